import jax
import jax.numpy as jnp
import numpy as np
import optax

import rsembed as rs
from rsembed.kernels.contract import NO_ROW
from tests.oracles import dense_gradients


def gradients(rows, values, num_rows=9, name="t"):
    rows, values = jnp.asarray(rows, jnp.int32), jnp.asarray(values, jnp.float32)
    return rs.RowGradients({name: rows}, {name: values}, ((name, num_rows),))


def test_combine_adds_equal_rows_and_keeps_ascending_order():
    one = gradients([2, 5, NO_ROW], [[1.0], [2.0], [0.0]])
    two = gradients([0, 5], [[4.0], [8.0]])
    both = rs.combine(one, two)
    assert both.rows["t"].tolist() == [0, 2, 5, NO_ROW, NO_ROW]
    assert both.values["t"][:, 0].tolist() == [4.0, 1.0, 10.0, 0.0, 0.0]
    assert int(both.num_touched()["t"]) == 3


def test_capacity_never_exceeds_the_table():
    parts = [gradients([0, 1], [[1.0], [1.0]], num_rows=2) for _ in range(3)]
    both = rs.combine(*parts)
    assert both.rows["t"].tolist() == [0, 1]
    assert both.values["t"][:, 0].tolist() == [3.0, 3.0]


def test_norm_scale_and_clip_agree_with_optax_on_dense_gradients():
    own = gradients([1, 3, NO_ROW], [[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    dense = dense_gradients(own)
    np.testing.assert_allclose(rs.global_norm(own), optax.tree.norm(dense))
    clipped = dense_gradients(rs.clip_by_global_norm(own, 1.0))["t"]
    expected, _ = optax.clip_by_global_norm(1.0).update(dense, optax.EmptyState())
    np.testing.assert_allclose(clipped, expected["t"], rtol=1e-6)
    np.testing.assert_array_equal(rs.clip_by_global_norm(own, 6.0).values["t"], own.values["t"])
    np.testing.assert_allclose(rs.global_norm(rs.clip_by_global_norm(own, 6.5, other_norm=12.0)), 2.5, rtol=1e-6)
    np.testing.assert_array_equal(rs.scale(own, 0.5).values["t"], own.values["t"] / 2)


def test_clipping_zero_gradients_gives_zeros():
    own = rs.clip_by_global_norm(gradients([1], [[0.0]]), 1.0)
    assert own.values["t"].tolist() == [[0.0]]


def test_what_somebody_puts_into_row_gradients_is_applied_inside_jit_too():
    table = rs.TableSpec("t", 9, 2, optimizer=rs.optimizers.SGD(1.0))
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    state, batch = collection.init(jax.random.key(0)), collection.prepare({"f": [[1, 2], [2]]})

    def step(state, batch):
        _, pullback = collection.lookup_vjp(state, batch)
        own = pullback({"f": jnp.ones((2, 2))})
        own.values["t"] = jnp.where(own.rows["t"][:, None] == 1, own.values["t"], 0.0)  # row 2 is not to be trained
        return collection.apply(state, own), rs.global_norm(own)

    eager, compiled = step(state, batch), jax.jit(step)(state, batch)
    for stepped, norm in (eager, compiled):
        moved = collection.tables(state)["t"] - collection.tables(stepped)["t"]
        np.testing.assert_allclose(moved, np.eye(9)[:, [1, 1]], rtol=1e-6)
        np.testing.assert_allclose(norm, 2**0.5, rtol=1e-6)
