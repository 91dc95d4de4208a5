"""Stacks: rows of one table or several, the features that read them, and the tables out of them and in again.

That of a table on the host is in `host_stack.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Integer, PyTree

from rsembed.bags import Bags, is_traced, padded_size
from rsembed.collection.dense_rows import RowLayout
from rsembed.collection.rows import Occurrences, Rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import Keys, as_keys, join_keys, owners, split_keys
from rsembed.specs import TableSpec
from rsembed.storage import Hashed, hashed_rows, row_map
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.logical_rows import array_names, as_dtype, keys_to_leave
from rsembed.storage.protocol import on_host

OF_ROWS = ("keys", "values", "last_step", "count", "first_step", "waiting_keys", "waiting_last_step", "waiting_count")
"""Names of the arrays that describe rows by key, beside those of slots."""
ROWS_PER_BLOCK = 1 << 14
"""Rows of a table that are made of other numbers at once."""


class Stack(abc.ABC):
    """Rows of one table or several, the features that read them, and the tables by name.

    Each storage has its own stack. All methods take the parameters and slots of a state; slots are None in a state for
    serving.

    Args:
      layout: where the rows of each table lie.
      rows: how devices find, read and step them.
    """

    def __init__(self, layout: RowLayout, rows: Rows):
        self.layout, self.rows, self.storage, self.devices = layout, rows, rows.storage, rows.devices
        self.table, self.rule, self.partition = rows.table, rows.table.optimizer, rows.partition
        self.tables = rows.storage.tables_of(rows.table)

    def __reduce__(self) -> tuple[PyTree, ...]:
        return type(self), (self.layout, self.rows)  # programs and stores belong to this process

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return (PartitionSpec() if self.rows.splits_columns else self.partition), self.partition

    @abc.abstractmethod
    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        """The ids of the stack's features; those outside their table are none."""

    @abc.abstractmethod
    def values(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        """The rows of every table, as `EmbeddingCollection.tables` returns them."""

    @abc.abstractmethod
    def slots(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        """The optimizer state of every table, as `EmbeddingCollection.slots` returns it."""

    @abc.abstractmethod
    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        """New rows of a table as `replaced` takes them; nothing has changed yet.

        Raises: ValueError: they do not fit. RuntimeError: this is inside `jit`, where the storage cannot take them.
        """

    def replaced(self, params: PyTree, slots: PyTree, values: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        """Parameters and slots with what `checked` returned of some tables."""
        num_shards = self.rows.num_shards
        parts = self.storage.unstack(params, slots, self.table, num_shards)
        for number, table in enumerate(self.tables):
            if table.name in values:
                parts[number] = self.storage.with_rows(*parts[number], values[table.name], table, num_shards)
        written = self.storage.stack(parts, params, num_shards)
        placed: tuple[PyTree, PyTree] = self.devices.place_from_host(written, self.partition)
        return placed

    def counts(self, params: PyTree) -> dict[str, dict[str, np.ndarray]]:
        """Counters of every device by table; empty for storages that count nothing."""
        return {self.table.name: self.storage.counts(params, self.rows.num_shards)}

    def fresh(self) -> tuple[PyTree, PyTree]:
        """Parameters and slots of a state of which all will be replaced."""
        part = self.partition
        start = self.devices.on_each(self.rows.init, PartitionSpec(), (part, part))
        made: tuple[PyTree, PyTree] = jax.jit(start)(jax.random.key(0))
        return made

    # Parts of these

    def with_rows_of_keys(self, table: TableSpec, whole: np.ndarray, rows: Mapping[str, PyTree]) -> np.ndarray:
        """A table whose ids are rows, with those that a table with keys has."""
        keys, values = (np.asarray(rows.get(part, ())) for part in ("keys", "values"))
        if unknown := sorted(part for part in rows if part not in OF_ROWS and not part.startswith("slot_")):
            raise ValueError(
                f"table {table.name!r}: cannot take {unknown} of rows by key; it takes 'keys' and 'values'."
            )
        if values.shape != (keys.size, whole.shape[1]) or not np.issubdtype(keys.dtype, np.integer):
            raise ValueError(
                f"table {table.name!r} takes rows by key as 'keys' [n] and 'values' [n, {whole.shape[1]}], got "
                f"{ {part: np.shape(array) for part, array in rows.items()} }."
            )
        if (is_outside := (keys < 0) | (keys >= len(whole))).any():
            raise ValueError(
                f"table {table.name!r} has {len(whole)} rows, none for key {keys[is_outside][0]} "
                f"({int(is_outside.sum())} such keys); hash them into the table, or keep it as rsembed.Hashed."
            )
        distinct, counts = np.unique(keys, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"table {table.name!r}: keys must be distinct, but {distinct[counts > 1][0]} comes twice.")
        whole[keys] = as_dtype(values, whole.dtype, f"table {table.name!r}", "values")
        return whole

    def as_whole(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree) -> PyTree:
        """All rows of a table, from an array of them or from some by key."""
        if isinstance(values, Mapping):
            values = self.with_rows_of_keys(table, np.array(self.values(params, slots)[table.name]), values)
        shape = (table.vocabulary_size, table.embedding_dim)
        if np.shape(values) != shape:
            raise ValueError(f"table {table.name!r} has shape {shape}, the new values {np.shape(values)}.")
        if is_traced(values):
            return values
        return as_dtype(on_host(values), table.dtype, f"table {table.name!r}", "values")  # may be of another mesh


class ArrayStack(Stack):
    """Tables that lie under each other in one array, as the layout says."""

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        return Occurrences(self.layout.segments(bags))

    def values(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        return self._copies(params)

    def slots(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        copies = [self._copies(slot) for slot in slots]
        return {t.name: self.rule.pack_slots(tuple(own[t.name] for own in copies)) for t in self.layout.stack.tables}

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        return self.as_whole(params, slots, table, values)

    def replaced(self, params: PyTree, slots: PyTree, values: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        params = self.devices.place(params, PartitionSpec())
        for name, own in values.items():
            params = params.at[self.layout.all_rows(name, len(own))].set(jnp.asarray(own, params.dtype))
        return self.devices.place(params, self.partition), slots

    def _copies(self, array: Array) -> dict[str, Array]:
        """The rows of each table, on every device."""
        layout, dense = self.layout, self.devices.place(array, PartitionSpec())
        return {table.name: _copy_of(dense, layout.all_rows(table.name, table.rows)) for table in layout.stack.tables}


class RowNumberStack(Stack):
    """One table with a storage of its own whose ids are row numbers."""

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        segments = RowLayout.whole(self.layout.stack).segments(bags)
        # What stands behind the last bag must not be looked for.
        ends = [bags[feature.name].offsets[-1] for feature in self.layout.stack.features]
        return Occurrences([_first_rows(segment, end) for segment, end in zip(segments, ends, strict=True)])


class TrainStack(RowNumberStack):
    """Tables whose rows are made of few numbers, equal on all devices: products of the cores of tensor trains."""

    def __init__(self, layout: RowLayout, rows: Rows):
        super().__init__(layout, rows)
        everywhere = PartitionSpec()
        own = [functools.partial(self._all_rows_here, number=number) for number in range(len(self.tables))]
        self._all_rows = [jax.jit(self.devices.on_each(of_table, everywhere, everywhere)) for of_table in own]

    def values(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        return {table.name: rows(params) for table, rows in zip(self.tables, self._all_rows, strict=True)}

    def slots(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        parts = self.storage.unstack(params, slots, self.table, self.rows.num_shards)
        copies = [self.devices.place(jax.tree.map(jnp.copy, own), PartitionSpec()) for _, own in parts]
        return dict(zip((table.name for table in self.tables), copies, strict=True))

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        return values

    def _all_rows_here(self, params: PyTree, *, number: int) -> Array:
        """One device's part of a program. Blocks of rows are written into one array: nothing else is as large."""
        sizes, storage = [table.vocabulary_size for table in self.tables], self.storage
        first_row, num_rows, size = sum(sizes[:number]), sizes[number], min(sizes[number], ROWS_PER_BLOCK)

        def put(block: Array, rows: Array) -> Array:
            first = jnp.minimum(block * size, num_rows - size)
            ids = as_keys(first_row + first + jnp.arange(size, dtype=jnp.int32))
            return jax.lax.dynamic_update_slice_in_dim(rows, storage.read(params, ids, self.table)[0], first, 0)

        nothing = jnp.zeros((num_rows, self.table.embedding_dim), storage.vector_dtype(self.table))
        rows: Array = jax.lax.fori_loop(0, -(-num_rows // size), put, nothing)
        return rows


def refuse_traced(table: TableSpec, *values: PyTree) -> None:
    """Raises: RuntimeError: this is inside `jit`, where rows of the table cannot be written."""
    if is_traced(values):
        raise RuntimeError(
            f"table {table.name!r} is kept as {table.storage}: with_tables writes its rows beside compiled programs; "
            "call it outside of jit, between two steps."
        )


def _first_rows(segment: Segment, count: Array | int) -> Segment:
    is_used = jnp.arange(segment.rows.shape[0], dtype=jnp.int32) < count
    return dataclasses.replace(segment, rows=jnp.where(is_used, segment.rows, NO_ROW))


def _copy_of(array: Array, rows: np.ndarray | slice) -> Array:
    """Some rows; indexing by all of them would give the array itself, which a donated step deletes."""
    own = array[rows]
    return jnp.copy(own) if own is array else own


MOST_KEYS, LEAST_KEYS = 1 << 16, 1 << 8
"""Rows of a device that one program moves at most; and for which there is room in each, so that there are few."""
FIRST_KEY = "initial_key"
"""Name in files of the PRNG key from which the rows of new keys follow."""


class Leaving(NamedTuple):
    """Places of rows that lose their keys, of one shard after the other, and what was noted of them."""

    rows: Int[Array, " size"]
    high: Array
    low: Array
    last_step: Array
    counts: Array
    first_step: PyTree


class KeyedStack(Stack):
    """Tables whose ids are keys; several may share one storage."""

    storage: Hashed

    def __init__(self, layout: RowLayout, rows: Rows):
        super().__init__(layout, rows)
        alone = len(self.tables) == 1
        self._programs = [self._programs_of(None if alone else number) for number in range(len(self.tables))]

    def occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        features, names = [], [table.name for table in self.layout.stack.tables]
        for feature in self.layout.stack.features:
            own = bags[feature.name]
            # What stands behind the last bag must not be looked for.
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < own.offsets[-1])
            if len(names) > 1:
                number = names.index(feature.table_name)
                keys = keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            features.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
        return Occurrences.of(features)

    def values(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        num_shards = self.rows.num_shards
        parts = self.storage.unstack(params, () if slots is None else slots, self.table, num_shards)
        return {t.name: self.storage.rows(*own, t, num_shards) for t, own in zip(self.tables, parts, strict=True)}

    def slots(self, params: PyTree, slots: PyTree) -> dict[str, PyTree]:
        by_table = self.values(params, slots)
        names = {name: [part for part in rows if part.startswith("slot_")] for name, rows in by_table.items()}
        return {n: self.rule.pack_slots(tuple(jnp.asarray(by_table[n][part]) for part in names[n])) for n in by_table}

    def checked(self, params: PyTree, slots: PyTree, table: TableSpec, values: PyTree, step: Int[Array, ""]) -> PyTree:
        refuse_traced(table, values, step)
        if not isinstance(values, Mapping):
            values = {"keys": np.arange(len(values)), "values": values}
        if "last_step" in values:
            return values
        # They count as used now: else they would be the first to go.
        return {**values, "last_step": np.full(np.shape(values.get("keys", ())), int(on_host(step)))}

    def counts(self, params: PyTree) -> dict[str, dict[str, np.ndarray]]:
        tables, num_shards = self.tables, self.rows.num_shards
        counts = self.storage.counts(params, num_shards * len(tables))
        return {
            table.name: {what: numbers.reshape(num_shards, -1)[:, k] for what, numbers in counts.items()}
            for k, table in enumerate(tables)
        }

    def saved(self, params: PyTree, slots: PyTree) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        keys = on_host(jax.random.key_data(params.key))  # of all shards, which have the same ones
        impl = jax.random.key_impl(params.key)
        first = (jax.random.wrap_key_data(jnp.asarray(own), impl=impl) for own in keys)
        tables = {name: rows | {FIRST_KEY: next(first)} for name, rows in self.values(params, slots).items()}
        return tables, {name: {} for name in tables}

    def restored(self, tables: Mapping[str, PyTree], slots: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
        (params, fresh_slots), own = self.fresh(), [tables[table.name] for table in self.tables]
        keys = [rows[FIRST_KEY] for rows in own]
        data = np.stack([np.asarray(jax.random.key_data(key)) for key in keys] * self.rows.num_shards)
        (placed,) = self.devices.place_from_host([data], self.partition)
        params = params._replace(key=jax.random.wrap_key_data(placed, impl=jax.random.key_impl(keys[0])))
        rows = [{name: array for name, array in parts.items() if name != FIRST_KEY} for parts in own]
        return self.replaced(params, fresh_slots, dict(zip((t.name for t in self.tables), rows, strict=True)))

    # Rows that leave

    def evicted(
        self, params: PyTree, slots: PyTree, table: TableSpec, step: Int[Array, ""], reason: Mapping[str, PyTree]
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """The parameters without some keys of a table, and their rows; see `EmbeddingCollection.evict`.

        The parameters are given away. Programs that change which keys have rows do without the rows, which they would
        copy on a mesh.
        """
        number = self.tables.index(table)
        numbers = np.arange(params.num_tables) % len(self.tables)  # of every shard one behind the other
        is_own = np.repeat(numbers == number, params.rows.shape[0] // params.num_tables)
        squares = None if reason["norm_below"] is None else float(reason["norm_below"]) ** 2
        given = {"keep": reason["keep"], "unused_for": reason["unused_for"], "squares_below": squares}
        keys = keys_to_leave(params, self._score, is_own, **given, step=int(on_host(step)))
        params, rows = self._taken_out(params, slots, table, number, keys)
        if reason["unused_for"] is not None:
            left = self._programs[number][2](_bare(params), step, np.int32(reason["unused_for"]))
            params = left._replace(rows=params.rows)
        return params, rows

    def _score(self, params: DynamicTable) -> Array:
        """The worth of each row as an unsigned number; rows of least worth leave first."""
        return self.storage.scores(params)[0](params.keys)

    def _programs_of(self, number: int | None) -> tuple[Any, Any, Any]:
        """Compiled functions for one table: gather rows, release keys, and forget keys that wait for admission."""
        part, everywhere, on_each = self.partition, PartitionSpec(), self.devices.on_each
        forget = functools.partial(hashed_rows.forget_older, number=number)
        release = functools.partial(_release, number=number)
        return (
            jax.jit(on_each(_gather, (part, part, part), part)),
            jax.jit(on_each(release, (part, part), (part, part)), donate_argnums=0),
            jax.jit(on_each(forget, (part, everywhere, everywhere), part), donate_argnums=0),
        )

    def _taken_out(
        self, params: DynamicTable, slots: PyTree, table: TableSpec, number: int, keys: Integer[np.ndarray, " n"]
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """The parameters without distinct keys, and their rows by key, in ascending order."""
        rows, (gather, release, _) = params.rows, self._programs[number]
        found: dict[str, list[np.ndarray]] = {}
        for block in self._blocks(keys):
            (lanes,) = self.devices.place_from_host([block], self.partition)
            params, leaving = release(_bare(params), lanes)
            arrays = dict(zip(array_names(table, slots), gather(rows, slots, leaving.rows), strict=True))
            noted = {name: on_host(lane) for name, lane in leaving._asdict().items() if lane is not None}
            is_row = noted.pop("rows") != NO_ROW
            numbers = join_keys(noted.pop("high"), noted.pop("low"), dtype=self.storage.key_dtype)
            for name, array in (noted | {"keys": numbers, "count": noted.pop("counts")} | arrays).items():
                found.setdefault(name, []).append(on_host(array)[is_row])
        joined = {name: np.concatenate(parts) for name, parts in found.items()}
        order = np.argsort(joined["keys"])
        return params._replace(rows=rows), {name: array[order] for name, array in joined.items()}

    def _blocks(self, keys: Integer[np.ndarray, " n"]) -> Iterator[Keys]:
        """Keys that leave together, of one shard after the other, equally many with padding."""
        lanes, num_shards = split_keys(keys), self.rows.num_shards
        shard = owners(lanes, num_shards)
        of_shard = [np.flatnonzero(shard == number) for number in range(num_shards)]
        for first in range(0, max(1, *map(len, of_shard)), MOST_KEYS):
            parts = [own[first : first + MOST_KEYS] for own in of_shard]
            size = padded_size(max(LEAST_KEYS, *map(len, parts)))
            yield jax.tree.map(
                lambda lane, parts=parts, size=size: np.concatenate(
                    [np.pad(lane[own], (0, size - own.size)) for own in parts]
                ),
                lanes,
            )


def _bare(params: DynamicTable) -> DynamicTable:
    """The parameters without their rows."""
    nothing: PyTree = ()
    return params._replace(rows=nothing)


def _gather(rows: Array, slots: PyTree, places: Array) -> tuple[Array, ...]:
    return api.gather_rows((rows, *slots), places)


def _release(params: DynamicTable, keys: Keys, *, number: int | None) -> tuple[DynamicTable, Leaving]:
    known = params.keys
    keys = keys if number is None else keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
    rows = row_map.find(known, keys)
    noted: dict[str, PyTree] = {
        "high": known.high,
        "low": known.low,
        "last_step": known.last_step,
        "counts": known.counts,
    }
    noted |= {} if known.first_step is None else {"first_step": known.first_step}
    lanes: dict[str, PyTree] = dict(zip(noted, api.gather_rows(list(noted.values()), rows), strict=True))
    left = row_map.release(known, rows)
    counters = params.counters.add(evicted=left.num_free - known.num_free)
    return params._replace(keys=left, counters=counters), Leaving(rows, **({"first_step": None} | lanes))
