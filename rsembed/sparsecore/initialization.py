"""Tables and slots at the start: every device builds its own rows, block by block.

A row's values depend on the key, the table and the row alone, so stacking, sharding and the number of devices never
change a logical table. Padding rows and columns are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.collection.initial_rows import OwnShards, PlacedTable, initial_shards
from rsembed.parallel.exchange import AxisName
from rsembed.sparsecore.belonging import variables_fingerprint
from rsembed.sparsecore.layout import cores_of, placed_stack, tables_by_stack
from rsembed.sparsecore.row_rule import rule_of_stack
from rsembed.sparsecore.variables import EmbeddingVariables
from rsembed.specs import TableSpec
from rsembed.stacking import place_of


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
    shards = OwnShards(first_shard, num_cores, stack.stack_vocab_size // num_shards, num_shards)
    placed = [
        PlacedTable(table, place_of(table.setting_in_stack, num_shards), table.setting_in_stack.padded_vocab_size)
        for table in tables
    ]
    rule, columns = rule_of_stack(stack, tables), (0, stack.stack_embedding_dim)
    table, slots = initial_shards(key, placed, shards, rule=rule, columns=columns, is_full=True)
    return EmbeddingVariables(table, stack.optimizer.pack_slots(slots), variables_fingerprint(tables))
