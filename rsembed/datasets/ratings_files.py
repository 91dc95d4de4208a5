"""Logs of film ratings in the file formats of MovieLens, by GroupLens and RecBole."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fnmatch
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rsembed.checks import PositiveInt, validated
from rsembed.datasets.files import (
    SourceFile,
    TextBlock,
    decoded,
    files_in,
    is_archive,
    is_number,
    line_blocks,
    read_first_line,
    shown,
)
from rsembed.datasets.ratings import GENRES, RatingsLog
from rsembed.datasets.text import Published

NO_GENRES = ("", "(no genres listed)", "unknown")
"""Entries that stand for unknown genres in GroupLens' files."""
MOST_EXACT = 2**53
"""Ids and times below this number are exact in float64, the dtype of the parsed numbers."""
SEARCH_DEPTH = 2
"""Levels of subfolders that are searched for a log."""


class Film(NamedTuple):
    """A film, as described on one line of the file of films.

    Attributes:
      line: index of the line, counted from 1.
      number: id of the film, as a string.
      title: title, with the year in brackets.
      genres: names of the film's genres. A string from `NO_GENRES` means that the genre is unknown.
    """

    line: int
    number: str
    title: str
    genres: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A file format of a log of ratings.

    Attributes:
      ratings_name, films_name: names of the file of ratings and the file of films. If both names
        begin with an asterisk, the two files of a log differ only in what follows the asterisk.
      separator: string between two fields in a line of ratings.
      columns: names that the header gives to the columns of user, film, stars and time, in this
        order. An empty tuple if the file of ratings has no header.
      films: function that takes the content of the file of films, and returns the films in it.
    """

    ratings_name: str
    films_name: str
    separator: str
    columns: tuple[str, ...] = ()
    films: Callable[[str], Iterator[Film]]

    def films_path(self, ratings_path: str) -> str:
        """Path of the file of films that accompanies the file `ratings_path`."""
        start = ratings_path.removesuffix(self.ratings_name.removeprefix("*"))
        return start + self.films_name.removeprefix("*")


def _films_of_csv(text: str) -> Iterator[Film]:
    """Films of `movies.csv`: movieId,title,genres, with genres separated by `|`."""
    reader = csv.reader(_lines(text), strict=True)
    header = next(reader, [])
    if header != ["movieId", "title", "genres"]:
        raise ValueError(f"line 1 is {shown(','.join(header))}, not movieId,title,genres")
    try:
        for fields in reader:
            if not fields:
                continue
            if len(fields) != 3:
                raise ValueError(
                    f"line {reader.line_num} is {shown(','.join(fields))}, not movieId,title,genres"
                )
            yield Film(reader.line_num, fields[0], fields[1], fields[2].split("|"))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is no CSV: {error}") from error


def _films_of_dat(text: str) -> Iterator[Film]:
    """Films of `movies.dat`: film::title::genre|genre."""
    for number, line in enumerate(_lines(text), 1):
        if not line:
            continue
        fields = line.split("::")
        if len(fields) != 3:
            raise ValueError(f"line {number} is {shown(line)}, not film::title::genre|genre")
        yield Film(number, fields[0], fields[1], fields[2].split("|"))


def _films_of_u_item(text: str) -> Iterator[Film]:
    """Films of `u.item`: film|title|release|video release|address, and a 0 or 1 for "unknown" and each genre."""
    flag_names = ("unknown", *GENRES)
    for number, line in enumerate(_lines(text), 1):
        if not line:
            continue
        fields = line.split("|")
        flags = fields[5:]
        if len(flags) != len(flag_names) or not set(flags) <= {"0", "1"}:
            raise ValueError(
                f"line {number} is {shown(line)}, not film|title|date|date|address and {len(flag_names)} flags, 0 or 1"
            )
        genres = []
        for name, flag in zip(flag_names, flags, strict=True):
            if flag == "1":
                genres.append(name)
        yield Film(number, fields[0], fields[1], genres)


def _films_of_recbole(text: str) -> Iterator[Film]:
    """Films of RecBole's `.item` file: a header, tabs between columns, spaces between genres."""
    lines = _lines(text)
    header = lines[0].split("\t")
    column_of = {}
    for column, name in enumerate(header):
        column_of[name.partition(":")[0]] = column
    genre_column = column_of.get("genre", column_of.get("class"))
    if "item_id" not in column_of or "movie_title" not in column_of or genre_column is None:
        raise ValueError(
            f"line 1 is {shown(lines[0])}, without item_id, movie_title, and class or genre"
        )
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            raise ValueError(
                f"line {number} has {len(fields)} fields, the header {len(header)}: {shown(line)}"
            )
        title = fields[column_of["movie_title"]]
        if "release_year" in column_of:
            year = fields[column_of["release_year"]]
            if year and not title.endswith(f"({year})"):
                title = f"{title} ({year})"
        yield Film(number, fields[column_of["item_id"]], title, fields[genre_column].split(" "))


