"""Map from keys to rows: assigns rows to new keys, finds them, and releases them for other keys.

All functions work inside `jit`. Rows are found by open addressing with linear probing. At most half
of the slots hold keys, and at most another quarter are deleted, so every search reaches an empty
slot. `kernels/keyed.py` defines the content of a slot and the choice of a slot for a key.

Several tables can be concatenated in every array. Row indices in arguments and results are global.
Row indices in the arrays are relative to their table. Each table is padded to the size of the
largest one, and its padding rows are never assigned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, CallGradients
from rsembed.kernels.keyed import DELETED, EMPTY, MAX_COUNT, mix, ranks, varying_zero
from rsembed.keys import Keys

Eviction = Literal["lru", "lfu"]
FREE = -1
REBUILD_BLOCK = 16_384
SIGN_BIT = 1 << 31
ROW_FACTOR = 0x9E3779B9  # The factor is odd, so different rows of a key have different numbers.


class HashTable(NamedTuple):
    """Hash tables of equal size, concatenated. Each has a power of two of slots.

    Attributes:
      keys: high and low 32 bits (lanes) of the key in every slot.
      rows: row of the key in every slot, or `EMPTY` or `DELETED`.
      num_keys: number of slots with a key in each table.
      num_deleted: number of deleted slots in each table.
    """

    keys: UInt32[Array, "slots 2"]
    rows: Int[Array, " slots"]
    num_keys: Int[Array, " tables"]
    num_deleted: Int[Array, " tables"]

    @staticmethod
    def empty(max_keys: int, num_tables: int = 1) -> HashTable:
        """Empty hash tables for at most `max_keys` keys each."""
        num_slots = num_tables << (2 * max(max_keys, 1) - 1).bit_length()
        return HashTable(
            keys=api.allocate((num_slots, 2), jnp.uint32, 0),
            rows=api.allocate((num_slots,), jnp.int32, EMPTY),
            num_keys=jnp.zeros(num_tables, jnp.int32),
            num_deleted=jnp.zeros(num_tables, jnp.int32),
        )

    def insert(self, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
        """Adds `keys`, which must be distinct and absent, and returns the new hash tables.

        Padding is skipped.

        The caller must not add more keys than `max_keys` of `empty`. A key is left out if it would
        leave less than a quarter of the slots empty.
        """
        return HashTable(*api.insert_keys(*self, keys, rows))

    def remove(self, keys: Keys) -> HashTable:
        """Removes `keys`, which must be distinct, and returns the new hash tables.

        Absent keys and padding are skipped.

        A table is rebuilt when more than a quarter of its slots are deleted.
        """
        num_tables = self.num_keys.shape[0]
        slots, _, _ = api.find_keys(self.keys, self.rows, keys, num_tables)
        num_removed = counts_of(slots != NO_ROW, keys.table, num_tables)
        deleted = jnp.full_like(slots, DELETED)
        (rows,) = api.scatter_rows((self.rows,), slots, (deleted,))
        smaller = self._replace(
            rows=rows,
            num_keys=self.num_keys - num_removed,
            num_deleted=self.num_deleted + num_removed,
        )
        slots_per_table = rows.shape[0] // num_tables
        is_crowded = smaller.num_deleted > slots_per_table // 4
        return jax.lax.cond(
            jnp.any(is_crowded), lambda: smaller._rebuilt(is_crowded), lambda: smaller
        )

    def _rebuilt(self, is_rebuilt: Bool[Array, " tables"]) -> HashTable:
        """Rebuilds the tables marked in `is_rebuilt`, without their deleted slots."""
        slots_per_table = self.rows.shape[0] // self.num_keys.shape[0]
        is_moved = jnp.repeat(is_rebuilt, slots_per_table)
        kept = HashTable(
            keys=jnp.where(is_moved[:, None], jnp.uint32(0), self.keys),
            rows=jnp.where(is_moved, EMPTY, self.rows),
            num_keys=jnp.where(is_rebuilt, 0, self.num_keys),
            num_deleted=jnp.where(is_rebuilt, 0, self.num_deleted),
        )
        return kept.with_keys_of(self, is_moved)

    def with_keys_of(self, other: HashTable, marks: Bool[Array, " slots"]) -> HashTable:
        """Adds the keys in marked slots of `other`, and returns the new hash tables."""
        num_slots = other.rows.shape[0]
        num_tables = other.num_keys.shape[0]
        slots_per_table = num_slots // num_tables
        # Blocks without a marked slot are skipped, because a rebuild moves the keys of only a few
        # tables.
        block_size = math.gcd(num_slots, REBUILD_BLOCK)
        has_mark = jnp.any(marks.reshape(-1, block_size), axis=1)
        blocks, num_blocks = api.compact(has_mark, num_slots // block_size)

        def add_block(i: Array, hashed: HashTable) -> HashTable:
            first = blocks[i] * block_size
            rows = jax.lax.dynamic_slice_in_dim(other.rows, first, block_size)
            lanes = jax.lax.dynamic_slice_in_dim(other.keys, first, block_size)
            is_marked = jax.lax.dynamic_slice_in_dim(marks, first, block_size)
            table = None
            if num_tables > 1:
                slots = first + jnp.arange(block_size, dtype=jnp.int32)
                table = slots // slots_per_table
            is_key = is_marked & (rows >= 0)
            return hashed.insert(Keys(lanes[:, 0], lanes[:, 1], is_key, table), rows)

        return jax.lax.fori_loop(0, num_blocks, add_block, self)


def counts_of(
    marks: Bool[Array, " n"], table: Int[Array, " n"] | None, num_tables: int
) -> Int[Array, " tables"]:
    """Number of marked entries of each table.

    Args:
      marks: mask of the entries to count.
      table: index of the table of each entry. None if there is one table.
      num_tables: number of tables.
    """
    if table is None:
        return jnp.sum(marks, dtype=jnp.int32)[None]
    # Unmarked entries get index `num_tables`, which the sum drops.
    counted_table = jnp.where(marks, table, num_tables)
    return jnp.zeros(num_tables, jnp.int32).at[counted_table].add(1, mode="drop")


class RowMap(NamedTuple):
    """Map from keys to rows and back. Shards are concatenated along the leading axis of all leaves.

    Attributes:
      hashed: hash tables with the row of every key.
      high: upper 32 bits of the key of every row.
      low: lower 32 bits of the key of every row.
      last_step: last step that used the row. `FREE` if the row has no key.
      counts: number of occurrences of the row's key in training, at most `MAX_COUNT`.
      free: stack of free rows, one for each table. The first `num_free` entries of a stack are free
        rows, and the last of these is assigned next. Entries after the free rows are undefined.
      num_free: number of free rows of each table.
      signature: number computed from all pairs of key and row, for each table. Maps with the same
        keys in the same rows have equal signatures.
    """

    hashed: HashTable
    high: UInt32[Array, " rows"]
    low: UInt32[Array, " rows"]
    last_step: Int[Array, " rows"]
    counts: Int[Array, " rows"]
    free: Int[Array, " rows"]
    num_free: Int[Array, " tables"]
    signature: UInt32[Array, " tables"]

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return self.num_free.shape[0]

    @property
    def rows_per_table(self) -> int:
        """Number of rows of each table, padding included."""
        return self.last_step.shape[0] // self.num_tables


def empty(*capacities: int) -> RowMap:
    """A map without keys, with one table for each capacity. Rows are assigned as 0, 1, 2, ...

    Args:
      capacities: number of rows of each table.
    """
    num_tables = len(capacities)
    rows_per_table = max(capacities)
    shape = (rows_per_table * num_tables,)
    num_free = jnp.asarray(capacities, jnp.int32)
    # The end of the stack of free rows is assigned first, so the stack counts down to row 0.
    positions = jnp.arange(rows_per_table, dtype=jnp.int32)
    free = jnp.maximum(num_free[:, None] - 1 - positions[None], 0)
    return RowMap(
        hashed=HashTable.empty(rows_per_table, num_tables),
        high=api.allocate(shape, jnp.uint32, 0),
        low=api.allocate(shape, jnp.uint32, 0),
        last_step=api.allocate(shape, jnp.int32, FREE),
        counts=api.allocate(shape, jnp.int32, 0),
        free=free.reshape(-1),
        num_free=num_free,
        signature=jnp.zeros(num_tables, jnp.uint32),
    )


def find(row_map: RowMap, keys: Keys) -> Int[Array, " nnz"]:
    """Row of each key. `NO_ROW` for unknown keys and padding."""
    rows, _ = search(row_map, keys)
    return rows


def search(row_map: RowMap, keys: Keys) -> tuple[Int[Array, " nnz"], Int[Array, ""]]:
    """Row of each key as `find` returns it, and the number of keys without one."""
    hashed = row_map.hashed
    _, rows_in_table, num_absent = api.find_keys(hashed.keys, hashed.rows, keys, row_map.num_tables)
    return _global_rows(row_map, rows_in_table, keys.table), num_absent


def _global_rows(
    row_map: RowMap, rows_in_table: Int[Array, " nnz"], table: Array | None
) -> Int[Array, " nnz"]:
    """Row numbers over all tables, from row numbers in single tables."""
    if table is None:
        return rows_in_table
    rows = rows_in_table + row_map.rows_per_table * table
    return jnp.where(rows_in_table == NO_ROW, NO_ROW, rows)


def _rows_in_table(
    row_map: RowMap, rows: Int[Array, " nnz"], table: Array | None
) -> Int[Array, " nnz"]:
    """Row numbers in single tables, from row numbers over all tables; inverse of `_global_rows`."""
    if table is None:
        return rows
    return jnp.where(rows == NO_ROW, NO_ROW, rows - row_map.rows_per_table * table)


def assign(
    row_map: RowMap,
    keys: Keys,
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    *,
    evict: Eviction | None = None,
    is_signed: bool = False,
) -> tuple[RowMap, Int[Array, " nnz"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Assigns rows to new keys, in the order of the keys. Returns the new map and these rows.

    Args:
      row_map: map before the call.
      keys: distinct keys that are not in the map. Padding gets no row.
      step: index of the current step, at least 0. Rows that this step used are not evicted.
      occurrences: number of occurrences of each key so far.
      evict: policy that selects keys to evict if too few rows are free. None, the default: no key
        is evicted.
      is_signed: whether keys are signed numbers. The sign matters if several keys have the smallest
        worth, because the smallest key is then evicted. False is the default.

    Returns: the map, the row of each key, the number of evicted keys of each table, and the number
      of keys of each table that got no row. A key that got no row has row `NO_ROW`.
    """
    num_free_before = row_map.num_free
    if evict is not None:
        row_map = _make_room(row_map, keys, step, evict, is_signed)
    num_evicted = row_map.num_free - num_free_before
    rows, num_free, num_without = api.take_rows(
        row_map.free, row_map.num_free, keys.is_key, keys.table
    )
    high, low = api.scatter_rows((row_map.high, row_map.low), rows, (keys.high, keys.low))
    keys_with_row = keys._replace(is_key=rows != NO_ROW)
    rows_in_table = _rows_in_table(row_map, rows, keys.table)
    added = _signature(keys_with_row, rows_in_table, row_map.num_tables)
    filled = row_map._replace(
        hashed=row_map.hashed.insert(keys_with_row, rows_in_table),
        high=high,
        low=low,
        num_free=num_free,
        signature=row_map.signature + added,
    )
    return touch(filled, rows, step, occurrences), rows, num_evicted, num_without


