"""The rows that are read most, kept uncompressed and trained by themselves.

A lookup of such a row takes its stored vector instead of a chain of products, and sends its gradient there. Which rows
are cached changes only in `populate`, and a row keeps its place and its bits as long as it is stored. One that was
trained and has to leave the cache is *spilled*: it stays, with its optimizer state, and is served and trained until it
returns; one that equals what its cores give is dropped. So nothing learned is lost, and the cache always follows what
is read, at the price of one more row for every row that was trained here and left: room for spilled rows grows as
needed. Where it may not, rows with something to lose stay in the cache, which is counted and logged.

All that the cache knows is in variables of the module, so whatever copies, saves or restores those (`nnx.clone`,
`nnx.split`, `nnx.state`, pickle) has the whole of it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rsembed.bags import is_traced
from rsembed.kernels import api as kernels
from rsembed.kernels.contract import NO_ROW, Segment, SegmentGradients, Step
from rsembed.optimizers import Hyperparameters, OptimizerSpec
from rsembed.tt.read_counts import ReadCounts, are_largest, places_in

# One program even outside jit: op by op, JAX does not keep to the axes of a mesh that its arrays lie on.
_update = jax.jit(kernels.update)

LEAST_ROWS = 32
"""Rows of a cache whose size is not given."""
COUNTS_PER_ROW = 16
LEAST_COUNTS_PER_ROW = 6
SPILLED_ROWS_TO_LOG = 3
"""Times the cache; beyond it the spill area is worth a word, and where it cannot grow it is as large from the start."""

NEVER_LEAVES = np.iinfo(np.int64).max

_LOG = logging.getLogger("rsembed")


def on_host(values: Any) -> Any:
    """The values as NumPy arrays. Raises: RuntimeError: they are known only inside `jit`."""
    if is_traced(values):
        raise RuntimeError(
            "a tensor-train cache counts, populates and tells what it holds on the host: call update_cache, "
            "cache_populate, reset_cache, cache_reports and full_weight outside of jit, between compiled steps."
        )
    return jax.tree.map(np.asarray, values)


class CacheDirectory(nnx.Variable):
    """Which ids are stored and where, how often ids were read, and the state of the rows' optimizer; not trained."""


class CacheReport(NamedTuple):
    """Counters of the cache since it was made or reset.

    Attributes:
      cached_ids: rows in the cache now.
      spilled_ids: spilled rows now.
      lookups: ids counted.
      hits: those that were stored at that time.
      evictions: rows that left the cache.
      spills: those of them that were spilled.
      uncounted: reads whose ids found no place among the counts.
      held_ids: rows in the cache now only because no more may be spilled: others were read more often.
    """

    cached_ids: int
    spilled_ids: int
    lookups: int
    hits: int
    evictions: int
    spills: int
    uncounted: int
    held_ids: int

    @property
    def hit_rate(self) -> float:
        """Share of counted ids that were stored, nan before the first."""
        return self.hits / self.lookups if self.lookups else math.nan


TOTALS = CacheReport._fields[2:]


