"""Pictures of how lookups spread over ids: a few rows serve most of them, which is what sizes buffers and caches."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from rsembed.checks import NonNegativeInt, validated
from rsembed.plot.drawing import COLOURS, axes_or_new, check_shares, finish, with_defaults


@validated
def id_counts(ids: Int[np.ndarray, "*shape"], vocabulary_size: NonNegativeInt) -> Int[np.ndarray, " vocab"]:
    """How often each id occurs; `-1` is no id.

    Args:
      ids: any shape.
      vocabulary_size: number of ids.

    Raises: ValueError: an id is outside the vocabulary.

    Example:
      >>> id_counts(np.array([[2, 0], [2, -1]]), 4).tolist()
      [1, 0, 2, 0]
    """
    flat = np.asarray(ids).reshape(-1)
    flat = flat[flat != -1]
    if flat.size and (flat.min() < 0 or flat.max() >= vocabulary_size):
        raise ValueError(
            f"id_counts: ids reach from {flat.min()} to {flat.max()}, outside "
            f"vocabulary_size={vocabulary_size}; pass the size of the table that they address."
        )
    return np.bincount(flat, minlength=vocabulary_size)


@validated
def plot_id_frequency(counts: Num[np.ndarray, " vocab"], *, ax: Axes | None = None, **line_kwargs: Any) -> Axes:
    """How often ids occur, from the most frequent down, on logarithmic axes; ids never seen are left out.

    Args:
      counts: occurrences of each id, see `id_counts`.
      ax: None makes a figure.
      **line_kwargs: for the curve.
    """
    ax = axes_or_new(ax)
    shares = check_shares("plot_id_frequency: counts", counts)
    seen = np.sort(shares[shares > 0])[::-1]
    ax.loglog(np.arange(1, len(seen) + 1), seen, **with_defaults(line_kwargs, color=COLOURS[0], linewidth=2.0))
    return finish(ax, "rank of the id (1 = most frequent)", "occurrences")


class Coverage(NamedTuple):
    """Shares of rows, hottest first, and the shares of lookups that these rows serve; both run from 0 to 1."""

    row_fractions: Float[np.ndarray, " points"]
    lookup_fractions: Float[np.ndarray, " points"]

    @validated
    def of_rows(self, row_fraction: Annotated[float, "[0, 1]"]) -> float:
        """The share of lookups that the hottest `row_fraction` of the rows serve.

        Raises: ValueError: `row_fraction` is no share.
        """
        return float(np.interp(row_fraction, self.row_fractions, self.lookup_fractions))


@validated
def coverage_curve(counts: Num[np.ndarray, " vocab"]) -> Coverage:
    """Which share of the lookups the hottest rows serve, for every number of rows from none to all.

    Args:
      counts: lookups of each row, those never looked up included, see `id_counts`; probabilities do as well.

    Raises: ValueError: a count is negative, or no row is looked up.

    Example:
      >>> curve = coverage_curve(np.array([1, 6, 0, 3]))
      >>> curve.row_fractions.tolist(), curve.lookup_fractions.tolist()
      ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.6, 0.9, 1.0, 1.0])
      >>> curve.of_rows(0.25)
      0.6
    """
    hottest_first = np.sort(check_shares("coverage_curve: counts", counts))[::-1]
    served = np.concatenate([[0.0], np.cumsum(hottest_first)])
    return Coverage(np.linspace(0.0, 1.0, len(served)), served / served[-1])


@validated
def plot_coverage(counts: Num[np.ndarray, " vocab"], *, ax: Axes | None = None, **line_kwargs: Any) -> Axes:
    """The hottest x % of the rows serve y % of the lookups; the axis of rows is logarithmic.

    Call it again with the same `ax` for more curves.

    Args:
      counts: lookups of each row, see `coverage_curve`, which computes the numbers.
      ax: None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.
    """
    ax = axes_or_new(ax)
    curve = coverage_curve(counts)
    look = with_defaults(line_kwargs, color=COLOURS[0], linewidth=2.0)
    ax.semilogx(100 * curve.row_fractions[1:], 100 * curve.lookup_fractions[1:], **look)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    labels = "hottest rows (% of the table)", "lookups they serve (%)"
    return finish(ax, *labels, legend="label" in line_kwargs, ylim=(0, 103))


@validated
def zipf_exponent(counts: Num[np.ndarray, " vocab"]) -> float:
    """The exponent `s` of the Zipf law `p(rank) ~ rank**-s` that fits best, by maximum likelihood over all ranks.

    0 means that all rows are equally popular. Ranks come from the same counts, which makes the exponent of little data
    (a few lookups per row) somewhat too large.

    Args:
      counts: lookups of each row, those never looked up included, see `id_counts`.

    Raises: ValueError: fewer than two rows, a negative count, or no lookup.
    Source: Clauset, Shalizi, Newman, "Power-law distributions in empirical data", SIAM Review 2009, for bounded ranks:
      the likelihood is largest where the mean of `log(rank)` under the law is that of the data.

    Example:
      >>> round(zipf_exponent(1e6 / np.arange(1.0, 1001.0) ** 1.2), 3)
      1.2
    """
    popular_first = np.sort(check_shares("zipf_exponent: counts", counts))[::-1]
    if popular_first.size < 2:
        raise ValueError("zipf_exponent: needs counts of two rows at least.")
    logs = np.log(np.arange(1, popular_first.size + 1))
    seen = float(popular_first @ logs / popular_first.sum())
    low, high = 0.0, 30.0  # sorted counts are never flatter than 0
    for _ in range(60):
        middle = (low + high) / 2
        law = np.exp(-middle * logs)
        low, high = (middle, high) if law @ logs / law.sum() > seen else (low, middle)
    return (low + high) / 2
