"""The rows that are read most, kept uncompressed and trained by themselves.

A lookup of such a row takes its stored vector instead of a chain of products, and sends its gradient there. Which rows
are kept changes only in `populate`, and no change of place ever changes a vector: a row that has to leave moves, with
its optimizer state, into a spill area and is served and trained there until it returns; a row that equals what its
cores give is dropped. So nothing learned is lost, and the cache always follows what is read, at the price of one more
row for every row that was trained here and left: the spill area grows as needed. Where it may not, rows with something
to lose keep their place, which is counted and logged.

All that the cache knows is in variables of the module, so whatever copies, saves or restores those (`nnx.clone`,
`nnx.split`, `nnx.state`, pickle) has the whole of it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rsembed.caching import set_of
from rsembed.kernels import api as kernels
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.optimizers import Hyperparameters, OptimizerSpec
from rsembed.tt.read_counts import ReadCounts, rank_in_sets
from rsembed.tt.spec import TTSpec

NUM_WAYS = 32
COUNTS_PER_ROW = 16
LEAST_COUNTS_PER_ROW = 6
SPILLED_ROWS_TO_LOG = 3
"""Times the cache; beyond it the spill area is worth a word."""

NEVER_LEAVES = np.iinfo(np.int64).max
TOTALS = ("lookups", "hits", "evictions", "spills", "uncounted", "held_ids")

_LOG = logging.getLogger("rsembed")


class CacheDirectory(nnx.Variable):
    """Which ids are stored and where, how often ids were read, and the state of the rows' optimizer; not trained."""


