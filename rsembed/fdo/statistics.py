"""Statistics of preprocessed batches by stack, and limits and buffer sizes computed from them.

After every change of a limit or a buffer size, the training step is compiled again. A limit that
equals the maximum of the latest batches is small, but changes often. Limits that never decrease,
and are rounded up to a coarse grid of sizes, stop changing after a few batches.
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
    """Number of ids of a table that were dropped in one batch, separately for each limit.

    Attributes:
      ids: number of ids dropped by `max_ids_per_partition`, duplicates included.
      unique_ids: number of ids dropped only by `max_unique_ids_per_partition`, duplicates included.
      buffer: number of ids dropped because the input buffer was full. Equal ids of one sample are
        counted once.
    """

    ids: int = 0
    unique_ids: int = 0
    buffer: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class SparseDenseMatmulInputStats:
    """Counts by stack name, for one batch, or for many batches with one row per batch.

    Entries are counted after equal ids of one sample were merged, and before any entry was dropped.

    Attributes:
      max_ids_per_partition: for each pair of a local device and a shard, the largest number of
        entries that a core of the device sends to the shard.
      max_unique_ids_per_partition: for each pair of a local device and a shard, the largest number
        of distinct rows that a core of the device requests from the shard.
      required_buffer_size_per_sc: buffer slots that each core needs, padding included. Each
        partition is padded to a multiple of 8 slots.
      id_drop_counters: number of dropped ids, duplicates included.
      id_drops_by_table: number of dropped ids for each table and each limit. `id_drops_by_table` is
        empty in statistics from an FDO client, because FDO clients store the number of dropped ids
        of each stack (`id_drop_counters`), but not of each table.
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
                    raise ValueError(
                        f"{field} of stack {stack!r} must be counts from 0 on, got {describe(values)}."
                    )

    def get_required_buffer_size_per_device(
        self, table_name: str, num_sc_per_device: int | None = None
    ) -> int | None:
        """Buffer slots that a device needs: number of cores times the largest buffer of a core.

        If the statistics have no buffer size of the stack, the method returns None.

        Args:
          table_name: name of the stack.
          num_sc_per_device: number of cores of a device. If None, the length of the stack's array
            in `required_buffer_size_per_sc` is used.
        """
        if table_name not in self.required_buffer_size_per_sc:
            return None
        values = np.asarray(self.required_buffer_size_per_sc[table_name])
        return int(np.max(values) * (num_sc_per_device or len(values)))

    @validated
    def set_required_buffer_size_per_device(
        self,
        table_name: str,
        required_buffer_size_per_device: int,
        num_sc_per_device: PositiveInt | None = None,
    ) -> None:
        """Replaces the buffer sizes of a stack. Each core gets an equal share of a device's slots.

        Args:
          table_name: name of the stack.
          required_buffer_size_per_device: number of slots for all cores of a device.
          num_sc_per_device: number of cores of a device. If None, the length of the stack's array
            in `required_buffer_size_per_sc` is used.

        Raises:
          ValueError: the statistics have no buffer size of the stack, and `num_sc_per_device` is
            None.
        """
        if num_sc_per_device is None:
            if table_name not in self.required_buffer_size_per_sc:
                raise ValueError(
                    f"stack {table_name!r} has no recorded buffer size, which would tell its cores; num_sc_per_device "
                    "must be provided if the table is not present."
                )
            num_sc_per_device = len(self.required_buffer_size_per_sc[table_name])
        size_per_core = required_buffer_size_per_device / num_sc_per_device
        self.required_buffer_size_per_sc[table_name] = np.full(num_sc_per_device, size_per_core)


def _flatten(statistics: SparseDenseMatmulInputStats) -> tuple[tuple[Any, ...], None]:
    values = [getattr(statistics, field.name) for field in dataclasses.fields(statistics)]
    return tuple(values), None


