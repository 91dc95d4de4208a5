"""Dense storage, which keeps the tables of a stack in one array, and the layouts of its rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from rsembed.arrays import is_traced
from rsembed.bags import Bags
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Rounding, Segment, Step
from rsembed.kernels.keyed import mix
from rsembed.keys import Keys
from rsembed.optimizers.base import Slots
from rsembed.places import Place as Place, tables_and_ids
from rsembed.specs import MAX_ROWS, TableSpec
from rsembed.stacking import StackPlan, place_of
from rsembed.storage.initial_states import NewStack, initial_states
from rsembed.storage.logical_rows import array_names, as_dtype
from rsembed.storage.protocol import (
    ByTable,
    Found,
    Params,
    ReadAhead,
    SlotTree,
    State,
    Storage,
    TableRows,
    Vectors,
    on_host,
)


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
        has the fewest rows of this stack. Between devices with equal numbers of rows, the device
        with the smallest `load` gets the table.

        Args:
          stack: plan of the stack.
          num_shards: number of devices.
          load: bytes of the other stacks on each device. `table_wise` changes this list in place,
            and adds the bytes of `stack` to the entry of each device.
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
                "owner": place.owner,
                "first": place.first,
                "vocabulary_size": table.vocabulary_size,
                "embedding_dim": table.embedding_dim,
                "dtype": table.dtype,
                "optimizer": table.optimizer.identity,  # It contains no learning rate.
                "storage": description,
                "in_files": in_files,
            }
            if storage is not None and len(self.stack.tables) > 1:
                # Tables that share a storage are concatenated in each array of the storage. The sum
                # of the part sizes of earlier tables is the first row of a table in each array.
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
        """Copy of `bags` with the first row and the number of rows of a table.

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


