"""Stacks of one table that is no array of rows: its home finds, reads and steps rows, here or at their owner.

```
ids ──▶ keys ──[distinct, ask]──▶ home.read ──▶ vectors ──pool──▶ activations
state ◀── home.step ◀── home.find ◀──[ask]── keys and gradients of entries ◀──spread── d(activations)
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.layout import RowLayout, read_from
from rsembed.collection.state import Traffic
from rsembed.homes.hash_table import combine
from rsembed.homes.home import Home
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.kernels.reference import entry_gains
from rsembed.keys import Keys, as_keys, owners
from rsembed.parallel import Wanted, ask, default_capacity, distinct
from rsembed.specs import TableSpec


class Occurrences(NamedTuple):
    """The ids of a batch, feature after feature, and its segments, which read them by position."""

    keys: Keys
    segments: list[Segment]


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """A table that a home keeps.

    With `is_split`, each key has one owner, and distinct keys travel there as distinct rows do in `RowShards`. Else
    every device has everything and steps it with the gradients of the global batch, so that copies never drift apart.

    Args:
      layout: the table's name and place among the stacks.
      devices: the mesh.
      table: whose rows these are.
      is_split: whether keys have owners.
      capacity: places per block of an exchange; None takes what usually needs one round.
      implementation: of the kernels that pool.
    """

    layout: RowLayout
    devices: Devices
    table: TableSpec
    is_split: bool = False
    capacity: int | None = None
    implementation: str | None = None

    @property
    def home(self) -> Home:
        """What keeps the rows."""
        return cast(Home, self.table.storage)

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split."""
        return self.devices.split if self.is_split else PartitionSpec()

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """How rows and values of `RowGradients` are split."""
        return self.partition, self.partition

    @property
    def num_shards(self) -> int:
        """How many devices share the keys."""
        return self.devices.num_devices if self.is_split else 1

    def init(self, key: PRNGKeyArray, specs: Mapping[str, TableSpec]) -> tuple[Any, Any]:
        """Parameters and slots."""
        del specs
        return self.home.init(key, self.table, num_shards=self.num_shards)

    def with_rows(self, params: Any, slots: Any, rows: Any) -> tuple[Any, Any]:
        """Parameters and slots of all devices with some rows written, by key; not inside `jit`."""
        written = self.home.with_rows(params, slots, rows, self.table, self.num_shards)
        return self.devices.place_from_host(written, self.partition)

    def dense(self, params: Any) -> Array:
        """The table as an array of rows, where ids are row numbers."""
        return self.home.read(params, as_keys(jnp.arange(self.table.vocabulary_size, dtype=jnp.int32)), self.table)

    def lookup(self, params: Any, bags: Mapping[str, Bags], *, train: bool) -> tuple[Sequence[Array], Traffic]:
        """Pooled rows of this device's samples, one array per feature; `train` reads ahead of the step that follows."""
        batch, traffic = self._occurrences(bags), Traffic.of(0, 0)

        def read(keys: Keys, occurrences: Array) -> Array:
            return self.home.read(params, keys, self.table, occurrences=occurrences if train else None)

        if self.is_split:
            wanted = self._distinct(batch)
            payload = _keys_of(wanted), _counts(wanted)
            _, vectors, rounds = self._ask(wanted, payload, lambda _, arrived: (None, read(*arrived)), None)
            bytes_per_place = 13 + 4 * self.table.embedding_dim  # two lanes, a mark and a count go, a vector comes
            blocks = (self.devices.num_devices - 1) * self._capacity(wanted)
            entry_of, traffic = wanted.entry_of, Traffic.of(rounds, blocks * bytes_per_place)
        else:
            vectors = read(batch.keys, jnp.ones(batch.keys.shape, jnp.int32))
            entry_of = _positions(batch.keys)
        outputs = api.lookup(
            vectors,
            read_from(entry_of, batch.segments),
            quantization=self.table.quantization_config,
            implementation=self.implementation,
        )
        return outputs, traffic

    def row_gradients(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Distinct keys that any device looked up here (`row_gradients.as_lanes`), and their gradients."""
        if not self.is_split:
            batch, d_outputs = self._global_batch(bags, d_outputs)
            values = self._entry_gradients(_positions(batch.keys), batch.segments, d_outputs)
            return combine(batch.keys, jnp.ones(batch.keys.shape, jnp.int32), values)
        wanted, gradients = self._entries(bags, d_outputs)
        num_places = wanted.entry_of.shape[0] * self.num_shards

        def collect(state: Any, arrived: tuple[Keys, Array, Array, Array]) -> tuple[Any, None]:
            count, all_lanes, all_values = state
            keys, occurrences, _, gradients = arrived
            lanes, values = combine(keys, occurrences, gradients)
            is_entry = lanes[:, 2] > 0
            # A round brings all of a key, and behind the keys of earlier rounds.
            places = jnp.where(is_entry, count + jnp.arange(is_entry.shape[0], dtype=jnp.int32), num_places)
            return (
                count + jnp.sum(is_entry, dtype=jnp.int32),
                all_lanes.at[places].set(lanes, mode="drop"),
                all_values.at[places].set(values, mode="drop"),
            ), None

        nothing = jnp.zeros((num_places, 3), jnp.uint32), jnp.zeros((num_places, self.table.embedding_dim), jnp.float32)
        state = (jnp.zeros((), jnp.int32), *nothing)
        (_, lanes, values), _, _ = self._ask(wanted, _payload(wanted, gradients), collect, state)
        return lanes, values

    def apply(self, params: Any, slots: Any, rows: Array, values: Array, step: Step) -> tuple[Any, Any]:
        """One step with the gradients of distinct keys, given as lanes."""
        keys, occurrences = Keys(rows[:, 0], rows[:, 1], rows[:, 2] > 0), rows[:, 2].astype(jnp.int32)
        params, slots, found = self.home.find(params, slots, keys, self.table, occurrences=occurrences, step=step)
        return self.home.step(params, slots, [Segment(found, None, None, "none")], [values], self.table, step=step)

    def update(
        self, params: Any, slots: Any, bags: Mapping[str, Bags], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        """Keys without a row get one, and all rows are stepped."""
        if not self.is_split:
            batch, d_outputs = self._global_batch(bags, d_outputs)
            ones = jnp.ones(batch.keys.shape, jnp.int32)
            params, slots, rows = self.home.find(params, slots, batch.keys, self.table, occurrences=ones, step=step)
            segments = read_from(rows, batch.segments)
            if self.home.takes_keys:
                segments = _counting_all(segments, batch.segments)
            return self.home.step(params, slots, segments, d_outputs, self.table, step=step)
        wanted, gradients = self._entries(bags, d_outputs)

        def hold(params: Any, keys: Keys) -> tuple[Any, None]:
            return self.home.hold(params, keys, step), None

        def step_rows(state: tuple[Any, Any], arrived: tuple[Keys, Array, Array, Array]) -> tuple[Any, None]:
            (params, slots), (keys, occurrences, first_of, gradients) = state, arrived
            order = in_order_of_occurrence(first_of, self.num_shards)
            keys, occurrences, gradients = jax.tree.map(lambda lane: lane[order], (keys, occurrences, gradients))
            params, slots, rows = self.home.find(params, slots, keys, self.table, occurrences=occurrences, step=step)
            segments = [Segment(rows, None, None, "none")]
            return self.home.step(params, slots, segments, [gradients], self.table, step=step), None

        if self._capacity(wanted) < wanted.entry_of.shape[0]:
            # Several rounds: what a later one asks for must not make room in an earlier one.
            params, _, _ = self._ask(wanted, _keys_of(wanted), hold, params)
        state: tuple[Any, Any] = self._ask(wanted, _payload(wanted, gradients), step_rows, (params, slots))[0]
        return state

    def _occurrences(self, bags: Mapping[str, Bags]) -> Occurrences:
        lanes, segments, first = [], [], 0
        for feature in self.layout.stack.features:
            own = bags[feature.name]
            keys, position = as_keys(own.ids), jnp.arange(own.ids.shape[0], dtype=jnp.int32)
            keys = keys.only(position < own.offsets[-1])
            if not self.home.takes_keys:
                keys = keys.only((keys.high == 0) & (keys.low < self.table.vocabulary_size))
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            segments.append(
                Segment(jnp.where(keys.is_key, first + position, NO_ROW), offsets, weights, feature.combiner)
            )
            lanes.append(keys)
            first += own.ids.shape[0]
        return Occurrences(_joined(lanes), segments)

    @property
    def feature_names(self) -> list[str]:
        """The features that read the table."""
        return [feature.name for feature in self.layout.stack.features]

    def own_keys(self, bags: Mapping[str, Bags]) -> Keys:
        """The keys of the global batch whose rows are here."""
        keys = _joined(self._keys_of_all(self._occurrences(bags)))
        return keys.only(owners(keys, self.num_shards) == self.devices.index()) if self.is_split else keys

    def _keys_of_all(self, own: Occurrences) -> list[Keys]:
        """The keys of every segment, those of all devices in their order."""
        lanes, first = [], 0
        for segment in own.segments:
            last = first + segment.rows.shape[0]
            lanes.append(Keys(*(self.devices.gather(lane[first:last]) for lane in own.keys)))
            first = last
        return lanes

    def _global_batch(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Occurrences, list[Array]]:
        """The samples of all devices, in order."""
        own, segments, first = self._occurrences(bags), [], 0
        lanes = self._keys_of_all(own)
        for keys, segment in zip(lanes, self.devices.gather_segments(own.segments), strict=True):
            position = first + jnp.arange(keys.shape[0], dtype=jnp.int32)
            segments.append(dataclasses.replace(segment, rows=jnp.where(keys.is_key, position, NO_ROW)))
            first += keys.shape[0]
        return Occurrences(_joined(lanes), segments), [self.devices.gather(d_output) for d_output in d_outputs]

    def _distinct(self, batch: Occurrences) -> Wanted:
        owner = owners(batch.keys, self.num_shards)
        return distinct(owner, (batch.keys.high, batch.keys.low), num_devices=self.num_shards)

    def _entries(self, bags: Mapping[str, Bags], d_outputs: Sequence[Array]) -> tuple[Wanted, Array]:
        """Distinct keys of this device's samples, and the gradient of each."""
        batch = self._occurrences(bags)
        wanted = self._distinct(batch)
        return wanted, self._entry_gradients(wanted.entry_of, batch.segments, d_outputs)

    def _entry_gradients(self, entry_of: Array, segments: Sequence[Segment], d_outputs: Sequence[Array]) -> Array:
        num_entries, own = entry_of.shape[0], read_from(entry_of, segments)
        rows, values = api.row_gradients(num_entries, own, d_outputs, implementation=self.implementation)
        return jnp.zeros((num_entries, self.table.embedding_dim), jnp.float32).at[rows].set(values, mode="drop")

    def _capacity(self, wanted: Wanted) -> int:
        num_entries = wanted.entry_of.shape[0]
        if self.table.optimizer.moves_all_rows:
            return num_entries  # one round: a second one would move all rows again
        return min(self.capacity or default_capacity(num_entries, self.num_shards), num_entries)

    def _ask(self, wanted: Wanted, payload: Any, answer: Callable[..., Any], state: Any) -> tuple[Any, Any, Array]:
        return ask(wanted, payload, answer, state, capacity=self._capacity(wanted), axis_name=self.devices.axes)


def in_order_of_occurrence(first_of: Array, num_devices: int) -> Int[Array, " nnz"]:
    """What puts arrived keys into the order in which the devices, one after the other, met them."""
    place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
    device = place // max(first_of.shape[0] // num_devices, 1)
    order: Array = jax.lax.sort((device, first_of, place), num_keys=2, is_stable=True)[2]
    return order


def _keys_of(wanted: Wanted) -> Keys:
    return Keys(wanted.lanes[0], wanted.lanes[1], wanted.first_of != NO_ROW)


def _counts(wanted: Wanted) -> Int[Array, " nnz"]:
    """How often each entry occurs."""
    return jnp.zeros(wanted.entry_of.shape, jnp.int32).at[wanted.entry_of].add(1, mode="drop")


def _payload(wanted: Wanted, gradients: Array) -> tuple[Keys, Array, Array, Array]:
    return _keys_of(wanted), _counts(wanted), wanted.first_of, gradients


def _positions(keys: Keys) -> Int[Array, " nnz"]:
    return jnp.where(keys.is_key, jnp.arange(keys.shape[0], dtype=jnp.int32), NO_ROW)


def _joined(keys: Sequence[Keys]) -> Keys:
    joined: Keys = jax.tree.map(lambda *lanes: jnp.concatenate(lanes), *keys)
    return joined


def _counting_all(segments: Sequence[Segment], occurrences: Sequence[Segment]) -> list[Segment]:
    """The segments, in whose means keys count that got no row, as they did when they were read."""
    counted = []
    for own, segment in zip(segments, occurrences, strict=True):
        if segment.combiner in ("mean", "sqrtn"):
            own = dataclasses.replace(own, weights=entry_gains(segment, NO_ROW)[1], combiner="sum")
        counted.append(own)
    return counted
