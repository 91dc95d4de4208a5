"""Tests of `trade`: blocks arrive at owners, with fill values in empty entries, and come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from rsembed.kernels.contract import NO_ROW
from rsembed.parallel.exchange import trade
from tests.world import assert_same, mesh_of


def parcel_of(numbers):
    """Arrays of several dtypes and shapes, computed from one number for each entry."""
    numbers = np.asarray(numbers)
    return {
        "row": numbers.astype(np.int32),
        "vector": np.repeat(numbers[..., None], 3, axis=-1).astype(np.float32),
        "half": np.repeat(numbers[..., None], 2, axis=-1).astype(jnp.bfloat16),
        "lanes": (numbers.astype(np.float32) / 2, ~numbers.astype(np.uint32)),
    }


@functools.cache
def round_trip(shape):
    """A program that trades two parcels at once. Owners send back the blocks that arrive."""
    mesh = mesh_of(*shape)
    axes = mesh.axis_names

    def body(parcels, entries):
        arrived = trade(parcels, axes, [indices[0] for indices in entries])
        back = trade(arrived, axes)
        return jax.tree.map(lambda x: x[None], (arrived, back))

    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    )


def wanted_block(parcel, entries):
    """The block that is sent for `entries`, filled by a loop."""

    def picked(array):
        block = np.zeros((*entries.shape, *array.shape[1:]), array.dtype)
        if array.dtype == np.int32:
            block[:] = NO_ROW
        for place, entry in np.ndenumerate(entries):
            if 0 <= entry < array.shape[0]:
                block[place] = array[entry]
        return block

    return jax.tree.map(picked, parcel)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from([((1,), 12), ((8,), 12), ((2,), 0), ((2, 2), 12)]))
def test_blocks_arrive_where_they_belong_and_come_back(seed, case):
    shape, num_entries = case
    rng = np.random.default_rng(seed)
    num_devices = int(np.prod(shape))
    parcels = []
    entries = []
    for capacity in (3, 5):
        parcels.append(parcel_of(rng.integers(0, 200, num_devices * num_entries)))
        choices = [*range(num_entries), num_entries, -1, NO_ROW]
        size = num_devices, num_devices, capacity
        entries.append(rng.choice(choices, size).astype(np.int32))
    arrived, back = jax.tree.map(np.asarray, round_trip(shape)(parcels, entries))
    for number, parcel in enumerate(parcels):
        for source in range(num_devices):
            first = source * num_entries
            sent = jax.tree.map(lambda x, k=first: x[k : k + num_entries], parcel)
            wanted = wanted_block(sent, entries[number][source])
            received = jax.tree.map(lambda x, k=source: x[:, k], arrived[number])
            assert_same(received, wanted)
            returned = jax.tree.map(lambda x, k=source: x[k], back[number])
            assert_same(returned, wanted)
