"""Kernels for keys in plain JAX: distinct entries, and hash tables from keys to rows.

Every other implementation of a kernel must return the same results as the plain JAX function.

The hash table uses open addressing with linear probing. A slot is empty, deleted, claimed, or holds
a key and its row. All keys of a call probe in parallel. If several keys reach the same free slot,
the first key of the call gets the slot, so equal calls return equal tables. Only a few keys need
many probes. The probe loop continues with the unfinished keys only, so the work is proportional to
the total number of probes of all keys.

Several tables of equal size can be concatenated in the same arrays. `Keys.table` is the table of
each key, and a key only probes the slots of its table.

A lane is an array with one 32-bit word per entry. A key has two lanes, its high and its low half,
and in a call for several tables also a lane with its table.

Source: lock-free hash tables on GPUs, for example SlabHash and WarpCore. In lock-free hash tables,
  keys race for a slot. In this file, a scatter-min selects the key that gets the slot. The hash of
  a key ends with the finaliser of MurmurHash3 (Appleby).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped, UInt32

from rsembed.kernels.contract import NO_ROW, int32_range, is_between
from rsembed.kernels.reference import gather_rows
from rsembed.keys import Keys

EMPTY = -1
DELETED = -2
MAX_COUNT = 2**31 - 1
CLAIM = -(2**31)
"""A claimed slot holds `CLAIM` plus the position of the claiming key in the call.

