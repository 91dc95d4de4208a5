"""Lookups and steps of sharded rows: a device requests a row from the device that owns the row.

```
ids ──▶ keys ──[distinct, ask]──▶ storage.read ──▶ vectors ──pool──▶ activations
state ◀── storage.step ◀── storage.find ◀──[ask]── keys, gradients ◀──spread── d(activations)
```

The methods `look_up`, `row_gradients` and `update` are generators: they yield a `Question` to the
owners of rows and receive the `Answers` (see `parallel/exchange.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from rsembed.collection.occurrences import Occurrences, keys_of_gradients, keys_of_rows
from rsembed.collection.rows import LookupResult, Rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, CallGradients, Step
from rsembed.keys import Keys
from rsembed.parallel.exchange import Asking, Question, Wanted, default_capacity, distinct
from rsembed.storage.protocol import Found, Params, SlotTree, State
from rsembed.storage.row_map import combine

Request: TypeAlias = PyTree
"""Arrays with one entry per requested row. An entry is a row number, or a key with its counts."""


@dataclasses.dataclass(frozen=True)
class AskedRows(Rows):
    """Sharded rows of one array, or of a storage that finds rows by row number.

    In a lookup, a device requests every distinct row of its samples once from the row's owner, and
    pools the received vectors. In an update, a device sends the sum of the gradients of every
    distinct row to the owner. A device requests a row by its index in the array or its row number.

    Args:
      capacity: maximum number of distinct rows that a device requests from one owner in one
        exchange round. None: the result of `default_capacity`.
    """

    capacity: int | None = None

    @property
    def partition(self) -> PartitionSpec:
        """Partition that splits parameters and slots over the mesh, one part per shard."""
        return self.devices.split

    @property
    def num_shards(self) -> int:
        """Number of shards, one per device."""
        return self.devices.num_devices

    @property
    def shard(self) -> Int[Array, ""]:
        """Index of this device's shard."""
        return self.devices.index()

    def look_up(
        self,
        params: Params,
        batch: Occurrences,
        number: Int[Array, ""] | None,
    ) -> Asking[LookupResult]:
        """See `Rows`."""
        wanted = self._distinct(batch.all_keys())

        def answer(num_unknown: Array, request: Request) -> tuple[Array, Array]:
            keys, occurrences = self._received(request)
            ahead = None
            if number is not None:
                ahead = occurrences, number, self._arrival(request, wanted.num_ids)
            vectors, num_new = self.storage.read(params, keys, self.table, ahead)
            return num_unknown + num_new, vectors

        vector_dtype = self.storage.vector_dtype(self.table)
        answers = yield Question(
            wanted=wanted,
            payload=self._request(wanted),
            answer=answer,
            state=jnp.zeros((), jnp.int32),
            capacity=self._capacity(wanted),
            reply=jax.ShapeDtypeStruct((self.table.embedding_dim,), vector_dtype),
        )
        call = batch.call.with_ids(wanted.entry_of)
        pooled = self._pooled(answers.replies, call)
        return pooled, answers.state, answers.num_rounds

    def row_gradients(
        self,
        batch: Occurrences,
        d_outputs: Sequence[Array],
    ) -> Asking[tuple[Array, Array]]:
        """See `Rows`."""
        wanted = self._distinct(batch.all_keys())
        no_rows = self._no_rows(wanted)
        most_rows = no_rows.shape[0]

        def collect(state: PyTree, arrived: tuple[Request, Array]) -> tuple[PyTree, None]:
            count, all_rows, all_values = state
            request, gradients = arrived
            rows, values = self._combined(request, gradients)
            keys, _ = keys_of_gradients(rows)
            is_row = keys.is_key
            # All gradients of a row arrive in the same exchange round, so no row arrives in two
            # rounds. Each round appends its rows to the rows of earlier rounds.
            index = jnp.arange(is_row.shape[0], dtype=jnp.int32)
            position = jnp.where(is_row, count + index, most_rows)
            all_rows, all_values = api.scatter_rows(
                (all_rows, all_values),
                position,
                (rows, values),
            )
            new_count = count + jnp.sum(is_row, dtype=jnp.int32)
            return (new_count, all_rows, all_values), None

        shape = most_rows, self.table.embedding_dim
        no_values = jnp.zeros(shape, jnp.float32)
        gradients = self._gradients_of_entries(wanted.entry_of, batch, d_outputs)
        request = self._request(wanted)
        count = jnp.zeros((), jnp.int32)
        answers = yield Question(
            wanted=wanted,
            payload=(request, gradients),
            answer=collect,
            state=(count, no_rows, no_values),
            capacity=self._capacity(wanted),
        )
        _, rows, values = answers.state
        return rows, values

    def update(
        self,
        params: Params,
        slots: SlotTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asking[State]:
        """See `Rows`."""

        def answer(state: State, arrived: tuple[Request, Array]) -> tuple[PyTree, None]:
            params, slots = state
            request, gradients = arrived
            params, slots, rows = self._found(params, slots, request, step)
            gradients_of_rows = CallGradients.of_rows(rows, gradients)
            stepped = self._step(params, slots, gradients_of_rows, step)
            return stepped, None

        keys = self.storage.keys_after(batch.all_keys(), d_outputs)
        wanted = self._distinct(keys)
        gradients = self._gradients_of_entries(wanted.entry_of, batch, d_outputs)
        params = yield from self._with_keys_held(params, wanted, step)
        request = self._request(wanted)
        answers = yield Question(
            wanted=wanted,
            payload=(request, gradients),
            answer=answer,
            state=(params, slots),
            capacity=self._capacity(wanted),
        )
        stepped: State = answers.state
        return stepped

    # Requests to the owners of rows

    def _distinct(self, keys: Keys) -> Wanted:
        """Distinct keys of this device's batch, grouped by owner."""
        owners = self.storage.owners(keys, self.num_shards)
        lanes = self._lanes(keys)
        return distinct(owners, lanes, num_devices=self.num_shards)

    def _lanes(self, keys: Keys) -> list[Array]:
        """Integer arrays (lanes) that together identify each key."""
        return [keys.low.astype(jnp.int32)]

    def _request(self, wanted: Wanted) -> Request:
        """Row numbers of the distinct rows that this device requests, and `NO_ROW` for padding."""
        (row,) = wanted.lanes
        return jnp.where(wanted.first_of == NO_ROW, NO_ROW, row)

    def _received(self, request: Request) -> tuple[Keys, Int[Array, " nnz"]]:
        """Keys in a request that an owner received, and the number of occurrences of each key."""
        keys = keys_of_rows(request)
        return keys, keys.is_key.astype(jnp.int32)

    def _arrival(self, request: Request, num_ids: int) -> Int[Array, " nnz"] | None:
        """Rank of each received key in the order in which new keys get rows.

        Args:
          request: request that an owner received.
          num_ids: number of ids in the batch of each device.

        Returns: None if new keys get rows in the order of the request.
        """
        del request, num_ids
        return None

    def _found(self, params: Params, slots: SlotTree, request: Request, step: Step) -> Found:
        """Gives rows to new keys. Returns new parameters and slots, and the row of each key."""
        keys, occurrences = self._received(request)
        return self.storage.find(
            params,
            slots,
            keys,
            occurrences,
            self.table,
            step,
        )

    def _no_rows(self, wanted: Wanted) -> Array:
        """Initial value of `RowGradients.rows`, with padding in all entries.

        The array has room for all rows that this device can receive in all exchange rounds.
        """
        most_rows = wanted.num_ids * self.num_shards
        num_rows = self.storage.num_ids(self.table)
        rows_per_shard = -(-num_rows // self.num_shards)
        return jnp.full(min(most_rows, rows_per_shard), NO_ROW, jnp.int32)

    def _combined(self, request: Request, gradients: Array) -> tuple[Array, Array]:
        """Distinct rows of a request as in `RowGradients.rows`, and the sum of their gradients."""
        gradients_of_rows = CallGradients.of_rows(request, gradients)
        num_rows = self.storage.num_ids(self.table)
        return self._summed(gradients_of_rows, num_rows)

    def _with_keys_held(self, params: Params, wanted: Wanted, step: Step) -> Asking[Params]:
        """Protects the rows of all requested keys from eviction until the end of the step.

        Without `_with_keys_held`, a new key of an early exchange round could evict a key that the
        same step requests in a later exchange round. The result is the new parameters.
        """
        capacity = self._capacity(wanted)
        takes_one_round = capacity == wanted.num_ids
        if takes_one_round or not self.storage.makes_room:
            return params

        def hold(params: Params, request: Request) -> tuple[Params, None]:
            keys, _ = self._received(request)
            return self.storage.hold(params, keys, step), None

        answers = yield Question(
            wanted=wanted,
            payload=self._request(wanted),
            answer=hold,
            state=params,
            capacity=capacity,
        )
        return answers.state

    # Helpers

    def _keys_here(self, keys: Keys) -> Keys:
        owners = self.storage.owners(keys, self.num_shards)
        return keys.only(owners == self.shard)

    def _capacity(self, wanted: Wanted) -> int:
        num_entries = wanted.num_ids
        if self.table.optimizer.moves_all_rows:
            # An optimizer with `moves_all_rows` updates every row of the table in each exchange
            # round. All entries must fit into a single exchange round, so that each row is updated
            # only once.
            return num_entries
        capacity = self.capacity or default_capacity(num_entries, self.num_shards)
        return min(capacity, num_entries)


class AskedKeys(AskedRows):
    """Sharded rows with 64-bit keys.

    For each key, a request holds the key's lanes, the number of its occurrences in the requesting
    device's batch, and the index of the first occurrence.
    """

    def _lanes(self, keys: Keys) -> list[Array]:
        return [*keys.lanes]

    def _request(self, wanted: Wanted) -> Request:
        return *wanted.lanes, wanted.counts, wanted.first_of

    def _received(self, request: Request) -> tuple[Keys, Int[Array, " nnz"]]:
        *lanes, counts, first_of = request
        return Keys.of_lanes(lanes, first_of != NO_ROW), counts

    def _arrival(self, request: Request, num_ids: int) -> Int[Array, " nnz"]:
        first_of = request[-1]
        device = self._asking_devices(first_of)
        rank = device * num_ids + first_of
        return jnp.where(first_of == NO_ROW, NO_ROW, rank)

    def _found(self, params: Params, slots: SlotTree, request: Request, step: Step) -> Found:
        in_order, order = self._in_order(request)
        params, slots, rows = super()._found(params, slots, in_order, step)
        (rows,) = api.gather_rows((rows,), order.entry_of)
        return params, slots, rows

    def _no_rows(self, wanted: Wanted) -> Array:
        most_rows = wanted.num_ids * self.num_shards
        num_columns = len(wanted.lanes) + 1  # The lanes and the number of occurrences of a key.
        return jnp.zeros((most_rows, num_columns), jnp.uint32)

    def _combined(self, request: Request, gradients: Array) -> tuple[Array, Array]:
        in_order, order = self._in_order(request)
        (gradients,) = api.gather_rows((gradients,), order.first_of)
        return combine(*self._received(in_order), gradients)

    def _asking_devices(self, entries: Array) -> Int[Array, " nnz"]:
        """Index of the device that sent each entry to this owner."""
        entries_per_device = entries.shape[0] // self.num_shards
        blocks = self.num_shards, entries_per_device
        device = jax.lax.broadcasted_iota(jnp.int32, blocks, 0)
        return device.reshape(-1)

    def _in_order(self, request: Request) -> tuple[Request, Wanted]:
        """A request sorted by device and first occurrence, and the sort order.

        If a table has too few free rows, only the first keys in the returned order get a row.
        `update` and `apply` give rows to the same keys, because both call `_in_order`.
        """
        first_of = request[-1]
        position = jnp.arange(first_of.shape[0], dtype=jnp.int32)
        # Every entry has a different `position`, so `distinct` merges no entries, and only sorts.
        device = self._asking_devices(position)
        order = distinct(device, [first_of, position], num_devices=self.num_shards)
        return api.gather_rows(request, order.first_of), order
