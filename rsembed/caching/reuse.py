"""How large must a cache be? Reuse distances of a stream of ids, and the miss ratio of every size at once."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int, Int64

from rsembed.caching.hashing import mix64
from rsembed.checks import validated


@validated
def reuse_distances(ids: Int[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
    """For each id, how many distinct other ids came since its last use; -1 at its first use.

    A fully associative LRU cache of `c` rows hits exactly where the distance is in `[0, c)`. A million ids take about
    a second.

    Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970 (stack distance).

    Example:
      >>> reuse_distances(np.array([5, 6, 7, 6, 6, 5])).tolist()
      [-1, -1, -1, 1, 0, 2]
    """
    ids = np.asarray(ids)
    order = np.argsort(ids, kind="stable")
    previous = np.full(ids.size, -1, np.int64)
    is_reused = ids[order[1:]] == ids[order[:-1]]
    previous[order[1:][is_reused]] = order[:-1][is_reused]
    # Distinct ids between p and i are the first uses inside: the j in (p, i) with previous[j] < p. Every j up to p has
    # previous[j] < p as well, so they are all earlier j with a smaller previous, less those p + 1.
    return np.where(previous < 0, -1, _count_smaller_before(previous) - previous - 1)


def _count_smaller_before(values: np.ndarray) -> np.ndarray:
    """How many earlier values are smaller, for each value that occurs once; a radix sort from the highest bit down."""
    size = values.size
    ranks = np.empty(size, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(size)
    current, counts = ranks, np.zeros(size, np.int64)
    for bit in reversed(range(size.bit_length())):
        # Ranks with equal higher bits stand together, in order of time, and fill exactly the places of those ranks.
        place, start = np.arange(size), current >> (bit + 1) << (bit + 1)
        is_upper = (current >> bit & 1).astype(bool)
        lower_before = np.concatenate([[0], np.cumsum(~is_upper)])
        lower_in_group = lower_before[:-1] - lower_before[start]
        counts += np.where(is_upper, lower_in_group, 0)
        moved = start + np.where(is_upper, (1 << bit) + place - start - lower_in_group, lower_in_group)
        current, counts = _scatter(moved, current), _scatter(moved, counts)
    return counts[ranks]


def _scatter(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    moved = np.empty_like(values)
    moved[places] = values
    return moved


@validated
def miss_ratio_curve(
    ids: Int[np.ndarray, " ids"],
    cache_rows: Int[np.ndarray, " sizes"],
    *,
    sample_fraction: float | None = None,
    seed: int = 0,
) -> Float64[np.ndarray, " sizes"]:
    """Share of the ids that a fully associative LRU cache misses, for each of the given sizes in rows.

    Args:
      ids: the stream, in order of time.
      cache_rows: sizes, in any order; 0 misses everything.
      sample_fraction: None is exact. 0.01 follows one distinct id in a hundred, chosen by hash, and scales distances
        up. Use it for long streams; sizes that hold fewer than about a hundred sampled ids are rough, and where
        curves of different seeds disagree a larger fraction helps.
      seed: which ids are sampled.

    Raises: ValueError: the stream is empty, a size is negative, the fraction is outside (0, 1], or the sample caught no
      id.
    Source: sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015, at a fixed rate and with
      its correction (SHARDS-adj) for a sample that is larger or smaller than expected.

    Example:
      >>> miss_ratio_curve(np.array([1, 2, 1, 2, 3, 1]), np.array([0, 1, 2, 3])).round(2).tolist()
      [1.0, 1.0, 0.67, 0.5]
    """
    ids, cache_rows = np.asarray(ids), np.asarray(cache_rows)
    if (cache_rows < 0).any():
        raise ValueError(f"cache_rows must not be negative, got {cache_rows.min()}.")
    if not ids.size:
        raise ValueError("the stream holds no id, so nothing can be missed.")
    expected, fraction = float(ids.size), 1.0
    if sample_fraction is not None:
        if not 0 < sample_fraction <= 1:
            raise ValueError(f"sample_fraction={sample_fraction} must lie above 0 and at most at 1.")
        key = mix64(np.asarray([seed + 1]).astype(np.uint64))
        ids = ids[(mix64(ids.astype(np.uint64) ^ key) >> np.uint64(11)) < sample_fraction * 2.0**53]
        if not ids.size:
            raise ValueError(f"sample_fraction={sample_fraction} caught no id; raise it, or pass None for all ids.")
        expected, fraction = expected * sample_fraction, sample_fraction
    distances = reuse_distances(ids)
    reused = np.sort(distances[distances >= 0]) / fraction
    hits = np.searchsorted(reused, cache_rows, side="left").astype(np.float64)
    # A very frequent id inside (or outside) the sample would tilt the curve; such ids hit at every size.
    hits += np.where(cache_rows > 0, expected - ids.size, 0.0)
    return np.clip(1.0 - hits / expected, 0.0, 1.0)
