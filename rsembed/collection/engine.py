"""The engine of a collection: what a single device does with its share, as functions of everything.

The collection checks what users give and hands canonical batches over; stacks do the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from rsembed.bags import Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.collection.rows import LookupResult, Occurrences, Rows
from rsembed.collection.stack import Stack
from rsembed.collection.state import Activations, Batch, ByName, LookupStatistics, Traffic
from rsembed.kernels import api
from rsembed.keys import as_keys, num_invalid
from rsembed.parallel.exchange import Asked, together
from rsembed.specs import FeatureSpec

Stacks = Mapping[str, Stack]
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

    Attributes:
      init: `(key)` to tables and slots of all stacks.
      weight_gradients: `(tables, batch, d_outputs)` to gradients of the weights of all ids of a batch, whether it has
        some or counts each once, by feature.
      row_gradients: `(batch, d_outputs)` to rows and values of `RowGradients`, by stack.
      squared_norm: `(batch, d_outputs)` to the sum of the squares of the values of `row_gradients`, by stack, on one
        device that has all rows in arrays.
      apply: `(tables, slots, gradients, steps)` to tables and slots after a step with the gradients of distinct rows.
      update: `(tables, slots, batch, d_outputs, steps)` to tables and slots after a step with the gradients of a batch.
    """

    def __init__(self, features: Mapping[str, FeatureSpec], stacks: Mapping[str, Stack], devices: Devices):
        self.features, self.stacks, self.devices = features, stacks, devices
        self._has_all_rows = all(stack.storage.ids_are_rows for stack in stacks.values())
        everywhere, split = PartitionSpec(), devices.split
        state = {name: stack.partition for name, stack in stacks.items()}
        gradients = {name: stack.gradient_partitions for name, stack in stacks.items()}
        self.init = self._on_each(self._init, (everywhere,), (state, state))
        self._look_up = self._on_each(self._lookup, (state, everywhere, split), (split, everywhere))
        self.weight_gradients = self._on_each(self._weight_gradients, (state, split, split), split)
        self.row_gradients = self._on_each(self._row_gradients, (split, split), gradients)
        self.squared_norm = self._on_each(self._squared_norm, (split, split), everywhere)
        self.apply = self._on_each(self._apply, (state, state, gradients, everywhere), (state, state))
        self.update = self._on_each(self._update, (state, state, split, split, everywhere), (state, state))

    def lookup(
        self, tables: ByName, batch: Batch, numbers: ByName | None = None
    ) -> tuple[Activations, LookupStatistics]:
        """Activations of all features, and what travelled; ahead of the steps of these numbers, if there are any."""
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

    def _on_each(
        self, function: Callable[..., PyTree], partitions: Sequence[PyTree], results: PyTree
    ) -> Callable[..., PyTree]:
        """A function of one device and some stacks as one of everything, group by group of the stacks.

        Args:
          function: takes the stacks by name, and its part of each argument.
          partitions: of the other arguments. Those that are split by sample are dictionaries by feature, and all other
            dictionaries are by stack.
          results: of what it returns.
        """
        most = STACKS_TOGETHER if self.devices.num_devices > 1 else max(len(self.stacks), 1)
        all_stacks, programs = list(self.stacks.items()), []
        for first in range(0, max(len(all_stacks), 1), most):
            stacks = dict(all_stacks[first : first + most])
            own = functools.update_wrapper(functools.partial(function, stacks), function)
            *specs, found = (_part(spec, stacks) for spec in (*partitions, results))
            programs.append((stacks, jax.jit(self.devices.on_each(own, tuple(specs), found))))
        if len(programs) == 1:
            return programs[0][1]

        def on_all(*args: PyTree) -> PyTree:
            found = []
            for stacks, program in programs:
                features = [own.name for stack in stacks.values() for own in stack.layout.stack.features]
                names = [features if partition == self.devices.split else stacks for partition in partitions]
                found.append(program(*map(_part, args, names)))
            return _union(found)

        return on_all

    # On one device

    def _init(self, stacks: Stacks, key: PRNGKeyArray) -> tuple[ByName, ByName]:
        return two_dicts({name: stack.rows.init(key) for name, stack in stacks.items()})

    def _lookup(
        self, stacks: Stacks, tables: ByName, numbers: ByName | None, batch: Batch
    ) -> tuple[Activations, LookupStatistics]:
        bags = {name: as_bags(value, feature=name) for name, value in batch.items()}
        activations: Activations = {}
        traffic: dict[str, Traffic] = {}
        asked: list[Asked[LookupResult]] = []
        for name, stack in stacks.items():
            number = None if numbers is None else numbers[name]
            asked.append(stack.rows.look_up(tables[name], stack.occurrences(bags), number))
        for (name, stack), found in zip(stacks.items(), together(asked, self.devices.axes), strict=True):
            outputs, num_unknown, traffic[name] = found
            if stack.storage.takes_keys:
                traffic[name] = traffic[name]._replace(num_unknown=self.devices.gather(num_unknown[None]))
            for feature, output in zip(stack.layout.stack.features, outputs, strict=True):
                activations[feature.name] = to_activation(self.features[feature.name], bags[feature.name], output)
        num_ids, num_out_of_range = self.devices.total(self._counts(bags))
        return activations, LookupStatistics(num_ids, num_out_of_range, traffic)

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

    def _weight_gradients(
        self, stacks: Stacks, tables: ByName, batch: Batch, d_outputs: ByName
    ) -> dict[str, Float[Array, " nnz"]]:
        found = self._backward(stacks, batch, d_outputs, lambda n, rows, *own: rows.weight_gradients(tables[n], *own))
        return {
            feature.name: gradient
            for name, stack in stacks.items()
            for feature, gradient in zip(stack.layout.stack.features, found[name], strict=True)
        }

    def _row_gradients(self, stacks: Stacks, batch: Batch, d_outputs: ByName) -> dict[str, tuple[Array, Array]]:
        return self._backward(stacks, batch, d_outputs, lambda _, rows, *own: rows.row_gradients(*own))

    def _squared_norm(self, stacks: Stacks, batch: Batch, d_outputs: ByName) -> dict[str, Array]:
        return self._backward(stacks, batch, d_outputs, lambda _, rows, *own: rows.squared_norm(*own))

    def _apply(
        self, stacks: Stacks, tables: ByName, slots: ByName, gradients: Mapping[str, tuple[Array, Array]], steps: ByName
    ) -> tuple[ByName, ByName]:
        stepped = {
            name: stack.rows.apply(tables[name], slots[name], *gradients[name], steps[name])
            for name, stack in stacks.items()
        }
        return two_dicts(stepped)

    def _update(
        self, stacks: Stacks, tables: ByName, slots: ByName, batch: Batch, d_outputs: ByName, steps: ByName
    ) -> tuple[ByName, ByName]:
        def update(name: str, rows: Rows, own: Occurrences, gradients: list[Array]) -> Asked[tuple[PyTree, PyTree]]:
            return rows.update(tables[name], slots[name], own, gradients, steps[name])

        return two_dicts(self._backward(stacks, batch, d_outputs, update))

    def _backward(
        self, stacks: Stacks, batch: Batch, d_outputs: ByName, function: Callable[..., Asked[PyTree]]
    ) -> ByName:
        """Results of a function of each stack's name, rows, occurrences in the batch, and gradients of its outputs."""
        bags, asked = {name: as_bags(value, feature=name) for name, value in batch.items()}, []
        for name, stack in stacks.items():
            own = [d_outputs[feature.name] for feature in stack.layout.stack.features]
            asked.append(function(name, stack.rows, stack.occurrences(bags), own))
        return dict(zip(stacks, together(asked, self.devices.axes), strict=True))


