"""Texts as word ids, and windows of ids: Shakespeare's plays, or bundled texts in a similar style.

`Published` finds files at a path, in the cache or on the web, and compares checksums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int, Int32

from rsembed.checks import PositiveInt, validated
from rsembed.progress import is_watched

_log = logging.getLogger("rsembed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published file with a known checksum, which may be on the disk, in the cache or on the web.

    Attributes:
      reader: name of the function that reads the file, for messages.
      name: name of the file, by which it is found in a folder or in the cache.
      kinds: files that the reader accepts instead, for messages.
      title: description of the content.
      url: address of the file on the web.
      known_hash: `algorithm:digest` of the content.
    """

    reader: str
    name: str
    kinds: str
    title: str
    url: str
    known_hash: str

    def find(
        self,
        path: str | os.PathLike[str] | None,
        *,
        download: bool,
        find_at: Callable[[Path], Path | None],
    ) -> Path:
        """Path of a file that the reader accepts, or of the published file in the cache.

        Args:
          path: where to look for a file. If None, the file is at the path in the environment
            variable `RSEMBED_DATA`, or else in pooch's cache.
          download: whether the published file may be downloaded into the cache. If the server does
            not answer within 5 seconds, nothing is downloaded.
          find_at: function that returns the path of a file at a place, a file or a folder, and None
            if there is no file.

        Raises: FileNotFoundError: there is no such file at `path`, or `path` is None and no file
          was found.
        """
        place = os.environ.get("RSEMBED_DATA") if path is None else path
        if place:
            file = find_at(Path(place).expanduser())
            if file is not None:
                return file
            if path is not None:
                raise FileNotFoundError(
                    f"{self.reader}: path={os.fspath(path)!r} is no file of this kind: give {self.kinds}."
                )
            _log.warning(
                "%s: RSEMBED_DATA=%r is no file of this kind; looking on.", self.reader, place
            )
        return self._cached(download)

    def check(self, file: Path) -> tuple[bytes, str]:
        """Content of a file, and a text that tells users where the content comes from.

        Raises: ValueError: the file is called `name`, but its checksum is not `known_hash`.
        """
        content = file.read_bytes()
        algorithm, known = self.known_hash.split(":")
        digest = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if digest == known:
            return content, f"{self.title} ({algorithm} verified) from {file}"
        if file.name == self.name:
            raise ValueError(
                f"{self.reader}: checksum mismatch, {file} has {algorithm} {digest}, the published file has {known}. "
                "Delete a broken download and fetch it again; give a file of your own another name."
            )
        return content, f"a file of your own, {file}"

    def _cached(self, download: bool) -> Path:
        """Path of the file in pooch's cache, into which it may be downloaded.

        Raises: FileNotFoundError: the file is not in the cache, and was not downloaded.
        """
        import pooch

        cached = Path(pooch.os_cache("rsembed")) / self.name
        if download:
            # `pooch.retrieve` downloads the file only if it is not in the cache.
            downloader = pooch.HTTPDownloader(timeout=5.0, progressbar=is_watched())
            try:
                pooch.retrieve(
                    self.url, self.known_hash, cached.name, cached.parent, downloader=downloader
                )
            except OSError as error:
                # pooch downloads with requests, and all exceptions of requests are OSErrors.
                _log.warning(
                    "%s: could not fetch %s (%s).", self.reader, self.url, type(error).__name__
                )
        if not cached.is_file():
            raise FileNotFoundError(
                f"{self.reader}: no {self.name} was found: give path=FILE, set RSEMBED_DATA to the file or its folder, "
                "allow download=True where there is a network, or do with generated data."
            )
        return cached


UNKNOWN_WORD = "<unk>"
"""The word of id 0, which represents every word outside the vocabulary."""

