"""How fast an operation can be on a machine at best, and how fast programs are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from rsembed.checks import validated
from rsembed.plot.drawing import MUTED, axes_or_new, colour_of, finish, label_ends, marker_look, note, with_defaults


class Work(NamedTuple):
    """What an operation cannot do without.

    Attributes:
      flops: additions and multiplications.
      num_bytes: bytes to and from memory, each distinct one once.
    """

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.num_bytes


@validated
def lookup_work(num_ids: int, num_distinct_rows: int, num_bags: int, dim: int, *, value_bytes: int = 4) -> Work:
    """A pooled lookup: every entry is scaled and added, every distinct row read, every sum written.

    Example:
      >>> lookup_work(num_ids=1000, num_distinct_rows=500, num_bags=100, dim=64).intensity
      0.812...
    """
    moved = num_distinct_rows * dim * value_bytes + num_ids * 4 + num_bags * dim * 4
    return Work(2.0 * num_ids * dim, float(moved))


def roof(intensity: Any, bytes_per_second: float, flops_per_second: float) -> Any:
    """Most operations per second at an intensity: memory limits low ones, arithmetic high ones.

    Source: Williams, Waterman, Patterson (2009).
    """
    return np.minimum(np.asarray(intensity, np.float64) * bytes_per_second, flops_per_second)


@validated
def plot_roofline(
    work: Work,
    seconds: Mapping[str, Annotated[float, "(0, inf)"]],
    *,
    bytes_per_second: Annotated[float, "(0, inf)"],
    flops_per_second: Annotated[float, "(0, inf)"],
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """Programs for one operation under the roof of a machine, both axes logarithmic.

    Args:
      work: what each program has to do.
      seconds: what each took, by name.
      bytes_per_second: what memory gives; a large copy measures it.
      flops_per_second: what arithmetic gives.
      ax: None makes a figure.
      **line_kwargs: go to the roof.
    """
    ax = axes_or_new(ax)
    ridge = flops_per_second / bytes_per_second
    span = np.geomspace(min(work.intensity, ridge) / 8, max(work.intensity, ridge) * 4, 200)
    line = with_defaults(line_kwargs, color=MUTED, linewidth=2.0)
    curve = span, roof(span, bytes_per_second, flops_per_second) / 1e9
    ax.loglog(*curve, **line)
    ax.axvline(work.intensity, color=MUTED, linewidth=0.8, linestyle=":")
    best = roof(work.intensity, bytes_per_second, flops_per_second)
    reached = [work.flops / taken / 1e9 for taken in seconds.values()]
    labels = [f"{name}: {100e9 * own / best:.0f} % of the roof" for name, own in zip(seconds, reached, strict=True)]
    for number, (own, label) in enumerate(zip(reached, labels, strict=True)):
        ax.plot(work.intensity, own, **marker_look(number), linestyle="none", markersize=9, label=label)
    slope = curve[0][20], curve[1][20]
    note(ax, f"{bytes_per_second / 1e9:.0f} GB/s", slope, xytext=(-4, 6), ha="right", va="baseline")
    finish(ax, "operations per byte of memory", "10⁹ operations per second")
    points, colours = [(work.intensity, own) for own in reached], [colour_of(k) for k in range(len(reached))]
    label_ends(ax, points, labels, colours=colours, curves=[curve])
    return ax
