"""Click logs in the file formats of Criteo, as arrays or in chunks that fit in memory."""

from __future__ import annotations

import binascii
import contextlib
import dataclasses
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from rsembed.checks import PositiveInt, validated
from rsembed.datasets.files import (
    SourceFile,
    TextBlock,
    files_in,
    is_archive,
    is_number,
    line_blocks,
    plain_file,
    read_first_line,
    shown,
)

STANDARD_NAMES = (
    "label",
    *[f"I{number}" for number in range(1, 14)],
    *[f"C{number}" for number in range(1, 27)],
)
"""Names of the columns of a log without a header."""
TRAINING_FILE = "train.txt"
"""Name of the file with labelled rows in the archive of Kaggle's competition on Criteo's data."""
LABEL_NAMES = ("label", "click")
"""Possible names of the label column. A first line with a label column is a header."""
ID_NAME = "id"
"""Name of a column with the number of each row. Such a column is skipped."""
NUM_DIGITS = 16
"""Number of hexadecimal digits of a 64-bit key."""
MOST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CriteoLog:
    """Rows of a click log. Each row has a label, numbers and categories.

    Attributes:
      labels: 1 for a click, else 0.
      dense: numbers in the order of `dense_names`, NaN for missing numbers.
      sparse: 64-bit keys of the categories, by name of the column. The key of a missing category is
        -1, or the argument `missing` of the loader. If the features of a collection have the names
        of the columns, pass the keys to `collection.prepare(log.sparse)`.
      dense_names: names of the columns of numbers, "I1" to "I13" unless the header has other names.
      first_line: index of the line with the first row, counted from 1.
      source: file format of the log, and path of the file.
    """

    labels: Int32[np.ndarray, " rows"]
    dense: Float32[np.ndarray, "rows numbers"]
    sparse: dict[str, Int64[np.ndarray, " rows"]]
    dense_names: tuple[str, ...]
    first_line: int
    source: str

    def __repr__(self) -> str:
        return (
            f"CriteoLog({len(self):,} rows with {len(self.dense_names)} numbers and "
            f"{len(self.sparse)} categories; {self.source})"
        )

    def __len__(self) -> int:
        return len(self.labels)


@validated
def criteo(
    path: str | os.PathLike[str], *, rows: PositiveInt | None = None, missing: int = -1
) -> CriteoLog:
    """First rows of a click log in Criteo's format, as arrays.

    The file can be Kaggle's `train.txt`, a day of the Terabyte log, or CSV or TSV with a header.
    The file may be compressed by gzip, or be in a zip or tar archive. `criteo_chunks` reads files
    that do not fit in memory. `synthetic_clicks` generates clicks without a file.

    Args:
      path: a file with a label, 13 numbers and 26 hexadecimal categories in each line, separated by
        tabs or commas. A file with other columns, or with columns in another order, must have a
        header with the names `label`, `I1`, `I2`, ... and `C1`, `C2`, ... (names such as `int_0`
        and `cat_0` are also accepted, and a column `Id` is skipped). In an archive, the log is
        `train.txt` or the only file.
      rows: number of rows to read from the beginning of the log. If None, all rows are read. A
        million rows take 0.3 GB of memory.
      missing: key that stands for a missing category. The default key, -1, means no id, so missing
        categories contribute nothing. If `missing` is not -1, all missing categories read the row
        of the key `missing`.

    Returns:
      The rows of the log. The key of a category is the number that its hexadecimal digits form. To
      look up the 64-bit keys, use tables with storage `rs.Hashed`.

    Raises:
      ValueError: a line is malformed, the file is damaged or has no rows, or `missing` does not fit
        64 bits.
      FileNotFoundError: `path` is not a file.

    Source: Criteo's data for Kaggle's Display Advertising Challenge (2014), and Criteo's Terabyte
      click logs.

    Example:
      >>> import tempfile
      >>> line = ",".join(["1", "5", *[""] * 12, "68fd1e64", *[""] * 25])
      >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
      ...     print(line, file=file, flush=True)
      ...     log = criteo(file.name)
      >>> log.labels.tolist(), log.dense[0, :2].tolist(), f"{log.sparse['C1'][0]:x}", log.sparse["C2"].tolist()
      ([1], [5.0, nan], '68fd1e64', [-1])
    """
    with contextlib.closing(_chunks("criteo", path, missing)) as chunks:
        if rows is None:
            return _concatenated(list(chunks))
        return next(_regrouped(chunks, rows))


