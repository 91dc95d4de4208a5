"""What every implementation of the kernels is asked: bags of all kinds, rules, and how close answers must be."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed.optimizers as ro
from rsembed.kernels import gpu, native, reference, sparsecore
from rsembed.kernels.contract import NO_ROW, Segment, SegmentGradients, Step
from rsembed.kernels.devices import tracing_for
from tests import oracles
from tests.kernels.simulator import simulate

_reason = native.unavailable_because()
needs_native = pytest.mark.skipif(_reason is not None, reason=f"needs the native kernels: {_reason}")
IMPLEMENTATIONS = ("reference", pytest.param("native", marks=needs_native))


def compiled(function, *args):
    return jax.jit(function)(*args)


def simulated(function, *args, chip="v6e"):
    with tracing_for(chip):
        return simulate(function, *args)


ALL_IMPLEMENTATIONS = [
    pytest.param("reference", reference, compiled, id="reference"),
    pytest.param("native", native, compiled, id="native", marks=needs_native),
    pytest.param("gpu", gpu, compiled, id="gpu"),
    pytest.param("sparsecore", sparsecore, simulated, id="sparsecore"),
]
"""Name, module, and what runs its functions."""

DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (1, 100, 300) if jax.default_backend() == "gpu" else (12,)  # 12 fills neither lanes nor a power of two
SETTINGS = {
    "reference": [(dtype, 8) for dtype in DTYPES],
    "native": [(dtype, dim) for dtype in DTYPES for dim in (12, 1, 17, 64, 130)],
    "gpu": [(dtype, dim) for dtype in DTYPES for dim in WIDTHS],
    "sparsecore": [("float32", 12)],
}
"""Dtypes and row lengths of tables that an implementation is asked for."""

COMBINERS = ("sum", "mean", "sqrtn", "none")
NUM_ROWS = 23
# float32: sums of a few dozen terms in another order. The table is rounded once per step to its own type, and a
# sum that differs in its last bit may round to the neighbour: 8 bits of bfloat16, 11 of float16.
RELATIVE_TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}

RULES = {
    "sgd": ro.SGD(0.3),
    "adagrad": ro.Adagrad(0.3),
    "rowwise_adagrad": ro.RowWiseAdagrad(0.3),
    "adam": ro.Adam(0.3),
    "ftrl": ro.FTRL(0.3),
    "custom": ro.Custom(0.3, lambda g, w, count, lr: (w - lr * jnp.sign(g) / (1.0 + count), count + 1.0), (0.0,)),
    "optax": ro.from_optax(optax.adamw(0.3)),
}
STEP = 2
ORACLE_STEPS = {
    "sgd": (oracles.sgd_step, {"learning_rate": 0.3}),
    "adagrad": (oracles.adagrad_step, {"learning_rate": 0.3}),
    "rowwise_adagrad": (oracles.rowwise_adagrad_step, {"learning_rate": 0.3, "epsilon": 1e-8}),
    "adam": (
        oracles.adam_step,
        {"learning_rate": 0.3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "step": STEP},
    ),
}


def step_by_loops(name, table, slots, gradients):
    """Table and slots after step `STEP` of each row in `gradients`, by its formula, or else by its rule alone.

    Rules without a formula here have one where rules are tested.
    """
    if name in ORACLE_STEPS:
        step_row, made_of = ORACLE_STEPS[name]
        return oracles.stepped_table(table, slots, gradients, step_row, **made_of)
    hyper, step_rows = RULES[name].get_hyperparameters(STEP), jax.jit(RULES[name].step_rows)

    def step_row(row, own, gradient):
        state = tuple(jnp.asarray(slot[None], old.dtype) for slot, old in zip(own, slots, strict=True))
        row[:], stepped = step_rows(jnp.float32(row[None]), state, jnp.float32(gradient[None]), hyper)
        for slot, new in zip(own, stepped, strict=True):
            slot[...] = new[0]

    return oracles.stepped_table(table, slots, gradients, step_row)


def run_python(*arguments, environment):
    """What Python does with these arguments in a process of its own, which finds the library and these tests."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def training_step(module, name, dim=128, dtype="float32"):
    """A lookup and a step of a table too large to be copied unseen, and shapes of their arguments."""
    rule, shape = RULES[name], jax.ShapeDtypeStruct
    table = shape((1 << 20, dim), dtype)

    def train(table, slots, rows, offsets):
        segments = [Segment(rows, offsets, None, "mean")]
        (output,) = module.lookup(table, segments)
        gradients, step = SegmentGradients(segments, (output,)), Step(rule.get_hyperparameters(0), rule)
        return output, module.update(table, slots, gradients, step)

    slots = jax.eval_shape(rule.init_slots, table)
    return train, (table, slots, shape((4096,), jnp.int32), shape((513,), jnp.int32))


def draw_segment(seed, combiner, lengths, *, weighted=False, outside=True):
    """Bags of the given lengths: duplicates are certain, and some rows lie outside the table."""
    generator = np.random.default_rng(seed)
    num_entries = sum(lengths)
    rows = generator.integers(0, NUM_ROWS, num_entries).astype(np.int32)
    if outside:
        rows[1::7], rows[3::7], rows[4::11] = -1, NUM_ROWS, NO_ROW
    weights = jax.device_put(generator.uniform(0.5, 2.0, num_entries).astype(np.float32)) if weighted else None
    offsets = None if combiner == "none" else jax.device_put(np.cumsum([0, *lengths]).astype(np.int32))
    return Segment(jax.device_put(rows), offsets, weights, combiner)


def draw_table(dim, dtype="float32", seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal((NUM_ROWS, dim)).astype(jnp.dtype(dtype)))


def draw_gradients(segments, dim, seed=1):
    generator = np.random.default_rng(seed)
    return [jax.device_put(generator.standard_normal((s.num_outputs, dim), np.float32)) for s in segments]


RAGGED = {
    "every combiner": [draw_segment(k, c, [3, 0, 5, 1, 9]) for k, c in enumerate(COMBINERS)],
    "weighted": [draw_segment(k, c, [0, 4, 7, 0], weighted=True) for k, c in enumerate(COMBINERS)],
    "no entry": [draw_segment(0, "sum", [0, 0, 0]), draw_segment(0, "none", [])],
    "no bag": [draw_segment(0, "mean", []), draw_segment(1, "sum", [2])],
    "no weight": [Segment(*map(jax.device_put, (np.int32([1, 2]), np.int32([0, 2]), np.zeros(2, np.float32))), "mean")],
    "one row only": [
        Segment(jax.device_put(np.full(40, 7, np.int32)), jax.device_put(np.arange(0, 41, 4, np.int32)), None)
    ]
    * 2,
    "trimmed": [
        Segment(jax.device_put(np.arange(9, dtype=np.int32)), jax.device_put(np.int32([2, 4, 6])), None, "mean")
    ],
}


def assert_close(actual, desired, dtype="float32"):
    rtol = RELATIVE_TOLERANCE[str(dtype)]
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(desired, np.float64), rtol=rtol, atol=rtol)
