"""Shape of a tensor-train table: rows, row and column factors, ranks, what they cost, and how to choose them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, no_type_check

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from rsembed.checks import NonNegativeInt, PositiveInt, check_fields, dtype_among, validated

CORE_DTYPES = ("float32", "bfloat16")
Integers = Sequence[int] | Int[np.ndarray, "_"]


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

    num_embeddings: PositiveInt
    tt_p_shapes: tuple[PositiveInt, ...]
    tt_q_shapes: tuple[PositiveInt, ...]
    tt_ranks: tuple[PositiveInt, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tt_p_shapes", "tt_q_shapes", "tt_ranks"):
            object.__setattr__(self, name, tuple(np.asarray(getattr(self, name)).tolist()))
        object.__setattr__(self, "num_embeddings", int(self.num_embeddings))
        check_fields(self)  # again, for the numbers of what were arrays
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
        tt_ranks: Integers,
        tt_p_shapes: Integers | None = None,
        tt_q_shapes: Integers | None = None,
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
        bytes: NonNegativeInt,
        num_cores: Annotated[int, "[2, inf)"] = 2,
        dtype: Any = jnp.float32,
    ) -> TTSpec:
        """The greatest equal ranks that fit a budget, with the row factors that cost least.

        Args:
          rows: rows of the table.
          dim: embedding dimension.
          bytes: the cores may take this many, optimizer state not counted.
          num_cores: two train best and cost least while ranks stay above about 8; more fit a smaller budget.
          dtype: of the cores.

        Raises: ValueError: rank one does not fit; the message says what would.

        Example:
          >>> print(TTSpec.for_budget(11_000_000, 64, bytes=4_000_000))
          TTSpec of 11,000,000 x 64: p 3315·3319, q 8·8, ranks 18
          955,296 numbers, 3.82 MB in float32, 737 times fewer than dense; 2,304 FLOP per lookup; 2,485 rows unused
        """
        of_rank = functools.partial(_equal_rank, rows, dim, num_cores)
        most, ranks = int(bytes) // jnp.dtype(dtype_among(CORE_DTYPES, dtype, "dtype")).itemsize, range(max(rows, dim))
        rank = bisect.bisect_right(ranks, most, key=lambda rank: of_rank(rank + 1).num_params)
        if not rank:
            raise ValueError(
                f"{bytes} bytes cannot hold {rows} x {dim} even at rank 1; that takes {of_rank(1).num_bytes(dtype)} "
                f"bytes with num_cores={num_cores}."
            )
        return of_rank(rank)

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
    def num_params(self) -> int:
        """Numbers in all cores."""
        return sum(p * size for p, size in self.core_shapes)

    @property
    def flops_per_lookup(self) -> int:
        """Multiplications and additions of one row's chain of products; a training step about three times as many."""
        q = self.tt_q_shapes
        return sum(2 * math.prod(q[:t]) * math.prod(self.slice_shapes[t]) for t in range(1, self.num_cores))

    def num_bytes(self, dtype: DTypeLike = jnp.float32) -> int:
        """Bytes of the cores."""
        return self.num_params * jnp.dtype(dtype).itemsize

    def __str__(self) -> str:
        p, q, ranks = ("·".join(map(str, x)) for x in (self.tt_p_shapes, self.tt_q_shapes, self.tt_ranks))
        ratio = self.num_embeddings * self.embedding_dim / self.num_params
        return (
            f"TTSpec of {self.num_embeddings:,} x {self.embedding_dim}: p {p}, q {q}, ranks {ranks}\n"
            f"{self.num_params:,} numbers, {self.num_bytes() / 1e6:.2f} MB in float32, {ratio:.3g} "
            f"times fewer than dense; {self.flops_per_lookup:,} FLOP per lookup; "
            f"{math.prod(self.tt_p_shapes) - self.num_embeddings:,} rows unused"
        )


def _equal_rank(rows: int, dim: int, d: int, rank: int) -> TTSpec:
    """Ranks `rank` at every boundary, less where that would be wasted."""
    q_shapes = suggested_tt_shapes(dim, d, False)
    ranks = [rank] * (d - 1)
    while True:
        sizes = [a * q * b for (a, b), q in zip(itertools.pairwise((1, *ranks, 1)), q_shapes, strict=True)]
        spec = TTSpec(rows, tuple(_cheapest_p_shapes(rows, sizes)), tuple(q_shapes), tuple(ranks))
        capped = [min(r, most) for r, most in zip(spec.tt_ranks, spec.max_ranks, strict=True)]
        if capped == ranks:
            return spec
        ranks = capped


