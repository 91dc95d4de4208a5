"""GPU kernels: on a GPU where there is one, through Pallas' interpreter where not, and through NVIDIA's compiler.

`make test-gpu` runs this file with JAX's CUDA plugin. The sizes that only a card can hold are skipped without one.
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
from rsembed.kernels import api, gpu
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.tt import TensorTrain
from tests import oracles
from tests.kernels.cases import (
    NUM_ROWS,
    ORACLE_STEPS,
    RULES,
    assert_close,
    draw_gradients,
    draw_table,
    run_python,
    step_by_loops,
)
from tests.world import assert_same

HAS_GPU = jax.default_backend() == "gpu"

# From jax 0.11 on.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

needs_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="unproven: the numbers of the GPU kernels on a GPU; there is none here"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("RSEMBED_TEST_GPU") != "1",
    reason="unproven here: that the GPU kernels compile for Hopper; make test-gpu installs JAX's CUDA plugin and tries",
)


# On a card or in the interpreter


def step_of(call, rule, number=2):
    hyper = rule.get_hyperparameters(number)

    def step(table, slots, d_outputs):
        gradients = CallGradients(call, d_outputs, (table.shape[1],))
        return gpu.update(table, slots, gradients, Step(hyper, rule))

    return step


def test_weights_of_entries_without_a_row_may_be_anything():
    """Nothing is read for them: at row `NO_ROW` that would be far outside the table."""
    rows = jnp.asarray([3, NO_ROW, -1, 5, NUM_ROWS], jnp.int32)
    weights = jnp.asarray([2.0, np.nan, np.inf, 0.5, -np.inf])
    table, seen = draw_table(12), []
    for combiner in ("sum", "mean", "sqrtn"):
        ids = IdList(rows, jnp.asarray([0, 3, 5]), weights)
        (output,) = jax.jit(gpu.lookup)((table,), Call.of([ids], [combiner]))
        clean = IdList(rows, ids.offsets, jnp.nan_to_num(weights, posinf=0.0, neginf=0.0))
        assert_close(output, oracles.pooled_lookup(table, clean, combiner))
        seen.append(output)
    assert np.all(np.isfinite(seen))


@pytest.mark.slow_rows("sgd")
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad"])
def test_rows_that_many_entries_share_are_summed_in_pieces(name, monkeypatch):
    """Row 7 has 41 entries, row 2 as many as make a piece, row 9 one more; the others have few."""
    monkeypatch.setattr(gpu, "tiling", gpu.Tiling(num_ahead=2, piece_entries=4))
    rows = np.int32([7] * 41 + [2] * 4 + [9] * 5 + [0, 1, 3, 3, NO_ROW])
    np.random.default_rng(0).shuffle(rows)
    weights = np.random.default_rng(1).uniform(0.5, 2.0, rows.size).astype(np.float32)
    ids = IdList(
        jnp.asarray(rows), jnp.asarray(np.arange(0, rows.size + 1, 5)), jnp.asarray(weights)
    )
    call = Call.of([ids], ["mean"])
    table, d_outputs, rule = draw_table(12), draw_gradients(call, [12]), RULES[name]
    step, slots = jax.jit(step_of(call, rule)), rule.init_slots(table)
    stepped, again = step(table, slots, d_outputs), step(table, slots, d_outputs)
    assert_same(stepped, again)  # on a card, too
    (gradients,) = oracles.row_gradients(call, [NUM_ROWS], [12], d_outputs)
    want_table, want_slots = step_by_loops(name, table, slots, gradients)
    for one, other in zip(jax.tree.leaves(stepped), [want_table, *want_slots], strict=True):
        assert_close(one, other)
    of_rows = jax.jit(lambda d: gpu.row_gradients(NUM_ROWS, CallGradients(call, d, (12,))))(
        d_outputs
    )
    for row, gradient in zip(of_rows[0].tolist(), of_rows[1], strict=True):
        assert_close(gradient, gradients.get(row, np.zeros(12)))


@pytest.mark.slow_rows("storage1", "storage2")
@pytest.mark.parametrize(
    "storage", [None, rs.Hashed(), rs.HostCached(cache_rows=16), TensorTrain((2,))]
)
def test_collections_train_alike_with_and_without_the_kernels(storage, monkeypatch):
    """Wherever rows are kept; two steps with equal rows in one batch, of rows of 12 numbers."""
    monkeypatch.setattr(gpu, "unavailable_because", lambda: None)
    spec = rs.TableSpec(
        "t", 20, 12, combiner="mean", storage=storage,
        optimizer=ro.Adagrad(0.1),
    )  # fmt: skip
    outputs = []
    for implementation in ("gpu", "reference"):
        collection = rs.EmbeddingCollection(
            rs.FeatureSpec("f", spec), implementation=implementation
        )
        state, batch = (
            collection.init(jax.random.key(0)),
            collection.prepare({"f": [[3, 7, 3], [], [19], [7]]}),
        )
        for _ in range(2):
            state = collection.prefetch(state, batch)
            vectors, pullback = collection.lookup_vjp(state, batch)
            state = collection.apply(state, pullback(jax.tree.map(lambda x: x - 1.0, vectors)))
            state = collection.update(state, batch, jax.tree.map(lambda x: x - 1.0, vectors))
        outputs.append(collection.lookup(state, batch)["f"])
    # Two bytes of every factor of a product, as a GPU multiplies by default, are good for three digits.
    assert_allclose(*outputs, rtol=2e-3 if HAS_GPU and storage else 1e-5, atol=1e-6)


def test_no_float_is_added_in_the_order_of_arrival():
    """XLA's scatter on a GPU adds so, and the last bits of a sum would differ from run to run."""
    rows, weights = jnp.asarray([3, 1, 3, 0], jnp.int32), jnp.asarray([0.5, 2.0, 0.7, 1.0])
    for combiner in ("sum", "mean", "sqrtn"):
        call = Call.of([IdList(rows, jnp.asarray([0, 3, 4]), weights)], [combiner])
        table, d_outputs, rule = draw_table(12), draw_gradients(call, [12]), RULES["adagrad"]
        step = jax.make_jaxpr(step_of(call, rule))(table, rule.init_slots(table), d_outputs)
        norm_of = functools.partial(gpu.squared_norm, NUM_ROWS)
        norm = jax.make_jaxpr(norm_of)(CallGradients(call, d_outputs, (12,)))
        for program in (step, norm):
            assert "pallas_call" in str(program)
            assert not re.findall(r":f32.* = scatter-add", str(program))


