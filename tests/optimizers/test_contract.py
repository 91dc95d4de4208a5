"""Every public rule in a collection: its published formula in float64, row by row, and rows that keep their bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
import rsembed.optimizers as ro
from tests import oracles
from tests.optimizers.test_rules import step_in_float64
from tests.tbe import row_formulas
from tests.tbe.row_formulas import LR, MAX_COUNTER

NUM_ROWS, DIM = 6, 4
# Ids of two samples; -1 is none. Row 4 is read by both, and in every step; rows 0 and 5 never are.
BATCHES = ([[1, 4, 4], [4, -1, -1]], [[2, 4, -1], [4, 3, 2]], [[1, 4, -1], [3, -1, -1]])
# A step starts from the numbers that the one before it stored, so one rounding of the table is all that may differ.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-8}


def by_entry(rule, row, slots, gradient, step):
    """Rules whose entries know nothing of each other, entry by entry."""
    for k in range(len(row)):
        row[k], new = step_in_float64(rule, row[k], [slot[k] for slot in slots], gradient[k], step)
        for slot, value in zip(slots, new, strict=True):
            slot[k] = value


def by_row(formula, names, /, **arguments):
    """A formula of table-batched embeddings, which knows its states by name."""

    def step_row(rule, row, slots, gradient, step):
        state = {name: slot.copy() for name, slot in zip(names.split(), slots, strict=True)}
        state |= {name: float(own[0]) for name, own in state.items() if len(own) == 1}
        row[:] = formula(row.copy(), gradient, state, step + 1, row_formulas.DEFAULTS | arguments)
        for slot, name in zip(slots, names.split(), strict=True):
            slot[:] = state[name]

    return step_row


def rowwise_adagrad(rule, row, slots, gradient, step):
    oracles.rowwise_adagrad_step(row, slots, gradient, learning_rate=LR, epsilon=rule.epsilon)


def epsilon_hat_adam(rule, row, slots, gradient, step):
    b1, b2, t = rule.beta_1, rule.beta_2, step + 1
    for k, g in enumerate(gradient):
        slots[0][k] = b1 * slots[0][k] + (1 - b1) * g
        slots[1][k] = b2 * slots[1][k] + (1 - b2) * g * g
        row[k] -= LR * (1 - b2**t) ** 0.5 / (1 - b1**t) * slots[0][k] / (slots[1][k] ** 0.5 + rule.epsilon)


def momentum_of_signs(rule, row, slots, gradient, step):
    slots[0][:] = 0.5 * slots[0] + np.sign(gradient)
    row -= LR * slots[0] / (1 + np.sqrt(np.sum(gradient**2)))


def momentum_of_signs_in_jax(gradient, row, momentum, lr):
    momentum = 0.5 * momentum + jnp.sign(gradient)
    return row - lr * momentum / (1.0 + jnp.linalg.norm(gradient)), momentum


def momentum_sgd(rule, row, slots, gradient, step):
    slots[0][:] = 0.9 * slots[0] + gradient
    row -= LR * slots[0]


DECAY = {"weight_decay": 0.3}
GLOBAL = {
    "weight_decay_mode": ro.WeightDecayMode.DECOUPLE_GLOBAL,
    "global_weight_decay": ro.GlobalWeightDecayDefinition(),
}
COUNTING = ro.CounterBasedRegularizationDefinition(
    ro.CounterWeightDecayMode.L2, counter_halflife=4, learning_rate_mode=ro.LearningRateMode.TAIL_ID_LR_INCREASE
)
CLIPPING = ro.CowClipDefinition(ro.CounterWeightDecayMode.DECOUPLE, weight_norm_coefficient=0.5, lower_bound=0.1)
ADAM, COUNTED = "momentum1 momentum2", "momentum1 prev_iter row_counter"
adam, adagrad = row_formulas.adam, row_formulas.rowwise_adagrad

CONTRACT = {
    "sgd": (rs.optimizers.SGD(LR), by_entry),
    "adagrad": (rs.optimizers.Adagrad(LR), by_entry),
    "torch_adagrad": (rs.optimizers.TorchAdagrad(LR), by_entry),
    "adam": (rs.optimizers.Adam(LR), by_entry),
    "adagrad_momentum": (rs.optimizers.AdagradMomentum(LR, use_nesterov=True), by_entry),
    "ftrl": (rs.optimizers.FTRL(LR, l1_regularization_strength=0.05), by_entry),
    "laprop": (rs.optimizers.LaProp(LR), by_entry),
    "f2a": (rs.optimizers.F2A(LR), by_entry),
    "row_wise_adagrad": (rs.optimizers.RowWiseAdagrad(LR), rowwise_adagrad),
    "custom": (rs.optimizers.Custom(LR, momentum_of_signs_in_jax, (0.0,)), momentum_of_signs),
    "optax": (rs.from_optax(optax.sgd(LR, momentum=0.9)), momentum_sgd),
    "tensorflow_adam": (ro.TensorFlowAdam(LR, epsilon=0.01), epsilon_hat_adam),
    "lazy_adam": (ro.LazyAdam(LR, epsilon=0.01), epsilon_hat_adam),
    "adamw": (rs.optimizers.AdamW(LR, **DECAY), by_row(adam, ADAM, **DECAY)),
    "adamw_by_row": (
        rs.optimizers.AdamW(LR, has_row_wise_bias_correction=True, has_row_wise_second_moment=True),
        by_row(functools.partial(adam, partial=True), f"{ADAM} row_counter"),
    ),
    "lamb": (rs.optimizers.LAMB(LR, **DECAY), by_row(functools.partial(adam, lamb=True), ADAM, **DECAY)),
    "lars": (rs.optimizers.LARS(LR, eta=0.2, **DECAY), by_row(row_formulas.lars, "momentum1", eta=0.2, **DECAY)),
    "rmsprop": (
        ro.RowWiseRMSProp(LR, ar_alpha=2.0),
        by_row(row_formulas.rmsprop, "momentum1 prev_iter", ar_alpha=2.0),
    ),
    "decayed_adagrad": (
        ro.DecayedAdagrad(LR, max_norm=0.4, **GLOBAL, **DECAY),
        by_row(adagrad, "momentum1 prev_iter", max_norm=0.4, **GLOBAL, **DECAY),
    ),
    "counter_adagrad": (
        ro.CounterAdagrad(LR, regularization=COUNTING, max_counter=MAX_COUNTER, **DECAY),
        by_row(row_formulas.counter_adagrad, COUNTED, counter_based_regularization=COUNTING, **DECAY),
    ),
    "cowclip_adagrad": (
        ro.CowClipAdagrad(LR, regularization=CLIPPING, **DECAY),
        by_row(row_formulas.cowclip_adagrad, COUNTED, cowclip_regularization=CLIPPING, **DECAY),
    ),
}


def test_the_contract_lists_every_public_rule():
    public = {rule for rule in vars(ro).values() if isinstance(rule, type) and issubclass(rule, rs.OptimizerSpec)}
    public.remove(rs.OptimizerSpec)
    assert {type(rule) for rule, _ in CONTRACT.values()} == public
    assert {value for name, value in vars(rs).items() if name.endswith("OptimizerSpec")} - {rs.OptimizerSpec} <= public


def d_activations(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(2, DIM)).astype(np.float32) for name in CONTRACT}


@functools.cache
def states(dtype):
    """Tables and slots by name, as they were before each step and after the last; one program for all rules."""
    features = []
    for name, (rule, _) in CONTRACT.items():
        table = rs.TableSpec(name=name, vocabulary_size=NUM_ROWS, embedding_dim=DIM, optimizer=rule, dtype=dtype)
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    collection = rs.EmbeddingCollection(features)
    step = jax.jit(collection.update)
    state, found = collection.init(jax.random.key(0)), []
    for number in range(len(BATCHES) + 1):
        tables, slots = jax.tree.map(np.asarray, (collection.tables(state), collection.slots(state)))
        found.append({name: (tables[name], jax.tree.leaves(slots[name])) for name in CONTRACT})
        if number < len(BATCHES):
            ids = np.asarray(BATCHES[number], np.int32)
            state = step(state, collection.prepare(dict.fromkeys(CONTRACT, ids)), d_activations(number))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONTRACT)
def test_a_rule_in_a_collection_follows_its_formula_and_leaves_other_rows_alone(name, dtype):
    rule, step_row = CONTRACT[name]
    for number, (before, after) in enumerate(zip(states(dtype)[:-1], states(dtype)[1:], strict=True)):
        gradients = dict.fromkeys(range(NUM_ROWS) if rule.moves_all_rows else (), np.zeros(DIM))
        for ids, d_output in zip(BATCHES[number], d_activations(number)[name].astype(np.float64), strict=True):
            for row in ids:
                if row >= 0:
                    gradients[row] = gradients.get(row, 0.0) + d_output
        (table, slots), (new_table, new_slots) = before[name], after[name]
        want_table, want_slots = oracles.stepped_table(
            table, slots, gradients, functools.partial(step_row, rule), step=number
        )
        np.testing.assert_allclose(new_table.astype(np.float64), want_table, rtol=TOLERANCE[dtype], atol=2e-6)
        for slot, wanted in zip(new_slots, want_slots, strict=True):
            np.testing.assert_allclose(slot, wanted, rtol=2e-5, atol=2e-6)
        assert (new_table != table).any(axis=1)[[row for row in gradients if np.any(gradients[row])]].all()
        others = [row for row in range(NUM_ROWS) if row not in gradients]
        for old, new in zip((table, *slots), (new_table, *new_slots), strict=True):
            assert old[others].tobytes() == new[others].tobytes()


def test_a_rule_that_moves_all_rows_moves_those_that_were_not_looked_up():
    _, one_step, two_steps, _ = (state["tensorflow_adam"][0] for state in states("float32"))
    assert (one_step[1] != two_steps[1]).all() and 1 not in np.unique(BATCHES[1])
    _, one_step, two_steps, _ = (state["lazy_adam"][0] for state in states("float32"))
    assert (one_step[1] == two_steps[1]).all()
