"""Colours, axes, curve styles, notes, labels and legends that all plots share."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import textalloc
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from rsembed.kernels.devices import granted_cores

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of curves: blue, vermilion, green, purple, orange, sky blue, black.

Okabe and Ito chose these colours so that colour-blind readers can tell the curves apart.
"""
MUTED = "#6b6b6b"
"""Grey for secondary text and lines, dark enough to read on white."""
LABEL_POINTS = 9.0
"""Font size of labels, notes and dense legends."""
DASHED: dict[str, Any] = {"color": MUTED, "linestyle": "--", "linewidth": 1.2}
"""Style of a line at a reference value."""
_LINE_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP"


def axes_or_new(ax: Axes | None, size_inches: tuple[float, float] = (6.4, 4.0)) -> Axes:
    """`ax` unchanged, or the axes of a new figure if `ax` is None."""
    if ax is not None:
        return ax
    _, new_axes = plt.subplots(figsize=size_inches, layout="constrained")
    return new_axes


def with_defaults(options: dict[str, Any], **defaults: object) -> dict[str, Any]:
    """Keyword arguments for a Matplotlib artist. Entries in `options` replace `defaults`."""
    return defaults | options


def colour_of(number: int) -> str:
    """Colour of curve `number`. After seven curves the colours repeat."""
    return COLOURS[number % len(COLOURS)]


def next_colour(ax: Axes) -> str:
    """Colour of the next curve on axes that may already have curves.

    Grey lines, such as lines at reference values, are not counted as curves.
    """
    num_curves = 0
    for line in ax.lines:
        if line.get_color() != MUTED:
            num_curves += 1
    return colour_of(num_curves)


def line_look(number: int) -> dict[str, Any]:
    """Colour and line style of curve `number`."""
    line_style = _LINE_STYLES[number % len(_LINE_STYLES)]
    return {"color": colour_of(number), "linestyle": line_style}


def marker_look(number: int) -> dict[str, Any]:
    """Colour and marker of curve `number`."""
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": colour_of(number), "marker": marker}


def note(ax: Axes, text: str, point: tuple[float, float], **text_kwargs: object) -> None:
    """Writes a small grey string to the right of a point."""
    style = with_defaults(
        text_kwargs,
        xytext=(4, 0),
        va="center",
        fontsize=LABEL_POINTS,
        color=MUTED,
    )
    ax.annotate(text, point, textcoords="offset points", **style)


def measured_on() -> str:
    """This machine's processor, its number of cores and today's date, to print beside timings.

    Example:
      >>> measured_on()
      '... cores, ...-...-...'
    """
    processor = platform.processor() or platform.machine()
    # On Linux, the file /proc/cpuinfo has the full name of the processor.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return f"{processor}, {granted_cores()} cores, {datetime.date.today()}"


def label_points(
    ax: Axes,
    points: Sequence[tuple[float, float]] | np.ndarray,
    labels: Sequence[str],
    *,
    colours: list[str] | None = None,
    curves: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    **options: object,
) -> None:
    """Writes a label beside each point, at a position that covers neither a point nor a curve.

    Thin lines connect distant labels with their points. Set limits and scales of the axes before
    the call, because the positions of labels depend on the limits and scales.

    Args:
      ax: axes to draw on.
      points: x and y of each point.
      labels: a string for each point.
      colours: a colour for each label. If None, all labels are black.
      curves: x and y of curves that labels must not cover.
      **options: further options of `textalloc.allocate`.
    """
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T
    textalloc.allocate(
        ax,
        x,
        y,
        list(labels),
        x_scatter=x,
        y_scatter=y,
        x_lines=[curve_x for curve_x, _ in curves],
        y_lines=[curve_y for _, curve_y in curves],
        textsize=LABEL_POINTS,
        textcolor=colours or "black",
        linewidth=0.6,
        zorder=4,
        max_distance=0.15,
        margin=0.004,
        nbr_candidates=600,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        **with_defaults(options, min_distance=0.015, linecolor=MUTED),
    )


def label_ends(
    ax: Axes,
    points: Sequence[tuple[float, float]] | np.ndarray,
    labels: Sequence[str],
    *,
    colours: list[str],
    curves: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> None:
    """Writes a label to the right of each point, and connects label and point by a thin line.

    The thin line has the colour of the label.

    Labels are further away from their points than in `label_points`, to make space for large
    markers.
    """
    label_points(
        ax,
        points,
        [f" {label}" for label in labels],
        colours=colours,
        curves=curves,
        direction="east",
        linecolor=colours,
        min_distance=0.025,
        avoid_label_lines_overlap=True,
        avoid_crossing_label_lines=True,
    )


def reference_lines(ax: Axes, references: Mapping[str, float] | None) -> None:
    """Draws a dashed line at each reference value, and writes name and value beside the axes."""
    if references is None:
        return
    for text, value in references.items():
        ax.axhline(value, **DASHED)
        right_end = (1.0, value)
        note(ax, f"{text}\n{value:.3f}", right_end, xycoords=("axes fraction", "data"))


def finish(
    ax: Axes,
    xlabel: str,
    ylabel: str,
    *,
    counts_on_x: bool = False,
    legend: bool = False,
    **settings: object,
) -> Axes:
    """Sets the labels and the legend of the axes, and returns the axes.

    Args:
      ax: axes to label.
      xlabel: label of the x axis, with its unit.
      ylabel: label of the y axis, with its unit.
      counts_on_x: whether the ticks of the x axis are whole numbers.
      legend: whether to draw a legend.
      **settings: further arguments of `ax.set`.
    """
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if counts_on_x:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        ax.legend(frameon=False)
    return ax
