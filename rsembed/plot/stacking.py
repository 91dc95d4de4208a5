"""Pictures of a stacking plan: how evenly the shards are loaded, and what the padding costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from rsembed.plot.pictures import COLOURS, LABEL_POINTS, MUTED, _axes, _options
from rsembed.stacking import StackingPlan

PADDING_COLOUR = "#d0d0d0"

# Numbers


def load_skew(load: Int[np.ndarray, " shards"]) -> float:
    """The largest load over the mean: 1 is even, and the busiest shard is late by this factor.

    Raises:
      ValueError: there is no load.

    Example:
      >>> load_skew(np.array([6, 2, 2, 2]))
      2.0
    """
    total = int(np.sum(load))
    if total == 0:
        raise ValueError("load_skew: no shard has anything to do; count the ids of at least one batch.")
    return float(np.max(load) * len(load) / total)


def stack_bytes(plan: StackingPlan) -> dict[str, tuple[int, int]]:
    """Bytes over all shards that hold embeddings and that are padding, by stack; optimizer state not counted."""
    sizes = {}
    for stack in plan.stacks:
        values = stack.spec.stack_vocab_size * stack.spec.stack_embedding_dim
        used = sum(table.rows * table.dim for table in stack.tables) * (stack.table_bytes // values)
        sizes[stack.name] = (used, stack.table_bytes - used)
    return sizes


# Drawing


def plot_shard_load(
    loads: Mapping[str, Int[np.ndarray, " shards"]], *, ax: Axes | None = None, **bar_kwargs: Any
) -> Axes:
    """Ids that every shard looks up, bars side by side for each layout, and the even load as a line.

    Args:
      loads: one array per layout of the same ids, see `StackingPlan.shard_load`; the names and their `load_skew` make
        the legend.
      ax: None makes a figure.
      **bar_kwargs: for all bars.

    Raises:
      ValueError: there is no load, or the layouts have different numbers of shards.
    """
    num_shards = {len(load) for load in loads.values()}
    if len(num_shards) != 1:
        raise ValueError(f"plot_shard_load: needs loads of one number of shards, got {sorted(num_shards)}.")
    ax = _axes(ax)
    shards, width = np.arange(num_shards.pop()), 0.8 / len(loads)
    for number, (name, load) in enumerate(loads.items()):
        left = shards + (number - (len(loads) - 1) / 2) * width
        label = f"{name}: busiest {load_skew(load):.2f} × mean"
        colour = COLOURS[number % len(COLOURS)]
        ax.bar(left, load, **_options(bar_kwargs, width=width, color=colour, label=label))
    even = float(np.mean([np.mean(load) for load in loads.values()]))
    ax.axhline(even, color=MUTED, linestyle="--", linewidth=1.2, label="mean")
    ax.set(xlabel="shard", ylabel="ids to look up")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize=LABEL_POINTS)
    return ax


def plot_stack_bytes(sizes: Mapping[str, tuple[int, int]], *, ax: Axes | None = None, **bar_kwargs: Any) -> Axes:
    """One bar per stack: megabytes of embeddings, then the padding behind them, with its share in percent.

    Args:
      sizes: bytes used and bytes of padding, by stack, as `stack_bytes` returns them; the first stack is on top.
      ax: None makes a figure.
      **bar_kwargs: for all bars.
    """
    ax = _axes(ax)
    names = list(sizes)
    used, padding = np.asarray([sizes[name] for name in names], np.float64).reshape(-1, 2).T / 1e6
    ax.barh(names, used, **_options(bar_kwargs, color=COLOURS[0], label="embeddings"))
    ax.barh(names, padding, left=used, **_options(bar_kwargs, color=PADDING_COLOUR, label="padding"))
    for position, (own, empty) in enumerate(zip(used, padding, strict=True)):
        ax.annotate(
            f"{empty / (own + empty):.1%} padding",
            (own + empty, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS,
            color=MUTED,
        )
    ax.set(xlabel="table (MB over all shards)", ylabel="stack")
    ax.set_xlim(0, 1.6 * max(used + padding, default=1.0))  # room for the text behind the bars
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=LABEL_POINTS)
    return ax
