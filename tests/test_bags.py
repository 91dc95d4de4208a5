import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
from rsembed.bags import Bags, as_bags

ROWS = [[3, 1], [], [4], [2, 2, 0]]


def test_a_column_that_numpy_cannot_read_is_refused_by_the_name_of_its_feature():
    # A tensor of torch raises this error if it requires a gradient.
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    with pytest.raises(RuntimeError, match="feature 'f': Can't call numpy"):
        as_bags(Tensor(), feature="f")


class Bfloat16Tensor:
    """Like a bfloat16 tensor of torch: NumPy cannot read it, and JAX reads it by DLPack."""

    def __init__(self, values):
        self._array = jnp.asarray(values, jnp.bfloat16)

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_bfloat16_tensors_of_torch_are_weights_and_tables():
    weights = Bfloat16Tensor([[1.5, 2.0], [0.25, 4.0]])
    pair = as_bags((np.ones((2, 2), int), weights), feature="f")
    assert_array_equal(pair.weights, np.float32([1.5, 2.0, 0.25, 4.0]))
    table = rs.TableSpec("t", 2, 2, dtype="bfloat16")
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    state = collection.with_tables(collection.init(jax.random.key(0)), {"t": weights})
    assert_array_equal(collection.tables(state)["t"], weights._array)
    module = rs.tbe.TableBatchedEmbeddingBags(
        [(2, 2, rs.tbe.EmbeddingLocation.HOST, rs.tbe.ComputeDevice.CPU)]
    )
    module.set_embedding_weights(0, weights)
    assert_array_equal(module.split_embedding_weights()[0], np.float32(weights._array))


LARGE_IDS = [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**64]
NO_PLAIN_IDS = [True, False, None, 1.5, "1", b"i", [2], np.int64(5)]


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(
        st.lists(
            st.one_of(st.integers(-2, 300), st.sampled_from(LARGE_IDS + NO_PLAIN_IDS)), max_size=4
        ),
        max_size=4,
    )
)
@hypothesis.example([[], []])
@hypothesis.example([[1, [2]], []])
# `marshal` writes lists and integers with the letters "[" and "i", which have the codes 91 and 105.
@hypothesis.example([[91, 105], [False] * 5])
def test_lists_mean_what_tuples_mean_that_are_read_row_by_row(rows):
    def result(rows):
        try:
            return Bags.from_lists(rows).to_lists()
        except (TypeError, ValueError) as error:
            return type(error)

    assert result(rows) == result([tuple(row) for row in rows])


def test_a_jagged_pair_is_not_copied():
    values, lengths = np.arange(5, dtype=np.int32), np.array([2, 0, 1, 2], np.int32)
    batch = rs.Jagged(values, lengths, features=["a", "b"])
    assert np.shares_memory(batch.bags.ids, values) and np.shares_memory(batch["b"].ids, values)
    assert batch.features == ("a", "b") and batch["b"].to_lists() == [[2], [3, 4]]


def test_weights_follow_their_ids():
    weights = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0]]
    assert_array_equal(Bags.from_lists(ROWS, weights).weights, [1, 2, 3, 4, 5, 6])
    dense = Bags.from_dense(np.array([[1, 2], [3, -1]]), [[1, 2], [3, 0.5]])
    assert_array_equal(dense.weights, np.float32([1, 2, 3, 0.5]))
    coo = Bags.from_coo([3, 0], [7, 8], [0.5, 0.25], num_samples=4)
    assert_array_equal(coo.weights, [0.25, 0.5])
    pair = as_bags((np.ones((2, 2), int), [[1.0, 2.0], [3.0, 4.0]]), feature="f")
    assert_array_equal(pair.weights, [1, 2, 3, 4])


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8), st.integers(0, 5))
def test_lists_survive_the_round_trip_with_any_padding(rows, extra):
    bags = Bags.from_lists(rows)
    assert bags.pad_to(bags.ids.shape[0] + extra).to_lists() == rows
    assert bags.num_bags == len(rows)
