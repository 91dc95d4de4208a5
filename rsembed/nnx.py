"""Tables in Flax NNX models: they train by their own rules, all other parameters by optax, in one step."""

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
from rsembed.taps import Gradients as Gradients

_OPTIMIZER = "rs.nnx.Optimizer"


class Tables(nnx.Variable):
    """An `EmbeddingState`: no parameter, so that neither `nnx.grad` nor optax sees it."""


class Guard(nnx.Param):
    """A parameter that no result depends on: a gradient that reaches it would leave the tables untrained."""


class Embeddings(nnx.Module):
    """The tables of a collection, as a layer that `rs.nnx.value_and_grad` and `rs.nnx.Optimizer` train.

    Several calls in a loss are one step of the summed gradients. Inside a transformation of JAX, such as a loop or
    `nnx.remat`, a loss cannot call it; look up before.

    Args:
      collection: the tables, in any storage, on one device or a mesh.
      rngs: its stream `params` gives the key of the initial tables.
      frozen: tables are only read. May be set at any time: `layer.frozen = True`, or for all layers
        `model.set_attributes(rs.nnx.Embeddings, frozen=True)`.

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
        """Activations of every feature; see `EmbeddingCollection.lookup`.

        Raises: RuntimeError: the model is differentiated in a way that forgets the tables.
        """
        if self.frozen:
            return self.collection.lookup(self.state, batch)
        return taps.look_up(id(self), self.collection, self.state, batch, self.guard.get_value())

    @property
    def state(self) -> EmbeddingState:
        """The tables with their optimizer state, for the methods of the collection and for checkpoints."""
        return self.tables.get_value()

    def set_state(self, state: EmbeddingState) -> None:
        """Replaces the layer's state, for example by one from a checkpoint.

        Raises: ValueError: it is not of the layer's collection.
        """
        self.collection.check_state(state)
        self.tables.set_value(state)

    def prefetch(self, batch: Batch) -> None:
        """Copies the batch's rows of host-cached tables to the device; see `EmbeddingCollection.prefetch`."""
        self.set_state(self.collection.prefetch(self.state, batch))


@validated
def value_and_grad(
    loss_fn: Callable[..., PyTree], *, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., tuple[Any, Gradients]]:
    """Value and gradients of a loss by the dense parameters and the tables of a model.

    Args:
      loss_fn: `loss_fn(model, ...)` returns the loss, or `(loss, aux)`; it is traced twice.
      has_aux: as for `nnx.value_and_grad`.
      wrt: filter of the dense parameters.

    Returns: a function `(model, ...) -> (value, gradients)`.

    Raises: RuntimeError: the loss calls a layer inside another transformation, where that cannot be recorded.
    """

    def with_gradients(model: Any, *args: PyTree, **kwargs: Any) -> tuple[Any, Gradients]:
        def recorded(model: Any, own_taps: list[Activations], *args: PyTree, **kwargs: Any) -> Any:
            layers = {id(layer): name for name, layer in _trained_layers(model).items()}
            recording = taps.Recording(layers, own_taps)
            result = check_loss(recording.run(loss_fn, model, *args, **kwargs), has_aux=has_aux)
            return result[0] if has_aux else result, (result, recording.calls)

        # On clones: what the loss changes here must not be seen outside.
        calls = nnx.eval_shape(lambda copy: recorded(copy, [], *nnx.clone(args), **nnx.clone(kwargs))[1][1], model)
        zeros = [jax.tree.map(jnp.zeros_like, call.activations) for call in calls]
        by = (nnx.DiffState(0, wrt), 1)
        differentiated = nnx.value_and_grad(recorded, argnums=by, has_aux=True, graph=True, graph_updates=True)
        (_, (value, calls)), (dense, d_taps) = differentiated(model, zeros, *args, **kwargs)
        return value, Gradients.of(dense, calls, d_taps)

    return with_gradients


class Optimizer(nnx.Module):
    """Steps tables by their rules, and dense parameters by optax, which never sees a table.

    Args:
      model: a model with `Embeddings` layers.
      tx: optax transformation for the dense parameters. What it does to gradients, such as clipping,
        schedules and weight decay, does not act on rows.
      wrt: as for `value_and_grad`.

    Raises: TypeError, ValueError: `tx` decides whether a step is made, as `optax.MultiSteps` and
      `optax.apply_if_finite` do; the tables would not follow.
    """

    @validated
    def __init__(self, model: nnx.Module, tx: Any, *, wrt: Any = nnx.Param):
        taps.check_transformation(tx, _OPTIMIZER)
        self.dense = nnx.Optimizer(model, tx, wrt=wrt)
        taps.check_steps_always(self.dense.opt_state, _OPTIMIZER)

    def update(self, model: Any, gradients: PyTree, **kwargs: Any) -> None:
        """One step, in place, with the `Gradients` of `value_and_grad`; `kwargs` are optax's.

        Raises: TypeError: the gradients are those of `nnx.grad`, which has nothing for the tables. ValueError: they are
          of another model.
        """
        taps.check_steps_always(self.dense.opt_state, _OPTIMIZER)
        layers = _trained_layers(model)
        states = {name: layer.state for name, layer in layers.items()}
        for name, state in taps.stepped(gradients, states).items():
            layers[name].set_state(state)
        # optax mixes its integer step counts with floats, whatever the user's promotion setting is.
        with jax.numpy_dtype_promotion("standard"):
            self.dense.update(model, gradients.dense, **kwargs)


def _trained_layers(model: Any) -> dict[str, Embeddings]:
    """The layers that are not frozen, by path."""
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    return {name: layer for name, layer in modules.items() if isinstance(layer, Embeddings) and not layer.frozen}
