"""The noise of a row does not depend on where it lies."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.collection.layout import RowLayout

SIZES = {"user": 11, "item": 30, "query": 2}
LAYOUTS = {
    "row_wise 2": lambda stack: RowLayout.row_wise(stack, 2),
    "row_wise 4": lambda stack: RowLayout.row_wise(stack, 4),
    "table_wise": lambda stack: RowLayout.table_wise(stack, 3, [0, 0, 0]),
}


def noise_rows(layout_of, *names):
    """What a rounding is told of every row, by table."""
    tables = [rs.TableSpec(name=name, vocabulary_size=SIZES[name], embedding_dim=4) for name in names]
    (stack,) = rs.plan_stacking([rs.FeatureSpec(name=t.name, table_spec=t) for t in tables], pad=False).stacks
    layout = layout_of(stack)
    assert layout.rounding(None, 0) is None
    found = []
    for shard in range(layout.num_shards):
        round_rows = layout.rounding(lambda values, dtype, rows: rows, shard)
        local = jnp.asarray(np.arange(50) % layout.rows_per_shard, jnp.int32)  # always as many: nothing compiles anew
        found.append(np.asarray(round_rows(local, None, local))[: layout.rows_per_shard])
    return {name: np.concatenate(found)[layout.all_rows(name, SIZES[name])] for name in names}


@functools.cache
def undivided():
    return noise_rows(RowLayout.whole, "user", "item", "query")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", [("user", "item", "query"), ("query", "item")], ids="+".join)
def test_noise_belongs_to_the_name_of_a_table_and_the_id_wherever_the_row_lies(layout, names):
    for name, rows in noise_rows(LAYOUTS[layout], *names).items():
        np.testing.assert_array_equal(rows, undivided()[name])


def test_every_row_of_every_table_has_noise_of_its_own():
    rows = np.concatenate(list(undivided().values()))
    assert rows.dtype == np.int32
    assert len(set(rows.tolist())) == sum(SIZES.values())
