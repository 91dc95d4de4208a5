"""Batches are windows of the text, and the entropy is that of its words."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from rsembed import datasets


@pytest.mark.parametrize("batch_size", [1, 4, 8, 23], ids="{}_windows".format)
def test_tutorial_batches_are_the_first_windows_and_wrap_at_the_end(batch_size):
    word_ids = np.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 0], np.int32)
    features, labels = datasets.word_id_batches(word_ids, 3, batch_size, 4, 2)
    assert sorted(features) == ["words_0", "words_1"]
    for table, step in itertools.product(features, range(3)):
        assert features[table][step].shape == (batch_size, 4, 1)
        assert features[table][step].dtype == labels[step].dtype == np.int32
        for b in range(batch_size):
            assert [int(features[table][step][b, s, 0]) for s in range(4)] == [
                int(word_ids[(b + s) % 10]) for s in range(4)
            ]
            assert labels[step][b] == word_ids[(b + 4) % 10]


def test_tutorial_batches_share_one_array_that_cannot_be_written():
    features, labels = datasets.word_id_batches(np.arange(9), 2, 2, 3, 1)
    for array in (features["words_0"][0], labels[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


# In these texts every word is its own position, so ids tell where a window was cut.


def test_training_windows_are_consecutive_words_of_the_first_part():
    starts = Counter()
    for contexts, labels in datasets.next_word_batches(
        np.arange(50), batch_size=16, sequence_length=4, num_batches=100, seed=3, validation_fraction=0.2
    ):
        assert contexts.shape == (16, 4)
        assert contexts.dtype == labels.dtype == np.int32
        np.testing.assert_array_equal(contexts, contexts[:, :1] + np.arange(4))
        np.testing.assert_array_equal(labels, contexts[:, 0] + 4)
        starts.update(contexts[:, 0].tolist())
    # 40 words for training hold the labels 4 to 39: every window is met, and none beyond.
    assert sorted(starts) == list(range(36))


def test_validation_windows_follow_each_other_and_never_meet_training_words():
    batches = list(
        datasets.next_word_batches(
            np.arange(100), batch_size=5, sequence_length=3, split="validation", validation_fraction=0.2
        )
    )
    # 20 words hold 17 windows: three full batches, and a rest of two windows that is left out.
    assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(83, 98))
    assert min(int(contexts.min()) for contexts, _ in batches) == 80
    train = datasets.next_word_batches(
        np.arange(100), batch_size=64, sequence_length=3, num_batches=20, validation_fraction=0.2
    )
    assert max(int(labels.max()) for _, labels in train) == 79


def test_equal_seeds_give_equal_batches_and_other_seeds_do_not():
    def draw(seed):
        batches = datasets.next_word_batches(np.arange(500), batch_size=8, sequence_length=5, seed=seed)
        return np.concatenate([contexts for contexts, _ in batches])

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()


def test_the_number_of_batches_defaults_to_one_pass_and_is_capped_for_validation():
    def count(**options):
        return len(list(datasets.next_word_batches(np.arange(103), sequence_length=3, **options)))

    assert count(batch_size=10, validation_fraction=0.0) == 10
    assert count(batch_size=1000, validation_fraction=0.0) == 1
    assert count(batch_size=10, validation_fraction=0.0, num_batches=25) == 25
    assert count(batch_size=10, validation_fraction=0.5, split="validation", num_batches=2) == 2
    assert count(batch_size=10, validation_fraction=0.5, split="validation", num_batches=99) == 4


def test_unigram_entropy_is_the_mean_surprise_of_the_words():
    word_ids = np.array([0, 3, 3, 1, 3, 0, 5], np.int32)
    share = {word: count / 7 for word, count in Counter(word_ids.tolist()).items()}
    expected = sum(-math.log(share[int(word)]) for word in word_ids) / 7
    assert datasets.unigram_entropy(word_ids, 10) == pytest.approx(expected, rel=1e-12)
    assert datasets.unigram_entropy(np.arange(64), 64) == pytest.approx(math.log(64), rel=1e-12)
    assert datasets.unigram_entropy(np.zeros(5, np.int32), 1) == 0.0
