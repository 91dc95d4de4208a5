"""Steps with minibatches give the same results as steps of the whole batch."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed.sparsecore import embedding
from rsembed.sparsecore.partitioner import bucket_of
from tests.sparsecore import minibatch_program as program, small_world
from tests.world import assert_same


def preprocess(specs, *, ids=None, **options):
    return small_world.preprocess(
        specs, {"history": program.make_ids() if ids is None else ids}, **options
    )


@pytest.mark.parametrize("num_shards", [1, 4, 6, 64])
def test_the_rows_of_one_shard_fill_all_buckets_evenly(num_shards):
    filled = np.bincount(bucket_of(np.arange(64 * 100) * num_shards + num_shards - 1), minlength=64)
    # Each bucket has 100 rows on average, with a standard deviation of 10.
    assert filled.min() > 60 and filled.max() < 150


@pytest.mark.parametrize("devices", [1, 4])
def test_the_step_is_bit_by_bit_that_of_the_whole_batch(devices):
    (_, *whole), seen = program.run_step(devices)
    (minibatches, *split), seen_split = program.run_step(
        devices, program.TIGHT, enable_minibatching=True
    )
    assert len(set(minibatches.tolist())) == 1 and minibatches[0] > 1
    assert_same(split, whole)
    for field in ("max_ids_per_partition", "max_unique_ids_per_partition", "id_drop_counters"):
        assert_same(getattr(seen_split, field), getattr(seen, field))
    sizes_split, sizes = (
        statistics.required_buffer_size_per_sc["words"] for statistics in (seen_split, seen)
    )
    assert (sizes_split >= sizes).all()


def test_a_given_agreement_is_asked_twice_and_obeyed():
    specs, asked = program.specs_for(4, **program.TIGHT), []

    def agree(key, flags):
        asked.append((key, len(flags), flags.any()))
        return np.ones(len(flags), bool)

    options = {"batch_number": 5, "all_reduce_interface": agree}
    quiet = program.make_ids()[:16]
    processed, _ = preprocess(
        specs, devices=4, ids=quiet, local=2, enable_minibatching=True, **options
    )
    assert asked == [(10, 1, False), (11, 63, False)]
    assert processed.num_minibatches.tolist() == [64, 64]


def test_a_batch_within_its_limits_is_one_minibatch_with_absolute_pointers():
    specs = program.specs_for(1, 2)
    processed, statistics = preprocess(specs, enable_minibatching=True)
    plain, _ = preprocess(specs)
    assert processed.num_minibatches.tolist() == [1]
    assert processed.lhs_gains["words"].size == 64 * plain.lhs_gains["words"].size
    blocks = processed.lhs_row_pointers["words"].reshape(-1, 8)
    plain_blocks = plain.lhs_row_pointers["words"].reshape(-1, 8)
    assert len(blocks) == 64 * 2
    assert blocks[0].tolist() == plain_blocks[0].tolist()
    assert blocks[1].tolist() == (plain_blocks[1] + blocks[0, -1]).tolist()
    assert (blocks[2:] == blocks[1, -1]).all()
    assert statistics.required_buffer_size_per_sc["words"].sum() == blocks[1, -1]


def test_blocks_hold_their_minibatch_in_the_published_order():
    specs = program.specs_for(1, 2, **program.TIGHT)
    processed, _ = preprocess(specs, enable_minibatching=True)
    number = int(processed.num_minibatches[0])
    pointers, rows, samples, _ = (field["words"] for field in processed.sparse_dense_matmul_input)
    blocks = pointers.reshape(-1, 8)
    start, minibatch_of = 0, {}
    for block in range(2 * number):
        core, minibatch = divmod(block, number)
        for shard in range(2):
            end = blocks[block, shard]
            columns = rows[start:end] * 2 + shard
            order = np.lexsort((samples[start:end], columns, bucket_of(columns)))
            assert_array_equal(order, np.arange(end - start))
            assert len(columns) <= 24 and len(set(columns)) <= 6
            for column in columns:
                # All entries of a row are in the same minibatch.
                assert minibatch_of.setdefault((core, column), minibatch) == minibatch
            start = -(-end // 8) * 8
        assert (blocks[block, 2:] == start).all()
    ids = program.make_ids().reshape(2, -1)
    assert set(minibatch_of) == {(core, row) for core in range(2) for row in ids[core]}


def test_a_bucket_that_overflows_alone_is_an_error_or_counted():
    specs = program.specs_for(1, max_ids_per_partition=10)
    ids = np.zeros((32, 6), int)
    with pytest.raises(
        ValueError,
        match=r"max_ids_per_partition=10, but core 0 has 32 for shard 0 in one of .* cannot",
    ):
        preprocess(specs, ids=ids, enable_minibatching=True)
    processed, statistics = preprocess(
        specs, ids=ids, enable_minibatching=True, allow_id_dropping=True
    )
    assert statistics.id_drop_counters == {"words": 22 * 6}
    assert statistics.id_drops_by_table["words"] == (22 * 6, 0, 0)
    assert np.isfinite(processed.lhs_gains["words"]).sum() == 10


def test_a_suggested_buffer_bounds_all_minibatches_together():
    specs = program.specs_for(1, suggested_coo_buffer_size_per_device=256, **program.TIGHT)
    processed, statistics = preprocess(specs, enable_minibatching=True)
    needed = int(statistics.required_buffer_size_per_sc["words"][0])
    assert needed <= 256 == processed.lhs_gains["words"].size
    small = program.specs_for(1, suggested_coo_buffer_size_per_device=64, **program.TIGHT)
    with pytest.raises(
        ValueError, match=rf"entries do not fit the buffer of 64 places per device, {needed} are"
    ):
        preprocess(small, enable_minibatching=True)


@pytest.mark.parametrize("has_leading_dimension", [False, True])
@pytest.mark.parametrize("enable_minibatching", [False, True])
def test_shapes_are_known_in_advance(has_leading_dimension, enable_minibatching):
    options = {
        "has_leading_dimension": has_leading_dimension,
        "enable_minibatching": enable_minibatching,
    }
    limits = {"max_ids_per_partition": 200, "suggested_coo_buffer_size_per_device": 500}
    specs = program.specs_for(4, 2, **limits)
    processed, _ = preprocess(specs, devices=4, ids=program.make_ids()[:16], local=2, **options)
    shapes = embedding.eval_preprocess_sparse_dense_matmul_input_shape(
        specs, 2, 4, num_sc_per_device=2, **options
    )
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(processed), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    size = embedding.compute_coo_buffer_size_per_device(specs, 4, 2, enable_minibatching)["words"]
    assert processed.lhs_gains["words"].size == 2 * size == 2 * 512
