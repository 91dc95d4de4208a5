"""Every row rule against its published formula, written row by row in numpy float64."""

import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
from rsembed.optimizers import TensorFlowAdamOptimizerSpec
from rsembed.tbe import records
from rsembed.tbe.arguments import OptimizerArguments, states_of
from rsembed.tbe.records import EmbOptimType as Optim
from rsembed.tbe.rules import make_rule
from tests.tbe.oracle import make, train
from tests.tbe.row_formulas import FIRST_STEP, LR, VARIANTS, stepped, stepped_in_float64

ROWS, DIM = 6, 4
TOUCHED = ([0, 1, 3, 5], [0, 2, 3, 4])


def rule_and_slot_names(variant):
    optimizer, arguments, _ = VARIANTS[variant]
    rule = make_rule(optimizer, learning_rate=LR, **arguments)
    names = tuple(states_of(optimizer, OptimizerArguments(**arguments)))
    return rule, names[:1] if optimizer == Optim.ENSEMBLE_ROWWISE_ADAGRAD else names


def distinct_states(rule, names):
    """Every row and column has its own value; two rows were never touched."""
    values = []
    for name, slot in zip(names, rule.init_slots(jnp.zeros((ROWS, DIM))), strict=True):
        place = np.arange(slot.size, dtype=np.float64).reshape(slot.shape)
        filled = {"prev_iter": np.maximum(place - 1, 0), "row_counter": 0.5 + place}.get(name, 0.3 + 0.1 * place)
        values.append(jnp.asarray(filled).astype(slot.dtype))
    return tuple(values)


eighths = st.integers(-16, 16).map(lambda x: x / 8)


@pytest.mark.parametrize("variant", VARIANTS)
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
    hnp.arrays(np.float64, (ROWS, DIM), elements=eighths), hnp.arrays(np.float64, (3, 4, DIM), elements=eighths)
)
def test_a_rule_follows_its_formula_over_several_steps(variant, weights, gradients):
    _, arguments, oracle = VARIANTS[variant]
    rule, names = rule_and_slot_names(variant)
    weights[0], gradients[0, 1] = 0.0, 0.0  # a zero row and a zero gradient in every example
    table, slots = weights, distinct_states(rule, names)
    expected, expected_slots = weights, slots
    for k, gradient in enumerate(gradients):
        rows = TOUCHED[k % 2]
        number = FIRST_STEP + k * k  # not every step touches the table
        table, slots = stepped(rule, table, slots, rows, gradient, number)
        expected, expected_slots = stepped_in_float64(
            oracle, arguments, names, expected, expected_slots, rows, gradient, number + 1
        )
    np.testing.assert_allclose(table, expected, rtol=3e-5, atol=3e-5)
    for slot, wanted in zip(slots, expected_slots, strict=True):
        np.testing.assert_allclose(slot, wanted, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("variant", "core"),
    [
        ("sgd", rs.SGDOptimizerSpec),
        ("adagrad", rs.TorchAdagradOptimizerSpec),
        ("rowwise", rs.RowWiseAdagradOptimizerSpec),
        ("adam", rs.AdamOptimizerSpec),
    ],
)
def test_rules_with_native_kernels_are_used_where_the_numbers_are_the_same(variant, core):
    rule, _ = rule_and_slot_names(variant)
    assert type(rule) is core
    assert [float(jnp.max(slot)) for slot in rule.init_slots(jnp.ones((2, DIM)))] == [0.0] * rule.slot_variables_count()


