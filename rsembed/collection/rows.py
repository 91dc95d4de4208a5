"""Lookups and updates of tables that are copied to every device, or split by column.

```
ids ──▶ keys ──▶ storage.read ──▶ vectors ──pool──▶ activations
state ◀── storage.step ◀── storage.find ◀── keys, gradients ◀──spread── d(activations)
```

`ArrayRows` and `ColumnRows` handle tables in one array. `NumberedRows` and `KeyedRows` handle
storages that translate ids to row indices. `TrainRows` handles parameters that every step updates
as a whole. The classes for sharded rows are in `asked_rows.py`. Lookups and updates run inside
`shard_map`, on one device, with that device's part of the batch and of the parameters.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.collection.devices import Devices
from rsembed.collection.occurrences import Occurrences, keys_of_gradients
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, Step
from rsembed.kernels.reference import entries_of, entry_gains
from rsembed.keys import Keys
from rsembed.parallel.exchange import Asked
from rsembed.specs import TableSpec
from rsembed.storage.protocol import Params, SlotTree, State, Storage
from rsembed.storage.row_map import entries, named

LookupResult: TypeAlias = tuple[Sequence[Array], Int[Array, ""], Int[Array, ""]]
"""Pooled rows, number of distinct keys without a row, and number of exchange rounds."""


@dataclasses.dataclass(frozen=True)
class Rows(abc.ABC):
    """Base class: looks up and updates the rows of a stack on the devices of a mesh.

    Most classes return the results of `look_up`, `row_gradients` and `update` directly. Classes for
    sharded rows return generators that yield requests to the owners of rows, so that the requests
    of all stacks share one exchange (`exchange.together`).

    Args:
      devices: devices of the mesh.
      table: spec of the stack's first table. All tables of a stack have the same dim, dtype and
        optimizer.
      storage: storage of all tables of the stack.
      implementation: name of the kernel implementation that pools rows. None: the fastest
        implementation.
    """

    devices: Devices
    table: TableSpec
    storage: Storage
    implementation: str | None = None

    @property
    def partition(self) -> PartitionSpec:
        """Partition of parameters and slots over the mesh. By default, every device has a copy."""
        return PartitionSpec()

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Partition specs of the rows and the values of `RowGradients` over the mesh."""
        return self.partition, self.partition

    @property
    def num_shards(self) -> int:
        """Number of shards that the rows are split into. 1 if every device has all rows."""
        return 1

    @property
    def shard(self) -> Int[Array, ""]:
        """Index of this device's shard."""
        return jnp.zeros((), jnp.int32)

    def init(self, key: PRNGKeyArray) -> State:
        """Initial parameters and slots of this device. `key` is the PRNG key of the whole model."""
        return self.storage.init(key, self.table, self.shard, self.num_shards)

    @abc.abstractmethod
    def look_up(
        self,
        params: Params,
        batch: Occurrences,
        number: Int[Array, ""] | None,
    ) -> Asked[LookupResult]:
        """Pooled rows of a batch. A lookup does not change the parameters.

        Args:
          params: parameters of the storage on this device.
          batch: ids of this device's samples.
          number: index of the step that follows the lookup. If a key has no row yet, but gets a row
            in step `number`, the lookup already reads the initial values of the row. None: no step
            follows, and a key without a row reads zeros.
        """

    def row_gradients(
        self,
        batch: Occurrences,
        d_outputs: Sequence[Array],
    ) -> Asked[tuple[Array, Array]]:
        """This device's part of `RowGradients`: distinct ids of the global batch, and gradients.

        For keyed tables, the 32-bit lanes of keys take the place of the ids.
        """
        gradients = self._gradients_of_all(batch, d_outputs)
        return self._summed(gradients, self.storage.num_ids(self.table))

    @abc.abstractmethod
    def update(
        self,
        params: Params,
        slots: SlotTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asked[State]:
        """Updates all rows that a batch looks up, and returns new parameters and slots.

        New keys get rows before the gradients are applied.
        """

    def apply(
        self,
        params: Params,
        slots: SlotTree,
        rows: Array,
        values: Array,
        step: Step,
    ) -> State:
        """Updates the rows of distinct ids or keys, and returns new parameters and slots.

        `rows` and `values` are results of `row_gradients`, possibly with changed values.
        """
        all_keys, occurrences = keys_of_gradients(rows)
        keys = self.storage.keys_after(self._keys_here(all_keys), [values])
        params, slots, rows = self.storage.find(
            params,
            slots,
            keys,
            occurrences,
            self.table,
            step,
        )
        rounded = self._rounded(step)
        return self.storage.step_distinct(params, slots, rows, values, self.table, rounded)

    def own_keys(self, batch: Occurrences) -> Keys:
        """Keys of the global batch. Keys that a different device owns are replaced by padding."""
        global_batch = batch.of_all(self.devices)
        return self._keys_here(global_batch.all_keys())

    # Helpers

    def _keys_here(self, keys: Keys) -> Keys:
        """`keys`, where padding replaces the keys that a different device owns.

        In the base class, every device has all rows, so `keys` are returned unchanged.
        """
        return keys

    def _rounded(self, step: Step) -> Step:
        """A copy of `step` with the stochastic-rounding function for the rows of this device."""
        rounding = self.storage.rounding(step.rounding, self.shard, step.resident_rows)
        return dataclasses.replace(step, rounding=rounding)

    def _step(self, params: Params, slots: SlotTree, gradients: CallGradients, step: Step) -> State:
        rounded = self._rounded(step)
        return self.storage.step(params, slots, gradients, self.table, rounded)

    def _pooled(self, vectors: Array, call: Call) -> Sequence[Array]:
        quantization = self.table.quantization_config
        return api.lookup(
            (vectors,),
            call,
            quantization=quantization,
            implementation=self.implementation,
        )

    def _summed(self, gradients: CallGradients, num_rows: int) -> tuple[Array, Array]:
        """Distinct ids in ascending order, and the sum of the gradients of each id."""
        summed: tuple[Array, Array] = api.dispatch(
            "row_gradients",
            num_rows,
            gradients,
            implementation=self.implementation,
        )
        return summed

    def _gradients_of_entries(
        self,
        entry_of: Array,
        batch: Occurrences,
        d_outputs: Sequence[Array],
    ) -> Array:
        """Sum of the gradients of each distinct key.

        Args:
          entry_of: for each id in the batch, the index of its key among the distinct keys.
            `NO_ROW` for padding.
          batch: ids of this device's samples.
          d_outputs: gradients of the pooled outputs.
        """
        num_entries = entry_of.shape[0]
        of_entries = Occurrences(batch.call.with_ids(entry_of))
        gradients = of_entries.gradients(d_outputs)
        # `_summed` returns one row for each key with an id in the batch. Every distinct key has an
        # id in the batch, so row `e` of `values` belongs to key `e`.
        _, values = self._summed(gradients, num_entries)
        return values

    def _of_all(self, d_outputs: Sequence[Array]) -> list[Array]:
        """Output gradients of the global batch, gathered from all devices."""
        return [self.devices.gather(d_output) for d_output in d_outputs]

    def _gradients_of_all(self, batch: Occurrences, d_outputs: Sequence[Array]) -> CallGradients:
        """Argument of the backward kernels: a lookup of the global batch, and output gradients."""
        global_batch = batch.of_all(self.devices)
        return global_batch.gradients(self._of_all(d_outputs))


class ArrayRows(Rows):
    """Tables with all rows in one array. Every device has a full copy of the array.

    A lookup is one kernel call that reads and pools rows. An update is one kernel call that sums
    all gradients of a row before it updates the row. Every device applies the gradients of the
    global batch to its copy of the array, so all copies stay equal.
    """

    def look_up(
        self,
        params: Params,
        batch: Occurrences,
        number: Int[Array, ""] | None,
    ) -> Asked[LookupResult]:
        """See `Rows`."""
        none = jnp.zeros((), jnp.int32)
        outputs = self._pooled(params, batch.call)
        return outputs, none, none

    def squared_norm(self, batch: Occurrences, d_outputs: Sequence[Array]) -> Float[Array, ""]:
        """Sum of squares of the values of `row_gradients`, on a single device."""
        gradients = batch.gradients(d_outputs)
        num_rows = self.storage.num_ids(self.table)
        norm: Array = api.dispatch(
            "squared_norm",
            num_rows,
            gradients,
            implementation=self.implementation,
        )
        return norm

    def update(
        self,
        params: Params,
        slots: SlotTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asked[State]:
        """See `Rows`."""
        gradients = self._gradients_of_all(batch, d_outputs)
        return self._step(params, slots, gradients, step)


class ColumnRows(ArrayRows):
    """Tables with all rows in one array. Each device has some columns of the array.

    In a lookup, every device pools its columns for the global batch. The devices exchange columns
    of the pooled activations, not rows of the tables.
    """

    @property
    def partition(self) -> PartitionSpec:
        """Partition that splits parameters and slots by column over the mesh."""
        return PartitionSpec(None, self.devices.axes)

    @property
    def gradient_partitions(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Partition specs of the rows and the values of `RowGradients`.

        Every device has all row numbers of `RowGradients`. The gradients are split by column, like
        the table.
        """
        return PartitionSpec(), self.partition

    @property
    def shard(self) -> Int[Array, ""]:
        """Index of this device's range of columns."""
        return self.devices.index()

    def look_up(
        self,
        params: Params,
        batch: Occurrences,
        number: Int[Array, ""] | None,
    ) -> Asked[LookupResult]:
        """See `Rows`."""
        none = jnp.zeros((), jnp.int32)
        global_batch = batch.of_all(self.devices)
        columns = self._pooled(params, global_batch.call)
        outputs = [self.devices.rows_of_all(output) for output in columns]
        return outputs, none, none

    def _of_all(self, d_outputs: Sequence[Array]) -> list[Array]:
        """This device's columns of the output gradients of the global batch."""
        return [self.devices.columns_of_all(d_output) for d_output in d_outputs]


class NumberedRows(Rows):
    """Rows of a storage that translates row numbers, for example to slots of a cache."""

    def look_up(
        self,
        params: Params,
        batch: Occurrences,
        number: Int[Array, ""] | None,
    ) -> Asked[LookupResult]:
        """See `Rows`."""
        keys = batch.all_keys()
        ahead = None
        if number is not None:
            occurrences = jnp.ones(keys.shape, jnp.int32)
            ahead = occurrences, number, None

        def pool(vectors: Array, index_of_vector: Array) -> Sequence[Array]:
            return self._pooled(vectors, batch.call.with_ids(index_of_vector))

        pooled, num_unknown = self.storage.pooled(params, keys, batch.call, self.table, pool, ahead)
        return pooled, num_unknown, jnp.zeros((), jnp.int32)

    def update(
        self,
        params: Params,
        slots: SlotTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asked[State]:
        """See `Rows`."""
        batch = batch.of_all(self.devices)
        d_outputs = self._of_all(d_outputs)
        keys = self.storage.keys_after(batch.all_keys(), d_outputs)
        occurrences = jnp.ones(keys.shape, jnp.int32)
        params, slots, rows = self.storage.find(
            params,
            slots,
            keys,
            occurrences,
            self.table,
            step,
        )
        of_rows = Occurrences(self._call_of_rows(batch.call, rows))
        gradients = of_rows.gradients(d_outputs)
        return self._step(params, slots, gradients, step)

    def _call_of_rows(self, call: Call, rows: Int[Array, " nnz"]) -> Call:
        """A copy of `call` that looks up `rows`, which has one row index for each id in `call`."""
        return call.with_ids(rows)


class KeyedRows(NumberedRows):
    """Rows of a storage that finds rows by 64-bit key, on a single device."""

    def row_gradients(
        self,
        batch: Occurrences,
        d_outputs: Sequence[Array],
    ) -> Asked[tuple[Array, Array]]:
        """See `Rows`."""
        all_keys = batch.all_keys()
        occurrences = jnp.ones(all_keys.shape, jnp.int32)
        entry_of, keys, _, counts = entries(all_keys, occurrences)
        rows = named(keys, counts)
        values = self._gradients_of_entries(entry_of, batch, d_outputs)
        return rows, values

    def _call_of_rows(self, call: Call, rows: Int[Array, " nnz"]) -> Call:
        """A copy of `call` that looks up `rows`, with the same weights as in the lookup of keys.

        In the mean of a bag, all keys count, even keys without a row. A kernel call does not count
        ids that are `NO_ROW`. To count all keys, the weight of each key in the mean is computed
        from `call`, and the returned call sums the weighted rows.
        """
        call_of_rows = call.with_ids(rows)
        lists = list(call_of_rows.lists)
        segments = list(call_of_rows.segments)
        for number, ids in enumerate(lists):
            readers = [k for k, segment in enumerate(segments) if segment.list == number]
            combiners = {segments[k].combiner for k in readers}
            if combiners.isdisjoint(("mean", "sqrtn")):
                continue
            bags = entries_of(call, number, 0, NO_ROW)
            _, gains, _ = entry_gains(bags, NO_ROW)
            lists[number] = dataclasses.replace(ids, weights=gains)
            for k in readers:
                segments[k] = segments[k]._replace(combiner="sum")
        return Call(tuple(lists), tuple(segments))


class TrainRows(NumberedRows):
    """Rows that are computed from a few parameters, such as tensor-train cores.

    Every device has all parameters, and every step updates all of them. Each device computes the
    gradients of its samples. The sum of the gradients over all devices has the same bits on every
    device, so all copies of the parameters stay equal.
    """

    def update(
        self,
        params: Params,
        slots: SlotTree,
        batch: Occurrences,
        d_outputs: Sequence[Array],
        step: Step,
    ) -> Asked[State]:
        """See `Rows`."""
        gradients = batch.gradients(d_outputs)
        return self._step_all(params, slots, gradients, step)

    def apply(
        self,
        params: Params,
        slots: SlotTree,
        rows: Array,
        values: Array,
        step: Step,
    ) -> State:
        """See `Rows`."""
        # On every device, `values` has the gradients of all rows, and `_step_all` adds up the
        # gradients of all devices. Each device passes a different part of the rows to `_step_all`,
        # so that no gradient is counted twice.
        device_of_row = jnp.arange(rows.shape[0]) % self.devices.num_devices
        rows_here = jnp.where(device_of_row == self.devices.index(), rows, NO_ROW)
        gradients = CallGradients.of_rows(rows_here, values)
        return self._step_all(params, slots, gradients, step)

    def _step_all(
        self,
        params: Params,
        slots: SlotTree,
        gradients: CallGradients,
        step: Step,
    ) -> State:
        """Updates all parameters, and returns new parameters and slots.

        `gradients` has the gradients of this device. The update uses the sum of the gradients over
        all devices.
        """
        gradients_here = self.storage.gradients(params, gradients, self.table)
        total = self.devices.total(gradients_here)
        rounded = self._rounded(step)
        return self.storage.step_all(params, slots, total, self.table, rounded)
