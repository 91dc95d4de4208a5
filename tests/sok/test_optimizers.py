"""Adam as TensorFlow has it, for all rows and for touched rows, against the worked cases and loops in numpy."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import Hashed, TableSpec
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.optimizers import RowWiseAdagradOptimizerSpec
from rsembed.sok.optimizers import Adam, LazyAdam

DATA = json.loads((Path(__file__).parent.parent / "data" / "sok_cases.json").read_text())
CASES = {case["kind"]: case for case in DATA["optimizer"]}
LENGTH = 4
SLOT_NAMES = {"momentum": "m", "velocity": "v", "accumulator": "acc"}


def optimizer_of(case):
    if case["kind"] == "rowwise_adagrad":
        return RowWiseAdagradOptimizerSpec(case["lr"], case["initial_accumulator"], case["epsilon"])
    kind = {"adam": Adam, "lazy_adam": LazyAdam}[case["kind"]]
    return kind(case["lr"], case["beta_1"], case["beta_2"], case["epsilon"])


def key_of(row):
    return 2**40 + 7 * row


HOME = Hashed()


def table_of(case, dim):
    return TableSpec(name="t", vocabulary_size=8, embedding_dim=dim, optimizer=optimizer_of(case), storage=HOME)


@functools.cache
def stepped(table):
    def program(state, rows, step, gradients):
        how = Step(table.optimizer.get_hyperparameters(step), table.optimizer)
        return HOME.step(*state, [Segment(rows, None, None, "none")], [gradients], table, step=how)

    return jax.jit(program)


def imported(table, start):
    """A table whose row `r` belongs to `key_of(r)`: rows are handed out in order."""
    keys = np.array([key_of(row) for row in range(len(start))])
    fresh = jax.jit(functools.partial(HOME.init, table=table, shard=jnp.int32(0), num_shards=1))(jax.random.key(0))
    return HOME.with_rows(*fresh, {"keys": keys, "values": start}, table, 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_worked_cases(case):
    start = np.array(case["table"], np.float32)
    num_rows, dim = start.shape
    table = table_of(case, dim)
    state = imported(table, start)
    for number, (given, expected) in enumerate(zip(case["steps"], case["expected"]["steps"], strict=True)):
        length = len(given["indices"])
        rows = np.array(given["indices"] + [NO_ROW] * (LENGTH - length), np.int32)
        gradients = np.full((LENGTH, dim), 1e3, np.float32)  # what padding brings must not matter
        gradients[:length] = given["grads"]
        state = stepped(table)(state, rows, np.int32(number), gradients)
        found = HOME.rows(*state, table, 1)
        assert found["keys"].tolist() == [key_of(row) for row in range(num_rows)]
        np.testing.assert_allclose(found["values"], expected["table"], rtol=2e-6, atol=2e-6)
        for ours, theirs in SLOT_NAMES.items():
            if theirs in expected:
                slot = np.array(expected[theirs]).reshape(num_rows, -1)
                np.testing.assert_allclose(found[f"slot_{ours}"], slot, rtol=2e-6, atol=2e-6)


def loop_over_rows(table, m, v, gradients, *, lr, b1, b2, epsilon, t, every_row):
    """One step of rows in float64, one number after the other."""
    for row in range(len(table)):
        if row not in gradients and not every_row:
            continue
        for k in range(table.shape[1]):
            g = gradients[row][k] if row in gradients else 0.0
            m[row, k] = b1 * m[row, k] + (1 - b1) * g
            v[row, k] = b2 * v[row, k] + (1 - b2) * g * g
            table[row, k] -= lr * (1 - b2**t) ** 0.5 / (1 - b1**t) * m[row, k] / (v[row, k] ** 0.5 + epsilon)


@pytest.mark.parametrize("every_row", [True, False], ids=["all rows", "touched rows"])
def test_steps_follow_the_formula_and_epsilon_stands_outside_the_correction(every_row):
    # An epsilon as large as the root of v tells the two places apart.
    optimizer = (Adam if every_row else LazyAdam)(lambda step: 0.1 / (step + 1), 0.8, 0.95, 0.3)
    generator = np.random.default_rng(0)
    expected = generator.normal(size=(6, 3))
    m, v = np.zeros((6, 3)), np.zeros((6, 3))
    table, slots = jnp.asarray(expected, jnp.float32), (jnp.zeros((6, 3)), jnp.zeros((6, 3)))
    step_of_rows = jax.jit(lambda *arguments: api.apply_rows(*arguments, optimizer))
    for step in range(5):
        rows = generator.choice(6, 2, replace=False).astype(np.int32)
        gradients = generator.normal(size=(3, 3)).astype(np.float32)
        hyper = optimizer.get_hyperparameters(step)
        table, slots = step_of_rows(table, slots, np.array([*rows, NO_ROW], np.int32), gradients, hyper)
        loop_over_rows(
            *(expected, m, v, dict(zip(rows.tolist(), gradients, strict=False))),
            **{"lr": 0.1 / (step + 1), "b1": 0.8, "b2": 0.95, "epsilon": 0.3, "t": step + 1, "every_row": every_row},
        )
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(slots[0], m, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(slots[1], v, rtol=1e-5, atol=1e-6)


def test_rows_that_were_not_looked_up_keep_their_bits_under_lazy_adam():
    case = CASES["lazy_adam"]
    start = np.array(case["table"], np.float32)
    table = table_of(case, 3)
    rows = np.array([2, NO_ROW, NO_ROW, NO_ROW], np.int32)
    state = stepped(table)(imported(table, start), rows, np.int32(0), np.ones((LENGTH, 3), np.float32))
    after = HOME.rows(*state, table, 1)["values"]
    assert (after[[0, 1, 3, 4]] == start[[0, 1, 3, 4]]).all() and (after[2] != start[2]).all()


def test_a_table_of_16_bits_keeps_its_dtype():
    adam = dataclasses.replace(Adam(), learning_rate=0.5)
    slots = (jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    rows, gradients = jnp.asarray([1], jnp.int32), jnp.ones((1, 3))
    table = jnp.ones((2, 3), jnp.bfloat16)
    table, _ = api.apply_rows(table, slots, rows, gradients, adam.get_hyperparameters(0), adam)
    assert table.dtype == jnp.bfloat16
    np.testing.assert_allclose(table.astype(jnp.float32), [[1.0] * 3, [0.5] * 3], atol=1e-2)
