"""Text as word ids, and windows of it: the real Shakespeare corpus where it is found, else one in his manner.

Files that others publish are found in a place that the user names, in the cache, or on the network; never mistaken.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int, Int32

from rsembed.checks import NonNegativeInt, PositiveInt, validated
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
        """Whether this is the published file, and no other one of the user's.

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
        """The file itself, or the published one inside a folder. An archive is no text, nor the reverse."""
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


UNKNOWN_WORD = "<unk>"
"""The word of id 0, which stands for every word outside the vocabulary."""

CORPUS = Published(
    reader="shakespeare",
    names=("tinyshakespeare.txt", "tinyshakespeare/input.txt"),
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    known_hash="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    source="corpus",
)
SOURCES = ("auto", "generated", "pastiche", "corpus")
BUNDLED = {
    "generated": ("sentences.txt", "generated, short sentences in Shakespeare's manner, bundled with rsembed"),
    "pastiche": ("pastiche.txt", "pastiche, an original text in Shakespeare's manner, bundled with rsembed"),
}
BEST_LOSS = 1.6432402670145951
"""Best loss that is possible on the generated sentences, as `datasets/make_text.py` prints it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text as word ids, with its vocabulary and a sentence about its origin.

    `content` is the text as it stands in its file, all of it, for models of letters. `vocabulary[i]` is the word of
    id `i`, and `vocabulary[0]` is `UNKNOWN_WORD`. It may be shorter than the `vocabulary_size` that was asked for,
    when the text has fewer distinct words. `best_loss` is the mean surprise of a word, in nats, to who knows the law
    that the text was drawn from: no model can do better. It is None where there is no such law, and where words
    became id 0.
    """

    word_ids: Int32[np.ndarray, " words"]
    vocabulary: tuple[str, ...]
    source: str
    content: str
    best_loss: float | None = None


