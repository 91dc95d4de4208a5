"""The NNX layer, which looks up rows and returns the updated tables as its "gradients"."""

from __future__ import annotations

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from rsembed.checks import validated
from rsembed.sparsecore.layout import Nested, Scalar, cores_of, sharding_strategy_to_enum
from rsembed.sparsecore.mesh_lookup import (
    MeshLayer,
    counter_at,
    next_step,
    step_counter,
    step_number as step_number,
    table_mesh,
)
from rsembed.sparsecore.preprocessing import PreprocessedInput
from rsembed.sparsecore.variables import Activations
from rsembed.specs import FeatureSpec, tables_of


class EmbeddingVariablesParam(nnx.Param):
    """Variable of a `SparseCoreEmbed` layer: the tables with their slots, or the step counter.

    Do not pass an `EmbeddingVariablesParam` to optax: its "gradient" is its new value.
    """


def is_embedding_variables(path: object, value: object) -> bool:
    """Filter for `nnx.state` that selects the variables of `SparseCoreEmbed` layers."""
    del path
    return isinstance(value, EmbeddingVariablesParam)


def is_non_embedding_variables(path: object, value: object) -> bool:
    """Filter for `nnx.state` that selects all variables outside `SparseCoreEmbed` layers."""
    return not is_embedding_variables(path, value)


class SparseCoreEmbed(MeshLayer, nnx.Module):
    """Layer that looks up the rows of all features, and updates the rows in the backward pass.

    As gradients of this layer, `nnx.grad` returns the UPDATED tables, slots and step counter, after
    one optimizer step. `PartitionedOptimizer` writes the updated values into the model. A loss may
    call the layer only once, because autodiff would add up the updated tables of two calls.

    The variable `step` is a counter of the training steps. `step_number` converts the counter to a
    number. The step counter stays exact even if all parameters are cast to a 16-bit dtype.

    Args:
      feature_specs: specs with their tables already assigned to stacks, see
        `embedding.prepare_feature_specs_for_training`.
      sharding_axis: mesh axis (or axes) that shards tables and batch. Tables and batch are
        replicated along mesh axes that are not in `sharding_axis`.
      mesh: mesh with the devices of the layer, by default a mesh with all devices on one axis.
      rngs: random streams. The stream `params` has the key of the initial tables.
      enable_minibatching: whether a batch that exceeds a limit is split into minibatches instead of
        raising an error, False by default.
      table_sharding_strategy: "MOD", the only sharding strategy.
      num_sc_per_device: cores per device, by default the number for which the tables were stacked.
        The layer's attribute `num_sc_per_device` has the number of cores that the layer uses.
    """

    @validated
    def __init__(
        self,
        feature_specs: Nested[FeatureSpec],
        sharding_axis: str | tuple[str, ...] = "sparsecore_sharding",
        mesh: Mesh | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        enable_minibatching: bool = False,
        table_sharding_strategy: str = "MOD",
        num_sc_per_device: int | None = None,
    ):
        sharding_strategy_to_enum(table_sharding_strategy)
        if rngs is None:
            raise ValueError(
                "SparseCoreEmbed needs rngs, the source of its initial tables, as in rngs=nnx.Rngs(0)."
            )
        self.feature_specs = nnx.static(feature_specs)
        devices = table_mesh(mesh, sharding_axis)
        self.mesh = nnx.static(devices.known_mesh)
        self.sharding_axis = sharding_axis
        self.table_sharding_strategy = table_sharding_strategy
        placed = list(tables_of(feature_specs).values())
        self.num_sc_per_device = cores_of(placed, devices.num_devices, num_sc_per_device)
        self.enable_minibatching = enable_minibatching
        variables = self._tables().init(rngs.params())
        self.embedding_table = EmbeddingVariablesParam(variables, table_axes=devices.axes)
        self.step = EmbeddingVariablesParam(step_counter(0))

    def __call__(
        self, embedding_lookup_inputs: PreprocessedInput, step: Scalar | None = None
    ) -> Activations:
        """Activations `[global samples, output dim]` in a tree like `feature_specs`.

        Args:
          embedding_lookup_inputs: a preprocessed batch, with the buffers of all devices.
          step: 0-based index of the training step of this lookup. After the update, the layer's
            step counter is `step + 1`. By default, `step` is the value of the counter. If all calls
            pass step 0, Adam applies the bias correction of its first step to all steps.
        """
        counter = counter_at(self.step.get_value(), step)
        return self._tables().train(
            self.embedding_table.get_value(), counter, embedding_lookup_inputs
        )

    def apply_gradient(
        self, gradients: Activations, inputs: PreprocessedInput, step: Scalar | None = None
    ) -> None:
        """Updates tables, slots and counter of the layer, without `nnx.grad`.

        Args:
          gradients: gradients of the activations, in a tree like `feature_specs`.
          inputs: the batch that was looked up.
          step: see `__call__`.
        """
        counter = counter_at(self.step.get_value(), step)
        variables = self.embedding_table.get_value()
        updated = self._tables().update(gradients, variables, step_number(counter), inputs)
        self.embedding_table.set_value(updated)
        self.step.set_value(next_step(counter))


