"""Rows that `evict` removes from a table can be written back unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
from tests.storage.test_corners import DIM, keyed, keys_of, rows_of
from tests.world import assert_same, mesh_of

# Fifteen keys for each of four devices.
KEYS = np.random.default_rng(5).integers(0, 2**60, 60) * 4 + np.arange(60) % 4


@functools.cache
def some_rows():
    """Forty keys, with rows, slots, last steps and counts."""
    generator, keys = np.random.default_rng(3), np.sort(KEYS)[10:50]
    steps, counts = (generator.integers(low, 9, 40).astype(np.int32) for low in (0, 1))
    arrays = {
        name: generator.normal(size=(40, DIM)).astype(np.float32)
        for name in ("values", "slot_accumulator")
    }
    # The accumulator is a sum of squares, so it must not be negative.
    arrays["slot_accumulator"] **= 2
    return {"keys": keys, "last_step": steps, "count": counts, **arrays}


def filled(num_devices=None, **storage):
    """A collection with a table of `some_rows` on one or more devices, and its state at step 9."""
    mesh, rule = num_devices and mesh_of(num_devices), rs.optimizers.Adagrad(0.3)
    collection = keyed(mesh, rows=96, optimizer=rule, eviction="lfu", **storage)
    state = collection.with_tables(collection.init(jax.random.key(0)), {"t": some_rows()})
    return collection, state._replace(step=jnp.int32(9))


REASONS = {"keep": 20, "unused_for": 3, "norm_below": 1.7}


def has_reason(rows, reasons):
    """Mask of the rows that are evicted before step 9."""
    least_used_first = np.lexsort((rows["keys"], rows["count"]))
    norms = np.linalg.norm(np.float64(rows["values"]), axis=1)
    masks = {
        "keep": np.isin(np.arange(40), least_used_first[: -REASONS["keep"]]),
        "unused_for": 9 - rows["last_step"] > REASONS["unused_for"],
        "norm_below": norms < REASONS["norm_below"],
    }
    return np.any([masks[reason] for reason in reasons], axis=0)


@pytest.mark.slow_rows("keep-None")
@pytest.mark.parametrize(
    ("reasons", "num_devices"),
    [
        ("keep", None),
        ("keep", 4),
        ("unused_for", 4),
        ("norm_below", None),
        ("keep unused_for norm_below", 4),
    ],
)
def test_keys_that_have_a_reason_leave_with_all_that_belongs_to_them_and_come_back(
    reasons, num_devices
):
    (collection, state), rows = filled(num_devices), some_rows()
    reasons = reasons.split()
    state, evicted = collection.evict(state, "t", **{reason: REASONS[reason] for reason in reasons})
    leaves = has_reason(rows, reasons)
    assert 5 < leaves.sum() < leaves.size - 3
    remaining = rows_of(collection, state)
    for name, array in rows.items():
        assert_array_equal(evicted[name], array[leaves], err_msg=name)
        assert_array_equal(remaining[name], array[~leaves], err_msg=name)
    assert collection.counts(state)["t"]["evicted"].sum() == leaves.sum()
    assert_same(rows_of(collection, collection.with_tables(state, {"t": evicted})), rows)


def test_what_nobody_lets_go_stays():
    (collection, state), rows = filled(), some_rows()
    state, evicted = collection.evict(state, "t", keep=1000)
    assert_same(evicted, {name: array[:0] for name, array in rows.items()})
    assert keys_of(collection, state) == rows["keys"].tolist()


def test_evicting_what_was_not_used_forgets_keys_that_wait():
    collection, state = filled(admission_count=5)
    waiting = {"waiting_keys": KEYS[:3], "waiting_last_step": [3, 4, 8], "waiting_count": [1, 2, 1]}
    state = collection.with_tables(state, {"t": some_rows() | waiting})
    state, _ = collection.evict(state, "t", unused_for=5)
    assert collection.counts(state)["t"]["forgotten"].tolist() == [1]
    assert rows_of(collection, state)["waiting_keys"].tolist() == sorted(KEYS[1:3].tolist())
