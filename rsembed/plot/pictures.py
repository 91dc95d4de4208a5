"""Plots of losses, cache misses, bytes and speed, and functions that compute the plotted data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.plot.drawing import (
    COLOURS,
    MUTED,
    axes_or_new,
    colour_of,
    finish,
    label_ends,
    label_points,
    line_look,
    marker_look,
    next_colour,
    note,
    reference_lines,
    with_defaults,
)

# Functions that compute numbers to plot


@validated
def running_mean(
    values: Num[np.ndarray, " steps"],
    window: PositiveInt,
) -> Float[np.ndarray, " steps"]:
    """The mean of each value and of up to `window - 1` values before it.

    Raises: ValueError: `window` is below 1.

    Example:
      >>> running_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
      [1.0, 2.0, 4.0]
    """
    sums = np.cumsum(values, dtype=np.float64)
    sums[window:] -= sums[:-window].copy()
    window_lengths = np.minimum(np.arange(1, len(sums) + 1), window)
    return sums / window_lengths


@validated
def nearest_neighbours(
    table: Float[np.ndarray, "rows dim"],
    ids: Int[np.ndarray, " queries"] | Sequence[int],
    k: PositiveInt,
) -> tuple[Int[np.ndarray, "queries k"], Float[np.ndarray, "queries k"]]:
    """For each query, the `k` rows with the largest cosine similarity, and these similarities.

    The queried row itself is not among its neighbours.

    Args:
      table: the embedding table, or some rows of a table.
      ids: row indices of the queries.
      k: number of neighbours for each query, less than the number of rows.

    Raises: ValueError: `k` or an id is out of range, or the table has numbers that are not finite.

    Example:
      >>> ids, cosines = nearest_neighbours(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), [0], 1)
      >>> ids.tolist(), cosines.round(2).tolist()
      ([[2]], [[0.89]])
    """
    if not k < len(table):
        raise ValueError(
            f"nearest_neighbours: k={k} must be from 1 to {len(table) - 1}, the other rows of the table."
        )
    if not np.isfinite(table).all():
        raise ValueError(
            "nearest_neighbours: the table has numbers that are not finite; leave their rows out."
        )
    queries = np.asarray(ids, np.int64)
    outside = queries[(queries < 0) | (queries >= len(table))]
    if len(outside):
        raise ValueError(
            f"nearest_neighbours: id {outside[0]} is none of the rows 0 to {len(table) - 1} of the table."
        )
    rows = np.asarray(table, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    divisors = np.where(norms > 0, norms, 1.0)
    unit = table / divisors
    cosines = unit[queries] @ unit.T
    query_numbers = np.arange(len(queries))
    cosines[query_numbers, queries] = -np.inf
    most_similar_first = np.argsort(-cosines, axis=1, kind="stable")
    nearest = most_similar_first[:, :k]
    nearest_cosines = np.take_along_axis(cosines, nearest, axis=1)
    return nearest, nearest_cosines


@validated
def principal_plane(
    vectors: Float[np.ndarray, "points dim"],
) -> tuple[Float[np.ndarray, "points 2"], Float[np.ndarray, " 2"]]:
    """Coordinates of points in their plane of largest variance, and the variance along each axis.

    The variances are fractions of the total variance of the points. The sign of an axis is
    chosen so that the coordinate with the largest absolute value is positive.

    Raises: ValueError: there are fewer than two points or columns, or a number is not finite.
    """
    shape = np.shape(vectors)
    if min(shape) < 2 or not np.isfinite(vectors).all():
        raise ValueError(
            f"principal_plane: needs two points of two finite columns, got shape {shape}."
        )
    means = np.mean(vectors, axis=0)
    centred = np.asarray(vectors, np.float64) - means
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    scales = singular[:2]
    coordinates = left[:, :2] * scales
    furthest_point = np.abs(coordinates).argmax(axis=0)
    largest = coordinates[furthest_point, [0, 1]]
    signs = np.sign(largest)
    has_no_extent = scales == 0
    coordinates *= signs + has_no_extent
    total_variance = float(np.sum(singular**2))
    variance = max(total_variance, 1e-300)
    variance_shares = scales**2 / variance
    return coordinates, variance_shares


# Plots of losses and limits during training


@validated
def plot_loss(
    losses: Num[np.ndarray, " points"] | Sequence[float],
    *,
    steps: Num[np.ndarray, " points"] | Sequence[int] | None = None,
    window: PositiveInt = 1,
    references: Mapping[str, float] | None = None,
    ylabel: str = "loss (nats)",
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots a loss over training steps, with dashed lines at reference losses.

    To add a curve, call `plot_loss` again with the same `ax`.

    Args:
      losses: a loss for each point.
      steps: the step after which each loss was measured. If None, the steps are 1, 2, 3, ….
      window: number of losses to average. Each point shows the mean of a loss and of the
        `window - 1` losses before it. With 1, the default, the curve is not smoothed.
      references: losses to compare with, by name, such as `{"unigram entropy": 5.3}`.
      ylabel: label of the y axis, with the unit of the loss.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: options of the curve. The option `label` adds a legend.

    Raises: ValueError: `steps` and `losses` differ in length.
    """
    ax = axes_or_new(ax)
    values = running_mean(np.asarray(losses, np.float64), window)
    if steps is None:
        steps = np.arange(1, len(values) + 1)
    if len(steps) != len(values):
        raise ValueError(
            f"plot_loss: {len(steps)} steps for {len(values)} losses; give one for each."
        )
    style = with_defaults(line_kwargs, color=next_colour(ax))
    ax.plot(steps, values, **style)
    reference_lines(ax, references)
    has_legend = "label" in line_kwargs
    return finish(ax, "training step", ylabel, counts_on_x=True, legend=has_legend)


