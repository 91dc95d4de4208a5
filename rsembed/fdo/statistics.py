"""Statistics of preprocessed batches by stack, and the limits and buffer sizes that follow from them.

Every change of a limit or a buffer size compiles the training step anew. Limits that follow each batch exactly are
small but never stay; limits in buckets that only grow settle after a few changes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Num

from rsembed.checks import PositiveInt, check_fields, check_type, describe, validated, within
from rsembed.specs import StackedTableSpec
from rsembed.stacking import SUBLANES, round_up

_log = logging.getLogger("rsembed")


class TableDrops(NamedTuple):
    """Ids that a table lost in one batch, by the limit that dropped them.

    Attributes:
      ids: above `max_ids_per_partition`, every duplicate counted.
      unique_ids: above `max_unique_ids_per_partition` alone, every duplicate counted.
      buffer: no place in the input buffer; equal ids of a sample count once.
    """

    ids: int = 0
    unique_ids: int = 0
    buffer: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class SparseDenseMatmulInputStats:
    """Counts of one batch (or of many, one row each), keyed by stack name.

    Entries are counted after equal ids of one sample were merged, and before any were dropped.

    Attributes:
      max_ids_per_partition: for every (local device, shard), the most entries that one core of the device sends there.
      max_unique_ids_per_partition: the same for distinct rows.
      required_buffer_size_per_sc: buffer places that every core needs; each partition fills whole tiles of 8.
      id_drop_counters: ids dropped, every duplicate counted.
      id_drops_by_table: the same by table and limit; keyed by table, and of one batch only (files do not keep it).
    """

    max_ids_per_partition: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_unique_ids_per_partition: dict[str, Any] = dataclasses.field(default_factory=dict)
    required_buffer_size_per_sc: dict[str, Any] = dataclasses.field(default_factory=dict)
    id_drop_counters: dict[str, Any] = dataclasses.field(default_factory=dict)
    id_drops_by_table: dict[str, TableDrops] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for field in KINDS.values():
            for stack, values in getattr(self, field).items():
                check_type(values, Num[np.ndarray, "..."] | float, f"{field} of stack {stack!r}")
                if not np.size(values) or not np.all(np.asarray(values) >= 0):
                    raise ValueError(f"{field} of stack {stack!r} must be counts from 0 on, got {describe(values)}.")

    def get_required_buffer_size_per_device(self, table_name: str, num_sc_per_device: int | None = None) -> int | None:
        """Buffer places a device needs: the fullest core's need times the cores; None for an unknown stack.

        Args:
          table_name: name of the stack.
          num_sc_per_device: None takes one core per recorded value.
        """
        if table_name not in self.required_buffer_size_per_sc:
            return None
        values = np.asarray(self.required_buffer_size_per_sc[table_name])
        return int(np.max(values) * (num_sc_per_device or len(values)))

    @validated
    def set_required_buffer_size_per_device(
        self, table_name: str, required_buffer_size_per_device: int, num_sc_per_device: PositiveInt | None = None
    ) -> None:
        """Records so many buffer places per device, in equal parts for its cores.

        Raises:
          ValueError: the stack is unknown and `num_sc_per_device` is missing.
        """
        if num_sc_per_device is None:
            if table_name not in self.required_buffer_size_per_sc:
                raise ValueError(
                    f"stack {table_name!r} has no recorded buffer size, which would tell its cores; num_sc_per_device "
                    "must be provided if the table is not present."
                )
            num_sc_per_device = len(self.required_buffer_size_per_sc[table_name])
        each = required_buffer_size_per_device / num_sc_per_device
        self.required_buffer_size_per_sc[table_name] = np.full(num_sc_per_device, each)


def _flatten(statistics: SparseDenseMatmulInputStats) -> tuple[tuple[Any, ...], None]:
    return tuple(getattr(statistics, field.name) for field in dataclasses.fields(statistics)), None


def _unflatten(_: None, values: Iterable[Any]) -> SparseDenseMatmulInputStats:
    statistics = object.__new__(SparseDenseMatmulInputStats)  # unchecked: JAX puts placeholders in
    for field, value in zip(dataclasses.fields(statistics), values, strict=True):
        object.__setattr__(statistics, field.name, value)
    return statistics


jax.tree_util.register_pytree_node(SparseDenseMatmulInputStats, _flatten, _unflatten)

KINDS: dict[str, str] = {
    "max_ids": "max_ids_per_partition",
    "max_unique_ids": "max_unique_ids_per_partition",
    "required_buffer_size": "required_buffer_size_per_sc",
    "id_drop_counters": "id_drop_counters",
}
"""Names of the statistics in files, where each is called `<stack>_<key of this dict>`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@validated
class LimitsPolicy:
    """Policy that turns observed maxima into new limits.

    Attributes:
      headroom_fraction: room on top of what was observed (0.1 = 10%); raise it if later batches still exceed a limit.
      monotone: never lower a limit, also not below what the specs declared.
      bucket: round up to a ladder of multiples of 8 that grows by this factor, so that few different limits occur: at
        most 12 between 100 and 1000 with 1.25, 4 with 2.0. None keeps exact numbers.

    Raises: ValueError: a negative headroom, or a factor that does not grow.
    """

    headroom_fraction: float = within("[0, inf)", default=0.1)
    monotone: bool = True
    bucket: float | None = within("(1, inf)", default=1.25)

    def limit(self, observed: float, current: int | None) -> int:
        """The limit for a maximum of `observed`, in place of `current` (None: there was none)."""
        # A stack that saw no id at all keeps room for one.
        value = max(1, math.ceil(round(observed * (1 + self.headroom_fraction), 6)))
        if self.bucket is not None:
            step = SUBLANES
            while step < value:
                step = max(step + SUBLANES, round_up(math.ceil(step * self.bucket), SUBLANES))
            value = step
        return max(value, current) if self.monotone and current is not None else value


