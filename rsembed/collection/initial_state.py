"""Initial rows and slots of one shard, without ever holding a whole table."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.collection.layout import RowLayout
from rsembed.initial_values import initial_rows, table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec

# Tables are filled block by block, so that the random numbers of a block are all that init needs beside the table.
INIT_BLOCK_VALUES = 1 << 20


def initial_shard(
    layout: RowLayout,
    specs: Mapping[str, TableSpec],
    key: PRNGKeyArray,
    *,
    shard: Int[Array, ""],
    columns: tuple[Int[Array, ""], int],
    implementation: str | None = None,
) -> tuple[Array, Slots]:
    """Rows and slots of one shard, which depend on `key`, the tables' names and initializers alone.

    Args:
      layout: where the rows of the stack lie.
      specs: all tables by name.
      key: the model's key.
      shard: which one.
      columns: the first column to keep, and how many.
      implementation: who allocates and writes.
    """
    stack, optimizer = layout.stack, layout.stack.spec.optimizer
    one_row = jax.ShapeDtypeStruct((1, columns[1]), jnp.float32)
    dtypes = [(one_row.shape, jnp.dtype(stack.dtype))]
    dtypes += [(slot.shape, slot.dtype) for slot in jax.eval_shape(optimizer.init_slots, one_row)]
    # Rows that no table uses are zeros; where there are none, nothing is written twice.
    padding = None if layout.num_rows == stack.spec.stack_vocab_size else 0.0
    arrays = tuple(
        api.allocate((layout.rows_per_shard, *shape[1:]), dtype, padding, implementation=implementation)
        for shape, dtype in dtypes
    )
    groups: dict[object, list[int]] = {}  # tables of equal size and initializer: one compiled loop fills them all
    for position, table in enumerate(stack.tables):
        groups.setdefault((specs[table.name].initializer, table.rows), []).append(position)
    for positions in groups.values():
        arrays = _fill_tables(layout, specs, positions, key, shard, columns, arrays, implementation)
    return arrays[0], arrays[1:]


def _fill_tables(
    layout: RowLayout,
    specs: Mapping[str, TableSpec],
    positions: list[int],
    key: PRNGKeyArray,
    shard: Array,
    columns: tuple[Array, int],
    arrays: tuple[Array, ...],
    implementation: str | None,
) -> tuple[Array, ...]:
    names = [layout.stack.tables[p].name for p in positions]
    spec, keys = specs[names[0]], jnp.stack([table_key(key, name) for name in names])
    places = jnp.asarray([layout.places[p] for p in positions], jnp.int32)
    rows_of_table = -(-spec.vocabulary_size // layout.spread)
    block = min(rows_of_table, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))
    num_blocks = -(-rows_of_table // block)

    def fill_block(i: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        table = i // num_blocks
        first = layout.first_row(places[table], shard) + (i % num_blocks) * block
        local = first + jnp.arange(block, dtype=jnp.int32)
        ids = layout.ids(places[table], shard, local)
        is_inside = (ids >= 0) & (ids < spec.vocabulary_size)
        values = initial_rows(keys[table], spec, jnp.where(is_inside, ids, 0))
        values = jax.lax.dynamic_slice_in_dim(values, *columns, axis=1)
        parts = (values, *spec.optimizer.init_slots(values))
        return api.scatter_rows(arrays, jnp.where(is_inside, local, NO_ROW), parts, implementation=implementation)

    return jax.lax.fori_loop(0, num_blocks * len(positions), fill_block, arrays)
