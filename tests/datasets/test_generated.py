"""Tests of generated data, against their laws."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import datasets
from rsembed.datasets.generated import zipf_probabilities


def assert_frequencies(ids, probabilities):
    """Checks that Pearson's statistic is at most five standard deviations above its mean."""
    expected = np.asarray(probabilities) * len(ids)
    counts = np.bincount(ids, minlength=len(expected))
    freedom = len(expected) - 1
    assert np.sum((counts - expected) ** 2 / expected) < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.15, 2.0])
def test_zipf_ids_have_the_bounded_zipf_frequencies(exponent):
    weights = np.arange(1.0, 41.0) ** -exponent
    expected = weights / weights.sum()
    assert_allclose(zipf_probabilities(40, exponent=exponent), expected, rtol=1e-12)
    ids = datasets.zipf_ids(100_000, 40, exponent=exponent, seed=1, shuffle=False)
    assert_frequencies(ids, expected)


def test_shuffling_moves_the_popular_ids_and_depends_on_the_seed_alone():
    ranks = datasets.zipf_ids(2000, 500, seed=4, shuffle=False)
    ids = datasets.zipf_ids(2000, 500, seed=4)
    pairs = set(zip(ranks.tolist(), ids.tolist(), strict=True))
    assert len(pairs) == len(set(ranks.tolist())) == len(set(ids.tolist()))
    assert_array_equal(datasets.zipf_ids(700, 500, seed=4), ids[:700])
    assert (datasets.zipf_ids(2000, 500, seed=5) != ids).any()


def test_ten_million_ids_are_drawn_exactly():
    ids = datasets.zipf_ids(2000, 10_000_000, exponent=0.0, seed=0)
    assert len(set(ids.tolist())) > 1990
    assert abs(ids.mean() / 5e6 - 1) < 0.1
    assert ids.max() < 10_000_000


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 30), st.floats(0.0, 8.0), st.integers(0, 2**40))
def test_zipf_ids_lie_in_the_vocabulary(num_ids, vocabulary_size, exponent, seed):
    ids = datasets.zipf_ids(num_ids, vocabulary_size, exponent=exponent, seed=seed)
    assert (ids.shape, ids.dtype) == ((num_ids,), np.int32)
    assert all(0 <= number < vocabulary_size for number in ids.tolist())


def test_click_logs_have_the_declared_shapes():
    def drawn(**options):
        return datasets.synthetic_clicks(
            50, vocabulary_sizes=(7, 11), num_dense=3, seed=0, **options
        )

    clicks = drawn()
    assert list(clicks.sparse) == ["sparse_0", "sparse_1"]
    for ids, size in zip(clicks.sparse.values(), (7, 11), strict=True):
        assert (ids.shape, ids.dtype) == ((50,), np.int32)
        assert ids.min() >= 0 and ids.max() < size
    assert (clicks.dense.shape, clicks.dense.dtype) == ((50, 3), np.float32)
    assert (clicks.labels.dtype, set(clicks.labels.tolist())) == (np.int32, {0, 1})
    assert (clicks.dense != drawn(sample_seed=1).dense).any()
    assert datasets.synthetic_clicks(5, num_dense=0, seed=0).dense.shape == (5, 0)


def test_the_true_model_depends_on_the_seed_alone():
    def probability_of_pairs(**options):
        clicks = datasets.synthetic_clicks(vocabulary_sizes=(4, 5), num_dense=0, **options)
        pairs = zip(*(ids.tolist() for ids in clicks.sparse.values()), strict=True)
        return dict(zip(pairs, clicks.click_probability.tolist(), strict=True))

    train = probability_of_pairs(num_samples=1500, seed=6)
    test = probability_of_pairs(num_samples=700, seed=6, sample_seed=1)
    other = probability_of_pairs(num_samples=700, seed=7)
    assert len(test) > 15
    for pair in train.keys() & test.keys():
        assert train[pair] == pytest.approx(test[pair], abs=1e-12)
    for pair in train.keys() & other.keys():
        assert train[pair] != pytest.approx(other[pair], abs=1e-6)


def test_equal_seeds_generate_equal_labels():
    one, two = (datasets.synthetic_clicks(1500, seed=6) for _ in range(2))
    assert_array_equal(one.labels, two.labels)


def test_best_and_base_log_loss_are_what_redrawn_labels_give():
    clicks = datasets.synthetic_clicks(4000, seed=8)
    labels = np.random.default_rng(0).random((100, 4000)) < clicks.click_probability
    for probability, expected in (
        (clicks.click_probability, clicks.best_log_loss),
        (clicks.click_probability.mean(), clicks.base_rate_log_loss),
    ):
        losses = np.where(labels, -np.log(probability), -np.log1p(-probability)).mean(axis=1)
        assert abs(losses.mean() - expected) < 5 * losses.std() / math.sqrt(100)
    assert clicks.best_log_loss < clicks.base_rate_log_loss - 0.05


def test_labels_follow_the_click_probability():
    clicks = datasets.synthetic_clicks(20_000, seed=11)
    for members in np.array_split(np.argsort(clicks.click_probability), 10):
        probability = clicks.click_probability[members]
        deviation = math.sqrt(np.sum(probability * (1 - probability))) / len(members)
        assert abs(clicks.labels[members].mean() - probability.mean()) < 5 * deviation


def test_every_data_set_is_shown_in_one_line_with_its_sizes():
    text = datasets.shakespeare(source="generated")
    shown = {
        repr(datasets.generated_ratings(10, 80, seed=0)): "of 80 items by 10 users",
        repr(datasets.synthetic_clicks(100, num_dense=2, seed=0)): "100 samples with 3 ids and 2 n",
        repr(text): f"{len(text.word_ids):,} words, vocabulary of {len(text.vocabulary)}",
        repr(datasets.word_vectors(["a 1 2", "b 3 4"], ["a"], dim=2)): "1 of 1 words found among 2",
    }
    for line, sizes in shown.items():
        assert sizes in line
        assert len(line) < 150 and "\n" not in line
