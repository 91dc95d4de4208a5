"""Parts that all pictures share: colours, axes to draw on, looks of curves, small texts, labels and legends."""

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
"""Blue, vermilion, green, purple, orange, sky blue, black, of Okabe and Ito: colour-blind eyes can tell them apart."""
MUTED = "#6b6b6b"
"""Grey for what is not the point of a picture, dark enough to read on white."""
LABEL_POINTS = 9.0
DASHED: dict[str, Any] = {"color": MUTED, "linestyle": "--", "linewidth": 1.2}
"""Look of a line at a known value."""
_LINE_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP"


def axes_or_new(ax: Axes | None, size_inches: tuple[float, float] = (6.4, 4.0)) -> Axes:
    """The given axes, or those of a new figure."""
    return plt.subplots(figsize=size_inches, layout="constrained")[1] if ax is None else ax


def with_defaults(given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Keyword arguments in which the caller's take precedence over our defaults."""
    return defaults | given


def colour_of(number: int) -> str:
    """The colour of curve `number`; they repeat."""
    return COLOURS[number % len(COLOURS)]


def next_colour(ax: Axes) -> str:
    """The colour of the next curve on axes that may have some; grey lines at known values do not count."""
    return colour_of(sum(line.get_color() != MUTED for line in ax.lines))


def line_look(number: int) -> dict[str, Any]:
    """Colour and line style of curve `number`."""
    return {"color": colour_of(number), "linestyle": _LINE_STYLES[number % len(_LINE_STYLES)]}


def marker_look(number: int) -> dict[str, Any]:
    """Colour and marker of curve `number`."""
    return {"color": colour_of(number), "marker": _MARKERS[number % len(_MARKERS)]}


def note(ax: Axes, text: str, point: tuple[float, float], **text_kwargs: Any) -> None:
    """Writes a small muted text to the right of a point."""
    look = with_defaults(text_kwargs, xytext=(4, 0), va="center", fontsize=LABEL_POINTS, color=MUTED)
    ax.annotate(text, point, textcoords="offset points", **look)


def note_at_height(ax: Axes, text: str, value: float) -> None:
    """Writes a text to the right of the axes, where no curve runs."""
    note(ax, text, (1.0, value), xycoords=("axes fraction", "data"))


def measured_on() -> str:
    """The processor of this machine, its cores and today's date: they belong to every time that is shown.

    Example:
      >>> measured_on()
      '... cores, ...-...-...'
    """
    described = Path("/proc/cpuinfo")  # of Linux; elsewhere Python knows a name
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {granted_cores()} cores, {datetime.date.today()}"


def label_points(
    ax: Axes,
    points: Sequence[tuple[float, float]] | np.ndarray,
    labels: Sequence[str],
    *,
    colours: list[str] | None = None,
    curves: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    **options: Any,
) -> None:
    """Writes labels beside points, where neither a point nor one of the curves runs; thin lines lead to those far away.

    The axes must have their limits and scales, as the places are those of this size. Other options are textalloc's.
    """
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T
    textalloc.allocate(
        ax, x, y, list(labels), x_scatter=x, y_scatter=y,
        x_lines=[own for own, _ in curves], y_lines=[own for _, own in curves],
        textsize=LABEL_POINTS, textcolor=colours or "black", linewidth=0.6, zorder=4,
        max_distance=0.15, margin=0.004, nbr_candidates=600,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        **with_defaults(options, min_distance=0.015, linecolor=MUTED),
    )  # fmt: skip


def label_ends(
    ax: Axes,
    points: Sequence[tuple[float, float]] | np.ndarray,
    labels: Sequence[str],
    *,
    colours: list[str],
    curves: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> None:
    """Writes labels to the right of large markers, such as ends of curves; thin lines in their colours lead there."""
    label_points(
        ax, points, [f" {label}" for label in labels], colours=colours, curves=curves, direction="east",
        linecolor=colours, min_distance=0.025, avoid_label_lines_overlap=True, avoid_crossing_label_lines=True,
    )  # fmt: skip


def reference_lines(ax: Axes, references: Mapping[str, float] | None) -> None:
    """Dashed lines at known values, with text and value beside the axes."""
    for text, value in (references or {}).items():
        ax.axhline(value, **DASHED)
        note_at_height(ax, f"{text}\n{value:.3f}", value)


def finish(
    ax: Axes, xlabel: str, ylabel: str, *, counts_on_x: bool = False, legend: bool = False, **settings: Any
) -> Axes:
    """Sets axis labels and other `settings`, whole-number ticks if x counts, and the legend; returns the axes."""
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if counts_on_x:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        ax.legend(frameon=False)
    return ax
