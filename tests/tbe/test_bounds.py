"""Ids and offsets out of range, compared with the published rules in numpy."""

import functools
import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

from rsembed import tbe as rt
from tests.tbe.oracle import assert_same_bits, make, train

Mode = rt.BoundsCheckMode
NUM_IDS = 6
SPECS = ((4, 2), (6, 2))
ROWS_OF_BAGS = [4, 4, 6, 6]


def repaired(ids, offsets):
    """Repaired ids, repaired offsets, and the number of changes.

    The last offset is repaired first, then the other offsets from left to right, then the ids. The
    id -1 is allowed.
    """
    new_offsets = offsets.copy()
    new_offsets[-1] = len(ids)
    new_offsets = np.maximum.accumulate(np.clip(new_offsets, 0, len(ids)))
    new_ids = ids.copy()
    ids_of_bags = new_ids[new_offsets[0] :]
    num_rows = np.repeat(ROWS_OF_BAGS, np.diff(new_offsets))
    ids_of_bags[(ids_of_bags < -1) | (ids_of_bags >= num_rows)] = 0
    return new_ids, new_offsets, np.sum(new_offsets != offsets) + np.sum(new_ids != ids)


@functools.cache
def two_features(mode):
    return make(SPECS, bounds_check_mode=mode)


compiled = nnx.jit(lambda module, ids, offsets: module(ids, offsets))
some_ids = st.lists(st.integers(-3, 8), min_size=NUM_IDS, max_size=NUM_IDS)
some_offsets = st.lists(st.integers(-2, NUM_IDS + 2), min_size=5, max_size=5)
sorted_offsets = st.lists(st.integers(0, NUM_IDS), min_size=3, max_size=3).map(
    lambda x: [0, *sorted(x), NUM_IDS]
)


@pytest.mark.filterwarnings("ignore:.*was corrected")
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(some_ids, some_offsets | sorted_offsets, st.sampled_from([np.int32, np.int64]))
def test_ids_and_offsets_are_repaired_counted_or_refused_as_published(ids, offsets, dtype):
    ids = np.array(ids, dtype)
    offsets = np.array(offsets, dtype)
    ids_before = ids.copy()
    offsets_before = offsets.copy()
    new_ids, new_offsets, count = repaired(ids, offsets)
    expected = two_features(Mode.NONE)(new_ids, new_offsets)
    for mode, reported in ((Mode.WARNING, count), (Mode.IGNORE, 0)):
        module = two_features(mode)
        assert_array_equal(module(ids, offsets), expected)
        assert int(module.bounds_check_warning.get_value()) == reported
        assert_array_equal(
            compiled(module, ids.astype(np.int32), offsets.astype(np.int32)), expected
        )
        assert int(module.bounds_check_warning.get_value()) == reported
    if count or offsets[0]:
        with pytest.raises(ValueError, match=r"offsets begin|outside table|never fall|last offset"):
            two_features(Mode.FATAL)(ids, offsets)
    else:
        assert_array_equal(two_features(Mode.FATAL)(ids, offsets), expected)
    assert_array_equal(ids, ids_before)
    assert_array_equal(offsets, offsets_before)


def test_a_correction_is_told_once_and_trained_on():
    module = make(SPECS, bounds_check_mode=Mode.WARNING)
    reference = make(SPECS, bounds_check_mode=Mode.NONE)
    ids = np.array([0, 9, 2, 3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(module, ids, np.array([0, 2, 3]))
            train(reference, ids % 9, np.array([0, 2, 4]))
    assert len(caught) == 1
    assert_same_bits(module, reference)


def test_without_checks_an_id_outside_its_table_contributes_nothing_not_even_a_huge_one():
    module = make(SPECS, bounds_check_mode=Mode.NONE)
    reference = make(SPECS)
    output, _ = train(module, np.array([1, 4, 2**32 + 1, -7, 3, 6, 2**40]), np.array([0, 4, 7]))
    expected, _ = train(reference, np.array([1, 3]), np.array([0, 1, 2]))
    assert_array_equal(output, expected)
    assert_same_bits(module, reference)


def test_inside_jit_fatal_drops_ids_and_counts_them():
    module = make(SPECS, bounds_check_mode=Mode.FATAL)
    expected = module(np.array([1, 3]), np.array([0, 1, 2]))
    ids = np.array([1, 4, -1, 3, 6], np.int32)
    assert_array_equal(compiled(module, ids, np.array([0, 3, 5], np.int32)), expected)
    assert int(module.bounds_check_warning.get_value()) == 2


def test_inside_jit_the_largest_unsigned_id_is_outside_its_table_as_it_is_outside_of_jit():
    """The largest uint32 has the bits of -1, and -1 means no id."""
    eager = make(SPECS)
    traced = make(SPECS)
    batch = (np.asarray([2**32 - 1, 3], np.uint32), np.asarray([0, 1, 2]))
    with pytest.warns(UserWarning, match="4294967295"):
        expected = eager(*batch)
    assert_array_equal(compiled(traced, *batch), expected)
    assert int(traced.bounds_check_warning) == int(eager.bounds_check_warning) == 1
