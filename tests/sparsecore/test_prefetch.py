"""Batches come prepared, in order, with their errors, and no thread is left behind."""

import gc
import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rsembed.sparsecore import embedding, embedding_spec
from rsembed.sparsecore.prefetch import prefetch

WAIT_SECONDS = 4


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rsembed-prefetch")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    deadline = time.monotonic() + WAIT_SECONDS
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
def test_order_is_kept(depth):
    assert list(prefetch(range(20), lambda x: x * x, depth=depth)) == [x * x for x in range(20)]


def test_no_batches_end_at_once():
    batches = prefetch([], str)
    assert list(batches) == []
    assert list(batches) == []


def test_falsy_results_are_batches():
    assert list(prefetch([1, 2, 3], lambda x: None)) == [None, None, None]


def test_next_batch_is_prepared_while_one_is_in_use():
    prepared = [threading.Event() for _ in range(3)]

    def prepare(number):
        prepared[number].set()
        return number

    with prefetch(range(3), prepare, depth=1) as batches:
        assert next(batches) == 0
        assert prepared[1].wait(WAIT_SECONDS)  # nobody asked for it yet


def test_no_more_than_depth_batches_are_read_ahead():
    read = []

    def stream():
        for number in itertools.count():
            read.append(number)
            yield number

    with prefetch(stream(), lambda x: x, depth=2) as batches:
        assert next(batches) == 0
        deadline = time.monotonic() + WAIT_SECONDS
        while len(read) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert read == [0, 1, 2]


def test_an_error_of_the_function_comes_in_place_of_its_batch():
    calls = []

    def prepare(number):
        calls.append(number)
        if number == 2:
            raise ValueError("batch 2 is bad")
        return number

    batches = prefetch(range(10), prepare, depth=4)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2 is bad"):
        next(batches)
    assert list(batches) == []
    assert calls == [0, 1, 2]


def test_an_error_of_the_stream_comes_after_the_batches_before_it():
    def stream():
        yield 0
        raise OSError("disk is gone")

    batches = prefetch(stream(), lambda x: x)
    assert next(batches) == 0
    with pytest.raises(OSError, match="disk is gone"):
        next(batches)


def test_leaving_the_block_ends_the_thread_and_the_iteration():
    with prefetch(itertools.count(), lambda x: x) as batches:
        next(batches)
        assert prefetch_threads()
    assert not prefetch_threads()
    assert list(batches) == []
    batches.close()


def test_an_error_in_the_block_ends_the_thread():
    with pytest.raises(KeyError), prefetch(itertools.count(), lambda x: x) as batches:
        next(batches)
        raise KeyError
    assert not prefetch_threads()


def test_a_dropped_prefetcher_ends_its_thread():
    batches = prefetch(itertools.count(), lambda x: x)
    next(batches)
    del batches
    gc.collect()  # the fixture waits for the thread


def test_an_interpreter_ends_although_a_prefetcher_is_open():
    program = (
        "import itertools; from rsembed.sparsecore.prefetch import prefetch; "
        "batches = prefetch(itertools.count(), lambda x: x); print(next(batches))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("depth", [0, -1])
def test_depth_below_one_is_refused(depth):
    with pytest.raises(ValueError, match=f"depth must be at least 1, got {depth}"):
        prefetch([], str, depth=depth)


def test_prefetched_batches_equal_those_prepared_in_place():
    table = embedding_spec.TableSpec(name="t", vocabulary_size=50, embedding_dim=8)
    specs = embedding_spec.FeatureSpec(name="f", table_spec=table, input_shape=(16, 3), output_shape=(16, 8))
    embedding.prepare_feature_specs_for_training(specs, 1, 4)
    generator = np.random.default_rng(0)
    stream = [generator.integers(0, 50, (16, 3)) for _ in range(5)]

    def prepare(batch):
        return embedding.preprocess_sparse_dense_matmul_input(batch, None, specs, 1, 1, num_sc_per_device=4)[0]

    with prefetch(stream, prepare) as batches:
        for got, expected in zip(batches, map(prepare, stream), strict=True):
            np.testing.assert_array_equal(got.lhs_embedding_ids["t"], expected.lhs_embedding_ids["t"])
            np.testing.assert_array_equal(got.lhs_gains["t"], expected.lhs_gains["t"])
