"""Tests of the picture of a buffer, against the partitioner."""

import numpy as np
import pytest

from rsembed import plot
from rsembed.plot.buffers import GAP, TAIL, buffer_places
from tests.plot.preprocessing import preprocessed

POINTERS = np.array([3, 9, *[16] * 6, 8, 8, *[8] * 6])
"""Row pointers of two cores for two shards. One core has 3 and 1 ids, the other has 8 and none."""
PLACES = buffer_places(POINTERS, num_shards=2, num_places=48)


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_places_are_partitions_gaps_and_a_tail():
    assert PLACES.tolist() == [
        [0] * 3 + [GAP] * 5 + [1] + [GAP] * 7 + [TAIL] * 8,
        [0] * 8 + [TAIL] * 16,
    ]


@pytest.mark.parametrize("num_cores", [1, 2, 4, 16])
def test_used_places_are_those_that_the_partitioner_filled(num_cores):
    ids = np.random.default_rng(0).integers(0, 100, (16, 5))
    processed, _ = preprocessed(ids, num_cores, limit=128)
    rows = processed.lhs_embedding_ids["t"]
    entries = buffer_places(
        processed.lhs_row_pointers["t"], num_shards=num_cores, num_places=len(rows)
    )
    is_used = rows.reshape(num_cores, -1) != np.iinfo(np.int32).max
    np.testing.assert_array_equal(entries >= 0, is_used)
    distinct = np.concatenate([np.unique(row) for row in ids])
    np.testing.assert_array_equal(np.bincount(entries[is_used]), np.bincount(distinct % num_cores))


def test_more_shards_than_colours_and_an_empty_buffer_are_drawn():
    ax = plot.plot_buffer(np.arange(16)[None])
    assert "colours repeat" in legend_texts(ax)[-3]
    assert legend_texts(plot.plot_buffer(np.full((1, 8), TAIL))) == ["gap", "empty tail"]
