"""The engine of a collection: compiled functions that initialize, look up and update all tables.

The functions take global arrays and run on every device of a mesh. `EmbeddingCollection` checks
batches before it passes them to the engine. For each stack, the engine calls the methods of `Stack`
and `Rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed.bags import PAD_ID
from rsembed.collection.devices import Devices
from rsembed.collection.occurrences import Occurrences, joined_calls
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.rows import ArrayRows, LookupResult, Rows
from rsembed.collection.stack import (
    Activations,
    ArrayStack,
    Batch,
    ByName,
    Stack,
)
from rsembed.kernels import api
from rsembed.kernels.contract import Call
from rsembed.keys import Keys, is_invalid
from rsembed.parallel.exchange import Asked, Result, together
from rsembed.specs import FeatureSpec
from rsembed.storage.dense_rows import DenseRows
from rsembed.storage.initial_states import NewStack, initial_states
from rsembed.storage.protocol import State


class LookupStatistics(NamedTuple):
    """Counts of one lookup, over the global batch.

    Args:
      num_ids: per feature, number of ids that contributed.
      num_out_of_range: per feature, number of ids outside the table, which contributed nothing.
      num_unknown: per stack of keyed tables, an array with one count per device: the distinct keys
        in the batch that the device owns but has no row for. If a step follows the lookup, only
        keys that the step admits are counted.
      num_rounds: per stack, number of exchange rounds. 0 if rows are not exchanged.
    """

    num_ids: dict[str, Int[Array, ""]]
    num_out_of_range: dict[str, Int[Array, ""]]
    num_unknown: dict[str, Int[Array, " devices"]]
    num_rounds: dict[str, Int[Array, ""]]


class Engine:
    """Compiled functions that initialize, look up and update all stacks of a collection.

    Each function runs on every device of a mesh. The stacks share exchanges of rows: one exchange
    carries the requests of all stacks.

    A batch is a mapping from features to ids or, on one device, a kernel `Call` with one output.
    Table `k` of the `Call` is the array of the `k`-th stack, the output of the `Call` takes the
    place of the activations, and `d_outputs` is the gradient of the output.

    Args:
      features: features by name.
      stacks: stacks by name.
      devices: devices of the mesh.
      implementation: with "reference", the engine runs plain JAX everywhere, including storages and
        exchanges. The engine ignores every implementation except "reference", because each stack
        already passes its implementation to the kernels.
      side_by_side: if True, a lookup returns one array `[batch, sum of dims]` with the concatenated
        activations of all features, and `d_outputs` is an array of this shape. If False, the
        default, activations and `d_outputs` are dictionaries by feature.

    Attributes:
      init: function `(key) -> (tables, slots)` that initializes the tables and slots of all stacks.
      row_gradients: function `(batch, d_outputs) -> (rows, values)`, where `rows` and `values` are
        the fields of `RowGradients`.
      squared_norm: function `(batch, d_outputs) -> {stack: sum of squares of the row gradients}`.
        `squared_norm` works only on one device, and only if the rows of every stack are in one
        array.
      apply: function `(tables, slots, rows, values, steps) -> (tables, slots)` that applies one
        optimizer step, with the gradients `values` of the distinct rows `rows`.
      update: function `(tables, slots, batch, d_outputs, steps) -> (tables, slots)` that applies
        one optimizer step, with the gradients of a batch.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        stacks: Mapping[str, Stack],
        devices: Devices,
        implementation: str | None = None,
        *,
        side_by_side: bool = False,
    ):
        self.features = features
        self.stacks = stacks
        self.devices = devices
        self.side_by_side = side_by_side
        self._has_all_rows = all(isinstance(stack, ArrayStack) for stack in stacks.values())
        everywhere = PartitionSpec()
        split = devices.split
        default_implementation = None
        if implementation == "reference":
            default_implementation = "reference"
        state = {}
        gradient_partitions = {}
        for name, stack in stacks.items():
            state[name] = stack.partition
            gradient_partitions[name] = stack.rows.gradient_partitions
        rows, values = unzip_dict(gradient_partitions)

        def on_each(
            function: Callable[..., PyTree],
            partitions: PyTree,
            results: PyTree,
        ) -> Callable[..., PyTree]:
            @functools.wraps(function)
            def traced(*args: PyTree) -> PyTree:
                with api.by_default(default_implementation):
                    return function(*args)

            return jax.jit(devices.on_each(traced, partitions, results))

        self.init = on_each(
            self._init,
            (everywhere,),
            (state, state),
        )
        self._look_up = on_each(
            self._lookup,
            (state, everywhere, split),
            (split, everywhere),
        )
        self.row_gradients = on_each(
            self._row_gradients,
            (split, split),
            (rows, values),
        )
        self.squared_norm = on_each(
            self._squared_norm,
            (split, split),
            everywhere,
        )
        self.apply = on_each(
            self._apply,
            (state, state, rows, values, everywhere),
            (state, state),
        )
        self.update = on_each(
            self._update,
            (state, state, split, split, everywhere),
            (state, state),
        )

    def lookup(
        self,
        tables: ByName,
        batch: Batch | Call,
        numbers: ByName | None = None,
    ) -> tuple[PyTree, LookupStatistics]:
        """Activations of all features, and statistics of the lookup.

        Args:
          tables: the field `tables` of the state.
          batch: prepared global batch, or a `Call` on one device.
          numbers: by stack, index of the step that follows the lookup. None: no step follows.
        """
        if numbers is None or self._has_all_rows:
            # A lookup in an `ArrayStack` does not depend on the next step. Without the index of the
            # step, `lookup` and `lookup_vjp` of a collection share one compiled program.
            numbers = dict.fromkeys(self.stacks)
        activations, statistics = self._look_up(tables, numbers, batch)
        if isinstance(activations, dict):
            activations = {name: activations[name] for name in self.features}
        return activations, statistics

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...] | None:
        """Name of each stack, and shardings of the stack's rows and values in `RowGradients`.

        On a single device, the result is None.
        """
        if self.devices.mesh is None:
            return None
        shardings = []
        for name in sorted(self.stacks):
            rows, values = self.stacks[name].rows.gradient_partitions
            sharding_of_rows = self.devices.sharding(rows)
            sharding_of_values = self.devices.sharding(values)
            shardings.append((name, sharding_of_rows, sharding_of_values))
        return tuple(shardings)

    # Methods that run on each device

    def _looked_up_together(self, tables: ByName, batch: PreparedBatch) -> dict[str, LookupResult]:
        """Lookup results of all stacks that one kernel call can look up, one call per dtype.

        On a single device, one call looks up all stacks with rows in arrays of one dtype, without
        quantization. On several devices, the result is empty.
        """
        groups: dict[str, list[str]] = {}
        for name, stack in self.stacks.items():
            is_plain = stack.table.quantization_config is None and isinstance(stack.rows, ArrayRows)
            if is_plain and self.devices.num_devices == 1:
                groups.setdefault(stack.table.dtype, []).append(name)
        results: dict[str, LookupResult] = {}
        none = jnp.zeros((), jnp.int32)
        for names in groups.values():
            arrays = [tables[name] for name in names]
            calls = [self.stacks[name].occurrences(batch).call for name in names]
            implementation = self.stacks[names[0]].rows.implementation
            outputs = api.lookup(arrays, joined_calls(calls), implementation=implementation)
            first = 0
            for name, call in zip(names, calls, strict=True):
                last = first + len(call.segments)
                results[name] = outputs[first:last], none, none
                first = last
        return results

    def _init(self, key: PRNGKeyArray) -> tuple[ByName, ByName]:
        states: dict[str, State] = {}
        dense: dict[str, NewStack] = {}
        for name, stack in self.stacks.items():
            rows = stack.rows
            if isinstance(rows.storage, DenseRows):
                dense[name] = rows.storage.new_stack(rows.table, rows.shard)
            else:
                states[name] = rows.init(key)
        dense_states = initial_states(list(dense.values()), key)
        states |= dict(zip(dense, dense_states, strict=True))
        return unzip_dict(states)

    def _lookup(
        self,
        tables: ByName,
        numbers: ByName,
        batch: Batch | Call,
    ) -> tuple[PyTree, LookupStatistics]:
        if isinstance(batch, Call):
            arrays = [tables[name] for name in self.stacks]
            (output,) = api.lookup(arrays, batch)
            return output, LookupStatistics({}, {}, {}, {})
        batch = PreparedBatch.of(batch)
        activations: Activations = {}
        unknown: dict[str, Array] = {}
        rounds: dict[str, Array] = {}
        asked: dict[str, Asked[LookupResult]] = dict(self._looked_up_together(tables, batch))
        for name, stack in self.stacks.items():
            if name not in asked:
                occurrences = stack.occurrences(batch)
                asked[name] = stack.rows.look_up(tables[name], occurrences, numbers[name])
        for name, result in self._answered(asked).items():
            stack = self.stacks[name]
            outputs, num_unknown, rounds[name] = result
            if stack.storage.takes_keys:
                unknown[name] = self.devices.gather(num_unknown[None])
            features = stack.layout.stack.features
            for feature, output in zip(features, outputs, strict=True):
                spec = self.features[feature.name]
                dense_shape = None
                if spec.pooling == "none":
                    dense_shape = batch.bags(feature.name).dense_shape
                activations[feature.name] = to_activation(spec, dense_shape, output)
        num_ids, num_out_of_range = self.devices.total(self._counts(batch))
        statistics = LookupStatistics(num_ids, num_out_of_range, unknown, rounds)
        if self.side_by_side:
            columns = [activations[name] for name in self.features]
            return jnp.concatenate(columns, axis=1), statistics
        return activations, statistics

    def _counts(self, batch: PreparedBatch) -> tuple[dict[str, Array], dict[str, Array]]:
        """For each feature, number of ids that contribute, and number of ids out of range."""
        ids = []
        offsets = []
        sizes = []
        for name, feature in self.features.items():
            bags = batch.bags(name)
            size = feature.table_spec.vocabulary_size
            ids_of_feature = bags.ids
            if isinstance(ids_of_feature, Keys):
                ids_of_feature = _countable(ids_of_feature)
                size = 1
            ids.append(jnp.asarray(ids_of_feature))
            offsets.append(jnp.asarray(bags.offsets))
            sizes.append(size)
        counts = api.count_ids(ids, offsets, sizes)
        return unzip_dict(dict(zip(self.features, counts, strict=True)))

    def _row_gradients(
        self,
        batch: Batch | Call,
        d_outputs: PyTree,
    ) -> tuple[ByName, ByName]:
        asked: dict[str, Asked[tuple[Array, Array]]] = {}
        for name, rows, occurrences, gradients in self._parts(batch, d_outputs):
            asked[name] = rows.row_gradients(occurrences, gradients)
        return unzip_dict(self._answered(asked))

    def _squared_norm(self, batch: Batch | Call, d_outputs: PyTree) -> dict[str, Array]:
        norms = {}
        for name, rows, occurrences, gradients in self._parts(batch, d_outputs):
            norms[name] = cast(ArrayRows, rows).squared_norm(occurrences, gradients)
        return norms

    def _apply(
        self,
        tables: ByName,
        slots: ByName,
        rows: ByName,
        values: ByName,
        steps: ByName,
    ) -> tuple[ByName, ByName]:
        stepped = {}
        for name, stack in self.stacks.items():
            stepped[name] = stack.rows.apply(
                tables[name],
                slots[name],
                rows[name],
                values[name],
                steps[name],
            )
        return unzip_dict(stepped)

    def _update(
        self,
        tables: ByName,
        slots: ByName,
        batch: Batch | Call,
        d_outputs: PyTree,
        steps: ByName,
    ) -> tuple[ByName, ByName]:
        asked: dict[str, Asked[State]] = {}
        for name, rows, occurrences, gradients in self._parts(batch, d_outputs):
            asked[name] = rows.update(
                tables[name],
                slots[name],
                occurrences,
                gradients,
                steps[name],
            )
        return unzip_dict(self._answered(asked))

    def _parts(
        self,
        batch: Batch | Call,
        d_outputs: PyTree,
    ) -> Iterator[tuple[str, Rows, Occurrences, list[Array]]]:
        """Yields the name, `Rows`, ids and output gradients of every stack.

        Args:
          batch: a batch or a `Call`, as described in `Engine`.
          d_outputs: gradients of the activations of all features, or of the output of a `Call`.
        """
        if isinstance(batch, Call):
            dims = tuple(stack.table.embedding_dim for stack in self.stacks.values())
            for number, (name, stack) in enumerate(self.stacks.items()):
                yield name, stack.rows, Occurrences(batch, None, number, dims), [d_outputs]
            return
        batch = PreparedBatch.of(batch)
        if self.side_by_side:
            d_outputs = self._by_feature(d_outputs)
        for name, stack in self.stacks.items():
            gradients = [d_outputs[feature.name] for feature in stack.layout.stack.features]
            yield name, stack.rows, stack.occurrences(batch), gradients

    def _answered(self, asked: Mapping[str, Asked[Result]]) -> dict[str, Result]:
        """Results of all stacks by stack name, after shared exchanges of rows."""
        results = together(list(asked.values()), self.devices.axes)
        return dict(zip(asked, results, strict=True))

    def _by_feature(
        self, d_output: Float[Array, "batch dims"]
    ) -> dict[str, Float[Array, "batch dim"]]:
        """Splits an array with the columns of all features into one array per feature."""
        columns = {}
        first = 0
        for name, feature in self.features.items():
            last = first + feature.table_spec.embedding_dim
            columns[name] = d_output[:, first:last]
            first = last
        return columns


