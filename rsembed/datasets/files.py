"""Files of folders and archives, read in blocks of whole lines so that memory does not grow with the file."""

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
"""Bytes of a file that are in memory at a time."""
MOST_LINE_BYTES = 1 << 20
"""Most bytes of a line.

Without a limit, a file without line ends would be read as one line.
"""
MOST_RATIO = 16
"""Most bytes of a member for each byte of its archive. Logs of ratings and clicks pack 3 to 6 times."""
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
      num_bytes: size after unpacking; None if the file does not contain it.
      opener: function that returns the open file.
    """

    name: str
    num_bytes: int | None
    opener: Callable[[], Any]

    @contextlib.contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """The open file, closed at the end of the `with` block.

        Raises: ValueError: the member is encrypted or damaged.
        """
        with damage_is_a_value_error(self.name):
            file = self.opener()
        with file:
            yield file

    def read(self) -> bytes:
        """Content of the whole file.

        Raises: ValueError: the member is encrypted or damaged.
        """
        with self.open() as file, damage_is_a_value_error(self.name):
            content = file.read()
        return content


@contextlib.contextmanager
def damage_is_a_value_error(name: str) -> Iterator[None]:
    """A context that turns the errors of damaged or encrypted archives into `ValueError` with the file's name."""
    try:
        yield
    except _DAMAGED as error:
        reason = str(error) or "it ends too early"
        raise ValueError(f"{name} cannot be read: {reason}. Get the file again.") from error


@contextlib.contextmanager
def files_in(path: Path) -> Iterator[list[SourceFile]]:
    """Files of a folder (without its subfolders), or the members of a zip or tar archive.

    Args:
      path: a folder, or an archive (zip, tar, tar.gz).

    Raises: ValueError: `path` is a file and no archive, or a member is larger than an archive of
      that size can hold.
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
    """Whether the file is named like a zip or tar archive."""
    return path.name.lower().endswith((".zip", ".tar", ".tar.gz", ".tgz"))


def _folder_files(folder: Path) -> list[SourceFile]:
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            files.append(plain_file(path))
    return files


def plain_file(path: Path) -> SourceFile:
    """A file on the disk. A file that gzip has compressed is unpacked while it is read."""
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
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile unpacks other compression methods without a bound on memory.
            raise ValueError(
                f"member {member.filename!r} is neither stored nor deflated. Pack it so."
            )
        opener = functools.partial(archive.open, member)
        files.append(SourceFile(name=member.filename, num_bytes=member.file_size, opener=opener))
    return files


def _tar_files(path: Path, archive: tarfile.TarFile) -> list[SourceFile]:
    files = []
    for member in archive:
        # The size is checked before tarfile reads past the member to the next one.
        _check_size(path, member.name, member.size)
        if not member.isfile() or _is_a_side_file(member.name):
            continue
        opener = functools.partial(archive.extractfile, member)
        files.append(SourceFile(name=member.name, num_bytes=member.size, opener=opener))
    return files


def _is_a_side_file(name: str) -> bool:
    """Whether macOS has added this member. Its name is a prefix and the name of a real member."""
    return name.startswith("__MACOSX/") or name.rpartition("/")[2].startswith("._")


def _check_size(path: Path, name: str, num_bytes: int) -> None:
    """Raises: ValueError: a member is larger than an archive of that size can hold."""
    most = max(archives.MOST_UNPACKED_BYTES, MOST_RATIO * path.stat().st_size)
    if num_bytes > most:
        raise ValueError(
            f"members hold more than {most} bytes ({name!r} declares {num_bytes}), more than a log packs into so small "
            "an archive. If you trust it, unpack it and give the folder."
        )


def read_first_line(file: io.BufferedIOBase, name: str) -> bytes:
    """First line of an open file, including its line end, without a byte order mark.

    The result is empty for an empty file.

    Raises: ValueError: the line has more than `MOST_LINE_BYTES`, or the file is damaged.
    """
    with damage_is_a_value_error(f"{name}, line 1,"):
        line = file.readline(MOST_LINE_BYTES)
    _check_line_bytes(len(line), name, 1)
    return line.removeprefix(BYTE_ORDER_MARK)


def _check_line_bytes(num_bytes: int, name: str, number: int) -> None:
    """Raises: ValueError: a line is longer than a log can have."""
    if num_bytes >= MOST_LINE_BYTES:
        raise ValueError(
            f"{name}, line {number} has {MOST_LINE_BYTES} bytes and no end. A log has one sample on each line."
        )


class Block(NamedTuple):
    """Whole lines of a file.

    Attributes:
      first_line: index of the first line, from 1.
      text: the lines, including their line ends.
      has_end: False if the file ends without an end of line. An end of line is then added to
        `text`.
    """

    first_line: int
    text: bytes
    has_end: bool


def line_blocks(
    file: io.BufferedIOBase, source: SourceFile, *, first_line: int, description: str
) -> Iterator[Block]:
    """Blocks of whole lines, with a progress bar in terminals and notebooks.

    Carriage returns before line ends are dropped.

    Args:
      file: `source`, opened, at the beginning of a line.
      source: name and size of the file.
      first_line: index of the first line to read, from 1, for errors.
      description: text beside the progress bar.

    Raises: ValueError: a line has more than `MOST_LINE_BYTES`, or the file is damaged.
    """
    num_blocks = None
    if source.num_bytes is not None:
        num_blocks = -(-source.num_bytes // BLOCK_BYTES)
    blocks = _read_blocks(file, source.name, first_line)
    yield from progress(blocks, description=description, total=num_blocks, unit="MB")


def _read_blocks(file: io.BufferedIOBase, name: str, first_line: int) -> Iterator[Block]:
    while True:
        with damage_is_a_value_error(f"{name}, line {first_line} or later,"):
            text = file.read(BLOCK_BYTES)
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
        yield Block(first_line, text.replace(b"\r\n", b"\n"), has_end)
        first_line += num_lines


def is_number(text: str) -> bool:
    """Whether a string is a decimal number, without the underscores that Python allows in one."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def decoded(content: bytes) -> str:
    """String from UTF-8 if it is valid, else from Latin-1, the encoding of ml-1m and ml-100k.

    Latin-1 titles are hardly ever valid UTF-8 by chance: a special character would have to follow each accent.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def shown(text: str) -> str:
    """The first 80 characters of a line, quoted, as errors show it."""
    return repr(text[:80]) + ("..." if len(text) > 80 else "")