EXACT = LimitsPolicy(headroom_fraction=0.0, monotone=False, bucket=None)
"""The published policy: limits are what was observed, and may shrink."""


class PartitionLimits(NamedTuple):
    """The settings of a stack that statistics decide."""

    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    suggested_coo_buffer_size_per_device: int | None


@validated
def limits_from_statistics(
    stacks: Iterable[StackedTableSpec],
    statistics: SparseDenseMatmulInputStats,
    num_sc_per_device: PositiveInt,
    *,
    policy: LimitsPolicy | None = None,
) -> dict[str, PartitionLimits]:
    """New limits and buffer sizes, by stack name; changes nothing.

    Args:
      stacks: the stacks with their present limits.
      statistics: of one or many batches, as loaded by a client. What it does not mention keeps its setting.
      num_sc_per_device: cores per device.
      policy: None means `LimitsPolicy()`: headroom, never shrinking, in buckets.

    Warns: statistics or number of cores are of another layout than the stacks.

    Example:
      >>> from rsembed.optimizers import SGD
      >>> stack = StackedTableSpec("words", 64, 8, SGD(), "sum", 8, max_ids_per_partition=50, num_shards=2)
      >>> seen = SparseDenseMatmulInputStats(max_ids_per_partition={"words": [61, 70]})
      >>> limits_from_statistics([stack], seen, 2)["words"].max_ids_per_partition
      96
    """
    policy = LimitsPolicy() if policy is None else policy
    return {stack.stack_name: _stack_limits(stack, statistics, num_sc_per_device, policy) for stack in stacks}


def _stack_limits(
    stack: StackedTableSpec, statistics: SparseDenseMatmulInputStats, num_cores: int, policy: LimitsPolicy
) -> PartitionLimits:
    name, buffer = stack.stack_name, stack.suggested_coo_buffer_size_per_device
    if stack.num_shards:  # a stack that was made by hand fits any number of cores
        _warn_of_other_cores(stack, statistics, num_cores)

    def new_limit(seen: Mapping[str, Any], current: int) -> int:
        return policy.limit(float(np.max(seen[name])), current) if name in seen else current

    max_ids = new_limit(statistics.max_ids_per_partition, stack.max_ids_per_partition)
    max_unique = new_limit(statistics.max_unique_ids_per_partition, stack.max_unique_ids_per_partition)
    if name in statistics.required_buffer_size_per_sc:
        per_core = None if buffer is None else -(-buffer // num_cores)
        observed = float(np.max(statistics.required_buffer_size_per_sc[name]))
        buffer = policy.limit(observed, per_core) * num_cores
        largest = round_up(max_ids, SUBLANES) * num_cores * stack.num_shards  # places that full partitions need
        if stack.num_shards and buffer > largest >= observed * num_cores:
            buffer = largest
    return PartitionLimits(max_ids, max_unique, buffer)


def _warn_of_other_cores(stack: StackedTableSpec, statistics: SparseDenseMatmulInputStats, num_cores: int) -> None:
    name, num_shards = stack.stack_name, stack.num_shards
    num_values, num_sizes = (
        np.shape(np.atleast_1d(seen.get(name, 0)))[-1]
        for seen in (statistics.max_ids_per_partition, statistics.required_buffer_size_per_sc)
    )
    num_devices, rest = divmod(num_values, num_shards)
    is_whole = name in statistics.required_buffer_size_per_sc and num_devices and not rest  # others were made by hand
    # Buffer sizes are one per core of every local device, or were set for the cores of one.
    fits = num_sizes in (num_cores, num_devices * num_cores) and num_devices * num_cores <= num_shards
    if num_shards % num_cores or (is_whole and not fits):
        # The published call takes any number, and buffers that are too small are an error of their own later.
        _log.warning(
            "rsembed.fdo: stack %r has %d shards, and its statistics %d partitions and %d buffer sizes, which does not "
            "fit num_sc_per_device=%d; its new buffer size is a guess. Pass the number of cores that it was placed "
            "for, and statistics of batches that were preprocessed for it.",
            name,
            num_shards,
            num_values,
            num_sizes,
            num_cores,
        )
