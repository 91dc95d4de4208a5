"""Ids and offsets outside their range, against the published words as a plain loop."""

import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from flax import nnx

from rsembed import tbe as rt
from rsembed.tbe.batches import first_mistake, repair
from tests.tbe.oracle import make, train

Mode = rt.BoundsCheckMode
NUM_BAGS, NUM_ROWS, NUM_IDS = (2, 1), (4, 6), 6
SPECS = ((4, 2), (6, 2))
NAMES = (["clicks", "views"], ["ads", "films"])


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


compiled = jax.jit(lambda ids, offsets: repair(ids, offsets, NUM_BAGS, NUM_ROWS))
some_ids = st.lists(st.integers(-3, 8), min_size=NUM_IDS, max_size=NUM_IDS)
some_offsets = st.lists(st.integers(-2, NUM_IDS + 2), min_size=4, max_size=4)
sorted_offsets = st.lists(st.integers(0, NUM_IDS), min_size=2, max_size=2).map(lambda x: [0, *sorted(x), NUM_IDS])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(some_ids, some_offsets | sorted_offsets, st.sampled_from([np.int32, np.int64]))
def test_repairs_are_those_of_a_loop_in_numpy_and_compiled(ids, offsets, dtype):
    ids, offsets = np.array(ids, dtype), np.array(offsets, dtype)
    before = ids.copy(), offsets.copy()
    # Ids in front of the first bag belong to no table: a loop over bags never sees them, and they stay as they are.
    wanted_ids, wanted_offsets, wanted_count = repaired_by_loops(ids, offsets)
    for fixed_ids, fixed_offsets, count in (
        repair(ids, offsets, NUM_BAGS, NUM_ROWS),
        compiled(ids.astype(np.int32), offsets.astype(np.int32)),
    ):
        assert fixed_offsets.tolist() == wanted_offsets
        first = wanted_offsets[0]
        assert fixed_ids.tolist()[first:] == wanted_ids[first:]
        outside_bags = int(np.sum(np.asarray(fixed_ids)[:first] != ids[:first]))
        assert int(count) - outside_bags == wanted_count
    np.testing.assert_array_equal(ids, before[0])
    np.testing.assert_array_equal(offsets, before[1])
    for may_begin_later in (True, False):
        mistake = first_mistake(ids, offsets, NUM_BAGS, NUM_ROWS, *NAMES, may_begin_later=may_begin_later)
        assert (mistake is None) == (wanted_count == 0 and (may_begin_later or offsets[0] == 0))


MISTAKES = {
    "too large": ([0, 1, 2, 3, 9, 0], [0, 2, 3, 6], r"'views': id 9 at position 1 of bag 0 .* 'films' with 6 rows"),
    "negative": ([0, 1, -2, 3, 0, 0], [0, 2, 3, 6], r"'clicks': id -2 at position 0 of bag 1 .* 'ads' with 4 rows"),
    "of another table": ([5, 1, 2, 3, 0, 0], [0, 2, 3, 6], r"'clicks': id 5 at position 0 of bag 0 .* 'ads'"),
    "falling": ([0] * 6, [0, 3, 2, 6], r"'clicks': bag 1 goes from offset 3 to 2, but offsets must never fall"),
    "past the end": ([0] * 6, [0, 3, 7, 6], r"'clicks': bag 1 goes from offset 3 to 7, .*there are 6 ids"),
    "too few": ([0] * 6, [0, 2, 3, 5], r"the last offset is 5, but there are 6 ids"),
    "late start": ([0] * 6, [1, 2, 3, 6], r"offsets begin with 1, but the first bag must begin at 0"),
}


