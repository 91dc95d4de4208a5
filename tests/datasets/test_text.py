"""Tests of texts: how words become ids, and which text is read."""

import dataclasses
import hashlib
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rsembed import datasets
from rsembed.datasets import text as text_module

README = Path(__file__).resolve().parents[2] / "datasets" / "README.md"
VERSE = "the sea the stone the sea a bell , a stone by the sea ."
RANKED = ["the", "sea", "stone", "a", "bell", ",", "by", "."]


@pytest.fixture
def corpus(monkeypatch, tmp_path):
    """A short text in place of the real corpus. Its checksum is the expected one."""
    file = tmp_path / "somewhere" / "tinyshakespeare.txt"
    file.parent.mkdir()
    file.write_text(VERSE)
    known_hash = f"sha256:{hashlib.sha256(VERSE.encode()).hexdigest()}"
    monkeypatch.setattr(
        text_module, "CORPUS", dataclasses.replace(text_module.CORPUS, known_hash=known_hash)
    )
    return file


def own_text(tmp_path, words):
    file = tmp_path / "own.txt"
    file.write_text(words)
    return file


@pytest.mark.parametrize("vocabulary_size", [2, 3, 5, 8, 9, 100])
def test_words_are_ranked_by_count_and_ties_by_first_appearance(tmp_path, vocabulary_size):
    text = datasets.shakespeare(vocabulary_size, path=own_text(tmp_path, VERSE))
    vocabulary = ["<unk>", *RANKED][:vocabulary_size]
    assert list(text.vocabulary) == vocabulary
    ids = {word: number for number, word in enumerate(vocabulary)}
    assert text.word_ids.tolist() == [ids.get(word, 0) for word in VERSE.split()]
    assert text.word_ids.dtype == np.int32


def test_the_word_of_id_0_is_unknown_even_where_a_text_contains_it(tmp_path):
    text = datasets.shakespeare(8, path=own_text(tmp_path, "<unk> sea <unk> bell"))
    assert text.vocabulary == ("<unk>", "sea", "bell")
    assert text.word_ids.tolist() == [0, 1, 0, 2]


def test_max_words_cuts_before_ranking():
    words = text_module._bundled_file("pastiche.txt").read_text().split()
    for num_words in (50, None):
        text = datasets.shakespeare(4096, source="pastiche", max_words=num_words)
        assert [text.vocabulary[number] for number in text.word_ids] == words[:num_words]
        assert len(text.vocabulary) == 1 + len(set(words[:num_words]))


@pytest.mark.parametrize("name", ["pastiche.txt", "sentences.txt"])
def test_a_bundled_text_is_the_one_its_readme_describes(name):
    if not README.is_file():
        pytest.skip("needs the checkout's datasets/README.md")
    row = next(line for line in README.read_text().splitlines() if line.startswith(f"| `{name}`"))
    content = text_module._bundled_file(name).read_bytes()
    words = content.decode().split()
    assert f"| {len(words):,} | {len(set(words)):,} | {len(content):,} |" in row
    assert hashlib.sha256(content).hexdigest() in row
    assert text_module.CORPUS.known_hash.removeprefix("sha256:") in README.read_text()


@pytest.mark.skipif(not README.is_file(), reason="needs the checkout's datasets/make_text.py")
def test_the_sentences_and_their_best_loss_are_made_by_the_script_beside_them(tmp_path):
    script = Path(shutil.copy(README.parent / "make_text.py", tmp_path))
    printed = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True
    ).stdout
    assert (tmp_path / "sentences.txt").read_bytes() == text_module._bundled_file(
        "sentences.txt"
    ).read_bytes()
    assert printed == f"best loss {text_module.BEST_LOSS} nats a word\n"


def test_the_best_loss_is_known_where_every_word_has_an_id():
    whole = datasets.shakespeare(source="generated")
    shares = np.bincount(whole.word_ids)[1:] / len(whole.word_ids)
    # The sum is the loss of a model that knows only how frequent the words are.
    assert whole.best_loss < -np.sum(shares * np.log(shares)) - 3
    assert datasets.shakespeare(50, source="generated").best_loss is None
    assert datasets.shakespeare(source="pastiche").best_loss is None


def test_auto_reads_the_sentences_when_there_is_no_corpus_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="rsembed"):
        text = datasets.shakespeare(64)
    assert text.source == datasets.shakespeare(64, source="generated").source
    assert text.source in caplog.text


