"""GPU kernels on a GPU where there is one, and through NVIDIA's compiler with JAX's CUDA plugin: `make test-gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rsembed.kernels import api, gpu
from tests import oracles
from tests.kernels.cases import NUM_ROWS, ORACLE_STEPS, RAGGED, RULES, assert_close, draw_gradients, draw_table

ROOT = Path(__file__).resolve().parents[2]

# From jax 0.11 on.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="unproven: the numbers of the GPU kernels on a GPU; there is none here"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("RSEMBED_TEST_GPU") != "1",
    reason="unproven here: that the GPU kernels compile for Hopper; make test-gpu installs JAX's CUDA plugin and tries",
)


@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", RAGGED)
def test_lookups_on_the_card_agree_with_loops(case, dtype):
    table, segments = draw_table(100, dtype), RAGGED[case]
    for output, segment in zip(jax.jit(gpu.lookup)(table, segments), segments, strict=True):
        assert_close(output, oracles.pooled_lookup(np.asarray(table, np.float64), segment))


@needs_gpu
@pytest.mark.parametrize("name", ORACLE_STEPS)
def test_updates_on_the_card_agree_with_loops_and_repeat_bit_by_bit(name):
    rule, segments = RULES[name], RAGGED["every combiner"] + RAGGED["weighted"]
    table, d_outputs = draw_table(100), draw_gradients(segments, 100)
    slots, hyper = rule.init_slots(table), rule.get_hyperparameters(2)
    step = jax.jit(lambda *arrays: api.update(*arrays, hyper, rule, implementation="gpu"))
    first, again = step(table, slots, segments, d_outputs), step(table, slots, segments, d_outputs)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    gradients = oracles.combined_row_gradients(NUM_ROWS, segments, d_outputs)
    made_by, made_of = ORACLE_STEPS[name]
    want_table, want_slots = oracles.stepped_table(table, slots, gradients, made_by, **made_of)
    for one, other in zip(jax.tree.leaves(first), [want_table, *want_slots], strict=True):
        assert_close(one, other)


@needs_compiler
@pytest.mark.parametrize("name", [*ORACLE_STEPS, "ftrl"])
def test_compiles_for_hopper_without_a_copy_of_the_table(name):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_gpu", name],
        env={**environment, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found = json.loads(child.stdout.splitlines()[-1])
    print(name, found)
    assert found["kernels"] == 2 and found["aliased_bytes"] == found["state_bytes"]
    assert found["temporary_bytes"] < found["state_bytes"] / 100
