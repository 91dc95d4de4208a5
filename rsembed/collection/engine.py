"""The engine of a collection: what a single device does with its share, as functions of everything.

The collection checks what users give and hands canonical batches over; stacks do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.bags import Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.collection.stack import Stack
from rsembed.collection.state import Activations, Batch, LookupStatistics, Traffic
from rsembed.kernels import api
from rsembed.keys import as_keys, num_invalid
from rsembed.parallel import Asking, together
from rsembed.specs import FeatureSpec

ByStack = dict[str, Any]


class Engine:
    """Init, lookup, row gradients and steps of all stacks, each one function on every device of a mesh.

    Args:
      features: by name.
      stacks: by name.
      devices: the mesh.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        self.features, self.stacks, self.devices = features, stacks, devices
        everywhere, split = PartitionSpec(), devices.split
        state = {name: stack.partition for name, stack in stacks.items()}
        gradients = {name: stack.gradient_partitions for name, stack in stacks.items()}
        has_homes = any(not stack.is_dense for stack in stacks.values())

        def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
            return jax.jit(devices.on_each(function, in_specs, out_specs))

        self.init = on_each(self._init, everywhere, (state, state))
        self.lookup = on_each(partial(self._lookup, number=None), (state, split), (split, everywhere))
        self.look_ahead: Callable[..., Any] = lambda tables, batch, number: self.lookup(tables, batch)
        """A lookup whose gradients will be stepped, as the step of this number."""
        if has_homes:
            self.look_ahead = on_each(self._lookup, (state, split, everywhere), (split, everywhere))
        self.row_gradients = on_each(self._row_gradients, (split, split), gradients)
        self.apply = on_each(self._apply, (state, state, gradients, everywhere), (state, state))
        self.update = on_each(self._update, (state, state, split, split, everywhere), (state, state))

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...] | None:
        """How rows and values of `RowGradients` are split, by stack; None on one device."""
        if self.devices.mesh is None:
            return None
        partitions = sorted((name, *stack.gradient_partitions) for name, stack in self.stacks.items())
        sharding = self.devices.sharding
        return tuple((name, sharding(rows), sharding(values)) for name, rows, values in partitions)

    # On one device

    def _init(self, key: PRNGKeyArray) -> tuple[ByStack, ByStack]:
        return two_dicts({name: stack.rows.init(key) for name, stack in self.stacks.items()})

    def _lookup(
        self, tables: ByStack, batch: Batch, number: Int[Array, ""] | None
    ) -> tuple[Activations, LookupStatistics]:
        bags = all_as_bags(batch)
        activations: Activations = {}
        traffic: dict[str, Traffic] = {}
        found = self._together(lambda name, s: s.rows.look_up(tables[name], s.occurrences(bags), number))
        for name, stack in self.stacks.items():
            outputs, num_unknown, traffic[name] = found[name]
            if stack.home.takes_keys:
                traffic[name] = traffic[name]._replace(num_unknown=self.devices.total(num_unknown))
            for feature, output in zip(stack.layout.stack.features, outputs, strict=True):
                activations[feature.name] = _to_activation(self.features[feature.name], bags[feature.name], output)
        activations = {name: activations[name] for name in self.features}
        num_ids, num_out_of_range = self.devices.total(self._counts(bags))
        return activations, LookupStatistics(num_ids, num_out_of_range, traffic)

    def _counts(self, bags: Mapping[str, Bags]) -> tuple[dict[str, Array], dict[str, Array]]:
        num_ids, num_out_of_range = {}, {}
        tables = {name: self.features[name].table_spec for name in bags}
        with_rows = [name for name, table in tables.items() if table.storage is None or table.storage.key_dtype is None]
        counts = api.count_ids(
            [jnp.asarray(bags[name].ids) for name in with_rows],
            [jnp.asarray(bags[name].offsets) for name in with_rows],
            [tables[name].vocabulary_size for name in with_rows],
        )
        for name, (num_inside, num_outside) in zip(with_rows, counts, strict=True):
            num_ids[name], num_out_of_range[name] = num_inside, num_outside
        for name in sorted(set(bags) - set(with_rows)):
            own = bags[name]
            keys = as_keys(own.ids).only(jnp.arange(own.ids.shape[0], dtype=jnp.int32) < own.offsets[-1])
            num_ids[name], num_out_of_range[name] = jnp.sum(keys.is_key, dtype=jnp.int32), num_invalid(keys)
        return num_ids, num_out_of_range

    def _row_gradients(self, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        bags = all_as_bags(batch)
        return self._together(lambda _, s: s.rows.row_gradients(s.occurrences(bags), _of_features(s, d_outputs)))

    def _apply(
        self, tables: ByStack, slots: ByStack, gradients: Mapping[str, tuple[Array, Array]], steps: ByStack
    ) -> tuple[ByStack, ByStack]:
        stepped = {
            name: stack.rows.apply(tables[name], slots[name], *gradients[name], steps[name])
            for name, stack in self.stacks.items()
        }
        return two_dicts(stepped)

    def _update(
        self, tables: ByStack, slots: ByStack, batch: Batch, d_outputs: Mapping[str, Array], steps: ByStack
    ) -> tuple[ByStack, ByStack]:
        bags = all_as_bags(batch)

        def update(name: str, stack: Stack) -> Asking[tuple[Any, Any]]:
            own = _of_features(stack, d_outputs)
            return stack.rows.update(tables[name], slots[name], stack.occurrences(bags), own, steps[name])

        return two_dicts(self._together(update))

    def _together(self, function: Callable[[str, Stack], Asking[Any]]) -> ByStack:
        """Results of a function for all stacks, whose questions to other devices travel together."""
        askings = [function(name, stack) for name, stack in self.stacks.items()]
        return dict(zip(self.stacks, together(askings, self.devices.axes), strict=True))


def all_as_bags(batch: Batch) -> dict[str, Bags]:
    """A batch of any form as bags."""
    return {name: as_bags(value, feature=name) for name, value in batch.items()}


def two_dicts(pairs: Mapping[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dictionary of pairs as a pair of dictionaries."""
    return {name: first for name, (first, _) in pairs.items()}, {name: second for name, (_, second) in pairs.items()}


def _of_features(stack: Stack, d_outputs: Mapping[str, Array]) -> list[Array]:
    return [d_outputs[feature.name] for feature in stack.layout.stack.features]


def _to_activation(feature: FeatureSpec, bags: Bags, output: Array) -> Array:
    output = output[:, : feature.output_dim] if feature.output_dim < output.shape[1] else output
    if feature.output_shape is not None:
        return output.reshape(-1, *feature.output_shape[1:])
    if feature.table_spec.combiner == "none" and bags.dense_shape is not None:
        return output.reshape(*bags.dense_shape, output.shape[1])
    return output
