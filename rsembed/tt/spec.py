"""Description of a tensor-train table: rows, row and column factors, ranks, and what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, no_type_check

import jax.numpy as jnp

from rsembed.checks import PositiveInt, check_type, check_within, dtype_among, validated
from rsembed.specs import TABLE_DTYPES
from rsembed.tt.checks import check_one_of
from rsembed.tt.shapes import cheapest_p_shapes, suggested_tt_shapes

MIN_USEFUL_RANK = 8
"""Below this rank `for_budget` prefers one more core: two cores train best and cost least while they have the rank."""


@no_type_check  # sequences become tuples, and wrong values are refused by name, in __post_init__
@dataclasses.dataclass(frozen=True)
class TTSpec:
    """A table of `num_embeddings` rows as a train of `d` cores; static and hashable, so it may be a `jit` constant.

    Row `i` has the digits `(i_1, ..., i_d)` in mixed radix `tt_p_shapes`, column `j` those of `tt_q_shapes`, most
    significant first. Core `t` is an array `[p_t, R_{t-1} * q_t * R_t]` that holds for each digit value a slice
    `[R_{t-1}, q_t, R_t]` in C order, and `W[i, j] = C_1[i_1][:, j_1, :] @ ... @ C_d[i_d][:, j_d, :]`.

    Args:
      num_embeddings: rows of the table.
      tt_p_shapes: row factors; their product is at least `num_embeddings`.
      tt_q_shapes: column factors; their product is the embedding dimension.
      tt_ranks: the inner ranks `R_1, ..., R_{d-1}`, one per boundary between cores.

    Raises:
      ValueError: lengths do not fit, a number is below one, or the row factors are too small.
      TypeError: a number is not an integer.

    Source: Oseledets (2011), "Tensor-train decomposition"; Yin et al. (2021), "TT-Rec".

    Example:
      >>> spec = TTSpec(11_000_000, (200, 220, 250), (4, 4, 4), (32, 32))
      >>> spec.num_params, spec.flops_per_lookup
      (958720, 36864)
    """

    num_embeddings: int
    tt_p_shapes: tuple[int, ...]
    tt_q_shapes: tuple[int, ...]
    tt_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tt_p_shapes", "tt_q_shapes", "tt_ranks"):
            check_type(getattr(self, name), tuple[int, ...], f"TTSpec: {name}")
            object.__setattr__(self, name, tuple(_whole_number(name, value) for value in getattr(self, name)))
        object.__setattr__(self, "num_embeddings", _whole_number("num_embeddings", self.num_embeddings))
        d = len(self.tt_p_shapes)
        if d < 2 or len(self.tt_q_shapes) != d or len(self.tt_ranks) != d - 1:
            raise ValueError(
                f"d cores need d row factors, d column factors and d - 1 ranks, d >= 2; got tt_p_shapes="
                f"{list(self.tt_p_shapes)}, tt_q_shapes={list(self.tt_q_shapes)}, tt_ranks={list(self.tt_ranks)}."
            )
        if math.prod(self.tt_p_shapes) < self.num_embeddings:
            raise ValueError(
                f"tt_p_shapes {list(self.tt_p_shapes)} make {math.prod(self.tt_p_shapes)} rows, fewer than "
                f"num_embeddings={self.num_embeddings}; enlarge a factor, or leave them out."
            )

    @staticmethod
    @validated
    def suggest(
        num_embeddings: PositiveInt,
        embedding_dim: PositiveInt,
        tt_ranks: Sequence[int],
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
    ) -> TTSpec:
        """A spec whose missing factors come from `suggested_tt_shapes`; the embedding dimension is never rounded up.

        Raises: ValueError: the column factors do not multiply to `embedding_dim`.
        """
        d = len(tt_ranks) + 1
        p_shapes = suggested_tt_shapes(num_embeddings, d) if tt_p_shapes is None else tt_p_shapes
        q_shapes = suggested_tt_shapes(embedding_dim, d, False) if tt_q_shapes is None else tt_q_shapes
        if math.prod(q_shapes) != embedding_dim:
            raise ValueError(
                f"tt_q_shapes {list(q_shapes)} multiply to {math.prod(q_shapes)}, not to embedding_dim={embedding_dim};"
                " leave them out to have it factored."
            )
        return TTSpec(num_embeddings, tuple(p_shapes), tuple(q_shapes), tuple(tt_ranks))

    @staticmethod
    @validated
    def for_budget(
        rows: PositiveInt,
        dim: PositiveInt,
        *,
        bytes: int | None = None,
        ratio: float | None = None,
        num_cores: int | Literal["auto"] = "auto",
        dtype: Any = jnp.float32,
    ) -> TTSpec:
        """The greatest equal ranks that fit a budget, with the row factors that cost least.

        Args:
          rows: rows of the table.
          dim: embedding dimension.
          bytes: the cores may take this many, optimizer state not counted.
          ratio: or: they may take the dense table's bytes divided by this.
          num_cores: "auto" takes two unless their rank would fall below `MIN_USEFUL_RANK`; then the fewest up to four
            that reach it, else the number that reaches the greatest rank.
          dtype: of the cores, and of the dense table that `ratio` speaks of.

        Raises: ValueError: not exactly one budget is given, or rank one does not fit; the message says what would.

        Example:
          >>> print(TTSpec.for_budget(11_000_000, 64, bytes=4_000_000))
          TTSpec of 11,000,000 x 64: p 3315·3319, q 8·8, ranks 18
          955,296 numbers, 3.82 MB in float32, 737 times fewer than dense; 2,304 FLOP per lookup; 2,485 rows unused
        """
        check_one_of("for_budget", bytes=bytes, ratio=ratio)
        check_within("(0, inf)", ratio, "ratio")
        check_within("[2, inf)", 2 if num_cores == "auto" else num_cores, "num_cores")
        item_bytes = jnp.dtype(dtype_among(TABLE_DTYPES, dtype, "dtype")).itemsize
        num_numbers = int(rows * dim / ratio) if ratio is not None else int(bytes or 0) // item_bytes
        choices = (2, 3, 4) if num_cores == "auto" else (num_cores,)
        best: TTSpec | None = None
        for d in choices:
            spec = _greatest_rank(rows, dim, d, num_numbers)
            if spec is not None and (best is None or max(spec.tt_ranks) > max(best.tt_ranks)):
                best = spec
            if best is not None and (max(best.tt_ranks) >= MIN_USEFUL_RANK or best.is_full_rank):
                break
        if best is None:
            least = min(_equal_rank(rows, dim, d, 1).num_params for d in choices) * item_bytes
            raise ValueError(
                f"{num_numbers * item_bytes} bytes cannot hold {rows} x {dim} even at rank 1; that takes {least} bytes "
                f"with num_cores {' or '.join(map(str, choices))}."
            )
        return best

    @property
    def num_cores(self) -> int:
        """Number of cores d."""
        return len(self.tt_p_shapes)

    @property
    def embedding_dim(self) -> int:
        """Length of a row."""
        return math.prod(self.tt_q_shapes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, `R_0 = R_d = 1` included."""
        return (1, *self.tt_ranks, 1)

    @property
    def slice_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Per core, `(R_{t-1}, q_t, R_t)`."""
        return tuple(zip(self.ranks[:-1], self.tt_q_shapes, self.ranks[1:], strict=True))

    @property
    def core_shapes(self) -> tuple[tuple[int, int], ...]:
        """Per core, the shape of its array: `(p_t, R_{t-1} * q_t * R_t)`."""
        return tuple((p, math.prod(shape)) for p, shape in zip(self.tt_p_shapes, self.slice_shapes, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Per core, how many rows one step of its digit passes."""
        return tuple(math.prod(self.tt_p_shapes[t + 1 :]) for t in range(self.num_cores))

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """Inner ranks at which any table of this shape is represented exactly; more are wasted."""
        sizes = [p * q for p, q in zip(self.tt_p_shapes, self.tt_q_shapes, strict=True)]
        return tuple(min(math.prod(sizes[:t]), math.prod(sizes[t:])) for t in range(1, len(sizes)))

    @property
    def is_full_rank(self) -> bool:
        """Whether any table of this shape can be represented exactly."""
        return all(rank >= most for rank, most in zip(self.tt_ranks, self.max_ranks, strict=True))

    @property
    def num_params(self) -> int:
        """Numbers in all cores."""
        return sum(p * size for p, size in self.core_shapes)

    @property
    def compression_ratio(self) -> float:
        """Numbers of the dense table over numbers in the cores."""
        return self.num_embeddings * self.embedding_dim / self.num_params

    @property
    def flops_per_lookup(self) -> int:
        """Multiplications and additions of one row's chain of products; a training step about three times as many."""
        q = self.tt_q_shapes
        return sum(2 * math.prod(q[:t]) * math.prod(self.slice_shapes[t]) for t in range(1, self.num_cores))

    def num_bytes(self, dtype: Any = jnp.float32) -> int:
        """Bytes of the cores."""
        return self.num_params * jnp.dtype(dtype).itemsize

    def __str__(self) -> str:
        p, q, ranks = ("·".join(map(str, x)) for x in (self.tt_p_shapes, self.tt_q_shapes, self.tt_ranks))
        return (
            f"TTSpec of {self.num_embeddings:,} x {self.embedding_dim}: p {p}, q {q}, ranks {ranks}\n"
            f"{self.num_params:,} numbers, {self.num_bytes() / 1e6:.2f} MB in float32, {self.compression_ratio:.3g} "
            f"times fewer than dense; {self.flops_per_lookup:,} FLOP per lookup; "
            f"{math.prod(self.tt_p_shapes) - self.num_embeddings:,} rows unused"
        )


