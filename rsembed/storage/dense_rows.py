"""Dense storage, which keeps the tables of a stack in one array."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from rsembed.arrays import copied_rows, is_traced
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, CallGradients, Rounding, Step
from rsembed.kernels.keyed import mix
from rsembed.keys import Keys
from rsembed.optimizers.base import Slots
from rsembed.places import Place as Place, tables_and_ids
from rsembed.specs import TableSpec
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
from rsembed.storage.row_layout import RowLayout


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
        """Exclusive upper bound of the ids: the number of rows in the array of the stack."""
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
        (state,) = initial_states([self.new_stack(table, shard)], key)
        return state

    def new_stack(self, table: TableSpec, shard: Int[Array, ""]) -> NewStack:
        """`NewStack` that describes the stack for `initial_states`.

        Args:
          table: spec of the stack's first table.
          shard: index of this device in the mesh.
        """
        return NewStack(self.layout, self.tables, self.num_parts, table, shard)

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
        del table, ahead
        rows = self._rows(keys)
        (vectors,) = api.gather_rows((params,), rows)
        num_unknown = jnp.zeros((), jnp.int32)
        return vectors, num_unknown

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
        `step.resident_rows` is set, `params` is a device cache and each id is a slot of the cache,
        so `find` returns the ids unchanged as rows.
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

        `unstack` does not cut the arrays, because methods such as `rows` select the rows of one
        table from the arrays of the stack.
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
        return copied_rows(tuple(arrays), index)

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
        """See `Storage.with_tables`. For dense storage, `with_tables` works inside `jit`."""
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
