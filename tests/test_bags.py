import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.bags import Bags, as_bags

ROWS = [[3, 1], [], [4], [2, 2, 0]]


class Column:
    """What other libraries have, as numpy sees it."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype, copy=copy)


def same(bags, rows):
    assert bags.to_lists() == rows


def test_every_form_of_input_gives_the_same_bags():
    flat, lengths = [3, 1, 4, 2, 2, 0], [2, 0, 1, 3]
    same(Bags.from_lists(ROWS), ROWS)
    same(Bags.from_lists([np.asarray(row, np.int64) for row in ROWS]), ROWS)
    same(Bags.from_lengths(flat, lengths), ROWS)
    same(Bags.from_lengths(Column(flat), Column(lengths)), ROWS)
    same(Bags.from_coo([0, 0, 2, 3, 3, 3], flat, num_samples=4), ROWS)
    same(Bags.from_coo(Column([0, 0, 2, 3, 3, 3]), Column(flat), num_samples=4), ROWS)
    same(Bags.from_coo([3, 2, 0, 3, 0, 3], [2, 4, 3, 2, 1, 0], num_samples=4), ROWS)
    same(Bags.from_sparse_tensor([[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]], flat, (4, 3)), ROWS)
    dense = np.asarray([[3, 1, -1], [-1, -1, -1], [4, -1, -1], [2, 2, 0]])
    same(Bags.from_dense(dense), ROWS)
    same(as_bags(ROWS, feature="f"), ROWS)
    same(as_bags(np.asarray(ROWS, dtype=object), feature="f"), ROWS)
    same(as_bags(dense, feature="f"), ROWS)
    same(as_bags([3, 1], feature="f"), [[3], [1]])
    same(as_bags(Column(dense), feature="f"), ROWS)
    same(as_bags(Column(np.asarray(ROWS, dtype=object)), feature="f"), ROWS)
    same(jax.jit(Bags.from_dense)(jnp.asarray(dense)), ROWS)


def test_a_column_that_numpy_cannot_read_is_refused_by_the_name_of_its_feature():
    class Tensor:  # of torch, with a gradient or a sign to be resolved
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    with pytest.raises(RuntimeError, match="feature 'f': Can't call numpy"):
        as_bags(Tensor(), feature="f")


def test_weights_follow_their_ids():
    weights = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0]]
    np.testing.assert_array_equal(Bags.from_lists(ROWS, weights).weights, [1, 2, 3, 4, 5, 6])
    coo = Bags.from_coo([3, 0], [7, 8], [0.5, 0.25], num_samples=4)
    np.testing.assert_array_equal(coo.weights, [0.25, 0.5])
    pair = as_bags((np.ones((2, 2), int), [[1.0, 2.0], [3.0, 4.0]]), feature="f")
    np.testing.assert_array_equal(pair.weights, [1, 2, 3, 4])


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8), st.integers(0, 5))
def test_lists_survive_the_round_trip_with_any_padding(rows, extra):
    bags = Bags.from_lists(rows)
    same(bags.pad_to(bags.ids.shape[0] + extra), rows)
    assert bags.num_bags == len(rows)
