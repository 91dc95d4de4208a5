"""How the rows and columns of a table are factored over the cores."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np

from rsembed.checks import validated


@validated
def suggested_tt_shapes(n: int, d: int = 3, allow_round_up: bool = True) -> list[int]:
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
    if n < 1 or d < 1:
        raise ValueError(f"suggested_tt_shapes needs n >= 1 and d >= 1, got n={n}, d={d}.")
    n, d = int(n), int(d)  # of numpy, too
    powers = [10**k for k in range(len(str(n)))] if allow_round_up else [1]
    candidates = [_most_even_factors(-(-n // power) * power, d) for power in powers]
    _, factors = max(candidates, key=lambda candidate: candidate[0])  # the first of equals
    small, large = list(factors[: d // 2]), list(factors[d // 2 :])
    return [(small if t % 2 == 0 and small else large).pop(0) for t in range(d)]


def _most_even_factors(n: int, d: int) -> tuple[float, tuple[int, ...]]:
    """Greatest entropy and its ascending factors; of equals the lexicographically largest.

    A factor is 1 only where there are fewer primes than factors, which then are the primes.
    """
    primes = _primes(n)
    if len(primes) <= d:
        factors = (*[1] * (d - len(primes)), *sorted(primes))
        return _entropy(factors), factors
    products = {1}
    for prime in primes:
        products |= {prime * product for product in products}
    divisors = sorted(products)
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
    return best


def _primes(n: int) -> list[int]:
    """Twos and fives, of which round numbers have many, are divided out before anything is tried."""
    primes, rest = [], n
    for prime in (2, 5):
        while rest % prime == 0:
            primes.append(prime)
            rest //= prime
    tried = np.arange(3, math.isqrt(rest) + 1, 2)
    for factor in tried[rest % tried == 0].tolist():  # ascending: what divides the rest still is a prime
        while rest % factor == 0:
            primes.append(factor)
            rest //= factor
    return primes if rest == 1 else [*primes, rest]


_SLACK = 1e-9  # roots are not exact


def _entropy(factors: tuple[float, ...]) -> float:
    total = sum(factors)
    return round(-sum(x / total * math.log(x / total) for x in factors), 12)


def cheapest_p_shapes(num_embeddings: int, slice_sizes: Sequence[int]) -> list[int]:
    """Row factors whose cores hold the fewest numbers, `sum(p * slice_size)`, at given slice sizes.

    The sum is least when all its terms are equal, `p_t = (num_embeddings * prod(a))^(1/d) / a_t`: the core with the
    largest slices gets the fewest of them. Integers are searched around that point, one core after the other, the
    largest slices first.

    Raises: ValueError: there are no slices.

    Example:
      >>> cheapest_p_shapes(11_000_000, [4 * 32, 32 * 4 * 32, 32 * 4])
      [706, 22, 709]
    """
    if not len(slice_sizes):
        raise ValueError("cheapest_p_shapes: slice_sizes is empty; give the size of a slice of each core.")
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
