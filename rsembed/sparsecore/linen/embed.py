"""The Linen layer: lookup in the forward pass, the optimizer step of the tables in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rsembed.sparsecore import embedding
from rsembed.sparsecore.initialization import initialize
from rsembed.sparsecore.layout import check_no_minibatching, check_sharding_strategy, cores_from_row_pointers
from rsembed.specs import FeatureSpec, tables_of

EMBEDDING_PARAM_NAME = "sc_embedding_variables"
STEP_PARAM_NAME = "sc_embedding_step"

EmbeddingLookupInput = embedding.PreprocessedInput
WithSparseCoreLayout = meta.Partitioned
with_sparsecore_layout = meta.with_partitioning


class SparseCoreEmbed(nn.Module):
    """Activations of all features; differentiating it trains the tables.

    The layer's parameters have an unusual gradient: `jax.grad` returns the UPDATED tables, slots and step counter, one
    optimizer step after the lookup. Use `embed_optimizer`, which puts them in place and leaves the rest to optax.

    Attributes:
      feature_specs: placed specs; see `embedding.prepare_feature_specs_for_training`.
      sharding_axis: mesh axis (or axes) over which tables and batch are sharded.
      mesh: the devices; None means all of them.
      table_sharding_strategy: "MOD".
      enable_minibatching: not implemented yet.
      frozen_step: hide the step from the optimizers: Adam corrects its bias as in the first step for ever, and
        learning rates that depend on the step fail. So does the published layer; by default a counter beside the
        tables keeps the true step (as float32, exact for 16 million steps).
    """

    feature_specs: embedding.Nested[FeatureSpec]
    sharding_axis: str | tuple[str, ...] = "sparsecore_sharding"
    mesh: Mesh | None = None
    table_sharding_strategy: str = "MOD"
    enable_minibatching: bool = False
    frozen_step: bool = False

    @nn.compact
    def __call__(self, embedding_lookup_inputs: embedding.PreprocessedInput) -> Any:
        """Activations `[global samples, output dim]` in a tree like `feature_specs`.

        Args:
          embedding_lookup_inputs: a preprocessed batch of all devices.
        """
        check_sharding_strategy(self.table_sharding_strategy)
        check_no_minibatching(self.enable_minibatching)
        mesh = self._device_mesh()
        num_devices = self._num_devices()
        pointers = next(iter(embedding_lookup_inputs.lhs_row_pointers.values()))
        num_cores = cores_from_row_pointers(pointers.size // num_devices, num_devices)

        def init(key: jax.Array) -> dict[str, embedding.EmbeddingVariables]:
            tables = list(tables_of(self.feature_specs).values())
            return initialize(key, tables, mesh=mesh, axis_name=self._axes(), num_cores=num_cores)

        axes: Any = (self._axes(),)  # one entry of a partition spec may be several mesh axes
        variables = self.param(EMBEDDING_PARAM_NAME, with_sparsecore_layout(init, axes))
        step = None if self.frozen_step else self.param(STEP_PARAM_NAME, lambda key: jnp.zeros((), jnp.float32))
        lookup = _trainable_lookup(self.feature_specs, mesh, self._axes(), num_devices)
        return lookup(variables, step, embedding_lookup_inputs)

    def preprocess_inputs(
        self, step: int, features: Any, features_weights: Any, all_reduce_interface: Any = None
    ) -> embedding.PreprocessedInput:
        """Preprocesses this process' part of a batch for the layer's devices, without returning statistics."""
        mesh = self._device_mesh()
        processed, _ = embedding.preprocess_sparse_dense_matmul_input(
            features,
            features_weights,
            self.feature_specs,
            local_device_count=mesh.local_mesh.size,
            global_device_count=mesh.size,
            sharding_strategy=self.table_sharding_strategy,
            batch_number=step,
            enable_minibatching=self.enable_minibatching,
            all_reduce_interface=all_reduce_interface,
        )
        return processed

    def _axes(self) -> tuple[str, ...]:
        return (self.sharding_axis,) if isinstance(self.sharding_axis, str) else tuple(self.sharding_axis)

    def _device_mesh(self) -> Mesh:
        if self.mesh is not None:
            missing = [axis for axis in self._axes() if axis not in self.mesh.axis_names]
            if missing:
                raise ValueError(
                    f"sharding_axis {missing} is not in the mesh, which has the axes {self.mesh.axis_names}."
                )
            return self.mesh
        if len(self._axes()) != 1:
            raise ValueError(f"sharding_axis {self._axes()} needs a mesh; pass mesh=.")
        return Mesh(np.asarray(jax.devices()), self._axes())

    def _num_devices(self) -> int:
        return int(np.prod([self._device_mesh().shape[axis] for axis in self._axes()]))


def _trainable_lookup(
    feature_specs: Any, mesh: Mesh, axes: tuple[str, ...], num_devices: int
) -> Callable[[Any, Float[Array, ""] | None, embedding.PreprocessedInput], Any]:
    """A lookup of `(variables, step, inputs)` whose "gradients" are the variables and the step after one update."""
    sharded = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def look_up(variables: Any, inputs: embedding.PreprocessedInput) -> Any:
        return embedding.sparse_dense_matmul(inputs, variables, feature_specs, global_device_count=num_devices)

    def step_tables(d_activations: Any, variables: Any, step: Any, inputs: embedding.PreprocessedInput) -> Any:
        return embedding.sparse_dense_matmul_grad(
            d_activations, inputs, variables, feature_specs, global_device_count=num_devices, step=step
        )

    @jax.custom_vjp
    def lookup(variables: Any, step: Any, inputs: embedding.PreprocessedInput) -> Any:
        return sharded(look_up, in_specs=(P(axes), P(axes)), out_specs=P(axes))(variables, inputs)

    def forward(variables: Any, step: Any, inputs: embedding.PreprocessedInput) -> Any:
        return lookup(variables, step, inputs), (variables, step, inputs)

    def backward(saved: Any, d_activations: Any) -> Any:
        variables, step, inputs = saved
        specs = (P(axes), P(axes), P(), P(axes))
        updated = sharded(step_tables, in_specs=specs, out_specs=P(axes))(d_activations, variables, step, inputs)
        return updated, None if step is None else step + 1.0, None

    lookup.defvjp(forward, backward)
    return lookup
