"""From the arguments of the TBE training module to the row rule of a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from rsembed.optimizers import (
    AdamOptimizerSpec,
    AdamWOptimizerSpec,
    CounterAdagradOptimizerSpec,
    CowClipAdagradOptimizerSpec,
    DecayedAdagradOptimizerSpec,
    FTRLOptimizerSpec,
    LAMBOptimizerSpec,
    LARSOptimizerSpec,
    OptimizerSpec,
    RowWiseAdagradOptimizerSpec,
    RowWiseRMSPropOptimizerSpec,
    SGDOptimizerSpec,
    TorchAdagradOptimizerSpec,
)
from rsembed.tbe.arguments import OptimizerArguments, check_arguments, read_arguments, states_of
from rsembed.tbe.records import EmbOptimType, TableOptimizer, WeightDecayMode, dtype_of

_FIELDS = {"eps": "epsilon", "beta1": "beta_1", "beta2": "beta_2"}
"""Arguments that rules call otherwise."""


def make_rule(optimizer: TableOptimizer, **arguments: Any) -> OptimizerSpec | None:
    """The row rule of `optimizer`; None for `EmbOptimType.NONE`.

    Where the numbers are the same it is a rule that has a fused native kernel. What
    ENSEMBLE_ROWWISE_ADAGRAD and EMAINPLACE_ROWWISE_ADAGRAD do to whole tables is up to their records.

    Arguments that `optimizer` does not read are skipped; `unused_arguments` lists them for a warning.

    Args:
      optimizer: a published name, or a rule of the core, which brings all its settings but the learning rate.
      **arguments: the fields of `OptimizerArguments`.

    Raises: ValueError: the optimizer is not offered, or arguments do not go together. TypeError: unknown arguments.
    """
    given = OptimizerArguments(**arguments)
    check_arguments(optimizer, given)
    if isinstance(optimizer, OptimizerSpec):
        return dataclasses.replace(optimizer, learning_rate=given.learning_rate)
    rate, dtypes = given.learning_rate, _slot_dtypes(optimizer, given)
    read = {_FIELDS.get(name, name): value for name, value in read_arguments(optimizer, given).items()}
    is_corrected_by_row = optimizer == EmbOptimType.ADAM and given.extra_optimizer_config.use_rowwise_bias_correction
    match optimizer:
        case EmbOptimType.NONE:
            return None
        case EmbOptimType.EXACT_SGD:
            return SGDOptimizerSpec(rate)
        case EmbOptimType.FTRL:
            return FTRLOptimizerSpec(rate)
        case EmbOptimType.LARS_SGD:
            return LARSOptimizerSpec(rate, slot_dtypes=dtypes, **read)
        case EmbOptimType.ROWWISE_RMSPROP_AR:
            return RowWiseRMSPropOptimizerSpec(rate, slot_dtypes=dtypes, **read)
        case EmbOptimType.ADAM if not (given.weight_decay or is_corrected_by_row or dtypes):
            return AdamOptimizerSpec(rate, given.beta1, given.beta2, given.eps)
    if not optimizer.name.endswith(("ADAM", "LAMB")):
        return _adagrad_family(optimizer, given, dtypes)
    family = LAMBOptimizerSpec if optimizer.name.endswith("LAMB") else AdamWOptimizerSpec
    return family(
        rate,
        has_row_wise_second_moment=optimizer.name.startswith("PARTIAL_ROWWISE"),
        has_row_wise_bias_correction=is_corrected_by_row,
        slot_dtypes=dtypes,
        **read,
    )


def _adagrad_family(
    optimizer: EmbOptimType, given: OptimizerArguments, dtypes: tuple[str | None, ...]
) -> OptimizerSpec:
    is_per_row = optimizer != EmbOptimType.EXACT_ADAGRAD
    mode = given.weight_decay_mode if is_per_row else WeightDecayMode.NONE
    common: dict[str, Any] = {"epsilon": given.eps, "weight_decay": given.weight_decay, "slot_dtypes": dtypes}
    if given.counter_based_regularization is not None:
        return CounterAdagradOptimizerSpec(
            given.learning_rate, regularization=given.counter_based_regularization, **common
        )
    if given.cowclip_regularization is not None:
        return CowClipAdagradOptimizerSpec(given.learning_rate, regularization=given.cowclip_regularization, **common)
    has_decay = given.global_weight_decay is not None or (mode != WeightDecayMode.NONE and given.weight_decay != 0)
    max_norm = given.max_norm if is_per_row else 0.0
    if has_decay or max_norm > 0 or dtypes:
        return DecayedAdagradOptimizerSpec(
            given.learning_rate,
            weight_decay_mode=mode,
            max_norm=max_norm,
            global_weight_decay=given.global_weight_decay,
            is_per_row=is_per_row,
            **common,
        )
    core = RowWiseAdagradOptimizerSpec if is_per_row else TorchAdagradOptimizerSpec
    return core(given.learning_rate, initial_accumulator_value=0.0, epsilon=given.eps)


def _slot_dtypes(optimizer: EmbOptimType, given: OptimizerArguments) -> tuple[str | None, ...]:
    """One entry per slot of the rule; empty when every slot keeps its own dtype."""
    asked = {
        name: dtype_of(sparse_type, f"optimizer_state_dtypes[{name!r}]").name
        for name, sparse_type in (given.optimizer_state_dtypes or {}).items()
    }
    dtypes = tuple(asked.get(name) for name in states_of(optimizer, given))
    if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD:
        dtypes = dtypes[:1]  # momentum2 is a copy of the table, not a slot of the rule
    return dtypes if any(dtype not in (None, "float32") for dtype in dtypes) else ()
