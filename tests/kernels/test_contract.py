"""Lookups, gradients and steps of all implementations agree with loops in numpy.

Without a GPU, the GPU kernels run in Pallas' interpreter. The SparseCore kernels are simulated.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed.kernels import api, reference, sparsecore
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment
from tests import oracles
from tests.kernels.cases import (
    ALL_IMPLEMENTATIONS,
    EVERY_BAG,
    IMPLEMENTATIONS,
    KNOWN_WARNINGS,
    NUM_ROWS,
    ONE_TABLE,
    RULES,
    SETTINGS,
    SEVERAL_TABLES,
    assert_close,
    assert_near,
    assert_stepped,
    draw_call,
    draw_gradients,
    draw_table,
    draw_tables,
    step_of,
)

pytestmark = KNOWN_WARNINGS
# FTRL uses a primitive that SparseCores do not have.
REFUSED = ("sparsecore", "ftrl")
every_implementation = pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS)


def slow_on_accelerators(cases, quick):
    """A mark for slow rows: GPUs and SparseCores with the cases that are not in `quick`.

    Their kernels are interpreted, and take seconds to compile.
    """
    slow = [case for case in cases if case not in quick]
    return pytest.mark.slow_rows(
        *(f"{case}-{name}" for case in slow for name in ("gpu", "sparsecore"))
    )


few_of_one_table = slow_on_accelerators(ONE_TABLE, quick=("every combiner", "weighted"))
few_of_several_tables = slow_on_accelerators(SEVERAL_TABLES, quick=("nothing",))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sparsecore, "MAX_CHUNK_ROWS", 8)


def settings_of(name, *, is_full):
    """Pairs of dtype and number of columns for the tables of an implementation.

    If not `is_full`: a single pair, or for the native kernels one pair for each dtype, because they
    compile fast.
    """
    if is_full:
        return SETTINGS[name]
    if name == "native":
        return {dtype: (dtype, dim) for dtype, dim in SETTINGS[name]}.values()
    return SETTINGS[name][:1]


def assert_lookup(outputs, tables, call):
    for output, wanted in zip(outputs, oracles.lookup(tables, call), strict=True):
        assert output.dtype == jnp.float32
        assert output.shape == wanted.shape
        assert_near(output, wanted)


def assert_rows(actual, expected, num_rows, call, table):
    """Asserts distinct rows in ascending order and their gradients, followed by padding.

    The expected length is the number of entries or of rows of the table, whichever is smaller.
    """
    rows, gradients = map(np.asarray, actual)
    lists = {segment.list for segment in call.segments if segment.table == table}
    num_entries = sum(call.lists[number].num_entries for number in lists)
    padding = min(num_rows, num_entries) - len(expected)
    assert rows.tolist() == sorted(expected) + [NO_ROW] * padding
    wanted = np.zeros(gradients.shape)
    for place, row in enumerate(sorted(expected)):
        wanted[place] = expected[row]
    assert_near(gradients, wanted)
    assert not np.any(gradients[len(expected) :])


# One table


@pytest.mark.slow_rows("every combiner-gpu")
@few_of_one_table
@every_implementation
@pytest.mark.parametrize("case", ONE_TABLE)
def test_lookup_agrees_with_loops(case, name, module, run):
    call = ONE_TABLE[case]
    for dtype, dim in settings_of(name, is_full=case == "every combiner"):
        tables = (draw_table(dim, dtype),)
        assert_lookup(run(lambda tables: module.lookup(tables, call), tables), tables, call)


@every_implementation
def test_rows_that_may_not_contribute_may_hold_nan(name, module, run):
    table = jnp.asarray([[jnp.nan], [1.0], [2.0]])
    rows = jnp.asarray([0, 1, NO_ROW])
    offsets = jnp.asarray([0, 3])
    zeroed = IdList(rows, offsets, jnp.asarray([0.0, 3.0, 1.0]))
    cancelled = IdList(rows, offsets, jnp.asarray([1.0, -1.0, 1.0]))
    call = Call.of([zeroed, cancelled], ["sum", "mean"])
    actual = run(lambda table: module.lookup((table,), call), table)
    assert actual[0] == 3.0
    assert actual[1] == 0.0


@few_of_one_table
@every_implementation
@pytest.mark.parametrize("case", ONE_TABLE)
def test_row_gradients_agree_with_loops(case, name, module, run):
    call = ONE_TABLE[case]
    d_outputs = draw_gradients(call, [5])
    actual = run(lambda d: module.row_gradients(NUM_ROWS, CallGradients(call, d, (5,))), d_outputs)
    (expected,) = oracles.row_gradients(call, [NUM_ROWS], [5], d_outputs)
    assert_rows(actual, expected, NUM_ROWS, call, 0)


@pytest.mark.slow_rows(
    "sgd-gpu",
    "sgd-sparsecore",
    "adagrad-gpu",
    "adagrad-sparsecore",
    "custom-gpu",
    "custom-sparsecore",
    "adam-gpu",
    "adam-sparsecore",
    "row_wise_adagrad-gpu",
)
@every_implementation
@pytest.mark.parametrize("rule_name", RULES)
def test_update_agrees_with_loops(rule_name, name, module, run):
    rule = RULES[rule_name]
    call = EVERY_BAG
    for dtype, dim in settings_of(name, is_full=rule_name == "row_wise_adagrad"):
        table = draw_table(dim, dtype)
        slots = rule.init_slots(table.astype(jnp.float32))
        d_outputs = draw_gradients(call, [dim])

        def update(table, slots, d_outputs, dims=(dim,)):
            gradients = CallGradients(call, d_outputs, dims)
            return module.update(table, slots, gradients, step_of(rule))

        if (name, rule_name) == REFUSED:
            with pytest.raises(NotImplementedError):
                run(update, table, slots, d_outputs)
            continue
        stepped = run(update, table, slots, d_outputs)
        (gradients,) = oracles.row_gradients(call, [NUM_ROWS], [dim], d_outputs)
        assert len(gradients) < NUM_ROWS
        assert_stepped(stepped, rule_name, table, slots, gradients)


# Several tables in one call


@few_of_several_tables
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

    is_simulated = name == "sparsecore"
    function = every_kernel if is_simulated else jax.jit(every_kernel)
    for seed in range(1 if is_simulated else 2):
        tables = draw_tables(seed, "float32" if is_simulated else None)
        table_rows, dims = zip(*(table.shape for table in tables), strict=True)
        call = draw_call(case, seed)
        d_outputs = draw_gradients(call, dims, seed)
        arguments = tables, call, d_outputs
        outputs, rows, norms = run(function, *arguments) if is_simulated else function(*arguments)
        assert_lookup(outputs, tables, call)
        expected = oracles.row_gradients(call, table_rows, dims, d_outputs)
        for number, gradients in enumerate(expected):
            assert_rows(rows[number], gradients, table_rows[number], call, number)
            squares = sum(np.square(gradient).sum() for gradient in gradients.values())
            if squares == 0.0 or 1e-30 < squares < 1e30:
                assert_near(norms[number], squares)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SEVERAL_TABLES)
def test_gradients_of_weights_agree_with_loops(case, implementation):
    weight_gradients = functools.partial(api.weight_gradients, implementation=implementation)
    weight_gradients = jax.jit(weight_gradients)
    for seed in range(2):
        tables, call = draw_tables(seed), draw_call(case, seed)
        d_outputs = draw_gradients(call, [table.shape[1] for table in tables], seed)
        actual = weight_gradients(tables, call, d_outputs)
        expected = oracles.weight_gradients(tables, call, d_outputs)
        for number, (ids, gradient, wanted) in enumerate(
            zip(call.lists, actual, expected, strict=True)
        ):
            assert (gradient is None) == (wanted is None) == (ids.weights is None)
            if gradient is None:
                continue
            scale = np.abs(wanted).max(initial=1.0)
            combiners = {segment.combiner for segment in call.segments if segment.list == number}
            # The gradient is a difference of terms that grow with the inverse of the weights.
            if combiners <= {"mean", "sqrtn"}:
                steepest = 1.0 / np.abs(ids.weights).max(initial=1e-30)
                scale = max(np.abs(wanted).max(initial=0.0), steepest)
            assert_close(np.asarray(gradient, np.float64) / scale, wanted / scale)


@pytest.mark.slow_rows(
    "row_wise_adagrad-kinds of lists-gpu",
    "row_wise_adagrad-kinds of lists-sparsecore",
    "ftrl-mixed columns-gpu",
    "ftrl-kinds of lists-gpu",
    "row_wise_adagrad-mixed columns-sparsecore",
    "row_wise_adagrad-mixed columns-gpu",
)
@every_implementation
@pytest.mark.parametrize("case", ["mixed columns", "kinds of lists"])
@pytest.mark.parametrize("rule_name", ["row_wise_adagrad", "ftrl"])
def test_every_table_of_a_call_is_stepped_once_a_row(rule_name, case, name, module, run):
    if (name, rule_name) == REFUSED:
        pytest.skip(f"{name} refuses {rule_name}")
    rule = RULES[rule_name]
    tables = draw_tables(3, "float32" if name == "sparsecore" else None)
    table_rows, dims = zip(*(table.shape for table in tables), strict=True)
    call = draw_call(case, 3)
    slots = [rule.init_slots(table.astype(jnp.float32)) for table in tables]
    d_outputs = draw_gradients(call, dims)

    def updates(d_outputs):
        stepped = []
        for number, table in enumerate(tables):
            gradients = CallGradients(call, d_outputs, dims, number)
            stepped.append(module.update(table, slots[number], gradients, step_of(rule)))
        return stepped

    stepped = run(updates, d_outputs)
    expected = oracles.row_gradients(call, table_rows, dims, d_outputs)
    for number, gradients in enumerate(expected):
        assert_stepped(stepped[number], rule_name, tables[number], slots[number], gradients)


@every_implementation
def test_no_ids_and_empty_tables_give_zeros(name, module, run):
    ids = IdList(jnp.zeros(0, jnp.int32), jnp.zeros(3, jnp.int32))
    segments = (Segment(0, 0, 1, "mean"), Segment(0, 1, 1, "sum", 0, 0, 0))
    call = Call((ids,), segments, "columns")

    def both(table, d_output):
        gradients = CallGradients(call, (d_output,), (3,))
        return module.lookup((table,), call), module.row_gradients(0, gradients)

    (output,), (rows, gradients) = run(both, jnp.ones((0, 3)), jnp.ones((1, 6)))
    assert_array_equal(output, np.zeros((1, 6)))
    assert rows.shape == (0,)
    assert gradients.shape == (0, 3)


# Steps of distinct rows


@every_implementation
def test_apply_rows_skips_padding_and_rows_outside(name, module, run):
    step = step_of(RULES["row_wise_adagrad"])
    rows = jnp.asarray([3, -1, NUM_ROWS, 22, NO_ROW, 0])
    table = draw_table(12)
    slots = (draw_table(1, seed=4) ** 2,)
    gradients = draw_table(12, seed=3)[:6]
    stepped = run(lambda *state: module.apply_rows(*state, rows, gradients, step), table, slots)
    real = {3: gradients[0], 22: gradients[3], 0: gradients[5]}
    real = {row: np.float64(gradient) for row, gradient in real.items()}
    assert_stepped(stepped, "row_wise_adagrad", table, slots, real)


@pytest.mark.slow_rows("gpu")
@pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS[1:3])
def test_stochastic_rounding_is_the_reference_one(name, module, run):
    rule = RULES["row_wise_adagrad"]
    call = ONE_TABLE["every combiner"]
    table = draw_table(8, "bfloat16")
    gradients = CallGradients(call, draw_gradients(call, [8]), (8,))
    state = table, (jnp.full((NUM_ROWS, 1), 0.1),), gradients

    def each(key):
        step = step_of(rule, api.stochastic_rounding(key))
        rounded, _ = module.update(*state, step)
        defined, _ = reference.update(*state, step)
        nearest, _ = module.update(*state, step_of(rule))
        return rounded, defined, nearest

    rounded, defined, nearest = map(np.asarray, run(each, jax.random.key(5)))
    # A sum can differ in its last bit, and then an entry can round to the other neighbour.
    assert rounded.dtype == table.dtype
    assert np.mean(rounded == defined) > 0.98
    assert np.any(rounded != nearest)


@pytest.mark.parametrize(("name", "module", "run"), ALL_IMPLEMENTATIONS[:3])
def test_ids_of_64_bits_are_not_wrapped_into_the_table(name, module, run):
    rule = RULES["row_wise_adagrad"]
    table = draw_table(12)

    def step_once(table, slots, d_output):
        gradients = CallGradients(call, (d_output,), (12,))
        new_state = module.update(table, slots, gradients, step_of(rule))
        return module.lookup((table,), call), new_state

    with jax.enable_x64(True):
        call = Call.of([IdList.single(jnp.asarray([2, 2**32 + 2, 2 - 2**32, 2**31 + 2]))], ["sum"])
        d_output = jnp.ones((4, 12), jnp.float32)
        actual = run(step_once, table, rule.init_slots(table), d_output)
    assert {array.dtype for array in jax.tree.leaves(actual)} == {jnp.dtype("float32")}
    (output,), (stepped, _) = actual
    assert np.any(output, axis=1).tolist() == [True, False, False, False]
    assert_array_equal(np.flatnonzero(np.any(stepped != table, axis=1)), [2])


def test_tiles_look_up_by_the_one_kernel_that_is_simulated():
    assert (
        sparsecore.lookup.keywords == sparsecore.row_gradients.keywords == {"pool": sparsecore.pool}
    )
