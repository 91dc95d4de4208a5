"""Every public rule follows its published formula, and the bits of a row depend on no other row."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.kernels import api, native
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.sparsecore import embedding, table_stacking
from tests import oracles
from tests.sparsecore import small_world
from tests.tbe import row_formulas
from tests.tbe.row_formulas import LR, MAX_COUNTER

NUM_ROWS, DIM = 6, 4
# Ids of two samples in three steps, padded with -1. Row 4 is read in every step, and by both
# samples in the first two steps. Rows 0 and 5 are never read.
BATCHES = ([[1, 4, 4], [4, -1, -1]], [[2, 4, -1], [4, 3, 2]], [[1, 4, -1], [3, -1, -1]])
# The expected numbers of a step are computed from the stored numbers of the step before, so they
# differ by no more than one rounding.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-8}


def step_in_float64(optimizer, row, slots, gradient, step):
    """Row and slots after a step of an entry-wise rule, by its published formula."""
    lr = optimizer.learning_rate
    match optimizer.short_name():
        case "tf_adam" | "tf_lazy_adam":
            t = step + 1
            b1 = optimizer.beta_1
            b2 = optimizer.beta_2
            m = b1 * slots[0] + (1 - b1) * gradient
            v = b2 * slots[1] + (1 - b2) * gradient**2
            root = np.sqrt(1 - b2**t)
            return row - lr * root / (1 - b1**t) * m / (np.sqrt(v) + optimizer.epsilon), (m, v)
        case "adagrad_momentum":
            b2 = optimizer.beta2
            momentum = optimizer.momentum
            total = b2 * slots[0] + (1 if b2 == 1 else 1 - b2) * gradient**2
            q = gradient * (total + optimizer.epsilon) ** (-1 / optimizer.exponent)
            m = momentum * slots[1] + q
            return row - lr * (momentum * m + q if optimizer.use_nesterov else m), (total, m)
        case "ftrl":
            k = -optimizer.learning_rate_power
            l1, l2 = _regularization(optimizer)
            total = slots[0] + gradient**2
            e = total**k - slots[0] ** k
            if optimizer.multiply_linear_by_learning_rate:
                linear = slots[1] + lr * gradient - e * row
                bound = lr * l1
                denominator = total**k + 2 * lr * l2 + optimizer.beta
            else:
                linear = slots[1] + gradient - e / lr * row
                bound = l1
                denominator = (total**k + optimizer.beta) / lr + 2 * l2
            return (np.clip(linear, -bound, bound) - linear) / denominator, (total, linear)
        case "laprop":
            b1 = optimizer.b1
            b2 = optimizer.b2
            d = b2 * (1 - b2**step) / (1 - b2 ** (step + 1))
            nu = d * slots[1] + (1 - d) * (gradient**2 + optimizer.eps)
            mu = b1 * slots[0] + (1 - b1**2) ** 0.5 * gradient / nu**0.5
            return row - lr * mu, (mu, nu)
        case "f2a":
            total = slots[0] + gradient**2
            seen = slots[1] + 1
            ratio = (max(step, 1) / seen) ** optimizer.rho
            ratio = np.minimum(ratio, optimizer.max_lr_multiplier)
            l1, l2 = _regularization(optimizer)
            direction = ratio * gradient / np.sqrt(total) + l1 * np.sign(row) + l2 * row
            return row - lr * direction, (total, seen)
    raise AssertionError(optimizer)


def _regularization(optimizer):
    return optimizer.l1_regularization_strength, optimizer.l2_regularization_strength


def by_entry(rule, row, slots, gradient, step):
    row[:], new_slots = step_in_float64(rule, row, slots, gradient, step)
    for slot, values in zip(slots, new_slots, strict=True):
        slot[:] = values


def by_row(formula, names, /, **arguments):
    """A function that steps a row by a formula of table-batched embeddings.

    `names` has the formula's names of the slots, in the order of the slots.
    """

    def step_row(rule, row, slots, gradient, step):
        state = {}
        for name, slot in zip(names.split(), slots, strict=True):
            state[name] = slot.copy() if len(slot) > 1 else float(slot[0])
        row[:] = formula(row.copy(), gradient, state, step + 1, row_formulas.DEFAULTS | arguments)
        for slot, name in zip(slots, names.split(), strict=True):
            slot[:] = state[name]

    return step_row


def momentum_of_signs(rule, row, slots, gradient, step):
    slots[0][:] = 0.5 * slots[0] + np.sign(gradient) + 0.1 * row.mean()
    row -= LR * slots[0] / (1 + np.sqrt(np.sum(gradient**2)))


def momentum_of_signs_in_jax(gradient, row, momentum, lr):
    momentum = 0.5 * momentum + jnp.sign(gradient) + 0.1 * jnp.mean(row)
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
adam = row_formulas.adam

CONTRACT = {
    "sgd": (ro.SGD(LR), by_row(row_formulas.sgd, "")),
    "adagrad": (ro.Adagrad(LR), by_row(row_formulas.adagrad, "momentum1", eps=0.0)),
    "torch_adagrad": (
        ro.TorchAdagrad(LR, epsilon=0.05),
        by_row(row_formulas.adagrad, "momentum1", eps=0.05),
    ),
    "adam": (ro.Adam(LR, beta_1=0.8, beta_2=0.99), by_row(adam, ADAM, beta1=0.8, beta2=0.99)),
    "adagrad_momentum": (ro.rules.AdagradMomentum(LR), by_entry),
    "nesterov": (
        ro.rules.AdagradMomentum(LR, beta2=0.9, exponent=3.0, use_nesterov=True),
        by_entry,
    ),
    "ftrl": (ro.FTRL(LR, l1_regularization_strength=0.05), by_entry),
    "ftrl_l2": (
        ro.FTRL(LR, learning_rate_power=-0.3, l2_regularization_strength=0.02, beta=0.1),
        by_entry,
    ),
    "ftrl_by_rate": (
        ro.FTRL(LR, l1_regularization_strength=0.5, multiply_linear_by_learning_rate=True),
        by_entry,
    ),
    "laprop": (ro.LaProp(LR), by_entry),
    "f2a": (
        ro.rules.F2A(LR, l1_regularization_strength=0.01, l2_regularization_strength=0.02),
        by_entry,
    ),
    "f2a_capped": (ro.rules.F2A(LR, rho=2.0, max_lr_multiplier=1.5), by_entry),
    "row_wise_adagrad": (
        ro.RowWiseAdagrad(LR),
        by_row(row_formulas.rowwise_adagrad, "momentum1"),
    ),
    "custom": (ro.Custom(LR, momentum_of_signs_in_jax, (0.0,)), momentum_of_signs),
    "optax": (ro.from_optax(optax.sgd(LR, momentum=0.9)), momentum_sgd),
    "tensorflow_adam": (ro.rules.TensorFlowAdam(LR, epsilon=0.01), by_entry),
    "lazy_adam": (ro.LazyAdam(LR, epsilon=0.01), by_entry),
    "adamw": (ro.AdamW(LR, **DECAY), by_row(adam, ADAM, **DECAY)),
    "adamw_by_row": (
        ro.AdamW(LR, has_row_wise_bias_correction=True, has_row_wise_second_moment=True),
        by_row(functools.partial(adam, partial=True), f"{ADAM} row_counter"),
    ),
    "lamb": (
        ro.LAMB(LR, **DECAY),
        by_row(functools.partial(adam, lamb=True), ADAM, **DECAY),
    ),
    "lars": (
        ro.LARS(LR, eta=0.2, **DECAY),
        by_row(row_formulas.lars, "momentum1", eta=0.2, **DECAY),
    ),
    "decayed_adagrad": (
        ro.regularized.DecayedAdagrad(LR, max_norm=0.4, **GLOBAL, **DECAY),
        by_row(
            row_formulas.rowwise_adagrad,
            "momentum1 prev_iter",
            max_norm=0.4,
            **GLOBAL | {"weight_decay_mode": "DECOUPLE_GLOBAL"},
            **DECAY,
        ),
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

# One native rule, one that is traced by entry, one with powers, and two that are traced by row.
OF_EACH_KIND = {"adam", "laprop", "ftrl", "lamb", "counter_adagrad"}


def test_the_contract_lists_every_rule():
    rules = set()
    for name, rule in (vars(ro.base) | vars(ro.rules) | vars(ro.regularized)).items():
        if hasattr(rule, "step_rows") and not inspect.isabstract(rule) and name[0] != "_":
            rules.add(rule)
    assert {type(rule) for rule, _ in CONTRACT.values()} == rules


def d_outputs_of(step):
    """Gradients of the outputs of both samples."""
    return np.random.default_rng(step).normal(size=(2, DIM)).astype(np.float32)


@functools.cache
def states(dtype):
    """Tables and slots by name, before each step and after the last. One program runs all rules."""
    features = []
    for name, (rule, _) in CONTRACT.items():
        table = rs.TableSpec(name, NUM_ROWS, DIM, optimizer=rule, dtype=dtype)
        features.append(rs.FeatureSpec(name, table))
    collection = rs.EmbeddingCollection(features)
    step = jax.jit(collection.update)
    state = collection.init(jax.random.key(0))
    results = [(collection.tables(state), collection.slots(state))]
    for number, ids in enumerate(BATCHES):
        batch = collection.prepare(dict.fromkeys(CONTRACT, np.int32(ids)))
        state = step(state, batch, dict.fromkeys(CONTRACT, d_outputs_of(number)))
        results.append((collection.tables(state), collection.slots(state)))
    return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONTRACT)
def test_a_rule_in_a_collection_follows_its_formula_and_leaves_other_rows_alone(name, dtype):
    rule, step_row = CONTRACT[name]
    results = []
    for tables, slots in states(dtype):
        results.append((tables[name], *jax.tree.leaves(slots[name])))
    for number, batch in enumerate(BATCHES):
        read = {}
        for ids, d_output in zip(batch, np.float64(d_outputs_of(number)), strict=True):
            for row in ids:
                if row >= 0:
                    read[row] = read.get(row, 0.0) + d_output
        gradients = read
        if rule.moves_all_rows:
            gradients = dict.fromkeys(range(NUM_ROWS), np.zeros(DIM)) | read
        table, *slots = results[number]
        new_table, *new_slots = results[number + 1]
        step_row_of = functools.partial(step_row, rule)
        wanted, wanted_slots = oracles.stepped_table(
            table, slots, gradients, step_row_of, step=number
        )
        assert_allclose(np.float64(new_table), wanted, rtol=TOLERANCE[dtype], atol=2e-6)
        for slot, values in zip(new_slots, wanted_slots, strict=True):
            assert_allclose(slot, values, rtol=2e-5, atol=2e-6)
        assert (new_table != table).any(axis=1)[[*read]].all()
        others = [row for row in range(NUM_ROWS) if row not in gradients]
        for old, new in zip(results[number], results[number + 1], strict=True):
            assert old[others].tobytes() == new[others].tobytes()


@pytest.mark.slow_rows("ftrl", "lamb")
@pytest.mark.usefixtures("more_optimizations")
@pytest.mark.skipif(
    native.unavailable_because() is not None,
    reason="without native kernels, rounding depends on the shapes of arrays",
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
    rule, _ = CONTRACT[name]
    draw = np.random.default_rng(0)
    table = jnp.asarray(draw.normal(size=(700, 16)), jnp.float32)
    gradients = jnp.asarray(draw.normal(size=(700, 16)), jnp.float32)
    slots = tuple(slot + jnp.asarray(1, slot.dtype) for slot in rule.init_slots(table))
    kernel_step = Step(rule.get_hyperparameters(jnp.int32(3)), rule)
    step = jax.jit(lambda *arguments: api.apply_rows(table, slots, *arguments, kernel_step))
    of_all = jax.tree.leaves(step(jnp.arange(700), gradients))
    for company in (np.arange(5, 8), np.sort(draw.permutation(700)[:139])):
        padded = jnp.asarray(np.insert(company, [1, 1], NO_ROW))
        of_some = jax.tree.leaves(step(padded, gradients.at[padded].get(mode="clip")))
        for one, other in zip(of_all, of_some, strict=True):
            assert_array_equal(one[company], other[company])


@pytest.mark.slow_rows("lamb", "tensorflow_adam")
@pytest.mark.parametrize("name", ["tensorflow_adam", "lamb", "counter_adagrad", "custom"])
def test_padding_columns_and_other_cores_leave_the_numbers_of_a_rule_alone(name):
    rule, step_row = CONTRACT[name]
    specs = small_world.placed_specs(1, 4, optimizer=rule)
    logical = small_world.logical_variables(small_world.init(specs), specs)
    # The padding is NaN, so reading it would make the results NaN.
    stacked = table_stacking.stack_and_shard_tables(embedding.get_table_specs(specs), logical, 4)
    variables = jax.tree.map(lambda rows: jnp.asarray(rows.reshape(-1, rows.shape[-1])), stacked)
    update = functools.partial(
        embedding.sparse_dense_matmul_grad, feature_specs=specs, global_device_count=1
    )
    update = jax.jit(update)
    wanted = {}
    for table, arrays in logical.items():
        wanted[table] = jax.tree.leaves(arrays)
    for step in range(2):
        ids, d_activations = small_world.draw_batch(step)
        inputs, _ = small_world.preprocess(specs, ids)
        variables = update(d_activations, inputs, variables, step=np.int32(step))
        for table, gradients in small_world.dense_row_gradients(ids, d_activations).items():
            if rule.moves_all_rows:
                all_rows = range(small_world.TABLES[table])
                gradients = dict.fromkeys(all_rows, np.zeros(small_world.DIM)) | gradients
            first, *slots = wanted[table]
            stepped, slots = oracles.stepped_table(
                first, slots, gradients, functools.partial(step_row, rule), step=step
            )
            wanted[table] = [stepped, *slots]
    for table, arrays in small_world.logical_variables(variables, specs).items():
        for array, expected in zip(jax.tree.leaves(arrays), wanted[table], strict=True):
            assert_allclose(array, expected, rtol=2e-5, atol=small_world.VALUE_TOLERANCE)
