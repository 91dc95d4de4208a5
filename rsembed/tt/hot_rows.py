"""Cache of the most-read rows of a tensor train, stored uncompressed and trained row by row.

A lookup of a cached row reads the stored vector instead of multiplying slices, and the gradient of
that row goes to the stored vector. Rows enter the cache only in `populate`, which chooses the rows
with the most reads in the recent past. A row that stays in the cache keeps its cache slot and its
bits. A row that enters the cache is initialised from the cores. Rows that are evicted are *written
back*: the first core is changed so that the whole table comes as close as possible to its previous
contents. `CacheReport.residual` is an upper bound on the error that a write-back leaves in an entry
of the table. All functions are pure and work inside `jit`, except `Directory.report`, which copies
numbers to the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from rsembed.collection.occurrences import keys_of_rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys
from rsembed.optimizers.base import OptimizerSpec, Slots
from rsembed.storage import row_map
from rsembed.storage.hashed_rows import increased, numbers_of
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import FREE, RowMap
from rsembed.tt.cores import Cores, rows_of
from rsembed.tt.spec import TTSpec

COUNTS_PER_ROW = 16
"""Default maximum number of ids with a read count, per row of the cache."""
MIN_COUNTS_PER_ROW = 6
"""Smallest accepted number of counted ids per cached row.

The hit rate of the cache drops if fewer than six ids per cached row have a read count.
"""
MAX_READS = 2**30
"""`populate` clips read counts to this maximum before it compares them."""
DAMPING = 1e-3
"""Relative damping of the least-squares problem in `written_back`.