If several keys claim a slot, the first key of the call has the smallest claim and gets the slot.
"""
MIN_WIDTH = 2048
"""`_probe_all` stops shrinking its arrays of unfinished keys at `MIN_WIDTH` or fewer keys."""

Distinct = tuple[
    tuple[Shaped[Array, " nnz"], ...],
    Int[Array, " nnz"],
    Int[Array, " nnz"],
    Int[Array, " owners_plus_1"],
    Int[Array, " nnz"],
]

Unique = tuple[
    Int[Array, " nnz"],
    Int[Array, " nnz"],
    Int[Array, " nnz"],
]

KeyRows = tuple[
    Int[Array, " nnz"],
    Int[Array, " nnz"],
    Int[Array, ""],
]
"""Slot and row of every key, and the number of keys that are not in their tables."""

TakenRows = tuple[
    Int[Array, " n"],
    Int[Array, " tables"],
    Int[Array, " tables"],
]
"""Row of every entry. For each table: number of free rows, and number of entries without a row."""

Positions = tuple[Int[Array, " size"], Int[Array, ""]]
"""Positions of the first True entries, padded with `NO_ROW`, and the number of True entries."""

HashTables = tuple[
    UInt32[Array, "slots 2"],
    Int[Array, " slots"],
    Int[Array, " tables"],
    Int[Array, " tables"],
]
"""Keys and rows of the slots. For each table: number of keys, and number of deleted slots."""


def mix(
    high: UInt32[Array, "*shape"],
    low: UInt32[Array, "*shape"],
) -> UInt32[Array, "*shape"]:
    """32-bit hash of a 64-bit key."""
    bits = low ^ (high * jnp.uint32(0x9E3779B1))
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def distinct(
    owners: Int[Array, " nnz"],
    lanes: Sequence[Shaped[Array, " nnz"]],
    num_owners: int,
) -> Distinct:
    """Distinct entries, sorted by owner and then by `lanes`, from a single stable sort.

    Args:
      owners: owner of every occurrence. An occurrence with an owner outside `[0, num_owners)` is
        padding.
      lanes: arrays of 32-bit words, most significant first. Two occurrences with the same owner and
        the same words belong to the same entry.
      num_owners: number of owners.

    Returns: `(lanes, entry_of, first_of, offsets, counts)`. `lanes` has the lanes of the distinct
      entries. For each occurrence, `entry_of` has the index of its entry, or `NO_ROW` if the
      occurrence is padding. For each entry, `first_of` has the position of its first occurrence,
      and `counts` has the number of its occurrences. The entries of owner `d` begin at `offsets[d]`
      and end before `offsets[d + 1]`. After the last entry, `first_of` is padded with `NO_ROW`, and
      `lanes` and `counts` with zeros.
    """
    num_occurrences = owners.shape[0]
    is_owned = is_between(owners, 0, num_owners)
    owners = jnp.where(is_owned, owners, num_owners).astype(jnp.int32)
    positions = int32_range(num_occurrences)
    operands = (owners, *lanes, positions)
    in_order = jax.lax.sort(operands, num_keys=1 + len(lanes), is_stable=True)
    sorted_owners, *lanes_in_order, order = in_order
    differs = sorted_owners[1:] != sorted_owners[:-1]
    for lane in lanes_in_order:
        differs = differs | (lane[1:] != lane[:-1])
    has_owner = sorted_owners < num_owners
    starts_entry = jnp.ones(owners.shape, bool)
    starts_entry = starts_entry.at[1:].set(differs)
    is_first = starts_entry & has_owner
    entries = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    no_rows = jnp.full(owners.shape, NO_ROW, jnp.int32)
    sorted_entry_of = jnp.where(has_owner, entries, NO_ROW)
    entry_of = no_rows.at[order].set(sorted_entry_of)
    first_entries = jnp.where(is_first, entries, NO_ROW)
    sorted_lanes = []
    for lane in lanes_in_order:
        zeros = jnp.zeros_like(lane)
        entry_lane = zeros.at[first_entries].set(lane, mode="drop")
        sorted_lanes.append(entry_lane)
    first_of = no_rows.at[first_entries].set(order, mode="drop")
    num_entries = jnp.zeros(num_owners, jnp.int32)
    is_counted = is_first.astype(jnp.int32)
    num_entries = num_entries.at[sorted_owners].add(is_counted, mode="drop")
    ends = jnp.cumsum(num_entries, dtype=jnp.int32)
    offsets = jnp.zeros(num_owners + 1, jnp.int32)
    offsets = offsets.at[1:].set(ends)
    counts = jnp.zeros(num_occurrences, jnp.int32)
    counts = counts.at[entry_of].add(1, mode="drop")
    return tuple(sorted_lanes), entry_of, first_of, offsets, counts


def unique_keys(keys: Keys, occurrences: Int[Array, " nnz"]) -> Unique:
    """Distinct keys in the order of their first occurrence.

    The positions of the keys are stored in a hash table that exists only during this call. A stable
    sort of the keys would take three times as long as the hash table.

    Args:
      keys: keys and padding, in any order.
      occurrences: number of occurrences that each key stands for.

    Returns: `(entry_of, first_of, counts)`. For each key, `entry_of` has its index among the
      distinct keys, or `NO_ROW` if the key is padding. For each distinct key, `first_of` has the
      position of its first occurrence, and `counts` has the sum of its `occurrences`, at most
      `MAX_COUNT`. After the last distinct key, `first_of` is padded with `NO_ROW`, and `counts`
      with zeros.
    """
    num_keys = keys.low.shape[0]
    least_slots = 2 * max(num_keys, 1)
    num_slots = 1 << (least_slots - 1).bit_length()

    def probe(
        owner: Array,
        lanes: Lanes,
        positions: Array,
        slots: Array,
        active: Array,
    ) -> tuple[Array, Array, Array]:
        is_free = active & (owner[slots] == NO_ROW)
        claimed = jnp.where(is_free, slots, num_slots)
        owner = owner.at[claimed].min(positions, mode="drop")
        # Equal keys probe the same slot at the same time, so of several equal keys only the first
        # can claim a slot.
        first = owner[slots]
        is_same = active
        for lane, key_lane in zip(keys.lanes, lanes, strict=True):
            is_same &= lane[first] == key_lane
        return owner, is_same, first

    owner = jnp.full(num_slots, NO_ROW, jnp.int32)
    hashed_keys = keys
    if keys.table is not None:
        table_bits = keys.table.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
        hashed_keys = keys._replace(high=keys.high ^ table_bits, table=None)
    homes = _homes(hashed_keys, num_slots)
    _, first = _probe_all(probe, owner, keys, homes, num_slots)
    is_first = first == int32_range(num_keys)
    entries = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    entry_of = entries.at[first].get(mode="fill", fill_value=NO_ROW)
    counts = jnp.zeros_like(entry_of)
    counts = counts.at[entry_of].add(occurrences, mode="drop")
    counts = jnp.where(counts < 0, MAX_COUNT, counts)  # An int32 sum that overflows is negative.
    first_of, _ = compact(is_first, num_keys)
    return entry_of, first_of, counts


def find_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    keys: Keys,
    num_tables: int = 1,
) -> KeyRows:
    """Slot and row of every key in its table, and the number of keys that are not in their tables.

    Padding and keys that are not in their tables have slot and row `NO_ROW`. A key may occur
    several times.
    """

    def probe(
        zero: Array,
        key_lanes: Lanes,
        _: Array,
        slots: Array,
        active: Array,
    ) -> tuple[Array, Array, Array]:
        slot_rows = rows[slots]
        slot_lanes = lanes[slots]
        high, low = key_lanes[-2:]
        is_equal = (slot_lanes[:, 0] == high) & (slot_lanes[:, 1] == low)
        is_hit = active & (slot_rows >= 0) & is_equal
        is_absent = active & (slot_rows == EMPTY)
        is_done = is_hit | is_absent
        hits = jnp.where(is_hit, slots, NO_ROW)
        return zero, is_done, hits

    size = rows.shape[0] // num_tables
    # The results of `probe` vary over the mesh axes of `rows`, too.
    zero = varying_zero(rows)
    homes = _homes(keys, size)
    _, slots = _probe_all(probe, zero, keys, homes, size)
    is_absent = keys.is_key & (slots == NO_ROW)
    num_absent = jnp.sum(is_absent, dtype=jnp.int32)
    key_rows = rows.at[slots].get(mode="fill", fill_value=NO_ROW)
    return slots, key_rows, num_absent


def compact(mask: Bool[Array, " n"], size: int) -> Positions:
    """Positions of the first `size` True entries, and the number of all True entries.

    The positions are padded with `NO_ROW`.
    """
    counts = jnp.cumsum(mask, dtype=jnp.int32)
    ranks = jnp.arange(1, size + 1, dtype=jnp.int32)
    positions = jnp.searchsorted(counts, ranks).astype(jnp.int32)
    is_position = positions < mask.shape[0]
    positions = jnp.where(is_position, positions, NO_ROW)
    num_true = jnp.sum(mask, dtype=jnp.int32)
    return positions, num_true


def ranks(
    marks: Bool[Array, " n"],
    table: Int[Array, " n"] | None,
    num_tables: int,
    tell_apart: Callable[..., Distinct] = distinct,
    arrival: Int[Array, " n"] | None = None,
) -> tuple[Int[Array, " n"], Int[Array, " tables"]]:
    """Rank of each marked entry, and the number of marked entries of each table.

    The rank of a marked entry is the number of marked entries before it that have the same table.
    Entries without a mark have meaningless ranks.

    Args:
      marks: whether each entry is marked.
      table: index of the table of each entry, or None if there is one table.
      num_tables: number of tables.
      tell_apart: implementation of `distinct`, which sorts the entries by table.
      arrival: one number per entry, which defines the order of the entries: the entry with the
        smallest number is the first. The numbers of marked entries must differ. If `arrival` is
        None, the entries are in the order of `marks`.
    """
    if table is None and arrival is None:
        rank = jnp.cumsum(marks, dtype=jnp.int32) - 1
        num_marked = jnp.sum(marks, dtype=jnp.int32)
        return rank, num_marked[None]
    if table is None:
        table = jnp.zeros_like(marks, jnp.int32)
    owners = jnp.where(marks, table, num_tables)
    # The only lane of an entry is its number in `arrival` or its position. So all marked entries
    # are distinct, and `tell_apart` sorts the entries of each table by this number.
    order = int32_range(marks.shape[0]) if arrival is None else arrival
    _, entry_of, _, offsets, _ = tell_apart(owners, [order], num_owners=num_tables)
    rank = entry_of - offsets.at[table].get(mode="clip")
    return rank, offsets[1:] - offsets[:-1]


def take_rows(
    free: Int[Array, " rows"],
    num_free: Int[Array, " tables"],
    wants: Bool[Array, " n"],
    table: Int[Array, " n"] | None = None,
) -> TakenRows:
    """For each entry that needs a row, takes one free row of the entry's table.

    Args:
      free: for each table, a list of its free rows, as row numbers within the table. The lists are
        in the order of the tables, and each list has one slot per row of its table. The first
        `num_free` slots of a list hold the free rows, and rows are taken from the end of these
        slots.
      num_free: number of free rows of each table.
      wants: whether each entry needs a row. If a table has too few free rows, the first entries of
        the table get the free rows.
      table: table of each entry. None, the default: there is one table.

    Returns: `(rows, num_left, num_without)`. `rows` has the row of each entry, numbered
      consecutively over all tables, or `NO_ROW` if the entry gets no row. For each table,
      `num_left` is the number of rows that remain free, and `num_without` is the number of entries
      that needed a row but got none.
    """
    num_tables = num_free.shape[0]
    rank, num_wanted = ranks(wants, table, num_tables)
    height = num_free
    first = jnp.int32(0)
    if table is not None:
        height = num_free.at[table].get(mode="clip")
        rows_per_table = free.shape[0] // num_tables
        first = table * rows_per_table
    gets_row = wants & (rank < height)
    from_end = first + height - 1 - rank
    positions = jnp.where(gets_row, from_end, NO_ROW)
    rows = free.at[positions].get(mode="fill", fill_value=NO_ROW)
    num_taken = jnp.minimum(num_wanted, num_free)
    rows = jnp.where(gets_row, first + rows, NO_ROW)
    return rows, num_free - num_taken, num_wanted - num_taken


def insert_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    num_keys: Int[Array, " tables"],
    num_deleted: Int[Array, " tables"],
    keys: Keys,
    new_rows: Int[Array, " nnz"],
) -> HashTables:
    """Inserts distinct new keys into their tables, and returns the new tables and counts.

    None of the keys may be in its table already. Padding is skipped. A key is not inserted if the
    insertion would leave less than a quarter of its table's slots empty.

    Args:
      lanes: high and low half of the key in every slot.
      rows: row in every slot, or `EMPTY` or `DELETED`.
      num_keys: number of keys in each table.
      num_deleted: number of deleted slots in each table.
      keys: keys to add.
      new_rows: row of each key to add.
    """
    num_slots = rows.shape[0]
    num_tables = num_keys.shape[0]
    size = num_slots // num_tables
    room = size * 3 // 4 - num_keys - num_deleted
    rank, num_wanted = ranks(keys.is_key, keys.table, num_tables)
    key_room = room
    if keys.table is not None:
        key_room = room.at[keys.table].get(mode="clip")
    keys = keys.only(rank < key_room)

    def probe(
        states: Array,
        _: Lanes,
        positions: Array,
        slots: Array,
        active: Array,
    ) -> tuple[Array, Array, Array]:
        state = states[slots]
        claim = CLAIM + positions
        is_unused = (state == EMPTY) | (state == DELETED)
        is_free = active & is_unused
        claimed = jnp.where(is_free, slots, num_slots)
        states = states.at[claimed].min(claim, mode="drop")
        is_won = is_free & (states[slots] == claim)
        return states, is_won, slots

    homes = _homes(keys, size)
    claimed_rows, slots = _probe_all(probe, rows, keys, homes, size)
    old_states = rows.at[slots].get(mode="fill", fill_value=EMPTY)
    was_deleted = old_states == DELETED
    reused = jnp.where(was_deleted, slots // size, num_tables)
    key_lanes = jnp.stack([keys.high, keys.low], axis=1)
    num_new = jnp.clip(num_wanted, 0, jnp.maximum(room, 0))
    return (
        lanes.at[slots].set(key_lanes, mode="drop"),
        claimed_rows.at[slots].set(new_rows, mode="drop"),
        num_keys + num_new,
        num_deleted.at[reused].add(-1, mode="drop"),
    )


def count_uses(
    last_step: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Records that step `step` uses `rows`, and returns the new `last_step` and `counts`.

    `last_step` has the step in which each row was last used. `counts` has the number of uses of
    each row. Every use of a row adds its `occurrences` to the count of the row, up to `MAX_COUNT`.
    `rows` may repeat.
    """
    counts = counts.at[rows].add(occurrences, mode="drop")
    sums = counts.at[rows].get(mode="fill", fill_value=0)
    sums = jnp.where(sums < 0, MAX_COUNT, sums)  # An int32 sum that overflows is negative.
    counts = counts.at[rows].set(sums, mode="drop")
    last_step = last_step.at[rows].set(step, mode="drop")
    return last_step, counts


