import numpy as np
import pytest

from rsembed import FeatureSpec, TableSpec, plan_stacking, plot
from rsembed.plot.distributions import stack_bytes, treemap

LOADS = {"together": np.array([6, 2, 2, 2]), "apart": np.array([3, 3, 4, 2])}
SHAPES = {"a": 10, "b": 16, "c": 32}
SIZES = {"big": (3_000_000, 1_000_000), "small": (500_000, 0)}


def plan(dtype="float32"):
    tables = [TableSpec(name, rows, 6, dtype=dtype) for name, rows in SHAPES.items()]
    features = [FeatureSpec(table.name, table, input_shape=(8, 1)) for table in tables]
    return plan_stacking(features, num_shards=2, groups=[["a", "b"], ["c"]])


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_used_and_padding_add_up_to_the_physical_table(dtype, width):
    stacks = plan(dtype).stacks
    sizes = stack_bytes(plan(dtype))
    # Rows are padded to a multiple of 16, columns from 6 to 8.
    assert sizes == {
        "a_b": (26 * 6 * width, (32 * 8 - 26 * 6) * width),
        "c": (32 * 6 * width, 32 * 2 * width),
    }
    assert [sum(sizes[stack.name]) for stack in stacks] == [stack.table_bytes for stack in stacks]


def test_the_legend_of_the_loads_tells_the_skew():
    labels = [text.get_text() for text in plot.plot_shard_load(LOADS).get_legend().get_texts()]
    assert "together: busiest 2.00 × mean" in labels and "apart: busiest 1.33 × mean" in labels


def test_padding_follows_the_bytes_in_use_in_megabytes():
    ax = plot.plot_stack_bytes(SIZES)
    used, padding = ax.containers
    assert [bar.get_width() for bar in used] == [3.0, 0.5]
    assert [(bar.get_x(), bar.get_width()) for bar in padding] == [(3.0, 1.0), (0.5, 0.0)]
    assert [text.get_text() for text in ax.texts] == ["25.0% padding", "0.0% padding"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["big", "small"]
    assert ax.yaxis_inverted()


@pytest.mark.parametrize("box", [(4.0, 3.0), (1.0, 7.0)])
def test_a_treemap_tiles_its_box_with_areas_in_proportion(box):
    sizes = np.random.default_rng(0).exponential(size=12)
    boxes = treemap(sizes, *box)
    np.testing.assert_allclose(boxes[:, 2] * boxes[:, 3], sizes / sizes.sum() * box[0] * box[1])
    points = np.random.default_rng(1).uniform(size=(500, 2)) * box
    from_corner = points[:, None] - boxes[:, :2]
    is_inside = (from_corner > 0) & (from_corner < boxes[:, 2:])
    assert (is_inside.all(axis=-1).sum(axis=1) == 1).all()


def test_stacks_are_areas_of_embeddings_and_padding():
    ax = plot.plot_stack_treemap(SIZES)
    areas = np.array([patch.get_width() * patch.get_height() for patch in ax.patches])
    np.testing.assert_allclose(areas / areas.sum(), np.array([3.0, 1.0, 0.5, 0.0]) / 4.5, atol=1e-9)
    assert ax.get_xlabel() == "area: 4.5 MB over all shards, 22% of it padding"
    assert ax.texts[0].get_text() == "big\n4.0 MB\n25% padding"
