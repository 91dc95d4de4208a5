"""Lookup and update over a device mesh: the one place that both Flax layers and the pipeline take them from.

Tables and batches are cut along some axes of the mesh. Along its other axes they are copied, and every copy does the
same work, so copies never drift apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.kernels.cpu_threads import check_threads
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
      num_sc_per_device: cores per device; None takes the number that tables were placed for.
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
    check_threads(mesh)
    return TableMesh(mesh=mesh, axes=axes, num_sc_per_device=num_sc_per_device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTables:
    """The tables that some features read, and where they lie.

    Attributes:
      feature_specs: placed specs.
      devices: the devices that share the tables.
      enable_minibatching: whether batches are preprocessed with it.
    """

    feature_specs: Nested[FeatureSpec]
    devices: TableMesh
    enable_minibatching: bool = False


def look_up(tables: MeshTables, variables: Mapping[str, EmbeddingVariables], inputs: PreprocessedInput) -> Any:
    """Activations of the global batch, in a tree like the feature specs."""

    def on_device(variables: Any, inputs: PreprocessedInput) -> Any:
        return sparse_dense_matmul(inputs, variables, tables.feature_specs, **_options(tables))

    part = P(tables.devices.axes)
    return _sharded(on_device, tables, in_specs=(part, part))(variables, inputs)


def update(
    tables: MeshTables,
    d_activations: Any,
    variables: Mapping[str, EmbeddingVariables],
    step: Any,
    inputs: PreprocessedInput,
) -> Any:
    """The variables after one optimizer step of every row that `inputs` look up, in the container they came in.

    The step counts from 0; None hides it from the optimizers.
    """

    def on_device(d_activations: Any, variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        specs = tables.feature_specs
        return sparse_dense_matmul_grad(d_activations, inputs, variables, specs, step=step, **_options(tables))

    part = P(tables.devices.axes)
    sharded = _sharded(on_device, tables, in_specs=(part, part, P(), part))
    updated = sharded(d_activations, variables, step, inputs)
    # A FrozenDict of tuples comes back as one: autodiff asks for gradients of the very structure it was given.
    leaves = [leaf for name in sorted(updated) for leaf in jax.tree.leaves(updated[name])]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)


def _options(tables: MeshTables) -> dict[str, Any]:
    return {
        "global_device_count": tables.devices.num_devices,
        "enable_minibatching": tables.enable_minibatching,
        "axis_name": tables.devices.axes,
    }


def _sharded(function: Callable[..., Any], tables: MeshTables, in_specs: Any) -> Callable[..., Any]:
    mesh, axes = tables.devices.mesh, tables.devices.axes
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(axes), check_vma=False)


def trainable_lookup(tables: MeshTables) -> Callable[[Any, Float[Array, ""] | None, PreprocessedInput], Any]:
    """A lookup of `(variables, step, inputs)` whose "gradients" are the variables and the step after one update.

    The step is a float, or autodiff would not ask for its gradient; float32 counts exactly to 16 million.
    """

    @jax.custom_vjp
    def lookup(variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        return look_up(tables, variables, inputs)

    def forward(variables: Any, step: Any, inputs: PreprocessedInput) -> Any:
        return look_up(tables, variables, inputs), (variables, step, inputs)

    def backward(saved: Any, d_activations: Any) -> Any:
        _, step, _ = saved
        return update(tables, d_activations, *saved), next_step(step), None

    lookup.defvjp(forward, backward)
    return lookup


def next_step(step: Float[Array, ""] | None) -> Float[Array, ""] | None:
    """The step after `step`; a hidden step stays hidden."""
    return None if step is None else step + 1.0


def preprocess(
    tables: MeshTables, features: Any, features_weights: Any = None, **options: Any
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """This process' part of a batch, partitioned for the devices that share the tables, still on the host.

    `features`, `features_weights` and options are those of `embedding.preprocess_sparse_dense_matmul_input`.
    """
    return preprocess_sparse_dense_matmul_input(
        features,
        features_weights,
        tables.feature_specs,
        local_device_count=tables.devices.num_local_devices,
        global_device_count=tables.devices.num_devices,
        num_sc_per_device=tables.devices.num_sc_per_device,
        enable_minibatching=tables.enable_minibatching,
        **options,
    )


def prepare(
    tables: MeshTables, features: Any, features_weights: Any = None, **options: Any
) -> tuple[PreprocessedInput, SparseDenseMatmulInputStats]:
    """As `preprocess`, the batch as global arrays on the devices."""
    processed, statistics = preprocess(tables, features, features_weights, **options)
    return put_on_devices(tables.devices, processed), statistics


def put_on_devices(devices: TableMesh, inputs: Any) -> Any:
    """Arrays of this process as global arrays, cut along the leading axis."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(devices.sharding, array), inputs)
