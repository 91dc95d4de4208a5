"""Published files: found where the user says, in the cache or on the network, and checked by their hash."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from pathlib import Path

from rsembed.progress import is_watched

TIMEOUT_SECONDS = 5.0

_log = logging.getLogger("rsembed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published file.

    Attributes:
      reader: the function that reads it, which errors name.
      names: what it is called inside a folder; in the cache it has the first name.
      url: where it is fetched.
      known_hash: `algorithm:digest` of its content.
      source: what `source=` insists on it.
    """

    reader: str
    names: tuple[str, ...]
    url: str
    known_hash: str
    source: str

    def find(self, source: str, path: str | os.PathLike[str] | None, *, download: bool) -> Path | None:
        """The file, or one that takes its place: in `path`, else in `RSEMBED_DATA`, in pooch's cache, or fetched.

        Args:
          source: "auto" looks for the file, and gives None without one; so does a source that needs no file.
          path: a file or folder.
          download: allow fetching it into the cache. Without an answer within seconds, it was not found.

        Raises:
          FileNotFoundError: `path` has no such file, or `source` insists on one, and none was found.
          ValueError: the source needs no file.
        """
        if source not in ("auto", self.source):
            if path is not None or download:
                raise ValueError(
                    f"{self.reader}: source={source!r} needs no file; drop path= and download=, or source=."
                )
            return None
        file = self._found(path, download)
        if file is None and source == self.source:
            raise FileNotFoundError(f"{self.reader}: source={source!r}, but {self.way_out}.")
        return file

    @property
    def way_out(self) -> str:
        """Sentence about a file that was not found, and how to have it."""
        return (
            f"no {self.names[0]} was found: give path=FILE, set RSEMBED_DATA to the file or its folder, allow "
            "download=True where there is a network, or do without: source='generated'"
        )

    def _found(self, path: str | os.PathLike[str] | None, download: bool) -> Path | None:
        if path is not None:
            if (file := self._inside(Path(path))) is None:
                raise FileNotFoundError(
                    f"{self.reader}: path={os.fspath(path)!r} is neither {self._kind} nor a folder with "
                    f"{' or '.join(self.names)}; correct it, or leave it out."
                )
            return file
        if named := os.environ.get("RSEMBED_DATA"):
            if (file := self._inside(Path(named))) is not None:
                return file
            known = self._kind, self.names[0]
            _log.warning("%s: RSEMBED_DATA=%s is not %s and holds no %s; looking on.", self.reader, named, *known)
        if download:  # unless the cache has it
            return self._fetched()
        cached = _cache_folder() / self.names[0]
        return cached if cached.is_file() else None

    def check(self, file: Path, content: bytes) -> bool:
        """Whether `content` is that of the published file, not of a file of the user's own.

        Raises: ValueError: it bears the published name, and is another one.
        """
        algorithm, known = self.known_hash.split(":")
        digest = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if digest != known and any(file.parts[-len(parts) :] == parts for parts in (Path(n).parts for n in self.names)):
            raise ValueError(
                f"{self.reader}: checksum mismatch, {file} has {algorithm} {digest}, the published file has {known}. "
                "Delete a broken download and fetch it again; give a file of your own another name."
            )
        return digest == known

    @property
    def _kind(self) -> str:
        return "an archive" if self._is_archive else "a text file"

    @property
    def _is_archive(self) -> bool:
        return self.names[0].endswith(".zip")

    def _inside(self, place: Path) -> Path | None:
        """`place` if it is a file of the right kind (archive or text), or the published file in it; else None."""
        place = place.expanduser()
        if place.is_file():
            return place if (place.suffix == ".zip") == self._is_archive else None
        return next((place / name for name in self.names if (place / name).is_file()), None)

    def _fetched(self) -> Path | None:
        import pooch

        downloader = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS, progressbar=is_watched())
        where = self.url, self.known_hash, self.names[0], _cache_folder()
        try:
            return Path(pooch.retrieve(*where, downloader=downloader))
        except OSError as error:  # what requests raises, too
            _log.warning("%s: could not fetch %s (%s).", self.reader, self.url, type(error).__name__)
            return None


def _cache_folder() -> Path:
    import pooch

    return Path(pooch.os_cache("rsembed"))
