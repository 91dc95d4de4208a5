import numpy as np
import pytest

from rsembed import plot

RNG = np.random.default_rng(0)


def test_magnitudes_count_every_entry_once():
    values = RNG.normal(size=(50, 4)) * (RNG.random((50, 1)) < 0.7)
    found = plot.magnitudes(values)
    assert found.fractions.sum() + found.zero_fraction == pytest.approx(1.0)
    for low, high, fraction in zip(found.edges, found.edges[1:], found.fractions, strict=False):
        assert fraction == pytest.approx(np.mean((np.abs(values) >= low) & (np.abs(values) < high)))


def test_an_array_of_zeros_has_no_magnitudes_and_says_so():
    found = plot.magnitudes(np.zeros(3))
    assert found.zero_fraction == 1.0 and found.fractions.sum() == 0.0


@pytest.mark.parametrize("values", [[], [1.0, np.nan], [np.inf]])
def test_magnitudes_of_nothing_or_of_nan_are_refused(values):
    with pytest.raises(ValueError, match="magnitudes: needs at least one entry"):
        plot.magnitudes(np.array(values, np.float64))


def test_states_are_outlines_whose_legend_tells_the_zeros():
    ax = plot.plot_slot_magnitudes({"m": np.array([0.0, 1.0]), "v": np.array([2.0, 3.0])})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["m (50% zero)", "v (0% zero)"]
    first, second = ax.patches
    assert first.get_data().values.sum() == 50.0 and second.get_data().values.sum() == 100.0
    assert first.get_linestyle() != second.get_linestyle()


def test_drift_agrees_with_a_loop_over_rows():
    tables = [RNG.normal(size=(20, 3)) for _ in range(4)]
    moved = [
        [np.linalg.norm(row - start) / np.linalg.norm(start) for row, start in zip(table, tables[0], strict=True)]
        for table in tables
    ]
    expected = [[np.quantile(own, share) for share in (0.1, 0.5, 0.9, 1.0)] for own in moved]
    np.testing.assert_allclose(plot.norm_drift(tables), expected)


def test_drift_leaves_out_rows_that_began_at_zero():
    start = np.array([[0.0, 0.0], [1.0, 0.0]])
    assert plot.norm_drift([start, start + 1.0], quantiles=[0.0, 1.0])[1].tolist() == pytest.approx([2**0.5] * 2)


def test_drift_is_a_line_per_quantile_the_highest_first():
    ax = plot.plot_norm_drift(np.array([[0.0, 0.0], [0.1, 0.4]]), steps=[0, 50], quantiles=(0.5, 1.0))
    assert [line.get_ydata().tolist() for line in ax.lines] == [[0.0, 0.4], [0.0, 0.1]]
    assert [line.get_label() for line in ax.lines] == ["row that moved most", "median row"]
    assert ax.lines[0].get_xdata().tolist() == [0, 50] and "%" in ax.get_ylabel()
