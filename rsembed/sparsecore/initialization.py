"""Tables and slots at the start: every device builds its own rows, block by block.

A row's values depend on the key, the table and the row alone, so stacking, sharding and the number of devices never
change a logical table. Padding rows and columns are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import initial_rows, table_key
from rsembed.kernels import api
from rsembed.optimizers import OptimizerSpec
from rsembed.parallel.exchange import AxisName
from rsembed.places import Place
from rsembed.sparsecore.belonging import variables_fingerprint
from rsembed.sparsecore.layout import cores_of, placed_stack, tables_by_stack
from rsembed.sparsecore.row_rule import rule_of_stack
from rsembed.sparsecore.variables import EmbeddingVariables
from rsembed.specs import TableSpec
from rsembed.stacking import SUBLANES, place_of

BLOCK_VALUES = 1 << 18
"""Values built at a time: what initialisation needs beside the table itself."""


def initialize(
    key: PRNGKeyArray,
    tables: Sequence[TableSpec],
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    num_cores: int | None,
) -> dict[str, EmbeddingVariables]:
    """Variables of all stacks, sharded over `axis_name`. Compiled, or traced as part of what is being compiled.

    Args:
      key: the model's key, typed or raw.
      tables: placed tables.
      mesh: the devices.
      axis_name: mesh axis (or axes) over which rows are sharded.
      num_cores: cores per device; None takes the number that the tables were placed for.

    Raises: ValueError: a table was not placed, or for another number of shards; tables of a stack are missing.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    num_devices = math.prod(mesh.shape[axis] for axis in axes)
    stacks = tables_by_stack(tables)
    num_cores = cores_of(tables, num_devices, num_cores)
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


def _build_stack(
    key: PRNGKeyArray, tables: Sequence[TableSpec], first_shard: Int[Array, ""], *, num_cores: int, num_shards: int
) -> EmbeddingVariables:
    """This device's part of one stack."""
    stack = placed_stack(tables[0])
    rule = rule_of_stack(stack, tables)
    rows_per_shard, dim = stack.stack_vocab_size // num_shards, stack.stack_embedding_dim
    num_rows = rows_per_shard * num_cores
    arrays = [api.allocate((num_rows, dim), jnp.dtype(tables[0].dtype))]
    for slot in jax.eval_shape(rule.init_slots, jax.ShapeDtypeStruct((SUBLANES, dim), jnp.float32)):
        arrays.append(api.allocate((num_rows, *slot.shape[1:]), slot.dtype))
    filled = tuple(arrays)
    # One compiled loop fills all tables of equal initializer and size.
    groups: dict[Any, list[TableSpec]] = {}
    for table in tables:
        groups.setdefault((table.initializer, table.vocabulary_size, table.embedding_dim), []).append(table)
    for alike in groups.values():
        filled = _fill_tables(key, alike, filled, first_shard, rule, num_cores=num_cores, num_shards=num_shards)
    return EmbeddingVariables(filled[0], stack.optimizer.pack_slots(filled[1:]), variables_fingerprint(tables))


def _fill_tables(
    key: PRNGKeyArray,
    tables: Sequence[TableSpec],
    arrays: tuple[Array, ...],
    first_shard: Int[Array, ""],
    rule: OptimizerSpec,
    *,
    num_cores: int,
    num_shards: int,
) -> tuple[Array, ...]:
    table_rows = tables[0].setting_in_stack.padded_vocab_size // num_shards
    vocabulary_size, (num_rows, dim) = tables[0].vocabulary_size, arrays[0].shape
    block_rows = min(table_rows, max(SUBLANES, BLOCK_VALUES // dim))
    blocks_per_core = -(-table_rows // block_rows)
    keys = jnp.stack([table_key(key, table.name) for table in tables])
    places = Place(*jnp.asarray([place_of(t.setting_in_stack, num_shards) for t in tables], jnp.int32).T)

    def fill_block(number: Int[Array, ""], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        table, rest = number // (num_cores * blocks_per_core), number % (num_cores * blocks_per_core)
        core, block = rest // blocks_per_core, rest % blocks_per_core
        # The last block overlaps the one before it and writes the same values again.
        place = jax.tree.map(lambda field: field[table], places)
        shard = first_shard + core
        first_row = place.first // num_shards + jnp.minimum(block * block_rows, table_rows - block_rows)
        ids = place.ids(shard, first_row + jnp.arange(block_rows, dtype=jnp.int32), spread=num_shards)
        values = initial_rows(keys[table], tables[0], jnp.minimum(ids, vocabulary_size - 1))
        values = jnp.where((ids < vocabulary_size)[:, None], values, 0.0)
        values = jnp.pad(values, ((0, 0), (0, dim - tables[0].embedding_dim)))
        start = core * (num_rows // num_cores) + first_row
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, axis=0)
            for array, part in zip(arrays, (values, *rule.init_slots(values)), strict=True)
        )

    return jax.lax.fori_loop(0, len(tables) * num_cores * blocks_per_core, fill_block, arrays)