def _make_room(
    row_map: RowMap, keys: Keys, step: Int[Array, ""], policy: Eviction, is_signed: bool
) -> RowMap:
    """Evicts keys until there is a free row for each of `keys`, if enough keys may be evicted.

    For the arguments, see `assign`.
    """
    num_wanted = counts_of(keys.is_key, keys.table, row_map.num_tables) - row_map.num_free

    def with_evictions(row_map: RowMap) -> RowMap:
        is_candidate = _may_leave(row_map, step)
        is_evicted = least(row_map, worth(row_map, policy), is_candidate, num_wanted, is_signed)
        evicted_rows, _ = api.compact(is_evicted, keys.low.shape[0])
        return release(row_map, evicted_rows)

    is_short = jnp.any(num_wanted > 0)
    return jax.lax.cond(is_short, with_evictions, lambda row_map: row_map, row_map)


def _signature(keys: Keys, rows: Int[Array, " nnz"], num_tables: int) -> UInt32[Array, " tables"]:
    """Contribution of these keys and rows to the signature of each table.

    Args:
      keys: keys and padding.
      rows: row of each key, relative to its table.
      num_tables: number of tables.
    """
    bits = mix(keys.high, keys.low + rows.astype(jnp.uint32) * jnp.uint32(ROW_FACTOR))
    bits = jnp.where(keys.is_key, bits, jnp.uint32(0))
    if keys.table is None:
        return jnp.sum(bits, dtype=jnp.uint32)[None]
    table = jnp.where(keys.is_key, keys.table, num_tables)
    return jnp.zeros(num_tables, jnp.uint32).at[table].add(bits, mode="drop")


