"""Whatever form a batch has and wherever it is preprocessed, its buffers are the same.

What they hold is held by `test_cases` and `test_random_models`.
"""

import jax
import numpy as np
import pytest

from tests.sparsecore import small_world
from tests.world import assert_same


@pytest.mark.parametrize("convert", [
    lambda rows: rows,
    lambda rows: [tuple(row) for row in rows],
    lambda rows: small_world.ragged(rows, np.int32),
    lambda rows: small_world.ragged(rows, np.uint64),
    lambda rows: np.asarray(rows, object),
    lambda rows: np.asarray(rows, np.uint8),
    lambda rows: jax.numpy.asarray(rows, np.int32),
], ids=["lists", "tuples", "ragged", "ragged_unsigned", "regular_objects", "dense_bytes", "jax"])  # fmt: skip
def test_every_form_of_the_same_ids_gives_the_same_buffers(convert):
    rows = {name: ids.tolist() for name, ids in small_world.draw_batch()[0].items()}
    specs = small_world.placed_specs(1, 2, combiner="mean")
    found, wanted = (
        small_world.preprocess(specs, {name: make(own) for name, own in rows.items()})[0]
        for make in (convert, np.asarray)
    )
    assert_same(found, wanted)


def test_processes_together_fill_what_one_process_fills():
    specs, parts = small_world.placed_specs(4, 1), []
    batch, _ = small_world.draw_batch()
    for process in range(2):
        local = {
            name: rows[process * len(rows) // 2 :][: len(rows) // 2] for name, rows in batch.items()
        }
        parts.append(small_world.preprocess(specs, local, devices=4, local=2)[0])
    whole, _ = small_world.preprocess(specs, batch, devices=4)
    together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    assert_same(together, whole)


def test_leading_dimension_counts_local_devices():
    specs, (batch, _) = small_world.placed_specs(2, 2), small_world.draw_batch()
    flat, _ = small_world.preprocess(specs, batch, devices=2)
    deep, _ = small_world.preprocess(specs, batch, devices=2, has_leading_dimension=True)
    assert deep.num_minibatches.shape == (2, 1)
    for a, b in zip(jax.tree.leaves(flat), jax.tree.leaves(deep), strict=True):
        assert b.shape[0] == 2
        np.testing.assert_array_equal(a, b.reshape(-1))


def test_a_small_buffer_drops_whole_tails_and_counts_them():
    specs = small_world.placed_specs(
        1, 1, is_stacked=False, suggested_coo_buffer_size_per_device=16
    )
    batch = {
        name: (np.arange(size) % 20)[:, None] for name, (_, size) in small_world.FEATURES.items()
    }
    processed, statistics = small_world.preprocess(specs, batch, allow_id_dropping=True)
    assert processed.lhs_row_pointers["first"].tolist() == [16] * 8
    assert statistics.id_drop_counters == {"first": 24 + 48 - 16, "second": 24 - 16}
    assert statistics.required_buffer_size_per_sc["first"].tolist() == [72]
    with pytest.raises(
        ValueError, match=r"stack 'first': 56 entries do not fit the buffer of 16 places .*to 72"
    ):
        small_world.preprocess(specs, batch)


def test_cancelling_weights_give_zero_gains():
    specs = small_world.place(small_world.feature_specs({"t": 8}, {"f": ("t", 2)}, combiner="mean"))
    weights = np.asarray([[1, -1], [0, 0]], np.float32)
    processed, _ = small_world.preprocess(
        specs, {"f": np.asarray([[1, 2], [3, 4]])}, {"f": weights}
    )
    assert processed.lhs_gains["t"][:4].tolist() == [0, 0, 0, 0]
