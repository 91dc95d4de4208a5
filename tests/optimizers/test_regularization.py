import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.optimizers import regularization as records
from rsembed.optimizers.regularization import global_decay_factor

ROWS, DIM = 3, 4


def random_table(seed, scale=1.0):
    return np.random.default_rng(seed).normal(scale=scale, size=(ROWS, DIM)).astype(np.float32)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.3]),
)
def test_the_global_factor_makes_up_for_the_missed_steps_of_each_row(prev_iter, t, lower_bound):
    config = records.GlobalWeightDecayDefinition(start_iter=20, lower_bound=lower_bound)
    for weight_decay in (0.5, 0.0):
        factors = global_decay_factor(
            jnp.asarray(prev_iter, jnp.int32), t, 0.1, weight_decay, config
        )
        for factor, last in zip(factors, prev_iter, strict=True):
            is_decayed = t >= 20 and weight_decay > 0 and last != 0
            wanted = (
                max(lower_bound, (1 - 0.1 * weight_decay) ** max(t - last - 1, 0))
                if is_decayed
                else 1.0
            )
            assert_allclose(factor, wanted, rtol=1e-5)


def test_the_global_factor_keeps_the_shape_of_slots_and_takes_traced_values():
    config = records.GlobalWeightDecayDefinition()
    last = jnp.asarray([[0], [3]], jnp.int32)
    factor = jax.jit(lambda t, lr, decay: global_decay_factor(last, t, lr, decay, config))(
        6, 0.1, 2.0
    )
    assert_allclose(factor, [[1.0], [0.8**2]], rtol=1e-6)


def test_the_global_factor_of_tiny_rates_counts_up_over_long_gaps():
    config, last = records.GlobalWeightDecayDefinition(), jnp.asarray([1, 10_000_001])
    factors = global_decay_factor(last, 10_000_002, 1e-4, 1e-4, config)
    assert_allclose(factors, [np.exp(-0.1), 1.0], rtol=1e-6)
    assert_allclose(global_decay_factor(last, 10_000_002, 1.0, 1.0, config), [0.0, 1.0])


def ensemble_oracle(w, m2, t, config):
    w, m2 = np.array(w, np.float64), np.array(m2, np.float64)
    if t % config.step_ema == 0:
        m2 = m2 + (1 - (0 if t <= config.step_start else config.step_ema_coef)) * (w - m2)
    if t % config.step_swap == 0:
        w = m2.copy()
    if t % config.step_ema == 0 and config.step_mode == records.StepMode.NONE:
        m2 = np.zeros_like(m2)
    return w, m2


ENSEMBLES = [
    records.EnsembleModeDefinition(step_ema=3, step_swap=6, step_start=6, step_ema_coef=0.75),
    records.EnsembleModeDefinition(step_ema=4, step_swap=3, step_mode=records.StepMode.NONE),
    records.EnsembleModeDefinition(
        step_ema=2.0, step_swap=5.0, step_start=0.0, step_mode=records.StepMode.USE_COUNTER
    ),
]


@pytest.mark.parametrize("config", ENSEMBLES)
def test_the_ensemble_follows_swaps_and_restarts_at_its_steps(config):
    run = jax.jit(config.before_step)
    weights, slow = random_table(1), random_table(2)
    for t in range(1, 25):
        new_weights, (new_slow,) = run(weights, (slow,), t)
        for found, wanted in zip(
            (new_weights, new_slow), ensemble_oracle(weights, slow, t, config), strict=True
        ):
            assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
        if t % config.step_ema and t % config.step_swap:
            assert_array_equal(new_weights, weights)
            assert_array_equal(new_slow, slow)


def test_a_float16_table_swaps_with_a_float32_ensemble():
    config = records.EnsembleModeDefinition(step_ema=1, step_swap=1, step_start=1)
    weights, slow = random_table(3).astype(np.float16), random_table(4)
    new_weights, (new_slow,) = config.before_step(jnp.asarray(weights), (jnp.asarray(slow),), 1)
    assert (new_weights.dtype, new_slow.dtype) == (jnp.float16, jnp.float32)
    assert_array_equal(new_weights, weights)
    assert_array_equal(new_slow, weights.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_slow_halves_move_toward_fast_halves_at_their_steps(dtype):
    config = records.EmainplaceModeDefinition(step_ema=3, step_start=6, step_ema_coef=0.25)
    weights = random_table(5).astype(dtype)
    run = jax.jit(config.before_step)
    for t in range(1, 13):
        wanted = weights.astype(np.float64)
        if t in (6, 9, 12):
            for row in wanted:
                row[2:] += 0.25 * (row[:2] - row[2:])
        found, copies = run(weights, (), t)
        assert copies == ()
        assert found.dtype == dtype
        assert_array_equal(found[:, :2], weights[:, :2])
        assert_allclose(found, wanted, rtol=1e-6 if dtype == np.float32 else 1e-3, atol=1e-6)


def test_the_largest_counter_is_refreshed_at_its_steps_only():
    config = records.CounterBasedRegularizationDefinition(max_counter_update_freq=4)
    counters = [jnp.asarray([[1.0], [6.5]]), jnp.zeros((0, 1)), jnp.asarray([[3.0]])]
    found = [float(config.refreshed_max_counter(counters, t, 2.5)) for t in range(1, 9)]
    assert found == [2.5, 2.5, 2.5, 7.5, 2.5, 2.5, 2.5, 7.5]
    assert float(jax.jit(lambda t: config.refreshed_max_counter(counters, t, 1.0))(4)) == 7.5
    never = records.CounterBasedRegularizationDefinition(max_counter_update_freq=0)
    assert float(never.refreshed_max_counter(counters, 4, 1.0)) == 1.0


def test_steps_without_a_pass_leave_a_donated_table_where_it_is():
    config = records.EmainplaceModeDefinition(step_ema=2)
    run = jax.jit(lambda w, t: config.before_step(w, (), t)[0], donate_argnums=0)
    weights = jnp.ones((512, DIM))
    place = weights.unsafe_buffer_pointer()
    assert run(weights, 1).unsafe_buffer_pointer() == place
