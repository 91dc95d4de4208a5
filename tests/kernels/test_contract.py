"""Lookups, row gradients and steps of every implementation agree with loops over numpy, for all bags and rules.

Kernels for GPUs run on one where there is one, in Pallas' interpreter where not; those for SparseCores are simulated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.kernels import api, reference, sparsecore
from rsembed.kernels.contract import NO_ROW, Segment, SegmentGradients, Step
from tests import oracles
from tests.kernels.cases import (
    ALL_IMPLEMENTATIONS,
    NUM_ROWS,
    RAGGED,
    RULES,
    SETTINGS,
    STEP,
    assert_close,
    draw_gradients,
    draw_table,
    step_by_loops,
)

pytestmark = [
    # jax 0.12 says so of every copy from a tile's memory that names a semaphore, as `sync_copy` does.
    pytest.mark.filterwarnings("ignore:Destination semaphore is ignored"),
    # From jax 0.11 on; what Pallas offers in its place did not lower with those versions.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
# An int32 slot, and a primitive that tiles lack.
REFUSED = [("gpu", "optax"), ("sparsecore", "optax"), ("sparsecore", "ftrl")]
every_implementation = pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sparsecore, "MAX_CHUNK_ROWS", 8)


@every_implementation
@pytest.mark.parametrize("case", RAGGED)
def test_lookup_agrees_with_loops(case, name, module, run):
    segments = RAGGED[case]
    for dtype, dim in SETTINGS[name]:
        table = draw_table(dim, dtype)
        outputs = run(lambda table: module.lookup(table, segments), table)
        for output, segment in zip(outputs, segments, strict=True):
            assert output.dtype == jnp.float32 and output.shape == (segment.num_outputs, dim)
            assert_close(output, oracles.pooled_lookup(table, segment))


@every_implementation
def test_rows_that_may_not_contribute_may_hold_nan(name, module, run):
    table, rows, offsets = jnp.asarray([[jnp.nan], [1.0], [2.0]]), jnp.asarray([0, 1, NO_ROW]), jnp.asarray([0, 3])
    zeroed = Segment(rows, offsets, jnp.asarray([0.0, 3.0, 1.0]), "sum")
    cancelled = Segment(rows, offsets, jnp.asarray([1.0, -1.0, 1.0]), "mean")
    found = run(lambda table: module.lookup(table, [zeroed, cancelled]), table)
    assert [own.tolist() for own in found] == [[[3.0]], [[0.0]]]


@every_implementation
@pytest.mark.parametrize("case", RAGGED)
def test_row_gradients_agree_with_loops(case, name, module, run):
    segments = RAGGED[case]
    d_outputs = draw_gradients(segments, 5)
    found = run(lambda d: module.row_gradients(NUM_ROWS, SegmentGradients(segments, d)), d_outputs)
    rows, gradients = map(np.asarray, found)
    expected = oracles.combined_row_gradients(NUM_ROWS, segments, d_outputs)
    count = len(expected)
    assert rows[:count].tolist() == sorted(expected) and set(rows[count:].tolist()) <= {NO_ROW}
    assert not np.any(gradients[count:])
    for row, gradient in zip(rows[:count].tolist(), gradients, strict=False):
        assert_close(gradient, expected[row])
    if name in ("native", "reference"):
        squares = sum(np.square(np.float64(gradient)).sum() for gradient in expected.values())
        assert_close(module.squared_norm(NUM_ROWS, SegmentGradients(segments, d_outputs)), squares)


@every_implementation
@pytest.mark.parametrize("rule_name", RULES)
def test_update_agrees_with_loops(rule_name, name, module, run):
    rule, segments = RULES[rule_name], RAGGED["every combiner"] + RAGGED["weighted"]
    step = Step(rule.get_hyperparameters(STEP), rule)
    settings = SETTINGS[name] if rule_name == "rowwise_adagrad" else {own[0]: own for own in SETTINGS[name]}.values()
    for dtype, dim in settings:
        table, d_outputs = draw_table(dim, dtype), draw_gradients(segments, dim)
        slots = rule.init_slots(jax.device_put(np.asarray(table, np.float32)))
        call = (lambda t, s, d: module.update(t, s, SegmentGradients(segments, d), step)), table, slots, d_outputs
        if (name, rule_name) in REFUSED:
            with pytest.raises(NotImplementedError):
                run(*call)
            continue
        new_table, new_slots = run(*call)
        by_row = oracles.combined_row_gradients(NUM_ROWS, segments, d_outputs)
        want_table, want_slots = step_by_loops(rule_name, table, slots, by_row)
        untouched = np.asarray(sorted(set(range(NUM_ROWS)) - set(by_row)), np.int32)
        assert new_table.dtype == table.dtype and untouched.size
        assert_close(new_table, want_table, dtype)
        np.testing.assert_array_equal(np.asarray(new_table)[untouched], np.asarray(table)[untouched])
        for slot, want, old in zip(new_slots, want_slots, slots, strict=True):
            assert slot.dtype == old.dtype and slot.shape == old.shape
            assert_close(slot, want)


@every_implementation
def test_apply_rows_skips_padding_and_rows_outside(name, module, run):
    rule, rows = RULES["rowwise_adagrad"], jnp.asarray([3, -1, NUM_ROWS, 22, NO_ROW, 0], jnp.int32)
    table, gradients, slots = draw_table(12), draw_table(12, seed=3)[:6], (draw_table(1, seed=4) ** 2,)
    step = Step(rule.get_hyperparameters(STEP), rule)
    stepped = run(lambda t, s, g: module.apply_rows(t, s, rows, g, step), table, slots, gradients)
    real = {row: np.asarray(gradients[k], np.float64) for k, row in enumerate(rows.tolist()) if 0 <= row < NUM_ROWS}
    for one, other in zip(stepped, step_by_loops("rowwise_adagrad", table, slots, real), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS[1:3])
def test_stochastic_rounding_is_the_reference_one(name, module, run):
    rule, segments = RULES["rowwise_adagrad"], RAGGED["every combiner"]
    table, d_outputs, slots = draw_table(8, "bfloat16"), draw_gradients(segments, 8), (jnp.full((NUM_ROWS, 1), 0.1),)
    arguments, hyper = (table, slots, SegmentGradients(segments, d_outputs)), rule.get_hyperparameters(0)

    def each(key):
        rounding, nearest = Step(hyper, rule, api.stochastic_rounding(key)), Step(hyper, rule)
        steps = module.update(*arguments, rounding), reference.update(*arguments, rounding)
        return [new_table for new_table, _ in (*steps, module.update(*arguments, nearest))]

    rounded, defined, nearest = map(np.asarray, run(each, jax.random.key(5)))
    # Sums differ in their last bit, which moves an entry whose noise fell just there.
    assert rounded.dtype == table.dtype and np.mean(rounded == defined) > 0.98
    assert np.any(rounded != nearest)


@pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS[:3])
def test_ids_of_64_bits_are_not_wrapped_into_the_table(name, module, run):
    def call(table, slots, d_output):
        step, gradients = Step(rule.get_hyperparameters(0), rule), SegmentGradients(segments, [d_output])
        return *module.lookup(table, segments), *module.update(table, slots, gradients, step)

    rule, table = RULES["rowwise_adagrad"], draw_table(12)
    with jax.enable_x64(True):
        rows = jax.device_put(np.int64([2, 2**32 + 2, -(2**32) + 2, 2**31 + 2]))
        segments = [Segment(rows, None, None, "none")]
        output, stepped, slots = run(call, table, rule.init_slots(table), jnp.ones((4, 12), jnp.float32))
    assert {array.dtype for array in (output, stepped, *slots)} == {jnp.dtype("float32")}
    assert np.any(output, axis=1).tolist() == [True, False, False, False]
    np.testing.assert_array_equal(np.flatnonzero(np.any(stepped != table, axis=1)), [2])
