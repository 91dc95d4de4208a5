"""Rounds of any capacity bring every entry to its owner once, all of a row at the same time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from rsembed.kernels.contract import NO_ROW
from rsembed.parallel.exchange import Question, ask, distinct, together
from tests.world import mesh_of

NUM_IDS = 24
ROWS = 11
INTEGER, FLOAT = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.int32, jnp.float32))


def mapped(body, num_devices=2):
    mesh = mesh_of(num_devices)
    return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


@functools.cache
def program(num_devices, capacity):
    """Owners count visits of each row, answer `100 * row + owner`, and add the squared sum of what arrives."""

    def answer(state, arrived):
        visits, squares = state
        rows, values = arrived
        total = jnp.zeros(ROWS).at[rows].add(values, mode="drop")
        state = (
            visits.at[rows].max(1, mode="drop") + jnp.where(total != 0, 10, 0),
            squares + total * total,
        )
        return state, 100 * rows + jax.lax.axis_index("x")

    def body(ids, values):
        # Of which the first alone tells few entries apart.
        lanes = (
            ids // num_devices // 4,
            ids // num_devices,
        )
        wanted = distinct(
            jnp.where(ids >= 0, ids % num_devices, NO_ROW), lanes, num_devices=num_devices
        )
        sums = jnp.zeros(NUM_IDS).at[wanted.entry_of].add(values, mode="drop")
        rows = jnp.where(wanted.first_of != NO_ROW, wanted.lanes[1], NO_ROW)
        state = jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS)
        (answers,) = ask(
            [Question(wanted, (rows, sums), answer, state, capacity, INTEGER)], axis_name="x"
        )
        state, replies, rounds = answers
        replies = replies.at[wanted.entry_of].get(mode="fill", fill_value=-1)
        return *(x[None] for x in state), replies, rounds[None]

    return jax.jit(mapped(body, num_devices))


@st.composite
def batches(draw):
    num_devices = draw(st.sampled_from([1, 2, 8]))
    capacity = draw(st.sampled_from([1, 3, NUM_IDS]))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["uniform", "one row", "one owner", "one asker", "nothing"]))
    ids = generator.integers(-1, ROWS * num_devices, (num_devices, NUM_IDS)).astype(np.int32)
    if kind == "one row":
        ids[:] = draw(st.integers(0, ROWS * num_devices - 1))
    elif kind == "one owner":
        ids -= np.where(ids >= 0, ids % num_devices, 0)
    elif kind == "one asker":
        ids[1:] = -1
    elif kind == "nothing":
        ids[:] = -1
    return num_devices, capacity, ids, generator.integers(1, 5, ids.shape).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(batches())
def test_every_row_is_whole_in_one_round_at_any_capacity(batch):
    num_devices, capacity, ids, values = batch
    visits, squares, replies, rounds = map(
        np.asarray, program(num_devices, capacity)(ids.reshape(-1), values.reshape(-1))
    )
    sums = np.zeros(ROWS * num_devices)
    np.add.at(sums, ids[ids >= 0], values[ids >= 0])
    by_owner = sums.reshape(ROWS, num_devices).T
    # 11 = visited, and in a single round: a second one would add another 10 and split the square.
    assert_array_equal(visits, np.where(by_owner > 0, 11, 0))
    assert_array_equal(squares, by_owner**2)
    flat = ids.reshape(-1)
    assert_array_equal(
        replies, np.where(flat >= 0, 100 * (flat // num_devices) + flat % num_devices, -1)
    )
    buckets = [
        len({i for i in row if i >= 0 and i % num_devices == d})
        for row in ids
        for d in range(num_devices)
    ]
    asked = [len({i for i in flat if i >= 0 and i % num_devices == d}) for d in range(num_devices)]
    assert max(1, -(-max(buckets) // capacity)) <= rounds[0] <= max(1, -(-max(asked) // capacity))
    assert (rounds == rounds[0]).all()


def test_entries_are_told_apart_by_all_lanes():
    high = jnp.asarray([7, 7, 2**32 - 1, 7], jnp.uint32)
    low = jnp.asarray([1, 2**32 - 1, 2**32 - 1, 1], jnp.uint32)
    wanted = distinct(jnp.asarray([0, 0, 1, 0]), [high, low], num_devices=2)
    assert wanted.offsets.tolist() == [0, 2, 3]
    assert wanted.entry_of.tolist() == [0, 1, 2, 0]
    assert wanted.first_of.tolist() == [0, 1, 2, NO_ROW]
    assert [lane.tolist()[:3] for lane in wanted.lanes] == [
        [7, 7, 2**32 - 1],
        [1, 2**32 - 1, 2**32 - 1],
    ]


@pytest.mark.parametrize("capacity", [1, 2])
def test_the_largest_key_is_an_ordinary_entry(capacity):
    """Two lanes of all ones must not be mistaken for "nothing left"."""

    def body(low):
        high = jnp.full(low.shape, 2**32 - 1, jnp.uint32)
        wanted = distinct(jnp.zeros(low.shape, jnp.int32), [high, low], num_devices=2)
        word = jax.ShapeDtypeStruct((), jnp.uint32)
        question = Question(
            wanted, wanted.lanes, lambda state, keys: (state, keys[1]), None, capacity, word
        )
        ((_, replies, rounds),) = ask([question], axis_name="x")
        return replies.at[wanted.entry_of].get(mode="fill", fill_value=0), rounds[None]

    low = np.asarray([2**32 - 1, 5, 2**32 - 2, 2**32 - 1, 9, 2**32 - 1], np.uint32)
    replies, rounds = jax.jit(mapped(body))(low)
    assert_array_equal(replies, low)
    assert rounds[0] > 1


def test_no_ids_and_no_capacity():
    def body(ids):
        wanted = distinct(ids, [ids], num_devices=2)
        question = Question(
            wanted, ids, lambda state, rows: (state, rows), None, capacity=0, reply=INTEGER
        )
        return ask([question], axis_name="x")[0].replies

    shape = jax.ShapeDtypeStruct((0,), jnp.int32)
    assert jax.eval_shape(mapped(body), shape).shape == (0,)
    assert np.asarray(jax.jit(mapped(body))(np.zeros(0, np.int32))).shape == (0,)
    # A capacity below 1 counts as 1.
    found = jax.jit(mapped(body))(np.asarray([0, 1, 1, 0], np.int32))
    assert_array_equal(found, [0, 1, 1, 0])


@functools.cache
def two_tables(num_devices, capacities):
    """Per table a sum at the owner and replies; the second table has keys of two lanes, and asks what it was told."""

    def sums(total, arrived):
        rows, values = arrived
        return total.at[rows].add(values, mode="drop"), (100 * rows, 2 * values)

    def asking(ids, num_lanes, capacity):
        lanes = (
            [ids // num_devices]
            if num_lanes == 1
            else [(ids % 2).astype(jnp.uint32), ids.astype(jnp.uint32)]
        )
        wanted = distinct(
            jnp.where(ids >= 0, ids % num_devices, NO_ROW), lanes, num_devices=num_devices
        )
        rows = (ids // num_devices).at[wanted.first_of].get(mode="fill", fill_value=NO_ROW)
        values = jnp.zeros(ids.shape).at[wanted.entry_of].add(1.0, mode="drop")
        reply = INTEGER, FLOAT
        total, replies, _ = yield Question(
            wanted, (rows, values), sums, jnp.zeros(ROWS), capacity, reply
        )
        if num_lanes == 2:
            total, _, _ = yield Question(wanted, (rows, values), sums, total, capacity, reply)
        return total[None], jax.tree.map(
            lambda x: x.at[wanted.entry_of].get(mode="fill", fill_value=-1), replies
        )

    def body(first, second):
        own = [asking(first, 1, capacities[0]), asking(second, 2, capacities[1])]
        return together(own, "x")

    return jax.jit(mapped(body, num_devices))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(3, 2), (2, 40), (40, 40)]), st.integers(0, 2**31))
def test_questions_of_several_tables_are_answered_as_if_each_was_alone(capacities, seed):
    generator, num_devices = np.random.default_rng(seed), 4
    batches = [
        generator.integers(-1, ROWS * num_devices, (num_devices, size)).astype(np.int32)
        for size in (24, 40)
    ]
    found = two_tables(num_devices, capacities)(*(batch.reshape(-1) for batch in batches))
    for ids, (totals, (rows, values)), times in zip(batches, found, (1, 2), strict=True):
        counts = (
            np.bincount(ids[ids >= 0], minlength=ROWS * num_devices).reshape(ROWS, num_devices).T
        )
        assert_array_equal(totals, times * counts)
        assert_array_equal(rows, np.where(ids >= 0, 100 * (ids // num_devices), -1).reshape(-1))
        own = [[2 * np.sum(device == i) if i >= 0 else -1 for i in device] for device in ids]
        assert_array_equal(values, np.asarray(own).reshape(-1))
