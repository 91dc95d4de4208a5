"""Places tables on devices, and reads and writes the tables of a state by name.

`make_stacks` chooses the storage of each stack, and how its rows are split over the devices.
`LogicalTables` reads and writes whole tables of a state, for methods of `EmbeddingCollection` and
for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jaxtyping import Num, PyTree

from rsembed.arrays import foreign_to_numpy, is_traced
from rsembed.checks import check_finite, check_type, did_you_mean
from rsembed.collection.asked_rows import AskedKeys, AskedRows
from rsembed.collection.devices import Devices
from rsembed.collection.host_rows import Prefetch
from rsembed.collection.host_stack import HostStack, KeyedStack
from rsembed.collection.rows import (
    ArrayRows,
    ColumnRows,
    KeyedRows,
    NumberedRows,
    Rows,
    TrainRows,
)
from rsembed.collection.stack import ArrayStack, ByName, EmbeddingState, Stack
from rsembed.fingerprint import Fingerprint
from rsembed.specs import TableSpec, tables_of
from rsembed.stacking import StackingPlan, StackPlan, group_tables, plan_stacking
from rsembed.storage import Hashed, HostCached
from rsembed.storage.dense_rows import DenseRows
from rsembed.storage.host_cached import HostTable
from rsembed.storage.logical_rows import SavedArray, check_reasons, checked_slots
from rsembed.storage.protocol import (
    ByTable,
    Storage,
)
from rsembed.storage.row_layout import RowLayout

PLACEMENTS = ("row", "table", "column", "replicated")


def placement_of_tables(
    tables: Mapping[str, TableSpec],
    devices: Devices,
    placement: str | Mapping[str, str] | None,
) -> dict[str, str]:
    """Placement of every table by name: "row", "table", "column" or "replicated".

    A table without a requested placement gets the first placement that its storage supports, for
    example "row" if the table is dense. On one device every table is "replicated".

    Args:
      tables: specs of the tables by name.
      devices: devices that share the tables.
      placement: one placement for all tables, or a mapping from table names to placements. A
        placement for all tables has no effect on tables with a storage that does not support this
        placement. If None, no placement is requested for any table.

    Raises:
      ValueError: a placement or table is unknown, the storage of a named table does not support its
        placement, or there is no mesh.
    """
    if placement is not None and devices.mesh is None:
        raise ValueError(f"placement={placement!r} needs a mesh; pass mesh=jax.make_mesh(...).")
    supported: dict[str, Sequence[str]] = {}
    for name, table in tables.items():
        storage = cast(Storage | None, table.storage)
        supported[name] = PLACEMENTS if storage is None else storage.placements
    wanted: dict[str, str] = {}
    if isinstance(placement, Mapping):
        wanted = dict(placement)
    elif placement is not None:
        for name in tables:
            if placement not in PLACEMENTS or placement in supported[name]:
                wanted[name] = placement
    unknown = sorted(set(wanted) - set(tables))
    if unknown:
        near = did_you_mean(unknown[0], tables)
        raise ValueError(
            f"placement names unknown tables {unknown}{near}; the collection has {sorted(tables)}."
        )
    for name, kind in wanted.items():
        if kind not in PLACEMENTS:
            raise ValueError(
                f"table {name!r}: placement {kind!r} is not one of {', '.join(PLACEMENTS)}."
            )
        if kind not in supported[name]:
            raise ValueError(
                f"table {name!r} is kept as {tables[name].storage}, which cannot be placed {kind!r}, only "
                f"{' or '.join(map(repr, supported[name]))}; leave it out of placement."
            )
    if devices.mesh is None:
        return dict.fromkeys(tables, "replicated")
    placements = {}
    for name in tables:
        default = supported[name][0]
        placements[name] = wanted.get(name, default)
    return placements


def plan_placed(features: PyTree, placements: Mapping[str, str]) -> StackingPlan:
    """Plans stacks: tables share a stack if their specs allow it and their placements are equal."""
    tables = tables_of(features)
    placed: dict[tuple[int, str], list[str]] = {}
    # The limit is for the memory of SparseCores. Here it would make the stacks, and so the state,
    # depend on the declared batch size.
    groups_by_spec = group_tables(
        features, num_shards=1, pad=False, activation_mem_bytes_limit=None
    )
    for number, group in enumerate(groups_by_spec):
        for name in group:
            group_and_placement = number, placements[name]
            placed.setdefault(group_and_placement, []).append(name)
    groups: list[list[str]] = []
    for names in placed.values():
        storage = cast(Storage | None, tables[names[0]].storage)
        if storage is None:
            groups.append(names)
            continue
        specs = [tables[name] for name in names]
        for part in storage.sharing_groups(specs):
            groups.append([table.name for table in part])
    return plan_stacking(features, groups=groups, pad=False)


def make_stacks(
    plan: StackingPlan,
    features: PyTree,
    placements: Mapping[str, str],
    devices: Devices,
    *,
    exchange_capacity: int | None,
    implementation: str | None,
) -> dict[str, Stack]:
    """Stacks of a plan by name, each with its storage and placement.

    Args:
      plan: result of `plan_placed`.
      features: features of the collection.
      placements: placement by table name.
      devices: devices that share the tables.
      exchange_capacity: see `EmbeddingCollection`.
      implementation: see `EmbeddingCollection`.
    """
    specs = tables_of(features)
    bytes_of_device = [0] * devices.num_devices
    stacks: dict[str, Stack] = {}
    for stack in plan.stacks:
        tables = tuple(specs[table.name] for table in stack.tables)
        # A single device has all rows, so it requests no rows from other devices.
        placement = "replicated"
        if devices.num_devices > 1:
            placement = placements[tables[0].name]
        layout = RowLayout.whole(stack)
        if placement == "row":
            layout = RowLayout.row_wise(stack, devices.num_devices)
        elif placement == "table":
            layout = RowLayout.table_wise(stack, devices.num_devices, bytes_of_device)
        elif placement == "column":
            _check_columns(stack, devices.num_devices)
        num_parts = devices.num_devices if placement == "column" else 1
        storage = _storage_of(tables, layout, num_parts, implementation)
        rows = _choose_rows(
            storage,
            tables[0],
            placement,
            devices,
            exchange_capacity,
            implementation,
        )
        stacks[stack.name] = _choose_stack(layout, rows)
    return stacks


def _choose_rows(
    storage: Storage,
    table: TableSpec,
    placement: str,
    devices: Devices,
    capacity: int | None,
    implementation: str | None,
) -> Rows:
    """Creates an instance of the subclass of `Rows` that fits the storage and the placement."""
    arguments = devices, table, storage, implementation
    if placement in ("row", "table"):
        if storage.takes_keys:
            return AskedKeys(*arguments, capacity)
        return AskedRows(*arguments, capacity)
    if placement == "column":
        return ColumnRows(*arguments)
    if isinstance(storage, DenseRows):
        return ArrayRows(*arguments)
    if storage.takes_keys:
        return KeyedRows(*arguments)
    if storage.sums_gradients:
        return TrainRows(*arguments)
    return NumberedRows(*arguments)


def _choose_stack(layout: RowLayout, rows: Rows) -> Stack:
    """Creates a `Stack`, or an instance of the subclass that fits the storage of `rows`."""
    if isinstance(rows.storage, DenseRows):
        return ArrayStack(layout, rows)
    if rows.storage.takes_keys:
        return KeyedStack(layout, rows)
    if rows.storage.rows_on_host:
        return HostStack(layout, rows)
    return Stack(layout, rows)


def _storage_of(
    tables: tuple[TableSpec, ...],
    layout: RowLayout,
    num_parts: int,
    implementation: str | None,
) -> Storage:
    """Storage object that holds the rows of all tables of a stack."""
    storage = cast(Storage | None, tables[0].storage)
    if storage is None:
        return DenseRows(layout, tables, num_parts, implementation)
    if len(tables) > 1:
        return storage.sharing(tables)
    if isinstance(storage, HostCached):
        return HostTable(storage, tables[0])
    return storage


def _check_columns(stack: StackPlan, num_devices: int) -> None:
    """Raises: ValueError: the stack cannot be split by column."""
    rule = stack.spec.optimizer
    dim = stack.spec.stack_embedding_dim
    problems = []
    if dim % num_devices:
        problems.append(f"embedding_dim={dim} is not divisible by {num_devices} devices")
    if rule.is_row_wise:
        problems.append(f"{type(rule).__name__} steps whole rows")
    if stack.tables[0].stochastic_rounding:
        problems.append("stochastic rounding draws for whole rows")
    if problems:
        names = [table.name for table in stack.tables]
        raise ValueError(
            f"tables {names} cannot be placed 'column': {' and '.join(problems)}; place them 'row'."
        )


class LogicalTables:
    """Reads and writes the tables of a collection by name.

    Args:
      specs: specs of the tables by name.
      stacks: stacks of the collection by name.

    Attributes:
      on_host: mapping from the name of each stack with storage `HostCached` to the `Prefetch` that
        moves its rows between host and device.
      apart: stacks of keyed tables and of tables on the host, by name. A file stores each table of
        the stacks in `apart` separately.
    """

    def __init__(self, specs: Mapping[str, TableSpec], stacks: Mapping[str, Stack]):
        self.specs = specs
        self.stacks = stacks
        self.on_host: dict[str, Prefetch] = {}
        self.apart: dict[str, HostStack] = {}
        self._stack_of: dict[str, str] = {}
        for name, stack in stacks.items():
            if isinstance(stack.storage, HostTable):
                self.on_host[name] = Prefetch(stack)
            if isinstance(stack, HostStack):
                self.apart[name] = stack
            for table in stack.layout.stack.tables:
                self._stack_of[table.name] = name

    def with_tables(
        self,
        state: EmbeddingState,
        tables: ByTable,
        slots: ByTable,
        *,
        allow_nonfinite: bool = False,
    ) -> EmbeddingState:
        """See `EmbeddingCollection.with_tables`."""
        new_rows: dict[str, ByName] = {name: {} for name in self.stacks}
        new_slots: dict[str, ByName] = {name: {} for name in self.stacks}
        for table_name in dict.fromkeys([*tables, *slots]):
            self._check_known(table_name)
            table = self.specs[table_name]
            name = self._stack_of[table_name]
            stack = self.stacks[name]
            arguments = tables.get(table_name), slots.get(table_name), state.step
            if name in self.apart and is_traced(arguments):
                raise RuntimeError(
                    f"table {table_name!r} is kept as {table.storage}: with_tables writes its rows beside compiled "
                    "programs; call it outside of jit, between two steps."
                )
            rows = None
            if table_name in tables:
                values = _of_numpy(tables[table_name])
                for part, array in _parts(values):
                    check_type(array, Num[np.ndarray, "..."], f"table {table_name!r}: its {part}")
                if not allow_nonfinite:
                    self._check_finite(table_name, _parts(values))
                rows = stack.storage.checked_rows(values, table, state.step)
                new_rows[name][table_name] = rows
            if table_name in slots:
                table_slots = slots[table_name]
                if not allow_nonfinite:
                    self._check_finite(table_name, _slots_by_name(table_slots))
                arrays = state.tables[name], state.slots[name]
                if isinstance(stack, HostStack):
                    new_rows[name][table_name] = stack.rows_with_slots(
                        *arrays,
                        table,
                        rows,
                        table_slots,
                    )
                else:
                    template = jax.eval_shape(stack.slots, *arrays)[table_name]
                    new_slots[name][table_name] = checked_slots(table_slots, template, table)
        all_tables = dict(state.tables)
        all_slots = dict(state.slots)
        for name in self._host_last(self.stacks):
            if new_rows[name] or new_slots[name]:
                stack = self.stacks[name]
                all_tables[name], all_slots[name] = stack.replaced(
                    all_tables[name],
                    all_slots[name],
                    new_rows[name],
                    new_slots[name],
                )
        return state._replace(tables=all_tables, slots=all_slots)

    def _host_last(self, names: Iterable[str]) -> list[str]:
        """Sorts names of stacks for writing: stacks on the host are written last.

        A write to a stack on the host makes the current state invalid. Stacks on the device are
        written first, so the current state stays valid if a write to the device fails.
        """
        return sorted(names, key=self.on_host.__contains__)

    def _check_finite(self, table_name: str, parts: Iterable[tuple[str, PyTree]]) -> None:
        """Checks the rows or slots of a table.

        Raises: ValueError: a number is not finite, or a sum of squares is negative.
        """
        non_negative = [
            f"slot_{slot}" for slot in self.specs[table_name].optimizer.non_negative_slots
        ]
        for part, array in parts:
            if isinstance(array, SavedArray):
                # `array` has not been read from its file yet. A check of `array` would read the
                # file one more time, which is slow.
                continue
            where = f"table {table_name!r}: its {part}"
            check_finite(array, where, may_be_negative=part not in non_negative)

    def evicted(
        self, state: EmbeddingState, table_name: str, **reasons: float | None
    ) -> tuple[EmbeddingState, ByName]:
        """See `EmbeddingCollection.evict`."""
        check_reasons(f"evict from table {table_name!r}", **reasons)
        if is_traced(state):
            raise RuntimeError(
                "evict works beside compiled programs; call it outside of jit, between two steps."
            )
        self._check_known(table_name)
        name = self._stack_of[table_name]
        spec = self.specs[table_name]
        stack = self.stacks[name]
        if not isinstance(spec.storage, Hashed) or not isinstance(stack, KeyedStack):
            raise ValueError(
                f"table {table_name!r} is kept as {spec.storage or 'an array'}: rows leave tables of keys, with "
                "storage=Hashed(...)."
            )
        params, rows = stack.evicted(
            state.tables[name],
            state.slots.get(name, ()),
            spec,
            state.step,
            reasons,
        )
        tables = state.tables | {name: params}
        return state._replace(tables=tables), rows

    def _check_known(self, table_name: str) -> None:
        if table_name not in self.specs:
            near = did_you_mean(table_name, self.specs)
            raise ValueError(
                f"unknown table {table_name!r}{near}; the collection has {list(self.specs)}."
            )

    # For files

    def parted(self, state: EmbeddingState) -> tuple[EmbeddingState, ByName, ByName]:
        """Separates the stacks in `apart` from the rest of a state, to write both to a file.

        Returns: a tuple of three: the state without the stacks in `apart`, the rows of the tables
          in these stacks by table name, and the slots of these tables by table name.
        """
        tables: ByName = {}
        slots: ByName = {}
        for name, stack in self.apart.items():
            params = state.tables[name]
            rows_by_table, slots_by_table = stack.saved(params, state.slots[name])
            tables |= rows_by_table
            slots |= slots_by_table
        return self.without_apart(state), tables, slots

    def without_apart(self, state: EmbeddingState) -> EmbeddingState:
        """A state without the stacks in `apart`.

        `state` may contain `jax.ShapeDtypeStruct`s in place of arrays.
        """
        facts: Mapping[str, PyTree] = {}
        if state.layout is not None:
            facts = state.layout.facts
        layout = Fingerprint.of(self._not_apart(facts))
        tables = self._not_apart(state.tables)
        slots = self._not_apart(state.slots)
        return EmbeddingState(tables, slots, state.step, state.key, layout)

    def _not_apart(self, by_stack: Mapping[str, PyTree]) -> ByName:
        kept = {}
        for name, value in by_stack.items():
            if name not in self.apart:
                kept[name] = value
        return kept

    def whole(
        self,
        state: EmbeddingState,
        tables: ByTable,
        slots: ByTable,
        layout: Fingerprint,
    ) -> EmbeddingState:
        """Inverse of `parted`: the state with all stacks. `layout` is the state's fingerprint."""
        all_tables = dict(state.tables)
        all_slots = dict(state.slots)
        for name in self._host_last(self.apart):
            stack = self.apart[name]
            all_tables[name], all_slots[name] = stack.restored(tables, slots)
        return EmbeddingState(all_tables, all_slots, state.step, state.key, layout)


def _of_numpy(values: PyTree) -> PyTree:
    """Converts arrays of other libraries (pandas, torch) in `values` to numpy arrays."""
    if isinstance(values, Mapping):
        return {name: foreign_to_numpy(part) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(foreign_to_numpy(part) for part in values)
    return foreign_to_numpy(values)


def _slots_by_name(slots: PyTree) -> list[tuple[str, PyTree]]:
    """Pairs of a name `slot_<name>` and an array, for every array in a table's slots."""
    parts = []
    for path, leaf in jax.tree.leaves_with_path(slots):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            parts.append((f"slot_{name}", leaf))
    return parts


def _parts(values: PyTree) -> Iterable[tuple[PyTree, PyTree]]:
    """Arrays in `values`, each with a name. `values` is a dictionary, a tuple, or one array."""
    if isinstance(values, Mapping):
        return values.items()
    if isinstance(values, tuple):
        return [(f"part {number}", part) for number, part in enumerate(values)]
    return [("values", values)]
