"""The native partitioner equals its definition bit by bit, whatever it is given and however many threads it uses."""

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

from rsembed.sparsecore import native_partitioner, table_stacking
from tests.sparsecore.small_world import feature_specs, place, preprocess, ragged

_reason = native_partitioner.unavailable_because()
if _reason is not None and os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
    raise RuntimeError(f"RSEMBED_REQUIRE_NATIVE=1, but {_reason}")
pytestmark = pytest.mark.skipif(
    _reason is not None, reason=f"needs the native host partitioner: {_reason}"
)

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


def make_specs(
    devices, cores, tables, features, *, limits=(256, 256), suggested=None, rotation=None
):
    """Specs of `{table: (vocabulary, combiner)}` and `{feature: (table, batch)}`; a rotation stacks all tables."""
    specs = feature_specs(
        {
            name: {"vocabulary_size": rows, "combiner": combiner}
            for name, (rows, combiner) in tables.items()
        },
        features,
        max_ids_per_partition=limits[0],
        max_unique_ids_per_partition=limits[1],
        suggested_coo_buffer_size_per_device=suggested,
    )
    if rotation is not None:
        used, of_stack = (
            dict.fromkeys(table for table, _ in features.values()),
            [lambda *_, n=n: n for n in limits],
        )
        table_stacking.stack_tables(specs, list(used), devices, cores, rotation, *of_stack)
    return place(specs, devices, cores)


def partitioned(*given, **options):
    """Buffers and statistics, or the message of the error."""
    try:
        return preprocess(*given, **options)
    except ValueError as error:
        return str(error)


def assert_same(got, expected):
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected
        return

    def check(mine, theirs):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert (mine.dtype, mine.shape, mine.tobytes()) == (
            theirs.dtype,
            theirs.shape,
            theirs.tobytes(),
        )

    (buffers, statistics), (expected_buffers, expected_statistics) = got, expected
    jax.tree.map(check, buffers, expected_buffers)
    jax.tree.map(check, dataclasses.asdict(statistics), dataclasses.asdict(expected_statistics))


def assert_equals_definition(*given, num_threads=2, **options):
    with mock.patch.object(
        native_partitioner, "unavailable_because", lambda: "its definition is asked"
    ):
        expected = partitioned(*given, **options)
    with threads(num_threads):
        assert_same(partitioned(*given, **options), expected)


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
    rows = [
        draw_ids(generator, vocabulary, dtype, int(generator.integers(0, 7)))
        for _ in range(num_samples)
    ]
    return [row.tolist() for row in rows] if kind == "lists" else ragged(rows, dtype)


def draw_weights(generator, leaf):
    def like(row):
        weights = generator.normal(size=np.shape(row)).astype(np.float32)
        return np.where(generator.random(np.shape(row)) < 0.2, np.float32(0), weights)

    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return like(leaf)
    return [like(row) for row in leaf]


@st.composite
def problems(draw):
    """What `make_specs` makes, forms and dtypes of the ids by feature, and how they are preprocessed."""
    devices, cores = draw(st.sampled_from(LAYOUTS))
    combiners = st.sampled_from(["sum", "mean", "sqrtn"])
    rotation = draw(st.none() | st.integers(0, 5))
    combiner = draw(combiners)
    tables = {
        f"t{k}": (
            draw(st.sampled_from(VOCABULARIES)),
            combiner if rotation is not None else draw(combiners),
        )
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
    kinds = {name: draw(st.sampled_from(["dense", "lists", "arrays"])) for name in features}
    dtypes = {name: draw(st.sampled_from(ID_DTYPES)) for name in features}
    options = {
        "num_threads": draw(st.sampled_from([1, 2, 7])),
        "allow_id_dropping": draw(st.booleans()),
    }
    options["local"] = draw(st.sampled_from([devices, 1]))
    return made, kinds, dtypes, options, draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_the_definition(problem):
    ((devices, cores, tables, features), layout), kinds, dtypes, options, is_weighted, seed = (
        problem
    )
    specs = make_specs(devices, cores, tables, features, **layout)
    generator, batch = np.random.default_rng(seed), {}
    for name, (table, num_samples) in features.items():
        num_samples = num_samples * options["local"] // devices
        batch[name] = draw_leaf(generator, kinds[name], tables[table][0], dtypes[name], num_samples)
    weights = (
        {name: draw_weights(generator, leaf) for name, leaf in batch.items()}
        if is_weighted
        else None
    )
    assert_equals_definition(specs, batch, weights, devices, cores, **options)


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
    [
        (-1, "int8"),
        (-1, "int64"),
        (30, "int32"),
        (30, "uint8"),
        (2**40, "int64"),
        (2**63 + 1, "uint64"),
    ],
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
    with mock.patch.object(
        native_partitioner, "partition_stacks", wraps=native_partitioner.partition_stacks
    ) as used:
        preprocess(specs, {"f": np.ones((8, 3), np.int32)})
    assert used.call_count == 1


def test_python_runs_beside_it():
    specs = make_specs(
        1,
        2,
        {"t": (100_000, "sum")},
        {"f": ("t", 32768)},
        limits=(300_000, 300_000),
        suggested=1 << 20,
    )
    batch = {"f": np.random.default_rng(0).integers(0, 100_000, (32768, 30), dtype=np.int32)}
    function, inside, beats = native_partitioner._partition_function(), threading.Event(), []

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
