"""The native partitioner equals the NumPy partitioner bit by bit, with any number of threads."""

import contextlib
import dataclasses
import os
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rsembed.sparsecore import embedding, native_partitioner, table_stacking
from tests.sparsecore.small_world import feature_specs, place, preprocess, ragged

_reason = native_partitioner.unavailable_because()
if _reason is not None and os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
    raise RuntimeError(f"RSEMBED_REQUIRE_NATIVE=1, but {_reason}")
pytestmark = pytest.mark.skipif(
    _reason is not None, reason=f"needs the native host partitioner: {_reason}"
)

LAYOUTS = [(1, 4), (1, 1), (3, 1), (2, 2), (1, 3), (4, 2), (1, 16)]
ID_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4"]
# Sort keys of the largest table do not fit 32 bits, and a stack can still have three such tables.
VOCABULARIES = [1, 7, 40, 300, 70_000, 2**29 + 5]


@contextlib.contextmanager
def threads(number):
    """Makes preprocessing use this number of threads, also for small batches and on few cores."""
    with (
        mock.patch.object(native_partitioner, "num_threads", lambda: number),
        mock.patch.object(native_partitioner, "_MIN_IDS_PER_THREAD", 1),
    ):
        yield


def make_specs(
    devices, cores, tables, features, *, limits=(256, 256), suggested=None, rotation=None
):
    """Placed specs. With a rotation, all tables are in one stack.

    Args:
      devices: number of devices.
      cores: number of SparseCores of a device.
      tables: pairs of number of rows and combiner, by table name.
      features: pairs of table name and batch size, by feature name.
      limits: maximum number of ids and of distinct ids of a partition.
      suggested: buffer size of each table, or None.
      rotation: rotation of the tables in the stack. None: each table is alone in a stack.
    """
    max_ids, max_unique = limits
    specs = feature_specs(
        {
            name: {"vocabulary_size": rows, "combiner": combiner}
            for name, (rows, combiner) in tables.items()
        },
        features,
        max_ids_per_partition=max_ids,
        max_unique_ids_per_partition=max_unique,
        suggested_coo_buffer_size_per_device=suggested,
    )
    if rotation is not None:
        table_stacking.stack_tables(
            specs,
            list(embedding.get_table_specs(specs)),
            devices,
            cores,
            rotation,
            lambda *_: max_ids,
            lambda *_: max_unique,
        )
    return place(specs, devices, cores)


def partitioned(*arguments, **options):
    """Dtype, shape and bytes of each buffer and statistic, or the message of the error."""
    try:
        buffers, statistics = preprocess(*arguments, **options)
    except ValueError as error:
        return str(error)
    results = []
    for leaf in jax.tree.leaves((buffers, dataclasses.asdict(statistics))):
        array = np.asarray(leaf)
        results.append((array.dtype, array.shape, array.tobytes()))
    return results


def assert_equals_definition(*arguments, num_threads=2, **options):
    with mock.patch.object(
        native_partitioner, "unavailable_because", lambda: "its definition is asked"
    ):
        expected = partitioned(*arguments, **options)
    with threads(num_threads):
        assert partitioned(*arguments, **options) == expected


def draw_ids(generator, vocabulary, dtype, size):
    """Random ids, half of them from the last four rows.

    Samples have duplicates, and partitions have different sizes.
    """
    top = min(vocabulary - 1, int(np.iinfo(dtype).max))
    wide = generator.integers(0, top, size, endpoint=True, dtype=np.int64)
    narrow = generator.integers(max(top - 3, 0), top, size, endpoint=True, dtype=np.int64)
    return np.where(generator.random(size) < 0.5, wide, narrow).astype(dtype)


def draw_leaf(generator, kind, vocabulary, dtype, num_samples, most_ids):
    """Random ids of a feature as a dense array, a read-only view, lists, or an object array."""
    if kind == "dense":
        width = int(generator.integers(0, most_ids, endpoint=True))
        return draw_ids(generator, vocabulary, dtype, (num_samples, width))
    if kind == "every second row":
        ids = draw_ids(generator, vocabulary, dtype, (2 * num_samples, most_ids))[::2]
        ids.flags.writeable = False
        return ids
    lengths = generator.integers(0, most_ids, num_samples, endpoint=True)
    rows = [draw_ids(generator, vocabulary, dtype, length) for length in lengths]
    return [row.tolist() for row in rows] if kind == "lists" else ragged(rows, dtype)


def draw_weights(generator, leaf):
    def like(row):
        weights = generator.normal(size=np.shape(row)).astype(np.float32)
        weights[generator.random(weights.shape) < 0.2] = 0
        return weights

    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return like(leaf)
    return [like(row) for row in leaf]