def test_none_has_no_rule_and_ftrl_is_the_one_of_the_library():
    assert make_rule(Optim.NONE) is None
    assert make_rule(Optim.FTRL, learning_rate=0.3) == rs.FTRLOptimizerSpec(0.3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fresh_row_or_a_zero_gradient_gives_finite_numbers(variant):
    rule, _ = rule_and_slot_names(variant)
    table = jnp.zeros((ROWS, DIM)).at[3].set(0.5)
    gradients = [[2.0], [0.0], [0.0]]  # a zero row with and one without a gradient, another row without one
    new, slots = stepped(rule, table, rule.init_slots(table), [0, 1, 3], gradients, 0)
    assert all(bool(jnp.isfinite(values).all()) for values in (new, *slots))
    np.testing.assert_array_equal(new[1], 0.0)


@pytest.mark.parametrize("variant", ["lamb", "partial_lamb", "lars", "cowclip_l2"])
def test_a_row_that_starts_at_zero_moves(variant):
    rule, _ = rule_and_slot_names(variant)
    table = jnp.zeros((ROWS, DIM))
    new, _ = stepped(rule, table, rule.init_slots(table), [2], [[1.0]], 0)
    assert bool((new[2] < -0.01).all())


# Every kind of rule, and every layout of slots.
SIXTEEN_BITS = "adagrad rowwise_max_norm ensemble global counter_l2 cowclip adam_by_row partial_lamb lars rmsprop"


@pytest.mark.parametrize(
    ("variant", "sparse_type"),
    [*((name, records.SparseType.BF16) for name in SIXTEEN_BITS.split()), ("adamw", records.SparseType.FP16)],
)
def test_momenta_may_be_stored_in_16_bits_while_rules_compute_in_float32(variant, sparse_type):
    optimizer, arguments, oracle = VARIANTS[variant]
    _, names = rule_and_slot_names(variant)
    momenta = [name for name in names if name.startswith("momentum")]
    rule = make_rule(
        optimizer, learning_rate=LR, optimizer_state_dtypes=dict.fromkeys(momenta, sparse_type), **arguments
    )
    slots = distinct_states(rule, names)
    dtype = records.dtype_of(sparse_type, "states")
    own = {"prev_iter": jnp.int32, "row_counter": jnp.float32}
    assert [slot.dtype for slot in slots] == [own.get(name, dtype) for name in names]

    weights = np.linspace(-1.0, 2.0, ROWS * DIM).reshape(ROWS, DIM)
    gradients = np.linspace(2.0, -1.0, 2 * DIM).reshape(2, DIM)
    table, new_slots = stepped(rule, weights, slots, [1, 4], gradients, FIRST_STEP)
    expected, expected_slots = stepped_in_float64(
        oracle, arguments, names, weights, slots, [1, 4], gradients, FIRST_STEP + 1
    )
    np.testing.assert_allclose(table, expected, rtol=3e-5, atol=3e-6)
    for old, slot, wanted in zip(slots, new_slots, expected_slots, strict=True):
        assert slot.dtype == old.dtype
        spacing = 2.0**-7 if slot.dtype == dtype else 1e-6
        np.testing.assert_allclose(np.asarray(slot, np.float64), wanted, rtol=spacing)


def test_float32_states_asked_for_by_name_change_nothing():
    asked = {"momentum1": records.SparseType.FP32}
    assert make_rule(Optim.ADAM, optimizer_state_dtypes=asked) == make_rule(Optim.ADAM)


@pytest.mark.parametrize("variant", ["rmsprop", "counter_adagradw_increase", "global"])
def test_the_gap_of_a_row_is_exact_beyond_the_integers_of_float32(variant):
    _, arguments, oracle = VARIANTS[variant]
    rule, names = rule_and_slot_names(variant)
    step = 2**25 + 2
    values = {"prev_iter": step - 2, "row_counter": 4.0, "momentum1": 0.7}
    slots = tuple(
        jnp.full(slot.shape, values[name], slot.dtype)
        for name, slot in zip(names, rule.init_slots(jnp.zeros((ROWS, DIM))), strict=True)
    )
    weights, gradients = np.ones((ROWS, DIM)), np.full((1, DIM), 0.25)
    table, new_slots = stepped(rule, weights, slots, [2], gradients, step)
    expected, _ = stepped_in_float64(oracle, arguments, names, weights, slots, [2], gradients, step + 1)
    np.testing.assert_allclose(table, expected, rtol=1e-6)
    assert int(new_slots[1][2, 0]) == step + 1 and int(new_slots[1][1, 0]) == step - 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_traced_learning_rate_takes_the_place_of_the_number(variant):
    rule, _ = rule_and_slot_names(variant)

    @jax.jit
    def hyper(lr):
        return dataclasses.replace(rule, learning_rate=lambda: lr).get_hyperparameters(3)

    wanted = dataclasses.replace(rule, learning_rate=0.7).get_hyperparameters(3)
    np.testing.assert_allclose(hyper(jnp.float32(0.7)), wanted, rtol=1e-6)
    assert float(wanted[0]) != float(rule.get_hyperparameters(3)[0])


def test_the_largest_counter_is_the_last_hyperparameter_and_may_be_traced():
    rule, _ = rule_and_slot_names("counter")
    hyper = jax.jit(lambda largest: dataclasses.replace(rule, max_counter=lambda: largest).get_hyperparameters(0)[-1])
    assert float(hyper(jnp.float32(9.0))) == 9.0
    assert float(dataclasses.replace(rule, max_counter=7).get_hyperparameters(0)[-1]) == 7.0


def test_a_rule_that_counts_updates_asks_for_the_step():
    with pytest.raises(ValueError, match="RowWiseRMSPropOptimizerSpec counts updates; pass step="):
        make_rule(Optim.ROWWISE_RMSPROP_AR).get_hyperparameters()


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="beta3"):
        make_rule(Optim.ADAM, beta3=0.9)


def test_a_rule_of_the_core_is_taken_with_its_settings():
    rule = rs.FTRLOptimizerSpec(0.3, l1_regularization_strength=0.05, initial_accumulator_value=0.5)
    module = make(((4, 2), (5, 2)), optimizer=[rule, "EXACT_SGD"], learning_rate=0.1)
    assert module.get_learning_rate() == pytest.approx([0.3, 0.1])
    before = module.split_embedding_weights()[0]
    train(module, np.array([1, 2]), np.array([0, 1, 2]))
    rows = before[1:2]
    hyper = rule.get_hyperparameters(jnp.zeros((), jnp.int32))
    wanted, slots = rule.step_rows(rows, rule.init_slots(rows), jnp.ones((1, 2)), hyper)
    np.testing.assert_allclose(module.split_embedding_weights()[0][1:2], wanted, rtol=1e-6)
    state = module.get_optimizer_state()[0]
    assert list(state) == ["accumulator", "linear"]
    np.testing.assert_allclose(state["accumulator"][1], slots[0][0], rtol=1e-6)
    other = make(((4, 2), (5, 2)), optimizer=[rule, "EXACT_SGD"])
    other.load_state_dict(module.state_dict())
    np.testing.assert_array_equal(other.split_embedding_weights()[0], module.split_embedding_weights()[0])
    with pytest.raises(NotImplementedError, match="states of another package have no names here"):
        make(((4, 2),), optimizer=rs.from_optax(optax.adam(0.1)))
    with pytest.raises(NotImplementedError, match="TensorFlowAdamOptimizerSpec goes over whole tables"):
        make(((4, 2),), optimizer=TensorFlowAdamOptimizerSpec(0.1), location=records.EmbeddingLocation.MANAGED_CACHING)
