"""The optimizers of the fused update: a row of a core is the slice of one digit value."""

from __future__ import annotations

import enum
from typing import Any

from rsembed.optimizers import (
    AdamOptimizerSpec,
    OptimizerSpec,
    RowWiseAdagradOptimizerSpec,
    SGDOptimizerSpec,
    TorchAdagradOptimizerSpec,
)


class OptimType(enum.Enum):
    """The published names."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LAMB = "lamb"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"


def rule_of(optimizer: Any, eps: float) -> OptimizerSpec:
    """The row rule of a published name; its learning rate is given at every step.

    Args:
      optimizer: an `OptimType`, or its name.
      eps: added to the denominator of both Adagrads. Adam keeps its own, 1e-8.

    Raises: NotImplementedError: the rule is not offered. ValueError: there is no such name.
    """
    names = [member.name for member in OptimType]
    name = optimizer.name if isinstance(optimizer, OptimType) else str(optimizer).upper()
    if name not in names:
        raise ValueError(f"unknown optimizer {optimizer!r}; choose one of OptimType.{', OptimType.'.join(names)}.")
    if name in ("SGD", "EXACT_SGD"):
        return SGDOptimizerSpec()
    if name == "EXACT_ADAGRAD":
        return TorchAdagradOptimizerSpec(1.0, epsilon=eps)
    if name == "EXACT_ROWWISE_ADAGRAD":
        return RowWiseAdagradOptimizerSpec(1.0, epsilon=eps)
    if name == "ADAM":
        return AdamOptimizerSpec()
    raise NotImplementedError(
        f"OptimType.{name} has no fused update; use SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD or ADAM, or take "
        "sparse=False and any optax rule."
    )