def _part(tree: PyTree, names: Iterable[str]) -> PyTree:
    """A dictionary, or each one of a tuple, cut down to the entries called `names`; any other tree unchanged."""
    if type(tree) is tuple:
        return tuple(_part(own, names) for own in tree)
    return {name: tree[name] for name in names} if isinstance(tree, dict) else tree


def _union(found: Sequence[PyTree]) -> PyTree:
    """One dictionary of several, or one tuple of several tuples of such."""
    if isinstance(found[0], dict):
        return {name: value for own in found for name, value in own.items()}
    parts = [_union(own) for own in zip(*found, strict=True)]
    return type(found[0])(*parts) if hasattr(found[0], "_fields") else tuple(parts)


def two_dicts(pairs: Mapping[str, tuple[PyTree, PyTree]]) -> tuple[ByName, ByName]:
    """A dictionary of pairs as a pair of dictionaries."""
    return {name: first for name, (first, _) in pairs.items()}, {name: second for name, (_, second) in pairs.items()}


def to_activation(feature: FeatureSpec, bags: Bags, output: Array) -> Array:
    """Pooled rows `[outputs, dim]` of a feature in the shape of its activations."""
    output = output[:, : feature.output_dim] if feature.output_dim < output.shape[1] else output
    if feature.output_shape is not None:
        return output.reshape(-1, *feature.output_shape[1:])
    if feature.table_spec.combiner == "none" and bags.dense_shape is not None:
        return output.reshape(*bags.dense_shape, output.shape[1])
    return output
