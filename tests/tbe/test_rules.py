"""Row rules of the module beyond the numbers that `test_random_configurations.py` compares with their formulas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
from rsembed import tbe as rt
from rsembed.optimizers import TensorFlowAdam
from rsembed.tbe import OptimType as Optim
from tests.tbe.oracle import Oracle, make, train
from tests.tbe.row_formulas import MAX_COUNTER, VARIANTS


@pytest.mark.parametrize(
    ("optimizer", "core"),
    [
        (Optim.EXACT_SGD, rs.optimizers.SGD),
        (Optim.EXACT_ADAGRAD, rs.optimizers.TorchAdagrad),
        (Optim.EXACT_ROWWISE_ADAGRAD, rs.optimizers.RowWiseAdagrad),
        (Optim.ADAM, rs.optimizers.Adam),
    ],
)
def test_rules_with_native_kernels_are_used_where_the_numbers_are_the_same(optimizer, core):
    assert type(make(((6, 4),), optimizer=optimizer).plan.tables[0].rule) is core


@pytest.mark.parametrize("variant", ["counter_adagradw_increase", "global"])
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
    rule = rs.optimizers.FTRL(0.3, l1_regularization_strength=0.05, initial_accumulator_value=0.5)
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
    with pytest.raises(NotImplementedError, match="TensorFlowAdam goes over whole tables"):
        make(((4, 2),), optimizer=TensorFlowAdam(0.1), location=rt.EmbeddingLocation.MANAGED_CACHING)
