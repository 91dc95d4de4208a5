"""State of a collection, and stacks: tables in one storage, with the features that read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from rsembed.bags import Bags, as_bags, is_traced, padded_size
from rsembed.checks import check_finite
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.rows import Occurrences, Rows
from rsembed.fingerprint import Fingerprint
from rsembed.kernels.contract import NO_ROW, Call, Segment
from rsembed.kernels.reference import bag_of_entries
from rsembed.keys import as_keys
from rsembed.specs import TableSpec, default_initializer
from rsembed.stacking import FeaturePlacement
from rsembed.storage import Hashed, hashed_rows, row_map
from rsembed.storage.dense_rows import RowLayout, in_some_bag, list_of
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.logical_rows import array_names, checked_slots, rows_to_leave
from rsembed.storage.protocol import on_host

MOST_KEYS = 1 << 16
"""Largest number of rows that one call of a program reads out."""
FIRST_KEY = "initial_key"
"""Name in files of the PRNG key that draws the initial rows of new keys."""
Activations = dict[str, Float[Array, "..."]]
Batch = Mapping[str, PyTree]
ByName = dict[str, PyTree]
"""Pytrees by name of a table, stack or feature."""


class EmbeddingState(NamedTuple):
    """Everything that training changes. Donate it to your step.

    Args:
      tables: by stack, one array `[rows, dim]`, or the parameters of the tables' storage. On a
        mesh, rows are ordered shard after shard. `EmbeddingCollection.tables` returns them in
        logical order.
      slots: by stack, the optimizer state of the tables.
      step: number of updates so far.
      key: PRNG key of stochastic rounding, otherwise unused.
      layout: fingerprint of the table, row and optimizer that each array row belongs to
        (`RowLayout.facts` by stack). Checkpoints are written by it, and a collection refuses a
        state with a different layout. None, as in a state made by hand, is not compared.
    """

    tables: ByName
    slots: ByName
    step: Int[Array, ""]
    key: PRNGKeyArray
    layout: Fingerprint | None = None


def bags_of(
    batch: PreparedBatch, features: Sequence[FeaturePlacement]
) -> tuple[list[Bags], list[Segment]]:
    """Lists of bags, each of one or several features, and the segment that each feature reads."""
    bags: list[Bags] = []
    segments: list[Segment] = []
    number_of: dict[str, int] = {}
    for feature in features:
        place = batch.place(feature.name)
        if place is None:
            own = as_bags(batch.arrays[feature.name], feature=feature.name)
            segments.append(Segment(len(bags), 0, own.num_bags, feature.combiner))
            bags.append(own)
            continue
        if place.list not in number_of:
            number_of[place.list] = len(bags)
            bags.append(batch.lists[place.list])
        segments.append(
            Segment(number_of[place.list], place.first_bag, place.num_bags, feature.combiner)
        )
    return bags, segments


class Stack:
    """Tables in one storage, with the features that read them, and access to each table by name.

    Methods take the parameters and slots of a state. Slots are None in a state for serving.

    Args:
      layout: tables and features of the stack, and the place of each table if one array has all.
      rows: the functions that find, read and step rows on the devices.
    """

    def __init__(self, layout: RowLayout, rows: Rows):
        self.layout, self.rows, self.storage, self.devices = (
            layout,
            rows,
            rows.storage,
            rows.devices,
        )
        self.table, self.rule, self.partition = rows.table, rows.table.optimizer, rows.partition
        self.tables, self.num_shards = rows.storage.tables_of(rows.table), rows.num_shards

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Partitions of rows and values of `RowGradients` over the mesh."""
        return (PartitionSpec() if self.rows.splits_columns else self.partition), self.partition

    def occurrences(self, batch: PreparedBatch) -> Occurrences:
        """Ids of the stack's features in a batch. Ids outside their table contribute nothing."""
        bags, segments = bags_of(batch, self.layout.stack.features)
        if self.storage.ids_are_rows:
            return Occurrences(self.layout.call(bags, segments))
        # Ids outside all bags must not be looked up.
        is_used = [in_some_bag(own) for own in bags]
        if not self.storage.takes_keys:
            call = RowLayout.whole(self.layout.stack).call(bags, segments)
            lists = []
            for ids, used in zip(call.lists, is_used, strict=True):
                lists.append(replace(ids, ids=jnp.where(used, ids.ids, NO_ROW)))
            return Occurrences(replace(call, lists=tuple(lists)))
        lists, all_keys, first = [], [], 0
        for number, (own, used) in enumerate(zip(bags, is_used, strict=True)):
            keys = as_keys(own.ids).only(used)
            keys = keys._replace(table=self._tables_of_keys(number, own, segments))
            position = first + jnp.arange(keys.shape[0], dtype=jnp.int32)
            lists.append(list_of(own, jnp.where(keys.is_key, position, NO_ROW)))
            all_keys.append(keys)
            first += keys.shape[0]
        return Occurrences(
            Call(tuple(lists), tuple(segments)),
            jax.tree.map(lambda *lanes: jnp.concatenate(lanes), *all_keys),
        )

    def _tables_of_keys(
        self, number: int, bags: Bags, segments: Sequence[Segment]
    ) -> Int[Array, " nnz"] | None:
        """Index of the table that each key of a list belongs to; None if the stack has one table.

        Args:
          number: index of the list.
          bags: bags of the list.
          segments: segment of each feature of the stack.
        """
        names = [table.name for table in self.layout.stack.tables]
        if len(names) == 1:
            return None
        of_bag = np.zeros(bags.num_bags + 1, np.int32)
        for feature, segment in zip(self.layout.stack.features, segments, strict=True):
            if segment.list == number:
                last_bag = segment.first_bag + segment.num_bags
                of_bag[segment.first_bag : last_bag] = names.index(feature.table_name)
        if (of_bag[:-1] == of_bag[0]).all():
            return jnp.full(bags.ids.shape, of_bag[0], jnp.int32)
        return jnp.asarray(of_bag)[
            bag_of_entries(list_of(bags, jnp.zeros(bags.ids.shape, jnp.int32)))
        ]

    def values(self, params: PyTree, slots: PyTree) -> ByName:
        """Rows of every table by name, in the form of `EmbeddingCollection.tables`."""
        if self.storage.takes_keys:
            return self._by_table(self.storage.rows, params, () if slots is None else slots)
        return {
            name: rows["values"]
            for name, rows in self._by_table(self.storage.rows, params, ()).items()
        }

    def slots(self, params: PyTree, slots: PyTree) -> ByName:
        """Optimizer state of every table by name, in the form of `EmbeddingCollection.slots`."""
        nothing: PyTree = ()
        return self._by_table(
            self.storage.optimizer_state, nothing if self.storage.ids_are_rows else params, slots
        )

    def _by_table(self, read: Callable[..., PyTree], params: PyTree, slots: PyTree) -> ByName:
        """Results of `read`, a function of the storage that reads one table, by table name."""
        if not self.storage.rows_on_host:
            params, slots = self.devices.place((params, slots), PartitionSpec())
        parts = self.storage.unstack(params, slots, self.table, self.num_shards)
        return {
            own.name: read(*part, own, self.num_shards)
            for own, part in zip(self.tables, parts, strict=True)
        }

    def replaced(
        self,
        params: PyTree,
        slots: PyTree,
        rows: Mapping[str, PyTree],
        new_slots: Mapping[str, PyTree] = MappingProxyType({}),
    ) -> tuple[PyTree, PyTree]:
        """Parameters and slots with new rows and slots of some tables, which were checked before.

        If `storage.rows_on_host`, `rows` contain the slots too, and `new_slots` is empty.
        """
        devices, shards = self.devices, self.num_shards
        if self.storage.rows_on_host:
            written = self.storage.with_tables(params, slots, rows, self.table, shards, {})
            placed: tuple[PyTree, PyTree] = devices.place_from_host(written, self.partition)
            return placed
        everywhere = PartitionSpec()
        if rows:
            params = devices.place(params, everywhere)
        if new_slots:
            slots = devices.place(slots, everywhere)
        params, slots = self.storage.with_tables(params, slots, rows, self.table, shards, new_slots)
        if rows:
            params = devices.place(params, self.partition)
        if new_slots:
            slots = devices.place(slots, self.partition)
        return params, slots

    def slot_shapes(self, params: PyTree, slots: PyTree, table: TableSpec, num_rows: int) -> PyTree:
        """Shapes and dtypes of the optimizer state of one table with `num_rows` rows."""
        if not self.storage.rows_on_host:
            return jax.eval_shape(self.slots, params, slots)[table.name]
        shapes: PyTree = tuple(
            jax.ShapeDtypeStruct((num_rows, *slot.shape[1:]), slot.dtype) for slot in slots
        )
        return table.optimizer.pack_slots(shapes)

    def rows_with_slots(
        self, params: PyTree, slots: PyTree, table: TableSpec, rows: PyTree, new_slots: PyTree
    ) -> dict[str, PyTree]:
        """Rows and slots of a table with `rows_on_host`, in the form that `replaced` takes.

        Args:
          params: parameters of the state.
          slots: slots of the state.
          table: spec of the table.
          rows: new rows, checked by the storage. None keeps the rows of the state.
          new_slots: slots of the new rows, or of the state's rows if `rows` is None. Slots of a
            keyed table are in the order of the keys.

        Raises: ValueError, TypeError: slots do not fit the table.
        """
        given = rows if rows is None or isinstance(rows, Mapping) else {"values": rows}
        whole: dict[str, PyTree] = {}
        if given is None or not self.storage.takes_keys:
            whole |= self._by_table(self.storage.rows, params, slots)[table.name]
        whole |= given or {}
        template = self.slot_shapes(params, slots, table, len(whole.get("values", ())))
        arrays = jax.tree.leaves(checked_slots(new_slots, template, table))
        return whole | dict(zip(array_names(table, slots)[1:], arrays, strict=True))

    def counts(self, params: PyTree) -> dict[str, dict[str, np.ndarray]]:
        """Counters by table, with one number per device; empty if the storage counts nothing."""
        counts = self.storage.counts(params, self.num_shards * len(self.tables))
        return {
            table.name: {
                what: numbers.reshape(self.num_shards, -1)[:, k] for what, numbers in counts.items()
            }
            for k, table in enumerate(self.tables)
        }

    def check_start(self, params: PyTree, slots: PyTree) -> None:
        """Raises: ValueError: a custom initializer gave a number that is not finite."""
        draws_slots = (
            any(map(callable, self.rule.slot_initial_values()))
            if self.storage.ids_are_rows
            else False
        )
        given = [table for table in self.tables if table.initializer is not default_initializer]
        if is_traced((params, slots)) or not (given or draws_slots):
            return
        way_out = "give one that makes finite numbers of the table's dtype"
        if not self.storage.ids_are_rows:
            # Rows of keyed tables are drawn one by one during training, so one row is tried.
            for table in given if self.storage.takes_keys else ():
                row = table.initializer(jax.random.key(0), (1, table.embedding_dim))
                check_finite(
                    row,
                    f"table {table.name!r}: what its initializer gives for a row",
                    way_out=way_out,
                )
            return
        try:
            for array in (params, *slots):
                check_finite(array, f"stack {self.layout.stack.name!r}", way_out=way_out)
        except ValueError:
            # Copying the tables one by one costs time, but names the table in the error.
            for table_name, values in self.values(params, slots).items():
                check_finite(
                    values, f"table {table_name!r}: what its initializer gives", way_out=way_out
                )
            raise

    # Files

    def saved(self, params: PyTree, slots: PyTree) -> tuple[ByName, ByName]:
        """Rows and slots of every table by name, in the form of files.

        A keyed table has its keys, rows and slots in one dictionary, and no separate slots.
        """
        tables = self._by_table(self.storage.rows, params, slots)
        if not self.storage.takes_keys:
            parts = {
                name: {part.removeprefix("slot_"): a for part, a in rows.items()}
                for name, rows in tables.items()
            }
            return {name: own.pop("values") for name, own in parts.items()}, parts
        # One key per table and shard. All shards have equal keys, so the first shard's are taken.
        keys = on_host(jax.random.key_data(params.key))
        impl = jax.random.key_impl(params.key)
        first = (jax.random.wrap_key_data(jnp.asarray(own), impl=impl) for own in keys)
        return {name: rows | {FIRST_KEY: next(first)} for name, rows in tables.items()}, {
            name: {} for name in tables
        }

    def restored(
        self, tables: Mapping[str, PyTree], slots: Mapping[str, PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Parameters and slots from the result of `saved`. Raises: ValueError: it does not fit."""
        part = self.partition
        start = self.devices.on_each(self.rows.init, PartitionSpec(), (part, part))
        params, fresh_slots = jax.jit(start)(jax.random.key(0))
        found = {own.name: tables[own.name] for own in self.tables}
        if self.storage.takes_keys:
            keys = [rows[FIRST_KEY] for rows in found.values()]
            data = np.stack(
                [np.asarray(jax.random.key_data(key)) for key in keys] * self.num_shards
            )
            (placed,) = self.devices.place_from_host([data], part)
            params = params._replace(
                key=jax.random.wrap_key_data(placed, impl=jax.random.key_impl(keys[0]))
            )
            found = {
                n: {what: a for what, a in rows.items() if what != FIRST_KEY}
                for n, rows in found.items()
            }
        else:
            found = {
                n: {"values": v} | {f"slot_{what}": a for what, a in slots.get(n, {}).items()}
                for n, v in found.items()
            }
        return self.replaced(params, fresh_slots, found)

    # Eviction

    def evicted(
        self,
        params: DynamicTable,
        slots: PyTree,
        table: TableSpec,
        step: Int[Array, ""],
        reasons: Mapping[str, Any],
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """Parameters without the evicted keys of a table, and these keys with their rows.

        See `EmbeddingCollection.evict`. `params` are donated. The compiled program that removes
        keys does not get the rows, because on a mesh it would copy them.
        """
        number, policy = self.tables.index(table), cast(Hashed, self.storage).eviction
        # Every shard has all tables in order, so their numbers repeat.
        tables = np.arange(params.num_tables) % len(self.tables)
        is_own = np.repeat(tables == number, params.rows.shape[0] // params.num_tables)
        places, found = rows_to_leave(
            params, table, policy, is_own, **reasons, step=int(on_host(step))
        )
        padded = np.pad(places, (0, padded_size(places.size) - places.size))
        blocks = np.split(padded, range(MOST_KEYS, padded.size, MOST_KEYS))
        values = [
            np.concatenate([on_host(_picked(array, block)) for block in blocks])[: places.size]
            for array in (params.rows, *slots)
        ]
        leaves = np.zeros(is_own.shape, bool)
        leaves[places] = True
        (leaves,) = self.devices.place_from_host([leaves], self.partition)
        nothing: PyTree = ()
        # If the reason is not given, no key is old enough.
        unused_for = np.int32(2**31 - 1 if reasons["unused_for"] is None else reasons["unused_for"])
        left = self._without(
            params._replace(rows=nothing), leaves, step, unused_for, np.int32(number)
        )
        return left._replace(rows=params.rows), found | dict(
            zip(array_names(table, slots), values, strict=True)
        )

    @functools.cached_property
    def _without(self) -> Callable[..., DynamicTable]:
        part, everywhere = self.partition, PartitionSpec()
        return jax.jit(
            self.devices.on_each(_without, (part, part, *[everywhere] * 3), part), donate_argnums=0
        )


def call_of(stacks: Sequence[Stack], batch: PreparedBatch) -> Call:
    """One kernel call that reads several stacks of dense rows on one device.

    Table `k` of the call is the array of stack `k`. Segments are the features of all stacks, stack
    after stack.
    """
    features: list[FeaturePlacement] = []
    for stack in stacks:
        features += stack.layout.stack.features
    bags, readers = bags_of(batch, features)
    segments: list[Segment] = []
    for number, stack in enumerate(stacks):
        for feature in stack.layout.stack.features:
            segment = stack.layout.segment(feature.table_name, readers[len(segments)])
            segments.append(segment._replace(table=number))
    return Call(tuple(list_of(own) for own in bags), tuple(segments))


@jax.jit
def _picked(array: Array, places: Int[Array, " n"]) -> Array:
    return array[places]


def _without(params: DynamicTable, leaves: Bool[Array, " rows"], *forget: Array) -> DynamicTable:
    """Parameters of a device without the keys of some rows.

    Args:
      params: parameters of the device.
      leaves: mask of the rows to free.
      forget: step, age and table number for `hashed_rows.forget_older`, which removes keys that
        wait for admission.
    """
    known, rows = params.keys, jnp.arange(leaves.shape[0], dtype=jnp.int32)
    left = row_map.release(known, jnp.where(leaves, rows, NO_ROW))
    counters = params.counters.add(evicted=left.num_free - known.num_free)
    return hashed_rows.forget_older(
        hashed_rows.with_keys(params, left)._replace(counters=counters), *forget
    )
