"""The engine of a collection: what a single device does with its share, as functions of everything.

The collection checks what users give and hands canonical batches over; stacks do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from rsembed.bags import Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.collection.rows import LookupResult
from rsembed.collection.stack import Stack
from rsembed.collection.state import Activations, Batch, ByName, LookupStatistics, Traffic
from rsembed.kernels import api
from rsembed.keys import as_keys, num_invalid
from rsembed.parallel.exchange import Asking, together
from rsembed.specs import FeatureSpec

STACKS_TOGETHER = 25
"""How many stacks ask together on a mesh."""


class Engine:
    """Init, lookup, row gradients and steps of all stacks, each one function on every device of a mesh.

    Stacks ask their owners together, so many at a time: what XLA does to let a function run on a mesh grows with the
    square of the arrays that it takes. With 100 tables of keys it took most of the time of compiling.

    Args:
      features: by name.
      stacks: by name.
      devices: the mesh.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        self.features, self.stacks, self.devices = features, stacks, devices
        names, most = list(stacks), STACKS_TOGETHER if devices.num_devices > 1 else max(len(stacks), 1)
        groups = [names[first : first + most] for first in range(0, max(len(names), 1), most)]
        self._groups = [Group(features, {name: stacks[name] for name in group}, devices) for group in groups]

    def init(self, key: PRNGKeyArray) -> tuple[ByName, ByName]:
        """Tables and slots of all stacks."""
        return _union([group.init(key) for group in self._groups])

    def lookup(
        self, tables: ByName, batch: Batch, numbers: ByName | None = None
    ) -> tuple[Activations, LookupStatistics]:
        """Activations of all features, and what travelled; ahead of the steps of these numbers, if there are any."""
        if all(stack.storage.ids_are_rows for stack in self.stacks.values()):
            numbers = None  # all rows are there already, so that one program serves both
        activations, statistics = self._all("lookup", [tables, numbers], [batch])
        return {name: activations[name] for name in self.features}, statistics

    def weight_gradients(self, tables: ByName, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients of the weights of all ids of a batch, whether it has some or counts each once, by feature."""
        return self._all("weight_gradients", [tables], [batch, d_outputs])

    def row_gradients(self, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
        """Rows and values of `RowGradients`, by stack."""
        return self._all("row_gradients", [], [batch, d_outputs])

    def squared_norm(self, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, Float[Array, ""]]:
        """Sum of the squares of the values of `row_gradients`, by stack, on one device that has all rows in arrays."""
        return self._all("squared_norm", [], [batch, d_outputs])

    def apply(self, tables: ByName, slots: ByName, gradients: ByName, steps: ByName) -> tuple[ByName, ByName]:
        """Tables and slots after a step with the gradients of distinct rows."""
        return self._all("apply", [tables, slots, gradients, steps], [])

    def update(
        self, tables: ByName, slots: ByName, batch: Batch, d_outputs: Mapping[str, Array], steps: ByName
    ) -> tuple[ByName, ByName]:
        """Tables and slots after a step with the gradients of a batch."""
        return self._all("update", [tables, slots, steps], [batch, d_outputs])

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...] | None:
        """How rows and values of `RowGradients` are split, by stack; None on one device."""
        if self.devices.mesh is None:
            return None
        partitions = sorted((name, *stack.gradient_partitions) for name, stack in self.stacks.items())
        sharding = self.devices.sharding
        return tuple((name, sharding(rows), sharding(values)) for name, rows, values in partitions)

    def _all(self, function: str, by_stack: Sequence[PyTree], by_feature: Sequence[Mapping[str, PyTree]]) -> PyTree:
        """Results of a function of all groups, each with its part of dictionaries by stack, and by feature."""
        results = []
        for group in self._groups:
            own = [None if given is None else {name: given[name] for name in group.stacks} for given in by_stack]
            own += [{name: given[name] for name in group.features} for given in by_feature]
            results.append(getattr(group, function)(*own))
        return _union(results)


class Group:
    """The functions of some stacks, each one function on every device of a mesh.

    Args:
      features: by name; those of other stacks are left out.
      stacks: by name.
      devices: the mesh.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        own = {feature.name for stack in stacks.values() for feature in stack.layout.stack.features}
        self.features = {name: feature for name, feature in features.items() if name in own}
        self.stacks, self.devices = stacks, devices
        everywhere, split = PartitionSpec(), devices.split
        state = {name: stack.partition for name, stack in stacks.items()}
        gradients = {name: stack.gradient_partitions for name, stack in stacks.items()}

        def on_each(function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree) -> Callable[..., PyTree]:
            return jax.jit(devices.on_each(function, in_specs, out_specs))

        self.init = on_each(self._init, everywhere, (state, state))
        self.lookup = on_each(self._lookup, (state, everywhere, split), (split, everywhere))
        self.weight_gradients = on_each(self._weight_gradients, (state, split, split), split)
        self.row_gradients = on_each(self._row_gradients, (split, split), gradients)
        self.squared_norm = on_each(self._squared_norm, (split, split), everywhere)
        self.apply = on_each(self._apply, (state, state, gradients, everywhere), (state, state))
        self.update = on_each(self._update, (state, state, everywhere, split, split), (state, state))

    # On one device

    def _init(self, key: PRNGKeyArray) -> tuple[ByName, ByName]:
        return two_dicts({name: stack.rows.init(key) for name, stack in self.stacks.items()})

    def _lookup(self, tables: ByName, numbers: ByName | None, batch: Batch) -> tuple[Activations, LookupStatistics]:
        bags = all_as_bags(batch)
        activations: Activations = {}
        traffic: dict[str, Traffic] = {}

        def look_up(name: str, stack: Stack) -> Asking[LookupResult]:
            return stack.rows.look_up(tables[name], stack.occurrences(bags), None if numbers is None else numbers[name])

        found = self._together(look_up)
        for name, stack in self.stacks.items():
            outputs, num_unknown, traffic[name] = found[name]
            if stack.storage.takes_keys:
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
        self, tables: ByName, batch: Batch, d_outputs: Mapping[str, Array]
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

    def _squared_norm(self, batch: Batch, d_outputs: Mapping[str, Array]) -> dict[str, Array]:
        bags = all_as_bags(batch)
        return self._together(lambda _, s: s.rows.squared_norm(s.occurrences(bags), _of_features(s, d_outputs)))

    def _apply(
        self, tables: ByName, slots: ByName, gradients: Mapping[str, tuple[Array, Array]], steps: ByName
    ) -> tuple[ByName, ByName]:
        stepped = {
            name: stack.rows.apply(tables[name], slots[name], *gradients[name], steps[name])
            for name, stack in self.stacks.items()
        }
        return two_dicts(stepped)

    def _update(
        self, tables: ByName, slots: ByName, steps: ByName, batch: Batch, d_outputs: Mapping[str, Array]
    ) -> tuple[ByName, ByName]:
        bags = all_as_bags(batch)

        def update(name: str, stack: Stack) -> Asking[tuple[PyTree, PyTree]]:
            own = _of_features(stack, d_outputs)
            return stack.rows.update(tables[name], slots[name], stack.occurrences(bags), own, steps[name])

        return two_dicts(self._together(update))

    def _together(self, function: Callable[[str, Stack], Asking[PyTree]]) -> ByName:
        """Results of a function for all stacks, whose questions to other devices travel together."""
        askings = [function(name, stack) for name, stack in self.stacks.items()]
        return dict(zip(self.stacks, together(askings, self.devices.axes), strict=True))


def _union(found: Sequence[PyTree]) -> PyTree:
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


def two_dicts(pairs: Mapping[str, tuple[PyTree, PyTree]]) -> tuple[ByName, ByName]:
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
