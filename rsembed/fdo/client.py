"""The contract of everything that collects statistics, and what clients that write files share."""

from __future__ import annotations

import abc
import logging
import re
import time
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from rsembed.fdo.statistics import SparseDenseMatmulInputStats

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


def wait_for_all_processes(reason: str) -> None:
    """Returns once every process is here: no process may read limits that another has not written yet."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


class StatisticsFiles:
    """The files `fdo_stats_<process>_<time in ns>.<extension>` of one folder.

    Args:
      base_dir: the folder; it is created when missing. In a run of several processes all of them must see it.
      extension: file type, without the dot.
    """

    def __init__(self, base_dir: str, extension: str):
        self.folder = Path(base_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pattern = re.compile(rf"fdo_stats_(\d+)_(\d+)\.{re.escape(extension)}")
        self._extension = extension

    def write(self, content: bytes) -> Path:
        """Writes this process' statistics in one go, and removes its older files, also those of an earlier run."""
        process, now = jax.process_index(), time.time_ns()
        path = self.folder / f"fdo_stats_{process}_{now}.{self._extension}"
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.rename(path)
        for other, (owner, written) in self._files().items():
            if owner == process and written < now:
                other.unlink(missing_ok=True)
        return path

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Process and time of every file."""
        matches = ((path, self._pattern.fullmatch(path.name)) for path in self.folder.iterdir())
        return {path: (int(match[1]), int(match[2])) for path, match in matches if match is not None}

    def newest(self) -> list[Path]:
        """The newest file of every process of this run, by process.

        Raises:
          FileNotFoundError: there is none.
        """
        newest: dict[int, tuple[int, Path]] = {}
        for path, (process, written) in self._files().items():
            newest[process] = max(newest.get(process, (-1, path)), (written, path))
        strangers = sorted(process for process in newest if process >= jax.process_count())
        if strangers:
            _log.warning(
                "%s holds statistics of processes %s, which are not in this run; ignored.", self.folder, strangers
            )
        found = [newest[process][1] for process in sorted(newest) if process not in strangers]
        if not found:
            raise FileNotFoundError(
                f"no fdo_stats_<process>_<time>.{self._extension} in {str(self.folder)!r}; publish() before load()."
            )
        return found