def specs_of_tables(num_tables: int, **given: Any) -> list[TTSpec]:
    """The spec of each table, by `TTSpec.suggest`, from arguments for all of them or sequences of one per table.

    Raises: ValueError: a sequence has not one entry per table.
    """
    columns = []
    for name, value in given.items():
        is_per_table = isinstance(value, Sequence) and not isinstance(value, str)
        if is_per_table and name.startswith("tt_"):  # which is a sequence for one table already
            is_per_table = any(entry is None or isinstance(entry, Sequence) for entry in value)
        if is_per_table and len(value) != num_tables:
            raise ValueError(
                f"{name} has {len(value)} entries for {num_tables} tables; give one for all, or one per table."
            )
        columns.append(value if is_per_table else [value] * num_tables)
    return [TTSpec.suggest(*arguments) for arguments in zip(*columns, strict=True)]


@validated
def suggested_tt_shapes(n: PositiveInt, d: PositiveInt = 3, allow_round_up: bool = True) -> list[int]:
    """The most even way to write `n`, or a slightly larger round number, as a product of `d` integers.

    Candidates are `n` rounded up to multiples of 1, 10, 100, ... Evenness is the entropy of the normalised factors;
    the first candidate with the greatest entropy wins. Small and large factors alternate.

    Args:
      n: what to factor.
      d: number of factors.
      allow_round_up: False factors `n` itself, as an embedding dimension needs.

    Raises: ValueError: `n` or `d` is less than one.

    Source: FBTT-Embedding, `suggested_tt_shapes`.

    Example:
      >>> suggested_tt_shapes(11_000_000), suggested_tt_shapes(13, allow_round_up=False)
      ([200, 220, 250], [1, 1, 13])
    """
    n, d = int(n), int(d)  # of numpy, too
    powers = [10**k for k in range(len(str(n)))] if allow_round_up else [1]
    candidates = [_most_even_factors(-(-n // power) * power, d) for power in powers]
    _, factors = max(candidates, key=lambda candidate: candidate[0])  # the first of equals
    small, large = list(factors[: d // 2]), list(factors[d // 2 :])
    return [(small if t % 2 == 0 and small else large).pop(0) for t in range(d)]


_SLACK = 1e-9  # roots are not exact


def _most_even_factors(n: int, d: int) -> tuple[float, tuple[int, ...]]:
    """Greatest entropy and its ascending factors; of equals the lexicographically largest.

    A factor is 1 only where there are fewer primes than factors, which then are the primes.
    """
    tried = np.arange(1, math.isqrt(n) + 1)
    small = tried[n % tried == 0].tolist()
    divisors = sorted({*small, *(n // factor for factor in small)})
    best: tuple[float, tuple[int, ...]] = (-1.0, ())

    def search(chosen: tuple[int, ...], left: int) -> None:
        """From the most even on: what is left, in equal parts, bounds what it can still give, and bounds fall."""
        nonlocal best
        count, least = d - len(chosen), chosen[-1] if chosen else 2
        if count == 1:
            best = max(best, (_entropy((*chosen, left)), (*chosen, left)))
            return
        for place in range(bisect.bisect_right(divisors, round(left ** (1 / count)) + 1) - 1, -1, -1):
            factor = divisors[place]
            if factor < least:
                return
            if factor**count > left or left % factor:
                continue
            rest = left // factor
            if _entropy((*chosen, factor, *[rest ** (1 / (count - 1))] * (count - 1))) < best[0] - _SLACK:
                return
            search((*chosen, factor), rest)

    search((), n)
    factors = best[1] or (1, *_most_even_factors(n, d - 1)[1])
    return _entropy(factors), factors


def _entropy(factors: tuple[float, ...]) -> float:
    total = sum(factors)
    return round(-sum(x / total * math.log(x / total) for x in factors), 12)


def _cheapest_p_shapes(num_embeddings: int, slice_sizes: Sequence[int]) -> list[int]:
    """Row factors whose cores hold the fewest numbers, `sum(p * slice_size)`, at given slice sizes.

    The sum is least when all its terms are equal, `p_t = (num_embeddings * prod(a))^(1/d) / a_t`: the core with the
    largest slices gets the fewest of them. Integers are searched around that point, one core after the other, the
    largest slices first.
    """
    order = sorted(range(len(slice_sizes)), key=lambda t: -slice_sizes[t])

    def search(rows: int, places: list[int]) -> tuple[int, dict[int, int]]:
        place, *rest = places
        size = slice_sizes[place]
        if not rest:
            return rows * size, {place: rows}
        ideal = math.exp(
            (math.log(rows) + sum(math.log(slice_sizes[t]) for t in places)) / len(places) - math.log(size)
        )
        found = []
        for p in {max(1, math.floor(ideal) + step) for step in (-1, 0, 1, 2)}:
            cost, factors = search(-(-rows // p), rest)
            found.append((cost + p * size, p, factors))
        cost, p, factors = min(found, key=lambda candidate: candidate[:2])
        return cost, {place: p, **factors}

    factors = search(num_embeddings, order)[1]
    return [factors[t] for t in range(len(slice_sizes))]
