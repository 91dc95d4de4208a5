"""Sizes to which lists and arrays are padded.

The size of a list or array is rounded up to one of a few allowed sizes, so `jit` compiles only a
few programs for batches of many sizes.
"""

from __future__ import annotations

import numpy as np

from rsembed.bags import Bags

FEWEST_OF_ONE_LENGTH = 16
"""Number of bags of equal length that suffices for `common_width` to infer a fixed length."""


def padded_size(count: int) -> int:
    """The smallest power of two that is not below `count`, or 0 if `count` is 0."""
    if not count:
        return 0
    return 1 << (count - 1).bit_length()


def size_of_list(count: int) -> int:
    """The smallest allowed size of a list that holds `count` ids.

    Allowed sizes are the powers of two from 8 to 64. Above 64, eight equally spaced sizes are
    allowed for each doubling, so at most 1/8 of a long list is padding.
    """
    if count <= 64:
        return max(padded_size(count), 8)
    step = 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def common_width(bags: Bags) -> int:
    """Width of a padded array `[bags, width]` that holds `bags`.

    The bags of later batches probably fit into the width, so `jit` rarely compiles another program.

    At least `FEWEST_OF_ONE_LENGTH` bags that all have the same length suggest a feature with a
    fixed length, so the width is the length of a bag. For fewer bags or bags of different lengths,
    the width is the length of the longest bag, rounded up to a power of two.
    """
    lengths = np.diff(np.asarray(bags.offsets))
    longest = int(lengths.max(initial=1))
    if lengths.size >= FEWEST_OF_ONE_LENGTH and int(lengths.min()) == longest:
        return longest
    return padded_size(longest)
