"""Worked lookups, gradients, rows of keys and steps of optimizers, through public calls, on any number of devices."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import sok
from rsembed.keys import join_keys
from rsembed.optimizers import SGD, RowWiseAdagrad
from tests.sok.training import context

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "sok_lookups.json").read_text())
OTHERS = json.loads((DATA / "sok_cases.json").read_text())
STEPS = {case["kind"]: case for case in OTHERS["optimizer"]}


def filled(layer, table):
    sok.assign_rows(
        layer.variable, {"keys": np.arange(len(table)), "values": np.asarray(table, np.float32)}
    )
    return layer


def cases(kind):
    return [pytest.param(case, id=case["name"]) for case in CASES if case["kind"] == kind]


@pytest.mark.slow_rows("combiner_sum_weighted-1-False", "combiner_mean_padding-1-False")
@pytest.mark.parametrize(("num_devices", "use_hashtable"), [(1, False), (3, True)])
@pytest.mark.parametrize("case", cases("pooled_lookup"))
def test_pooled(case, num_devices, use_hashtable):
    keys = np.asarray(case["keys"])
    layer = sok.DistributedEmbedding(
        case["combiner"],
        12,
        4,
        *keys.shape[1:],
        use_hashtable=use_hashtable,
        context=context(num_devices),
    )
    weights = np.asarray(case["weights"], np.float32) if "weights" in case else None
    out = filled(layer, case["table"])(keys, weights)
    assert_allclose(out, case["expected"], atol=2e-6)
    if weights is not None:  # bags with weights say the same as padded arrays
        bags = [
            (bag[bag >= 0].tolist(), w[bag >= 0].tolist())
            for bag, w in zip(keys.reshape(-1, 3), weights.reshape(-1, 3), strict=True)
        ]
        again = layer([ids for ids, _ in bags], [own for _, own in bags])
        assert_array_equal(again, out)


@pytest.mark.parametrize("case", cases("pooled_backward"))
def test_gradients_reach_the_keys_and_no_others(case):
    keys = np.asarray(case["keys"])
    layer = sok.DistributedEmbedding(
        case["combiner"],
        9,
        4,
        *keys.shape[1:],
        embedding_initializer="zeros",
        optimizer=SGD(1.0),
        context=context(3),
    )
    _, backward = layer.vjp(keys)
    backward(np.asarray(case["top_grad"], np.float32))
    rows = sok.export_rows(layer.variable)
    assert rows["keys"].tolist() == sorted(int(key) for key in case["expected"])
    for key, row in zip(rows["keys"], rows["values"], strict=True):
        assert_allclose(-row, case["expected"][str(key)], atol=2e-6)


@pytest.mark.parametrize("case", cases("dense_lookup"))
def test_dense_lookups_do_not_depend_on_the_devices(case):
    keys = np.asarray(case["keys"])
    for num_devices in (1, case["gpu_num"]):
        layer = sok.All2AllDenseEmbedding(12, 4, *keys.shape[1:], context=context(num_devices))
        out = filled(layer, case["table"])(keys)
        assert_allclose(out, case["expected"], atol=2e-6)


def places_of(variable, num_shards):
    """Shard and row of every key."""
    known = variable.get_value().tables["t"].keys
    keys = join_keys(np.asarray(known.high), np.asarray(known.low)).tolist()
    used, capacity = np.asarray(known.last_step) >= 0, len(keys) // num_shards
    return {key: [row // capacity, row % capacity] for row, key in enumerate(keys) if used[row]}


@pytest.mark.parametrize("case", OTHERS["dynamic_insert"], ids=lambda case: case["name"])
def test_worked_cases_of_insertion(case):
    num_shards, width = case["num_shards"], max(map(len, case["batches"]))
    variable = sok.embedding_variable(
        "t", 2, rows_per_device=case["capacity"], context=context(num_shards)
    )
    for number, (keys, expected) in enumerate(
        zip(case["batches"], case["expected"]["steps"], strict=True)
    ):
        padded = np.full((num_shards, width), -1)
        padded[0, : len(keys)] = keys  # the first sample, in the order of the case
        if number in case.get("eval_batches", []):
            sok.group_embedding_lookup_sparse([variable], [padded], ["sum"])
        else:
            outputs, backward = sok.group_embedding_lookup_vjp([variable], [padded], ["sum"])
            backward(outputs)
        places, counts = places_of(variable, num_shards), variable.counts()
        assert [places.get(key, [key % num_shards, -1]) for key in keys] == expected["slots"]
        assert counts["rows"].tolist() == expected["sizes"]
        assert counts["failed"].sum() == len(expected["failed"])
    for shard, expected in enumerate(case["expected"].get("final", [])):
        assert {str(key): row for key, (own, row) in places.items() if own == shard} == expected


SLOT_NAMES = {"momentum": "m", "velocity": "v", "accumulator": "acc"}


def optimizer_of(case):
    if case["kind"] == "rowwise_adagrad":
        return RowWiseAdagrad(case["lr"], case["initial_accumulator"], case["epsilon"])
    kind = {"adam": sok.optimizers.Adam, "lazy_adam": sok.optimizers.LazyAdam}[case["kind"]]
    return kind(case["lr"], case["beta_1"], case["beta_2"], case["epsilon"])


@pytest.mark.slow_rows("rowwise_adagrad", "lazy_adam")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_worked_steps_of_adam_as_tensorflow_has_it_and_of_row_wise_adagrad(case):
    start = np.array(case["table"], np.float32)
    num_rows, dim = start.shape
    keys = 2**40 + 7 * np.arange(num_rows)
    options = {"rows_per_device": 8, "optimizer": optimizer_of(case), "context": context(1)}
    variable = sok.embedding_variable("t", dim, **options)
    sok.assign_rows(variable, {"keys": keys, "values": start})
    for given, expected in zip(case["steps"], case["expected"]["steps"], strict=True):
        _, backward = sok.group_embedding_lookup_vjp(
            [variable], [keys[given["indices"], None]], ["sum"]
        )
        backward([np.array(given["grads"], np.float32)])
        found = sok.export_rows(variable)
        assert_array_equal(found["keys"], keys)
        assert_allclose(found["values"], expected["table"], rtol=2e-6, atol=2e-6)
        for ours, theirs in SLOT_NAMES.items():
            if theirs in expected:
                slot = np.array(expected[theirs]).reshape(num_rows, -1)
                assert_allclose(found[f"slot_{ours}"], slot, rtol=2e-6, atol=2e-6)
