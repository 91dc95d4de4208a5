"""The rows of a train that are read most: kept uncompressed in front of it, and trained by themselves.

A lookup of such a row takes its stored vector instead of a chain of products, and sends its gradient there. Which rows
are cached changes only in `populate`, which follows the counts of recent reads; a row that stays stored keeps its place
and its bits. A row that leaves the cache and equals what its cores give is dropped. Any other is *spilled*: it stays
stored with its optimizer state, and is served and trained until it returns. When there is no place left, the least
read of these are *written back*: the cores take the step that brings the whole table closest to what it was, and
what changes nevertheless is reported.
All functions are pure and work inside `jit`, but for those that say "on the host".
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from rsembed.bags import is_traced
from rsembed.collection.rows import keys_of_rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import OptimizerSpec, Slots
from rsembed.storage import hash_table, row_map
from rsembed.storage.row_map import FREE, RowMap
from rsembed.tt.cores import Cores, rows_of, squared_norm
from rsembed.tt.spec import TTSpec

LEAST_ROWS = 32
"""Of a cache whose size is not given."""
COUNTS_PER_ROW = 16
LEAST_COUNTS_PER_ROW = 6
SPILLED_ROWS_PER_ROW = 3
"""Room for spilled rows where its size is not given."""
MOST_READS = 2**30
"""Beyond it, counts are equal."""
SOLVER_STEPS = 8
DAMPING = 1e-3
"""Of least squares, as a part of their curvature along the gradient."""


class Directory(NamedTuple):
    """Which ids were read how often, and where the rows of those that are stored lie.

    Attributes:
      counted: ids whose reads are counted. When there is room for no more, all counts are halved, and ids that have
        none left make room: so old reads fade, the faster the more ids are read.
      places: where the row of each counted id is stored; `NO_ROW` for others.
      owners: the number among counted ids of each place's id; `NO_ROW` for a free place.
      is_cached: whether the row of each place is cached; other stored rows are spilled.
      residuals: those of a `CacheReport`.
      totals: what a `CacheReport` sums up, of 64 bits, as a high and a low lane.
    """

    counted: RowMap
    places: Int[Array, " counted"]
    owners: Int[Array, " places"]
    is_cached: Bool[Array, " places"]
    residuals: Float[Array, "2"]
    totals: UInt32[Array, "totals 2"]


class CacheReport(NamedTuple):
    """What a cache has done since it was made or reset.

    Attributes:
      cached_ids: rows in the cache now.
      spilled_ids: spilled rows now.
      residual: largest change of a number in a row when it was written back.
      residual_elsewhere: no number in any other row changed by more at once; a bound from the norm of all changes.
      lookups: ids counted.
      hits: those that were stored at that time.
      uncounted: reads whose ids found no place among the counts.
      evictions: rows that left the cache.
      spills: those of them that were spilled.
      written_back: rows that gave up their place, towards which the cores were stepped.
    """

    cached_ids: int
    spilled_ids: int
    residual: float
    residual_elsewhere: float
    lookups: int
    hits: int
    uncounted: int
    evictions: int
    spills: int
    written_back: int

    @property
    def hit_rate(self) -> float:
        """Share of counted ids that were stored, nan before the first."""
        return self.hits / self.lookups if self.lookups else math.nan


TOTALS = CacheReport._fields[4:]


def sizes(num_rows: int, cache_size: int, hashtbl_size: int) -> tuple[int, int]:
    """Rows to cache and ids to count, of those published; 0 takes a thousandth of the rows, and 16 ids a row.

    Raises: ValueError: fewer counts than rows, or 2^31 rows.
    """
    if num_rows >= NO_ROW:
        raise ValueError(
            f"a cache takes fewer than {NO_ROW} rows in a group of tables, got {num_rows}; use_cache=False."
        )
    capacity = min(num_rows, cache_size or max(LEAST_ROWS, num_rows // 1000))
    if hashtbl_size and hashtbl_size < capacity:
        raise ValueError(f"hashtbl_size={hashtbl_size} must be at least cache_size={capacity}.")
    if hashtbl_size >= LEAST_COUNTS_PER_ROW * capacity:
        return capacity, hashtbl_size
    num_counts = 1 << (COUNTS_PER_ROW * capacity - 1).bit_length()
    if hashtbl_size:
        warnings.warn(
            f"hashtbl_size={hashtbl_size} counts few ids for cache_size={capacity}: below six times as many the hit "
            f"rate would suffer, so {num_counts} are counted; leave it out, or say at least six times cache_size.",
            stacklevel=5,
        )
    return capacity, num_counts


def room_for_spilled(num_rows: int, capacity: int, max_spilled_rows: int | None) -> int:
    """Places for spilled rows; None takes three per cached row."""
    most = SPILLED_ROWS_PER_ROW * capacity if max_spilled_rows is None else max_spilled_rows
    return min(most, num_rows - capacity)


def empty(capacity: int, num_spilled: int, num_counts: int) -> Directory:
    """Nothing counted, nothing stored; stored ids are counted as well and leave room for others."""
    num_places, num_counts = capacity + num_spilled, max(num_counts, LEAST_COUNTS_PER_ROW * capacity + num_spilled)
    places, owners = (jnp.full(size, NO_ROW, jnp.int32) for size in (num_counts, num_places))
    totals = jnp.zeros((len(TOTALS), 2), jnp.uint32)
    is_cached = jnp.zeros(num_places, bool)
    return Directory(row_map.empty(num_counts), places, owners, is_cached, jnp.zeros(2, jnp.float32), totals)


def enlarged(directory: Directory, stored: PyTree, num_more: int) -> tuple[Directory, PyTree]:
    """The directory and the arrays of stored rows with more places, and with room to count as many more ids."""

    def extended(array: Array, value: int | bool) -> Array:
        return jnp.concatenate([array, jnp.full((num_more, *array.shape[1:]), value, array.dtype)])

    counted = row_map.grow(directory.counted, directory.places.shape[0] + num_more)
    lanes = {"places": NO_ROW, "owners": NO_ROW, "is_cached": False}
    wider = {name: extended(getattr(directory, name), value) for name, value in lanes.items()}
    return directory._replace(counted=counted, **wider), jax.tree.map(lambda array: extended(array, 0), stored)


def find(directory: Directory, ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Place of every id's row, `NO_ROW` where it is not stored."""
    return _place_of(directory, row_map.find(directory.counted, keys_of_rows(ids)))