@validated
def criteo_chunks(
    path: str | os.PathLike[str], *, rows: PositiveInt = 65_536, missing: int = -1
) -> Iterator[CriteoLog]:
    """Iterator over a click log in Criteo's format, in chunks of `rows` rows.

    Memory holds one chunk and 1 MB of the file, so a day of the Terabyte log can be read on a
    laptop. In a terminal or notebook, a progress bar shows how much of the file is read.

    Args:
      path: file or archive, see `criteo`.
      rows: number of rows in each chunk, for example the size of one or several batches. The last
        chunk may have fewer rows.
      missing: key that stands for a missing category, see `criteo`.

    Raises: ValueError, FileNotFoundError: see `criteo`. A malformed line raises the error only when
      the iterator reaches the chunk with this line.
    """
    chunks = _chunks("criteo_chunks", path, missing)
    return _regrouped(chunks, rows)


def _regrouped(chunks: Iterator[CriteoLog], rows: int) -> Iterator[CriteoLog]:
    """Regroups rows into chunks of `rows` rows. The last chunk may have fewer rows."""
    waiting: list[CriteoLog] = []
    num_waiting = 0
    for part in chunks:
        start = 0
        while num_waiting + len(part) - start >= rows:
            stop = start + rows - num_waiting
            waiting.append(_row_range(part, start, stop))
            yield _concatenated(waiting)
            waiting = []
            num_waiting = 0
            start = stop
        if start < len(part):
            waiting.append(_row_range(part, start, len(part)))
            num_waiting += len(part) - start
    if waiting:
        yield _concatenated(waiting)


def _row_range(part: CriteoLog, start: int, stop: int) -> CriteoLog:
    sparse = {}
    for name, keys in part.sparse.items():
        sparse[name] = keys[start:stop]
    return dataclasses.replace(
        part,
        labels=part.labels[start:stop],
        dense=part.dense[start:stop],
        sparse=sparse,
        first_line=part.first_line + start,
    )


def _concatenated(parts: list[CriteoLog]) -> CriteoLog:
    sparse = {}
    for name in parts[0].sparse:
        sparse[name] = np.concatenate([part.sparse[name] for part in parts])
    return dataclasses.replace(
        parts[0],
        labels=np.concatenate([part.labels for part in parts]),
        dense=np.concatenate([part.dense for part in parts]),
        sparse=sparse,
    )


class Columns(NamedTuple):
    """Indices of the fields that hold the label, numbers and categories in a line of a click log.

    Attributes:
      separator: the byte between two fields, a tab or a comma.
      num_columns: number of fields in each line.
      label: index of the field with the label.
      numbers: mapping from the name of each numeric feature to the index of its field.
      categories: mapping from the name of each categorical feature to the index of its field.
    """

    separator: bytes
    num_columns: int
    label: int
    numbers: dict[str, int]
    categories: dict[str, int]


def _chunks(
    reader: str, path: str | os.PathLike[str], missing: int
) -> Generator[CriteoLog, None, None]:
    """Iterator over chunks of rows, one chunk for each block of the file.

    `_chunks` checks that the file exists and that `missing` fits 64 bits. The file is opened when
    the first chunk is requested.
    """
    file_path = Path(path).expanduser()
    if not file_path.is_file():
        raise FileNotFoundError(
            f"{reader}: path={os.fspath(path)!r} is no file; give a log, or an archive of one."
        )
    if not -(2**63) <= missing < 2**63:
        raise ValueError(
            f"{reader}: missing={missing} does not fit 64 bits with a sign; give another key."
        )
    return _read_chunks(reader, file_path, missing)


