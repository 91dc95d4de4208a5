"""Target: handlers of the native library. Valid calls must give what defines them, hostile ones an error or anything,
and neither may touch memory or wait for a thread as sanitizers forbid.
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
"""Of the valid calls of each kind, for each of which its definition is compiled."""
VALID_EVERY = 8
HOSTILE_CALLS = 16
"""Made of one valid call."""
# Sums of up to thousands of terms in another order; steps of halves are rounded once to their own type.
TOLERANCES = {"float32": 3e-4, "bfloat16": 2**-6, "float16": 2**-9}


def parted(arguments: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """The arrays among the arguments, and how to put others in their place."""
    leaves, structure = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def whole(arrays: list[jax.Array]) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(
            structure,
            [next(rest) if is_own else leaf for leaf, is_own in zip(leaves, is_array, strict=True)],
        )

    return [leaf for leaf, is_own in zip(leaves, is_array, strict=True) if is_own], whole


@functools.cache
def definition(kind: int, shape: int) -> Callable[[list[jax.Array]], Any]:
    """What defines a call of these shapes, compiled once."""
    call = CALLS[kind](np.random.default_rng(shape), np.random.default_rng(0))
    _, whole = parted(call.arguments)
    return jax.jit(lambda arrays: call.defined(*whole(arrays)))


def assert_same(actual: Any, defined: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(defined), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if (tolerance := TOLERANCES.get(str(one.dtype))) is None:
            np.testing.assert_array_equal(one, other)
        else:
            wide = np.asarray(one, np.float64), np.asarray(other, np.float64)
            # Thousands of terms may cancel: what is left is no more exact than what they had come to on the way.
            rounding = 64 * float(jnp.finfo(one.dtype).eps) * np.abs(wide[1]).max(initial=0.0)
            np.testing.assert_allclose(*wide, rtol=tolerance, atol=max(tolerance, rounding))


@functools.cache
def driver(path: str) -> Driver:
    return Driver(path)


def run(seed: int) -> int:
    """A valid call, or some hostile ones; returns how many. Without a driver all go through XLA, and are valid."""
    path = os.environ.get(DRIVER_VARIABLE)
    if path is None:
        return valid_call(seed)
    with mock.patch.object(jax.ffi, "ffi_call", driver(path).ffi_call):
        if seed % VALID_EVERY == 0 or os.environ.get(ONLY_VALID_VARIABLE):
            return valid_call(seed // VALID_EVERY)
        return hostile_calls(seed, driver(path))


def valid_call(seed: int) -> int:
    kind, shape = seed % len(CALLS), seed // len(CALLS) % NUM_SHAPES
    call = CALLS[kind](np.random.default_rng(shape), np.random.default_rng(seed))
    assert_same(call.native(*call.arguments), definition(kind, shape)(parted(call.arguments)[0]))
    return 1


def hostile_calls(seed: int, driver: Driver) -> int:
    draw = np.random.default_rng(seed)
    call = CALLS[draw.integers(len(CALLS))](draw, draw)  # may call the library itself

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