def find_or_assign(
    row_map: RowMap, keys: Keys, steps: Int[Array, " nnz"], counts: Int[Array, " nnz"]
) -> tuple[RowMap, Int[Array, " nnz"]]:
    """Imports keys. Returns the new map and the row of each key.

    Args:
      row_map: map before the call.
      keys: distinct keys. Keys that are not in the map get free rows.
      steps: last step that used each key.
      counts: number of occurrences of each key.

    Returns: the map, and the row of each key. `NO_ROW` for padding, and for keys that got no row.
    """
    known_rows = find(row_map, keys)
    new = keys.only(known_rows == NO_ROW)
    row_map, new_rows, _, _ = assign(row_map, new, jnp.int32(0), counts)
    rows = jnp.where(new.is_key, new_rows, known_rows)
    return touch(row_map, rows, steps, counts), rows


def touch(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    step: Int[Array, "*nnz"],
    occurrences: Int[Array, " nnz"],
) -> RowMap:
    """The map with new last steps and counts for distinct rows.

    Args:
      row_map: map before the call.
      rows: distinct rows. `NO_ROW` is skipped.
      step: last step that used the rows, for all rows or one for each.
      occurrences: number of occurrences of each row's key so far, which replaces its count.
    """
    steps = jnp.broadcast_to(step, rows.shape)
    last_step, counts = api.scatter_rows(
        (row_map.last_step, row_map.counts), rows, (steps, occurrences)
    )
    return row_map._replace(last_step=last_step, counts=counts)