@validated
def plot_row_path(
    paths: Mapping[str, Num[np.ndarray, " steps"]],
    *,
    lookups: Int[np.ndarray, " times"] | Sequence[int] = (),
    ylabel: str = "one entry of the row (no unit)",
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots how training changes one value of a table row, with one curve for each optimizer.

    A grey mark shows every step that looks the row up.

    Args:
      paths: for each optimizer name, an array with the value after steps 1, 2, 3, ….
      lookups: the steps that look the row up, counted from 1.
      ylabel: label of the y axis, with the unit of the value.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: options of all curves.
    """
    ax = axes_or_new(ax)
    for step in lookups:
        ax.axvline(step, color="#d9d9d9", linewidth=3, zorder=0)
    for number, (name, values) in enumerate(paths.items()):
        steps = np.arange(1, len(values) + 1)
        look = line_look(number)
        style = with_defaults(line_kwargs, **look, linewidth=2.0, label=name)
        ax.plot(steps, values, **style)
    xlabel = "training step"
    if len(lookups):
        xlabel = "training step (grey: the row is looked up)"
    finish(ax, xlabel, ylabel, counts_on_x=True)
    # Without an opaque legend, the grey marks would cross its text.
    ax.legend(framealpha=1.0, edgecolor="none")
    return ax


@validated
def plot_loss_against_state(
    results: Mapping[str, tuple[float, float]],
    *,
    references: Mapping[str, float] | None = None,
    ylabel: str = "validation loss (nats)",
    ax: Axes | None = None,
    **scatter_kwargs: object,
) -> Axes:
    """Plots the loss of each optimizer against the bytes of optimizer state.

    Args:
      results: for each optimizer name, the pair (bytes of optimizer state per row, loss).
      references: losses to compare with, by name, such as the lowest that can be reached.
      ylabel: label of the y axis, with the unit of the loss.
      ax: the axes to draw on. If None, the function creates a new figure.
      **scatter_kwargs: options of the points.
    """
    ax = axes_or_new(ax)
    names = list(results)
    points = np.array(list(results.values()), np.float64).reshape(-1, 2)
    state_bytes, losses = points.T
    style = with_defaults(
        scatter_kwargs,
        color=COLOURS[0],
        s=45,
        zorder=3,
    )
    ax.scatter(state_bytes, losses, **style)
    reference_lines(ax, references)
    ax.margins(x=0.2, y=0.15)
    low, high = ax.get_xlim()
    # Drop the ticks in the left margin, because a number of bytes cannot be negative.
    ticks = [tick for tick in ax.get_xticks() if 0 <= tick <= high]
    ax.set_xticks(ticks)
    xlabel = "optimizer state (bytes per row)"
    finish(ax, xlabel, ylabel, xlim=(low, high))
    label_points(ax, points, names)
    return ax


@validated
def plot_limits(
    observed: Num[np.ndarray, " steps"] | Sequence[int],
    limits: Num[np.ndarray, " steps"] | Sequence[int] | int,
    *,
    ylabel: str = "ids in the fullest partition",
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots a count that was observed in each batch, and the limit for this count.

    Crosses mark batches that exceed the limit. Without minibatching, preprocessing drops ids of a
    batch that exceeds a limit, or raises an error.

    Args:
      observed: the count in each batch, such as the number of ids in the fullest partition.
      limits: the limit for each batch, or one limit for all batches.
      ylabel: label of the y axis, which names the count.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: Matplotlib options for the curve that shows `observed`.

    Raises: ValueError: `observed` is empty, or `limits` has a different length than `observed`.
    """
    ax = axes_or_new(ax)
    needed = np.asarray(observed)
    has_limits = np.shape(limits) in ((), needed.shape)
    if not needed.size or not has_limits:
        raise ValueError(
            f"plot_limits: {np.size(limits)} limits for {needed.size} batches; give one, or one for each."
        )
    steps = np.arange(1, len(needed) + 1)
    allowed = np.broadcast_to(np.asarray(limits), needed.shape)
    ax.step(
        steps,
        allowed,
        where="post",
        color=COLOURS[1],
        linewidth=2.0,
        label="limit",
    )
    style = with_defaults(
        line_kwargs,
        color=COLOURS[0],
        linewidth=1.5,
        label="observed",
    )
    ax.plot(steps, needed, **style)
    is_above = needed > allowed
    if is_above.any():
        steps_above = steps[is_above]
        needed_above = needed[is_above]
        ax.plot(steps_above, needed_above, "kx", ms=8, mew=2, label="over the limit")
    highest = max(needed.max(), allowed.max())
    finish(ax, "training step", ylabel, counts_on_x=True, ylim=(0, 1.2 * highest))
    # `ylim` leaves space for the legend above the curves.
    ax.legend(frameon=False, loc="upper left", ncols=3)
    return ax


# Plots of cache misses, table sizes and speed


@validated
def plot_miss_ratio(
    measured: Mapping[str, Mapping[int, float]],
    *,
    xlabel: str = "cache (rows)",
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots the share of lookups that miss a cache against the cache size, on a logarithmic axis.

    Args:
      measured: for each curve name, a mapping from cache size to the share (0 to 1) of lookups
        that miss a cache of this size.
      xlabel: label of the x axis, with the unit of the cache sizes.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: options of all curves.
    """
    ax = axes_or_new(ax)
    all_sizes: set[int] = set()
    for number, (name, points) in enumerate(measured.items()):
        sizes, shares = zip(*sorted(points.items()), strict=True)
        all_sizes.update(sizes)
        percent = 100 * np.asarray(shares)
        look = marker_look(number)
        style = with_defaults(line_kwargs, **look)
        ax.semilogx(sizes, percent, label=name, **style)
    ticks = sorted(all_sizes)
    tick_labels = [f"{size:,}" for size in ticks]
    ax.set_xticks(ticks, tick_labels)
    ax.minorticks_off()
    return finish(ax, xlabel, "lookups that miss (%)", ylim=(0, None), legend=True)


@validated
def plot_against_bytes(
    results: Mapping[str, Sequence[tuple[float, float]]],
    *,
    references: Mapping[str, float] | None = None,
    ylabel: str = "relative error",
    ax: Axes | None = None,
) -> Axes:
    """Plots results of several methods, such as errors, against the size of the table in bytes.

    The axis of the bytes is logarithmic. The name of each method is written beside the last point
    of its curve.

    Args:
      results: for each method name, pairs `(bytes of the table, result)`. The result in each pair
        is a number, such as a reconstruction error or a loss. If a method has several results for
        the same number of bytes, for example from three seeds, the plot shows their mean, and a
        vertical line from the lowest to the highest result.
      references: values to compare with, by name, drawn as dashed lines.
      ylabel: label of the y axis, with the unit of the results.
      ax: the axes to draw on. If None, the function creates a new figure.
    """
    ax = axes_or_new(ax)
    curves = []
    ends = []
    colours = []
    for number, (name, points) in enumerate(results.items()):
        num_bytes, values = np.array(points, np.float64).T
        sizes = np.unique(num_bytes)
        summaries = []
        for size in sizes:
            repeated = values[num_bytes == size]
            summaries.append((repeated.mean(), repeated.min(), repeated.max()))
        means, lowest, highest = np.array(summaries).T
        colour = colour_of(number)
        look = marker_look(number)
        ax.vlines(sizes, lowest, highest, color=colour, linewidth=1.5)
        ax.plot(sizes, means, **look, linewidth=1.5, label=name)
        curves.append((sizes, means))
        ends.append((sizes[-1], means[-1]))
        colours.append(colour)
    reference_lines(ax, references)
    # `set_xscale` replaces the formatter, so `set_xscale` comes before `set_major_formatter`.
    ax.set_xscale("log")
    ax.margins(x=0.25)
    ax.xaxis.set_major_formatter(FuncFormatter(_bytes_label))
    finish(ax, "table (bytes)", ylabel)
    label_ends(ax, ends, list(results), colours=colours, curves=curves)
    return ax


def _bytes_label(num_bytes: float, _: int) -> str:
    """Bytes with their unit, such as "3 kB"."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


class Work(NamedTuple):
    """Lower bounds for an operation: number of arithmetic operations, and number of bytes moved.

    Attributes:
      flops: number of additions and multiplications.
      num_bytes: number of bytes that are read from and written to memory, if every byte is moved
        only once.
    """

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: additions and multiplications per byte."""
        return self.flops / self.num_bytes


@validated
def lookup_work(
    num_ids: NonNegativeInt,
    num_distinct_rows: NonNegativeInt,
    num_bags: NonNegativeInt,
    dim: NonNegativeInt,
    *,
    value_bytes: int = 4,
) -> Work:
    """Lower bounds for a pooled lookup: number of arithmetic operations, and number of bytes moved.

    For each id, every value of the id's row costs one multiplication and one addition. Every id and
    every distinct row is read once, and every pooled output is written once.

    Args:
      num_ids: number of ids, duplicates included.
      num_distinct_rows: number of distinct rows among the ids.
      num_bags: number of pooled outputs.
      dim: number of columns of the table.
      value_bytes: bytes of each number in the table, 4 (float32) by default.

    Example:
      >>> lookup_work(num_ids=1000, num_distinct_rows=500, num_bags=100, dim=64).intensity
      0.812...
    """
    moved = num_distinct_rows * dim * value_bytes + num_ids * 4 + num_bags * dim * 4
    return Work(2.0 * num_ids * dim, float(moved))


@validated
def roof(
    intensity: object,
    bytes_per_second: Annotated[float, "(0, inf)"],
    flops_per_second: Annotated[float, "(0, inf)"],
) -> Any:
    """Upper bound of a machine's operations per second, for a given arithmetic intensity.

    The result is the minimum of `intensity * bytes_per_second` and `flops_per_second`.

    Args:
      intensity: operations per byte that is read or written, as a number or an array.
      bytes_per_second: memory bandwidth of the machine.
      flops_per_second: peak arithmetic throughput of the machine.

    Source: Williams, Waterman and Patterson (2009), "Roofline: An insightful visual performance
      model".
    """
    return np.minimum(np.asarray(intensity, np.float64) * bytes_per_second, flops_per_second)


@validated
def plot_roofline(
    work: Work,
    seconds: Mapping[str, Annotated[float, "(0, inf)"]],
    *,
    bytes_per_second: Annotated[float, "(0, inf)"],
    flops_per_second: Annotated[float, "(0, inf)"],
    ax: Axes | None = None,
    **line_kwargs: object,
) -> Axes:
    """Plots the speed of several programs for one operation, and the machine's roofline.

    Both axes are logarithmic.

    Args:
      work: number of arithmetic operations and number of bytes moved, from `lookup_work`.
      seconds: for each program name, the running time in seconds.
      bytes_per_second: memory bandwidth, for example as measured with a large copy.
      flops_per_second: peak arithmetic throughput of the machine.
      ax: the axes to draw on. If None, the function creates a new figure.
      **line_kwargs: Matplotlib options for the roofline.
    """
    ax = axes_or_new(ax)
    intensity = work.intensity
    ridge = flops_per_second / bytes_per_second
    first = min(intensity, ridge) / 8
    last = max(intensity, ridge) * 4
    span = np.geomspace(first, last, 200)
    heights = roof(span, bytes_per_second, flops_per_second) / 1e9
    style = with_defaults(line_kwargs, color=MUTED, linewidth=2.0)
    ax.loglog(span, heights, **style)
    ax.axvline(intensity, color=MUTED, linewidth=0.8, linestyle=":")
    best = roof(intensity, bytes_per_second, flops_per_second)
    points = []
    labels = []
    colours = []
    for number, (name, time) in enumerate(seconds.items()):
        speed = work.flops / time
        label = f"{name}: {100 * speed / best:.0f}% of the roof"
        point = (intensity, speed / 1e9)
        look = marker_look(number)
        ax.plot(*point, **look, linestyle="none", markersize=9, label=label)
        points.append(point)
        labels.append(label)
        colours.append(colour_of(number))
    bandwidth = f"{bytes_per_second / 1e9:.0f} GB/s"
    on_slope = (span[20], heights[20])
    note(ax, bandwidth, on_slope, xytext=(-4, 6), ha="right", va="baseline")
    finish(ax, "operations per byte of memory", "10⁹ operations per second")
    label_ends(ax, points, labels, colours=colours, curves=[(span, heights)])
    return ax
