"""The input buffer of a device: which places hold ids, and for which shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from rsembed.checks import PositiveInt, validated
from rsembed.plot.drawing import COLOURS, axes_or_new, colour_of, finish, with_defaults
from rsembed.stacking import SUBLANES

GAP = -1
"""A place between the end of a partition and the next multiple of 8."""
TAIL = -2
"""A place behind the last partition."""
_EMPTY_COLOURS = ("#f2f2f2", "#bdbdbd")  # tail, gap
_MOST_PLACES_WITH_LINES = 64


@validated
def buffer_places(
    row_pointers: Int[np.ndarray, " pointers"], *, num_shards: PositiveInt, num_places: PositiveInt
) -> Int[np.ndarray, "cores places"]:
    """What every place of a device's buffer is: the shard whose row it names, `GAP` or `TAIL`.

    Args:
      row_pointers: of one device and one stack, laid out without minibatches.
      num_shards: shards over all devices.
      num_places: places of the device's buffer.

    Raises: ValueError: the numbers do not describe one buffer.

    Example:
      >>> pointers = np.array([2, 9, 16, 16, 16, 16, 16, 16])
      >>> buffer_places(pointers, num_shards=2, num_places=24)[0].tolist()
      [0, 0, -1, -1, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1, -1, -1, -2, -2, -2, -2, -2, -2, -2, -2]
    """
    block = max(num_shards, SUBLANES)
    num_cores = len(row_pointers) // block
    if num_cores < 1 or len(row_pointers) % block or num_places % num_cores:
        raise ValueError(
            f"buffer_places: {len(row_pointers)} row pointers and {num_places} places are no buffer for "
            f"num_shards={num_shards}, which has {block} pointers per core; give those of one device and one stack."
        )
    ends = np.asarray(row_pointers).reshape(num_cores, block)[:, :num_shards]
    if (np.diff(ends, axis=1, prepend=0, append=num_places // num_cores) < 0).any():
        raise ValueError(
            f"buffer_places: partitions end at {ends.tolist()}, which must not fall, in the {num_places // num_cores} "
            "places of a core; buffers with minibatches are laid out otherwise."
        )
    places = np.full((num_cores, num_places // num_cores), TAIL)
    for core, core_ends in enumerate(ends.tolist()):
        start = 0
        for shard, end in enumerate(core_ends):
            next_start = -(-end // SUBLANES) * SUBLANES
            places[core, start:end] = shard
            places[core, end:next_start] = GAP
            start = next_start
    return places


@validated
def plot_buffer(
    places: Int[np.ndarray, "cores places"],
    *,
    labels: np.ndarray | Sequence[Sequence[str]] | None = None,
    ax: Axes | None = None,
    **mesh_kwargs: Any,
) -> Axes:
    """The buffer of one device as a strip per core: coloured partitions, gaps between them, the empty tail.

    Args:
      places: see `buffer_places`.
      labels: a text for each place, of the same shape; only places that hold an id show theirs.
      ax: None makes a figure.
      **mesh_kwargs: for the coloured strips.

    Raises: ValueError: the labels have another shape.
    """
    places = np.asarray(places)
    num_cores, num_places = places.shape
    if labels is not None and np.shape(labels) != places.shape:
        raise ValueError(f"plot_buffer: labels have shape {np.shape(labels)}, places {places.shape}; give one each.")
    ax = axes_or_new(ax, (10.0, 1.3 + 0.75 * num_cores))
    num_shards = int(places.max(initial=-1)) + 1
    shard_colours = [colour_of(shard) for shard in range(num_shards)]
    colours = ListedColormap([*_EMPTY_COLOURS, *shard_colours])
    with_lines = num_places <= _MOST_PLACES_WITH_LINES
    width = 0.8 if with_lines else 0.0
    look = with_defaults(
        mesh_kwargs, cmap=colours, vmin=-0.5, vmax=num_shards + 1.5, edgecolors="white", linewidth=width
    )
    for core, strip in enumerate(places):
        ax.pcolormesh(np.arange(num_places + 1), [core - 0.36, core + 0.36], strip[None] - TAIL, **look)
    if labels is not None:
        for core, place in np.argwhere(places >= 0).tolist():
            ax.text(place + 0.5, core, labels[core][place], ha="center", va="center", color="white", fontsize=8.0)
    shown = [Patch(color=own, label=f"shard {shard}") for shard, own in enumerate(shard_colours[: len(COLOURS)])]
    if num_shards > len(COLOURS):
        shown[-1].set_label(f"shard {len(COLOURS) - 1}; colours repeat")
    shown += [Patch(color=_EMPTY_COLOURS[1], label="gap"), Patch(color=_EMPTY_COLOURS[0], label="empty tail")]
    ax.legend(handles=shown, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set(xlim=(0, num_places), yticks=range(num_cores), ylim=(num_cores - 0.5, -0.5))
    if with_lines:
        ax.xaxis.set_major_locator(MultipleLocator(SUBLANES))
    return finish(ax, "place in the core's part of the buffer", "core")