@validated
def shakespeare(
    vocabulary_size: Annotated[int, "[2, inf)"] = 2048,
    *,
    source: str = "auto",
    path: str | os.PathLike[str] | None = None,
    download: bool = False,
    max_words: PositiveInt | None = None,
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
    """
    if source not in SOURCES:
        raise ValueError(f"shakespeare: source={source!r} is none of {SOURCES}.")
    file = CORPUS.find(source, path, download=download)
    bundled = "pastiche" if source == "pastiche" else "generated"
    content, sentence = _read(file, *BUNDLED[bundled])
    _log.info("shakespeare: %s", sentence)
    words = content.split()[:max_words]
    counts = Counter(word for word in words if word != UNKNOWN_WORD)
    # A stable sort keeps words of equal count in order of first appearance.
    ranked = sorted(counts, key=lambda word: -counts[word])[: vocabulary_size - 1]
    ids = {word: rank for rank, word in enumerate(ranked, start=1)}
    word_ids = np.array([ids.get(word, 0) for word in words], np.int32)
    best_loss = BEST_LOSS if file is None and bundled == "generated" and word_ids.all() else None
    vocabulary = (UNKNOWN_WORD, *ranked)
    return Text(word_ids=word_ids, vocabulary=vocabulary, source=sentence, content=content, best_loss=best_loss)


def _read(file: Path | None, bundled: str, sentence: str) -> tuple[str, str]:
    """Content of `file`, or of the bundled text where there is none, and a sentence about its origin."""
    origin = bundled if file is None else str(file)
    content = (_bundled_file(bundled) if file is None else file).read_bytes()
    if file is not None:
        is_corpus = CORPUS.check(file, content)
        whose = "tinyshakespeare, the real corpus (sha256 verified)" if is_corpus else "a text of your own"
        sentence = f"{whose}, from {origin}"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"shakespeare: {origin} is not UTF-8 text ({error}); convert it first.") from error
    if not text.strip():
        raise ValueError(f"shakespeare: {origin} has no words; give a text with at least one.")
    return text, sentence


def _bundled_file(name: str) -> Path:
    """Path of a bundled text, inside the installed package or in the checkout around it."""
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


SPLITS = ("train", "validation")


@validated
def word_id_batches(
    word_ids: Int[np.ndarray, " words"],
    num_steps: PositiveInt,
    batch_size: PositiveInt,
    seq_len: PositiveInt,
    num_tables: PositiveInt = 1,
) -> tuple[dict[str, list[Int32[np.ndarray, "batch seq 1"]]], list[Int32[np.ndarray, " batch"]]]:
    """The batches of the published tutorial: every step the same first windows of the text.

    `features["words_<i>"][step][b, s, 0]` is word `b + s` and `labels[step][b]` is word `b + seq_len`.
    Positions past the end continue at the start of the text, for features as for labels, so a batch larger
    than the text meets the same windows again. All steps and tables share one read-only array.

    Args:
      word_ids: the text.
      num_steps: length of each list.
      batch_size: windows per step.
      seq_len: context words per window.
      num_tables: number of features, each holding the same words.

    Raises: ValueError: a count is below 1, or the text is too short for one window and its label.

    Source: Shakespeare example of jax-tpu-embedding.

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
    positions = np.arange(batch_size)[:, None] + np.arange(seq_len + 1)
    windows = _narrow("word_id_batches", word_ids)[positions % len(word_ids)]
    windows.flags.writeable = False
    features = {f"words_{table}": [windows[:, :-1, None]] * num_steps for table in range(num_tables)}
    return features, [windows[:, -1]] * num_steps


@validated
def next_word_batches(
    word_ids: Int[np.ndarray, " words"],
    *,
    batch_size: PositiveInt,
    sequence_length: PositiveInt,
    num_batches: PositiveInt | None = None,
    seed: NonNegativeInt = 0,
    split: str = "train",
    validation_fraction: Annotated[float, "[0, 1)"] = 0.1,
) -> Iterator[tuple[Int32[np.ndarray, "batch seq"], Int32[np.ndarray, " batch"]]]:
    """Windows of a text with the word that follows each, as `(contexts, labels)` pairs of full batches.

    The text is cut once: its end is for validation, and no window crosses the cut.

    Args:
      word_ids: the text.
      batch_size: windows per batch.
      sequence_length: context words per window.
      num_batches: for "train" any number (default: as many as one pass over the text would take); for
        "validation" at most this many (default: every full batch; a rest smaller than a batch is left out).
      seed: the training windows are drawn by `Generator(PCG64(seed))`; equal seeds give equal batches.
      split: "train" draws windows at random with replacement; "validation" goes through them in text order,
        one word further each time.
      validation_fraction: share of the words kept for validation, from 0 up to but not including 1.

    Raises: ValueError: an argument is out of range, or the split has too few words.

    Example:
      >>> contexts, labels = next(next_word_batches(np.arange(100), batch_size=4, sequence_length=3, seed=1))
      >>> contexts.shape, (labels == contexts[:, -1] + 1).all()
      ((4, 3), np.True_)
    """
    if split not in SPLITS:
        raise ValueError(f"next_word_batches: split={split!r} is none of {SPLITS}.")
    cut = len(word_ids) - round(len(word_ids) * validation_fraction)
    word_ids = _narrow("next_word_batches", word_ids)
    part = word_ids[:cut] if split == "train" else word_ids[cut:]
    num_windows = len(part) - sequence_length
    needed = 1 if split == "train" else batch_size
    if num_windows < needed:
        raise ValueError(
            f"next_word_batches: the {split} part has {len(part)} words, but batch_size={batch_size} and "
            f"sequence_length={sequence_length} need {sequence_length + needed}; give more words, smaller "
            f"sizes, or another validation_fraction (now {validation_fraction})."
        )
    whole = num_windows // batch_size
    if split == "train":
        generator = np.random.Generator(np.random.PCG64(seed))
        starts = (generator.integers(0, num_windows, size=batch_size) for _ in range(num_batches or max(1, whole)))
    else:
        starts = (batch * batch_size + np.arange(batch_size) for batch in range(min(num_batches or whole, whole)))
    windows = (part[first[:, None] + np.arange(sequence_length + 1)] for first in starts)
    return ((words[:, :-1], words[:, -1]) for words in windows)


def _narrow(where: str, word_ids: Any) -> np.ndarray:
    narrow = np.asarray(word_ids).astype(np.int32)
    if (narrow != np.asarray(word_ids)).any():
        raise ValueError(f"{where}: word_ids must fit int32; give ids from 0 to below the size of a vocabulary.")
    return narrow


@validated
def unigram_entropy(word_ids: Int[np.ndarray, " words"], vocabulary_size: int) -> float:
    """Entropy of the words' frequencies, in nats: the loss of a model that knows them and sees no context.

    Args:
      word_ids: the text.
      vocabulary_size: number of ids; every id must be below it.

    Raises: ValueError: there is no word, or an id is out of range.

    Example:
      >>> round(unigram_entropy(np.array([0, 1, 0, 1]), 2), 4)
      0.6931
    """
    if len(word_ids) == 0:
        raise ValueError("unigram_entropy: no words; give at least one id.")
    if np.min(word_ids) < 0 or np.max(word_ids) >= vocabulary_size:
        raise ValueError(
            f"unigram_entropy: ids reach from {np.min(word_ids)} to {np.max(word_ids)}, outside "
            f"vocabulary_size={vocabulary_size}; pass the size that the text was loaded with."
        )
    counts = np.bincount(word_ids, minlength=vocabulary_size)
    frequencies = counts[counts > 0] / len(word_ids)
    return float(-np.sum(frequencies * np.log(frequencies)))
