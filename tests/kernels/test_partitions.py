"""The entries of preprocessed buffers are those of a loop over partitions, in every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.kernels import api, library, native
from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.ids import ALIGNMENT, Partitions

_reason = native.unavailable_because()
needs_native = pytest.mark.skipif(_reason is not None, reason=f"needs the native kernels: {_reason}")
IMPLEMENTATIONS = ("reference", pytest.param("native", marks=needs_native))
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
@given(seed=st.integers(0, 2**31), numbers=st.lists(st.sampled_from([None, 1, 3]), min_size=1, max_size=2))
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


@needs_native
def test_calls_that_memory_would_suffer_from_are_refused():
    own, _ = draw_partitions(np.random.default_rng(0))
    places, numbers = own.embedding_ids.shape, [own.num_cores, own.num_shards, own.rows_per_shard, own.samples_per_core]
    operands = [*own[:4]]
    results = [(places, jnp.int32), ((own.num_samples + 1,), jnp.int32), (places, jnp.float32)]
    twice = jnp.tile(jnp.asarray([places[0] // 2, 0], jnp.int32), own.row_pointers.shape[0] // 2)  # again and again all
    far = jnp.zeros(places, jnp.int32)
    calls = {
        "unreadable stacks": (results, operands, [*numbers, 0, 1]),
        "wrong size of entries": (results[::-1], operands, [*numbers, 0]),
        "wrong size of sample ids": (results, [*operands[:2], own.sample_ids[:3], own.gains], [*numbers, 0]),
        "missing num_minibatches": (results, operands, [*numbers, 1]),
        "row pointers overlap": (results, [twice, far, far, own.gains], [*numbers, 0]),
    }
    for complaint, (kinds, arrays, attribute) in calls.items():
        with pytest.raises(Exception, match=complaint):
            jax.block_until_ready(
                library.call_handler(
                    "rsembed_entries_by_sample", kinds, *arrays, stacks=np.asarray(attribute, np.int64)
                )
            )
