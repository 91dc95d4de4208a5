"""Pictures of traffic between devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from rsembed.plot.pictures import COLOURS, LABEL_POINTS, MUTED, _axes, _options


class ExchangeVolume(NamedTuple):
    """Bytes per device: what it sends to others, receives from others, and keeps."""

    sent: Float[np.ndarray, " devices"]
    received: Float[np.ndarray, " devices"]
    kept: Float[np.ndarray, " devices"]


def exchange_volume(num_bytes: Num[np.ndarray, "source destination"]) -> ExchangeVolume:
    """What every device sends, receives and keeps in one exchange.

    Args:
      num_bytes: bytes from each device (first axis) to each device (second axis); the diagonal does not travel.

    Raises:
      ValueError: the array is not square, or an entry is negative.

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
    ax = _axes(ax)
    volume = exchange_volume(num_bytes)
    devices = np.arange(len(volume.sent))
    for side, name, colour in ((-0.2, "sent", COLOURS[0]), (0.2, "received", COLOURS[4])):
        values = getattr(volume, name)
        ax.bar(devices + side, values, **_options(bar_kwargs, width=0.38, color=colour, label=f"{name} to others"))
    ax.containers[1].set_label("received from others")
    ax.axhline(volume.sent.mean(), color=MUTED, linestyle="--", linewidth=1.2, label="mean")
    total = volume.sent.sum() + volume.kept.sum()
    travels = volume.sent.sum() / total if total else 0.0
    ax.set_title(f"{travels:.0%} of the bytes leave their device", fontsize=LABEL_POINTS + 1)
    ax.set(xlabel="device", ylabel="exchanged in one step (bytes)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(EngFormatter(unit="B"))
    ax.set_ylim(top=1.3 * max(volume.sent.max(), volume.received.max(), 1.0))  # room for the legend
    ax.legend(frameon=False, ncols=3, loc="upper center", fontsize=LABEL_POINTS)
    return ax
