"""Embedding tables in Flax NNX models.

Each training step updates tables and parameters: a table with the optimizer of its `TableSpec`, and
the parameters of the model with optax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from rsembed import taps
from rsembed.checks import validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.embeddings import check_loss
from rsembed.collection.stack import Activations, Batch
from rsembed.taps import Gradients as Gradients, Loss

_OPTIMIZER = "rs.nnx.Optimizer"


class Tables(nnx.Variable):
    """NNX variable that holds the `EmbeddingState` of a layer.

    `Tables` is not a subclass of `nnx.Param`, so `nnx.grad` and optax ignore the tables.
    """


class Guard(nnx.Param):
    """Parameter of an `Embeddings` layer that does not change the activations.

    `nnx.grad` returns no gradients of tables, so if `nnx.grad` differentiates the model, the
    derivative with respect to a `Guard` raises an error.
    """


class Embeddings(nnx.Module):
    """Flax layer that looks up ids in the tables of a collection.

    `rs.nnx.value_and_grad` and `rs.nnx.Optimizer` train the tables. If a loss calls the layer
    several times, one step applies the summed gradients. A loss cannot call the layer inside
    another JAX transformation, such as a loop or `nnx.remat`: call the layer before the
    transformation.

    Args:
      collection: the tables, in any storage, on one device or a mesh.
      rngs: NNX random streams. The stream `params` provides the random key of the initial tables.
      frozen: whether the tables are only read and not trained, False by default. To freeze a layer
        later, set `layer.frozen = True`, or call
        `model.set_attributes(rs.nnx.Embeddings, frozen=True)` for all layers of a model.

    Example:
      >>> import rsembed as rs
      >>> from flax import nnx
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))({"context": [[1, 2], [3]]})["context"].shape
      (2, 4)
    """

    @validated
    def __init__(self, collection: EmbeddingCollection, *, rngs: nnx.Rngs, frozen: bool = False):
        self.collection = collection
        self.frozen = frozen
        self.tables = Tables(collection.init(rngs.params()))
        self.guard = Guard(jnp.zeros(()))

    def __call__(self, batch: Batch) -> Activations:
        """Activations of every feature. See `EmbeddingCollection.lookup`.

        Raises: RuntimeError: the model is differentiated by a function that returns no gradients of
          tables, such as `nnx.grad`.
        """
        if self.frozen:
            return self.collection.lookup(self.state, batch)
        return taps.look_up(id(self), self.collection, self.state, batch, self.guard.get_value())

    @property
    def state(self) -> EmbeddingState:
        """The tables with their optimizer state, for checkpoints and methods of the collection."""
        return self.tables.get_value()

    def set_state(self, state: EmbeddingState) -> None:
        """Replaces the state of the layer, for example by a state from a checkpoint.

        Raises: ValueError: the state belongs to a different collection.
        """
        self.collection.check_state(state)
        self.tables.set_value(state)

    def prefetch(self, batch: Batch) -> None:
        """Copies the rows for a lookup of `batch` from host memory to the device.

        Tables with the storage `rs.HostCached` have rows in host memory. See
        `EmbeddingCollection.prefetch`.
        """
        self.set_state(self.collection.prefetch(self.state, batch))


@validated
def value_and_grad(
    loss_fn: Loss,
    *,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
) -> Callable[..., tuple[Any, Gradients]]:
    """Function that returns a loss, and its gradients with respect to parameters and tables.

    Args:
      loss_fn: function `loss_fn(model, ...)` that returns the loss, or `(loss, aux)`. JAX traces
        `loss_fn` twice: first to find the lookups, then to compute gradients.
      has_aux: whether `loss_fn` returns `(loss, aux)`, False by default.
      wrt: NNX filter that selects the dense parameters, `nnx.Param` by default.

    Returns: a function `(model, ...) -> (value, gradients)`.

    Raises: RuntimeError: the loss calls an `Embeddings` layer inside another JAX transformation,
      such as a loop, where lookups cannot be recorded.
    """

    def recorded(
        model: object,
        tap_arrays: list[Activations],
        *args: PyTree,
        **kwargs: object,
    ) -> Any:
        """The loss, with the result of `loss_fn` and the recorded lookups as aux output."""
        layers = {}
        for name, layer in _trained_layers(model).items():
            layers[id(layer)] = name
        recording = taps.Recording(layers, tap_arrays)
        result = recording.run(loss_fn, model, *args, **kwargs)
        result = check_loss(result, has_aux=has_aux)
        loss = result
        if has_aux:
            loss = result[0]
        return loss, (result, recording.calls)

    def with_gradients(model: Any, *args: PyTree, **kwargs: Any) -> tuple[Any, Gradients]:
        def recorded_calls(model_copy: object) -> Any:
            # `nnx.eval_shape` calls `recorded_calls` only to find the shapes of the recorded
            # lookups. The arguments are cloned, because the loss may change modules among the
            # arguments.
            args_copy = nnx.clone(args)
            kwargs_copy = nnx.clone(kwargs)
            _, (_, calls) = recorded(model_copy, [], *args_copy, **kwargs_copy)
            return calls

        call_shapes = nnx.eval_shape(recorded_calls, model)
        zeros = [jax.tree.map(jnp.zeros_like, call.activations) for call in call_shapes]
        differentiate = nnx.value_and_grad(
            recorded,
            argnums=(nnx.DiffState(0, wrt), 1),
            has_aux=True,
            graph=True,
            graph_updates=True,
        )
        return taps.value_and_gradients(differentiate(model, zeros, *args, **kwargs))

    return with_gradients


class Optimizer(nnx.Module):
    """Trains tables with the optimizers of their `TableSpec`s, and dense parameters with optax.

    Args:
      model: a model with `Embeddings` layers.
      tx: optax transformation for the dense parameters. The clipping, schedules and weight decay of
        `tx` have no effect on tables.
      wrt: NNX filter that selects the dense parameters, `nnx.Param` by default. `Optimizer` and
        `value_and_grad` need the same filter.

    Raises:
      TypeError: `tx` is not an optax transformation. An `optax.MultiSteps` object is not an optax
        transformation.
      ValueError: `tx` can skip an update of the parameters, as `optax.apply_if_finite` does. A step
        that `tx` skips would still update the tables.
    """

    @validated
    def __init__(self, model: nnx.Module, tx: Any, *, wrt: Any = nnx.Param):
        taps.check_transformation(tx, _OPTIMIZER)
        self.dense = nnx.Optimizer(model, tx, wrt=wrt)
        taps.check_steps_always(self.dense.opt_state, _OPTIMIZER)

    def update(self, model: Any, gradients: Any, **kwargs: Any) -> None:
        """Updates the parameters and tables of the model in place, by one optimizer step.

        Args:
          model: the model to update.
          gradients: the `Gradients` of `value_and_grad`.
          kwargs: keyword arguments that are passed on to optax's `update`.

        Raises:
          TypeError: the gradients come from `nnx.grad`, which returns no gradients of tables.
          ValueError: the gradients belong to a different model.
        """
        taps.check_steps_always(self.dense.opt_state, _OPTIMIZER)
        layers = _trained_layers(model)
        states = {name: layer.state for name, layer in layers.items()}
        new_states = taps.stepped(gradients, states)
        for name, state in new_states.items():
            layers[name].set_state(state)
        # optax mixes integer step counts with floats, which strict dtype promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            self.dense.update(model, gradients.dense, **kwargs)


def _trained_layers(model: Any) -> dict[str, Embeddings]:
    """Dictionary from path to layer, for the `Embeddings` layers that are not frozen."""
    layers = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Embeddings) and not module.frozen:
            layers["/".join(map(str, path))] = module
    return layers
