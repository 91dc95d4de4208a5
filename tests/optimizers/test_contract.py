"""Every public rule: its published formula in float64, row by row, and rows that keep their bits in any company."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.kernels import api, native
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.sparsecore import embedding
from tests import oracles
from tests.sparsecore import small_world
from tests.tbe import row_formulas
from tests.tbe.row_formulas import LR, MAX_COUNTER

NUM_ROWS, DIM = 6, 4
# Ids of two samples; -1 is none. Row 4 is read by both, and in every step; rows 0 and 5 never are.
BATCHES = ([[1, 4, 4], [4, -1, -1]], [[2, 4, -1], [4, 3, 2]], [[1, 4, -1], [3, -1, -1]])
# A step starts from the numbers that the one before it stored, so one rounding of the table is all that may differ.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-8}


def step_in_float64(optimizer, row, slots, gradient, step):
    """One step of one entry, scalar by scalar, straight from the published formulas."""
    lr = optimizer.learning_rate
    match optimizer.short_name():
        case "sgd":
            return row - lr * gradient, ()
        case "adagrad":
            total = slots[0] + gradient**2
            return row - lr * gradient / total**0.5, (total,)
        case "torch_adagrad":
            total = slots[0] + gradient**2
            return row - lr * gradient / (total**0.5 + optimizer.epsilon), (total,)
        case "adam":
            t, b1, b2 = step + 1, optimizer.beta_1, optimizer.beta_2
            m = b1 * slots[0] + (1 - b1) * gradient
            v = b2 * slots[1] + (1 - b2) * gradient**2
            return row - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + optimizer.epsilon), (
                m,
                v,
            )
        case "adagrad_momentum":
            b2, momentum = optimizer.beta2, optimizer.momentum
            total = slots[0] + gradient**2 if b2 == 1 else b2 * slots[0] + (1 - b2) * gradient**2
            q = gradient * (total + optimizer.epsilon) ** (-1 / optimizer.exponent)
            m = momentum * slots[1] + q
            return row - lr * (momentum * m + q if optimizer.use_nesterov else m), (total, m)
        case "ftrl":
            k, l1, l2 = -optimizer.learning_rate_power, *_regularization(optimizer)
            total = slots[0] + gradient**2
            e = total**k - slots[0] ** k
            if optimizer.multiply_linear_by_learning_rate:
                linear = slots[1] + lr * gradient - e * row
                bound, denominator = lr * l1, total**k + 2 * lr * l2 + optimizer.beta
            else:
                linear = slots[1] + gradient - e / lr * row
                bound, denominator = l1, (total**k + optimizer.beta) / lr + 2 * l2
            return (min(max(linear, -bound), bound) - linear) / denominator, (total, linear)
        case "laprop":
            b1, b2 = optimizer.b1, optimizer.b2
            d = b2 * (1 - b2**step) / (1 - b2 ** (step + 1))
            nu = d * slots[1] + (1 - d) * (gradient**2 + optimizer.eps)
            mu = b1 * slots[0] + (1 - b1**2) ** 0.5 * gradient / nu**0.5
            return row - lr * mu, (mu, nu)
        case "f2a":
            total, seen = slots[0] + gradient**2, slots[1] + 1
            ratio = min((max(step, 1) / seen) ** optimizer.rho, optimizer.max_lr_multiplier)
            l1, l2 = _regularization(optimizer)
            direction = ratio * gradient / total**0.5 + l1 * np.sign(row) + l2 * row
            return row - lr * direction, (total, seen)
    raise AssertionError(optimizer)


def _regularization(optimizer):
    return optimizer.l1_regularization_strength, optimizer.l2_regularization_strength


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
    rate = rule.learning_rate * (1 - b2**t) ** 0.5 / (1 - b1**t)
    for k, g in enumerate(gradient):
        slots[0][k] = b1 * slots[0][k] + (1 - b1) * g
        slots[1][k] = b2 * slots[1][k] + (1 - b2) * g * g
        row[k] -= rate * slots[0][k] / (slots[1][k] ** 0.5 + rule.epsilon)


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
    "weight_decay_mode": rs.tbe.WeightDecayMode.DECOUPLE_GLOBAL,
    "global_weight_decay": rs.tbe.GlobalWeightDecayDefinition(),
}
COUNTING = rs.tbe.CounterBasedRegularizationDefinition(
    rs.tbe.CounterWeightDecayMode.L2,
    counter_halflife=4,
    learning_rate_mode=rs.tbe.LearningRateMode.TAIL_ID_LR_INCREASE,
)
CLIPPING = rs.tbe.CowClipDefinition(
    rs.tbe.CounterWeightDecayMode.DECOUPLE, weight_norm_coefficient=0.5, lower_bound=0.1
)
ADAM, COUNTED = "momentum1 momentum2", "momentum1 prev_iter row_counter"
adam, adagrad = row_formulas.adam, row_formulas.rowwise_adagrad

CONTRACT = {
    "sgd": (rs.optimizers.SGD(LR), by_entry),
    "adagrad": (rs.optimizers.Adagrad(LR), by_entry),
    "torch_adagrad": (rs.optimizers.TorchAdagrad(LR, epsilon=0.05), by_entry),
    "adam": (rs.optimizers.Adam(LR, beta_1=0.8, beta_2=0.99), by_entry),
    "adagrad_momentum": (ro.rules.AdagradMomentum(LR), by_entry),
    "nesterov": (
        ro.rules.AdagradMomentum(LR, beta2=0.9, exponent=3.0, use_nesterov=True),
        by_entry,
    ),
    "ftrl": (rs.optimizers.FTRL(LR, l1_regularization_strength=0.05), by_entry),
    "ftrl_l2": (
        rs.optimizers.FTRL(LR, learning_rate_power=-0.3, l2_regularization_strength=0.02, beta=0.1),
        by_entry,
    ),
    "ftrl_by_rate": (
        rs.optimizers.FTRL(
            LR, l1_regularization_strength=0.5, multiply_linear_by_learning_rate=True
        ),
        by_entry,
    ),
    "laprop": (rs.optimizers.LaProp(LR), by_entry),
    "f2a": (
        ro.rules.F2A(LR, l1_regularization_strength=0.01, l2_regularization_strength=0.02),
        by_entry,
    ),
    "f2a_capped": (ro.rules.F2A(LR, rho=2.0, max_lr_multiplier=1.5), by_entry),
    "row_wise_adagrad": (rs.optimizers.RowWiseAdagrad(LR), rowwise_adagrad),
    "custom": (rs.optimizers.Custom(LR, momentum_of_signs_in_jax, (0.0,)), momentum_of_signs),
    "optax": (rs.from_optax(optax.sgd(LR, momentum=0.9)), momentum_sgd),
    "tensorflow_adam": (ro.rules.TensorFlowAdam(LR, epsilon=0.01), epsilon_hat_adam),
    "lazy_adam": (ro.LazyAdam(LR, epsilon=0.01), epsilon_hat_adam),
    "adamw": (rs.optimizers.AdamW(LR, **DECAY), by_row(adam, ADAM, **DECAY)),
    "adamw_by_row": (
        rs.optimizers.AdamW(LR, has_row_wise_bias_correction=True, has_row_wise_second_moment=True),
        by_row(functools.partial(adam, partial=True), f"{ADAM} row_counter"),
    ),
    "lamb": (
        rs.optimizers.LAMB(LR, **DECAY),
        by_row(functools.partial(adam, lamb=True), ADAM, **DECAY),
    ),
    "lars": (
        rs.optimizers.LARS(LR, eta=0.2, **DECAY),
        by_row(row_formulas.lars, "momentum1", eta=0.2, **DECAY),
    ),
    "decayed_adagrad": (
        ro.regularized.DecayedAdagrad(LR, max_norm=0.4, **GLOBAL, **DECAY),
        by_row(adagrad, "momentum1 prev_iter", max_norm=0.4, **GLOBAL, **DECAY),
    ),
    "counter_adagrad": (
        ro.regularized.CounterAdagrad(
            LR, regularization=COUNTING, max_counter=MAX_COUNTER, **DECAY
        ),
        by_row(
            row_formulas.counter_adagrad, COUNTED, counter_based_regularization=COUNTING, **DECAY
        ),
    ),
    "cowclip_adagrad": (
        ro.regularized.CowClipAdagrad(LR, regularization=CLIPPING, **DECAY),
        by_row(row_formulas.cowclip_adagrad, COUNTED, cowclip_regularization=CLIPPING, **DECAY),
    ),
}

# Native, traced by entry, with powers, and traced by row.
OF_EACH_KIND = {"adam", "laprop", "ftrl", "lamb", "counter_adagrad"}


def test_the_contract_lists_every_rule():
    classes = [
        own for module in (ro.base, ro.rules, ro.regularized) for own in vars(module).values()
    ]
    rules = {own for own in classes if hasattr(own, "step_rows") and not inspect.isabstract(own)}
    assert {type(rule) for rule, _ in CONTRACT.values()} == {
        rule for rule in rules if rule.__name__[0] != "_"
    }


def d_activations(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(2, DIM)).astype(np.float32) for name in CONTRACT}


@functools.cache
def states(dtype):
    """Tables and slots by name, as they were before each step and after the last; one program for all rules."""
    features = []
    for name, (rule, _) in CONTRACT.items():
        table = rs.TableSpec(name, NUM_ROWS, DIM, optimizer=rule, dtype=dtype)
        features.append(rs.FeatureSpec(name, table))
    collection = rs.EmbeddingCollection(features)
    step = jax.jit(collection.update)
    state, found = collection.init(jax.random.key(0)), []
    for number in range(len(BATCHES) + 1):
        tables, slots = jax.tree.map(
            np.asarray, (collection.tables(state), collection.slots(state))
        )
        found.append({name: (tables[name], jax.tree.leaves(slots[name])) for name in CONTRACT})
        if number < len(BATCHES):
            ids = np.asarray(BATCHES[number], np.int32)
            state = step(
                state, collection.prepare(dict.fromkeys(CONTRACT, ids)), d_activations(number)
            )
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONTRACT)
def test_a_rule_in_a_collection_follows_its_formula_and_leaves_other_rows_alone(name, dtype):
    rule, step_row = CONTRACT[name]
    for number, (before, after) in enumerate(
        zip(states(dtype)[:-1], states(dtype)[1:], strict=True)
    ):
        gradients = dict.fromkeys(range(NUM_ROWS) if rule.moves_all_rows else (), np.zeros(DIM))
        for ids, d_output in zip(
            BATCHES[number], d_activations(number)[name].astype(np.float64), strict=True
        ):
            for row in ids:
                if row >= 0:
                    gradients[row] = gradients.get(row, 0.0) + d_output
        (table, slots), (new_table, new_slots) = before[name], after[name]
        want_table, want_slots = oracles.stepped_table(
            table, slots, gradients, functools.partial(step_row, rule), step=number
        )
        assert_allclose(new_table.astype(np.float64), want_table, rtol=TOLERANCE[dtype], atol=2e-6)
        for slot, wanted in zip(new_slots, want_slots, strict=True):
            assert_allclose(slot, wanted, rtol=2e-5, atol=2e-6)
        assert (
            (new_table != table)
            .any(axis=1)[[row for row in gradients if np.any(gradients[row])]]
            .all()
        )
        others = [row for row in range(NUM_ROWS) if row not in gradients]
        for old, new in zip((table, *slots), (new_table, *new_slots), strict=True):
            assert old[others].tobytes() == new[others].tobytes()


def test_a_rule_that_moves_all_rows_moves_those_that_were_not_looked_up():
    _, one_step, two_steps, _ = (state["tensorflow_adam"][0] for state in states("float32"))
    assert (one_step[1] != two_steps[1]).all() and 1 not in np.unique(BATCHES[1])
    _, one_step, two_steps, _ = (state["lazy_adam"][0] for state in states("float32"))
    assert (one_step[1] == two_steps[1]).all()


@pytest.mark.slow_rows("ftrl", "lamb")
@pytest.mark.usefixtures("more_optimizations")
@pytest.mark.skipif(
    native.unavailable_because() is not None, reason="XLA alone rounds as the shapes have it"
)
@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow)
        for name, (rule, _) in CONTRACT.items()
        if not rule.moves_all_rows
    ],
)
def test_the_bits_of_a_row_are_those_that_it_has_in_any_company(name):
    rule, num_rows, dim, draw = CONTRACT[name][0], 700, 16, np.random.default_rng(0)
    table, gradients = (
        jnp.asarray(draw.normal(size=(num_rows, dim)).astype(np.float32)) for _ in range(2)
    )
    slots = tuple(slot + jnp.asarray(1, slot.dtype) for slot in rule.init_slots(table))
    hyper = rule.get_hyperparameters(jnp.int32(3))
    step = jax.jit(
        lambda rows, gradients: api.apply_rows(table, slots, rows, gradients, Step(hyper, rule))
    )
    of_all = step(jnp.arange(num_rows, dtype=jnp.int32), gradients)
    for company in (np.arange(5, 8), np.sort(draw.permutation(num_rows)[:139])):
        padded = np.insert(company, [1, 1], NO_ROW).astype(np.int32)
        own = step(jnp.asarray(padded), gradients.at[padded].get(mode="clip"))
        for one, other in zip(jax.tree.leaves(of_all), jax.tree.leaves(own), strict=True):
            assert_array_equal(np.asarray(one)[company], np.asarray(other)[company])


@pytest.mark.slow_rows("lamb")
@pytest.mark.parametrize("name", ["tensorflow_adam", "lamb", "counter_adagrad"])
def test_padding_columns_and_other_cores_leave_the_numbers_of_a_rule_alone(name):
    rule, step_row = CONTRACT[name]
    specs = small_world.placed_specs(1, 4, optimizer=rule)
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("x",)), P("x", None))
    variables = embedding.init_embedding_variables(
        jax.random.key(0), embedding.get_table_specs(specs), sharding
    )
    grad = functools.partial(
        embedding.sparse_dense_matmul_grad, feature_specs=specs, global_device_count=1
    )
    stepped_by = jax.jit(
        lambda gradients, inputs, variables, step: grad(gradients, inputs, variables, step=step)
    )
    wanted = {
        name: jax.tree.leaves(own)
        for name, own in small_world.logical_variables(variables, specs).items()
    }
    for step in range(2):
        ids, d_activations = small_world.draw_batch(step)
        inputs, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, specs, 1, 1)
        variables = stepped_by(d_activations, inputs, variables, np.int32(step))
        for table, own in small_world.dense_row_gradients(ids, d_activations).items():
            rows = range(small_world.TABLES[table]) if rule.moves_all_rows else ()
            own = {row: np.zeros(small_world.DIM) for row in rows} | own
            first, *slots = wanted[table]
            stepped, slots = oracles.stepped_table(
                first, slots, own, functools.partial(step_row, rule), step=step
            )
            wanted[table] = [stepped, *slots]
    for table, own in small_world.logical_variables(variables, specs).items():
        for array, expected in zip(jax.tree.leaves(own), wanted[table], strict=True):
            assert_allclose(array, expected, rtol=2e-5, atol=small_world.VALUE_TOLERANCE)
