"""Pictures of how lookups spread over ids: a few rows serve most of them, which is what sizes buffers and caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from rsembed.plot.pictures import COLOURS, _axes, _options


class Coverage(NamedTuple):
    """Shares of rows, hottest first, and the shares of lookups that these rows serve; both run from 0 to 1."""

    row_fractions: Float[np.ndarray, " points"]
    lookup_fractions: Float[np.ndarray, " points"]

    def of_rows(self, row_fraction: float) -> float:
        """The share of lookups that the hottest `row_fraction` of the rows serve.

        Raises:
          ValueError: `row_fraction` is no share.
        """
        if not 0 <= row_fraction <= 1:
            raise ValueError(f"row_fraction={row_fraction} must be from 0 to 1; 0.01 is the hottest 1 % of the rows.")
        return float(np.interp(row_fraction, self.row_fractions, self.lookup_fractions))


def coverage_curve(counts: Num[np.ndarray, " vocab"]) -> Coverage:
    """Which share of the lookups the hottest rows serve, for every number of rows from none to all.

    Args:
      counts: lookups of each row, those never looked up included, see `id_counts`; probabilities do as well.

    Raises:
      ValueError: a count is negative, or no row is looked up.

    Example:
      >>> curve = coverage_curve(np.array([1, 6, 0, 3]))
      >>> curve.row_fractions.tolist(), curve.lookup_fractions.tolist()
      ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.6, 0.9, 1.0, 1.0])
      >>> curve.of_rows(0.25)
      0.6
    """
    hottest_first = np.sort(np.asarray(counts, np.float64))[::-1]
    if not hottest_first.size or hottest_first[-1] < 0 or hottest_first[0] <= 0:
        raise ValueError("coverage_curve: counts must not be negative, and at least one must be above 0.")
    served = np.concatenate([[0.0], np.cumsum(hottest_first)])
    return Coverage(np.linspace(0.0, 1.0, len(served)), served / served[-1])


def plot_coverage(counts: Num[np.ndarray, " vocab"], *, ax: Axes | None = None, **line_kwargs: Any) -> Axes:
    """The hottest x % of the rows serve y % of the lookups; the axis of rows is logarithmic.

    Call it again with the same `ax` for more curves.

    Args:
      counts: lookups of each row, see `coverage_curve`, which computes the numbers.
      ax: None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.
    """
    ax = _axes(ax)
    curve = coverage_curve(counts)
    options = _options(line_kwargs, color=COLOURS[0], linewidth=2.0)
    ax.semilogx(100 * curve.row_fractions[1:], 100 * curve.lookup_fractions[1:], **options)
    ax.set(xlabel="hottest rows (% of the table)", ylabel="lookups they serve (%)", ylim=(0, 103))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if "label" in line_kwargs:
        ax.legend(frameon=False)
    return ax
