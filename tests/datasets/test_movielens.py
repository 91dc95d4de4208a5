"""MovieLens is read as published or refused, and what is generated in its form has a law."""

import dataclasses
import hashlib
import importlib
import logging
import tracemalloc
import zipfile

import numpy as np
import pytest

from rsembed import archives, datasets

movielens_module = importlib.import_module("rsembed.datasets.ratings")  # the package has a function of this name

RATINGS = [  # user, film, stars, seconds
    (7, 30, 5, 1_000),
    (2, 10, 3, 1_050),
    (7, 10, 1, 1_000),
    (2, 50, 4, 1_020),
    (7, 50, 2, 990),
]
FILMS = {10: ("Émile (1999)", ["Comedy", "Drama"]), 30: ("A: B (1950)", ["War"]), 50: ("Seen by two (2000)", ["Drama"])}
GENRES = ["Comedy", "Drama", "War"]


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A stand-in for the archive whose checksum is the expected one."""
    file = tmp_path / "somewhere" / "ml-1m.zip"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "".join("::".join(map(str, row)) + "\n" for row in RATINGS))
        films = "".join(f"{film}::{title}::{'|'.join(genres)}\n" for film, (title, genres) in FILMS.items())
        archive.writestr("ml-1m/movies.dat", films.encode("latin-1"))
    known_hash = f"md5:{hashlib.md5(file.read_bytes()).hexdigest()}"
    monkeypatch.setattr(
        movielens_module, "ARCHIVE", dataclasses.replace(movielens_module.ARCHIVE, known_hash=known_hash)
    )
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_titles_are_read_in_utf8_and_as_published(tmp_path, encoding, end):
    """An "Å" in UTF-8 has a byte that Latin-1 takes for the end of a line."""
    titles = ["Ångström & Söhne (1999)", "Émile\x85? (1950)", "Плава (2000)"][: 2 if encoding == "latin-1" else 3]
    films = "".join(f"{30 + number}::{title}::War|Drama{end}" for number, title in enumerate(titles))
    log = datasets.movielens(path=of_own(tmp_path, ONE_RATING.replace("\n", end), films.encode(encoding)))
    assert log.titles == tuple(titles)
    assert log.genre_names == ("Drama", "War")


@pytest.mark.parametrize(
    ("ratings", "films", "message"),
    [
        (ONE_RATING, "30::A (1)::War\n31::B\n", r"line 2 of ml-1m/movies\.dat is '31::B', not film::title::genre"),
        (ONE_RATING, "30::A::B::War\n", r"line 1 of ml-1m/movies\.dat"),
        (ONE_RATING, "x30::A::War\n", r"line 1 of ml-1m/movies\.dat"),
        (ONE_RATING, f"30::A::War\n{10**30}::B::War\n", "has not the form"),
        ("7::30::3.5::1000\n", "30::A::War\n", "has not the form"),
        ("7::30\n", "30::A::War\n", "has not the form"),
    ],
)
def test_a_line_of_another_form_is_refused_by_its_number(tmp_path, ratings, films, message):
    with pytest.raises(ValueError, match=rf"movielens: a file of your own, .*mine\.zip .*{message}"):
        datasets.movielens(path=of_own(tmp_path, ratings, films))


def test_archives_are_read_within_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_UNPACKED_BYTES", 1 << 20)
    zeros = bytes(16 << 20)
    with pytest.raises(
        ValueError, match=r"mine\.zip .*hold more than 1048576 bytes \('ml-1m/ratings.dat' declares 16777216"
    ):
        datasets.movielens(path=of_own(tmp_path, zeros, "30::A::War\n"))
    # What an archive declares too small is bounded by what comes out.
    packed = bytearray(of_own(tmp_path, zeros, "30::A::War\n").read_bytes())
    place = packed.find((16 << 20).to_bytes(4, "little"), packed.find(b"PK\x01\x02"))
    packed[place : place + 4] = (100).to_bytes(4, "little")
    (tmp_path / "mine.zip").write_bytes(packed)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"mine\.zip .*cannot be read: Bad CRC"):
        datasets.movielens(path=tmp_path / "mine.zip")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        datasets.movielens(path=of_own(tmp_path, ONE_RATING, "30::A::War\n", zipfile.ZIP_BZIP2))
    # An archive that is larger than the bound may hold as much as it has.
    noise = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8).tobytes()
    with pytest.raises(ValueError, match=r"has not the form of .*int64"):
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
    with pytest.raises(ValueError, match=r"movielens: .*mine\.zip has not the form of ml-1m\.zip: "):
        datasets.movielens(path=file)


# What is generated


@pytest.fixture(scope="module")
def log():
    return datasets.generated_ratings(300, 120, seed=3)


def test_equal_seeds_generate_equal_logs(log):
    again, other = datasets.generated_ratings(300, 120, seed=3), datasets.generated_ratings(300, 120, seed=4)
    for name in ("users", "items", "ratings", "timestamps", "item_ids", "genres"):
        assert np.array_equal(getattr(log, name), getattr(again, name))
        assert not np.array_equal(getattr(log, name), getattr(other, name))
    assert log.titles == again.titles


def test_a_generated_log_has_the_form_of_movielens(log):
    assert (np.diff(log.timestamps) >= 0).all()
    assert np.bincount(log.users, minlength=300).min() >= 20
    assert len(np.unique(log.users.astype(np.int64) * 120 + log.items)) == len(log.users)  # nobody rates a film twice
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


def test_a_taste_turns_from_the_first_visit_to_the_last(log):
    law, user = log.law, np.array([5])
    flat = law.log_popularity[None] * 0 + np.where(law.release_days > law.first_days[5], -np.inf, 0)
    first, last = (law.log_odds(user, moment[user]) for moment in (law.first_days, law.last_days))
    liked = 6.0 * law.first_tastes[5] @ law.item_vectors.T + law.log_popularity + flat[0]
    old = law.release_days < -60 * 30  # no longer new, so nothing but popularity and taste is left
    np.testing.assert_allclose(first[0, old], liked[old], atol=1e-9)
    assert np.abs(last[0, old] - first[0, old]).max() > 0.5


# What follows from a log


def test_histories_hold_what_a_user_rated_before_and_nothing_later(log):
    seen, histories = {}, log.histories(7)
    for user, item, found in zip(log.users.tolist(), log.items.tolist(), histories.tolist(), strict=True):
        before = seen.setdefault(user, [])
        assert found == (before[::-1] + [-1] * 7)[:7]
        before.append(item)


def test_every_user_has_one_last_rating_and_it_is_the_latest(log):
    last = {}
    for number, user in enumerate(log.users.tolist()):
        last[user] = number
    assert np.flatnonzero(log.is_last()).tolist() == sorted(last.values())