class CacheReport(NamedTuple):
    """What the cache has done since it was made or reset.

    Attributes:
      cached_ids: rows in the cache now.
      spilled_ids: rows in the spill area now.
      lookups: ids counted.
      hits: those that were stored at that time.
      evictions: rows that left the cache.
      spills: those of them that moved to the spill area.
      uncounted: reads whose ids found no place among the counts.
      held_ids: rows in the cache now only because the spill area may not grow: others were read more often.
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


class HotRows(nnx.Module):
    """Stored rows of one group of tables; ids are row numbers plus the rows of the tables before.

    Args:
      num_rows: rows in the cache at most.
      num_counts: places for counts of reads.
      dim: length of a row.
      rule: row rule of the fused update.
      kind: variable type of the rows.
      max_spilled_rows: rows in the spill area at most; None lets it grow as needed.
    """

    def __init__(
        self,
        num_rows: int,
        num_counts: int,
        dim: int,
        *,
        rule: OptimizerSpec,
        kind: type,
        max_spilled_rows: int | None,
    ):
        self.num_ways = min(NUM_WAYS, num_rows)
        self.capacity = num_rows - num_rows % self.num_ways
        self.max_spilled_rows = max_spilled_rows
        rows = jnp.zeros((self.capacity, dim))
        self.rows = kind(rows)
        self.state = CacheDirectory(rule.init_slots(rows))
        self.ids = CacheDirectory(np.full(self.capacity, NO_ROW, np.int32))
        self.places = CacheDirectory(np.zeros(self.capacity, np.int32))
        self.reads = CacheDirectory(tuple(ReadCounts.empty(num_counts)))
        self.totals = CacheDirectory(np.zeros(2 * len(TOTALS), np.uint32))
        self.rule: OptimizerSpec = nnx.static(rule)

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
        pairs = list(zip(directory, self.directory(), strict=True))
        if any(isinstance(x, jax.core.Tracer) for pair in pairs for x in pair):
            return True  # nothing moves inside jit
        return all(old is new or np.array_equal(np.asarray(old), np.asarray(new)) for old, new in pairs)

    def sizes(self) -> dict[str, int]:
        """What a saved state must have been made with."""
        return {"cache_size": self.capacity, "num_counts": self.reads.get_value()[0].size}

    def read_counts(self) -> ReadCounts:
        """How often ids were read."""
        return ReadCounts(*map(np.asarray, self.reads.get_value()))

    def count(self, ids: Int[np.ndarray, " nnz"]) -> None:
        """Counts reads, on the host."""
        stored = np.asarray(self.ids.get_value())
        k = np.minimum(np.searchsorted(stored, ids), stored.size - 1)
        counts, num_uncounted = self.read_counts().counted(ids)
        self.reads.set_value(tuple(counts))
        self._add(lookups=ids.size, hits=int((stored[k] == ids).sum()), uncounted=num_uncounted)

    def step(self, segment: Segment, d_outputs: Float[Array, "bags dim"], hyper: Hyperparameters) -> None:
        """One optimizer step of the rows that were read; the others and their state keep their bits."""
        rows, state = kernels.update(
            self.rows.get_value(), self.state.get_value(), [segment], [d_outputs], hyper, self.rule
        )
        self.rows.set_value(rows)
        self.state.set_value(state)

    def learned(self) -> tuple[Int[np.ndarray, " ids"], Float[np.ndarray, "ids dim"]]:
        """All stored ids, ascending, and their rows."""
        ids, places = map(np.asarray, self.directory())
        num = int((ids != NO_ROW).sum())
        return ids[:num], np.asarray(self.rows.get_value())[places[:num]]

    def populate(self, rows_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Keeps the most read ids of every set from now on; `rows_of` gives rows from the cores."""
        stored, vectors = self.learned()
        places, counts = np.asarray(self.places.get_value())[: stored.size], self.read_counts()
        is_cached, is_dirty = places < self.capacity, (vectors != rows_of(stored)).any(axis=1)
        ids = np.union1d(stored[is_cached], counts.keys[counts.reads > 0])
        worth, slots, dirty = counts.of(ids), np.full(ids.size, -1), np.zeros(ids.size, bool)
        resident = np.searchsorted(ids, stored[is_cached])
        slots[resident], dirty[resident] = places[is_cached], is_dirty[is_cached]
        stays, num_held = self._most_read(ids, worth), 0
        if self.max_spilled_rows is not None:
            room = self.max_spilled_rows - int((~is_cached).sum())
            if np.count_nonzero(dirty & ~stays) > room:
                trained = np.flatnonzero(dirty)
                held = trained[np.argsort(-worth[trained], kind="stable")[: trained.size - room]]
                num_held = int(np.count_nonzero(~stays[held]))
                worth[held] = NEVER_LEAVES
                stays = self._most_read(ids, worth)
        leaves = ~stays & (slots >= 0)
        self._log_held(num_held)
        self._add(evictions=int(leaves.sum()), spills=int((leaves & dirty).sum()))
        new, new_slots = self._free_slots(ids, worth, stays & (slots < 0), slots[stays & (slots >= 0)])
        is_spilled = ~is_cached & ~np.isin(stored, new)
        returning = ~is_cached & np.isin(stored, new)
        self._write(
            kept=(
                np.concatenate([ids[stays & (slots >= 0)], stored[is_spilled]]),
                np.concatenate([slots[stays & (slots >= 0)], places[is_spilled]]),
            ),
            spilling=(ids[leaves & dirty], slots[leaves & dirty]),
            returning=(stored[returning], places[returning]),
            new=(new, new_slots),
            rows_of=rows_of,
        )

    def _most_read(self, ids: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """Which ids are among the most read of their set; ids ascend, and the lower one wins where reads are equal."""
        is_chosen = np.zeros(ids.size, bool)
        order, rank = rank_in_sets(self._sets(ids), worth)
        is_chosen[order[rank < self.num_ways]] = True
        return is_chosen

    def _sets(self, ids: np.ndarray) -> np.ndarray:
        return set_of(ids, self.capacity // self.num_ways)

    def _free_slots(
        self, ids: np.ndarray, worth: np.ndarray, is_new: np.ndarray, taken: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """New ids and their slots: the lowest free one of a set for the most read."""
        free = np.setdiff1d(np.arange(self.capacity), taken)
        sets = self._sets(ids[is_new])
        order, rank = rank_in_sets(sets, worth[is_new])
        return ids[is_new][order], free[np.searchsorted(free // self.num_ways, sets[order]) + rank]

    def _write(
        self,
        *,
        kept: tuple[np.ndarray, np.ndarray],
        spilling: tuple[np.ndarray, np.ndarray],
        returning: tuple[np.ndarray, np.ndarray],
        new: tuple[np.ndarray, np.ndarray],
        rows_of: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Moves rows and their state, all pairs being ids and places; a new row comes from the cores, or returns."""
        arrays = [np.array(x) for x in (self.rows.get_value(), *self.state.get_value())]
        fresh = rows_of(new[0])
        incoming = [np.array(x) for x in (fresh, *self.rule.init_slots(jnp.asarray(fresh)))]
        by_id = np.argsort(new[0])
        comes_back = by_id[np.searchsorted(new[0], returning[0], sorter=by_id)]
        for source, target in zip(arrays, incoming, strict=True):
            target[comes_back] = source[returning[1]]
        outgoing = [x[spilling[1]] for x in arrays]
        arrays = self._grown(arrays, int((kept[1] >= self.capacity).sum()) + spilling[0].size)
        free = np.setdiff1d(np.arange(self.capacity, len(arrays[0])), kept[1])[: spilling[0].size]
        for target, left, came in zip(arrays, outgoing, incoming, strict=True):
            target[free], target[new[1]] = left, came
        self.rows.set_value(jnp.asarray(arrays[0]))
        self.state.set_value(tuple(jnp.asarray(x) for x in arrays[1:]))
        self._write_directory(
            np.concatenate([kept[0], spilling[0], new[0]]), np.concatenate([kept[1], free, new[1]]), len(arrays[0])
        )

    def _grown(self, arrays: list[np.ndarray], num_spilled: int) -> list[np.ndarray]:
        """Room for the spilled rows: twice as much as before when it is short, so that shapes change seldom."""
        area = len(arrays[0]) - self.capacity
        if num_spilled <= area:
            return arrays
        wanted = max(num_spilled, 2 * area)
        if self.max_spilled_rows is not None:
            wanted = min(wanted, self.max_spilled_rows)
        elif area <= SPILLED_ROWS_TO_LOG * self.capacity < wanted:
            _LOG.warning(
                "%d rows were trained in a tensor-train cache of %d and left it; none is dropped, so they now take "
                "more memory than %d times the cache. Raise cache_size, or bound them with max_spilled_rows.",
                num_spilled,
                self.capacity,
                SPILLED_ROWS_TO_LOG,
            )
        return [np.concatenate([x, np.zeros((wanted - area, *x.shape[1:]), x.dtype)]) for x in arrays]

    def _write_directory(self, ids: np.ndarray, places: np.ndarray, size: int) -> None:
        order = np.argsort(ids)
        stored, where = np.full(size, NO_ROW, np.int32), np.zeros(size, np.int32)
        stored[: ids.size], where[: ids.size] = ids[order], places[order]
        self.ids.set_value(stored)
        self.places.set_value(where)

    def _log_held(self, num_held: int) -> None:
        if num_held and not self._totals()["held_ids"]:
            _LOG.warning(
                "%d trained rows keep their places in a tensor-train cache of %d although others are read more often: "
                "max_spilled_rows=%d are used up. Raise it or cache_size, or take the learned rows out with "
                "reset_cache(); with sparse=False no trained row can move.",
                num_held,
                self.capacity,
                self.max_spilled_rows,
            )
        self._add(held_ids=num_held - self._totals()["held_ids"])

    def report(self) -> CacheReport:
        """Contents and counters."""
        ids, places = map(np.asarray, self.directory())
        is_spilled = places[ids != NO_ROW] >= self.capacity
        return CacheReport(int((~is_spilled).sum()), int(is_spilled.sum()), **self._totals())

    def _totals(self) -> dict[str, int]:
        """Sums in 64 bits, which JAX keeps as two words of 32."""
        return dict(zip(TOTALS, np.array(self.totals.get_value()).view(np.int64).tolist(), strict=True))

    def _add(self, **changes: int) -> None:
        totals = [total + changes.get(name, 0) for name, total in self._totals().items()]
        self.totals.set_value(np.asarray(totals, np.int64).view(np.uint32))

    def halve_counts(self) -> None:
        """Lets old reads fade."""
        self.reads.set_value(tuple(self.read_counts().halved()))

    def reset(self) -> None:
        """Forgets counts and contents, and gives the spill area back."""
        self.rows.set_value(self.rows.get_value()[: self.capacity])
        self.state.set_value(tuple(x[: self.capacity] for x in self.state.get_value()))
        self.reads.set_value(tuple(ReadCounts.empty(self.reads.get_value()[0].size)))
        self.totals.set_value(np.zeros(2 * len(TOTALS), np.uint32))
        nothing = np.empty(0, np.int32)
        self._write_directory(nothing, nothing, self.capacity)


def make_hot_rows(
    specs: Sequence[TTSpec], rule: OptimizerSpec, kind: type, num_rows: int, num_counts: int, max_spilled: int | None
) -> HotRows:
    """Hot rows of one group of tables, of default sizes where zero is given.

    Defaults: a thousandth of the rows (at least 32), and 16 counts per cached row rounded up to a power of two. Fewer
    than six counts per cached row would lose hits, so the default is taken then, too, with a warning.

    Raises: ValueError: fewer counts than rows, or 2^31 rows in the group.
    """
    total = sum(spec.num_embeddings for spec in specs)
    if total >= NO_ROW:
        raise ValueError(f"a cache takes fewer than {NO_ROW} rows in a group of tables, got {total}; use_cache=False.")
    num_rows = min(total, num_rows or max(NUM_WAYS, total // 1000))
    if num_counts and num_counts < num_rows:
        raise ValueError(f"hashtbl_size={num_counts} must be at least cache_size={num_rows}.")
    if num_counts < LEAST_COUNTS_PER_ROW * num_rows:
        wanted, num_counts = num_counts, 1 << (COUNTS_PER_ROW * num_rows - 1).bit_length()
        if wanted:
            warnings.warn(
                f"hashtbl_size={wanted} counts few ids for cache_size={num_rows}: below six times as many the hit rate "
                f"would suffer, so {num_counts} are counted; leave it out, or say at least six times cache_size.",
                stacklevel=4,
            )
    return HotRows(num_rows, num_counts, specs[0].embedding_dim, rule=rule, kind=kind, max_spilled_rows=max_spilled)
