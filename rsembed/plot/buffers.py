"""Plots of a device's input buffer, and of the costs of the limit `max_ids_per_partition`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator, StrMethodFormatter

from rsembed.checks import PositiveInt, validated
from rsembed.fdo.ids import partition_counts
from rsembed.plot.drawing import COLOURS, axes_or_new, colour_of, finish, with_defaults
from rsembed.stacking import SUBLANES, round_up

GAP = -1
"""Marks an unused slot between the end of a partition and the next multiple of 8."""
TAIL = -2
"""Marks an unused slot after the last partition of a core."""
_TAIL_COLOUR = "#f2f2f2"
_GAP_COLOUR = "#bdbdbd"
_MOST_PLACES_WITH_LINES = 64


@validated
def buffer_places(
    row_pointers: Int[np.ndarray, " pointers"], *, num_shards: PositiveInt, num_places: PositiveInt
) -> Int[np.ndarray, "cores places"]:
    """Content of each slot in a device's input buffer: index of the id's shard, `GAP` or `TAIL`.

    Args:
      row_pointers: ends of the partitions of one device and one stack, from a batch that was
        preprocessed without minibatches.
      num_shards: number of shards over all devices.
      num_places: number of slots in the device's input buffer.

    Raises: ValueError: the number of row pointers or of slots does not match `num_shards`, or a
      partition ends before the previous partition or after the end of the buffer.

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
    places_per_core = num_places // num_cores
    pointers = np.asarray(row_pointers).reshape(num_cores, block)
    ends = pointers[:, :num_shards]
    distances = np.diff(ends, axis=1, prepend=0, append=places_per_core)
    if (distances < 0).any():
        raise ValueError(
            f"buffer_places: partitions end at {ends.tolist()}, which must not fall, in the {places_per_core} "
            "places of a core; buffers with minibatches are laid out otherwise."
        )
    places = np.full((num_cores, places_per_core), TAIL)
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
    **mesh_kwargs: object,
) -> Axes:
    """Draws the input buffer of one device, as one horizontal strip for each core.

    A strip shows coloured partitions, the gaps after them, and the empty tail.

    Args:
      places: content of each slot, as `buffer_places` returns it.
      labels: a label for each slot, drawn only in slots that hold an id. If None, slots have no
        labels.
      ax: the axes to draw on. If None, the function creates a new figure.
      **mesh_kwargs: keyword arguments of `Axes.pcolormesh`, which draws the strips.

    Raises: ValueError: `labels` and `places` differ in shape.
    """
    places = np.asarray(places)
    num_cores, num_places = places.shape
    if labels is not None and np.shape(labels) != places.shape:
        raise ValueError(
            f"plot_buffer: labels have shape {np.shape(labels)}, places {places.shape}; give one each."
        )
    ax = axes_or_new(ax, (10.0, 1.3 + 0.75 * num_cores))
    num_shards = int(places.max(initial=-1)) + 1
    shard_colours = [colour_of(shard) for shard in range(num_shards)]
    colours = ListedColormap([_TAIL_COLOUR, _GAP_COLOUR, *shard_colours])
    has_lines = num_places <= _MOST_PLACES_WITH_LINES
    style = with_defaults(
        mesh_kwargs,
        cmap=colours,
        vmin=-0.5,
        vmax=num_shards + 1.5,
        edgecolors="white",
        linewidth=0.8 * has_lines,
    )
    x_edges = np.arange(num_places + 1)
    for core, strip in enumerate(places):
        y_edges = [core - 0.36, core + 0.36]
        colour_numbers = strip[None] - TAIL
        ax.pcolormesh(x_edges, y_edges, colour_numbers, **style)
    if labels is not None:
        for core, place in np.argwhere(places >= 0).tolist():
            ax.text(
                place + 0.5,
                core,
                labels[core][place],
                ha="center",
                va="center",
                color="white",
                fontsize=8.0,
            )
    handles = []
    distinct_colours = shard_colours[: len(COLOURS)]
    for shard, colour in enumerate(distinct_colours):
        handles.append(Patch(color=colour, label=f"shard {shard}"))
    if num_shards > len(COLOURS):
        handles[-1].set_label(f"shard {len(COLOURS) - 1}; colours repeat")
    handles.append(Patch(color=_GAP_COLOUR, label="gap"))
    handles.append(Patch(color=_TAIL_COLOUR, label="empty tail"))
    ax.legend(
        handles=handles,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    ax.set(
        xlim=(0, num_places),
        yticks=range(num_cores),
        ylim=(num_cores - 0.5, -0.5),
    )
    if has_lines:
        ax.xaxis.set_major_locator(MultipleLocator(SUBLANES))
    return finish(ax, "place in the core's part of the buffer", "core")


BYTES_PER_PLACE = 12
"""Bytes of one slot of an input buffer: 4 each for an id, its sample index and its weight."""


@validated
def partition_entries(
    batches: Int[np.ndarray, "batches samples ids"], *, num_shards: PositiveInt
) -> Int[np.ndarray, "batches cores shards"]:
    """Number of entries that each core sends to each shard (the size of a "partition").

    All cores belong to one device, and each core has one shard. Row `id` belongs to shard
    `id % num_shards`. Duplicate ids in a sample count as one entry.

    Args:
      batches: ids of all samples in several batches, -1 for no id. Each core gets an equal number
        of consecutive samples from every batch.
      num_shards: number of shards, which is also the number of cores.

    Raises: ValueError: the number of samples is not a multiple of `num_shards`, `num_shards` is
      below 1, or `batches` contains an id below -1 or no id at all.

    Example:
      >>> partition_entries(np.array([[[0, 2], [3, 3]], [[2, 1], [0, -1]]]), num_shards=2).tolist()
      [[[2, 0], [0, 1]], [[1, 1], [1, 0]]]
    """
    num_batches, num_samples, ids_per_sample = batches.shape
    is_cut_evenly = num_samples % num_shards == 0
    has_bad_ids = (batches < -1).any()
    has_ids = (batches >= 0).any()
    if not is_cut_evenly or has_bad_ids or not has_ids:
        raise ValueError(
            f"partition_entries: {num_samples} samples are dealt to {num_shards} cores, which needs a multiple of "
            f"them, and at least one id among the {batches.size} places, and none below -1."
        )
    samples = np.repeat(np.arange(num_samples), ids_per_sample)
    cores = samples // (num_samples // num_shards)
    entries = np.zeros((num_batches, num_shards, num_shards), np.int64)
    for number, batch in enumerate(batches):
        ids = batch.reshape(-1)
        is_id = ids >= 0
        counts, _ = partition_counts(ids[is_id], samples[is_id], cores[is_id], num_shards)
        entries[number] = counts
    return entries


@validated
def limit_costs(
    entries: Int[np.ndarray, "batches cores shards"], max_ids_per_partition: PositiveInt
) -> tuple[float, int]:
    """Fraction of entries dropped by a limit, and size in bytes of the input buffers of all cores.

    Every partition is assumed to have space for `max_ids_per_partition` entries. If a stack has a
    suggested buffer size, the real buffers can be smaller than the result.

    Args:
      entries: number of entries in each partition, the result of `partition_entries`.
      max_ids_per_partition: maximum number of entries that one core sends to one shard.
    """
    num_dropped = np.maximum(entries - max_ids_per_partition, 0).sum()
    fraction = float(num_dropped / entries.sum())
    _, num_cores, num_shards = entries.shape
    places_per_partition = round_up(max_ids_per_partition, SUBLANES)
    num_places = num_cores * num_shards * places_per_partition
    return fraction, num_places * BYTES_PER_PLACE


@validated
def plot_limit_choice(
    entries: Int[np.ndarray, "batches cores shards"],
    max_ids_per_partition: PositiveInt,
    *,
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots the fraction of dropped entries (y) against the buffer size (x) for many limits.

    A dot marks the limit `max_ids_per_partition`.

    Args:
      entries: number of entries in each partition, the result of `partition_entries`.
      max_ids_per_partition: the limit to mark with a dot.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: keyword arguments of `Axes.plot`, which draws the curve.
    """
    ax = axes_or_new(ax)
    largest = max(int(entries.max()), max_ids_per_partition)
    most_tiles = max(largest / SUBLANES, 1)
    # The number of slots of a partition is a multiple of 8. A limit that is not a multiple of 8
    # needs as many bytes as the next larger multiple, so only multiples of 8 are drawn.
    num_tiles = np.ceil(np.linspace(1, most_tiles, 120))
    limits = SUBLANES * np.unique(num_tiles.astype(int))
    costs = [limit_costs(entries, int(limit)) for limit in limits]
    dropped, buffers = np.array(costs).T
    style = with_defaults(line_kwargs, color=COLOURS[0], linewidth=2.0)
    ax.plot(buffers / 1e3, 100 * dropped, **style)
    fraction, num_bytes = limit_costs(entries, max_ids_per_partition)
    kilobytes = num_bytes / 1e3
    percent = 100 * fraction
    ax.plot(kilobytes, percent, "o", color=COLOURS[1], markersize=9, zorder=3)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    title = f"limit {max_ids_per_partition:,}: {kilobytes:,.0f} kB, {fraction:.2%} dropped"
    return finish(
        ax,
        "input buffers (kB)",
        "entries dropped (%)",
        ylim=(-3.0, None),
        title=title,
    )


@validated
def explore(
    entries: Int[np.ndarray, "batches cores shards"], *, max_ids_per_partition: int | None = None
) -> Any:
    """A widget for notebooks: `plot_limit_choice` with a slider for the limit.

    Jupyter shows the widget if the call is the last line of a cell.

    Args:
      entries: number of entries in each partition, the result of `partition_entries`.
      max_ids_per_partition: the limit at which the slider starts. If None, the slider starts at the
        smallest limit that drops nothing.

    Raises: ImportError: ipywidgets is missing. Install rsembed with the extra `notebooks`.
    """
    import ipywidgets
    from IPython.display import display

    def draw(limit: int) -> None:
        figure = Figure(layout="constrained")
        plot_limit_choice(entries, limit, ax=figure.subplots())
        display(figure)

    largest = int(entries.max())
    start = max_ids_per_partition or largest
    slider = ipywidgets.IntSlider(start, 1, largest, description="limit")
    picture = ipywidgets.interactive_output(draw, {"limit": slider})
    return ipywidgets.VBox([slider, picture])
