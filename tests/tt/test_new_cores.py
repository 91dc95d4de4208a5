import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tt import (
    TTSpec,
    from_dense,
    from_tensorly,
    full_weight,
    init_cores,
    round_cores,
    to_tensorly,
)
from tests.tt.tt_oracles import expanded

SHAPES = {2: ((12, 9), (4, 3)), 3: ((6, 5, 4), (2, 3, 2)), 4: ((4, 3, 3, 3), (2, 1, 3, 2))}


def random_table(rows=101, dim=12, decay=0.0, seed=0):
    table = np.random.default_rng(seed).normal(size=(rows, dim)) * np.exp(-decay * np.arange(dim))
    return table.astype(np.float32)


def unfolding_tails(table, p, q):
    """Singular values of every unfolding of the padded table, by NumPy's own SVD."""
    d = len(p)
    padded = np.zeros((math.prod(p), table.shape[1]))
    padded[: len(table)] = table
    tensor = padded.reshape(*p, *q).transpose([axis for t in range(d) for axis in (t, d + t)])
    sizes = [a * b for a, b in zip(p, q, strict=True)]
    return [np.linalg.svd(tensor.reshape(math.prod(sizes[:t]), -1), compute_uv=False) for t in range(1, d)]


def error(spec, cores, table):
    return np.linalg.norm(expanded(spec, cores) - table) / np.linalg.norm(table)


@pytest.mark.parametrize("d", SHAPES)
def test_full_ranks_are_exact(d):
    p, q = SHAPES[d]
    table = random_table()
    spec, cores = from_dense(table, ranks=1000, tt_p_shapes=p, tt_q_shapes=q)
    assert spec.tt_ranks == TTSpec(101, p, q, (1,) * (d - 1)).max_ranks
    np.testing.assert_allclose(expanded(spec, cores), table, atol=2e-5)


@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize("wanted", [0.05, 0.4, 0.9])
def test_an_error_is_kept_at_ranks_no_larger_than_needed(d, wanted):
    p, q = SHAPES[d]
    table = np.float32(1 / (1 + np.arange(101)[:, None] % 10 + np.arange(12)))
    spec, cores = from_dense(table, max_relative_error=wanted, tt_p_shapes=p, tt_q_shapes=q)
    assert error(spec, cores, table) <= wanted
    tail = wanted * np.linalg.norm(table) / math.sqrt(d - 1)
    for rank, values in zip(spec.tt_ranks, unfolding_tails(table, p, q), strict=True):
        needed = min(r for r in range(1, values.size + 1) if np.linalg.norm(values[r:]) <= tail)
        assert rank <= needed


@pytest.mark.parametrize("d", SHAPES)
def test_fixed_ranks_lie_within_the_bounds_of_the_unfoldings(d):
    p, q = SHAPES[d]
    table, ranks = random_table(decay=0.2), [3] * (d - 1)
    spec, cores = from_dense(table, ranks=ranks, tt_p_shapes=p, tt_q_shapes=q)
    tails = [np.linalg.norm(values[3:]) for values in unfolding_tails(table, p, q)]
    padded = np.linalg.norm(full_padded(spec, cores) - np.pad(table, [(0, math.prod(p) - 101), (0, 0)]))
    assert max(tails) * (1 - 1e-5) <= padded <= math.sqrt(sum(t**2 for t in tails)) * (1 + 1e-5)
    assert list(spec.tt_ranks) == ranks


def full_padded(spec, cores):
    whole = TTSpec(math.prod(spec.tt_p_shapes), spec.tt_p_shapes, spec.tt_q_shapes, spec.tt_ranks)
    return expanded(whole, cores)


def test_tensorly_finds_the_same_error_at_the_same_ranks():
    from tensorly.decomposition import tensor_train_matrix

    p, q = SHAPES[3]
    table = random_table(120, decay=0.2)
    spec, cores = from_dense(table, ranks=[4, 5], tt_p_shapes=p, tt_q_shapes=q)
    theirs = tensor_train_matrix(table.reshape(*p, *q), rank=[1, 4, 5, 1])
    assert error(spec, cores, table) == pytest.approx(error(*from_tensorly(theirs), table), rel=1e-3)


def test_bytes_bound_the_cores():
    table = random_table(1000, 16)
    spec, cores = from_dense(table, bytes=20_000, num_cores=3)
    assert sum(core.nbytes for core in cores) == spec.num_bytes() <= 20_000
    assert 0 < error(spec, cores, table) < 1


@pytest.mark.parametrize("d", SHAPES)
def test_rounding_finds_the_ranks_that_are_needed(d):
    p, q = SHAPES[d]
    narrow = TTSpec(101, p, q, (2,) * (d - 1))
    cores = init_cores(jax.random.key(1), narrow)
    wide_spec, wide = from_dense(np.asarray(full_weight(narrow, cores)), ranks=5, tt_p_shapes=p, tt_q_shapes=q)
    assert min(wide_spec.tt_ranks) > 2 or d > 3
    spec, rounded = round_cores(wide_spec, wide, max_relative_error=1e-3)
    assert spec.num_params < wide_spec.num_params
    assert np.linalg.norm(expanded(spec, rounded) - expanded(narrow, cores)) < 2e-3 * np.linalg.norm(
        expanded(narrow, cores)
    )


def test_rounding_to_ranks_equals_decomposing_the_padded_table():
    p, q = SHAPES[3]
    table = random_table(120, decay=0.2)
    wide = from_dense(table, ranks=9, tt_p_shapes=p, tt_q_shapes=q)
    rounded = round_cores(*wide, ranks=[3, 4])
    direct = from_dense(expanded(*wide).astype(np.float32), ranks=[3, 4], tt_p_shapes=p, tt_q_shapes=q)
    np.testing.assert_allclose(expanded(*rounded), expanded(*direct), atol=1e-3)


def test_tensorly_and_back():
    spec = TTSpec(101, *SHAPES[3], (3, 4))
    cores = init_cores(jax.random.key(0), spec)
    theirs = to_tensorly(spec, cores)
    np.testing.assert_allclose(theirs.to_matrix()[:101], full_weight(spec, cores), rtol=1e-4, atol=1e-6)
    back_spec, back = from_tensorly(theirs, 101)
    assert back_spec == spec
    assert all((a == b).all() for a, b in zip(cores, back, strict=True))


def test_jax_stays_in_32_bits_and_tensorly_in_numpy():
    import tensorly

    to_tensorly(*from_dense(random_table(), ranks=3))
    assert "tensorly" in sys.modules
    assert not jax.config.jax_enable_x64
    assert jnp.ones(1).dtype == jnp.float32
    assert tensorly.get_backend() == "numpy"


def test_an_error_target_that_needs_more_numbers_than_the_table_is_refused():
    noise = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    with pytest.raises(ValueError, match=r"needs \d+ numbers in cores, more than the 480 of the table"):
        from_dense(noise, max_relative_error=1e-4, num_cores=3)
    assert from_dense(noise, ranks=np.int64(2))[0].tt_ranks == (2,)


def test_ranks_and_factors_may_be_numbers_and_arrays_of_numpy():
    table = random_table(60, 4)
    spec, cores = from_dense(table, ranks=np.array([2, 3]), tt_p_shapes=np.array([3, 4, 5]))
    assert (spec.tt_ranks, spec.tt_p_shapes) == ((2, 3), (3, 4, 5))
    assert round_cores(spec, cores, ranks=np.int64(2))[0].tt_ranks == (2, 2)
