"""Word vectors from the text files of word2vec, GloVe and fastText, read line by line."""

from __future__ import annotations

import dataclasses
import gzip
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32

from rsembed.checks import PositiveInt, describe, validated
from rsembed.datasets.files import BYTE_ORDER_MARK, decoded, is_number, plain_file, shown

MAX_WORD_BYTES = 65_536
"""Number of bytes that a line may use for its word, see `MAX_NUMBER_BYTES`."""
MAX_NUMBER_BYTES = 64
"""Number of bytes that a line may use for each number, including the space before the number.

To bound the memory, a line of a file must have fewer than
`MAX_WORD_BYTES + dim * MAX_NUMBER_BYTES` bytes.
"""
MAX_DIGITS = 19
"""A first line is a header only if each of its two integers has fewer digits than `MAX_DIGITS`."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class WordVectors:
    """Vectors of the requested words, and counts of the vectors and lines of the file.

    Attributes:
      values: vector of each word, zeros for words without a vector in the file.
      is_found: whether the file has a vector for the word.
      num_vectors: number of vectors in the file, including words that were not requested.
      num_duplicates: number of vectors that were not used, because an earlier line has a vector of
        the same requested word.
      num_bad_lines: number of skipped lines, 0 unless `bad_lines="skip"`.
      num_announced: number of vectors that the header of the file states, None for a file without a
        header.
    """

    values: Float32[np.ndarray, "words dim"]
    is_found: Bool[np.ndarray, " words"]
    num_vectors: int
    num_duplicates: int
    num_bad_lines: int
    num_announced: int | None

    def __repr__(self) -> str:
        num_words, dim = self.values.shape
        return (
            f"WordVectors({self.is_found.sum():,} of {num_words:,} words found among "
            f"{self.num_vectors:,} vectors of {dim} numbers)"
        )


@validated
def word_vectors(
    source: str | os.PathLike[str] | Iterable[str | bytes],
    words: Iterable[str],
    *,
    dim: PositiveInt,
    bad_lines: Literal["raise", "skip"] = "raise",
) -> WordVectors:
    """Pretrained vectors of some words, from a text file of word2vec, GloVe or fastText.

    Each line is a word and `dim` numbers. A first line of two integers is a header, as in files of
    word2vec and fastText. A word may contain spaces, as some words of GloVe 840B do. Lines are read
    one at a time, so reading needs little more memory than the result. If a word is not requested,
    only the first and the last number in its line are checked.

    Args:
      source: path of a UTF-8 text file, plain or compressed by gzip, or an iterable of lines.
      words: the requested words, one for each row of the result. The same word may occur several
        times in `words`.
      dim: length of a vector. If the header of a file states a different length, `word_vectors`
        raises an error.
      bad_lines: "raise", the default, stops at the first bad line. "skip" skips bad lines and
        counts them in `num_bad_lines`. A line is bad if it has too few or too many numbers, a word
        that is not UTF-8, or a number that float32 cannot hold. If the last line of a file has no
        line end, the line is bad, because the line may have been cut inside a number.

    Returns:
      The vectors, and a mask of the words with a vector. To keep initial values for words without a
      vector, use `np.where(found.is_found[:, None], found.values, initial)`.

    Raises:
      TypeError: a line is neither a string nor bytes, or a word is not a string.
      ValueError: the header states a different `dim`, a line is too long, the file is a zip archive
        or a damaged gzip file, or with `bad_lines="raise"`, a line is bad or the header states a
        different number of vectors.

    Example:
      >>> found = word_vectors(["2 3", "the 0.5 1 2", "New York 1 1 1"], ["New York", "cat"], dim=3)
      >>> found.values.tolist(), found.is_found.tolist()
      ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [True, False])
    """
    rows_of_word = _rows_of_word(words)
    num_words = sum(len(rows) for rows in rows_of_word.values())
    values = np.zeros((num_words, dim), np.float32)
    is_found = np.zeros(num_words, bool)
    name = "lines"
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        lines = _lines_of_file(Path(source).expanduser(), dim)
    else:
        lines = _lines_of(source)
    num_announced: int | None = None
    num_vectors = num_duplicates = num_bad_lines = 0
    for number, (line, has_end) in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
            num_announced = _announced(line, dim, name)
            if num_announced is not None:
                continue
        try:
            if not has_end:
                raise ValueError("the last line has no end of line, so it may be cut")
            word, numbers = _split(line, dim)
            rows = rows_of_word.get(word)
            vector = None if rows is None else _vector(numbers)
        except ValueError as error:
            if bad_lines == "raise":
                raise ValueError(
                    f"word_vectors: {name}, line {number}: {error}; mend the file, or skip and count such lines by "
                    'bad_lines="skip".'
                ) from error
            num_bad_lines += 1
            continue
        num_vectors += 1
        if rows is None:
            continue
        if is_found[rows[0]]:
            num_duplicates += 1
            continue
        values[rows] = vector
        is_found[rows] = True
    if bad_lines == "raise" and num_announced not in (None, num_vectors):
        raise ValueError(
            f"word_vectors: {name} has {num_vectors} vectors, its header says {num_announced}; get the whole file, or "
            'take what there is by bad_lines="skip".'
        )
    return WordVectors(
        values=values,
        is_found=is_found,
        num_vectors=num_vectors,
        num_duplicates=num_duplicates,
        num_bad_lines=num_bad_lines,
        num_announced=num_announced,
    )


def _rows_of_word(words: Iterable[str]) -> dict[bytes, list[int]]:
    """Mapping from each word, as UTF-8 bytes, to the word's row indices in the result."""
    if isinstance(words, str):
        raise TypeError(f"word_vectors: words must be a list of texts, got {describe(words)}.")
    rows_of_word: dict[bytes, list[int]] = {}
    for row, word in enumerate(words):
        if not isinstance(word, str):
            raise TypeError(f"word_vectors: words[{row}] must be a text, got {describe(word)}.")
        rows_of_word.setdefault(word.encode("utf-8", "surrogatepass"), []).append(row)
    return rows_of_word


