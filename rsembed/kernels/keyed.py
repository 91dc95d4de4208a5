"""Kernels for keys in plain JAX, which define their meaning: distinct entries, and a hash table of rows.

The table is one of open addressing with linear probing. A slot is empty, deleted, claimed, or holds a key and its row.
All keys of a call probe at the same time; of those that find the same free slot, the first in the call gets it, so
equal calls give equal tables. Few keys need many probes: the loop narrows to those still searching, so the work follows
the number of probes and not their maximum. Several tables of one size may lie one behind the other in the same arrays;
`Keys.table` says which of them a key is in, and no key leaves its own.

Source: the lanes, the hash and the claims by scatter-min follow the usual lock-free GPU tables (for example SlabHash
and WarpCore), with a minimum in place of the race; the hash ends in MurmurHash3's finaliser (Appleby).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped, UInt32

from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.reference import gather_rows
from rsembed.keys import Keys

EMPTY, DELETED = -1, -2
MAX_COUNT = 2**31 - 1
# A claim in flight is one of the lowest int32 values, plus the position of the claimant: the first one is the least.
CLAIM = -(2**31)
MIN_WIDTH = 2048

Distinct = tuple[
    tuple[Shaped[Array, " nnz"], ...],
    Int[Array, " nnz"],
    Int[Array, " nnz"],
    Int[Array, " owners_plus_1"],
    Int[Array, " nnz"],
]

Unique = tuple[Int[Array, " nnz"], Int[Array, " nnz"], Int[Array, " nnz"]]


def mix(high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """32 well-spread bits of a key."""
    h = low ^ (high * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def distinct(owners: Int[Array, " nnz"], lanes: Sequence[Shaped[Array, " nnz"]], num_owners: int) -> Distinct:
    """Distinct entries, sorted by owner and then by lanes, from a single stable sort.

    Returns: the lanes of every distinct entry (zeros behind the last one), the entry of every occurrence (`NO_ROW`
    without an owner), the first occurrence of every entry (`NO_ROW` behind the last one), and where each owner's
    entries begin, and how often every entry occurs (0 behind the last one).
    """
    owners = jnp.where((owners >= 0) & (owners < num_owners), owners, num_owners).astype(jnp.int32)
    occurrences = jnp.arange(owners.shape[0], dtype=jnp.int32)
    *keys, order = jax.lax.sort((owners, *lanes, occurrences), num_keys=1 + len(lanes), is_stable=True)
    differs = functools.reduce(operator.or_, [key[1:] != key[:-1] for key in keys])
    has_owner = keys[0] < num_owners
    is_first = jnp.ones(owners.shape, bool).at[1:].set(differs) & has_owner
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    entry_of = jnp.full(owners.shape, NO_ROW, jnp.int32).at[order].set(jnp.where(has_owner, number, NO_ROW))
    place = jnp.where(is_first, number, NO_ROW)
    sorted_lanes = tuple(jnp.zeros_like(lane).at[place].set(lane, mode="drop") for lane in keys[1:])
    first_of = jnp.full(owners.shape, NO_ROW, jnp.int32).at[place].set(order, mode="drop")
    counts = jnp.zeros(num_owners, jnp.int32).at[keys[0]].add(is_first.astype(jnp.int32), mode="drop")
    offsets = jnp.zeros(num_owners + 1, jnp.int32).at[1:].set(jnp.cumsum(counts, dtype=jnp.int32))
    num_occurrences = jnp.zeros(owners.shape, jnp.int32).at[entry_of].add(1, mode="drop")
    return sorted_lanes, entry_of, first_of, offsets, num_occurrences


def unique_keys(keys: Keys, occurrences: Int[Array, " nnz"]) -> Unique:
    """Distinct keys in the order of their first occurrence.

    The keys go into a table of positions made for this call alone: a stable sort of two lanes takes three times as
    long.

    Returns: which distinct key every key is, `NO_ROW` for padding; where each occurs first, `NO_ROW` behind the last
      one; and the sum of its `occurrences`, up to `MAX_COUNT`, 0 behind the last one.
    """
    num_keys = keys.low.shape[0]
    num_slots = 1 << (2 * max(num_keys, 1) - 1).bit_length()

    def probe(lane: Array, lanes: Lanes, positions: Array, places: Array, active: Array) -> tuple[Array, Array, Array]:
        is_free = active & (lane[places] == NO_ROW)
        lane = lane.at[jnp.where(is_free, places, num_slots)].min(positions, mode="drop")
        there = lane[places]  # copies of a key probe in step, so it was its first one that claimed the slot
        same = [lane[there] == own for lane, own in zip(keys.lanes, lanes, strict=True)]
        return lane, active & functools.reduce(operator.and_, same), there

    lane = jnp.full(num_slots, NO_ROW, jnp.int32) + varying_zero(keys.low, keys.is_key)
    high = keys.high if keys.table is None else keys.high ^ (keys.table.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    homes = (mix(high, keys.low) & jnp.uint32(num_slots - 1)).astype(jnp.int32)
    first = _probe_all(probe, lane, keys, homes, num_slots)[1]  # position at which every key occurs first
    is_first = first == jnp.arange(num_keys, dtype=jnp.int32)
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    entry_of = number.at[first].get(mode="fill", fill_value=NO_ROW)
    counts = jnp.zeros_like(entry_of).at[entry_of].add(occurrences, mode="drop")
    # A sum that does not fit wraps.
    return entry_of, compact(is_first, num_keys)[0], jnp.where(counts < 0, MAX_COUNT, counts)


def find_keys(
    lanes: UInt32[Array, "slots 2"], rows: Int[Array, " slots"], keys: Keys, num_tables: int = 1
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Int[Array, ""]]:
    """Slot and row of every key in its table, `NO_ROW` for absent keys and padding; and how many of them are absent.

    A key may occur several times.
    """

    def probe(zero: Array, own: Lanes, _: Array, places: Array, active: Array) -> tuple[Array, Array, Array]:
        found_rows, found = rows[places], lanes[places]
        high, low = own[-2:]
        is_hit = active & (found_rows >= 0) & (found[:, 0] == high) & (found[:, 1] == low)
        return zero, is_hit | (active & (found_rows == EMPTY)), jnp.where(is_hit, places, NO_ROW)

    size = rows.shape[0] // num_tables
    slots = _probe_all(probe, varying_zero(rows, keys.low), keys, _homes(keys, size), size)[1]
    num_absent = jnp.sum(keys.is_key & (slots == NO_ROW), dtype=jnp.int32)
    return slots, rows.at[slots].get(mode="fill", fill_value=NO_ROW), num_absent


def compact(mask: Bool[Array, " n"], size: int) -> tuple[Int[Array, " size"], Int[Array, ""]]:
    """Positions of the first `size` True entries, `NO_ROW` behind them; and how many there are."""
    counts = jnp.cumsum(mask, dtype=jnp.int32)
    places = jnp.searchsorted(counts, jnp.arange(1, size + 1, dtype=jnp.int32)).astype(jnp.int32)
    return jnp.where(places < mask.shape[0], places, NO_ROW), jnp.sum(mask, dtype=jnp.int32)


def ranks(
    marks: Bool[Array, " n"],
    table: Int[Array, " n"] | None,
    num_tables: int,
    tell_apart: Callable[..., Distinct] = distinct,
) -> tuple[Int[Array, " n"], Int[Array, " tables"]]:
    """Rank of each marked entry among those of its table, and the number of marked entries in each table."""
    if table is None:
        return jnp.cumsum(marks, dtype=jnp.int32) - 1, jnp.sum(marks, dtype=jnp.int32)[None]
    owners, places = jnp.where(marks, table, num_tables), jnp.arange(marks.shape[0], dtype=jnp.int32)
    _, entry_of, _, offsets, _ = tell_apart(owners, [places], num_owners=num_tables)  # places tell all entries apart
    return entry_of - offsets.at[table].get(mode="clip"), offsets[1:] - offsets[:-1]


def take_rows(
    free: Int[Array, " rows"],
    num_free: Int[Array, " tables"],
    wants: Bool[Array, " n"],
    table: Int[Array, " n"] | None = None,
) -> tuple[Int[Array, " n"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Free rows for the entries that want one, taken in order from the top of their table's stack of free rows.

    The stacks of several tables lie one behind the other, as their rows do. What stands in them counts from the first
    row of the table.

    Returns: the rows, `NO_ROW` for the others; how many are left in each stack; and for how many there was none.
    """
    num_tables = num_free.shape[0]
    rank, num_wanted = ranks(wants, table, num_tables)
    left, first = num_free, jnp.int32(0)
    if table is not None:
        left, first = num_free.at[table].get(mode="clip"), table * (free.shape[0] // num_tables)
    gets_row = wants & (rank < left)
    rows = free.at[jnp.where(gets_row, first + left - 1 - rank, NO_ROW)].get(mode="fill", fill_value=NO_ROW)
    num_given = jnp.minimum(num_wanted, num_free)
    return jnp.where(gets_row, first + rows, NO_ROW), num_free - num_given, num_wanted - num_given


def insert_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    num_keys: Int[Array, " tables"],
    num_deleted: Int[Array, " tables"],
    keys: Keys,
    new_rows: Int[Array, " nnz"],
) -> tuple[UInt32[Array, "slots 2"], Int[Array, " slots"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Hash tables and their counts after distinct, absent keys are added; padding is skipped.

    Keys that would leave less than a quarter of a table's slots empty are left out.
    """
    num_slots, num_tables = rows.shape[0], num_keys.shape[0]
    size = num_slots // num_tables
    room, (rank, num_wanted) = size * 3 // 4 - num_keys - num_deleted, ranks(keys.is_key, keys.table, num_tables)
    keys = keys.only(rank < (room if keys.table is None else room.at[keys.table].get(mode="clip")))

    def probe(lane: Array, _: Lanes, positions: Array, places: Array, active: Array) -> tuple[Array, Array, Array]:
        state, claim = lane[places], CLAIM + positions
        is_free = active & ((state == EMPTY) | (state == DELETED))
        lane = lane.at[jnp.where(is_free, places, num_slots)].min(claim, mode="drop")
        is_won = is_free & (lane[places] == claim)
        return lane, is_won, places

    claimed, slots = _probe_all(probe, rows + varying_zero(rows, keys.low), keys, _homes(keys, size), size)
    was_deleted = rows.at[slots].get(mode="fill", fill_value=EMPTY) == DELETED
    reused = jnp.where(was_deleted, slots // size, num_tables)
    return (
        lanes.at[slots].set(jnp.stack([keys.high, keys.low], axis=1), mode="drop"),
        claimed.at[slots].set(new_rows, mode="drop"),
        num_keys + jnp.clip(num_wanted, 0, jnp.maximum(room, 0)),
        num_deleted.at[reused].add(-1, mode="drop"),
    )


def count_uses(
    last_step: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Last steps and counts of uses after `step` used `rows`, which may repeat; counts end at `MAX_COUNT`."""
    risen = counts.at[rows].add(occurrences, mode="drop")
    now = risen.at[rows].get(mode="fill", fill_value=0)
    risen = risen.at[rows].set(jnp.where(now < 0, MAX_COUNT, now), mode="drop")  # a sum that does not fit wraps
    return last_step.at[rows].set(step, mode="drop"), risen


def varying_zero(*arrays: Array) -> Int[Array, ""]:
    """A zero that varies over the same mesh axes as the arrays, as the carry of a loop in `shard_map` must."""
    first = [jnp.sum(x.reshape(-1)[:1].astype(jnp.int32), dtype=jnp.int32) for x in arrays]
    return sum(first, start=jnp.int32(0)) * 0


def _homes(keys: Keys, size: int) -> Int[Array, " nnz"]:
    """Slot at which each key begins its search, in tables of `size` slots."""
    homes = (mix(keys.high, keys.low) & jnp.uint32(size - 1)).astype(jnp.int32)
    return homes if keys.table is None else homes + keys.table * size


Lanes = Sequence[Array]
Probe = Callable[[Any, Lanes, Array, Array, Array], tuple[Any, Array, Array]]
"""`(state, lanes, positions, places, active) -> (state, is_done, results)`: looks at one slot for every key.

Lanes and positions in the call are those of the keys that still probe.
"""


def _probe_all(
    probe: Probe, state: PyTree, keys: Keys, homes: Int[Array, " nnz"], size: int
) -> tuple[Any, Int[Array, " nnz"]]:
    """Moves every key from its home, among the `size` slots of its table, from slot to slot until `probe` is done.

    Returns: the final state, which must vary as the keys do from the start; and the result of every key's last probe,
    `NO_ROW` for padding.
    """
    n = keys.low.shape[0]
    widths = [n]  # how many keys probe at a time: fewer and fewer of a large call
    while widths[-1] > MIN_WIDTH:
        widths.append(widths[-1] // 8)
    zero = varying_zero(state, keys.low, keys.is_key)
    lanes, positions, places = [*keys.lanes], jnp.arange(n, dtype=jnp.int32), homes + zero
    active, results = keys.is_key & (zero == 0), jnp.full(n, NO_ROW, jnp.int32)
    for width, next_width in itertools.pairwise([*widths, 0]):

        def is_wide(carry: tuple[PyTree, ...], next_width: int = next_width) -> Array:
            return jnp.sum(carry[2], dtype=jnp.int32) > next_width

        def probe_once(carry: PyTree, lanes: Lanes = lanes, positions: Array = positions) -> tuple[PyTree, ...]:
            state, places, active, found = carry
            state, is_done, result = probe(state, lanes, positions, places, active)
            found = jnp.where(is_done, result, found)
            return state, (places & -size) | ((places + 1) & (size - 1)), active & ~is_done, found

        start = (state, places, active, jnp.full(width, NO_ROW, jnp.int32) + zero)
        state, places, still_active, found = jax.lax.while_loop(is_wide, probe_once, start)
        if width == n:
            results = found
        else:
            is_done = active & ~still_active
            results = results.at[jnp.where(is_done, positions, n)].set(found, mode="drop")
        if next_width:
            kept, _ = compact(still_active, next_width)
            *lanes, positions, places = gather_rows((*lanes, positions, places), kept)
            active = kept != NO_ROW
    return state, results