def use(
    row_map: RowMap, rows: Int[Array, " nnz"], step: Int[Array, ""], occurrences: Int[Array, " nnz"]
) -> RowMap:
    """Records that `step` used `rows`, which may repeat, and returns the new map.

    The counts of the rows grow by `occurrences`.
    """
    last_step, counts = api.count_uses(row_map.last_step, row_map.counts, rows, step, occurrences)
    return row_map._replace(last_step=last_step, counts=counts)


def count_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Number of occurrences of the keys of `rows`. 0 for `NO_ROW`."""
    return row_map.counts.at[rows].get(mode="fill", fill_value=0)


def add_counts(one: Int[Array, " nnz"], other: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Sums of two arrays of counts, at most `MAX_COUNT`."""
    return jnp.where(one > MAX_COUNT - other, MAX_COUNT, one + other)


def release(row_map: RowMap, rows: Int[Array, " nnz"]) -> RowMap:
    """Removes the keys of distinct `rows`, and frees the rows. `NO_ROW` is skipped.

    The first of these rows in each table is assigned next.
    """
    is_row = rows != NO_ROW
    table = table_of(row_map, rows)
    high, low = api.gather_rows((row_map.high, row_map.low), rows)
    keys = Keys(high, low, is_row, table)
    rows_in_table = _rows_in_table(row_map, rows, table)

    # The first released row of a table becomes the top of its stack of free rows.
    rank, num_released = ranks(is_row, table, row_map.num_tables, api.distinct)
    num_free = row_map.num_free + num_released
    stack_size = num_free
    if table is not None:
        stack_size = num_free.at[table].get(mode="clip")
    position = _global_rows(row_map, stack_size - 1 - rank, table)
    position = jnp.where(is_row, position, NO_ROW)
    removed = _signature(keys, rows_in_table, row_map.num_tables)
    return row_map._replace(
        hashed=row_map.hashed.remove(keys),
        last_step=row_map.last_step.at[rows].set(FREE, mode="drop"),
        free=row_map.free.at[position].set(rows_in_table, mode="drop"),
        num_free=num_free,
        signature=row_map.signature - removed,
    )


