"""Shape of a tensor-train table: row and column factors, ranks, and their cost."""

from __future__ import annotations

import bisect
import dataclasses
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


@no_type_check  # Arguments may be any sequences of integers, which `__post_init__` converts.
@dataclasses.dataclass(frozen=True)
class TTSpec:
    """Shape of a table of `num_embeddings` rows that is stored as a train of `d` cores.

    A spec is static and hashable, so it can be a constant under `jit`.

    Row `i` has the digits `(i_1, ..., i_d)` in the mixed radix `tt_p_shapes`. Column `j` has the
    digits `(j_1, ..., j_d)` in the mixed radix `tt_q_shapes`. The most significant digit comes
    first. Core `t` is an array `[p_t, R_{t-1} * q_t * R_t]` with one slice `[R_{t-1}, q_t, R_t]`,
    in C order, for each value of digit `t`. An entry of the table is
    `W[i, j] = C_1[i_1][:, j_1, :] @ ... @ C_d[i_d][:, j_d, :]`.

    Args:
      num_embeddings: number of rows of the table.
      tt_p_shapes: row factors, with a product of at least `num_embeddings`.
      tt_q_shapes: column factors. The product of the column factors is the embedding dimension.
      tt_ranks: the inner ranks `R_1, ..., R_{d-1}`, one per boundary between cores.

    Raises:
      ValueError: the lengths do not match, a number is below one, or the row factors are too small.
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
            numbers = np.asarray(getattr(self, name)).tolist()
            object.__setattr__(self, name, tuple(numbers))
        object.__setattr__(self, "num_embeddings", int(self.num_embeddings))
        # `check_fields` does not check numbers inside NumPy arrays, so the fields are checked again
        # after the conversion of arrays to tuples.
        check_fields(self)
        d = len(self.tt_p_shapes)
        if d < 2 or len(self.tt_q_shapes) != d or len(self.tt_ranks) != d - 1:
            raise ValueError(
                "d cores need d row factors, d column factors and d - 1 ranks, d >= 2; got "
                f"tt_p_shapes={list(self.tt_p_shapes)}, tt_q_shapes={list(self.tt_q_shapes)}, "
                f"tt_ranks={list(self.tt_ranks)}."
            )
        if math.prod(self.tt_p_shapes) < self.num_embeddings:
            raise ValueError(
                f"tt_p_shapes {list(self.tt_p_shapes)} make {math.prod(self.tt_p_shapes)} rows, "
                f"fewer than num_embeddings={self.num_embeddings}; enlarge a factor, or leave "
                "them out."
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
        """A spec in which `suggested_tt_shapes` chooses the factors that are not passed.

        For the row factors, the number of rows may be rounded up to get factors of similar size.
        For the column factors, the embedding dimension is never rounded.

        Raises: ValueError: the product of the column factors differs from `embedding_dim`.
        """
        d = len(tt_ranks) + 1
        if tt_p_shapes is None:
            tt_p_shapes = suggested_tt_shapes(num_embeddings, d)
        if tt_q_shapes is None:
            tt_q_shapes = suggested_tt_shapes(embedding_dim, d, False)
        product = math.prod(tt_q_shapes)
        if product != embedding_dim:
            raise ValueError(
                f"tt_q_shapes {list(tt_q_shapes)} multiply to {product}, not to "
                f"embedding_dim={embedding_dim}; leave them out to have it factored."
            )
        return TTSpec(num_embeddings, tuple(tt_p_shapes), tuple(tt_q_shapes), tuple(tt_ranks))

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
        """The spec with the largest equal ranks that fits a budget in bytes.

        The row factors are chosen so that the cores have as few parameters as possible.

        Args:
          rows: number of rows of the table.
          dim: embedding dimension of the table.
          bytes: upper bound on the bytes of the cores, without optimizer state.
          num_cores: number of cores, 2 by default. If the budget allows ranks above about 8, two
            cores train best and cost least. If two cores exceed the budget even at rank 1, a larger
            number of cores may fit.
          dtype: dtype of the cores, float32 (default) or bfloat16.

        Raises: ValueError: the cores exceed the budget even at rank 1. For a budget that is too
          small, the error message says how many bytes cores of rank 1 need.

        Example:
          >>> print(TTSpec.for_budget(11_000_000, 64, bytes=4_000_000))
          TTSpec of 11,000,000 x 64: p 3315·3319, q 8·8, ranks 18
          955,296 numbers, 3.82 MB in float32, 737 times fewer than dense; 2,304 FLOP per lookup; 2,485 rows unused
        """

        def of_rank(rank: int) -> TTSpec:
            return _equal_rank(rows, dim, num_cores, rank)

        itemsize = jnp.dtype(dtype_among(CORE_DTYPES, dtype, "dtype")).itemsize
        max_params = int(bytes) // itemsize
        # The number of parameters grows with the rank, so the largest rank is found by bisection.
        ranks = range(1, max(rows, dim) + 1)
        num_fitting = bisect.bisect_right(
            ranks,
            max_params,
            key=lambda rank: of_rank(rank).num_params,
        )
        if not num_fitting:
            raise ValueError(
                f"{bytes} bytes cannot hold {rows} x {dim} even at rank 1; that takes "
                f"{of_rank(1).num_bytes(dtype)} bytes with num_cores={num_cores}."
            )
        return of_rank(num_fitting)

    @property
    def num_cores(self) -> int:
        """Number of cores `d`."""
        return len(self.tt_p_shapes)

    @property
    def embedding_dim(self) -> int:
        """Length of a row."""
        return math.prod(self.tt_q_shapes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, including `R_0 = 1` and `R_d = 1`."""
        return (1, *self.tt_ranks, 1)

    @property
    def slice_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shape of a slice of each core: `(R_{t-1}, q_t, R_t)`."""
        return tuple(zip(self.ranks[:-1], self.tt_q_shapes, self.ranks[1:], strict=True))

    @property
    def core_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shape of the array of each core: `(p_t, R_{t-1} * q_t * R_t)`."""
        sizes = [math.prod(shape) for shape in self.slice_shapes]
        return tuple(zip(self.tt_p_shapes, sizes, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Place value of the digit of each core: a row number is the sum of `digit * stride`."""
        strides = []
        for t in range(self.num_cores):
            later_factors = self.tt_p_shapes[t + 1 :]
            strides.append(math.prod(later_factors))
        return tuple(strides)

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """Inner ranks that are just large enough to represent any table of this shape exactly."""
        sizes = [p * q for p, q in zip(self.tt_p_shapes, self.tt_q_shapes, strict=True)]
        ranks = []
        for t in range(1, len(sizes)):
            size_before = math.prod(sizes[:t])
            size_after = math.prod(sizes[t:])
            ranks.append(min(size_before, size_after))
        return tuple(ranks)

    @property
    def num_params(self) -> int:
        """Number of parameters in all cores."""
        return sum(p * size for p, size in self.core_shapes)

    @property
    def flops_per_lookup(self) -> int:
        """Number of additions and multiplications that compute one row.

        The gradients in a training step need about twice as many operations as the row.
        """
        flops = 0
        for t in range(1, self.num_cores):
            num_columns = math.prod(self.tt_q_shapes[:t])
            slice_size = math.prod(self.slice_shapes[t])
            flops += 2 * num_columns * slice_size
        return flops

    def num_bytes(self, dtype: DTypeLike = jnp.float32) -> int:
        """Bytes of the cores in `dtype`, float32 by default."""
        return self.num_params * jnp.dtype(dtype).itemsize

    def __str__(self) -> str:
        p = "·".join(map(str, self.tt_p_shapes))
        q = "·".join(map(str, self.tt_q_shapes))
        ranks = "·".join(map(str, self.tt_ranks))
        ratio = self.num_embeddings * self.embedding_dim / self.num_params
        return (
            f"TTSpec of {self.num_embeddings:,} x {self.embedding_dim}: p {p}, q {q}, ranks "
            f"{ranks}\n{self.num_params:,} numbers, {self.num_bytes() / 1e6:.2f} MB in float32, "
            f"{ratio:.3g} times fewer than dense; {self.flops_per_lookup:,} FLOP per lookup; "
            f"{math.prod(self.tt_p_shapes) - self.num_embeddings:,} rows unused"
        )


def _equal_rank(
    rows: int,
    dim: int,
    d: int,
    rank: int,
) -> TTSpec:
    """Spec with the rank `min(rank, max_rank)` at every boundary between two cores.

    The `max_rank` of a boundary is an entry of `TTSpec.max_ranks`.
    """
    q_shapes = suggested_tt_shapes(dim, d, False)
    ranks = [rank] * (d - 1)
    while True:
        boundaries = itertools.pairwise((1, *ranks, 1))
        slice_sizes = []
        for q, (rank_before, rank_after) in zip(q_shapes, boundaries, strict=True):
            slice_sizes.append(rank_before * q * rank_after)
        p_shapes = _cheapest_p_shapes(rows, slice_sizes)
        spec = TTSpec(rows, tuple(p_shapes), tuple(q_shapes), tuple(ranks))
        capped = list(map(min, spec.tt_ranks, spec.max_ranks))
        if capped == ranks:
            return spec
        ranks = capped


def specs_of_tables(
    num_tables: int,
    **arguments: Any,
) -> list[TTSpec]:
    """The spec of each table, from arguments of `TTSpec.suggest`.

    Args:
      num_tables: number of tables.
      arguments: arguments of `TTSpec.suggest`. Each argument is one value for all tables, or a
        sequence with one value per table.

    Raises: ValueError: the length of a sequence differs from the number of tables.
    """
    columns = []
    for name, value in arguments.items():
        is_per_table = isinstance(value, Sequence) and not isinstance(value, str)
        if is_per_table and name.startswith("tt_"):
            # A flat sequence of numbers contains ranks or factors that hold for all tables. If an
            # entry of the sequence is a sequence or None, the sequence has one entry per table.
            is_per_table = any(entry is None or isinstance(entry, Sequence) for entry in value)
        if is_per_table and len(value) != num_tables:
            raise ValueError(
                f"{name} has {len(value)} entries for {num_tables} tables; give one for all, or one per table."
            )
        if not is_per_table:
            value = [value] * num_tables
        columns.append(value)
    specs = []
    for values in zip(*columns, strict=True):
        specs.append(TTSpec.suggest(*values))
    return specs


@validated
def suggested_tt_shapes(
    n: PositiveInt,
    d: PositiveInt = 3,
    allow_round_up: bool = True,
) -> list[int]:
    """`d` integers, as equal as possible, with the product `n` or a slightly larger round number.

    The possible products are `n` rounded up to multiples of 1, 10, 100, and so on. The function
    chooses the product with the most equal factors. Factors are most equal if the entropy of their
    shares `factor / sum(factors)` is largest. If several products have equal entropies, the
    function chooses the smallest product. Small and large factors alternate in the result.

    Args:
      n: the number to factor.
      d: number of factors, 3 by default.
      allow_round_up: whether `n` may be rounded up, True by default. If False, `n` itself is
        factored, as needed for an embedding dimension.

    Raises: ValueError: `n` or `d` is less than one.

    Source: FBTT-Embedding, `suggested_tt_shapes`.

    Example:
      >>> suggested_tt_shapes(11_000_000), suggested_tt_shapes(13, allow_round_up=False)
      ([200, 220, 250], [1, 1, 13])
    """
    n = int(n)  # A Python integer cannot overflow, but a NumPy integer can.
    d = int(d)
    powers = [1]
    if allow_round_up:
        powers = [10**k for k in range(len(str(n)))]
    candidates = []
    for power in powers:
        candidates.append(_most_even_factors(-(-n // power) * power, d))
    # If several candidates have equal entropies, `max` returns the first candidate, which has the
    # smallest product.
    _, factors = max(candidates, key=lambda candidate: candidate[0])
    small = factors[: d // 2]
    large = factors[d // 2 :]
    alternating: list[int] = []
    for pair in zip(small, large, strict=False):
        alternating += pair
    return [*alternating, *large[len(small) :]]


_SLACK = 1e-9
"""Tolerance for rounding errors of the roots in the upper bound of `_most_even_factors`."""


def _most_even_factors(
    n: int,
    d: int,
) -> tuple[float, tuple[int, ...]]:
    """Finds the `d` integers with product `n` that have the largest `_entropy`.

    If several lists of factors have equal entropies, the function chooses the lexicographically
    largest list. No factor is 1 if `n` has at least `d` prime factors. If `n` has fewer than `d`
    prime factors, the result consists of the prime factors and as many ones as needed.

    Returns: the entropy, and the factors in ascending order.
    """
    candidates = np.arange(1, math.isqrt(n) + 1)
    small = candidates[n % candidates == 0].tolist()
    large = [n // factor for factor in small]
    divisors = sorted({*small, *large})
    best: tuple[float, tuple[int, ...]] = (-1.0, ())

    def search(
        chosen: tuple[int, ...],
        remainder: int,
    ) -> None:
        """Tries all lists of `d` ascending factors that start with `chosen`, and updates `best`.

        The product of the factors after `chosen` is `remainder`. The search tries the values of the
        next factor from the largest to the smallest. For each value of the next factor, equal real
        numbers as later factors give an upper bound on the entropy. The upper bound falls with the
        value of the next factor, so the search ends when the upper bound is below the best entropy
        so far.
        """
        nonlocal best
        count = d - len(chosen)
        if count == 1:
            factors = (*chosen, remainder)
            best = max(best, (_entropy(factors), factors))
            return
        smallest = chosen[-1] if chosen else 2
        root = round(remainder ** (1 / count))
        num_candidates = bisect.bisect_right(divisors, root + 1)
        for factor in reversed(divisors[:num_candidates]):
            if factor < smallest:
                return
            if factor**count > remainder or remainder % factor:
                continue
            rest = remainder // factor
            even_rest = [rest ** (1 / (count - 1))] * (count - 1)
            if _entropy((*chosen, factor, *even_rest)) < best[0] - _SLACK:
                return
            search((*chosen, factor), rest)

    search((), n)
    factors = best[1]
    if not factors:
        _, fewer_factors = _most_even_factors(n, d - 1)
        factors = (1, *fewer_factors)
    return _entropy(factors), factors


def _entropy(factors: tuple[float, ...]) -> float:
    """Entropy of the shares `factor / sum(factors)`.

    The entropy is rounded to 12 decimals, so that entropies that differ only by rounding errors are
    equal.
    """
    total = sum(factors)
    shares = [factor / total for factor in factors]
    entropy = -sum(share * math.log(share) for share in shares)
    return round(entropy, 12)


def _cheapest_p_shapes(
    num_embeddings: int,
    slice_sizes: Sequence[int],
) -> list[int]:
    """Row factors with which the cores have the fewest parameters, `sum(p * slice_size)`.

    For real row factors with a fixed product, the sum is smallest if all cores have equally many
    parameters. With the slice size `a_t` of core `t`, the ideal row factor of core `t` is
    `p_t = (num_embeddings * prod(a))^(1/d) / a_t`. The core with the largest slices gets the fewest
    slices. The search tries a few integers around the ideal `p_t` of every core, and starts with
    the core that has the largest slices.
    """
    order = sorted(range(len(slice_sizes)), key=lambda t: -slice_sizes[t])
    sizes = [slice_sizes[t] for t in order]
    _, factors = _cheapest_factors(num_embeddings, sizes)
    factor_of_core = dict(zip(order, factors, strict=True))
    return [factor_of_core[t] for t in range(len(slice_sizes))]


def _cheapest_factors(
    rows: int,
    slice_sizes: Sequence[int],
) -> tuple[int, tuple[int, ...]]:
    """Smallest number of parameters of cores with these slice sizes, and the row factors.

    The product of the row factors is at least `rows`.
    """
    size, *later_sizes = slice_sizes
    if not later_sizes:
        return rows * size, (rows,)
    log_product = math.log(rows) + sum(map(math.log, slice_sizes))
    log_ideal = log_product / len(slice_sizes) - math.log(size)
    ideal = math.floor(math.exp(log_ideal))
    candidates = []
    for p in range(max(1, ideal - 1), ideal + 3):
        later_rows = -(-rows // p)
        later_cost, later_factors = _cheapest_factors(later_rows, later_sizes)
        candidates.append((later_cost + p * size, (p, *later_factors)))
    return min(candidates)
