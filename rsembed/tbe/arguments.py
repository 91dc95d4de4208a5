"""Arguments of the TBE training module, and the optimizers that the module supports.

For each optimizer, `_OPTIMIZERS` has the class that implements the optimizer, the arguments that
the optimizer reads, and the names of its states. Arguments that contradict each other raise errors,
even where FBGEMM accepts the arguments and ignores one of them.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import os
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import rsembed.optimizers as core
from rsembed.checks import validated, within
from rsembed.optimizers.base import LearningRate, OptimizerSpec
from rsembed.optimizers.regularization import (
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    WeightDecayMode,
)
from rsembed.optimizers.regularized import CounterAdagrad, CowClipAdagrad, DecayedAdagrad


class EmbOptimType(enum.Enum):
    """Optimizer that updates the looked-up rows in the backward pass."""

    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"


OptimType = EmbOptimType
TableOptimizer = EmbOptimType | OptimizerSpec
AnyOptimizer = TableOptimizer | str


class SparseType(enum.Enum):
    """Element types, with the names that FBGEMM uses."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def dtype(self) -> str:
        """Name of the dtype that stores elements of this type."""
        return {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[self.name]


Member = TypeVar("Member", bound=enum.Enum)


def member(kind: type[Member], value: Member | str | int, argument: str) -> Member:
    """A member of an enum, from the member, its value or its name in any case.

    Args:
      kind: the enum class that `value` is a member of.
      value: the member, its value or its name.
      argument: name of the caller's argument, for the error message.

    Raises: ValueError: the enum has no such member. The error message contains the name of the
      argument and the names of all members of the enum.
    """
    for candidate in kind:
        names = str(candidate.value), candidate.name.lower()
        is_named = not isinstance(value, enum.Enum) and str(value).lower() in names
        if value is candidate or is_named:
            return candidate
    members = ", ".join(candidate.name for candidate in kind)
    raise ValueError(f"{argument}: {kind.__name__} has no member {value!r}; there are {members}.")


def name_of(optimizer: TableOptimizer) -> str:
    """FBGEMM's name of an optimizer, or the class name of an optimizer of rsembed."""
    if isinstance(optimizer, EmbOptimType):
        return optimizer.name
    return type(optimizer).__name__


class PoolingMode(enum.IntEnum):
    """Pooling of a bag's rows into one vector. With NONE, a lookup returns one row per id."""

    SUM = 0
    MEAN = 1
    NONE = 2


class CacheAlgorithm(enum.IntEnum):
    """Eviction policy of a cache: least recently used (LRU) or least frequently used (LFU)."""

    LRU = 0
    LFU = 1


@dataclasses.dataclass(frozen=True)
class RecordCacheMetrics:
    """Flags that enable two cache-miss counters: a sum over all tables, and counts per feature."""

    record_cache_miss_counter: bool = False
    record_tablewise_cache_miss: bool = False


@dataclasses.dataclass(frozen=True)
@validated
class MultiPassPrefetchConfig:
    """Splits a prefetch into several passes to save memory.

    Args:
      num_passes: maximum number of passes, 12 by default.
      min_splitable_pass_size: minimum number of ids in a pass (except the last), 6 * 2**20 by
        default.
    """

    num_passes: int = within("[1, inf)", default=12)
    min_splitable_pass_size: int = within("[1, inf)", default=6 * 2**20)


@dataclasses.dataclass(frozen=True)
@validated
class TBEStatsReporterConfig:
    """Settings of periodic reports about training: cache counts and bytes of tables and caches.

    Args:
      interval: number of steps between two reports.
      report: function `(step, figures)` that receives each report. None, the default, means that
        reports go to the logger `rsembed`.
    """

    interval: int = within("[1, inf)")
    report: Callable[[int, Mapping[str, float]], None] | None = None


class BoundsCheckMode(enum.IntEnum):
    """Treatment of ids and offsets that are out of range."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3


class Arguments(types.SimpleNamespace):
    """Arguments of a module's constructor, as attributes.

    The attribute `defaults` is a dictionary of the default values of the arguments. Two `Arguments`
    objects are compared by identity, and not by the values of their attributes.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    @staticmethod
    def of(passed: Mapping[str, Any], signature: inspect.Signature) -> Arguments:
        """The constructor's arguments, with enum members in place of their names and values.

        The environment variable `FBGEMM_TBE_BOUNDS_CHECK_MODE` overrides `bounds_check_mode`.

        Raises: ValueError: an argument is not a member of its enum, see `member`.
        """
        defaults: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if name in ("self", "rngs"):
                continue
            default, value = parameter.default, passed[name]
            if name == "bounds_check_mode":
                value = os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE", value)
            if isinstance(default, enum.Enum) and name != "optimizer":
                value = member(type(default), value, name)
            defaults[name] = default
            settings[name] = value
        defaults["cache_precision"] = settings["weights_precision"]
        precision = settings["cache_precision"] or defaults["cache_precision"]
        settings["cache_precision"] = member(SparseType, precision, "cache_precision")
        defaults["record_cache_metrics"] = RecordCacheMetrics()
        settings["record_cache_metrics"] = settings["record_cache_metrics"] or RecordCacheMetrics()
        return Arguments(**settings, defaults=defaults)

    def warn_of_no_effect(self, names: Iterable[str], reason: str) -> None:
        """Warns that some arguments have no effect.

        The warning contains the names of all arguments in `names` that the user has set, and the
        reason. An argument is regarded as set if its value is neither None nor the default value.
        """
        changed = []
        for name in names:
            if getattr(self, name) not in (None, self.defaults[name]):
                changed.append(name)
        if changed:
            warnings.warn(f"{', '.join(changed)}: no effect, {reason}.", stacklevel=5)


class OfferedOptimizer(NamedTuple):
    """Description of how rsembed implements an optimizer of FBGEMM.

    EXACT_ROWWISE_ADAGRAD has several descriptions, because some weight decay modes need a different
    rule or more states.

    Args:
      rule: the `OptimizerSpec` class that implements the optimizer. An argument of the module sets
        the field of `rule` with the same name, unless `_FIELDS` gives a different name. NONE never
        updates rows, and has SGD, a rule without states.
      states: names of the optimizer's states in torch, separated by spaces.
      arguments: names of the constructor's arguments that the optimizer reads.
      fixed: fields of `rule` that no argument of the module sets, with their values.
      fused: another `OptimizerSpec` class, which has a native kernel but lacks some fields of
        `rule`. If the fields that `fused` lacks have their default values, `fused` computes the
        same update as `rule`, and is used instead of `rule`. None if the optimizer has no class
        with a native kernel.
    """

    rule: type[OptimizerSpec]
    states: str = ""
    arguments: Set[str] = frozenset()
    fixed: Mapping[str, bool] = {}
    fused: type[OptimizerSpec] | None = None


_RECORDS = {
    WeightDecayMode.COUNTER: "counter_based_regularization",
    WeightDecayMode.COWCLIP: "cowclip_regularization",
    WeightDecayMode.DECOUPLE_GLOBAL: "global_weight_decay",
}
_ADAM = {"eps", "beta1", "beta2", "weight_decay"}
_COUNTED = {"eps", "weight_decay", "weight_decay_mode", *_RECORDS.values()}
_ROWWISE = {"eps", "weight_decay", "weight_decay_mode", "max_norm"}
_PARTIAL = {"has_row_wise_second_moment": True}
_OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: OfferedOptimizer(core.SGD),
    EmbOptimType.EXACT_ADAGRAD: OfferedOptimizer(
        DecayedAdagrad, "sum", {"eps"}, fixed={"is_per_row": False}, fused=core.TorchAdagrad
    ),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: OfferedOptimizer(
        DecayedAdagrad, "sum", _ROWWISE | _COUNTED, fused=core.RowWiseAdagrad
    ),
    EmbOptimType.ADAM: OfferedOptimizer(core.AdamW, "exp_avg exp_avg_sq", _ADAM, fused=core.Adam),
    EmbOptimType.LAMB: OfferedOptimizer(core.LAMB, "exp_avg exp_avg_sq", _ADAM),
    EmbOptimType.LARS_SGD: OfferedOptimizer(
        core.LARS, "momentum1", {"momentum", "eta", "weight_decay"}
    ),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: OfferedOptimizer(
        core.AdamW, "exp_avg exp_avg_sq", _ADAM, fixed=_PARTIAL
    ),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: OfferedOptimizer(
        core.LAMB, "exp_avg exp_avg_sq", _ADAM, fixed=_PARTIAL
    ),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: OfferedOptimizer(
        DecayedAdagrad, "sum sparse_ema", _ROWWISE | {"ensemble_mode"}, fused=core.RowWiseAdagrad
    ),
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: OfferedOptimizer(
        DecayedAdagrad, "sum", _ROWWISE | {"emainplace_mode"}, fused=core.RowWiseAdagrad
    ),
    EmbOptimType.NONE: OfferedOptimizer(core.SGD),
}
_MODES = {
    WeightDecayMode.COUNTER: OfferedOptimizer(
        CounterAdagrad, "sum prev_iter row_counter", _COUNTED
    ),
    WeightDecayMode.COWCLIP: OfferedOptimizer(
        CowClipAdagrad, "sum prev_iter row_counter", _COUNTED
    ),
    WeightDecayMode.DECOUPLE_GLOBAL: OfferedOptimizer(
        DecayedAdagrad, "sum prev_iter", _ROWWISE | _COUNTED
    ),
}
"""Descriptions of EXACT_ROWWISE_ADAGRAD in the weight decay modes that need several states.

Each weight decay mode in `_MODES` has its settings in one argument of the module, and `_RECORDS`
maps the mode to the name of the argument.
"""
_OF_OPTIMIZERS = frozenset[str]().union(*(entry.arguments for entry in _OPTIMIZERS.values()))
_WHOLE_TABLES = {
    "ensemble_mode": EnsembleModeDefinition(),
    "emainplace_mode": EmainplaceModeDefinition(),
}
"""Default value of each argument that contains the settings of a whole-table pass.

A whole-table pass changes all rows of a table before the lookups of some training steps.
"""
_FIELDS = {
    "eps": "epsilon",
    "beta1": "beta_1",
    "beta2": "beta_2",
    "counter_based_regularization": "regularization",
    "cowclip_regularization": "regularization",
}
"""Fields of optimizer classes that are set by an argument with a different name.

`_FIELDS` maps the name of each argument to the name of the field that the argument sets.
"""


