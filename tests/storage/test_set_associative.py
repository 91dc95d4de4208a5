"""Decisions of the cache equal a simulation with dicts and lists, one id and one slot at a time."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from numpy.testing import assert_array_equal

from rsembed.storage import Admission, SetAssociativeCache
from rsembed.storage.set_associative import set_of

CASES = json.loads((Path(__file__).parents[1] / "data" / "caching_cases.json").read_text())
NUM_IDS = 40


class DumbCache:
    """A dict for each slot, with keys "id", "time" and "locks", and a count for each id."""

    def __init__(self, num_sets: int, num_ways: int, algorithm: str, num_ids: int) -> None:
        self.num_sets = num_sets
        self.num_ways = num_ways
        self.algorithm = algorithm
        self.num_ids = num_ids
        self.slots = [{"id": -1, "time": 0, "locks": 0} for _ in range(num_sets * num_ways)]
        self.count: Counter[int] = Counter()
        self.clock = 1

    def slot_of(self, wanted: int) -> int:
        return next((number for number, slot in enumerate(self.slots) if slot["id"] == wanted), -1)

    def admit(self, ids: list[int], lock: bool) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Slot of each id (-1: none), and moves as tuples of inserted id, slot and evicted id."""
        wanted = sorted({i for i in ids if 0 <= i < self.num_ids})
        self.count.update(i for i in ids if i in wanted)
        moves = self.let_in(wanted)
        locations = [self.slot_of(i) if i in wanted else -1 for i in ids]
        if lock:
            for number in set(locations) - {-1}:
                self.slots[number]["locks"] += 1
        return locations, moves

    def let_in(self, wanted: list[int]) -> list[tuple[int, int, int]]:
        self.clock += 1
        missing = [i for i in wanted if self.slot_of(i) < 0]
        for i in wanted:
            if self.slot_of(i) >= 0:
                self.slots[self.slot_of(i)]["time"] = self.clock
        moves = []
        for number_of_set in range(self.num_sets):
            # `test_set_of_the_worked_values` checks this function.
            mine = [i for i in missing if set_of(np.array([i]), self.num_sets) == number_of_set]
            first = number_of_set * self.num_ways
            free = [
                number
                for number in range(first, first + self.num_ways)
                if self.slots[number]["time"] != self.clock and not self.slots[number]["locks"]
            ]
            if self.algorithm == "lru":
                free.sort(key=lambda number: (self.slots[number]["time"], number))
            else:
                mine.sort(key=lambda i: (-self.count[i], i))
                free.sort(key=lambda number: (self.occupant_count(number), number))
            for i, number in zip(mine, free, strict=False):
                if self.algorithm == "lfu" and self.occupant_count(number) > self.count[i]:
                    break
                moves.append((i, number, self.slots[number]["id"]))
                self.slots[number] |= {"id": i, "time": self.clock}
        return moves

    def occupant_count(self, number: int) -> int:
        occupant = self.slots[number]["id"]
        return -1 if occupant < 0 else self.count[occupant]


