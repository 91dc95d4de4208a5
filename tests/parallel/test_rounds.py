"""Rounds of any capacity bring each row to its owner once, with all of its values in one round."""

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


def mapped(body, num_devices):
    mesh = mesh_of(num_devices)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )


@functools.cache
def program(num_devices, capacities):
    """A program in which two tables ask together. The second table asks twice.

    Owners count the rounds in which each row arrives, and add up the squared sums of the rounds.
    They reply `100 * row + owner` and twice the values. Keys of the second table have two lanes.
    All bits of its largest key are set, and it must not count as "no keys left".
    """

    def answer(state, arrived):
        visits, squares = state
        rows, values = arrived
        total = jnp.zeros(ROWS).at[rows].add(values, mode="drop")
        visits = visits.at[rows].max(1, mode="drop") + jnp.where(total != 0, 10, 0)
        replies = 100 * rows + jax.lax.axis_index("x"), 2 * values
        return (visits, squares + total * total), replies

    def asking(ids, values, number):
        owners = jnp.where(ids >= 0, ids % num_devices, NO_ROW)
        rows = ids // num_devices
        lanes = [rows]
        if number == 1:
            lanes = [jnp.full(ids.shape, 2**32 - 1, jnp.uint32), ~rows.astype(jnp.uint32)]
        wanted = distinct(owners, lanes, num_devices=num_devices)
        first_rows = rows.at[wanted.first_of].get(mode="fill", fill_value=NO_ROW)
        sums = jnp.zeros(ids.shape).at[wanted.entry_of].add(values, mode="drop")
        state = jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS)
        question = Question(
            wanted, (first_rows, sums), answer, state, capacities[number], (INTEGER, FLOAT)
        )
        state, replies, rounds = yield question
        if number == 1:
            state, _, _ = yield question._replace(state=state)
        replies = [reply.at[wanted.entry_of].get(mode="fill", fill_value=-1) for reply in replies]
        return [x[None] for x in state], replies, rounds[None]

    def body(first, second):
        return together([asking(*first, 0), asking(*second, 1)], "x")

    return mapped(body, num_devices)


def draw_ids(generator, kind, num_devices):
    ids = generator.integers(-1, ROWS * num_devices, (num_devices, NUM_IDS)).astype(np.int32)
    if kind == "one row":
        ids[:] = generator.integers(ROWS * num_devices)
    elif kind == "one owner":
        ids -= np.where(ids >= 0, ids % num_devices, 0)
    elif kind == "one asker":
        ids[1:] = -1
    elif kind == "nothing":
        ids[:] = -1
    return ids


def rounds_for(ids, num_devices, capacity):
    """Number of rounds that one device needs to send these ids to their owners."""
    distinct_ids = np.unique(ids[ids >= 0])
    of_owners = np.bincount(distinct_ids % num_devices, minlength=1)
    return max(1, -(-of_owners.max() // capacity))


KINDS = st.sampled_from(["uniform", "one row", "one owner", "one asker", "nothing"])


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 8]),
    st.sampled_from([(1, 3), (3, 1), (3, NUM_IDS), (NUM_IDS, NUM_IDS)]),
    st.tuples(KINDS, KINDS),
    st.integers(0, 2**31),
)
def test_every_row_is_whole_in_one_round_at_any_capacity(num_devices, capacities, kinds, seed):
    generator = np.random.default_rng(seed)
    batches = []
    for kind in kinds:
        ids = draw_ids(generator, kind, num_devices)
        batches.append((ids, generator.integers(1, 5, ids.shape).astype(np.float32)))
    actual = program(num_devices, capacities)(*jax.tree.map(np.ravel, batches))
    most_rounds = []
    for (ids, _), capacity in zip(batches, capacities, strict=True):
        most_rounds.append(rounds_for(ids, num_devices, capacity))
    for number, (ids, values) in enumerate(batches):
        (visits, squares), (numbers, doubles), rounds = actual[number]
        num_questions = number + 1
        sums = np.zeros(ROWS * num_devices)
        np.add.at(sums, ids[ids >= 0], values[ids >= 0])
        by_owner = sums.reshape(ROWS, num_devices).T
        # 11 is a row that arrived in one round. A second round would add 10, and split the sum that
        # is squared.
        assert_array_equal(visits, np.where(by_owner > 0, 1 + 10 * num_questions, 0))
        assert_array_equal(squares, num_questions * by_owner**2)
        answers = 100 * (ids // num_devices) + ids % num_devices
        assert_array_equal(numbers, np.where(ids >= 0, answers, -1).ravel())
        are_equal = ids[:, :, None] == ids[:, None, :]
        own_sums = np.einsum("dij,dj->di", are_equal, values)
        assert_array_equal(doubles, np.where(ids >= 0, 2 * own_sums, -1).ravel())
        for own_ids in ids:
            assert rounds_for(own_ids, num_devices, capacities[number]) <= rounds[0]
        assert rounds[0] <= max(most_rounds)
        assert np.all(rounds == rounds[0])


def test_no_ids_and_no_capacity():
    def body(ids):
        wanted = distinct(ids, [ids], num_devices=2)
        question = Question(wanted, ids, lambda state, rows: (state, rows), None, 0, INTEGER)
        return ask([question], axis_name="x")[0].replies

    run = mapped(body, 2)
    assert run(np.zeros(0, np.int32)).shape == (0,)
    # A capacity below 1 counts as 1.
    assert_array_equal(run(np.int32([0, 1, 1, 0])), [0, 1, 1, 0])
