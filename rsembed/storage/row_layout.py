"""Layouts of the rows of a stack in one array, on one device or several."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from rsembed.bags import Bags
from rsembed.kernels import api
from rsembed.kernels.contract import Call, IdList, Segment
from rsembed.places import Place
from rsembed.specs import MAX_ROWS, TableSpec
from rsembed.stacking import StackPlan, place_of
from rsembed.storage.protocol import Storage


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of the tables of a stack in one array `[num_shards * rows_per_shard, dim]`.

    The array has the rows of shard 0, then the rows of shard 1, and so on.

    Args:
      stack: plan of the stack, with its tables and features.
      num_shards: number of shards of the array.
      rows_per_shard: number of rows of a shard, padding included.
      spread: number of shards that share the rows of a table. If `spread` is 1, each table is in
        one shard. If `spread` is `num_shards`, neighbouring ids are in different shards.
      places: position of each table of the stack in the array.
      shards_per_device: number of consecutive shards on each device, 1 by default.
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
        """Layout with all rows in one shard."""
        return RowLayout.row_wise(stack, 1)

    @staticmethod
    def row_wise(stack: StackPlan, num_shards: int) -> RowLayout:
        """Layout with neighbouring ids in different shards, so that frequent ids are spread."""
        places = []
        for table in stack.tables:
            places.append(Place(0, table.setting.row_offset_in_shard))
        return RowLayout(
            stack,
            num_shards=num_shards,
            rows_per_shard=-(-stack.spec.stack_vocab_size // num_shards),
            spread=num_shards,
            places=tuple(places),
        )

    @staticmethod
    def as_planned(stack: StackPlan, shards_per_device: int) -> RowLayout:
        """Layout with the number of shards, the padded sizes and the table rotations of `stack`."""
        num_shards = stack.spec.num_shards
        places = []
        for table in stack.tables:
            places.append(place_of(table.setting, num_shards))
        return RowLayout(
            stack,
            num_shards=num_shards,
            rows_per_shard=stack.spec.stack_vocab_size // num_shards,
            spread=num_shards,
            places=tuple(places),
            shards_per_device=shards_per_device,
        )

    @staticmethod
    def table_wise(stack: StackPlan, num_shards: int, load: list[int]) -> RowLayout:
        """Layout with each table on one device.

        Tables are placed from the largest to the smallest. Each table is placed on the device that
        has the fewest rows of `stack`. Between devices with equal numbers of rows, the device with
        the smallest `load` gets the table.

        Args:
          stack: plan of the stack.
          num_shards: number of devices.
          load: bytes of the other stacks on each device. `table_wise` updates `load` in place: it
            adds the bytes that `stack` has on each device.
        """
        used = [0] * num_shards

        def rows_and_load(shard: int) -> tuple[int, int]:
            return used[shard], load[shard]

        place_of_table: dict[str, Place] = {}
        for table in sorted(stack.tables, key=lambda table: -table.rows):
            owner = min(range(num_shards), key=rows_and_load)
            place_of_table[table.name] = Place(owner, used[owner])
            used[owner] += table.rows
        stack_bytes = stack.table_bytes + stack.slot_bytes
        row_bytes = stack_bytes // stack.spec.stack_vocab_size
        for shard, rows in enumerate(used):
            load[shard] += rows * row_bytes
        places = []
        for table in stack.tables:
            places.append(place_of_table[table.name])
        return RowLayout(
            stack,
            num_shards=num_shards,
            rows_per_shard=max(used),
            spread=1,
            places=tuple(places),
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of the whole array, padding included."""
        return self.num_shards * self.rows_per_shard

    @property
    def rows_per_device(self) -> int:
        """Number of rows on one device, padding included."""
        return self.shards_per_device * self.rows_per_shard

    def facts(self, tables: Mapping[str, TableSpec]) -> dict[str, object]:
        """Description of the rows in a state's arrays, for `EmbeddingState.layout`.

        Args:
          tables: spec of each table, by name.
        """
        facts_of_tables: dict[str, dict[str, object]] = {}
        for placed, place in zip(self.stack.tables, self.places, strict=True):
            table = tables[placed.name]
            storage = None
            description = None
            in_files = None
            if table.storage is not None:
                storage = cast(Storage, table.storage).resolved(table)
                description = repr(storage)
                in_files = storage.in_files
            facts: dict[str, object] = {
                "place": list(place),
                "vocabulary_size": table.vocabulary_size,
                "embedding_dim": table.embedding_dim,
                "dtype": table.dtype,
                "optimizer": table.optimizer.identity,  # `identity` contains no learning rate.
                "storage": description,
                "in_files": in_files,
            }
            if storage is not None and len(self.stack.tables) > 1:
                # Tables that share a storage are concatenated in each array of the storage. In each
                # array, the first row of a table is the sum of the part sizes of all earlier
                # tables.
                sizes = storage.part_sizes(table)
                if sizes is not None:
                    facts["part_sizes"] = list(sizes)
            facts_of_tables[table.name] = facts
        rule = self.stack.spec.optimizer
        slots = getattr(rule.slot_type, "_fields", None)
        if not slots:
            num_slots = rule.slot_variables_count()
            slots = map(str, range(num_slots))
        return {
            "num_shards": self.num_shards,
            "rows_per_shard": self.rows_per_shard,
            "spread": self.spread,
            "slots": list(slots),
            "tables": facts_of_tables,
        }

    @functools.cached_property
    def place_of(self) -> dict[str, Place]:
        """Position of each table in the shards of the stack, by table name."""
        place_of_table = {}
        for table, place in zip(self.stack.tables, self.places, strict=True):
            place_of_table[table.name] = place
        return place_of_table

    @functools.cached_property
    def num_rows_of(self) -> dict[str, int]:
        """Number of rows of each table, by name."""
        return {table.name: table.rows for table in self.stack.tables}

    def segment(self, table_name: str, bags: Segment) -> Segment:
        """Copy of the segment `bags` that reads the rows of a table.

        The layout must have `spread` 1, so that the rows of the table are contiguous.
        """
        place = self.place_of[table_name]
        first_row_of_shard = place.owner * self.rows_per_shard
        return bags._replace(
            first_row=first_row_of_shard + place.first,
            num_rows=self.num_rows_of[table_name],
        )

    def rows(self, table_name: str, ids: PyTree) -> PyTree:
        """Row of each id in the array.

        Args:
          table_name: name of the table.
          ids: ids, or a tree of ids. All ids must be in `[0, vocabulary_size)`.
        """
        place = self.place_of[table_name]
        return place.rows(
            ids,
            spread=self.spread,
            rows_per_shard=self.rows_per_shard,
        )

    def all_rows(self, table_name: str, vocabulary_size: int) -> slice | Int[np.ndarray, " vocab"]:
        """Index of all rows of a table in the array, in the order of the ids."""
        place = self.place_of[table_name]
        return place.all_rows(
            vocabulary_size,
            spread=self.spread,
            rows_per_shard=self.rows_per_shard,
        )

    def call(self, bags: Sequence[Bags], readers: Sequence[Segment]) -> Call:
        """Kernel call that reads the array of the stack.

        An id outside its table adds nothing to the output.

        Args:
          bags: ids of all features. Each `Bags` has the ids of one feature, or of several features.
          readers: for each feature of the stack, the `Segment` that says which bags it reads.
        """
        features = self.stack.features
        lists = []
        for bags_of_list in bags:
            lists.append(list_of(bags_of_list))
        segments = []
        for feature, segment in zip(features, readers, strict=True):
            if self.spread == 1:
                segment = self.segment(feature.table_name, segment)
            segments.append(segment)
        call = Call(tuple(lists), tuple(segments))
        if self.spread == 1:
            return call
        places = []
        sizes = []
        for feature in features:
            places.append(self.place_of[feature.table_name])
            sizes.append(self.num_rows_of[feature.table_name])
        rows = api.rows_of_ids(
            call,
            places,
            sizes,
            spread=self.spread,
            rows_per_shard=self.rows_per_shard,
        )
        lists_of_rows = []
        for ids, rows_of_list in zip(lists, rows, strict=True):
            lists_of_rows.append(dataclasses.replace(ids, ids=rows_of_list))
        return dataclasses.replace(call, lists=tuple(lists_of_rows))


def list_of(bags: Bags, ids: Int[Array, " nnz"] | None = None) -> IdList:
    """Bags as an `IdList` for kernels.

    Args:
      bags: bags of one or several features.
      ids: row numbers for the `IdList`. None, the default: the ids of `bags`.
    """
    if ids is None:
        ids = jnp.asarray(bags.ids)
    weights = None
    if bags.weights is not None:
        weights = jnp.asarray(bags.weights)
    if bags.dense_shape is not None:
        num_bags, *axes = bags.dense_shape
        width = math.prod(axes)
        return IdList(ids, None, weights, (num_bags, width))
    offsets = jnp.asarray(bags.offsets)
    return IdList(ids, offsets, weights)


def in_some_bag(bags: Bags) -> Bool[Array, " nnz"]:
    """Mask of the ids that belong to a bag.

    Ids before the first offset, or from the last offset on, belong to no bag.
    """
    position = jnp.arange(bags.ids.shape[0], dtype=jnp.int32)
    is_after_start = position >= bags.offsets[0]
    is_before_end = position < bags.offsets[-1]
    return is_after_start & is_before_end
