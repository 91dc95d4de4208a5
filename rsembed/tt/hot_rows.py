"""The rows that are read most, kept uncompressed and trained by themselves.

A lookup of such a row takes its stored vector instead of a chain of products, and sends its gradient there. Which rows
are kept changes only in `populate`, and no change of place ever changes a vector: a row that has to leave moves, with
its optimizer state, into a spill area and is served and trained there until it returns; a row that equals what its
cores give is dropped. The spill area grows as needed up to a bound; beyond it, rows with something to lose keep their
place. So nothing learned is lost, at the price of at most `max_spilled_rows` more rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rsembed.caching import SetAssociativeCache, set_of
from rsembed.kernels import api as kernels
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.optimizers import Hyperparameters, OptimizerSpec
from rsembed.tt.spec import TTSpec

NUM_WAYS = 32
MAX_PROBES = 32


class CacheDirectory(nnx.Variable):
    """Which ids are stored and where; not trained."""


class CacheReport(NamedTuple):
    """What the cache has done since it was made or reset.

    Attributes:
      cached_ids: rows in the cache now.
      spilled_ids: rows in the spill area now.
      lookups: ids counted.
      hits: those that were stored at that time.
      evictions: rows that left the cache.
      spills: those of them that moved to the spill area.
      uncounted: ids that found no place among the counts.
    """

    cached_ids: int
    spilled_ids: int
    lookups: int
    hits: int
    evictions: int
    spills: int
    uncounted: int

    @property
    def hit_rate(self) -> float:
        """Share of counted ids that were stored, nan before the first."""
        return self.hits / self.lookups if self.lookups else math.nan


class AccessCounts:
    """How often ids were read, in a table of bounded size with open addressing, and which of them are resident.

    An id may sit in one of `MAX_PROBES` places from its home on; the first that is empty, or whose id was counted down
    to zero and is not resident, is taken. All of them are looked at, so an id never has two places. Its place is what
    the set-associative LFU policy knows it by.
    """

    def __init__(self, num_rows: int, num_counts: int):
        self.keys = np.full(num_counts, -1, np.int64)
        self.policy = SetAssociativeCache(
            max(1, num_rows // NUM_WAYS), num_ways=min(NUM_WAYS, num_rows), algorithm="lfu", num_ids=num_counts
        )

    def count(self, ids: np.ndarray) -> int:
        """Counts ids; returns how many found no place."""
        unique, occurrences = np.unique(ids, return_counts=True)
        probes = min(MAX_PROBES, self.keys.size)
        home = set_of(unique, self.keys.size)
        places = (home[:, None] + np.arange(probes)) % self.keys.size
        matches = self.keys[places] == unique[:, None]
        place = np.where(matches.any(1), places[np.arange(unique.size), matches.argmax(1)], -1)
        is_free = (self.keys < 0) | (self.policy.counts == 0)
        is_free[self.policy.resident()[0]] = False
        for probe in range(probes):
            waiting = np.flatnonzero(place < 0)
            waiting = waiting[is_free[places[waiting, probe]]]
            taken, first = np.unique(places[waiting, probe], return_index=True)  # the lowest id of those that want it
            self.keys[taken], place[waiting[first]], is_free[taken] = unique[waiting[first]], taken, False
        found = place >= 0
        self.policy.counts[place[found]] += occurrences[found]  # type: ignore[index]
        return int(occurrences[~found].sum())


class HotRows(nnx.Module):
    """Stored rows of one group of tables; ids are row numbers plus the rows of the tables before.

    Args:
      num_rows: rows in the cache at most.
      num_counts: places for access counts.
      dim: length of a row.
      rule: row rule of the fused update.
      kind: variable type of the rows.
      max_spilled_rows: rows in the spill area at most.
    """

    def __init__(
        self, num_rows: int, num_counts: int, dim: int, *, rule: OptimizerSpec, kind: type, max_spilled_rows: int
    ):
        counts = AccessCounts(num_rows, num_counts)
        capacity = counts.policy.tags.size
        rows = jnp.zeros((capacity, dim))
        self.rows = kind(rows)
        self.state = CacheDirectory(rule.init_slots(rows))
        self.ids = CacheDirectory(jnp.full(capacity, NO_ROW, jnp.int32))
        self.places = CacheDirectory(jnp.zeros(capacity, jnp.int32))
        self.rule: OptimizerSpec = nnx.static(rule)
        self.counts = nnx.static(counts)
        self.host: Any = nnx.static(_Host(capacity, max_spilled_rows))

    def find(self, ids: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
        """Place of every id among the rows, `NO_ROW` where it is not stored. Works under `jit`."""
        stored = self.ids.get_value()
        k = jnp.minimum(jnp.searchsorted(stored, ids), stored.shape[0] - 1)
        return jnp.where(stored[k] == ids, self.places.get_value()[k], NO_ROW)

    def count(self, ids: Int[np.ndarray, " nnz"]) -> None:
        """Counts reads, on the host."""
        stored = np.asarray(self.ids.get_value())
        k = np.minimum(np.searchsorted(stored, ids), stored.size - 1)
        self.host.lookups += ids.size
        self.host.hits += int((stored[k] == ids).sum())
        self.host.uncounted += self.counts.count(ids)

    def step(self, segment: Segment, d_outputs: Float[Array, "bags dim"], hyper: Hyperparameters) -> None:
        """One optimizer step of the rows that were read; the others and their state keep their bits."""
        rows, state = kernels.update(
            self.rows.get_value(), self.state.get_value(), [segment], [d_outputs], hyper, self.rule
        )
        self.rows.set_value(rows)
        self.state.set_value(state)

    def learned(self) -> tuple[Int[np.ndarray, " ids"], Float[np.ndarray, "ids dim"]]:
        """All stored ids, ascending, and their rows."""
        ids = np.asarray(self.ids.get_value())
        num = int((ids != NO_ROW).sum())
        return ids[:num], np.asarray(self.rows.get_value())[np.asarray(self.places.get_value())[:num]]

    def populate(self, rows_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Keeps the most read ids of every set from now on; `rows_of` gives rows from the cores."""
        host, policy, keys = self.host, self.counts.policy, self.counts.keys
        stored, vectors = self.learned()
        resident, slots = policy.resident()
        if not np.array_equal(np.sort([*keys[resident], *host.spilled]), stored):
            raise ValueError(
                "the stored rows are not those that the counts know of; restore modules with load_state_dict."
            )
        is_dirty = dict(zip(stored.tolist(), (vectors != rows_of(stored)).any(1), strict=True))
        locked = np.empty(0, np.int64)
        if host.max_spilled_rows - len(host.spilled) < resident.size:
            locked = slots[[is_dirty[id] for id in keys[resident].tolist()]] if slots.size else slots
        host.version += 1
        policy.lock(locked)
        admission = policy.populate()
        policy.unlock(locked)
        new_ids = keys[admission.inserted_ids]
        old_ids = np.where(admission.evicted_ids >= 0, keys[admission.evicted_ids], -1)
        self._move(new_ids, admission.inserted_slots, old_ids, is_dirty, rows_of)

    def _move(
        self, new_ids: np.ndarray, slots: np.ndarray, old_ids: np.ndarray, is_dirty: Mapping[int, Any], rows_of: Any
    ) -> None:
        """Spills what would be lost, then loads the new rows: from the spill area, or from the cores."""
        host = self.host
        leaving = [(old, slot) for old, slot in zip(old_ids.tolist(), slots.tolist(), strict=True) if old >= 0]
        spilling = [(old, slot) for old, slot in leaving if is_dirty[old]]
        host.evictions, host.spills = host.evictions + len(leaving), host.spills + len(spilling)
        returning = [(k, new) for k, new in enumerate(new_ids.tolist()) if new in host.spilled]
        fresh = rows_of(new_ids)
        arrays = [np.array(x) for x in (self.rows.get_value(), *self.state.get_value())]
        initial = [np.asarray(x) for x in self.rule.init_slots(jnp.asarray(fresh))]
        incoming = [fresh.copy(), *(np.array(x) for x in initial)]
        outgoing = [x[[slot for _, slot in spilling]] for x in arrays]
        for k, new in returning:
            for source, target in zip(arrays, incoming, strict=True):
                target[k] = source[host.spilled[new]]
        for _, new in returning:
            host.free.append(host.spilled.pop(new))
        host.free.sort(reverse=True)
        missing = len(spilling) - len(host.free)
        if missing > 0:
            grown = max(missing, len(arrays[0]) - host.capacity)  # twice the area, so that shapes change seldom
            grown = max(missing, min(grown, host.max_spilled_rows - (len(arrays[0]) - host.capacity)))
            host.free = [*range(len(arrays[0]) + grown - 1, len(arrays[0]) - 1, -1), *host.free]
            arrays = [np.concatenate([x, np.zeros((grown, *x.shape[1:]), x.dtype)]) for x in arrays]
        for k, (old, _) in enumerate(spilling):
            host.spilled[old] = host.free.pop()
            for target, source in zip(arrays, outgoing, strict=True):
                target[host.spilled[old]] = source[k]
        for target, source in zip(arrays, incoming, strict=True):
            target[slots] = source
        self.rows.set_value(jnp.asarray(arrays[0]))
        self.state.set_value(tuple(jnp.asarray(x) for x in arrays[1:]))
        self._write_directory(len(arrays[0]))

    def _write_directory(self, size: int) -> None:
        resident, slots = self.counts.policy.resident()
        ids = np.concatenate([self.counts.keys[resident], np.asarray(list(self.host.spilled), np.int64)])
        places = np.concatenate([slots, np.asarray(list(self.host.spilled.values()), np.int64)])
        order = np.argsort(ids)
        stored, where = np.full(size, NO_ROW, np.int32), np.zeros(size, np.int32)
        stored[: ids.size], where[: ids.size] = ids[order], places[order]
        self.ids.set_value(jnp.asarray(stored))
        self.places.set_value(jnp.asarray(where))

    def report(self) -> CacheReport:
        """Contents and counters."""
        host = self.host
        numbers = (host.lookups, host.hits, host.evictions, host.spills, host.uncounted)
        return CacheReport(self.counts.policy.resident()[0].size, len(host.spilled), *numbers)

    def state_dict(self) -> dict[str, Any]:
        """What `nnx.state` does not hold: counts, tags and the places of spilled rows."""
        host = {name: np.asarray(value) for name, value in vars(self.host).items() if isinstance(value, int)}
        spilled = np.asarray(sorted(self.host.spilled.items()), np.int64).reshape(-1, 2)
        return {"keys": self.counts.keys.copy(), "spilled": spilled, "free": np.asarray(self.host.free, np.int64)} | {
            **{f"host.{name}": value for name, value in host.items()},
            **{f"policy.{name}": value for name, value in self.counts.policy.state_dict().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of rows made with the same arguments; the variables come by themselves."""
        parts = {name.removeprefix("policy."): x for name, x in state.items() if name.startswith("policy.")}
        self.counts.policy.load_state_dict(parts)
        self.counts.keys[:] = state["keys"]
        self.host.spilled = {int(id): int(place) for id, place in state["spilled"]}
        self.host.free = state["free"].tolist()
        for name in [name for name, value in vars(self.host).items() if isinstance(value, int)]:
            setattr(self.host, name, int(state[f"host.{name}"]))

    def halve_counts(self) -> None:
        """Lets old reads fade."""
        self.counts.policy.halve_counts()

    def reset(self) -> None:
        """Forgets counts and contents."""
        self.counts.policy.reset()
        self.counts.keys[:] = -1
        self.host.reset()
        self._write_directory(self.rows.get_value().shape[0])


def make_hot_rows(
    specs: Sequence[TTSpec], rule: OptimizerSpec, kind: type, num_rows: int, num_counts: int, max_spilled: int | None
) -> HotRows:
    """Hot rows of one group of tables, of default sizes where zero or None is given.

    Defaults: a thousandth of the rows (at least 32), 16 counts per cached row rounded up to a power of two, and three
    times as many spilled rows. Counts of fewer than six per cached row lose hits, which is warned about.

    Raises: ValueError: fewer counts than rows, or 2^31 rows in the group.
    """
    total = sum(spec.num_embeddings for spec in specs)
    if total >= NO_ROW:
        raise ValueError(f"a cache takes fewer than {NO_ROW} rows in a group of tables, got {total}; use_cache=False.")
    num_rows = min(total, num_rows or max(NUM_WAYS, total // 1000))
    if not num_counts:
        num_counts = 1 << (16 * num_rows - 1).bit_length()
    elif num_counts < num_rows:
        raise ValueError(f"hashtbl_size={num_counts} must be at least cache_size={num_rows}.")
    elif num_counts < 6 * num_rows:
        warnings.warn(
            f"hashtbl_size={num_counts} counts few ids for cache_size={num_rows}: below six times as many the hit rate "
            "suffers; leave it out for 16 times.",
            stacklevel=4,
        )
    spilled = 3 * num_rows if max_spilled is None else max_spilled
    dim = specs[0].embedding_dim
    return HotRows(num_rows, num_counts, dim, rule=rule, kind=kind, max_spilled_rows=spilled)


class _Host:
    """Where spilled rows are, which places of the spill area are free (the next one last), and counters."""

    def __init__(self, capacity: int, max_spilled_rows: int):
        self.capacity, self.max_spilled_rows, self.version = capacity, max_spilled_rows, 0
        self.reset()

    def reset(self) -> None:
        self.spilled: dict[int, int] = {}
        self.free: list[int] = []
        self.lookups = self.hits = self.evictions = self.spills = self.uncounted = 0
        self.version += 1
