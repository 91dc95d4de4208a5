"""Ids and offsets outside their range, against the published words as a plain loop."""

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
NUM_BAGS, NUM_ROWS, NUM_IDS = (2, 1), (4, 6), 6
SPECS = ((4, 2), (6, 2))


def repaired_by_loops(ids, offsets):
    """Last offset first, then offsets from left to right, then ids; -1 passes."""
    ids, offsets, changes = list(map(int, ids)), list(map(int, offsets)), 0
    before = list(offsets)
    offsets[-1] = len(ids)
    offsets[0] = min(max(offsets[0], 0), len(ids))
    for k in range(1, len(offsets)):
        offsets[k] = min(max(offsets[k], offsets[k - 1]), len(ids))
    changes += sum(old != new for old, new in zip(before, offsets, strict=True))
    bag = 0
    for feature, count in enumerate(NUM_BAGS):
        for _ in range(count):
            for place in range(offsets[bag], offsets[bag + 1]):
                if ids[place] != -1 and not 0 <= ids[place] < NUM_ROWS[feature]:
                    ids[place], changes = 0, changes + 1
            bag += 1
    return ids, offsets, changes


SIZES = {"batch_size_per_feature_per_rank": [[2], [1]]}


@functools.cache
def two_features(mode):
    return make(SPECS, bounds_check_mode=mode)


compiled = nnx.jit(lambda module, ids, offsets: module(ids, offsets, **SIZES))
some_ids = st.lists(st.integers(-3, 8), min_size=NUM_IDS, max_size=NUM_IDS)
some_offsets = st.lists(st.integers(-2, NUM_IDS + 2), min_size=4, max_size=4)
sorted_offsets = st.lists(st.integers(0, NUM_IDS), min_size=2, max_size=2).map(
    lambda x: [0, *sorted(x), NUM_IDS]
)


@pytest.mark.filterwarnings("ignore:.*was corrected")
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(some_ids, some_offsets | sorted_offsets, st.sampled_from([np.int32, np.int64]))
def test_ids_and_offsets_are_repaired_as_by_a_loop_counted_or_refused(ids, offsets, dtype):
    ids, offsets = np.array(ids, dtype), np.array(offsets, dtype)
    before = ids.copy(), offsets.copy()
    fixed_ids, fixed_offsets, count = repaired_by_loops(ids, offsets)
    wanted = two_features(Mode.NONE)(np.array(fixed_ids), np.array(fixed_offsets), **SIZES)
    for mode in (Mode.WARNING, Mode.IGNORE):
        module = two_features(mode)
        for found in (
            module(ids, offsets, **SIZES),
            compiled(module, ids.astype(np.int32), offsets.astype(np.int32)),
        ):
            assert_array_equal(found, wanted)
            assert int(module.bounds_check_warning.get_value()) == (
                count if mode == Mode.WARNING else 0
            )
    if count or offsets[0]:
        with pytest.raises(ValueError, match=r"offsets begin|outside table|never fall|last offset"):
            two_features(Mode.FATAL)(ids, offsets, **SIZES)
    else:
        assert_array_equal(two_features(Mode.FATAL)(ids, offsets, **SIZES), wanted)
    assert_array_equal(ids, before[0])
    assert_array_equal(offsets, before[1])


def test_a_correction_is_told_once_and_trained_on():
    module, reference = (make(SPECS, bounds_check_mode=mode) for mode in (Mode.WARNING, Mode.NONE))
    ids, offsets = np.array([0, 9, 2, 3]), np.array([0, 2, 3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(module, ids, offsets)
            train(reference, np.array([0, 0, 2, 3]), np.array([0, 2, 4]))
    assert len(caught) == 1
    assert_same_bits(module, reference)


def test_without_checks_an_id_outside_its_table_contributes_nothing_not_even_a_huge_one():
    module = make(SPECS, bounds_check_mode=Mode.NONE)
    before = [np.array(w) for w in module.split_embedding_weights()]
    ids = np.array([1, 4, 2**32 + 1, -7, 3, 6, 2**40], np.int64)
    output, _ = train(module, ids, np.array([0, 4, 7]))
    assert_array_equal(output[0], [*before[0][1], *before[1][3]])
    after = module.split_embedding_weights()
    for table, row in ((0, 1), (1, 3)):
        moved = (np.asarray(after[table]) != before[table]).any(axis=1)
        assert np.flatnonzero(moved).tolist() == [row]


def test_inside_jit_fatal_drops_ids_and_counts_them():
    module = make(SPECS, bounds_check_mode=Mode.FATAL)
    before = [np.array(w) for w in module.split_embedding_weights()]
    ids, offsets = np.array([1, 4, -1, 3, 6], np.int32), np.array([0, 3, 5], np.int32)
    found = nnx.jit(lambda module, ids, offsets: module(ids, offsets))(module, ids, offsets)
    assert_array_equal(found[0], [*before[0][1], *before[1][3]])
    assert int(module.bounds_check_warning.get_value()) == 2


def test_inside_jit_the_largest_unsigned_id_is_outside_its_table_as_it_is_outside_of_jit():
    """Its bits are those of -1, which is no id."""
    eager, compiled = make(SPECS), make(SPECS)
    ids, offsets = np.asarray([2**32 - 1, 3], np.uint32), np.asarray([0, 1, 2])
    with pytest.warns(UserWarning, match="4294967295"):
        expected = eager(ids, offsets)
    assert_array_equal(
        nnx.jit(lambda module, *batch: module(*batch))(compiled, ids, offsets), expected
    )
    assert int(compiled.bounds_check_warning) == int(eager.bounds_check_warning) == 1
