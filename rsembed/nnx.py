"""Tables in Flax NNX models: they train by their own rules, all other parameters by optax, in one step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

from rsembed import taps
from rsembed.checks import validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.embeddings import check_loss
from rsembed.collection.stack import Activations, Batch
from rsembed.taps import Gradients as Gradients


class Tables(nnx.Variable):
    """An `EmbeddingState`: no parameter, so that neither `nnx.grad` nor optax sees it."""


class Guard(nnx.Param):
    """A parameter that no result depends on: a gradient that reaches it would leave the tables untrained."""


class Taps(nnx.Variable):
    """Zeros that `value_and_grad` adds to activations while it runs; no model has them elsewhere."""


class Calls(nnx.Variable):
    """Record of the lookups of a layer while `value_and_grad` runs; no model has it elsewhere."""


_WAY_OUT = (
    "Use loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ...) and rs.nnx.Optimizer(...).update(model, "
    "gradients); or, to leave the tables as they are, set layer.frozen = True."
)


_LEFT_BEHIND = re.compile(r"mutate Calls|\['calls'\]\.value")
"""Texts in errors of Flax and JAX about a record of lookups that was made inside a transformation of theirs."""
_places: ContextVar[list[PyTree]] = ContextVar("places of the lookups of a loss")
"""The trace of each lookup while a loss is recorded: `nnx.scan` drops the record of a model that it only reads."""


class Embeddings(nnx.Module):
    """The tables of a collection, as a layer that `rs.nnx.value_and_grad` and `rs.nnx.Optimizer` train.

    Several calls in a loss are one step of the summed gradients. Inside a loop or branch of JAX a loss cannot call it;
    look up before.

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
        self.taps: Any = nnx.data(None)
        self.calls: Any = nnx.data(None)

    def __call__(self, batch: Batch) -> Activations:
        """Activations of every feature; see `EmbeddingCollection.lookup`.

        Raises: RuntimeError: the model is differentiated in a way that forgets the tables.
        """
        if self.frozen:
            return self.collection.lookup(self.state, batch)
        if self.taps is None:
            return taps.look_up_guarded(self.collection, self.state, batch, self.guard.get_value(), _WAY_OUT)
        _places.get().append(get_opaque_trace_state(convention="nnx"))
        own, earlier = self.taps.get_value(), self.calls.get_value()
        activations, calls = taps.look_up(self.collection, self.state, batch, own, earlier)
        self.calls.set_value(calls)
        return activations

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

    Raises: RuntimeError: the loss calls a layer in a scan, a branch or a `vmap`, where that cannot be recorded.
    """

    def with_gradients(model: Any, *args: PyTree, **kwargs: Any) -> tuple[Any, Gradients]:
        graphdef, variables = nnx.split(model)

        def record(variables: Any) -> dict[str, taps.Calls]:
            # On clones: what the loss changes here must not be seen outside.
            copy, (more, named) = nnx.merge(graphdef, variables), nnx.clone((args, kwargs))
            layers = _trained_layers(copy)
            for layer in layers.values():
                layer.taps, layer.calls = Taps(()), Calls(())
            _places.set([])
            here = get_opaque_trace_state(convention="nnx")
            check_loss(loss_fn(copy, *more, **named), has_aux=has_aux)
            recorded = {name: layer.calls.get_value() for name, layer in layers.items()}
            num_inside = sum(place != here for place in _places.get())
            if num_inside and sum(map(len, recorded.values())) <= len(_places.get()) - num_inside:
                raise taps.in_another_transformation(layers)
            return recorded

        layers = _trained_layers(model)
        if any(layer.taps is not None for layer in layers.values()):
            raise RuntimeError("value_and_grad of a model inside its own value_and_grad would lose gradients of rows.")
        try:
            recorded = jax.eval_shape(record, variables)
        except (TraceContextError, TypeError, ValueError) as error:
            if not _LEFT_BEHIND.search(str(error)):
                raise
            raise taps.in_another_transformation(layers) from error
        by = nnx.DiffState(0, nnx.Any(wrt, Taps))
        differentiated = nnx.value_and_grad(loss_fn, argnums=by, has_aux=has_aux, graph=True, graph_updates=True)
        try:
            for name, layer in layers.items():
                layer.taps, layer.calls = Taps(taps.taps_of(recorded[name])), Calls(())
            value, gradients = differentiated(model, *args, **kwargs)
            calls = {name: layer.calls.get_value() for name, layer in layers.items()}
        finally:
            for layer in layers.values():
                layer.taps = layer.calls = None
        d_taps, dense = nnx.split_state(gradients, Taps, ...)
        of_layer = {_name(path[:-1]): own.get_value() for path, own in nnx.to_flat_state(d_taps)}
        return value, Gradients.of(dense, calls, of_layer)

    return with_gradients


class Optimizer(nnx.Module):
    """Steps tables by their rules, and dense parameters by optax, which never sees a table.

    Args:
      model: a model with `Embeddings` layers.
      tx: optax transformation for the dense parameters.
      wrt: as for `value_and_grad`.
    """

    @validated
    def __init__(self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param):
        self.dense = nnx.Optimizer(model, tx, wrt=wrt)

    def update(self, model: Any, gradients: PyTree, **kwargs: Any) -> None:
        """One step, in place, with the `Gradients` of `value_and_grad`; `kwargs` are optax's.

        Raises: TypeError: the gradients are those of `nnx.grad`, which has nothing for the tables. ValueError: they are
          of another model.
        """
        layers = _trained_layers(model)
        states = {name: layer.state for name, layer in layers.items()}
        for name, state in taps.stepped(gradients, states, _WAY_OUT).items():
            layers[name].set_state(state)
        # optax mixes its integer step counts with floats, whatever the user's promotion setting is.
        with jax.numpy_dtype_promotion("standard"):
            self.dense.update(model, gradients.dense, **kwargs)


def _trained_layers(model: Any) -> dict[str, Embeddings]:
    """The layers that are not frozen, by path."""
    found = {_name(path): module for path, module in nnx.iter_modules(model) if isinstance(module, Embeddings)}
    return {name: layer for name, layer in found.items() if not layer.frozen}


def _name(path: tuple[PyTree, ...]) -> str:
    return "/".join(map(str, path))
