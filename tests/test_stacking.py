import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import rsembed as rs
from rsembed.sparsecore.table_stacking import (
    attach_placement,
    stack_and_shard_tables,
    unshard_and_unstack_tables,
)
from tests.world import assert_same


def tables_and_features(*sizes, **changes):
    tables = [rs.TableSpec(f"t{i}", rows, dim, **changes) for i, (rows, dim) in enumerate(sizes)]
    features = [
        rs.FeatureSpec(f"f{i}", table, output_shape=(16, table.embedding_dim))
        for i, table in enumerate(tables)
    ]
    return tables, features


def test_the_core_layout_stacks_equal_tables_without_padding():
    tables, features = tables_and_features((5, 3), (7, 4), (6, 3))
    plan = rs.plan_stacking(features, pad=False)
    assert [[t.name for t in stack.tables] for stack in plan.stacks] == [["t0", "t2"], ["t1"]]
    assert [stack.padding_fraction for stack in plan.stacks] == [0.0, 0.0]
    assert plan.table("t2")[1].setting.row_offset_in_shard == 5
    # Planning does not change the specs.
    assert all(t.stacked_table_spec is None for t in tables)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": rs.optimizers.Adam()},
        {"dtype": "bfloat16"},
        {"stochastic_rounding": True},
        {"quantization_config": rs.QuantizationConfig(-1, 1, 8)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_tables_that_differ_in_what_a_stack_shares_stay_apart(change):
    one = rs.FeatureSpec("f", rs.TableSpec("one", 4, 2))
    two = rs.FeatureSpec("g", rs.TableSpec("two", 4, 2, **change))
    features = [one, two]
    assert len(rs.plan_stacking(features, pad=False).stacks) == 2


def test_row_wise_rules_share_a_padded_stack_only_at_their_exact_dim():
    _, features = tables_and_features(
        (9, 5), (9, 6), (9, 6), optimizer=rs.optimizers.RowWiseAdagrad()
    )
    plan = rs.plan_stacking(features, num_shards=2)
    assert [[t.name for t in stack.tables] for stack in plan.stacks] == [["t0"], ["t1", "t2"]]


def test_plans_are_equal_and_hash_by_value_limits_included():
    def plan(limit):
        _, features = tables_and_features((5, 3), max_ids_per_partition=limit)
        return rs.plan_stacking(features, num_shards=4)

    assert plan(8) == plan(8)
    assert len({plan(8), plan(8), plan(16)}) == 2


def test_plan_prints_as_text_and_html():
    _, features = tables_and_features((5, 3), (7, 4), optimizer=rs.optimizers.Adam())
    plan = rs.plan_stacking(features, num_shards=4)
    lines = str(plan).splitlines()
    assert lines[0].split()[:4] == ["stack", "tables", "features", "rows"]
    assert lines[1].split()[:7] == ["t0_t1", "2", "2", "64", "8", "float32", "adam"]
    assert plan._repr_html_().count("<tr>") == len(lines)
    assert plan.stacks[0].slot_bytes == 2 * plan.stacks[0].table_bytes == 2 * 64 * 8 * 4


def test_shard_load_counts_ids_where_the_plan_puts_them():
    _, features = tables_and_features((64, 8), (64, 8))
    plain, rotated = (
        rs.plan_stacking(features, num_shards=4, rotation=rotation) for rotation in (0, 1)
    )
    hot = {"f0": np.zeros((12, 1), int), "f1": [[0, 4], [], [8]]}
    assert plain.shard_load(hot)["t0_t1"].tolist() == [15, 0, 0, 0]
    assert rotated.shard_load(hot)["t0_t1"].tolist() == [12, 3, 0, 0]
    assert rotated.shard_load({})["t0_t1"].tolist() == [0, 0, 0, 0]
    assert plain.describe(hot).splitlines()[1].split()[-3:] == ["15", "0", "4.00"]
    assert rotated.describe(hot).splitlines()[1].split()[-3:] == ["15", "0", "3.20"]
    assert plain.describe() == str(plain)


def test_attached_specs_are_frozen_and_show_their_place():
    tables, features = tables_and_features((5, 3), (5, 3))
    attach_placement(features, rs.plan_stacking(features, num_shards=2, rotation=1))
    assert tables[1].is_stacked()
    assert tables[1].setting_in_stack.shard_rotation == 1
    assert features[1].id_transformation.row_offset == 16


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 2**16),
)
def test_stacking_and_sharding_puts_each_row_where_the_plan_says_and_comes_back(
    sizes, num_shards, rotation, seed
):
    _, features = tables_and_features(*[(size, 3 + i % 2) for i, size in enumerate(sizes)])
    plan = rs.plan_stacking(features, num_shards=num_shards, rotation=rotation)
    attach_placement(features, plan)
    specs = [feature.table_spec for feature in features]
    rng = np.random.default_rng(seed)
    tables = {}
    for spec in specs:
        tables[spec.name] = rng.normal(size=(spec.vocabulary_size, spec.embedding_dim))
    stacked = stack_and_shard_tables(specs, tables, num_shards)
    back = unshard_and_unstack_tables({table.name: table for table in specs}, stacked, num_shards)
    assert_same(back, tables)
    for name, table in tables.items():
        stack, _ = plan.table(name)
        flat = stacked[stack.name].reshape(-1, stack.spec.stack_embedding_dim)
        rows = plan.flat_rows(name, np.arange(len(table)))
        np.testing.assert_array_equal(flat[rows, : table.shape[1]], table)
        flat[rows, : table.shape[1]] = np.nan
    assert all(np.isnan(array).all() for array in stacked.values())


def test_stacked_spec_is_replaced_not_changed():
    _, features = tables_and_features((5, 3))
    spec = rs.plan_stacking(features).stacks[0].spec
    assert spec.replace(max_ids_per_partition=8).max_ids_per_partition == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.max_ids_per_partition = 8


@pytest.mark.parametrize(("pad", "num_shards"), [(False, 1), (True, 8)])
def test_a_table_that_would_take_a_stack_beyond_its_most_rows_opens_the_next(pad, num_shards):
    _, features = tables_and_features((2**31 - 256, 8), (64, 8), (200, 8), (2**30, 8))
    plan = rs.plan_stacking(features, num_shards=num_shards, pad=pad)
    assert [[table.name for table in stack.tables] for stack in plan.stacks] == [
        ["t0", "t1"],
        ["t2", "t3"],
    ]
    assert all(stack.spec.stack_vocab_size < 2**31 for stack in plan.stacks)