def _place_of(directory: Directory, numbers: Array) -> Array:
    return directory.places.at[numbers].get(mode="fill", fill_value=NO_ROW)


def count(directory: Directory, ids: Int[Array, " nnz"], occurrences: Int[Array, " nnz"] | None = None) -> Directory:
    """Counts reads of ids, which may repeat; `NO_ROW` is none."""
    keys = keys_of_rows(ids)
    ones = jnp.ones(ids.shape, jnp.int32)
    _, own, _, reads = hash_table.entries(keys, ones if occurrences is None else occurrences)
    numbers = row_map.find(directory.counted, own)
    is_hit = _place_of(directory, numbers) != NO_ROW
    counted = row_map.use(directory.counted, numbers, jnp.zeros((), jnp.int32), reads)
    new = own.only(numbers == NO_ROW)

    def add(_: object, state: tuple[Directory, Array]) -> tuple[Directory, Array]:
        directory, _ = state
        num_new = jnp.sum(new.is_key, dtype=jnp.int32)
        is_short = num_new > directory.counted.num_free[0]
        directory = jax.lax.cond(is_short, halved, lambda directory: directory, directory)
        # If there still is no room for all, the most read come first, of equals the lower id.
        order = jax.lax.cond(num_new > directory.counted.num_free[0], by_reads, lambda: jnp.arange(ids.shape[0]))
        wanting = jax.tree.map(lambda lane: lane[order], new)
        counted, rows, _, _ = row_map.assign(directory.counted, wanting, jnp.zeros((), jnp.int32), reads[order])
        left_out = jnp.sum(jnp.where(wanting.is_key & (rows == NO_ROW), reads[order], 0), dtype=jnp.int32)
        return directory._replace(counted=counted), left_out

    def by_reads() -> Array:
        order = jnp.arange(ids.shape[0])
        return jax.lax.sort((jnp.where(new.is_key, -reads, 1), new.low, order), num_keys=2)[2]

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


