"""Text as word ids: the real Shakespeare corpus where it is found, a text of our own in his manner elsewhere."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Int, Int32

from rsembed.checks import PositiveInt, validated
from rsembed.datasets.files import Published

UNKNOWN_WORD = "<unk>"
"""The word of id 0, which stands for every word outside the vocabulary."""

CORPUS = Published(
    reader="shakespeare",
    names=("tinyshakespeare.txt", "tinyshakespeare/input.txt"),
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    known_hash="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
SOURCES = ("auto", "generated", "pastiche", "corpus")
BUNDLED = {
    "generated": ("sentences.txt", "generated, short sentences in Shakespeare's manner, bundled with rsembed"),
    "pastiche": ("pastiche.txt", "pastiche, an original text in Shakespeare's manner, bundled with rsembed"),
}
BEST_LOSS = 1.6432402670145951
"""Of the generated sentences, as `datasets/make_text.py` prints it, beside which their sha256 stands."""

_log = logging.getLogger("rsembed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text as word ids, with its vocabulary and a sentence about its origin.

    `vocabulary[i]` is the word of id `i`, and `vocabulary[0]` is `UNKNOWN_WORD`. It may be shorter than the
    `vocabulary_size` that was asked for, when the text has fewer distinct words. `best_loss` is the mean surprise of a
    word, in nats, to who knows the law that the text was drawn from: no model can do better. It is None where there is
    no such law, and where words became id 0.
    """

    word_ids: Int32[np.ndarray, " words"]
    vocabulary: tuple[str, ...]
    source: str
    best_loss: float | None = None

    @property
    def unknown_fraction(self) -> float:
        """Share of the text's words that became id 0."""
        return float(np.mean(self.word_ids == 0))

    @validated
    def encode(self, words: str | Iterable[str]) -> Int32[np.ndarray, " encoded"]:
        """Ids of words; a string is split at white space, and unknown words become 0."""
        ids = {word: number for number, word in enumerate(self.vocabulary)}
        words = words.split() if isinstance(words, str) else words
        return np.array([ids.get(word, 0) for word in words], np.int32)

    @validated
    def decode(self, ids: Int[np.ndarray, "*shape"] | Sequence[int]) -> str:
        """Words of ids, joined by spaces; arrays are read row by row.

        Raises: ValueError: an id has no word.
        """
        flat = np.asarray(ids, np.int64).reshape(-1)
        bad = np.flatnonzero((flat < 0) | (flat >= len(self.vocabulary)))
        if bad.size:
            raise ValueError(
                f"Text.decode: id {flat[bad[0]]} at position {bad[0]} has no word; this text has the ids "
                f"0 to {len(self.vocabulary) - 1}. Where a model has more rows than that, mask the rest."
            )
        return " ".join(self.vocabulary[number] for number in flat)

    def verse(self, ids: Int[np.ndarray, "*shape"] | Sequence[int]) -> str:
        """Words of ids as a play is printed: every speaker on a new line, and stops close to their words.

        Raises: ValueError: an id has no word.
        """
        return re.sub(r" (?=[,.?!])", "", re.sub(r" (?=[A-Z]+:)", "\n", self.decode(ids)))