def _countable(keys: Keys) -> Int[Array, " nnz"]:
    """Ids of a table with one row: 0 for a key, 1 for a key out of range, `PAD_ID` for padding."""
    number = jnp.where(is_invalid(keys), 1, PAD_ID)
    return jnp.where(keys.is_key, 0, number)


def unzip_dict(pairs: Mapping[str, tuple[PyTree, PyTree]]) -> tuple[ByName, ByName]:
    """Splits a dictionary of pairs into a pair of dictionaries."""
    all_first = {}
    all_second = {}
    for name, (first, second) in pairs.items():
        all_first[name] = first
        all_second[name] = second
    return all_first, all_second


def to_activation(
    feature: FeatureSpec,
    dense_shape: tuple[Any, ...] | None,
    output: Array,
) -> Array:
    """Reshapes the pooled rows of a feature to the shape of its activations.

    Args:
      feature: spec of the feature.
      dense_shape: shape of the array of ids, for a feature with combiner `none`. None: the ids are
        ragged bags, or the feature has a combiner other than `none`.
      output: pooled rows `[outputs, dim]`. Only the first `feature.output_dim` columns are kept.
    """
    if feature.output_dim < output.shape[1]:
        output = output[:, : feature.output_dim]
    if feature.output_shape is not None:
        return output.reshape(-1, *feature.output_shape[1:])
    if feature.pooling == "none" and dense_shape is not None:
        return output.reshape(*dense_shape, output.shape[1])
    return output