def table_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"] | None:
    """Index of the table of each row. None if there is one table."""
    if row_map.num_tables == 1:
        return None
    return rows // row_map.rows_per_table


def grow(row_map: RowMap, capacity: int) -> RowMap:
    """The map of one table with more rows.

    The new rows are assigned after the rows that are free now.
    """
    old = row_map.last_step.shape[0]

    def extend(lane: Array, value: int) -> Array:
        return jnp.concatenate([lane, jnp.full(capacity - old, value, lane.dtype)])

    hashed = row_map.hashed
    # Under `shard_map`, the loop of `with_keys_of` must start from arrays that vary over devices.
    zero = varying_zero(hashed.rows)
    larger: HashTable = jax.tree.map(lambda x: x + zero.astype(x.dtype), HashTable.empty(capacity))
    new_rows = jnp.arange(capacity - 1, old - 1, -1, dtype=jnp.int32)
    return RowMap(
        hashed=larger.with_keys_of(hashed, jnp.ones(hashed.rows.shape, bool)),
        high=extend(row_map.high, 0),
        low=extend(row_map.low, 0),
        last_step=extend(row_map.last_step, FREE),
        counts=extend(row_map.counts, 0),
        free=jnp.concatenate([new_rows, row_map.free]),
        num_free=row_map.num_free + (capacity - old),
        signature=row_map.signature,
    )


def worth(row_map: RowMap, policy: Eviction) -> Int[Array, " rows"]:
    """Worth of each row: its last step ("lru"), or the number of occurrences of its key ("lfu").

    Keys with the smallest worth are evicted first. If worths are equal, the smallest key is first.
    """
    if policy == "lru":
        return row_map.last_step
    return row_map.counts


def _may_leave(row_map: RowMap, step: Int[Array, ""]) -> Bool[Array, " rows"]:
    """Mask of the rows that can be evicted: rows with a key that this step did not use."""
    return (row_map.last_step != FREE) & (row_map.last_step != step)


def room(
    row_map: RowMap, rows: Int[Array, " nnz"], step: Int[Array, ""], *, evicts: bool
) -> Int[Array, " tables"]:
    """Number of new keys of each table that can get a row in a step.

    Args:
      row_map: the map before the step.
      rows: rows that the step uses, which may repeat.
      step: index of the step.
      evicts: whether `assign` may evict keys.
    """
    if not evicts:
        return row_map.num_free
    is_candidate = _may_leave(row_map, step).at[rows].set(False, mode="drop")
    by_table = is_candidate.reshape(row_map.num_tables, -1)
    return row_map.num_free + jnp.sum(by_table, axis=1, dtype=jnp.int32)


