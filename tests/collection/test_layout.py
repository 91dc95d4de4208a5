"""What a row is called does not depend on where it lies."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.collection.layout import RowLayout

SIZES = {"user": 11, "item": 30, "query": 2}


def stack_of(*names):
    tables = [rs.TableSpec(name=name, vocabulary_size=SIZES[name], embedding_dim=4) for name in names]
    (stack,) = rs.plan_stacking([rs.FeatureSpec(name=t.name, table_spec=t) for t in tables], pad=False).stacks
    return stack


@pytest.mark.parametrize(
    "layout_of",
    [
        RowLayout.whole,
        lambda stack: RowLayout.row_wise(stack, 2),
        lambda stack: RowLayout.row_wise(stack, 4),
        lambda stack: RowLayout.table_wise(stack, 3, [0, 0, 0]),
    ],
    ids=["whole", "row_wise 2", "row_wise 4", "table_wise"],
)
@pytest.mark.parametrize("names", [("user", "item", "query"), ("query", "item")], ids="+".join)
def test_noise_belongs_to_the_name_of_a_table_and_the_id_wherever_the_row_lies(layout_of, names):
    layout = layout_of(stack_of(*names))
    for name in names:
        rows = np.arange(layout.num_rows)[layout.all_rows(name, SIZES[name])]
        for shard in range(layout.num_shards):
            is_here = rows // layout.rows_per_shard == shard
            numbers, ids = layout.names_and_ids(shard, jnp.asarray(rows[is_here] % layout.rows_per_shard, jnp.int32))
            assert numbers.dtype == ids.dtype == jnp.uint32
            np.testing.assert_array_equal(numbers, np.full(is_here.sum(), zlib.crc32(name.encode())))
            np.testing.assert_array_equal(ids, np.flatnonzero(is_here))
