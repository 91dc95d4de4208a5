"""GPU kernels on a GPU or in Pallas' interpreter, and compiled by NVIDIA's compiler.

`make test-gpu` runs this file with JAX's CUDA plugin. Without a GPU, tests that need one are
skipped.
"""

import functools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.kernels import gpu
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.tt import TensorTrain
from tests import oracles
from tests.kernels.cases import (
    KERNEL_RULES,
    KNOWN_WARNINGS,
    NUM_ROWS,
    RULES,
    assert_close,
    assert_stepped,
    draw_gradients,
    draw_table,
    run_python,
    step_of,
)
from tests.world import assert_same

HAS_GPU = jax.default_backend() == "gpu"

pytestmark = KNOWN_WARNINGS
needs_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="needs a GPU: the results of the GPU kernels on a GPU are unproven here"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("RSEMBED_TEST_GPU") != "1",
    reason="needs JAX's CUDA plugin, as in `make test-gpu`: that the GPU kernels compile for Hopper is unproven here",
)


# On a GPU or in the interpreter


COMBINERS = ("sum", "mean", "sqrtn")


def update_of(call, rule):
    """A function that steps one table with gradients of the outputs of a call."""

    def update(table, slots, d_outputs):
        gradients = CallGradients(call, d_outputs, (table.shape[1],))
        return gpu.update(table, slots, gradients, step_of(rule))

    return update


@pytest.mark.slow
def test_weights_of_entries_without_a_row_may_be_anything():
    """The kernel reads no row for such entries: row `NO_ROW` is outside any table."""
    rows = jnp.asarray([3, NO_ROW, -1, 5, NUM_ROWS])
    offsets = jnp.asarray([0, 3, 5])
    weights = jnp.asarray([2.0, np.nan, np.inf, 0.5, -np.inf])
    clean = jnp.asarray([2.0, 0.0, 0.0, 0.5, 0.0])
    table = draw_table(12)
    outputs = []
    for each in (weights, clean):
        call = Call.of([IdList(rows, offsets, each)] * 3, COMBINERS)
        outputs.append(jax.jit(gpu.lookup)((table,), call))
    assert np.all(np.isfinite(outputs))
    assert_same(*outputs)


@pytest.mark.slow_rows("sgd")
@pytest.mark.parametrize("name", ["sgd", "row_wise_adagrad"])
def test_rows_that_many_entries_share_are_summed_in_pieces(name, monkeypatch):
    """Row 7 has 41 entries, row 2 one full piece of 4, and row 9 one entry more than a piece."""
    monkeypatch.setattr(gpu, "tiling", gpu.Tiling(num_ahead=2, piece_entries=4))
    draw = np.random.default_rng(0)
    rows = draw.permutation([7] * 41 + [2] * 4 + [9] * 5 + [0, 1, 3, 3, NO_ROW])
    weights = draw.uniform(0.5, 2.0, rows.size).astype(np.float32)
    offsets = np.arange(0, rows.size + 1, 5)
    call = Call.of([IdList(*map(jnp.asarray, (rows, offsets, weights)))], ["mean"])
    rule = RULES[name]
    table = draw_table(12)
    slots = rule.init_slots(table)
    d_outputs = draw_gradients(call, [12])
    update = jax.jit(update_of(call, rule))
    stepped = update(table, slots, d_outputs)
    # Bits must repeat on a GPU, too.
    assert_same(stepped, update(table, slots, d_outputs))
    (gradients,) = oracles.row_gradients(call, [NUM_ROWS], [12], d_outputs)
    assert_stepped(stepped, name, table, slots, gradients)
    of_rows = jax.jit(lambda d: gpu.row_gradients(NUM_ROWS, CallGradients(call, d, (12,))))
    for row, gradient in zip(*of_rows(d_outputs), strict=True):
        assert_close(gradient, gradients.get(int(row), np.zeros(12)))


@pytest.mark.slow_rows("storage1", "storage2", "None")
@pytest.mark.parametrize(
    "storage", [None, rs.Hashed(), rs.HostCached(cache_rows=16), TensorTrain((2,))]
)
def test_collections_train_alike_with_and_without_the_kernels(storage, monkeypatch):
    """The tables have 12 columns, and each of two steps reads some rows repeatedly."""
    monkeypatch.setattr(gpu, "unavailable_because", lambda: None)
    table = rs.TableSpec("t", 20, 12, combiner="mean", storage=storage, optimizer=ro.Adagrad(0.1))
    outputs = []
    for implementation in ("gpu", "reference"):
        collection = rs.EmbeddingCollection(
            rs.FeatureSpec("f", table), implementation=implementation
        )
        state = collection.init(jax.random.key(0))
        batch = collection.prepare({"f": [[3, 7, 3], [], [19], [7]]})
        state = collection.prefetch(state, batch)
        vectors, pullback = collection.lookup_vjp(state, batch)
        d_vectors = jax.tree.map(lambda x: x - 1.0, vectors)
        state = collection.apply(state, pullback(d_vectors))
        state = collection.update(state, batch, d_vectors)
        outputs.append(collection.lookup(state, batch)["f"])
    # By default, JAX multiplies float32 matrices on a GPU with about three significant digits.
    assert_allclose(*outputs, rtol=2e-3 if HAS_GPU and storage else 1e-5, atol=1e-6)


