"""Row rules of the module beyond the numbers that `test_random_configurations.py` compares with their formulas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
from rsembed import tbe as rt
from rsembed.optimizers import TensorFlowAdamOptimizerSpec
from rsembed.tbe import OptimType as Optim
from rsembed.tbe.arguments import dtype_of, make_rule
from tests.tbe.oracle import Oracle, make, train
from tests.tbe.row_formulas import MAX_COUNTER, VARIANTS

IDS, OFFSETS = np.array([1, 4, 4]), np.array([0, 2, 3])


@pytest.mark.parametrize(
    ("optimizer", "core"),
    [
        (Optim.EXACT_SGD, rs.SGDOptimizerSpec),
        (Optim.EXACT_ADAGRAD, rs.TorchAdagradOptimizerSpec),
        (Optim.EXACT_ROWWISE_ADAGRAD, rs.RowWiseAdagradOptimizerSpec),
        (Optim.ADAM, rs.AdamOptimizerSpec),
    ],
)
def test_rules_with_native_kernels_are_used_where_the_numbers_are_the_same(optimizer, core):
    assert type(make_rule(optimizer)) is core


# Every kind of rule, and every layout of slots.
SIXTEEN_BITS = "adagrad rowwise_max_norm ensemble global counter_l2 cowclip adam_by_row partial_lamb lars rmsprop"


@pytest.mark.parametrize(
    ("variant", "sparse_type"),
    [*((name, rt.SparseType.BF16) for name in SIXTEEN_BITS.split()), ("adamw", rt.SparseType.FP16)],
)
def test_momenta_may_be_stored_in_16_bits_while_rules_compute_in_float32(variant, sparse_type):
    optimizer, arguments, formula = VARIANTS[variant]
    names = make(((6, 4),), optimizer=optimizer, **arguments).plan.tables[0].state_names
    momenta = dict.fromkeys((name for name in names if name.startswith("momentum")), sparse_type)
    module = make(((6, 4),), optimizer=optimizer, optimizer_state_dtypes=momenta, **arguments)
    train(module, IDS, OFFSETS)
    oracle = Oracle(module, (0,), "sum", formula, arguments)
    train(module, IDS, OFFSETS)
    oracle.backward(IDS, OFFSETS, None, [2], np.ones((2, 4)))
    np.testing.assert_allclose(module.split_embedding_weights()[0], oracle.tables[0], rtol=3e-5, atol=3e-6)
    dtype = dtype_of(sparse_type, "states")
    for found, (name, wanted) in zip(module.split_optimizer_states()[0], oracle.states[0].items(), strict=True):
        own = {"prev_iter": jnp.int32, "row_counter": jnp.float32}.get(name, dtype)
        assert found.dtype == own
        np.testing.assert_allclose(np.float64(found), wanted, rtol=2.0**-7 if own == dtype else 1e-6, err_msg=name)


@pytest.mark.parametrize("variant", ["rmsprop", "counter_adagradw_increase", "global"])
def test_steps_and_the_gaps_of_rows_are_exact_beyond_the_integers_of_float32(variant):
    optimizer, arguments, formula = VARIANTS[variant]
    module = make(((6, 4),), optimizer=optimizer, **arguments)
    numbers = {"step": np.int32(2**25), "max_counter": np.float32(MAX_COUNTER)}
    module.load_state_dict(module.state_dict() | numbers)
    for row in (1, 2):
        train(module, np.array([row]), np.array([0, 1]))
    (states,) = module.get_optimizer_state()
    assert states["prev_iter"][1:3].tolist() == [2**25 + 1, 2**25 + 2]
    oracle = Oracle(module, (0,), "sum", formula, arguments)
    output, _ = train(module, np.array([1]), np.array([0, 1]))
    np.testing.assert_allclose(output[0], oracle.read(0, 1), rtol=1e-6)
    oracle.backward([1], [0, 1], None, [1], np.ones((1, 4)))
    oracle.assert_agrees(module, rtol=1e-6, atol=1e-6)


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
        make(((4, 2),), optimizer=TensorFlowAdamOptimizerSpec(0.1), location=rt.EmbeddingLocation.MANAGED_CACHING)
