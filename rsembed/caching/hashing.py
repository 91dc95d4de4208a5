"""Spreading ids evenly: one fixed bijection of 64-bit numbers."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int64, UInt64


def mix64(values: UInt64[np.ndarray, " ids"]) -> UInt64[np.ndarray, " ids"]:
    """The values, scrambled by a bijection of 64-bit numbers. Source: Appleby, MurmurHash3, finaliser `fmix64`."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def set_of(ids: Int[np.ndarray, " ids"], num_sets: int) -> Int64[np.ndarray, " ids"]:
    """The set of each id: its scrambled bits modulo the number of sets.

    Example:
      >>> set_of(np.array([0, 1, 2, 10**12]), 1000).tolist()
      [0, 604, 447, 300]

    Raises: ValueError: there is no set.
    """
    if num_sets < 1:
        raise ValueError(f"set_of: num_sets must be at least 1, got {num_sets}.")
    return (mix64(ids.astype(np.uint64)) % np.uint64(num_sets)).astype(np.int64)