def test_no_float_is_added_in_the_order_of_arrival():
    """XLA's scatter-add on a GPU has no fixed order, so the last bits would differ between runs."""
    rows = jnp.asarray([3, 1, 3, 0])
    ids = IdList(rows, jnp.asarray([0, 3, 4]), jnp.asarray([0.5, 2.0, 0.7, 1.0]))
    call = Call.of([ids] * 3, COMBINERS)
    table = draw_table(12)
    d_outputs = draw_gradients(call, [12])
    rule = RULES["adagrad"]
    update = jax.make_jaxpr(update_of(call, rule))(table, rule.init_slots(table), d_outputs)
    norm_of = functools.partial(gpu.squared_norm, NUM_ROWS)
    norm = jax.make_jaxpr(norm_of)(CallGradients(call, d_outputs, (12,)))
    for program in (str(update), str(norm)):
        assert "pallas_call" in program
        assert not re.findall(r":f32.* = scatter-add", program)


# On a GPU


@needs_gpu
def test_bits_repeat():
    """Bags have 400 entries, many entries read one row, and sums of the weights are not exact."""
    generator = np.random.default_rng(0)
    rows = jnp.asarray(generator.zipf(1.2, 200_000) % 5000)
    weights = jnp.asarray(generator.uniform(0.5, 2.0, rows.size), jnp.float32)
    call = Call.of([IdList(rows, jnp.arange(0, 200_001, 400), weights)] * 3, COMBINERS)
    rule = RULES["adagrad"]
    table = jnp.ones((5000, 40))
    d_outputs = draw_gradients(call, [40])

    @jax.jit
    def both(d_outputs):
        norm = gpu.squared_norm(5000, CallGradients(call, d_outputs, (40,)))
        return update_of(call, rule)(table, rule.init_slots(table), d_outputs), norm

    first = both(d_outputs)
    for _ in range(7):
        assert_same(both(d_outputs), first)


@needs_gpu
def test_rows_of_a_table_of_more_than_two_to_the_31_numbers_are_found():
    """The table has 5 GiB in bfloat16. An offset of 32 bits would overflow in its second half."""
    num_rows = 21_000_000
    rows = jnp.asarray([0, 1, num_rows // 2, 2**24 - 1, 2**24, 2**24 + 1, num_rows - 1])
    marks = jnp.repeat(jnp.arange(1, 8, dtype=jnp.bfloat16)[:, None], 128, axis=1)

    @jax.jit
    def run():
        table = jnp.zeros((num_rows, 128), jnp.bfloat16).at[rows].set(marks, unique_indices=True)
        (actual,) = gpu.lookup((table,), Call.of([IdList.single(rows)], ["sum"]))
        stepped, _ = gpu.apply_rows(
            table, (), rows, actual, Step((jnp.float32(0.5),), RULES["sgd"])
        )
        return actual, stepped[rows], jnp.sum(stepped, dtype=jnp.float32)

    actual, stepped, total = run()
    marks = np.asarray(marks, np.float32)
    assert_array_equal(actual, marks)
    assert_array_equal(np.asarray(stepped, np.float32), marks / 2)
    assert total == np.sum(marks) / 2


# Through NVIDIA's compiler

COMPILED = (*KERNEL_RULES, "ftrl", "adagrad 100 bfloat16", "row_wise_adagrad 1", "sgd 1000 float16")


@pytest.fixture(scope="module")
def compiled():
    """Records of `compile_gpu` by case, and the end of its error output.

    The cases are compiled in a child process, because this process may use the CPU.
    """
    environment = os.environ | {"JAX_PLATFORMS": "", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    child = run_python(
        "-m", "tests.kernels.compile_gpu", *COMPILED, "init", environment=environment
    )
    records = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return {record["case"]: record for record in records}, child.stderr[-4000:]


@needs_compiler
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_for_hopper_without_a_copy_of_the_table(case, compiled):
    records, errors = compiled
    assert case in records, errors
    record = records[case]
    assert record["kernels"] == 3
    assert record["aliased_bytes"] == record["state_bytes"]
    assert record["temporary_bytes"] < record["state_bytes"] / 10


@needs_compiler
def test_tables_of_one_form_are_made_on_a_gpu(compiled):
    records, errors = compiled
    assert "init" in records, errors
