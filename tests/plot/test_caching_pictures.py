import numpy as np

from rsembed import plot


def test_measured_shares_are_curves_in_the_order_of_their_sizes():
    ax = plot.plot_miss_ratio({"LRU": {400: 0.2, 50: 0.5}, "LFU": {50: 0.25}})
    assert [line.get_xdata().tolist() for line in ax.lines] == [[50, 400], [50]]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [50.0, 20.0])
    assert len({(line.get_marker(), line.get_color()) for line in ax.lines}) == 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["LRU", "LFU"]
    assert ax.get_xscale() == "log" and ax.get_ylim()[0] == 0
