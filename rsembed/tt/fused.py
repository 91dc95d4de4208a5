"""What the fused update trains, and by which rule: the published optimizers."""

from __future__ import annotations

import enum

from flax import nnx

from rsembed.optimizers import (
    SGD,
    Adam,
    OptimizerSpec,
    RowWiseAdagrad,
    TorchAdagrad,
)


class FusedParam(nnx.Variable):
    """Cores that only the fused update trains: no `nnx.Param`, so neither `nnx.grad` nor optax sees them."""

    def set_value(self, value: object, **how: object) -> None:
        """Cores have optimizer states and cached rows beside them, which the module replaces with them.

        Raises: ValueError: always, and names `set_cores`.
        """
        raise ValueError(
            "the cores of a module with sparse=True have an optimizer state and cached rows beside them, which would "
            "stay those of the old cores; use module.set_cores(cores, table)."
        )


class FusedState(nnx.Variable):
    """What no optimizer outside trains: states, counts, step counter and learning rate of the fused update."""


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


def member_of(optimizer: object) -> OptimType:
    """A member, given as itself, by name or by value. Raises: ValueError: there is no such name."""
    for member in OptimType:
        if optimizer is member or str(optimizer).lower() in (member.value, member.name.lower()):
            return member
    names = ", OptimType.".join(member.name for member in OptimType)
    raise ValueError(f"unknown optimizer {optimizer!r}; choose one of OptimType.{names}.")


def rule_of(optimizer: object, eps: float) -> OptimizerSpec:
    """The row rule of a published name; its learning rate is given at every step.

    Args:
      optimizer: an `OptimType`, or its name.
      eps: added to the denominator of both Adagrads. Adam keeps its own, 1e-8.

    Raises: NotImplementedError: the rule is not offered. ValueError: there is no such name.
    """
    name = member_of(optimizer).name
    if name in ("SGD", "EXACT_SGD"):
        return SGD()
    if name == "EXACT_ADAGRAD":
        return TorchAdagrad(1.0, epsilon=eps)
    if name == "EXACT_ROWWISE_ADAGRAD":
        return RowWiseAdagrad(1.0, epsilon=eps)
    if name == "ADAM":
        return Adam()
    raise NotImplementedError(
        f"OptimType.{name} has no fused update; use SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD or ADAM, or take "
        "sparse=False and any optax rule."
    )
