"""Adam as TensorFlow has it, for all rows and for touched rows, against the worked cases and loops in numpy."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import Hashed, TableSpec, sok
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.optimizers import RowWiseAdagrad

DATA = json.loads((Path(__file__).parent.parent / "data" / "sok_cases.json").read_text())
CASES = {case["kind"]: case for case in DATA["optimizer"]}
LENGTH = 4
SLOT_NAMES = {"momentum": "m", "velocity": "v", "accumulator": "acc"}


def optimizer_of(case):
    if case["kind"] == "rowwise_adagrad":
        return RowWiseAdagrad(case["lr"], case["initial_accumulator"], case["epsilon"])
    kind = {"adam": sok.optimizers.Adam, "lazy_adam": sok.optimizers.LazyAdam}[case["kind"]]
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
