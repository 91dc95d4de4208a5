"""Pictures of training, tables, caches and speed, and the numbers that they show."""

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

# Numbers


@validated
def running_mean(values: Num[np.ndarray, " steps"], window: PositiveInt) -> Float[np.ndarray, " steps"]:
    """The mean of each value and the up to `window - 1` values before it.

    Raises: ValueError: the window holds nothing.

    Example:
      >>> running_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
      [1.0, 2.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


@validated
def nearest_neighbours(
    table: Float[np.ndarray, "rows dim"], ids: Int[np.ndarray, " queries"] | Sequence[int], k: PositiveInt
) -> tuple[Int[np.ndarray, "queries k"], Float[np.ndarray, "queries k"]]:
    """The `k` rows of `table` most similar to each row of `ids`, itself left out, and their cosines.

    Args:
      table: the embedding table, or the part of it among which to search.
      ids: rows of `table`.
      k: neighbours per row, fewer than the table has rows.

    Raises: ValueError: `k` is out of range, an id is no row, or the table has numbers that are not finite.

    Example:
      >>> ids, cosines = nearest_neighbours(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), [0], 1)
      >>> ids.tolist(), cosines.round(2).tolist()
      ([[2]], [[0.89]])
    """
    if not k < len(table):
        raise ValueError(f"nearest_neighbours: k={k} must be from 1 to {len(table) - 1}, the other rows of the table.")
    if not np.isfinite(table).all():
        raise ValueError("nearest_neighbours: the table has numbers that are not finite; leave their rows out.")
    norms = np.linalg.norm(np.asarray(table, np.float64), axis=1, keepdims=True)
    queries, unit = np.asarray(ids, np.int64), table / np.where(norms > 0, norms, 1.0)
    if len(outside := queries[(queries < 0) | (queries >= len(table))]):
        raise ValueError(f"nearest_neighbours: id {outside[0]} is none of the rows 0 to {len(table) - 1} of the table.")
    cosines = unit[queries] @ unit.T
    cosines[np.arange(len(queries)), queries] = -np.inf
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return nearest, np.take_along_axis(cosines, nearest, axis=1)


@validated
def principal_plane(
    vectors: Float[np.ndarray, "points dim"],
) -> tuple[Float[np.ndarray, "points 2"], Float[np.ndarray, " 2"]]:
    """Coordinates in the plane in which the points vary most, and the shares of variance on its two axes.

    The sign of an axis is chosen so that its coordinate of largest size is positive.

    Raises: ValueError: there are fewer than two points or columns.
    """
    if min(np.shape(vectors)) < 2 or not np.isfinite(vectors).all():
        raise ValueError(f"principal_plane: needs two points of two finite columns, got shape {np.shape(vectors)}.")
    centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    coordinates = left[:, :2] * singular[:2]
    coordinates *= np.sign(coordinates[np.abs(coordinates).argmax(axis=0), [0, 1]] + 0.0) + (singular[:2] == 0)
    return coordinates, singular[:2] ** 2 / max(float(np.sum(singular**2)), 1e-300)


# Training


@validated
def plot_loss(
    losses: Num[np.ndarray, " points"] | Sequence[float],
    *,
    steps: Num[np.ndarray, " points"] | Sequence[int] | None = None,
    window: PositiveInt = 1,
    references: Mapping[str, float] | None = None,
    ylabel: str = "loss (nats)",
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """A loss over training steps, with lines at losses to compare it with.

    Call it again with the same `ax` for more curves.

    Args:
      losses: one value per point.
      steps: where they were measured; None means after steps 1, 2, 3, ….
      window: losses of which each point shows the mean: its own and those before it.
      references: losses of things known, such as `{"unigram entropy": 5.3}`, by the text written at the line.
      ylabel: what the loss is, with its unit.
      ax: None makes a figure.
      **line_kwargs: for the curve, such as `label=`; with it, a legend appears.

    Raises: ValueError: there are not as many steps as losses.
    """
    ax = axes_or_new(ax)
    values = running_mean(np.asarray(losses, np.float64), window)
    if steps is not None and len(steps) != len(values):
        raise ValueError(f"plot_loss: {len(steps)} steps for {len(values)} losses; give one for each.")
    if steps is None:
        steps = np.arange(1, len(values) + 1)
    ax.plot(steps, values, **with_defaults(line_kwargs, color=next_colour(ax)))
    reference_lines(ax, references)
    return finish(ax, "training step", ylabel, counts_on_x=True, legend="label" in line_kwargs)


@validated
def plot_row_path(
    paths: Mapping[str, Num[np.ndarray, " steps"]],
    *,
    lookups: Int[np.ndarray, " times"] | Sequence[int] = (),
    ylabel: str = "one entry of the row (no unit)",
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """Plots how one row moves under different rules, with a mark at every step that looked it up.

    Args:
      paths: values after steps 1, 2, 3, … by the name of the rule.
      lookups: the steps, counted from 1, whose batch held the row.
      ylabel: what the values are.
      ax: None makes a figure.
      **line_kwargs: for all curves.
    """
    ax = axes_or_new(ax)
    for step in lookups:
        ax.axvline(step, color="#d9d9d9", linewidth=3, zorder=0)
    for number, (name, values) in enumerate(paths.items()):
        look = with_defaults(line_kwargs, **line_look(number), linewidth=2.0, label=name)
        ax.plot(np.arange(1, len(values) + 1), values, **look)
    xlabel = "training step (grey: the row is looked up)" if len(lookups) else "training step"
    finish(ax, xlabel, ylabel, counts_on_x=True)
    ax.legend(framealpha=1.0, edgecolor="none")  # the marks do not run through it
    return ax


@validated
def plot_loss_against_state(
    results: Mapping[str, tuple[float, float]],
    *,
    references: Mapping[str, float] | None = None,
    ylabel: str = "validation loss (nats)",
    ax: Axes | None = None,
    **scatter_kwargs: Any,
) -> Axes:
    """Loss of each optimizer against the bytes that it keeps beside a row.

    Args:
      results: `(state bytes per row, loss in nats)` by the name of the rule.
      references: losses to compare with, by name, such as the best that can be reached.
      ylabel: what the loss is, with its unit.
      ax: None makes a figure.
      **scatter_kwargs: for the points.
    """
    ax = axes_or_new(ax)
    state_bytes, losses = np.array(list(results.values()), np.float64).reshape(-1, 2).T
    ax.scatter(state_bytes, losses, **with_defaults(scatter_kwargs, color=COLOURS[0], s=45, zorder=3))
    reference_lines(ax, references)
    ax.margins(x=0.2, y=0.15)
    low, high = ax.get_xlim()
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= high])  # the margin is not for negative bytes
    finish(ax, "optimizer state (bytes per row)", ylabel, xlim=(low, high))
    label_points(ax, np.stack([state_bytes, losses], axis=1), list(results))
    return ax


@validated
def plot_limits(
    observed: Num[np.ndarray, " steps"] | Sequence[int],
    limits: Num[np.ndarray, " steps"] | Sequence[int] | int,
    *,
    ylabel: str = "ids in the fullest partition",
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """Needs of batches against the limit in force; crosses mark batches above it, which lose ids or raise.

    Args:
      observed: the largest count of each batch.
      limits: the limit at each batch, or one for all.
      ylabel: what is counted.
      ax: None makes a figure.
      **line_kwargs: for the observed curve.

    Raises: ValueError: there is no batch, or another number of limits.
    """
    ax = axes_or_new(ax)
    needed = np.asarray(observed)
    if not needed.size or np.shape(limits) not in ((), needed.shape):
        raise ValueError(f"plot_limits: {np.size(limits)} limits for {needed.size} batches; give one, or one for each.")
    steps, allowed = np.arange(1, len(needed) + 1), np.broadcast_to(np.asarray(limits), needed.shape)
    ax.step(steps, allowed, where="post", color=COLOURS[1], linewidth=2.0, label="limit")
    ax.plot(steps, needed, **with_defaults(line_kwargs, color=COLOURS[0], linewidth=1.5, label="observed"))
    above = needed > allowed
    if above.any():
        cross: dict[str, Any] = {"color": "black", "markersize": 8, "markeredgewidth": 2, "label": "over the limit"}
        ax.plot(steps[above], needed[above], "x", **cross)
    top = 1.2 * max(needed.max(), allowed.max())
    finish(ax, "training step", ylabel, counts_on_x=True, ylim=(0, top))
    ax.legend(frameon=False, loc="upper left", ncols=3)  # above all curves
    return ax


# Caches, bytes and speed


@validated
def plot_miss_ratio(
    measured: Mapping[str, Mapping[int, float]],
    *,
    xlabel: str = "cache (rows)",
    ax: Axes | None = None,
    **line_kwargs: Any,
) -> Axes:
    """The share of lookups that caches missed, over their sizes on a logarithmic axis; one curve per kind of cache.

    Args:
      measured: `{name: {rows: share}}`, with shares from 0 to 1.
      xlabel: what the sizes are, with their unit.
      ax: None makes a figure.
      **line_kwargs: for all curves.
    """
    ax, sizes = axes_or_new(ax), sorted({rows for points in measured.values() for rows in points})
    for number, (name, points) in enumerate(measured.items()):
        rows, shares = zip(*sorted(points.items()), strict=True)
        ax.semilogx(rows, 100 * np.asarray(shares), label=name, **with_defaults(line_kwargs, **marker_look(number)))
    ax.set_xticks(sizes, [f"{rows:,}" for rows in sizes])
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
    """Plots the result of each method against its bytes, on a logarithmic axis, with its name beside the last point.

    Args:
      results: `{method: (bytes, value) pairs}`, in any order; such as a reconstruction error or a loss. Of several
        values for the same bytes, such as three seeds', the mean is drawn, and a line from the least to the largest.
      references: `{name: value}`, drawn as dashed lines across.
      ylabel: what the values are, with their unit.
      ax: None makes a figure.
    """
    ax = axes_or_new(ax)
    curves = []
    for number, (name, points) in enumerate(results.items()):
        num_bytes, values = np.array(points, np.float64).T
        sizes = np.unique(num_bytes)
        means, least, largest = ([of(values[num_bytes == size]) for size in sizes] for of in (np.mean, np.min, np.max))
        ax.vlines(sizes, least, largest, color=colour_of(number), linewidth=1.5)
        ax.plot(sizes, means, **marker_look(number), linewidth=1.5, label=name)
        curves.append((sizes, np.array(means)))
    reference_lines(ax, references)
    ax.set_xscale("log")  # sets a formatter of its own
    ax.margins(x=0.25)
    ax.xaxis.set_major_formatter(FuncFormatter(_bytes_label))
    finish(ax, "table (bytes)", ylabel)
    colours, ends = [colour_of(number) for number in range(len(results))], [(x[-1], y[-1]) for x, y in curves]
    label_ends(ax, ends, list(results), colours=colours, curves=curves)
    return ax


def _bytes_label(num_bytes: float, _: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


class Work(NamedTuple):
    """Smallest possible work of an operation: arithmetic and bytes moved.

    Attributes:
      flops: additions and multiplications.
      num_bytes: bytes to and from memory, each distinct one once.
    """

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte."""
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
    """Work of a pooled lookup: every entry is scaled and added, every distinct row read, every sum written.

    Example:
      >>> lookup_work(num_ids=1000, num_distinct_rows=500, num_bags=100, dim=64).intensity
      0.812...
    """
    moved = num_distinct_rows * dim * value_bytes + num_ids * 4 + num_bags * dim * 4
    return Work(2.0 * num_ids * dim, float(moved))


