import numpy as np
import pytest

from rsembed import plot
from rsembed.datasets.generated import zipf_probabilities
from rsembed.plot.distributions import zipf_exponent

COUNTS = np.array([1, 6, 0, 3])


def test_coverage_is_drawn_in_per_cent_over_a_logarithmic_axis_of_rows():
    ax = plot.plot_coverage(COUNTS)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xdata(), [25.0, 50.0, 75.0, 100.0])
    np.testing.assert_allclose(line.get_ydata(), [60.0, 90.0, 100.0, 100.0])
    assert ax.get_xscale() == "log" and "%" in ax.get_xlabel() and "%" in ax.get_ylabel()
    assert ax.get_legend() is None


def test_coverage_curves_on_one_picture_are_told_apart_by_a_legend():
    ax = plot.plot_coverage(COUNTS, label="a")
    plot.plot_coverage(np.ones(4), ax=ax, label="b", color="black")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.lines[1].get_color() == "black"


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.7])
def test_the_fit_finds_the_exponent_of_a_law(exponent):
    assert zipf_exponent(zipf_probabilities(500, exponent=exponent)) == pytest.approx(
        exponent, abs=1e-6
    )


def test_curves_of_many_ids_are_drawn_through_few_points_with_both_ends():
    counts = np.arange(30_000, 0, -1)
    (line,) = plot.plot_id_frequency(counts).lines
    ranks, occurrences = line.get_data()
    assert len(ranks) < 10_000 and (ranks[0], ranks[-1]) == (1, 30_000)
    assert occurrences.tolist() == counts[ranks - 1].tolist()
    (line,) = plot.plot_coverage(counts).lines
    assert line.get_ydata()[-1] == 100.0 and len(line.get_xdata()) < 10_000
