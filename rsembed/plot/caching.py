"""Pictures of caches in front of tables: how well one does, and what a larger one would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from rsembed.caching import CacheCounts
from rsembed.plot.drawing import (
    COLOURS,
    DASHED,
    axes_or_new,
    colour_of,
    finish,
    marker_look,
    note_at_height,
    with_defaults,
)


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
    ax = axes_or_new(ax)
    label = "predicted" if measured else None
    ax.semilogx(np.asarray(sizes), 100 * np.asarray(ratios), color=COLOURS[0], linewidth=2.0, label=label)
    for number, (name, points) in enumerate((measured or {}).items()):
        rows, shares = zip(*sorted(points.items()), strict=True)
        look = marker_look(number) | {"color": colour_of(number + 1)}  # the curve has the first colour
        ax.plot(rows, 100 * np.asarray(shares), **look, linestyle="none", label=name)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return finish(ax, "cache (rows)", "lookups that miss (%)", ylim=(0, None), legend=bool(measured))


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

    Raises: ValueError: no batch is left after the warm-up.
    """
    shares = 100 * np.asarray(rates, np.float64)
    if not np.isfinite(shares[warm_up:]).any():
        raise ValueError(f"plot_hit_rate: {len(shares)} batches leave nothing after warm_up={warm_up}; lower it.")
    ax = axes_or_new(ax)
    mean, number = float(np.nanmean(shares[warm_up:])), len(ax.lines)
    look = with_defaults(line_kwargs, color=colour_of(number // 2), linewidth=1.5)
    ax.plot(np.arange(1, len(shares) + 1), shares, **look)
    ax.plot([warm_up + 1, len(shares)], [mean, mean], **DASHED)
    note_at_height(ax, f"mean\n{mean:.1f} %", mean)
    labels = "batch", "distinct rows that are there (%)"
    return finish(ax, *labels, counts_on_x=True, legend="label" in line_kwargs, ylim=(0, 103))
