import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.tt import (
    TTSpec,
    from_dense,
    from_tensorly,
    full_weight,
    init_cores,
    round_cores,
    to_tensorly,
)
from tests.tt.tt_oracles import dense_table
from tests.world import assert_same

SHAPES = {2: ((12, 9), (4, 3)), 3: ((6, 5, 4), (2, 3, 2)), 4: ((4, 3, 3, 3), (2, 1, 3, 2))}


def spec_of(d, rank, rows=101):
    return TTSpec(rows, *SHAPES[d], (rank,) * (d - 1))


def exact(d, rows=101):
    """Spec with ranks that can hold any table of this shape."""
    spec = spec_of(d, 1, rows)
    return dataclasses.replace(spec, tt_ranks=spec.max_ranks)


def random_table(rows=101, dim=12, decay=0.0, seed=0):
    table = np.random.default_rng(seed).normal(size=(rows, dim)) * np.exp(-decay * np.arange(dim))
    return table.astype(np.float32)


def unfolding_tails(table, p, q):
    """Singular values of each unfolding of the padded table, computed by numpy."""
    d = len(p)
    padded = np.zeros((math.prod(p), table.shape[1]))
    padded[: len(table)] = table
    tensor = padded.reshape(*p, *q).transpose([axis for t in range(d) for axis in (t, d + t)])
    sizes = [a * b for a, b in zip(p, q, strict=True)]
    return [
        np.linalg.svd(tensor.reshape(math.prod(sizes[:t]), -1), compute_uv=False)
        for t in range(1, d)
    ]


def error(spec, cores, table):
    return np.linalg.norm(dense_table(spec, cores) - table) / np.linalg.norm(table)


@pytest.mark.parametrize("d", SHAPES)
def test_full_ranks_are_exact_and_larger_ones_are_filled_with_zeros(d):
    table = random_table()
    spec, cores = exact(d), from_dense(exact(d), table)
    assert_allclose(dense_table(spec, cores), table, atol=2e-5)
    larger = dataclasses.replace(spec, tt_ranks=[rank + 2 for rank in spec.tt_ranks])
    wide = from_dense(larger, table)
    assert_array_equal(dense_table(larger, wide), dense_table(spec, cores))
    for actual, wanted in zip(wide, cores, strict=True):
        assert np.count_nonzero(actual) == np.count_nonzero(wanted)


@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize("wanted", [0.05, 0.4, 0.9])
def test_an_error_is_kept_at_ranks_no_larger_than_needed(d, wanted):
    p, q = SHAPES[d]
    table = np.zeros((math.prod(p), 12), np.float32)
    table[:101] = 1 / (1 + np.arange(101)[:, None] % 10 + np.arange(12))
    whole = exact(d, math.prod(p))
    spec, cores = round_cores(whole, from_dense(whole, table), max_relative_error=wanted)
    assert error(spec, cores, table) <= wanted
    tail = wanted * np.linalg.norm(table) / math.sqrt(d - 1)
    for rank, values in zip(spec.tt_ranks, unfolding_tails(table, p, q), strict=True):
        needed = min(r for r in range(1, values.size + 1) if np.linalg.norm(values[r:]) <= tail)
        assert rank <= needed


@pytest.mark.parametrize("d", SHAPES)
def test_fixed_ranks_lie_within_the_bounds_of_the_unfoldings(d):
    p, q = SHAPES[d]
    table, spec = random_table(decay=0.2), spec_of(d, 3)
    cores, whole = from_dense(spec, table), spec_of(d, 3, rows=math.prod(p))
    tails = [np.linalg.norm(values[3:]) for values in unfolding_tails(table, p, q)]
    padded = np.pad(table, [(0, math.prod(p) - 101), (0, 0)])
    distance = np.linalg.norm(dense_table(whole, cores) - padded)
    assert max(tails) * (1 - 1e-5) <= distance <= np.linalg.norm(tails) * (1 + 1e-5)


def test_rounding_to_ranks_equals_decomposing_the_padded_table():
    table, wide = random_table(120, decay=0.2), spec_of(3, 9, rows=120)
    cores = from_dense(wide, table)
    spec, rounded = round_cores(wide, cores, ranks=np.array([3, 4]))
    assert spec == TTSpec(120, *SHAPES[3], (3, 4))
    direct = from_dense(spec, dense_table(wide, cores).astype(np.float32))
    assert_allclose(dense_table(spec, rounded), dense_table(spec, direct), atol=1e-3)
    fewer, cut = round_cores(wide, cores, ranks=[3, 4], max_relative_error=0.9)
    assert max(fewer.tt_ranks) < 4 and error(fewer, cut, table) < 0.95


def test_tensorly_and_back():
    spec = TTSpec(101, *SHAPES[3], (3, 4))
    cores = init_cores(jax.random.key(0), spec)
    theirs = to_tensorly(spec, cores)
    assert_allclose(theirs.to_matrix()[:101], full_weight(spec, cores), rtol=1e-4, atol=1e-6)
    back_spec, back = from_tensorly(theirs, 101)
    assert back_spec == spec
    assert_same(tuple(back), tuple(cores))


def test_jax_stays_in_32_bits_and_tensorly_in_numpy():
    import tensorly

    to_tensorly(spec_of(3, 3), from_dense(spec_of(3, 3), random_table()))
    assert "tensorly" in sys.modules
    assert not jax.config.jax_enable_x64
    assert jnp.ones(1).dtype == jnp.float32
    assert tensorly.get_backend() == "numpy"
