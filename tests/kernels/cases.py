"""Cases for all implementations of the kernels: calls, optimizer rules, and tolerances."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed.optimizers as ro
from rsembed.kernels import gpu, native, reference, sparsecore
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from rsembed.kernels.devices import tracing_for
from tests import launching, oracles
from tests.kernels.simulator import simulate
from tests.optimizers.test_contract import CONTRACT

_reason = native.unavailable_because()
needs_native = pytest.mark.skipif(
    _reason is not None, reason=f"needs the native kernels: {_reason}"
)
KNOWN_WARNINGS = [
    # JAX 0.12 warns of every copy from a tile's memory with a semaphore, as in `sync_copy`.
    pytest.mark.filterwarnings("ignore:Destination semaphore is ignored"),
    # JAX 0.11 and later warn of the backend, but kernels did not lower with its replacement.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
"""Marks for tests of kernels for accelerators."""
IMPLEMENTATIONS = ("reference", pytest.param("native", marks=needs_native))


def compiled(function, *args):
    return jax.jit(function)(*args)


def simulated(function, *args):
    with tracing_for("v6e"):
        return simulate(function, *args)


ALL_IMPLEMENTATIONS = [
    pytest.param("reference", reference, compiled, id="reference"),
    pytest.param("native", native, compiled, id="native", marks=needs_native),
    pytest.param("gpu", gpu, compiled, id="gpu"),
    pytest.param("sparsecore", sparsecore, simulated, id="sparsecore"),
]
"""Name and module of each implementation, and a function that runs a function of the module."""

DTYPES = ("float32", "bfloat16", "float16")
# 12 columns are neither a multiple of the vector lanes nor a power of two.
WIDTHS = (1, 100, 300) if jax.default_backend() == "gpu" else (12,)
SETTINGS = {
    "reference": [(dtype, 8) for dtype in DTYPES],
    "native": [(dtype, dim) for dtype in DTYPES for dim in (12, 1, 17, 64, 130)],
    "gpu": [(dtype, dim) for dtype in DTYPES for dim in WIDTHS],
    "sparsecore": [("float32", 12)],
}
"""Dtype and number of columns of the tables that each implementation is tested with."""

COMBINERS = ("sum", "mean", "sqrtn", "mean_by_count", "none")
NUM_ROWS = 23
# float32: an implementation can add a few dozen terms in another order. Each step rounds the table
# once to its dtype, so a sum with another last bit can round to the neighbouring value. bfloat16
# has 8 significant bits, float16 has 11.
RELATIVE_TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}


def step_of_signs(rule, row, slots, gradient, step):
    row -= 0.3 * np.sign(gradient) / (1.0 + slots[0])
    slots[0] += 1.0


def step_of_signs_in_jax(gradient, row, count, lr):
    return row - lr * jnp.sign(gradient) / (1.0 + count), count + 1.0


KERNEL_RULES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
"""Rules with handwritten kernels. All other rules are traced."""
FORMULAS = {name: CONTRACT[name] for name in (*KERNEL_RULES, "ftrl")}
FORMULAS["custom"] = (ro.Custom(0.3, step_of_signs_in_jax, (0.0,)), step_of_signs)
RULES = {name: rule for name, (rule, _) in FORMULAS.items()}
STEP = 2


def step_of(rule, rounding=None):
    """Arguments of step number `STEP` of a rule."""
    return Step(rule.get_hyperparameters(STEP), rule, rounding)


def run_python(*arguments, environment):
    """Runs Python with these arguments. The child process can import the library and the tests."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=launching.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def training_step(module, name, dim=128, dtype="float32"):
    """A function that looks up and steps a table, and the shapes of its arguments.

    The table is so large that a copy of it shows in the memory statistics of the compiled program.
    """
    rule = RULES[name]
    shape = jax.ShapeDtypeStruct
    table = shape((1 << 20, dim), dtype)

    def train(table, slots, rows, offsets):
        call = Call.of([IdList(rows, offsets)], ["mean"])
        (output,) = module.lookup((table,), call)
        gradients = CallGradients(call, (output,), (dim,))
        return output, module.update(table, slots, gradients, step_of(rule))

    slots = jax.eval_shape(rule.init_slots, table)
    return train, (table, slots, shape((4096,), jnp.int32), shape((513,), jnp.int32))