def numbers_of_rows(
    names: Sequence[str],
    tables: Int[Array, " rows"],
    ids: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """32-bit number of each row: a hash of the table's name and the row's id.

    The hash of a row is the same for every stacking plan and every mesh.

    Args:
      names: names of the tables.
      tables: index of each row's table in `names`.
      ids: id of each row in its table.
    """
    hashes = []
    for name in names:
        hashes.append(zlib.crc32(name.encode()))
    ids = ids.astype(jnp.uint32)
    name_of_row = jnp.asarray(np.asarray(hashes, np.uint32))[tables]
    return mix(ids, name_of_row).astype(jnp.int32)


def whole_table(values: TableRows, table: TableSpec) -> TableRows:
    """Checks the values of a whole table, and converts them to the dtype of the table.

    Inside `jit`, only the shape is checked, and `values` is returned unchanged.

    Args:
      values: array of all rows, in the order of the ids.
      table: spec of the table.

    Raises: ValueError: `values` is a mapping, has the wrong shape, or has numbers that are too
      large for the dtype.
    """
    shape = (table.vocabulary_size, table.embedding_dim)
    if isinstance(values, Mapping):
        raise ValueError(
            f"table {table.name!r} has no keys: give it an array of all rows {list(shape)}, not a mapping."
        )
    if np.shape(values) != shape:
        raise ValueError(
            f"table {table.name!r} has shape {shape}, the new values {np.shape(values)}."
        )
    if is_traced(values):
        return values
    # `values` may be an array on a mesh other than the mesh of the table.
    return as_dtype(on_host(values), table.dtype, f"table {table.name!r}", "values")


@dataclasses.dataclass(frozen=True)
class DenseRows(Storage):
    """Storage of several tables in one array.

    In all methods of `DenseRows`, an id is a row index in the array of the stack.

    Args:
      layout: layout of the rows.
      tables: specs of the tables, in the order of the layout.
      num_parts: number of devices that share the columns of each row. 1, the default: every device
        has all columns.
      implementation: name of the kernel implementation. None, the default: `kernels.api` chooses
        the implementation.
    """

    layout: RowLayout
    tables: tuple[TableSpec, ...]
    num_parts: int = 1
    implementation: str | None = None

    def check(self, table: TableSpec) -> None:
        """Raises no error, because dense storage supports every table."""

    def num_ids(self, table: TableSpec) -> int:
        """Exclusive upper bound of the ids: the number of rows of the whole array.

        An id is a row index in the array.
        """
        return self.layout.num_rows

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All tables of the layout."""
        return self.tables

    def init(
        self,
        key: PRNGKeyArray,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        """Initial rows and slots of one device. See `initial_states`."""
        del num_shards
        (state,) = initial_states([NewStack(self, table, shard)], key)
        return state

    def owners(self, keys: Keys, num_shards: int) -> Int[Array, " nnz"]:
        """Device that owns the row of each id, or `num_shards` for padding."""
        rows = keys.low.astype(jnp.int32)
        device = rows // self.layout.rows_per_device
        return jnp.where(keys.is_key, device, num_shards)

    def keys_after(self, keys: Keys, gradients: Sequence[Array]) -> Keys:
        """`keys` unchanged, because every id has a row."""
        del gradients
        return keys

    def vector_dtype(self, table: TableSpec) -> DTypeLike:
        """Dtype of the table. Devices exchange rows of a 16-bit table as 16-bit numbers."""
        return jnp.dtype(table.dtype)

    def rounding(
        self,
        rounding: Rounding | None,
        shard: Int[Array, ""] | int,
        resident_rows: Int[Array, " places"] | None = None,
    ) -> Rounding | None:
        """Rounding with noise that does not depend on the stack, the placement or the mesh.

        The noise of a row depends on the row's table name and id, see `numbers_of_rows`.
        """
        if rounding is None:
            return None
        layout = self.layout
        names = []
        sizes = []
        for table in layout.stack.tables:
            names.append(table.name)
            sizes.append(table.rows)

        def round_rows(values: Array, dtype: DTypeLike, rows: Array) -> Array:
            if resident_rows is not None:
                rows = resident_rows.at[rows].get(mode="fill", fill_value=NO_ROW)
            shard_here, row = jnp.divmod(rows, layout.rows_per_shard)
            first_shard = shard * layout.shards_per_device
            tables, ids = tables_and_ids(
                layout.places,
                sizes,
                first_shard + shard_here,
                row,
                spread=layout.spread,
            )
            numbers = numbers_of_rows(names, tables, ids)
            return rounding(values, dtype, numbers)

        return round_rows

    def read(
        self,
        params: Array,
        keys: Keys,
        table: TableSpec,
        ahead: ReadAhead | None = None,
    ) -> Vectors:
        """Vectors of the ids, in the table's dtype, and 0 as the number of ids without a row."""
        del ahead
        rows = self._rows(keys)
        vectors = self.vectors(params, rows, table)
        num_unknown = jnp.zeros((), jnp.int32)
        return vectors, num_unknown

    def vectors(
        self,
        params: Array,
        rows: Int[Array, " nnz"],
        table: TableSpec,
    ) -> Float[Array, "nnz dim"]:
        """Vectors of the rows, in the dtype of the table, and zeros for `NO_ROW`."""
        del table
        (vectors,) = api.gather_rows((params,), rows)
        return vectors

    def find(
        self,
        params: Params,
        slots: SlotTree,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        """Row of each id on the device that owns it.

        `find` returns `params` and `slots` unchanged, because every id has a row. If
        `step.resident_rows` is set, the array is a device cache. Each id is then already a slot of
        the cache, and `find` returns the ids unchanged as rows.
        """
        del table, occurrences
        if step.resident_rows is not None:
            cache_slots = keys.low.astype(jnp.int32)
            cache_slots = jnp.where(keys.is_key, cache_slots, NO_ROW)
            return params, slots, cache_slots
        rows = self._rows(keys)
        return params, slots, rows

    def step(
        self,
        params: Array,
        slots: Slots,
        gradients: CallGradients,
        table: TableSpec,
        step: Step,
    ) -> State:
        """See `Storage.step`. One kernel sums the gradients of each row and updates the rows."""
        return api.update(
            params,
            slots,
            gradients,
            step,
            implementation=self.implementation,
        )

    def step_distinct(
        self,
        params: Array,
        slots: Slots,
        rows: Array,
        values: Array,
        table: TableSpec,
        step: Step,
    ) -> State:
        """See `Storage.step_distinct`. The numbers in `rows` may be in any order."""
        return api.apply_rows(
            params,
            slots,
            rows,
            values,
            step,
            implementation=self.implementation,
        )

    def unstack(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> list[State]:
        """List that repeats `(params, slots)` of the whole stack for each table.

        Methods such as `rows` then select one table's rows from the whole arrays.
        """
        return [(params, slots)] * len(self.tables)

    def rows(
        self,
        params: Array,
        slots: Slots,
        table: TableSpec,
        num_shards: int,
    ) -> dict[str, Array]:
        """Copies of a table's rows and slots, by name."""
        names = array_names(table, slots)
        copies = self._copies((params, *slots), table)
        return dict(zip(names, copies, strict=True))

    def optimizer_state(
        self,
        params: Params,
        slots: Slots,
        table: TableSpec,
        num_shards: int,
    ) -> PyTree:
        """Slots of all rows of a table, in the named tuple of its optimizer. `params` is unused."""
        copies = self._copies(slots, table)
        return table.optimizer.pack_slots(copies)

    def _copies(self, arrays: Sequence[Array], table: TableSpec) -> tuple[Array, ...]:
        """Copies of the table's rows, one array of rows for each array in `arrays`."""
        index = self.layout.all_rows(table.name, table.vocabulary_size)
        copies = []
        for array in arrays:
            rows = array[index]
            # An index that selects all rows returns the array itself. Without the copy, a later
            # step that donates the array would also delete the result of `_copies`.
            if rows is array:
                rows = jnp.copy(rows)
            copies.append(rows)
        return tuple(copies)

    def checked_rows(self, values: TableRows, table: TableSpec, step: Int[Array, ""]) -> TableRows:
        """Checks the values of a whole table, see `whole_table`."""
        return whole_table(values, table)

    def with_tables(
        self,
        params: Params,
        slots: SlotTree,
        rows: ByTable,
        table: TableSpec,
        num_shards: int,
        new_slots: ByTable,
    ) -> State:
        """See `Storage.with_tables`. For dense storage, `with_tables` also works inside `jit`."""
        for member in self.tables:
            name = member.name
            index = self.layout.all_rows(name, member.vocabulary_size)
            if name in rows:
                new_rows = jnp.asarray(rows[name], params.dtype)
                params = params.at[index].set(new_rows)
            if name in new_slots:
                arrays = jax.tree.leaves(new_slots[name])
                written = []
                for slot, array in zip(slots, arrays, strict=True):
                    written.append(slot.at[index].set(array))
                slots = tuple(written)
        return params, slots

    def _rows(self, keys: Keys) -> Int[Array, " nnz"]:
        """Row of each id on the device that owns it, `NO_ROW` for padding and ids out of range."""
        # Row gradients that a user passes may contain ids that are out of range.
        is_row = keys.is_key & (keys.low < self.layout.num_rows)
        rows = keys.low.astype(jnp.int32)
        rows_of_device = rows % self.layout.rows_per_device
        return jnp.where(is_row, rows_of_device, NO_ROW)
