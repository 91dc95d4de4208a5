"""The rows with the lowest scores are evicted first, and of equal scores the lowest keys."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import split_keys
from rsembed.storage import row_map

ROWS = 12
scores = st.one_of(st.integers(0, 3), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
keys = st.one_of(
    st.integers(0, 40), st.integers(0, 3).map(lambda n: n * 2**32), st.integers(0, 2**64 - 1)
)
least = jax.jit(row_map.least)


@settings(deadline=None, max_examples=80)
@given(
    score=st.lists(scores, min_size=ROWS, max_size=ROWS),
    key=st.lists(keys, min_size=ROWS, max_size=ROWS, unique=True),
    mask=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    count=st.integers(-1, ROWS + 1),
)
def test_the_least_are_the_first_of_a_sort_by_score_and_key(score, key, mask, count):
    lanes = split_keys(np.array(key, np.uint64))
    known = row_map.empty(ROWS)._replace(high=lanes.high, low=lanes.low)
    chosen = least(known, np.array(score, np.uint32), np.array(mask), np.int32([count]))
    ordered = sorted(
        (row for row in range(ROWS) if mask[row]), key=lambda row: (score[row], key[row])
    )
    assert np.flatnonzero(chosen).tolist() == sorted(ordered[: max(count, 0)])


@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 1.0])
@pytest.mark.parametrize("length", [40, 6_001])
def test_the_first_of_many_entries_are_found_like_those_of_few(share, length):
    mask = np.random.default_rng(0).random(length) < share
    for implementation in ("reference", None):
        compact = functools.partial(api.compact, size=30, implementation=implementation)
        actual, num = map(np.asarray, jax.jit(compact)(mask))
        expected = [*np.flatnonzero(mask), *[NO_ROW] * 30][:30]
        assert actual.tolist() == expected
        assert num == mask.sum()