def chosen(
    specs: Sequence[TTSpec], directory: Directory, cores: Cores, rows: Float[Array, "places dim"], capacity: int
) -> tuple[UInt32[Array, " counted"], Bool[Array, " counted"], Bool[Array, " counted"]]:
    """Of each counted id: its rank by reads; whether it is cached from now on; whether its row is spilled then.

    The most read are cached: of equals those that are cached already, then the lower ones. Spilled is what leaves the
    cache, or left it and was not read since, and differs from what its cores give.
    """
    counted, places = directory.counted, directory.places
    was_cached = directory.is_cached.at[places].get(mode="fill", fill_value=False)
    worth = 2 * jnp.minimum(counted.counts, MOST_READS).astype(jnp.uint32) + was_cached.astype(jnp.uint32)
    is_cached = row_map.least(counted, ~worth, worth > 0, jnp.full(1, capacity, jnp.int32))
    is_trained = jnp.any(rows != rows_of(specs, cores, stored_ids(directory)), axis=1)
    return worth, is_cached, ~is_cached & is_trained.at[places].get(mode="fill", fill_value=False)


def stored_ids(directory: Directory, first: int = 0) -> Int[Array, " places"]:
    """The id of each place, counted from `first` on; one beyond all rows for a free place and for lower ids."""
    ids = _ids_of(directory, directory.owners)
    return jnp.where(ids < first, NO_ROW, ids - first)


def _ids_of(directory: Directory, numbers: Int[Array, " n"]) -> Int[Array, " n"]:
    """The ids with these numbers among counted ones; `NO_ROW` for `NO_ROW`."""
    ids = directory.counted.low.at[numbers].get(mode="fill", fill_value=0).astype(jnp.int32)
    return jnp.where(numbers == NO_ROW, NO_ROW, ids)


def populate(
    specs: Sequence[TTSpec],
    directory: Directory,
    cores: Cores,
    rows: Float[Array, "places dim"],
    slots: Slots,
    rule: OptimizerSpec,
    capacity: int,
) -> tuple[Directory, Cores, Float[Array, "places dim"], Slots]:
    """Caches the most read rows from now on; no output changes unless rows are written back.

    Args:
      specs: tables whose cores stand one behind the other.
      directory: which rows are stored.
      cores: those of all tables.
      rows: the stored rows.
      slots: their optimizer state.
      rule: of the optimizer.
      capacity: rows that are cached at most; other places are for spilled ones.
    """
    counted, places, owners = directory.counted, directory.places, directory.owners
    num_places, is_stored = owners.shape[0], places != NO_ROW
    worth, is_cached, is_spilled = chosen(specs, directory, cores, rows, capacity)
    room = num_places - jnp.sum(is_cached, dtype=jnp.int32, keepdims=True)
    is_kept = row_map.least(counted, ~worth, is_spilled, room)
    stays = is_stored & (is_cached | is_kept)
    is_free = ~stays.at[owners].get(mode="fill", fill_value=False)
    new, num_new = api.compact(is_cached & ~is_stored, capacity)
    free = api.compact(is_free, capacity)[0]
    free = jnp.where(jnp.arange(capacity) < num_new, free, NO_ROW)
    vectors = rows_of(specs, cores, _ids_of(directory, new))
    gone, num_gone = api.compact(is_spilled & ~is_kept, capacity)
    targets = rows.at[places.at[gone].get(mode="fill", fill_value=NO_ROW)].get(mode="fill", fill_value=0)
    # A loop of one turn or none keeps arrays where they lie, a branch may not.
    write = functools.partial(written_back, specs, _ids_of(directory, gone), targets)
    start = cores, directory.residuals
    cores, residuals = jax.lax.fori_loop(0, jnp.minimum(num_gone, 1), lambda _, state: write(*state), start)
    rows, *kept = api.scatter_rows((rows, *slots), free, (vectors, *rule.init_slots(vectors)))
    places = jnp.where(stays, places, NO_ROW).at[new].set(free, mode="drop")
    owners = jnp.where(is_free, NO_ROW, owners).at[free].set(new, mode="drop")
    leaves = directory.is_cached.at[directory.places].get(mode="fill", fill_value=False) & ~is_cached
    changes = {"evictions": leaves, "spills": leaves & is_kept, "written_back": is_spilled & ~is_kept}
    directory = _summed(directory, **{name: jnp.sum(own, dtype=jnp.int32) for name, own in changes.items()})
    return (
        directory._replace(
            places=places,
            owners=owners,
            is_cached=is_cached.at[owners].get(mode="fill", fill_value=False),
            residuals=residuals,
        ),
        cores,
        rows,
        tuple(kept),
    )