def _read_chunks(reader: str, path: Path, missing: int) -> Generator[CriteoLog, None, None]:
    num_rows = 0
    try:
        with contextlib.ExitStack() as stack:
            source = plain_file(path)
            if is_archive(path):
                source = _log_in_archive(stack.enter_context(files_in(path)))
            file = stack.enter_context(source.open())
            line = read_first_line(file, source.name)
            columns, is_header = _columns_of(line)
            origin = f"Criteo's format, from {path}"
            for block in line_blocks(file, source, line, is_header=is_header):
                part = _parsed(block, columns, source.name, missing, origin)
                num_rows += len(part)
                yield part
            if not num_rows:
                raise ValueError(f"{source.name} has no rows")
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{reader}: {path}: {reason}.") from error


def _log_in_archive(files: list[SourceFile]) -> SourceFile:
    """The file `train.txt` of an archive, or the only file of the archive.

    Raises: ValueError: the archive has several files, but no `train.txt`, or has no files.
    """
    for file in files:
        if file.name.rpartition("/")[2] == TRAINING_FILE:
            return file
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files)
    raise ValueError(
        f"it has no {TRAINING_FILE}, but {names or 'no files'}; unpack the log that you mean"
    )


def _columns_of(line: bytes) -> tuple[Columns, bool]:
    """Columns of a log, inferred from its first line, and whether the line is a header.

    Raises: ValueError: a header names a column twice, or has a name that is not accepted.
    """
    separator = b"\t" if b"\t" in line else b","
    fields = line.rstrip(b"\r\n").decode("latin-1").split(separator.decode())
    names = [field.strip('"') for field in fields]
    is_header = any(name.lower() in LABEL_NAMES for name in names)
    if not is_header:
        names = list(STANDARD_NAMES)
    label = 0
    numbers = {}
    categories = {}
    num_skipped = 0
    for column, name in enumerate(names):
        if name.lower() in LABEL_NAMES:
            label = column
        elif name.lower() == ID_NAME:
            num_skipped += 1
        elif re.fullmatch(r"(I|int_?)\d+", name):
            numbers[name] = column
        elif re.fullmatch(r"(C|cat_?)\d+", name):
            categories[name] = column
        else:
            raise ValueError(
                f"line 1 has the column {shown(name)}, neither label, nor I1, I2, ..., nor C1, C2, ..."
            )
    if 1 + len(numbers) + len(categories) + num_skipped != len(names):
        raise ValueError("line 1 names a column twice")
    return Columns(separator, len(names), label, numbers, categories), is_header


def _parsed(block: TextBlock, columns: Columns, name: str, missing: int, origin: str) -> CriteoLog:
    """The rows in a block of lines, as a `CriteoLog`.

    Raises: ValueError: a line is malformed.
    """
    _check_num_fields(block, columns, name)
    flat_text = block.text.replace(b"\n", columns.separator)
    fields = flat_text.split(columns.separator)
    del fields[-1]  # `flat_text` ends with a separator, so the last field is empty.
    labels = fields[columns.label :: columns.num_columns]
    for row, label in enumerate(labels):
        if label not in (b"0", b"1"):
            raise _bad_field(block, row, name, "label", label, "neither 0 nor 1")
    dense = np.empty((len(labels), len(columns.numbers)), np.float32)
    for position, (column_name, column) in enumerate(columns.numbers.items()):
        texts = fields[column :: columns.num_columns]
        dense[:, position] = _numbers(texts, block, name, column_name)
    sparse = {}
    for column_name, column in columns.categories.items():
        texts = fields[column :: columns.num_columns]
        sparse[column_name] = _keys(texts, missing, block, name, column_name)
    return CriteoLog(
        labels=np.array(labels).astype(np.int32),
        dense=dense,
        sparse=sparse,
        dense_names=tuple(columns.numbers),
        first_line=block.first_line,
        source=origin,
    )