def offered_optimizer(optimizer: TableOptimizer, mode: WeightDecayMode) -> OfferedOptimizer:
    """The `OfferedOptimizer` for an optimizer and a weight decay mode.

    In mode NONE, all forms of row-wise Adagrad ignore the argument `weight_decay`.

    Raises: NotImplementedError: the optimizer comes from another package, such as optax.
    """
    if isinstance(optimizer, OptimizerSpec):
        if optimizer.slot_type is tuple:
            raise NotImplementedError(
                f"optimizer {name_of(optimizer)}: states of optimizers of other packages have no names and may not be "
                "rows; use rsembed.EmbeddingCollection, or an optimizer of rsembed."
            )
        return OfferedOptimizer(type(optimizer), " ".join(optimizer.slot_type._fields))  # type: ignore[attr-defined]
    offered = _OPTIMIZERS[optimizer]
    if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        offered = _MODES.get(mode, offered)
    has_no_mode = "weight_decay_mode" in offered.arguments and mode == WeightDecayMode.NONE
    if has_no_mode:
        return offered._replace(arguments=offered.arguments - {"weight_decay"})
    return offered


def state_names(optimizer: TableOptimizer, torch_names: Sequence[str]) -> tuple[str, ...]:
    """FBGEMM's names of an optimizer's states: `momentum1`, `momentum2` and so on.

    Args:
      optimizer: the optimizer. For an `OptimizerSpec`, the result is `torch_names`.
      torch_names: names of the states in torch. The counters `prev_iter` and `row_counter` have the
        same names in FBGEMM.
    """
    if isinstance(optimizer, OptimizerSpec):
        return tuple(torch_names)
    names = []
    for number, name in enumerate(torch_names, 1):
        if name not in ("prev_iter", "row_counter"):
            name = f"momentum{number}"
        names.append(name)
    return tuple(names)


