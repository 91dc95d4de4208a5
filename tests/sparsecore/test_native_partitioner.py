"""The native partitioner equals its definition bit by bit, whatever it is given and however many threads it uses."""

import contextlib
import os
import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.fdo import SparseDenseMatmulInputStats
from rsembed.sparsecore import embedding, embedding_spec, native_partitioner, partitioner, table_stacking
from rsembed.sparsecore.host_features import read_features
from rsembed.sparsecore.layout import stack_layouts

_reason = native_partitioner.unavailable_because()
if _reason is not None and os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
    raise RuntimeError(f"RSEMBED_REQUIRE_NATIVE=1, but {_reason}")
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"needs the native host partitioner: {_reason}")

LAYOUTS = [(1, 4), (1, 1), (3, 1), (2, 2), (1, 3), (4, 2), (1, 16)]
ID_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4"]
# Keys of the last do not fit 32 bits, and three such tables still fit one stack.
VOCABULARIES = [1, 7, 40, 300, 70_000, 2**29 + 5]


@contextlib.contextmanager
def threads(number):
    """Makes even small batches use so many threads, on a machine of any size."""
    with (
        mock.patch.object(native_partitioner, "num_threads", lambda: number),
        mock.patch.object(native_partitioner, "_MIN_IDS_PER_THREAD", 1),
    ):
        yield


def make_specs(devices, cores, tables, features, *, limits=(256, 256), suggested=None, rotation=None):
    """Specs from `{table: (vocabulary, combiner)}` and `{feature: (table, batch)}`; a rotation stacks all tables."""
    table_specs = {
        name: embedding_spec.TableSpec(
            name=name,
            vocabulary_size=vocabulary,
            embedding_dim=8,
            combiner=combiner,
            max_ids_per_partition=limits[0],
            max_unique_ids_per_partition=limits[1],
            suggested_coo_buffer_size_per_device=suggested,
        )
        for name, (vocabulary, combiner) in tables.items()
    }
    specs = {
        name: embedding_spec.FeatureSpec(
            name=name, table_spec=table_specs[table], input_shape=(batch, 1), output_shape=(batch, 8)
        )
        for name, (table, batch) in features.items()
    }
    if rotation is not None:
        used = dict.fromkeys(table for table, _ in features.values())
        table_stacking.stack_tables(
            specs,
            list(used),
            devices,
            cores,
            rotation,
            stack_to_max_ids_per_partition=lambda *_: limits[0],
            stack_to_max_unique_ids_per_partition=lambda *_: limits[1],
        )
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    return specs


def partition(module, specs, batch, weights, devices, cores, local_devices, drops):
    """Buffers and statistics, or the message of the error."""
    layouts = stack_layouts(specs, num_devices=devices, num_cores=cores)
    by_name = {feature.spec.name: feature for feature in read_features(specs, batch, weights, local_devices, devices)}
    readers = {name: [by_name[feature.name] for feature in layout.features] for name, layout in layouts.items()}
    statistics = SparseDenseMatmulInputStats()
    try:
        buffers = module.partition_stacks(partitioner.HostBatch(layouts, readers, local_devices, drops, statistics))
    except ValueError as error:
        return str(error)
    return buffers, statistics


def assert_same(got, expected):
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected
        return
    (buffers, statistics), (expected_buffers, expected_statistics) = got, expected
    assert list(buffers) == list(expected_buffers)
    for name, stack in expected_buffers.items():
        for field, array in stack._asdict().items():
            mine = getattr(buffers[name], field)
            assert mine.dtype == array.dtype and mine.shape == array.shape, field
            np.testing.assert_array_equal(mine.view(np.int32), array.view(np.int32), err_msg=f"{name} {field}")
    for field in ("max_ids_per_partition", "max_unique_ids_per_partition", "required_buffer_size_per_sc"):
        mine, theirs = getattr(statistics, field), getattr(expected_statistics, field)
        assert mine.keys() == theirs.keys()
        for name, counts in theirs.items():
            assert mine[name].dtype == counts.dtype
            np.testing.assert_array_equal(mine[name], counts, err_msg=field)
    assert statistics.id_drop_counters == expected_statistics.id_drop_counters
    assert statistics.id_drops_by_table == expected_statistics.id_drops_by_table


def assert_equals_definition(specs, batch, weights, devices, cores, *, local_devices=1, drops=False, num_threads=2):
    given = specs, batch, weights, devices, cores, local_devices, drops
    expected = partition(partitioner, *given)
    with threads(num_threads):
        got = partition(native_partitioner, *given)
    assert_same(got, expected)


