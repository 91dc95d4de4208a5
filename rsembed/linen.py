"""Tables in Flax Linen models: they train by their own rules, parameters by optax, in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct, traverse_util
from jaxtyping import PyTree

from rsembed import taps
from rsembed.checks import check_fields, check_type, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.embeddings import check_loss
from rsembed.collection.stack import Activations, Batch
from rsembed.taps import Gradients as Gradients

_TRAIN_STATE = "rs.linen.TrainState"


class Embeddings(nn.Module):
    """The tables of a collection, as a layer that `rs.linen.value_and_grad` and `rs.linen.TrainState` train.

    The `EmbeddingState` is the variable `tables` of the variable collection `embeddings`. The parameter `guard`, on
    which no result depends, tells when somebody differentiates the model and forgets the tables.

    Attributes:
      collection: the tables, in any storage, on one device or a mesh.
      frozen: tables are only read.

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
        """Activations of every feature; see `EmbeddingCollection.lookup`.

        Raises: RuntimeError: the model is differentiated in a way that forgets the tables.
        """
        check_fields(self)
        state = self.variable("embeddings", "tables", lambda: self.collection.init(self.make_rng("params"))).value
        guard = self.param("guard", lambda _: jnp.zeros(()))
        if self.frozen:
            return self.collection.lookup(state, batch)
        return taps.look_up("/".join(self.path), self.collection, state, batch, guard)


@no_type_check  # a pytree holds placeholders while JAX transforms it
class TrainState(struct.PyTreeNode):
    """A model in training, as `flax.training.train_state.TrainState` with tables.

    Args:
      step: number of updates so far.
      apply_fn: the model's `apply`.
      params: the variable collection `params`.
      embeddings: tables with their optimizer state, by the path of their layer; `replace` them after a `prefetch`, or
        with those of a checkpoint.
      variables: other variable collections, such as `batch_stats`.
      tx: steps `params`, and never sees a table. What it does to gradients, such as clipping,
        schedules and weight decay, does not act on rows.
      opt_state: state of `tx`.
    """

    step: Any
    apply_fn: Callable[..., PyTree] = struct.field(pytree_node=False)
    params: PyTree
    embeddings: dict[str, EmbeddingState]
    variables: dict[str, PyTree]
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: PyTree

    @classmethod
    @validated
    def create(cls, *, apply_fn: Callable[..., PyTree], variables: Mapping[str, PyTree], tx: Any) -> TrainState:
        """The state before the first step, made from the variables that the model's `init` returned.

        Raises: ValueError: it has no parameters. TypeError, ValueError: `tx` decides whether a step
          is made, as `optax.MultiSteps` and `optax.apply_if_finite` do; the tables would not follow.
        """
        taps.check_transformation(tx, _TRAIN_STATE)
        if "params" not in variables:
            raise ValueError(f"variables of a model's init have 'params', these have {sorted(variables)}.")
        flat = traverse_util.flatten_dict(variables.get("embeddings", {}), sep="/")
        params, embeddings = variables["params"], {path.rpartition("/")[0]: own for path, own in flat.items()}
        others = {name: own for name, own in variables.items() if name not in ("params", "embeddings")}
        opt_state = tx.init(params)
        taps.check_steps_always(opt_state, _TRAIN_STATE)
        return cls(jnp.zeros((), jnp.int32), apply_fn, params, embeddings, others, tx, opt_state)

    def apply(self, *args: PyTree, **options: Any) -> PyTree:
        """Output of the model with all its variables; `options` are those of Flax's `apply`."""
        flat = {f"{layer}/tables".lstrip("/"): own for layer, own in self.embeddings.items()}
        embeddings = traverse_util.unflatten_dict(flat, sep="/")
        variables = {"params": self.params, **self.variables, "embeddings": embeddings}
        return self.apply_fn(variables, *args, **options)

    def apply_gradients(self, gradients: PyTree, **replacements: Any) -> TrainState:
        """The state after a step with the `Gradients` of `value_and_grad`; other fields may be replaced: `variables`.

        Raises: TypeError: the gradients are those of `jax.grad`, which has nothing for the tables. ValueError: they are
          of another model.
        """
        taps.check_steps_always(self.opt_state, _TRAIN_STATE)
        stepped = taps.stepped(gradients, self.embeddings)
        # optax mixes its integer step counts with floats, whatever the user's promotion setting is.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(gradients.dense, self.opt_state, self.params)
            params = optax.apply_updates(self.params, updates)
        changed = {"params": params, "embeddings": self.embeddings | stepped, "opt_state": opt_state}
        return self.replace(step=self.step + 1, **(changed | replacements))


@validated
def value_and_grad(loss_fn: Callable[..., PyTree], *, has_aux: bool = False) -> Callable[..., tuple[Any, Gradients]]:
    """Value and gradients of a loss by the parameters and tables of a model.

    Args:
      loss_fn: `loss_fn(apply, ...)` returns the loss, or `(loss, aux)`, and is traced twice; `apply` is that of the
        train state.
      has_aux: as for `jax.value_and_grad`.

    Returns: a function `(train_state, ...) -> (value, gradients)`.

    Raises: RuntimeError: the loss calls a layer inside another transformation, where that cannot be recorded.
    """

    def with_gradients(state: TrainState, *args: PyTree, **kwargs: Any) -> tuple[Any, Gradients]:
        check_type(state, TrainState, "value_and_grad: the first argument, which rs.linen.TrainState.create makes,")

        def recorded(params: PyTree, own_taps: list[Activations], embeddings: Any) -> Any:
            recording = taps.Recording({name: name for name in embeddings}, own_taps)
            apply = partial(recording.run, state.replace(params=params, embeddings=embeddings).apply)
            result = check_loss(loss_fn(apply, *args, **kwargs), has_aux=has_aux)
            return result[0] if has_aux else result, (result, recording.calls)

        calls = jax.eval_shape(lambda *own: recorded(*own)[1][1], state.params, [], state.embeddings)
        zeros = [jax.tree.map(jnp.zeros_like, call.activations) for call in calls]
        differentiated = jax.value_and_grad(recorded, argnums=(0, 1), has_aux=True)
        (_, (value, calls)), (dense, d_taps) = differentiated(state.params, zeros, state.embeddings)
        return value, Gradients.of(dense, calls, d_taps)

    return with_gradients
