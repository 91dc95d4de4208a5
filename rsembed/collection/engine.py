"""The engine of a collection: what a single device does with its share, as functions of everything.

The collection checks what users give and hands canonical batches over; stacks do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from rsembed.bags import Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.collection.rows import LookupResult
from rsembed.collection.stack import Stack
from rsembed.collection.state import Activations, Batch, LookupStatistics, Traffic
from rsembed.kernels import api
from rsembed.keys import as_keys, num_invalid
from rsembed.parallel import Asking, together
from rsembed.specs import FeatureSpec

ByStack = dict[str, Any]
STACKS_TOGETHER = 25
"""How many stacks ask together on a mesh."""


class Engine:
    """Init, lookup, row gradients and steps of all stacks, by groups.

    Stacks of a group ask their owners together, and each function of a group is one on every device of a mesh. What XLA
    does to let such a function run on a mesh grows with the square of the arrays that it takes: with 100 tables of keys
    it took most of the time of compiling.

    Args:
      features: by name.
      stacks: by name.
      devices: the mesh.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        self.features, self.stacks, self.devices = features, stacks, devices
        names = list(stacks)
        size = STACKS_TOGETHER if devices.num_devices > 1 else max(len(names), 1)
        self._groups = [
            Group(features, {name: stacks[name] for name in names[first : first + size]}, devices)
            for first in range(0, max(len(names), 1), size)
        ]

    def init(self, key: PRNGKeyArray) -> tuple[ByStack, ByStack]:
        """Tables and slots of all stacks."""
        return _union([group.init(key) for group in self._groups])

    def lookup(self, tables: ByStack, batch: Batch) -> tuple[Activations, LookupStatistics]:
        """Activations of all features, and what travelled."""
        return self._in_order(group.lookup(group.own(tables), group.of_features(batch)) for group in self._groups)

    def look_ahead(self, tables: ByStack, batch: Batch, numbers: ByStack) -> tuple[Activations, LookupStatistics]:
        """A lookup whose gradients will be stepped, in the step of this number."""
        return self._in_order(
            group.look_ahead(group.own(tables), group.of_features(batch), group.own(numbers)) for group in self._groups
        )

    def weight_gradients(self, tables: ByStack, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients of the weights of all ids of a batch, whether it has some or counts each once, by feature."""
        return _union(
            [
                group.weight_gradients(group.own(tables), *map(group.of_features, (batch, d_outputs)))
                for group in self._groups
            ]
        )

    def row_gradients(self, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """Rows and values of `RowGradients`, by stack."""
        return _union(
            [group.row_gradients(group.of_features(batch), group.of_features(d_outputs)) for group in self._groups]
        )

    def apply(self, tables: ByStack, slots: ByStack, gradients: ByStack, steps: ByStack) -> tuple[ByStack, ByStack]:
        """Tables and slots after a step with the gradients of distinct rows."""
        return _union([group.apply(*map(group.own, (tables, slots, gradients, steps))) for group in self._groups])

    def update(
        self, tables: ByStack, slots: ByStack, batch: Batch, d_outputs: Mapping[str, Array], steps: ByStack
    ) -> tuple[ByStack, ByStack]:
        """Tables and slots after a step with the gradients of a batch."""
        return _union(
            [
                group.update(
                    *map(group.own, (tables, slots)), *map(group.of_features, (batch, d_outputs)), group.own(steps)
                )
                for group in self._groups
            ]
        )

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...] | None:
        """How rows and values of `RowGradients` are split, by stack; None on one device."""
        if self.devices.mesh is None:
            return None
        partitions = sorted((name, *stack.gradient_partitions) for name, stack in self.stacks.items())
        sharding = self.devices.sharding
        return tuple((name, sharding(rows), sharding(values)) for name, rows, values in partitions)

    def _in_order(self, found: Iterable[tuple[Activations, LookupStatistics]]) -> tuple[Activations, LookupStatistics]:
        activations, statistics = _union(list(found))
        return {name: activations[name] for name in self.features}, statistics


class Group:
    """The functions of some stacks, each one function on every device of a mesh.

    Args:
      features: by name; those of other stacks are left out.
      stacks: by name.
      devices: the mesh.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        own = {feature.name for stack in stacks.values() for feature in stack.layout.stack.features}
        features = {name: feature for name, feature in features.items() if name in own}
        self.features, self.stacks, self.devices = features, stacks, devices
        everywhere, split = PartitionSpec(), devices.split
        state = {name: stack.partition for name, stack in stacks.items()}
        gradients = {name: stack.gradient_partitions for name, stack in stacks.items()}
        has_homes = any(not stack.home.ids_are_rows for stack in stacks.values())

        def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
            return jax.jit(devices.on_each(function, in_specs, out_specs))

        self.init = on_each(self._init, everywhere, (state, state))
        self.lookup = on_each(partial(self._lookup, numbers=None), (state, split), (split, everywhere))
        self.look_ahead: Callable[..., Any] = lambda tables, batch, numbers: self.lookup(tables, batch)
        """A lookup whose gradients will be stepped, in the step of this number."""
        if has_homes:
            self.look_ahead = on_each(self._lookup, (state, split, everywhere), (split, everywhere))
        self.weight_gradients = on_each(self._weight_gradients, (state, split, split), split)
        self.row_gradients = on_each(self._row_gradients, (split, split), gradients)
        self.apply = on_each(self._apply, (state, state, gradients, everywhere), (state, state))
        self.update = on_each(self._update, (state, state, split, split, everywhere), (state, state))

    def own(self, by_stack: Mapping[str, Any]) -> ByStack:
        """The entries of a dictionary by stack that belong to these stacks."""
        return {name: by_stack[name] for name in self.stacks}

    def of_features(self, by_feature: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a dictionary by feature that belong to the features of these stacks."""
        return {name: by_feature[name] for name in self.features}

    # On one device

    def _init(self, key: PRNGKeyArray) -> tuple[ByStack, ByStack]:
        return two_dicts({name: stack.rows.init(key) for name, stack in self.stacks.items()})

    def _lookup(self, tables: ByStack, batch: Batch, numbers: ByStack | None) -> tuple[Activations, LookupStatistics]:
        bags = all_as_bags(batch)
        activations: Activations = {}
        traffic: dict[str, Traffic] = {}

        def look_up(name: str, stack: Stack) -> Asking[LookupResult]:
            return stack.rows.look_up(tables[name], stack.occurrences(bags), None if numbers is None else numbers[name])

        found = self._together(look_up)
        for name, stack in self.stacks.items():
            outputs, num_unknown, traffic[name] = found[name]
            if stack.home.takes_keys:
                traffic[name] = traffic[name]._replace(num_unknown=self.devices.gather(num_unknown[None]))
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

    def _weight_gradients(
        self, tables: ByStack, batch: Batch, d_outputs: Mapping[str, Array]
    ) -> dict[str, Float[Array, " nnz"]]:
        bags = all_as_bags(batch)

        def of_stack(name: str, stack: Stack) -> Asking[list[Array]]:
            own = _of_features(stack, d_outputs)
            return stack.rows.weight_gradients(tables[name], stack.occurrences(bags), own)

        found = self._together(of_stack)
        return {
            feature.name: gradient
            for name, stack in self.stacks.items()
            for feature, gradient in zip(stack.layout.stack.features, found[name], strict=True)
        }

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


def _union(found: Sequence[Any]) -> Any:
    """One of several dictionaries, or tuples of such."""
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], dict):
        return {name: value for own in found for name, value in own.items()}
    parts = [_union(own) for own in zip(*found, strict=True)]
    return type(found[0])(*parts) if hasattr(found[0], "_fields") else tuple(parts)


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
