import matplotlib.pyplot as plt
import numpy as np
import pytest

from rsembed import plot

BYTES = np.array([[5, 1, 0], [3, 7, 2], [4, 0, 9]])
SIZES = [8, 64, 512]
TIMES = {"dedup": [0.004, 0.005, 0.008], "table-wise": np.array([0.002, 0.004, 0.02])}


def test_volume_agrees_with_a_loop_over_pairs_of_devices():
    sent, received, kept = [0] * 3, [0] * 3, [0] * 3
    for source in range(3):
        for destination in range(3):
            if source == destination:
                kept[source] += BYTES[source, destination]
            else:
                sent[source] += BYTES[source, destination]
                received[destination] += BYTES[source, destination]
    volume = plot.exchange_volume(BYTES)
    assert [volume.sent.tolist(), volume.received.tolist(), volume.kept.tolist()] == [sent, received, kept]


@pytest.mark.parametrize("wrong", [np.ones((2, 3)), np.array([[0, -1], [0, 0]])])
def test_what_is_no_exchange_is_refused(wrong):
    with pytest.raises(ValueError, match="source, destination"):
        plot.exchange_volume(wrong)


def test_bars_stand_for_what_is_sent_and_received_and_the_title_tells_the_share_that_travels():
    ax = plot.plot_exchange_volume(BYTES)
    sent, received = ax.containers
    assert [bar.get_height() for bar in sent] == [1, 5, 4] and [bar.get_height() for bar in received] == [7, 1, 2]
    assert ax.lines[0].get_ydata()[0] == pytest.approx(10 / 3)
    assert ax.get_title() == "32% of the bytes leave their device"
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {
        "sent to others",
        "received from others",
        "mean",
    }


def test_an_exchange_of_nothing_is_drawn():
    assert plot.plot_exchange_volume(np.zeros((2, 2), int)).get_title().startswith("0%")


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
