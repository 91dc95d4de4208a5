"""Plots of the distribution of lookups over ids and shards, and of the bytes of each stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import StrMethodFormatter

from rsembed.checks import PositiveInt, validated
from rsembed.fdo.ids import check_shares, zipf_exponent as zipf_exponent
from rsembed.plot.drawing import (
    COLOURS,
    DASHED,
    LABEL_POINTS,
    axes_or_new,
    colour_of,
    finish,
    next_colour,
    note,
    with_defaults,
)
from rsembed.stacking import StackingPlan

PADDING_COLOUR = "#d0d0d0"
MOST_DRAWN_RANKS = 10_000


@validated
def plot_id_frequency(
    counts: Num[np.ndarray, " vocab"],
    *,
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots how often each id occurs, most frequent first, on logarithmic axes.

    Ids that never occur are left out. To add a curve, call `plot_id_frequency` again with the same
    `ax`.

    Args:
      counts: occurrences of each id, for example from `np.bincount`.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: options of the curve. The option `label` adds a legend.
    """
    ax = axes_or_new(ax)
    shares = check_shares("plot_id_frequency: counts", counts)
    seen = np.sort(shares[shares > 0])[::-1]
    ranks = _drawn_ranks(len(seen))
    style = with_defaults(line_kwargs, color=next_colour(ax), linewidth=2.0)
    ax.loglog(ranks, seen[ranks - 1], **style)
    xlabel = "rank of the id (1 = most frequent)"
    has_legend = "label" in line_kwargs
    return finish(ax, xlabel, "occurrences", legend=has_legend)


