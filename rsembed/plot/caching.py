"""Pictures of caches in front of tables: how well one does, and what a larger one would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from rsembed.caching import CacheCounts
from rsembed.plot.pictures import COLOURS, MUTED, _axes, _options

_MARKERS = "osD^v"


def plot_miss_ratio(
    sizes: Int[np.ndarray, " sizes"] | Sequence[int],
    ratios: Float[np.ndarray, " sizes"] | Sequence[float],
    *,
    measured: Mapping[str, Mapping[int, float]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The share of lookups that a cache misses, over its size on a logarithmic axis.

    Args:
      sizes: rows of the cache, above 0.
      ratios: the predicted share from 0 to 1 at each size, see `caching.miss_ratio_curve`.
      measured: `{name: {rows: share}}` of real caches, drawn as markers over the curve.
      ax: None makes a figure.
    """
    ax = _axes(ax)
    label = None if measured is None else "predicted"
    ax.semilogx(np.asarray(sizes), 100 * np.asarray(ratios), color=COLOURS[0], linewidth=2.0, label=label)
    for number, (name, points) in enumerate((measured or {}).items()):
        rows = sorted(points)
        colour, marker = COLOURS[(number + 1) % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
        shares = [100 * points[n] for n in rows]
        ax.plot(rows, shares, color=colour, marker=marker, linestyle="none", label=name)
    ax.set(xlabel="cache (rows)", ylabel="lookups that miss (%)")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if measured:
        ax.legend(frameon=False)
    return ax


def hit_rates(counts: Sequence[CacheCounts]) -> Float[np.ndarray, " batches"]:
    """Share of each batch's distinct rows that the cache held before it; NaN where a batch asked for none.

    Args:
      counts: one entry per batch, such as `Admission.counts`.

    Example:
      >>> hit_rates([CacheCounts(unique_misses=3, unique_hits=1), CacheCounts(unique_misses=1, unique_hits=3)]).tolist()
      [0.25, 0.75]
    """
    hits = np.array([count.unique_hits for count in counts], np.float64)
    asked = hits + np.array([count.unique_misses for count in counts], np.float64)
    return np.divide(hits, asked, out=np.full_like(hits, np.nan), where=asked > 0)


def plot_hit_rate(
    rates: Float[np.ndarray, " batches"] | Sequence[float],
    *,
    warm_up: int = 0,
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """The hit rate of a cache over time, and its mean once it is warm.

    Call it again with the same `ax` for more caches.

    Args:
      rates: shares from 0 to 1, one per batch, see `hit_rates`.
      warm_up: batches at the beginning that the mean leaves out.
      ax: None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.

    Raises:
      ValueError: no batch is left after the warm-up.
    """
    shares = 100 * np.asarray(rates, np.float64)
    if not np.isfinite(shares[warm_up:]).any():
        raise ValueError(f"plot_hit_rate: {len(shares)} batches leave nothing after warm_up={warm_up}; lower it.")
    ax = _axes(ax)
    mean, number = float(np.nanmean(shares[warm_up:])), len(ax.lines)
    options = _options(line_kwargs, color=COLOURS[number // 2 % len(COLOURS)], linewidth=1.5)
    ax.plot(np.arange(1, len(shares) + 1), shares, **options)
    ax.plot([warm_up + 1, len(shares)], [mean, mean], color=MUTED, linestyle="--", linewidth=1.2)
    ax.annotate(
        f"mean\n{mean:.1f} %", (1.0, mean), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", color=MUTED, fontsize=9.0,
    )  # fmt: skip
    ax.set(xlabel="batch", ylabel="distinct rows that are there (%)", ylim=(0, 103))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "label" in line_kwargs:
        ax.legend(frameon=False)
    return ax
