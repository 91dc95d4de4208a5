import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tt import TTSpec, fine_tune


@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_row_of_a_table_of_16_million_can_be_drawn(is_weighted):
    num_rows = 2**24
    spec = TTSpec(num_rows, (4096, 4096), (1, 1), (1,))
    cores = tuple(jnp.asarray(np.zeros(shape, np.float32)) for shape in spec.core_shapes)
    weights = np.ones(num_rows) if is_weighted else None
    table = np.zeros((num_rows, 1), np.float32)
    table[::2] = 1.0  # float32 numbers in [0, 1) name every second row only: then the loss would be 0 or 2
    _, losses = fine_tune(spec, cores, table, key=jax.random.key(0), row_weights=weights, num_steps=4)
    assert np.mean(losses) == pytest.approx(1.0, abs=0.05)


def test_rows_are_drawn_in_proportion_to_their_weights_and_never_without_one():
    spec = TTSpec(6, (2, 3), (1, 1), (1,))
    cores = tuple(jnp.asarray(np.zeros(shape, np.float32)) for shape in spec.core_shapes)
    weights = np.asarray([0.0, 1.0, 0.0, 6.0, 3.0, 0.0])
    for row, share in enumerate(weights / weights.sum()):
        table = np.ones((6, 1), np.float32)
        table[row] = 3.0  # the mean square is 1 + 8 share, and so is that of the drawn rows
        _, losses = fine_tune(spec, cores, table, key=jax.random.key(1), row_weights=weights, num_steps=5)
        assert np.mean(losses) == pytest.approx(1.0, abs=0.03)
        if not share:
            np.testing.assert_array_equal(losses, np.ones(5, np.float32))


def test_equal_keys_draw_equal_rows_in_one_piece_or_in_several(monkeypatch):
    spec = TTSpec(6, (2, 3), (1, 2), (1,))
    cores = tuple(jnp.asarray(np.full(shape, 0.5, np.float32)) for shape in spec.core_shapes)
    table = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)

    def tuned(seed):
        new, losses = fine_tune(spec, cores, table, key=jax.random.key(seed), num_steps=5, batch_rows=8)
        return np.concatenate([*(np.ravel(core) for core in new), losses])

    whole = tuned(3)
    np.testing.assert_array_equal(tuned(3), whole)
    assert (tuned(4) != whole).any()
    monkeypatch.setattr("rsembed.tt.fine_tuning.DRAWS_AT_ONCE", 16)
    np.testing.assert_array_equal(tuned(3), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": -1}, "num_steps=-1 must be at least 0"),
        ({"batch_rows": 0}, "batch_rows=0 at least 1"),
        ({"learning_rate": -0.1}, "learning_rate must be in .* got -0.1"),
        ({"learning_rate": float("nan")}, "learning_rate must be in .* got nan"),
        ({"row_weights": np.asarray([1.0, np.nan])}, "row_weights must be 2 numbers, finite"),
    ],
)
def test_numbers_without_a_meaning_are_refused(options, message):
    spec = TTSpec(2, (1, 2), (1, 1), (1,))
    cores = tuple(jnp.asarray(np.ones(shape, np.float32)) for shape in spec.core_shapes)
    with pytest.raises(ValueError, match=message):
        fine_tune(spec, cores, np.ones((2, 1), np.float32), key=jax.random.key(0), **options)
