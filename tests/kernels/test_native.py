"""Native kernels: slots, rounding, malformed offsets, threads, and the library itself."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed.optimizers as ro
from rsembed.kernels import devices, native, reference
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from tests.kernels.cases import (
    NUM_ROWS,
    ONE_TABLE,
    RULES,
    assert_close,
    draw_gradients,
    draw_table,
    needs_native,
    run_python,
    step_of,
)

pytestmark = needs_native


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++"), reason="needs Debian's g++-aarch64-linux-gnu"
)
@pytest.mark.parametrize(
    "source", ["pairs.cc", "random_bits.cc", "row_kernels.cc", "train_kernels.cc"]
)
def test_what_differs_by_processor_compiles_for_arm(source):
    path = Path(__file__).parents[2] / "rsembed" / "kernels" / "csrc" / source
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run(["aarch64-linux-gnu-g++", *options, path], check=True)


def test_slots_of_any_shape_and_type_follow_a_traced_rule():
    class Counting(ro.SGD):
        def step_rows(self, rows, slots, gradients, hyper):
            return rows - hyper[0] * gradients, (slots[0] + 1, slots[1] | True)

    call = ONE_TABLE["every combiner"]
    slots = jnp.zeros(NUM_ROWS, jnp.int32), jnp.zeros((NUM_ROWS, 2, 3), bool)
    gradients = CallGradients(call, draw_gradients(call, [4]), (4,))
    state = draw_table(4), slots, gradients, step_of(Counting(0.1))
    stepped = jax.jit(native.update)(*state)
    defined = jax.jit(reference.update)(*state)
    for one, other in zip(jax.tree.leaves(stepped), jax.tree.leaves(defined), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other)


def test_float16_keeps_its_value_also_if_it_is_subnormal():
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)].reshape(-1, 31)
    rows = IdList.single(jnp.arange(len(numbers)))
    (output,) = native.lookup((jnp.asarray(numbers),), Call.of([rows], ["sum"]))
    assert_array_equal(output, numbers.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_the_table_is_to_nearest_even(dtype):
    edges = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, np.nan]
    values = np.concatenate([np.geomspace(1e-6, 1e5, 2000), np.linspace(-2.0, 2.0, 999), edges])
    values = values.astype(np.float32)[:, None]
    table = jnp.zeros(values.shape, dtype)
    step = Step((np.float32(1.0),), RULES["sgd"])
    rounded, _ = native.apply_rows(table, (), jnp.arange(len(values)), jnp.asarray(-values), step)
    with np.errstate(over="ignore"):
        nearest = values.astype(table.dtype)
    assert_array_equal(np.asarray(rounded, np.float32), nearest.astype(np.float32))


@pytest.mark.parametrize("offsets", [[0, 99, 3], [-5, 2, 1000], [7, 3, 1], [NO_ROW, -NO_ROW, 6]])
def test_malformed_offsets_touch_nothing_outside(offsets):
    call = Call.of([IdList(jnp.arange(6), jnp.asarray(offsets))], ["mean"])
    table = jnp.ones((NUM_ROWS, 8))
    (output,) = native.lookup((table,), call)
    assert output.shape == (2, 8)
    assert set(np.unique(output)) <= {0.0, 1.0}
    gradients = CallGradients(call, (jnp.ones((2, 8)),), (8,))
    stepped, _ = native.update(table, (), gradients, step_of(RULES["sgd"]))
    assert_array_equal(stepped[6:], table[6:])


def test_a_library_for_another_jaxlib_is_passed_over(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("the handler's API version (0.5) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    reason = devices.shared_library.__wrapped__()
    for words in ("was not made for jaxlib", "API version (0.5)", "PIP_CONSTRAINT"):
        assert words in reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_allocated_arrays_hold_their_fill(dtype):
    for shape in ((), (0, 3), (7,), (3, 5), (1000, 1001)):
        array = jax.jit(lambda shape=shape: native.allocate(shape, dtype, 1))()
        assert array.shape == shape
        assert array.dtype == dtype
        assert np.all(array == 1)


_HASHES = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np
import rsembed.optimizers as ro
from rsembed.kernels import devices, native
from rsembed.kernels.contract import Call, CallGradients, IdList, Step
from rsembed.keys import Keys

def digest(arrays):
    sha = hashlib.sha256()
    for array in jax.tree.leaves(arrays):
        sha.update(np.asarray(array).tobytes())
    return sha.hexdigest()

generator = np.random.default_rng(0)
num_rows, dim, bags = 5000, 33, 900
table = jax.device_put(generator.standard_normal((num_rows, dim), np.float32) * np.float32(1e-20))
lists, d_outputs, combiners = [], [], ("sum", "mean", "sqrtn")
for combiner in combiners:
    rows = jnp.asarray((num_rows * generator.random(bags * 30) ** 4).astype(np.int32))
    weights = jax.device_put(generator.random(bags * 30, np.float32)) if combiner == "sqrtn" else None
    lists.append(IdList(rows, jax.device_put(np.arange(bags + 1, dtype=np.int32) * 30), weights))
    d_outputs.append(jax.device_put(generator.standard_normal((bags, dim), np.float32)))
call = Call.of(lists, combiners)
gradients = CallGradients(call, tuple(d_outputs), (dim,))
found = {"lookup": digest(native.lookup((table,), call))}
found["row_gradients"] = digest(native.row_gradients(num_rows, gradients))
for rule in (ro.RowWiseAdagrad(0.1), ro.FTRL(0.1)):  # native, and traced
    step = Step(rule.get_hyperparameters(0), rule)
    found[rule.short_name()] = digest(jax.jit(lambda: native.update(table, rule.init_slots(table), gradients, step))())

halves = generator.zipf(1.3, (2, 50_000)).clip(max=2**32 - 1).astype(np.uint32)
keys = Keys(*map(jax.device_put, halves), jax.device_put(generator.random(50_000) < 0.9))

@jax.jit
def keyed(keys):
    rows, counts, zeros = jnp.arange(50_000, dtype=jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(50_000, jnp.int32)
    unique = native.unique_keys(keys, rows)
    owners = jnp.where(keys.is_key, (keys.low % 5).astype(jnp.int32), 5)
    table = jnp.zeros((2**17, 2), jnp.uint32), jnp.full(2**17, -1, jnp.int32), counts, counts
    table = native.insert_keys(*table, keys.only(unique[1].at[unique[0]].get(mode="fill", fill_value=-1) == rows), rows)
    uses = native.count_uses(zeros, zeros, native.find_keys(table[0], table[1], keys)[1], jnp.int32(1), rows)
    bits = native.row_bits(jax.random.key(1), (keys.high, keys.low), 7)
    return (unique, native.distinct(owners, (keys.high, keys.low), 5)), (table, uses, bits)

found["distinct"], found["keys"] = map(digest, keyed(keys))
print(json.dumps([found, devices.shared_library().rsembed_num_cores()]))
"""