def two_features(mode, **arguments):
    names = {"table_names": NAMES[1], "feature_names": NAMES[0]}
    return make(SPECS, bounds_check_mode=mode, **names, **arguments)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_fatal_names_feature_table_bag_position_id_and_rows_and_changes_nothing(mistake):
    ids, offsets, message = MISTAKES[mistake]
    given = np.array(ids), np.array(offsets)
    sizes = ((2,), (1,))
    module = two_features(Mode.V2_FATAL)
    for call in (module, module.vjp):
        with pytest.raises(ValueError, match=message):
            call(*given, batch_size_per_feature_per_rank=sizes)
    assert given[0].tolist() == ids and given[1].tolist() == offsets
    assert int(module.step) == 0
    module(np.array([0, 1, 2, -1, 5, 0]), np.array([0, 2, 3, 6]), batch_size_per_feature_per_rank=sizes)  # still works


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("mode", [Mode.WARNING, Mode.IGNORE])
def test_other_modes_read_what_was_repaired_and_leave_the_callers_arrays_alone(mode, mistake):
    ids, offsets, _ = MISTAKES[mistake]
    ids, offsets = np.array(ids), np.array(offsets)
    before = ids.copy(), offsets.copy()
    sizes = {"batch_size_per_feature_per_rank": ((2,), (1,))}
    module, reference = two_features(mode), two_features(mode)
    fixed_ids, fixed_offsets, count = repaired_by_loops(ids, offsets)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output, _ = train(module, ids, offsets, **sizes)
        module(ids, offsets, **sizes)
    wanted, _ = train(reference, np.array(fixed_ids), np.array(fixed_offsets), **sizes)
    np.testing.assert_array_equal(output, wanted)
    assert len(caught) == (mode == Mode.WARNING and count > 0)
    assert int(module.bounds_check_warning.get_value()) == (count if mode == Mode.WARNING else 0)
    np.testing.assert_array_equal(ids, before[0])
    np.testing.assert_array_equal(offsets, before[1])
    weights = [np.asarray(each.split_embedding_weights()[0]) for each in (module, reference)]
    np.testing.assert_array_equal(*weights)


def test_without_checks_an_id_outside_its_table_contributes_nothing_not_even_a_huge_one():
    module = make(SPECS, bounds_check_mode=Mode.NONE)
    before = [np.array(w) for w in module.split_embedding_weights()]
    ids = np.array([1, 4, 2**32 + 1, -7, 3, 6, 2**40], np.int64)
    output, _ = train(module, ids, np.array([0, 4, 7]))
    np.testing.assert_array_equal(output[0], [*before[0][1], *before[1][3]])
    after = module.split_embedding_weights()
    for table, row in ((0, 1), (1, 3)):
        moved = (np.asarray(after[table]) != before[table]).any(axis=1)
        assert np.flatnonzero(moved).tolist() == [row]


@pytest.mark.parametrize(("mode", "replaces"), [(Mode.WARNING, True), (Mode.IGNORE, True), (Mode.FATAL, False)])
def test_inside_jit_ids_are_repaired_or_dropped_and_counted(mode, replaces):
    module = make(SPECS, bounds_check_mode=mode)
    before = [np.array(w) for w in module.split_embedding_weights()]
    ids, offsets = np.array([1, 4, -1, 3, 6], np.int32), np.array([0, 3, 5], np.int32)

    @nnx.jit
    def lookup(module, ids, offsets):
        return module(ids, offsets)

    extra = np.stack([before[0][0], before[1][0]]) * replaces
    wanted = np.concatenate([before[0][1] + extra[0], before[1][3] + extra[1]])
    np.testing.assert_allclose(lookup(module, ids, offsets)[0], wanted, rtol=1e-6)
    assert int(module.bounds_check_warning.get_value()) == (0 if mode == Mode.IGNORE else 2)


def test_batch_sizes_may_be_lists():
    module, ids, offsets = make(SPECS), np.array([1, 2, 3]), np.arange(4)
    listed = module(ids, offsets, batch_size_per_feature_per_rank=[[1, 0], [1, 1]])
    np.testing.assert_array_equal(listed, module(ids, offsets, batch_size_per_feature_per_rank=((1, 0), (1, 1))))
