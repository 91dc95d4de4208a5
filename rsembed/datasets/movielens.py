"""MovieLens: the ratings log that recommenders are compared on, from a file, the cache or the network."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.datasets.files import Published
from rsembed.datasets.ratings import RatingsLog, generated_ratings

ARCHIVES = {
    name: Published(
        reader="movielens",
        names=(f"{name}.zip", f"{name}/{name}.zip"),
        url=f"https://files.grouplens.org/datasets/movielens/{name}.zip",
        known_hash=f"md5:{digest}",
    )
    for name, digest in (
        ("ml-100k", "0e33842e24a9c977be4e0107933c0723"),
        ("ml-1m", "c4d9eecfca2ab87c1945afe126590906"),
    )
}
"""With the sums that GroupLens publishes beside the files."""
SIZES = {"ml-100k": (943, 1682, 106.0), "ml-1m": (6040, 3883, 165.6)}
"""Users, films and ratings per user of each, which a generated log imitates."""
SOURCES = ("auto", "ratings", "generated")

_log = logging.getLogger("rsembed")


@validated
def movielens(
    name: str = "ml-1m",
    *,
    source: str = "auto",
    path: str | os.PathLike[str] | None = None,
    download: bool = False,
    max_users: PositiveInt | None = None,
    seed: NonNegativeInt = 0,
    progress: bool | None = None,
) -> RatingsLog:
    """The ratings of MovieLens, or a generated log of the same form and size where they cannot be had.

    The archive is searched in `path`, then in the file or folder named by the environment variable `RSEMBED_DATA`, then
    in pooch's cache, and fetched only if `download`. A generated log says so: in a warning to the logger "rsembed", in
    `source` and in `is_generated`.

    MovieLens may be used for research, with acknowledgement and without a claim that GroupLens endorses it; it must be
    neither redistributed nor used commercially without their permission. So it does not come with this library.

    Args:
      name: "ml-100k" (5 MB; 943 users, 1,682 films, 100,000 ratings) or "ml-1m" (6 MB; 6,040 users, 3,883 films, a
        million ratings).
      source: "auto" takes people's ratings if they are found, else a generated log; "ratings" insists on the former,
        "generated" on the latter.
      path: the archive, or a folder with `<name>.zip`. An archive of your own may have any other name, and is then read
        without a checksum.
      download: allow fetching the archive into the cache folder. Without an answer within seconds, it was not found.
      max_users: keep only the first users; a hundred make a test quick.
      seed: of a generated log.
      progress: show a bar while downloading; None shows it where somebody watches, see `rsembed.progress`.

    Returns:
      The log in the order of time; equal times stay in the order of the file.

    Raises:
      ValueError: an argument is unknown or out of range, or an archive has another checksum or form than published.
      FileNotFoundError: `path` has no archive, or `source="ratings"` found none.

    Source: Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.

    Example:
      >>> log = movielens("ml-100k", source="generated", max_users=50)
      >>> log.is_generated, len(log.user_ids), len(log.titles)
      (True, 50, 1682)
    """
    if name not in ARCHIVES or source not in SOURCES:
        raise ValueError(f"movielens: name={name!r} is none of {(*ARCHIVES,)}, or source={source!r} none of {SOURCES}.")
    if source == "generated" and (path is not None or download):
        raise ValueError("movielens: source='generated' reads no file; drop path= and download=, or source=.")
    file = None if source == "generated" else ARCHIVES[name].find(path, download=download, progress=progress)
    if file is not None:
        log = _read(name, file, max_users)
        _log.info("movielens: %s", log.source)
        return log
    way_out = (
        f"give path=FILE, set RSEMBED_DATA to {name}.zip or its folder, or allow download=True where there is a network"
    )
    if source == "ratings":
        raise FileNotFoundError(f"movielens: source='ratings', but {name}.zip was not found; {way_out}.")
    if source == "auto":
        _log.warning("movielens: no %s.zip was found, so this log is GENERATED, not people's; %s.", name, way_out)
    num_users, num_items, ratings_per_user = SIZES[name]
    num_users = min(num_users, max_users or num_users)
    return generated_ratings(num_users, num_items, ratings_per_user=ratings_per_user, seed=seed)


def _read(name: str, file: Path, max_users: int | None) -> RatingsLog:
    content = file.read_bytes()
    is_published = ARCHIVES[name].check(file, content)
    whose = f"{name} (md5 verified)" if is_published else "an archive of your own"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            numbers, item_ids, titles, genres, genre_names = _FORMATS[name](archive)
        numbers = numbers[np.argsort(numbers[:, 3], kind="stable")]
    except (KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"movielens: {file} has not the form of {name}.zip: {error}.") from error
    user_ids = np.unique(numbers[:, 0])[:max_users]
    numbers = numbers[np.isin(numbers[:, 0], user_ids)]
    if not len(numbers) or not np.isin(numbers[:, 1], item_ids).all():
        raise ValueError(f"movielens: {file} has no ratings, or ratings of films that it does not list.")
    return RatingsLog(
        users=np.searchsorted(user_ids, numbers[:, 0]).astype(np.int32),
        items=np.searchsorted(item_ids, numbers[:, 1]).astype(np.int32),
        ratings=numbers[:, 2].astype(np.int32),
        timestamps=numbers[:, 3],
        user_ids=user_ids,
        item_ids=item_ids,
        titles=titles,
        genres=genres,
        genre_names=genre_names,
        source=f"MovieLens, {whose}, from {file}",
    )


_Parsed = tuple[np.ndarray, np.ndarray, tuple[str, ...], np.ndarray, tuple[str, ...]]
"""Ratings as `(user, item, stars, seconds)` rows; ids, titles and genres of the films; names of the genres."""


def _parse_1m(archive: zipfile.ZipFile) -> _Parsed:
    """`user::film::stars::seconds`, and `film::title::genre|genre`."""
    films = {
        int(film): (title, genres.split("|")) for film, title, genres in _fields(archive, "ml-1m/movies.dat", "::")
    }
    names = tuple(sorted({genre for _, genres in films.values() for genre in genres}))
    item_ids = np.array(sorted(films), np.int64)
    titles = tuple(films[film][0] for film in item_ids.tolist())
    genres = np.array([[name in films[film][1] for name in names] for film in item_ids.tolist()])
    return _numbers(archive, "ml-1m/ratings.dat", "::"), item_ids, titles, genres, names


def _parse_100k(archive: zipfile.ZipFile) -> _Parsed:
    """Ratings between tabs; films as `film|title|date|date|address|0|1|...`, flags in the order of `u.genre`."""
    names = tuple(name for name, _ in _fields(archive, "ml-100k/u.genre", "|"))
    films = {int(film): (title, flags) for film, title, _, _, _, *flags in _fields(archive, "ml-100k/u.item", "|")}
    item_ids = np.array(sorted(films), np.int64)
    titles = tuple(films[film][0] for film in item_ids.tolist())
    genres = np.array([[flag == "1" for flag in films[film][1]] for film in item_ids.tolist()])
    return _numbers(archive, "ml-100k/u.data", "\t"), item_ids, titles, genres, names


def _fields(archive: zipfile.ZipFile, member: str, separator: str) -> list[list[str]]:
    lines = archive.read(member).decode("latin-1").splitlines()
    return [line.split(separator) for line in lines if line.strip()]


def _numbers(archive: zipfile.ZipFile, member: str, separator: str) -> np.ndarray:
    text = archive.read(member).decode("latin-1").replace(separator, " ")
    return np.loadtxt(io.StringIO(text), dtype=np.int64, ndmin=2)


_FORMATS: dict[str, Callable[[zipfile.ZipFile], _Parsed]] = {"ml-1m": _parse_1m, "ml-100k": _parse_100k}
