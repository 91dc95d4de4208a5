"""A picture to play with: drag the limit of a partition, and see bytes and drops change.

The stream is counted once; every limit is then answered from the counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from rsembed.checks import PositiveInt, validated
from rsembed.plot.drawing import COLOURS, axes_or_new, finish, with_defaults
from rsembed.stacking import SUBLANES, round_up

BYTES_PER_PLACE = 12
"""Of an input buffer: id, sample and gain of one entry, 4 bytes each."""


class Costs(NamedTuple):
    """Entries above a limit, over all entries; and bytes of the input buffers of all cores that it asks for."""

    dropped_fraction: float
    buffer_bytes: int


@validated
def partition_entries(
    batches: Int[np.ndarray, "batches samples ids"], *, num_shards: PositiveInt
) -> Int[np.ndarray, "batches cores shards"]:
    """Entries of every partition, on one device of `num_shards` cores that own the rows `id % num_shards`.

    Args:
      batches: ids; `-1` is no id, and equal ids of one sample are one entry. Samples are cut into equal parts, one per
        core.
      num_shards: cores.

    Raises: ValueError: the samples cannot be cut evenly, `num_shards` is below 1, or there is no id.

    Example:
      >>> partition_entries(np.array([[[0, 2], [3, 3]], [[2, 1], [0, -1]]]), num_shards=2).tolist()
      [[[2, 0], [0, 1]], [[1, 1], [1, 0]]]
    """
    ids = np.sort(batches, axis=2)
    counts, (num_batches, num_samples, _) = ids != -1, ids.shape
    if num_samples % num_shards or not counts.any() or ids.min() < -1:
        raise ValueError(
            f"partition_entries: {num_samples} samples are dealt to {num_shards} cores, which needs a multiple of "
            f"them, and at least one id among the {ids.size} places, and none below -1."
        )
    counts[:, :, 1:] &= ids[:, :, 1:] != ids[:, :, :-1]  # the first of equal ids in a sample
    core = np.arange(num_samples) // (num_samples // num_shards)
    partition = (np.arange(num_batches)[:, None, None] * num_shards + core[:, None]) * num_shards + ids % num_shards
    entries = np.bincount(partition[counts], minlength=num_batches * num_shards**2)
    return entries.reshape(num_batches, num_shards, num_shards)


@validated
def limit_costs(entries: Int[np.ndarray, "batches cores shards"], max_ids_per_partition: PositiveInt) -> Costs:
    """What this limit would have cost; see `partition_entries`. A suggested buffer size may be smaller."""
    dropped = np.maximum(entries - max_ids_per_partition, 0).sum() / entries.sum()
    places = entries.shape[1] * entries.shape[2] * round_up(max_ids_per_partition, SUBLANES)
    return Costs(float(dropped), places * BYTES_PER_PLACE)


@validated
def plot_limit_choice(
    entries: Int[np.ndarray, "batches cores shards"],
    max_ids_per_partition: PositiveInt,
    *,
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """The share of entries that each limit would drop, over the bytes of its buffers; a dot marks the one chosen.

    Args:
      entries: see `partition_entries`.
      max_ids_per_partition: the limit to mark.
      ax: None makes a figure.
      **line_kwargs: for the curve.
    """
    ax = axes_or_new(ax)
    largest = max(int(entries.max()), max_ids_per_partition) / SUBLANES
    limits = SUBLANES * np.unique(np.ceil(np.linspace(1, max(largest, 1), 120)).astype(int))  # buffers have no others
    dropped, buffers = np.array([limit_costs(entries, int(limit)) for limit in limits]).T
    ax.plot(buffers / 1e3, 100 * dropped, **with_defaults(line_kwargs, color=COLOURS[0], linewidth=2.0))
    here = limit_costs(entries, max_ids_per_partition)
    ax.plot(here.buffer_bytes / 1e3, 100 * here.dropped_fraction, "o", color=COLOURS[1], markersize=9, zorder=3)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    title = f"limit {max_ids_per_partition:,}: {here.buffer_bytes / 1e3:,.0f} kB, {here.dropped_fraction:.2%} dropped"
    return finish(ax, "input buffers (kB)", "entries dropped (%)", ylim=(-3.0, None), title=title)


@validated
def explore(entries: Int[np.ndarray, "batches cores shards"], *, max_ids_per_partition: int | None = None) -> Any:
    """A slider for the limit over `plot_limit_choice`; show it as a cell's last line.

    Args:
      entries: see `partition_entries`.
      max_ids_per_partition: where the slider starts; None is the smallest limit that drops nothing.

    Raises: ImportError: ipywidgets is missing; the extra `notebooks` brings it.
    """
    import ipywidgets
    from IPython.display import display

    def draw(limit: int) -> None:
        figure = Figure(layout="constrained")
        plot_limit_choice(entries, limit, ax=figure.subplots())
        display(figure)

    largest = int(entries.max())
    limit = ipywidgets.IntSlider(max_ids_per_partition or largest, 1, largest, description="limit")
    return ipywidgets.VBox([limit, ipywidgets.interactive_output(draw, {"limit": limit})])
