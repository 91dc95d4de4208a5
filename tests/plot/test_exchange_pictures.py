import numpy as np
import pytest

from rsembed import plot

BYTES = np.array([[5, 1, 0], [3, 7, 2], [4, 0, 9]])


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
