"""Tables of keys by name: rows come out and go in by key, and leave between two steps with all that belongs to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Integer, PyTree

from rsembed.bags import Bags, padded_size
from rsembed.collection.dense_rows import RowLayout
from rsembed.collection.rows import Occurrences, Rows
from rsembed.collection.stack import Stack, refuse_traced
from rsembed.collection.state import ByName
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import Keys, as_keys, join_keys, owners, split_keys
from rsembed.specs import TableSpec
from rsembed.storage import Hashed, hashed_rows, row_map
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.logical_rows import array_names, keys_to_leave
from rsembed.storage.protocol import on_host

MOST_KEYS, LEAST_KEYS = 1 << 16, 1 << 8
"""Rows of a device that one program moves at most; and for which there is room in each, so that there are few."""
FIRST_KEY = "initial_key"
"""Name in files of the PRNG key from which the rows of new keys follow."""


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

    def values(self, params: PyTree, slots: PyTree) -> ByName:
        num_shards = self.rows.num_shards
        parts = self.storage.unstack(params, () if slots is None else slots, self.table, num_shards)
        return {t.name: self.storage.rows(*own, t, num_shards) for t, own in zip(self.tables, parts, strict=True)}

    def slots(self, params: PyTree, slots: PyTree) -> ByName:
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

    def saved(self, params: PyTree, slots: PyTree) -> tuple[ByName, ByName]:
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
        self, params: PyTree, slots: PyTree, table: TableSpec, step: Int[Array, ""], reasons: Mapping[str, Any]
    ) -> tuple[PyTree, dict[str, np.ndarray]]:
        """The parameters without some keys of a table, and their rows; see `EmbeddingCollection.evict`.

        The parameters are given away. Programs that change which keys have rows do without the rows, which they would
        copy on a mesh.
        """
        number = self.tables.index(table)
        numbers = np.arange(params.num_tables) % len(self.tables)  # of every shard one behind the other
        is_own = np.repeat(numbers == number, params.rows.shape[0] // params.num_tables)
        keys = keys_to_leave(params, self.storage.eviction, is_own, **reasons, step=int(on_host(step)))
        params, rows = self._taken_out(params, slots, table, number, keys)
        if reasons["unused_for"] is not None:
            left = self._programs[number][2](_bare(params), step, np.int32(reasons["unused_for"]))
            params = left._replace(rows=params.rows)
        return params, rows

    def _programs_of(self, number: int | None) -> tuple[Callable[..., PyTree], ...]:
        """Compiled functions for one table: gather rows, release keys, and forget keys that wait for admission."""
        part, everywhere, on_each = self.partition, PartitionSpec(), self.devices.on_each
        forget = functools.partial(hashed_rows.forget_older, number=number)
        release = functools.partial(_release, number=number)
        return (
            jax.jit(on_each(_gather, (part, part, part), part)),
            jax.jit(on_each(release, (part, part), (part, part, part)), donate_argnums=0),
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
            params, places, leaving = release(_bare(params), lanes)
            arrays = dict(zip(array_names(table, slots), gather(rows, slots, places), strict=True))
            noted = {name: on_host(lane) for name, lane in leaving.items()}
            numbers = join_keys(noted.pop("high"), noted.pop("low"), dtype=self.storage.key_dtype)
            is_row = on_host(places) != NO_ROW
            for name, array in (noted | {"keys": numbers} | arrays).items():
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


def _release(
    params: DynamicTable, keys: Keys, *, number: int | None
) -> tuple[DynamicTable, Int[Array, " size"], dict[str, Array]]:
    """The parameters without these keys, the rows that they had, and what was noted of them."""
    known = params.keys
    keys = keys if number is None else keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
    rows = row_map.find(known, keys)
    noted = {"high": known.high, "low": known.low, "last_step": known.last_step, "count": known.counts}
    lanes = dict(zip(noted, api.gather_rows(list(noted.values()), rows), strict=True))
    left = row_map.release(known, rows)
    counters = params.counters.add(evicted=left.num_free - known.num_free)
    return params._replace(keys=left, counters=counters), rows, lanes
