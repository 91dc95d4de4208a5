"""Stacks: rows of one table or several, the features that read them, and the devices that have them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from rsembed.bags import Bags
from rsembed.checks import did_you_mean
from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.dense_rows import DenseRows, RowLayout
from rsembed.collection.devices import Devices
from rsembed.collection.rows import Occurrences, Rows
from rsembed.homes.hashed_rows import apart, together
from rsembed.homes.home import Home
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import as_keys
from rsembed.specs import TableSpec, tables_of
from rsembed.stacking import StackingPlan, StackPlan, group_tables, plan_stacking

ROWS_PER_BLOCK = 1 << 14
"""Rows of a table that are made of other numbers at once."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Rows under the features of their stack.

    Args:
      layout: where the rows of each table lie.
      rows: what does the work.
    """

    layout: RowLayout
    rows: Rows

    @property
    def home(self) -> Home:
        """What keeps the rows."""
        return self.rows.home

    @property
    def is_dense(self) -> bool:
        """Whether the rows are an array, of one table or several; else they are as a table's storage has them."""
        return self.table.storage is None

    @property
    def table(self) -> TableSpec:
        """Whose rows these are; of dense rows the first."""
        return self.rows.table

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split."""
        return self.rows.partition

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return (PartitionSpec() if self.rows.splits_columns else self.partition), self.partition

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """Those that share the home; of dense rows the first."""
        return self.home.tables_of(self.table)

    def apart(self, params: Any, slots: Any) -> dict[str, tuple[Any, Any]]:
        """Parameters and slots of each table that shares the home; of several, on the host."""
        tables = self.tables
        parted = apart((params, slots), len(tables), self.rows.num_shards)
        return {table.name: own for table, own in zip(tables, parted, strict=True)}

    def counts(self, params: Any) -> dict[str, dict[str, np.ndarray]]:
        """What happened on each device so far, of each table that shares the home."""
        tables, num_shards = self.tables, self.rows.num_shards
        counts = self.home.counts(params, num_shards * len(tables))
        if len(tables) == 1:
            return {self.table.name: counts}
        return {
            table.name: {what: numbers.reshape(num_shards, -1)[:, k] for what, numbers in counts.items()}
            for k, table in enumerate(tables)
        }

    def all_rows_of(self, params: Any, slots: Any) -> dict[str, dict[str, np.ndarray]]:
        """Rows by key with what belongs to them, of each table that shares the home, on the host."""
        return {
            table.name: self.home.rows(*own, table, self.rows.num_shards)
            for table, own in zip(self.tables, self.apart(params, slots).values(), strict=True)
        }

    def with_rows(self, params: Any, slots: Any, rows: Mapping[str, Any]) -> tuple[Any, Any]:
        """Parameters and slots of all devices with rows of some tables written, by key; not inside `jit`."""
        by_table = self.apart(params, slots)
        for table in self.tables:
            if table.name in rows:
                given = *by_table[table.name], rows[table.name], table, self.rows.num_shards
                by_table[table.name] = self.home.with_rows(*given)
        written, written_slots = together(list(by_table.values()), self.rows.num_shards)
        if len(by_table) > 1:
            written = written._replace(key=params.key)  # as it lies on the devices
        return self.rows.devices.place_from_host((written, written_slots), self.partition)

    def all_rows(self, params: Any) -> Array:
        """An array of rows, of a table that is kept in few numbers; one device's part of a program.

        Blocks of rows are written into one array: nothing else is as large.
        """
        num_rows, dim = self.table.vocabulary_size, self.table.embedding_dim
        size = min(num_rows, ROWS_PER_BLOCK)

        def put(number: Array, rows: Array) -> Array:
            first = jnp.minimum(number * size, num_rows - size)
            ids = as_keys(first + jnp.arange(size, dtype=jnp.int32))
            block = self.home.read(params, ids, self.table)[0]
            return jax.lax.dynamic_update_slice_in_dim(rows, block, first, 0)

        nothing = jnp.zeros((num_rows, dim), self.home.vector_dtype(self.table))
        rows: Array = jax.lax.fori_loop(0, -(-num_rows // size), put, nothing)
        return rows

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside their table are none."""
        if self.is_dense:
            return Occurrences(self.layout.segments(bags))
        # What stands behind the last bag must not be looked for.
        num_ids = [bags[feature.name].offsets[-1] for feature in self.layout.stack.features]
        if not self.home.takes_keys:
            pairs = zip(self._ids.segments(bags), num_ids, strict=True)
            return Occurrences([_first_rows(segment, count) for segment, count in pairs])
        features, names = [], [table.name for table in self.layout.stack.tables]
        for feature, count in zip(self.layout.stack.features, num_ids, strict=True):
            own = bags[feature.name]
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < count)
            if len(names) > 1:
                number = names.index(feature.table_name)
                keys = keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            features.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
        return Occurrences.of(features)

    @functools.cached_property
    def _ids(self) -> RowLayout:
        """The layout of one table whose rows are its ids."""
        return RowLayout.whole(self.layout.stack)


def _first_rows(segment: Segment, count: Any) -> Segment:
    is_used = jnp.arange(segment.rows.shape[0], dtype=jnp.int32) < count
    return dataclasses.replace(segment, rows=jnp.where(is_used, segment.rows, NO_ROW))


Placement = Literal["row", "table", "column", "replicated"]
PLACEMENTS: tuple[Placement, ...] = ("row", "table", "column", "replicated")


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


def plan_placed(features: Any, placements: Mapping[str, str]) -> StackingPlan:
    """Stacks of tables that can share one and have the same placement."""
    tables, placed = tables_of(features), dict[Any, list[str]]()
    for number, group in enumerate(group_tables(features, num_shards=1, pad=False)):
        for name in group:
            placed.setdefault((number, placements[name]), []).append(name)
    groups: list[list[str]] = []
    for names in placed.values():
        storage = tables[names[0]].storage
        parts = None if storage is None else storage.groups([tables[name] for name in names])
        groups += [names] if parts is None else [[table.name for table in part] for part in parts]
    return plan_stacking(features, groups=groups, pad=False)


def make_stacks(
    plan: StackingPlan,
    features: Any,
    placements: Mapping[str, str],
    devices: Devices,
    *,
    exchange_capacity: int | None,
    implementation: str | None,
) -> dict[str, Stack]:
    """What does the work of every stack, by name."""
    tables, load = tables_of(features), [0] * devices.num_devices

    def make(stack: StackPlan) -> Stack:
        own = tuple(tables[table.name] for table in stack.tables)
        table, storage, placement = own[0], cast(Home | None, own[0].storage), placements[own[0].name]
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
        home = storage or DenseRows(layout, own, devices.num_devices if splits_columns else 1, implementation)
        if storage is not None and len(own) > 1:
            home = storage.shared(own)
        if is_split:
            return Stack(layout, AskedRows(devices, table, home, implementation, capacity=exchange_capacity))
        return Stack(layout, Rows(devices, table, home, implementation, splits_columns))

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
