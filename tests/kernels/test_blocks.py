"""Blocks that travel together equal loops of numpy, and so do the places that a round has for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.ids import Queue
from tests.kernels.cases import IMPLEMENTATIONS

LANES = (np.int32, np.uint32, np.float32)


def expected_blocks(array, rows):
    filler = NO_ROW if array.dtype == np.int32 else 0
    blocks = np.full((*rows.shape, *array.shape[1:]), filler, array.dtype)
    for place in np.ndindex(rows.shape):
        if 0 <= rows[place] < len(array):
            blocks[place] = array[rows[place]]
    return blocks


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("devices", "row"), [(1, (3,)), (4, ()), (4, (0,)), (4, (700,))])
def test_packed_rows_come_back_as_blocks(devices, row, implementation):
    generator = np.random.default_rng(0)
    dtypes = LANES if not row else (np.float32,) * 3
    arrays = [generator.integers(-9, 99, (n, *row)).astype(dtype) for n, dtype in zip((50, 0, 7), dtypes, strict=True)]
    rows = [generator.integers(-2, 60, (devices, c)).astype(np.int32) for c in (5, 2, 300)]
    rows[0][0, 0] = NO_ROW
    packed = api.pack_blocks(*jax.tree.map(jnp.asarray, (arrays, rows)), implementation=implementation)
    assert packed.shape == (devices, 307, *row)
    assert packed.dtype == (np.uint32 if not row else np.float32)
    expected = [expected_blocks(*pair) for pair in zip(arrays, rows, strict=True)]
    again = api.pack_blocks(jax.tree.map(jnp.asarray, expected), [None] * 3, implementation=implementation)
    np.testing.assert_array_equal(packed, again)
    shapes = [jax.ShapeDtypeStruct(own.shape, own.dtype) for own in expected]
    for found, own in zip(api.unpack_blocks(packed, shapes, implementation=implementation), expected, strict=True):
        assert found.dtype == own.dtype
        np.testing.assert_array_equal(found, own)


def queue_of(generator, num_devices, num_lanes, capacity):
    """Ascending entries of every owner, some of which have travelled."""
    keys = np.sort(generator.choice(40, 12, replace=False))
    offsets = np.sort(generator.integers(0, 13, num_devices + 1))
    offsets[0] = 0
    cursor = np.array([generator.integers(0, size + 1) for size in np.diff(offsets)])
    lanes = (np.int32(keys - 20),) if num_lanes == 1 else (np.uint32(keys // 7), np.uint32(keys))
    return Queue(np.int32(offsets), np.int32(cursor), lanes, capacity)


def name_of(queue, entry):
    return tuple(int(lane[entry]) for lane in queue.lanes)


def waiting(queue, owner):
    """The entries that are left for an owner."""
    return range(queue.offsets[owner] + queue.cursor[owner], queue.offsets[owner + 1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(6))
def test_a_round_takes_what_is_before_everybodys_first_entry_without_a_place(seed, implementation):
    generator, num_devices = np.random.default_rng(seed), 3
    sizes = [(1, 2), (2, 1), (2, 20)]
    devices = [[queue_of(generator, num_devices, *size) for size in sizes] for _ in range(num_devices)]
    asked = [[jax.tree.map(jnp.asarray, own) for own in queues] for queues in devices]
    asked = [[own._replace(capacity=size[1]) for own, size in zip(queues, sizes, strict=True)] for queues in asked]
    ends = [api.block_ends(queues, implementation=implementation) for queues in asked]
    fit = jnp.min(jnp.stack([fit for fit, _ in ends]), axis=0)
    cuts = np.full((2, 3, num_devices), 2**32 - 1, np.uint32)
    for k in range(3):
        for owner in range(num_devices):
            words = [tuple(np.asarray(behind)[:, k, owner].tolist()) for own, behind in ends if not own[k, owner]]
            cuts[:, k, owner] = min(words, default=(2**32 - 1,) * 2)
    for queues, own in zip(devices, asked, strict=True):
        places, cursors, are_left = api.round_places(own, fit, jnp.asarray(cuts), implementation=implementation)
        left = 0
        for k, queue in enumerate(queues):
            for owner in range(num_devices):
                others = [(other[k], waiting(other[k], owner)[queue.capacity :]) for other in devices]
                behind = [name_of(other, entries[0]) for other, entries in others if entries]
                ahead = waiting(queue, owner)
                sent = [e for e in ahead[: queue.capacity] if not behind or name_of(queue, e) < min(behind)]
                assert np.asarray(places[k])[owner].tolist() == sent + [NO_ROW] * (queue.capacity - len(sent))
                assert cursors[k][owner] == queue.cursor[owner] + len(sent)
                left += len(ahead) - len(sent)
        assert bool(are_left) == (left > 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queues_without_entries_send_nothing(implementation):
    nothing = Queue(jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32), (jnp.zeros(0, jnp.uint32),), 2)
    fit, behind = api.block_ends([nothing], implementation=implementation)
    assert fit.tolist() == [[1, 1]] and behind.tolist() == [[[0, 0]]]
    for fits in (fit, 1 - fit):
        places, cursors, are_left = api.round_places([nothing], fits, behind, implementation=implementation)
        assert places[0].tolist() == [[NO_ROW] * 2] * 2 and cursors[0].tolist() == [0, 0] and not are_left