@validated
def plot_coverage(
    counts: Num[np.ndarray, " vocab"],
    *,
    num_rows: PositiveInt | None = None,
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots the share of lookups that read the hottest rows, against the number of these rows.

    The logarithmic x axis shows the number of rows as a percentage of all rows of the table. To add
    a curve, call `plot_coverage` again with the same `ax`.

    Args:
      counts: number of lookups of each row, or the probability that a lookup reads the row, with 0
        for rows that are never looked up.
      num_rows: number of rows of the table. Set `num_rows` if `counts` leaves out rows that are
        never looked up. If None, the table has one row for each count.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: options of the curve. The option `label` adds a legend.

    Raises: ValueError: a count is negative, all counts are 0, or there are more counts than rows.
    """
    ax = axes_or_new(ax)
    shares = check_shares("plot_coverage: counts", counts)
    hottest_first = np.sort(shares)[::-1]
    if num_rows is None:
        num_rows = len(hottest_first)
    if num_rows < len(hottest_first):
        raise ValueError(
            f"plot_coverage: there are {len(hottest_first)} counts, but num_rows={num_rows}."
        )
    served = 100 * np.cumsum(hottest_first) / hottest_first.sum()
    ranks = _drawn_ranks(len(served))
    served = served[ranks - 1]
    if num_rows > len(hottest_first):  # Rows without an entry in `counts` are never read.
        ranks = np.append(ranks, num_rows)
        served = np.append(served, 100.0)
    style = with_defaults(line_kwargs, color=next_colour(ax), linewidth=2.0)
    ax.semilogx(100 * ranks / num_rows, served, **style)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    return finish(
        ax,
        "hottest rows (% of the table)",
        "lookups they serve (%)",
        legend="label" in line_kwargs,
        ylim=(0, 103),
    )


def _drawn_ranks(num_ranks: int) -> Int[np.ndarray, " ranks"]:
    """Ranks to draw, from 1 (most frequent), and at most `MOST_DRAWN_RANKS` of them.

    If `num_ranks` is larger than `MOST_DRAWN_RANKS`, the drawn ranks are equally spaced on a
    logarithmic axis.
    """
    if num_ranks <= MOST_DRAWN_RANKS:
        return np.arange(1, num_ranks + 1)
    ranks = np.geomspace(1, num_ranks, MOST_DRAWN_RANKS)
    return np.unique(ranks.astype(np.int64))


# Functions that compute numbers to plot


@validated
def stack_bytes(plan: StackingPlan) -> dict[str, tuple[int, int]]:
    """Bytes of embeddings and bytes of padding of each stack, over all shards, without optimizer state."""
    sizes = {}
    for stack in plan.stacks:
        num_values = stack.spec.stack_vocab_size * stack.spec.stack_embedding_dim
        value_bytes = stack.table_bytes // num_values
        num_used = sum(table.rows * table.dim for table in stack.tables)
        used_bytes = num_used * value_bytes
        padding_bytes = stack.table_bytes - used_bytes
        sizes[stack.name] = (used_bytes, padding_bytes)
    return sizes


@validated
def treemap(
    sizes: Sequence[float] | Float[np.ndarray, " sizes"],
    width: float,
    height: float,
) -> Float[np.ndarray, "sizes 4"]:
    """Rectangles `(x, y, width, height)` that tile a box, with areas in proportion to `sizes`.

    Rectangles are placed by size, the largest first, in rows along the shorter side of the empty
    part of the box. The next rectangle starts a new row if adding it to the current row would
    increase the largest aspect ratio in the row.

    Args:
      sizes: the size of each rectangle. The result has the rectangles in the order of `sizes`.
      width: width of the box.
      height: height of the box that the rectangles tile.

    Raises: ValueError: a size is negative, or all are zero.

    Source: Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000.

    Example:
      >>> treemap([3.0, 1.0], 4.0, 1.0).tolist()
      [[0.0, 0.0, 3.0, 1.0], [3.0, 0.0, 1.0, 1.0]]
    """
    areas = check_shares("treemap: sizes", sizes)
    areas = areas * (width * height / areas.sum())
    boxes = np.zeros((len(areas), 4))
    order = np.argsort(-areas, kind="stable")
    falling = areas[order]
    first = 0
    x = 0.0
    y = 0.0
    while first < len(falling) and falling[first] > 0:
        side = min(width, height)
        last = first + 1
        while last < len(falling):
            longer = _worst(falling[first : last + 1], side)
            if longer > _worst(falling[first:last], side):
                break
            last += 1
        depth = falling[first:last].sum() / side
        lengths = falling[first:last] / depth
        along = np.append(0.0, np.cumsum(lengths)[:-1])
        if width >= height:
            sides = np.broadcast_arrays(x, y + along, depth, lengths)
            x += depth
            width -= depth
        else:
            sides = np.broadcast_arrays(x + along, y, lengths, depth)
            y += depth
            height -= depth
        boxes[order[first:last]] = np.stack(sides, axis=1)
        first = last
    return boxes


def _worst(areas: np.ndarray, side: float) -> float:
    """Largest aspect ratio of rectangles with these areas that fill a row of length `side`."""
    depth = areas.sum() / side
    ratios = areas / depth**2
    smallest = max(ratios.min(), 1e-12)
    return float(max(ratios.max(), 1 / smallest))


# Plots of shard loads and of bytes


@validated
def plot_shard_load(
    loads: Mapping[str, Int[np.ndarray, " shards"]],
    *,
    ax: Axes | None = None,
    **bar_kwargs: object,
) -> Axes:
    """Draws the number of ids that each shard looks up as bars, and the mean as a line.

    Each shard has one bar for each layout. The legend shows, for each layout, the load of the
    busiest shard divided by the mean load.

    Args:
      loads: for each layout name, an array with the number of ids that each shard looks up, from
        `StackingPlan.shard_load`. Compute the loads of all layouts from the same batch of ids.
      ax: the axes to draw on. If None, the function creates a new figure.
      **bar_kwargs: options of `Axes.bar`, for all bars.

    Raises: ValueError: `loads` is empty, the counts of a layout are all 0, or the layouts have
      different numbers of shards.
    """
    num_shards = {len(load) for load in loads.values()}
    if len(num_shards) != 1:
        raise ValueError(
            f"plot_shard_load: needs loads of one number of shards, got {sorted(num_shards)}."
        )
    ax = axes_or_new(ax)
    shards = np.arange(num_shards.pop())
    width = 0.8 / len(loads)
    middle = (len(loads) - 1) / 2
    for number, (name, load) in enumerate(loads.items()):
        centres = shards + (number - middle) * width
        shares = check_shares("plot_shard_load: load", load)
        skew = shares.max() / shares.mean()
        style = with_defaults(
            bar_kwargs,
            width=width,
            color=colour_of(number),
            label=f"{name}: busiest {skew:.2f} × mean",
        )
        ax.bar(centres, load, **style)
    all_loads = np.array(list(loads.values()))
    mean_load = float(all_loads.mean())
    ax.axhline(mean_load, **DASHED, label="mean")
    ax.legend(frameon=False, fontsize=LABEL_POINTS, loc="upper left")
    # Leave space above the bars for the legend, which grows with the number of layouts.
    num_lines = min(len(loads), 9)
    bar_space = 0.86 - 0.065 * num_lines
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return finish(
        ax,
        "shard",
        "ids to look up",
        counts_on_x=True,
        ylim=(0, all_loads.max() / bar_space),
    )


@validated
def plot_stack_bytes(
    sizes: Mapping[str, tuple[int, int]],
    *,
    ax: Axes | None = None,
    **bar_kwargs: object,
) -> Axes:
    """Draws a bar for each stack, with megabytes of embeddings, then megabytes of padding.

    The share of padding is written beside each bar, in percent.

    Args:
      sizes: bytes of embeddings and bytes of padding of each stack, as `stack_bytes` returns them.
        The bar of the first stack is on top.
      ax: the axes to draw on. If None, the function creates a new figure.
      **bar_kwargs: options of `Axes.barh`, for all bars.
    """
    ax = axes_or_new(ax)
    names = list(sizes)
    num_bytes = np.asarray(list(sizes.values()), np.float64).reshape(-1, 2)
    megabytes = num_bytes / 1e6
    used, padding = megabytes.T
    ends = used + padding
    style = with_defaults(bar_kwargs, color=COLOURS[0], label="embeddings")
    ax.barh(names, used, **style)
    style = with_defaults(bar_kwargs, color=PADDING_COLOUR, label="padding")
    ax.barh(names, padding, left=used, **style)
    for position, end in enumerate(ends):
        share = padding[position] / end
        note(ax, f"{share:.1%} padding", (end, position))
    # Leave space for the notes to the right of the bars.
    longest = max(ends, default=1.0)
    ax.set_xlim(0, 1.6 * longest)
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=LABEL_POINTS)
    return finish(ax, "table (MB over all shards)", "stack")


@validated
def plot_stack_treemap(
    sizes: Mapping[str, tuple[int, int]],
    *,
    ax: Axes | None = None,
    **box_kwargs: object,
) -> Axes:
    """Draws a treemap of all stacks: the area of a rectangle shows the bytes of a stack.

    The grey part of each rectangle shows the padding of the stack.

    Args:
      sizes: bytes of embeddings and bytes of padding of each stack, as `stack_bytes` returns them.
      ax: the axes to draw on. If None, the function creates a new figure.
      **box_kwargs: options of the rectangles.
    """
    ax = axes_or_new(ax, (7.2, 4.2))
    ax.legend(
        handles=[
            Patch(facecolor=COLOURS[0], label="embeddings"),
            Patch(facecolor=PADDING_COLOUR, label="padding"),
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    areas = [used + padding for used, padding in sizes.values()]
    total = sum(areas)
    total_padding = sum(padding for _, padding in sizes.values())
    # `treemap` needs the size of the axes in inches, which the layout engine decides when it draws.
    # Set labels and legend before the axes are measured, because they take space from the axes.
    finish(ax, "area", "one rectangle per stack", xticks=[], yticks=[])
    figure = ax.figure.canvas.figure
    figure.draw_without_rendering()
    width = ax.bbox.width / figure.dpi
    height = ax.bbox.height / figure.dpi
    boxes = treemap(areas, width, height)
    used_style = with_defaults(box_kwargs, facecolor=COLOURS[0], edgecolor="white", lw=1.5)
    padding_style = with_defaults(box_kwargs, facecolor=PADDING_COLOUR, edgecolor="white", lw=1.5)
    for (name, (used, padding)), box in zip(sizes.items(), boxes.tolist(), strict=True):
        left, bottom, box_width, box_height = box
        share = used / max(used + padding, 1)
        used_width = box_width * share
        used_box = Rectangle((left, bottom), used_width, box_height, **used_style)
        ax.add_patch(used_box)
        padding_left = left + used_width
        padding_width = box_width * (1 - share)
        padding_box = Rectangle((padding_left, bottom), padding_width, box_height, **padding_style)
        ax.add_patch(padding_box)
        megabytes = (used + padding) / 1e6
        full_text = f"{name}\n{megabytes:,.1f} MB\n{1 - share:.0%} padding"
        for text in (full_text, name):
            lines = text.splitlines()
            # Approximate width of a letter and height of a line in inches, at a font size of 9
            # points.
            text_width = 0.075 * max(map(len, lines))
            text_height = 0.17 * len(lines)
            if used_width > text_width and box_height > text_height:
                ax.text(
                    left + used_width / 2,
                    bottom + box_height / 2,
                    text,
                    fontsize=LABEL_POINTS,
                    ha="center",
                    va="center",
                    color="white",
                )
                break
    share = total_padding / total
    xlabel = f"area: {total / 1e6:,.1f} MB over all shards, {share:.0%} of it padding"
    ax.set(xlabel=xlabel, xlim=(0, width), ylim=(0, height))
    return ax