def varying_zero(*arrays: Array) -> Int[Array, ""]:
    """Zero that varies over the same mesh axes as the arrays.

    In `shard_map`, the first carry of a loop must vary over the mesh axes of later carries. Adding
    `varying_zero(*arrays)` to the first carry makes the carry vary over the mesh axes of `arrays`.
    """
    total = jnp.int32(0)
    for array in arrays:
        first = array.reshape(-1)[:1]
        total += jnp.sum(first.astype(jnp.int32), dtype=jnp.int32)
    return total * 0


def _homes(keys: Keys, size: int) -> Int[Array, " nnz"]:
    """Slot where the search for each key starts, in tables of `size` slots."""
    homes = mix(keys.high, keys.low) & jnp.uint32(size - 1)
    homes = homes.astype(jnp.int32)
    if keys.table is None:
        return homes
    return homes + keys.table * size


Lanes = Sequence[Array]
Probe = Callable[[Array, Lanes, Array, Array, Array], tuple[Array, Array, Array]]
"""Function `(state, lanes, positions, slots, active) -> (state, is_done, results)`.

A `Probe` function checks one slot for each key that it gets. It gets all keys that `_probe_all`
searches, or only some of these keys. For each key that the function gets, `lanes` has the lanes,
`positions` the index among all keys, and `slots` the slot to check. `active` is False for keys that
are already done.
"""


