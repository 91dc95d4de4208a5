"""Files in folders and archives, read in blocks of whole lines to bound the memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rsembed import archives
from rsembed.progress import progress

BLOCK_BYTES = 1 << 20
"""Number of bytes that are read from a file at a time."""
MOST_LINE_BYTES = 1 << 20
"""Number of bytes from which a line can be rejected as too long.

Without a limit, a file without line ends would be read as one line.
"""
MOST_RATIO = 16
"""Maximum size of a member of an archive, as a multiple of the size of the archive.

Compression makes logs of ratings and clicks only 3 to 6 times smaller.
"""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    RuntimeError,  # zipfile raises RuntimeError for an encrypted member.
    NotImplementedError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that can be opened for reading: a plain file, or a member of an archive.

    Attributes:
      name: path inside the folder or archive, as shown in error messages.
      num_bytes: size after unpacking, or None if the size is unknown before the file is read.
      opener: function that returns the open file.
    """

    name: str
    num_bytes: int | None
    opener: Callable[[], Any]

    @contextlib.contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """Context manager that opens the file, and closes it at the end of the `with` block.

        Raises: ValueError: the file is encrypted or damaged.
        """
        with damage_is_a_value_error(self.name):
            file = self.opener()
        with file:
            yield file

    def read(self) -> bytes:
        """Content of the whole file.

        Raises: ValueError: the file is encrypted or damaged.
        """
        with self.open() as file, damage_is_a_value_error(self.name):
            content = file.read()
        return content


@contextlib.contextmanager
def damage_is_a_value_error(name: str) -> Iterator[None]:
    """Context manager that turns errors of damaged or encrypted archives into `ValueError`.

    Args:
      name: name of the file or member, at the start of the error message.
    """
    try:
        yield
    except _DAMAGED as error:
        reason = str(error) or "it ends too early"
        raise ValueError(f"{name} cannot be read: {reason}. Get the file again.") from error


@contextlib.contextmanager
def files_in(path: Path) -> Iterator[list[SourceFile]]:
    """Context manager that yields the files of a folder, or the members of a zip or tar archive.

    If `path` is a folder, the files in its subfolders are not included.

    Args:
      path: a folder, or an archive (zip, tar, tar.gz).

    Raises: ValueError: `path` is neither a folder nor an archive, an archive is damaged, a member
      of a zip archive is neither stored nor deflated, or a member is more than `MOST_RATIO` times
      as large as the archive and has more than `archives.MOST_UNPACKED_BYTES` bytes.
    """
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            yield _folder_files(path)
            return
        with damage_is_a_value_error(path.name):
            if zipfile.is_zipfile(path):
                files = _zip_files(path, stack.enter_context(zipfile.ZipFile(path)))
            elif tarfile.is_tarfile(path):
                files = _tar_files(path, stack.enter_context(tarfile.open(path)))
            else:
                raise ValueError(f"{path.name} is neither a folder nor a zip or tar archive.")
        yield files


def is_archive(path: Path) -> bool:
    """Whether the file name has the extension of a zip or tar archive."""
    return path.name.lower().endswith((".zip", ".tar", ".tar.gz", ".tgz"))


def _folder_files(folder: Path) -> list[SourceFile]:
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            files.append(plain_file(path))
    return files


