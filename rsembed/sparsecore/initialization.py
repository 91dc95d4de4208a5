"""Tables and slots at the start: every device builds its own rows, block by block.

A row's values depend on the key, the table and the row alone, so stacking, sharding and the number of devices never
change a logical table. Padding rows and columns are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.initial_values import initial_rows
from rsembed.optimizers import OptimizerSpec, Slots
from rsembed.parallel.exchange import AxisName
from rsembed.sparsecore.layout import placed_stack
from rsembed.sparsecore.row_rule import rule_of_stack
from rsembed.sparsecore.variables import EmbeddingVariables
from rsembed.specs import TableSpec
from rsembed.stacking import SUBLANES

BLOCK_VALUES = 1 << 18
"""Values built at a time: what initialisation needs beside the table itself."""


def initialize(
    key: PRNGKeyArray,
    tables: Sequence[TableSpec],
    *,
    mesh: Mesh,
    axis_name: AxisName,
    num_cores: int,
) -> dict[str, EmbeddingVariables]:
    """Variables of all stacks, sharded over `axis_name`. Compiled, or traced as part of what is being compiled.

    Args:
      key: the model's key, typed or raw.
      tables: placed tables.
      mesh: the devices.
      axis_name: mesh axis (or axes) over which rows are sharded.
      num_cores: cores per device.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    num_devices = 1
    for axis in axes:
        num_devices *= mesh.shape[axis]
    stacks = tables_by_stack(tables)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def build(key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        first_shard = jax.lax.axis_index(axes) * num_cores
        return {
            name: _build_stack(key, members, first_shard, num_cores=num_cores, num_shards=num_devices * num_cores)
            for name, members in stacks.items()
        }

    sharded = jax.shard_map(build, mesh=mesh, in_specs=P(), out_specs=P(axes), check_vma=False)
    return jax.jit(sharded)(key)


def tables_by_stack(tables: Sequence[TableSpec]) -> dict[str, list[TableSpec]]:
    """Stack name to its tables, from the first row to the last.

    Raises:
      ValueError: a table was not placed, or tables of its stack are missing.
    """
    stacks: dict[str, dict[str, TableSpec]] = {}
    for table in tables:
        stacks.setdefault(placed_stack(table).stack_name, {})[table.name] = table
    ordered = {}
    for name, members in stacks.items():
        ordered[name] = sorted(members.values(), key=lambda table: table.setting_in_stack.row_offset_in_shard)
        present = sum(table.setting_in_stack.padded_vocab_size for table in members.values())
        expected = placed_stack(ordered[name][0]).stack_vocab_size
        if present != expected:
            raise ValueError(
                f"stack {name!r} has {expected} rows, but its given tables {sorted(members)} have {present}; pass all "
                "tables of the stack."
            )
    return ordered


def _build_stack(
    key: PRNGKeyArray, tables: Sequence[TableSpec], first_shard: Int[Array, ""], *, num_cores: int, num_shards: int
) -> EmbeddingVariables:
    """This device's part of one stack."""
    stack = placed_stack(tables[0])
    rule = rule_of_stack(stack, tables)
    rows_per_shard, dim = stack.stack_vocab_size // num_shards, stack.stack_embedding_dim
    num_rows = rows_per_shard * num_cores
    table_array = jnp.zeros((num_rows, dim), tables[0].dtype)
    block = jax.ShapeDtypeStruct((SUBLANES, dim), jnp.float32)
    slots = tuple(
        jnp.zeros((num_rows, *slot.shape[1:]), slot.dtype) for slot in jax.eval_shape(rule.init_slots, block)
    )
    for table in tables:
        table_array, slots = _write_table(
            key, table, (table_array, slots), first_shard, rule, num_cores=num_cores, num_shards=num_shards
        )
    return EmbeddingVariables(table_array, stack.optimizer.pack_slots(slots))


def _write_table(
    key: PRNGKeyArray,
    table: TableSpec,
    arrays: tuple[Array, Slots],
    first_shard: Int[Array, ""],
    rule: OptimizerSpec,
    *,
    num_cores: int,
    num_shards: int,
) -> tuple[Array, Slots]:
    setting = table.setting_in_stack
    table_rows = setting.padded_vocab_size // num_shards
    num_rows, dim = arrays[0].shape
    block_rows = min(table_rows, max(SUBLANES, BLOCK_VALUES // dim))
    blocks_per_core = -(-table_rows // block_rows)

    def write_block(number: Int[Array, ""], arrays: tuple[Array, Slots]) -> tuple[Array, Slots]:
        core, block = number // blocks_per_core, number % blocks_per_core
        # The last block overlaps the one before it and writes the same values again.
        first_row = jnp.minimum(block * block_rows, table_rows - block_rows)
        shard = (first_shard + core - setting.shard_rotation) % num_shards
        ids = (first_row + jnp.arange(block_rows, dtype=jnp.int32)) * num_shards + shard
        values = _padded_rows(key, table, ids, dim)
        place = core * (num_rows // num_cores) + setting.row_offset_in_shard + first_row

        def put(array: Array, block: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), place, axis=0)

        new_slots = rule.init_slots(values)
        return put(arrays[0], values), tuple(map(put, arrays[1], new_slots))

    return jax.lax.fori_loop(0, num_cores * blocks_per_core, write_block, arrays)


def _padded_rows(
    key: PRNGKeyArray, table: TableSpec, ids: Int[Array, " rows"], dim: int
) -> Float[Array, "rows columns"]:
    is_real = (ids < table.vocabulary_size)[:, None]
    values = initial_rows(key, table, jnp.minimum(ids, table.vocabulary_size - 1))
    return jnp.pad(jnp.where(is_real, values, 0.0), ((0, 0), (0, dim - table.embedding_dim)))

