"""Tables in files that outlive the process: what they hold, when they are whole, and how that is known."""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from rsembed.caching.stores import RowStore
from rsembed.caching.undo import UndoLog, is_in_use, take_back
from rsembed.fingerprint import Fingerprint, check_same

RECORD = "tables.json"
_UNDO = ".undo"
_WAY_OUT = "Give another folder, and bring the tables there by load_state_dict; or delete this one."

_log = logging.getLogger("rsembed")


class StorageFolder:
    """A folder of row files beside a record of what they hold: tables, optimizers, step, and a checksum of every file.

    The files change while training runs, row by row; the record says that they are *whole* after `commit` only, and
    says otherwise before the first row changes after it. From then on, rows are noted in a log before they change. So a
    folder that is opened again holds the rows and the step of the last `commit`, to the bit, also after `kill -9` or a
    full disk. Where the log cannot say what was there (a system that lost power before all of it was on the disk, a
    byte that something else changed), checksums differ, and the folder is refused.

    Two modules may have it open, but only the first to change a row goes on; the other is stopped before it writes.

    Args:
      path: made if it is not there.
      tables: what the files hold.

    Attributes:
      is_new: no file was there.
      step: that of the last commit.

    Raises: ValueError: the files are not those of `tables`, or not whole.
    """

    def __init__(self, path: str | os.PathLike[str], tables: Fingerprint):
        self.path, self.step, self._tables = Path(path), 0, tables
        self._stores: dict[str, RowStore] = {}
        self._checksums: dict[str, int] = {}
        self.path.mkdir(parents=True, exist_ok=True)
        self._written = self._read()
        self.is_new = not self._written
        self._undo: UndoLog | None = None
        self._is_whole = False
        if self.is_new:
            if files := sorted(file.name for file in self.path.glob("*.bin")):
                raise ValueError(f"{self.path} has {files}, but no {RECORD} that says what they hold. {_WAY_OUT}")
            self._write(is_whole=False)
        else:
            self._open()

    def _open(self) -> None:
        try:
            content = json.loads(self._written)
            record = content["record"]
            is_sound = Fingerprint.of(record).digest == content["digest"]
        except (ValueError, TypeError, KeyError):
            is_sound = False
        if not is_sound:
            raise ValueError(f"{self.path / RECORD} is damaged. {_WAY_OUT}")
        check_same(
            Fingerprint.of(record["tables"]),
            self._tables,
            what=f"the files in {self.path} belong to another module",
            way_out=f"Construct the module as it was. {_WAY_OUT}",
        )
        self.step, self._checksums, self._is_whole = record["step"], record["checksums"], True
        if not record["is_whole"]:
            log = self.path / f"{record.get('undo')}{_UNDO}"
            if not log.is_file() or is_in_use(log):
                why = "and its process still runs, or cannot be asked" if log.is_file() else "and there is no log of it"
                raise ValueError(
                    f"the files in {self.path} are not whole: training changed rows after the last flush(), which was "
                    f"at step {record['step']}, {why}. End with flush(). {_WAY_OUT}"
                )
            take_back(log)
            self._write(is_whole=True)
            log.unlink()
            _log.warning("%s went back to step %d, its last flush(); later steps are lost.", self.path, self.step)

    def store(self, label: str, shape: tuple[int, ...], dtype: DTypeLike) -> RowStore:
        """The rows of one file. Raises: ValueError: it is missing, or not as it was when it was whole."""
        file = self.path / f"{label}.bin"
        if not self.is_new and not file.exists():
            raise ValueError(f"{file} is missing, although {RECORD} lists it. {_WAY_OUT}")
        note = functools.partial(self._before_change, label)
        store = self._stores[label] = RowStore.in_file(file, shape, dtype, before_change=note)
        if store.checksum != self._checksums.get(label, 0):
            raise ValueError(f"{file} was changed or damaged since it was written: its checksum differs. {_WAY_OUT}")
        return store

    def commit(self, step: int) -> None:
        """Brings all rows to the disk and declares them whole. Raises: RuntimeError: another module wrote here."""
        if self._is_whole and step == self.step:
            return
        self._require_own()
        for store in self._stores.values():
            store.flush()
        self.step = step
        self._write(is_whole=True)
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def _before_change(self, label: str, rows: np.ndarray, values: np.ndarray) -> None:
        if self._is_whole:
            self._require_own()
            name = secrets.token_hex(8)
            self._undo = UndoLog(self.path / f"{name}{_UNDO}")
            self._write(is_whole=False, undo=name)
        if self._undo is not None:  # else the files never were whole
            self._undo.note(label, self._stores[label].shape[0], rows, values)

    def _require_own(self) -> None:
        if self._read() != self._written:
            raise RuntimeError(
                f"another module has written into {self.path} since this one opened it, so that its cache holds rows "
                "of another time; give each module its own folder."
            )

    def _read(self) -> str:
        file = self.path / RECORD
        return file.read_text() if file.exists() else ""

    def _write(self, *, is_whole: bool, undo: str | None = None) -> None:
        record: dict[str, Any] = {
            "tables": self._tables.facts,
            "is_whole": is_whole,
            "step": self.step,
            "checksums": self._checksums | {label: store.checksum for label, store in self._stores.items()},
            "undo": undo,
            "writer": secrets.token_hex(8),  # tells what two modules have written, even if all else is equal
        }
        text = json.dumps({"record": record, "digest": Fingerprint.of(record).digest}, indent=1)
        partial = self.path / f"{RECORD}.{record['writer']}"
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / RECORD)
        self._written, self._is_whole = text, is_whole
