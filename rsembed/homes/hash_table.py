"""From 64-bit keys to row numbers, inside `jit`: open addressing with linear probing.

Of the slots at most half hold keys and at most a quarter more are deleted, so every search meets an empty slot.
`kernels/keyed.py` says what a slot holds and which one a key gets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.kernels.keyed import DELETED, EMPTY, varying_zero
from rsembed.keys import Keys

REBUILD_BLOCK = 16_384


class HashTable(NamedTuple):
    """Slots; their number is a power of two.

    Attributes:
      keys: high and low lane of the key in every slot.
      rows: its row, `EMPTY` or `DELETED`.
      num_keys: how many slots hold a key.
      num_deleted: how many slots are deleted.
    """

    keys: UInt32[Array, "slots 2"]
    rows: Int[Array, " slots"]
    num_keys: Int[Array, "1"]
    num_deleted: Int[Array, "1"]


def empty(max_keys: int) -> HashTable:
    """A table for at most `max_keys` keys."""
    num_slots = 1 << (2 * max(max_keys, 1) - 1).bit_length()
    lanes, rows = api.allocate((num_slots, 2), jnp.uint32, 0), api.allocate((num_slots,), jnp.int32, EMPTY)
    return HashTable(lanes, rows, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))


def find(table: HashTable, keys: Keys) -> tuple[Int[Array, " nnz"], Int[Array, ""]]:
    """The row of every key, `NO_ROW` for absent keys and padding; and how many are absent. A key may occur again."""
    return api.find_keys(table.keys, table.rows, keys)[1:]


def insert(table: HashTable, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
    """The table with distinct, absent keys added; padding is skipped.

    The caller sees to it that there are no more keys than the table was made for; far beyond, keys are left out.
    """
    return HashTable(*api.insert_keys(*table, keys, rows))


def remove(table: HashTable, keys: Keys) -> HashTable:
    """The table without these distinct keys; absent keys and padding are skipped."""
    slots = api.find_keys(table.keys, table.rows, keys)[0]
    num_removed = jnp.sum(slots != NO_ROW, dtype=jnp.int32)
    table = table._replace(
        rows=api.scatter_rows((table.rows,), slots, (jnp.full_like(slots, DELETED),))[0],
        num_keys=table.num_keys - num_removed,
        num_deleted=table.num_deleted + num_removed,
    )
    return jax.lax.cond(table.num_deleted[0] > table.rows.shape[0] // 4, rebuild, lambda same: same, table)


def rebuild(table: HashTable, max_keys: int | None = None) -> HashTable:
    """The same keys and rows, without deleted slots; in a table for `max_keys` keys, or as large as before."""
    num_slots = table.rows.shape[0]
    block = min(num_slots, REBUILD_BLOCK)
    fresh = empty(num_slots // 2 if max_keys is None else max_keys)
    zero = varying_zero(table.rows)
    fresh = jax.tree.map(lambda x: x + zero.astype(x.dtype), fresh)

    def add_block(i: Array, fresh: HashTable) -> HashTable:
        rows, lanes = (jax.lax.dynamic_slice_in_dim(x, i * block, block) for x in (table.rows, table.keys))
        return insert(fresh, Keys(lanes[:, 0], lanes[:, 1], rows >= 0), rows)

    return jax.lax.fori_loop(0, num_slots // block, add_block, fresh)


def entries(
    keys: Keys, occurrences: Int[Array, " nnz"]
) -> tuple[Int[Array, " nnz"], Keys, Int[Array, " nnz"], Int[Array, " nnz"]]:
    """Distinct keys in the order of their first occurrence.

    Returns: which of them every key is, `NO_ROW` for padding; these keys, with padding behind the last one; where each
      occurs first, `NO_ROW` for padding; and the sum of its occurrences.
    """
    entry_of, first_of, counts = api.unique_keys(keys, occurrences)
    high, low = api.gather_rows((keys.high, keys.low), first_of)
    return entry_of, Keys(high, low, first_of != NO_ROW), first_of, counts


def named(keys: Keys, counts: Int[Array, " nnz"]) -> UInt32[Array, "nnz 3"]:
    """Distinct keys as `RowGradients` has them: `(high, low, occurrences)`, zeros for padding."""
    return jnp.stack([keys.high, keys.low, counts.astype(jnp.uint32)], axis=1)


def combine(
    keys: Keys, occurrences: Int[Array, " nnz"], values: Float[Array, "nnz dim"]
) -> tuple[UInt32[Array, "nnz 3"], Float[Array, "nnz dim"]]:
    """Distinct keys as `(high, low, occurrences)`, in the order of their first occurrence, and sums of their values.

    Behind the last one there are zeros.
    """
    entry_of, own, _, counts = entries(keys, occurrences)
    # Every entry occurs, so the sum in row `e` is that of entry `e`.
    _, sums = api.row_gradients(entry_of.size, [Segment(entry_of, None, None, "none")], [values])
    return named(own, counts), sums


def num_distinct(keys: Keys) -> Int[Array, ""]:
    """How many different keys there are; costs next to nothing where there is none."""

    def count(keys: Keys) -> Int[Array, ""]:
        first_of = api.unique_keys(keys, jnp.ones(keys.shape, jnp.int32))[1]
        return jnp.sum(first_of != NO_ROW, dtype=jnp.int32)

    return jax.lax.cond(jnp.any(keys.is_key), count, lambda keys: varying_zero(keys.is_key), keys)
