"""Initial cores give tables with the expected distributions, on tables small enough to expand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tt import TTSpec, init_cores
from tests.tt.tt_oracles import CASES, dense_table
from tests.world import assert_same

SPECS = {
    "d2": TTSpec(3000, (60, 50), (4, 8), (8,)),
    "d3": TTSpec(3000, (15, 20, 10), (4, 4, 2), (8, 12)),
    "d4": TTSpec(3000, (8, 6, 8, 8), (2, 4, 2, 2), (8, 8, 8)),
}


DISTRIBUTIONS = ["normal", "uniform", "approx-normal", "approx-uniform"]


def target_std(spec):
    """Standard deviation of a uniform distribution in [-b, b] with b = 1 / sqrt(number of rows)."""
    return 1 / math.sqrt(3 * spec.num_embeddings)


@functools.cache
def tables(spec, weight_dist, draws=16):
    """Tables of several seeds, in units of `target_std`."""
    draw = functools.partial(init_cores, spec=spec, weight_dist=weight_dist)
    drawn = map(draw, jax.random.split(jax.random.key(5), draws))
    return np.stack([dense_table(spec, cores) for cores in drawn]) / target_std(spec)


@pytest.mark.usefixtures("more_optimizations")
@pytest.mark.parametrize("weight_dist", DISTRIBUTIONS)
def test_cores_have_equal_bits_inside_and_outside_of_jit(weight_dist):
    draw = functools.partial(init_cores, spec=SPECS["d3"], weight_dist=weight_dist)
    key = jax.random.key(7)
    doubled = jax.jit(lambda key: [2 * core for core in draw(key)])(key)
    assert_same(doubled, [2 * np.asarray(core) for core in draw(key)])


def kolmogorov_distance(samples, cumulative):
    ordered = np.sort(samples)
    return np.abs(np.arange(1, ordered.size + 1) / ordered.size - cumulative(ordered)).max()


def test_worked_standard_deviations():
    inputs, expect = CASES["init_variance"]["input"], CASES["init_variance"]["expect"]
    spec = TTSpec.suggest(inputs["n"], 64, inputs["ranks"])
    assert target_std(spec) == pytest.approx(expect["target_std"], rel=1e-6)
    for core in init_cores(jax.random.key(0), spec):
        assert core.std() == pytest.approx(expect["exact_variance_core_std"], rel=0.03)


@pytest.mark.slow_rows(
    *(f"{weight_dist}-{name}" for weight_dist in DISTRIBUTIONS for name in ("d2", "d4"))
)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("weight_dist", DISTRIBUTIONS)
def test_the_table_has_the_target_mean_and_standard_deviation(name, weight_dist):
    actual = tables(SPECS[name], weight_dist)
    assert abs(actual.mean()) < 0.03
    assert actual.std() == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize(("name", "most"), [("d2", 0.01), ("d3", 0.01), ("d4", 0.03)])
def test_approx_normal_tables_are_normal(name, most):
    actual = tables(SPECS[name], "approx-normal").ravel()
    assert kolmogorov_distance(actual[::7], jax.scipy.stats.norm.cdf) < most
    assert (actual**4).mean() / (actual**2).mean() ** 2 == pytest.approx(
        3, abs=0.2 if name != "d4" else 1.0
    )


@pytest.mark.slow_rows(
    "2-0.11-d2", "8-0.04-d3", "16-0.025-d4", "16-0.025-d2", "2-0.11-d4", "8-0.04-d4"
)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("rank", "most"), [(2, 0.11), (8, 0.04), (16, 0.025)])
def test_approx_uniform_tables_come_closer_to_uniform_with_the_rank(name, rank, most):
    spec = dataclasses.replace(SPECS[name], tt_ranks=[rank] * (SPECS[name].num_cores - 1))
    # In units of 1 / sqrt(num_embeddings).
    actual = tables(spec, "approx-uniform", draws=4).ravel() / math.sqrt(3)
    assert kolmogorov_distance(actual, lambda x: np.clip((x + 1) / 2, 0, 1)) < most
    assert np.abs(actual).max() < 1.1


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("weight_dist", DISTRIBUTIONS)
def test_rows_that_share_a_digit_are_uncorrelated(name, weight_dist):
    spec, actual = SPECS[name], tables(SPECS[name], weight_dist)
    rows = np.arange(spec.num_embeddings)
    for stride, p in zip(spec.strides, spec.tt_p_shapes, strict=True):
        # A row and its partner differ only in this digit. The partner has the next digit, or 0
        # after the last digit.
        is_last = rows // stride % p == p - 1
        partners = np.where(is_last, rows - (p - 1) * stride, rows + stride)
        kept = partners < spec.num_embeddings
        ours, theirs = actual[:, kept], actual[:, partners[kept]]
        assert abs((ours * theirs).mean()) < 0.06
        # A row never equals its partner.
        assert np.abs(ours - theirs).max(axis=-1).min() > 1e-3


def test_naive_uniform_keeps_the_published_formula_and_warns():
    spec = SPECS["d3"]
    with pytest.warns(UserWarning, match=r"nearly zero"):
        cores = init_cores(jax.random.key(0), spec, "naive-uniform")
    bound = 1 / math.sqrt(spec.num_embeddings)
    for core in cores:
        assert 0 <= core.min() < core.max() <= bound
        assert core.mean() == pytest.approx(bound / 2, rel=0.1)


def test_keys_and_dtypes():
    first, again, other = (init_cores(jax.random.key(k), SPECS["d2"]) for k in (0, 0, 1))
    assert_same(again, first)
    assert not any((a == b).any() for a, b in zip(first, other, strict=True))
    low = init_cores(jax.random.key(0), SPECS["d2"], dtype=jnp.bfloat16)
    assert_same(low, tuple(core.astype(jnp.bfloat16) for core in first))
