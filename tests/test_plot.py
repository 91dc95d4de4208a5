import datetime
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
from numpy.testing import assert_allclose

from rsembed import plot
from rsembed.kernels.devices import granted_cores
from rsembed.plot.buffers import partition_entries
from rsembed.plot.drawing import measured_on
from rsembed.plot.pictures import (
    Work,
    lookup_work,
    nearest_neighbours,
    principal_plane,
    roof,
    running_mean,
)

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(40, 8))
ENTRIES = partition_entries(RNG.integers(0, 9, (2, 4, 3)), num_shards=2)

PICTURES = {
    "loss": partial(plot.plot_loss, [3.0, 2.0, 1.0], references={"floor": 0.5}, label="training"),
    "row_path": partial(plot.plot_row_path, {"a": np.arange(4), "b": np.ones(4)}, lookups=[2]),
    "loss_against_state": partial(
        plot.plot_loss_against_state, {"sgd": (0, 0.6), "adam": (128, 0.5)}
    ),
    "id_frequency": partial(plot.plot_id_frequency, np.array([5, 0, 9])),
    "limits": partial(plot.plot_limits, [3, 9, 4], [8, 8, 16]),
    "coverage": partial(plot.plot_coverage, np.array([5, 0, 9])),
    "shard_load": partial(
        plot.plot_shard_load, {"plain": np.array([5, 3]), "turned": np.array([4, 4])}
    ),
    "stack_bytes": partial(plot.plot_stack_bytes, {"a": (4000, 100), "b": (2000, 0)}),
    "buffer": partial(plot.plot_buffer, np.array([[0, 0, -1, 1, -2, -2]])),
    "miss_ratio": partial(plot.plot_miss_ratio, {"lru": {10: 0.95, 100: 0.2}}),
    "stack_treemap": partial(plot.plot_stack_treemap, {"a": (4000, 100), "b": (2000, 0)}),
    "limit_choice": partial(plot.plot_limit_choice, ENTRIES, 2),
    "roofline": partial(
        plot.plot_roofline,
        Work(2e9, 4e9),
        {"slow": 2.0, "fast": 0.5},
        bytes_per_second=1e10,
        flops_per_second=1e11,
    ),
    "against_bytes": partial(plot.plot_against_bytes, {"int8": [(1e3, 0.01), (2e3, 0.005)]}),
}


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def boxes_of(ax):
    """Boxes of the texts of a picture. Fails if one text covers another."""
    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent().shrunk(0.98, 0.8) for text in ax.texts]
    assert not [(a, b) for a in range(len(boxes)) for b in range(a) if boxes[a].overlaps(boxes[b])]
    return boxes


# Every picture


def test_every_picture_is_in_this_table():
    assert {name for name in vars(plot) if name.startswith("plot_")} == {
        f"plot_{name}" for name in PICTURES
    }


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_on_the_given_axes_or_in_one_figure_of_its_own(name):
    before = dict(plt.rcParams)
    _, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    assert PICTURES[name](ax=right) is right
    assert plt.get_fignums() == [1]
    assert not left.has_data() and right.has_data()
    ax = PICTURES[name]()
    assert plt.get_fignums() == [1, 2]
    assert len(ax.get_xlabel()) > 3 and len(ax.get_ylabel()) > 3
    assert dict(plt.rcParams) == before


def test_times_can_be_told_with_processor_and_date():
    processor, cores, date = measured_on().rsplit(", ", 2)
    assert len(processor) > 2 and cores == f"{granted_cores()} cores"
    assert datetime.date.fromisoformat(date) <= datetime.date.today()


# Numbers


def test_running_mean_averages_what_there_is_at_the_beginning():
    values = RNG.normal(size=30)
    expected = [np.mean(values[max(0, i - 6) : i + 1]) for i in range(30)]
    assert_allclose(running_mean(values, 7), expected)
    assert_allclose(plot.plot_loss(values, window=7).lines[0].get_ydata(), expected)


def test_nearest_neighbours_are_those_of_an_exhaustive_search():
    nearest, cosines = nearest_neighbours(VECTORS, [3, 17], 4)
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    for row, query in enumerate([3, 17]):
        expected = unit @ unit[query]
        order = np.argsort(-expected)[1:5]  # the first is the query
        assert nearest[row].tolist() == order.tolist()
        assert_allclose(cosines[row], expected[order])


def test_nearest_neighbours_of_a_zero_row_have_cosine_zero():
    _, cosines = nearest_neighbours(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [0], 2)
    assert cosines.tolist() == [[0.0, 0.0]]


