"""Members of zip archives, read within a bound: a few kilobytes of an archive can say that they hold terabytes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

MOST_UNPACKED_BYTES = 1 << 28
"""What the members of a smaller archive may hold in all: ten times a MovieLens log of a million ratings."""
_COMPRESSIONS = (
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
)  # of these, a reader can say how much it takes at once


def unpacked(content: bytes, names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Content of members of a zip archive by name.

    Args:
      content: the archive.
      names: members to read; None reads all.

    Raises: ValueError: this is no zip archive, it is damaged or encrypted, a member is missing or there twice, or
      members hold more than `MOST_UNPACKED_BYTES`, or more than the archive where this is larger.

    Example:
      >>> import io, zipfile
      >>> file = io.BytesIO()
      >>> with zipfile.ZipFile(file, "w") as archive:
      ...     archive.writestr("a.txt", "text")
      >>> unpacked(file.getvalue())
      {'a.txt': b'text'}
    """
    most = max(MOST_UNPACKED_BYTES, len(content))
    left = most
    found: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist() if names is None else names:
                if name in found:
                    raise ValueError(f"the archive has two members {name!r}.")
                found[name] = _read(archive, name, left, most)
                left -= len(found[name])
    except KeyError as error:
        raise ValueError(f"the archive lacks a member: {error}") from error
    # What zipfile says of archives that are damaged, encrypted, or of a kind that it cannot read.
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise ValueError(f"the archive cannot be read: {error or 'it ends too early'}") from error
    return found


def _read(archive: zipfile.ZipFile, name: str, left: int, most: int) -> bytes:
    """Content of a member of at most `left` bytes; what it declares is checked first, then what comes out of it."""
    member = archive.getinfo(name)
    if member.compress_type not in _COMPRESSIONS:
        raise ValueError(
            f"member {name!r} of the archive is neither stored nor deflated; pack it so."
        )
    if member.file_size <= left:
        with archive.open(member) as file:
            content = file.read(left + 1)
        if len(content) <= left:
            return content
    raise ValueError(
        f"members of the archive hold more than {most} bytes ({name!r} declares {member.file_size}), more than one of "
        "this kind has. If you trust it, pack fewer rows, or store them without compression."
    )