def _unflatten(_: None, values: Iterable[Any]) -> SparseDenseMatmulInputStats:
    # The checks of `__init__` are skipped, because JAX puts placeholders into the fields of
    # pytrees.
    statistics = object.__new__(SparseDenseMatmulInputStats)
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
"""Fields of `SparseDenseMatmulInputStats` by the suffix of stored names, `<stack>_<suffix>`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@validated
class LimitsPolicy:
    """Policy that turns observed maxima into new limits.

    Attributes:
      headroom_fraction: fraction of the observed maximum that is added to a limit (0.1 = 10%).
        Raise `headroom_fraction` if later batches still exceed a limit.
      monotone: whether a limit never decreases, and is never below the limit in the specs. True by
        default.
      bucket: approximate factor between two consecutive values on the grid of limits, 1.25 by
        default. Limits are rounded up to the next value on the grid. All values on the grid are
        multiples of 8. Between 100 and 1000, the grid has 10 values for a factor of 1.25 (120, 152,
        192, ...), and 3 values for a factor of 2 (128, 256, 512). If None, limits are not rounded.

    Raises: ValueError: the headroom is negative, or the factor is not above 1.
    """

    headroom_fraction: float = within("[0, inf)", default=0.1)
    monotone: bool = True
    bucket: float | None = within("(1, inf)", default=1.25)

    def limit(self, observed: float, current: int | None) -> int:
        """The new limit for an observed maximum.

        Args:
          observed: the largest count that was observed.
          current: the present limit, or None if there is no limit.
        """
        # The smallest valid limit is 1, even if the stack had no ids.
        value = max(1, math.ceil(round(observed * (1 + self.headroom_fraction), 6)))
        if self.bucket is not None:
            step = SUBLANES
            while step < value:
                step = max(step + SUBLANES, round_up(math.ceil(step * self.bucket), SUBLANES))
            value = step
        if current is None:
            return value
        return max(value, current) if self.monotone else value


EXACT = LimitsPolicy(headroom_fraction=0.0, monotone=False, bucket=None)
"""Policy of jax-tpu-embedding: limits are the observed maxima, and may shrink."""


class PartitionLimits(NamedTuple):
    """New limits and buffer size of a stack, computed from statistics."""

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
    """New limits and buffer sizes by stack name.

    `limits_from_statistics` returns the new limits, but does not change `stacks`.

    Args:
      stacks: the stacks with their present limits.
      statistics: statistics of one or more batches, as returned by the `load` method of an FDO
        client. If the statistics have no count for a limit, the limit does not change.
      num_sc_per_device: cores per device.
      policy: rule that computes a limit from a count. If None, `LimitsPolicy()` adds headroom,
        never lowers a limit and rounds limits up to a coarse grid of sizes.

    Warns: the statistics or the number of cores do not fit the layout of a stack.

    Example:
      >>> from rsembed.optimizers import SGD
      >>> stack = StackedTableSpec("words", 64, 8, SGD(), "sum", 8, max_ids_per_partition=50, num_shards=2)
      >>> seen = SparseDenseMatmulInputStats(max_ids_per_partition={"words": [61, 70]})
      >>> limits_from_statistics([stack], seen, 2)["words"].max_ids_per_partition
      96
    """
    policy = LimitsPolicy() if policy is None else policy
    limits = {}
    for stack in stacks:
        limits[stack.stack_name] = _stack_limits(stack, statistics, num_sc_per_device, policy)
    return limits


def _stack_limits(
    stack: StackedTableSpec,
    statistics: SparseDenseMatmulInputStats,
    num_cores: int,
    policy: LimitsPolicy,
) -> PartitionLimits:
    name = stack.stack_name
    buffer = stack.suggested_coo_buffer_size_per_device
    # If a user constructed the stack without `num_shards`, the number of cores cannot be checked.
    if stack.num_shards:
        _warn_of_other_cores(stack, statistics, num_cores)

    def new_limit(counts: Mapping[str, Any], current: int) -> int:
        if name not in counts:
            return current
        return policy.limit(float(np.max(counts[name])), current)

    max_ids = new_limit(statistics.max_ids_per_partition, stack.max_ids_per_partition)
    max_unique = new_limit(
        statistics.max_unique_ids_per_partition, stack.max_unique_ids_per_partition
    )
    if name in statistics.required_buffer_size_per_sc:
        per_core = None if buffer is None else -(-buffer // num_cores)
        observed = float(np.max(statistics.required_buffer_size_per_sc[name]))
        buffer = policy.limit(observed, per_core) * num_cores
        # `largest` slots suffice even if every partition has as many ids as the limit allows, so a
        # larger buffer would never be full.
        largest = round_up(max_ids, SUBLANES) * num_cores * stack.num_shards
        if stack.num_shards and buffer > largest >= observed * num_cores:
            buffer = largest
    return PartitionLimits(max_ids, max_unique, buffer)


def _warn_of_other_cores(
    stack: StackedTableSpec, statistics: SparseDenseMatmulInputStats, num_cores: int
) -> None:
    name = stack.stack_name
    num_shards = stack.num_shards
    num_values = np.shape(np.atleast_1d(statistics.max_ids_per_partition.get(name, 0)))[-1]
    num_sizes = np.shape(np.atleast_1d(statistics.required_buffer_size_per_sc.get(name, 0)))[-1]
    num_devices, rest = divmod(num_values, num_shards)
    # In `max_ids_per_partition`, preprocessing returns one count for each pair of a local device
    # and a shard. If the number of counts is not a multiple of `num_shards`, the statistics do not
    # come from preprocessing, and the number of buffer sizes cannot be checked.
    is_whole = name in statistics.required_buffer_size_per_sc and num_devices and not rest
    # The statistics have a buffer size either for each core of every local device, or only for the
    # cores of one device.
    fits = (
        num_sizes in (num_cores, num_devices * num_cores) and num_devices * num_cores <= num_shards
    )
    if num_shards % num_cores or (is_whole and not fits):
        # A number of cores that does not fit the statistics is not an error, because
        # jax-tpu-embedding accepts any number of cores, and preprocessing later reports a buffer
        # that is too small.
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