@pytest.mark.parametrize(
    "place", ["file", "folder", "variable file", "variable folder", "cache", "download"]
)
@pytest.mark.parametrize("source", ["auto", "corpus"])
def test_the_corpus_is_preferred_wherever_it_is_found(monkeypatch, corpus, cache, place, source):
    options = {}
    if place in ("file", "folder"):
        options["path"] = corpus if place == "file" else str(corpus.parent)
    elif place.startswith("variable"):
        monkeypatch.setenv("RSEMBED_DATA", str(corpus if place.endswith("file") else corpus.parent))
    else:
        corpus = corpus.rename(cache / corpus.name)
        # A file in the cache with the right checksum is not downloaded, so this needs no network.
        options["download"] = place == "download"
    text = datasets.shakespeare(100, source=source, **options)
    assert text.source == f"tinyshakespeare, the real corpus (sha256 verified) from {corpus}"
    assert text.content == VERSE


def test_the_download_is_pinned_and_asked_for(monkeypatch, corpus, cache):
    asked = []

    def retrieve(url, known_hash, fname, path, *, downloader):
        asked.append((url, known_hash, fname, path, downloader.progressbar))
        shutil.copy(corpus, path / fname)

    monkeypatch.setattr("pooch.retrieve", retrieve)
    assert "generated" in datasets.shakespeare(100, max_words=5).source
    assert asked == []
    assert "verified" in datasets.shakespeare(100, download=True).source
    expected = (text_module.CORPUS.url, text_module.CORPUS.known_hash, corpus.name, cache, False)
    assert asked == [expected]


def test_path_wins_over_the_variable_and_a_text_of_ours_over_both(monkeypatch, corpus, tmp_path):
    monkeypatch.setenv("RSEMBED_DATA", str(corpus))
    path = own_text(tmp_path, "one two two")
    text = datasets.shakespeare(10, path=path)
    assert text.source == f"a file of your own, {path}"
    assert text.vocabulary == ("<unk>", "two", "one")
    assert "pastiche" in datasets.shakespeare(10, source="pastiche").source
    assert "generated" in datasets.shakespeare(10, source="generated", max_words=5).source


def test_a_variable_that_leads_nowhere_is_reported_and_passed_over(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path / "gone"))
    assert "generated" in datasets.shakespeare(10, max_words=5).source
    assert re.search(r"RSEMBED_DATA=.*gone. is no file of this kind", caplog.text)


@pytest.mark.parametrize("place", ["path", "variable", "cache"])
def test_a_doctored_corpus_is_refused(monkeypatch, tmp_path, cache, place):
    doctored = tmp_path / "tinyshakespeare.txt"
    doctored.write_text(VERSE)
    if place == "variable":
        monkeypatch.setenv("RSEMBED_DATA", str(doctored.parent))
    if place == "cache":
        doctored.rename(cache / doctored.name)
    with pytest.raises(ValueError, match=r"checksum mismatch.*another name"):
        datasets.shakespeare(10, path=doctored if place == "path" else None)


def test_an_insisted_corpus_that_is_missing_lists_the_ways_out():
    with pytest.raises(
        FileNotFoundError, match=r"path=FILE.*RSEMBED_DATA.*download=True.*generated"
    ):
        datasets.shakespeare(10, source="corpus")


def test_a_broken_installation_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(text_module, "__file__", str(tmp_path / "a" / "b" / "text.py"))
    with pytest.raises(FileNotFoundError, match=r"the bundled text is at none of .*reinstall"):
        datasets.shakespeare(10, source="pastiche")


def test_an_installed_package_reads_its_own_copy_of_the_text(monkeypatch, tmp_path):
    bundled = tmp_path / "rsembed" / "_bundled" / "pastiche.txt"
    bundled.parent.mkdir(parents=True)
    bundled.write_text("here we are")
    monkeypatch.setattr(text_module, "__file__", str(tmp_path / "rsembed" / "datasets" / "text.py"))
    assert datasets.shakespeare(10, source="pastiche").vocabulary == ("<unk>", "here", "we", "are")


def test_load_shakespeare_numbers_words_as_the_tutorial_does(monkeypatch, tmp_path):
    monkeypatch.setenv("RSEMBED_DATA", str(own_text(tmp_path, "b a b c a b d e c")))
    # Sorted by frequency, the words are b, a, c, d, e. The first three have the ids 0, 1 and 2, and
    # all other words have id 0.
    assert text_module.load_shakespeare(3).tolist() == [0, 1, 0, 2, 1, 0, 0, 0, 2]
    assert text_module.load_shakespeare(vocab_size=9).tolist() == [0, 1, 0, 2, 1, 0, 3, 4, 2]
