"""One device's share of a table without hash table: key `k` has row `k // n` of device `k % n`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import Slots
from rsembed.sok.dynamic_table import DynamicTableSpec, initial_values
from rsembed.sok.keys import Keys, local_rows

INIT_BLOCK_VALUES = 1 << 20


class StaticTable(NamedTuple):
    """Arrays of one device.

    Attributes:
      rows: `[rows, dim]`.
      slots: optimizer state beside them.
      unknown: keys so far that had no row, `[1]`.
    """

    rows: Array
    slots: Slots
    unknown: Int[Array, "1"]


def init(spec: DynamicTableSpec, key: PRNGKeyArray, shard: Int[Array, ""], num_shards: int) -> StaticTable:
    """All rows with the initial values that a hash table would give to their keys, made block by block."""
    own_key = table_key(key, spec.name)
    block = min(spec.capacity, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))
    shapes = jax.ShapeDtypeStruct((spec.capacity, spec.embedding_dim), jnp.float32)
    slots = jax.eval_shape(spec.optimizer.init_slots, shapes)
    dtypes = [jnp.dtype(spec.dtype), *(slot.dtype for slot in slots)]
    arrays = tuple(api.allocate(x.shape, dtype) for x, dtype in zip((shapes, *slots), dtypes, strict=True))

    def fill(i: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        first = jnp.minimum(i * block, spec.capacity - block)
        low = (first + jnp.arange(block, dtype=jnp.int32)).astype(jnp.uint32) * jnp.uint32(num_shards)
        low = low + shard.astype(jnp.uint32)
        values = initial_values(spec, own_key, Keys(jnp.zeros_like(low), low, jnp.ones(low.shape, bool)))
        parts = values, *spec.optimizer.init_slots(values)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), first, 0)
            for array, part in zip(arrays, parts, strict=True)
        )

    arrays = jax.lax.fori_loop(0, -(-spec.capacity // block), fill, arrays)
    return StaticTable(arrays[0], arrays[1:], jnp.zeros(1, jnp.int32))


def translate(table: StaticTable, keys: Keys, num_shards: int) -> tuple[StaticTable, Int[Array, " nnz"]]:
    """The row of every key; `NO_ROW` for padding and keys beyond the table, which are counted."""
    rows = local_rows(keys, num_shards, table.rows.shape[0])
    unknown = table.unknown + jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)
    return table._replace(unknown=unknown), rows