def _lines(text: str) -> list[str]:
    # If UTF-8 text was decoded as Latin-1, `splitlines` would split inside the letter "Å".
    return text.replace("\r\n", "\n").split("\n")


FORMS = (
    Form(
        ratings_name="ratings.csv",
        films_name="movies.csv",
        separator=",",
        columns=("userId", "movieId", "rating", "timestamp"),
        films=_films_of_csv,
    ),
    Form(ratings_name="ratings.dat", films_name="movies.dat", separator="::", films=_films_of_dat),
    Form(ratings_name="u.data", films_name="u.item", separator="\t", films=_films_of_u_item),
    Form(
        ratings_name="*.inter",
        films_name="*.item",
        separator="\t",
        columns=("user_id", "item_id", "rating", "timestamp"),
        films=_films_of_recbole,
    ),
)
_RATINGS_NAMES = ", ".join(form.ratings_name for form in FORMS)
ARCHIVE = Published(
    reader="movielens",
    name="ml-1m.zip",
    kinds=f"a folder, a zip or a tar.gz with one of {_RATINGS_NAMES}, or the file of ratings",
    title="MovieLens, ml-1m",
    url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    # GroupLens publishes the checksum beside `ml-1m.zip`.
    known_hash="md5:c4d9eecfca2ab87c1945afe126590906",
)


@validated
def movielens(
    path: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    max_users: PositiveInt | None = None,
) -> RatingsLog:
    """Ratings of a MovieLens data set, from a folder or an archive, in chronological order.

    `movielens` reads MovieLens data sets of all sizes. The names of the files show the format:

    * ml-latest-small, ml-latest, ml-20m, ml-25m and ml-32m: `ratings.csv`, `movies.csv`
    * ml-1m and ml-10m: `ratings.dat`, `movies.dat`
    * ml-100k: `u.data`, `u.item`
    * RecBole's versions of these data sets: `.inter`, `.item`

    The files of a log may be in UTF-8 or in Latin-1. `generated_ratings` draws a log at random, and
    needs no file.

    If `path` is None, `movielens` looks for a log in the folder or archive that the environment
    variable `RSEMBED_DATA` names, then for ml-1m in pooch's cache. A log is downloaded only with
    `download=True`.

    The licence of MovieLens allows research, with acknowledgement and without a claim that
    GroupLens endorses the research. Commercial use of MovieLens needs the permission of GroupLens.
    Some of the data sets must not be redistributed, so MovieLens is not part of this library.

    Args:
      path: a folder with the two files, a zip or tar archive of the two files, or the file of
        ratings. A folder is searched two levels deep, and must have only one log.
      download: whether ml-1m (6 MB) may be downloaded into the cache folder, False by default. If
        the server does not answer within 5 seconds, nothing is downloaded.
      max_users: number of users to keep. The users with the smallest ids are kept. A hundred users
        are enough for a quick test. If None, all users are kept.

    Returns:
      The log. Ratings with equal times stay in the order of the file. Reading takes about 120 bytes
      of memory for each rating.

    Raises:
      ValueError: a line is malformed, a rated film is not in the file of films, an archive is
        damaged, `ml-1m.zip` differs from the file that GroupLens publishes, or a folder has several
        logs.
      FileNotFoundError: no log was found.

    Source: Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
    """
    log_path = ARCHIVE.find(path, download=download, find_at=_log_at)
    origin = f"MovieLens ratings from {log_path}"
    if log_path.name == ARCHIVE.name:
        _, origin = ARCHIVE.check(log_path)
    try:
        with _opened_log(log_path) as (form, ratings_file, films_file):
            item_ids, titles, genres = _read_films(form, films_file)
            ratings = _read_ratings(form, ratings_file)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"movielens: {log_path}: {reason}.") from error
    if max_users is not None:
        users = ratings[:, 0]
        first_users = np.unique(users)[:max_users]
        ratings = ratings[np.isin(users, first_users)]
    order = np.argsort(ratings[:, 3], kind="stable")
    ratings = ratings[order]
    users = ratings[:, 0].astype(np.int64)
    items = ratings[:, 1].astype(np.int64)
    user_ids, user_rows = np.unique(users, return_inverse=True)
    item_rows = np.minimum(np.searchsorted(item_ids, items), len(item_ids) - 1)
    is_listed = item_ids[item_rows] == items
    if not is_listed.all():
        unknown = items[np.argmin(is_listed)]
        raise ValueError(
            f"movielens: {log_path}: {films_file.name} does not list film {unknown}, which {ratings_file.name} rates."
        )
    genre_names = sorted(set().union(*genres))
    mask = np.zeros((len(item_ids), len(genre_names)), bool)
    for row, genres_of_film in enumerate(genres):
        for column, name in enumerate(genre_names):
            mask[row, column] = name in genres_of_film
    return RatingsLog(
        users=user_rows.astype(np.int32),
        items=item_rows.astype(np.int32),
        ratings=ratings[:, 2].astype(np.float32),
        timestamps=ratings[:, 3].astype(np.int64),
        user_ids=user_ids,
        item_ids=item_ids,
        titles=titles,
        genres=mask,
        genre_names=tuple(genre_names),
        source=origin,
    )


