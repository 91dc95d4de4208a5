"""The rows of a train that are read most: kept uncompressed in front of it, and trained by themselves.

A lookup of such a row takes its stored vector instead of a chain of products, and sends its gradient there. Which rows
are cached changes only in `populate`, which follows the counts of recent reads: a row that stays keeps its place and
its bits, and one that enters starts as what its cores give. Rows that leave are *written back*: the first core takes
the step that brings the whole table closest to what it was, and what changes nevertheless is reported.
All functions are pure and work inside `jit`, but for those that say "on the host".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from rsembed.collection.rows import keys_of_rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers.base import OptimizerSpec, Slots
from rsembed.storage import row_map
from rsembed.storage.hashed_rows import numbers_of
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import FREE, RowMap
from rsembed.tt.cores import Cores, rows_of
from rsembed.tt.spec import TTSpec

COUNTS_PER_ROW = 16
LEAST_COUNTS_PER_ROW = 6
MOST_READS = 2**30
"""Beyond it, counts are equal."""
DAMPING = 1e-3
"""Damping of the step of `written_back`, as a share of the mean of its Gram matrix' diagonal."""


class Directory(NamedTuple):
    """Which ids were read how often, and where the rows of those that are stored lie.

    Attributes:
      counted: ids whose reads are counted. When there is room for no more, all counts are halved, and ids that have
        none left make room: so old reads fade, the faster the more ids are read.
      places: where the row of each counted id is stored; `NO_ROW` for others.
      ids: of each place's row; `NO_ROW` for a free place.
      residual: that of a `CacheReport`.
      totals: what a `CacheReport` sums up, of 64 bits, as a high and a low lane.
    """

    counted: RowMap
    places: Int[Array, " counted"]
    ids: Int[Array, " places"]
    residual: Float[Array, ""]
    totals: UInt32[Array, "totals 2"]

    def find(self, ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
        """Place of every id's row, `NO_ROW` where it is not stored."""
        return _place_of(self, row_map.find(self.counted, keys_of_rows(ids)))

    def forget(self, first: int, last: int) -> Directory:
        """No row of the ids from `first` to before `last` is stored any more; they are counted on."""
        is_old = (self.ids >= first) & (self.ids < last)
        is_gone = is_old.at[self.places].get(mode="fill", fill_value=False)
        places, ids = jnp.where(is_gone, NO_ROW, self.places), jnp.where(is_old, NO_ROW, self.ids)
        return self._replace(places=places, ids=ids)

    def report(self) -> CacheReport:
        """Contents and sums, on the host."""
        num_cached = int((on_host(self.ids) != NO_ROW).sum())
        return CacheReport(num_cached, float(on_host(self.residual)), *numbers_of(self.totals).tolist())


class CachedTrain(NamedTuple):
    """Parameters of a train storage with stored rows: cores, these rows, and whose they are.

    Attributes:
      cores: one array per core.
      rows: the stored rows.
      directory: whose they are.
    """

    cores: Cores
    rows: Float[Array, "places dim"]
    directory: Directory


class CacheReport(NamedTuple):
    """Numbers of a cache since it was made or reset.

    Attributes:
      cached_ids: rows in the cache now.
      residual: no number in any row changed by more when rows left and were written back: of those rows the largest
        change, of all others a bound from the norm of all changes.
      lookups: ids counted.
      hits: those that were stored at that time.
      uncounted: reads whose ids found no place among the counts.
      evictions: rows that left the cache.
    """

    cached_ids: int
    residual: float
    lookups: int
    hits: int
    uncounted: int
    evictions: int


TOTALS = CacheReport._fields[2:]


def num_counts_of(cache_rows: int, counted_ids: int) -> int:
    """Ids to count for so many cached rows; 0 takes 16 per row. Raises: ValueError: fewer counts than rows."""
    if counted_ids and counted_ids < cache_rows:
        raise ValueError(f"hashtbl_size={counted_ids} must be at least cache_size={cache_rows}.")
    if counted_ids >= LEAST_COUNTS_PER_ROW * cache_rows:
        return counted_ids
    num_counts = 1 << (COUNTS_PER_ROW * cache_rows - 1).bit_length()
    if counted_ids:
        warnings.warn(
            f"hashtbl_size={counted_ids} counts few ids for cache_size={cache_rows}: below six times as many the hit "
            f"rate would suffer, so {num_counts} are counted; leave it out, or say at least six times cache_size.",
            stacklevel=5,
        )
    return num_counts


def empty(capacity: int, num_counts: int) -> Directory:
    """Nothing counted, nothing stored; stored ids are counted as well and leave room for others."""
    places, ids = (jnp.full(size, NO_ROW, jnp.int32) for size in (num_counts, capacity))
    totals = jnp.zeros((len(TOTALS), 2), jnp.uint32)
    return Directory(row_map.empty(num_counts), places, ids, jnp.zeros((), jnp.float32), totals)


def _place_of(directory: Directory, numbers: Array) -> Array:
    return directory.places.at[numbers].get(mode="fill", fill_value=NO_ROW)


def count(directory: Directory, ids: Int[Array, " nnz"], occurrences: Int[Array, " nnz"] | None = None) -> Directory:
    """Counts reads of ids, which may repeat; `NO_ROW` is none."""
    keys = keys_of_rows(ids)
    ones = jnp.ones(ids.shape, jnp.int32)
    _, own, _, reads = row_map.entries(keys, ones if occurrences is None else occurrences)
    numbers = row_map.find(directory.counted, own)
    is_hit = _place_of(directory, numbers) != NO_ROW
    counted = row_map.use(directory.counted, numbers, jnp.zeros((), jnp.int32), reads)
    new, as_given = own.only(numbers == NO_ROW), jnp.arange(ids.shape[0])

    def add(_: object, state: tuple[Directory, Array]) -> tuple[Directory, Array]:
        directory, _ = state
        is_short = jnp.sum(new.is_key, dtype=jnp.int32) > directory.counted.num_free[0]
        directory, order = jax.lax.cond(is_short, with_room, lambda directory: (directory, as_given), directory)
        wanting = jax.tree.map(lambda lane: lane[order], new)
        counted, rows, _, _ = row_map.assign(directory.counted, wanting, jnp.zeros((), jnp.int32), reads[order])
        left_out = jnp.sum(jnp.where(wanting.is_key & (rows == NO_ROW), reads[order], 0), dtype=jnp.int32)
        return directory._replace(counted=counted), left_out

    def with_room(directory: Directory) -> tuple[Directory, Array]:
        # If there still is no room for all, the most read come first, of equals the lower id.
        return halved(directory), jax.lax.sort((jnp.where(new.is_key, -reads, 1), new.low, as_given), num_keys=2)[2]

    # A loop of one turn or none keeps arrays where they lie, a branch may not.
    num_turns, start = jnp.any(new.is_key).astype(jnp.int32), (directory._replace(counted=counted), jnp.int32(0))
    directory, left_out = jax.lax.fori_loop(0, num_turns, add, start)
    num_hits = jnp.sum(jnp.where(is_hit, reads, 0), dtype=jnp.int32)
    return _summed(directory, lookups=jnp.sum(reads, dtype=jnp.int32), hits=num_hits, uncounted=left_out)


def _summed(directory: Directory, **changes: Array) -> Directory:
    more = jnp.stack([changes.get(name, jnp.int32(0)) for name in TOTALS]).astype(jnp.uint32)
    low = directory.totals[:, 1] + more
    return directory._replace(totals=jnp.stack([directory.totals[:, 0] + (low < more).astype(jnp.uint32), low], axis=1))


def halved(directory: Directory) -> Directory:
    """Old reads fade; ids that have none left, and no row, are no longer counted."""
    counted = directory.counted._replace(counts=directory.counted.counts >> 1)
    is_gone = (counted.last_step != FREE) & (counted.counts == 0) & (directory.places == NO_ROW)
    numbers = jnp.where(is_gone, jnp.arange(is_gone.shape[0], dtype=jnp.int32), NO_ROW)
    return directory._replace(counted=row_map.release(counted, numbers))


def populate(
    specs: Sequence[TTSpec], params: CachedTrain, slots: Slots, rule: OptimizerSpec
) -> tuple[CachedTrain, Slots]:
    """Caches the most read rows from now on, of equals those that are cached already, then the lower ones.

    Counts are halved. `slots` are those of the stored rows, and `rule` that of the optimizer.
    """
    cores, rows, directory = params
    counted, capacity, is_stored = directory.counted, directory.ids.shape[0], directory.places != NO_ROW
    worth = 2 * jnp.minimum(counted.counts, MOST_READS).astype(jnp.uint32) + is_stored.astype(jnp.uint32)
    is_cached = row_map.least(counted, ~worth, worth > 0, jnp.full(1, capacity, jnp.int32))
    places = jnp.where(is_cached, directory.places, NO_ROW)
    is_free = jnp.ones(capacity, bool).at[places].set(False, mode="drop")
    new, num_new = api.compact(is_cached & ~is_stored, capacity)
    free = jnp.where(jnp.arange(capacity) < num_new, api.compact(is_free, capacity)[0], NO_ROW)
    ids = counted.low.at[new].get(mode="fill", fill_value=NO_ROW).astype(jnp.int32)
    vectors = rows_of(specs, cores, ids)
    gone = jnp.where(is_free, directory.ids, NO_ROW)
    # A loop of one turn or none keeps arrays where they lie, a branch may not.
    num_turns, start = jnp.any(gone != NO_ROW).astype(jnp.int32), (cores, directory.residual)
    write = functools.partial(written_back, specs, gone, jnp.where((gone != NO_ROW)[:, None], rows, 0.0))
    cores, residual = jax.lax.fori_loop(0, num_turns, lambda _, state: write(*state), start)
    rows, *kept = api.scatter_rows((rows, *slots), free, (vectors, *rule.init_slots(vectors)))
    directory = _summed(directory, evictions=jnp.sum(is_stored & ~is_cached, dtype=jnp.int32))
    directory = directory._replace(
        places=places.at[new].set(free, mode="drop"),
        ids=jnp.where(is_free, NO_ROW, directory.ids).at[free].set(ids, mode="drop"),
        residual=residual,
    )
    return CachedTrain(cores, rows, halved(directory)), tuple(kept)


def written_back(
    specs: Sequence[TTSpec],
    ids: Int[Array, " n"],
    targets: Float[Array, "n dim"],
    cores: Cores,
    residual: Float[Array, ""],
) -> tuple[Cores, Float[Array, ""]]:
    """Cores whose table is as close to the old one with `targets` as rows of `ids` as the first core can make it.

    A table is linear in its first core, so this is one least-squares problem of all rows: those of `ids` move to their
    targets, the others stay where they are.

    Returns: the cores, and the `residual` after that.
    """
    first, *others = (core.astype(jnp.float32) for core in cores)
    old, pull = jax.vjp(lambda first: rows_of(specs, (first, *others), ids), first)
    shapes, gram = specs[0].slice_shapes, jnp.ones((len(specs), 1, 1))
    for t in range(len(others), 0, -1):  # the Gram matrices of what each table's first core is multiplied by
        core, table = others[t - 1].reshape(-1, *shapes[t]), _table_of_slices(specs, t)
        squares = jnp.einsum("piqk,pkl,pjql->pij", core, gram[table], core, precision="highest")
        gram = jax.ops.segment_sum(squares, table, len(specs))
    mean = jnp.trace(gram, axis1=1, axis2=2) / gram.shape[1]
    damping = jnp.maximum(DAMPING * mean, jnp.finfo(jnp.float32).tiny)[:, None, None]
    inverse, table = jnp.linalg.inv(gram + damping * jnp.eye(gram.shape[1])[None]), _table_of_slices(specs, 0)
    downhill = pull(targets - old)[0].reshape(-1, *shapes[0][1:])
    change = jnp.einsum("pqi,pij->pqj", downhill, inverse[table], precision="highest").reshape(first.shape)
    # A row that is not finite is lost, and does not spread.
    new = (first + jnp.where(jnp.isfinite(change), change, 0.0)).astype(cores[0].dtype)
    change = (new.astype(jnp.float32) - first).reshape(downhill.shape)
    everywhere = jnp.sum(jnp.einsum("pqi,pij->pqj", change, gram[table], precision="highest") * change)
    written = (new, *cores[1:])
    left = jnp.max(jnp.abs(rows_of(specs, written, ids) - targets))
    return written, jnp.maximum(residual, jnp.maximum(left, jnp.sqrt(everywhere)))


def _table_of_slices(specs: Sequence[TTSpec], t: int) -> Int[np.ndarray, " slices"]:
    """The table to which each slice of core `t` belongs."""
    return np.repeat(np.arange(len(specs)), [spec.tt_p_shapes[t] for spec in specs])