def first_marked(
    marks: Bool[Array, " n"],
    arrival: Int[Array, " n"] | None,
    table: Int[Array, " n"] | None,
    most: Int[Array, " tables"],
) -> Bool[Array, " n"]:
    """Mask of the first `most` marked entries of each table.

    Args:
      marks: mask of the entries to choose from.
      arrival: sort key of each entry. None: the entries are in order.
      table: index of the table of each entry. None if there is one table.
      most: maximum number of entries of each table.
    """
    if arrival is not None:
        positions = jax.lax.broadcasted_iota(jnp.int32, arrival.shape, 0)
        _, order = jax.lax.sort((arrival, positions), num_keys=1)
        sorted_table = table
        if table is not None:
            sorted_table = table[order]
        is_first = first_marked(marks[order], None, sorted_table, most)
        return jnp.zeros_like(is_first).at[order].set(is_first)
    rank, _ = ranks(marks, table, most.shape[0], api.distinct)
    if table is not None:
        most = most.at[table].get(mode="clip")
    return marks & (rank < most)


def least(
    row_map: RowMap,
    worth: Array,
    is_candidate: Bool[Array, " rows"],
    num_wanted: Int[Array, " tables"],
    is_signed: bool = False,
) -> Bool[Array, " rows"]:
    """Mask of the `num_wanted` candidates of each table with the smallest worth.

    If candidates have equal worth, the smallest keys are chosen. If a table has fewer candidates
    than `num_wanted`, all of them are chosen.

    Args:
      row_map: map before the call.
      worth: worth of each row, at least 0 for candidates.
      is_candidate: mask of the rows to choose from.
      num_wanted: number of rows to choose in each table.
      is_signed: whether keys are signed numbers, False by default.
    """
    high = row_map.high
    if is_signed:
        high = high ^ jnp.uint32(SIGN_BIT)  # Negative keys come before positive keys.
    lanes = (worth.astype(jnp.uint32), high, row_map.low)
    if row_map.num_tables == 1:
        return _first(lanes, is_candidate, num_wanted[0])
    lanes_by_table = tuple(lane.reshape(row_map.num_tables, -1) for lane in lanes)
    candidates_by_table = is_candidate.reshape(row_map.num_tables, -1)
    chosen: Array = jax.vmap(_first)(lanes_by_table, candidates_by_table, num_wanted)
    return chosen.reshape(-1)


def _first(
    lanes: Sequence[UInt32[Array, " rows"]],
    is_candidate: Bool[Array, " rows"],
    num_wanted: Int[Array, ""],
) -> Bool[Array, " rows"]:
    """Mask of the first `num_wanted` candidates in lexicographic order of `lanes`.

    In each lane, the value of the last wanted candidate is found bit by bit. The search takes a few
    passes over the lane, in a fraction of the time of a sort. Bits that all candidates share need
    no pass. The search stops as soon as the wanted candidates are separated from the others.
    """
    chosen = jnp.zeros_like(is_candidate)
    for lane in lanes:
        bound = _bound(lane, is_candidate, num_wanted)
        is_below = is_candidate & (lane < bound)
        chosen = chosen | is_below
        num_wanted = num_wanted - jnp.sum(is_below, dtype=jnp.int32)
        is_candidate = is_candidate & (lane == bound)
    return chosen | (is_candidate & (num_wanted > 0))


class BoundSearch(NamedTuple):
    """State of the search in `_bound`.

    Attributes:
      bit: index of the bit to try next.
      bound: the bits that were chosen so far.
      is_exact: whether exactly the wanted number of candidates is below `bound`.
    """

    bit: Int[Array, ""]
    bound: UInt32[Array, ""]
    is_exact: Bool[Array, ""]


