"""Pictures of how lookups spread over ids and of how tables fill their stacks: what sizes buffers and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import StrMethodFormatter

from rsembed.checks import PositiveInt, validated
from rsembed.fdo.ids import check_shares
from rsembed.fdo.ids import zipf_exponent as zipf_exponent
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
def plot_id_frequency(counts: Num[np.ndarray, " vocab"], *, ax: Axes | None = None, **line_kwargs: Any) -> Axes:
    """Plots how often ids occur, most frequent first, on logarithmic axes; ids never seen are left out.

    Call it again with the same `ax` for more curves.

    Args:
      counts: occurrences of each id, such as `np.bincount` gives.
      ax: the axes to draw on; None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.
    """
    ax = axes_or_new(ax)
    shares = check_shares("plot_id_frequency: counts", counts)
    seen = np.sort(shares[shares > 0])[::-1]
    ranks = _drawn_ranks(len(seen))
    look = with_defaults(line_kwargs, color=next_colour(ax), linewidth=2.0)
    ax.loglog(ranks, seen[ranks - 1], **look)
    xlabel = "rank of the id (1 = most frequent)"
    return finish(ax, xlabel, "occurrences", legend="label" in line_kwargs)


@validated
def plot_coverage(
    counts: Num[np.ndarray, " vocab"],
    *,
    num_rows: PositiveInt | None = None,
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """Plots the share of lookups that read the hottest rows; the axis of rows is logarithmic.

    Call it again with the same `ax` for more curves.

    Args:
      counts: lookups of each row; rows without a lookup count as well. Probabilities do, too.
      num_rows: rows of the table, where `counts` leaves out rows without a lookup. None takes the
        length of `counts`.
      ax: the axes to draw on; None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.

    Raises: ValueError: a count is negative, all are 0, or there are more counts than rows.
    """
    ax = axes_or_new(ax)
    hottest_first = np.sort(check_shares("plot_coverage: counts", counts))[::-1]
    if num_rows is None:
        num_rows = len(hottest_first)
    if num_rows < len(hottest_first):
        raise ValueError(f"plot_coverage: there are {len(hottest_first)} counts, but num_rows={num_rows}.")
    served = 100 * np.cumsum(hottest_first) / hottest_first.sum()
    ranks = _drawn_ranks(len(served))
    served = served[ranks - 1]
    if num_rows > len(hottest_first):  # the other rows serve nothing
        ranks = np.append(ranks, num_rows)
        served = np.append(served, 100.0)
    look = with_defaults(line_kwargs, color=next_colour(ax), linewidth=2.0)
    ax.semilogx(100 * ranks / num_rows, served, **look)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    labels = ("hottest rows (% of the table)", "lookups they serve (%)")
    return finish(ax, *labels, legend="label" in line_kwargs, ylim=(0, 103))


def _drawn_ranks(num_ranks: int) -> Int[np.ndarray, " ranks"]:
    """Ranks from 1 on to draw: all of them, or those that a logarithmic axis can tell apart."""
    if num_ranks <= MOST_DRAWN_RANKS:
        return np.arange(1, num_ranks + 1)
    ranks = np.rint(np.geomspace(1, num_ranks, MOST_DRAWN_RANKS)).astype(np.int64)
    return np.unique(ranks)


# Numbers


@validated
def stack_bytes(plan: StackingPlan) -> dict[str, tuple[int, int]]:
    """Bytes over all shards that hold embeddings and that are padding, by stack; optimizer state not counted."""
    sizes = {}
    for stack in plan.stacks:
        values = stack.spec.stack_vocab_size * stack.spec.stack_embedding_dim
        used = sum(table.rows * table.dim for table in stack.tables) * (stack.table_bytes // values)
        sizes[stack.name] = (used, stack.table_bytes - used)
    return sizes


@validated
def treemap(
    sizes: Sequence[float] | Float[np.ndarray, " sizes"], width: float, height: float
) -> Float[np.ndarray, "sizes 4"]:
    """Rectangles `(x, y, width, height)` that tile a box, with areas in proportion to `sizes`, in their order.

    Largest first, rows of rectangles are filled along the shorter side of what is left, as long as that makes them
    squarer.

    Raises: ValueError: a size is negative, or all are zero.
    Source: Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000.

    Example:
      >>> treemap([3.0, 1.0], 4.0, 1.0).tolist()
      [[0.0, 0.0, 3.0, 1.0], [3.0, 0.0, 1.0, 1.0]]
    """
    areas = check_shares("treemap: sizes", sizes)
    areas = areas * (width * height / areas.sum())
    boxes, waiting = np.zeros((len(areas), 4)), np.argsort(-areas, kind="stable").tolist()
    x, y = 0.0, 0.0
    while waiting and areas[waiting[0]] > 0:
        side = min(width, height)
        count = 1
        while count < len(waiting) and _worst(areas[waiting[: count + 1]], side) <= _worst(
            areas[waiting[:count]], side
        ):
            count += 1
        row, waiting = waiting[:count], waiting[count:]
        depth, along = areas[row].sum() / side, 0.0
        for place in row:
            length = areas[place] / depth
            boxes[place] = (x, y + along, depth, length) if width >= height else (x + along, y, length, depth)
            along += length
        x, y, width, height = (
            (x + depth, y, width - depth, height) if width >= height else (x, y + depth, width, height - depth)
        )
    return boxes


def _worst(areas: np.ndarray, side: float) -> float:
    """Largest ratio of sides among rectangles of these areas that fill one row along `side`."""
    depth = areas.sum() / side
    ratios = areas / depth**2
    return float(np.max(np.maximum(ratios, 1 / np.maximum(ratios, 1e-12))))


# Drawing


@validated
def plot_shard_load(
    loads: Mapping[str, Int[np.ndarray, " shards"]], *, ax: Axes | None = None, **bar_kwargs: Any
) -> Axes:
    """Ids that every shard looks up, bars side by side for each layout, and the even load as a line.

    Args:
      loads: one array per layout of the same ids, see `StackingPlan.shard_load`; the legend tells how many times the
        mean load the busiest shard has.
      ax: None makes a figure.
      **bar_kwargs: for all bars.

    Raises: ValueError: a layout has no load, or the layouts have different numbers of shards.
    """
    num_shards = {len(load) for load in loads.values()}
    if len(num_shards) != 1:
        raise ValueError(f"plot_shard_load: needs loads of one number of shards, got {sorted(num_shards)}.")
    ax = axes_or_new(ax)
    shards, width = np.arange(num_shards.pop()), 0.8 / len(loads)
    for number, (name, load) in enumerate(loads.items()):
        left = shards + (number - (len(loads) - 1) / 2) * width
        shares = check_shares("plot_shard_load: load", load)
        label = f"{name}: busiest {shares.max() / shares.mean():.2f} × mean"
        ax.bar(left, load, **with_defaults(bar_kwargs, width=width, color=colour_of(number), label=label))
    ax.axhline(float(np.mean(list(loads.values()))), **DASHED, label="mean")
    ax.legend(frameon=False, fontsize=LABEL_POINTS, loc="upper left")
    most = max(int(load.max()) for load in loads.values())
    top = most * (1.12 + 0.08 * len(loads))  # room for the legend above the bars
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return finish(ax, "shard", "ids to look up", counts_on_x=True, ylim=(0, top))


@validated
def plot_stack_bytes(sizes: Mapping[str, tuple[int, int]], *, ax: Axes | None = None, **bar_kwargs: Any) -> Axes:
    """One bar per stack: megabytes of embeddings, then the padding behind them, with its share in percent.

    Args:
      sizes: bytes used and bytes of padding, by stack, as `stack_bytes` returns them; the first stack is on top.
      ax: None makes a figure.
      **bar_kwargs: for all bars.
    """
    ax = axes_or_new(ax)
    names = list(sizes)
    used, padding = np.asarray([sizes[name] for name in names], np.float64).reshape(-1, 2).T / 1e6
    ax.barh(names, used, **with_defaults(bar_kwargs, color=COLOURS[0], label="embeddings"))
    ax.barh(names, padding, left=used, **with_defaults(bar_kwargs, color=PADDING_COLOUR, label="padding"))
    for position, (own, empty) in enumerate(zip(used, padding, strict=True)):
        note(ax, f"{empty / (own + empty):.1%} padding", (own + empty, position))
    ax.set_xlim(0, 1.6 * max(used + padding, default=1.0))  # room for the text behind the bars
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=LABEL_POINTS)
    return finish(ax, "table (MB over all shards)", "stack")


@validated
def plot_stack_treemap(sizes: Mapping[str, tuple[int, int]], *, ax: Axes | None = None, **box_kwargs: Any) -> Axes:
    """The bytes of all stacks as areas: a rectangle per stack, its padding as the grey strip at the right.

    Args:
      sizes: bytes used and bytes of padding, by stack, as `stack_bytes` returns them.
      ax: None makes a figure.
      **box_kwargs: for the rectangles.
    """
    ax = axes_or_new(ax, (7.2, 4.2))
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in (COLOURS[0], PADDING_COLOUR)]
    ax.legend(handles, ["embeddings", "padding"], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    ax.set(xticks=[], yticks=[])
    figure = ax.figure.canvas.figure
    figure.draw_without_rendering()  # layout engines decide late how large the axes are, and with them what is square
    width, height = ax.bbox.width / figure.dpi, ax.bbox.height / figure.dpi
    boxes = treemap([used + padding for used, padding in sizes.values()], width, height)
    for (name, (used, padding)), (left, bottom, across, up) in zip(sizes.items(), boxes.tolist(), strict=True):
        share = used / max(used + padding, 1)
        parts = ((left, across * share, COLOURS[0]), (left + across * share, across * (1 - share), PADDING_COLOUR))
        for start, length, colour in parts:
            look = with_defaults(box_kwargs, facecolor=colour, edgecolor="white", lw=1.5)
            ax.add_patch(Rectangle((start, bottom), length, up, **look))
        wanted = f"{name}\n{(used + padding) / 1e6:,.1f} MB\n{1 - share:.0%} padding"
        for text in (wanted, name):
            lines = text.splitlines()
            if across * share > 0.075 * max(map(len, lines)) and up > 0.17 * len(lines):  # inches at 9 points
                place = (left + across * share / 2, bottom + up / 2)
                ax.text(*place, text, ha="center", va="center", color="white", fontsize=LABEL_POINTS)
                break
    total = sum(used + padding for used, padding in sizes.values())
    padding_total = sum(padding for _, padding in sizes.values())
    ax.set(xlim=(0, width), ylim=(0, height))
    xlabel = f"area: {total / 1e6:,.1f} MB over all shards, {padding_total / total:.0%} of it padding"
    return finish(ax, xlabel, "one rectangle per stack")
