"""What each optimizer of the TBE training module is made of: its arguments, its states, and what does not go together.

Combinations that the original accepts and then ignores, or that can only do harm, are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Set
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp

from rsembed.checks import check_within, within
from rsembed.optimizers import LearningRate
from rsembed.tbe import records
from rsembed.tbe.plan import TablePlan
from rsembed.tbe.records import EmbOptimType, OptimizerSpec, TableOptimizer, WeightDecayMode, name_of

Record = TypeVar("Record")
_NO_OPTIONS, _NO_METRICS = records.UserEnabledConfigDefinition(), records.RecordCacheMetrics()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerArguments:
    """The arguments of `TableBatchedEmbeddingBags` that concern optimizers, with their defaults."""

    learning_rate: LearningRate = 0.01
    eps: float = 1e-8
    momentum: float = within("[0, 1]", default=0.9)
    eta: float = within("[0, inf)", default=0.001)
    beta1: float = within("[0, 1)", default=0.9)
    beta2: float = within("[0, 1)", default=0.999)
    weight_decay: float = within("[0, inf)", default=0.0)
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    max_norm: float = within("[0, inf]", default=0.0)
    counter_based_regularization: records.CounterBasedRegularizationDefinition | None = None
    cowclip_regularization: records.CowClipDefinition | None = None
    ensemble_mode: records.EnsembleModeDefinition | None = None
    emainplace_mode: records.EmainplaceModeDefinition | None = None
    global_weight_decay: records.GlobalWeightDecayDefinition | None = None
    ar_alpha: float = within("[0, inf)", default=0.0)
    ema_beta: float = within("[0, 1]", default=0.99)
    min_shrinkage: float = within("[0, 1]", default=0.1)
    extra_optimizer_config: records.UserEnabledConfigDefinition = _NO_OPTIONS
    optimizer_state_dtypes: Mapping[str, records.SparseType] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """The arguments of `TableBatchedEmbeddingBags` that concern caches alone, with their defaults."""

    cache_algorithm: records.CacheAlgorithm = records.CacheAlgorithm.LRU
    cache_load_factor: float = within("[0, 1]", default=0.2)
    cache_sets: int = within("[0, inf)", default=0)
    cache_reserved_memory: float = within("[0, inf)", default=0.0)
    cache_precision: records.SparseType | None = None
    enforce_hbm: bool = False
    prefetch_pipeline: bool = False
    multipass_prefetch_config: records.MultiPassPrefetchConfig | None = None
    gather_uvm_cache_stats: bool = False
    record_cache_metrics: records.RecordCacheMetrics = _NO_METRICS

    def __post_init__(self) -> None:
        _check_intervals(self)
        if self.prefetch_pipeline and self.cache_algorithm != records.CacheAlgorithm.LRU:
            raise ValueError("prefetch_pipeline needs cache_algorithm LRU: LFU cannot keep the rows of later batches.")

    def changed(self) -> list[str]:
        """Names of arguments that differ from their defaults."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]

    def dtype_of(self, table: TablePlan) -> jnp.dtype:
        """What the weights of a table are cached in."""
        if self.cache_precision is None:
            return jnp.dtype(table.dtype)
        return records.dtype_of(self.cache_precision, "cache_precision")


