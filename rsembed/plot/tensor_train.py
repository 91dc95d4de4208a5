"""Pictures of compressed tables: how fast the error falls with the rank, and what bytes buy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rsembed.plot.drawing import axes_or_new, colour_of, finish, label_ends, marker_look, reference_lines


def rank_tails(
    table: Float[np.ndarray, "vocab dim"], tt_p_shapes: Sequence[int], tt_q_shapes: Sequence[int]
) -> list[Float[np.ndarray, " ranks"]]:
    """Per boundary between cores, the relative error that a tensor train of rank 0, 1, 2, ... there cannot avoid.

    Args:
      table: the table; rows of zeros are added up to the product of the row factors.
      tt_p_shapes: row factors.
      tt_q_shapes: column factors; their product is the table's second axis.

    Raises: ValueError: the factors do not fit the table.
    Source: Oseledets (2011), "Tensor-train decomposition", theorem 2.2.
    """
    from rsembed.tt.decomposition import digit_tensor

    d, num_rows, dim = len(tt_p_shapes), math.prod(tt_p_shapes), math.prod(tt_q_shapes)
    if len(tt_q_shapes) != d or num_rows < len(table) or dim != table.shape[1]:
        raise ValueError(
            f"row factors {list(tt_p_shapes)} and column factors {list(tt_q_shapes)} do not fit a table of shape "
            f"{table.shape}."
        )
    tensor = digit_tensor(np.asarray(table, np.float64), tt_p_shapes, tt_q_shapes)
    tails = []
    for t in range(1, d):
        unfolding = tensor.reshape(math.prod(tensor.shape[: 2 * t]), -1)
        squares = np.linalg.svd(unfolding, compute_uv=False) ** 2
        left_out = np.append(np.cumsum(squares[::-1])[::-1], 0.0)
        tails.append(np.sqrt(left_out / max(left_out[0], np.finfo(float).tiny)))
    return tails


def plot_rank_spectrum(
    tails: Mapping[str, Float[np.ndarray, " ranks"] | Sequence[float]], *, ax: Axes | None = None
) -> Axes:
    """The error that is left at each rank, one line per boundary or table.

    Args:
      tails: `{name: relative errors at rank 0, 1, ...}`, see `rank_tails`.
      ax: None makes a figure.
    """
    ax = axes_or_new(ax)
    for number, (name, tail) in enumerate(tails.items()):
        ax.plot(np.arange(len(tail)), np.asarray(tail), color=colour_of(number), linewidth=2.0, label=name)
    return finish(ax, "rank", "relative error that must remain", xlim=(0, None), ylim=(0, 1.02), legend=True)


def plot_against_bytes(
    results: Mapping[str, Sequence[tuple[float, float]]],
    *,
    references: Mapping[str, float] | None = None,
    ylabel: str = "relative error",
    ax: Axes | None = None,
) -> Axes:
    """What each method reaches with so many bytes, on a logarithmic axis; its name stands where the bytes are most.

    Args:
      results: `{method: (bytes, value) pairs}`, in any order; such as a reconstruction error or a loss.
      references: `{name: value}`, drawn as dashed lines across.
      ylabel: what the values are, with their unit.
      ax: None makes a figure.
    """
    ax = axes_or_new(ax)
    curves = [np.array(sorted(points), np.float64).T for points in results.values()]
    for number, (name, curve) in enumerate(zip(results, curves, strict=True)):
        ax.plot(*curve, **marker_look(number), linewidth=1.5, label=name)
    reference_lines(ax, references)
    ax.set_xscale("log")  # sets a formatter of its own
    ax.margins(x=0.25)
    ax.xaxis.set_major_formatter(FuncFormatter(_bytes_label))
    finish(ax, "table (bytes)", ylabel)
    colours, lines = [colour_of(number) for number in range(len(results))], [(own[0], own[1]) for own in curves]
    label_ends(ax, [(own[0, -1], own[1, -1]) for own in curves], list(results), colours=colours, curves=lines)
    return ax


def _bytes_label(num_bytes: float, _: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"
