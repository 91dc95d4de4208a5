"""Initial rows and slots of one shard of a collection."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.collection.initial_rows import OwnShards, PlacedTable, initial_shards
from rsembed.collection.layout import RowLayout
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec


def initial_shard(
    layout: RowLayout,
    specs: Mapping[str, TableSpec],
    key: PRNGKeyArray,
    *,
    shard: Int[Array, ""],
    columns: tuple[Int[Array, ""], int],
    implementation: str | None = None,
) -> tuple[Array, Slots]:
    """Rows and slots of one shard of a stack; see `initial_shards`."""
    stack = layout.stack
    tables = [
        PlacedTable(specs[table.name], place, table.rows)
        for table, place in zip(stack.tables, layout.places, strict=True)
    ]
    return initial_shards(
        key,
        tables,
        OwnShards(shard, 1, layout.rows_per_shard, layout.spread),
        rule=stack.spec.optimizer,
        columns=columns,
        is_full=layout.num_rows == stack.spec.stack_vocab_size,
        implementation=implementation,
    )