class HotRows(nnx.Module):
    """Stored rows of one group of tables; ids are row numbers plus the rows of the tables before.

    Args:
      group_rows: rows of all tables of the group.
      dim: length of a row.
      rule: row rule of the fused update.
      kind: variable type of the rows.
      cache_size: rows in the cache at most; 0 takes a thousandth of all, at least 32.
      hashtbl_size: ids counted at most; 0 takes 16 per cached row, rounded up to a power of two. So does, with a
        warning, less than six per cached row, which would lose hits.
      max_spilled_rows: spilled rows at most; None makes room for all, if it may.
      is_stepped_here: False makes room at once, and never more, as an optimizer outside knows the array by its shape.

    Raises: ValueError: fewer counts than rows, or 2^31 rows in the group.
    """

    def __init__(
        self,
        group_rows: int,
        dim: int,
        *,
        rule: OptimizerSpec,
        kind: type,
        cache_size: int,
        hashtbl_size: int,
        max_spilled_rows: int | None,
        is_stepped_here: bool,
    ):
        if group_rows >= NO_ROW:
            raise ValueError(
                f"a cache takes fewer than {NO_ROW} rows in a group of tables, got {group_rows}; use_cache=False."
            )
        self.capacity = min(group_rows, cache_size or max(LEAST_ROWS, group_rows // 1000))
        if max_spilled_rows is None and not is_stepped_here:
            max_spilled_rows = min(SPILLED_ROWS_TO_LOG * self.capacity, group_rows - self.capacity)
        self.max_spilled_rows = max_spilled_rows
        self.first_size = self.capacity + (0 if is_stepped_here else max_spilled_rows or 0)
        self.rule: OptimizerSpec = nnx.static(rule)
        rows, nothing = jnp.zeros((self.first_size, dim)), np.full(self.first_size, NO_ROW, np.int32)
        self.rows = kind(rows)
        self.state = CacheDirectory(rule.init_slots(rows))
        self.ids = CacheDirectory(nothing)
        self.places = CacheDirectory(np.zeros_like(nothing))
        self.is_cached = CacheDirectory(np.zeros(self.first_size, bool))
        self.reads = CacheDirectory(tuple(ReadCounts.empty(self._num_counts(hashtbl_size))))
        self.totals = CacheDirectory(np.zeros(2 * len(TOTALS), np.uint32))

    def _num_counts(self, wanted: int) -> int:
        if wanted and wanted < self.capacity:
            raise ValueError(f"hashtbl_size={wanted} must be at least cache_size={self.capacity}.")
        if wanted >= LEAST_COUNTS_PER_ROW * self.capacity:
            return wanted
        num_counts = 1 << (COUNTS_PER_ROW * self.capacity - 1).bit_length()
        if wanted:
            warnings.warn(
                f"hashtbl_size={wanted} counts few ids for cache_size={self.capacity}: below six times as many the hit "
                f"rate would suffer, so {num_counts} are counted; leave it out, or say at least six times cache_size.",
                stacklevel=4,
            )
        return num_counts

    def find(self, ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
        """Place of every id among the rows, `NO_ROW` where it is not stored. Works under `jit`."""
        stored = jnp.asarray(self.ids.get_value())
        k = jnp.minimum(jnp.searchsorted(stored, ids), stored.shape[0] - 1)
        return jnp.where(stored[k] == ids, jnp.asarray(self.places.get_value())[k], NO_ROW)

    def directory(self) -> tuple[Array | np.ndarray, Array | np.ndarray]:
        """Stored ids, ascending, and their places; `NO_ROW` for ids that are not there. Values never change."""
        return self.ids.get_value(), self.places.get_value()

    def holds(self, directory: tuple[Array | np.ndarray, Array | np.ndarray]) -> bool:
        """Whether places that were found with an earlier `directory` still hold the same ids."""
        return all(
            old is new
            or any(isinstance(x, jax.core.Tracer) for x in (old, new))  # nothing moves inside jit
            or np.array_equal(np.asarray(old), np.asarray(new))
            for old, new in zip(directory, self.directory(), strict=True)
        )

    def sizes(self) -> dict[str, int]:
        """Facts that a saved state must have been made with."""
        return {
            "cache_size": self.capacity,
            "first_size": self.first_size,
            "num_counts": self.reads.get_value()[0].size,
        }

    def read_counts(self) -> ReadCounts:
        """How often ids were read."""
        return ReadCounts(*on_host(tuple(self.reads.get_value())))

    def count(self, ids: Int[np.ndarray, " nnz"]) -> None:
        """Counts reads, on the host."""
        is_hit = places_in(on_host(self.ids.get_value()), ids)[1]
        counts, num_uncounted = self.read_counts().counted(ids)
        self.reads.set_value(tuple(counts))
        self._add(lookups=ids.size, hits=int(is_hit.sum()), uncounted=num_uncounted)

    def step(self, segment: Segment, d_outputs: Float[Array, "bags dim"], hyper: Hyperparameters) -> None:
        """One optimizer step of the rows that were read; the others and their state keep their bits."""
        rows, state = self.rows.get_value(), self.state.get_value()
        rows, state = _update(rows, state, SegmentGradients([segment], [d_outputs]), Step(hyper, self.rule))
        self._set_rows([rows, *state])

    def learned(self) -> tuple[Int[np.ndarray, " ids"], Float[np.ndarray, "ids dim"]]:
        """All stored ids, ascending, and their rows."""
        ids, places = on_host(self.directory())
        num = int((ids != NO_ROW).sum())
        return ids[:num], np.asarray(self.rows.get_value())[places[:num]]

    def populate(self, rows_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Keeps the most read ids from now on, of equals the lower; `rows_of` gives rows from the cores."""
        stored, vectors = self.learned()
        counts = self.read_counts()
        ids = np.union1d(stored, counts.keys[counts.reads > 0])
        worth, places = counts.of(ids), np.full(ids.size, -1)
        was_cached, is_trained = np.zeros((2, ids.size), bool)
        own = np.searchsorted(ids, stored)
        places[own] = np.asarray(self.places.get_value())[: stored.size]
        was_cached[own] = np.asarray(self.is_cached.get_value())[: stored.size]
        is_trained[own] = (vectors != rows_of(stored)).any(axis=1)
        worth[~was_cached & (worth == 0)] = -1  # a spilled row that nobody reads returns only where there is room
        is_cached, num_held = are_largest(worth, self.capacity), 0
        if self.max_spilled_rows is not None and (is_trained & ~is_cached).sum() > self.max_spilled_rows:
            trained = np.flatnonzero(is_trained)
            held = trained[are_largest(worth[trained], trained.size - self.max_spilled_rows)]
            num_held = int((~is_cached[held]).sum())
            worth[held] = NEVER_LEAVES
            is_cached = are_largest(worth, self.capacity)
        is_spilled, leaves = is_trained & ~is_cached, was_cached & ~is_cached
        self._log_held(num_held)
        self._add(evictions=int(leaves.sum()), spills=int((leaves & is_trained).sum()))
        new = np.flatnonzero(is_cached & (places < 0))
        new = new[np.argsort(-worth[new], kind="stable")]  # the most read take the first places
        size, stays = self._size_for(int(is_spilled.sum())), is_spilled | (is_cached & (places >= 0))
        places[new] = np.setdiff1d(np.arange(size), places[stays])[: new.size]
        self._put(rows_of(ids[new]), places[new], size)
        self._write_directory(*(x[is_cached | is_spilled] for x in (ids, places, is_cached)))

    def _size_for(self, num_spilled: int) -> int:
        """Rows there is to be room for: twice as many spilled ones when that is short, so that shapes change seldom."""
        size = len(self.rows.get_value())
        room = size - self.capacity
        if num_spilled <= room:
            return size
        wanted = max(num_spilled, 2 * room)
        if self.max_spilled_rows is not None:
            wanted = min(wanted, self.max_spilled_rows)
        elif room <= SPILLED_ROWS_TO_LOG * self.capacity < wanted:
            _LOG.warning(
                "%d rows were trained in a tensor-train cache of %d and left it; none is dropped, so they now take "
                "more memory than %d times the cache. Raise cache_size, or bound them with max_spilled_rows.",
                num_spilled,
                self.capacity,
                SPILLED_ROWS_TO_LOG,
            )
        return self.capacity + wanted

    def _put(self, rows: np.ndarray, places: np.ndarray, size: int) -> None:
        """New rows and the state that they start with, into arrays of `size` rows."""
        arrays = self.rows.get_value(), *self.state.get_value()
        changed = []
        for array, new in zip(arrays, (rows, *self.rule.init_slots(jnp.asarray(rows))), strict=True):
            changed.append(np.zeros((size, *array.shape[1:]), array.dtype))
            changed[-1][: len(array)] = array
            changed[-1][places] = new
        self._set_rows([jnp.asarray(array) for array in changed])

    def _set_rows(self, arrays: Sequence[Array]) -> None:
        nnx.Variable.set_value(self.rows, arrays[0])
        self.state.set_value(tuple(arrays[1:]))

    def _write_directory(self, ids: np.ndarray, places: np.ndarray, is_cached: np.ndarray) -> None:
        size = len(self.rows.get_value())
        for variable, values, nothing in ((self.ids, ids, NO_ROW), (self.places, places, 0)):
            variable.set_value(np.r_[values, np.full(size - values.size, nothing)].astype(np.int32))
        self.is_cached.set_value(np.r_[is_cached, np.zeros(size - ids.size, bool)])

    def _log_held(self, num_held: int) -> None:
        if num_held and not self._totals()["held_ids"]:
            _LOG.warning(
                "%d trained rows keep their places in a tensor-train cache of %d although others are read more often: "
                "max_spilled_rows=%d are used up. Raise it or cache_size, or take the learned rows out with "
                "reset_cache().",
                num_held,
                self.capacity,
                self.max_spilled_rows,
            )
        self._add(held_ids=num_held - self._totals()["held_ids"])

    def report(self) -> CacheReport:
        """Contents and counters."""
        num_stored = int((on_host(self.ids.get_value()) != NO_ROW).sum())
        num_cached = int(np.asarray(self.is_cached.get_value()).sum())
        return CacheReport(num_cached, num_stored - num_cached, **self._totals())

    def _totals(self) -> dict[str, int]:
        """Sums in 64 bits, which JAX keeps as two words of 32."""
        return dict(zip(TOTALS, np.array(self.totals.get_value()).view(np.int64).tolist(), strict=True))

    def _add(self, **changes: int) -> None:
        totals = [total + changes.get(name, 0) for name, total in self._totals().items()]
        self.totals.set_value(np.asarray(totals, np.int64).view(np.uint32))

    def halve_counts(self) -> None:
        """Lets old reads fade."""
        self.reads.set_value(tuple(self.read_counts().halved()))

    def forget(self, first: int, last: int) -> None:
        """Forgets the rows of ids from `first` to before `last`; works inside `jit`."""
        ids, places, is_cached = (jnp.asarray(own.get_value()) for own in (self.ids, self.places, self.is_cached))
        is_old = (ids >= first) & (ids < last)
        ids = jnp.where(is_old, NO_ROW, ids)
        order = jnp.argsort(ids, stable=True)
        self.ids.set_value(ids[order])
        self.places.set_value(places[order])
        self.is_cached.set_value((is_cached & ~is_old)[order])

    def reset(self) -> None:
        """Forgets counts and contents, and gives the room of spilled rows back."""
        self._set_rows([x[: self.first_size] for x in (self.rows.get_value(), *self.state.get_value())])
        self.reads.set_value(tuple(ReadCounts.empty(self.reads.get_value()[0].size)))
        self.totals.set_value(np.zeros(2 * len(TOTALS), np.uint32))
        self._write_directory(*np.empty((3, 0), np.int32))