def unread_arguments(optimizers: Iterable[TableOptimizer], arguments: Arguments) -> frozenset[str]:
    """Names of the arguments that `optimizers` ignore, although other optimizers read them."""
    mode = arguments.weight_decay_mode
    read = [offered_optimizer(optimizer, mode).arguments for optimizer in optimizers]
    return _OF_OPTIMIZERS.difference(*read)


def check_arguments(optimizers: Sequence[TableOptimizer], arguments: Arguments) -> None:
    """Checks the arguments that the optimizers of the module read.

    Raises: ValueError: arguments contradict each other, or `eps` is not positive and finite.
    """
    mode = arguments.weight_decay_mode
    if mode in _RECORDS and EmbOptimType.EXACT_ROWWISE_ADAGRAD not in optimizers:
        raise ValueError(
            f"weight_decay_mode {mode.name} exists for EXACT_ROWWISE_ADAGRAD only, not for {name_of(optimizers[0])}; "
            "change the optimizer or the mode."
        )
    for mode_of_record, record in _RECORDS.items():
        is_set = getattr(arguments, record) is not None
        if is_set != (mode == mode_of_record):
            raise ValueError(
                f"{record} and weight_decay_mode=WeightDecayMode.{mode_of_record.name} need each other, "
                f"but the mode is {mode.name} and {record} is {'given' if is_set else 'None'}; set both or neither."
            )
    for optimizer in optimizers:
        offered = offered_optimizer(optimizer, mode)
        if "eps" in offered.arguments and not 0 < arguments.eps < math.inf:
            raise ValueError(
                f"eps must be positive, got {arguments.eps}: with 0, a row whose first gradient is zero becomes NaN; "
                "use a small number such as 1e-10."
            )
        all_names = state_names(optimizer, offered.states.split())
        names = [name for name in all_names if name.startswith("momentum")]
        for name in arguments.optimizer_state_dtypes or {}:
            if name not in names:
                choice = f"choose among {', '.join(names)}" if names else "leave the argument out"
                raise ValueError(
                    f"optimizer_state_dtypes: {name_of(optimizer)} has no state {name!r} with a dtype to choose; "
                    f"{choice}."
                )


