"""Rows in host memory and cached rows equal the rows of one array."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
from rsembed.kernels.contract import NO_ROW
from rsembed.storage.backing_store import BackingStore, Generation

NUM_ROWS = 90


def test_rows_hold_their_first_values_until_they_are_written():
    sizes, rng = set(), np.random.default_rng(0)

    def first_values(rows):
        sizes.add(rows.size)
        return [np.stack([rows, -rows], axis=1).astype(np.float32), rows[:, None] % np.int32(7)]

    arrays = [np.zeros((NUM_ROWS, 2), np.float32), np.zeros((NUM_ROWS, 1), np.int32)]
    backing = BackingStore(arrays, first_values)
    # In the expected arrays, `NO_ROW` is the row after the last one.
    wanted = [array.copy() for array in first_values(np.arange(NUM_ROWS + 1, dtype=np.int32))]
    for _ in range(6):
        evicted, inserted = rng.permutation(NUM_ROWS)[:12], rng.integers(0, NUM_ROWS, 40)
        evicted[[2, 5, 11]] = NO_ROW
        inserted[[0, 7]] = NO_ROW
        values = rng.normal(size=(12, 2)).astype(np.float32), rng.integers(0, 9, (12, 1), np.int32)
        actual = backing.exchange(evicted, values, inserted)
        for value, array, rows in zip(values, wanted, actual, strict=True):
            array[np.minimum(evicted, NUM_ROWS)] = value
            array[NUM_ROWS] = 0
            assert_array_equal(rows, array[np.minimum(inserted, NUM_ROWS)])
    assert all(size & (size - 1) == 0 for size in sizes - {NUM_ROWS + 1})


def test_a_generation_knows_its_own_number_alone():
    one, other = Generation("not mine"), Generation("not mine")
    first = one.number
    one.check(np.asarray([first, first]))
    one.advance(first)
    one.check(one.number)
    for foreign in (first, other.number, np.asarray([one.number, first])):
        with pytest.raises(
            RuntimeError, match=r"not mine \(It has another generation than the host"
        ):
            one.advance(foreign)
    assert one.number == (first + 1) % 2**32


def test_a_lookup_that_a_step_of_another_thread_overtakes_is_refused(monkeypatch):
    spec = rs.TableSpec(
        "t", 64, 2, optimizer=rs.optimizers.SGD(1.0), storage=rs.HostCached(cache_rows=8)
    )
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", spec))
    state = collection.init(jax.random.key(0))
    batches = [{"f": np.arange(first, first + 8)} for first in (0, 8, 16)]
    (way,) = collection._on_host.values()
    gather = way._gather

    def overtaken(*arguments):
        monkeypatch.setattr(way, "_gather", gather)
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(train).result()
        return gather(*arguments)

    def train():
        trained = state
        # Each batch needs the whole cache, so trained rows are written to the host.
        for batch in batches:
            trained = collection.update(trained, batch, {"f": jnp.ones((8, 2))})

    collection.lookup(state, batches[0])
    monkeypatch.setattr(way, "_gather", overtaken)
    with pytest.raises(RuntimeError, match="exchanged since for another state"):
        collection.lookup(state, batches[0])
