"""What each optimizer of the TBE training module is made of: its arguments, its states, and what does not go together.

Combinations that the original accepts and then ignores, or that can only do harm, are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rsembed.optimizers import LearningRate
from rsembed.tbe.records import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EmbOptimType,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    GradSumDecay,
    SparseType,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerArguments:
    """The constructor arguments that concern optimizers, with their defaults.

    Args:
      learning_rate: a number, a callable of nothing, or a callable of the 0-based step.
      eps: added outside the square root; torch's Adagrad has 1e-10.
      momentum: of LARS_SGD.
      eta: trust coefficient of LARS_SGD.
      beta1: of the ADAM and LAMB families.
      beta2: likewise.
      weight_decay: of LARS_SGD, ADAM, LAMB and their partial forms (decoupled), and of row-wise Adagrad.
      weight_decay_mode: of row-wise Adagrad.
      max_norm: bound on the norm of updated rows, of row-wise Adagrad; 0 for none.
      counter_based_regularization: if and only if the mode is COUNTER.
      cowclip_regularization: if and only if the mode is COWCLIP.
      ensemble_mode: of ENSEMBLE_ROWWISE_ADAGRAD.
      emainplace_mode: of EMAINPLACE_ROWWISE_ADAGRAD.
      global_weight_decay: if and only if the mode is DECOUPLE_GLOBAL.
      ar_alpha: shrinkage per step of ROWWISE_RMSPROP_AR, in learning rates.
      ema_beta: decay of its mean.
      min_shrinkage: its smallest factor.
      extra_optimizer_config: options of ADAM and EXACT_SGD.
      optimizer_state_dtypes: FP32, FP16 or BF16 by state name; for momentum1 and momentum2 of any optimizer.
    """

    learning_rate: LearningRate = 0.01
    eps: float = 1e-8
    momentum: float = 0.9
    eta: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    max_norm: float = 0.0
    counter_based_regularization: CounterBasedRegularizationDefinition | None = None
    cowclip_regularization: CowClipDefinition | None = None
    ensemble_mode: EnsembleModeDefinition | None = None
    emainplace_mode: EmainplaceModeDefinition | None = None
    global_weight_decay: GlobalWeightDecayDefinition | None = None
    ar_alpha: float = 0.0
    ema_beta: float = 0.99
    min_shrinkage: float = 0.1
    extra_optimizer_config: UserEnabledConfigDefinition | None = None
    optimizer_state_dtypes: Mapping[str, SparseType] | None = None


_SUM, _MOMENTS = {"momentum1": "sum"}, {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}
_STATES: dict[EmbOptimType, dict[str, str]] = {
    EmbOptimType.EXACT_SGD: {},
    EmbOptimType.EXACT_ADAGRAD: _SUM,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _SUM,
    EmbOptimType.ADAM: _MOMENTS,
    EmbOptimType.LAMB: _MOMENTS,
    EmbOptimType.LARS_SGD: {"momentum1": "momentum1"},
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _MOMENTS,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _MOMENTS,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _SUM | {"momentum2": "sparse_ema"},
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _SUM,
    EmbOptimType.ROWWISE_RMSPROP_AR: _SUM | {"prev_iter": "prev_iter"},
    EmbOptimType.FTRL: _SUM | {"momentum2": "linear"},
    EmbOptimType.NONE: {},
}
_EXTRA_STATES = {
    WeightDecayMode.COUNTER: ("prev_iter", "row_counter"),
    WeightDecayMode.COWCLIP: ("prev_iter", "row_counter"),
    WeightDecayMode.DECOUPLE_GLOBAL: ("prev_iter",),
}
_RECORD_OF_MODE = {
    WeightDecayMode.COUNTER: "counter_based_regularization",
    WeightDecayMode.COWCLIP: "cowclip_regularization",
    WeightDecayMode.DECOUPLE_GLOBAL: "global_weight_decay",
}

_ADAM = {"eps", "beta1", "beta2", "weight_decay"}
_ROWWISE_ADAGRAD = {"eps", "weight_decay", "weight_decay_mode", "max_norm"}
_USED: dict[EmbOptimType, set[str]] = {
    EmbOptimType.EXACT_SGD: set(),
    EmbOptimType.EXACT_ADAGRAD: {"eps"},
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _ROWWISE_ADAGRAD | set(_RECORD_OF_MODE.values()),
    EmbOptimType.ADAM: _ADAM,
    EmbOptimType.LAMB: _ADAM,
    EmbOptimType.LARS_SGD: {"momentum", "eta", "weight_decay"},
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _ADAM,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _ADAM,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _ROWWISE_ADAGRAD | {"ensemble_mode"},
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _ROWWISE_ADAGRAD | {"emainplace_mode"},
    EmbOptimType.ROWWISE_RMSPROP_AR: {"eps", "ar_alpha", "ema_beta", "min_shrinkage"},
    EmbOptimType.FTRL: set(),
    EmbOptimType.NONE: set(),
}
_OPTIONS_USED = {
    EmbOptimType.ADAM: {"use_rowwise_bias_correction"},
    EmbOptimType.EXACT_SGD: {"use_writeback_bwd_prehook", "writeback_first_feature_only", "precompute_writeback"},
}


def state_names(
    optimizer: EmbOptimType,
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
    *,
    use_rowwise_bias_correction: bool = False,
) -> tuple[str, ...]:
    """Names of a table's states, in the order of `split_optimizer_states`.

    They are the slots of `make_rule` in the same order, except for `momentum2` of ENSEMBLE_ROWWISE_ADAGRAD: that is a
    slow copy of the table, which the row rule does not read.
    """
    return tuple(_states(optimizer, weight_decay_mode, use_rowwise_bias_correction))


def torch_state_names(
    optimizer: EmbOptimType,
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
    *,
    use_rowwise_bias_correction: bool = False,
) -> tuple[str, ...]:
    """Names of the same states in `get_optimizer_state`, after those of torch's optimizers."""
    return tuple(_states(optimizer, weight_decay_mode, use_rowwise_bias_correction).values())