def draw_ids(generator, vocabulary, dtype, size):
    """Half of the ids come from a few rows, so that samples have duplicates and partitions are uneven."""
    top = min(vocabulary - 1, int(np.iinfo(dtype).max))
    wide = generator.integers(0, top, size, endpoint=True, dtype=np.int64)
    narrow = generator.integers(max(top - 3, 0), top, size, endpoint=True, dtype=np.int64)
    return np.where(generator.random(size) < 0.5, wide, narrow).astype(dtype)


def draw_leaf(generator, kind, vocabulary, dtype, num_samples):
    """Ids as users have them."""
    if kind == "dense":
        return draw_ids(generator, vocabulary, dtype, (num_samples, int(generator.integers(0, 6))))
    rows = [draw_ids(generator, vocabulary, dtype, int(generator.integers(0, 7))) for _ in range(num_samples)]
    if kind == "lists":
        return [row.tolist() for row in rows]
    leaf = np.empty(num_samples, object)
    leaf[:] = rows
    return leaf


def draw_weights(generator, leaf):
    def like(row):
        weights = generator.normal(size=np.shape(row)).astype(np.float32)
        return np.where(generator.random(np.shape(row)) < 0.2, np.float32(0), weights)

    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return like(leaf)
    return [like(row) for row in leaf]


