"""Lookup and update over a device mesh: the one place that both Flax layers and the pipeline take them from.

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
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore.layout import check_sharding_strategy, resolve_cores
from rsembed.sparsecore.matmul import sparse_dense_matmul, sparse_dense_matmul_grad
from rsembed.sparsecore.preprocessing import preprocess_sparse_dense_matmul_input
from rsembed.sparsecore.variables import EmbeddingVariables, Nested, PreprocessedInput
from rsembed.specs import FeatureSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableMesh:
    """The devices that share tables.

    Attributes:
      mesh: all devices.
      axes: axes along which tables and batches are cut, outermost first.
      num_sc_per_device: cores per device; None means `utils.num_sparsecores_per_device()`.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_sc_per_device: int | None = None

    @property
    def num_devices(self) -> int:
        """Parts into which tables are cut: the sizes of `axes` alone, whatever else the mesh has."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def num_local_devices(self) -> int:
        """Parts that lie in this process."""
        return math.prod(self.mesh.local_mesh.shape[axis] for axis in self.axes)

    @property
    def num_cores(self) -> int:
        """Cores per device."""
        return resolve_cores(self.num_sc_per_device, self.num_devices)

    @property
    def sharding(self) -> NamedSharding:
        """How tables, slots, batches and activations lie on the devices."""
        return NamedSharding(self.mesh, P(self.axes))


def table_mesh(
    mesh: Mesh | None, sharding_axis: str | tuple[str, ...], num_sc_per_device: int | None = None
) -> TableMesh:
    """The devices behind a layer's arguments; `mesh=None` means one axis over all devices.

    Raises: ValueError: the mesh lacks an axis, or is missing while there are several.
    """
    axes = (sharding_axis,) if isinstance(sharding_axis, str) else tuple(sharding_axis)
    if mesh is None:
        if len(axes) != 1:
            raise ValueError(f"sharding_axis {axes} needs a mesh; pass mesh=.")
        mesh = Mesh(np.asarray(jax.devices()), axes)
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing or not axes:
        raise ValueError(f"sharding_axis {missing or axes} is not in the mesh, which has the axes {mesh.axis_names}.")
    return TableMesh(mesh=mesh, axes=axes, num_sc_per_device=num_sc_per_device)


def look_up(
    devices: TableMesh,
    feature_specs: Nested[FeatureSpec],
    variables: Mapping[str, EmbeddingVariables],
    inputs: PreprocessedInput,
    *,
    enable_minibatching: bool = False,
) -> Any:
    """Activations of the global batch, in a tree like `feature_specs`."""

    def on_device(variables: Any, inputs: PreprocessedInput) -> Any:
        return sparse_dense_matmul(
            inputs,
            variables,
            feature_specs,
            global_device_count=devices.num_devices,
            enable_minibatching=enable_minibatching,
            axis_name=devices.axes,
        )

    part = P(devices.axes)
    return _sharded(on_device, devices, in_specs=(part, part))(variables, inputs)


def update(
    devices: TableMesh,
    feature_specs: Nested[FeatureSpec],
    d_activations: Any,
    variables: Mapping[str, EmbeddingVariables],
    step: Any,
    inputs: PreprocessedInput,
    *,
    enable_minibatching: bool = False,
) -> Any:
    """The variables after one optimizer step of every row that `inputs` look up, in the container they came in.

    Args:
      devices: where the variables lie.
      feature_specs: placed specs.
      d_activations: gradients of the global activations.
      variables: tables and slots, by stack.
      step: 0-based step; None hides it from the optimizers.
      inputs: the batch that was looked up.
      enable_minibatching: whether the batch was preprocessed with it.
    """

    def on_device(d_activations: Any, variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        return sparse_dense_matmul_grad(
            d_activations,
            inputs,
            variables,
            feature_specs,
            global_device_count=devices.num_devices,
            step=step,
            enable_minibatching=enable_minibatching,
            axis_name=devices.axes,
        )

    part = P(devices.axes)
    sharded = _sharded(on_device, devices, in_specs=(part, part, P(), part))
    updated = sharded(d_activations, variables, step, inputs)
    # A FrozenDict of tuples comes back as one: autodiff asks for gradients of the very structure it was given.
    leaves = [leaf for name in sorted(updated) for leaf in jax.tree.leaves(updated[name])]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)


def _sharded(function: Callable[..., Any], devices: TableMesh, in_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=devices.mesh, in_specs=in_specs, out_specs=P(devices.axes), check_vma=False)


def trainable_lookup(
    devices: TableMesh, feature_specs: Nested[FeatureSpec], *, enable_minibatching: bool = False
) -> Callable[[Any, Float[Array, ""] | None, PreprocessedInput], Any]:
    """A lookup of `(variables, step, inputs)` whose "gradients" are the variables and the step after one update.

    The step is a float, or autodiff would not ask for its gradient; float32 counts exactly to 16 million.
    """
    look = functools.partial(look_up, devices, feature_specs, enable_minibatching=enable_minibatching)

    @jax.custom_vjp
    def lookup(variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        return look(variables, inputs)

    def forward(variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        return look(variables, inputs), (variables, step, inputs)

    def backward(saved: Any, d_activations: Any) -> Any:
        variables, step, inputs = saved
        updated = update(
            devices, feature_specs, d_activations, variables, step, inputs, enable_minibatching=enable_minibatching
        )
        return updated, next_step(step), None

    lookup.defvjp(forward, backward)
    return lookup


def next_step(step: Float[Array, ""] | None) -> Float[Array, ""] | None:
    """The step after `step`; a hidden step stays hidden."""
    return None if step is None else step + 1.0


def preprocess(
    devices: TableMesh,
    feature_specs: Nested[FeatureSpec],
    features: Any,
    features_weights: Any = None,
    *,
    sharding_strategy: str = "MOD",
    **options: Any,
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """This process' part of a batch, partitioned for the devices that share the tables, still on the host.

    Args:
      devices: where the tables lie.
      feature_specs: placed specs.
      features: ids, in a tree like `feature_specs`.
      features_weights: weights in the same tree, or None.
      sharding_strategy: "MOD".
      **options: as for `embedding.preprocess_sparse_dense_matmul_input`.
    """
    check_sharding_strategy(sharding_strategy)
    return preprocess_sparse_dense_matmul_input(
        features,
        features_weights,
        feature_specs,
        local_device_count=devices.num_local_devices,
        global_device_count=devices.num_devices,
        num_sc_per_device=devices.num_cores,
        **options,
    )


def put_on_devices(devices: TableMesh, inputs: Any) -> Any:
    """Arrays of this process as global arrays, cut along the leading axis."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(devices.sharding, array), inputs)
