"""Optax for the dense part of a model whose tables train themselves in the backward pass."""

from __future__ import annotations

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from rsembed.sparsecore.linen.embed import EMBEDDING_PARAM_NAME, STEP_PARAM_NAME

_OWN_PARAM_NAMES = {EMBEDDING_PARAM_NAME, STEP_PARAM_NAME}


def create_optimizer_for_sc_model(
    params: PyTree, tc_optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """`tc_optimizer` for all parameters but those of `SparseCoreEmbed`, which pass through unchanged.

    Args:
      params: the model's parameters.
      tc_optimizer: optimizer of the dense part; it never sees tables, so norms and state are those of the dense part.
    """
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "tables" if _is_own(path) else "dense", params)
    return optax.multi_transform({"tables": optax.identity(), "dense": tc_optimizer}, labels)


def apply_updates_for_sc_model(params: PyTree, updates: PyTree) -> PyTree:
    """Parameters after a step: updates replace tables, slots and counters, and are added to all others.

    Args:
      params: the model's parameters.
      updates: what the optimizer of `create_optimizer_for_sc_model` returned.
    """

    def apply(path: KeyPath, param: PyTree, update: PyTree) -> PyTree:
        return update if _is_own(path) else param + update.astype(param.dtype)

    return jax.tree_util.tree_map_with_path(apply, params, updates)


def _is_own(path: KeyPath) -> bool:
    """Whether a parameter belongs to a `SparseCoreEmbed`."""
    return any(getattr(step, "key", None) in _OWN_PARAM_NAMES for step in path)
