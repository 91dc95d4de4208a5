import matplotlib.pyplot as plt

from rsembed import plot


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