@validated
def shakespeare(
    vocabulary_size: Annotated[int, "[2, inf)"] = 2048,
    *,
    source: str = "auto",
    path: str | os.PathLike[str] | None = None,
    download: bool = False,
    max_words: PositiveInt | None = None,
    progress: bool | None = None,
) -> Text:
    """Words of Shakespeare, or of a text of our own in his manner, ranked into ids by how often they occur.

    The most frequent word gets id 1, ties go to the word that appears first, and id 0 stands for the words
    that found no room. The real corpus (tinyshakespeare) is searched in `path`, then in the file or folder
    named by the environment variable `RSEMBED_DATA`, then in pooch's cache, and fetched only if `download`.

    Args:
      vocabulary_size: number of ids, id 0 included; a table of as many rows holds them all.
      source: "corpus" insists on a file that was found. "generated" are 72,000 words of short sentences from a
        grammar, speakers' names and stops among them: a small model learns to write such. "pastiche" is a short
        play, written by hand, with as many rare words as any text. Both are bundled. "auto" takes the real corpus if
        it is found, else the generated text, and tells the logger "rsembed" which.
      path: a text file, or a folder with `tinyshakespeare.txt` or `tinyshakespeare/input.txt`. Your own text
        may have any other name, and is then read without a checksum.
      download: allow fetching the corpus (1.1 MB) into the cache folder. Without an answer within seconds, it was not
        found.
      max_words: keep only the first words; a few hundred make a test quick.
      progress: show a bar while downloading; None shows it where somebody watches, see `rsembed.progress`.

    Returns:
      The text; its `source` says what was read.

    Raises:
      ValueError: an argument is out of range, a file that bears the corpus' name has another content, or a
        text is empty or not UTF-8.
      FileNotFoundError: `path` has no text, or `source="corpus"` found none.

    Source:
      Ranking as in the Shakespeare example of jax-tpu-embedding, except that its most frequent word shares
      id 0 with the unknown words; here every id is one higher and 0 means unknown alone.

    Example:
      >>> text = shakespeare(64, source="pastiche", max_words=2000)
      >>> text.word_ids.shape, len(text.vocabulary), text.vocabulary[:3]
      ((2000,), 64, ('<unk>', 'the', 'I'))
      >>> text.decode(text.encode("the zeppelin"))
      'the <unk>'
    """
    if source not in SOURCES:
        raise ValueError(f"shakespeare: source={source!r} is none of {SOURCES}.")
    if source in ("generated", "pastiche") and (path is not None or download):
        raise ValueError(f"shakespeare: source={source!r} needs no file; drop path= and download=, or source=.")

    file = CORPUS.find(path, download=download, progress=progress) if source in ("auto", "corpus") else None
    if file is None and source == "corpus":
        raise FileNotFoundError(
            f"shakespeare: source='corpus', but no {CORPUS.names[0]} was found. Give path=FILE, set RSEMBED_DATA "
            f"to the file or its folder, allow download=True, or do without: source='generated'."
        )
    bundled = "pastiche" if source == "pastiche" else "generated"
    words, sentence = _read_words(file, *BUNDLED[bundled])
    _log.info("shakespeare: %s", sentence)
    word_ids, vocabulary = _rank_words(words[:max_words], vocabulary_size)
    best_loss = BEST_LOSS if file is None and bundled == "generated" and word_ids.all() else None
    return Text(word_ids=word_ids, vocabulary=vocabulary, source=sentence, best_loss=best_loss)


def _read_words(file: Path | None, bundled: str, sentence: str) -> tuple[list[str], str]:
    """Words of a file, or of a bundled text, and a sentence on which it is."""
    origin = bundled if file is None else str(file)
    content = (_bundled_file(bundled) if file is None else file).read_bytes()
    if file is not None:
        sentence = _describe(content, file, origin)
    try:
        words = content.decode("utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"shakespeare: {origin} is not UTF-8 text ({error}); convert it first.") from error
    if not words:
        raise ValueError(f"shakespeare: {origin} has no words; give a text with at least one.")
    return words, sentence


def _rank_words(words: list[str], vocabulary_size: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Ids by falling count, from 1; a stable sort keeps words of equal count in order of first appearance."""
    counts = Counter(word for word in words if word != UNKNOWN_WORD)
    ranked = sorted(counts, key=lambda word: -counts[word])[: vocabulary_size - 1]
    ids = {word: rank for rank, word in enumerate(ranked, start=1)}
    return np.array([ids.get(word, 0) for word in words], np.int32), (UNKNOWN_WORD, *ranked)


def _describe(content: bytes, file: Path, origin: str) -> str:
    """Says which text this is, after checking that a file with the corpus' name is the corpus."""
    if CORPUS.check(file, content):
        return f"tinyshakespeare, the real corpus (sha256 verified), from {origin}"
    return f"a text of your own, from {origin}"


def _bundled_file(name: str) -> Path:
    """A text inside an installed package, else in the checkout around it."""
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "_bundled" / name, package.parent / "datasets" / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"shakespeare: the bundled text is at none of {[str(c) for c in candidates]}; reinstall.")


@validated
def load_shakespeare(
    vocab_size: PositiveInt, *, source: str = "auto", path: str | os.PathLike[str] | None = None
) -> Int32[np.ndarray, " words"]:
    """Word ids as the published tutorial numbers them: the most frequent word is 0, and so is every unknown word.

    `shakespeare` keeps the two apart; use this one to compare with the tutorial.

    Args:
      vocab_size: number of ids; as many of the most frequent words get one of their own.
      source: as in `shakespeare`.
      path: as in `shakespeare`.

    Example:
      >>> load_shakespeare(2048, source="pastiche").dtype
      dtype('int32')
    """
    ids = shakespeare(vocab_size + 1, source=source, path=path).word_ids
    return np.maximum(ids - np.int32(1), np.int32(0))
