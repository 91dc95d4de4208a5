"""Lookup and update over a device mesh, used by both Flax layers and the pipeline.

Tables and batches are sharded along some axes of the mesh and replicated along its other axes.
Every replica does the same work, so replicas stay equal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from rsembed.checks import check_type
from rsembed.collection.devices import Devices
from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore.embedding import sparse_dense_matmul, sparse_dense_matmul_grad
from rsembed.sparsecore.layout import FeatureTree, Nested, Scalar
from rsembed.sparsecore.preprocessing import (
    AllReduce,
    PreprocessedInput,
    preprocess_sparse_dense_matmul_input,
)
from rsembed.sparsecore.variables import Activations, EmbeddingVariables, Variables, initialize
from rsembed.specs import FeatureSpec, tables_of

Result = TypeVar("Result")
Arguments = tuple[Variables, Array, PreprocessedInput]
"""Arguments of a trainable lookup: variables, step counter and batch."""


def table_mesh(mesh: Mesh | None, sharding_axis: str | tuple[str, ...]) -> Devices:
    """The devices that share the tables of a layer.

    Args:
      mesh: mesh of the devices. With None, `table_mesh` makes a mesh with all devices on one axis.
      sharding_axis: name or names of the axes that shard tables and batch.

    Raises: ValueError: the mesh does not have the axes, or several axes are named without a mesh.
    """
    check_type(mesh, Mesh | None, "mesh")
    if mesh is None:
        axes = (sharding_axis,) if isinstance(sharding_axis, str) else tuple(sharding_axis)
        if len(axes) != 1:
            raise ValueError(f"sharding_axis {axes} needs a mesh; pass mesh=.")
        mesh = Mesh(np.asarray(jax.devices()), axes)
    # Replace the mesh of `Devices.of`, which has only axes of type `AxisType.Auto`, by the user's
    # mesh. If the user's mesh has axes of type `Explicit`, JAX requires that the "gradient" of a
    # table has the same sharding as the table.
    return dataclasses.replace(Devices.of(mesh, sharding_axis), mesh=mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedTables:
    """The tables that the features read, and the devices that share the tables.

    Attributes:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      devices: devices that share the tables, along the mesh axes that shard tables and batch.
      num_sc_per_device: SparseCores per device, by default the number for which the tables were
        stacked.
      enable_minibatching: whether batches are preprocessed with minibatching.
    """

    feature_specs: Nested[FeatureSpec]
    devices: Devices
    num_sc_per_device: int | None = None
    enable_minibatching: bool = False

    def init(self, key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        """Initial tables and optimizer slots of all stacks."""
        tables = list(tables_of(self.feature_specs).values())
        return initialize(key, tables, self.devices, self.num_sc_per_device)

    def look_up(self, variables: Variables, inputs: PreprocessedInput) -> Activations:
        """Activations of the global batch, in a tree like the feature specs."""
        return self._on_devices(sparse_dense_matmul, self.devices.split, self.devices.split)(
            inputs, variables
        )

    def update(
        self,
        d_activations: Activations,
        variables: Variables,
        step: Scalar | None,
        inputs: PreprocessedInput,
    ) -> Variables:
        """Applies one optimizer step to the rows that `inputs` read, and returns the new variables.

        The result has the tree structure of `variables`. `step` is the index of the training step,
        from 0, or None if no optimizer needs the index.
        """
        split = self.devices.split
        shards = self.devices.num_devices
        for path, leaf in jax.tree_util.tree_leaves_with_path(d_activations):
            if leaf.ndim and leaf.shape[0] % shards:
                raise ValueError(
                    f"the gradient of feature {jax.tree_util.keystr(path)} has shape "
                    f"{leaf.shape}, whose first axis {shards} devices cannot split; give that of "
                    "the activations."
                )

        def on_device(step: Scalar | None, *arguments: Any, **options: Any) -> Variables:
            return sparse_dense_matmul_grad(*arguments, step=step, **options)

        update = self._on_devices(on_device, P(), split, split, split)
        updated = update(step, d_activations, inputs, variables)
        # Autodiff needs gradients in the tree structure of `variables`, which may be a FrozenDict.
        return type(variables)((name, updated[name]) for name in variables)

    def train(self, variables: Variables, counter: Array, inputs: PreprocessedInput) -> Activations:
        """Looks up a batch, and returns the activations.

        The backward pass of `train` returns the updated variables as the "gradients" of
        `variables`. The "gradient" of `counter` is the counter of the next step. The counter is a
        float array, because autodiff computes gradients only for floats.
        """
        check_type(
            inputs, PreprocessedInput, "the input of a layer, which its prepare_batch makes,"
        )

        def lookup(variables: Variables, counter: Array, inputs: PreprocessedInput) -> Activations:
            return self.look_up(variables, inputs)

        def forward(*arguments: Any) -> tuple[Activations, Arguments]:
            return lookup(*arguments), arguments

        def backward(saved: Arguments, d_activations: Activations) -> tuple[Variables, Array, None]:
            variables, counter, inputs = saved
            return (
                self.update(d_activations, variables, step_number(counter), inputs),
                next_step(counter),
                None,
            )

        trained = jax.custom_vjp(lookup)
        trained.defvjp(forward, backward)
        return trained(variables, counter, inputs)

    def preprocess(
        self, features: FeatureTree, features_weights: FeatureTree = None, **options: Any
    ) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
        """Partitions this process' part of a batch, on the host, for the devices with the tables.

        For the arguments see `embedding.preprocess_sparse_dense_matmul_input`.
        """
        return preprocess_sparse_dense_matmul_input(
            features,
            features_weights,
            self.feature_specs,
            local_device_count=self.devices.num_parts_here,
            global_device_count=self.devices.num_devices,
            num_sc_per_device=self.num_sc_per_device,
            enable_minibatching=self.enable_minibatching,
            **options,
        )

    def _on_devices(self, function: Callable[..., Result], *in_specs: P) -> Callable[..., Result]:
        """Turns `function`, which runs on one device, into a function that takes global arrays."""
        on_device = functools.partial(
            function,
            feature_specs=self.feature_specs,
            global_device_count=self.devices.num_devices,
            enable_minibatching=self.enable_minibatching,
            axis_name=self.devices.axes,
        )
        split = self.devices.split
        return jax.shard_map(
            on_device, mesh=self.devices.mesh, in_specs=in_specs, out_specs=split, check_vma=False
        )


class MeshLayer:
    """Base of the layers of both Flax APIs: prepares batches for a lookup over a mesh.

    Attributes:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      sharding_axis: mesh axis (or axes) that shards tables and batch.
      mesh: mesh with the devices of the layer, which may have further axes.
      num_sc_per_device: SparseCores per device.
      enable_minibatching: whether batches are preprocessed with minibatching.
    """

    feature_specs: Nested[FeatureSpec]
    sharding_axis: str | tuple[str, ...]
    mesh: Mesh | None
    num_sc_per_device: int | None
    enable_minibatching: bool

    def preprocess_inputs(
        self,
        step: int,
        features: FeatureTree,
        features_weights: FeatureTree,
        all_reduce_interface: AllReduce | None = None,
    ) -> PreprocessedInput:
        """Partitions this process' part of a batch, on the host, for the layer's devices."""
        processed, _ = self._tables().preprocess(
            features,
            features_weights,
            batch_number=step,
            all_reduce_interface=all_reduce_interface,
        )
        return processed

    def prepare_batch(
        self, features: FeatureTree, features_weights: FeatureTree = None, **options: object
    ) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
        """A batch as global arrays on the layer's devices, and statistics about its ids.

        The functions of `rsembed.fdo` compute limits from the statistics of many batches.

        Args:
          features: ids of this process' samples, in a tree like `feature_specs`.
          features_weights: weights of the ids, in a tree like `features`. With None, the default,
            all weights are 1.
          options: keyword options of `embedding.preprocess_sparse_dense_matmul_input`, such as
            `allow_id_dropping` and `batch_number`.
        """
        tables = self._tables()
        processed, statistics = tables.preprocess(features, features_weights, **options)
        sharding = tables.devices.sharding(tables.devices.split)
        place = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, processed), statistics

    def _tables(self) -> ShardedTables:
        return ShardedTables(
            feature_specs=self.feature_specs,
            devices=table_mesh(self.mesh, self.sharding_axis),
            num_sc_per_device=self.num_sc_per_device,
            enable_minibatching=self.enable_minibatching,
        )


_PLACES = np.asarray([1, 2**8, 2**16], np.float32)


def step_counter(step: Scalar) -> Float[Array, " digits"]:
    """Counter that stores a step's index as three digits in base 256, exact even in bfloat16."""
    return jnp.floor(jnp.asarray(step, jnp.float32) / _PLACES) % _PLACES[1]


def step_number(counter: Float[Array, " digits"]) -> Float[Array, ""]:
    """The step index that a counter stores, as float32, which is exact below 2**24."""
    return jnp.sum(counter.astype(jnp.float32) * _PLACES)


def next_step(counter: Float[Array, " digits"]) -> Float[Array, " digits"]:
    """Counter for the next step, in the dtype of `counter`."""
    return step_counter(step_number(counter) + 1.0).astype(counter.dtype)


def counter_at(counter: Float[Array, " digits"], step: Scalar | None) -> Float[Array, " digits"]:
    """Counter that stores the step index `step`, or `counter` unchanged if `step` is None.

    With or without `step`, the derivative of the result with respect to `counter` is one.
    """
    if step is None:
        return counter
    return counter + jax.lax.stop_gradient(step_counter(step).astype(counter.dtype) - counter)
