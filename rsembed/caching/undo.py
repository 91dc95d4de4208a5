"""The rows of files as they were at the last commit, noted before they change: what takes files back to it.

A record is written before the rows of it are overwritten, by the same process and through the same system, so however
the process ends, a row that differs from the commit has its record. What is torn at the end of the file was about rows
that did not change.
"""

from __future__ import annotations

import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

fcntl: Any
try:
    import fcntl
except ImportError:  # a system without locks, on which nobody could tell whether the writer still runs
    fcntl = None

_HEAD = struct.Struct("<4sHQQI")  # mark, length of the label, rows, bytes of a row, CRC32 of what follows
_MARK = b"undo"


class UndoLog:
    """Rows of several stores as they were, each once; its writer holds a lock on it as long as it lives.

    Args:
      path: a file that does not exist yet.
    """

    def __init__(self, path: Path):
        self._path, self._num_bytes = path, 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0))
        self._close = weakref.finalize(self, os.close, self._file)
        self._noted: dict[str, np.ndarray] = {}  # a bit a row
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def note(self, label: str, num_rows: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Notes the rows of a store that are new to the log, with their values before the change.

        Raises: OSError: the disk does not take them; then nothing is noted.
        """
        noted = self._noted.setdefault(label, np.zeros(-(-num_rows // 8), np.uint8))
        places, bits = rows >> 3, (1 << (rows & 7)).astype(np.uint8)
        is_new = noted[places] & bits == 0
        rows, values = rows[is_new].astype("<i8"), np.ascontiguousarray(values[is_new])
        if not rows.size:
            return
        body = label.encode() + rows.tobytes() + values.tobytes()
        record = _HEAD.pack(_MARK, len(label.encode()), len(rows), values.nbytes // len(rows), zlib.crc32(body)) + body
        try:
            written = 0
            while written < len(record):
                written += os.write(self._file, record[written:])
        except OSError:
            os.ftruncate(self._file, self._num_bytes)  # what follows must not stand behind half a record
            os.lseek(self._file, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += len(record)
        np.bitwise_or.at(noted, places[is_new], bits[is_new])

    def close(self) -> None:
        """Removes the log: a later commit is on the disk."""
        self._path.unlink(missing_ok=True)
        self._close()


def is_in_use(path: Path) -> bool:
    """Whether the writer of a log still lives, as far as can be told."""
    if fcntl is None:
        return True
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def take_back(path: Path) -> None:
    """Gives the rows of files beside a log their values of before."""
    for label, rows, values in _records(path):
        file = path.parent / f"{label}.bin"
        if file.is_file() and os.path.getsize(file) >= (int(rows.max()) + 1) * values.shape[1]:
            whole = np.memmap(file, np.uint8, "r+")
            whole[: whole.size // values.shape[1] * values.shape[1]].reshape(-1, values.shape[1])[rows] = values
            whole.flush()


def _records(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    with open(path, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            mark, label_bytes, num_rows, row_bytes, checksum = _HEAD.unpack(head)
            body = file.read(label_bytes + num_rows * (8 + row_bytes)) if mark == _MARK else b""
            if not body or zlib.crc32(body) != checksum:
                return
            rows = np.frombuffer(body, "<i8", num_rows, label_bytes)
            values = np.frombuffer(body, np.uint8, offset=label_bytes + rows.nbytes).reshape(num_rows, row_bytes)
            yield body[:label_bytes].decode(), rows, values
