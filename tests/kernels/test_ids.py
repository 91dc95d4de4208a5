"""Kernels for ids, entries of preprocessed buffers and exchanges equal loops or the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rsembed as rs
from rsembed.kernels import api, ids as definition, native
from rsembed.kernels.contract import NO_ROW, Call, IdList, Segment
from rsembed.kernels.ids import ALIGNMENT, Partitions, Queue
from rsembed.places import Place
from tests.kernels.cases import IMPLEMENTATIONS, needs_native
from tests.world import assert_same

ROWS_PER_SHARD = 64


def row_of(id_, place, size, spread):
    if not 0 <= id_ < size:
        return NO_ROW
    shard = place.owner + (id_ + place.first + place.rotation) % spread
    return shard * ROWS_PER_SHARD + (place.first + id_) // spread


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spread", [1, 2, 3, 8])
def test_rows_are_those_of_a_loop_over_ids(spread, implementation):
    """Each feature has two bags of the shared list, which has ids in no bag at both ends.

    The ids of the last feature are also in a separate list.
    """
    draw = np.random.default_rng(spread)
    ids = [0, 0]
    rows = [NO_ROW, NO_ROW]
    ends = [2]
    segments = []
    places = []
    sizes = []
    for number, length in enumerate((5, 0, 5000, 5)):
        size = int(draw.integers(1, 40))
        owner = number if spread == 1 else 0
        place = Place(owner, int(draw.integers(0, 50)), int(draw.integers(0, 8)))
        own_ids = [-(2**31), 2**31 - 1, *draw.integers(-3, size + 3, length).tolist()]
        ids += own_ids
        rows += [row_of(id_, place, size, spread) for id_ in own_ids]
        ends += [len(ids) - length // 3, len(ids)]
        segments.append(Segment(0, 2 * number, 2))
        places.append(place)
        sizes.append(size)
    shared = IdList(jnp.asarray([*ids, 0]), jnp.asarray(ends))
    alone = IdList.single(jnp.asarray(own_ids))
    empty = IdList.single(jnp.zeros(0, jnp.int32))
    segments += [Segment(1, 0, len(own_ids)), Segment(2, 0, 0)]
    call = Call((shared, alone, empty), tuple(segments))
    stacks = [*places, place, place], [*sizes, size, size], spread, ROWS_PER_SHARD
    actual = api.rows_of_ids(call, *stacks, implementation=implementation)
    assert [each.dtype for each in actual] == [jnp.int32] * 3
    assert actual[0].tolist() == [*rows, NO_ROW]
    assert actual[1].tolist() == rows[-len(own_ids) :]
    assert actual[2].size == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_counts_are_those_of_a_loop_over_ids(implementation):
    draw = np.random.default_rng(0)
    sizes = (4, 5, 10)
    ids = [jnp.asarray(draw.integers(-2, 12, count)) for count in (0, 7, 20_000)]
    offsets = [jnp.asarray(ends) for ends in ([0, 0], [2, 3, 5], [0, 19_000, 25_000])]
    actual = api.count_ids(ids, offsets, sizes, implementation=implementation)
    for counts, own_ids, ends, size in zip(actual, ids, offsets, sizes, strict=True):
        used = np.asarray(own_ids[ends[0] : ends[-1]])
        is_inside = (used >= 0) & (used < size)
        assert counts[0] == np.sum(is_inside)
        assert counts[1] == np.sum(~is_inside & (used != -1))


@needs_native
def test_a_program_does_not_grow_with_the_number_of_features():
    def num_operations(num_features):
        features = []
        for number in range(num_features):
            table = rs.TableSpec(f"t{number}", 10 + number, 8, optimizer=rs.optimizers.SGD(0.1))
            features.append(rs.FeatureSpec(table.name, table))
        collection = rs.EmbeddingCollection(features)
        state = jax.eval_shape(collection.init, jax.random.key(0))
        batch = {feature.name: jnp.zeros((4, 2), jnp.int32) for feature in features}

        def step(state, batch):
            activations, statistics = collection.lookup(state, batch, return_statistics=True)
            return collection.update(state, batch, activations), statistics

        text = jax.jit(step).lower(state, batch).compile().as_text()
        return text.count(" fusion(") + text.count(" custom-call(")

    assert num_operations(12) == num_operations(3)


# Entries of preprocessed buffers

MOST_PER_PARTITION, MOST_MINIBATCHES = 11, 3


def draw_partitions(rng, num_minibatches=None, *, cores=2, shards=4, rows=6, samples=5):
    """Preprocessed buffers, with garbage in all unused places, and a list of their entries.

    An entry is a tuple `(sample, row, gain)`.
    """
    num_parts = num_minibatches or 1
    num_places = cores * num_parts * shards * 2 * ALIGNMENT
    num_blocks = cores if num_minibatches is None else cores * MOST_MINIBATCHES
    pointers = rng.integers(-9, 2**20, (num_blocks, max(shards, ALIGNMENT)))
    ids = rng.integers(-9, 2**20, num_places)
    own_samples = rng.integers(-9, 2**20, num_places)
    gains = rng.normal(size=num_places).astype(np.float32)
    entries = []
    end = 0
    for block in range(cores * num_parts):
        core = block // num_parts
        first = 0
        # Without minibatches, each core has a separate buffer.
        if num_minibatches is None:
            first = num_places // cores * core
            end = 0
        for shard in range(shards):
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + int(rng.choice([0, rng.integers(0, MOST_PER_PARTITION)]))
            pointers[block, shard] = end
            for place in range(first + begin, first + end):
                ids[place] = rng.integers(0, rows)
                own_samples[place] = rng.integers(0, samples)
                sample = core * samples + int(own_samples[place])
                entries.append((sample, shard * rows + int(ids[place]), float(gains[place])))
    number = None if num_minibatches is None else jnp.int32(num_minibatches)
    arrays = [jnp.asarray(array) for array in (pointers.reshape(-1), ids, own_samples, gains)]
    return Partitions(*arrays, number, cores, shards, rows, samples), entries


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    seed=st.integers(0, 2**31),
    numbers=st.lists(st.sampled_from([None, 1, 3]), min_size=1, max_size=2),
)
@settings(max_examples=25, deadline=None)
def test_entries_are_those_of_a_loop_over_partitions(implementation, seed, numbers):
    rng = np.random.default_rng(seed)
    drawn = [draw_partitions(rng, number) for number in numbers]
    actual = api.entries_by_sample([stack for stack, _ in drawn], implementation=implementation)
    for (stack, entries), (rows, offsets, gains) in zip(drawn, actual, strict=True):
        # With minibatches, the entries of a sample are sorted by row. Otherwise they keep the order
        # of the buffers.
        num_keys = 1 if stack.num_minibatches is None else 2
        entries.sort(key=lambda entry, num_keys=num_keys: entry[:num_keys])
        samples = [entry[0] for entry in entries]
        assert offsets.tolist() == np.searchsorted(samples, range(stack.num_samples + 1)).tolist()
        padding = len(rows) - len(entries)
        assert rows.tolist() == [entry[1] for entry in entries] + [NO_ROW] * padding
        assert gains.tolist() == [entry[2] for entry in entries] + [0.0] * padding
        assert (rows.dtype, offsets.dtype, gains.dtype) == (jnp.int32, jnp.int32, jnp.float32)


# Exchanges between devices. tests/parallel compares whole exchanges and their rounds with loops.


@needs_native
@pytest.mark.parametrize(("devices", "row"), [(1, (3,)), (4, ()), (4, (0,)), (4, (700,))])
def test_packed_rows_and_blocks_are_those_of_the_definition(devices, row):
    draw = np.random.default_rng(0)
    dtypes = [np.float32] * 3 if row else [np.int32, np.uint32, np.float32]
    arrays = []
    rows = []
    shapes = []
    for num_rows, capacity, dtype in zip((50, 0, 7), (5, 2, 300), dtypes, strict=True):
        arrays.append(jnp.asarray(draw.integers(-9, 99, (num_rows, *row)).astype(dtype)))
        rows.append(jnp.asarray(draw.integers(-2, 60, (devices, capacity))))
        shapes.append(jax.ShapeDtypeStruct((devices, capacity, *row), dtype))
    packed = native.pack_blocks(arrays, rows)
    assert packed.dtype == (np.float32 if row else np.uint32)
    assert_same(packed, definition.pack_blocks(arrays, rows))
    blocks = native.unpack_blocks(packed, shapes)
    assert_same(blocks, definition.unpack_blocks(packed, shapes))
    assert_same(native.pack_blocks(blocks, [None] * 3), packed)
    assert_same(definition.pack_blocks(blocks, [None] * 3), packed)


def queue_of(draw, num_lanes, capacity):
    """A queue of ascending entries for three owners. A random number of them is already sent."""
    keys = np.sort(draw.choice(40, 12, replace=False))
    offsets = np.sort(draw.integers(0, 13, 4))
    offsets[0] = 0
    cursor = [draw.integers(0, size + 1) for size in np.diff(offsets)]
    lanes = (keys - 20,)
    if num_lanes == 2:
        lanes = (np.uint32(keys // 7), np.uint32(keys))
    return Queue(
        jnp.asarray(offsets), jnp.asarray(cursor), tuple(map(jnp.asarray, lanes)), capacity
    )


@needs_native
@pytest.mark.parametrize("seed", range(6))
def test_a_round_takes_the_entries_that_the_definition_takes(seed):
    draw = np.random.default_rng(seed)
    devices = []
    for _ in range(2):
        devices.append([queue_of(draw, *size) for size in ((1, 2), (2, 1), (2, 20))])
    ends = [definition.block_ends(queues) for queues in devices]
    assert_same([native.block_ends(queues) for queues in devices], ends)
    (fit, cuts), (other_fit, other_cuts) = ends
    fit = jnp.minimum(fit, other_fit)
    cuts = jnp.maximum(cuts, other_cuts)
    for queues in devices:
        actual = native.round_places(queues, fit, cuts)
        expected = definition.round_places(queues, fit, cuts)
        assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected))