def test_principal_plane_finds_the_plane_in_which_the_points_lie():
    flat = RNG.normal(size=(50, 2)) * [5.0, 1.0]
    basis = np.linalg.qr(RNG.normal(size=(6, 2)))[0]
    coordinates, shares = principal_plane(flat @ basis.T + 3.0)
    assert shares.sum() == pytest.approx(1.0)
    centred = flat - flat.mean(axis=0)
    assert_allclose(coordinates @ coordinates.T, centred @ centred.T, atol=1e-9)
    assert coordinates.max(axis=0).tolist() == np.abs(coordinates).max(axis=0).tolist()


# Artists

BOTH = {"LRU": {400: 0.2, 50: 0.5}, "LFU": {50: 0.25}}
CURVES = {
    "a loss": (PICTURES["loss"], [[(1, 3), (2, 2), (3, 1)], [(0, 0.5), (1, 0.5)]]),
    "a second loss at its own steps": (
        lambda: plot.plot_loss([5.0], steps=[10], ax=plot.plot_loss([2.0, 1.0]), color="red"),
        [[(1, 2), (2, 1)], [(10, 5)]],
    ),
    "counts in falling order, without ids never seen": (
        PICTURES["id_frequency"],
        [[(1, 9), (2, 5)]],
    ),
    "limits, with a cross at each batch above its own": (
        partial(plot.plot_limits, [3, 9, 4, 20], [8, 8, 16, 16]),
        [[(1, 8), (2, 8), (3, 16), (4, 16)], [(1, 3), (2, 9), (3, 4), (4, 20)], [(2, 9), (4, 20)]],
    ),
    "one limit for all batches": (
        lambda: plot.plot_limits([3, 4], 8),
        [[(1, 8), (2, 8)], [(1, 3), (2, 4)]],
    ),
    "shares in the order of sizes, in per cent": (
        lambda: plot.plot_miss_ratio(BOTH),
        [[(50, 50), (400, 20)], [(50, 25)]],
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_picture_draws_these_curves(name):
    draw, curves = CURVES[name]
    lines = draw().lines
    for line, points in zip(lines, curves, strict=True):
        assert_allclose(line.get_xydata(), points)
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(styles) == len(lines)


def test_pictures_name_what_they_draw():
    ax = PICTURES["loss"]()
    assert texts(ax) == ["floor\n0.500"] and legend_of(ax) == ["training"]
    assert texts(plot.plot_loss_against_state({"sgd": (0, 0.6)}, references={"best": 0.45})) == [
        "best\n0.450",
        "sgd",
    ]
    assert legend_of(plot.plot_miss_ratio(BOTH)) == ["LRU", "LFU"]
    assert {PICTURES[name]().get_xscale() for name in ("id_frequency", "miss_ratio")} == {"log"}


def test_labels_cover_neither_each_other_nor_a_point_and_stay_in_the_picture():
    results = {
        f"rule {number}": tuple(point) for number, point in enumerate(RNG.uniform(1, 9, (20, 2)))
    }
    ax = plot.plot_loss_against_state(results)
    boxes = boxes_of(ax)
    points = ax.transData.transform(ax.collections[0].get_offsets())
    assert texts(ax) == list(results)
    for box in boxes:
        assert not any(box.contains(*point) for point in points)
    assert all(ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1 for box in boxes)
    assert all(ax.bbox.y0 <= box.y0 and box.y1 <= ax.bbox.y1 for box in boxes)
    again = plot.plot_loss_against_state(results)
    assert [text.get_position() for text in again.texts] == [
        text.get_position() for text in ax.texts
    ]


def test_work_of_a_lookup_is_counted_by_hand():
    work = lookup_work(num_ids=6, num_distinct_rows=4, num_bags=2, dim=8, value_bytes=2)
    assert work.flops == 6 * 8 * 2
    assert work.num_bytes == 4 * 8 * 2 + 6 * 4 + 2 * 8 * 4


def test_the_roof_has_its_ridge_where_memory_and_arithmetic_meet():
    assert_allclose(roof([0.5, 2.0, 10.0], 1e9, 4e9), [0.5e9, 2e9, 4e9])


def test_programs_stand_at_the_speed_they_reached():
    ax = PICTURES["roofline"]()
    points = {}
    for line in ax.lines:
        if line.get_linestyle() == "None":
            points[line.get_label()] = line.get_xydata()[0]
    assert points == {
        "slow: 20% of the roof": pytest.approx([0.5, 1.0]),
        "fast: 80% of the roof": pytest.approx([0.5, 4.0]),
    }
    assert ax.lines[0].get_ydata().max() == pytest.approx(100.0)
    assert ax.get_xscale() == ax.get_yscale() == "log"
