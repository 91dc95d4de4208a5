"""From the arguments of the TBE training module to the row rule of a table."""

from __future__ import annotations

from typing import Any

from rsembed.optimizers import (
    AdamOptimizerSpec,
    FTRLOptimizerSpec,
    OptimizerSpec,
    RowWiseAdagradOptimizerSpec,
    SGDOptimizerSpec,
    TorchAdagradOptimizerSpec,
)
from rsembed.tbe.arguments import OptimizerArguments, check_arguments
from rsembed.tbe.arguments import state_names as state_names
from rsembed.tbe.arguments import torch_state_names as torch_state_names
from rsembed.tbe.arguments import unused_arguments as unused_arguments
from rsembed.tbe.counter_rules import CounterAdagradSpec, CowClipAdagradSpec
from rsembed.tbe.records import (
    EmbOptimType,
    UserEnabledConfigDefinition,
    WeightDecayMode,
    dtype_of,
)
from rsembed.tbe.row_rules import (
    AdamFamilySpec,
    DecayedAdagradSpec,
    LARSSpec,
    RowWiseRMSPropSpec,
)


def make_rule(optimizer: EmbOptimType, **arguments: Any) -> OptimizerSpec | None:
    """The row rule of `optimizer`; None for `EmbOptimType.NONE`.

    Where the numbers are the same it is a rule of `rsembed.optimizers`, because those have fused native kernels. What
    ENSEMBLE_ROWWISE_ADAGRAD and EMAINPLACE_ROWWISE_ADAGRAD do to whole tables is left to `rsembed.tbe.full_table`.

    Arguments that `optimizer` does not read are skipped; `unused_arguments` lists them for a warning.

    Args:
      optimizer: FTRL, an extension, takes its other settings from `FTRLOptimizerSpec`.
      **arguments: the fields of `OptimizerArguments`.

    Raises: ValueError: the optimizer is not offered, or arguments do not go together. TypeError: unknown arguments.
    """
    given = OptimizerArguments(**arguments)
    check_arguments(optimizer, given)
    match optimizer:
        case EmbOptimType.NONE:
            return None
        case EmbOptimType.EXACT_SGD:
            return SGDOptimizerSpec(given.learning_rate)
        case EmbOptimType.FTRL:
            return FTRLOptimizerSpec(given.learning_rate)
        case EmbOptimType.LARS_SGD | EmbOptimType.ROWWISE_RMSPROP_AR:
            return _lars_or_rmsprop(optimizer, given)
        case EmbOptimType.ADAM | EmbOptimType.PARTIAL_ROWWISE_ADAM:
            return _adam_family(optimizer, given)
        case EmbOptimType.LAMB | EmbOptimType.PARTIAL_ROWWISE_LAMB:
            return _adam_family(optimizer, given)
    return _adagrad_family(optimizer, given)


def _adagrad_family(optimizer: EmbOptimType, given: OptimizerArguments) -> OptimizerSpec:
    is_per_row = optimizer != EmbOptimType.EXACT_ADAGRAD
    mode = given.weight_decay_mode if is_per_row else WeightDecayMode.NONE
    dtypes = _slot_dtypes(optimizer, given)
    common: dict[str, Any] = {"eps": given.eps, "weight_decay": given.weight_decay, "slot_dtypes": dtypes}
    if given.counter_based_regularization is not None:
        return CounterAdagradSpec(given.learning_rate, regularization=given.counter_based_regularization, **common)
    if given.cowclip_regularization is not None:
        return CowClipAdagradSpec(given.learning_rate, regularization=given.cowclip_regularization, **common)
    has_decay = given.global_weight_decay is not None or (mode != WeightDecayMode.NONE and given.weight_decay != 0)
    max_norm = given.max_norm if is_per_row else 0.0
    if has_decay or max_norm > 0 or dtypes:
        return DecayedAdagradSpec(
            given.learning_rate,
            weight_decay_mode=mode,
            max_norm=max_norm,
            global_weight_decay=given.global_weight_decay,
            is_per_row=is_per_row,
            **common,
        )
    core = RowWiseAdagradOptimizerSpec if is_per_row else TorchAdagradOptimizerSpec
    return core(given.learning_rate, initial_accumulator_value=0.0, epsilon=given.eps)


def _adam_family(optimizer: EmbOptimType, given: OptimizerArguments) -> OptimizerSpec:
    options = given.extra_optimizer_config or UserEnabledConfigDefinition()
    is_corrected_by_row = optimizer == EmbOptimType.ADAM and options.use_rowwise_bias_correction
    dtypes = _slot_dtypes(optimizer, given)
    if optimizer == EmbOptimType.ADAM and not (given.weight_decay or is_corrected_by_row or dtypes):
        return AdamOptimizerSpec(given.learning_rate, beta_1=given.beta1, beta_2=given.beta2, epsilon=given.eps)
    return AdamFamilySpec(
        given.learning_rate,
        eps=given.eps,
        beta1=given.beta1,
        beta2=given.beta2,
        weight_decay=given.weight_decay,
        has_row_wise_second_moment=optimizer.name.startswith("PARTIAL_ROWWISE"),
        has_trust_ratio=optimizer.name.endswith("LAMB"),
        has_row_wise_bias_correction=is_corrected_by_row,
        slot_dtypes=dtypes,
    )


def _lars_or_rmsprop(optimizer: EmbOptimType, given: OptimizerArguments) -> OptimizerSpec:
    dtypes = _slot_dtypes(optimizer, given)
    if optimizer == EmbOptimType.LARS_SGD:
        return LARSSpec(
            given.learning_rate,
            momentum=given.momentum,
            eta=given.eta,
            weight_decay=given.weight_decay,
            slot_dtypes=dtypes,
        )
    return RowWiseRMSPropSpec(
        given.learning_rate,
        eps=given.eps,
        ar_alpha=given.ar_alpha,
        ema_beta=given.ema_beta,
        min_shrinkage=given.min_shrinkage,
        slot_dtypes=dtypes,
    )


def _slot_dtypes(optimizer: EmbOptimType, given: OptimizerArguments) -> tuple[str | None, ...]:
    """One entry per slot of the rule; empty when every slot keeps its own dtype."""
    asked = {
        name: dtype_of(sparse_type, f"optimizer_state_dtypes[{name!r}]").name
        for name, sparse_type in (given.optimizer_state_dtypes or {}).items()
    }
    options = given.extra_optimizer_config or UserEnabledConfigDefinition()
    by_row = options.use_rowwise_bias_correction
    names = state_names(optimizer, given.weight_decay_mode, use_rowwise_bias_correction=by_row)
    if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD:
        names = names[:1]  # momentum2 is a copy of the table, not a slot of the rule
    dtypes = tuple(asked.get(name) for name in names)
    return dtypes if any(dtype not in (None, "float32") for dtype in dtypes) else ()
