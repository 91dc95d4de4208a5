import matplotlib.pyplot as plt
import numpy as np
import pytest

from rsembed import plot

SIZES = [8, 64, 512]
TIMES = {"dedup": [0.004, 0.005, 0.008], "table-wise": np.array([0.002, 0.004, 0.02])}


def test_times_are_drawn_in_milliseconds_on_logarithmic_axes():
    ax = plot.plot_scaling(SIZES, TIMES)
    assert [line.get_xdata().tolist() for line in ax.lines] == [SIZES, SIZES]
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [2.0, 4.0, 20.0])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "64", "512"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["dedup", "table-wise"]
    assert "ms" in ax.get_ylabel() and len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 2


def test_efficiency_is_the_first_time_over_each_in_per_cent():
    _, (left, right) = plt.subplots(1, 2)
    assert plot.plot_scaling(SIZES, TIMES, efficiency=True, ax=right) is right
    np.testing.assert_allclose(right.lines[1].get_ydata(), [100.0, 50.0, 10.0])
    assert right.get_yscale() == "linear" and "%" in right.get_ylabel() and not left.lines


def test_a_missing_time_is_named():
    with pytest.raises(ValueError, match="'dedup' has 2 times for 3 sizes"):
        plot.plot_scaling(SIZES, {"dedup": [1.0, 2.0]})
