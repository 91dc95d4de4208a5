"""Tests of MovieLens logs in every published form, and of generated logs in the same form."""

import dataclasses
import hashlib
import logging
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rsembed import archives, datasets
from rsembed.datasets import ratings_files

PUBLISHED = {
    "csv": {
        "ml-latest-small/ratings.csv": """\
userId,movieId,rating,timestamp
7,30,5,1000
2,10,3.5,1050
7,10,0.5,1000
2,50,4,1020
7,50,2,990
""",
        "ml-latest-small/movies.csv": """\
movieId,title,genres
10,Émile (1999),Comedy|Drama
30,"The ""A"": B, C (1950)",War
50,unknown,(no genres listed)
""",
        "__MACOSX/ml-latest-small/._ratings.csv": "side file of an archive",
    },
    "ml-1m": {
        "ml-1m/ratings.dat": """\
7::30::5::1000
2::10::3::1050
7::10::1::1000
2::50::4::1020
7::50::2::990
""",
        "ml-1m/movies.dat": """\
10::Émile (1999)::Comedy|Drama
30::The "A": B, C (1950)::War
50::unknown::(no genres listed)
""",
    },
    "ml-10m": {
        "ml-10M100K/ratings.dat": """\
7::30::5::1000
2::10::3.5::1050
7::10::0.5::1000
2::50::4::1020
7::50::2::990
""",
        "ml-10M100K/movies.dat": """\
10::Émile (1999)::Comedy|Drama
30::The "A": B, C (1950)::War
50::unknown::(no genres listed)
""",
    },
    "ml-100k": {
        "ml-100k/u.data": """\
7\t30\t5\t1000
2\t10\t3\t1050
7\t10\t1\t1000
2\t50\t4\t1020
7\t50\t2\t990
""",
        # Some titles end with a space, and the first flag means that no genre is known.
        "ml-100k/u.item": """\
10|Émile (1999) |01-Jan-1995||http://us.imdb.com/|0|0|0|0|0|1|0|0|1|0|0|0|0|0|0|0|0|0|0
30|The "A": B, C (1950) |01-Jan-1995||http://us.imdb.com/|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|1|0
50|unknown |01-Jan-1995||http://us.imdb.com/|1|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0|0
""",
    },
    "recbole": {
        "ml-100k/ml-100k.inter": """\
user_id:token\titem_id:token\trating:float\ttimestamp:float
7\t30\t5\t1000
2\t10\t3\t1050
7\t10\t1\t1000
2\t50\t4\t1020
7\t50\t2\t990
""",
        "ml-100k/ml-100k.item": """\
item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
10\tÉmile\t1999\tComedy Drama
30\tThe "A": B, C\t1950\tWar
50\tunknown\t\tunknown
""",
    },
}


def written(folder, form):
    """Writes the files of a published form, and returns the path of the file of ratings."""
    encoding = "latin-1" if form in ("ml-1m", "ml-100k") else "utf-8"
    for name, text in PUBLISHED[form].items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode(encoding))
    ratings, *_ = PUBLISHED[form]
    return folder / ratings


def packed(ratings_file, kind):
    """Path of an archive with the folder of the files."""
    root = ratings_file.parents[1]
    return Path(shutil.make_archive(root, kind, root))


