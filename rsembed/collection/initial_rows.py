"""Initial rows and slots of the shards that a device has, without ever holding a whole table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import form, initial_rows, table_keys
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
    arrays = tuple(api.dispatch("allocate", implementation, *part, fill) for part in parts)

    def write(arrays: tuple[Array, ...], rows: Array, values: Array) -> tuple[Array, ...]:
        with_slots = values, *rule.init_slots(values)
        return cast(tuple[Array, ...], api.dispatch("scatter_rows", implementation, arrays, rows, with_slots))

    # Tables of one form, and of sizes that one size of blocks suits, are filled by one compiled loop.
    groups: dict[tuple[Hashable, int], list[PlacedTable]] = {}
    forms: dict[Hashable, Hashable] = {}
    for table in tables:
        alike = table.spec.initializer, table.spec.vocabulary_size, table.spec.embedding_dim
        if alike not in forms:
            forms[alike] = form(table.spec)
        groups.setdefault((forms[alike], _block_of(table, shards)), []).append(table)
    for (_, block), group in groups.items():
        arrays = _filled(arrays, key, group, block, shards, columns, write)
    return arrays[0], arrays[1:]


def _block_of(table: PlacedTable, shards: OwnShards) -> int:
    """Rows that are made at a time: a power of four that holds all that a shard has, up to those of a full block."""
    most = max(1, INIT_BLOCK_VALUES // table.spec.embedding_dim)
    bits = max(-(-table.num_rows // shards.spread) - 1, 0).bit_length()
    return min(most, 1 << (bits + bits % 2))


def _filled(
    arrays: tuple[Array, ...],
    key: PRNGKeyArray,
    tables: Sequence[PlacedTable],
    block: int,
    shards: OwnShards,
    columns: tuple[Any, int],
    write: Callable[[tuple[Array, ...], Array, Array], tuple[Array, ...]],
) -> tuple[Array, ...]:
    spec, keys = tables[0].spec, table_keys(key, [table.spec.name for table in tables])
    places = Place(*jnp.asarray([table.place for table in tables], jnp.int32).T)
    num_blocks = np.asarray([-(-table.num_rows // (shards.spread * block)) for table in tables], np.int32)
    num_rows = jnp.asarray([table.num_rows for table in tables], jnp.int32)
    num_ids = jnp.asarray([table.spec.vocabulary_size for table in tables], jnp.int32)
    ends = np.cumsum(num_blocks * shards.num_own, dtype=np.int32)

    def fill_block(number: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        table = jnp.searchsorted(jnp.asarray(ends), number, side="right")
        own, blocks = number - (jnp.asarray(ends) - num_blocks * shards.num_own)[table], jnp.asarray(num_blocks)[table]
        shard, first = own // blocks, own % blocks * block
        place = jax.tree.map(lambda field: field[table], places)
        where = shards.first + shard
        rows = place.first_row(where, spread=shards.spread) + first + jnp.arange(block, dtype=jnp.int32)
        ids = place.ids(where, rows, spread=shards.spread)
        values = initial_rows(keys[table], spec, jnp.clip(ids, 0, num_ids[table] - 1))
        values = jnp.where((ids < num_ids[table])[:, None], values, 0.0)
        values = jnp.pad(values, ((0, 0), (0, max(0, columns[1] - spec.embedding_dim))))
        values = jax.lax.dynamic_slice_in_dim(values, *columns, axis=1)
        is_own = (ids >= 0) & (ids < num_rows[table])
        return write(arrays, jnp.where(is_own, shard * shards.rows_per_shard + rows, NO_ROW), values)

    return jax.lax.fori_loop(0, int(ends[-1]), fill_block, arrays)
