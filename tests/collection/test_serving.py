"""Lookups for serving give the collection's activations, also in a process without rsembed."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.kernels.contract import IdList
from rsembed.keys import split_keys
from rsembed.sok import Keys
from rsembed.tt import TensorTrain
from tests.oracles import pooled_lookup
from tests.world import assert_close

ROWS, SHAPE = 50, (6, 3)
STORAGES = {"keys": rs.Hashed(), "host": rs.HostCached(cache_rows=20), "train": TensorTrain((2,))}
LANES = {"high": "uint32", "low": "uint32", "is_key": "bool"}
COMBINERS = {name: name for name in ("sum", "mean", "sqrtn", "none")}
COMBINERS |= dict.fromkeys(STORAGES, "mean")
IDS = {
    name: np.random.default_rng(number).integers(-1, ROWS, SHAPE).astype(np.int32)
    for number, name in enumerate(COMBINERS)
}
for ids in IDS.values():
    ids[0, 0] = -1


@pytest.fixture(scope="module")
def trained():
    """A collection with all storages and combiners, and its state after one step."""
    features = []
    for name, combiner in COMBINERS.items():
        table = rs.TableSpec(name, ROWS, 4, combiner=combiner, storage=STORAGES.get(name),
            optimizer=rs.optimizers.SGD(0.1),
        )  # fmt: skip
        features.append(rs.FeatureSpec(name, table))
    collection = rs.EmbeddingCollection(features)
    state = collection.init(jax.random.key(0))
    ones = jax.tree.map(np.ones_like, collection.lookup(state, IDS))
    return collection, collection.update(state, IDS, ones)


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "int8"])
def test_activations_are_those_of_the_collection_up_to_what_the_dtype_can_hold(trained, dtype):
    collection, state = trained
    lookup, tables = rs.for_serving(collection, state, dtype=dtype)
    actual = jax.jit(lookup)(tables, collection.prepare(IDS))
    for name, expected in collection.lookup(state, IDS).items():
        largest = np.abs(np.asarray(tables[name]["rows"], np.float32)).max()
        largest = largest if dtype != "int8" else 127 * np.asarray(tables[name]["scales"]).max()
        error = {None: 1e-7, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.51 / 127}[dtype]
        times = {"sum": 3, "sqrtn": 3**0.5}.get(name, 1)
        assert_allclose(actual[name], expected, atol=2 * times * error * largest)


def test_ragged_bags_with_weights_and_ids_outside_pool_as_numpy_does(trained):
    lookup, tables = rs.for_serving(*trained)
    ids, offsets = np.array([3, 2**32 + 60, 7, 2**32 + 3, 7, 2]), np.array([0, 2, 2, 5])
    weights = np.array([0.5, 1.0, 2.0, 1.0, -1.0, 9.0], np.float32)
    actual = lookup(tables, dict.fromkeys(COMBINERS, rs.Bags(ids, offsets, weights)))
    for name in ("sum", "mean", "sqrtn"):
        expected = pooled_lookup(tables[name]["rows"], IdList(ids, offsets, weights), name)
        assert_allclose(actual[name], expected, atol=1e-6)


def test_keys_of_64_bits_are_found_by_both_lanes_and_unknown_ones_read_zeros(trained):
    collection, state = trained
    keys = np.array([5, 2**32 + 5, -7, 2**32 + 6])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = collection.with_tables(state, {"keys": {"keys": keys[:3], "values": values}})
    lookup, tables = rs.for_serving(collection, state)
    batch = IDS | {"keys": keys}
    for actual in (lookup(tables, batch), jax.jit(lookup)(tables, collection.prepare(batch))):
        assert_array_equal(actual["keys"], np.concatenate([values, np.zeros((1, 4))]))


READER = """
import sys
sys.modules["rsembed"] = None  # an import of it fails
import jax, numpy as np
from jax import export
folder = sys.argv[1]
served = export.deserialize(open(folder + "/lookup.bin", "rb").read())
for count in (1, 6):
    ids = dict(np.load(f"{folder}/ids_{count}.npz"))
    np.savez(f"{folder}/found_{count}.npz", **served.call(ids))
"""


def test_a_process_without_the_library_reads_an_exported_lookup_for_any_batch_and_platform(
    trained, tmp_path
):
    lookup, tables = rs.for_serving(*trained)
    (batch,) = export.symbolic_shape("batch")
    dtypes = dict.fromkeys(COMBINERS, "int32") | LANES
    del dtypes["keys"]
    shapes = {
        name: jax.ShapeDtypeStruct((batch, SHAPE[1]), dtype) for name, dtype in dtypes.items()
    }

    def of_lanes(arrays):
        ids = dict(arrays)
        ids["keys"] = Keys(*(ids.pop(lane) for lane in LANES))
        return lookup(tables, ids)

    exported = export.export(jax.jit(of_lanes), platforms=("cpu", "cuda", "tpu"))(shapes)
    assert "rsembed" not in exported.mlir_module()
    (tmp_path / "lookup.bin").write_bytes(exported.serialize())
    expected = {}
    for count in (1, 6):
        arrays = {name: ids[:count] for name, ids in IDS.items()}
        expected[count] = lookup(tables, arrays)
        lanes = split_keys(arrays.pop("keys"))._asdict()
        np.savez(tmp_path / f"ids_{count}.npz", **arrays, **{lane: lanes[lane] for lane in LANES})
    subprocess.run([sys.executable, "-c", READER, str(tmp_path)], check=True)
    for count, activations in expected.items():
        assert_close(dict(np.load(tmp_path / f"found_{count}.npz")), activations, atol=1e-7)


@pytest.mark.parametrize(("combiner", "shape"), [("sum", (2, 3)), ("none", (2, 3, 3))])
def test_activations_have_the_columns_and_shape_that_a_feature_declares(combiner, shape):
    table = rs.TableSpec("t", ROWS, 4, combiner=combiner)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table, output_shape=shape))
    state, batch = collection.init(jax.random.key(0)), {"f": np.array([[1, 2, -1], [3, -1, 4]])}
    lookup, tables = rs.for_serving(collection, state)
    actual = lookup(tables, batch)["f"]
    assert actual.shape == shape
    assert_allclose(actual, collection.lookup(state, batch)["f"], rtol=1e-6)
