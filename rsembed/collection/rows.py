"""Lookups and steps of stored rows, on this device or through the owners of the rows.

```
ids ──▶ keys ──[distinct, ask]──▶ storage.read ──▶ vectors ──pool──▶ activations
state ◀── storage.step ◀── storage.find ◀──[ask]── keys, gradients ◀──spread── d(activations)
```

All functions run on one device, with its part of the data. Methods of `AskedRows` yield questions
to the owners of rows, so that all stacks of a model share one exchange (`exchange.together`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.prepared import Listed, in_order_of_features
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.kernels.reference import entries_of, entry_gains, rows_of_list
from rsembed.keys import Keys
from rsembed.parallel.exchange import Asked, Asking, Question, Wanted, default_capacity, distinct
from rsembed.specs import TableSpec
from rsembed.storage.dense_rows import list_of
from rsembed.storage.protocol import State, Storage
from rsembed.storage.row_map import combine, entries, named, unnamed


class Occurrences(NamedTuple):
    """The ids of a batch, feature after feature.

    Attributes:
      call: the ids with their bags. With `keys`, the ids are indices of keys, `NO_ROW` for padding.
      keys: the keys of keyed tables. None if ids are row numbers.
      table: number of the table in a call that reads several tables.
      dims: row length of every table of such a call.
    """

    call: Call
    keys: Keys | None = None
    table: int = 0
    dims: tuple[int, ...] = ()

    def gradients(self, d_outputs: Sequence[Array]) -> CallGradients:
        """Gradients of the call's outputs in the form that kernels take.

        For a single table, `d_outputs` may have only some of the columns.
        """
        dims = self.dims or (d_outputs[0].shape[-1],)
        return CallGradients(self.call, tuple(d_outputs), dims, self.table)

    def all_keys(self) -> Keys:
        """The ids as `Keys`, also if they are row numbers."""
        if self.keys is not None:
            return self.keys
        lists = range(len(self.call.lists))
        return keys_of_rows(
            jnp.concatenate([rows_of_list(self.call, number, 0, NO_ROW) for number in lists])
        )

    def of_all(self, devices: Devices) -> Occurrences:
        """Occurrences of the global batch, with samples in the order of devices.

        With several devices, the ids must be row numbers.
        """
        num_devices = devices.num_devices
        if num_devices == 1:
            return self
        lists = []
        segments = list(self.call.segments)
        for number, ids in enumerate(self.call.lists):
            readers = [k for k, segment in enumerate(segments) if segment.list == number]
            weights = None if ids.weights is None else devices.gather(ids.weights)
            if ids.offsets is None:
                num_bags, width = ids.array_shape
                gathered = IdList(
                    devices.gather(ids.ids), None, weights, (num_bags * num_devices, width)
                )
            else:
                parts = Bags(devices.gather(ids.ids), devices.gather(ids.offsets), weights)
                places = [Listed("", *segments[k][1:3]) for k in readers]
                gathered = list_of(in_order_of_features(parts, places, num_devices, NO_ROW))
            lists.append(gathered)
            first_bag = 0
            for k in readers:
                num_bags = segments[k].num_bags * num_devices
                segments[k] = segments[k]._replace(first_bag=first_bag, num_bags=num_bags)
                first_bag += num_bags
        return Occurrences(Call(tuple(lists), tuple(segments)))


LookupResult: TypeAlias = tuple[Sequence[Array], Int[Array, ""], Int[Array, ""]]
"""Pooled rows, number of distinct keys without a row, and number of exchange rounds."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that are read without an exchange: each device has a full copy, or some columns of all.

    Every device steps its rows with the gradients of the global batch, so all copies stay equal.
    With `splits_columns`, every device pools the global batch for its columns, and devices exchange
    columns of activations instead of rows. If `storage.ids_are_rows`, one kernel reads and pools
    rows, and another one sums gradients and steps rows. If `storage.sums_gradients`, every device
    computes the gradients of its samples, and the sum over devices has the same bits on all.

    Args:
      devices: devices of the mesh.
      table: spec of the table. For a stack, the first table: all have the same dim, dtype and rule.
      storage: storage of the rows.
      implementation: kernel implementation that pools rows. None takes the fastest one.
      splits_columns: True if every device has some columns of all rows.
    """

    devices: Devices
    table: TableSpec
    storage: Storage
    implementation: str | None = None
    splits_columns: bool = False

    @property
    def partition(self) -> PartitionSpec:
        """Partition of parameters and slots over the mesh."""
        return PartitionSpec(None, self.devices.axes) if self.splits_columns else PartitionSpec()

    @property
    def num_shards(self) -> int:
        """Number of shards: 1, because rows are not split."""
        return 1

    def init(self, key: PRNGKeyArray) -> State:
        """Initial parameters and slots of this device. `key` is the key of the model."""
        return self.storage.init(key, self.table, self.shard, self.num_shards)

    def look_up(
        self, params: PyTree, batch: Occurrences, number: Int[Array, ""] | None
    ) -> Asked[LookupResult]:
        """Pooled rows of a batch. Parameters do not change.

        Args:
          params: parameters of the storage on this device.
          batch: ids of this device's samples.
          number: number of the step that will follow. Keys that get a row in that step read its
            initial values. None if no step follows: keys without a row read zeros.
        """
        none = jnp.zeros((), jnp.int32)
        if self.splits_columns:
            outputs = self._pooled(params, batch.of_all(self.devices).call)
            return list(map(self.devices.rows_of_all, outputs)), none, none
        if self.storage.ids_are_rows:
            return self._pooled(params, batch.call), none, none
        keys = batch.all_keys()
        ahead = None if number is None else (jnp.ones(keys.shape, jnp.int32), number, None)

        def pool(vectors: Array, places: Array) -> Sequence[Array]:
            return self._pooled(vectors, batch.call.with_ids(places))

        pooled, num_unknown = self.storage.pooled(params, keys, batch.call, self.table, pool, ahead)
        return pooled, num_unknown, none

    def row_gradients(
        self, batch: Occurrences, d_outputs: Sequence[Array]
    ) -> Asked[tuple[Array, Array]]:
        """Distinct ids (or key lanes) of the global batch on this device, and their gradients.

        Both are in the form of `RowGradients`.
        """
        batch, d_outputs = batch.of_all(self.devices), self._of_all(d_outputs)
        if batch.keys is None:
            return self._summed(batch.gradients(d_outputs), self.storage.num_ids(self.table))
        entry_of, keys, _, counts = entries(batch.keys, jnp.ones(batch.keys.shape, jnp.int32))
        return named(keys, counts), self._of_entries(entry_of, batch, d_outputs)

    def squared_norm(self, batch: Occurrences, d_outputs: Sequence[Array]) -> Float[Array, ""]:
        """Sum of squares of the values of `row_gradients`.

        Only on a single device, for a storage with `ids_are_rows`.
        """
        gradients, num_rows = batch.gradients(d_outputs), self.storage.num_ids(self.table)
        norm: Array = api.dispatch(
            "squared_norm", num_rows, gradients, implementation=self.implementation
        )
        return norm

    def update(
        self,
        params: PyTree,
        slots: PyTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asked[State]:
        """Parameters and slots after one step of all rows of a batch.

        Keys without a row get one first.
        """
        if self.storage.sums_gradients:
            return self._step_all(params, slots, batch.gradients(d_outputs), step)
        batch, d_outputs = batch.of_all(self.devices), self._of_all(d_outputs)
        if self.storage.ids_are_rows:
            return self._step(params, slots, batch.gradients(d_outputs), step)
        keys = self._after(batch.all_keys(), d_outputs)
        params, slots, rows = self.storage.find(
            params, slots, keys, jnp.ones(keys.shape, jnp.int32), self.table, step
        )
        call = batch.call.with_ids(rows)
        if self.storage.takes_keys:
            call = self._with_gains(call, batch.call)
        return self._step(params, slots, Occurrences(call).gradients(d_outputs), step)

    def _with_gains(self, call: Call, keys: Call) -> Call:
        """`call` with weights that count keys without a row in a mean, as the lookup does.

        Args:
          call: call with the row of each key, `NO_ROW` for keys without one.
          keys: call with the index of each key. Its entries have the gains of the lookup.
        """
        lists = list(call.lists)
        segments = list(call.segments)
        for number, ids in enumerate(lists):
            readers = [place for place, own in enumerate(segments) if own.list == number]
            if not {segments[place].combiner for place in readers} & {"mean", "sqrtn"}:
                continue
            entries = entries_of(keys, number, 0, NO_ROW)
            gains = entry_gains(entries, NO_ROW)[1]
            lists[number] = dataclasses.replace(ids, weights=gains)
            for place in readers:
                segments[place] = segments[place]._replace(combiner="sum")
        return Call(tuple(lists), tuple(segments))

    def apply(self, params: PyTree, slots: PyTree, rows: Array, values: Array, step: Step) -> State:
        """Parameters and slots after a step with the gradients of distinct ids or keys.

        `rows` and `values` are in the form that `row_gradients` returns.
        """
        if self.storage.sums_gradients:
            # Every device has all gradients. Each takes a part, and `_step_all` sums the parts.
            is_own = jnp.arange(rows.shape[0]) % self.devices.num_devices == self.devices.index()
            own = CallGradients.of_rows(jnp.where(is_own, rows, NO_ROW), values)
            return self._step_all(params, slots, own, step)
        keys, occurrences = keys_of_gradients(rows)
        keys = self._after(self._own(keys), [values])
        params, slots, found = self.storage.find(params, slots, keys, occurrences, self.table, step)
        return self.storage.step_distinct(params, slots, found, values, self.table, self._how(step))

    def own_keys(self, batch: Occurrences) -> Keys:
        """Keys of the global batch that belong to this device."""
        return self._own(batch.of_all(self.devices).all_keys())

    # Helpers

    @property
    def shard(self) -> Int[Array, ""]:
        """Index of this device's range of columns with `splits_columns`, else 0."""
        return self.devices.index() if self.splits_columns else jnp.zeros((), jnp.int32)

    def _own(self, keys: Keys) -> Keys:
        """`keys` with padding in place of keys of other devices. Here, every key stays."""
        return keys

    def _how(self, step: Step) -> Step:
        rounding = self.storage.rounding(step.rounding, self.shard, step.resident_rows)
        return dataclasses.replace(step, rounding=rounding)

    def _after(self, keys: Keys, gradients: Sequence[Array]) -> Keys:
        """`keys` that depend on the gradients, so that a compiled step creates new rows last.

        Otherwise XLA could create the rows in parallel with the lookup, and would copy the table
        for that. XLA removes barriers before it decides about copies, so the keys depend on a
        condition that never holds: one number equals both infinities.
        """
        if self.storage.ids_are_rows:
            return keys
        first = sum(
            (gradient.reshape(-1)[:1].sum() for gradient in gradients),
            start=jnp.zeros((), jnp.float32),
        )
        return keys.only(~((first == jnp.inf) & (first == -jnp.inf)))

    def _step(self, params: PyTree, slots: PyTree, gradients: CallGradients, step: Step) -> State:
        return self.storage.step(params, slots, gradients, self.table, self._how(step))

    def _step_all(
        self, params: PyTree, slots: PyTree, gradients: CallGradients, step: Step
    ) -> State:
        """Parameters and slots after one step of all parameters.

        Every device passes different `gradients`, and their sum over devices is applied.
        """
        total = self.devices.total(self.storage.gradients(params, gradients, self.table))
        return self.storage.step_all(params, slots, total, self.table, self._how(step))

    def _pooled(self, vectors: Array, call: Call) -> Sequence[Array]:
        quantization = self.table.quantization_config
        return api.lookup(
            (vectors,), call, quantization=quantization, implementation=self.implementation
        )

    def _of_entries(self, entry_of: Array, batch: Occurrences, d_outputs: Sequence[Array]) -> Array:
        """Gradient of each distinct entry. `entry_of` is the entry of each occurrence."""
        num_entries = entry_of.shape[0]
        # Every entry occurs at least once, so index `e` of the result belongs to entry `e`.
        return self._summed(
            Occurrences(batch.call.with_ids(entry_of)).gradients(d_outputs), num_entries
        )[1]

    def _summed(self, gradients: CallGradients, num_rows: int) -> tuple[Array, Array]:
        """Distinct ids in ascending order, and the sum of the gradients of each."""
        summed: tuple[Array, Array] = api.dispatch(
            "row_gradients", num_rows, gradients, implementation=self.implementation
        )
        return summed

    def _of_all(self, d_outputs: Sequence[Array]) -> list[Array]:
        """Output gradients of the global batch; with `splits_columns`, this device's columns."""
        return list(
            map(
                self.devices.columns_of_all if self.splits_columns else self.devices.gather,
                d_outputs,
            )
        )


