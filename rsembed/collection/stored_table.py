"""The engine of tables that are no arrays of rows: a home finds, reads and steps rows, here or at their owner.

```
ids ──▶ keys ──[distinct, ask]──▶ home.read ──▶ vectors ──pool──▶ activations
state ◀── home.step ◀── home.find ◀──[ask]── keys and gradients of entries ◀──spread── d(activations)
```

All functions are those of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.collection.devices import Devices
from rsembed.collection.layout import read_from
from rsembed.collection.state import Traffic
from rsembed.homes.hash_table import combine, first_occurrences
from rsembed.homes.home import Home
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.kernels.reference import entry_gains
from rsembed.keys import Keys, owners
from rsembed.parallel import Wanted, ask, default_capacity, distinct
from rsembed.specs import TableSpec


class Occurrences(NamedTuple):
    """The ids of a batch, feature after feature, and its segments, which read them by position."""

    keys: Keys
    segments: Sequence[Segment]

    @staticmethod
    def of(features: Sequence[tuple[Keys, Segment]]) -> Occurrences:
        """From each feature's ids and a segment whose rows are yet to be said."""
        segments, first = [], 0
        for keys, segment in features:
            position = first + jnp.arange(keys.shape[0], dtype=jnp.int32)
            segments.append(dataclasses.replace(segment, rows=jnp.where(keys.is_key, position, NO_ROW)))
            first += keys.shape[0]
        return Occurrences(jax.tree.map(lambda *lanes: jnp.concatenate(lanes), *(k for k, _ in features)), segments)

    def features(self) -> list[tuple[Keys, Segment]]:
        """The inverse of `of`."""
        found, first = [], 0
        for segment in self.segments:
            last = first + segment.rows.shape[0]
            found.append((Keys(*(lane[first:last] for lane in self.keys)), segment))
            first = last
        return found


