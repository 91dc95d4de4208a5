"""The contract of everything that collects statistics, and the clients that write files, whatever their format."""

from __future__ import annotations

import abc
import logging
import re
import time
from pathlib import Path
from typing import ClassVar

import jax
from jax.experimental import multihost_utils

from rsembed.fdo.statistics import (
    History,
    SparseDenseMatmulInputStats,
    append_record,
    merge_processes,
    running_maximum,
    to_statistics,
)

_log = logging.getLogger("rsembed")


class FDOClient(abc.ABC):
    """Collects the statistics of batches and hands back those of all processes."""

    @abc.abstractmethod
    def record(self, stats: SparseDenseMatmulInputStats) -> None:
        """Remembers the statistics of one batch."""

    @abc.abstractmethod
    def publish(self) -> None:
        """Makes what this process recorded visible to the others; all processes call it together."""

    @abc.abstractmethod
    def load(self) -> SparseDenseMatmulInputStats:
        """The published statistics of all processes; all processes call it together."""


class FileFDOClient(FDOClient):
    """Exchanges histories through the files `fdo_stats_<process>_<time in ns>.<extension>` of a shared folder.

    A format is the extension of its files, without the dot, and how a history becomes the content of one. Arguments
    are those of `NPZFileFDOClient`.
    """

    _extension: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def _encode(history: History) -> bytes: ...

    @staticmethod
    @abc.abstractmethod
    def _decode(content: bytes) -> History:
        """Raises: ValueError: a file is not of this form."""

    def __init__(self, base_dir: str, retain_history: bool = True):
        self._folder = Path(base_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._retain_history = retain_history
        self._history: History = {}

    def record(self, stats: SparseDenseMatmulInputStats) -> None:
        """Appends one row to every statistic, or raises the running maximum."""
        history = append_record(self._history, stats)
        self._history = history if self._retain_history else running_maximum(history)

    def publish(self) -> None:
        """Writes everything in one go, and removes older files of this process, also those of an earlier run."""
        process, now = jax.process_index(), time.time_ns()
        path = self._folder / f"fdo_stats_{process}_{now}.{self._extension}"
        partial = path.with_suffix(".partial")
        partial.write_bytes(self._encode(self._history))
        partial.rename(path)
        for other, (owner, written) in self._files().items():
            if owner == process and written < now:
                other.unlink(missing_ok=True)
        _wait_for_all_processes("rsembed.fdo.publish")

    def load(self) -> SparseDenseMatmulInputStats:
        """Reads the newest file of each process; what was read replaces what this client remembers.

        Returns:
          All records of a single process, or the elementwise maximum of all records of several.

        Raises:
          FileNotFoundError: nothing was published.
          ValueError: a file is not of this form, or holds something that is no statistic.
        """
        histories = [self._decode(path.read_bytes()) for path in self._newest()]
        _wait_for_all_processes("rsembed.fdo.load")
        merged = merge_processes(histories)
        statistics = to_statistics(merged)
        self._history = merged
        return statistics

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Process and time of every file."""
        pattern = re.compile(rf"fdo_stats_(\d+)_(\d+)\.{self._extension}")
        matches = ((path, pattern.fullmatch(path.name)) for path in self._folder.iterdir())
        return {path: (int(match[1]), int(match[2])) for path, match in matches if match is not None}

    def _newest(self) -> list[Path]:
        """The newest file of every process of this run, by process."""
        files = self._files()
        newest = {files[path][0]: path for path in sorted(files, key=files.__getitem__)}
        strangers = [process for process in newest if process >= jax.process_count()]
        if strangers:
            _log.warning(
                "%s holds statistics of processes %s, which are not in this run; ignored.", self._folder, strangers
            )
        found = [path for process, path in newest.items() if process not in strangers]
        if not found:
            raise FileNotFoundError(
                f"no fdo_stats_<process>_<time>.{self._extension} in {str(self._folder)!r}; publish() before load()."
            )
        return found


def _wait_for_all_processes(reason: str) -> None:
    # No process may read limits that another has not written yet.
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)
