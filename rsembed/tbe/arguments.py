"""The arguments of the TBE training module, and one table of what each optimizer has: arguments, states, a row rule.

Combinations that the original accepts and then ignores, or that can only do harm, are refused.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp

import rsembed.optimizers as core
from rsembed.checks import check_within, validated, within
from rsembed.optimizers import LearningRate, OptimizerSpec, WeightDecayMode


class EmbOptimType(enum.Enum):
    """The optimizer that the backward pass runs on touched rows.

    FTRL is an extension. SGD, ROWWISE_ADAGRAD (both not exact), SHAMPOO, SHAMPOO_V2, MADGRAD and
    EXACT_ROWWISE_WEIGHTED_ADAGRAD can be named but are refused, as in the original.
    """

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    ROWWISE_RMSPROP_AR = "row_wise_rmsprop_ar"
    FTRL = "ftrl"
    NONE = "none"


OptimType = EmbOptimType
TableOptimizer = EmbOptimType | OptimizerSpec


class SparseType(enum.Enum):
    """Element types by the original's names; `dtype_of` says which of them can be stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    NFP8 = "nfp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    MX4 = "mx4"


_DTYPES = {SparseType.FP32: "float32", SparseType.FP16: "float16", SparseType.BF16: "bfloat16"}


def dtype_of(sparse_type: SparseType, what: str) -> jnp.dtype:
    """The dtype that stores `sparse_type`.

    Args:
      sparse_type: FP32, FP16 or BF16.
      what: the argument it was given as, for the error.

    Raises: ValueError: `sparse_type` is one of the quantized types.
    """
    if sparse_type not in _DTYPES:
        offered = ", ".join(member.name for member in _DTYPES)
        raise ValueError(f"{what}: {sparse_type.name} cannot be stored or trained; choose one of {offered}.")
    return jnp.dtype(_DTYPES[sparse_type])


Member = TypeVar("Member", bound=enum.Enum)


def member(kind: type[Member], given: Member | str | int) -> Member:
    """A member of an enum, given as itself, as its value or by its name in any case.

    Raises: ValueError: there is no such member; names those that there are.
    """
    for own in kind:
        if given is own or (
            not isinstance(given, enum.Enum) and str(given).lower() in (str(own.value), own.name.lower())
        ):
            return own
    raise ValueError(f"{kind.__name__} has no member {given!r}; there are {', '.join(own.name for own in kind)}.")


def name_of(optimizer: TableOptimizer) -> str:
    """A published name, or the name of a rule of the core."""
    return optimizer.name if isinstance(optimizer, EmbOptimType) else type(optimizer).__name__


@dataclasses.dataclass(frozen=True)
class UserEnabledConfigDefinition:
    """Options of single optimizers.

    Args:
      use_rowwise_bias_correction: ADAM corrects by the row's own number of updates, not by the step.
      use_writeback_bwd_prehook: EXACT_SGD takes a row's gradient from the first bag that holds it only.
      writeback_first_feature_only: the same, looking at the first feature only.
      precompute_writeback: no effect on the numbers.
    """

    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False
    writeback_first_feature_only: bool = False
    precompute_writeback: bool = False


_NO_OPTIONS = UserEnabledConfigDefinition()


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
    counter_based_regularization: core.CounterBasedRegularizationDefinition | None = None
    cowclip_regularization: core.CowClipDefinition | None = None
    ensemble_mode: core.EnsembleModeDefinition | None = None
    emainplace_mode: core.EmainplaceModeDefinition | None = None
    global_weight_decay: core.GlobalWeightDecayDefinition | None = None
    ar_alpha: float = within("[0, inf)", default=0.0)
    ema_beta: float = within("[0, 1]", default=0.99)
    min_shrinkage: float = within("[0, 1]", default=0.1)
    extra_optimizer_config: UserEnabledConfigDefinition = _NO_OPTIONS
    optimizer_state_dtypes: Mapping[str, SparseType] | None = None


Record = TypeVar("Record")