def unused_arguments(optimizer: EmbOptimType, given: Mapping[str, Any]) -> list[str]:
    """Names of arguments in `given` that differ from their default although `optimizer` does not read them.

    Names that are no field of `OptimizerArguments` are skipped. The options of `extra_optimizer_config` are judged one
    by one. `weight_decay` counts as unread while a `weight_decay_mode` is needed and missing.
    """
    used = {"learning_rate", "optimizer_state_dtypes", "extra_optimizer_config", *_USED[optimizer]}
    mode = given.get("weight_decay_mode", WeightDecayMode.NONE)
    if "weight_decay_mode" in used and mode == WeightDecayMode.NONE:
        used.remove("weight_decay")
    if mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP):
        used.discard("max_norm")
    if optimizer == EmbOptimType.NONE:
        used.remove("learning_rate")
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerArguments)}
    unused = [name for name, default in defaults.items() if name not in used and given.get(name, default) != default]
    options = dataclasses.asdict(given.get("extra_optimizer_config") or UserEnabledConfigDefinition())
    read = _OPTIONS_USED.get(optimizer, set())
    return unused + [f"extra_optimizer_config.{name}" for name, on in options.items() if on and name not in read]


def check_arguments(optimizer: EmbOptimType, arguments: OptimizerArguments) -> None:
    """Raises: ValueError: the optimizer is not offered, or arguments do not go together; says what to change."""
    check_offered(optimizer)
    _check_decay_mode(optimizer, arguments)
    if arguments.counter_based_regularization is not None:
        _check_counter(arguments.counter_based_regularization)
    if arguments.cowclip_regularization is not None:
        _check_cowclip(arguments.cowclip_regularization)
    if "eps" in _USED[optimizer] and not 0 < arguments.eps < math.inf:
        raise ValueError(
            f"eps must be positive, got {arguments.eps}: with 0, a row whose first gradient is zero becomes NaN; "
            "use a small number such as 1e-10."
        )
    for name in sorted({"beta1", "beta2"} & _USED[optimizer]):
        if not 0 <= getattr(arguments, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(arguments, name)}.")
    _check_state_dtypes(optimizer, arguments)


