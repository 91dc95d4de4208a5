"""The picture of caches in front of tables: how many lookups they miss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from rsembed.checks import validated
from rsembed.plot.drawing import axes_or_new, finish, marker_look, with_defaults


@validated
def plot_miss_ratio(measured: Mapping[str, Mapping[int, float]], *, ax: Axes | None = None, **line_kwargs: Any) -> Axes:
    """The share of lookups that caches missed, over their sizes on a logarithmic axis; one curve per kind of cache.

    Args:
      measured: `{name: {rows: share}}`, with shares from 0 to 1.
      ax: None makes a figure.
      **line_kwargs: for all curves.
    """
    ax, sizes = axes_or_new(ax), sorted({rows for points in measured.values() for rows in points})
    for number, (name, points) in enumerate(measured.items()):
        rows, shares = zip(*sorted(points.items()), strict=True)
        ax.semilogx(rows, 100 * np.asarray(shares), label=name, **with_defaults(line_kwargs, **marker_look(number)))
    ax.set_xticks(sizes, [f"{rows:,}" for rows in sizes])
    ax.minorticks_off()
    return finish(ax, "cache (rows)", "lookups that miss (%)", ylim=(0, None), legend=True)
