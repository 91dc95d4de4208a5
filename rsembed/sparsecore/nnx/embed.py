"""The NNX layer: lookup in the forward pass, the optimizer step of the tables in the backward pass."""

from __future__ import annotations

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from rsembed.checks import validated
from rsembed.sparsecore.layout import Nested, Scalar, cores_of, sharding_strategy_to_enum
from rsembed.sparsecore.mesh_lookup import MeshLayer, counter_at, next_step, step_counter, table_mesh
from rsembed.sparsecore.mesh_lookup import step_number as step_number
from rsembed.sparsecore.preprocessing import PreprocessedInput
from rsembed.specs import FeatureSpec, tables_of


class EmbeddingVariablesParam(nnx.Param):
    """Tables with their slots, or a step counter: parameters that optax must not see."""


def is_embedding_variables(path: object, value: object) -> bool:
    """Filter of `nnx.state` and friends: the parameters of `SparseCoreEmbed` layers."""
    del path
    return isinstance(value, EmbeddingVariablesParam)


def is_non_embedding_variables(path: object, value: object) -> bool:
    """Filter of `nnx.state` and friends: everything but the parameters of `SparseCoreEmbed` layers."""
    return not is_embedding_variables(path, value)


class SparseCoreEmbed(MeshLayer, nnx.Module):
    """Activations of all features; differentiating it trains the tables.

    `nnx.grad` returns for this layer the UPDATED tables, slots and step counter, one optimizer step after the lookup;
    `PartitionedOptimizer` puts them in place. Call a layer once in a loss: of two calls, autodiff would add up the two
    updated tables.

    Args:
      feature_specs: placed specs; see `embedding.prepare_feature_specs_for_training`.
      sharding_axis: mesh axis (or axes) over which tables and batch are cut; other axes of the mesh hold copies.
      mesh: the devices; None means all of them.
      rngs: its stream `params` gives the key of the initial tables.
      enable_minibatching: split batches that exceed a limit, instead of refusing them.
      table_sharding_strategy: "MOD".
      num_sc_per_device: cores per device; None takes the number that the specs were placed for, which the layer tells.

    A counter beside the tables, `step`, keeps the step, which `step_number` reads; a cast of all parameters leaves it
    exact.
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
            raise ValueError("SparseCoreEmbed needs rngs, the source of its initial tables, as in rngs=nnx.Rngs(0).")
        self.feature_specs = nnx.static(feature_specs)
        devices = table_mesh(mesh, sharding_axis)
        self.mesh = nnx.static(devices.known_mesh)
        self.sharding_axis, self.table_sharding_strategy = sharding_axis, table_sharding_strategy
        placed = list(tables_of(feature_specs).values())
        self.num_sc_per_device = cores_of(placed, devices.num_devices, num_sc_per_device)
        self.enable_minibatching = enable_minibatching
        variables = self._tables().init(rngs.params())
        self.embedding_table = EmbeddingVariablesParam(variables, table_axes=devices.axes)
        self.step = EmbeddingVariablesParam(step_counter(0))

    def __call__(self, embedding_lookup_inputs: PreprocessedInput, step: Scalar | None = None) -> PyTree:
        """Activations `[global samples, output dim]` in a tree like `feature_specs`.

        Args:
          embedding_lookup_inputs: a preprocessed batch of all devices.
          step: 0-based step of the update that autodiff will ask for; the counter goes on from it. None reads the
            counter. With 0 in every call, Adam corrects its bias as in the first step for ever.
        """
        counter = counter_at(self.step.get_value(), step)
        return self._tables().train(self.embedding_table.get_value(), counter, embedding_lookup_inputs)

    def apply_gradient(self, gradients: PyTree, inputs: PreprocessedInput, step: Scalar | None = None) -> None:
        """Updates tables, slots and counter in place: what autodiff and `PartitionedOptimizer` do, without them.

        Args:
          gradients: gradients of the activations, in a tree like `feature_specs`.
          inputs: the batch that was looked up.
          step: as for a call.
        """
        counter, variables = counter_at(self.step.get_value(), step), self.embedding_table.get_value()
        self.embedding_table.set_value(self._tables().update(gradients, variables, step_number(counter), inputs))
        self.step.set_value(next_step(counter))


def embedding_lookup(
    embedding_layer: SparseCoreEmbed, embedding_lookup_inputs: PreprocessedInput, step: Scalar | None = None
) -> PyTree:
    """The trainable lookup of a layer; see `SparseCoreEmbed.__call__`."""
    return embedding_layer(embedding_lookup_inputs, step)


def embedding_lookup_bwd(res: PyTree, g: PyTree) -> PyTree:
    """Backward pass of a lookup: the "gradients" of layer, inputs and step, in the form of `nnx.custom_vjp`.

    Args:
      res: layer, inputs and step of the lookup.
      g: a state of the layer beside what is returned for inputs and step, and the gradients of the activations.

    Returns:
      The state with updated tables and counter in it, and the other two as they came.
    """
    (layer, inputs, step), ((state, *others), d_activations) = res, g
    counter = counter_at(layer.step.get_value(), step)
    variables = layer._tables().update(d_activations, layer.embedding_table.get_value(), step_number(counter), inputs)
    new = {"embedding_table": variables, "step": next_step(counter)}
    # The state of a program that was written for the published layer holds the tables alone.
    return type(state)({name: param.replace(new[name]) for name, param in state.items()}), *others


class PartitionedOptimizer(nnx.Module):
    """Puts updated tables in place and leaves all other parameters to optax.

    Args:
      model: holds `SparseCoreEmbed` layers and dense ones.
      dense_optimizer: never sees tables, so its norms and state are those of the dense part.
    """

    def __init__(self, model: nnx.Module, dense_optimizer: optax.GradientTransformation):
        self.dense = nnx.Optimizer(model, dense_optimizer, wrt=nnx.All(nnx.Param, is_non_embedding_variables))

    def update(self, model: nnx.Module, grads: PyTree) -> None:
        """Applies what `nnx.grad` of the model returned, in place."""
        nnx.update(model, nnx.state(grads, is_embedding_variables))
        # optax mixes its integer step counts with floats, whatever the user's promotion setting is.
        with jax.numpy_dtype_promotion("standard"):
            self.dense.update(model, grads)


def get_named_sharding(node: nnx.Module, mesh: Mesh) -> nnx.StateSharding:
    """Shardings of a model's or optimizer's state, for `in_shardings` of `nnx.jit`.

    Tables and slots are cut along the axes of their layer. Every other variable follows its own annotation, and is
    copied to all devices if it has none.

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