# On a card


@needs_gpu
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bits_repeat(combiner):
    """Of bags of hundreds of entries, one row in a tenth of them, and weights whose sums are not exact."""
    generator = np.random.default_rng(0)
    rows = jnp.asarray(generator.zipf(1.2, 200_000) % 5000, jnp.int32)
    weights = jnp.asarray(generator.uniform(0.5, 2.0, rows.size), jnp.float32)
    call = Call.of(
        [IdList(rows, jnp.arange(0, 200_001, 400, dtype=jnp.int32), weights)], [combiner]
    )
    table, d_outputs, rule = jnp.ones((5000, 40)), draw_gradients(call, [40]), RULES["adagrad"]
    step = jax.jit(step_of(call, rule))
    norm = jax.jit(lambda d_outputs: gpu.squared_norm(5000, CallGradients(call, d_outputs, (40,))))
    first, *others = [
        (step(table, rule.init_slots(table), d_outputs), norm(d_outputs)) for _ in range(8)
    ]
    for other in others:
        assert_same(other, first)


@needs_gpu
def test_arrays_on_the_cpu_beside_a_gpu_are_served_there():
    rows, rule = jnp.asarray([3, 1, 3], jnp.int32), RULES["adagrad"]
    call = Call.of([IdList(rows, jnp.asarray([0, 2, 3]))], ["mean"])
    of_step = Step(rule.get_hyperparameters(0), rule)

    def step(table, slots, call):
        (output,) = api.lookup((table,), call)
        return output, api.update(table, slots, CallGradients(call, (output,), (12,)), of_step)

    table, cpu = draw_table(12), jax.devices("cpu")[0]
    given = table, rule.init_slots(table), call
    found = jax.jit(step)(*jax.device_put(given, cpu))
    assert found[0].devices() == {cpu}
    jax.tree.map(assert_close, found, jax.jit(step)(*given))


@needs_gpu
def test_rows_of_a_table_of_more_than_two_to_the_31_numbers_are_found():
    """5 GiB of bfloat16: an offset of 32 bits would wrap at half of them."""
    num_rows, dim = 21_000_000, 128
    assert num_rows * dim > 2**31
    rows = jnp.asarray([0, 1, num_rows // 2, 2**24 - 1, 2**24, 2**24 + 1, num_rows - 1], jnp.int32)
    marks = jnp.arange(1, 8, dtype=jnp.bfloat16)[:, None] * jnp.ones((1, dim), jnp.bfloat16)

    @jax.jit
    def run():
        table = jnp.zeros((num_rows, dim), jnp.bfloat16).at[rows].set(marks, unique_indices=True)
        (found,) = gpu.lookup((table,), Call.of([IdList.single(rows)], ["sum"]))
        stepped, _ = gpu.apply_rows(table, (), rows, found, Step((jnp.float32(0.5),), RULES["sgd"]))
        return found, stepped[rows], jnp.sum(stepped, dtype=jnp.float32)

    found, stepped, total = run()
    assert_array_equal(np.asarray(found, np.float32), np.asarray(marks, np.float32))
    assert_array_equal(np.asarray(stepped, np.float32), np.asarray(marks, np.float32) / 2)
    assert total == 28 / 2 * dim


@needs_gpu
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_donated_table_is_stepped_where_it_lies(name):
    """A copy of the table would be 1 GiB more than what the card ever held."""
    rule, shape = RULES[name], (1 << 21, 128)
    ids = IdList(jnp.arange(4096, dtype=jnp.int32) * 7, jnp.arange(0, 4097, 8, dtype=jnp.int32))
    call = Call.of([ids], ["mean"])
    table = jnp.zeros(shape)
    slots, d_outputs = rule.init_slots(table), (jnp.ones((512, 128)),)
    state_bytes = sum(array.nbytes for array in jax.tree.leaves((table, slots)))
    compiled = (
        jax.jit(step_of(call, rule), donate_argnums=(0, 1)).lower(table, slots, d_outputs).compile()
    )
    memory = compiled.memory_analysis()
    assert (
        memory.alias_size_in_bytes == state_bytes and memory.temp_size_in_bytes < state_bytes / 100
    )
    place = table.unsafe_buffer_pointer()
    stepped, _ = jax.block_until_ready(compiled(table, slots, d_outputs))
    assert stepped.unsafe_buffer_pointer() == place


# Through NVIDIA's compiler

COMPILED = (*ORACLE_STEPS, "ftrl", "adagrad 100 bfloat16", "rowwise_adagrad 1", "sgd 1000 float16")


@pytest.fixture(scope="module")
def compiled():
    """What became of every case, in a process of its own: this one may have settled on a CPU."""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
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
    found = records[case]
    print(found)
    assert found["kernels"] == 3 and found["aliased_bytes"] == found["state_bytes"]
    assert found["temporary_bytes"] < found["state_bytes"] / 10


@needs_compiler
def test_tables_of_one_form_are_made_on_a_gpu(compiled):
    records, errors = compiled
    assert "init" in records, errors
