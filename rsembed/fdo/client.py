"""Clients that collect statistics of batches, in memory or in files, and the interface they share."""

from __future__ import annotations

import abc
import csv
import io
import logging
import math
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.archives import unpacked
from rsembed.checks import check_type, validated
from rsembed.fdo.statistics import KINDS, SparseDenseMatmulInputStats

HEADER = ["key", "values"]
_log = logging.getLogger("rsembed")


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


class FDOClient(abc.ABC):
    """Collects the statistics of batches and hands back those of all processes."""

    @abc.abstractmethod
    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Remembers the statistics of one batch."""

    @abc.abstractmethod
    def publish(self) -> None:
        """Makes what this process recorded visible to the others; all processes call it together."""

    @abc.abstractmethod
    def load(self) -> SparseDenseMatmulInputStats:
        """The published statistics of all processes; all processes call it together."""


class FileFDOClient(FDOClient):
    """Exchanges histories through the files `fdo_stats_<process>_<time in ns>_<client>_<CRC>.<extension>` of a folder.

    The CRC-32 is that of the content, so a file that was cut off or changed is told from its name. Published names lack
    client and CRC; such files load, unchecked. A format is the extension of its files, without the dot, and how a
    history becomes the content of one. Arguments are those of `NPZFileFDOClient`.
    """

    _extension: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def _encode(history: History) -> bytes: ...

    @staticmethod
    @abc.abstractmethod
    def _decode(content: bytes) -> History:
        """The history in a file's content. Raises: ValueError: the content is not of this format."""

    @validated
    def __init__(self, base_dir: str | os.PathLike[str], retain_history: bool = True):
        self._folder = Path(base_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._retain_history = retain_history
        self._history: History = {}
        self._unpublished: History = {}
        self._client = secrets.token_hex(4)
        # Files whose records this client remembers, so that its next file replaces them.
        self._known: set[Path] = set()

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Appends one row to every statistic, or raises the running maximum."""
        self._unpublished = self._kept(append_history(self._unpublished, record_of(data)))
        self._history = self._kept(append_history(self._history, record_of(data)))

    def _kept(self, history: History) -> History:
        return history if self._retain_history else running_maximum(history)

    def publish(self) -> None:
        """Writes all records to one file, and removes the files that it replaces: its own and those it loaded.

        What others have published for the same process, earlier or meanwhile, is left alone.
        """
        content, process = self._encode(self._history), jax.process_index()
        name = f"fdo_stats_{process}_{time.time_ns()}_{self._client}_{zlib.crc32(content):08x}.{self._extension}"
        path = self._folder / name
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except BaseException:  # a full disk or Ctrl-C: the torn file gives its space back
            partial.unlink(missing_ok=True)
            raise
        for other in self._known - {path}:
            other.unlink(missing_ok=True)
        self._known, self._unpublished = {path}, {}
        _wait_for_all_processes("rsembed.fdo.publish")

    def load(self) -> SparseDenseMatmulInputStats:
        """Reads the newest file of each client of each process.

        This client remembers what it has read, and what it has recorded but not published.

        Returns:
          All records of a single file, or the elementwise maximum of all records of several.

        Raises:
          FileNotFoundError: nothing was published.
          ValueError: a file is damaged, not of this form, of another layout, or holds something that is no statistic.
        """
        files, histories = self._read()
        _wait_for_all_processes("rsembed.fdo.load")
        merged = merge_processes(histories)
        statistics = to_statistics(merged)
        self._history = self._kept(append_history(merged, self._unpublished))
        # Each process replaces its own files alone.
        self._known = {path for path, (process, _) in files.items() if process == jax.process_index()}
        return statistics

    def _read(self) -> tuple[dict[Path, tuple[int, str]], list[History]]:
        while True:
            files = self._newest()
            try:
                return files, [self._checked(path.name, path.read_bytes(), crc) for path, (_, crc) in files.items()]
            except FileNotFoundError:
                continue  # a client has just replaced it
            except IsADirectoryError as error:
                raise ValueError(f"{error.filename} cannot be read: it is a directory; remove it.") from None

    def _checked(self, name: str, content: bytes, crc: str) -> History:
        if crc and crc != (actual := f"{zlib.crc32(content):08x}"):
            raise ValueError(
                f"{name} in {str(self._folder)!r} is damaged: its content has CRC-32 {actual}, not {crc} as its name "
                "says. Remove it; the next publish() of its process writes a new one."
            )
        try:
            return self._decode(content)
        except (ValueError, OverflowError, csv.Error) as error:
            raise ValueError(f"{name} in {str(self._folder)!r} cannot be read: {error}") from error

    def _newest(self) -> dict[Path, tuple[int, str]]:
        """Process and CRC, "" without one, of the newest file of every client of every process."""
        pattern = re.compile(rf"fdo_stats_(\d+)_(\d+)(?:_([0-9a-f]{{8}})_([0-9a-f]{{8}}))?\.{self._extension}")
        newest: dict[tuple[int, str], tuple[int, str, Path]] = {}
        for path in self._folder.iterdir():
            if match := pattern.fullmatch(path.name):
                client, file = (int(match[1]), match[3] or ""), (int(match[2]), match[4] or "", path)
                newest[client] = max(newest.get(client, file), file)
        if strangers := sorted({process for process, _ in newest if process >= jax.process_count()}):
            _log.warning(
                "rsembed.fdo: %s holds statistics of processes %s, which are not in this run; they are used, too. "
                "Remove them if they are of a run that does not matter.",
                self._folder,
                strangers,
            )
        if not newest:
            raise FileNotFoundError(
                f"no fdo_stats_<process>_<time>*.{self._extension} in {str(self._folder)!r}; publish() before load()."
            )
        return {path: (process, crc) for (process, _), (_, crc, path) in sorted(newest.items())}


class NPZFileFDOClient(FileFDOClient):
    """Keeps one row per recorded batch and exchanges them through files in a shared folder.

    With several processes, `publish` and `load` wait for one another: every process must call both, in the same
    order. A folder belongs to one run, but whoever reads it, one process or several, gets the maximum of all files.

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

    _extension = "npz"

    @staticmethod
    def _encode(history: History) -> bytes:
        content = io.BytesIO()
        arrays: dict = dict(history)
        np.savez(content, **arrays)
        return content.getvalue()

    @staticmethod
    def _decode(content: bytes) -> History:
        return {name.removesuffix(".npy"): _array_of(name, data) for name, data in unpacked(content).items()}


def _array_of(name: str, data: bytes) -> np.ndarray:
    """The array of a member of an npz file.

    `np.load` would allocate what the header declares before it looks for the numbers.

    Raises: ValueError: the content is no array of numbers, or has fewer or more of them than it declares.
    """
    file = io.BytesIO(data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        shape, is_transposed, dtype = read_header[np.lib.format.read_magic(file)](file)
    except (KeyError, ValueError, SyntaxError, RecursionError, MemoryError) as error:  # Python parses the header
        raise ValueError(f"{name!r} has no header of an array: {error}") from error
    numbers = data[file.tell() :]
    if dtype.kind not in "biuf" or len(shape) > 2:
        raise ValueError(f"{name!r} is {dtype}{list(shape)}, no list or table of numbers.")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError(f"{name!r} declares {dtype}{list(shape)}, but has {len(numbers)} bytes of numbers.")
    order: Literal["F", "C"] = "F" if is_transposed else "C"
    return np.frombuffer(numbers, dtype).reshape(shape, order=order).copy()


class CSVFileFDOClient(FileFDOClient):
    """As `NPZFileFDOClient`, in files of lines `<stack>_<statistic>,<values separated by blanks>`, one per record.

    Args:
      base_dir: the folder; all processes must see it.
      retain_history: keep every record; False keeps the running maximum alone, so that files stay small.
    """

    _extension = "csv"

    @staticmethod
    def _encode(history: History) -> bytes:
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\r\n")
        writer.writerow(HEADER)
        for key, values in history.items():
            writer.writerows([key, " ".join(map(str, row))] for row in np.atleast_2d(values).tolist())
        return content.getvalue().encode()

    @staticmethod
    def _decode(content: bytes) -> History:
        if not content.endswith(b"\n"):
            raise ValueError("the last line has no end; the file was cut off.")
        header, *lines = list(csv.reader(io.StringIO(content.decode(), newline=""))) or [[]]
        if header != HEADER:
            raise ValueError(f"a statistics file starts with the line {','.join(HEADER)!r}, got {','.join(header)!r}.")
        rows: dict[str, list[list[int]]] = {}
        for line in lines:
            if len(line) != len(HEADER):
                raise ValueError(f"a line of a statistics file is {','.join(HEADER)!r}, got {','.join(line)!r}.")
            key, values = line
            rows.setdefault(key, []).append([int(value) for value in values.split()])
        arrays = {key: np.asarray(values, np.int64) for key, values in rows.items()}
        return {key: values[0] if len(values) == 1 else values for key, values in arrays.items()}


def _wait_for_all_processes(reason: str) -> None:
    # No process may read limits that another has not written yet.
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


class MemoryFDOClient(FDOClient):
    """Keeps the running maximum; with several processes, `load` asks all of them through the devices.

    Every process must record the same stacks with the same layout, and call `load` together with the others.
    """

    def __init__(self) -> None:
        self._recorded: History = {}
        self._published: History = {}

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Raises the running maximum."""
        self._recorded = running_maximum(append_history(self._recorded, record_of(data)))

    def publish(self) -> None:
        """Makes the running maximum the one that `load` returns."""
        self._published = dict(self._recorded)

    def load(self) -> SparseDenseMatmulInputStats:
        """The running maximum over all processes.

        Raises:
          LookupError: nothing was published.
        """
        if not self._published:
            raise LookupError("nothing was published yet; call record() and publish() before load().")
        merged = self._published
        if jax.process_count() > 1:
            # Counts fit 32 bits (a device holds at most 2^26 samples), the widest integer that travels by default.
            narrow = {key: values.astype(np.int32) for key, values in merged.items()}
            gathered = multihost_utils.process_allgather(narrow)
            merged = {key: np.max(values, axis=0).astype(np.int64) for key, values in gathered.items()}
        return to_statistics(merged)