def chosen(record: type[Record], given: Mapping[str, Any]) -> Record:
    """A record of those of the constructor's arguments that are its fields; None stands for the default."""
    names = {field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    return record(**{name: value for name, value in given.items() if name in names and value is not None})


def check_intervals(record: Any, names: Container[str] | None = None) -> None:
    """Raises: TypeError, ValueError: a field (one of `names`, if given) is outside its interval."""
    for field in dataclasses.fields(record):
        if "interval" in field.metadata and (names is None or field.name in names):
            check_within(field.metadata["interval"], getattr(record, field.name), field.name)


class PoolingMode(enum.IntEnum):
    """How the rows of a bag become one vector. NONE: one output row per id."""

    SUM = 0
    MEAN = 1
    NONE = 2


class CacheAlgorithm(enum.IntEnum):
    """Which cached row makes room: the least recently used or the least frequently used one."""

    LRU = 0
    LFU = 1


@dataclasses.dataclass(frozen=True)
class RecordCacheMetrics:
    """Which cache misses are counted: of all tables together, and per table."""

    record_cache_miss_counter: bool = False
    record_tablewise_cache_miss: bool = False


@dataclasses.dataclass(frozen=True)
@validated
class MultiPassPrefetchConfig:
    """A prefetch in up to `num_passes` passes of at least `min_splitable_pass_size` ids, to bound its memory."""

    num_passes: int = within("[1, inf)", default=12)
    min_splitable_pass_size: int = within("[1, inf)", default=6 * 2**20)


@dataclasses.dataclass(frozen=True)
@validated
class TBEStatsReporterConfig:
    """Figures every `interval` training steps, for `report(step, figures)` or else for the log `rsembed`."""

    interval: int = within("[1, inf)")
    report: Callable[[int, Mapping[str, float]], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """The arguments of `TableBatchedEmbeddingBags` that concern caches alone, with their defaults."""

    cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU
    cache_load_factor: float = within("[0, 1]", default=0.2)
    cache_sets: int = within("[0, inf)", default=0)
    cache_reserved_memory: float = within("[0, inf)", default=0.0)
    cache_precision: SparseType | None = None
    enforce_hbm: bool = False
    prefetch_pipeline: bool = False
    multipass_prefetch_config: MultiPassPrefetchConfig | None = None
    gather_uvm_cache_stats: bool = False
    record_cache_metrics: RecordCacheMetrics = RecordCacheMetrics()

    def __post_init__(self) -> None:
        check_intervals(self)
        if self.prefetch_pipeline and self.cache_algorithm != CacheAlgorithm.LRU:
            raise ValueError("prefetch_pipeline needs cache_algorithm LRU: LFU cannot keep the rows of later batches.")

    def near_dtype(self, dtype: str) -> jnp.dtype:
        """What weights of a dtype are cached in."""
        return jnp.dtype(dtype) if self.cache_precision is None else dtype_of(self.cache_precision, "cache_precision")


_ENUMS: dict[str, type[enum.Enum]] = {
    "cache_algorithm": CacheAlgorithm,
    "cache_precision": SparseType,
    "weights_precision": SparseType,
    "output_dtype": SparseType,
    "weight_decay_mode": WeightDecayMode,
    "pooling_mode": PoolingMode,
}


def with_members(given: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments with members of enums for names and values. Raises: ValueError: as `member`."""
    return {**given, **{name: member(kind, given[name]) for name, kind in _ENUMS.items() if given[name] is not None}}


class _Optimizer(NamedTuple):
    """An optimizer that is offered.

    Args:
      rule: the core's, which takes those arguments and options that are its fields; None returns row gradients.
      states: names of its states, and what torch's optimizers call them.
      arguments: which of `OptimizerArguments` it reads, beside those that all have.
      options: which options of `extra_optimizer_config` it reads.
      fixed: fields of `rule` that no argument sets.
      fused: a rule with a native kernel and the same numbers while the fields that it lacks have their defaults.
    """

    rule: type[OptimizerSpec] | None
    states: Mapping[str, str] = {}
    arguments: Set[str] = frozenset()
    options: Set[str] = frozenset()
    fixed: Mapping[str, bool] = {}
    fused: type[OptimizerSpec] | None = None


class _DecayMode(NamedTuple):
    """A mode of weight decay of EXACT_ROWWISE_ADAGRAD with a record, a rule, and states beside the optimizer's."""

    record: str
    rule: type[OptimizerSpec]
    states: tuple[str, ...]


_ADAGRAD, _ADAM_RULE, _LAMB_RULE = core.DecayedAdagradOptimizerSpec, core.AdamWOptimizerSpec, core.LAMBOptimizerSpec
_DECAY_MODES = {
    WeightDecayMode.COUNTER: _DecayMode(
        "counter_based_regularization", core.CounterAdagradOptimizerSpec, ("prev_iter", "row_counter")
    ),
    WeightDecayMode.COWCLIP: _DecayMode(
        "cowclip_regularization", core.CowClipAdagradOptimizerSpec, ("prev_iter", "row_counter")
    ),
    WeightDecayMode.DECOUPLE_GLOBAL: _DecayMode("global_weight_decay", _ADAGRAD, ("prev_iter",)),
}
_SUM, _MOMENTS = {"momentum1": "sum"}, {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}
_ADAM = {"eps", "beta1", "beta2", "weight_decay"}
_ROWWISE = {"eps", "weight_decay", "weight_decay_mode", "max_norm"}
_WITH_RECORDS = _ROWWISE | {mode.record for mode in _DECAY_MODES.values()}
_RMSPROP = {"eps", "ar_alpha", "ema_beta", "min_shrinkage"}
_WRITEBACK = {"use_writeback_bwd_prehook", "writeback_first_feature_only", "precompute_writeback"}
_BY_ROW, _PARTIAL = {"use_rowwise_bias_correction"}, {"has_row_wise_second_moment": True}
_FUSED_ROWWISE = core.RowWiseAdagradOptimizerSpec
_OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: _Optimizer(core.SGDOptimizerSpec, options=_WRITEBACK),
    EmbOptimType.EXACT_ADAGRAD: _Optimizer(
        _ADAGRAD, _SUM, {"eps"}, fixed={"is_per_row": False}, fused=core.TorchAdagradOptimizerSpec
    ),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _Optimizer(_ADAGRAD, _SUM, _WITH_RECORDS, fused=_FUSED_ROWWISE),
    EmbOptimType.ADAM: _Optimizer(_ADAM_RULE, _MOMENTS, _ADAM, _BY_ROW, fused=core.AdamOptimizerSpec),
    EmbOptimType.LAMB: _Optimizer(_LAMB_RULE, _MOMENTS, _ADAM),
    EmbOptimType.LARS_SGD: _Optimizer(
        core.LARSOptimizerSpec, {"momentum1": "momentum1"}, {"momentum", "eta", "weight_decay"}
    ),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _Optimizer(_ADAM_RULE, _MOMENTS, _ADAM, fixed=_PARTIAL),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _Optimizer(_LAMB_RULE, _MOMENTS, _ADAM, fixed=_PARTIAL),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: _Optimizer(
        _ADAGRAD, _SUM | {"momentum2": "sparse_ema"}, _ROWWISE | {"ensemble_mode"}, fused=_FUSED_ROWWISE
    ),
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: _Optimizer(
        _ADAGRAD, _SUM, _ROWWISE | {"emainplace_mode"}, fused=_FUSED_ROWWISE
    ),
    EmbOptimType.ROWWISE_RMSPROP_AR: _Optimizer(
        core.RowWiseRMSPropOptimizerSpec, _SUM | {"prev_iter": "prev_iter"}, _RMSPROP
    ),
    EmbOptimType.FTRL: _Optimizer(core.FTRLOptimizerSpec, _SUM | {"momentum2": "linear"}),
    EmbOptimType.NONE: _Optimizer(None),
}
_WHOLE_TABLES = {"ensemble_mode": core.EnsembleModeDefinition(), "emainplace_mode": core.EmainplaceModeDefinition()}
"""Arguments that say what happens to all rows before the lookup of a step, and what they are by default."""
_FIELDS = {
    "eps": "epsilon",
    "beta1": "beta_1",
    "beta2": "beta_2",
    "counter_based_regularization": "regularization",
    "cowclip_regularization": "regularization",
    "use_rowwise_bias_correction": "has_row_wise_bias_correction",
}
"""Arguments and options that rules call otherwise."""


def _offered(optimizer: TableOptimizer) -> _Optimizer:
    if isinstance(optimizer, OptimizerSpec):
        if optimizer.slot_type is tuple:
            raise NotImplementedError(
                f"optimizer {name_of(optimizer)}: states of another package have no names here, and may be no rows; "
                "use rsembed.EmbeddingCollection, or a rule of rsembed."
            )
        names: tuple[str, ...] = optimizer.slot_type._fields  # type: ignore[attr-defined]
        return _Optimizer(type(optimizer), {name: name for name in names})
    if optimizer not in _OPTIMIZERS:
        offered = ", ".join(member.name for member in _OPTIMIZERS)
        raise ValueError(f"optimizer {name_of(optimizer)} is deprecated and not offered; choose one of {offered}.")
    return _OPTIMIZERS[optimizer]


def _states_of(optimizer: TableOptimizer, arguments: OptimizerArguments) -> dict[str, str]:
    """Names of a table's states in the order of `split_optimizer_states`, with those of torch's optimizers."""
    extra: tuple[str, ...] = ()
    if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD and arguments.weight_decay_mode in _DECAY_MODES:
        extra = _DECAY_MODES[arguments.weight_decay_mode].states
    elif optimizer == EmbOptimType.ADAM and arguments.extra_optimizer_config.use_rowwise_bias_correction:
        extra = ("row_counter",)
    return {**_offered(optimizer).states, **{name: name for name in extra}}


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
    read, mode = _offered(optimizer).arguments, arguments.weight_decay_mode
    if mode in _DECAY_MODES and optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        raise ValueError(
            f"weight_decay_mode {mode.name} exists for EXACT_ROWWISE_ADAGRAD only, not for {name_of(optimizer)}; "
            "change the optimizer or the mode."
        )
    for own_mode, (record, *_) in _DECAY_MODES.items():
        is_given = getattr(arguments, record) is not None
        if is_given != (mode == own_mode):
            raise ValueError(
                f"{record} and weight_decay_mode=WeightDecayMode.{own_mode.name} need each other, but the mode is "
                f"{mode.name} and {record} is {'given' if is_given else 'None'}; set both or neither."
            )
    if "eps" in read and not 0 < arguments.eps < math.inf:
        raise ValueError(
            f"eps must be positive, got {arguments.eps}: with 0, a row whose first gradient is zero becomes NaN; "
            "use a small number such as 1e-10."
        )
    check_intervals(arguments, read)
    names = [name for name in _offered(optimizer).states if name.startswith("momentum")]
    names = [] if optimizer == EmbOptimType.FTRL else names
    for name in arguments.optimizer_state_dtypes or {}:
        if name not in names:
            offered = f"choose among {', '.join(names)}" if names else "leave the argument out"
            raise ValueError(
                f"optimizer_state_dtypes: {name_of(optimizer)} has no state {name!r} with a dtype to choose; {offered}."
            )


def make_rule(optimizer: TableOptimizer, **arguments: Any) -> OptimizerSpec | None:
    """The row rule of `optimizer`, with a fused native kernel where numbers are the same; None for NONE.

    What ENSEMBLE_ROWWISE_ADAGRAD and EMAINPLACE_ROWWISE_ADAGRAD do to whole tables is up to their records. Arguments
    that `optimizer` does not read are skipped; `unused_arguments` lists them for a warning.

    Args:
      optimizer: a published name, or a rule of the core, which brings all its settings but the learning rate.
      **arguments: the fields of `OptimizerArguments`.

    Raises: ValueError: the optimizer is not offered, or arguments do not go together. TypeError: unknown arguments.
    """
    given, own = OptimizerArguments(**arguments), _offered(optimizer)
    check_arguments(optimizer, given)
    if isinstance(optimizer, OptimizerSpec):
        return dataclasses.replace(optimizer, learning_rate=given.learning_rate)
    if own.rule is None:
        return None
    mode = _DECAY_MODES.get(given.weight_decay_mode)
    read = {name: getattr(given, name) for name in own.arguments}
    read |= {name: getattr(given.extra_optimizer_config, name) for name in own.options}
    settings = {_FIELDS.get(name, name): value for name, value in read.items() if value is not None}
    settings |= {**own.fixed, "learning_rate": given.learning_rate, "slot_dtypes": _slot_dtypes(optimizer, given)}
    if mode is None and not given.weight_decay:
        settings.pop("weight_decay_mode", None)
    rule: Any = own.rule if mode is None else mode.rule
    defaults: dict[str, Any] = {**{field.name: field.default for field in dataclasses.fields(rule)}, **own.fixed}
    if own.fused is not None and rule is own.rule:
        own_fields = {field.name for field in dataclasses.fields(own.fused)}
        if all(name in own_fields or value == defaults.get(name, value) for name, value in settings.items()):
            rule, defaults = own.fused, dict.fromkeys(own_fields)
    return rule(**{name: value for name, value in settings.items() if name in defaults})


def _slot_dtypes(optimizer: TableOptimizer, given: OptimizerArguments) -> tuple[str | None, ...]:
    """One entry per slot of the rule; empty when every slot keeps its own dtype."""
    asked = {
        name: dtype_of(sparse_type, f"optimizer_state_dtypes[{name!r}]").name
        for name, sparse_type in (given.optimizer_state_dtypes or {}).items()
    }
    dtypes = tuple(asked.get(name) for name in _states_of(optimizer, given))
    if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD:
        dtypes = dtypes[:1]  # momentum2 is a copy of the table, not a slot of the rule
    return dtypes if any(dtype not in (None, "float32") for dtype in dtypes) else ()


def trained_by(optimizer: TableOptimizer, learning_rate: LearningRate, arguments: OptimizerArguments) -> dict[str, Any]:
    """The fields of a `TablePlan` that its optimizer decides, from those of the arguments that it reads.

    Raises: ValueError: arguments do not go together. NotImplementedError: an option is not offered.
    """
    options = arguments.extra_optimizer_config
    if options.writeback_first_feature_only or options.precompute_writeback:
        raise NotImplementedError(
            "extra_optimizer_config: writeback_first_feature_only and precompute_writeback are not offered; "
            "use_writeback_bwd_prehook alone keeps the first gradient of each row."
        )
    unread = unused_arguments(optimizer, vars(arguments))
    read = {name: value for name, value in vars(arguments).items() if name not in unread}
    own = OptimizerArguments(**{**read, "learning_rate": learning_rate})
    states, read_names = _states_of(optimizer, own), _offered(optimizer).arguments
    modes = [getattr(own, name) or default for name, default in _WHOLE_TABLES.items() if name in read_names]
    copies: Sequence[str] = ["momentum2"] if optimizer == EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD else []
    asked = own.optimizer_state_dtypes or {}
    return {
        "rule": make_rule(optimizer, **vars(own)),
        "whole_table_mode": modes[0] if modes else None,
        "copy_dtypes": tuple(dtype_of(asked.get(n, SparseType.FP32), "optimizer_state_dtypes").name for n in copies),
        "keeps_first_gradients": optimizer == EmbOptimType.EXACT_SGD and options.use_writeback_bwd_prehook,
        "state_names": tuple(states),
        "torch_state_names": tuple(states.values()),
    }
