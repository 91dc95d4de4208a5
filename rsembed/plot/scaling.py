"""How a step grows with the number of devices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from rsembed.plot.pictures import COLOURS, _axes, _options


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
    ax = _axes(ax)
    looks = zip(itertools.cycle(COLOURS), itertools.cycle(["-", "--", "-.", ":"]), strict=True)
    for (name, seconds), (colour, style) in zip(step_seconds.items(), looks, strict=False):
        if len(seconds) != len(num_devices):
            raise ValueError(f"plot_scaling: {name!r} has {len(seconds)} times for {len(num_devices)} sizes.")
        values = 100 * scaling_efficiency(seconds) if efficiency else 1e3 * np.asarray(seconds)
        options = _options(line_kwargs, color=colour, linestyle=style, linewidth=2.0, marker="o", markersize=3.5)
        ax.plot(num_devices, values, label=name, **options)
    ax.set_xscale("log", base=2)
    ax.set_xticks(num_devices, [f"{number:,}" for number in num_devices])
    ax.minorticks_off()
    if efficiency:
        ax.set(xlabel="devices", ylabel="weak-scaling efficiency (%)", ylim=(0, 105))
    else:
        ax.set_yscale("log")
        ax.set(xlabel="devices", ylabel="time of a step (ms)")
    ax.legend(frameon=False)
    return ax
