"""Statistics of a preprocessed batch by stack, from which limits and buffer sizes follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Num

from rsembed.checks import PositiveInt, check_fields, check_type, describe, validated


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
                    f"stack {table_name!r} has no recorded buffer size, so its cores are unknown; pass "
                    "num_sc_per_device."
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

History = dict[str, np.ndarray]
"""Every statistic of every stack by its name in files; one row per record once there are several."""


def record_of(statistics: SparseDenseMatmulInputStats) -> History:
    """The history of one record, whose arrays are one-dimensional."""
    check_type(statistics, SparseDenseMatmulInputStats, "the statistics of a batch, which preprocessing returns,")
    return {
        f"{stack}_{suffix}": np.atleast_1d(np.asarray(values)).astype(np.int64)
        for suffix, field in KINDS.items()
        for stack, values in getattr(statistics, field).items()
    }


def append_history(history: History, later: History) -> History:
    """Both histories joined: the later records are rows below the earlier ones.

    Raises:
      ValueError: a statistic has another length than before: the layout changed under one client, or processes differ.
    """
    result = dict(history)
    for key, rows in later.items():
        if key in result and result[key].shape[-1] != rows.shape[-1]:
            raise ValueError(
                f"statistic {key!r} has {rows.shape[-1]} values, but was recorded with {result[key].shape[-1]} before "
                "or in another process; use a new client (and folder) when the number of devices or cores changes, and "
                "equally many in all processes."
            )
        result[key] = np.vstack([result[key], rows]) if key in result else rows
    return result


def running_maximum(history: Mapping[str, np.ndarray]) -> History:
    """The elementwise maximum of all records: a history whose size does not grow."""
    return {key: np.max(np.atleast_2d(values), axis=0) for key, values in history.items()}


def merge_processes(histories: Iterable[Mapping[str, np.ndarray]]) -> History:
    """The history of a single process unchanged; of several, the elementwise maximum over all records.

    Raises: ValueError: the processes recorded different layouts.
    """
    first, *others = histories
    if not others:
        return dict(first)
    merged = running_maximum(first)
    for history in others:
        merged = running_maximum(append_history(merged, running_maximum(history)))
    return merged


def to_statistics(history: Mapping[str, np.ndarray]) -> SparseDenseMatmulInputStats:
    """Statistics that hold the values of a history.

    Raises:
      ValueError: a name ends in none of the known kinds.
    """
    statistics = SparseDenseMatmulInputStats()
    for key, values in history.items():
        suffix = next((suffix for suffix in KINDS if key.endswith(f"_{suffix}")), None)
        if suffix is None:
            raise ValueError(f"statistic {key!r} ends in none of {', '.join('_' + suffix for suffix in KINDS)}.")
        getattr(statistics, KINDS[suffix])[key.removesuffix(f"_{suffix}")] = values
    return statistics