def moves_of(admission: Admission) -> list[tuple[int, int, int]]:
    columns = (admission.inserted_ids, admission.inserted_slots, admission.evicted_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_set_of_the_worked_values():
    case = CASES["set_hash"]
    ids = np.asarray(case["ids"])
    for column, num_sets in enumerate(case["num_sets"]):
        assert set_of(ids, num_sets).tolist() == [row[column] for row in case["sets"]]


def test_lru_trace():
    case = CASES["lru_trace"]
    cache = SetAssociativeCache(
        case["num_sets"], num_ways=case["num_ways"], num_ids=case["num_ids"]
    )
    totals = np.zeros(6, int)
    for batch, expected in zip(case["batches"], case["steps"], strict=True):
        admission = cache.admit(np.asarray(batch))
        totals += admission.counts[:6]
        assert admission.locations.tolist() == expected["locations"]
        assert [i for i in admission.evicted_ids.tolist() if i >= 0] == expected["evicted_ids"]
        assert totals.tolist() == expected["totals"]
    assert cache.tags.reshape(2, 4).tolist() == case["tags"]


batches = st.lists(
    st.tuples(st.lists(st.integers(-2, NUM_IDS + 1), max_size=25), st.booleans(), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow_rows("lru")
@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
@settings(max_examples=150, deadline=None)
@example(batches=[([], False, False), ([-1, 7], False, False)], num_sets=2, num_ways=2, num_ids=0)
@given(
    batches=batches,
    num_sets=st.integers(1, 3),
    num_ways=st.integers(1, 4),
    num_ids=st.just(NUM_IDS),
)
def test_admission_equals_the_simulation(algorithm, batches, num_sets, num_ways, num_ids):
    cache = SetAssociativeCache(num_sets, num_ways=num_ways, algorithm=algorithm, num_ids=num_ids)
    dumb = DumbCache(num_sets, num_ways, algorithm, num_ids)
    outstanding = []
    for ids, lock, release in batches:
        before = {slot["id"] for slot in dumb.slots}
        admission = cache.admit(np.asarray(ids, np.int64), lock=lock)
        locations, moves = dumb.admit(ids, lock)
        assert admission.locations.tolist() == locations
        assert moves_of(admission) == moves
        assert cache.tags.tolist() == [slot["id"] for slot in dumb.slots]
        assert cache.find(np.asarray(ids, np.int64)).tolist() == locations
        resident = [
            (entry["id"], slot) for slot, entry in enumerate(dumb.slots) if entry["id"] >= 0
        ]
        assert list(zip(*cache.resident(), strict=True)) == resident

        asked = {i for i in ids if 0 <= i < num_ids}
        served_by_store = [
            i for i, location in zip(ids, locations, strict=True) if location < 0 and i in asked
        ]
        assert admission.missed_ids.tolist() == sorted(asked - before)
        assert admission.counts._asdict() == {
            "calls": 1,
            "requested_ids": len(ids),
            "unique_ids": len({i if i in asked else NUM_IDS for i in ids}),
            "unique_misses": len(asked - before),
            "unique_conflict_misses": len(set(served_by_store)),
            "conflict_misses": len(served_by_store),
            "unique_hits": len(asked & before),
        }
        if lock:
            outstanding.append(locations)
        if release and outstanding:
            released = outstanding.pop(0)
            cache.unlock(np.asarray(released, np.int64))
            for number in set(released) - {-1}:
                dumb.slots[number]["locks"] -= 1
    if cache.counts is not None:
        assert cache.counts.tolist() == [dumb.count[i] for i in range(num_ids)]


def test_large_batches_are_found_where_they_were_put():
    ids = np.random.default_rng(0).permutation(20_000)[:10_000]
    cache = SetAssociativeCache(300, num_ways=32, num_ids=20_000)
    locations = cache.admit(ids).locations
    there = locations >= 0
    assert_array_equal(cache.tags[locations[there]], ids[there])
    assert_array_equal(cache.find(ids), locations)
    assert there.sum() == (cache.tags >= 0).sum() > 8192


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_a_reset_cache_is_as_new(algorithm):
    used = SetAssociativeCache(3, num_ways=4, algorithm=algorithm, num_ids=60)
    used.admit(np.arange(50))
    used.reset()
    new = SetAssociativeCache(3, num_ways=4, algorithm=algorithm, num_ids=60)
    for ids in np.random.default_rng(1).integers(0, 60, (6, 20)):
        assert moves_of(used.admit(ids)) == moves_of(new.admit(ids))


def test_a_refused_unlock_or_reset_changes_nothing():
    cache = SetAssociativeCache(2, num_ways=2, num_ids=10)
    cache.admit(np.array([1]), lock=True)
    slot = cache.find(np.array([1]))
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(np.arange(4))
    with pytest.raises(ValueError, match="cannot reset a cache with 1 locked slots"):
        cache.reset()
    assert_array_equal(cache.find(np.array([1])), slot)
    cache.unlock(slot)