def _lines_of(lines: Iterable[str | bytes]) -> Iterator[tuple[bytes, bool]]:
    """Pairs `(line, True)` of lines from memory, where True means that the line is complete.

    Each line is converted to bytes without a line end. For the lines of a file, see
    `_lines_of_file`.
    """
    for number, line in enumerate(lines, start=1):
        if isinstance(line, str):
            line = line.encode("utf-8", "surrogatepass")
        elif not isinstance(line, bytes):
            raise TypeError(
                f"word_vectors: line {number} must be text or bytes, got {describe(line)}."
            )
        yield line.rstrip(b"\r\n"), True


def _lines_of_file(path: Path, dim: int) -> Iterator[tuple[bytes, bool]]:
    """Pairs `(line, has_end)`: a line without line end, and whether the file has the line end.

    Args:
      path: a text file, plain or compressed by gzip.
      dim: length of a vector. The limit on the number of bytes in a line depends on `dim`.

    Raises: ValueError: the file is a zip archive or a damaged gzip file, or a line is too long.
    """
    most = MAX_WORD_BYTES + dim * MAX_NUMBER_BYTES
    if zipfile.is_zipfile(path):
        raise ValueError(
            f"word_vectors: {path} is a zip archive, which may have several files; give the lines of one: "
            "zipfile.ZipFile(path).open(name)."
        )
    with plain_file(path).open() as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(most)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"word_vectors: {path}, line {number}: the gzip file is damaged or cut ({error}); get it again."
                ) from error
            if not line:
                return
            if len(line) == most:
                raise ValueError(
                    f"word_vectors: {path}, line {number} has {most} bytes and no end; a text file of vectors has a "
                    "word and its numbers in each line."
                )
            yield line.rstrip(b"\r\n"), line.endswith(b"\n")


def _announced(line: bytes, dim: int, name: str) -> int | None:
    """Number of vectors that a header states, or None if the line is not a header.

    Raises: ValueError: the length of the vectors that the header states differs from `dim`.
    """
    pieces = line.split()
    if len(pieces) != 2 or not all(piece.isdigit() and len(piece) < MAX_DIGITS for piece in pieces):
        return None
    if int(pieces[1]) != dim:
        raise ValueError(
            f"word_vectors: {name}, line 1: the header says {int(pieces[1])} numbers a line, dim={dim}; give "
            f"dim={int(pieces[1])}, or another file."
        )
    return int(pieces[0])


def _split(line: bytes, dim: int) -> tuple[bytes, bytes]:
    """The word at the start of a line, and the rest of the line, which holds the numbers.

    Raises: ValueError: the line is bad, for the reason in the error message.
    """
    stripped = line.rstrip(b" ")
    num_spaces = stripped.count(b" ")
    # `_split` does not split the numbers of a line, because most words are not requested.
    word = stripped.partition(b" ")[0] if num_spaces == dim else stripped.rsplit(b" ", dim)[0]
    numbers = stripped[len(word) + 1 :]
    first = numbers.partition(b" ")[0]
    last = numbers.rpartition(b" ")[2]
    # If a line has a word with spaces and lacks one number, `first` is the last part of the word.
    if num_spaces < dim or not is_number(first) or not is_number(last):
        raise ValueError(f"it has not a word and {dim} numbers, {shown(decoded(line))}")
    last_of_word = word.rpartition(b" ")[2]
    if b" " in word and (not last_of_word or is_number(last_of_word)):
        raise ValueError(f"it has more than a word and {dim} numbers, {shown(decoded(line))}")
    try:
        word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the word is not UTF-8 ({error.reason} at byte {error.start}), {shown(decoded(line))}"
        ) from error
    return word, numbers


def _vector(text: bytes) -> np.ndarray:
    """The vector in a line, as float32 numbers.

    Raises: ValueError: a field is not a number, or float32 cannot hold it.
    """
    numbers = text.split(b" ")
    for place, number in enumerate(numbers):
        if not is_number(number):
            raise ValueError(f"number {place + 1} is {shown(decoded(number))}")
    with np.errstate(over="ignore"):
        vector = np.array([float(number) for number in numbers], np.float64).astype(np.float32)
    if not np.isfinite(vector).all():
        place = int(np.isfinite(vector).argmin())
        raise ValueError(
            f"number {place + 1} is {shown(decoded(numbers[place]))}, which float32 cannot hold"
        )
    return vector