def _probe_all(
    probe: Probe,
    state: Array,
    keys: Keys,
    homes: Int[Array, " nnz"],
    size: int,
) -> tuple[Array, Int[Array, " nnz"]]:
    """Checks slot after slot for every key, until `probe` marks the key as done.

    Args:
      probe: function that checks one slot for every key, see `Probe`.
      state: int32 array that `probe` reads and changes.
      keys: keys and padding.
      homes: slot where the search for each key starts.
      size: number of slots of a table, a power of two. After the last slot of a table, the search
        continues at the table's first slot.

    Returns: the final state, and the result of the last probe of every key, `NO_ROW` for padding.
    """
    num_keys = keys.low.shape[0]
    # Each loop probes arrays of `width` keys. The loop ends when the unfinished keys fit in arrays
    # of the next width, which is smaller.
    widths = [num_keys]
    while widths[-1] > MIN_WIDTH:
        widths.append(widths[-1] // 8)
    zero = varying_zero(state, keys.low, keys.is_key)
    state = state + zero
    lanes = [*keys.lanes]
    positions = int32_range(num_keys)
    slots = homes + zero
    active = keys.is_key & (zero == 0)
    results = jnp.full(num_keys, NO_ROW, jnp.int32)
    for width, next_width in itertools.pairwise([*widths, 0]):
        no_results = jnp.full(width, NO_ROW, jnp.int32) + zero
        search = (state, slots, active, no_results)
        goes_on = functools.partial(_searches_more_than, next_width)
        step = functools.partial(_probe_once, probe, lanes, positions, size)
        search = jax.lax.while_loop(goes_on, step, search)
        state, slots, still_active, last_results = search
        if width == num_keys:
            results = last_results
        else:
            is_done = active & ~still_active
            done = jnp.where(is_done, positions, num_keys)
            results = results.at[done].set(last_results, mode="drop")
        if next_width:
            kept, _ = compact(still_active, next_width)
            arrays = (*lanes, positions, slots)
            *lanes, positions, slots = gather_rows(arrays, kept)
            active = kept != NO_ROW
    return state, results


Search = tuple[Array, Array, Array, Array]
"""State of `probe`, and for each key: next slot, whether the search continues, and last result."""


def _searches_more_than(limit: int, search: Search) -> Bool[Array, ""]:
    _, _, active, _ = search
    return jnp.sum(active, dtype=jnp.int32) > limit


def _probe_once(
    probe: Probe,
    lanes: Lanes,
    positions: Array,
    size: int,
    search: Search,
) -> Search:
    """Probes one slot for every key, and moves the search to the next slot of the key's table."""
    state, slots, active, results = search
    state, is_done, probed = probe(state, lanes, positions, slots, active)
    results = jnp.where(is_done, probed, results)
    table_start = slots & -size
    next_in_table = (slots + 1) & (size - 1)
    next_slots = table_start | next_in_table
    still_active = active & ~is_done
    return state, next_slots, still_active, results
