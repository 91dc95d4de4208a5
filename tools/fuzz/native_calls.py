"""Target: handlers of the native library.

The results of a valid call must be those of the function that defines them. A hostile call may
return an error or anything else. No call may have a bad access or a race, which sanitizers report.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tools.fuzz.direct_calls import Call, Driver, Refused
from tools.fuzz.hostile_calls import spoil
from tools.fuzz.sanitizers import DRIVER_VARIABLE, ONLY_VALID_VARIABLE
from tools.fuzz.valid_calls import CALLS

NUM_SHAPES = 8
"""Number of shapes for each kind of valid calls. Each needs a compiled definition."""
VALID_EVERY = 8
HOSTILE_CALLS = 16
"""Number of hostile calls that are made from one valid call."""
# Native kernels sum up to thousands of terms in another order. Rows of 16 bits are rounded once.
TOLERANCES = {"float32": 3e-4, "bfloat16": 2**-6, "float16": 2**-9}


def parted(arguments: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """The arrays among the arguments, and a function that puts other arrays into their places."""
    leaves, structure = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def whole(arrays: list[jax.Array]) -> Any:
        rest = iter(arrays)
        new_leaves = []
        for leaf, is_replaced in zip(leaves, is_array, strict=True):
            new_leaves.append(next(rest) if is_replaced else leaf)
        return jax.tree.unflatten(structure, new_leaves)

    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)], whole


@functools.cache
def definition(kind: int, shape: int) -> Callable[[list[jax.Array]], Any]:
    """The compiled function that defines the results of a kind of calls, for one of its shapes."""
    call = CALLS[kind](np.random.default_rng(shape), np.random.default_rng(0))
    _, whole = parted(call.arguments)
    return jax.jit(lambda arrays: call.defined(*whole(arrays)))


def assert_same(actual: Any, defined: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(defined), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        tolerance = TOLERANCES.get(str(one.dtype))
        if tolerance is None:
            np.testing.assert_array_equal(one, other)
            continue
        found = np.asarray(one, np.float64)
        expected = np.asarray(other, np.float64)
        # The terms of a small sum may be as large as the largest sum, and cancel.
        rounding = 64 * float(jnp.finfo(one.dtype).eps) * np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=max(tolerance, rounding))


@functools.cache
def driver(path: str) -> Driver:
    return Driver(path)


def run(seed: int) -> int:
    """Makes a valid call or some hostile ones, and returns their number.

    Without a driver, XLA makes the calls, and all of them are valid.
    """
    path = os.environ.get(DRIVER_VARIABLE)
    if path is None:
        return valid_call(seed)
    with mock.patch.object(jax.ffi, "ffi_call", driver(path).ffi_call):
        if seed % VALID_EVERY == 0 or os.environ.get(ONLY_VALID_VARIABLE):
            return valid_call(seed // VALID_EVERY)
        return hostile_calls(seed, driver(path))


def valid_call(seed: int) -> int:
    kind = seed % len(CALLS)
    shape = seed // len(CALLS) % NUM_SHAPES
    call = CALLS[kind](np.random.default_rng(shape), np.random.default_rng(seed))
    arrays, _ = parted(call.arguments)
    assert_same(call.native(*call.arguments), definition(kind, shape)(arrays))
    return 1


def hostile_calls(seed: int, driver: Driver) -> int:
    draw = np.random.default_rng(seed)
    # Some kinds call the library to make their arguments, so `driver.before` is set later.
    call = CALLS[draw.integers(len(CALLS))](draw, draw)

    def make_worse(call: Call) -> None:
        for _ in range(HOSTILE_CALLS):
            spoiled = copy.deepcopy(call)
            spoil(draw, spoiled)
            with contextlib.suppress(Refused):
                driver.made(spoiled)
        raise Refused("enough")

    driver.before = make_worse
    try:
        with contextlib.suppress(Refused):
            call.native(*call.arguments)
    finally:
        driver.before = lambda call: None
    return HOSTILE_CALLS