def _rule_of(
    offered: OfferedOptimizer,
    rate: LearningRate,
    arguments: Arguments,
    slot_dtypes: tuple[str | None, ...],
) -> OptimizerSpec:
    """The `OptimizerSpec` that updates rows for an optimizer of FBGEMM.

    If several `OptimizerSpec` classes compute the same update, the result is an instance of the
    class with a native kernel.
    """
    settings: dict[str, Any] = {"learning_rate": rate, "slot_dtypes": slot_dtypes}
    for name in offered.arguments:
        value = getattr(arguments, name)
        if value is not None:
            settings[_FIELDS.get(name, name)] = value
    fused = offered.fused
    if fused is not None and not arguments.weight_decay:
        settings.pop("weight_decay_mode", None)
    rule = offered.rule(**_known_to(offered.rule, settings), **offered.fixed)
    if fused is not None:
        of_fused = _known_to(fused, settings)
        if offered.rule(**of_fused, **offered.fixed) == rule:
            return fused(**of_fused)
    return rule


def _known_to(rule: type[OptimizerSpec], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `settings` that are fields of `rule`."""
    names = {field.name for field in dataclasses.fields(rule)}
    return {name: settings[name] for name in settings.keys() & names}


def trained_by(
    optimizer: TableOptimizer, learning_rate: LearningRate, arguments: Arguments
) -> dict[str, Any]:
    """Dictionary with the fields of a `TablePlan` that depend on the optimizer.

    `check_arguments` has checked the arguments. Arguments that the optimizer does not read have no
    influence on the result. ENSEMBLE_ROWWISE_ADAGRAD and EMAINPLACE_ROWWISE_ADAGRAD change whole
    tables before some lookups. The settings for changes of whole tables are in the arguments
    `ensemble_mode` and `emainplace_mode`, where None means the default settings.

    Raises: ValueError: the rule of the optimizer rejects an argument.
    """
    offered = offered_optimizer(optimizer, arguments.weight_decay_mode)
    states = tuple(offered.states.split())
    sparse_types = arguments.optimizer_state_dtypes or {}
    dtypes: list[str | None] = []
    for name in state_names(optimizer, states):
        dtypes.append(sparse_types[name].dtype if name in sparse_types else None)
    copy_dtypes: tuple[str, ...] = ()
    if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD:
        # The state `momentum2` is the slow copy of the table, and not a slot of the update rule.
        copy_dtypes = (dtypes.pop() or "float32",)
    slot_dtypes: tuple[str | None, ...] = ()
    if set(dtypes) - {None, "float32"}:
        slot_dtypes = tuple(dtypes)
    whole_table_mode = None
    for name, default in _WHOLE_TABLES.items():
        if name in offered.arguments:
            whole_table_mode = getattr(arguments, name) or default
    rule = optimizer
    if isinstance(optimizer, EmbOptimType):
        rule = _rule_of(offered, learning_rate, arguments, slot_dtypes)
    return {
        "rule": rule,
        "whole_table_mode": whole_table_mode,
        "copy_dtypes": copy_dtypes,
        "torch_state_names": states,
    }