def _bound(
    lane: UInt32[Array, " rows"], is_candidate: Bool[Array, " rows"], num_wanted: Array
) -> UInt32[Array, ""]:
    """A lane value with at most `num_wanted` candidates below it.

    The bound is the value of the last wanted candidate, or any value with exactly `num_wanted`
    candidates below it. If there are fewer candidates than `num_wanted`, no candidate is above it.
    """
    # All candidates have equal bits above the highest bit in which the two extremes differ.
    largest = jnp.max(jnp.where(is_candidate, lane, jnp.uint32(0)))
    smallest = jnp.min(jnp.where(is_candidate, lane, largest))
    differing_bits = smallest ^ largest
    num_bits = 32 - jax.lax.clz(differing_bits).astype(jnp.int32)
    for distance in (1, 2, 4, 8, 16):  # Set all bits below the highest one.
        differing_bits |= differing_bits >> distance
    common_bits = largest & ~differing_bits

    def is_searching(state: BoundSearch) -> Array:
        return (state.bit >= 0) & ~state.is_exact

    def try_bit(state: BoundSearch) -> BoundSearch:
        higher = state.bound | (jnp.uint32(1) << state.bit.astype(jnp.uint32))
        num_below = jnp.sum(is_candidate & (lane < higher), dtype=jnp.int32)
        bound = jnp.where(num_below <= num_wanted, higher, state.bound)
        return BoundSearch(state.bit - 1, bound, num_below == num_wanted)

    wants_none = num_wanted + varying_zero(lane, is_candidate) <= 0
    start = BoundSearch(num_bits - 1, common_bits, wants_none)
    return jax.lax.while_loop(is_searching, try_bit, start).bound


# Keys of a batch


def entries(
    keys: Keys, occurrences: Int[Array, " nnz"]
) -> tuple[Int[Array, " nnz"], Keys, Int[Array, " nnz"], Int[Array, " nnz"]]:
    """Distinct keys in the order of their first occurrence.

    Args:
      keys: keys and padding, in any order.
      occurrences: number of occurrences in each entry.

    Returns: a tuple of four: the index of each key in the distinct keys (`NO_ROW` for padding); the
      distinct `Keys`, with padding after the last one; the position of the first occurrence of each
      distinct key (`NO_ROW` for padding); and the sum of the occurrences of each distinct key.
    """
    entry_of, first_of, counts = api.unique_keys(keys, occurrences)
    lanes = api.gather_rows(keys.lanes, first_of)
    return entry_of, Keys.of_lanes(lanes, first_of != NO_ROW), first_of, counts


def named(keys: Keys, counts: Int[Array, " nnz"]) -> UInt32[Array, "nnz lanes"]:
    """Distinct keys as the row numbers of `RowGradients`: columns `(high, low, occurrences)`.

    If there are several tables, the index of the table is the fourth column. Padding has
    `occurrences` 0.
    """
    lanes = [keys.high, keys.low, counts.astype(jnp.uint32)]
    if keys.table is not None:
        lanes.append(keys.table.astype(jnp.uint32))
    return jnp.stack(lanes, axis=1)


def unnamed(lanes: UInt32[Array, "nnz lanes"]) -> tuple[Keys, Int[Array, " nnz"]]:
    """Keys, and the number of occurrences of each, from the format of `named`."""
    high = lanes[:, 0]
    low = lanes[:, 1]
    occurrences = lanes[:, 2]
    table = None
    if lanes.shape[1] > 3:
        table = lanes[:, 3].astype(jnp.int32)
    return Keys(high, low, occurrences > 0, table), occurrences.astype(jnp.int32)


def combine(
    keys: Keys, occurrences: Int[Array, " nnz"], values: Float[Array, "nnz dim"]
) -> tuple[UInt32[Array, "nnz lanes"], Float[Array, "nnz dim"]]:
    """Distinct keys, as `named` returns them, and the sum of the values of each.

    The keys are in the order of their first occurrence, with zeros after the last one.
    """
    entry_of, distinct, _, counts = entries(keys, occurrences)
    # Every distinct key occurs, so row `e` of the sums belongs to the distinct key `e`.
    _, sums = api.row_gradients(entry_of.size, CallGradients.of_rows(entry_of, values))
    return named(distinct, counts), sums
