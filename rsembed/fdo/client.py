"""Clients that collect the statistics of batches, in memory or in files."""

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
from typing import ClassVar, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.archives import unpacked
from rsembed.checks import check_type, validated
from rsembed.fdo.statistics import KINDS, SparseDenseMatmulInputStats

HEADER = ["key", "values"]
_log = logging.getLogger("rsembed")


History = dict[str, np.ndarray]
"""Mapping from names `<stack>_<statistic>`, which files also use, to arrays of statistics.

In the statistics of one batch, each array is one-dimensional. In the statistics of several batches,
each array has one row per batch.
"""


def record_of(statistics: SparseDenseMatmulInputStats) -> History:
    """Converts the statistics of one batch to a `History`, with one-dimensional arrays."""
    check_type(
        statistics,
        SparseDenseMatmulInputStats,
        "the statistics of a batch, which preprocessing returns,",
    )
    history = {}
    for suffix, field in KINDS.items():
        for stack, values in getattr(statistics, field).items():
            history[f"{stack}_{suffix}"] = np.atleast_1d(np.asarray(values)).astype(np.int64)
    return history


def append_history(history: History, later: History) -> History:
    """Appends the batches of `later` to `history`: each array gets the rows of `later` at its end.

    Raises:
      ValueError: a statistic has different lengths in the two histories, because the layout changed
        or because processes have different layouts.
    """
    result = dict(history)
    for key, rows in later.items():
        if key in result and result[key].shape[-1] != rows.shape[-1]:
            raise ValueError(
                f"statistic {key!r} has {rows.shape[-1]} values, but was recorded with {result[key].shape[-1]} before "
                "or in another process; use a new client (and folder) when the number of devices or cores changes, and "
                "equally many in all processes."
            )
        if key in result:
            rows = np.vstack([result[key], rows])
        result[key] = rows
    return result


def running_maximum(history: Mapping[str, np.ndarray]) -> History:
    """A history with one row: the elementwise maximum over all batches."""
    return {key: np.max(np.atleast_2d(values), axis=0) for key, values in history.items()}


def merge_processes(histories: Iterable[Mapping[str, np.ndarray]]) -> History:
    """The elementwise maximum over the histories. A single history is returned unchanged.

    Raises: ValueError: the processes recorded statistics of different layouts.
    """
    first, *others = histories
    if not others:
        return dict(first)
    merged = running_maximum(first)
    for history in others:
        merged = running_maximum(append_history(merged, running_maximum(history)))
    return merged


def to_statistics(history: Mapping[str, np.ndarray]) -> SparseDenseMatmulInputStats:
    """Inverse of `record_of`: converts a history to a `SparseDenseMatmulInputStats`.

    Raises:
      ValueError: a name in the history does not end with a known kind of statistic.
    """
    statistics = SparseDenseMatmulInputStats()
    for key, values in history.items():
        suffix = next((suffix for suffix in KINDS if key.endswith(f"_{suffix}")), None)
        if suffix is None:
            known = ", ".join(f"_{suffix}" for suffix in KINDS)
            raise ValueError(f"statistic {key!r} ends in none of {known}.")
        by_stack = getattr(statistics, KINDS[suffix])
        by_stack[key.removesuffix(f"_{suffix}")] = values
    return statistics


