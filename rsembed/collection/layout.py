"""The place law for the stacks of a collection: the only thing that sharding rows changes."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rsembed.bags import Bags
from rsembed.kernels import api
from rsembed.kernels.contract import Rounding, Segment
from rsembed.kernels.keyed import mix
from rsembed.places import Place as Place
from rsembed.places import tables_and_ids
from rsembed.specs import MAX_ROWS, TableSpec
from rsembed.stacking import StackPlan, place_of


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The rows of a stack in one array `[num_shards * rows_per_shard, dim]`, shard after shard.

    Spread over one shard, tables lie whole; spread over all, neighbouring ids have different owners. A device has one
    shard, or `shards_per_device` that follow each other.
    """

    stack: StackPlan
    num_shards: int
    rows_per_shard: int
    spread: int
    places: tuple[Place, ...]
    shards_per_device: int = 1

    def __post_init__(self) -> None:
        if self.num_rows > MAX_ROWS:
            raise ValueError(
                f"stack {self.stack.name!r} would have {self.num_rows} rows on {self.num_shards} devices, above "
                f"{MAX_ROWS}; give its tables another placement, or different optimizers' specs."
            )

    @staticmethod
    def whole(stack: StackPlan) -> RowLayout:
        """All rows in one shard."""
        return RowLayout.row_wise(stack, 1)

    @staticmethod
    def row_wise(stack: StackPlan, num_shards: int) -> RowLayout:
        """Neighbouring rows with different owners, so that frequent ids spread evenly."""
        places = tuple(Place(0, table.setting.row_offset_in_shard) for table in stack.tables)
        return RowLayout(stack, num_shards, -(-stack.spec.stack_vocab_size // num_shards), num_shards, places)

    @staticmethod
    def as_planned(stack: StackPlan, shards_per_device: int) -> RowLayout:
        """Padded and rotated as the plan says, over all shards that it was made for."""
        num_shards = stack.spec.num_shards
        places = tuple(place_of(table.setting, num_shards) for table in stack.tables)
        rows_per_shard = stack.spec.stack_vocab_size // num_shards
        return RowLayout(stack, num_shards, rows_per_shard, num_shards, places, shards_per_device)

    @staticmethod
    def table_wise(stack: StackPlan, num_shards: int, load: list[int]) -> RowLayout:
        """Each table whole with one owner: the largest first, to whoever has least.

        Args:
          stack: its tables are distributed.
          num_shards: how many devices there are.
          load: bytes that each device has from other stacks; what this stack brings is added.
        """
        used = [0] * num_shards
        places: dict[str, Place] = {}
        for table in sorted(stack.tables, key=lambda table: -table.rows):
            owner = min(range(num_shards), key=lambda d: (used[d], load[d]))
            places[table.name] = Place(owner, used[owner])
            used[owner] += table.rows
        row_bytes = (stack.table_bytes + stack.slot_bytes) // stack.spec.stack_vocab_size
        load[:] = [before + rows * row_bytes for before, rows in zip(load, used, strict=True)]
        return RowLayout(stack, num_shards, max(used), 1, tuple(places[table.name] for table in stack.tables))

    @property
    def num_rows(self) -> int:
        """Rows of the whole array, padding included."""
        return self.num_shards * self.rows_per_shard

    @property
    def rows_per_device(self) -> int:
        """Rows that one device has."""
        return self.shards_per_device * self.rows_per_shard

    def facts(self, tables: Mapping[str, TableSpec]) -> dict[str, Any]:
        """All on which the meaning of a state's arrays depends, as `EmbeddingState.layout` keeps it."""
        optimizer = self.stack.spec.optimizer
        slots = getattr(optimizer.slot_type, "_fields", None) or map(str, range(optimizer.slot_variables_count()))
        return {
            **{"num_shards": self.num_shards, "rows_per_shard": self.rows_per_shard, "spread": self.spread},
            "slots": list(slots),
            "tables": {
                table.name: {"owner": place.owner, "first": place.first, **self._parts(tables[table.name])}
                | table_facts(tables[table.name])
                for table, place in zip(self.stack.tables, self.places, strict=True)
            },
        }

    def _parts(self, table: TableSpec) -> dict[str, Any]:
        """How much of each array belongs to a table whose arrays those of others follow."""
        sizes = None if table.storage is None or len(self.stack.tables) == 1 else table.storage.part_sizes(table)
        return {} if sizes is None else {"part_sizes": list(sizes)}

    def place(self, table_name: str) -> Place:
        """Where a table starts."""
        return self._place_of[table_name]

    @functools.cached_property
    def _place_of(self) -> dict[str, Place]:
        return dict(zip((table.name for table in self.stack.tables), self.places, strict=True))

    def rows(self, table_name: str, ids: Any) -> Any:
        """Row of each id in the array; ids must lie inside the table."""
        return self.place(table_name).rows(ids, spread=self.spread, rows_per_shard=self.rows_per_shard)

    def all_rows(self, table_name: str, vocabulary_size: int) -> slice | Int[np.ndarray, " vocab"]:
        """Index of a whole table in the array."""
        place = self.place(table_name)
        return place.all_rows(vocabulary_size, spread=self.spread, rows_per_shard=self.rows_per_shard)

    def rounding(self, rounding: Rounding | None, device: Any) -> Rounding | None:
        """The rounding of a device's rows, with noise that no stack, placement or mesh changes.

        Rows are told apart by a number for the table's name and the id, wherever they lie.
        """
        if rounding is None:
            return None
        names = np.asarray([zlib.crc32(table.name.encode()) for table in self.stack.tables], np.uint32)

        def round_rows(values: Array, dtype: Any, rows: Array) -> Array:
            sizes, shard, row = [table.rows for table in self.stack.tables], device, rows
            if self.shards_per_device > 1:
                own, row = jnp.divmod(rows, self.rows_per_shard)
                shard = device * self.shards_per_device + own
            tables, ids = tables_and_ids(self.places, sizes, shard, row, spread=self.spread)
            return rounding(values, dtype, mix(ids.astype(jnp.uint32), jnp.asarray(names)[tables]).astype(jnp.int32))

        return round_rows

    def segments(self, bags: Mapping[str, Bags]) -> list[Segment]:
        """Ids of the stack's features as rows of the array; ids outside their table become `NO_ROW`."""
        features, sizes = self.stack.features, {table.name: table.rows for table in self.stack.tables}
        names = [feature.table_name for feature in features]
        all_rows = api.rows_of_ids(
            [jnp.asarray(bags[feature.name].ids) for feature in features],
            [self.place(name) for name in names],
            [sizes[name] for name in names],
            spread=self.spread,
            rows_per_shard=self.rows_per_shard,
        )
        segments = []
        for feature, rows in zip(features, all_rows, strict=True):
            own = bags[feature.name]
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            segments.append(Segment(rows, offsets, weights, feature.combiner))
        return segments


def table_facts(table: TableSpec) -> dict[str, Any]:
    """What must be equal wherever rows and optimizer state of a table are used; learning rates may change."""
    storage = None if table.storage is None else table.storage.resolved(table)
    return {
        "vocabulary_size": table.vocabulary_size,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer.identity,
        "storage": None if storage is None else repr(storage),
        "in_files": None if storage is None else storage.in_files,
    }


def read_from(entry_of: Int[Array, " nnz"], segments: Sequence[Segment]) -> list[Segment]:
    """The segments, reading from the entries of all segments instead of rows."""
    result, first = [], 0
    for segment in segments:
        last = first + segment.rows.shape[0]
        result.append(dataclasses.replace(segment, rows=entry_of[first:last]))
        first = last
    return result
