"""Which table lies where: placements become stacks, and tables by name come out of these and go in again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import jax
import numpy as np
from jaxtyping import Num, PyTree

from rsembed.bags import foreign_to_numpy, is_traced
from rsembed.checks import check_finite, check_type, did_you_mean
from rsembed.collection.dense_rows import DenseRows, RowLayout
from rsembed.collection.devices import Devices
from rsembed.collection.host_rows import HostRows, Prefetch
from rsembed.collection.rows import AskedRows, Rows
from rsembed.collection.stack import ByName, EmbeddingState, Stack
from rsembed.fingerprint import Fingerprint
from rsembed.specs import TableSpec, tables_of
from rsembed.stacking import StackingPlan, StackPlan, group_tables, plan_stacking
from rsembed.storage import Hashed, HostCached
from rsembed.storage.logical_rows import SavedArray, check_reasons, checked_slots
from rsembed.storage.protocol import Storage

PLACEMENTS = ("row", "table", "column", "replicated")


def placement_of_tables(
    tables: Mapping[str, TableSpec], devices: Devices, placement: str | Mapping[str, str] | None
) -> dict[str, str]:
    """The placement of every table; one with a storage has the first that this knows, unless another is asked for.

    Raises: ValueError: a placement or table is unknown, a storage does not know its own, or there is no mesh.
    """
    if placement is not None and devices.mesh is None:
        raise ValueError(f"placement={placement!r} needs a mesh; pass mesh=jax.make_mesh(...).")
    storages = {name: cast(Storage | None, table.storage) for name, table in tables.items()}
    known = {name: PLACEMENTS if storage is None else storage.placements for name, storage in storages.items()}
    given = dict(placement) if isinstance(placement, Mapping) else {}
    if isinstance(placement, str):  # what a storage cannot do is an error only where its table is named
        given = {name: placement for name in tables if placement not in PLACEMENTS or placement in known[name]}
    if unknown := sorted(set(given) - set(tables)):
        near = did_you_mean(unknown[0], tables)
        raise ValueError(f"placement names unknown tables {unknown}{near}; the collection has {sorted(tables)}.")
    for name, kind in given.items():
        if kind not in PLACEMENTS:
            raise ValueError(f"table {name!r}: placement {kind!r} is not one of {', '.join(PLACEMENTS)}.")
        if kind not in known[name]:
            raise ValueError(
                f"table {name!r} is kept as {storages[name]}, which cannot be placed {kind!r}, only "
                f"{' or '.join(map(repr, known[name]))}; leave it out of placement."
            )
    return {name: "replicated" if devices.mesh is None else given.get(name, known[name][0]) for name in tables}


def plan_placed(features: PyTree, placements: Mapping[str, str]) -> StackingPlan:
    """Stacks of tables that can share one and have the same placement."""
    tables, placed = tables_of(features), dict[tuple[int, str], list[str]]()
    for number, group in enumerate(group_tables(features, num_shards=1, pad=False)):
        for name in group:
            placed.setdefault((number, placements[name]), []).append(name)
    groups: list[list[str]] = []
    for names in placed.values():
        storage = tables[names[0]].storage
        parts = None if storage is None else cast(Storage, storage).sharing_groups([tables[name] for name in names])
        groups += [names] if parts is None else [[table.name for table in part] for part in parts]
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
    """The stacks of a plan by name, each with the rows of its storage and placement."""
    tables, load, stacks = tables_of(features), [0] * devices.num_devices, dict[str, Stack]()
    for stack in plan.stacks:
        own = tuple(tables[table.name] for table in stack.tables)
        table, storage = own[0], cast(Storage | None, own[0].storage)
        # One device has all rows and asks nobody.
        placement = placements[table.name] if devices.num_devices > 1 else "replicated"
        layout = RowLayout.whole(stack)
        if placement == "row":
            layout = RowLayout.row_wise(stack, devices.num_devices)
        elif placement == "table":
            layout = RowLayout.table_wise(stack, devices.num_devices, load)
        elif placement == "column":
            _check_columns(stack, devices.num_devices)
        if storage is None:
            num_parts = devices.num_devices if placement == "column" else 1
            storage = DenseRows(layout, own, num_parts, implementation)
        elif len(own) > 1:
            storage = storage.sharing(own)
        elif isinstance(storage, HostCached):
            storage = HostRows(storage, table)
        if placement in ("row", "table"):
            rows: Rows = AskedRows(devices, table, storage, implementation, capacity=exchange_capacity)
        else:
            rows = Rows(devices, table, storage, implementation, placement == "column")
        stacks[stack.name] = Stack(layout, rows)
    return stacks


def _check_columns(stack: StackPlan, num_devices: int) -> None:
    """Raises: ValueError: the stack cannot be split by column."""
    rule, dim = stack.spec.optimizer, stack.spec.stack_embedding_dim
    problems = {
        f"embedding_dim={dim} is not divisible by {num_devices} devices": dim % num_devices > 0,
        f"{type(rule).__name__} steps whole rows": rule.is_row_wise,
        "stochastic rounding draws for whole rows": stack.tables[0].stochastic_rounding,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        tables = [table.name for table in stack.tables]
        raise ValueError(f"tables {tables} cannot be placed 'column': {' and '.join(found)}; place them 'row'.")


class LogicalTables:
    """The tables of a collection.

    Args:
      specs: tables by name.
      stacks: what keeps them, by name.
    """

    def __init__(self, specs: Mapping[str, TableSpec], stacks: Mapping[str, Stack]):
        self.specs, self.stacks = specs, stacks
        self.on_host = {name: Prefetch(own) for name, own in stacks.items() if isinstance(own.storage, HostRows)}
        self.apart = {name: own for name, own in stacks.items() if own.storage.rows_on_host}
        """Stacks whose arrays mean nothing to a file: rows found by key, or on the host."""
        self._stack_of = {table.name: name for name, s in stacks.items() for table in s.layout.stack.tables}

    def with_tables(
        self,
        state: EmbeddingState,
        tables: Mapping[str, PyTree],
        slots: Mapping[str, PyTree],
        *,
        allow_nonfinite: bool = False,
    ) -> EmbeddingState:
        """See `EmbeddingCollection.with_tables`."""
        new: dict[str, ByName] = {name: {} for name in self.stacks}
        new_slots: dict[str, ByName] = {name: {} for name in self.stacks}
        for table_name, values in tables.items():
            self._check_known(table_name)
            values = _of_numpy(values)
            for part, array in _parts(values):
                check_type(array, Num[np.ndarray, "..."], f"table {table_name!r}: its {part}")
            if not allow_nonfinite:
                self._check_finite(table_name, _parts(values))
            name, table = self._stack_of[table_name], self.specs[table_name]
            self._check_outside_jit(table, (values, state.step))
            new[name][table_name] = self.stacks[name].storage.checked_rows(values, table, state.step)
        for table_name, own_slots in slots.items():
            self._check_known(table_name)
            name, table = self._stack_of[table_name], self.specs[table_name]
            self._check_outside_jit(table, (own_slots, state.step))
            if not allow_nonfinite:
                self._check_finite(table_name, _slots_by_name(own_slots))
            stack, arrays = self.stacks[name], (state.tables[name], state.slots[name])
            if stack.storage.rows_on_host:
                rows = new[name].get(table_name)
                new[name][table_name] = stack.rows_with_slots(*arrays, table, rows, own_slots)
            else:
                template = stack.slot_shapes(*arrays, table, table.vocabulary_size)
                new_slots[name][table_name] = checked_slots(own_slots, template, table)
        all_tables, all_slots = dict(state.tables), dict(state.slots)
        # Rows on the host last, as what is refused must leave their store with the state that it has.
        for name in sorted(self.stacks, key=self.on_host.__contains__):
            if new[name] or new_slots[name]:
                arrays = all_tables[name], all_slots[name]
                written = self.stacks[name].replaced(*arrays, new[name], new_slots[name])
                all_tables[name], all_slots[name] = written
        return state._replace(tables=all_tables, slots=all_slots)

    def _check_finite(self, table_name: str, parts: Iterable[tuple[str, PyTree]]) -> None:
        """Raises: ValueError: a part of a table is not finite, or a sum of squares is negative."""
        of_squares = [f"slot_{slot}" for slot in self.specs[table_name].optimizer.non_negative_slots]
        for part, array in parts:
            # What a file of ours holds was saved so, and is read later.
            if not isinstance(array, SavedArray):
                where = f"table {table_name!r}: its {part}"
                check_finite(array, where, may_be_negative=part not in of_squares)

    def _check_outside_jit(self, table: TableSpec, values: PyTree) -> None:
        """Raises: RuntimeError: rows of the table are written on the host, and this is inside `jit`."""
        if self.stacks[self._stack_of[table.name]].storage.rows_on_host and is_traced(values):
            raise RuntimeError(
                f"table {table.name!r} is kept as {table.storage}: with_tables writes its rows beside compiled "
                "programs; call it outside of jit, between two steps."
            )

    def evicted(self, state: EmbeddingState, table_name: str, **reasons: float | None) -> tuple[EmbeddingState, ByName]:
        """See `EmbeddingCollection.evict`."""
        check_reasons(f"evict from table {table_name!r}", **reasons)
        if is_traced(state):
            raise RuntimeError("evict works beside compiled programs; call it outside of jit, between two steps.")
        self._check_known(table_name)
        name, spec = self._stack_of[table_name], self.specs[table_name]
        if not isinstance(spec.storage, Hashed):
            raise ValueError(
                f"table {table_name!r} is kept as {spec.storage or 'an array'}: rows leave tables of keys, with "
                "storage=Hashed(...)."
            )
        given = state.tables[name], state.slots.get(name, ()), spec, state.step, reasons
        params, rows = self.stacks[name].evicted(*given)
        return state._replace(tables=state.tables | {name: params}), rows

    def _check_known(self, table_name: str) -> None:
        if table_name not in self.specs:
            near = did_you_mean(table_name, self.specs)
            raise ValueError(f"unknown table {table_name!r}{near}; the collection has {list(self.specs)}.")

    # For files

    def parted(self, state: EmbeddingState) -> tuple[EmbeddingState, ByName, ByName]:
        """The state without stacks that are `apart`, and their tables as files have them: rows, and slots by name."""
        tables: ByName = {}
        slots: ByName = {}
        for name, own in self.apart.items():
            rows, kept = own.saved(state.tables[name], state.slots[name])
            tables, slots = tables | rows, slots | kept
        return self.without_apart(state), tables, slots

    def without_apart(self, state: EmbeddingState) -> EmbeddingState:
        """The state, or a template of one, without stacks that are `apart`."""
        parts = state.tables, state.slots, {} if state.layout is None else state.layout.facts
        tables, slots, facts = ({name: own for name, own in p.items() if name not in self.apart} for p in parts)
        return EmbeddingState(tables, slots, state.step, state.key, Fingerprint.of(facts))

    def whole(
        self, state: EmbeddingState, tables: Mapping[str, PyTree], slots: Mapping[str, PyTree], layout: Fingerprint
    ) -> EmbeddingState:
        """The inverse of `parted`."""
        all_tables, all_slots = dict(state.tables), dict(state.slots)
        for name in sorted(self.apart, key=self.on_host.__contains__):  # as in `with_tables`
            all_tables[name], all_slots[name] = self.apart[name].restored(tables, slots)
        return EmbeddingState(all_tables, all_slots, state.step, state.key, layout)


def _of_numpy(values: PyTree) -> PyTree:
    """A table from outside, of which columns and tensors of other libraries have become arrays of numpy."""
    if isinstance(values, Mapping):
        return {name: foreign_to_numpy(part) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(foreign_to_numpy(part) for part in values)
    return foreign_to_numpy(values)


def _slots_by_name(slots: PyTree) -> list[tuple[str, PyTree]]:
    """The arrays of a table's slots that hold numbers, each with the name of its slot."""
    parts = []
    for path, leaf in jax.tree.leaves_with_path(slots):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            parts.append((f"slot_{name}", leaf))
    return parts


def _parts(values: PyTree) -> Iterable[tuple[PyTree, PyTree]]:
    """The arrays of a table by name: of keys, of cores in a row, or one."""
    if isinstance(values, Mapping):
        return values.items()
    return ((f"part {k}", part) for k, part in enumerate(values)) if isinstance(values, tuple) else [("values", values)]