@st.composite
def problems(draw):
    """Arguments of `make_specs`, arguments of `draw_leaf` by feature, and options of preprocessing.

    Also draws whether the ids have weights, and the seed of ids and weights.
    """
    devices, cores = draw(st.sampled_from(LAYOUTS))
    combiners = st.sampled_from(["sum", "mean", "sqrtn"])
    rotation = draw(st.none() | st.integers(0, 5))
    # All tables of a stack have the same combiner.
    if rotation is not None:
        combiners = st.just(draw(combiners))
    tables = {
        f"t{k}": (draw(st.sampled_from(VOCABULARIES)), draw(combiners))
        for k in range(draw(st.integers(1, 3)))
    }
    features = {
        f"f{k}": (draw(st.sampled_from(sorted(tables))), devices * cores * draw(st.integers(1, 5)))
        for k in range(draw(st.integers(1, 4)))
    }
    limit = st.sampled_from([1, 2, 5, 9, 256])
    limits = draw(limit), draw(limit)
    suggested = draw(st.none() | st.integers(1, -(-limits[0] // 8) * 8 * cores * devices * cores))
    made = (
        (devices, cores, tables, features),
        {"limits": limits, "suggested": suggested, "rotation": rotation},
    )
    kinds = st.sampled_from(["dense", "every second row", "lists", "arrays"])
    most_ids = draw(st.integers(0, 6))
    leaves = {
        name: {"kind": draw(kinds), "dtype": draw(st.sampled_from(ID_DTYPES)), "most_ids": most_ids}
        for name in features
    }
    options = {
        "num_threads": draw(st.sampled_from([1, 2, 7])),
        "allow_id_dropping": draw(st.booleans()),
        "local": draw(st.sampled_from([devices, 1])),
    }
    return made, leaves, options, draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_the_definition(problem):
    ((devices, cores, tables, features), layout), leaves, options, is_weighted, seed = problem
    specs = make_specs(devices, cores, tables, features, **layout)
    generator = np.random.default_rng(seed)
    batch, weights = {}, {}
    for name, (table, num_samples) in features.items():
        vocabulary, _ = tables[table]
        num_samples = num_samples * options["local"] // devices
        batch[name] = draw_leaf(
            generator, vocabulary=vocabulary, num_samples=num_samples, **leaves[name]
        )
        weights[name] = draw_weights(generator, batch[name])
    assert_equals_definition(
        specs, batch, weights if is_weighted else None, devices, cores, **options
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


@pytest.mark.parametrize(
    ("bad", "dtype"), [(-1, "int8"), (30, "uint8"), (2**40, "int64"), (2**63 + 1, "uint64")]
)
def test_an_id_outside_its_table_is_named(bad, dtype):
    specs = make_specs(1, 2, {"t": (30, "sum")}, {"f": ("t", 8), "g": ("t", 8)})
    batch = {name: np.ones((8, 3), dtype) for name in specs}
    batch["g"][5, 1] = bad
    with pytest.raises(
        ValueError, match=rf"feature 'g': id {bad} in sample 5 is outside table 't'.*=30"
    ):
        preprocess(specs, batch, allow_id_dropping=True)


def test_preprocessing_uses_it():
    specs = make_specs(1, 2, {"t": (30, "sum")}, {"f": ("t", 8)})
    function = native_partitioner.partition_stacks
    with mock.patch.object(native_partitioner, "partition_stacks", wraps=function) as used:
        preprocess(specs, {"f": np.ones((8, 3), np.int32)})
    used.assert_called_once()


def test_python_runs_beside_it():
    limits = (300_000, 300_000)
    specs = make_specs(
        1, 2, {"t": (100_000, "sum")}, {"f": ("t", 32768)}, limits=limits, suggested=1 << 20
    )
    batch = {"f": np.random.default_rng(0).integers(0, 100_000, (32768, 30), dtype=np.int32)}
    function = native_partitioner._partition_function()
    inside = threading.Event()

    def call(*arguments):
        inside.set()
        try:
            return function(*arguments)
        finally:
            inside.clear()

    def preprocess_three():
        with mock.patch.object(native_partitioner, "_partition_function", lambda: call), threads(1):
            for _ in range(3):
                preprocess(specs, batch)

    worker = threading.Thread(target=preprocess_three)
    worker.start()
    num_beats = 0
    while worker.is_alive():
        num_beats += inside.is_set()
        time.sleep(0.0005)
    worker.join()
    # If the native code held Python's global lock, the loop could count at most once for each call.
    assert num_beats > 3


@pytest.mark.parametrize("wanted", [" 1 ", "1000000"])
def test_the_environment_caps_the_threads(wanted, monkeypatch):
    monkeypatch.delenv(native_partitioner.THREADS_VARIABLE, raising=False)
    available = native_partitioner.num_threads()
    monkeypatch.setenv(native_partitioner.THREADS_VARIABLE, wanted)
    assert native_partitioner.num_threads() == min(available, int(wanted))
