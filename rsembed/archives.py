"""Reads members of zip archives up to a size limit.

Archives need a size limit, because an archive of a few kilobytes can unpack to terabytes.
"""

from __future__ import annotations

import io
import zipfile
import zlib

MOST_UNPACKED_BYTES = 1 << 28
"""Maximum total size in bytes of the members that are read from one archive.

`MOST_UNPACKED_BYTES` is about ten times the size of the MovieLens 1M data, a log of a million
ratings. For an archive file larger than `MOST_UNPACKED_BYTES`, the limit is the size of the file.
"""


def unpacked(content: bytes) -> dict[str, bytes]:
    """Unpacks a zip archive. Returns a dictionary from the names of members to their contents.

    Args:
      content: the archive file as bytes.

    Raises: ValueError: the bytes are not a zip archive, the archive is damaged or encrypted, a
      member has an unsupported compression, two members have the same name, or the members are
      larger than the limit (see `MOST_UNPACKED_BYTES`).

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
            for member in archive.infolist():
                name = member.filename
                if name in contents:
                    raise ValueError(f"the archive has two members {name!r}.")
                contents[name] = _read(archive, member, bytes_left, most)
                bytes_left -= len(contents[name])
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


def check_compression(member: zipfile.ZipInfo) -> None:
    """Checks that `read(n)` of a member does not decompress much more than `n` bytes.

    Raises: ValueError: the member is neither stored nor deflated.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"member {member.filename!r} is neither stored nor deflated; pack it so.")


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, bytes_left: int, most: int) -> bytes:
    """Reads one member of an archive, and checks the size of the member.

    The declared size of the member is checked before decompression, and the actual size after
    decompression.

    Args:
      archive: the open archive.
      member: the member.
      bytes_left: maximum size of the member, in bytes.
      most: maximum size of all members together, in bytes, for the error message.

    Raises: ValueError: the member has more than `bytes_left` bytes.
    """
    check_compression(member)
    if member.file_size <= bytes_left:
        with archive.open(member) as file:
            content = file.read(bytes_left + 1)
        if len(content) <= bytes_left:
            return content
    raise ValueError(
        f"members of the archive hold more than {most} bytes ({member.filename!r} declares {member.file_size}), "
        "more than one of this kind has. If you trust it, pack fewer rows, or store them without compression."
    )
