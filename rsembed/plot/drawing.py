"""What all pictures share: colours, axes to draw on, looks of curves, small texts, labels and legends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Blue, vermilion, green, purple, orange, sky blue, black, of Okabe and Ito: colour-blind eyes can tell them apart."""
MUTED = "#6b6b6b"
"""Dark enough to read on white; for what is not the point of the picture."""
LABEL_POINTS = 9.0
DASHED: dict[str, Any] = {"color": MUTED, "linestyle": "--", "linewidth": 1.2}
"""Look of a line at a known value."""
_LINE_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP"


def axes_or_new(ax: Axes | None, size_inches: tuple[float, float] = (6.4, 4.0)) -> Axes:
    """The given axes, or those of a new figure."""
    return plt.subplots(figsize=size_inches, layout="constrained")[1] if ax is None else ax


def with_defaults(given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The caller's keyword arguments over ours."""
    return defaults | given


def colour_of(number: int) -> str:
    """The colour of curve `number`; they repeat."""
    return COLOURS[number % len(COLOURS)]


def line_look(number: int) -> dict[str, Any]:
    """Colour and line style of curve `number`."""
    return {"color": colour_of(number), "linestyle": _LINE_STYLES[number % len(_LINE_STYLES)]}


def marker_look(number: int) -> dict[str, Any]:
    """Colour and marker of curve `number`."""
    return {"color": colour_of(number), "marker": _MARKERS[number % len(_MARKERS)]}


def note(ax: Axes, text: str, point: tuple[float, float], **text_kwargs: Any) -> None:
    """A small muted text to the right of a point."""
    look = with_defaults(text_kwargs, xytext=(4, 0), va="center", fontsize=LABEL_POINTS, color=MUTED)
    ax.annotate(text, point, textcoords="offset points", **look)


def note_at_height(ax: Axes, text: str, value: float) -> None:
    """The text to the right of the axes, where no curve runs."""
    note(ax, text, (1.0, value), xycoords=("axes fraction", "data"))


def reference_lines(ax: Axes, references: Mapping[str, float] | None) -> None:
    """Dashed lines at known values, with text and value beside the axes."""
    for text, value in (references or {}).items():
        ax.axhline(value, **DASHED)
        note_at_height(ax, f"{text}\n{value:.3f}", value)


def finish(
    ax: Axes, xlabel: str, ylabel: str, *, counts_on_x: bool = False, legend: bool = False, **settings: Any
) -> Axes:
    """Writes the labels, makes other settings, puts ticks at whole numbers where x counts; returns the axes."""
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if counts_on_x:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        ax.legend(frameon=False)
    return ax
