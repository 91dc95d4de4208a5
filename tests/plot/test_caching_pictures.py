import matplotlib.pyplot as plt
import numpy as np
import pytest

from rsembed import plot


def test_the_curve_is_drawn_in_per_cent_over_a_logarithmic_axis_of_rows():
    ax = plot.plot_miss_ratio(np.array([10, 100, 1000]), np.array([0.9, 0.4, 0.1]))
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [10, 100, 1000]
    np.testing.assert_allclose(line.get_ydata(), [90.0, 40.0, 10.0])
    assert ax.get_xscale() == "log" and "rows" in ax.get_xlabel() and "%" in ax.get_ylabel()
    assert ax.get_ylim()[0] == 0 and ax.get_legend() is None


def test_measured_shares_are_markers_of_their_own_in_the_order_of_their_sizes():
    measured = {"LRU": {400: 0.2, 50: 0.5}, "LFU": {50: 0.25}}
    ax = plot.plot_miss_ratio([10, 1000], [0.9, 0.1], measured=measured)
    curve, *points = ax.lines
    assert [line.get_xdata().tolist() for line in points] == [[50, 400], [50]]
    assert [line.get_ydata().tolist() for line in points] == [[50.0, 20.0], [25.0]]
    assert all(line.get_linestyle() == "None" for line in points)
    assert len({line.get_marker() for line in points}) == len({line.get_color() for line in ax.lines}) - 1 == 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["predicted", "LRU", "LFU"]
    assert curve.get_label() == "predicted"


def test_the_given_axes_are_drawn_on():
    _, (left, right) = plt.subplots(1, 2)
    assert plot.plot_miss_ratio([1, 2], [1.0, 0.5], ax=right) is right
    assert not left.lines


@pytest.mark.parametrize("measured", [None, {}])
def test_nothing_measured_needs_no_legend(measured):
    assert plot.plot_miss_ratio([1, 2], [1.0, 0.5], measured=measured).get_legend() is None