class Trip(NamedTuple):
    """What a backward pass needs to know of a lookup that gave keys their rows.

    Attributes:
      batch: what was looked up.
      wanted: distinct keys of this device; None where their rows are here.
      rows: of each of them at its owner, or of each occurrence here; `NO_ROW` for keys without one.
    """

    batch: Occurrences
    wanted: Wanted | None
    rows: Int[Array, " nnz"]


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table that a home keeps.

    With `is_split`, each key has one owner, and distinct keys travel there as distinct rows do in `RowShards`. Else
    every device has everything and steps it with the gradients of the global batch, so that copies never drift apart.

    Args:
      devices: the mesh.
      table: whose rows these are.
      is_split: whether keys have owners.
      capacity: places per block of an exchange; None takes what usually needs one round.
      implementation: of the kernels that pool.
    """

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
    def num_shards(self) -> int:
        """How many devices share the keys."""
        return self.devices.num_devices if self.is_split else 1

    def init(self, key: PRNGKeyArray) -> tuple[Any, Any]:
        """Parameters and slots; `key` is the model's."""
        shard = self.devices.index() if self.is_split else jnp.zeros((), jnp.int32)
        return self.home.init(key, self.table, shard=shard, num_shards=self.num_shards)

    def look_up(
        self, params: Any, batch: Occurrences, *, train: bool
    ) -> tuple[Sequence[Array], Int[Array, ""], Traffic]:
        """Pooled rows, how many distinct keys had none, and what travelled; `train` reads ahead of the step to come."""
        traffic = Traffic.of(0, 0)

        def read(keys: Keys, occurrences: Array) -> tuple[Array, Array]:
            return self.home.read(params, keys, self.table, occurrences=occurrences if train else None)

        if self.is_split:

            def answer(num_unknown: Array, arrived: tuple[Keys, Array]) -> tuple[Array, Array]:
                vectors, more = read(*arrived)
                return num_unknown + more, vectors

            wanted = self._distinct(batch)
            payload, zero = (keys_of(wanted), _counts(wanted)), jnp.zeros((), jnp.int32)
            num_unknown, vectors, rounds = self._ask(wanted, payload, answer, zero)
            bytes_per_place = 13 + 4 * self.table.embedding_dim  # two lanes, a mark and a count go, a vector comes
            blocks = (self.devices.num_devices - 1) * self._capacity(wanted)
            entry_of, traffic = wanted.entry_of, Traffic.of(rounds, blocks * bytes_per_place)
        else:
            occurrences = self._global_counts(batch) if train else jnp.ones(batch.keys.shape, jnp.int32)
            vectors, num_unknown = read(batch.keys, occurrences)
            entry_of = _positions(batch.keys)
        return self._pooled(vectors, entry_of, batch), num_unknown, traffic

    def admit(self, params: Any, slots: Any, batch: Occurrences, step: Step) -> tuple[Any, Any, Sequence[Array], Trip]:
        """Rows for keys that have none, and a lookup of all; `step_found` trains what it read."""
        if not self.is_split:
            params, slots, rows = self._find(params, slots, batch.keys, jnp.ones(batch.keys.shape, jnp.int32), step)
            vectors = self.home.vectors(params, rows, self.table)
            return params, slots, self._pooled(vectors, _positions(batch.keys), batch), Trip(batch, None, rows)

        def answer(state: tuple[Any, Any], arrived: tuple[Keys, Array, Array]) -> tuple[Any, Any]:
            params, slots, rows = self._find_arrived(state, arrived, step)
            return (params, slots), (rows, self.home.vectors(params, rows, self.table))

        wanted = self._distinct(batch)
        params = self._held(params, wanted, step)
        payload = keys_of(wanted), _counts(wanted), wanted.first_of
        (params, slots), (rows, vectors), _ = self._ask(wanted, payload, answer, (params, slots))
        rows = jnp.where(wanted.first_of == NO_ROW, NO_ROW, rows)
        return params, slots, self._pooled(vectors, wanted.entry_of, batch), Trip(batch, wanted, rows)

    def step_found(
        self, params: Any, slots: Any, trip: Trip, d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        """One step of the rows that a trip found, but for those that belong to other keys by now."""
        batch, wanted, rows = trip
        if wanted is None:
            params, rows = self.home.still_theirs(params, rows, batch.keys)
            return self._step(params, slots, self._reading(rows, batch), d_outputs, step)

        def answer(state: tuple[Any, Any], arrived: tuple[Array, Keys, Array]) -> tuple[Any, None]:
            (params, slots), (rows, keys, gradients) = state, arrived
            params, rows = self.home.still_theirs(params, rows, keys)
            return self._step(params, slots, [_each(rows)], [gradients], step), None

        gradients = self._entry_gradients(wanted.entry_of, batch.segments, d_outputs)
        payload = rows, keys_of(wanted).only(rows != NO_ROW), gradients
        state: tuple[Any, Any] = self._ask(wanted, payload, answer, (params, slots))[0]
        return state

    def key_gradients(self, batch: Occurrences, d_outputs: Sequence[Array]) -> tuple[Array, Array]:
        """Distinct keys that any device looked up here, as lanes of `RowGradients`, and their gradients."""
        if not self.is_split:
            batch, d_outputs = self.of_all_devices(batch), [self.devices.gather(d_output) for d_output in d_outputs]
            values = self._entry_gradients(_positions(batch.keys), batch.segments, d_outputs)
            return combine(batch.keys, jnp.ones(batch.keys.shape, jnp.int32), values)
        wanted = self._distinct(batch)
        gradients = self._entry_gradients(wanted.entry_of, batch.segments, d_outputs)
        num_places = wanted.entry_of.shape[0] * self.num_shards

        def collect(state: Any, arrived: tuple[Keys, Array, Array]) -> tuple[Any, None]:
            count, all_lanes, all_values = state
            lanes, values = combine(*arrived)
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
        (_, lanes, values), _, _ = self._ask(wanted, (keys_of(wanted), _counts(wanted), gradients), collect, state)
        return lanes, values

    def apply(
        self, params: Any, slots: Any, keys: Keys, occurrences: Array, values: Array, step: Step
    ) -> tuple[Any, Any]:
        """One step with the gradients of distinct keys."""
        keys = _after(keys, [values])
        params, slots, found = self._find(params, slots, keys, occurrences, step)
        return self._step(params, slots, [_each(found)], [values], step)

    def step_batch(
        self, params: Any, slots: Any, batch: Occurrences, d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        """Keys without a row get one, and all rows are stepped."""
        batch = batch._replace(keys=_after(batch.keys, d_outputs))
        if not self.is_split:
            batch, d_outputs = self.of_all_devices(batch), [self.devices.gather(d_output) for d_output in d_outputs]
            params, slots, rows = self._find(params, slots, batch.keys, jnp.ones(batch.keys.shape, jnp.int32), step)
            return self._step(params, slots, self._reading(rows, batch), d_outputs, step)

        def answer(state: tuple[Any, Any], arrived: tuple[Keys, Array, Array, Array]) -> tuple[Any, None]:
            params, slots, rows = self._find_arrived(state, arrived[:3], step)
            gradients = arrived[3]
            return self._step(params, slots, [_each(rows)], [gradients], step), None

        wanted = self._distinct(batch)
        gradients = self._entry_gradients(wanted.entry_of, batch.segments, d_outputs)
        params = self._held(params, wanted, step)
        payload = keys_of(wanted), _counts(wanted), wanted.first_of, gradients
        state: tuple[Any, Any] = self._ask(wanted, payload, answer, (params, slots))[0]
        return state

    def of_all_devices(self, batch: Occurrences) -> Occurrences:
        """The samples of all devices, in order."""
        segments = self.devices.gather_segments(batch.segments)
        lanes = [Keys(*map(self.devices.gather, keys)) for keys, _ in batch.features()]
        return Occurrences.of(list(zip(lanes, segments, strict=True)))

    def own_keys(self, batch: Occurrences) -> Keys:
        """The keys of the global batch whose rows are here."""
        keys = self.of_all_devices(batch).keys
        return keys.only(owners(keys, self.num_shards) == self.devices.index()) if self.is_split else keys

    def _global_counts(self, batch: Occurrences) -> Int[Array, " nnz"]:
        """How often each key occurs in the batches of all devices, where it occurs here first."""
        num_own = batch.keys.shape[0]
        if self.devices.num_devices == 1:
            return jnp.ones(num_own, jnp.int32)
        keys = Keys(*map(_joined, batch.keys, self.of_all_devices(batch).keys))
        first, position = first_occurrences(keys), jnp.arange(keys.shape[0], dtype=jnp.int32)
        counts = (
            jnp.zeros(position.shape, jnp.int32).at[first].add((position >= num_own).astype(jnp.int32), mode="drop")
        )
        return jnp.where(first == position, counts, 0)[:num_own]

    def _find(
        self, params: Any, slots: Any, keys: Keys, occurrences: Array, step: Step
    ) -> tuple[Any, Any, Int[Array, " nnz"]]:
        return self.home.find(params, slots, keys, self.table, occurrences=occurrences, step=step)

    def _find_arrived(
        self, state: tuple[Any, Any], arrived: tuple[Keys, Array, Array], step: Step
    ) -> tuple[Any, Any, Int[Array, " nnz"]]:
        """As `_find`, for keys of all devices: in the order in which these, one after the other, met them."""
        keys, occurrences, first_of = arrived
        place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
        device = place // max(first_of.shape[0] // self.num_shards, 1)
        order = jax.lax.sort((device, first_of, place), num_keys=2, is_stable=True)[2]
        keys, occurrences = jax.tree.map(lambda lane: lane[order], (keys, occurrences))
        params, slots, rows = self._find(*state, keys, occurrences, step)
        return params, slots, jnp.zeros_like(rows).at[order].set(rows)

    def _held(self, params: Any, wanted: Wanted, step: Step) -> Any:
        """Of several rounds, what a later one asks for must not make room in an earlier one."""
        if self._capacity(wanted) == wanted.entry_of.shape[0]:
            return params
        return self._ask(wanted, keys_of(wanted), lambda p, keys: (self.home.hold(p, keys, step), None), params)[0]

    def _step(
        self, params: Any, slots: Any, segments: Sequence[Segment], d_outputs: Sequence[Array], step: Step
    ) -> tuple[Any, Any]:
        return self.home.step(params, slots, segments, d_outputs, self.table, step=step)

    def _pooled(self, vectors: Array, entry_of: Array, batch: Occurrences) -> Sequence[Array]:
        segments, quantization = read_from(entry_of, batch.segments), self.table.quantization_config
        return api.lookup(vectors, segments, quantization=quantization, implementation=self.implementation)

    def _reading(self, rows: Array, batch: Occurrences) -> list[Segment]:
        """The batch, reading rows; keys that got none count in means all the same, as they did when they were read."""
        reading = read_from(rows, batch.segments)
        if not self.home.takes_keys:
            return reading
        gains = [entry_gains(s, NO_ROW)[1] if s.combiner in ("mean", "sqrtn") else None for s in batch.segments]
        return [
            own if gain is None else dataclasses.replace(own, weights=gain, combiner="sum")
            for own, gain in zip(reading, gains, strict=True)
        ]

    def _distinct(self, batch: Occurrences) -> Wanted:
        owner = owners(batch.keys, self.num_shards)
        return distinct(owner, (batch.keys.high, batch.keys.low), num_devices=self.num_shards)

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


def _joined(one: Array, other: Array) -> Array:
    return jnp.concatenate([one, other])


def _after(keys: Keys, gradients: Sequence[Array]) -> Keys:
    """The same keys, for which rows are only made once the gradients are there.

    Else a compiled step would make them beside the lookup that the gradients follow from, and copy the table for it.
    XLA takes barriers away before it decides that, so the keys depend on a number that is never both infinities.
    """
    first = sum((gradient.reshape(-1)[:1].sum() for gradient in gradients), start=jnp.zeros(()))
    return keys.only(~((first == jnp.inf) & (first == -jnp.inf)))


def keys_of_gradients(rows: Array) -> tuple[Keys, Int[Array, " capacity"]]:
    """The keys that `RowGradients` hold for a table, as ids or as lanes, and how often each occurred."""
    if rows.ndim == 1:
        keys = Keys(jnp.zeros(rows.shape, jnp.uint32), rows.astype(jnp.uint32), rows != NO_ROW)
        return keys, keys.is_key.astype(jnp.int32)
    return Keys(rows[:, 0], rows[:, 1], rows[:, 2] > 0), rows[:, 2].astype(jnp.int32)


def _each(rows: Int[Array, " nnz"]) -> Segment:
    return Segment(rows, None, None, "none")


def keys_of(wanted: Wanted) -> Keys:
    """The distinct keys that a device has questions about."""
    return Keys(wanted.lanes[0], wanted.lanes[1], wanted.first_of != NO_ROW)


def _counts(wanted: Wanted) -> Int[Array, " nnz"]:
    """How often each entry occurs."""
    return jnp.zeros(wanted.entry_of.shape, jnp.int32).at[wanted.entry_of].add(1, mode="drop")


def _positions(keys: Keys) -> Int[Array, " nnz"]:
    return jnp.where(keys.is_key, jnp.arange(keys.shape[0], dtype=jnp.int32), NO_ROW)
