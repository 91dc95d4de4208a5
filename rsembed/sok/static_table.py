"""A shard without hash table: key `k` has row `k // n` of device `k % n`, and all rows are there from the start."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import table_key
from rsembed.kernels.contract import NO_ROW
from rsembed.sok.dynamic_table import Counters, DynamicTable, DynamicTableSpec, allocate, initial_values
from rsembed.sok.keys import Keys, local_rows

INIT_BLOCK_VALUES = 1 << 20


def init(spec: DynamicTableSpec, key: PRNGKeyArray, shard: Int[Array, ""], num_shards: int) -> DynamicTable:
    """All rows with the initial values that a hash table would give to their keys, made block by block."""
    own_key = table_key(key, spec.name)
    block = min(spec.capacity, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))

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

    arrays = jax.lax.fori_loop(0, -(-spec.capacity // block), fill, allocate(spec, spec.capacity, fill=None))
    counters = Counters(unknown=jnp.zeros(1, jnp.int32))
    return DynamicTable(None, arrays[0], arrays[1:], None, counters, own_key[None])


def translate(table: DynamicTable, keys: Keys, num_shards: int) -> tuple[DynamicTable, Int[Array, " nnz"]]:
    """The row of every key; `NO_ROW` for padding and keys beyond the table, which are counted."""
    rows = local_rows(keys, num_shards, table.rows.shape[0])
    unknown = jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)
    return table._replace(counters=table.counters.add(unknown=unknown)), rows
