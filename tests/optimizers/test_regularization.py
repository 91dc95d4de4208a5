import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.optimizers import regularization as records
from rsembed.optimizers.regularization import global_decay_factor

TOLERANCE = {"float32": 1e-6, "float16": 1e-3}


def random_table(seed):
    return np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)


def test_the_global_factor_of_tiny_rates_counts_up_over_long_gaps():
    config = records.GlobalWeightDecayDefinition()
    last = jnp.asarray([1, 10_000_001])
    factors = global_decay_factor(last, 10_000_002, 1e-4, 1e-4, config)
    assert_allclose(factors, [np.exp(-0.1), 1.0], rtol=1e-6)
    assert_allclose(global_decay_factor(last, 10_000_002, 1.0, 1.0, config), [0.0, 1.0])


ENSEMBLES = [
    records.EnsembleModeDefinition(step_ema=3, step_swap=6, step_start=6, step_ema_coef=0.75),
    records.EnsembleModeDefinition(step_ema=4, step_swap=3, step_mode=records.StepMode.NONE),
    records.EnsembleModeDefinition(
        step_ema=2.0, step_swap=5.0, step_start=0.0, step_mode=records.StepMode.USE_COUNTER
    ),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", ENSEMBLES)
def test_the_ensemble_follows_swaps_and_restarts_at_its_steps(config, dtype):
    run = jax.jit(config.before_step)
    weights = random_table(1).astype(dtype)
    slow = random_table(2)
    for t in range(1, 25):
        is_update = t % config.step_ema == 0
        is_swap = t % config.step_swap == 0
        wanted, wanted_slow = weights, slow
        if is_update:
            share = 1 if t <= config.step_start else 1 - config.step_ema_coef
            wanted_slow = slow + share * (np.float64(weights) - slow)
        if is_swap:
            wanted = wanted_slow
        if is_update and config.step_mode == records.StepMode.NONE:
            wanted_slow = np.zeros_like(slow)
        new_weights, (new_slow,) = run(weights, (slow,), t)
        assert (new_weights.dtype, new_slow.dtype) == (dtype, np.float32)
        assert_allclose(new_weights, wanted, rtol=TOLERANCE[dtype] if is_swap else 0, atol=1e-6)
        assert_allclose(new_slow, wanted_slow, rtol=1e-6, atol=1e-6)
        if not is_update and not is_swap:
            assert_array_equal(new_weights, weights)
            assert_array_equal(new_slow, slow)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_slow_halves_move_toward_fast_halves_at_their_steps(dtype):
    config = records.EmainplaceModeDefinition(step_ema=3, step_start=6, step_ema_coef=0.25)
    weights = random_table(5).astype(dtype)
    run = jax.jit(config.before_step)
    for t in range(1, 13):
        wanted = weights.astype(np.float64)
        if t in (6, 9, 12):
            wanted[:, 2:] += 0.25 * (wanted[:, :2] - wanted[:, 2:])
        actual, copies = run(weights, (), t)
        assert copies == ()
        assert actual.dtype == dtype
        assert_array_equal(actual[:, :2], weights[:, :2])
        assert_allclose(actual, wanted, rtol=TOLERANCE[dtype], atol=1e-6)


def test_the_largest_counter_is_refreshed_at_its_steps_only():
    counters = [jnp.asarray([[1.0], [6.5]]), jnp.zeros((0, 1)), jnp.asarray([[3.0]])]

    def refreshed(update_freq):
        config = records.CounterBasedRegularizationDefinition(max_counter_update_freq=update_freq)
        refresh = jax.jit(config.refreshed_max_counter)
        return [float(refresh(counters, t, 2.5)) for t in range(1, 9)]

    assert refreshed(4) == [2.5, 2.5, 2.5, 7.5, 2.5, 2.5, 2.5, 7.5]
    assert refreshed(0) == [2.5] * 8


def test_steps_without_a_pass_leave_a_donated_table_where_it_is():
    config = records.EmainplaceModeDefinition(step_ema=2)
    run = jax.jit(lambda w, t: config.before_step(w, (), t)[0], donate_argnums=0)
    weights = jnp.ones((512, 4))
    place = weights.unsafe_buffer_pointer()
    assert run(weights, 1).unsafe_buffer_pointer() == place