def draw_table(dim, dtype="float32", seed=0):
    numbers = np.random.default_rng(seed).standard_normal((NUM_ROWS, dim))
    return jnp.asarray(numbers, dtype)


def draw_gradients(call, dims, seed=1):
    """Random gradients of the outputs of a call."""
    generator = np.random.default_rng(seed)
    shapes, _ = call.outputs(dims)
    return tuple(jnp.asarray(generator.standard_normal(shape, np.float32)) for shape in shapes)


# Calls of one table of NUM_ROWS rows.


def draw_list(seed, lengths, *, weighted=False, single=False):
    """Bags of these lengths. Row 11 is never read, and some ids are outside the table.

    With `single`, the list has one id for each sample, and `lengths` must be ones.
    """
    generator = np.random.default_rng(seed)
    num_entries = sum(lengths)
    rows = generator.integers(0, NUM_ROWS, num_entries).astype(np.int32)
    rows[rows == 11] = NUM_ROWS - 1
    rows[1::7] = -1
    rows[3::7] = NUM_ROWS
    rows[4::11] = NO_ROW
    weights = None
    if weighted:
        weights = jnp.asarray(generator.uniform(0.5, 2.0, num_entries), jnp.float32)
    if single:
        return IdList(jnp.asarray(rows), None, weights, (num_entries, 1))
    return IdList(jnp.asarray(rows), jnp.asarray(np.cumsum([0, *lengths])), weights)


def _every_combiner(lengths, weighted=False):
    return [draw_list(seed, lengths, weighted=weighted) for seed in range(len(COMBINERS))]


def _one_list(ids, offsets, weights=None):
    if weights is not None:
        weights = jnp.float32(weights)
    return IdList(jnp.int32(ids), jnp.int32(offsets), weights)


ONE_TABLE = {
    "every combiner": Call.of(_every_combiner([3, 0, 5, 1, 9]), COMBINERS),
    "weighted": Call.of(_every_combiner([0, 4, 7, 0], weighted=True), COMBINERS),
    "no entry": Call.of([draw_list(0, [0, 0, 0]), draw_list(0, [], single=True)], ["sum", "mean"]),
    "no bag": Call.of([draw_list(0, []), draw_list(1, [2])], ["mean", "sum"]),
    "no weight": Call.of([_one_list([1, 2], [0, 2], [0, 0])] * 2, ["mean", "sqrtn"]),
    "one row only": Call.of([_one_list([7] * 40, range(0, 41, 4))], ["sum"]),
    "trimmed": Call.of([_one_list(range(9), [2, 4, 6])], ["mean"]),
}
_single = draw_list(9, [1] * 8, weighted=True, single=True)
EVERY_BAG = Call.of(
    [*ONE_TABLE["every combiner"].lists, *ONE_TABLE["weighted"].lists, _single],
    [*COMBINERS, *COMBINERS, "sum"],
)
"""Bags of all kinds, for steps of one table."""


# Calls of several tables. The segments of a case are fixed, and each seed draws ids and weights.

TABLES = ((9, 5, "float32"), (14, 8, "bfloat16"), (6, 12, "float16"))
"""Number of rows, number of columns and dtype of each table."""


def ragged(generator, num_bags, num_entries, *, weighted=False):
    """A list of ragged bags. Bags can be empty.

    The first two and the last two entries of the list are in no bag.
    """
    offsets = np.zeros(num_bags + 1)
    if num_entries:
        ends = generator.integers(2, num_entries - 1, num_bags - 1)
        offsets = [2, *np.sort(ends), num_entries - 2]
    ids = _ids(generator, num_entries)
    return IdList(ids, np.int32(offsets), _weights(generator, num_entries, weighted))


