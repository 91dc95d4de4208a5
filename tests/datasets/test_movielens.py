"""MovieLens is read in every published form or refused, and what is generated in its form has a law."""

import dataclasses
import hashlib
import logging
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from rsembed import archives, datasets
from rsembed.datasets import ratings_files

RATINGS = [  # user, film, stars, seconds
    (7, 30, 5, 1_000),
    (2, 10, 3, 1_050),
    (7, 10, 1, 1_000),
    (2, 50, 4, 1_020),
    (7, 50, 2, 990),
]
FILMS = {
    10: ("Émile (1999)", ["Comedy", "Drama"]),
    30: ("A: B (1950)", ["War"]),
    50: ("Seen by two (2000)", ["Drama"]),
}
GENRES = ["Comedy", "Drama", "War"]


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A stand-in for the archive whose checksum is the expected one."""
    file = tmp_path / "somewhere" / "ml-1m.zip"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "ml-1m/ratings.dat", "".join("::".join(map(str, row)) + "\n" for row in RATINGS)
        )
        films = "".join(
            f"{film}::{title}::{'|'.join(genres)}\n" for film, (title, genres) in FILMS.items()
        )
        archive.writestr("ml-1m/movies.dat", films.encode("latin-1"))
    known_hash = f"md5:{hashlib.md5(file.read_bytes()).hexdigest()}"
    stand_in = dataclasses.replace(ratings_files.ARCHIVE, known_hash=known_hash)
    monkeypatch.setattr(ratings_files, "ARCHIVE", stand_in)
    return file


def test_the_published_form_is_read_in_the_order_of_time(published):
    log = datasets.movielens(path=published)
    assert log.timestamps.tolist() == [990, 1_000, 1_000, 1_020, 1_050]
    assert log.user_ids[log.users].tolist() == [7, 7, 7, 2, 2]
    assert log.item_ids[log.items].tolist() == [50, 30, 10, 50, 10]
    assert log.ratings.tolist() == [2, 5, 1, 4, 3]
    assert log.titles == ("Émile (1999)", "A: B (1950)", "Seen by two (2000)")
    assert log.genre_names == tuple(GENRES)
    assert log.genres.tolist() == [[True, True, False], [False, False, True], [False, True, False]]
    assert log.law is None
    assert "md5 verified" in log.source
    assert np.diff(log.days).sum() * 86_400 == pytest.approx(60)


def test_a_download_with_another_checksum_is_refused(monkeypatch, published):
    def other_content(url, output_file, pooch):
        with open(output_file, "wb") as out:
            out.write(published.read_bytes() + b"?")

    monkeypatch.setattr("pooch.HTTPDownloader", lambda **kwargs: other_content)
    with pytest.raises(ValueError, match="hash"):
        datasets.movielens(download=True)


def test_a_network_that_does_not_answer_is_reported_within_seconds(monkeypatch, caplog):
    asked = {}

    def unreachable(url, output_file, pooch):
        raise ConnectionError("no route to host")  # an OSError, as those of requests are

    def downloader(**kwargs):
        asked.update(kwargs)
        return unreachable

    monkeypatch.setattr("pooch.HTTPDownloader", downloader)
    with (
        caplog.at_level(logging.WARNING, logger="rsembed"),
        pytest.raises(FileNotFoundError, match=r"no ml-1m\.zip was"),
    ):
        datasets.movielens(download=True)
    assert asked["timeout"] <= 10
    assert "could not fetch" in caplog.text


def test_only_the_first_users_are_kept(published):
    log = datasets.movielens(path=published, max_users=1)
    assert log.user_ids.tolist() == [2]
    assert log.items.tolist() == [2, 0]


def of_own(folder, ratings, films, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(folder / "mine.zip", "w", compression) as archive:
        archive.writestr("ml-1m/ratings.dat", ratings)
        archive.writestr("ml-1m/movies.dat", films)
    return folder / "mine.zip"


ONE_RATING = "7::30::5::1000\n"

STARS = [5, 3, 1, 4, 2]
HALF_STARS = [5, 3.5, 0.5, 4, 2]


def rating_lines(stars, separator):
    """The lines of RATINGS with other stars."""
    lines = []
    for (user, film, _, seconds), number in zip(RATINGS, stars, strict=True):
        lines.append(separator.join(map(str, (user, film, number, seconds))))
    return "\n".join(lines) + "\n"


def flags_of(genres):
    """The flags of `u.item`, of which the first means that no genre is known."""
    names = ("unknown", *datasets.ratings.GENRES)
    return "|".join("1" if name in genres else "0" for name in names)


def csv_field(title):
    return '"' + title.replace('"', '""') + '"' if "," in title or '"' in title else title


TITLES = ["Émile (1999)", 'The "A": B, C (1950)', "unknown"]
GENRES_OF = [["Comedy", "Drama"], ["War"], []]
PUBLISHED = {
    "csv": {
        "folder": "ml-latest-small",
        "stars": HALF_STARS,
        "ratings": (
            "ratings.csv",
            "userId,movieId,rating,timestamp\n" + rating_lines(HALF_STARS, ","),
        ),
        "films": (
            "movies.csv",
            "utf-8",
            "movieId,title,genres\n",
            "{film},{csv_title},{genres_or_none}\n",
        ),
    },
    "ml-1m": {
        "folder": "ml-1m",
        "stars": STARS,
        "ratings": ("ratings.dat", rating_lines(STARS, "::")),
        "films": ("movies.dat", "latin-1", "", "{film}::{title}::{genres_or_none}\n"),
    },
    "ml-10m": {
        "folder": "ml-10M100K",
        "stars": HALF_STARS,
        "ratings": ("ratings.dat", rating_lines(HALF_STARS, "::")),
        "films": ("movies.dat", "utf-8", "", "{film}::{title}::{genres_or_none}\n"),
    },
    "ml-100k": {
        "folder": "ml-100k",
        "stars": STARS,
        "ratings": ("u.data", rating_lines(STARS, "\t")),
        "films": (
            "u.item",
            "latin-1",
            "",
            "{film}|{title} |01-Jan-1995||http://us.imdb.com/|{flags}\n",  # some titles end so
        ),
    },
    "recbole": {
        "folder": "ml-100k",
        "stars": STARS,
        "ratings": (
            "ml-100k.inter",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
            + rating_lines(STARS, "\t"),
        ),
        "films": (
            "ml-100k.item",
            "utf-8",
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n",
            "{film}\t{title_only}\t{year}\t{genres_in_words}\n",
        ),
    },
}


def written(folder, form):
    """A folder with the two files of a form, as they are published."""
    published = PUBLISHED[form]
    place = folder / published["folder"]
    place.mkdir(parents=True)
    ratings_name, ratings = published["ratings"]
    (place / ratings_name).write_text(ratings)
    films_name, encoding, text, line = published["films"]
    for film, title, genres in zip(FILMS, TITLES, GENRES_OF, strict=True):
        title_only, _, year = title.partition(" (1")
        text += line.format(
            film=film,
            title=title,
            csv_title=csv_field(title),
            title_only=title_only,
            year="1" + year[:3] if year else "",
            genres_or_none="|".join(genres) or "(no genres listed)",
            genres_in_words=" ".join(genres) or "unknown",
            flags=flags_of(genres or ["unknown"]),
        )
    (place / films_name).write_bytes(text.encode(encoding))
    return place


def packed(place, kind):
    """The folder, an archive of it, or its file of ratings."""
    if kind == "folder":
        return place
    if kind == "ratings file":
        return min(
            place.iterdir(),
            key=lambda file: ("ratings" not in file.name, "inter" not in file.name, file.name),
        )
    archive_path = place.parent.with_suffix(".zip" if kind == "zip" else ".tar.gz")
    if kind == "zip":
        with zipfile.ZipFile(archive_path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__MACOSX/" + place.name + "/._ratings.csv", "side file")
            for file in place.iterdir():
                archive.write(file, f"{place.name}/{file.name}")
    else:
        with tarfile.open(archive_path, "w:gz") as archive:
            archive.add(place, place.name)
    return archive_path


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz", "ratings file"])
@pytest.mark.parametrize("form", PUBLISHED)
def test_every_published_form_gives_the_same_log(tmp_path, form, kind):
    log = datasets.movielens(packed(written(tmp_path / "data", form), kind))
    order = sorted(range(5), key=lambda row: RATINGS[row][3])
    assert log.user_ids[log.users].tolist() == [RATINGS[row][0] for row in order]
    assert log.item_ids[log.items].tolist() == [RATINGS[row][1] for row in order]
    assert log.ratings.dtype == np.float32
    assert log.ratings.tolist() == [PUBLISHED[form]["stars"][row] for row in order]
    assert log.timestamps.tolist() == [RATINGS[row][3] for row in order]
    assert log.titles == tuple(TITLES)
    genres = []
    for row in log.genres:
        genres.append([name for name, is_one in zip(log.genre_names, row, strict=True) if is_one])
    assert genres == GENRES_OF
    assert str(tmp_path) in log.source


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_titles_are_read_in_utf8_and_as_published(tmp_path, encoding, end):
    """An "Å" in UTF-8 has a byte that Latin-1 takes for the end of a line."""
    titles = ["Ångström & Söhne (1999)", "Émile\x85? (1950)", "Плава (2000)"][
        : 2 if encoding == "latin-1" else 3
    ]
    films = "".join(
        f"{30 + number}::{title}::War|Drama{end}" for number, title in enumerate(titles)
    )
    log = datasets.movielens(
        path=of_own(tmp_path, ONE_RATING.replace("\n", end), films.encode(encoding))
    )
    assert log.titles == tuple(titles)
    assert log.genre_names == ("Drama", "War")


@pytest.mark.parametrize(
    ("ratings", "films", "message"),
    [
        (
            ONE_RATING,
            "30::A (1)::War\n31::B\n",
            r"ml-1m/movies\.dat, line 2 is '31::B', not film::title::genre",
        ),
        (ONE_RATING, "30::A::B::War\n", r"ml-1m/movies\.dat, line 1 is"),
        (ONE_RATING, "x30::A::War\n", r"ml-1m/movies\.dat, line 1: 'x30' is no number of a film"),
        (ONE_RATING, f"30::A::War\n{10**30}::B::War\n", "line 2: .* is no number"),
        (ONE_RATING, "30::A::War\n30::B::War\n", "line 2 repeats film 30 of line 1"),
        (ONE_RATING, "", "lists no film"),
        ("", "30::A::War\n", "ratings.dat has no ratings"),
        ("\n\n", "30::A::War\n", "ratings.dat has no ratings"),
        (ONE_RATING + "7::30\n", "30::A::War\n", r"ratings\.dat, line 2 .*2 fields, not 4"),
        (
            ONE_RATING + "\n7::30::5::x\n",
            "30::A::War\n",
            r"ratings\.dat, line 3 .*'x' is no number",
        ),
        (
            ONE_RATING + "7::30::nan::1\n",
            "30::A::War\n",
            r"ratings\.dat, line 2 .*'nan' is no number",
        ),
        (ONE_RATING + "7::30.5::5::1\n", "30::A::War\n", r"line 2 .*'30\.5' is no whole number"),
        (ONE_RATING + "-7::30::5::1\n", "30::A::War\n", r"line 2 .*'-7' is no whole number"),
        (ONE_RATING + "7::30::1_0::1\n", "30::A::War\n", r"line 2 .*'1_0' is no number"),
        (ONE_RATING + "7::31::5::1\n", "30::A::War\n", r"movies\.dat does not list film 31"),
        (ONE_RATING + "7::29::5::1\n", "30::A::War\n", r"movies\.dat does not list film 29"),
    ],
)
def test_a_line_of_another_form_is_refused_by_its_number(tmp_path, ratings, films, message):
    with pytest.raises(ValueError, match=rf"movielens: .*mine\.zip: .*{message}"):
        datasets.movielens(path=of_own(tmp_path, ratings, films))


@pytest.mark.parametrize(
    ("form", "name", "old", "new", "message"),
    [
        (
            "csv",
            "ratings.csv",
            "movieId",
            "item",
            r"ratings\.csv, line 1 lacks the column 'movieId'",
        ),
        (
            "csv",
            "ratings.csv",
            "7,30,5,",
            "7,30,five,",
            r"ratings\.csv, line 2 .*'five' is no number",
        ),
        (
            "csv",
            "movies.csv",
            "title",
            "name",
            r"movies\.csv, line 1 is 'movieId,name,genres', not",
        ),
        ("csv", "movies.csv", '""A""', '"A"', r"movies\.csv, line 3 is no CSV"),
        ("csv", "movies.csv", "10,Émile", "10,E,F", r"movies\.csv, line 2 is"),
        ("ml-100k", "u.item", "|0|0\n", "|0\n", r"u\.item, line 1 is .* 19 flags"),
        ("ml-100k", "u.item", "|0|0\n", "|0|2\n", r"u\.item, line 1 is .* 19 flags"),
        (
            "recbole",
            "ml-100k.item",
            "movie_title",
            "name",
            r"\.item, line 1 is .*without item_id, movie_title",
        ),
        ("recbole", "ml-100k.item", "\t1999", "", r"\.item, line 2 has 3 fields, the header 4"),
        (
            "recbole",
            "ml-100k.inter",
            "timestamp",
            "time",
            r"\.inter, line 1 lacks the column 'timestamp'",
        ),
    ],
)
def test_a_line_of_another_published_form_is_refused_by_its_number(
    tmp_path, form, name, old, new, message
):
    place = written(tmp_path, form)
    encoding = "latin-1" if name == "u.item" else "utf-8"
    content = (place / name).read_text(encoding=encoding)
    assert old in content
    (place / name).write_text(content.replace(old, new, 1), encoding=encoding)
    with pytest.raises(ValueError, match=rf"movielens: .*{message}"):
        datasets.movielens(place)


def test_columns_may_have_another_order_where_a_header_names_them(tmp_path):
    place = written(tmp_path, "csv")
    expected = datasets.movielens(place)
    lines = (place / "ratings.csv").read_text().splitlines()
    (place / "ratings.csv").write_text(
        "\n".join(",".join(reversed(line.split(","))) for line in lines)
    )
    log = datasets.movielens(place)
    assert np.array_equal(log.ratings, expected.ratings)
    assert np.array_equal(log.items, expected.items)


def test_a_log_is_searched_in_the_folder_that_the_variable_names(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path))
    place = written(tmp_path / "movielens", "csv")
    assert datasets.movielens().source.endswith(str(place))
    packed(place, "zip").rename(tmp_path / "movielens" / "ml-latest-small.zip")
    assert datasets.movielens().source.endswith(str(place))  # not the archive of the same name
    assert datasets.movielens(tmp_path / "movielens").source.endswith(str(place))
    (place / "ratings.csv").unlink()
    assert datasets.movielens().source.endswith(".zip")
    second = written(tmp_path / "movielens", "ml-100k")
    with pytest.raises(
        ValueError, match=r"has several logs: .*ml-100k.*ml-latest-small.*; give path="
    ):
        datasets.movielens()
    assert datasets.movielens(second).source.endswith("ml-100k")
    assert caplog.text == ""


def test_a_folder_or_archive_without_one_pair_of_files_is_refused(tmp_path):
    place = written(tmp_path / "data", "ml-100k")
    with pytest.raises(
        FileNotFoundError,
        match=r"no file of this kind: give a folder, a zip.* ratings\.csv.*\.inter",
    ):
        datasets.movielens(tmp_path / "data" / "ml-100k" / "u.item")
    (place / "ml-100k.inter").write_text("")
    with pytest.raises(
        ValueError, match=r"several files of ratings: ml-100k\.inter, u\.data; give path= one"
    ):
        datasets.movielens(place)
    with pytest.raises(ValueError, match=r"has 0 files ml-100k\.item"):
        datasets.movielens(place / "ml-100k.inter")
    (place / "u.data").unlink()
    (place / "ml-100k.inter").unlink()
    with pytest.raises(ValueError, match=r"lacks a file of ratings"):
        datasets.movielens(packed(place, "tar.gz"))


def test_a_file_is_read_in_blocks(tmp_path, monkeypatch):
    """Lines that a block cuts are whole in the log, and the text of the file is never in memory at once."""
    place = written(tmp_path, "csv")
    expected = datasets.movielens(place)
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", 7)
    log = datasets.movielens(place)
    for name in ("users", "items", "ratings", "timestamps"):
        assert np.array_equal(getattr(log, name), getattr(expected, name))
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", 1 << 16)
    num_ratings = 100_000
    lines = ["userId,movieId,rating,timestamp"]
    for number in range(num_ratings):
        lines.append(f"{number // 20},10,4.5,{1_000_000_000 + number}" + " " * 200)
    (place / "ratings.csv").write_text("\n".join(lines) + "\n")
    del lines
    tracemalloc.start()
    log = datasets.movielens(place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(log.users) == num_ratings
    assert peak < 150 * num_ratings + (8 << 20)  # the file has 220 bytes a rating


def test_archives_are_read_within_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_UNPACKED_BYTES", 1 << 20)
    zeros = bytes(16 << 20)
    with pytest.raises(
        ValueError,
        match=r"mine\.zip: .*hold more than 1048576 bytes \('ml-1m/ratings.dat' declares 16777216",
    ):
        datasets.movielens(path=of_own(tmp_path, zeros, "30::A::War\n"))
    # What an archive declares too small is bounded by what comes out.
    packed = bytearray(of_own(tmp_path, zeros, "30::A::War\n").read_bytes())
    place = packed.find((16 << 20).to_bytes(4, "little"), packed.find(b"PK\x01\x02"))
    packed[place : place + 4] = (100).to_bytes(4, "little")
    (tmp_path / "mine.zip").write_bytes(packed)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"mine\.zip: .*cannot be read: Bad CRC"):
        datasets.movielens(path=tmp_path / "mine.zip")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        datasets.movielens(path=of_own(tmp_path, ONE_RATING, "30::A::War\n", zipfile.ZIP_BZIP2))
    # An archive that is larger than the bound may hold as much as it has.
    noise = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8).tobytes()
    with pytest.raises(ValueError, match=r"ratings\.dat, line 1 is .*fields, not 4"):
        datasets.movielens(path=of_own(tmp_path, noise, "30::A::War\n", zipfile.ZIP_STORED))


@pytest.mark.parametrize("damage", ["flipped", "cut", "no zip", "encrypted", "missing"])
def test_a_damaged_archive_is_refused_by_name(tmp_path, damage):
    file = of_own(tmp_path, ONE_RATING * 1000, "30::A::War\n")
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[60] ^= 255
    elif damage == "cut":
        del content[-30:]
    elif damage == "no zip":
        content = bytearray(b"text")
    elif damage == "encrypted":
        content[content.find(b"PK\x01\x02") + 8] |= 1
    else:
        content = content.replace(b"movies", b"moVies")
    file.write_bytes(content)
    message = {
        "flipped": "ratings.dat, line 1 or later, cannot be read",
        "cut": "neither a folder nor a zip or tar archive",
        "no zip": "neither a folder nor a zip or tar archive",
        "encrypted": "is encrypted",
        "missing": "has 0 files ml-1m/movies.dat",
    }
    with pytest.raises(ValueError, match=rf"movielens: .*mine\.zip: .*{message[damage]}"):
        datasets.movielens(path=file)


# What is generated


@pytest.fixture(scope="module")
def log():
    return datasets.generated_ratings(300, 120, seed=3)


def test_equal_seeds_generate_equal_logs(log):
    again, other = (
        datasets.generated_ratings(300, 120, seed=3),
        datasets.generated_ratings(300, 120, seed=4),
    )
    for name in ("users", "items", "ratings", "timestamps", "item_ids", "genres"):
        assert np.array_equal(getattr(log, name), getattr(again, name))
        assert not np.array_equal(getattr(log, name), getattr(other, name))
    assert log.titles == again.titles


def test_a_generated_log_has_the_form_of_movielens(log):
    assert (np.diff(log.timestamps) >= 0).all()
    assert np.bincount(log.users, minlength=300).min() >= 20
    # Nobody rates a film twice.
    assert len(np.unique(log.users.astype(np.int64) * 120 + log.items)) == len(log.users)
    assert set(log.ratings.tolist()) == {1, 2, 3, 4, 5}
    assert set(log.genres.sum(axis=1).tolist()) == {1, 2, 3}
    assert (np.diff(log.item_ids) > 0).all()
    assert log.item_ids.max() > 120
    assert len(log.titles) == len(log.item_ids) == 120
    assert "seed 3" in log.source


def test_nobody_rates_a_film_before_it_came_out(log):
    # Films of one visit are 20 seconds apart, and the first is at the moment of the visit.
    assert (log.days - log.law.release_days[log.items] >= 0).all()


def test_choices_follow_the_law(log):
    """Of the first choices on the first day, as many as expected are films that the law has among the ten likeliest."""
    firsts = np.unique(log.users, return_index=True)[1]
    odds = log.law.log_odds(log.users[firsts], log.law.first_days[log.users[firsts]])
    probabilities = np.exp(odds) / np.exp(odds).sum(axis=1, keepdims=True)
    likeliest = np.argsort(-probabilities, axis=1)[:, :10]
    expected = np.take_along_axis(probabilities, likeliest, axis=1).sum(axis=1)
    found = (likeliest == log.items[firsts][:, None]).any(axis=1)
    error = np.sqrt((expected * (1 - expected)).sum()) / len(found)
    assert abs(found.mean() - expected.mean()) < 4 * error


# What follows from a log


def test_histories_hold_what_a_user_rated_before_and_nothing_later(log):
    seen, histories = {}, log.histories(7)
    for user, item, found in zip(
        log.users.tolist(), log.items.tolist(), histories.tolist(), strict=True
    ):
        before = seen.setdefault(user, [])
        assert found == (before[::-1] + [-1] * 7)[:7]
        before.append(item)


def test_every_user_has_one_last_rating_and_it_is_the_latest(log):
    last = {}
    for number, user in enumerate(log.users.tolist()):
        last[user] = number
    assert np.flatnonzero(log.is_last()).tolist() == sorted(last.values())
