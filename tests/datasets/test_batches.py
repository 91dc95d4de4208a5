"""Batches of words are windows of the text."""

import numpy as np
import pytest

from rsembed import datasets


@pytest.mark.parametrize("batch_size", [1, 4, 8, 23], ids="{}_windows".format)
def test_tutorial_batches_are_the_first_windows_and_wrap_at_the_end(batch_size):
    word_ids = np.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 0], np.int32)
    features, labels = datasets.word_id_batches(word_ids, 3, batch_size, 4, 2)
    assert sorted(features) == ["words_0", "words_1"]
    positions = np.arange(batch_size)[:, None] + np.arange(5)
    windows = word_ids[positions % 10]
    for table in features:
        for step in range(3):
            assert features[table][step].dtype == labels[step].dtype == np.int32
            np.testing.assert_array_equal(features[table][step], windows[:, :4, None])
            np.testing.assert_array_equal(labels[step], windows[:, 4])


def test_tutorial_batches_share_one_array_that_cannot_be_written():
    features, labels = datasets.word_id_batches(np.arange(9), 2, 2, 3, 1)
    for array in (features["words_0"][0], labels[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
