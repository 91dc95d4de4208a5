"""Adam as TensorFlow has it, for all rows and for touched rows, and row-wise Adagrad, against the worked cases."""

import json
from pathlib import Path

import numpy as np
import pytest

from rsembed import sok
from rsembed.optimizers import RowWiseAdagrad
from tests.sok.training import context

DATA = json.loads((Path(__file__).parent.parent / "data" / "sok_cases.json").read_text())
CASES = {case["kind"]: case for case in DATA["optimizer"]}
SLOT_NAMES = {"momentum": "m", "velocity": "v", "accumulator": "acc"}


def optimizer_of(case):
    if case["kind"] == "rowwise_adagrad":
        return RowWiseAdagrad(case["lr"], case["initial_accumulator"], case["epsilon"])
    kind = {"adam": sok.optimizers.Adam, "lazy_adam": sok.optimizers.LazyAdam}[case["kind"]]
    return kind(case["lr"], case["beta_1"], case["beta_2"], case["epsilon"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_worked_cases(case):
    start = np.array(case["table"], np.float32)
    num_rows, dim = start.shape
    keys = 2**40 + 7 * np.arange(num_rows)
    options = {"rows_per_device": 8, "optimizer": optimizer_of(case), "context": context(1)}
    variable = sok.embedding_variable("t", dim, **options)
    sok.assign_rows(variable, {"keys": keys, "values": start})
    for given, expected in zip(case["steps"], case["expected"]["steps"], strict=True):
        _, backward = sok.group_embedding_lookup_vjp([variable], [keys[given["indices"], None]], ["sum"])
        backward([np.array(given["grads"], np.float32)])
        found = sok.export_rows(variable)
        np.testing.assert_array_equal(found["keys"], keys)
        np.testing.assert_allclose(found["values"], expected["table"], rtol=2e-6, atol=2e-6)
        for ours, theirs in SLOT_NAMES.items():
            if theirs in expected:
                slot = np.array(expected[theirs]).reshape(num_rows, -1)
                np.testing.assert_allclose(found[f"slot_{ours}"], slot, rtol=2e-6, atol=2e-6)
