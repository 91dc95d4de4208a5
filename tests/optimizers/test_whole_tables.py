"""Rules that move all rows move each row once a step in every kernel. Native kernels fuse rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed.optimizers as ro
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.sparsecore.variables import BoundedRowRule
from tests import oracles
from tests.kernels.cases import needs_native
from tests.optimizers.test_contract import by_entry

RULE = ro.rules.TensorFlowAdam(0.1, epsilon=0.3)
HYPER = RULE.get_hyperparameters(4)
NUM_ROWS, DIM = 5, 4


def drawn(dtype="float32"):
    """A table, its slots, and four gradients. Only the first and the last belong to a row."""
    rng = np.random.default_rng(0)
    table, m, v = rng.uniform(0.1, 1.0, (3, NUM_ROWS, DIM))
    gradients = rng.normal(size=(4, DIM))
    as_floats = functools.partial(jnp.asarray, dtype=jnp.float32)
    return jnp.asarray(table, dtype), (as_floats(m), as_floats(v)), as_floats(gradients)


def as_rows(table, slots, gradients, rounding=None, **options):
    step = Step(HYPER, RULE, rounding)
    rows = jnp.asarray([3, -1, NO_ROW, 0])
    return api.apply_rows(table, slots, rows, gradients, step, **options)


def as_lists(table, slots, gradients, **options):
    lists = [IdList.single(jnp.asarray([3, NUM_ROWS])), IdList.single(jnp.asarray([0]))]
    call = Call.of(lists, ["sum", "sum"])
    of_outputs = CallGradients(call, (gradients[:2], gradients[3:]), (DIM,))
    return api.update(table, slots, of_outputs, Step(HYPER, RULE), **options)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("ask", [as_rows, as_lists])
def test_every_kernel_steps_all_rows_once_and_padding_none(ask, implementation):
    table, slots, d = drawn()
    actual = jax.jit(functools.partial(ask, implementation=implementation))(table, slots, d)
    gradients = dict.fromkeys(range(NUM_ROWS), np.zeros(DIM))
    gradients |= {3: np.float64(d[0]), 0: np.float64(d[3])}
    wanted = oracles.stepped_table(
        table, slots, gradients, functools.partial(by_entry, RULE), step=4
    )
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


def test_all_rows_are_rounded_as_asked_each_with_its_own_number():
    rounded = []

    def down(values, dtype, rows):
        rounded.append((values.shape, rows.tolist()))
        return jnp.zeros(values.shape, dtype)

    table, _ = as_rows(*drawn("bfloat16"), rounding=down)
    assert rounded == [((NUM_ROWS, DIM), list(range(NUM_ROWS)))]
    assert not table.any()


def test_limits_of_a_stack_hold_for_rows_that_were_not_looked_up():
    rule = BoundedRowRule(0.1, inner=RULE, num_columns=3, minimum=0.4, maximum=0.5)
    assert rule.moves_all_rows
    table, slots, d = drawn()
    new, _ = api.apply_rows(table, slots, jnp.asarray([1]), d[:1], Step(HYPER, rule))
    assert new[:, :3].min() >= 0.4
    assert new[:, :3].max() <= 0.5
    np.testing.assert_array_equal(new[:, 3], table[:, 3])


class MyAdam(ro.Adam):
    """A subclass, which could have another formula."""


@needs_native
@pytest.mark.parametrize(
    ("rule", "is_fused"),
    [(ro.LazyAdam(), True), (ro.Adam(), True), (MyAdam(), False), (RULE, False)],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_is_fused_under_the_formula_that_its_own_class_names(rule, is_fused):
    """`test_contract.py` compares the numbers of fused rules with their formulas."""

    def step(table, slots, d):
        gradients = CallGradients.of_rows(jnp.asarray([1, 2, 1, 0]), d)
        return api.update(table, slots, gradients, Step(rule.get_hyperparameters(2), rule))

    assert ("rsembed_update" in str(jax.make_jaxpr(step)(*drawn()))) == is_fused