def plain_file(path: Path) -> SourceFile:
    """A plain file on the disk, or a gzip file, which is decompressed while it is read."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return SourceFile(name=path.name, num_bytes=None, opener=functools.partial(gzip.open, path))
    return SourceFile(
        name=path.name, num_bytes=path.stat().st_size, opener=functools.partial(path.open, "rb")
    )


def _zip_files(path: Path, archive: zipfile.ZipFile) -> list[SourceFile]:
    files = []
    for member in archive.infolist():
        if member.is_dir() or _is_a_side_file(member.filename):
            continue
        _check_size(path, member.filename, member.file_size)
        archives.check_compression(member)
        opener = functools.partial(archive.open, member)
        files.append(SourceFile(name=member.filename, num_bytes=member.file_size, opener=opener))
    return files


def _tar_files(path: Path, archive: tarfile.TarFile) -> list[SourceFile]:
    files = []
    for member in archive:
        # Check the size of each member first, because tarfile decompresses a whole member to find
        # the next member.
        _check_size(path, member.name, member.size)
        if not member.isfile() or _is_a_side_file(member.name):
            continue
        opener = functools.partial(archive.extractfile, member)
        files.append(SourceFile(name=member.name, num_bytes=member.size, opener=opener))
    return files


def _is_a_side_file(name: str) -> bool:
    """Whether macOS has added this member to the archive, to hold metadata of another member."""
    return name.startswith("__MACOSX/") or name.rpartition("/")[2].startswith("._")


def _check_size(path: Path, name: str, num_bytes: int) -> None:
    """Raises: ValueError: a member is too large for the size of the archive, see `files_in`."""
    most = max(archives.MOST_UNPACKED_BYTES, MOST_RATIO * path.stat().st_size)
    if num_bytes > most:
        raise ValueError(
            f"members hold more than {most} bytes ({name!r} declares {num_bytes}), more than a log packs into so small "
            "an archive. If you trust it, unpack it and give the folder."
        )


def read_first_line(file: io.BufferedIOBase, name: str) -> bytes:
    """First line of an open file, including its line end, without a byte order mark.

    The first line of an empty file is b"".

    Raises: ValueError: the line has `MOST_LINE_BYTES` bytes or more, or the file is damaged.
    """
    with damage_is_a_value_error(f"{name}, line 1,"):
        line = file.readline(MOST_LINE_BYTES)
    _check_line_bytes(len(line), name, 1)
    return line.removeprefix(BYTE_ORDER_MARK)


def _check_line_bytes(num_bytes: int, name: str, number: int) -> None:
    """Raises: ValueError: a line has `MOST_LINE_BYTES` bytes or more."""
    if num_bytes >= MOST_LINE_BYTES:
        raise ValueError(
            f"{name}, line {number} has {MOST_LINE_BYTES} bytes and no end. A log has one sample on each line."
        )


class TextBlock(NamedTuple):
    """A block of consecutive whole lines of a file.

    Attributes:
      first_line: index of the block's first line in the file, counted from 1.
      text: the lines, including their line ends.
      has_end: whether the last line ends with a line end in the file. If `has_end` is False, `text`
        ends with a line end that is not in the file.
    """

    first_line: int
    text: bytes
    has_end: bool


def line_blocks(
    file: io.BufferedIOBase, source: SourceFile, line: bytes, *, is_header: bool
) -> Iterator[TextBlock]:
    """Yields blocks of whole lines, and shows a progress bar in terminals and notebooks.

    Carriage returns before line ends are dropped.

    Args:
      file: open file, positioned after its first line.
      source: the `SourceFile` that was opened as `file`. Error messages show `source.name`, and the
        progress bar uses `source.num_bytes`.
      line: the first line, from `read_first_line`.
      is_header: whether the first line is a header, which is left out.

    Raises: ValueError: a line is too long (see `MOST_LINE_BYTES`), or the file is damaged.
    """
    num_blocks = None
    if source.num_bytes is not None:
        num_blocks = -(-source.num_bytes // BLOCK_BYTES)
    blocks = _read_blocks(file, source.name, line, is_header)
    description = f"reading {source.name}"
    yield from progress(blocks, description=description, total=num_blocks, unit="MB")


def _read_blocks(
    file: io.BufferedIOBase, name: str, line: bytes, is_header: bool
) -> Iterator[TextBlock]:
    first_line = 1
    text = line
    if is_header:
        first_line = 2
        text = b""
    while True:
        with damage_is_a_value_error(f"{name}, line {first_line} or later,"):
            text += file.read(BLOCK_BYTES)
            if not text.endswith(b"\n"):
                text += file.readline(MOST_LINE_BYTES)
        if not text:
            return
        has_end = text.endswith(b"\n")
        num_lines = text.count(b"\n")
        last_line_bytes = len(text) - 1 - text.rfind(b"\n")
        _check_line_bytes(last_line_bytes, name, first_line + num_lines)
        if not has_end:
            text += b"\n"
        yield TextBlock(first_line, text.replace(b"\r\n", b"\n"), has_end)
        first_line += num_lines
        text = b""


def is_number(text: bytes) -> bool:
    """Whether `float` accepts the text, and the text has no underscore.

    Underscores are rejected, because `float` reads 1_0 as 10.
    """
    try:
        float(text)
    except ValueError:
        return False
    return b"_" not in text


def decoded(content: bytes) -> str:
    """Decodes bytes as UTF-8 if they are valid UTF-8, and otherwise as Latin-1.

    Some MovieLens files (ml-1m and ml-100k) are in Latin-1. Titles in Latin-1 are hardly ever valid
    UTF-8 by chance, because a special character would have to follow each accented letter.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def shown(text: str) -> str:
    """The first 80 characters of a string in quotes, for an error message."""
    return repr(text[:80]) + ("..." if len(text) > 80 else "")
