"""Statistics in NumPy's `.npz` files: one file per process, holding every record since the start, or their maximum."""

from __future__ import annotations

import io

import numpy as np

from rsembed.fdo.client import FDOClient, StatisticsFiles, wait_for_all_processes
from rsembed.fdo.statistics import (
    History,
    SparseDenseMatmulInputStats,
    append_record,
    merge_processes,
    running_maximum,
    to_statistics,
)


class NPZFileFDOClient(FDOClient):
    """Keeps one row per recorded batch and exchanges them through files in a shared folder.

    With several processes, `publish` and `load` wait for one another: every process must call both, in the same
    order. A folder belongs to one run; files of processes that are not in the run are ignored.

    Args:
      base_dir: the folder; all processes must see it.
      retain_history: keep every record; False keeps the running maximum alone, so that files never grow.

    Example:
      >>> import tempfile
      >>> client = NPZFileFDOClient(tempfile.mkdtemp())
      >>> client.record(SparseDenseMatmulInputStats(max_ids_per_partition={"words": [3, 4]}))
      >>> client.publish()
      >>> client.load().max_ids_per_partition["words"].tolist()
      [3, 4]
    """

    def __init__(self, base_dir: str, retain_history: bool = True):
        self._files = StatisticsFiles(base_dir, "npz")
        self._retain_history = retain_history
        self._history: History = {}

    def record(self, stats: SparseDenseMatmulInputStats) -> None:
        """Appends one row to every statistic, or raises the running maximum."""
        history = append_record(self._history, stats)
        self._history = history if self._retain_history else running_maximum(history)

    def publish(self) -> None:
        """Writes all rows to `fdo_stats_<process>_<time in ns>.npz`."""
        content = io.BytesIO()
        arrays: dict = dict(self._history)
        np.savez(content, **arrays)
        self._files.write(content.getvalue())
        wait_for_all_processes("rsembed.fdo.publish")

    def load(self) -> SparseDenseMatmulInputStats:
        """Reads the newest file of each process; what was read replaces what this client remembers.

        Returns:
          All records of a single process, or the elementwise maximum of all records of several.

        Raises:
          FileNotFoundError: nothing was published.
          ValueError: a file holds something that is no statistic.
        """
        histories = []
        for path in self._files.newest():
            with np.load(path, allow_pickle=False) as arrays:
                histories.append({key: arrays[key] for key in arrays.files})
        wait_for_all_processes("rsembed.fdo.load")
        merged = merge_processes(histories)
        statistics = to_statistics(merged)
        self._history = merged
        return statistics
