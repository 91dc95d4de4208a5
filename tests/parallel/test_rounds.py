"""Rounds of any capacity bring every entry to its owner once, all of a row at the same time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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


def owner_and_row(ids, num_devices):
    return jnp.where(ids >= 0, ids % num_devices, NO_ROW), ids // num_devices


def of_ids(replies, wanted):
    """The reply to the entry of every id, -1 for those without an owner."""
    return replies.at[wanted.entry_of].get(mode="fill", fill_value=-1)


@functools.cache
def program(num_devices, capacity):
    """Owners count visits of each row, answer `100 * row + owner`, and add the squared sum of what arrives."""

    def answer(state, arrived):
        visits, squares = state
        rows, values = arrived
        total = jnp.zeros(ROWS).at[rows].add(values, mode="drop")
        visits = visits.at[rows].max(1, mode="drop") + jnp.where(total != 0, 10, 0)
        return (visits, squares + total * total), 100 * rows + jax.lax.axis_index("x")

    def body(ids, values):
        owners, rows = owner_and_row(ids, num_devices)
        # Of which the first alone tells few entries apart.
        wanted = distinct(owners, (rows // 4, rows), num_devices=num_devices)
        sums = jnp.zeros(NUM_IDS).at[wanted.entry_of].add(values, mode="drop")
        payload = jnp.where(wanted.first_of != NO_ROW, wanted.lanes[1], NO_ROW), sums
        state = jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS)
        question = Question(wanted, payload, answer, state, capacity, INTEGER)
        ((state, replies, rounds),) = ask([question], axis_name="x")
        return *(x[None] for x in state), of_ids(replies, wanted), rounds[None]

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
    run = program(num_devices, capacity)
    visits, squares, replies, rounds = map(np.asarray, run(ids.reshape(-1), values.reshape(-1)))
    sums = np.zeros(ROWS * num_devices)
    np.add.at(sums, ids[ids >= 0], values[ids >= 0])
    by_owner = sums.reshape(ROWS, num_devices).T
    # 11 = visited, and in a single round: a second one would add another 10 and split the square.
    assert_array_equal(visits, np.where(by_owner > 0, 11, 0))
    assert_array_equal(squares, by_owner**2)
    flat = ids.reshape(-1)
    answers = 100 * (flat // num_devices) + flat % num_devices
    assert_array_equal(replies, np.where(flat >= 0, answers, -1))
    # No round sends less than a full block of some device, and none more than a block of each.
    most_rounds = rounds_for(np.unique(flat), num_devices, capacity)
    assert (
        max(rounds_for(np.unique(own_ids), num_devices, capacity) for own_ids in ids) <= rounds[0]
    )
    assert rounds[0] <= most_rounds
    assert (rounds == rounds[0]).all()


def rounds_for(distinct_ids, num_devices, capacity):
    """Rounds in which one device could send these ids to their owners."""
    of_owners = np.bincount(distinct_ids[distinct_ids >= 0] % num_devices, minlength=1)
    return max(1, -(-of_owners.max() // capacity))


def test_the_largest_key_is_an_ordinary_entry():
    """Two lanes of all ones must not be mistaken for "nothing left"."""

    def body(low):
        high = jnp.full(low.shape, 2**32 - 1, jnp.uint32)
        wanted = distinct(jnp.zeros(low.shape, jnp.int32), [high, low], num_devices=2)
        word = jax.ShapeDtypeStruct((), jnp.uint32)
        question = Question(wanted, wanted.lanes[1], echo, None, 2, word)
        ((_, replies, rounds),) = ask([question], axis_name="x")
        return replies.at[wanted.entry_of].get(), rounds[None]

    low = np.asarray([2**32 - 1, 5, 2**32 - 2, 2**32 - 1, 9, 2**32 - 1], np.uint32)
    replies, rounds = jax.jit(mapped(body))(low)
    assert_array_equal(replies, low)
    assert rounds[0] > 1


def echo(state, arrived):
    return state, arrived


def test_no_ids_and_no_capacity():
    def body(ids):
        wanted = distinct(ids, [ids], num_devices=2)
        question = Question(wanted, ids, echo, None, 0, INTEGER)
        return ask([question], axis_name="x")[0].replies

    run = jax.jit(mapped(body))
    assert run(np.zeros(0, np.int32)).shape == (0,)
    # A capacity below 1 counts as 1.
    assert_array_equal(run(np.int32([0, 1, 1, 0])), [0, 1, 1, 0])


@functools.cache
def two_tables(num_devices, capacities):
    """Per table a sum at the owner and replies; the second table has keys of two lanes, and asks what it was told."""

    def sums(total, arrived):
        rows, values = arrived
        return total.at[rows].add(values, mode="drop"), (100 * rows, 2 * values)

    def asking(ids, num_lanes, capacity):
        owners, rows = owner_and_row(ids, num_devices)
        lanes = [rows]
        if num_lanes == 2:
            lanes = [(ids % 2).astype(jnp.uint32), ids.astype(jnp.uint32)]
        wanted = distinct(owners, lanes, num_devices=num_devices)
        rows = rows.at[wanted.first_of].get(mode="fill", fill_value=NO_ROW)
        values = jnp.zeros(ids.shape).at[wanted.entry_of].add(1.0, mode="drop")
        question = Question(
            wanted, (rows, values), sums, jnp.zeros(ROWS), capacity, (INTEGER, FLOAT)
        )
        total, replies, _ = yield question
        if num_lanes == 2:
            total, _, _ = yield question._replace(state=total)
        return total[None], [of_ids(reply, wanted) for reply in replies]

    def body(first, second):
        own = [asking(first, 1, capacities[0]), asking(second, 2, capacities[1])]
        return together(own, "x")

    return jax.jit(mapped(body, num_devices))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(3, 2), (2, 40), (40, 40)]), st.integers(0, 2**31))
def test_questions_of_several_tables_are_answered_as_if_each_was_alone(capacities, seed):
    generator = np.random.default_rng(seed)
    batches = [generator.integers(-1, 4 * ROWS, (4, size)).astype(np.int32) for size in (24, 40)]
    found = two_tables(4, capacities)(*(batch.reshape(-1) for batch in batches))
    for ids, (totals, (rows, values)), times in zip(batches, found, (1, 2), strict=True):
        counts = np.bincount(ids[ids >= 0], minlength=4 * ROWS).reshape(ROWS, 4).T
        assert_array_equal(totals, times * counts)
        assert_array_equal(rows, np.where(ids >= 0, 100 * (ids // 4), -1).reshape(-1))
        occurrences = (ids[:, :, None] == ids[:, None, :]).sum(axis=2)
        assert_array_equal(values, np.where(ids >= 0, 2 * occurrences, -1).reshape(-1))
