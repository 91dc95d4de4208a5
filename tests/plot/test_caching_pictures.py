import numpy as np
import pytest

from rsembed import plot
from rsembed.caching import CacheCounts, SetAssociativeCache


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


@pytest.mark.parametrize("measured", [None, {}])
def test_nothing_measured_needs_no_legend(measured):
    assert plot.plot_miss_ratio([1, 2], [1.0, 0.5], measured=measured).get_legend() is None


def test_hit_rates_are_those_of_a_dictionary_that_never_forgets():
    cache, seen, counts, expected = SetAssociativeCache(64, num_ids=200), set(), [], []
    for ids in np.random.default_rng(0).integers(0, 200, (6, 40)):
        counts.append(cache.admit(ids).counts)
        distinct = set(ids.tolist())
        expected.append(len(distinct & seen) / len(distinct))
        seen |= distinct
    np.testing.assert_allclose(plot.hit_rates(counts), expected)
    assert np.isnan(plot.hit_rates([CacheCounts()])).all()


def test_the_mean_hit_rate_leaves_the_warm_up_out():
    ax = plot.plot_hit_rate([0.0, 0.5, 0.7], warm_up=1, label="LRU")
    curve, mean = ax.lines
    np.testing.assert_allclose(curve.get_ydata(), [0, 50, 70])
    assert mean.get_xdata().tolist() == [2, 3] and mean.get_ydata() == pytest.approx([60, 60])
    assert [text.get_text() for text in ax.texts] == ["mean\n60.0 %"]
    assert plot.plot_hit_rate([0.2, 0.3], ax=ax, label="LFU").lines[2].get_color() != curve.get_color()


@pytest.mark.parametrize("rates", [[0.5], [np.nan, np.nan]])
def test_a_warm_up_of_everything_is_refused(rates):
    with pytest.raises(ValueError, match="warm_up=1"):
        plot.plot_hit_rate(rates, warm_up=1)
