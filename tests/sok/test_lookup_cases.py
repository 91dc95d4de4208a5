"""Worked lookups and gradients, through the public layers, on any number of devices."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rsembed import sok
from rsembed.optimizers import SGD

CASES = json.loads((Path(__file__).parents[1] / "data" / "sok_lookups.json").read_text())


def context(num_devices):
    return sok.Init(mesh=Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",)))


def filled(layer, table):
    sok.assign_rows(layer.variable, {"keys": np.arange(len(table)), "values": np.asarray(table, np.float32)})
    return layer


def cases(kind):
    return [pytest.param(case, id=case["name"]) for case in CASES if case["kind"] == kind]


@pytest.mark.parametrize(("num_devices", "use_hashtable"), [(1, False), (3, True)])
@pytest.mark.parametrize("case", cases("pooled_lookup"))
def test_pooled(case, num_devices, use_hashtable):
    keys = np.asarray(case["keys"])
    layer = sok.DistributedEmbedding(
        case["combiner"], 12, 4, *keys.shape[1:], use_hashtable=use_hashtable, context=context(num_devices)
    )
    weights = np.asarray(case["weights"], np.float32) if "weights" in case else None
    out = filled(layer, case["table"])(keys, weights)
    np.testing.assert_allclose(out, case["expected"], atol=2e-6)
    if weights is not None:  # bags with weights say the same as padded arrays
        bags = [
            (bag[bag >= 0].tolist(), w[bag >= 0].tolist())
            for bag, w in zip(keys.reshape(-1, 3), weights.reshape(-1, 3), strict=True)
        ]
        again = layer([ids for ids, _ in bags], [own for _, own in bags])
        np.testing.assert_array_equal(again, out)


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
        np.testing.assert_allclose(-row, case["expected"][str(key)], atol=2e-6)


@pytest.mark.parametrize("case", cases("dense_lookup"))
def test_dense_lookups_do_not_depend_on_the_devices(case):
    keys = np.asarray(case["keys"])
    for num_devices in (1, case["gpu_num"]):
        layer = sok.All2AllDenseEmbedding(12, 4, *keys.shape[1:], context=context(num_devices))
        out = filled(layer, case["table"])(keys)
        np.testing.assert_allclose(out, case["expected"], atol=2e-6)
