"""The Linen layer: lookup in the forward pass, the optimizer step of the tables in the backward pass."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import Mesh

from rsembed.fdo.statistics import SparseDenseMatmulInputStats
from rsembed.sparsecore import embedding
from rsembed.sparsecore.layout import sharding_strategy_to_enum
from rsembed.sparsecore.mesh_lookup import MeshTables, next_step, table_mesh
from rsembed.specs import FeatureSpec

EMBEDDING_PARAM_NAME = "sc_embedding_variables"
STEP_PARAM_NAME = "sc_embedding_step"

EmbeddingLookupInput = embedding.PreprocessedInput
WithSparseCoreLayout = meta.Partitioned
with_sparsecore_layout = meta.with_partitioning


class SparseCoreEmbed(nn.Module):
    """Activations of all features; differentiating it trains the tables.

    The layer's parameters have an unusual gradient: `jax.grad` returns the UPDATED tables, slots and step counter, one
    optimizer step after the lookup. Use `embed_optimizer`, which puts them in place and leaves the rest to optax. Call
    a layer once in a loss: of two calls, autodiff would add up the two updated tables.

    Attributes:
      feature_specs: placed specs; see `embedding.prepare_feature_specs_for_training`.
      sharding_axis: mesh axis (or axes) over which tables and batch are cut; other axes of the mesh hold copies.
      mesh: the devices; None means all of them.
      table_sharding_strategy: "MOD".
      enable_minibatching: split batches that exceed a limit, instead of refusing them.
      frozen_step: hide the step from the optimizers: Adam corrects its bias as in the first step for ever, and
        learning rates that depend on the step fail. So does the published layer; by default a counter beside the
        tables keeps the true step (as float32, exact for 16 million steps).
      num_sc_per_device: cores per device; None takes the number that the specs were placed for.
    """

    feature_specs: embedding.Nested[FeatureSpec]
    sharding_axis: str | tuple[str, ...] = "sparsecore_sharding"
    mesh: Mesh | None = None
    table_sharding_strategy: str = "MOD"
    enable_minibatching: bool = False
    frozen_step: bool = False
    num_sc_per_device: int | None = None

    @nn.compact
    def __call__(self, embedding_lookup_inputs: embedding.PreprocessedInput) -> Any:
        """Activations `[global samples, output dim]` in a tree like `feature_specs`.

        Args:
          embedding_lookup_inputs: a preprocessed batch of all devices.
        """
        tables = self._tables()
        axes: Any = (tables.devices.axes,)  # one entry of a partition spec may be several mesh axes
        variables = self.param(EMBEDDING_PARAM_NAME, with_sparsecore_layout(tables.init, axes))
        step = None if self.frozen_step else self.param(STEP_PARAM_NAME, lambda key: jnp.zeros((), jnp.float32))
        return tables.train(variables, step, embedding_lookup_inputs)

    def apply_gradient(
        self, gradients: Any, embedding_lookup_inputs: embedding.PreprocessedInput, step: Any = None
    ) -> dict[str, Any]:
        """The layer's parameters after one update with the given gradients: what autodiff returns, without it.

        Call it as `layer.apply({"params": params}, gradients, inputs, method="apply_gradient")` and put the result in
        the place of `params`.

        Args:
          gradients: gradients of the activations, in a tree like `feature_specs`.
          embedding_lookup_inputs: the batch that was looked up.
          step: 0-based step; None reads the layer's own counter (or hides the step, if it is frozen).
        """
        boxed: Any = self.get_variable("params", EMBEDDING_PARAM_NAME)
        if boxed is None:
            raise ValueError("apply_gradient needs the layer's parameters; pass those that init or training returned.")
        if step is None and not self.frozen_step:
            step = self.get_variable("params", STEP_PARAM_NAME)
        updated = self._tables().update(gradients, meta.unbox(boxed), step, embedding_lookup_inputs)
        result = {EMBEDDING_PARAM_NAME: meta.replace_boxed(boxed, updated)}
        if not self.frozen_step:
            result[STEP_PARAM_NAME] = next_step(jnp.asarray(step, jnp.float32))
        return result

    def preprocess_inputs(
        self, step: int, features: Any, features_weights: Any, all_reduce_interface: Any = None
    ) -> embedding.PreprocessedInput:
        """Preprocesses this process' part of a batch for the layer's devices, without returning statistics."""
        options = {"batch_number": step, "all_reduce_interface": all_reduce_interface}
        return self._tables().preprocess(features, features_weights, **options)[0]

    def prepare_batch(
        self, features: Any, features_weights: Any = None, **options: Any
    ) -> tuple[embedding.PreprocessedInput, SparseDenseMatmulInputStats]:
        """A batch ready for the layer, as global arrays on its devices, and the statistics for `rsembed.fdo`.

        Args:
          features: ids of this process' samples, in a tree like `feature_specs`.
          features_weights: weights in the same tree, or None.
          options: of `embedding.preprocess_sparse_dense_matmul_input`, such as `allow_id_dropping` and `batch_number`.
        """
        return self._tables().prepare(features, features_weights, **options)

    def _tables(self) -> MeshTables:
        sharding_strategy_to_enum(self.table_sharding_strategy)
        return MeshTables(
            feature_specs=self.feature_specs,
            devices=table_mesh(self.mesh, self.sharding_axis),
            num_sc_per_device=self.num_sc_per_device,
            enable_minibatching=self.enable_minibatching,
        )