CORPUS = Published(
    reader="shakespeare",
    name="tinyshakespeare.txt",
    kinds="a text file, or a folder with tinyshakespeare.txt",
    title="tinyshakespeare, the real corpus",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    known_hash="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
BUNDLED = {
    "generated": (
        "sentences.txt",
        "generated, short sentences in Shakespeare's manner, bundled with rsembed",
    ),
    "pastiche": (
        "pastiche.txt",
        "pastiche, an original text in Shakespeare's manner, bundled with rsembed",
    ),
}
BEST_LOSS = 1.6432402670145951
"""Lowest possible loss on the generated sentences (nats per word), from `datasets/make_text.py`."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Text:
    """A text as word ids, with its vocabulary and a description of its origin (`source`).

    `content` is the whole text of the file, for character-level models. `vocabulary[i]` is the word
    of id `i`, and `vocabulary[0]` is `UNKNOWN_WORD`. `vocabulary` is shorter than the requested
    `vocabulary_size` if the text has fewer distinct words. For the generated text, `best_loss` is
    the expected loss, in nats per word, of a model that knows the distribution from which the text
    was drawn, which is the lowest expected loss that a model can have. `best_loss` is None for
    every text except the generated text, and if some words have id 0.
    """

    word_ids: Int32[np.ndarray, " words"]
    vocabulary: tuple[str, ...]
    source: str
    content: str
    best_loss: float | None = None

    def __repr__(self) -> str:
        return (
            f"Text({len(self.word_ids):,} words, vocabulary of {len(self.vocabulary):,}; "
            f"{self.source})"
        )


@validated
def shakespeare(
    vocabulary_size: Annotated[int, "[2, inf)"] = 2048,
    *,
    source: Literal["auto", "generated", "pastiche", "corpus"] = "auto",
    path: str | os.PathLike[str] | None = None,
    download: bool = False,
    max_words: PositiveInt | None = None,
) -> Text:
    """Shakespeare's plays, or a bundled text in a similar style, as word ids ranked by frequency.

    The most frequent word has id 1, the next word has id 2, and so on. Words that occur equally
    often are ranked in order of their first appearance. Id 0 represents all words that are not
    among the `vocabulary_size - 1` most frequent words.

    The real corpus (tinyshakespeare) is read from `path`, else from the file or folder that the
    environment variable `RSEMBED_DATA` names, else from pooch's cache. The corpus is downloaded
    only if `download` is True.

    Args:
      vocabulary_size: number of ids, id 0 included. A table for the words needs `vocabulary_size`
        rows.
      source: "auto", the default, reads the real corpus if there is a file, else the generated
        text, and logs the choice to the logger "rsembed". With `source="corpus"`, a missing file of
        the real corpus is an error. "generated" and "pastiche" are texts that are bundled with
        rsembed. "generated" has 72,000 words: short sentences, drawn from a grammar, with speakers'
        names and full stops, which even a small model learns to write. "pastiche" is a short play,
        written by hand, with many rare words.
      path: a text file, or a folder with `tinyshakespeare.txt`. The checksum of a file is checked
        only if the file is called `tinyshakespeare.txt`.
      download: whether the corpus (1.1 MB) may be downloaded into the cache folder, False by
        default. If the server does not answer within 5 seconds, nothing is downloaded.
      max_words: number of words to keep from the beginning of the text. A few hundred words are
        enough for a quick test. If None, all words are kept.

    Returns:
      The text. The attribute `source` describes where the text comes from.

    Raises:
      ValueError: an argument is out of range, a file called `tinyshakespeare.txt` has a different
        checksum, or a text is empty or not UTF-8.
      FileNotFoundError: `path` has no text file, or `source="corpus"` and there is no file.

    Source: words are ranked as in the Shakespeare example of jax-tpu-embedding. The example of
      jax-tpu-embedding uses id 0 for the most frequent word and for all unknown words.
      `shakespeare` adds one to the example's id of each known word, so id 0 represents only unknown
      words.

    Example:
      >>> text = shakespeare(64, source="pastiche", max_words=2000)
      >>> text.word_ids.shape, len(text.vocabulary), text.vocabulary[:3]
      ((2000,), 64, ('<unk>', 'the', 'I'))
    """
    if source in ("auto", "corpus"):
        try:
            file = CORPUS.find(path, download=download, find_at=_text_at)
            content, origin = CORPUS.check(file)
        except FileNotFoundError:
            if source == "corpus" or path is not None:
                raise
            source = "generated"
    elif path is not None or download:
        raise ValueError(
            f"shakespeare: source={source!r} needs no file; drop path= and download=, or source=."
        )
    if source in BUNDLED:
        name, origin = BUNDLED[source]
        content = _bundled_file(name).read_bytes()
    _log.info("shakespeare: %s", origin)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"shakespeare: {origin} is not UTF-8 text ({error}); convert it first."
        ) from error
    words = text.split()[:max_words]
    if not words:
        raise ValueError(f"shakespeare: {origin} has no words; give a text with at least one.")
    counts = Counter(word for word in words if word != UNKNOWN_WORD)
    # A stable sort keeps words with equal counts in the order of their first appearance.
    ranked = sorted(counts, key=lambda word: -counts[word])[: vocabulary_size - 1]
    ids = {word: rank for rank, word in enumerate(ranked, start=1)}
    word_ids = np.array([ids.get(word, 0) for word in words], np.int32)
    best_loss = BEST_LOSS if source == "generated" and word_ids.all() else None
    vocabulary = (UNKNOWN_WORD, *ranked)
    return Text(
        word_ids=word_ids, vocabulary=vocabulary, source=origin, content=text, best_loss=best_loss
    )


def _text_at(place: Path) -> Path | None:
    """The text file `place`, or the corpus in the folder `place` or a subfolder, or None."""
    for file in (place, place / CORPUS.name, *sorted(place.glob(f"*/{CORPUS.name}"))):
        # `RSEMBED_DATA` may be the path of a zip archive of ratings.
        if file.is_file() and file.suffix != ".zip":
            return file
    return None


def _bundled_file(name: str) -> Path:
    """Path of a bundled text, in the installed package or in a checkout of the repository."""
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "_bundled" / name, package.parent / "datasets" / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"shakespeare: the bundled text is at none of {[str(c) for c in candidates]}; reinstall."
    )


@validated
def load_shakespeare(vocab_size: PositiveInt) -> Int32[np.ndarray, " words"]:
    """Word ids of the text that `shakespeare` reads, numbered as in jax-tpu-embedding's tutorial.

    Use `load_shakespeare` to compare a model with the model of jax-tpu-embedding's tutorial. Id 0
    represents the most frequent word and all unknown words. In the result of `shakespeare`, the
    most frequent word has id 1, and id 0 represents only unknown words. Each of the `vocab_size`
    most frequent words has a different id.

    Example:
      >>> load_shakespeare(2048).dtype
      dtype('int32')
    """
    ids = shakespeare(vocab_size + 1).word_ids
    return np.maximum(ids - np.int32(1), np.int32(0))


@validated
def word_id_batches(
    word_ids: Int[np.ndarray, " words"],
    num_steps: PositiveInt,
    batch_size: PositiveInt,
    seq_len: PositiveInt,
    num_tables: PositiveInt = 1,
) -> tuple[dict[str, list[Int32[np.ndarray, "batch seq 1"]]], list[Int32[np.ndarray, " batch"]]]:
    """Batches of word windows as in jax-tpu-embedding's tutorial, with the same windows every step.

    `features["words_<i>"][step][b, s, 0]` is word `b + s` and `labels[step][b]` is word
    `b + seq_len`. Windows that extend beyond the end of the text continue at its start, so a batch
    larger than the text repeats windows. All steps and features share one read-only array.

    Args:
      word_ids: the text as word ids.
      num_steps: number of steps, which is the length of each returned list.
      batch_size: number of windows per step.
      seq_len: number of words in a window. The label of a window is the word after the window.
      num_tables: number of features. All features get the same word ids.

    Raises: ValueError: a count is below 1, or the text is too short for one window and its label.

    Source: the Shakespeare example of jax-tpu-embedding.

    Example:
      >>> features, labels = word_id_batches(np.arange(9), num_steps=2, batch_size=2, seq_len=3)
      >>> features["words_0"][0][..., 0].tolist(), labels[0].tolist()
      ([[0, 1, 2], [1, 2, 3]], [3, 4])
    """
    if len(word_ids) <= seq_len:
        raise ValueError(
            f"word_id_batches: {len(word_ids)} words are too few for windows of seq_len={seq_len} and "
            f"a label; give at least {seq_len + 1} words or a smaller seq_len."
        )
    narrow = np.asarray(word_ids).astype(np.int32)
    if (narrow != np.asarray(word_ids)).any():
        raise ValueError(
            "word_id_batches: word_ids must fit int32; give ids from 0 to below the size of a vocabulary."
        )
    positions = np.arange(batch_size)[:, None] + np.arange(seq_len + 1)
    windows = narrow[positions % len(word_ids)]
    windows.flags.writeable = False
    features = {
        f"words_{table}": [windows[:, :-1, None]] * num_steps for table in range(num_tables)
    }
    return features, [windows[:, -1]] * num_steps
