"""Initial rows and slots of the shards that a device has, without ever holding a whole table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import initial_rows, table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.optimizers import OptimizerSpec, Slots
from rsembed.places import Place
from rsembed.specs import TableSpec

# Tables are filled block by block, so that the random numbers of a block are all that init needs beside the table.
INIT_BLOCK_VALUES = 1 << 18


class OwnShards(NamedTuple):
    """The shards of one device: `num_own` from `first` on, with tables dealt to `spread` of all shards."""

    first: Int[Array, ""]
    num_own: int
    rows_per_shard: int
    spread: int


class PlacedTable(NamedTuple):
    """A table, where it lies, and the rows that it has there; those behind its vocabulary hold zeros."""

    spec: TableSpec
    place: Place
    num_rows: int


def initial_shards(
    key: PRNGKeyArray,
    tables: Sequence[PlacedTable],
    shards: OwnShards,
    *,
    rule: OptimizerSpec,
    columns: tuple[Int[Array, ""] | int, int],
    is_full: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Slots]:
    """Rows and slots, which depend on `key`, the tables' names and their initializers alone.

    Args:
      key: the model's key.
      tables: those of a stack.
      shards: where to build them.
      rule: whose slots they are.
      columns: the first one to keep, and how many; columns that a table does not have hold zeros.
      is_full: the tables have all rows of all shards, so that nothing needs to be written twice.
      implementation: who allocates and writes.
    """
    rows = jax.ShapeDtypeStruct((shards.num_own * shards.rows_per_shard, columns[1]), jnp.float32)
    parts = [(rows.shape, jnp.dtype(tables[0].spec.dtype))]
    parts += [(slot.shape, slot.dtype) for slot in jax.eval_shape(rule.init_slots, rows)]
    fill = None if is_full else 0.0
    arrays = tuple(api.allocate(*part, fill, implementation=implementation) for part in parts)

    def write(arrays: tuple[Array, ...], rows: Array, values: Array) -> tuple[Array, ...]:
        return api.scatter_rows(arrays, rows, (values, *rule.init_slots(values)), implementation=implementation)

    groups: dict[object, list[PlacedTable]] = {}  # tables of equal size and initializer: one compiled loop fills all
    for table in tables:
        alike = table.spec.initializer, table.spec.vocabulary_size, table.spec.embedding_dim
        groups.setdefault(alike, []).append(table)
    for group in groups.values():
        arrays = _filled(arrays, key, group, shards, columns, write)
    return arrays[0], arrays[1:]


def _filled(
    arrays: tuple[Array, ...],
    key: PRNGKeyArray,
    tables: Sequence[PlacedTable],
    shards: OwnShards,
    columns: tuple[Any, int],
    write: Callable[[tuple[Array, ...], Array, Array], tuple[Array, ...]],
) -> tuple[Array, ...]:
    spec, num_rows = tables[0].spec, tables[0].num_rows
    keys = table_keys(key, [table.spec.name for table in tables])
    places = Place(*jnp.asarray([table.place for table in tables], jnp.int32).T)
    rows_of_shard = -(-num_rows // shards.spread)
    block = min(rows_of_shard, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))
    num_blocks = -(-rows_of_shard // block)

    def fill_block(number: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        own, first = number // num_blocks, number % num_blocks * block
        table, shard = own // shards.num_own, own % shards.num_own
        place = jax.tree.map(lambda field: field[table], places)
        where = shards.first + shard
        rows = place.first_row(where, spread=shards.spread) + first + jnp.arange(block, dtype=jnp.int32)
        ids = place.ids(where, rows, spread=shards.spread)
        values = initial_rows(keys[table], spec, jnp.clip(ids, 0, spec.vocabulary_size - 1))
        values = jnp.where((ids < spec.vocabulary_size)[:, None], values, 0.0)
        values = jnp.pad(values, ((0, 0), (0, max(0, columns[1] - spec.embedding_dim))))
        values = jax.lax.dynamic_slice_in_dim(values, *columns, axis=1)
        is_own = (ids >= 0) & (ids < num_rows)
        return write(arrays, jnp.where(is_own, shard * shards.rows_per_shard + rows, NO_ROW), values)

    return jax.lax.fori_loop(0, len(tables) * shards.num_own * num_blocks, fill_block, arrays)
