"""Rows and counts of ids, entries of preprocessed buffers and blocks equal loops, in every implementation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rsembed as rs
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, IdList, Segment
from rsembed.kernels.ids import ALIGNMENT, Partitions, Queue
from rsembed.places import Place
from tests.kernels.cases import IMPLEMENTATIONS, needs_native


def row_of(id_, place, size, spread, rows_per_shard):
    if not 0 <= id_ < size:
        return NO_ROW
    shard = place.owner + (id_ + place.first + place.rotation) % spread
    return shard * rows_per_shard + (place.first + id_) // spread


@st.composite
def features(draw):
    """Places and sizes of the tables of some features, the ids of their bags, and which features share a list."""
    spread = draw(st.sampled_from([1, 2, 3, 8]))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 40))
        owner = draw(st.integers(0, 3)) if spread == 1 else 0
        place = Place(owner, draw(st.integers(0, 50)), draw(st.integers(0, 7)))
        ids = st.integers(-3, size + 2) | st.sampled_from([-(2**31), 2**31 - 1])
        # Few lengths, so that few programs are compiled.
        own = draw(st.lists(ids, min_size=5, max_size=5)) * draw(st.sampled_from([0, 1, 1000]))
        drawn.append((own, place, size))
    return spread, drawn, draw(st.booleans())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(features())
@settings(max_examples=15, deadline=None)
def test_rows_are_those_of_a_loop_over_ids(implementation, drawn):
    spread, all_features, is_shared = drawn
    ids, places, sizes = zip(*all_features, strict=True)
    expected = []
    for own, place, size in all_features:
        expected.append([row_of(id_, place, size, spread, 64) for id_ in own])
    if is_shared:  # two bags a feature, and ids in no bag on both sides
        ends = [2]
        for own in ids:
            ends += [ends[-1] + len(own) // 3, ends[-1] + len(own)]
        listed = IdList(
            jnp.asarray([0, 0, *itertools.chain(*ids), 0], jnp.int32), jnp.asarray(ends, jnp.int32)
        )
        segments = [Segment(0, 2 * k, 2) for k in range(len(ids))]
        call = Call((listed,), tuple(segments))
        expected = [[NO_ROW, NO_ROW, *itertools.chain(*expected), NO_ROW]]
    else:
        call = Call.of(
            [IdList.single(jnp.asarray(own, jnp.int32)) for own in ids], ["sum"] * len(ids)
        )
    found = api.rows_of_ids(
        call, places, sizes, spread=spread, rows_per_shard=64, implementation=implementation
    )
    assert [rows.dtype for rows in found] == [jnp.int32] * len(found)
    assert [rows.tolist() for rows in found] == expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_counts_are_those_of_a_loop_over_ids(implementation):
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(-2, 12, n), jnp.int32) for n in (0, 7, 20_000)]
    offsets = [jnp.asarray(own, jnp.int32) for own in ([0, 0], [0, 3, 5], [0, 19_000, 25_000])]
    found = api.count_ids(ids, offsets, (4, 5, 10), implementation=implementation)
    for (num_inside, num_outside), own, ends, size in zip(
        found, ids, offsets, (4, 5, 10), strict=True
    ):
        used = own[: ends[-1]].tolist()
        assert int(num_inside) == sum(0 <= id_ < size for id_ in used)
        assert int(num_outside) == sum(id_ >= size or id_ < -1 for id_ in used)


@needs_native
def test_a_program_does_not_grow_with_the_number_of_features():
    def num_operations(num_features):
        tables = [
            rs.TableSpec(
                f"t{k}",
                10 + k,
                8,
                optimizer=rs.optimizers.SGD(0.1),
            )
            for k in range(num_features)
        ]
        collection = rs.EmbeddingCollection([rs.FeatureSpec(t.name, t) for t in tables])
        state = jax.eval_shape(collection.init, jax.random.key(0))
        batch = {t.name: jnp.zeros((4, 2), jnp.int32) for t in tables}

        def step(state, batch):
            activations, statistics = collection.lookup(state, batch, return_statistics=True)
            return collection.update(state, batch, activations), statistics

        text = jax.jit(step).lower(state, batch).compile().as_text()
        return text.count(" fusion(") + text.count(" custom-call(")

    assert num_operations(12) == num_operations(3)


# Entries of preprocessed buffers

MOST_PER_PARTITION, MOST_MINIBATCHES = 11, 3


def draw_partitions(rng, num_minibatches=None, *, cores=2, shards=4, rows=6, samples=5):
    """Buffers as preprocessing lays them out, with garbage wherever there is no entry; and `(sample, row, gain)`s."""
    places = cores * (num_minibatches or 1) * shards * 2 * ALIGNMENT
    per_part = places if num_minibatches is not None else places // cores
    num_blocks = cores * (MOST_MINIBATCHES if num_minibatches is not None else 1)
    pointers = rng.integers(-9, 2**20, (num_blocks, max(shards, ALIGNMENT))).astype(np.int32)
    ids, own_samples = (rng.integers(-9, 2**20, places).astype(np.int32) for _ in range(2))
    gains, entries, end = rng.normal(size=places).astype(np.float32), [], 0
    for block in range(cores * (1 if num_minibatches is None else num_minibatches)):
        core = block // (num_minibatches or 1)
        first = per_part * core if num_minibatches is None else 0
        end = 0 if num_minibatches is None else end
        for shard in range(shards):
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + int(rng.choice([0, rng.integers(0, MOST_PER_PARTITION)]))
            pointers[block, shard] = end
            for place in range(first + begin, first + end):
                ids[place], own_samples[place] = rng.integers(0, rows), rng.integers(0, samples)
                row, sample = shard * rows + ids[place], core * samples + own_samples[place]
                entries.append((int(sample), int(row), float(gains[place])))
    number = None if num_minibatches is None else jnp.asarray(num_minibatches, jnp.int32)
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
    found = api.entries_by_sample([own for own, _ in drawn], implementation=implementation)
    for (own, entries), (rows, offsets, gains), number in zip(drawn, found, numbers, strict=True):
        # Minibatches cut a sample by its rows; without them it comes in the order of its rows.
        entries = sorted(entries, key=(lambda e: e[:2]) if number is not None else (lambda e: e[0]))
        samples = [sample for sample, _, _ in entries]
        assert offsets.tolist() == np.searchsorted(samples, np.arange(own.num_samples + 1)).tolist()
        padding = rows.shape[0] - len(entries)
        assert rows.tolist() == [row for _, row, _ in entries] + [NO_ROW] * padding
        assert gains.tolist() == [gain for *_, gain in entries] + [0.0] * padding
        assert (rows.dtype, offsets.dtype, gains.dtype) == (jnp.int32, jnp.int32, jnp.float32)


# Blocks that travel between devices

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
    arrays = [
        generator.integers(-9, 99, (n, *row)).astype(dtype)
        for n, dtype in zip((50, 0, 7), dtypes, strict=True)
    ]
    rows = [generator.integers(-2, 60, (devices, c)).astype(np.int32) for c in (5, 2, 300)]
    rows[0][0, 0] = NO_ROW
    packed = api.pack_blocks(
        *jax.tree.map(jnp.asarray, (arrays, rows)), implementation=implementation
    )
    assert packed.shape == (devices, 307, *row)
    assert packed.dtype == (np.uint32 if not row else np.float32)
    expected = [expected_blocks(*pair) for pair in zip(arrays, rows, strict=True)]
    again = api.pack_blocks(
        jax.tree.map(jnp.asarray, expected), [None] * 3, implementation=implementation
    )
    np.testing.assert_array_equal(packed, again)
    shapes = [jax.ShapeDtypeStruct(own.shape, own.dtype) for own in expected]
    for found, own in zip(
        api.unpack_blocks(packed, shapes, implementation=implementation), expected, strict=True
    ):
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
    devices = [
        [queue_of(generator, num_devices, *size) for size in sizes] for _ in range(num_devices)
    ]
    asked = [[jax.tree.map(jnp.asarray, own) for own in queues] for queues in devices]
    asked = [
        [own._replace(capacity=size[1]) for own, size in zip(queues, sizes, strict=True)]
        for queues in asked
    ]
    ends = [api.block_ends(queues, implementation=implementation) for queues in asked]
    fit = jnp.min(jnp.stack([fit for fit, _ in ends]), axis=0)
    cuts = np.full((2, 3, num_devices), 2**32 - 1, np.uint32)
    for k in range(3):
        for owner in range(num_devices):
            words = [
                tuple(np.asarray(behind)[:, k, owner].tolist())
                for own, behind in ends
                if not own[k, owner]
            ]
            cuts[:, k, owner] = min(words, default=(2**32 - 1,) * 2)
    for queues, own in zip(devices, asked, strict=True):
        places, cursors, are_left = api.round_places(
            own, fit, jnp.asarray(cuts), implementation=implementation
        )
        left = 0
        for k, queue in enumerate(queues):
            for owner in range(num_devices):
                others = [
                    (other[k], waiting(other[k], owner)[queue.capacity :]) for other in devices
                ]
                behind = [name_of(other, entries[0]) for other, entries in others if entries]
                ahead = waiting(queue, owner)
                sent = [
                    e
                    for e in ahead[: queue.capacity]
                    if not behind or name_of(queue, e) < min(behind)
                ]
                assert np.asarray(places[k])[owner].tolist() == sent + [NO_ROW] * (
                    queue.capacity - len(sent)
                )
                assert cursors[k][owner] == queue.cursor[owner] + len(sent)
                left += len(ahead) - len(sent)
        assert bool(are_left) == (left > 0)