def _states(optimizer: EmbOptimType, mode: WeightDecayMode, is_corrected_by_row: bool) -> dict[str, str]:
    check_offered(optimizer)
    extra: tuple[str, ...] = ()
    if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        extra = _EXTRA_STATES.get(mode, ())
    elif optimizer == EmbOptimType.ADAM and is_corrected_by_row:
        extra = ("row_counter",)
    return _STATES[optimizer] | {name: name for name in extra}


def check_offered(optimizer: EmbOptimType) -> None:
    """Raises: ValueError: the optimizer can be named, but not used."""
    if optimizer not in _STATES:
        offered = ", ".join(member.name for member in _STATES)
        raise ValueError(f"optimizer {optimizer.name} is deprecated and not offered; choose one of {offered}.")


def _check_decay_mode(optimizer: EmbOptimType, arguments: OptimizerArguments) -> None:
    mode = arguments.weight_decay_mode
    if mode in _RECORD_OF_MODE and optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        raise ValueError(
            f"weight_decay_mode {mode.name} exists for EXACT_ROWWISE_ADAGRAD only, not for {optimizer.name}; "
            "change the optimizer or the mode."
        )
    for own_mode, record in _RECORD_OF_MODE.items():
        is_given = getattr(arguments, record) is not None
        if is_given != (mode == own_mode):
            raise ValueError(
                f"{record} and weight_decay_mode=WeightDecayMode.{own_mode.name} need each other, but the mode is "
                f"{mode.name} and {record} is {'given' if is_given else 'None'}; set both or neither."
            )


def _check_counter(config: CounterBasedRegularizationDefinition) -> None:
    mode = config.counter_weight_decay_mode
    if mode in (CounterWeightDecayMode.L2, CounterWeightDecayMode.DECOUPLE) and config.counter_halflife <= 0:
        raise ValueError(
            f"counter_based_regularization: counter_weight_decay_mode {mode.name} multiplies the decay by "
            f"counter_halflife / row_counter, so counter_halflife {config.counter_halflife} would make rows grow or "
            "not decay; set a positive counter_halflife."
        )
    if config.grad_sum_decay != GradSumDecay.NO_DECAY:
        raise ValueError(
            f"counter_based_regularization: grad_sum_decay {config.grad_sum_decay.name} is not offered (the original "
            "accepts it and does nothing); use GradSumDecay.NO_DECAY."
        )


def _check_cowclip(config: CowClipDefinition) -> None:
    if config.weight_norm_coefficient <= 0 and config.lower_bound <= 0:
        raise ValueError(
            "cowclip_regularization: with weight_norm_coefficient and lower_bound both zero, every update is clipped "
            "to nothing; set lower_bound, or both, above zero."
        )
    if config.counter_weight_decay_mode == CounterWeightDecayMode.ADAGRADW:
        raise ValueError(
            "cowclip_regularization: counter_weight_decay_mode ADAGRADW has no meaning here; choose NONE, L2 or "
            "DECOUPLE, or use WeightDecayMode.COUNTER."
        )


def _check_state_dtypes(optimizer: EmbOptimType, arguments: OptimizerArguments) -> None:
    names = [] if optimizer == EmbOptimType.FTRL else [n for n in _STATES[optimizer] if n.startswith("momentum")]
    for name in arguments.optimizer_state_dtypes or {}:
        if name not in names:
            offered = f"choose among {', '.join(names)}" if names else "leave the argument out"
            raise ValueError(
                f"optimizer_state_dtypes: {optimizer.name} has no state {name!r} with a dtype to choose; {offered}."
            )
