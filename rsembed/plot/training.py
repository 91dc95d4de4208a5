"""Pictures of what training does to tables: how large optimizer states are, and how far rows have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from rsembed.plot.drawing import axes_or_new, finish, line_look, with_defaults

QUANTILES = (0.1, 0.5, 0.9, 1.0)


class MagnitudeBins(NamedTuple):
    """How many entries have which size, and how many are zero.

    Attributes:
      edges: borders of the bins, powers of ten in equal steps.
      fractions: share of all entries in each bin.
      zero_fraction: share of all entries that are 0: in most states, rows never touched.
    """

    edges: Float[np.ndarray, " edges"]
    fractions: Float[np.ndarray, " bins"]
    zero_fraction: float


def magnitudes(values: Float[np.ndarray, "*shape"], *, bins_per_decade: int = 4) -> MagnitudeBins:
    """Sizes of the entries of an array, such as an optimizer slot, in logarithmic bins.

    Args:
      values: any shape; signs do not matter.
      bins_per_decade: bins between a power of ten and the next.

    Raises: ValueError: the array is empty, or holds an entry that is not finite.

    Example:
      >>> found = magnitudes(np.array([0.0, 1.5, -2.0, 150.0]), bins_per_decade=1)
      >>> found.edges.tolist(), found.fractions.tolist(), found.zero_fraction
      ([1.0, 10.0, 100.0, 1000.0], [0.5, 0.0, 0.25], 0.25)
    """
    sizes = np.abs(np.asarray(values, np.float64)).reshape(-1)
    if not sizes.size or not np.isfinite(sizes).all():
        raise ValueError("magnitudes: needs at least one entry, and finite ones; look for NaN in the loss first.")
    exponents = np.log10(sizes[sizes > 0]) * bins_per_decade
    low, high = (int(np.floor(exponents.min())), int(np.floor(exponents.max())) + 1) if exponents.size else (0, 1)
    counts, _ = np.histogram(np.floor(exponents), bins=np.arange(low, high + 1))
    edges = 10.0 ** (np.arange(low, high + 1) / bins_per_decade)
    return MagnitudeBins(edges, counts / sizes.size, 1.0 - exponents.size / sizes.size)


def plot_slot_magnitudes(
    slots: Mapping[str, Float[np.ndarray, "*shape"]], *, ax: Axes | None = None, **line_kwargs: Any
) -> Axes:
    """How large the entries of optimizer states are, one outline per state; zeros are told in the legend.

    Args:
      slots: arrays by name, see `magnitudes`, which computes the numbers.
      ax: None makes a figure.
      **line_kwargs: for the outlines.
    """
    ax = axes_or_new(ax)
    for number, (name, values) in enumerate(slots.items()):
        found = magnitudes(values)
        label = f"{name} ({found.zero_fraction:.0%} zero)"
        look = with_defaults(line_kwargs, **line_look(number), linewidth=2.0, label=label)
        ax.stairs(100 * found.fractions, found.edges, **look)
    return finish(ax, "size of an entry (no unit)", "entries per bin (%)", xscale="log", ylim=(0, None), legend=True)


def norm_drift(
    tables: Sequence[Float[np.ndarray, "rows dim"]], *, quantiles: Sequence[float] = QUANTILES
) -> Float[np.ndarray, "times quantiles"]:
    """How far rows lie from where they began: quantiles over rows of `norm(row - first row) / norm(first row)`.

    Args:
      tables: one table at several times, the first one being the beginning. Rows that began at zero are left out.
      quantiles: from 0 to 1; 0.5 is the median row, 1 the one that moved most.

    Raises: ValueError: no row began with a norm above zero.

    Example:
      >>> start = np.array([[3.0, 4.0], [0.0, 1.0]])
      >>> norm_drift([start, start * [[1.0, 1.0], [1.0, 1.5]]], quantiles=[0.0, 1.0]).tolist()
      [[0.0, 0.0], [0.0, 0.5]]
    """
    first = np.asarray(tables[0], np.float64) if len(tables) else np.zeros((0, 0))
    norms = np.linalg.norm(first, axis=-1)
    kept = norms > 0
    if not kept.any():
        raise ValueError(
            "norm_drift: no row of the first table has a norm above 0, so nothing can be compared with it."
        )
    moved = [
        np.linalg.norm(np.asarray(table, np.float64)[kept] - first[kept], axis=-1) / norms[kept] for table in tables
    ]
    return np.quantile(np.stack(moved), quantiles, axis=1).T


def plot_norm_drift(
    drift: Float[np.ndarray, "times quantiles"],
    *,
    steps: Int[np.ndarray, " times"] | Sequence[int] | None = None,
    quantiles: Sequence[float] = QUANTILES,
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """How far rows have moved over time: a line per quantile of the rows, the fastest row on top.

    Args:
      drift: see `norm_drift`.
      steps: when the tables were looked at; None means 0, 1, 2, ….
      quantiles: those of `drift`.
      ax: None makes a figure.
      **line_kwargs: for the lines.
    """
    ax = axes_or_new(ax)
    times = np.arange(len(drift)) if steps is None else np.asarray(steps)
    names = {0.5: "median row", 1.0: "row that moved most", 0.0: "row that moved least"}
    for number in reversed(range(len(quantiles))):
        share = quantiles[number]
        label = names.get(share, f"{share:.0%} of the rows moved less")
        ax.plot(times, drift[:, number], **with_defaults(line_kwargs, **line_look(number), linewidth=2.0, label=label))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    labels = "training step", "distance from the first value (% of its norm)"
    return finish(ax, *labels, counts_on_x=True, legend=True, ylim=(0, None))