def arrays(generator, num_bags, width, *, weighted=False):
    """A list of bags with the same length."""
    num_entries = num_bags * width
    weights = _weights(generator, num_entries, weighted)
    return IdList(_ids(generator, num_entries), None, weights, (num_bags, width))


def _ids(generator, num_entries):
    ids = generator.integers(-2, 13, num_entries).astype(np.int32)
    ids[5::9] = NO_ROW
    ids[7::13] = -(2**31)
    return ids


def _weights(generator, num_entries, weighted):
    if not weighted:
        return None
    signs = generator.choice([-1.0, 1.0, 1.0, 1.0], num_entries)
    weights = generator.uniform(0.5, 2.0, num_entries) * signs
    weights[3::8] = 0.0
    return weights.astype(np.float32)


def _mixed(layout, *combiners, bags=(3, 3, 3, 3)):
    """Four features in one list, which read three windows of the rows of two tables.

    The first and the last feature read the same window.
    """

    def draw(generator):
        first = np.cumsum([0, *bags]).tolist()
        windows = [(0, 0, 4), (1, 3, 11), (0, 4, 5), (0, 0, 4)]
        segments = [Segment(0, first[k], bags[k], combiners[k], *windows[k]) for k in range(4)]
        # The outputs have another order than the bags.
        if layout == "blocks":
            segments = [segments[k] for k in (2, 0, 3, 1)]
        return Call((ragged(generator, sum(bags), 60, weighted=True),), tuple(segments), layout)

    return draw


def _kinds_of_lists(generator):
    """Ragged lists, arrays and single ids, some of them weighted. Some bags are in no segment."""
    lists = (
        ragged(generator, 7, 30),
        arrays(generator, 5, 3, weighted=True),
        arrays(generator, 8, 1, weighted=True),
        arrays(generator, 4, 2),
        arrays(generator, 6, 1),
        ragged(generator, 3, 20, weighted=True),
        ragged(generator, 4, 20, weighted=True),
    )
    segments = (
        Segment(0, 1, 3, "sqrtn", 0, 0, 4),
        Segment(1, 0, 2, "mean", 1, 3, 11),
        Segment(0, 5, 2, "mean", 1),
        Segment(1, 3, 2, "sqrtn", 0, 4, 5),
        Segment(2, 0, 4, "sqrtn", 2, 1, 5),
        Segment(2, 4, 4, "mean", 0),
        Segment(3, 1, 3, "mean_by_count", 2),
        Segment(4, 0, 3, "none", 2, 0, 6),
        Segment(4, 4, 2, "none", 0, 2),
        Segment(5, 0, 3, "none", 1, 2, 9),
        Segment(6, 0, 4, "sum", 1, 2, 9),
    )
    return Call(lists, segments)


def _nothing(generator):
    """Empty lists, empty bags, segments without bags, windows without rows, and an unread table."""
    lists = (
        ragged(generator, 3, 0, weighted=True),
        arrays(generator, 4, 0),
        arrays(generator, 0, 3, weighted=True),
        ragged(generator, 4, 30),
    )
    segments = (
        Segment(0, 0, 3, "mean"),
        Segment(1, 1, 2, "sqrtn"),
        Segment(1, 3, 1, "sum"),
        Segment(2, 0, 0, "sum"),
        Segment(3, 0, 1, "mean", 1, 4, 0),
        Segment(3, 1, 0, "sum", 1),
        Segment(3, 2, 1, "sum", 1, 14),
        Segment(3, 3, 1, "mean", 1, 13),
    )
    return Call(lists, segments)