@validated
def roof(
    intensity: Any, bytes_per_second: Annotated[float, "(0, inf)"], flops_per_second: Annotated[float, "(0, inf)"]
) -> Any:
    """Most operations per second at an arithmetic intensity, limited by memory or by arithmetic.

    Source: Williams, Waterman, Patterson (2009).
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
    **line_kwargs: Any,
) -> Axes:
    """Programs for one operation under the roof of a machine, both axes logarithmic.

    Args:
      work: what each program has to do.
      seconds: what each took, by name.
      bytes_per_second: what memory gives; a large copy measures it.
      flops_per_second: what arithmetic gives.
      ax: None makes a figure.
      **line_kwargs: go to the roof.
    """
    ax = axes_or_new(ax)
    ridge = flops_per_second / bytes_per_second
    span = np.geomspace(min(work.intensity, ridge) / 8, max(work.intensity, ridge) * 4, 200)
    line = with_defaults(line_kwargs, color=MUTED, linewidth=2.0)
    curve = span, roof(span, bytes_per_second, flops_per_second) / 1e9
    ax.loglog(*curve, **line)
    ax.axvline(work.intensity, color=MUTED, linewidth=0.8, linestyle=":")
    best = roof(work.intensity, bytes_per_second, flops_per_second)
    reached = [work.flops / taken / 1e9 for taken in seconds.values()]
    labels = [f"{name}: {100e9 * own / best:.0f}% of the roof" for name, own in zip(seconds, reached, strict=True)]
    for number, (own, label) in enumerate(zip(reached, labels, strict=True)):
        ax.plot(work.intensity, own, **marker_look(number), linestyle="none", markersize=9, label=label)
    slope = curve[0][20], curve[1][20]
    note(ax, f"{bytes_per_second / 1e9:.0f} GB/s", slope, xytext=(-4, 6), ha="right", va="baseline")
    finish(ax, "operations per byte of memory", "10⁹ operations per second")
    points, colours = [(work.intensity, own) for own in reached], [colour_of(k) for k in range(len(reached))]
    label_ends(ax, points, labels, colours=colours, curves=[curve])
    return ax
