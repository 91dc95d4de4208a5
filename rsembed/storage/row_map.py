"""Map from keys to rows: finds the row of a key, assigns rows to new keys, and evicts keys.

All functions work inside `jit`. The row of a key is in a hash table with open addressing and linear
probing. At most half of the slots hold keys, and at most another quarter are deleted, so every
search reaches an empty slot. `kernels/keyed.py` defines the content of a slot, and the order of
the slots in the search for a key.

In a map for the keys of several tables, every array is the concatenation of one array per table. In
arguments and results of functions, rows are numbered consecutively over the tables. In the arrays
`free` and `hashed.rows` of a map, the rows of each table are numbered from 0. All tables are padded
to the size of the largest table, and padding rows are never assigned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, CallGradients
from rsembed.kernels.keyed import DELETED, EMPTY, MAX_COUNT, mix, ranks, varying_zero
from rsembed.keys import Keys

Eviction = Literal["lru", "lfu"]
FREE = -1
REBUILD_BLOCK = 16_384
SIGN_BIT = 1 << 31
# `_signature` multiplies row numbers by `ROW_FACTOR`, modulo 2**32. `ROW_FACTOR` is odd, so
# different row numbers have different products.
ROW_FACTOR = 0x9E3779B9


class HashTable(NamedTuple):
    """One hash table from keys to rows, or several hash tables of equal size in the same arrays.

    The number of slots of a table is a power of two.

    Attributes:
      keys: high and low 32 bits (lanes) of the key in every slot.
      rows: row of the key in every slot, or `EMPTY` or `DELETED` if the slot has no key.
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
        num_bits = (2 * max(max_keys, 1) - 1).bit_length()
        num_slots = num_tables << num_bits
        return HashTable(
            keys=api.allocate((num_slots, 2), jnp.uint32, 0),
            rows=api.allocate((num_slots,), jnp.int32, EMPTY),
            num_keys=jnp.zeros(num_tables, jnp.int32),
            num_deleted=jnp.zeros(num_tables, jnp.int32),
        )

    def insert(self, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
        """Adds keys to the hash tables, and returns the new hash tables.

        A key is skipped if inserting it would leave less than a quarter of the slots of its table
        empty. A table must not contain more keys than the argument `max_keys` of `HashTable.empty`.

        Args:
          keys: distinct keys that are not in the hash tables. Padding is skipped.
          rows: row of each key. The rows of each table are numbered from 0.
        """
        return HashTable(*api.insert_keys(*self, keys, rows))

    def remove(self, keys: Keys) -> HashTable:
        """Removes distinct keys from the hash tables, and returns the new hash tables.

        Absent keys and padding are skipped. If more than a quarter of the slots of a table are
        deleted after the removal, the table is rebuilt without deleted slots.
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
            jnp.any(is_crowded),
            lambda: smaller._rebuilt(is_crowded),
            lambda: smaller,
        )

    def _rebuilt(self, is_rebuilt: Bool[Array, " tables"]) -> HashTable:
        """Rebuilds some tables without deleted slots, and returns the new hash tables.

        Args:
          is_rebuilt: mask of the tables to rebuild.
        """
        num_slots = self.rows.shape[0]
        num_tables = self.num_keys.shape[0]
        slots_per_table = num_slots // num_tables
        is_moved = jnp.repeat(is_rebuilt, slots_per_table)
        kept = HashTable(
            keys=jnp.where(is_moved[:, None], jnp.uint32(0), self.keys),
            rows=jnp.where(is_moved, EMPTY, self.rows),
            num_keys=jnp.where(is_rebuilt, 0, self.num_keys),
            num_deleted=jnp.where(is_rebuilt, 0, self.num_deleted),
        )
        return kept.with_keys_of(self, is_moved)

    def with_keys_of(self, other: HashTable, marks: Bool[Array, " slots"]) -> HashTable:
        """Adds keys of another `HashTable`, and returns the new hash tables.

        Args:
          other: hash tables that contain the keys to add.
          marks: mask of the slots of `other` from which keys are added.
        """
        num_slots = other.rows.shape[0]
        num_tables = other.num_keys.shape[0]
        slots_per_table = num_slots // num_tables
        # Blocks of slots without a True mark are skipped. A rebuild usually moves the keys of only
        # a few tables, so most blocks are skipped.
        block_size = math.gcd(num_slots, REBUILD_BLOCK)
        has_mark = jnp.any(marks.reshape(-1, block_size), axis=1)
        blocks, num_blocks = api.compact(has_mark, num_slots // block_size)

        def add_block(number: Array, hashed: HashTable) -> HashTable:
            first = blocks[number] * block_size
            rows = jax.lax.dynamic_slice_in_dim(other.rows, first, block_size)
            lanes = jax.lax.dynamic_slice_in_dim(other.keys, first, block_size)
            is_marked = jax.lax.dynamic_slice_in_dim(marks, first, block_size)
            table = None
            if num_tables > 1:
                slots = first + jnp.arange(block_size, dtype=jnp.int32)
                table = slots // slots_per_table
            is_key = is_marked & (rows >= 0)
            high = lanes[:, 0]
            low = lanes[:, 1]
            keys = Keys(high, low, is_key, table)
            return hashed.insert(keys, rows)

        return jax.lax.fori_loop(0, num_blocks, add_block, self)


def counts_of(
    marks: Bool[Array, " n"],
    table: Int[Array, " n"] | None,
    num_tables: int,
) -> Int[Array, " tables"]:
    """Number of marked entries of each table.

    Args:
      marks: mask with one value per entry: True if the entry is counted.
      table: table index of each entry. None if there is only one table.
      num_tables: number of tables.
    """
    return _sums(marks.astype(jnp.int32), table, num_tables)


def _sums(
    numbers: Num[Array, " n"],
    table: Int[Array, " n"] | None,
    num_tables: int,
) -> Num[Array, " tables"]:
    """Sum of the numbers of each table. `table` is the table index of each number, or None."""
    if table is None:
        return jnp.sum(numbers, dtype=numbers.dtype)[None]
    return jax.ops.segment_sum(numbers, table, num_tables)


class RowMap(NamedTuple):
    """Map from keys to rows and from rows to keys, with the last use and use count of each row.

    Outside `shard_map`, every leaf is the concatenation of its shards.

    Attributes:
      hashed: hash tables with the row of every key.
      high: upper 32 bits of the key in every row.
      low: lower 32 bits of the key in every row.
      last_step: index of the last step that used the row. `FREE` if the row has no key.
      counts: number of occurrences of the row's key in training, at most `MAX_COUNT`.
      free: free rows of all tables. The array `free` is divided into sections of equal size, one
        for each table. The first `num_free` entries of a section are the free rows of the table,
        and entry `num_free - 1` is assigned next. The entries of a section from `num_free` on have
        undefined values.
      num_free: number of free rows of each table.
      signature: hash of all pairs of key and row, for each table. Maps with the same keys in the
        same rows have equal signatures.
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
    """Creates a map without keys. New keys of a table get its rows in ascending order, from row 0.

    Args:
      *capacities: number of rows of each table.
    """
    num_tables = len(capacities)
    rows_per_table = max(capacities)
    shape = (rows_per_table * num_tables,)
    num_free = jnp.asarray(capacities, jnp.int32)
    # The last free row of a table is assigned first, so the free rows are in descending order.
    positions = jnp.arange(rows_per_table, dtype=jnp.int32)
    last_row = num_free[:, None] - 1
    free = jnp.maximum(last_row - positions[None], 0)
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
    """Row of each key, or `NO_ROW` for padding and for keys that are not in the map."""
    rows, _ = search(row_map, keys)
    return rows


def search(row_map: RowMap, keys: Keys) -> tuple[Int[Array, " nnz"], Int[Array, ""]]:
    """Row of each key, and the number of keys that are not in the map.

    The row is `NO_ROW` for padding, and for keys that are not in the map. A key that is not in the
    map is counted once for each of its occurrences in `keys`.
    """
    hashed = row_map.hashed
    _, rows_in_table, num_absent = api.find_keys(
        hashed.keys,
        hashed.rows,
        keys,
        row_map.num_tables,
    )
    rows = _global_rows(row_map, rows_in_table, keys.table)
    return rows, num_absent


def _global_rows(
    row_map: RowMap,
    rows_in_table: Int[Array, " nnz"],
    table: Array | None,
) -> Int[Array, " nnz"]:
    """Converts row numbers that start from 0 in each table to row numbers over all tables."""
    if table is None:
        return rows_in_table
    first_rows = row_map.rows_per_table * table
    rows = rows_in_table + first_rows
    return jnp.where(rows_in_table == NO_ROW, NO_ROW, rows)


def _rows_in_table(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    table: Array | None,
) -> Int[Array, " nnz"]:
    """Converts row numbers over all tables to row numbers that start from 0 in each table."""
    if table is None:
        return rows
    is_padding = rows == NO_ROW
    first_rows = row_map.rows_per_table * table
    return jnp.where(is_padding, NO_ROW, rows - first_rows)


def assign(
    row_map: RowMap,
    keys: Keys,
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    *,
    evict: Eviction | None = None,
    is_signed: bool = False,
) -> tuple[RowMap, Int[Array, " nnz"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Assigns rows to new keys, and evicts other keys if too few rows are free.

    If a table has too few rows for all its new keys, the keys that come first in `keys` get rows.

    Args:
      row_map: the map to change.
      keys: distinct keys that are not in the map. Padding gets no row.
      step: index of the current step, at least 0. Keys that the current step has already used are
        not evicted.
      occurrences: number of occurrences of each key so far.
      evict: policy that selects the keys to evict. None, the default, means that no key is evicted.
      is_signed: whether keys are signed numbers, False by default. Among equally old ("lru") or
        equally frequent ("lfu") keys, the smallest key is evicted first. If `is_signed` is False,
        keys are compared as unsigned numbers, so -5 is a very large key.

    Returns: the new map, the row of each key (`NO_ROW` if it got no row), the number of evicted
      keys of each table, and the number of keys of each table that got no row.
    """
    num_free_before = row_map.num_free
    if evict is not None:
        row_map = _make_room(row_map, keys, step, evict, is_signed)
    num_evicted = row_map.num_free - num_free_before
    rows, num_free, num_without = api.take_rows(
        row_map.free,
        row_map.num_free,
        keys.is_key,
        keys.table,
    )
    old_lanes = (row_map.high, row_map.low)
    new_lanes = (keys.high, keys.low)
    high, low = api.scatter_rows(old_lanes, rows, new_lanes)
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
    filled = touch(filled, rows, step, occurrences)
    return filled, rows, num_evicted, num_without


def _make_room(
    row_map: RowMap,
    keys: Keys,
    step: Int[Array, ""],
    policy: Eviction,
    is_signed: bool,
) -> RowMap:
    """Evicts keys until each new key has a free row, or until no more keys may be evicted.

    All arguments have the same meaning as in `assign`, where `policy` has the name `evict`.
    """
    num_new = counts_of(keys.is_key, keys.table, row_map.num_tables)
    num_wanted = num_new - row_map.num_free

    def with_evictions(row_map: RowMap) -> RowMap:
        is_evicted = least(
            row_map,
            worth(row_map, policy),
            _may_leave(row_map, step),
            num_wanted,
            is_signed,
        )
        evicted_rows, _ = api.compact(is_evicted, keys.low.shape[0])
        return release(row_map, evicted_rows)

    return jax.lax.cond(
        jnp.any(num_wanted > 0),
        with_evictions,
        lambda row_map: row_map,
        row_map,
    )


def _signature(
    keys: Keys,
    rows: Int[Array, " nnz"],
    num_tables: int,
) -> UInt32[Array, " tables"]:
    """Sum of the hashes of pairs `(key, row)`, for each table.

    Args:
      keys: keys, which may include padding.
      rows: row of each key. The rows of each table are numbered from 0.
      num_tables: number of tables.
    """
    row_bits = rows.astype(jnp.uint32) * jnp.uint32(ROW_FACTOR)
    hashes = mix(keys.high, keys.low + row_bits)
    hashes = jnp.where(keys.is_key, hashes, jnp.uint32(0))
    return _sums(hashes, keys.table, num_tables)


def find_or_assign(
    row_map: RowMap,
    keys: Keys,
    steps: Int[Array, " nnz"],
    counts: Int[Array, " nnz"],
) -> tuple[RowMap, Int[Array, " nnz"]]:
    """Finds the rows of keys, assigns rows to new keys, and sets `last_step` and `counts`.

    Args:
      row_map: the map to change.
      keys: distinct keys. Keys that are not in the map get free rows.
      steps: index of the last step that used each key.
      counts: number of occurrences of each key so far.

    Returns: the new map, and the row of each key. The row of padding, and of a key that got no row,
      is `NO_ROW`.
    """
    known_rows = find(row_map, keys)
    new_keys = keys.only(known_rows == NO_ROW)
    row_map, new_rows, _, _ = assign(row_map, new_keys, jnp.int32(0), counts)
    rows = jnp.where(new_keys.is_key, new_rows, known_rows)
    row_map = touch(row_map, rows, steps, counts)
    return row_map, rows


def touch(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    step: Int[Array, "*nnz"],
    occurrences: Int[Array, " nnz"],
) -> RowMap:
    """Sets `last_step` and `counts` of distinct rows, and returns the new map.

    Args:
      row_map: the map to change.
      rows: distinct rows. `NO_ROW` is skipped.
      step: index of the step that last used the rows: one number for all rows, or an array with one
        number per row.
      occurrences: new count of each row.
    """
    steps = jnp.broadcast_to(step, rows.shape)
    last_step, counts = api.scatter_rows(
        (row_map.last_step, row_map.counts),
        rows,
        (steps, occurrences),
    )
    return row_map._replace(last_step=last_step, counts=counts)


def use(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
) -> RowMap:
    """Records uses of rows in a step, and returns the new map.

    Args:
      row_map: the map to change.
      rows: rows that the step uses. Rows may repeat, and `NO_ROW` is skipped.
      step: index of the step.
      occurrences: number to add to the count of each of `rows`.
    """
    last_step, counts = api.count_uses(
        row_map.last_step,
        row_map.counts,
        rows,
        step,
        occurrences,
    )
    return row_map._replace(last_step=last_step, counts=counts)


def count_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """How often the key of each row has occurred so far. The count of `NO_ROW` is 0."""
    return row_map.counts.at[rows].get(mode="fill", fill_value=0)


def add_counts(one: Int[Array, " nnz"], other: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Elementwise sum of two arrays of counts. A sum above `MAX_COUNT` becomes `MAX_COUNT`."""
    is_too_large = one > MAX_COUNT - other
    return jnp.where(is_too_large, MAX_COUNT, one + other)


def release(row_map: RowMap, rows: Int[Array, " nnz"]) -> RowMap:
    """Removes keys from the map, frees their rows, and returns the new map.

    Args:
      row_map: the map to change.
      rows: distinct rows to free. `NO_ROW` is skipped. The freed rows of a table are assigned to
        the next new keys of the table, in the order of `rows`.
    """
    is_row = rows != NO_ROW
    table = table_of(row_map, rows)
    high, low = api.gather_rows((row_map.high, row_map.low), rows)
    keys = Keys(high, low, is_row, table)
    rows_in_table = _rows_in_table(row_map, rows, table)

    # The last free row of a table is assigned first. The freed rows are appended to the free rows
    # in reversed order, so the freed rows are assigned in the order of `rows`.
    rank, num_released = ranks(is_row, table, row_map.num_tables, api.distinct)
    num_free = row_map.num_free + num_released
    stack_size = num_free
    if table is not None:
        stack_size = num_free.at[table].get(mode="clip")
    position_in_stack = stack_size - 1 - rank
    position = _global_rows(row_map, position_in_stack, table)
    position = jnp.where(is_row, position, NO_ROW)
    removed = _signature(keys, rows_in_table, row_map.num_tables)
    hashed = row_map.hashed.remove(keys)
    last_step = row_map.last_step.at[rows].set(FREE, mode="drop")
    free = row_map.free.at[position].set(rows_in_table, mode="drop")
    return row_map._replace(
        hashed=hashed,
        last_step=last_step,
        free=free,
        num_free=num_free,
        signature=row_map.signature - removed,
    )


def table_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"] | None:
    """Table index of each row. None if the map has only one table."""
    if row_map.num_tables == 1:
        return None
    return rows // row_map.rows_per_table


def grow(row_map: RowMap, capacity: int) -> RowMap:
    """Enlarges the map of a single table to `capacity` rows, and returns the new map.

    Rows that were free before the call are assigned before the added rows.
    """
    old_capacity = row_map.last_step.shape[0]
    num_added = capacity - old_capacity

    padding = (0, num_added)
    hashed = row_map.hashed
    added_rows = jnp.arange(capacity - 1, old_capacity - 1, -1, dtype=jnp.int32)
    all_slots = jnp.ones(hashed.rows.shape, bool)
    return RowMap(
        hashed=HashTable.empty(capacity).with_keys_of(hashed, all_slots),
        high=jnp.pad(row_map.high, padding),
        low=jnp.pad(row_map.low, padding),
        last_step=jnp.pad(row_map.last_step, padding, constant_values=FREE),
        counts=jnp.pad(row_map.counts, padding),
        free=jnp.concatenate([added_rows, row_map.free]),
        num_free=row_map.num_free + num_added,
        signature=row_map.signature,
    )


def worth(row_map: RowMap, policy: Eviction) -> Int[Array, " rows"]:
    """Number by which a policy ranks each row for eviction.

    For "lru", the number of a row is the last step that used the row. For "lfu", the number of a
    row is the number of occurrences of its key. The row with the smallest number is evicted first.
    Among equally old or equally frequent rows, the row with the smallest key is evicted first.
    """
    if policy == "lru":
        return row_map.last_step
    return row_map.counts


def _may_leave(row_map: RowMap, step: Int[Array, ""]) -> Bool[Array, " rows"]:
    """Mask of the rows with a key that may be evicted, because the step has not used the key."""
    return (row_map.last_step != FREE) & (row_map.last_step != step)


def room(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    *,
    evicts: bool,
) -> Int[Array, " tables"]:
    """Maximum number of new keys of each table that can get a row in a step.

    Args:
      row_map: map before the step.
      rows: rows that the step uses. Rows may repeat, and `NO_ROW` is skipped.
      step: index of the step.
      evicts: whether the step may evict keys that the step does not use.
    """
    if not evicts:
        return row_map.num_free
    is_candidate = _may_leave(row_map, step)
    is_candidate = is_candidate.at[rows].set(False, mode="drop")
    by_table = is_candidate.reshape(row_map.num_tables, -1)
    num_candidates = jnp.sum(by_table, axis=1, dtype=jnp.int32)
    return row_map.num_free + num_candidates


def first_marked(
    marks: Bool[Array, " n"],
    arrival: Int[Array, " n"] | None,
    table: Int[Array, " n"] | None,
    most: Int[Array, " tables"],
) -> Bool[Array, " n"]:
    """Mask of the first `most` marked entries of each table.

    Args:
      marks: mask of the entries that may be chosen.
      arrival: one number per entry, which defines the order of the entries: the entry with the
        smallest number is the first. If `arrival` is None, the entries have the same order as in
        `marks`.
      table: table index of each entry. None if there is only one table.
      most: maximum number of entries to choose in each table.
    """
    rank, _ = ranks(marks, table, most.shape[0], api.distinct, arrival)
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
    """Mask of the `num_wanted` candidate rows of each table with the smallest values in `worth`.

    Among candidates with equal values, the candidates with the smallest keys are chosen. If a table
    has fewer candidates than `num_wanted`, all its candidates are chosen.

    Args:
      row_map: map from keys to rows, which contains the key of each row.
      worth: integer of each row, such as the result of the function `worth`. The values of `worth`
        are compared as unsigned numbers.
      is_candidate: mask of the rows that may be chosen.
      num_wanted: number of rows to choose in each table.
      is_signed: whether keys are signed numbers, False by default.
    """
    high = row_map.high
    if is_signed:
        # With the sign bit flipped, negative keys are smaller than positive keys.
        high = high ^ jnp.uint32(SIGN_BIT)
    lanes = (worth.astype(jnp.uint32), high, row_map.low)
    lanes_by_table = []
    for lane in lanes:
        lanes_by_table.append(lane.reshape(row_map.num_tables, -1))
    candidates_by_table = is_candidate.reshape(row_map.num_tables, -1)
    first_of_tables = jax.vmap(_first)
    chosen: Array = first_of_tables(lanes_by_table, candidates_by_table, num_wanted)
    return chosen.reshape(-1)


def _first(
    lanes: Sequence[UInt32[Array, " rows"]],
    is_candidate: Bool[Array, " rows"],
    num_wanted: Int[Array, ""],
) -> Bool[Array, " rows"]:
    """Mask of the first `num_wanted` candidates in lexicographic order.

    Candidates are compared by the first array in `lanes`, then by the second array, and so on. For
    each array in `lanes`, `_bound` computes a bound. Candidates with values below the bound are
    chosen. Candidates with values equal to the bound are compared by the next array in `lanes`. The
    search for the bounds takes a fraction of the time of a sort.
    """
    chosen = jnp.zeros_like(is_candidate)
    for lane in lanes:
        bound = _bound(lane, is_candidate, num_wanted)
        is_below = is_candidate & (lane < bound)
        chosen = chosen | is_below
        num_below = jnp.sum(is_below, dtype=jnp.int32)
        num_wanted = num_wanted - num_below
        is_candidate = is_candidate & (lane == bound)
    return chosen | (is_candidate & (num_wanted > 0))


class BoundSearch(NamedTuple):
    """Loop state of `_bound`, which determines the bits of a bound from the highest to the lowest.

    Attributes:
      bit: position of the next bit of `bound` to determine, 0 for the lowest bit.
      bound: the bound, with 0 in all bits that are not determined yet.
      is_exact: True if exactly `num_wanted` candidates are below `bound`.
    """

    bit: Int[Array, ""]
    bound: UInt32[Array, ""]
    is_exact: Bool[Array, ""]


# `_first` needs a bound of each lane, and with `jit` the search is traced only once.
@jax.jit
def _bound(
    lane: UInt32[Array, " rows"],
    is_candidate: Bool[Array, " rows"],
    num_wanted: Array,
) -> UInt32[Array, ""]:
    """Bound that separates the `num_wanted` candidates with the smallest values from the others.

    At most `num_wanted` candidates have values below the bound. The bound is the `num_wanted`-th
    smallest value of the candidates, or any number such that exactly `num_wanted` candidates have
    smaller values. If there are at most `num_wanted` candidates, no candidate has a value above the
    bound.

    `_bound` determines one bit of the bound after the other, with one pass over `lane` for each
    bit. `_bound` skips the leading bits that are equal in all candidates, and stops when exactly
    `num_wanted` candidates are below the bound.
    """
    # The largest and the smallest value have equal bits above their highest differing bit, so the
    # values of all candidates have these bits.
    largest = jnp.max(jnp.where(is_candidate, lane, jnp.uint32(0)))
    smallest = jnp.min(jnp.where(is_candidate, lane, largest))
    differing_bits = smallest ^ largest
    num_equal_bits = jax.lax.clz(differing_bits).astype(jnp.int32)
    num_bits = 32 - num_equal_bits
    # Set all bits of `differing_bits` below its highest set bit.
    for distance in (1, 2, 4, 8, 16):
        differing_bits |= differing_bits >> distance
    common_bits = largest & ~differing_bits

    def is_searching(state: BoundSearch) -> Array:
        return (state.bit >= 0) & ~state.is_exact

    def try_bit(state: BoundSearch) -> BoundSearch:
        shift = state.bit.astype(jnp.uint32)
        higher = state.bound | (jnp.uint32(1) << shift)
        is_below = is_candidate & (lane < higher)
        num_below = jnp.sum(is_below, dtype=jnp.int32)
        bound = jnp.where(num_below <= num_wanted, higher, state.bound)
        return BoundSearch(
            bit=state.bit - 1,
            bound=bound,
            is_exact=num_below == num_wanted,
        )

    wants_none = num_wanted + varying_zero(lane, is_candidate) <= 0
    start = BoundSearch(
        bit=num_bits - 1,
        bound=common_bits,
        is_exact=wants_none,
    )
    end = jax.lax.while_loop(is_searching, try_bit, start)
    return end.bound


def entries(
    keys: Keys,
    occurrences: Int[Array, " nnz"],
) -> tuple[Int[Array, " nnz"], Keys, Int[Array, " nnz"], Int[Array, " nnz"]]:
    """Distinct keys of a batch, in the order of their first occurrence.

    Args:
      keys: keys, which may be in any order and include padding.
      occurrences: for each entry of `keys`, how many ids of the batch the entry represents.

    Returns: `(entry_of, distinct, first_of, counts)`. `entry_of` has the index in `distinct` of
      each entry of `keys`, or `NO_ROW` for padding. `distinct` has the distinct keys, followed by
      padding. `first_of` has the position in `keys` of the first occurrence of each distinct key,
      or `NO_ROW` for padding. `counts` has the sum of the occurrences of each distinct key, at most
      `MAX_COUNT`.
    """
    entry_of, first_of, counts = api.unique_keys(keys, occurrences)
    lanes = api.gather_rows(keys.lanes, first_of)
    distinct = Keys.of_lanes(lanes, first_of != NO_ROW)
    return entry_of, distinct, first_of, counts


def named(keys: Keys, counts: Int[Array, " nnz"]) -> UInt32[Array, "nnz lanes"]:
    """Distinct keys in the array format of `RowGradients.rows` for tables with keys.

    The returned array has one row per key. Columns 0 and 1 of the array are the high and the low
    half of the key. Column 2 of the array is the number of occurrences of the key, or 0 for
    padding. If `keys` belong to several tables, column 3 of the array is the table index.
    """
    occurrences = counts.astype(jnp.uint32)
    lanes = [keys.high, keys.low, occurrences]
    if keys.table is not None:
        lanes.append(keys.table.astype(jnp.uint32))
    return jnp.stack(lanes, axis=1)


def unnamed(lanes: UInt32[Array, "nnz lanes"]) -> tuple[Keys, Int[Array, " nnz"]]:
    """Keys and their numbers of occurrences, from the result of `named`."""
    high = lanes[:, 0]
    low = lanes[:, 1]
    occurrences = lanes[:, 2]
    table = None
    if lanes.shape[1] > 3:
        table = lanes[:, 3].astype(jnp.int32)
    keys = Keys(high, low, occurrences > 0, table)
    return keys, occurrences.astype(jnp.int32)


def combine(
    keys: Keys,
    occurrences: Int[Array, " nnz"],
    values: Float[Array, "nnz dim"],
) -> tuple[UInt32[Array, "nnz lanes"], Float[Array, "nnz dim"]]:
    """Distinct keys in the format of `named`, and for each distinct key the sum of its values.

    The distinct keys are in the order of their first occurrence. Both returned arrays contain zeros
    after the last distinct key.

    Args:
      keys: keys, which may be in any order and include padding.
      occurrences: for each entry of `keys`, how many ids of the batch the entry represents.
      values: vector of each entry of `keys`, such as its gradient.
    """
    entry_of, distinct, _, counts = entries(keys, occurrences)
    # Every distinct key occurs at least once, so row `e` of `sums` belongs to distinct key `e`.
    gradients = CallGradients.of_rows(entry_of, values)
    _, sums = api.row_gradients(entry_of.size, gradients)
    return named(distinct, counts), sums
