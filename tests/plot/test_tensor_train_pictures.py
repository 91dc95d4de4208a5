import matplotlib.pyplot as plt
import numpy as np
import pytest

from rsembed import plot


def test_two_cores_cannot_do_better_than_the_truncated_svd_of_the_rearranged_table():
    table = np.random.default_rng(0).normal(size=(11, 6))
    (tail,) = plot.rank_tails(table, (4, 3), (2, 3))
    rearranged = np.zeros((8, 9))
    for row in range(11):
        for column in range(6):
            rearranged[row // 3 * 2 + column // 3, row % 3 * 3 + column % 3] = table[row, column]
    left, values, right = np.linalg.svd(rearranged)
    for rank, found in enumerate(tail):
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        assert found == pytest.approx(np.linalg.norm(rearranged - best) / np.linalg.norm(table), abs=1e-7)


def test_a_table_of_rank_one_leaves_nothing_behind_rank_one():
    row, column = np.arange(1.0, 13), np.arange(1.0, 9)
    for tail in plot.rank_tails(np.outer(np.kron([1, 2], row[:6]), column), (2, 3, 2), (2, 2, 2)):
        assert tail[0] == 1 and tail[-1] == 0
    with pytest.raises(ValueError, match="do not fit a table of shape"):
        plot.rank_tails(np.ones((5, 4)), (2, 2), (2, 2))


def test_a_spectrum_is_a_line_over_the_ranks():
    ax = plot.plot_rank_spectrum({"a": [1.0, 0.5, 0.0], "b": np.array([1.0, 0.0])})
    assert [line.get_xdata().tolist() for line in ax.lines] == [[0, 1, 2], [0, 1]]
    assert ax.lines[0].get_ydata().tolist() == [1.0, 0.5, 0.0]
    assert ax.get_xlabel() == "rank" and "error" in ax.get_ylabel()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]


def test_results_are_sorted_by_bytes_on_a_logarithmic_axis():
    _, (left, right) = plt.subplots(1, 2)
    results = {"tt": [(4e6, 0.2), (2e3, 0.5)], "dense": [(2.8e9, 0.0)]}
    ax = plot.plot_against_bytes(results, references={"best": 0.1}, ylabel="loss (nats)", ax=right)
    assert ax is right and not left.lines and ax.get_xscale() == "log" and ax.get_ylabel() == "loss (nats)"
    assert ax.lines[0].get_xdata().tolist() == [2e3, 4e6] and ax.lines[0].get_ydata().tolist() == [0.5, 0.2]
    assert ax.lines[2].get_ydata() == [0.1, 0.1] and [text.get_text().strip() for text in ax.texts] == [
        "best\n0.100",
        "tt",
        "dense",
    ]
    label = ax.xaxis.get_major_formatter()
    assert [label(value, 0) for value in (4e6, 2e3, 2.8e9, 10)] == ["4 MB", "2 kB", "2.8 GB", "10 B"]


def test_names_of_curves_that_end_close_together_cover_neither_each_other_nor_an_end():
    results = {f"curve {k}": [(1e3, 0.5 - k / 100), (1e6, 0.4 + k / 1000)] for k in range(4)}
    ax = plot.plot_against_bytes(results)
    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent().shrunk(0.98, 0.8) for text in ax.texts]
    assert [(a, b) for a in range(4) for b in range(a) if boxes[a].overlaps(boxes[b])] == []
    ends = ax.transData.transform([points[-1] for points in results.values()])
    assert all(box.x0 > end[0] for box, end in zip(boxes, ends, strict=True))