def keys_of_gradients(rows: Array) -> tuple[Keys, Int[Array, " capacity"]]:
    """Keys of the rows of `RowGradients`, which are ids or lanes, and the number of occurrences.

    Ids count once each, because `RowGradients` do not hold their occurrences.
    """
    if rows.ndim == 1:
        keys = keys_of_rows(rows)
        return keys, keys.is_key.astype(jnp.int32)
    return unnamed(rows)


def keys_of_rows(rows: Int[Array, " nnz"]) -> Keys:
    """Row numbers as `Keys`, with `NO_ROW` as padding."""
    return Keys(jnp.zeros(rows.shape, jnp.uint32), rows.astype(jnp.uint32), rows != NO_ROW)


@dataclasses.dataclass(frozen=True)
class AskedRows(Rows):
    """Sharded rows: each device requests every distinct row once from its owner, and pools locally.

    Gradients travel to the owner the same way.

    Args:
      capacity: largest number of rows that a device requests from one owner in a round. None takes
        `default_capacity`.
    """

    capacity: int | None = None

    @property
    def partition(self) -> PartitionSpec:
        """Partition of parameters and slots over the mesh."""
        return self.devices.split

    @property
    def num_shards(self) -> int:
        """Number of shards, one per device."""
        return self.devices.num_devices

    def look_up(
        self, params: PyTree, batch: Occurrences, number: Int[Array, ""] | None
    ) -> Asking[LookupResult]:
        """See `Rows`."""

        def answer(num_unknown: Array, question: PyTree) -> tuple[Array, Array]:
            keys, occurrences, first_of = self._received(question)
            ahead = None
            if number is not None:
                arrival = (
                    None if first_of is None else self._arrival(first_of, wanted.entry_of.shape[0])
                )
                ahead = occurrences, number, arrival
            vectors, more = self.storage.read(params, keys, self.table, ahead)
            return num_unknown + more, vectors

        wanted = self._distinct(batch.all_keys())
        zero = jnp.zeros((), jnp.int32)
        row = jax.ShapeDtypeStruct(
            (self.table.embedding_dim,), self.storage.vector_dtype(self.table)
        )
        num_unknown, vectors, rounds = yield Question(
            wanted, self._names(wanted), answer, zero, self._capacity(wanted), row
        )
        return self._pooled(vectors, batch.call.with_ids(wanted.entry_of)), num_unknown, rounds

    def row_gradients(
        self, batch: Occurrences, d_outputs: Sequence[Array]
    ) -> Asking[tuple[Array, Array]]:
        """See `Rows`."""
        wanted, takes_keys = self._distinct(batch.all_keys()), self.storage.takes_keys
        num_places = wanted.entry_of.shape[0] * self.num_shards
        if not takes_keys:
            num_places = min(num_places, -(-self.storage.num_ids(self.table) // self.num_shards))

        def collect(state: PyTree, arrived: tuple[PyTree, Array]) -> tuple[PyTree, None]:
            (count, all_rows, all_values), (question, gradients) = state, arrived
            keys, occurrences, first_of = self._received(question)
            if first_of is not None:
                keys, occurrences, order = self._in_order(keys, occurrences, first_of)
                (gradients,) = api.gather_rows((gradients,), order.first_of)
                rows, values = combine(keys, occurrences, gradients)
                is_row = rows[:, 2] > 0
            else:
                own = CallGradients.of_rows(question, gradients)
                rows, values = self._summed(own, self.storage.num_ids(self.table))
                is_row = rows != NO_ROW
            # Each round delivers complete rows. Append them after the rows of earlier rounds.
            places = jnp.where(
                is_row, count + jnp.arange(is_row.shape[0], dtype=jnp.int32), num_places
            )
            return (
                count + jnp.sum(is_row, dtype=jnp.int32),
                *api.scatter_rows((all_rows, all_values), places, (rows, values)),
            ), None

        no_rows = jnp.full(num_places, NO_ROW, jnp.int32)
        if takes_keys:
            no_rows = jnp.zeros((num_places, len(wanted.lanes) + 1), jnp.uint32)
        nothing = (
            jnp.zeros((), jnp.int32),
            no_rows,
            jnp.zeros((num_places, self.table.embedding_dim), jnp.float32),
        )
        payload = self._names(wanted), self._of_entries(wanted.entry_of, batch, d_outputs)
        answers = yield Question(wanted, payload, collect, nothing, self._capacity(wanted))
        _, rows, values = answers.state
        return rows, values

    def update(
        self,
        params: PyTree,
        slots: PyTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asking[State]:
        """See `Rows`."""

        def answer(
            state: tuple[PyTree, PyTree], arrived: tuple[PyTree, Array]
        ) -> tuple[PyTree, None]:
            question, gradients = arrived
            keys, occurrences, first_of = self._received(question)
            if first_of is not None:
                keys, occurrences, order = self._in_order(keys, occurrences, first_of)
            params, slots, rows = self.storage.find(*state, keys, occurrences, self.table, step)
            if first_of is not None:
                (rows,) = api.gather_rows((rows,), order.entry_of)
            return self._step(params, slots, CallGradients.of_rows(rows, gradients), step), None

        wanted = self._distinct(self._after(batch.all_keys(), d_outputs))
        payload = self._names(wanted), self._of_entries(wanted.entry_of, batch, d_outputs)
        capacity = self._capacity(wanted)
        if self.storage.makes_room and capacity < wanted.entry_of.shape[0]:
            # A key of a later round must not be evicted for a key of an earlier round.
            keys = Keys.of_lanes(wanted.lanes, wanted.first_of != NO_ROW)
            held = yield Question(
                wanted,
                keys,
                lambda p, own: (self.storage.hold(p, own, step), None),
                params,
                capacity,
            )
            params = held.state
        answers = yield Question(wanted, payload, answer, (params, slots), capacity)
        stepped: tuple[PyTree, PyTree] = answers.state
        return stepped

    # Helpers

    @property
    def shard(self) -> Int[Array, ""]:
        """Index of this device's shard."""
        return self.devices.index()

    def _own(self, keys: Keys) -> Keys:
        return keys.only(self.storage.owners(keys, self.num_shards) == self.shard)

    def _distinct(self, keys: Keys) -> Wanted:
        """Distinct keys of this device's batch, grouped by owner."""
        lanes = [*keys.lanes] if self.storage.takes_keys else [keys.low.astype(jnp.int32)]
        return distinct(
            self.storage.owners(keys, self.num_shards), lanes, num_devices=self.num_shards
        )

    def _names(self, wanted: Wanted) -> PyTree:
        """Payload that names the entries to their owner.

        It holds row numbers, or the lanes of keys with the number of occurrences on this device and
        the index of the first one.
        """
        if not self.storage.takes_keys:
            return jnp.where(wanted.first_of == NO_ROW, NO_ROW, wanted.lanes[0])
        return *wanted.lanes, wanted.counts, wanted.first_of

    def _received(
        self, question: PyTree
    ) -> tuple[Keys, Int[Array, " nnz"], Int[Array, " nnz"] | None]:
        """Keys, occurrences and first occurrences from the payload of `_names`, at the owner.

        First occurrences are None if the payload holds row numbers.
        """
        if self.storage.takes_keys:
            *lanes, counts, first_of = question
            return Keys.of_lanes(lanes, first_of != NO_ROW), counts, first_of
        keys = keys_of_rows(question)
        return keys, keys.is_key.astype(jnp.int32), None

    def _devices_of(self, messages: Array) -> Int[Array, " nnz"]:
        """Index of the device that sent each entry to this owner."""
        blocks = self.num_shards, messages.shape[0] // self.num_shards
        return jax.lax.broadcasted_iota(jnp.int32, blocks, 0).reshape(-1)

    def _arrival(self, first_of: Int[Array, " nnz"], num_entries: int) -> Int[Array, " nnz"]:
        """Numbers that sort the received entries in the order of `_in_order`.

        `num_entries` is the number of ids of each device.
        """
        numbers = self._devices_of(first_of) * num_entries + first_of
        return jnp.where(first_of == NO_ROW, NO_ROW, numbers)

    def _in_order(
        self, keys: Keys, occurrences: Array, first_of: Array
    ) -> tuple[Keys, Int[Array, " nnz"], Wanted]:
        """Received keys sorted by device and first occurrence, their occurrences, and the order.

        If rows are scarce, the order decides which keys get one, so `update` and `apply` must use
        the same order.
        """
        place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
        # With `place` as a lane all entries differ, so `distinct` merges none and only sorts.
        order = distinct(self._devices_of(place), [first_of, place], num_devices=self.num_shards)
        is_key, occurrences, *lanes = api.gather_rows(
            (keys.is_key, occurrences, *keys.lanes), order.first_of
        )
        return Keys.of_lanes(lanes, is_key), occurrences, order

    def _capacity(self, wanted: Wanted) -> int:
        num_entries = wanted.entry_of.shape[0]
        if self.table.optimizer.moves_all_rows:
            # Every round steps all rows, so there must be only one.
            return num_entries
        return min(self.capacity or default_capacity(num_entries, self.num_shards), num_entries)