def written_back(
    specs: Sequence[TTSpec],
    ids: Int[Array, " n"],
    targets: Float[Array, "n dim"],
    cores: Cores,
    residuals: Float[Array, "2"],
) -> tuple[Cores, Float[Array, "2"]]:
    """Cores that give a table closer to the old one with `targets` as rows of `ids`, and the residuals after that.

    That is a Gauss-Newton step of the squared error of all rows. Cores stay as they are if it does not lessen it.
    """
    wide = tuple(core.astype(jnp.float32) for core in cores)
    old, pull = jax.vjp(lambda cores: rows_of(specs, cores, ids), wide)
    (downhill,) = pull(targets - old)
    curvature = jax.grad(lambda change: squared_norm(specs, wide, change, wide) / 2)
    along = _dot(downhill, curvature(downhill)) / jnp.maximum(_dot(downhill, downhill), jnp.finfo(jnp.float32).tiny)

    def normal(change: Cores) -> Cores:
        return jax.tree.map(lambda own, more: own + DAMPING * along * more, curvature(change), change)

    change, _ = jax.scipy.sparse.linalg.cg(normal, downhill, maxiter=SOLVER_STEPS)
    new = tuple((own + more).astype(core.dtype) for own, more, core in zip(wide, change, cores, strict=True))
    change = tuple(after.astype(jnp.float32) - before for after, before in zip(new, wide, strict=True))
    everywhere = squared_norm(specs, wide, change, tuple(own + more for own, more in zip(wide, change, strict=True)))
    found = rows_of(specs, new, ids)
    error = everywhere - _dot(found - old, found - old) + _dot(found - targets, found - targets)
    helps = error < _dot(old - targets, old - targets)
    left = jnp.max(jnp.abs(jnp.where(helps, found, old) - targets))
    measured = jnp.stack([left, jnp.where(helps, jnp.sqrt(everywhere), 0.0)])
    return jax.tree.map(lambda new, old: jnp.where(helps, new, old), new, cores), jnp.maximum(residuals, measured)


def _dot(one: PyTree, other: PyTree) -> Array:
    """Sum of the products of all numbers."""
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), one, other)
    return sum(jax.tree.leaves(products), start=jnp.zeros((), jnp.float32))


def forget(directory: Directory, first: int, last: int) -> Directory:
    """No row of the ids from `first` to before `last` is stored any more; they are counted on."""
    ids = directory.counted.low
    is_old = (directory.places != NO_ROW) & (ids >= first) & (ids < last)
    is_free = is_old.at[directory.owners].get(mode="fill", fill_value=True)
    return directory._replace(
        places=jnp.where(is_old, NO_ROW, directory.places),
        owners=jnp.where(is_free, NO_ROW, directory.owners),
        is_cached=directory.is_cached & ~is_free,
    )


def learned(
    directory: Directory, rows: Float[Array, "places dim"]
) -> tuple[Int[np.ndarray, " ids"], Float[np.ndarray, "ids dim"]]:
    """All stored ids, ascending, and their rows, on the host."""
    owners, ids, vectors = on_host((directory.owners, directory.counted.low, rows))
    places = np.flatnonzero(owners != NO_ROW)
    order = np.argsort(ids[owners[places]])
    return ids[owners[places]][order].astype(np.int64), vectors[places[order]]


def report(directory: Directory) -> CacheReport:
    """Contents and sums, on the host."""
    owners, is_cached, residuals, totals = on_host(directory[2:])
    num_stored, num_cached = int((owners != NO_ROW).sum()), int(is_cached.sum())
    high, low = totals.astype(np.int64).T
    sums = ((high << 32) + low).tolist()
    return CacheReport(num_cached, num_stored - num_cached, *residuals.tolist(), *sums)


def on_host(values: PyTree) -> PyTree:
    """The values as NumPy arrays. Raises: RuntimeError: they are known only inside `jit`."""
    if is_traced(values):
        raise RuntimeError(
            "a tensor-train cache tells what it holds on the host: call reset_cache and cache_reports outside "
            "of jit, between compiled steps."
        )
    return jax.tree.map(np.asarray, values)
