"""Lookups, gradients and steps of every implementation agree with loops over numpy, for all calls and rules.

Kernels for GPUs run on one where there is one, in Pallas' interpreter where not; those for SparseCores are simulated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed.kernels import api, native, reference, sparsecore
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from tests import oracles
from tests.kernels.cases import (
    ALL_IMPLEMENTATIONS,
    EVERY_BAG,
    NUM_ROWS,
    ONE_TABLE,
    RULES,
    SETTINGS,
    SEVERAL_TABLES,
    STEP,
    assert_close,
    assert_near,
    draw_call,
    draw_gradients,
    draw_table,
    draw_tables,
    needs_native,
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
WITH_WEIGHT_GRADIENTS = [reference, pytest.param(native, marks=needs_native)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sparsecore, "MAX_CHUNK_ROWS", 8)


def settings_of(name, *, is_full):
    """Every dtype and row length that an implementation is asked for.

    Otherwise one row length of each dtype where kernels are compiled in no time, and a single setting elsewhere.
    """
    if is_full:
        return SETTINGS[name]
    if name == "native":
        return {dtype: (dtype, dim) for dtype, dim in SETTINGS[name]}.values()
    return SETTINGS[name][:1]


def assert_lookup(outputs, tables, call):
    shapes, _ = call.outputs([table.shape[1] for table in tables])
    for output, shape, wanted in zip(outputs, shapes, oracles.lookup(tables, call), strict=True):
        assert output.dtype == jnp.float32 and output.shape == shape
        assert_near(output, wanted)


def assert_rows(found, expected, num_rows, call, table):
    """Distinct rows ascending with their gradients, then padding, as many as there is room for."""
    rows, gradients = map(np.asarray, found)
    lists = {segment.list for segment in call.segments if segment.table == table}
    assert (
        len(rows)
        == len(gradients)
        == min(num_rows, sum(call.lists[own].num_entries for own in lists))
    )
    count = len(expected)
    assert rows[:count].tolist() == sorted(expected) and set(rows[count:].tolist()) <= {NO_ROW}
    assert not np.any(gradients[count:])
    scale = (
        max([np.abs(gradient).max(initial=0.0) for gradient in expected.values()], default=0.0)
        or 1.0
    )
    for row, gradient in zip(rows[:count].tolist(), gradients, strict=False):
        assert_close(gradient / scale, expected[row] / scale)


# One table


@every_implementation
@pytest.mark.parametrize("case", ONE_TABLE)
def test_lookup_agrees_with_loops(case, name, module, run):
    call = ONE_TABLE[case]
    for dtype, dim in settings_of(name, is_full=case == "every combiner"):
        tables = (draw_table(dim, dtype),)
        assert_lookup(run(lambda tables: module.lookup(tables, call), tables), tables, call)


@every_implementation
def test_rows_that_may_not_contribute_may_hold_nan(name, module, run):
    table, rows, offsets = (
        jnp.asarray([[jnp.nan], [1.0], [2.0]]),
        jnp.asarray([0, 1, NO_ROW]),
        jnp.asarray([0, 3]),
    )
    zeroed = IdList(rows, offsets, jnp.asarray([0.0, 3.0, 1.0]))
    cancelled = IdList(rows, offsets, jnp.asarray([1.0, -1.0, 1.0]))
    call = Call.of([zeroed, cancelled], ["sum", "mean"])
    found = run(lambda table: module.lookup((table,), call), table)
    assert [own.tolist() for own in found] == [[[3.0]], [[0.0]]]


@every_implementation
@pytest.mark.parametrize("case", ONE_TABLE)
def test_row_gradients_agree_with_loops(case, name, module, run):
    call = ONE_TABLE[case]
    d_outputs = draw_gradients(call, [5])
    found = run(lambda d: module.row_gradients(NUM_ROWS, CallGradients(call, d, (5,))), d_outputs)
    (expected,) = oracles.row_gradients(call, [NUM_ROWS], [5], d_outputs)
    assert_rows(found, expected, NUM_ROWS, call, 0)


@pytest.mark.slow_rows(
    "sgd-gpu",
    "sgd-sparsecore",
    "adagrad-gpu",
    "adagrad-sparsecore",
    "custom-gpu",
    "custom-sparsecore",
)
@every_implementation
@pytest.mark.parametrize("rule_name", RULES)
def test_update_agrees_with_loops(rule_name, name, module, run):
    rule, call = RULES[rule_name], EVERY_BAG
    step = Step(rule.get_hyperparameters(STEP), rule)
    for dtype, dim in settings_of(name, is_full=rule_name == "rowwise_adagrad"):
        table, d_outputs = draw_table(dim, dtype), draw_gradients(call, [dim])
        slots = rule.init_slots(jax.device_put(np.asarray(table, np.float32)))

        def update(table, slots, d_outputs, dims=(dim,)):
            return module.update(table, slots, CallGradients(call, d_outputs, dims), step)

        if (name, rule_name) in REFUSED:
            with pytest.raises(NotImplementedError):
                run(update, table, slots, d_outputs)
            continue
        new_table, new_slots = run(update, table, slots, d_outputs)
        (by_row,) = oracles.row_gradients(call, [NUM_ROWS], [dim], d_outputs)
        want_table, want_slots = step_by_loops(rule_name, table, slots, by_row)
        untouched = np.asarray(sorted(set(range(NUM_ROWS)) - set(by_row)), np.int32)
        assert new_table.dtype == table.dtype and untouched.size
        assert_close(new_table, want_table, dtype)
        assert_array_equal(np.asarray(new_table)[untouched], np.asarray(table)[untouched])
        for slot, want, old in zip(new_slots, want_slots, slots, strict=True):
            assert slot.dtype == old.dtype and slot.shape == old.shape
            assert_close(slot, want)


# Several tables in one call


# Interpreted kernels compile for seconds. These cases take the code of the others.
@pytest.mark.slow_rows(
    *(
        f"{case}-{name}"
        for case in ("columns", "mixed columns", "none in each", "tiny weights", "huge weights")
        for name in ("gpu", "sparsecore")
    ),
    "kinds of lists-gpu",
)
@every_implementation
@pytest.mark.parametrize("case", SEVERAL_TABLES)
def test_a_call_of_several_tables_agrees_with_loops(case, name, module, run):
    squared_norm = getattr(module, "squared_norm", reference.squared_norm)

    def every_kernel(tables, call, d_outputs):
        dims = tuple(table.shape[1] for table in tables)
        rows, norms = [], []
        for number, table in enumerate(tables):
            gradients = CallGradients(call, d_outputs, dims, number)
            rows.append(module.row_gradients(table.shape[0], gradients))
            norms.append(squared_norm(table.shape[0], gradients))
        return module.lookup(tables, call), rows, norms

    function = every_kernel if name == "sparsecore" else jax.jit(every_kernel)
    for seed in range(1 if name == "sparsecore" else 3):
        tables = draw_tables(seed, "float32" if name == "sparsecore" else None)
        table_rows, dims = zip(*(table.shape for table in tables), strict=True)
        call = draw_call(case, seed)
        d_outputs = draw_gradients(call, dims, seed)
        arguments = tables, call, d_outputs
        outputs, rows, norms = (
            run(function, *arguments) if name == "sparsecore" else function(*arguments)
        )
        assert_lookup(outputs, tables, call)
        expected = oracles.row_gradients(call, table_rows, dims, d_outputs)
        for number, (own, of_table) in enumerate(zip(rows, expected, strict=True)):
            assert_rows(own, of_table, table_rows[number], call, number)
            squares = sum(np.square(np.float64(gradient)).sum() for gradient in of_table.values())
            if squares == 0.0 or 1e-30 < squares < 1e30:
                assert_near(norms[number], squares)


@pytest.mark.parametrize("module", WITH_WEIGHT_GRADIENTS, ids=lambda module: module.NAME)
@pytest.mark.parametrize("case", SEVERAL_TABLES)
def test_gradients_of_weights_agree_with_loops(case, module):
    weight_gradients = jax.jit(module.weight_gradients)
    for seed in range(3):
        tables, call = draw_tables(seed), draw_call(case, seed)
        d_outputs = draw_gradients(call, [table.shape[1] for table in tables], seed)
        found = weight_gradients(tables, call, d_outputs)
        expected = oracles.weight_gradients(tables, call, d_outputs)
        for number, (ids, own, wanted) in enumerate(zip(call.lists, found, expected, strict=True)):
            assert (own is None) == (wanted is None) == (ids.weights is None)
            if own is None:
                continue
            scale = np.abs(wanted).max(initial=1.0)
            combiners = {segment.combiner for segment in call.segments if segment.list == number}
            # The slopes that cancel are as steep as weights are small.
            if combiners <= {
                "mean",
                "sqrtn",
            }:
                scale = max(
                    np.abs(wanted).max(initial=0.0), 1.0 / np.abs(ids.weights).max(initial=1e-30)
                )
            assert_close(np.asarray(own, np.float64) / scale, wanted / scale)


@pytest.mark.slow_rows(
    "rowwise_adagrad-kinds of lists-gpu",
    "rowwise_adagrad-kinds of lists-sparsecore",
    "ftrl-mixed columns-gpu",
    "ftrl-kinds of lists-gpu",
)
@every_implementation
@pytest.mark.parametrize("case", ["mixed columns", "kinds of lists"])
@pytest.mark.parametrize("rule_name", ["rowwise_adagrad", "ftrl"])
def test_every_table_of_a_call_is_stepped_once_a_row(rule_name, case, name, module, run):
    if (name, rule_name) in REFUSED:
        pytest.skip(f"{name} refuses {rule_name}")
    rule = RULES[rule_name]
    step = Step(rule.get_hyperparameters(STEP), rule)
    tables = draw_tables(3, "float32" if name == "sparsecore" else None)
    table_rows, dims = zip(*(table.shape for table in tables), strict=True)
    call = draw_call(case, 3)
    slots = [rule.init_slots(jnp.asarray(table, jnp.float32)) for table in tables]
    d_outputs = draw_gradients(call, dims)

    def updates(d_outputs):
        gradients = [CallGradients(call, d_outputs, dims, number) for number in range(len(tables))]
        return [module.update(*each, step) for each in zip(tables, slots, gradients, strict=True)]

    summed = oracles.row_gradients(call, table_rows, dims, d_outputs)
    stepped = run(updates, d_outputs)
    for table, own, (new_table, new_slots), by_row in zip(
        tables, slots, stepped, summed, strict=True
    ):
        wanted, wanted_slots = step_by_loops(rule_name, table, own, by_row)
        assert_close(new_table, wanted, table.dtype)
        for found, slot in zip(new_slots, wanted_slots, strict=True):
            assert_close(found, slot)


@every_implementation
def test_no_ids_and_empty_tables_give_zeros(name, module, run):
    ids, offsets, table = jax.device_put(
        (np.zeros(0, np.int32), np.zeros(3, np.int32), np.ones((0, 3), np.float32))
    )
    segments = (Segment(0, 0, 1, "mean"), Segment(0, 1, 1, "sum", 0, 0, 0))
    call = Call((IdList(ids, offsets),), segments, "columns")

    def both(table, d_output):
        gradients = CallGradients(call, (d_output,), (3,))
        return module.lookup((table,), call), module.row_gradients(0, gradients)

    (output,), (rows, gradients) = run(both, table, jnp.ones((1, 6)))
    assert_array_equal(output, np.zeros((1, 6)))
    assert rows.shape == (0,) and gradients.shape == (0, 3)


# Steps of distinct rows


@every_implementation
def test_apply_rows_skips_padding_and_rows_outside(name, module, run):
    rule, rows = RULES["rowwise_adagrad"], jnp.asarray([3, -1, NUM_ROWS, 22, NO_ROW, 0], jnp.int32)
    table, gradients, slots = (
        draw_table(12),
        draw_table(12, seed=3)[:6],
        (draw_table(1, seed=4) ** 2,),
    )
    step = Step(rule.get_hyperparameters(STEP), rule)
    stepped = run(lambda t, s, g: module.apply_rows(t, s, rows, g, step), table, slots, gradients)
    real = {
        row: np.asarray(gradients[k], np.float64)
        for k, row in enumerate(rows.tolist())
        if 0 <= row < NUM_ROWS
    }
    for one, other in zip(
        stepped, step_by_loops("rowwise_adagrad", table, slots, real), strict=True
    ):
        assert_close(one, other)


@pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS[1:3])
def test_stochastic_rounding_is_the_reference_one(name, module, run):
    rule, call = RULES["rowwise_adagrad"], ONE_TABLE["every combiner"]
    table, d_outputs, slots = (
        draw_table(8, "bfloat16"),
        draw_gradients(call, [8]),
        (jnp.full((NUM_ROWS, 1), 0.1),),
    )
    arguments, hyper = (
        (table, slots, CallGradients(call, d_outputs, (8,))),
        rule.get_hyperparameters(0),
    )

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
    def step_once(table, slots, d_output):
        step, gradients = (
            Step(rule.get_hyperparameters(0), rule),
            CallGradients(call, (d_output,), (12,)),
        )
        return *module.lookup((table,), call), *module.update(table, slots, gradients, step)

    rule, table = RULES["rowwise_adagrad"], draw_table(12)
    with jax.enable_x64(True):
        rows = jax.device_put(np.int64([2, 2**32 + 2, -(2**32) + 2, 2**31 + 2]))
        call = Call.of([IdList.single(rows)], ["sum"])
        output, stepped, slots = run(
            step_once, table, rule.init_slots(table), jnp.ones((4, 12), jnp.float32)
        )
    assert {array.dtype for array in (output, stepped, *slots)} == {jnp.dtype("float32")}
    assert np.any(output, axis=1).tolist() == [True, False, False, False]
    assert_array_equal(np.flatnonzero(np.any(stepped != table, axis=1)), [2])


def test_tiles_look_up_by_the_one_kernel_that_is_simulated():
    assert (
        sparsecore.lookup.keywords == sparsecore.row_gradients.keywords == {"pool": sparsecore.pool}
    )
