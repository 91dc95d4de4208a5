"""What is sent arrives at its owner, in order, and every reply finds its entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rsembed.kernels.contract import NO_ROW
from rsembed.parallel import plan_routes, send, send_back

NUM_ENTRIES = 12


@functools.cache
def round_trip(num_devices, capacity):
    """Every entry sends `(row, vector)`; owners answer with `1000 * owner + row` and see what arrived."""
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("x",))

    def body(owners, rows):
        routes = plan_routes(owners, num_devices=num_devices, capacity=capacity)
        vectors = jnp.repeat(rows[:, None].astype(jnp.float32), 3, axis=1)
        lanes = rows % 2 == 1, rows.astype(jnp.float32) / 2, ~rows.astype(jnp.uint32)
        arrived, vectors, lanes = send((rows, vectors, lanes), routes.entries, "x")
        replies = jnp.where(arrived == NO_ROW, -1, 1000 * jax.lax.axis_index("x") + arrived)
        answers = send_back(replies, "x").at[routes.places].get(mode="fill", fill_value=-2)
        return arrived[None], vectors[None], [lane[None] for lane in lanes], answers, routes.num_left_behind[None]

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def owners_of(seed, num_devices):
    # Owner `num_devices` does not exist: such entries stay at home.
    return np.random.default_rng(seed).integers(0, num_devices + 1, num_devices * NUM_ENTRIES).astype(np.int32)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), num_devices=st.sampled_from([1, 2, 8]), capacity=st.sampled_from([3, NUM_ENTRIES]))
def test_entries_reach_their_owner_in_order(seed, num_devices, capacity):
    owners = owners_of(seed, num_devices)
    rows = np.arange(owners.size, dtype=np.int32)
    found = jax.tree.map(np.asarray, round_trip(num_devices, capacity)(owners, rows))
    arrived, vectors, (is_odd, half, word), answers, left_behind = found
    for source in range(num_devices):
        mine = slice(source * NUM_ENTRIES, (source + 1) * NUM_ENTRIES)
        lost = 0
        wanted_answers = np.full(NUM_ENTRIES, -2)
        for owner in range(num_devices):
            sent = rows[mine][owners[mine] == owner]
            lost += max(0, sent.size - capacity)
            sent = sent[:capacity]
            padded = np.concatenate([sent, np.full(capacity - sent.size, NO_ROW)])
            np.testing.assert_array_equal(arrived[owner, source], padded)
            np.testing.assert_array_equal(vectors[owner, source, : sent.size], np.repeat(sent[:, None], 3, 1))
            np.testing.assert_array_equal(is_odd[owner, source, : sent.size], sent % 2 == 1)
            np.testing.assert_array_equal(half[owner, source, : sent.size], sent / 2)
            np.testing.assert_array_equal(word[owner, source, : sent.size], ~sent.astype(np.uint32))
            assert not any(lane[owner, source, sent.size :].any() for lane in (vectors, is_odd, half, word))
            wanted_answers[sent - source * NUM_ENTRIES] = 1000 * owner + sent
        np.testing.assert_array_equal(answers[mine], wanted_answers)
        assert left_behind[source] == lost


def test_several_mesh_axes_count_as_one():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def body(owners, rows):
        routes = plan_routes(owners, num_devices=4, capacity=NUM_ENTRIES)
        return send(rows, routes.entries, ("x", "y"))[None]

    owners = owners_of(0, 4)
    rows = np.arange(owners.size, dtype=np.int32)
    exchange = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False))
    expected = round_trip(4, NUM_ENTRIES)(owners, rows)[0]
    np.testing.assert_array_equal(exchange(owners, rows), expected)


@pytest.mark.parametrize("owners", [np.zeros(0, np.int32), np.full(5, -1, np.int32)])
def test_nothing_to_send_is_nothing_sent(owners):
    routes = plan_routes(jnp.asarray(owners), num_devices=2, capacity=4)
    assert (np.asarray(routes.entries) == NO_ROW).all()
    assert (np.asarray(routes.places) == NO_ROW).all()
    assert int(routes.num_left_behind) == 0
