"""Statistics in text files that a spreadsheet opens."""

from __future__ import annotations

import csv
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

HEADER = ["key", "values"]


class CSVFileFDOClient(FDOClient):
    """As `NPZFileFDOClient`, in files of lines `<stack>_<statistic>,<values separated by blanks>`, one per record.

    Args:
      base_dir: the folder; all processes must see it.
      retain_history: keep every record; False keeps the running maximum alone, so that files stay small.
    """

    def __init__(self, base_dir: str, retain_history: bool = True):
        self._files = StatisticsFiles(base_dir, "csv")
        self._retain_history = retain_history
        self._history: History = {}

    def record(self, stats: SparseDenseMatmulInputStats) -> None:
        """Appends one row to every statistic, or raises the running maximum."""
        history = append_record(self._history, stats)
        self._history = history if self._retain_history else running_maximum(history)

    def publish(self) -> None:
        """Writes everything to `fdo_stats_<process>_<time in ns>.csv`."""
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\r\n")
        writer.writerow(HEADER)
        for key, values in self._history.items():
            writer.writerows([key, " ".join(map(str, row))] for row in np.atleast_2d(values).tolist())
        self._files.write(content.getvalue().encode())
        wait_for_all_processes("rsembed.fdo.publish")

    def load(self) -> SparseDenseMatmulInputStats:
        """Reads the newest file of each process; what was read replaces what this client remembers.

        Raises:
          FileNotFoundError: nothing was published.
          ValueError: a file is not of this form.
        """
        histories = [_read(path.read_bytes().decode()) for path in self._files.newest()]
        wait_for_all_processes("rsembed.fdo.load")
        merged = merge_processes(histories)
        statistics = to_statistics(merged)
        self._history = merged
        return statistics


def _read(text: str) -> History:
    header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    if header != HEADER:
        raise ValueError(f"a statistics file starts with the line {','.join(HEADER)!r}, got {','.join(header)!r}.")
    rows: dict[str, list[list[int]]] = {}
    for key, values in lines:
        rows.setdefault(key, []).append([int(value) for value in values.split()])
    arrays = {key: np.asarray(values, np.int64) for key, values in rows.items()}
    return {key: values[0] if len(values) == 1 else values for key, values in arrays.items()}