def _none(layout):
    def draw(generator):
        segments = tuple(
            Segment(0, first, 2, "none", table, table, 5)
            for first, table in [(0, 1), (3, 0), (5, 1)]
        )
        return Call((ragged(generator, 8, 40, weighted=True),), segments, layout)

    return draw


def _scaled(factor):
    """Weights whose sums or squares overflow or underflow in float32."""

    def draw(generator):
        lists, segments = [], []
        for number, combiner in enumerate(("mean", "sqrtn", "mean_by_count")):
            for own in (
                ragged(generator, 4, 30, weighted=True),
                arrays(generator, 3, 1, weighted=True),
            ):
                weights = np.abs(own.weights) * np.float32(factor)
                segments.append(Segment(len(lists), 0, own.num_bags, combiner, number))
                lists.append(dataclasses.replace(own, weights=weights))
        return Call(tuple(lists), tuple(segments))

    return draw


def _extremes_beside_others(generator):
    """One list with tiny weights, and two segments of it with different combiners."""
    own = ragged(generator, 6, 50, weighted=True)
    own = dataclasses.replace(own, weights=own.weights * np.float32(1e-20))
    return Call((own,), (Segment(0, 0, 3, "mean", 0), Segment(0, 3, 3, "sqrtn", 1)))


SEVERAL_TABLES = {
    "columns": _mixed("columns", "sum", "sum", "sum", "sum"),
    "blocks": _mixed("blocks", *["mean_by_count"] * 4, bags=(3, 0, 4, 1)),
    "mixed combiners": _mixed("each", "mean", "sqrtn", "mean_by_count", "sum", bags=(2, 4, 3, 3)),
    "mixed columns": _mixed("columns", "mean_by_count", "mean", "sqrtn", "mean"),
    "kinds of lists": _kinds_of_lists,
    "nothing": _nothing,
    "none in columns": _none("columns"),
    "none in each": _none("each"),
    "tiny weights": _scaled(1e-20),
    "huge weights": _scaled(1e19),
    "tiny weights of two combiners": _extremes_beside_others,
}


def draw_call(name, seed):
    """A random call of the case `name` of `SEVERAL_TABLES`."""
    return jax.device_put(SEVERAL_TABLES[name](np.random.default_rng(seed)))


def draw_tables(seed, dtype=None):
    """Random tables for `draw_call`, in the dtypes of `TABLES`, or all in `dtype`."""
    generator = np.random.default_rng(seed)
    tables = []
    for num_rows, dim, own_dtype in TABLES:
        numbers = generator.standard_normal((num_rows, dim))
        tables.append(jnp.asarray(numbers, dtype or own_dtype))
    return tuple(tables)


def assert_close(actual, desired, dtype="float32"):
    tolerance = RELATIVE_TOLERANCE[str(dtype)]
    actual = np.asarray(actual, np.float64)
    desired = np.asarray(desired, np.float64)
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def assert_near(actual, desired):
    """Asserts that all differences are small in relation to the largest desired number."""
    desired = np.asarray(desired, np.float64)
    scale = np.abs(desired).max(initial=0.0) or 1.0
    assert_close(np.asarray(actual, np.float64) / scale, desired / scale)


def assert_stepped(stepped, name, table, slots, gradients):
    """Asserts table and slots after step `STEP` of the rule for each row in `gradients`."""
    rule, step_row = FORMULAS[name]
    wanted_table, wanted_slots = oracles.stepped_table(
        table, slots, gradients, functools.partial(step_row, rule), step=STEP
    )
    new_table, new_slots = stepped
    assert new_table.dtype == table.dtype
    assert_close(new_table, wanted_table, table.dtype)
    others = np.setdiff1d(np.arange(len(table)), [*gradients])
    np.testing.assert_array_equal(np.asarray(new_table)[others], np.asarray(table)[others])
    for slot, wanted, old in zip(new_slots, wanted_slots, slots, strict=True):
        assert slot.dtype == old.dtype
        assert slot.shape == old.shape
        assert_close(slot, wanted)
