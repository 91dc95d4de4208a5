"""Worked lookups, gradients, rows of keys and optimizer steps, on different numbers of devices."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import sok
from rsembed.keys import join_keys
from rsembed.optimizers import SGD, RowWiseAdagrad
from tests.sok.training import by_key, context, step_of

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "sok_lookups.json").read_text())
OTHERS = json.loads((DATA / "sok_cases.json").read_text())
STEPS = {case["kind"]: case for case in OTHERS["optimizer"]}


def fill(layer, table):
    rows = {"keys": np.arange(len(table)), "values": np.float32(table)}
    sok.assign_rows(layer.variable, rows)


def cases(kind):
    chosen = [case for case in CASES if case["kind"] == kind]
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


@pytest.mark.slow_rows("combiner_sum_weighted-1-False", "combiner_mean_padding-1-False")
@pytest.mark.parametrize(("num_devices", "use_hashtable"), [(1, False), (3, True)])
@cases("pooled_lookup")
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
    fill(layer, case["table"])
    if "weights" not in case:
        assert_allclose(layer(keys), case["expected"], atol=2e-6)
        return
    weights = np.float32(case["weights"])
    out = layer(keys, weights)
    assert_allclose(out, case["expected"], atol=2e-6)
    # Bags with weights give the same result as padded arrays.
    bags = []
    weights_of_bags = []
    for bag, bag_weights in zip(keys.reshape(-1, 3), weights.reshape(-1, 3), strict=True):
        bags.append(bag[bag >= 0].tolist())
        weights_of_bags.append(bag_weights[bag >= 0].tolist())
    assert_array_equal(layer(bags, weights_of_bags), out)


@cases("pooled_backward")
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
    backward(np.float32(case["top_grad"]))
    expected = {int(key): gradient for key, gradient in case["expected"].items()}
    rows = by_key(layer.variable)
    assert list(rows) == sorted(expected)
    for key, row in rows.items():
        assert_allclose(-row, expected[key], atol=2e-6)


@cases("dense_lookup")
def test_dense_lookups_do_not_depend_on_the_devices(case):
    keys = np.asarray(case["keys"])
    for num_devices in (1, case["gpu_num"]):
        layer = sok.All2AllDenseEmbedding(12, 4, *keys.shape[1:], context=context(num_devices))
        fill(layer, case["table"])
        assert_allclose(layer(keys), case["expected"], atol=2e-6)


def places_of(variable, num_shards):
    """Shard and row of each key."""
    known = variable.get_value().tables["t"].keys
    shards = np.split(join_keys(np.asarray(known.high), np.asarray(known.low)), num_shards)
    is_used = np.split(np.asarray(known.last_step) >= 0, num_shards)
    rows_of_keys = {}
    for shard in range(num_shards):
        for row in np.flatnonzero(is_used[shard]).tolist():
            rows_of_keys[int(shards[shard][row])] = [shard, row]
    return rows_of_keys


@pytest.mark.parametrize("case", OTHERS["dynamic_insert"], ids=lambda case: case["name"])
def test_worked_cases_of_insertion(case):
    num_shards = case["num_shards"]
    width = max(map(len, case["batches"]))
    variable = sok.embedding_variable(
        "t", 2, rows_per_device=case["capacity"], context=context(num_shards)
    )
    steps = case["expected"]["steps"]
    for number, (keys, expected) in enumerate(zip(case["batches"], steps, strict=True)):
        padded = np.full((num_shards, width), -1)
        # The first sample has the keys in the order of the case.
        padded[0, : len(keys)] = keys
        if number in case.get("eval_batches", []):
            sok.group_embedding_lookup_sparse([variable], [padded], ["sum"])
        else:
            step_of(variable, padded)
        rows_of_keys = places_of(variable, num_shards)
        assert [rows_of_keys.get(key, [key % num_shards, -1]) for key in keys] == expected["slots"]
        counts = variable.counts()
        assert counts["rows"].tolist() == expected["sizes"]
        assert counts["failed"].sum() == len(expected["failed"])
    for shard, expected in enumerate(case["expected"].get("final", [])):
        assert {
            str(key): row for key, (owner, row) in rows_of_keys.items() if owner == shard
        } == expected


SLOT_NAMES = {"momentum": "m", "velocity": "v", "accumulator": "acc"}


def optimizer_of(case):
    if case["kind"] == "rowwise_adagrad":
        return RowWiseAdagrad(case["lr"], case["initial_accumulator"], case["epsilon"])
    kind = {"adam": sok.optimizers.Adam, "lazy_adam": sok.optimizers.LazyAdam}[case["kind"]]
    return kind(case["lr"], case["beta_1"], case["beta_2"], case["epsilon"])


@pytest.mark.slow_rows("rowwise_adagrad", "lazy_adam")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_worked_steps_of_adam_as_tensorflow_has_it_and_of_row_wise_adagrad(case):
    start = np.float32(case["table"])
    num_rows, dim = start.shape
    keys = 2**40 + 7 * np.arange(num_rows)
    variable = sok.embedding_variable(
        "t", dim, rows_per_device=8, optimizer=optimizer_of(case), context=context(1)
    )
    sok.assign_rows(variable, {"keys": keys, "values": start})
    for step, expected in zip(case["steps"], case["expected"]["steps"], strict=True):
        ids = keys[step["indices"], None]
        _, backward = sok.group_embedding_lookup_vjp([variable], [ids], ["sum"])
        backward([np.float32(step["grads"])])
        actual = sok.export_rows(variable)
        assert_array_equal(actual["keys"], keys)
        assert_allclose(actual["values"], expected["table"], rtol=2e-6, atol=2e-6)
        for ours, theirs in SLOT_NAMES.items():
            if theirs in expected:
                slot = np.array(expected[theirs]).reshape(num_rows, -1)
                assert_allclose(actual[f"slot_{ours}"], slot, rtol=2e-6, atol=2e-6)