def embedding_lookup(
    embedding_layer: SparseCoreEmbed,
    embedding_lookup_inputs: PreprocessedInput,
    step: Scalar | None = None,
) -> Activations:
    """Looks up a batch in a layer, and returns the activations. See `SparseCoreEmbed.__call__`."""
    return embedding_layer(embedding_lookup_inputs, step)


def embedding_lookup_bwd(res: PyTree, g: PyTree) -> PyTree:
    """Backward pass of a lookup, for `nnx.custom_vjp`: "gradients" of the layer, inputs and step.

    Args:
      res: layer, inputs and step of the lookup.
      g: the pair that `nnx.custom_vjp` passes to a backward function. The first item of `g` is a
        tuple of three: state of the layer, gradients of the inputs, gradient of the step. The
        second item of `g` has the gradients of the activations.

    Returns:
      The "gradients" of layer, inputs and step. The "gradient" of the layer is its state, with
      updated tables and counter. The gradients of inputs and step are returned as they are in
      `g`.
    """
    layer, inputs, step = res
    (state, *others), d_activations = g
    counter = counter_at(layer.step.get_value(), step)
    variables = layer._tables().update(
        d_activations, layer.embedding_table.get_value(), step_number(counter), inputs
    )
    new = {"embedding_table": variables, "step": next_step(counter)}
    # The layer state of a program for jax-tpu-embedding has only tables, and no `step`.
    return type(state)({name: param.replace(new[name]) for name, param in state.items()}), *others


class PartitionedOptimizer(nnx.Module):
    """Optimizer of a model: replaces tables, and updates all other parameters with optax.

    Args:
      model: a module with `SparseCoreEmbed` layers and dense layers.
      dense_optimizer: optimizer of the parameters outside `SparseCoreEmbed` layers. The state of
        `dense_optimizer` has no slots for the tables, and its gradient norms do not include the
        tables.
    """

    def __init__(self, model: nnx.Module, dense_optimizer: optax.GradientTransformation):
        self.dense = nnx.Optimizer(
            model, dense_optimizer, wrt=nnx.All(nnx.Param, is_non_embedding_variables)
        )

    def update(self, model: nnx.Module, grads: PyTree) -> None:
        """Updates the model in place with gradients from `nnx.grad`."""
        nnx.update(model, nnx.state(grads, is_embedding_variables))
        # optax mixes integers and floats, which is an error with strict dtype promotion.
        with jax.numpy_dtype_promotion("standard"):
            self.dense.update(model, grads)


def get_named_sharding(node: nnx.Module, mesh: Mesh) -> nnx.StateSharding:
    """Shardings of the state of a model or an optimizer, for `in_shardings` of `nnx.jit`.

    Tables and slots are sharded along the axes of their layer. A variable that is neither a table
    nor a slot has the sharding in its metadata entry `sharding_names`, or is replicated if
    `sharding_names` is missing.

    Args:
      node: an `nnx.Module` or `nnx.Optimizer`.
      mesh: the mesh of the layers.
    """

    def sharding_of(path: object, value: nnx.Variable) -> nnx.Variable:
        del path
        axes = value.get_metadata().get("table_axes")
        names = value.get_metadata().get("sharding_names")
        spec = P(axes) if axes is not None else P(*(names or ()))
        return value.replace(NamedSharding(mesh, spec))

    return nnx.StateSharding(nnx.map_state(sharding_of, nnx.state(node)))
