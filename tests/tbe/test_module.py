"""Gradients, steps, rates, states, rounding and errors that the worked cases do not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.kernels import native
from rsembed.tbe import functional
from tests.tbe.oracle import (
    CACHED,
    CLOSE,
    IDS,
    OFFSETS,
    Oracle,
    assert_same_bits,
    gradient_like,
    make,
    tables_of,
    train,
    variant,
)
from tests.tbe.row_formulas import MAX_COUNTER
from tests.world import assert_same

ROWWISE = "EXACT_ROWWISE_ADAGRAD"
WEIGHTS = np.array([0.5, -1.0, 2.0, 0.25, 1.5, 1.0, -0.75], np.float32)
SPECS = ((5, 4), (6, 3))


# Gradients of weights, masks, clipping


@pytest.mark.parametrize("options", [{}, {"pooling_mode": "MEAN", "location": CACHED}])
def test_the_gradient_of_weights_is_that_of_autodiff_also_for_weighted_means(options):
    module = make(SPECS, **options)
    d_output = gradient_like(module(IDS, OFFSETS))
    before = tables_of(module)
    autodiff = nnx.grad(lambda weights, module: jnp.vdot(module(IDS, OFFSETS, weights), d_output))
    actual = [run(jnp.asarray(WEIGHTS), module) for run in (autodiff, nnx.jit(autodiff))]
    assert_same(tables_of(module), before)
    # Other tests compare this gradient with loops.
    _, returned = train(module, IDS, OFFSETS, WEIGHTS, d_output)
    for gradient in actual:
        assert_allclose(gradient, returned, **CLOSE)


def test_masked_features_have_no_gradient_of_weights_but_are_trained_also_behind_a_late_first_bag():
    module = make(SPECS)
    unmasked = make(SPECS)
    offsets = np.array([2, 3, 3, 4, 7])
    _, actual = train(module, IDS, offsets, WEIGHTS, feature_requires_grad=np.array([1, 0]))
    _, everything = train(unmasked, IDS, offsets, WEIGHTS)
    assert_array_equal(actual, np.where(np.arange(7) < 3, everything, 0.0))
    assert np.flatnonzero(everything).tolist() == [2, 3, 4, 5, 6]
    assert_same_bits(module, unmasked)


# Optimizers and rates per table, steps


def test_every_table_may_have_its_own_optimizer_and_rate():
    optimizers = ["EXACT_SGD", ROWWISE, "ADAM"]
    rates = [0.5, 0.25, 0.125]
    together = make(((5, 4),) * 3, optimizer=optimizers, learning_rate=rates)
    assert together.get_learning_rate() == rates
    before = together.split_embedding_weights()
    ids = np.array([1, 3, 3])
    gradients = gradient_like(np.zeros((2, 3, 12)))
    for gradient in gradients:
        train(together, np.tile(ids, 3), np.arange(10), d_output=gradient)
    weights, states = tables_of(together)
    for table in range(3):
        alone = make(((5, 4),), optimizer=optimizers[table], learning_rate=rates[table])
        alone.set_embedding_weights(0, before[table])
        for gradient in np.split(gradients, 3, axis=2)[table]:
            train(alone, ids, np.arange(4), d_output=gradient)
        assert_same(tables_of(alone), ([weights[table]], [states[table]]))


def test_a_refused_gradient_leaves_the_backward_usable():
    module = make(SPECS)
    other = make(SPECS)
    output, backward = module.vjp(IDS, OFFSETS, total_unique_indices=1)
    gradient = gradient_like(output)
    with pytest.raises(ValueError, match="gradient has"):
        backward(np.ones(7, np.float32))
    with pytest.raises(ValueError, match="total_unique_indices is 1"):
        backward.row_gradients(gradient)
    backward(gradient)
    train(other, IDS, OFFSETS, d_output=gradient)
    assert_same_bits(module, other)


def test_evaluation_mode_never_trains():
    module = make(SPECS, optimizer="ADAM")
    output, backward = module.vjp(IDS, OFFSETS)
    module.eval()
    with pytest.raises(RuntimeError, match="evaluation mode"):
        module.vjp(IDS, OFFSETS)
    with pytest.raises(RuntimeError, match="evaluation mode"):
        backward(gradient_like(output))
    assert_array_equal(module(IDS, OFFSETS), output)


def test_numpy_integers_are_sizes_of_tables():
    sizes = [tuple(np.int32(size) for size in spec) for spec in SPECS]
    actual, wanted = make(sizes), make(SPECS)
    assert actual.plan.layout == wanted.plan.layout
    assert_same(actual.state_dict(), wanted.state_dict())


def test_what_was_read_earlier_stays_as_it_was():
    module = make(SPECS)
    step = module.step
    read = module.split_embedding_weights()
    before, _ = tables_of(module)
    train(module, IDS, OFFSETS)
    assert int(step) == 0 and int(module.step) == 1
    assert_same(read, before)


def moves_of_row_1(module):
    """Change of row 1 of each table in a step with gradients of 1."""
    before, _ = tables_of(module)
    train(module, np.ones(len(before), int), np.arange(len(before) + 1))
    after, _ = tables_of(module)
    return [old[1, 0] - new[1, 0] for old, new in zip(before, after, strict=True)]


def test_rates_follow_set_learning_rate_and_schedules():
    module = make(((5, 4), (5, 3)), learning_rate=jnp.float32(0.5))
    assert module.get_learning_rate() == 0.5
    module.set_learning_rate([1.0, 2.0])
    assert module.get_learning_rate() == [1.0, 2.0]
    assert_allclose(moves_of_row_1(module), [1, 2], rtol=1e-6)
    scheduled = make(((5, 4),), learning_rate=lambda step: 1.0 / (1.0 + step.astype(jnp.float32)))
    for step in range(3):
        assert_allclose(moves_of_row_1(scheduled), 1 / (1 + step), rtol=1e-5)


# Compiled steps


def test_a_scan_over_functional_steps_has_the_bits_of_separate_ones():
    module = make(SPECS, optimizer=ROWWISE)
    other = make(SPECS, optimizer=ROWWISE)
    plan = module.plan

    def step(state, ids):
        batch = plan.batch(ids, jnp.asarray(OFFSETS, jnp.int32), None)
        output = functional.lookup(plan, state, batch)
        rates = functional.learning_rates(plan, state)
        return functional.update(plan, state, batch, output, rates), output

    all_ids = np.stack([IDS, IDS[::-1], IDS - 1]).astype(np.int32)
    state, outputs = jax.lax.scan(step, module.state.get_value(), all_ids)
    module.state.set_value(state)
    for ids, output in zip(all_ids, outputs, strict=True):
        expected, backward = other.vjp(ids, OFFSETS)
        assert_array_equal(output, expected)
        backward(expected)
    assert_same_bits(module, other)


@pytest.mark.skipif(
    native.unavailable_because() is not None,
    reason="without native kernels, XLA may copy tables",
)
@pytest.mark.parametrize(
    ("optimizer", "is_weighted"), [(ROWWISE, True), ("ADAM", False), ("LAMB", True)]
)
def test_a_compiled_step_makes_no_copy_of_a_table(optimizer, is_weighted):
    module = make(((20_000, 32),) * 2, optimizer=optimizer, uniform=None)
    plan = module.plan

    def step(state, batch):
        output = functional.lookup(plan, state, batch)
        rates = functional.learning_rates(plan, state)
        return functional.backward(
            plan, state, batch, jnp.cos(output), rates, wants_weight_gradients=is_weighted
        )

    weights = np.ones(256, np.float32) if is_weighted else None
    batch = module.prepare(np.zeros(256, int), np.arange(0, 257, 2), weights)
    compiled = jax.jit(step, donate_argnums=0).lower(module.state.get_value(), batch).compile()
    memory = compiled.memory_analysis()
    table_bytes = 20_000 * 32 * 4
    assert memory.alias_size_in_bytes > 2 * table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2


# Row gradients


def test_without_an_optimizer_there_are_no_states_and_gradients_cannot_be_applied():
    module = make(SPECS, optimizer="NONE", location=CACHED)
    output, backward = module.vjp(IDS, OFFSETS)
    with pytest.raises(NotImplementedError, match="keeps no optimizer states"):
        module.split_optimizer_states()
    with pytest.raises(ValueError, match="no optimizer"):
        module.apply(backward(np.ones_like(output)))
    assert_array_equal(module(IDS, OFFSETS), output)


# Row rules, whose numbers `test_random_configurations.py` compares with their formulas


def test_rules_with_native_kernels_are_used_where_the_numbers_are_the_same():
    rules = {
        "EXACT_SGD": rs.optimizers.SGD,
        "EXACT_ADAGRAD": rs.optimizers.TorchAdagrad,
        ROWWISE: rs.optimizers.RowWiseAdagrad,
        "ADAM": rs.optimizers.Adam,
    }
    module = make(((6, 4),) * 4, optimizer=list(rules))
    assert [type(table.rule) for table in module.plan.tables] == list(rules.values())


@pytest.mark.parametrize("rule", ["counter_adagradw_increase", "global"])
def test_steps_and_the_gaps_of_rows_are_exact_beyond_the_integers_of_float32(rule):
    module = make(((6, 4),), **variant(rule))
    numbers = {"step": np.int32(2**25), "max_counter": np.float32(MAX_COUNTER)}
    module.load_state_dict(module.state_dict() | numbers)
    first, second = [(np.array([row]), np.array([0, 1])) for row in (1, 2)]
    train(module, *first)
    train(module, *second)
    (states,) = module.get_optimizer_state()
    assert states["prev_iter"][1:3].tolist() == [2**25 + 1, 2**25 + 2]
    oracle = Oracle(module, rule)
    output, _ = train(module, *first)
    assert_allclose(output, oracle.lookup(*first), rtol=1e-6)
    oracle.backward(*first, None, np.ones((1, 4)))
    oracle.assert_agrees(module, rtol=1e-6, atol=1e-6)


def test_a_rule_of_the_core_is_taken_with_its_settings():
    rule = rs.optimizers.FTRL(0.3, l1_regularization_strength=0.05, initial_accumulator_value=0.5)
    module = make(((4, 2), (5, 2)), optimizer=[rule, "EXACT_SGD"])
    assert module.get_learning_rate() == pytest.approx([0.3, 0.1])
    rows = module.split_embedding_weights()[0]
    train(module, np.array([1, 2]), np.array([0, 1, 2]))
    hyper = rule.get_hyperparameters(jnp.zeros((), jnp.int32))
    stepped, slots = rule.step_rows(rows, rule.init_slots(rows), jnp.ones_like(rows), hyper)
    assert_allclose(module.split_embedding_weights()[0][1], stepped[1], rtol=1e-6)
    state = module.get_optimizer_state()[0]
    assert list(state) == ["accumulator", "linear"]
    assert_allclose(state["accumulator"][1], slots[0][1], rtol=1e-6)
