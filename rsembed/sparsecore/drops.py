"""Ids that were dropped: counted by table and by the limit that dropped them, and told once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from rsembed.fdo.statistics import SparseDenseMatmulInputStats, TableDrops
from rsembed.sparsecore.layout import StackLayout

_log = logging.getLogger("rsembed")

SETTINGS = {
    "ids": "max_ids_per_partition",
    "unique_ids": "max_unique_ids_per_partition",
    "buffer": "suggested_coo_buffer_size_per_device",
}
"""What a kind of drop is the consequence of; the keys are the fields of `TableDrops`."""


def record_drops(
    statistics: SparseDenseMatmulInputStats, layout: StackLayout, dropped: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Records what a stack lost, by stack and by table, and warns once per table and limit.

    `dropped` has, by kind (`ids`, `unique_ids`, `buffer`), the rows inside their shard that lost entries, and how many.
    """
    first_rows = np.asarray([table.setting_in_stack.row_offset_in_shard for table in layout.tables])
    counts = {
        kind: np.bincount(np.searchsorted(first_rows, rows, side="right") - 1, times, minlength=len(first_rows))
        for kind, (rows, times) in dropped.items()
    }
    statistics.id_drop_counters[layout.name] = int(sum(by_table.sum() for by_table in counts.values()))
    for number, table in enumerate(layout.tables):
        drops = TableDrops(**{kind: int(by_table[number]) for kind, by_table in counts.items()})
        statistics.id_drops_by_table[table.name] = drops
        for kind, count in drops._asdict().items():
            if count:
                _warn_once(table.name, layout.name, kind, count, getattr(layout.spec, SETTINGS[kind]))


_told: set[tuple[str, str, str]] = set()


def _warn_once(table: str, stack: str, kind: str, count: int, limit: int | None) -> None:
    # Not functools.cache: the count changes from batch to batch, and is no part of what was told.
    if (table, stack, kind) in _told:
        return
    _told.add((table, stack, kind))
    _log.warning(
        "rsembed.sparsecore: table %r in stack %r: %d ids were dropped in one batch by %s=%s; id_drops_by_table of the "
        "statistics counts them. This is said once per table and limit.",
        table,
        stack,
        count,
        SETTINGS[kind],
        limit,
    )
