"""The enums and records that table-batched embeddings are declared with.

Names, members and defaults are those of FBGEMM's TBE training module, so that its declarations work unchanged.
Impossible values are refused here; values that do not go together are refused by `make_rule` and the module.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp

from rsembed.checks import validated, within
from rsembed.optimizers import CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition
from rsembed.optimizers import CounterWeightDecayMode as CounterWeightDecayMode
from rsembed.optimizers import CowClipDefinition as CowClipDefinition
from rsembed.optimizers import EmainplaceModeDefinition as EmainplaceModeDefinition
from rsembed.optimizers import EnsembleModeDefinition as EnsembleModeDefinition
from rsembed.optimizers import GlobalWeightDecayDefinition as GlobalWeightDecayDefinition
from rsembed.optimizers import GradSumDecay as GradSumDecay
from rsembed.optimizers import LearningRateMode as LearningRateMode
from rsembed.optimizers import OptimizerSpec as OptimizerSpec
from rsembed.optimizers import StepMode as StepMode
from rsembed.optimizers import TailIdThreshold as TailIdThreshold
from rsembed.optimizers import WeightDecayMode as WeightDecayMode


class EmbeddingLocation(enum.IntEnum):
    """Where the rows of a table live: device, host, or host rows behind a cache on the device.

    MTIA can be named but not used: JAX has no such backend.
    """

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """What looks the rows up. GPU is another name of CUDA; GPU and TPU are extensions. MTIA can be named, not used."""

    CPU = 0
    CUDA = 1
    GPU = 1
    MTIA = 2
    TPU = 3


class CacheAlgorithm(enum.IntEnum):
    """Which cached row makes room: the least recently used or the least frequently used one."""

    LRU = 0
    LFU = 1


class PoolingMode(enum.IntEnum):
    """How the rows of a bag become one vector. NONE: one output row per id."""

    SUM = 0
    MEAN = 1
    NONE = 2


class BoundsCheckMode(enum.IntEnum):
    """What happens to ids and offsets outside their range; each V2 member means the same as its namesake."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


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


TableOptimizer = EmbOptimType | OptimizerSpec


def optimizers(given: TableOptimizer | str | Sequence[TableOptimizer | str]) -> TableOptimizer | list[TableOptimizer]:
    """One for all tables, or one each. Raises: ValueError: as `member`."""
    if isinstance(given, OptimizerSpec):
        return given
    if isinstance(given, (EmbOptimType, str)):
        return member(EmbOptimType, given)
    return [own if isinstance(own, OptimizerSpec) else member(EmbOptimType, own) for own in given]


def name_of(optimizer: TableOptimizer) -> str:
    """A published name, or the name of a rule of the core."""
    return optimizer.name if isinstance(optimizer, EmbOptimType) else type(optimizer).__name__


def bounds_check_mode(given: BoundsCheckMode | str | int) -> BoundsCheckMode:
    """The mode, or that of the environment variable `FBGEMM_TBE_BOUNDS_CHECK_MODE`, which overrules it.

    Raises: ValueError: as `member`.
    """
    return member(BoundsCheckMode, os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE", given))


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
