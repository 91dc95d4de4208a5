"""What bytes buy: errors and losses of small tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rsembed.checks import validated
from rsembed.plot.drawing import axes_or_new, colour_of, finish, label_ends, marker_look, reference_lines


@validated
def plot_against_bytes(
    results: Mapping[str, Sequence[tuple[float, float]]],
    *,
    references: Mapping[str, float] | None = None,
    ylabel: str = "relative error",
    ax: Axes | None = None,
) -> Axes:
    """What each method reaches with so many bytes, on a logarithmic axis; its name stands where the bytes are most.

    Args:
      results: `{method: (bytes, value) pairs}`, in any order; such as a reconstruction error or a loss.
      references: `{name: value}`, drawn as dashed lines across.
      ylabel: what the values are, with their unit.
      ax: None makes a figure.
    """
    ax = axes_or_new(ax)
    curves = [np.array(sorted(points), np.float64).T for points in results.values()]
    for number, (name, curve) in enumerate(zip(results, curves, strict=True)):
        ax.plot(*curve, **marker_look(number), linewidth=1.5, label=name)
    reference_lines(ax, references)
    ax.set_xscale("log")  # sets a formatter of its own
    ax.margins(x=0.25)
    ax.xaxis.set_major_formatter(FuncFormatter(_bytes_label))
    finish(ax, "table (bytes)", ylabel)
    colours, lines = [colour_of(number) for number in range(len(results))], [(own[0], own[1]) for own in curves]
    label_ends(ax, [(own[0, -1], own[1, -1]) for own in curves], list(results), colours=colours, curves=lines)
    return ax


def _bytes_label(num_bytes: float, _: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"
