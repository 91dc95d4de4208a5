"""Lookup and update over a device mesh, used by both Flax layers and the pipeline.

Tables and batches are cut along some axes of the mesh. Along its other axes they are copied, and every copy does the
same work, so copies never drift apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from rsembed.checks import check_type
from rsembed.collection.devices import Devices
from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore.embedding import sparse_dense_matmul, sparse_dense_matmul_grad
from rsembed.sparsecore.layout import Nested, Scalar
from rsembed.sparsecore.preprocessing import AllReduce, PreprocessedInput, preprocess_sparse_dense_matmul_input
from rsembed.sparsecore.variables import EmbeddingVariables, initialize
from rsembed.specs import FeatureSpec, tables_of


def table_mesh(mesh: Mesh | None, sharding_axis: str | tuple[str, ...]) -> Devices:
    """Devices from a layer's arguments; `mesh=None` means one axis over all devices.

    Raises: ValueError: the mesh lacks an axis, or is missing while there are several.
    """
    check_type(mesh, Mesh | None, "mesh")
    if mesh is None:
        axes = (sharding_axis,) if isinstance(sharding_axis, str) else tuple(sharding_axis)
        if len(axes) != 1:
            raise ValueError(f"sharding_axis {axes} needs a mesh; pass mesh=.")
        mesh = Mesh(np.asarray(jax.devices()), axes)
    # The mesh as it came, explicit axes included: "gradients" of tables must be split as the tables are.
    return dataclasses.replace(Devices.of(mesh, sharding_axis), mesh=mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTables:
    """Tables that some features read, and the devices that share them.

    Attributes:
      feature_specs: placed specs.
      devices: devices that share the tables; other axes of their mesh do not count.
      num_sc_per_device: cores per device; None takes the number that tables were placed for.
      enable_minibatching: whether batches are preprocessed with it.
    """

    feature_specs: Nested[FeatureSpec]
    devices: Devices
    num_sc_per_device: int | None = None
    enable_minibatching: bool = False

    def init(self, key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        """Initial tables and slots."""
        tables = list(tables_of(self.feature_specs).values())
        return initialize(key, tables, self.devices, num_cores=self.num_sc_per_device)

    def look_up(self, variables: Mapping[str, EmbeddingVariables], inputs: PreprocessedInput) -> PyTree:
        """Activations of the global batch, in a tree like the feature specs."""
        return self._on_devices(sparse_dense_matmul, self.devices.split, self.devices.split)(inputs, variables)

    def update(
        self,
        d_activations: PyTree,
        variables: Mapping[str, EmbeddingVariables],
        step: Scalar | None,
        inputs: PreprocessedInput,
    ) -> PyTree:
        """Variables after one optimizer step of every row that `inputs` look up, in the same container as before.

        The step counts from 0; None hides it from the optimizers.
        """
        part, shards = self.devices.split, self.devices.num_devices
        for path, leaf in jax.tree_util.tree_leaves_with_path(d_activations):
            if leaf.ndim and leaf.shape[0] % shards:
                raise ValueError(
                    f"the gradient of feature {jax.tree_util.keystr(path)} has shape {leaf.shape}, whose first axis "
                    f"{shards} devices cannot split; give that of the activations."
                )

        def on_device(step: PyTree, *given: Any, **options: Any) -> PyTree:
            return sparse_dense_matmul_grad(*given, step=step, **options)

        updated = self._on_devices(on_device, P(), part, part, part)(step, d_activations, inputs, variables)
        # A FrozenDict of tuples comes back as one: autodiff asks for gradients of the very structure it was given.
        leaves = {name: iter(jax.tree.leaves(own)) for name, own in updated.items()}
        return jax.tree_util.tree_map_with_path(lambda path, _: next(leaves[path[0].key]), variables)

    def train(self, variables: PyTree, counter: Array, inputs: PreprocessedInput) -> PyTree:
        """A lookup whose "gradients" are the variables and the step counter after one update.

        The counter is of floats, or autodiff would not ask for its gradient.
        """
        check_type(inputs, PreprocessedInput, "the input of a layer, which its prepare_batch makes,")

        @jax.custom_vjp
        def lookup(variables: PyTree, counter: Array, inputs: PreprocessedInput) -> PyTree:
            return self.look_up(variables, inputs)

        def forward(variables: PyTree, counter: Array, inputs: PreprocessedInput) -> PyTree:
            return self.look_up(variables, inputs), (variables, counter, inputs)

        def backward(saved: PyTree, d_activations: PyTree) -> PyTree:
            variables, counter, inputs = saved
            return self.update(d_activations, variables, step_number(counter), inputs), next_step(counter), None

        lookup.defvjp(forward, backward)
        return lookup(variables, counter, inputs)

    def preprocess(
        self, features: PyTree, features_weights: PyTree = None, **options: Any
    ) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
        """This process' part of a batch, partitioned for the devices that share the tables, still on the host.

        `features`, `features_weights` and options are those of `embedding.preprocess_sparse_dense_matmul_input`.
        """
        mesh: Any = self.devices.mesh
        return preprocess_sparse_dense_matmul_input(
            features,
            features_weights,
            self.feature_specs,
            local_device_count=math.prod(mesh.local_mesh.shape[axis] for axis in self.devices.axes),
            global_device_count=self.devices.num_devices,
            num_sc_per_device=self.num_sc_per_device,
            enable_minibatching=self.enable_minibatching,
            **options,
        )

    def _on_devices(self, function: Callable[..., PyTree], *in_specs: P) -> Callable[..., PyTree]:
        """A function of one device's parts of its arguments as a function of the whole ones."""
        own = functools.partial(
            function,
            feature_specs=self.feature_specs,
            global_device_count=self.devices.num_devices,
            enable_minibatching=self.enable_minibatching,
            axis_name=self.devices.axes,
        )
        split = self.devices.split
        return jax.shard_map(own, mesh=self.devices.mesh, in_specs=in_specs, out_specs=split, check_vma=False)


