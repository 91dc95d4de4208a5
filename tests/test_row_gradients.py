import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.kernels.contract import NO_ROW
from tests.oracles import dense_gradients


def gradients(rows, values, num_rows=9):
    rows, values = jnp.asarray(rows, jnp.int32), jnp.asarray(values, jnp.float32)
    return rs.RowGradients({"t": rows}, {"t": values}, (("t", num_rows),))


def test_combine_adds_equal_rows_and_keeps_ascending_order():
    one = gradients([2, 5, NO_ROW], [[1.0], [2.0], [0.0]])
    two = gradients([0, 5], [[4.0], [8.0]])
    both = rs.combine(one, two)
    values = [[4.0], [1.0], [10.0], [0.0], [0.0]]
    assert_same(both, gradients([0, 2, 5, NO_ROW, NO_ROW], values))
    assert int(both.num_touched()["t"]) == 3


def test_capacity_never_exceeds_the_table():
    parts = [gradients([0, 1], [[1.0], [1.0]], num_rows=2) for _ in range(3)]
    assert_same(rs.combine(*parts), gradients([0, 1], [[3.0], [3.0]], num_rows=2))


def test_norm_scale_and_clip_agree_with_optax_on_dense_gradients():
    row_grads = gradients([1, 3, NO_ROW], [[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    dense = dense_gradients(row_grads)
    assert_allclose(rs.global_norm(row_grads), optax.tree.norm(dense))
    clipped = dense_gradients(rs.clip_by_global_norm(row_grads, 1.0))["t"]
    expected, _ = optax.clip_by_global_norm(1.0).update(dense, optax.EmptyState())
    assert_allclose(clipped, expected["t"], rtol=1e-6)
    assert_array_equal(rs.clip_by_global_norm(row_grads, 6.0).values["t"], row_grads.values["t"])
    assert_allclose(
        rs.global_norm(rs.clip_by_global_norm(row_grads, 6.5, other_norm=12.0)), 2.5, rtol=1e-6
    )
    zero = gradients([1], [[0.0]])
    assert_array_equal(rs.clip_by_global_norm(zero, 1.0).values["t"], [[0.0]])
    assert_array_equal(rs.scale(row_grads, 0.5).values["t"], row_grads.values["t"] / 2)


def test_what_somebody_puts_into_row_gradients_is_applied_inside_jit_too():
    table = rs.TableSpec("t", 9, 2, optimizer=rs.optimizers.SGD(1.0))
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    state, batch = collection.init(jax.random.key(0)), collection.prepare({"f": [[1, 2], [2]]})

    def step(state, batch):
        _, pullback = collection.lookup_vjp(state, batch)
        row_grads = pullback({"f": jnp.ones((2, 2))})
        # Only row 1 is trained.
        row_grads.values["t"] = jnp.where(
            row_grads.rows["t"][:, None] == 1, row_grads.values["t"], 0.0
        )
        return collection.apply(state, row_grads), rs.global_norm(row_grads)

    for stepped, norm in (step(state, batch), jax.jit(step)(state, batch)):
        moved = collection.tables(state)["t"] - collection.tables(stepped)["t"]
        assert_allclose(moved, np.eye(9)[:, [1, 1]], rtol=1e-6)
        assert_allclose(norm, 2**0.5, rtol=1e-6)


def assert_same(actual, expected):
    assert actual.num_rows == expected.num_rows
    for name in expected.values:
        assert_array_equal(actual.rows[name], expected.rows[name])
        assert_array_equal(actual.values[name], expected.values[name])


def keyed(rows):
    """Gradients of keys. Each row of `rows` has the halves of a key, and how often it occurred."""
    lanes, values = jnp.asarray(rows, jnp.uint32), jnp.ones((len(rows), 1))
    return rs.RowGradients({"t": lanes}, {"t": values}, (("t", 9),))


def test_operators_are_combine_and_scale():
    one, two = gradients([2, 5], [[1.0], [2.0]]), gradients([0, 5], [[4.0], [8.0]])
    assert_same(one + two, rs.combine(one, two))
    assert_same(sum([one, two, one]), rs.combine(rs.combine(one, two), one))
    for half in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5)):
        assert_same(one * half, rs.scale(one, 0.5))
        assert_same(half * one, rs.scale(one, 0.5))
        assert_same(one / (1 / half), rs.scale(one, 0.5))
    assert_same(jax.jit(lambda a, b: (a + b) / 2)(one, two), rs.scale(rs.combine(one, two), 0.5))


@pytest.mark.parametrize(
    "row_grads", [gradients([1, 3, NO_ROW], [[1.0], [2.0], [0.0]]), keyed([[0, 7, 2], [0, 0, 0]])]
)
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda row_grads: pickle.loads(pickle.dumps(row_grads)),
        lambda row_grads: jax.tree.map(jnp.copy, row_grads),
        jax.jit(lambda row_grads: row_grads),
        jax.device_get,
        lambda row_grads: jax.lax.scan(lambda carry, _: (carry, None), row_grads, None, length=2)[
            0
        ],
    ],
)
def test_copies_are_the_same_gradients(row_grads, copied):
    assert_same(copied(row_grads), row_grads)


def test_row_numbers_are_read_as_integers_and_replaced_as_a_whole():
    row_grads = gradients([1, NO_ROW], [[1.0], [0.0]])
    assert row_grads.rows["t"].dtype == jnp.int32
    for array in (jnp.array([2, 4]), np.array([2, 4], np.int16), np.array([2, 4], np.uint64)):
        assert dataclasses.replace(row_grads, rows={"t": array}).rows["t"].tolist() == [2, 4]
    assert jax.jit(lambda row_grads: row_grads.rows)(row_grads)["t"].tolist() == [
        1,
        NO_ROW,
    ]
    assert pickle.loads(pickle.dumps(row_grads.rows))["t"].tolist() == [1, NO_ROW]


@pytest.mark.parametrize("row_grads", [gradients([1, 3], [[1.0], [2.0]]), keyed([[0, 7, 2]])])
def test_zeros_like_gradients_are_gradients_of_no_row(row_grads):
    for zeros in (
        jax.tree.map(jnp.zeros_like, row_grads),
        optax.tree.zeros_like(row_grads),
    ):
        assert int(zeros.num_touched()["t"]) == 0
        total = zeros + row_grads
        assert_array_equal(total.rows["t"][: row_grads.num_touched()["t"]], row_grads.rows["t"])


def test_gradients_in_a_file_are_the_same_gradients(tmp_path):
    accumulated = {
        "one": gradients([1, 3], [[1.0], [2.0]]),
        "two": keyed([[0, 7, 2]]),
        "key": jax.random.key(3),
    }
    checkpoint.save(tmp_path / "saved", accumulated)
    restored = checkpoint.load(
        tmp_path / "saved", like=jax.tree.map(jnp.zeros_like, accumulated)
    ).tree
    for name in ("one", "two"):
        assert_same(restored[name], accumulated[name])
    assert restored["key"] == accumulated["key"]
