"""Optax optimizer for models with `SparseCoreEmbed` layers, which train their tables themselves."""

from __future__ import annotations

from typing import TypeAlias

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from rsembed.sparsecore.linen.embed import EMBEDDING_PARAM_NAME, STEP_PARAM_NAME

Params: TypeAlias = PyTree
"""Parameters of a Linen model, or their gradients or updates."""
_LAYER_PARAM_NAMES = {EMBEDDING_PARAM_NAME, STEP_PARAM_NAME}


def create_optimizer_for_sc_model(
    params: Params, tc_optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Optimizer that applies `tc_optimizer` to all parameters outside `SparseCoreEmbed` layers.

    Args:
      params: the parameters of the model.
      tc_optimizer: optimizer of the dense parameters. `tc_optimizer` does not see the tables: its
        state has no entries for tables, and its gradient norms do not include gradients of tables.
    """

    def label(path: KeyPath, _: object) -> str:
        return "tables" if _is_layer_param(path) else "dense"

    labels = jax.tree_util.tree_map_with_path(label, params)
    return optax.multi_transform({"tables": optax.identity(), "dense": tc_optimizer}, labels)


def apply_updates_for_sc_model(params: Params, updates: Params) -> Params:
    """Parameters of the model after an update.

    Tables, optimizer slots and step counters are replaced by their updates. The updates of all
    dense parameters are added to the parameters.

    Args:
      params: the parameters of the model.
      updates: updates from the optimizer of `create_optimizer_for_sc_model`.
    """

    def apply(path: KeyPath, param: Params, update: Params) -> Params:
        return update if _is_layer_param(path) else param + update.astype(param.dtype)

    return jax.tree_util.tree_map_with_path(apply, params, updates)


def _is_layer_param(path: KeyPath) -> bool:
    """Whether a parameter belongs to a `SparseCoreEmbed`."""
    return any(getattr(step, "key", None) in _LAYER_PARAM_NAMES for step in path)