class MeshLayer:
    """Base of the layers of both Flax APIs: lookup over a mesh, and batches for it.

    Attributes:
      feature_specs: placed specs.
      sharding_axis: mesh axis (or axes) over which tables and batch are cut.
      mesh: the devices, with those along other axes.
      num_sc_per_device: cores per device.
      enable_minibatching: whether batches are preprocessed with it.
    """

    feature_specs: Nested[FeatureSpec]
    sharding_axis: str | tuple[str, ...]
    mesh: Mesh | None
    num_sc_per_device: int | None
    enable_minibatching: bool

    def preprocess_inputs(
        self, step: int, features: PyTree, features_weights: PyTree, all_reduce_interface: AllReduce | None = None
    ) -> PreprocessedInput:
        """Preprocesses this process' part of a batch for the layer's devices, without returning statistics."""
        options = {"batch_number": step, "all_reduce_interface": all_reduce_interface}
        return self._tables().preprocess(features, features_weights, **options)[0]

    def prepare_batch(
        self, features: PyTree, features_weights: PyTree = None, **options: Any
    ) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
        """A batch ready for the layer, as global arrays on its devices, and the statistics for `rsembed.fdo`.

        Args:
          features: ids of this process' samples, in a tree like `feature_specs`.
          features_weights: weights in the same tree, or None.
          options: of `embedding.preprocess_sparse_dense_matmul_input`, such as `allow_id_dropping` and `batch_number`.
        """
        tables = self._tables()
        processed, statistics = tables.preprocess(features, features_weights, **options)
        sharding = tables.devices.sharding(tables.devices.split)
        place = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, processed), statistics

    def _tables(self) -> MeshTables:
        return MeshTables(
            feature_specs=self.feature_specs,
            devices=table_mesh(self.mesh, self.sharding_axis),
            num_sc_per_device=self.num_sc_per_device,
            enable_minibatching=self.enable_minibatching,
        )


_PLACES = np.asarray([1, 2**8, 2**16], np.float32)


def step_counter(step: Scalar) -> Float[Array, " digits"]:
    """A step as three digits to base 256, which any cast of all parameters to a 16-bit type leaves exact."""
    return jnp.floor(jnp.asarray(step, jnp.float32) / _PLACES) % _PLACES[1]


def step_number(counter: Float[Array, " digits"]) -> Float[Array, ""]:
    """Step that a counter holds, as float32 (exact for 16 million steps)."""
    return jnp.sum(counter.astype(jnp.float32) * _PLACES)


def next_step(counter: Float[Array, " digits"]) -> Float[Array, " digits"]:
    """The counter after one step, of the same dtype."""
    return step_counter(step_number(counter) + 1.0).astype(counter.dtype)


def counter_at(counter: Float[Array, " digits"], step: Scalar | None) -> Float[Array, " digits"]:
    """The counter set to a step, of which autodiff sees the counter itself; None leaves it where it is."""
    if step is None:
        return counter
    return counter + jax.lax.stop_gradient(step_counter(step).astype(counter.dtype) - counter)