def _form_of(name: str) -> Form | None:
    """Format of the file of ratings with the path `name`, or None for any other file."""
    base = name.replace("\\", "/").rpartition("/")[2]
    for form in FORMS:
        if fnmatch.fnmatchcase(base, form.ratings_name):
            return form
    return None


def _log_at(path: Path) -> Path | None:
    """Path of the only log at `path` or in the folder `path`, or None if there is no log.

    Raises: ValueError: the folder has several logs.
    """
    if path.is_file() and (_form_of(path.name) or is_archive(path)):
        return path
    if not path.is_dir():
        return None
    logs = _logs_below(path, SEARCH_DEPTH)
    # A folder and an archive with the same name are one log, which is read from the folder.
    log_of_name: dict[str, Path] = {}
    for log_path in logs:
        name = log_path.name.partition(".")[0]
        if name not in log_of_name or log_path.is_dir():
            log_of_name[name] = log_path
    if len(log_of_name) > 1:
        several = ", ".join(str(log_path) for log_path in log_of_name.values())
        raise ValueError(f"movielens: {path} has several logs: {several}; give path= one of them.")
    for log_path in log_of_name.values():
        return log_path
    return None


def _logs_below(folder: Path, depth: int) -> list[Path]:
    """`folder` itself if it has a file of ratings, else its archives and its subfolders with logs.

    Args:
      folder: the folder to search.
      depth: number of levels of subfolders to search.
    """
    children = sorted(folder.iterdir())
    for child in children:
        if child.is_file() and _form_of(child.name):
            return [folder]
    logs = []
    for child in children:
        if child.is_dir() and depth > 0 and not child.name.startswith("."):
            logs.extend(_logs_below(child, depth - 1))
        elif child.is_file() and child.name.lower().startswith("ml-") and is_archive(child):
            logs.append(child)
    return logs


@contextlib.contextmanager
def _opened_log(log_path: Path) -> Iterator[tuple[Form, SourceFile, SourceFile]]:
    """Context manager that yields the format of a log, its file of ratings and its file of films.

    Raises: ValueError: the log does not have exactly one file of ratings and one file of films.
    """
    folder = log_path
    if log_path.is_file() and not is_archive(log_path):
        folder = log_path.parent
    with files_in(folder) as files:
        candidates = []
        for file in files:
            form = _form_of(file.name)
            is_chosen = folder == log_path or file.name == log_path.name
            if form and is_chosen:
                candidates.append((form, file))
        if not candidates:
            raise ValueError(f"it lacks a file of ratings: {_RATINGS_NAMES}")
        if len(candidates) > 1:
            names = ", ".join(file.name for _, file in candidates)
            raise ValueError(
                f"it has several files of ratings: {names}; give path= one of them, unpacked"
            )
        form, ratings_file = candidates[0]
        films_path = form.films_path(ratings_file.name)
        films_files = [file for file in files if file.name == films_path]
        if len(films_files) != 1:
            raise ValueError(
                f"it has {len(films_files)} files {films_path}; one must list the rated films"
            )
        yield form, ratings_file, films_files[0]