def _check_num_fields(block: TextBlock, columns: Columns, name: str) -> None:
    """Raises: ValueError: a line has fewer or more fields than `columns.num_columns`."""
    characters = np.frombuffer(block.text, np.uint8)
    is_line_end = characters == ord("\n")
    is_field_end = is_line_end | (characters == columns.separator[0])
    last_fields = np.flatnonzero(is_line_end[is_field_end])
    num_fields = np.diff(last_fields, prepend=-1)
    is_bad = num_fields != columns.num_columns
    if not is_bad.any():
        return
    row = int(is_bad.argmax())
    hint = ""
    if num_fields[row] == len(STANDARD_NAMES) - 1:
        hint = " (a log without labels, as test.txt is, cannot be trained on)"
    elif not block.has_end and row == len(num_fields) - 1:
        hint = " (the file ends inside this line)"
    raise ValueError(
        f"{name}, line {block.first_line + row} has {num_fields[row]} fields, not {columns.num_columns}{hint}: "
        f"a label, {len(columns.numbers)} numbers and {len(columns.categories)} categories"
    )


def _bad_field(
    block: TextBlock, row: int, name: str, column_name: str, field: bytes, reason: str
) -> ValueError:
    text = field.decode("latin-1")
    return ValueError(
        f"{name}, line {block.first_line + row}: {column_name} is {shown(text)}, {reason}"
    )


def _numbers(texts: list[bytes], block: TextBlock, name: str, column_name: str) -> np.ndarray:
    """Numbers of a column, with NaN for empty fields.

    Raises: ValueError: a field is not a number that float32 can hold.
    """
    is_missing = np.array([not text for text in texts])
    filled = [text or b"0" for text in texts]
    try:
        numbers = np.array(filled).astype(np.float64)
        with np.errstate(over="ignore"):
            narrow = numbers.astype(np.float32)
        # `astype` reads 1_0 as 10, so underscores are rejected. No valid field contains an
        # underscore, so a single search for underscores in the whole block suffices.
        is_good = np.isfinite(narrow).all() and b"_" not in block.text
    except ValueError:
        is_good = False
    if not is_good:
        for row, text in enumerate(filled):
            if not is_number(text) or not abs(float(text)) <= MOST_FLOAT32:
                raise _bad_field(
                    block, row, name, column_name, text, "no number that float32 can hold"
                )
    narrow[is_missing] = np.nan
    return narrow


def _keys(
    texts: list[bytes], missing: int, block: TextBlock, name: str, column_name: str
) -> np.ndarray:
    """Keys of a column of hexadecimal categories.

    Raises: ValueError: a field has a character that is not a hexadecimal digit, or has more than 16
      digits.
    """
    padded = [text.rjust(NUM_DIGITS, b"0") for text in texts]
    digits = b"".join(padded)
    is_good = len(digits) == NUM_DIGITS * len(texts)
    try:
        content = binascii.unhexlify(digits)
    except binascii.Error:
        is_good = False
    if not is_good:
        for row, text in enumerate(texts):
            if len(text) > NUM_DIGITS or not re.fullmatch(b"[0-9A-Fa-f]*", text):
                reason = f"no category of at most {NUM_DIGITS} hexadecimal digits; make keys of texts by rs.hash_keys"
                raise _bad_field(block, row, name, column_name, text, reason)
    keys = np.frombuffer(content, ">i8").astype(np.int64)
    # A key of -1 means no id. The category "ffffffffffffffff" has the bits of -1, so the category
    # gets the key -2, as in `rs.hash_keys`.
    keys[keys == -1] = -2
    is_missing = np.array([not text for text in texts])
    keys[is_missing] = missing
    return keys