`DAMPING` times the mean diagonal entry of the Gram matrix is added to its diagonal.
"""


class Directory(NamedTuple):
    """Read counts per id, and the cache slot of every cached id.

    Attributes:
      counted: map from the counted ids to their numbers of reads. `populate` halves all counts, to
        reduce the weight of old reads. `count` halves all counts if the map has no space for a new
        id. An id that is not cached is removed from the map if its count is halved to zero.
      places: cache slot of each counted id, `NO_ROW` if the id is not cached.
      ids: id in each cache slot, `NO_ROW` for a free slot.
      residual: see `CacheReport`.
      totals: the sums of a `CacheReport` (see `TOTALS`), 64 bits each. A sum is stored as a high
        and a low 32-bit word.
    """

    counted: RowMap
    places: Int[Array, " counted"]
    ids: Int[Array, " places"]
    residual: Float[Array, ""]
    totals: UInt32[Array, "totals 2"]

    def find(self, ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
        """Cache slot of every id, `NO_ROW` for an id that is not cached."""
        keys = keys_of_rows(ids)
        counted_rows = row_map.find(self.counted, keys)
        return _slot_of(self, counted_rows)

    def forget(self, first: int, last: int) -> Directory:
        """Removes the rows of all ids in `[first, last)` from the cache, without a write-back.

        `forget` keeps the read counts of the removed rows.
        """
        is_forgotten_slot = (self.ids >= first) & (self.ids < last)
        is_forgotten_id = is_forgotten_slot.at[self.places].get(mode="fill", fill_value=False)
        return self._replace(
            places=jnp.where(is_forgotten_id, NO_ROW, self.places),
            ids=jnp.where(is_forgotten_slot, NO_ROW, self.ids),
        )

    def report(self) -> CacheReport:
        """Statistics of the cache, copied to the host."""
        is_cached = on_host(self.ids) != NO_ROW
        num_cached = int(is_cached.sum())
        residual = float(on_host(self.residual))
        totals = numbers_of(self.totals).tolist()
        return CacheReport(num_cached, residual, *totals)


class CachedTrain(NamedTuple):
    """Parameters of a tensor train with a cache.

    Attributes:
      cores: one array per core.
      rows: the cached rows, one per cache slot.
      directory: read counts, and the id in each cache slot.
    """

    cores: Cores
    rows: Float[Array, "places dim"]
    directory: Directory


class CacheReport(NamedTuple):
    """Statistics of a cache, counted from its creation or last reset.

    Attributes:
      cached_ids: number of rows in the cache now.
      residual: upper bound on the error that any single write-back has caused in an entry of the
        table. A write-back changes the first core, which can change all rows of the table. For an
        evicted row, the error is the measured difference between the new row and the cached row.
        For a row that was not evicted, the error is at most the norm of the change of the whole
        table.
      lookups: number of reads of ids, including the reads in `uncounted`.
      hits: number of reads of ids that were cached at the time of the read.
      uncounted: number of lookups of ids that `populate` does not take into account, because the
        map of counted ids was full.
      evictions: number of rows that were evicted from the cache.
    """

    cached_ids: int
    residual: float
    lookups: int
    hits: int
    uncounted: int
    evictions: int


TOTALS = CacheReport._fields[2:]
"""Fields of a `CacheReport` that are sums over all steps."""


def num_counts_of(cache_rows: int, counted_ids: int) -> int:
    """Maximum number of ids for which reads are counted, for a cache of `cache_rows` rows.

    Args:
      cache_rows: size of the cache, in rows.
      counted_ids: requested maximum. 0 requests the default: `COUNTS_PER_ROW` (16) ids per cached
        row, rounded up to a power of two. If a positive `counted_ids` is below `MIN_COUNTS_PER_ROW`
        (6) ids per cached row, the function warns and returns the default.

    Raises: ValueError: `counted_ids` is positive and smaller than `cache_rows`.
    """
    if counted_ids and counted_ids < cache_rows:
        raise ValueError(f"hashtbl_size={counted_ids} must be at least cache_size={cache_rows}.")
    if counted_ids >= MIN_COUNTS_PER_ROW * cache_rows:
        return counted_ids
    num_counts = 1 << (COUNTS_PER_ROW * cache_rows - 1).bit_length()
    if counted_ids:
        warnings.warn(
            f"hashtbl_size={counted_ids} is less than six times cache_size={cache_rows}, which "
            f"would lower the hit rate, so {num_counts} ids get a read count; leave hashtbl_size "
            "out, or pass at least six times cache_size.",
            stacklevel=5,
        )
    return num_counts


def empty(capacity: int, num_counts: int) -> Directory:
    """Directory of an empty cache, without counted ids.

    Args:
      capacity: number of cache slots.
      num_counts: maximum number of ids for which reads are counted. `num_counts` must exceed
        `capacity`, because every cached id has a read count.
    """
    return Directory(
        counted=row_map.empty(num_counts),
        places=jnp.full(num_counts, NO_ROW, jnp.int32),
        ids=jnp.full(capacity, NO_ROW, jnp.int32),
        residual=jnp.zeros((), jnp.float32),
        totals=jnp.zeros((len(TOTALS), 2), jnp.uint32),
    )


def _slot_of(
    directory: Directory,
    counted_rows: Int[Array, " nnz"],
) -> Int[Array, " nnz"]:
    """Cache slots of ids, from the position of each id in the map `directory.counted`.

    An id that is not cached gets `NO_ROW`.
    """
    return directory.places.at[counted_rows].get(mode="fill", fill_value=NO_ROW)


def count(
    directory: Directory,
    ids: Int[Array, " nnz"],
    occurrences: Int[Array, " nnz"] | None = None,
) -> Directory:
    """Counts the reads of `ids`, and returns the new directory.

    Args:
      directory: the directory before the reads.
      ids: ids that were read. Ids may repeat, and `NO_ROW` is skipped.
      occurrences: number of reads to count for each entry of `ids`. Default: one read.
    """
    if occurrences is None:
        occurrences = jnp.ones(ids.shape, jnp.int32)
    _, distinct, _, reads = row_map.entries(keys_of_rows(ids), occurrences)
    counted_rows = row_map.find(directory.counted, distinct)
    is_hit = _slot_of(directory, counted_rows) != NO_ROW
    step = jnp.zeros((), jnp.int32)
    counted = row_map.use(directory.counted, counted_rows, step, reads)
    directory = directory._replace(counted=counted)
    new = distinct.only(counted_rows == NO_ROW)

    def add_new_ids(
        _: Array,
        state: tuple[Directory, Array],
    ) -> tuple[Directory, Array]:
        directory, _ = state
        return _with_new_ids(directory, new, reads)

    # `fori_loop` with at most one iteration updates arrays in place. `lax.cond` may copy arrays.
    num_iterations = jnp.any(new.is_key).astype(jnp.int32)
    directory, num_uncounted = jax.lax.fori_loop(
        0,
        num_iterations,
        add_new_ids,
        (directory, jnp.int32(0)),
    )
    hit_reads = jnp.where(is_hit, reads, 0)
    return _with_totals(
        directory,
        hits=jnp.sum(hit_reads, dtype=jnp.int32),
        lookups=jnp.sum(reads, dtype=jnp.int32),
        uncounted=num_uncounted,
    )


def _with_new_ids(
    directory: Directory,
    new: Keys,
    reads: Int[Array, " nnz"],
) -> tuple[Directory, Int[Array, ""]]:
    """Adds new, distinct ids and their read counts to the map of counted ids.

    Returns: the new directory, and the number of reads that are not counted for lack of space.
    """
    positions = jnp.arange(new.shape[0])

    def make_room(directory: Directory) -> tuple[Directory, Array]:
        # If halving the read counts does not free enough rows of the map for all new ids, only the
        # new ids with the most reads are counted. Ties between read counts are broken in favour of
        # lower ids.
        priority = jnp.where(new.is_key, -reads, 1)
        _, _, order = jax.lax.sort((priority, new.low, positions), num_keys=2)
        return halved(directory), order

    def keep(directory: Directory) -> tuple[Directory, Array]:
        return directory, positions

    num_new = jnp.sum(new.is_key, dtype=jnp.int32)
    is_full = num_new > directory.counted.num_free[0]
    directory, order = jax.lax.cond(is_full, make_room, keep, directory)
    new = jax.tree.map(lambda lane: lane[order], new)
    reads = reads[order]
    step = jnp.zeros((), jnp.int32)
    counted, counted_rows, _, _ = row_map.assign(directory.counted, new, step, reads)
    is_uncounted = new.is_key & (counted_rows == NO_ROW)
    uncounted_reads = jnp.where(is_uncounted, reads, 0)
    num_uncounted = jnp.sum(uncounted_reads, dtype=jnp.int32)
    return directory._replace(counted=counted), num_uncounted


def _with_totals(
    directory: Directory,
    **added: Int[Array, ""],
) -> Directory:
    """Adds numbers to the `totals` of a directory, and returns the new directory.

    Args:
      directory: the directory before the addition.
      added: for names in `TOTALS`, the number to add to the total with this name.
    """
    numbers = []
    for name in TOTALS:
        numbers.append(added.get(name, jnp.int32(0)))
    totals = increased(directory.totals, jnp.stack(numbers))
    return directory._replace(totals=totals)


def halved(directory: Directory) -> Directory:
    """Halves all read counts, and returns the new directory.

    Ids that are not cached are removed from the map of counted ids if their count becomes zero.
    """
    counts = directory.counted.counts >> 1
    counted = directory.counted._replace(counts=counts)
    has_no_reads = (counted.last_step != FREE) & (counts == 0)
    is_uncached = directory.places == NO_ROW
    is_faded = has_no_reads & is_uncached
    positions = jnp.arange(is_faded.shape[0], dtype=jnp.int32)
    faded_rows = jnp.where(is_faded, positions, NO_ROW)
    return directory._replace(counted=row_map.release(counted, faded_rows))


def populate(
    specs: Sequence[TTSpec],
    params: CachedTrain,
    slots: Slots,
    rule: OptimizerSpec,
) -> tuple[CachedTrain, Slots]:
    """Fills the cache with the most-read rows and halves all read counts.

    Ties between read counts are broken in favour of cached ids, then of lower ids.

    Args:
      specs: specs of the tables that share the cores, in the order of their slices.
      params: cores, cached rows and read counts.
      slots: optimizer state of the cached rows. The state of a row that enters the cache is
        initialised by `rule`.
      rule: optimizer of the cached rows.

    Returns: new parameters and new optimizer state of the cached rows.
    """
    cores, rows, directory = params
    capacity = directory.ids.shape[0]

    # A row that stays in the cache keeps its cache slot. Rows that enter the cache can take every
    # cache slot that no row keeps.
    was_cached = directory.places != NO_ROW
    is_cached = _most_read(directory, capacity)
    slot_of_id = jnp.where(is_cached, directory.places, NO_ROW)
    is_free = jnp.ones(capacity, bool)
    is_free = is_free.at[slot_of_id].set(False, mode="drop")

    # The rows that enter the cache take the first free cache slots.
    is_new = is_cached & ~was_cached
    new, num_new = api.compact(is_new, capacity)
    free_slots, _ = api.compact(is_free, capacity)
    is_taken = jnp.arange(capacity) < num_new
    new_slots = jnp.where(is_taken, free_slots, NO_ROW)
    new_ids = directory.counted.low.at[new].get(mode="fill", fill_value=NO_ROW)
    new_ids = new_ids.astype(jnp.int32)
    new_rows = rows_of(specs, cores, new_ids)

    evicted_ids = jnp.where(is_free, directory.ids, NO_ROW)
    is_evicted = evicted_ids != NO_ROW
    targets = jnp.where(is_evicted[:, None], rows, 0.0)

    def write_back(
        _: Array,
        state: tuple[Cores, Array],
    ) -> tuple[Cores, Array]:
        cores, residual = state
        return written_back(specs, evicted_ids, targets, cores, residual)

    # `fori_loop` with at most one iteration updates arrays in place. `lax.cond` may copy arrays.
    num_evicted = jnp.sum(is_evicted, dtype=jnp.int32)
    cores, residual = jax.lax.fori_loop(
        0,
        jnp.minimum(num_evicted, 1),
        write_back,
        (cores, directory.residual),
    )

    old_arrays = (rows, *slots)
    new_values = (new_rows, *rule.init_slots(new_rows))
    rows, *slots_of_rows = api.scatter_rows(old_arrays, new_slots, new_values)
    directory = _with_totals(directory, evictions=num_evicted)
    kept_ids = jnp.where(is_free, NO_ROW, directory.ids)
    directory = directory._replace(
        places=slot_of_id.at[new].set(new_slots, mode="drop"),
        ids=kept_ids.at[new_slots].set(new_ids, mode="drop"),
        residual=residual,
    )
    params = CachedTrain(cores, rows, halved(directory))
    return params, tuple(slots_of_rows)


def _most_read(
    directory: Directory,
    capacity: int,
) -> Bool[Array, " counted"]:
    """For each counted id, whether it is one of the `capacity` most-read ids.

    Ties between read counts are broken in favour of cached ids, then of lower ids.
    """
    reads = jnp.minimum(directory.counted.counts, MAX_READS)
    reads = reads.astype(jnp.uint32)
    was_cached = (directory.places != NO_ROW).astype(jnp.uint32)
    worth = 2 * reads + was_cached
    # `row_map.least` selects the smallest values, so it gets `~worth`, which is smallest where
    # `worth` is largest.
    return row_map.least(
        directory.counted,
        ~worth,
        worth > 0,
        jnp.full(1, capacity, jnp.int32),
    )


def written_back(
    specs: Sequence[TTSpec],
    ids: Int[Array, " n"],
    targets: Float[Array, "n dim"],
    cores: Cores,
    residual: Float[Array, ""],
) -> tuple[Cores, Float[Array, ""]]:
    """Changes the first core so that the rows of `ids` come close to `targets`.

    Every row of the table is a linear function of the first core. The change of the first core
    solves a least-squares problem over the whole table: the rows of `ids` should equal `targets`,
    and all other rows should stay unchanged.

    Returns: new cores, and the new residual: the larger of `residual` and the error of the
      write-back. For the definition of the error, see `CacheReport.residual`.
    """
    first, *others = [core.astype(jnp.float32) for core in cores]
    gram = _gram_matrices(specs, others)
    rank = gram.shape[1]
    mean = jnp.trace(gram, axis1=1, axis2=2) / rank
    smallest = jnp.finfo(jnp.float32).tiny
    damping = jnp.maximum(DAMPING * mean, smallest)
    damping_matrix = damping[:, None, None] * jnp.eye(rank)[None]
    inverse = jnp.linalg.inv(gram + damping_matrix)

    def rows_with(first: Array) -> Array:
        return rows_of(specs, (first, *others), ids)

    old_rows, pull = jax.vjp(rows_with, first)
    (downhill,) = pull(targets - old_rows)
    _, q, next_rank = specs[0].slice_shapes[0]
    downhill = downhill.reshape(-1, q, next_rank)
    table = _table_of_slices(specs, 0)
    change = jnp.einsum("pqi,pij->pqj", downhill, inverse[table], precision="highest")
    change = change.reshape(first.shape)
    # Entries of `change` that are not finite are set to zero, so that a NaN or an infinity in a
    # cached row does not spread to other rows of the table through a slice that the rows share.
    finite_change = jnp.where(jnp.isfinite(change), change, 0.0)
    new_first = (first + finite_change).astype(cores[0].dtype)
    new_cores = (new_first, *cores[1:])

    rounded_change = new_first.astype(jnp.float32) - first
    rounded_change = rounded_change.reshape(downhill.shape)
    product = jnp.einsum("pqi,pij->pqj", rounded_change, gram[table], precision="highest")
    norm_of_changes = jnp.sqrt(jnp.sum(product * rounded_change))
    errors = rows_of(specs, new_cores, ids) - targets
    largest_error = jnp.max(jnp.abs(errors))
    step_error = jnp.maximum(largest_error, norm_of_changes)
    return new_cores, jnp.maximum(residual, step_error)


def _gram_matrices(
    specs: Sequence[TTSpec],
    others: Sequence[Array],
) -> Float[Array, "tables rank rank"]:
    """For each table, the Gram matrix of the product of all cores after the first."""
    num_tables = len(specs)
    gram = jnp.ones((num_tables, 1, 1))
    for t in range(len(others), 0, -1):
        core = others[t - 1].reshape(-1, *specs[0].slice_shapes[t])
        table = _table_of_slices(specs, t)
        squares = jnp.einsum("piqk,pkl,pjql->pij", core, gram[table], core, precision="highest")
        gram = jax.ops.segment_sum(squares, table, num_tables)
    return gram


def _table_of_slices(
    specs: Sequence[TTSpec],
    t: int,
) -> Int[np.ndarray, " slices"]:
    """Index of the table that each slice of core `t` belongs to."""
    num_slices = [spec.tt_p_shapes[t] for spec in specs]
    tables = np.arange(len(specs))
    return np.repeat(tables, num_slices)