def _whole_number(name: str, value: Any) -> int:
    check_type(value, int, f"TTSpec: {name}")
    if int(value) < 1:
        raise ValueError(f"{name} must hold integers of at least 1, got {value!r}.")
    return int(value)


def _equal_rank(rows: int, dim: int, d: int, rank: int) -> TTSpec:
    """Ranks `rank` at every boundary, less where that would be wasted."""
    q_shapes = suggested_tt_shapes(dim, d, False)
    ranks = [rank] * (d - 1)
    while True:
        sizes = [a * q * b for (a, b), q in zip(itertools.pairwise((1, *ranks, 1)), q_shapes, strict=True)]
        spec = TTSpec(rows, tuple(cheapest_p_shapes(rows, sizes)), tuple(q_shapes), tuple(ranks))
        capped = [min(r, most) for r, most in zip(spec.tt_ranks, spec.max_ranks, strict=True)]
        if capped == ranks:
            return spec
        ranks = capped


def _greatest_rank(rows: int, dim: int, d: int, num_numbers: int) -> TTSpec | None:
    """By bisection; None when rank one is too much."""
    low, high = 0, 1
    while high < max(rows, dim) and _equal_rank(rows, dim, d, high).num_params <= num_numbers:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _equal_rank(rows, dim, d, middle).num_params <= num_numbers else (low, middle)
    return _equal_rank(rows, dim, d, low) if low else None
