"""Next-word samples: windows of a text and the word that follows each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int, Int32

from rsembed.checks import NonNegativeInt, PositiveInt, validated

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