def run_child(program, **environment):
    """The JSON that a program prints in a child process."""
    child = run_python(
        "-c", program, environment=os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    )
    assert (child.returncode, child.stderr) == (0, "")
    return json.loads(child.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs os.sched_setaffinity")
def test_results_of_several_threads_are_those_of_a_process_that_is_granted_one_core():
    # With `NPROC`, XLA makes more threads than cores. The second process has a single core.
    on_one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    several_threads, num_cores = run_child(_HASHES, NPROC="7")
    assert num_cores == len(os.sched_getaffinity(0))
    assert run_child(on_one_core + _HASHES, NPROC="16") == [several_threads, 1]


def test_an_environment_that_asks_for_what_there_is_not_is_told(monkeypatch):
    # The wrapped function does not keep its result.
    load = devices.shared_library.__wrapped__
    monkeypatch.setenv("RSEMBED_ISA", "avx-512")
    with pytest.raises(
        ValueError, match="'avx-512' names no instruction set; it knows baseline, avx2, avx512"
    ):
        load()
    monkeypatch.setenv("RSEMBED_ISA", "")
    monkeypatch.setenv("RSEMBED_NATIVE_LIBRARY", "/nowhere/kernels.so")
    assert load() == "RSEMBED_NATIVE_LIBRARY names /nowhere/kernels.so, which is no file"
