"""Pictures of many devices: what travels between them, and how a step grows with their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from rsembed.plot.drawing import COLOURS, DASHED, LABEL_POINTS, axes_or_new, finish, line_look, with_defaults


class ExchangeVolume(NamedTuple):
    """Bytes per device: what it sends to others, receives from others, and keeps."""

    sent: Float[np.ndarray, " devices"]
    received: Float[np.ndarray, " devices"]
    kept: Float[np.ndarray, " devices"]


def exchange_volume(num_bytes: Num[np.ndarray, "source destination"]) -> ExchangeVolume:
    """What every device sends, receives and keeps in one exchange.

    Args:
      num_bytes: bytes from each device (first axis) to each device (second axis); the diagonal does not travel.

    Raises: ValueError: the array is not square, or an entry is negative.

    Example:
      >>> volume = exchange_volume(np.array([[5, 1], [3, 7]]))
      >>> volume.sent.tolist(), volume.received.tolist(), volume.kept.tolist()
      ([1.0, 3.0], [3.0, 1.0], [5.0, 7.0])
    """
    volume = np.asarray(num_bytes, np.float64)
    if volume.ndim != 2 or volume.shape[0] != volume.shape[1] or (volume < 0).any():
        raise ValueError(
            f"exchange_volume: needs bytes [source, destination] of one number of devices, none below 0; got shape "
            f"{volume.shape}."
        )
    kept = np.diagonal(volume)
    return ExchangeVolume(volume.sum(axis=1) - kept, volume.sum(axis=0) - kept, kept.copy())


def plot_exchange_volume(
    num_bytes: Num[np.ndarray, "source destination"], *, ax: Axes | None = None, **bar_kwargs: Any
) -> Axes:
    """What every device sends and receives, bars side by side, and the mean over devices: the slowest one decides.

    Args:
      num_bytes: see `exchange_volume`, which computes the numbers.
      ax: None makes a figure.
      **bar_kwargs: for all bars.
    """
    ax = axes_or_new(ax)
    volume = exchange_volume(num_bytes)
    devices = np.arange(len(volume.sent))
    sides = (
        (-0.2, volume.sent, COLOURS[0], "sent to others"),
        (0.2, volume.received, COLOURS[4], "received from others"),
    )
    for side, values, colour, label in sides:
        ax.bar(devices + side, values, **with_defaults(bar_kwargs, width=0.38, color=colour, label=label))
    ax.axhline(volume.sent.mean(), **DASHED, label="mean")
    total = volume.sent.sum() + volume.kept.sum()
    travels = volume.sent.sum() / total if total else 0.0
    ax.set_title(f"{travels:.0%} of the bytes leave their device", fontsize=LABEL_POINTS + 1)
    ax.yaxis.set_major_formatter(EngFormatter(unit="B"))
    ax.set_ylim(top=1.3 * max(volume.sent.max(), volume.received.max(), 1.0))  # room for the legend
    ax.legend(frameon=False, ncols=3, loc="upper center", fontsize=LABEL_POINTS)
    return finish(ax, "device", "exchanged in one step (bytes)", counts_on_x=True)


def scaling_efficiency(step_seconds: Float[np.ndarray, " sizes"] | Sequence[float]) -> Float[np.ndarray, " sizes"]:
    """The step on the fewest devices over each step: 1 is perfect weak scaling, in which every device keeps its load.

    Example:
      >>> scaling_efficiency([2.0, 2.5, 4.0]).tolist()
      [1.0, 0.8, 0.5]
    """
    seconds = np.asarray(step_seconds, np.float64)
    return seconds[0] / seconds


def plot_scaling(
    num_devices: Sequence[int],
    step_seconds: Mapping[str, Sequence[float]],
    *,
    efficiency: bool = False,
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """Time of a step, or the efficiency of weak scaling, against the number of devices; one curve per strategy.

    Args:
      num_devices: the sizes, rising; their axis is logarithmic, so is that of times.
      step_seconds: at every size, by the name of the strategy.
      efficiency: draw `scaling_efficiency`, in per cent, instead of the times.
      ax: None makes a figure.
      **line_kwargs: for all curves.

    Raises: ValueError: a strategy has not one time per size.
    """
    ax = axes_or_new(ax)
    for number, (name, seconds) in enumerate(step_seconds.items()):
        if len(seconds) != len(num_devices):
            raise ValueError(f"plot_scaling: {name!r} has {len(seconds)} times for {len(num_devices)} sizes.")
        values = 100 * scaling_efficiency(seconds) if efficiency else 1e3 * np.asarray(seconds)
        look = with_defaults(line_kwargs, **line_look(number), linewidth=2.0, marker="o", markersize=3.5)
        ax.plot(num_devices, values, label=name, **look)
    ax.set_xscale("log", base=2)
    ax.set_xticks(num_devices, [f"{number:,}" for number in num_devices])
    ax.minorticks_off()
    if efficiency:
        return finish(ax, "devices", "weak-scaling efficiency (%)", ylim=(0, 105), legend=True)
    finish(ax, "devices", "time of a step (ms)", yscale="log", legend=True)
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    return ax
