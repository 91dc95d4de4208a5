"""What a module promises beyond its worked cases: gradients, steps, rates, states, rounding and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import tbe as rt
from rsembed.kernels import native
from rsembed.tbe import functional
from tests.tbe.oracle import (
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
from tests.tbe.row_formulas import MAX_COUNTER, VARIANTS
from tests.world import assert_same

Optim, Pooling = rt.OptimType, rt.PoolingMode
ROWWISE = Optim.EXACT_ROWWISE_ADAGRAD
WEIGHTS = np.array([0.5, -1.0, 2.0, 0.25, 1.5, 1.0, -0.75], np.float32)
SPECS = ((5, 4), (6, 3))


# Gradients of weights, masks, clipping


@pytest.mark.parametrize(
    ("pooling", "location"),
    [
        (Pooling.SUM, rt.EmbeddingLocation.DEVICE),
        (Pooling.MEAN, rt.EmbeddingLocation.MANAGED_CACHING),
    ],
)
def test_the_gradient_of_weights_is_that_of_autodiff_also_for_weighted_means(pooling, location):
    module = make(SPECS, pooling_mode=pooling, location=location)
    d_output, before = gradient_like(module(IDS, OFFSETS)), tables_of(module)
    autodiff = nnx.grad(lambda weights, module: jnp.vdot(module(IDS, OFFSETS, weights), d_output))
    found = [run(jnp.asarray(WEIGHTS), module) for run in (autodiff, nnx.jit(autodiff))]
    assert_same(tables_of(module), before)
    _, returned = train(module, IDS, OFFSETS, WEIGHTS, d_output)  # which loops confirm elsewhere
    for gradient in found:
        assert_allclose(gradient, returned, **CLOSE)


def test_masked_features_have_no_gradient_of_weights_but_are_trained_also_behind_a_late_first_bag():
    module, unmasked, offsets = make(SPECS), make(SPECS), np.array([2, 3, 3, 4, 7])
    _, found = train(module, IDS, offsets, WEIGHTS, feature_requires_grad=np.array([1, 0]))
    _, everything = train(unmasked, IDS, offsets, WEIGHTS)
    assert_array_equal(found, np.where(np.arange(7) < 3, everything, 0.0))
    assert np.flatnonzero(everything).tolist() == [2, 3, 4, 5, 6]
    assert_same_bits(module, unmasked)


# Optimizers and rates per table, steps


def test_every_table_may_have_its_own_optimizer_and_rate():
    optimizers, rates, ids = (
        [Optim.EXACT_SGD, ROWWISE, Optim.ADAM],
        [0.5, 0.25, 0.125],
        np.array([1, 3, 3]),
    )
    together = make(((5, 4),) * 3, optimizer=optimizers, learning_rate=rates)
    alone = [
        make(((5, 4),), optimizer=o, learning_rate=rate)
        for o, rate in zip(optimizers, rates, strict=True)
    ]
    for weights, module in zip(together.split_embedding_weights(), alone, strict=True):
        module.set_embedding_weights(0, weights)
    assert together.get_learning_rate() == rates
    for k in range(2):
        d_output = gradient_like(np.zeros((3, 12)), k)
        train(together, np.tile(ids, 3), np.arange(10), d_output=d_output)
        for t, module in enumerate(alone):
            train(module, ids, np.arange(4), d_output=d_output[:, 4 * t : 4 * t + 4])
    for number, module in enumerate(alone):
        (weights,), (states,) = tables_of(module)
        together_weights, together_states = tables_of(together)
        assert_same(together_weights[number], weights)
        assert_same(together_states[number], states)


def test_a_refused_gradient_leaves_the_backward_usable():
    module, other = make(SPECS), make(SPECS)
    output, backward = module.vjp(IDS, OFFSETS, total_unique_indices=1)
    with pytest.raises(ValueError, match="gradient has"):
        backward(np.ones(7, np.float32))
    with pytest.raises(ValueError, match="total_unique_indices is 1"):
        backward.row_gradients(gradient_like(output))
    backward(gradient_like(output))
    train(other, IDS, OFFSETS, d_output=gradient_like(output))
    assert_same_bits(module, other)


def test_evaluation_mode_never_trains():
    module = make(SPECS, optimizer=Optim.ADAM)
    output, backward = module.vjp(IDS, OFFSETS)
    module.eval()
    for forbidden in (lambda: module.vjp(IDS, OFFSETS), lambda: backward(gradient_like(output))):
        with pytest.raises(RuntimeError, match="evaluation mode"):
            forbidden()
    assert_array_equal(module(IDS, OFFSETS), output)


def test_what_was_read_earlier_stays_as_it_was():
    module = make(SPECS)
    step, read, before = module.step, module.split_embedding_weights(), tables_of(module)[0]
    train(module, IDS, OFFSETS)
    assert int(step) == 0 and int(module.step) == 1
    assert_array_equal(read[0], before[0])


def test_rates_follow_set_learning_rate_and_schedules():
    module = make(((5, 4), (5, 3)), learning_rate=jnp.float32(0.5))
    assert module.get_learning_rate() == 0.5
    module.set_learning_rate([1.0, 2.0])
    assert module.get_learning_rate() == [1.0, 2.0]
    before = tables_of(module)[0]
    train(module, np.array([1, 1]), np.array([0, 1, 2]))
    for k, (old, new) in enumerate(zip(before, tables_of(module)[0], strict=True)):
        assert_allclose(old[1] - new[1], k + 1.0, rtol=1e-6)
    scheduled = make(((5, 4),), learning_rate=lambda step: 1.0 / (1.0 + step.astype(jnp.float32)))
    for k in range(3):
        old = np.array(scheduled.split_embedding_weights()[0])
        train(scheduled, np.array([1]), np.array([0, 1]))
        assert_allclose(
            old[1] - np.asarray(scheduled.split_embedding_weights()[0])[1], 1 / (1 + k), rtol=1e-5
        )


# Compiled steps


@pytest.mark.slow_rows("rowwise_l2")
@pytest.mark.parametrize("rule", ["rowwise_l2", "global", "emainplace"])
def test_a_compiled_step_has_the_bits_of_an_eager_one(rule):
    eager, compiled = (make(((5, 4), (6, 2)), **variant(rule)) for _ in range(2))

    @nnx.jit
    def step(module, ids, offsets, d_output):
        output, backward = module.vjp(ids, offsets)
        backward(d_output)
        return output

    for k in range(3):
        d_output, ids = gradient_like(np.zeros((2, 6)), k), (IDS + k) % 5
        wanted, _ = train(eager, ids, OFFSETS, d_output=d_output)
        assert_array_equal(
            step(compiled, ids.astype(np.int32), OFFSETS.astype(np.int32), d_output), wanted
        )
    assert_same_bits(eager, compiled)
    assert int(eager.step) == int(compiled.step) == 3


def test_a_scan_over_functional_steps_has_the_bits_of_separate_ones():
    module, other = make(SPECS, optimizer=ROWWISE), make(SPECS, optimizer=ROWWISE)
    plan, offsets = module.plan, jnp.asarray(OFFSETS, jnp.int32)

    def step(state, ids):
        batch = plan.batch(ids, offsets, None)
        output = functional.lookup(plan, state, batch)
        return functional.update(
            plan, state, batch, output, functional.learning_rates(plan, state)
        ), output

    all_ids = np.stack([(IDS + k) % 5 for k in range(4)]).astype(np.int32)
    state, outputs = jax.jit(lambda s, ids: jax.lax.scan(step, s, ids))(
        module.state.get_value(), all_ids
    )
    module.state.set_value(state)
    for ids, output in zip(all_ids, outputs, strict=True):
        wanted, backward = other.vjp(ids, OFFSETS)
        assert_array_equal(output, wanted)
        backward(wanted)
    assert_same_bits(module, other)


@pytest.mark.skipif(
    native.unavailable_because() is not None, reason="XLA may copy; native calls alias"
)
@pytest.mark.parametrize(
    ("optimizer", "is_weighted"),
    [("EXACT_ROWWISE_ADAGRAD", True), ("ADAM", False), ("LAMB", True)],
)
def test_a_compiled_step_makes_no_copy_of_a_table(optimizer, is_weighted):
    num_rows, dim, num_bags, num_ids = 20_000, 32, 64, 256
    specs = [(num_rows, dim, rt.EmbeddingLocation.HOST, rt.ComputeDevice.CPU)] * 2
    module = rt.TableBatchedEmbeddingBags(specs, optimizer=rt.OptimType[optimizer])
    plan = module.plan

    def step(state, ids, offsets, weights):
        batch = plan.batch(ids, offsets, weights if is_weighted else None)
        output = functional.lookup(plan, state, batch)
        rates = functional.learning_rates(plan, state)
        return functional.backward(
            plan, state, batch, jnp.cos(output), rates, wants_weight_gradients=is_weighted
        )

    arguments = (
        module.state.get_value(),
        jnp.zeros(num_ids, jnp.int32),
        jnp.zeros(2 * num_bags + 1, jnp.int32),
        jnp.ones(num_ids),
    )
    memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    table_bytes = num_rows * dim * 4
    assert memory.alias_size_in_bytes > 2 * table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2


# Row gradients


def test_without_an_optimizer_there_are_no_states_and_gradients_cannot_be_applied():
    module = make(((5, 4),), optimizer=Optim.NONE, location=rt.EmbeddingLocation.MANAGED_CACHING)
    output, backward = module.vjp(np.array([4, 1, 4]), np.array([0, 1, 3]))
    with pytest.raises(NotImplementedError, match="keeps no optimizer states"):
        module.split_optimizer_states()
    with pytest.raises(ValueError, match="no optimizer"):
        module.apply(backward(np.ones_like(output)))
    assert_array_equal(module(np.array([4, 1, 4]), np.array([0, 1, 3])), output)


# Row rules, beyond the numbers that `test_random_configurations.py` compares with their formulas


def test_rules_with_native_kernels_are_used_where_the_numbers_are_the_same():
    module = make(
        ((6, 4),) * 4, optimizer=[Optim.EXACT_SGD, Optim.EXACT_ADAGRAD, ROWWISE, Optim.ADAM]
    )
    core = (
        rs.optimizers.SGD,
        rs.optimizers.TorchAdagrad,
        rs.optimizers.RowWiseAdagrad,
        rs.optimizers.Adam,
    )
    assert tuple(type(table.rule) for table in module.plan.tables) == core


@pytest.mark.parametrize("rule", ["counter_adagradw_increase", "global"])
def test_steps_and_the_gaps_of_rows_are_exact_beyond_the_integers_of_float32(rule):
    _, arguments, formula = VARIANTS[rule]
    module = make(((6, 4),), **variant(rule))
    numbers = {"step": np.int32(2**25), "max_counter": np.float32(MAX_COUNTER)}
    module.load_state_dict(module.state_dict() | numbers)
    for row in (1, 2):
        train(module, np.array([row]), np.array([0, 1]))
    (states,) = module.get_optimizer_state()
    assert states["prev_iter"][1:3].tolist() == [2**25 + 1, 2**25 + 2]
    oracle = Oracle(module, (0,), "sum", formula, arguments)
    output, _ = train(module, np.array([1]), np.array([0, 1]))
    assert_allclose(output[0], oracle.read(0, 1), rtol=1e-6)
    oracle.backward([1], [0, 1], None, [1], np.ones((1, 4)))
    oracle.assert_agrees(module, rtol=1e-6, atol=1e-6)


def test_a_rule_of_the_core_is_taken_with_its_settings():
    rule = rs.optimizers.FTRL(0.3, l1_regularization_strength=0.05, initial_accumulator_value=0.5)
    module = make(((4, 2), (5, 2)), optimizer=[rule, "EXACT_SGD"], learning_rate=0.1)
    assert module.get_learning_rate() == pytest.approx([0.3, 0.1])
    before = module.split_embedding_weights()[0]
    train(module, np.array([1, 2]), np.array([0, 1, 2]))
    rows = before[1:2]
    hyper = rule.get_hyperparameters(jnp.zeros((), jnp.int32))
    wanted, slots = rule.step_rows(rows, rule.init_slots(rows), jnp.ones((1, 2)), hyper)
    assert_allclose(module.split_embedding_weights()[0][1:2], wanted, rtol=1e-6)
    state = module.get_optimizer_state()[0]
    assert list(state) == ["accumulator", "linear"]
    assert_allclose(state["accumulator"][1], slots[0][0], rtol=1e-6)
    other = make(((4, 2), (5, 2)), optimizer=[rule, "EXACT_SGD"])
    other.load_state_dict(module.state_dict())
    assert_array_equal(other.split_embedding_weights()[0], module.split_embedding_weights()[0])
