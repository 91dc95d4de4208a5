"""What a step makes of a row does not depend on the rows that are stepped with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, native
from rsembed.kernels.contract import NO_ROW, Step
from tests.optimizers.test_contract import CONTRACT

pytestmark = [
    pytest.mark.usefixtures("more_optimizations"),
    pytest.mark.skipif(native.unavailable_because() is not None, reason="XLA alone rounds as the shapes have it"),
]


@pytest.mark.parametrize("name", [name for name, (rule, _) in CONTRACT.items() if not rule.moves_all_rows])
def test_the_bits_of_a_row_are_those_that_it_has_in_any_company(name):
    rule, num_rows, dim, draw = CONTRACT[name][0], 700, 16, np.random.default_rng(0)
    table, gradients = (jnp.asarray(draw.normal(size=(num_rows, dim)).astype(np.float32)) for _ in range(2))
    slots = tuple(slot + jnp.asarray(1, slot.dtype) for slot in rule.init_slots(table))
    hyper = rule.get_hyperparameters(jnp.int32(3))
    step = jax.jit(lambda rows, gradients: api.apply_rows(table, slots, rows, gradients, Step(hyper, rule)))
    of_all = step(jnp.arange(num_rows, dtype=jnp.int32), gradients)
    for company in (np.arange(5, 8), np.sort(draw.permutation(num_rows)[:139])):
        padded = np.insert(company, [1, 1], NO_ROW).astype(np.int32)
        own = step(jnp.asarray(padded), gradients.at[padded].get(mode="clip"))
        for one, other in zip(jax.tree.leaves(of_all), jax.tree.leaves(own), strict=True):
            np.testing.assert_array_equal(np.asarray(one)[company], np.asarray(other)[company])
