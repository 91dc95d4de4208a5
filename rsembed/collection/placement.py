"""Which table lies where: placements become stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from jaxtyping import PyTree

from rsembed.checks import did_you_mean
from rsembed.collection.dense_rows import DenseRows, RowLayout
from rsembed.collection.devices import Devices
from rsembed.collection.host_stack import HostStack
from rsembed.collection.keyed_stack import KeyedStack
from rsembed.collection.rows import AskedRows, Rows
from rsembed.collection.stack import ArrayStack, Stack, TrainStack
from rsembed.specs import TableSpec, tables_of
from rsembed.stacking import StackingPlan, StackPlan, group_tables, plan_stacking
from rsembed.storage import HostCached
from rsembed.storage.hashed import RowsByKey
from rsembed.storage.protocol import Storage

Placement = Literal["row", "table", "column", "replicated"]
PLACEMENTS: tuple[Placement, ...] = ("row", "table", "column", "replicated")


_OF_STORAGE: dict[type, type[Stack]] = {DenseRows: ArrayStack, RowsByKey: KeyedStack, HostCached: HostStack}


def placement_of_tables(
    tables: Mapping[str, TableSpec], devices: Devices, placement: str | Mapping[str, str] | None
) -> dict[str, str]:
    """The placement of every table; one with a storage has the first that this knows, unless another is asked for.

    Raises: ValueError: a placement or table is unknown, a storage does not know its own, or there is no mesh.
    """
    if placement is not None and devices.mesh is None:
        raise ValueError(f"placement={placement!r} needs a mesh; pass mesh=jax.make_mesh(...).")
    given = dict(placement) if isinstance(placement, Mapping) else {}
    if isinstance(placement, str):  # what a storage cannot do is an error only where its table is named
        known = {
            name: PLACEMENTS if table.storage is None else table.storage.placements for name, table in tables.items()
        }
        given = {name: placement for name in tables if placement not in PLACEMENTS or placement in known[name]}
    unknown = sorted(set(given) - set(tables))
    if unknown:
        near = did_you_mean(unknown[0], tables)
        raise ValueError(f"placement names unknown tables {unknown}{near}; the collection has {sorted(tables)}.")
    for name, kind in given.items():
        if kind not in PLACEMENTS:
            raise ValueError(f"table {name!r}: placement {kind!r} is not one of {', '.join(PLACEMENTS)}.")
        storage = tables[name].storage
        if storage is not None and kind not in storage.placements:
            raise ValueError(
                f"table {name!r} is kept as {storage}, which cannot be placed {kind!r}, only "
                f"{' or '.join(map(repr, storage.placements))}; leave it out of placement."
            )
    default = {name: "row" if table.storage is None else table.storage.placements[0] for name, table in tables.items()}
    return {name: "replicated" if devices.mesh is None else given.get(name, default[name]) for name in tables}


def plan_placed(features: PyTree, placements: Mapping[str, str]) -> StackingPlan:
    """Stacks of tables that can share one and have the same placement."""
    tables, placed = tables_of(features), dict[tuple[int, str], list[str]]()
    for number, group in enumerate(group_tables(features, num_shards=1, pad=False)):
        for name in group:
            placed.setdefault((number, placements[name]), []).append(name)
    groups: list[list[str]] = []
    for names in placed.values():
        storage = tables[names[0]].storage
        parts = None if storage is None else storage.sharing_groups([tables[name] for name in names])
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
    tables, load = tables_of(features), [0] * devices.num_devices

    def make(stack: StackPlan) -> Stack:
        own = tuple(tables[table.name] for table in stack.tables)
        table, storage, placement = own[0], cast(Storage | None, own[0].storage), placements[own[0].name]
        # One device has all rows and asks nobody.
        is_split = devices.num_devices > 1 and placement in ("row", "table")
        layout = RowLayout.whole(stack)
        if is_split and placement == "row":
            layout = RowLayout.row_wise(stack, devices.num_devices)
        elif is_split:
            layout = RowLayout.table_wise(stack, devices.num_devices, load)
        splits_columns = placement == "column" and devices.num_devices > 1
        if splits_columns:
            _check_columns(stack, devices.num_devices)
        if storage is None:
            storage = DenseRows(layout, own, devices.num_devices if splits_columns else 1, implementation)
        elif len(own) > 1:
            storage = storage.sharing(own)
        kind = next((own for of, own in _OF_STORAGE.items() if isinstance(storage, of)), TrainStack)
        if is_split:
            return kind(layout, AskedRows(devices, table, storage, implementation, capacity=exchange_capacity))
        return kind(layout, Rows(devices, table, storage, implementation, splits_columns))

    return {stack.name: make(stack) for stack in plan.stacks}


def _check_columns(stack: StackPlan, num_devices: int) -> None:
    """Raises: ValueError: the stack cannot be split by column."""
    problem = None
    if stack.spec.stack_embedding_dim % num_devices:
        problem = f"embedding_dim={stack.spec.stack_embedding_dim} is not divisible by {num_devices} devices"
    elif stack.spec.optimizer.is_row_wise:
        problem = f"{type(stack.spec.optimizer).__name__} steps whole rows"
    elif stack.tables[0].stochastic_rounding:
        problem = "stochastic rounding draws for whole rows"
    if problem is not None:
        tables = [table.name for table in stack.tables]
        raise ValueError(f"tables {tables} cannot be placed 'column': {problem}; place them 'row'.")
