"""Rules that move all rows do so once a step, whichever kernel is asked; rules with a native formula get it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.kernels import api, native, reference
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from rsembed.sparsecore.variables import BoundedRowRule
from tests import oracles
from tests.optimizers.test_contract import epsilon_hat_adam

RULE = ro.rules.TensorFlowAdam(0.1, epsilon=0.3)
HYPER = RULE.get_hyperparameters(4)
NUM_ROWS, DIM = 5, 4


def drawn(dtype="float32"):
    rng = np.random.default_rng(0)
    table, m, v = (rng.uniform(0.1, 1.0, (NUM_ROWS, DIM)).astype(np.float32) for _ in range(3))
    return jax.device_put(
        (table.astype(jnp.dtype(dtype)), (m, v), rng.normal(size=(4, DIM)).astype(np.float32))
    )


def as_rows(table, slots, d, rounding=None, **options):
    return api.apply_rows(
        table, slots, jnp.asarray([3, -1, NO_ROW, 0]), d, Step(HYPER, RULE, rounding), **options
    )


def as_lists(table, slots, d, **options):
    lists = [IdList.single(jnp.asarray([3, NUM_ROWS])), IdList.single(jnp.asarray([0]))]
    gradients = CallGradients(Call.of(lists, ["sum", "sum"]), (d[:2], d[3:]), (DIM,))
    return api.update(table, slots, gradients, Step(HYPER, RULE), **options)


def as_segments_of_one_list(table, slots, d, **options):
    segments = (Segment(0, 0, 1, "sum", 1, 0, NUM_ROWS), Segment(0, 1, 1, "sum", 1, 0, NUM_ROWS))
    call = Call((IdList(jnp.asarray([3, 0]), jnp.arange(3)),), segments, "blocks")
    gradients = CallGradients(call, (jnp.concatenate([d[0], d[3]]),), (1, DIM), 1)
    return api.update(table, slots, gradients, Step(HYPER, RULE), **options)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("ask", [as_rows, as_lists, as_segments_of_one_list])
def test_every_kernel_steps_all_rows_once_and_padding_none(ask, implementation):
    table, slots, d = drawn()
    found = jax.jit(functools.partial(ask, implementation=implementation))(table, slots, d)
    gradients = dict.fromkeys(range(NUM_ROWS), np.zeros(DIM)) | {
        3: np.float64(d[0]),
        0: np.float64(d[3]),
    }
    wanted = oracles.stepped_table(
        table, slots, gradients, functools.partial(epsilon_hat_adam, RULE), step=4
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


def test_all_rows_are_rounded_as_asked_each_with_its_own_number():
    table, slots, d = drawn("bfloat16")
    rounded = []

    def down(values, dtype, rows):
        rounded.append((values.shape, rows.tolist()))
        return jnp.zeros(values.shape, dtype)

    table, _ = as_rows(table, slots, d, rounding=down)
    assert rounded == [((NUM_ROWS, DIM), list(range(NUM_ROWS)))] and not table.any()


def test_limits_of_a_stack_hold_for_rows_that_were_not_looked_up():
    rule = BoundedRowRule(0.1, dataclasses.replace(RULE, learning_rate=0.1), 3, 0.4, 0.5)
    table, slots, d = drawn()
    new, _ = jax.jit(
        lambda d: api.apply_rows(table, slots, jnp.asarray([1]), d[:1], Step(HYPER, rule))
    )(d)
    new = np.asarray(new)
    assert rule.moves_all_rows and new[:, :3].min() >= 0.4 and new[:, :3].max() <= 0.5
    np.testing.assert_array_equal(new[:, 3], np.asarray(table)[:, 3])


class MyAdam(rs.optimizers.Adam):
    """A subclass may compute something else."""


@pytest.mark.skipif(native.unavailable_because() is not None, reason="needs the native kernels")
@pytest.mark.parametrize(
    ("rule", "is_fused"),
    [(ro.LazyAdam(), True), (rs.optimizers.Adam(), True), (MyAdam(), False), (RULE, False)],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_is_fused_under_the_formula_that_its_own_class_names(rule, is_fused):
    table, slots, d = drawn()

    def step(table, slots, d):
        gradients = CallGradients.of_rows(jnp.asarray([1, 2, 1, 0]), d)
        return api.update(table, slots, gradients, Step(rule.get_hyperparameters(2), rule))

    assert ("rsembed_update" in str(jax.make_jaxpr(step)(table, slots, d))) == is_fused
    if is_fused:
        steps = Step(rule.get_hyperparameters(2), rule)
        own = np.asarray(d)
        rows, sums = np.arange(3, dtype=np.int32), np.stack([own[3], own[0] + own[2], own[1]])
        wanted = jax.jit(reference.apply_rows)(table, slots, rows, sums, steps)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6),
            jax.jit(step)(table, slots, d),
            wanted,
        )