class FDOClient(abc.ABC):
    """Interface of clients that collect the statistics of batches over all processes."""

    @abc.abstractmethod
    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Adds the statistics of one batch to the statistics that the client collects."""

    @abc.abstractmethod
    def publish(self) -> None:
        """Makes the recorded statistics of this process available to `load` in all processes.

        All processes must call `publish` together.
        """

    @abc.abstractmethod
    def load(self) -> SparseDenseMatmulInputStats:
        """The statistics that all processes have published.

        All processes must call `load` together.
        """


class StatisticsFile(NamedTuple):
    """A file of statistics, with the parts of its name. `client` and `crc` may be ""."""

    process: int
    client: str
    time: int
    crc: str
    path: Path


class FileFDOClient(FDOClient):
    """Client that exchanges histories through files in a folder. Subclasses define the file format.

    A file is called `fdo_stats_<process>_<time in ns>_<client>_<CRC>.<extension>`. The CRC in the
    name is the CRC-32 of the content, so `load` detects a file that was cut off or changed. File
    names of jax-tpu-embedding contain neither client nor CRC, so `load` reads files of
    jax-tpu-embedding without a check of the CRC. `NPZFileFDOClient` documents the arguments.
    """

    _extension: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def _encode(history: History) -> bytes:
        """Converts a history to the bytes of a file."""

    @staticmethod
    @abc.abstractmethod
    def _decode(content: bytes) -> History:
        """Converts the bytes of a file to a history (inverse of `_encode`).

        Raises: ValueError: the bytes have the wrong format.
        """

    @validated
    def __init__(self, base_dir: str | os.PathLike[str], retain_history: bool = True):
        self._folder = Path(base_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._retain_history = retain_history
        self._history: History = {}
        self._unpublished: History = {}
        self._client = secrets.token_hex(4)
        # Files of this process that `publish` has written or `load` has read. `_history` contains
        # the statistics of the files in `_known`, so after `publish` has written `_history` to a
        # new file, `publish` removes the files in `_known`.
        self._known: set[Path] = set()

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Adds the statistics of one batch to the history, or updates the running maximum."""
        record = record_of(data)
        self._unpublished = self._kept(append_history(self._unpublished, record))
        self._history = self._kept(append_history(self._history, record))

    def _kept(self, history: History) -> History:
        """`history` itself if `retain_history` is True, else the maximum over all batches."""
        if self._retain_history:
            return history
        return running_maximum(history)

    def publish(self) -> None:
        """Writes the statistics that this client has recorded or loaded to one new file.

        After the new file is written, the client removes the older files that the client has
        written, and the files of this process that the client has loaded. Files of other processes
        stay in the folder, and so do files that other clients have published since the last `load`.
        """
        content = self._encode(self._history)
        crc = f"{zlib.crc32(content):08x}"
        process = jax.process_index()
        name = f"fdo_stats_{process}_{time.time_ns()}_{self._client}_{crc}.{self._extension}"
        path = self._folder / name
        partial = path.with_suffix(".partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except BaseException:
            # A full disk or Ctrl-C must not leave an incomplete file in the folder.
            partial.unlink(missing_ok=True)
            raise
        for other in self._known - {path}:
            other.unlink(missing_ok=True)
        self._known = {path}
        self._unpublished = {}
        _wait_for_all_processes("rsembed.fdo.publish")

    def load(self) -> SparseDenseMatmulInputStats:
        """For every client in every process, reads the newest file of the client.

        The next file that this client writes also contains the loaded statistics.

        Returns:
          The statistics of all batches in the file, if there is only one file to read. If there are
          several files, the elementwise maximum over all batches in these files.

        Raises:
          FileNotFoundError: no process has published statistics yet.
          ValueError: a file is damaged, has the wrong format or layout, or holds an unknown
            statistic.
        """
        files, histories = self._read()
        _wait_for_all_processes("rsembed.fdo.load")
        merged = merge_processes(histories)
        statistics = to_statistics(merged)
        self._history = self._kept(append_history(merged, self._unpublished))
        # A process may replace only files that have its process index in their names.
        self._known = {file.path for file in files if file.process == jax.process_index()}
        return statistics

    def _read(self) -> tuple[list[StatisticsFile], list[History]]:
        """Result of `_newest`, and the history in each file that `_newest` finds."""
        while True:
            files = self._newest()
            try:
                return files, [self._history_in(file) for file in files]
            except FileNotFoundError:
                # A client has replaced the file after `_newest` listed the folder.
                continue
            except IsADirectoryError as error:
                raise ValueError(
                    f"{error.filename} cannot be read: it is a directory; remove it."
                ) from None

    def _history_in(self, file: StatisticsFile) -> History:
        """Checks the CRC of a file, and returns the history in the file.

        Raises: ValueError: the file is damaged, or has the wrong format.
        """
        content = file.path.read_bytes()
        where = f"{file.path.name} in {str(self._folder)!r}"
        actual = f"{zlib.crc32(content):08x}"
        if file.crc and file.crc != actual:
            raise ValueError(
                f"{where} is damaged: its content has CRC-32 {actual}, not {file.crc} as its name "
                "says. Remove it; the next publish() of its process writes a new one."
            )
        try:
            return self._decode(content)
        except (ValueError, OverflowError, csv.Error) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error

    def _newest(self) -> list[StatisticsFile]:
        """For every client in every process, the newest file of the client."""
        pattern = re.compile(
            rf"fdo_stats_(\d+)_(\d+)(?:_([0-9a-f]{{8}})_([0-9a-f]{{8}}))?\.{self._extension}"
        )
        newest: dict[tuple[int, str], StatisticsFile] = {}
        for path in self._folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            process, time_in_name, client, crc = match.groups(default="")
            file = StatisticsFile(int(process), client, int(time_in_name), crc, path)
            newest[file[:2]] = max(newest.get(file[:2], file), file)
        other_processes = sorted(
            {process for process, _ in newest if process >= jax.process_count()}
        )
        if other_processes:
            _log.warning(
                "rsembed.fdo: %s holds statistics of processes %s, which are not in this run; they are used, too. "
                "Remove them if they are of a run that does not matter.",
                self._folder,
                other_processes,
            )
        if not newest:
            raise FileNotFoundError(
                f"no fdo_stats_<process>_<time>*.{self._extension} in {str(self._folder)!r}; publish() before load()."
            )
        return sorted(newest.values())


class NPZFileFDOClient(FileFDOClient):
    """Client that keeps statistics in npz files in a shared folder, with a row for each batch.

    With several processes, `publish` and `load` wait until every process has called the method, so
    all processes must call `publish` and `load` in the same order. Use a separate folder for each
    training run. Any number of processes may load the folder, and each process gets the maximum
    over all files.

    Args:
      base_dir: folder of the files, which all processes must be able to read and write.
      retain_history: whether to keep the statistics of every batch, True by default. If False, only
        the running maximum is kept, so files do not grow with the number of batches.

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
        history = {}
        for name, data in unpacked(content).items():
            history[name.removesuffix(".npy")] = _array_of(name, data)
        return history


def _array_of(name: str, data: bytes) -> np.ndarray:
    """The array that one member of an npz file stores.

    `np.load` is not used, because it allocates memory for the size in the header before it reads
    the numbers, and a damaged header can state any size.

    Raises: ValueError: the member is not an array of numbers, or the number of bytes differs from
      the size in the header.
    """
    file = io.BytesIO(data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    # The header of an array in an npz file is a Python literal, so Python's parser may raise
    # `SyntaxError`, `RecursionError` or `MemoryError`.
    header_errors = (KeyError, ValueError, SyntaxError, RecursionError, MemoryError)
    try:
        version = np.lib.format.read_magic(file)
        shape, is_transposed, dtype = read_header[version](file)
    except header_errors as error:
        raise ValueError(f"{name!r} has no header of an array: {error}") from error
    numbers = data[file.tell() :]
    if dtype.kind not in "biuf" or len(shape) > 2:
        raise ValueError(f"{name!r} is {dtype}{list(shape)}, no list or table of numbers.")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError(
            f"{name!r} declares {dtype}{list(shape)}, but has {len(numbers)} bytes of numbers."
        )
    order: Literal["F", "C"] = "F" if is_transposed else "C"
    return np.frombuffer(numbers, dtype).reshape(shape, order=order).copy()


class CSVFileFDOClient(FileFDOClient):
    """Client that keeps statistics in CSV files in a shared folder.

    Except for the file format, `CSVFileFDOClient` works like `NPZFileFDOClient`. The first line of
    a file is the header `key,values`. Each further line is
    `<stack>_<statistic>,<values separated by spaces>`, and holds one statistic of one stack, in one
    batch or as the maximum over all batches.

    Args:
      base_dir: folder of the files, which all processes must be able to read and write.
      retain_history: whether to keep the statistics of every batch, True by default. If False, only
        the running maximum is kept, so files do not grow with the number of batches.
    """

    _extension = "csv"

    @staticmethod
    def _encode(history: History) -> bytes:
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\r\n")
        writer.writerow(HEADER)
        for key, values in history.items():
            for row in np.atleast_2d(values).tolist():
                writer.writerow([key, " ".join(map(str, row))])
        return content.getvalue().encode()

    @staticmethod
    def _decode(content: bytes) -> History:
        if not content.endswith(b"\n"):
            raise ValueError("the last line has no end; the file was cut off.")
        header, *lines = list(csv.reader(io.StringIO(content.decode(), newline=""))) or [[]]
        if header != HEADER:
            raise ValueError(
                f"a statistics file starts with the line {','.join(HEADER)!r}, got {','.join(header)!r}."
            )
        rows: dict[str, list[list[int]]] = {}
        for line in lines:
            if len(line) != len(HEADER):
                raise ValueError(
                    f"a line of a statistics file is {','.join(HEADER)!r}, got {','.join(line)!r}."
                )
            key, values = line
            rows.setdefault(key, []).append([int(value) for value in values.split()])
        history = {}
        for key, records in rows.items():
            array = np.asarray(records, np.int64)
            if len(records) == 1:
                array = array[0]
            history[key] = array
        return history


def _wait_for_all_processes(reason: str) -> None:
    """Waits until all processes have called this function, so that files are complete when read."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


class MemoryFDOClient(FDOClient):
    """Client that keeps the running maximum of all statistics in memory.

    With several processes, the processes exchange their statistics through their devices, and
    `load` returns the elementwise maximum of the statistics of all processes. Every process must
    record the same stacks with the same layout, and all processes must call `load` together.
    """

    def __init__(self) -> None:
        self._recorded: History = {}
        self._published: History = {}

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Adds the statistics of one batch to the running maximum."""
        self._recorded = running_maximum(append_history(self._recorded, record_of(data)))

    def publish(self) -> None:
        """Makes the running maximum available to `load`."""
        self._published = dict(self._recorded)

    def load(self) -> SparseDenseMatmulInputStats:
        """The elementwise maximum of the published statistics over all batches and processes.

        Raises:
          LookupError: `publish` has not been called yet.
        """
        if not self._published:
            raise LookupError(
                "nothing was published yet; call record() and publish() before load()."
            )
        merged = self._published
        if jax.process_count() > 1:
            # JAX has no 64-bit integers by default. Counts fit 32 bits, because a device has at
            # most 2^26 samples.
            narrow = {key: values.astype(np.int32) for key, values in merged.items()}
            gathered = multihost_utils.process_allgather(narrow)
            merged = {}
            for key, values in gathered.items():
                merged[key] = np.max(values, axis=0).astype(np.int64)
        return to_statistics(merged)
