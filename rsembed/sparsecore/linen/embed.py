"""The Linen layer, which looks up rows and returns the updated tables as its "gradients"."""

from __future__ import annotations

from flax import linen as nn
from flax.core import meta
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from rsembed.sparsecore import embedding
from rsembed.sparsecore.layout import Scalar, cores_of, sharding_strategy_to_enum
from rsembed.sparsecore.mesh_lookup import (
    MeshLayer,
    counter_at,
    next_step,
    step_counter,
    step_number as step_number,
    table_mesh,
)
from rsembed.sparsecore.variables import Activations, EmbeddingVariables, Variables
from rsembed.specs import FeatureSpec, tables_of

EMBEDDING_PARAM_NAME = "sc_embedding_variables"
STEP_PARAM_NAME = "sc_embedding_step"

EmbeddingLookupInput = embedding.PreprocessedInput
WithSparseCoreLayout = meta.Partitioned
with_sparsecore_layout = meta.with_partitioning


class SparseCoreEmbed(MeshLayer, nn.Module):
    """Layer that looks up the rows of all features, and updates the rows in the backward pass.

    For the layer's parameters, `jax.grad` returns no gradients, but the UPDATED tables, optimizer
    slots and step counter after one optimizer step. The functions of `embed_optimizer` write the
    updated values into the parameters, and update all other parameters with optax. A loss may call
    the layer only once, because autodiff would add the updated tables of two calls.

    The parameter `sc_embedding_step` is a counter of the training steps. `step_number` converts the
    counter to a number. The counter stays exact if all parameters are cast to a 16-bit dtype.

    Attributes:
      feature_specs: specs of all features, with their tables already assigned to stacks. See
        `embedding.prepare_feature_specs_for_training`.
      sharding_axis: mesh axis (or axes) that shards tables and batch. Tables and batch are
        replicated along mesh axes that `sharding_axis` does not name.
      mesh: mesh with the devices of the layer. If you pass None, the default, the attribute `mesh`
        is set to a mesh with all devices on one axis.
      table_sharding_strategy: "MOD", the only sharding strategy.
      enable_minibatching: whether a batch that exceeds a limit is split into minibatches instead of
        raising an error, False by default.
      num_sc_per_device: SparseCores per device. If you pass None, the default, or -1, the attribute
        `num_sc_per_device` is set to the number for which the tables were stacked.
    """

    feature_specs: embedding.Nested[FeatureSpec]
    sharding_axis: str | tuple[str, ...] = "sparsecore_sharding"
    mesh: Mesh | None = None
    table_sharding_strategy: str = "MOD"
    enable_minibatching: bool = False
    num_sc_per_device: int | None = None

    def __post_init__(self) -> None:
        sharding_strategy_to_enum(self.table_sharding_strategy)
        devices = table_mesh(self.mesh, self.sharding_axis)
        self.mesh = devices.known_mesh
        if self.num_sc_per_device in (None, -1):
            self.num_sc_per_device = cores_of(
                list(tables_of(self.feature_specs).values()), devices.num_devices, None
            )
        super().__post_init__()

    @property
    def embedding_table(self) -> dict[str, EmbeddingVariables]:
        """Tables and optimizer slots by stack name, if the layer is bound to its parameters."""
        if not self.has_variable("params", EMBEDDING_PARAM_NAME):
            raise ValueError(
                "the layer has no parameters here; pass those that init or training returned."
            )
        return meta.unbox(self.get_variable("params", EMBEDDING_PARAM_NAME))

    @nn.compact
    def __call__(
        self, embedding_lookup_inputs: embedding.PreprocessedInput, step: Scalar | None = None
    ) -> Activations:
        """Activations `[global samples, output dim]` in a tree like `feature_specs`.

        Args:
          embedding_lookup_inputs: a preprocessed batch of all devices.
          step: index, from 0, of the training step of this lookup. After the update, the layer's
            step counter is `step + 1`. By default, `step` is the value of the counter. In
            jax-tpu-embedding, the step is always 0, so Adam applies the bias correction of its
            first step to all steps.
        """
        tables = self._tables()
        # One entry of a partition spec may be several mesh axes.
        axes: PyTree = (tables.devices.axes,)
        variables = self.param(EMBEDDING_PARAM_NAME, with_sparsecore_layout(tables.init, axes))
        counter = self.param(STEP_PARAM_NAME, lambda key: step_counter(0))
        return tables.train(variables, counter_at(counter, step), embedding_lookup_inputs)

    def apply_gradient(
        self,
        gradients: Activations,
        embedding_lookup_inputs: embedding.PreprocessedInput,
        step: Scalar | None = None,
    ) -> dict[str, Variables | Array]:
        """Applies one optimizer step without autodiff, and returns the layer's new parameters.

        Call `apply_gradient` as `layer.apply({"params": params}, gradients, inputs,
        method="apply_gradient")` and replace `params` by the result. In a model, parameter names
        begin with the path of the layer, as in "tower/embed/...".

        Args:
          gradients: gradients of the activations, in a tree like `feature_specs`.
          embedding_lookup_inputs: the batch that was looked up.
          step: see `__call__`.
        """
        variables = self.embedding_table
        counter = counter_at(self.get_variable("params", STEP_PARAM_NAME), step)
        updated = self._tables().update(
            gradients, variables, step_number(counter), embedding_lookup_inputs
        )
        result = {EMBEDDING_PARAM_NAME: updated, STEP_PARAM_NAME: next_step(counter)}
        return {"/".join((*self.path, name)): value for name, value in result.items()}
