"""A whole compiled step takes over the tables it is given: no second copy of any."""

import jax
import jax.numpy as jnp
import pytest

from rsembed import tbe as rt
from rsembed.kernels import native
from rsembed.tbe import functional

ROWS, DIM, BAGS, IDS = 20_000, 32, 64, 256

needs_native = pytest.mark.skipif(native.unavailable_because() is not None, reason="XLA may copy; native calls alias")


@needs_native
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "ADAM", "LAMB"])
def test_a_compiled_step_makes_no_copy_of_a_table(optimizer, is_weighted):
    specs = [(ROWS, DIM, rt.EmbeddingLocation.HOST, rt.ComputeDevice.CPU)] * 2
    module = rt.TableBatchedEmbeddingBags(specs, optimizer=rt.OptimType[optimizer])
    plan = module.plan

    def step(state, ids, offsets, weights):
        batch = plan.batch(ids, offsets, weights if is_weighted else None)
        output = functional.lookup(plan, state, batch)
        rates = functional.learning_rates(plan, state)
        return functional.backward(plan, state, batch, jnp.cos(output), rates, wants_weight_gradients=is_weighted)

    arguments = (module.state.get_value(), jnp.zeros(IDS, jnp.int32), jnp.zeros(2 * BAGS + 1, jnp.int32), jnp.ones(IDS))
    memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    table_bytes = ROWS * DIM * 4
    assert memory.alias_size_in_bytes > 2 * table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2
