"""Pictures of caches in front of tables: what a larger one would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from rsembed.plot.pictures import COLOURS, _axes

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
