"""Batches are windows of the text."""

import itertools

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