def chosen(record: type[Record], given: Mapping[str, Any]) -> Record:
    """A record of those of the constructor's arguments that are its fields; None stands for the default."""
    names = {field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    return record(**{name: value for name, value in given.items() if name in names and value is not None})


def _check_intervals(record: Any, names: Container[str] | None = None) -> None:
    for field in dataclasses.fields(record):
        if "interval" in field.metadata and (names is None or field.name in names):
            check_within(field.metadata["interval"], getattr(record, field.name), field.name)


class _Optimizer(NamedTuple):
    """An optimizer that is offered.

    Args:
      states: names of its states, and what torch's optimizers call them.
      arguments: which of `OptimizerArguments` it reads, beside those that all have.
      options: which options of `extra_optimizer_config` it reads.
    """

    states: Mapping[str, str]
    arguments: Set[str] = frozenset()
    options: Set[str] = frozenset()


class _DecayMode(NamedTuple):
    """A mode of weight decay of EXACT_ROWWISE_ADAGRAD with a record of its own, and states beside the optimizer's."""

    record: str
    states: tuple[str, ...]


_DECAY_MODES = {
    WeightDecayMode.COUNTER: _DecayMode("counter_based_regularization", ("prev_iter", "row_counter")),
    WeightDecayMode.COWCLIP: _DecayMode("cowclip_regularization", ("prev_iter", "row_counter")),
    WeightDecayMode.DECOUPLE_GLOBAL: _DecayMode("global_weight_decay", ("prev_iter",)),
}
_SUM, _MOMENTS = {"momentum1": "sum"}, {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}
_ADAM = {"eps", "beta1", "beta2", "weight_decay"}
_ROWWISE = {"eps", "weight_decay", "weight_decay_mode", "max_norm"}
_RMSPROP = {"eps", "ar_alpha", "ema_beta", "min_shrinkage"}
_WRITEBACK = {"use_writeback_bwd_prehook", "writeback_first_feature_only", "precompute_writeback"}
_OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: _Optimizer({}, options=_WRITEBACK),
    EmbOptimType.EXACT_ADAGRAD: _Optimizer(_SUM, {"eps"}),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _Optimizer(_SUM, _ROWWISE | {mode.record for mode in _DECAY_MODES.values()}),
    EmbOptimType.ADAM: _Optimizer(_MOMENTS, _ADAM, {"use_rowwise_bias_correction"}),
    EmbOptimType.LAMB: _Optimizer(_MOMENTS, _ADAM),
    EmbOptimType.LARS_SGD: _Optimizer({"momentum1": "momentum1"}, {"momentum", "eta", "weight_decay"}),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _Optimizer(_MOMENTS, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _Optimizer(_MOMENTS, _ADAM),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _Optimizer(_SUM | {"momentum2": "sparse_ema"}, _ROWWISE | {"ensemble_mode"}),
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _Optimizer(_SUM, _ROWWISE | {"emainplace_mode"}),
    EmbOptimType.ROWWISE_RMSPROP_AR: _Optimizer(_SUM | {"prev_iter": "prev_iter"}, _RMSPROP),
    EmbOptimType.FTRL: _Optimizer(_SUM | {"momentum2": "linear"}),
    EmbOptimType.NONE: _Optimizer({}),
}


def _offered(optimizer: TableOptimizer) -> _Optimizer:
    if isinstance(optimizer, OptimizerSpec):
        if optimizer.slot_type is tuple:
            raise NotImplementedError(
                f"optimizer {name_of(optimizer)}: states of another package have no names here, and may be no rows; "
                "use rsembed.EmbeddingCollection, or a rule of rsembed."
            )
        return _Optimizer({name: name for name in optimizer.slot_type._fields})  # type: ignore[attr-defined]
    if optimizer not in _OPTIMIZERS:
        offered = ", ".join(member.name for member in _OPTIMIZERS)
        raise ValueError(f"optimizer {name_of(optimizer)} is deprecated and not offered; choose one of {offered}.")
    return _OPTIMIZERS[optimizer]


def states_of(optimizer: TableOptimizer, arguments: OptimizerArguments) -> dict[str, str]:
    """Names of a table's states in the order of `split_optimizer_states`, with those of torch's optimizers.

    They are the slots of `make_rule` in the same order, except for `momentum2` of ENSEMBLE_ROWWISE_ADAGRAD: that is a
    slow copy of the table, which the row rule does not read.
    """
    extra: tuple[str, ...] = ()
    if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD and arguments.weight_decay_mode in _DECAY_MODES:
        extra = _DECAY_MODES[arguments.weight_decay_mode].states
    elif optimizer == EmbOptimType.ADAM and arguments.extra_optimizer_config.use_rowwise_bias_correction:
        extra = ("row_counter",)
    return {**_offered(optimizer).states, **{name: name for name in extra}}


def read_arguments(optimizer: TableOptimizer, arguments: OptimizerArguments) -> dict[str, Any]:
    """The arguments that the optimizer reads and not every optimizer has, by name."""
    return {name: getattr(arguments, name) for name in _offered(optimizer).arguments}


def unused_arguments(optimizer: TableOptimizer, given: Mapping[str, Any]) -> list[str]:
    """Names of arguments in `given` that differ from their default although `optimizer` does not read them.

    Names that are no field of `OptimizerArguments` are skipped. The options of `extra_optimizer_config` are judged one
    by one. `weight_decay` counts as unread while a `weight_decay_mode` is needed and missing.

    Raises: ValueError: the optimizer can be named, but not used.
    """
    used = {"learning_rate", "optimizer_state_dtypes", "extra_optimizer_config", *_offered(optimizer).arguments}
    mode = given.get("weight_decay_mode", WeightDecayMode.NONE)
    if "weight_decay_mode" in used and mode == WeightDecayMode.NONE:
        used.remove("weight_decay")
    if mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP):
        used.discard("max_norm")
    if optimizer == EmbOptimType.NONE:
        used.remove("learning_rate")
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerArguments)}
    unused = [name for name, default in defaults.items() if name not in used and given.get(name, default) != default]
    options = vars(given.get("extra_optimizer_config") or _NO_OPTIONS)
    read = _offered(optimizer).options
    return unused + [f"extra_optimizer_config.{name}" for name, on in options.items() if on and name not in read]


def check_arguments(optimizer: TableOptimizer, arguments: OptimizerArguments) -> None:
    """Raises: ValueError: the optimizer is not offered, or arguments do not go together; says what to change."""
    read = _offered(optimizer).arguments
    _check_decay_mode(optimizer, arguments)
    if "eps" in read and not 0 < arguments.eps < math.inf:
        raise ValueError(
            f"eps must be positive, got {arguments.eps}: with 0, a row whose first gradient is zero becomes NaN; "
            "use a small number such as 1e-10."
        )
    _check_intervals(arguments, read)
    _check_state_dtypes(optimizer, arguments)


def _check_decay_mode(optimizer: TableOptimizer, arguments: OptimizerArguments) -> None:
    mode = arguments.weight_decay_mode
    if mode in _DECAY_MODES and optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        raise ValueError(
            f"weight_decay_mode {mode.name} exists for EXACT_ROWWISE_ADAGRAD only, not for {name_of(optimizer)}; "
            "change the optimizer or the mode."
        )
    for own_mode, (record, _) in _DECAY_MODES.items():
        is_given = getattr(arguments, record) is not None
        if is_given != (mode == own_mode):
            raise ValueError(
                f"{record} and weight_decay_mode=WeightDecayMode.{own_mode.name} need each other, but the mode is "
                f"{mode.name} and {record} is {'given' if is_given else 'None'}; set both or neither."
            )


def _check_state_dtypes(optimizer: TableOptimizer, arguments: OptimizerArguments) -> None:
    names = [name for name in _offered(optimizer).states if name.startswith("momentum")]
    names = [] if optimizer == EmbOptimType.FTRL else names
    for name in arguments.optimizer_state_dtypes or {}:
        if name not in names:
            offered = f"choose among {', '.join(names)}" if names else "leave the argument out"
            raise ValueError(
                f"optimizer_state_dtypes: {name_of(optimizer)} has no state {name!r} with a dtype to choose; {offered}."
            )