def _read_films(form: Form, file: SourceFile) -> tuple[np.ndarray, tuple[str, ...], list[set[str]]]:
    """Ids of the films in ascending order, and the title and the genres of each.

    Raises: ValueError: a line is malformed, or repeats a film.
    """
    films: dict[int, Film] = {}
    try:
        for film in form.films(decoded(file.read())):
            if not film.number.isdecimal() or int(film.number) >= MOST_EXACT:
                raise ValueError(f"line {film.line}: {shown(film.number)} is no number of a film")
            number = int(film.number)
            if number in films:
                raise ValueError(
                    f"line {film.line} repeats film {number} of line {films[number].line}"
                )
            films[number] = film
    except ValueError as error:
        raise ValueError(f"{file.name}, {error}") from error
    if not films:
        raise ValueError(f"{file.name} lists no film")
    item_ids = np.array(sorted(films), np.int64)
    titles = []
    genres = []
    for item_id in item_ids.tolist():
        film = films[item_id]
        # In ml-100k, some titles end with a space, such as "Two Friends (1986) ".
        titles.append(film.title.strip())
        genres.append(set(film.genres).difference(NO_GENRES))
    return item_ids, tuple(titles), genres


def _read_ratings(form: Form, file: SourceFile) -> np.ndarray:
    """User, film, stars and time of all ratings in the order of the file, `[ratings, 4]`.

    Raises: ValueError: a line is malformed.
    """
    columns = [0, 1, 2, 3]
    num_columns = 4
    parts = [np.zeros((0, 4))]
    with file.open() as opened:
        line = read_first_line(opened, file.name)
        if form.columns:
            names = decoded(line).rstrip("\r\n").split(form.separator)
            # RecBole adds a type to each name, such as `user_id:token`.
            names = [name.partition(":")[0] for name in names]
            missing = [name for name in form.columns if name not in names]
            if missing:
                raise ValueError(
                    f"{file.name}, line 1 lacks the column {missing[0]!r}: {shown(','.join(names))}"
                )
            columns = [names.index(name) for name in form.columns]
            num_columns = len(names)
        for block in line_blocks(opened, file, line, is_header=bool(form.columns)):
            parts.append(_numbers(block, form, file.name, columns, num_columns))
    ratings = np.concatenate(parts)
    if not len(ratings):
        raise ValueError(f"{file.name} has no ratings")
    return ratings


def _numbers(
    block: TextBlock, form: Form, name: str, columns: list[int], num_columns: int
) -> np.ndarray:
    """User, film, stars and time in each line of a block, `[lines, 4]`.

    Args:
      block: the lines. Empty lines are skipped.
      form: format of the file.
      name: name of the file, for error messages.
      columns: indices of the columns of user, film, stars and time.
      num_columns: number of columns in the file.

    Raises: ValueError: a line is malformed.
    """
    if not block.text.strip():
        return np.zeros((0, 4))
    tab_separated = block.text.decode("latin-1").replace(form.separator, "\t")
    lines = tab_separated.split("\n")
    try:
        numbers = np.loadtxt(lines, delimiter="\t", comments=None, dtype=np.float64, ndmin=2)
    except ValueError:
        numbers = np.zeros((1, 0))
    if numbers.shape[1] == num_columns:
        numbers = numbers[:, columns]
        ids_and_times = numbers[:, [0, 1, 3]]
        is_in_range = (ids_and_times >= 0) & (ids_and_times < MOST_EXACT)
        is_whole = ids_and_times == np.floor(ids_and_times)
        if (is_in_range & is_whole).all() and np.isfinite(numbers).all():
            return numbers
    message = _first_bad_line(lines, block.first_line, form, name, columns, num_columns)
    raise ValueError(message)


def _first_bad_line(
    lines: list[str], first_line: int, form: Form, name: str, columns: list[int], num_columns: int
) -> str:
    """Error message about the first line that is not a rating."""
    wanted = form.separator.join(("user", "film", "stars", "seconds"))
    for number, line in enumerate(lines, first_line):
        fields = line.split("\t")
        reason = ""
        if line and len(fields) != num_columns:
            reason = f"it has {len(fields)} fields, not {num_columns}"
        elif line:
            for place, column in enumerate(columns):
                field = fields[column]
                if not is_number(field.encode()) or not math.isfinite(float(field)):
                    reason = f"{shown(field)} is no number"
                elif place != 2 and not (
                    0 <= float(field) < MOST_EXACT and float(field).is_integer()
                ):
                    reason = f"{shown(field)} is no whole number from 0 to {MOST_EXACT}"
        if reason:
            return f"{name}, line {number} is {shown(line)}, not {wanted}: {reason}"
    return f"{name}: a line from {first_line} to {first_line + len(lines) - 1} is not {wanted}"
