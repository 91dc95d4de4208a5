"""Gradients of a model that reads a collection: dense ones for its parameters, sparse ones for the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rsembed.checks import describe, validated
from rsembed.collection.embeddings import EmbeddingCollection
from rsembed.collection.state import Batch, EmbeddingState


@validated
def value_and_grad(
    loss_fn: Callable[..., Any], collection: EmbeddingCollection, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Value and gradients of a loss, with sparse gradients for the tables.

    Args:
      loss_fn: `loss_fn(params, activations, *args)` returns the loss, or `(loss, aux)` with `has_aux=True`.
      collection: looks up `activations`.
      has_aux: as in `jax.value_and_grad`.

    Returns: a function `(params, state, batch, *args) -> (value, (dense_grads, row_gradients))`.

    Raises: TypeError: with `has_aux` a loss comes alone, or it is no number.

    Example:
      >>> import jax, jax.numpy as jnp, rsembed as rs
      >>> table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> def loss_fn(params, activations):
      ...     return jnp.sum(params * activations["f"])
      >>> step = value_and_grad(loss_fn, collection)
      >>> loss, (dense_grads, row_gradients) = step(jnp.ones(()), state, {"f": [[4], [7]]})
      >>> state = collection.apply(state, row_gradients)
    """

    def checked_loss(*args: Any) -> Any:
        return check_loss(loss_fn(*args), has_aux=has_aux)

    def with_gradients(params: PyTree, state: EmbeddingState, batch: Batch, *args: Any) -> Any:
        activations, pullback = collection.lookup_vjp(state, batch)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                where = f"value_and_grad: params{jax.tree_util.keystr(path)}"
                raise TypeError(f"{where} must hold floats, got {describe(leaf)}; pass it to loss_fn behind the batch.")
        value, (d_params, d_activations) = jax.value_and_grad(checked_loss, argnums=(0, 1), has_aux=has_aux)(
            params, activations, *args
        )
        return value, (d_params, pullback(d_activations))

    return with_gradients


def check_loss(result: Any, *, has_aux: bool) -> Any:
    """The result of a loss function. Raises: TypeError: it is no number, or with `has_aux` no pair."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError("value_and_grad: with has_aux=True, loss_fn must return (loss, aux).")
    loss = result[0] if has_aux else result
    if isinstance(loss, tuple) and not has_aux:
        raise TypeError("value_and_grad: loss_fn returns a tuple; for (loss, aux), pass has_aux=True.")
    if getattr(loss, "shape", ()) or not jnp.issubdtype(getattr(loss, "dtype", type(loss)), jnp.floating):
        raise TypeError(f"value_and_grad: the loss must be a scalar of floats, got {describe(loss)}; take its mean.")
    return result