@st.composite
def problems(draw):
    devices, cores = draw(st.sampled_from(LAYOUTS))
    combiners = st.sampled_from(["sum", "mean", "sqrtn"])
    rotation = draw(st.none() | st.integers(0, 5))
    combiner = draw(combiners)
    tables = {
        f"t{k}": (draw(st.sampled_from(VOCABULARIES)), combiner if rotation is not None else draw(combiners))
        for k in range(draw(st.integers(1, 3)))
    }
    features = {
        f"f{k}": (draw(st.sampled_from(sorted(tables))), devices * cores * draw(st.integers(1, 5)))
        for k in range(draw(st.integers(1, 4)))
    }
    limit = st.sampled_from([1, 2, 5, 9, 256])
    max_ids = draw(limit)
    largest = -(-max_ids // 8) * 8 * cores * devices * cores
    return {
        "devices": devices,
        "cores": cores,
        "tables": tables,
        "features": features,
        "limits": (max_ids, draw(limit)),
        "suggested": draw(st.none() | st.integers(1, largest)),
        "rotation": rotation,
        "local_devices": draw(st.sampled_from([devices, 1])),
        "drops": draw(st.booleans()),
        "kinds": {name: draw(st.sampled_from(["dense", "lists", "arrays"])) for name in features},
        "dtypes": {name: draw(st.sampled_from(ID_DTYPES)) for name in features},
        "has_weights": draw(st.booleans()),
        "num_threads": draw(st.sampled_from([1, 2, 7])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_the_definition(problem):
    devices, cores, features = problem["devices"], problem["cores"], problem["features"]
    specs = make_specs(
        devices,
        cores,
        problem["tables"],
        features,
        limits=problem["limits"],
        suggested=problem["suggested"],
        rotation=problem["rotation"],
    )
    generator = np.random.default_rng(problem["seed"])
    local_devices = problem["local_devices"]
    batch = {
        name: draw_leaf(
            generator,
            problem["kinds"][name],
            problem["tables"][table][0],
            problem["dtypes"][name],
            num_samples * local_devices // devices,
        )
        for name, (table, num_samples) in features.items()
    }
    weights = None
    if problem["has_weights"]:
        weights = {name: draw_weights(generator, leaf) for name, leaf in batch.items()}
    assert_equals_definition(
        specs,
        batch,
        weights,
        devices,
        cores,
        local_devices=local_devices,
        drops=problem["drops"],
        num_threads=problem["num_threads"],
    )


@pytest.mark.parametrize("num_threads", [1, 7])
def test_large_batches_take_every_pass_of_the_sort(num_threads):
    specs = make_specs(
        1, 2, {"a": (2**30, "mean"), "b": (50_000, "mean")}, {"f": ("a", 4096), "g": ("b", 2048), "h": ("a", 2)},
        limits=(40_000, 40_000), rotation=1,
    )  # fmt: skip
    generator = np.random.default_rng(3)
    batch = {
        "f": draw_ids(generator, 2**30, "int64", (4096, 7)),
        "g": draw_ids(generator, 50_000, "uint16", (2048, 3)),
        "h": [[], [5]],
    }
    weights = {name: draw_weights(generator, leaf) for name, leaf in batch.items()}
    for chosen in (None, weights):
        assert_equals_definition(specs, batch, chosen, 1, 2, num_threads=num_threads)


def test_a_batch_without_ids_equals_the_definition():
    specs = make_specs(1, 4, {"t": (30, "mean")}, {"f": ("t", 8)})
    for batch in (np.zeros((8, 0), np.int32), [[]] * 8):
        for weights in (None, {"f": batch}):
            assert_equals_definition(specs, {"f": batch}, weights, 1, 4)


def test_scattered_and_read_only_ids_are_read_right():
    specs = make_specs(1, 2, {"t": (30, "sum")}, {"f": ("t", 8)})
    ids = np.random.default_rng(0).integers(0, 30, (16, 3), dtype=np.int32)[::2]
    ids.flags.writeable = False
    assert_equals_definition(specs, {"f": ids}, None, 1, 2)


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(-1, "int8"), (-1, "int64"), (30, "int32"), (30, "uint8"), (2**40, "int64"), (2**63 + 1, "uint64")],
)
def test_an_id_outside_its_table_is_named(bad, dtype):
    specs = make_specs(1, 2, {"t": (30, "sum")}, {"f": ("t", 8), "g": ("t", 8)})
    batch = {name: np.ones((8, 3), dtype) for name in specs}
    batch["g"][5, 1] = bad
    with pytest.raises(ValueError, match=rf"feature 'g': id {bad} in sample 5 is outside table 't'.*=30"):
        embedding.preprocess_sparse_dense_matmul_input(
            batch, None, specs, 1, 1, num_sc_per_device=2, allow_id_dropping=True
        )


@pytest.mark.parametrize(("bad", "combiner"), [(np.nan, "sum"), (np.inf, "mean"), (-np.inf, "sqrtn")])
def test_a_weight_that_is_not_finite_is_named(bad, combiner):
    specs = make_specs(1, 2, {"t": (30, combiner)}, {"f": ("t", 8)})
    weights = np.ones((8, 3), np.float32)
    weights[6, 2] = bad
    with pytest.raises(ValueError, match=r"feature 'f': weight .* in sample 6 is not finite"):
        embedding.preprocess_sparse_dense_matmul_input(
            {"f": np.ones((8, 3), np.int32)}, {"f": weights}, specs, 1, 1, num_sc_per_device=2
        )


def test_preprocessing_uses_it():
    specs = make_specs(1, 2, {"t": (30, "sum")}, {"f": ("t", 8)})
    with mock.patch.object(native_partitioner, "partition_stacks", wraps=native_partitioner.partition_stacks) as used:
        embedding.preprocess_sparse_dense_matmul_input(
            {"f": np.ones((8, 3), np.int32)}, None, specs, 1, 1, num_sc_per_device=2
        )
    assert used.call_count == 1


def test_buffers_are_aligned_for_devices():
    specs = make_specs(1, 2, {"a": (30, "sum"), "b": (9, "sum")}, {"f": ("a", 8), "g": ("b", 8)}, suggested=16)
    batch = {name: np.ones((8, 1), np.int32) for name in specs}
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(batch, None, specs, 1, 1, num_sc_per_device=2)
    for arrays in processed.sparse_dense_matmul_input:
        assert all(array.ctypes.data % 64 == 0 for array in arrays.values())


def test_python_runs_beside_it():
    specs = make_specs(1, 2, {"t": (100_000, "sum")}, {"f": ("t", 32768)}, limits=(300_000, 300_000), suggested=1 << 20)
    batch = {"f": np.random.default_rng(0).integers(0, 100_000, (32768, 30), dtype=np.int32)}
    function, inside, beats = native_partitioner._partition_function(), threading.Event(), []

    def call(*arguments):
        inside.set()
        try:
            return function(*arguments)
        finally:
            inside.clear()

    def preprocess():
        with mock.patch.object(native_partitioner, "_partition_function", lambda: call), threads(1):
            for _ in range(3):
                embedding.preprocess_sparse_dense_matmul_input(batch, None, specs, 1, 1, num_sc_per_device=2)

    worker = threading.Thread(target=preprocess)
    worker.start()
    while worker.is_alive():
        if inside.is_set():
            beats.append(time.perf_counter())
        time.sleep(0.0005)
    worker.join()
    assert len(beats) > 3  # with the lock held, at most one at the edge of each call


@pytest.mark.parametrize("wanted", [" 1 ", "1000000"])
def test_the_environment_caps_the_threads(wanted, monkeypatch):
    monkeypatch.delenv(native_partitioner.THREADS_VARIABLE, raising=False)
    available = native_partitioner.num_threads()
    monkeypatch.setenv(native_partitioner.THREADS_VARIABLE, wanted)
    assert native_partitioner.num_threads() == min(available, int(wanted))


@pytest.mark.parametrize("wanted", ["0", "many"])
def test_a_senseless_number_of_threads_is_refused(wanted, monkeypatch):
    monkeypatch.setenv(native_partitioner.THREADS_VARIABLE, wanted)
    with pytest.raises(ValueError, match=f"must be a number of at least 1, got '{wanted}'"):
        native_partitioner.num_threads()
