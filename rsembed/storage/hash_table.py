"""From 64-bit keys to row numbers, inside `jit`: open addressing with linear probing.

Of the slots at most half hold keys and at most a quarter more are deleted, so every search meets an empty slot.
`kernels/keyed.py` says what a slot holds and which one a key gets. Several tables of one size lie one behind the other;
the rows that they hold count from the first row of the table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, SegmentGradients
from rsembed.kernels.keyed import DELETED, EMPTY, varying_zero
from rsembed.keys import Keys

REBUILD_BLOCK = 16_384


class HashTable(NamedTuple):
    """Slots; of each table their number is a power of two.

    Attributes:
      keys: high and low lane of the key in every slot.
      rows: its row, `EMPTY` or `DELETED`.
      num_keys: how many slots of each table hold a key.
      num_deleted: how many slots of each table are deleted.
    """

    keys: UInt32[Array, "slots 2"]
    rows: Int[Array, " slots"]
    num_keys: Int[Array, " tables"]
    num_deleted: Int[Array, " tables"]

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return self.num_keys.shape[0]


def empty(max_keys: int, num_tables: int = 1) -> HashTable:
    """Tables for at most `max_keys` keys each."""
    num_slots = num_tables << (2 * max(max_keys, 1) - 1).bit_length()
    lanes, rows = api.allocate((num_slots, 2), jnp.uint32, 0), api.allocate((num_slots,), jnp.int32, EMPTY)
    return HashTable(lanes, rows, jnp.zeros(num_tables, jnp.int32), jnp.zeros(num_tables, jnp.int32))


def find(table: HashTable, keys: Keys) -> tuple[Int[Array, " nnz"], Int[Array, ""]]:
    """The row of every key, `NO_ROW` for absent keys and padding; and how many are absent. A key may occur again."""
    return api.find_keys(table.keys, table.rows, keys, table.num_tables)[1:]


def counts_of(marks: Bool[Array, " n"], table: Int[Array, " n"] | None, num_tables: int) -> Int[Array, " tables"]:
    """How many marked entries each table has."""
    if table is None:
        return jnp.sum(marks, dtype=jnp.int32)[None]
    return jnp.zeros(num_tables, jnp.int32).at[jnp.where(marks, table, num_tables)].add(1, mode="drop")


def insert(table: HashTable, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
    """The table with distinct, absent keys added; padding is skipped.

    The caller sees to it that there are no more keys than the table was made for; far beyond, keys are left out.
    """
    return HashTable(*api.insert_keys(*table, keys, rows))


def remove(table: HashTable, keys: Keys) -> HashTable:
    """The table without these distinct keys; absent keys and padding are skipped."""
    slots = api.find_keys(table.keys, table.rows, keys, table.num_tables)[0]
    num_removed = counts_of(slots != NO_ROW, keys.table, table.num_tables)
    table = table._replace(
        rows=api.scatter_rows((table.rows,), slots, (jnp.full_like(slots, DELETED),))[0],
        num_keys=table.num_keys - num_removed,
        num_deleted=table.num_deleted + num_removed,
    )
    needs = table.num_deleted > table.rows.shape[0] // table.num_tables // 4
    return jax.lax.cond(jnp.any(needs), lambda: rebuild(table, needs), lambda: table)


def rebuild(table: HashTable, needs: Bool[Array, " tables"]) -> HashTable:
    """The hash tables with equal contents; those that `needs` marks have no deleted slots any more."""
    is_new = jnp.repeat(needs, table.rows.shape[0] // table.num_tables)
    kept = HashTable(
        jnp.where(is_new[:, None], jnp.uint32(0), table.keys),
        jnp.where(is_new, EMPTY, table.rows),
        jnp.where(needs, 0, table.num_keys),
        jnp.where(needs, 0, table.num_deleted),
    )
    return _with_keys_of(kept, table, is_new)


def enlarged(table: HashTable, max_keys: int) -> HashTable:
    """A hash table with equal contents, room for `max_keys`, and no deleted slots."""
    zero = varying_zero(table.rows)
    fresh = jax.tree.map(lambda x: x + zero.astype(x.dtype), empty(max_keys))
    return _with_keys_of(fresh, table, jnp.ones(table.rows.shape, bool))


def _with_keys_of(table: HashTable, other: HashTable, marks: Bool[Array, " slots"]) -> HashTable:
    """A table with the keys that stand in marked slots of another one."""
    num_slots, size = other.rows.shape[0], other.rows.shape[0] // other.num_tables
    block = math.gcd(num_slots, REBUILD_BLOCK)  # most tables have none to move, most blocks belong to one table
    blocks, num_blocks = api.compact(jnp.any(marks.reshape(-1, block), axis=1), num_slots // block)

    def add_block(i: Array, table: HashTable) -> HashTable:
        first = blocks[i] * block
        rows, lanes, own = (jax.lax.dynamic_slice_in_dim(x, first, block) for x in (other.rows, other.keys, marks))
        number = None if other.num_tables == 1 else (first + jnp.arange(block, dtype=jnp.int32)) // size
        return insert(table, Keys(lanes[:, 0], lanes[:, 1], own & (rows >= 0), number), rows)

    return jax.lax.fori_loop(0, num_blocks, add_block, table)


def entries(
    keys: Keys, occurrences: Int[Array, " nnz"]
) -> tuple[Int[Array, " nnz"], Keys, Int[Array, " nnz"], Int[Array, " nnz"]]:
    """Distinct keys in the order of their first occurrence.

    Returns: which of them every key is, `NO_ROW` for padding; these keys, with padding behind the last one; where each
      occurs first, `NO_ROW` for padding; and the sum of its occurrences.
    """
    entry_of, first_of, counts = api.unique_keys(keys, occurrences)
    lanes = api.gather_rows(keys.lanes, first_of)
    return entry_of, Keys.of_lanes(lanes, first_of != NO_ROW), first_of, counts


def named(keys: Keys, counts: Int[Array, " nnz"]) -> UInt32[Array, "nnz lanes"]:
    """Distinct keys as `RowGradients` has them: `(high, low, occurrences)`, and which of several tables; then zeros."""
    lanes = [keys.high, keys.low, counts.astype(jnp.uint32)]
    return jnp.stack(lanes if keys.table is None else [*lanes, keys.table.astype(jnp.uint32)], axis=1)


def unnamed(lanes: UInt32[Array, "nnz lanes"]) -> tuple[Keys, Int[Array, " nnz"]]:
    """The inverse of `named`: keys, and how often each occurred."""
    table = lanes[:, 3].astype(jnp.int32) if lanes.shape[1] > 3 else None
    return Keys(lanes[:, 0], lanes[:, 1], lanes[:, 2] > 0, table), lanes[:, 2].astype(jnp.int32)


def combine(
    keys: Keys, occurrences: Int[Array, " nnz"], values: Float[Array, "nnz dim"]
) -> tuple[UInt32[Array, "nnz lanes"], Float[Array, "nnz dim"]]:
    """Distinct keys as `named` gives them, in the order of their first occurrence, and sums of their values.

    Behind the last one there are zeros.
    """
    entry_of, own, _, counts = entries(keys, occurrences)
    # Every entry occurs, so the sum in row `e` is that of entry `e`.
    _, sums = api.row_gradients(entry_of.size, SegmentGradients.of_rows(entry_of, values))
    return named(own, counts), sums


def num_distinct(keys: Keys) -> Int[Array, ""]:
    """How many different keys there are; costs next to nothing where there is none."""

    def count(keys: Keys) -> Int[Array, ""]:
        first_of = api.unique_keys(keys, jnp.ones(keys.shape, jnp.int32))[1]
        return jnp.sum(first_of != NO_ROW, dtype=jnp.int32)

    return jax.lax.cond(jnp.any(keys.is_key), count, lambda keys: varying_zero(keys.is_key), keys)