@pytest.mark.parametrize("kind", ["folder", "zip", "gztar", "ratings file"])
@pytest.mark.parametrize("form", PUBLISHED)
def test_every_published_form_gives_the_same_log(tmp_path, form, kind):
    path = written(tmp_path / "data", form)
    if kind == "folder":
        path = path.parent
    elif kind != "ratings file":
        path = packed(path, kind)
    log = datasets.movielens(path)
    assert log.timestamps.tolist() == [990, 1_000, 1_000, 1_020, 1_050]
    assert log.user_ids[log.users].tolist() == [7, 7, 7, 2, 2]
    assert log.item_ids[log.items].tolist() == [50, 30, 10, 50, 10]
    has_half_stars = form in ("csv", "ml-10m")
    assert log.ratings.dtype == np.float32
    assert log.ratings.tolist() == ([2, 5, 0.5, 4, 3.5] if has_half_stars else [2, 5, 1, 4, 3])
    assert log.titles == ("Émile (1999)", 'The "A": B, C (1950)', "unknown")
    genres = [np.array(log.genre_names)[is_one].tolist() for is_one in log.genres]
    assert genres == [["Comedy", "Drama"], ["War"], []]
    assert str(tmp_path) in log.source


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A small archive in place of the published one. Its checksum is the expected one."""
    file = packed(written(tmp_path / "ml-1m", "ml-1m"), "zip")
    known_hash = f"md5:{hashlib.md5(file.read_bytes()).hexdigest()}"
    stand_in = dataclasses.replace(ratings_files.ARCHIVE, known_hash=known_hash)
    monkeypatch.setattr(ratings_files, "ARCHIVE", stand_in)
    return file


def test_the_published_archive_is_known_by_its_checksum_and_has_no_law(published):
    log = datasets.movielens(path=published)
    assert "md5 verified" in log.source
    assert log.law is None
    assert np.diff(log.days).sum() * 86_400 == pytest.approx(60)


def test_a_download_with_another_checksum_is_refused(monkeypatch, published):
    def other_content(url, output_file, pooch):
        Path(output_file).write_bytes(published.read_bytes() + b"?")

    monkeypatch.setattr("pooch.HTTPDownloader", lambda **kwargs: other_content)
    with pytest.raises(ValueError, match="hash"):
        datasets.movielens(download=True)


def test_a_network_that_does_not_answer_is_reported_within_seconds(monkeypatch, caplog):
    asked = {}

    def unreachable(url, output_file, pooch):
        # A ConnectionError is an OSError, as errors of requests are.
        raise ConnectionError("no route to host")

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


def of_own(folder, ratings, films="30::A::War\n", compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(folder / "mine.zip", "w", compression) as archive:
        archive.writestr("ml-1m/ratings.dat", ratings)
        archive.writestr("ml-1m/movies.dat", films)
    return folder / "mine.zip"


ONE_RATING = "7::30::5::1000\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_titles_are_read_in_utf8_and_as_published(tmp_path, encoding, end):
    """In UTF-8, "Å" has the byte 0x85, which is the end of a line in Latin-1."""
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


def test_columns_may_have_another_order_where_a_header_names_them(tmp_path):
    ratings_file = written(tmp_path, "csv")
    expected = datasets.movielens(ratings_file)
    text = ""
    for line in ratings_file.read_text().splitlines():
        text += ",".join(reversed(line.split(","))) + "\n"
    ratings_file.write_text(text)
    log = datasets.movielens(ratings_file)
    assert np.array_equal(log.ratings, expected.ratings)
    assert np.array_equal(log.items, expected.items)


def test_a_log_is_searched_in_the_folder_that_the_variable_names(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path))
    folder = tmp_path / "movielens"
    ratings_file = written(folder, "csv")
    assert datasets.movielens().source.endswith("ml-latest-small")
    packed(ratings_file, "zip").rename(folder / "ml-latest-small.zip")
    # The folder is preferred to the archive.
    assert datasets.movielens().source.endswith("ml-latest-small")
    assert datasets.movielens(folder).source.endswith("ml-latest-small")
    ratings_file.unlink()
    assert datasets.movielens().source.endswith(".zip")
    second = written(folder, "ml-100k").parent
    with pytest.raises(
        ValueError, match=r"has several logs: .*ml-100k.*ml-latest-small.*; give path="
    ):
        datasets.movielens()
    assert datasets.movielens(second).source.endswith("ml-100k")
    assert caplog.text == ""


def test_a_file_is_read_in_blocks(tmp_path, monkeypatch):
    """A line can be in two blocks, and the text of the whole file is never in memory."""
    ratings_file = written(tmp_path, "csv")
    expected = datasets.movielens(ratings_file)
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", 7)
    log = datasets.movielens(ratings_file)
    for name in ("users", "items", "ratings", "timestamps"):
        assert np.array_equal(getattr(log, name), getattr(expected, name))
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", 1 << 16)
    num_ratings = 100_000
    lines = ["userId,movieId,rating,timestamp"]
    for number in range(num_ratings):
        lines.append(f"{number // 20},10,4.5,{1_000_000_000 + number}" + " " * 200)
    ratings_file.write_text("\n".join(lines) + "\n")
    del lines
    tracemalloc.start()
    log = datasets.movielens(ratings_file)
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
        datasets.movielens(path=of_own(tmp_path, zeros))
    # An archive that declares too few bytes is bounded while it is unpacked.
    packed = bytearray(of_own(tmp_path, zeros).read_bytes())
    place = packed.find((16 << 20).to_bytes(4, "little"), packed.find(b"PK\x01\x02"))
    packed[place : place + 4] = (100).to_bytes(4, "little")
    (tmp_path / "mine.zip").write_bytes(packed)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"mine\.zip: .*cannot be read: Bad CRC"):
        datasets.movielens(path=tmp_path / "mine.zip")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        datasets.movielens(path=of_own(tmp_path, ONE_RATING, compression=zipfile.ZIP_BZIP2))
    # If an archive itself is larger than the bound, its files may be as large as the archive.
    noise = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8).tobytes()
    with pytest.raises(ValueError, match=r"ratings\.dat, line 1 is .*fields, not 4"):
        datasets.movielens(path=of_own(tmp_path, noise, compression=zipfile.ZIP_STORED))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flipped", "ratings.dat, line 1, cannot be read"),
        ("encrypted", "is encrypted"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(tmp_path, damage, message):
    file = of_own(tmp_path, ONE_RATING * 1000)
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[60] ^= 255
    else:
        content[content.find(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"movielens: .*mine\.zip: .*{message}"):
        datasets.movielens(path=file)


# Generated logs


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
    # No user rates a film twice.
    assert len(np.unique(log.users.astype(np.int64) * 120 + log.items)) == len(log.users)
    assert set(log.ratings.tolist()) == {1, 2, 3, 4, 5}
    assert set(log.genres.sum(axis=1).tolist()) == {1, 2, 3}
    assert (np.diff(log.item_ids) > 0).all()
    assert log.item_ids.max() > 120
    assert len(log.titles) == len(log.item_ids) == 120
    assert "seed 3" in log.source


def test_nobody_rates_a_film_before_it_came_out(log):
    # The films of a visit are rated 20 seconds apart, the first one at the time of the visit.
    assert (log.days - log.law.release_days[log.items] >= 0).all()


def test_choices_follow_the_law(log):
    """The number of users that first rate one of their ten likeliest films is as expected."""
    firsts = np.unique(log.users, return_index=True)[1]
    odds = log.law.log_odds(log.users[firsts], log.law.first_days[log.users[firsts]])
    probabilities = np.exp(odds) / np.exp(odds).sum(axis=1, keepdims=True)
    likeliest = np.argsort(-probabilities, axis=1)[:, :10]
    expected = np.take_along_axis(probabilities, likeliest, axis=1).sum(axis=1)
    is_hit = (likeliest == log.items[firsts][:, None]).any(axis=1)
    error = np.sqrt((expected * (1 - expected)).sum()) / len(is_hit)
    assert abs(is_hit.mean() - expected.mean()) < 4 * error


# Histories and last ratings


def test_histories_hold_what_a_user_rated_before_and_nothing_later(log):
    seen, histories = {}, log.histories(7)
    for user, item, is_listed in zip(
        log.users.tolist(), log.items.tolist(), histories.tolist(), strict=True
    ):
        before = seen.setdefault(user, [])
        assert is_listed == (before[::-1] + [-1] * 7)[:7]
        before.append(item)


def test_every_user_has_one_last_rating_and_it_is_the_latest(log):
    last = {}
    for number, user in enumerate(log.users.tolist()):
        last[user] = number
    assert np.flatnonzero(log.is_last()).tolist() == sorted(last.values())
