"""Embedding tables in Flax Linen models.

Each training step updates tables and parameters: a table with the optimizer of its `TableSpec`, and
the parameters of the model with optax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, struct, traverse_util
from jaxtyping import PyTree

from rsembed import taps
from rsembed.checks import check_fields, check_type, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.embeddings import check_loss
from rsembed.collection.stack import Activations, Batch
from rsembed.taps import Gradients as Gradients, Loss, Params

_TRAIN_STATE = "rs.linen.TrainState"


class Embeddings(nn.Module):
    """Flax layer that looks up ids in the tables of a collection.

    `rs.linen.value_and_grad` and `rs.linen.TrainState` train the tables. The `EmbeddingState` is
    the variable `tables` of the variable collection `embeddings`. The layer has a parameter
    `guard`, which does not change the activations. `jax.grad` returns no gradients of tables, so if
    `jax.grad` differentiates the model, the derivative with respect to `guard` raises an error.

    Attributes:
      collection: the tables, in any storage, on one device or a mesh.
      frozen: whether the tables are only read and not trained, False by default.

    Example:
      >>> import jax, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4)
      >>> layer = rs.linen.Embeddings(rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)]))
      >>> variables = layer.init(jax.random.key(0), {"context": [[1, 2], [3]]})
      >>> layer.apply(variables, {"context": [[1, 2], [3]]})["context"].shape
      (2, 4)
    """

    collection: EmbeddingCollection
    frozen: bool = False

    @nn.compact
    def __call__(self, batch: Batch) -> Activations:
        """Activations of every feature. See `EmbeddingCollection.lookup`.

        Raises: RuntimeError: the model is differentiated by a function that returns no gradients of
          tables, such as `jax.grad`.
        """
        check_fields(self)
        state = self.variable(
            "embeddings", "tables", lambda: self.collection.init(self.make_rng("params"))
        ).value
        guard = self.param("guard", lambda _: jnp.zeros(()))
        if self.frozen:
            return self.collection.lookup(state, batch)
        return taps.look_up("/".join(self.path), self.collection, state, batch, guard)


@no_type_check  # Field types are unchecked, because JAX puts placeholders into fields of pytrees.
class TrainState(struct.PyTreeNode):
    """State of a training run: the fields of Flax's `TrainState`, and the tables of all layers.

    Args:
      step: number of updates so far.
      apply_fn: the `apply` method of the model.
      params: the variable collection `params` of the model.
      embeddings: dictionary from the path of each layer to the tables and optimizer state of the
        layer. Use `train_state.replace(embeddings=...)` after `EmbeddingCollection.prefetch`, or
        after loading tables from a checkpoint.
      variables: other variable collections of the model, such as `batch_stats`.
      tx: optax transformation that updates `params`. The clipping, schedules and weight decay of
        `tx` have no effect on tables.
      opt_state: state of `tx`.
    """

    step: Any
    apply_fn: Callable[..., PyTree] = struct.field(pytree_node=False)
    params: Params
    embeddings: dict[str, EmbeddingState]
    variables: dict[str, PyTree]
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: PyTree

    @classmethod
    @validated
    def create(
        cls, *, apply_fn: Callable[..., PyTree], variables: Mapping[str, PyTree], tx: Any
    ) -> TrainState:
        """The training state before the first step.

        Args:
          apply_fn: the `apply` method of the model.
          variables: the variables that the model's `init` returned.
          tx: optax transformation that updates the dense parameters.

        Raises:
          ValueError: `variables` has no entry `params`, or `tx` can skip an update of the
            parameters, as `optax.apply_if_finite` does. A step that `tx` skips would still update
            the tables.
          TypeError: `tx` is not an optax transformation. An `optax.MultiSteps` object is not an
            optax transformation.
        """
        taps.check_transformation(tx, _TRAIN_STATE)
        if "params" not in variables:
            raise ValueError(
                f"variables of a model's init have 'params', these have {sorted(variables)}."
            )
        params = variables["params"]
        flat = traverse_util.flatten_dict(variables.get("embeddings", {}), sep="/")
        embeddings = {}
        for path, state in flat.items():
            layer, _, _ = path.rpartition("/")
            embeddings[layer] = state
        others = {}
        for name, collection in variables.items():
            if name not in ("params", "embeddings"):
                others[name] = collection
        opt_state = tx.init(params)
        taps.check_steps_always(opt_state, _TRAIN_STATE)
        return cls(jnp.zeros((), jnp.int32), apply_fn, params, embeddings, others, tx, opt_state)

    def apply(self, *args: PyTree, **options: object) -> PyTree:
        """Output of the model, called with all variables of this state.

        Args:
          args: arguments of the model.
          options: keyword arguments of Flax's `apply`, such as `mutable` and `rngs`.
        """
        flat = {}
        for layer, state in self.embeddings.items():
            path = f"{layer}/tables".lstrip("/")
            flat[path] = state
        variables = {
            "params": self.params,
            **self.variables,
            "embeddings": traverse_util.unflatten_dict(flat, sep="/"),
        }
        return self.apply_fn(variables, *args, **options)

    def apply_gradients(self, gradients: Any, **replacements: Any) -> TrainState:
        """The training state after one step.

        Args:
          gradients: the `Gradients` of `value_and_grad`.
          replacements: new values for other fields of the training state, such as `variables`.

        Raises:
          TypeError: the gradients come from `jax.grad`, which returns no gradients of tables.
          ValueError: the gradients belong to a different model.
        """
        taps.check_steps_always(self.opt_state, _TRAIN_STATE)
        stepped = taps.stepped(gradients, self.embeddings)
        # optax mixes integer step counts with floats, which strict dtype promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(gradients.dense, self.opt_state, self.params)
            params = optax.apply_updates(self.params, updates)
        changed = {
            "params": params,
            "embeddings": self.embeddings | stepped,
            "opt_state": opt_state,
        }
        return self.replace(step=self.step + 1, **(changed | replacements))


@validated
def value_and_grad(loss_fn: Loss, *, has_aux: bool = False) -> Callable[..., tuple[Any, Gradients]]:
    """Function that returns a loss, and its gradients with respect to parameters and tables.

    Args:
      loss_fn: function `loss_fn(apply, ...)` that returns the loss, or `(loss, aux)`. The argument
        `apply` calls the model, like `TrainState.apply`. JAX traces `loss_fn` twice:
        first to find the lookups, then to compute gradients.
      has_aux: whether `loss_fn` returns `(loss, aux)`, False by default.

    Returns: a function `(train_state, ...) -> (value, gradients)`.

    Raises: RuntimeError: the loss calls an `Embeddings` layer inside another JAX transformation,
      such as a loop, where lookups cannot be recorded.
    """

    def with_gradients(state: TrainState, *args: PyTree, **kwargs: object) -> tuple[Any, Gradients]:
        what = "value_and_grad: the first argument, which rs.linen.TrainState.create makes,"
        check_type(state, TrainState, what)

        def recorded(
            params: Params,
            tap_arrays: list[Activations],
            embeddings: dict[str, EmbeddingState],
        ) -> Any:
            """The loss, with the result of `loss_fn` and the recorded lookups as aux output."""
            layers = {name: name for name in embeddings}
            recording = taps.Recording(layers, tap_arrays)
            state_with_arguments = state.replace(params=params, embeddings=embeddings)
            apply = partial(recording.run, state_with_arguments.apply)
            result = check_loss(loss_fn(apply, *args, **kwargs), has_aux=has_aux)
            loss = result
            if has_aux:
                loss = result[0]
            return loss, (result, recording.calls)

        def recorded_calls(params: Params, embeddings: dict[str, EmbeddingState]) -> Any:
            _, (_, calls) = recorded(params, [], embeddings)
            return calls

        call_shapes = jax.eval_shape(recorded_calls, state.params, state.embeddings)
        zeros = [jax.tree.map(jnp.zeros_like, call.activations) for call in call_shapes]
        differentiate = jax.value_and_grad(recorded, argnums=(0, 1), has_aux=True)
        return taps.value_and_gradients(differentiate(state.params, zeros, state.embeddings))

    return with_gradients
