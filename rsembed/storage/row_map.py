"""Map from keys to rows: assigns rows to new keys, finds them, and releases them for other keys.

All functions work inside `jit`. Rows are found by open addressing with linear probing. At most half
of the slots hold keys, and at most another quarter are deleted, so every search reaches an empty
slot. `kernels/keyed.py` defines the content of a slot and the choice of a slot for a key.

Several tables can be concatenated in every array. Row numbers in arguments and results are global.
Row numbers in the arrays are relative to their table. Each table is padded to the size of the
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
ROW_FACTOR = 0x9E3779B9  # It is odd, so different rows of a key give different numbers.


class HashTable(NamedTuple):
    """Hash tables of equal size, concatenated. The number of slots of each is a power of two.

    Attributes:
      keys: high and low lane of the key in every slot.
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
        lanes, rows = (
            api.allocate((num_slots, 2), jnp.uint32, 0),
            api.allocate((num_slots,), jnp.int32, EMPTY),
        )
        return HashTable(
            lanes, rows, jnp.zeros(num_tables, jnp.int32), jnp.zeros(num_tables, jnp.int32)
        )

    def insert(self, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
        """The hash tables after distinct, absent keys are added. Padding is skipped.

        The caller must not add more keys than `max_keys` of `empty`. A key is left out if it would
        leave less than a quarter of the slots empty.
        """
        return HashTable(*api.insert_keys(*self, keys, rows))

    def remove(self, keys: Keys) -> HashTable:
        """The hash tables after distinct keys are removed. Absent keys and padding are skipped.

        A table is rebuilt when more than a quarter of its slots are deleted.
        """
        num_tables = self.num_keys.shape[0]
        slots = api.find_keys(self.keys, self.rows, keys, num_tables)[0]
        num_removed = counts_of(slots != NO_ROW, keys.table, num_tables)
        left = self._replace(
            rows=api.scatter_rows((self.rows,), slots, (jnp.full_like(slots, DELETED),))[0],
            num_keys=self.num_keys - num_removed,
            num_deleted=self.num_deleted + num_removed,
        )
        size = self.rows.shape[0] // num_tables
        is_crowded = left.num_deleted > size // 4

        def rebuilt() -> HashTable:
            is_new = jnp.repeat(is_crowded, size)
            kept = HashTable(
                jnp.where(is_new[:, None], jnp.uint32(0), left.keys),
                jnp.where(is_new, EMPTY, left.rows),
                jnp.where(is_crowded, 0, left.num_keys),
                jnp.where(is_crowded, 0, left.num_deleted),
            )
            return kept.with_keys_of(left, is_new)

        return jax.lax.cond(jnp.any(is_crowded), rebuilt, lambda: left)

    def with_keys_of(self, other: HashTable, marks: Bool[Array, " slots"]) -> HashTable:
        """The hash tables after the keys in marked slots of `other` are added."""
        num_slots, size = other.rows.shape[0], other.rows.shape[0] // other.num_keys.shape[0]
        # Blocks without a marked slot are skipped, because a rebuild moves the keys of few tables.
        block = math.gcd(num_slots, REBUILD_BLOCK)
        blocks, num_blocks = api.compact(
            jnp.any(marks.reshape(-1, block), axis=1), num_slots // block
        )

        def add_block(i: Array, table: HashTable) -> HashTable:
            first = blocks[i] * block
            rows, lanes, own = (
                jax.lax.dynamic_slice_in_dim(x, first, block)
                for x in (other.rows, other.keys, marks)
            )
            number = (
                None if size == num_slots else (first + jnp.arange(block, dtype=jnp.int32)) // size
            )
            return table.insert(Keys(lanes[:, 0], lanes[:, 1], own & (rows >= 0), number), rows)

        return jax.lax.fori_loop(0, num_blocks, add_block, self)


def counts_of(
    marks: Bool[Array, " n"], table: Int[Array, " n"] | None, num_tables: int
) -> Int[Array, " tables"]:
    """Number of marked entries of each table.

    Args:
      marks: mask of the entries to count.
      table: number of the table of each entry. None if there is one table.
      num_tables: number of tables.
    """
    if table is None:
        return jnp.sum(marks, dtype=jnp.int32)[None]
    return (
        jnp.zeros(num_tables, jnp.int32).at[jnp.where(marks, table, num_tables)].add(1, mode="drop")
    )


class RowMap(NamedTuple):
    """Map from keys to rows and back. Shards are concatenated along the leading axis of all leaves.

    Attributes:
      hashed: hash tables with the row of every key.
      high: upper 32 bits of the key of every row.
      low: lower 32 bits of the key of every row.
      last_step: last step that used the row. `FREE` if the row has no key.
      counts: number of occurrences of the row's key in training, at most `MAX_COUNT`.
      free: stack of free rows, one for each table. Its first `num_free` entries are free rows, and
        the last of these is assigned next. Entries after them are undefined.
      num_free: number of free rows of each table.
      signature: number computed from all pairs of key and row, for each table. Maps with equal
        pairs have equal signatures.
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
    most, own = max(capacities), jnp.asarray(capacities, jnp.int32)
    num_rows = (most * len(capacities),)
    return RowMap(
        hashed=HashTable.empty(most, len(capacities)),
        high=api.allocate(num_rows, jnp.uint32, 0),
        low=api.allocate(num_rows, jnp.uint32, 0),
        last_step=api.allocate(num_rows, jnp.int32, FREE),
        counts=api.allocate(num_rows, jnp.int32, 0),
        free=jnp.maximum(own[:, None] - 1 - jnp.arange(most, dtype=jnp.int32)[None], 0).reshape(-1),
        num_free=own,
        signature=jnp.zeros(len(capacities), jnp.uint32),
    )


def find(row_map: RowMap, keys: Keys) -> Int[Array, " nnz"]:
    """Row of each key. `NO_ROW` for unknown keys and padding."""
    return search(row_map, keys)[0]


def search(row_map: RowMap, keys: Keys) -> tuple[Int[Array, " nnz"], Int[Array, ""]]:
    """Row of each key as `find` returns it, and the number of keys without one."""
    _, rows, num_absent = api.find_keys(
        row_map.hashed.keys, row_map.hashed.rows, keys, row_map.num_tables
    )
    return _moved(row_map, rows, keys.table, 1), num_absent


def _moved(
    row_map: RowMap, rows: Int[Array, " nnz"], table: Array | None, sign: int
) -> Int[Array, " nnz"]:
    """Global row numbers from row numbers in tables (`sign` 1), or the inverse (`sign` -1)."""
    if table is None:
        return rows
    return jnp.where(rows == NO_ROW, NO_ROW, rows + sign * row_map.rows_per_table * table)


def assign(
    row_map: RowMap,
    keys: Keys,
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    *,
    evict: Eviction | None = None,
    is_signed: bool = False,
) -> tuple[RowMap, Int[Array, " nnz"], Int[Array, " tables"], Int[Array, " tables"]]:
    """The map after new keys got rows, in the order of the keys, and these rows.

    Args:
      row_map: the map.
      keys: distinct keys that are not in the map. Padding gets no row.
      step: number of the current step, at least 0. Rows that this step used are not evicted.
      occurrences: number of occurrences of each key so far.
      evict: policy that selects keys to evict if too few rows are free. None, the default, evicts
        no key.
      is_signed: True if keys are signed numbers. It matters if several keys have the smallest
        worth, because the smallest key is then evicted. False is the default.

    Returns: the map, the row of each key, the number of evicted keys of each table, and the number
      of keys of each table that got no row. The row of such a key is `NO_ROW`.
    """
    num_before = row_map.num_free
    if evict is not None:
        short = counts_of(keys.is_key, keys.table, row_map.num_tables) - num_before
        row_map = jax.lax.cond(
            jnp.any(short > 0),
            lambda known: _evict_least(known, short, step, evict, keys.low.shape[0], is_signed),
            lambda known: known,
            row_map,
        )
    num_evicted = row_map.num_free - num_before
    rows, num_free, num_without = api.take_rows(
        row_map.free, row_map.num_free, keys.is_key, keys.table
    )
    high, low = api.scatter_rows((row_map.high, row_map.low), rows, (keys.high, keys.low))
    with_row = keys._replace(is_key=rows != NO_ROW)
    own_rows = _moved(row_map, rows, keys.table, -1)
    hashed = row_map.hashed.insert(with_row, own_rows)
    signature = row_map.signature + _signature(with_row, own_rows, row_map.num_tables)
    filled = row_map._replace(
        hashed=hashed, high=high, low=low, num_free=num_free, signature=signature
    )
    return touch(filled, rows, step, occurrences), rows, num_evicted, num_without


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
    """The map after an import of keys, and the row of each key.

    Args:
      row_map: the map.
      keys: distinct keys. Keys that are not in the map get free rows.
      steps: last step that used each key.
      counts: number of occurrences of each key.

    Returns: the map, and the row of each key. `NO_ROW` for padding, and for keys that got no row.
    """
    rows = find(row_map, keys)
    new = keys.only(rows == NO_ROW)
    row_map, new_rows, *_ = assign(row_map, new, jnp.int32(0), counts)
    rows = jnp.where(new.is_key, new_rows, rows)
    return touch(row_map, rows, steps, counts), rows


def touch(
    row_map: RowMap,
    rows: Int[Array, " nnz"],
    step: Int[Array, "*nnz"],
    occurrences: Int[Array, " nnz"],
) -> RowMap:
    """The map with new last steps and counts for distinct rows.

    Args:
      row_map: the map.
      rows: distinct rows. `NO_ROW` is skipped.
      step: last step that used the rows, for all rows or one for each.
      occurrences: number of occurrences of each row's key so far, which replaces its count.
    """
    given = jnp.broadcast_to(step, rows.shape), occurrences
    last_step, counts = api.scatter_rows((row_map.last_step, row_map.counts), rows, given)
    return row_map._replace(last_step=last_step, counts=counts)


def use(
    row_map: RowMap, rows: Int[Array, " nnz"], step: Int[Array, ""], occurrences: Int[Array, " nnz"]
) -> RowMap:
    """The map after `step` used `rows`, which may repeat. Their counts grow by `occurrences`."""
    last_step, counts = api.count_uses(row_map.last_step, row_map.counts, rows, step, occurrences)
    return row_map._replace(last_step=last_step, counts=counts)


def count_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Number of occurrences of the keys of `rows`. 0 for `NO_ROW`."""
    return row_map.counts.at[rows].get(mode="fill", fill_value=0)


def add_counts(one: Int[Array, " nnz"], other: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Sums of two arrays of counts, at most `MAX_COUNT`."""
    return jnp.where(one > MAX_COUNT - other, MAX_COUNT, one + other)


def release(row_map: RowMap, rows: Int[Array, " nnz"]) -> RowMap:
    """The map after distinct `rows` lost their keys and became free. `NO_ROW` is skipped.

    The first of these rows in each table is assigned next.
    """
    is_row, table = rows != NO_ROW, table_of(row_map, rows)
    high, low = api.gather_rows((row_map.high, row_map.low), rows)
    rank, num_released = ranks(is_row, table, row_map.num_tables, api.distinct)
    num_free = row_map.num_free + num_released
    places = (num_free if table is None else num_free.at[table].get(mode="clip")) - 1 - rank
    free = jnp.where(is_row, _moved(row_map, places, table, 1), NO_ROW)
    keys, own_rows = Keys(high, low, is_row, table), _moved(row_map, rows, table, -1)
    return row_map._replace(
        hashed=row_map.hashed.remove(keys),
        last_step=row_map.last_step.at[rows].set(FREE, mode="drop"),
        free=row_map.free.at[free].set(own_rows, mode="drop"),
        num_free=num_free,
        signature=row_map.signature - _signature(keys, own_rows, row_map.num_tables),
    )


def table_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"] | None:
    """Number of the table of each row. None if there is one table."""
    return None if row_map.num_tables == 1 else rows // row_map.rows_per_table


def grow(row_map: RowMap, capacity: int) -> RowMap:
    """The map of one table with more rows. They are assigned after the rows that are free now."""
    old = row_map.last_step.shape[0]

    def extend(lane: Array, value: int) -> Array:
        return jnp.concatenate([lane, jnp.full(capacity - old, value, lane.dtype)])

    hashed, zero = row_map.hashed, varying_zero(row_map.hashed.rows)
    fresh: HashTable = jax.tree.map(lambda x: x + zero.astype(x.dtype), HashTable.empty(capacity))
    return RowMap(
        hashed=fresh.with_keys_of(hashed, jnp.ones(hashed.rows.shape, bool)),
        high=extend(row_map.high, 0),
        low=extend(row_map.low, 0),
        last_step=extend(row_map.last_step, FREE),
        counts=extend(row_map.counts, 0),
        free=jnp.concatenate(
            [jnp.arange(capacity - 1, old - 1, -1, dtype=jnp.int32), row_map.free]
        ),
        num_free=row_map.num_free + (capacity - old),
        signature=row_map.signature,
    )


def worth(row_map: RowMap, policy: Eviction) -> Int[Array, " rows"]:
    """Worth of each row: its last step ("lru"), or the number of occurrences of its key ("lfu").

    Keys with the smallest worth are evicted first. If worths are equal, the smallest key is first.
    """
    return row_map.last_step if policy == "lru" else row_map.counts


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
      step: number of the step.
      evicts: True if `assign` may evict keys.
    """
    if not evicts:
        return row_map.num_free
    is_left = _may_leave(row_map, step).at[rows].set(False, mode="drop")
    num_left = jnp.sum(is_left.reshape(row_map.num_tables, -1), axis=1, dtype=jnp.int32)
    return row_map.num_free + num_left


def first_marked(
    marks: Bool[Array, " n"],
    arrival: Int[Array, " n"] | None,
    table: Int[Array, " n"] | None,
    most: Int[Array, " tables"],
) -> Bool[Array, " n"]:
    """Mask of the first `most` marked entries of each table.

    Args:
      marks: mask of the entries to choose from.
      arrival: sort key of each entry. None means that the entries are in order.
      table: number of the table of each entry. None if there is one table.
      most: maximum number of entries of each table.
    """
    order = None
    if arrival is not None:
        places = jax.lax.broadcasted_iota(jnp.int32, arrival.shape, 0)
        _, order = jax.lax.sort((arrival, places), num_keys=1)
        marks = marks[order]
        table = None if table is None else table[order]
    rank, _ = ranks(marks, table, most.shape[0], api.distinct)
    limit = most if table is None else most.at[table].get(mode="clip")
    is_first = marks & (rank < limit)
    if order is None:
        return is_first
    return jnp.zeros_like(is_first).at[order].set(is_first)


def _evict_least(
    row_map: RowMap,
    num_wanted: Int[Array, " tables"],
    step: Int[Array, ""],
    policy: Eviction,
    most: int,
    is_signed: bool,
) -> RowMap:
    leaves = least(
        row_map, worth(row_map, policy), _may_leave(row_map, step), num_wanted, is_signed
    )
    return release(row_map, api.compact(leaves, most)[0])


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
      row_map: the map.
      worth: worth of each row, at least 0 for candidates.
      is_candidate: mask of the rows to choose from.
      num_wanted: number of rows to choose in each table.
      is_signed: True if keys are signed numbers. False is the default.
    """
    high = row_map.high
    if is_signed:
        high = high ^ jnp.uint32(SIGN_BIT)  # sorts negative keys before positive keys
    lanes = worth.astype(jnp.uint32), high, row_map.low
    if row_map.num_tables == 1:
        return _first(lanes, is_candidate, num_wanted[0])
    by_table = [lane.reshape(row_map.num_tables, -1) for lane in (*lanes, is_candidate)]
    found: Array = jax.vmap(lambda *own: _first(own[:3], *own[3:]))(*by_table, num_wanted)
    return found.reshape(-1)


def _first(
    lanes: Sequence[UInt32[Array, " rows"]],
    is_candidate: Bool[Array, " rows"],
    num_wanted: Int[Array, ""],
) -> Bool[Array, " rows"]:
    """Mask of the first `num_wanted` candidates in lexicographic order of their lanes.

    In each lane, the value of the last wanted candidate is found bit by bit. This takes a few
    passes over the lane and a fraction of the time of a sort. Bits that all candidates share need
    no pass. The search stops as soon as the wanted candidates are separated from the others.
    """
    chosen = jnp.zeros_like(is_candidate)
    for lane in lanes:
        bound = _bound(lane, is_candidate, num_wanted)
        is_below = is_candidate & (lane < bound)
        chosen, is_candidate = chosen | is_below, is_candidate & (lane == bound)
        num_wanted = num_wanted - jnp.sum(is_below, dtype=jnp.int32)
    return chosen | (is_candidate & (num_wanted > 0))


def _bound(
    lane: UInt32[Array, " rows"], is_candidate: Bool[Array, " rows"], num_wanted: Array
) -> UInt32[Array, ""]:
    """A lane value with at most `num_wanted` candidates below it.

    It is the value of the last wanted candidate, or any value with exactly `num_wanted` candidates
    below it. If there are fewer candidates than `num_wanted`, no candidate is above it.
    """
    most = jnp.max(jnp.where(is_candidate, lane, jnp.uint32(0)))
    differs = jnp.min(jnp.where(is_candidate, lane, most)) ^ most
    num_bits = 32 - jax.lax.clz(differs).astype(jnp.int32)
    for distance in (1, 2, 4, 8, 16):
        differs |= differs >> distance

    def look(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, bound, _ = state
        higher = bound | (jnp.uint32(1) << bit.astype(jnp.uint32))
        num_below = jnp.sum(is_candidate & (lane < higher), dtype=jnp.int32)
        return bit - 1, jnp.where(num_below <= num_wanted, higher, bound), num_below == num_wanted

    is_found = num_wanted + varying_zero(lane, is_candidate) <= 0
    start = num_bits - 1, most & ~differs, is_found
    bound: Array = jax.lax.while_loop(lambda state: (state[0] >= 0) & ~state[2], look, start)[1]
    return bound


# Keys of a batch


def entries(
    keys: Keys, occurrences: Int[Array, " nnz"]
) -> tuple[Int[Array, " nnz"], Keys, Int[Array, " nnz"], Int[Array, " nnz"]]:
    """Distinct keys in the order of their first occurrence.

    Args:
      keys: keys and padding, in any order.
      occurrences: number of occurrences in each entry.

    Returns: four values.
      1. Index of each key in the distinct keys. `NO_ROW` for padding.
      2. The distinct keys, with padding after the last one.
      3. Position of the first occurrence of each distinct key. `NO_ROW` for padding.
      4. Sum of the occurrences of each distinct key.
    """
    entry_of, first_of, counts = api.unique_keys(keys, occurrences)
    lanes = api.gather_rows(keys.lanes, first_of)
    return entry_of, Keys.of_lanes(lanes, first_of != NO_ROW), first_of, counts


def named(keys: Keys, counts: Int[Array, " nnz"]) -> UInt32[Array, "nnz lanes"]:
    """Distinct keys in the format of `RowGradients`: columns `(high, low, occurrences)`.

    If there are several tables, the number of the table is the fourth column. Padding has
    `occurrences` 0.
    """
    lanes = [keys.high, keys.low, counts.astype(jnp.uint32)]
    return jnp.stack(
        lanes if keys.table is None else [*lanes, keys.table.astype(jnp.uint32)], axis=1
    )


def unnamed(lanes: UInt32[Array, "nnz lanes"]) -> tuple[Keys, Int[Array, " nnz"]]:
    """The inverse of `named`: keys, and the number of occurrences of each."""
    table = lanes[:, 3].astype(jnp.int32) if lanes.shape[1] > 3 else None
    return Keys(lanes[:, 0], lanes[:, 1], lanes[:, 2] > 0, table), lanes[:, 2].astype(jnp.int32)


def combine(
    keys: Keys, occurrences: Int[Array, " nnz"], values: Float[Array, "nnz dim"]
) -> tuple[UInt32[Array, "nnz lanes"], Float[Array, "nnz dim"]]:
    """Distinct keys in the format of `named`, and the sum of the values of each.

    The keys are in the order of their first occurrence, with zeros after the last one.
    """
    entry_of, own, _, counts = entries(keys, occurrences)
    # Every distinct key occurs, so row `e` of the sums belongs to the distinct key `e`.
    _, sums = api.row_gradients(entry_of.size, CallGradients.of_rows(entry_of, values))
    return named(own, counts), sums
