"""Reads members of zip archives up to a size limit.

Archives need a size limit, because an archive of a few kilobytes can unpack to terabytes.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

MOST_UNPACKED_BYTES = 1 << 28
"""Maximum total size in bytes of the members that are read from one archive.

`MOST_UNPACKED_BYTES` is about ten times the size of the MovieLens 1M data, a log of a million
ratings. For an archive file larger than `MOST_UNPACKED_BYTES`, the limit is the size of the file.
"""
# Compression methods for which `read(n)` of a member does not decompress much more than `n` bytes.
_COMPRESSIONS = (
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
)


def unpacked(content: bytes, names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Unpacks members of a zip archive. Returns a dictionary from names to contents.

    Args:
      content: the archive file as bytes.
      names: names of the members to read, by default all.

    Raises: ValueError: the bytes are not a zip archive, the archive is damaged or encrypted, a
      member is missing or has an unsupported compression, two members have the same name, or the
      members are larger than the limit (see `MOST_UNPACKED_BYTES`).

    Example:
      >>> import io, zipfile
      >>> file = io.BytesIO()
      >>> with zipfile.ZipFile(file, "w") as archive:
      ...     archive.writestr("a.txt", "text")
      >>> unpacked(file.getvalue())
      {'a.txt': b'text'}
    """
    most = max(MOST_UNPACKED_BYTES, len(content))
    bytes_left = most
    contents: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist() if names is None else names:
                if name in contents:
                    raise ValueError(f"the archive has two members {name!r}.")
                contents[name] = _read(archive, name, bytes_left, most)
                bytes_left -= len(contents[name])
    except KeyError as error:
        raise ValueError(f"the archive lacks a member: {error}") from error
    # For an archive that is damaged, encrypted or in an unknown format, `zipfile` raises one of
    # several exceptions.
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise ValueError(f"the archive cannot be read: {error or 'it ends too early'}") from error
    return contents


def _read(archive: zipfile.ZipFile, name: str, bytes_left: int, most: int) -> bytes:
    """Reads one member of an archive, and checks the size of the member.

    The declared size of the member is checked before decompression, and the actual size after
    decompression.

    Args:
      archive: the open archive.
      name: name of the member.
      bytes_left: maximum size of the member, in bytes.
      most: maximum size of all members together, in bytes, for the error message.

    Raises: ValueError: the member has more than `bytes_left` bytes.
    """
    member = archive.getinfo(name)
    if member.compress_type not in _COMPRESSIONS:
        raise ValueError(
            f"member {name!r} of the archive is neither stored nor deflated; pack it so."
        )
    if member.file_size <= bytes_left:
        with archive.open(member) as file:
            content = file.read(bytes_left + 1)
        if len(content) <= bytes_left:
            return content
    raise ValueError(
        f"members of the archive hold more than {most} bytes ({name!r} declares {member.file_size}), more than one of "
        "this kind has. If you trust it, pack fewer rows, or store them without compression."
    )
