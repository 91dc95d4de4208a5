"""The engine of a collection: what a single device does with its share, as functions of everything.

The collection checks what users give and hands canonical batches over; stacks do the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from rsembed.bags import Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.collection.rows import LookupResult, Occurrences, Rows
from rsembed.collection.stack import Activations, Batch, ByName, Stack
from rsembed.kernels import api
from rsembed.keys import as_keys, num_invalid
from rsembed.parallel.exchange import Asked, together
from rsembed.specs import FeatureSpec


class LookupStatistics(NamedTuple):
    """Counts of one lookup, over the global batch.

    Args:
      num_ids: ids that contributed, per feature.
      num_out_of_range: ids outside their table, which contributed nothing, per feature.
      num_unknown: per stack of tables with keys, distinct keys without a row, by device that looked for them. Ahead of
        a step, those that it is going to give a row.
      num_rounds: per stack, rounds in which devices asked the owners of rows; 0 where nothing is asked.
    """

    num_ids: dict[str, Int[Array, ""]]
    num_out_of_range: dict[str, Int[Array, ""]]
    num_unknown: dict[str, Int[Array, " devices"]]
    num_rounds: dict[str, Int[Array, ""]]


class Engine:
    """Init, lookup, row gradients and steps of all stacks, each one function on every device of a mesh.

    All stacks ask their owners together.

    Args:
      features: by name.
      stacks: by name.
      devices: the mesh.
      implementation: "reference" runs nothing but plain JAX, in storages and exchanges as well. Others say
        only how rows are pooled and stepped, which each stack knows.

    Attributes:
      init: `(key)` to tables and slots of all stacks.
      row_gradients: `(batch, d_outputs)` to rows and values of `RowGradients`, by stack.
      squared_norm: `(batch, d_outputs)` to the sum of the squares of the values of `row_gradients`, by stack, on one
        device that has all rows in arrays.
      apply: `(tables, slots, gradients, steps)` to tables and slots after a step with the gradients of distinct rows.
      update: `(tables, slots, batch, d_outputs, steps)` to tables and slots after a step with the gradients of a batch.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        stacks: Mapping[str, Stack],
        devices: Devices,
        implementation: str | None = None,
    ):
        self.features, self.stacks, self.devices = features, stacks, devices
        self._has_all_rows = all(stack.storage.ids_are_rows for stack in stacks.values())
        everywhere, split = PartitionSpec(), devices.split
        state = {name: stack.partition for name, stack in stacks.items()}
        gradients = {name: stack.gradient_partitions for name, stack in stacks.items()}

        def on_each(function: Callable[..., PyTree], partitions: PyTree, results: PyTree) -> Callable[..., PyTree]:
            @functools.wraps(function)
            def traced(*args: PyTree) -> PyTree:
                with api.by_default("reference" if implementation == "reference" else None):
                    return function(*args)

            return jax.jit(devices.on_each(traced, partitions, results))

        self.init = on_each(self._init, (everywhere,), (state, state))
        self._look_up = on_each(self._lookup, (state, everywhere, split), (split, everywhere))
        self.row_gradients = on_each(self._row_gradients, (split, split), gradients)
        self.squared_norm = on_each(self._squared_norm, (split, split), everywhere)
        self.apply = on_each(self._apply, (state, state, gradients, everywhere), (state, state))
        self.update = on_each(self._update, (state, state, split, split, everywhere), (state, state))

    def lookup(
        self, tables: ByName, batch: Batch, numbers: ByName | None = None
    ) -> tuple[Activations, LookupStatistics]:
        """Activations of all features, and counts; ahead of the steps of these numbers, if there are any."""
        if self._has_all_rows:
            numbers = None  # so that one program serves both
        activations, statistics = self._look_up(tables, numbers, batch)
        return {name: activations[name] for name in self.features}, statistics

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...] | None:
        """How rows and values of `RowGradients` are split, by stack; None on one device."""
        if self.devices.mesh is None:
            return None
        partitions = sorted((name, *stack.gradient_partitions) for name, stack in self.stacks.items())
        sharding = self.devices.sharding
        return tuple((name, sharding(rows), sharding(values)) for name, rows, values in partitions)

    # On one device

    def _init(self, key: PRNGKeyArray) -> tuple[ByName, ByName]:
        return unzip_dict({name: stack.rows.init(key) for name, stack in self.stacks.items()})

    def _lookup(self, tables: ByName, numbers: ByName | None, batch: Batch) -> tuple[Activations, LookupStatistics]:
        bags = {name: as_bags(value, feature=name) for name, value in batch.items()}
        activations: Activations = {}
        unknown, rounds = dict[str, Array](), dict[str, Array]()
        asked: list[Asked[LookupResult]] = []
        for name, stack in self.stacks.items():
            number = None if numbers is None else numbers[name]
            asked.append(stack.rows.look_up(tables[name], stack.occurrences(bags), number))
        for (name, stack), found in zip(self.stacks.items(), together(asked, self.devices.axes), strict=True):
            outputs, num_unknown, rounds[name] = found
            if stack.storage.takes_keys:
                unknown[name] = self.devices.gather(num_unknown[None])
            for feature, output in zip(stack.layout.stack.features, outputs, strict=True):
                activations[feature.name] = to_activation(self.features[feature.name], bags[feature.name], output)
        num_ids, num_out_of_range = self.devices.total(self._counts(bags))
        return activations, LookupStatistics(num_ids, num_out_of_range, unknown, rounds)

    def _counts(self, bags: Mapping[str, Bags]) -> tuple[dict[str, Array], dict[str, Array]]:
        num_ids, num_out_of_range, with_rows = {}, {}, dict[str, Bags]()
        for name, own in bags.items():
            storage = self.features[name].table_spec.storage
            if storage is None or storage.key_dtype is None:
                with_rows[name] = own
                continue
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < own.offsets[-1])
            num_ids[name], num_out_of_range[name] = jnp.sum(keys.is_key, dtype=jnp.int32), num_invalid(keys)
        counts = api.count_ids(
            [jnp.asarray(own.ids) for own in with_rows.values()],
            [jnp.asarray(own.offsets) for own in with_rows.values()],
            [self.features[name].table_spec.vocabulary_size for name in with_rows],
        )
        for name, count in zip(with_rows, counts, strict=True):
            num_ids[name], num_out_of_range[name] = count
        return num_ids, num_out_of_range

    def _row_gradients(self, batch: Batch, d_outputs: ByName) -> dict[str, tuple[Array, Array]]:
        return self._backward(batch, d_outputs, lambda _, rows, *own: rows.row_gradients(*own))

    def _squared_norm(self, batch: Batch, d_outputs: ByName) -> dict[str, Array]:
        return self._backward(batch, d_outputs, lambda _, rows, *own: rows.squared_norm(*own))

    def _apply(
        self, tables: ByName, slots: ByName, gradients: Mapping[str, tuple[Array, Array]], steps: ByName
    ) -> tuple[ByName, ByName]:
        stepped = {
            name: stack.rows.apply(tables[name], slots[name], *gradients[name], steps[name])
            for name, stack in self.stacks.items()
        }
        return unzip_dict(stepped)

    def _update(
        self, tables: ByName, slots: ByName, batch: Batch, d_outputs: ByName, steps: ByName
    ) -> tuple[ByName, ByName]:
        def update(name: str, rows: Rows, own: Occurrences, gradients: list[Array]) -> Asked[tuple[PyTree, PyTree]]:
            return rows.update(tables[name], slots[name], own, gradients, steps[name])

        return unzip_dict(self._backward(batch, d_outputs, update))

    def _backward(self, batch: Batch, d_outputs: ByName, function: Callable[..., Asked[PyTree]]) -> ByName:
        """Results of a function of each stack's name, rows, occurrences in the batch, and gradients of its outputs."""
        bags, asked = {name: as_bags(value, feature=name) for name, value in batch.items()}, []
        for name, stack in self.stacks.items():
            own = [d_outputs[feature.name] for feature in stack.layout.stack.features]
            asked.append(function(name, stack.rows, stack.occurrences(bags), own))
        return dict(zip(self.stacks, together(asked, self.devices.axes), strict=True))


def unzip_dict(pairs: Mapping[str, tuple[PyTree, PyTree]]) -> tuple[ByName, ByName]:
    """A dictionary of pairs as a pair of dictionaries."""
    return {name: first for name, (first, _) in pairs.items()}, {name: second for name, (_, second) in pairs.items()}


def to_activation(feature: FeatureSpec, bags: Bags, output: Array) -> Array:
    """Pooled rows `[outputs, dim]` of a feature in the shape of its activations."""
    output = output[:, : feature.output_dim] if feature.output_dim < output.shape[1] else output
    if feature.output_shape is not None:
        return output.reshape(-1, *feature.output_shape[1:])
    if feature.pooling == "none" and bags.dense_shape is not None:
        return output.reshape(*bags.dense_shape, output.shape[1])
    return output
