"""The way to rows that one device owns each: distinct ids travel there, vectors come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from rsembed.collection.dense_rows import read_from
from rsembed.collection.rows import LookupResult, Occurrences, Rows, keys_of_rows, row_by_row
from rsembed.collection.state import Traffic
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.keys import Keys
from rsembed.parallel.exchange import Asking, Question, Wanted, default_capacity, distinct
from rsembed.storage.hash_table import combine
from rsembed.storage.protocol import ReadAhead


@dataclasses.dataclass(frozen=True)
class AskedRows(Rows):
    """A row is asked for once, comes back and is pooled where it was asked for; gradients take that way, too.

    Args:
      capacity: places per block of a round; None takes `default_capacity`.
    """

    capacity: int | None = None

    @property
    def partition(self) -> PartitionSpec:
        """How parameters and slots are split."""
        return self.devices.split

    @property
    def num_shards(self) -> int:
        """How many devices share the rows."""
        return self.devices.num_devices

    def look_up(self, params: PyTree, batch: Occurrences, number: Int[Array, ""] | None) -> Asking[LookupResult]:
        """See `Rows`."""

        def answer(num_unknown: Array, question: PyTree) -> tuple[Array, Array]:
            keys, occurrences, _ = self._received(question)
            ahead = None if number is None else ReadAhead(occurrences, number)
            vectors, more = self.storage.read(params, keys, self.table, ahead=ahead)
            return num_unknown + more, vectors

        wanted = self._distinct(batch.all_keys())
        zero = jnp.zeros((), jnp.int32)
        num_unknown, vectors, rounds = yield self._question(wanted, self._names(wanted), answer, zero, reply=self._row)
        # Of a key its lanes, its count and its first place go, else a row; a vector comes.
        num_lanes = len(wanted.lanes) + (2 if self.storage.takes_keys else 0)
        bytes_per_place = 4 * num_lanes + vectors.shape[1] * vectors.dtype.itemsize
        traffic = Traffic.of(rounds, (self.num_shards - 1) * self._capacity(wanted) * bytes_per_place)
        return self._pooled(vectors, read_from(wanted.entry_of, batch.segments)), num_unknown, traffic

    def row_gradients(self, batch: Occurrences, d_outputs: Sequence[Array]) -> Asking[tuple[Array, Array]]:
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
                rows, values = self._summed([row_by_row(question)], [gradients])
                is_row = rows != NO_ROW
            # A round brings all of a row, and behind the rows of earlier rounds.
            places = jnp.where(is_row, count + jnp.arange(is_row.shape[0], dtype=jnp.int32), num_places)
            return (
                count + jnp.sum(is_row, dtype=jnp.int32),
                *api.scatter_rows((all_rows, all_values), places, (rows, values)),
            ), None

        no_rows = jnp.full(num_places, NO_ROW, jnp.int32)
        if takes_keys:
            no_rows = jnp.zeros((num_places, len(wanted.lanes) + 1), jnp.uint32)
        nothing = jnp.zeros((), jnp.int32), no_rows, jnp.zeros((num_places, self.table.embedding_dim), jnp.float32)
        payload = self._names(wanted), self._of_entries(wanted.entry_of, batch, d_outputs)
        answers = yield self._question(wanted, payload, collect, nothing)
        _, rows, values = answers.state
        return rows, values

    def update(
        self, params: PyTree, slots: PyTree, batch: Occurrences, d_outputs: Sequence[Array], step: Step
    ) -> Asking[tuple[PyTree, PyTree]]:
        """See `Rows`."""

        def answer(state: tuple[PyTree, PyTree], arrived: tuple[PyTree, Array]) -> tuple[PyTree, None]:
            question, gradients = arrived
            params, slots, rows = self._find_arrived(*state, question, step)
            return self._step(params, slots, [row_by_row(rows)], [gradients], step), None

        wanted = self._distinct(self._after(batch.all_keys(), d_outputs))
        payload = self._names(wanted), self._of_entries(wanted.entry_of, batch, d_outputs)
        params = yield from self._held(params, wanted, step)
        answers = yield self._question(wanted, payload, answer, (params, slots))
        stepped: tuple[PyTree, PyTree] = answers.state
        return stepped

    # Parts of these

    @property
    def _shard(self) -> Int[Array, ""]:
        return self.devices.index()

    def _own(self, keys: Keys) -> Keys:
        return keys.only(self.storage.owners(keys, self.num_shards) == self._shard)

    def _distinct(self, keys: Keys) -> Wanted:
        """Each id once."""
        lanes = [*keys.lanes] if self.storage.takes_keys else [keys.low.astype(jnp.int32)]
        return distinct(self.storage.owners(keys, self.num_shards), lanes, num_devices=self.num_shards)

    def _names(self, wanted: Wanted) -> PyTree:
        """The message to an owner: row numbers; or keys, how often each occurs on this device, and where first."""
        if not self.storage.takes_keys:
            return jnp.where(wanted.first_of == NO_ROW, NO_ROW, wanted.lanes[0])
        return *wanted.lanes, wanted.counts, wanted.first_of

    def _received(self, question: PyTree) -> tuple[Keys, Int[Array, " nnz"], Int[Array, " nnz"] | None]:
        """Keys, occurrences and first places out of the message of `_names`, at the owner."""
        if self.storage.takes_keys:
            *lanes, counts, first_of = question
            return Keys.of_lanes(lanes, first_of != NO_ROW), counts, first_of
        keys = keys_of_rows(question)
        return keys, keys.is_key.astype(jnp.int32), None

    def _find_arrived(
        self, params: PyTree, slots: PyTree, question: PyTree, step: Step
    ) -> tuple[PyTree, PyTree, Int[Array, " nnz"]]:
        """As `_find`, for keys of all devices, in their order."""
        keys, occurrences, first_of = self._received(question)
        if first_of is None:
            return self._find(params, slots, keys, occurrences, step)
        keys, occurrences, order = self._in_order(keys, occurrences, first_of)
        params, slots, rows = self._find(params, slots, keys, occurrences, step)
        return params, slots, api.gather_rows((rows,), order.entry_of)[0]

    def _in_order(self, keys: Keys, occurrences: Array, first_of: Array) -> tuple[Keys, Int[Array, " nnz"], Wanted]:
        """Keys of all devices in the order in which these, one after the other, met them; and where each came from.

        When rows are few, this decides which keys get one: `update` and `apply` must agree.
        """
        place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
        device = jax.lax.broadcasted_iota(jnp.int32, (self.num_shards, place.shape[0] // self.num_shards), 0)
        # Places tell all entries apart.
        order = distinct(device.reshape(-1), [first_of, place], num_devices=self.num_shards)
        is_key, occurrences, *lanes = api.gather_rows((keys.is_key, occurrences, *keys.lanes), order.first_of)
        return Keys.of_lanes(lanes, is_key), occurrences, order

    def _held(self, params: PyTree, wanted: Wanted, step: Step) -> Asking[PyTree]:
        """Parameters in which no key of this batch can lose its row to a key of an earlier round."""
        if not self.storage.makes_room or self._capacity(wanted) == wanted.entry_of.shape[0]:
            return params
        held = yield self._question(
            wanted, keys_of(wanted), lambda p, keys: (self.storage.hold(p, keys, step), None), params
        )
        return held.state

    def _capacity(self, wanted: Wanted) -> int:
        num_entries = wanted.entry_of.shape[0]
        if self.table.optimizer.moves_all_rows:
            return num_entries  # one round: rows without a gradient move once
        return min(self.capacity or default_capacity(num_entries, self.num_shards), num_entries)

    @property
    def _row(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.table.embedding_dim,), self.storage.vector_dtype(self.table))

    def _question(
        self, wanted: Wanted, payload: PyTree, answer: Callable[..., PyTree], state: PyTree, *, reply: PyTree = None
    ) -> Question:
        return Question(wanted, payload, answer, state, self._capacity(wanted), reply)


def keys_of(wanted: Wanted) -> Keys:
    """The distinct keys that a device has questions about."""
    return Keys.of_lanes(wanted.lanes, wanted.first_of != NO_ROW)
