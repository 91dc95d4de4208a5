"""Changes valid calls of native handlers into calls that handlers must refuse or survive."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from tools.fuzz.direct_calls import Call

Draw = np.random.Generator
INT64 = np.iinfo(np.int64)
EXTREMES = (
    0,
    1,
    -1,
    2,
    7,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**32 + 1,
    2**40,
    2**61,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63 - 2,
    2**62 + 1,
    -(2**62),
    2**63 - 1000,
)
HUGE_AXES = (2**31, 2**40, 2**58, 2**58 + 1)
"""Lengths of axes of arrays without entries. NumPy and XLA refuse longer axes."""
MOST_ENTRIES = 2**20


def extreme_of(draw: Draw, dtype: np.dtype) -> int:
    """One of `EXTREMES`, clipped to the range of an integer dtype."""
    bounds = np.iinfo(dtype)
    return int(np.clip(draw.choice(EXTREMES), bounds.min, bounds.max))


def spoil_numbers(draw: Draw, array: np.ndarray) -> np.ndarray:
    """A copy of an array with random, extreme or non-finite numbers in some entries, or in all."""
    array = np.array(array)
    chosen = draw.random(array.shape) < draw.choice([0.01, 0.2, 1.0])
    if array.dtype.kind in "iu":
        if draw.random() < 0.5:
            array[chosen] = extreme_of(draw, array.dtype)
        else:
            array[chosen] = draw.integers(-3, 9, chosen.sum())
        if draw.random() < 0.2:
            array = np.flip(array).copy()
    elif array.dtype.kind == "f" or array.dtype == jnp.bfloat16:
        number = draw.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-42])
        with np.errstate(over="ignore"):
            array[chosen] = np.asarray(number, array.dtype)
    return array


def other_shape(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A similar shape, or `shape` itself if the similar one has too many entries."""
    other = _other_shape(draw, shape)
    return other if math.prod(other) <= MOST_ENTRIES else shape


def _other_shape(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with a changed axis, an added or removed axis, or an empty and a huge axis."""
    kind = draw.integers(4)
    if kind == 0:
        return (*shape, int(draw.integers(0, 3)))
    if kind == 1 or not shape:
        return shape[1:]
    axis = int(draw.integers(len(shape)))
    size = list(shape)
    if kind == 2 and len(shape) > 1:
        size[axis] = 0
        size[axis - 1] = int(draw.choice(HUGE_AXES))
        return tuple(size[:2])
    length = size[axis]
    size[axis] = int(draw.choice([0, 1, max(length - 1, 0), length + 1, 2 * length + 3]))
    return tuple(size)


def spoil(draw: Draw, call: Call) -> None:
    """Makes one to three random changes of a call."""
    for _ in range(draw.integers(1, 4)):
        kind = draw.integers(8)
        place = int(draw.integers(len(call.operands))) if call.operands else None
        if kind <= 1 and call.attributes:
            name = str(draw.choice(sorted(call.attributes)))
            value = call.attributes[name].copy()
            if value.dtype != bool and value.size:
                # `value` is a contiguous copy, so `flat` has the same memory.
                flat = value.reshape(-1)
                at = draw.integers(flat.size)
                nearby = int(flat[at]) + int(draw.integers(-2, 3))
                nearby = int(np.clip(nearby, INT64.min, INT64.max))
                bounds = np.iinfo(value.dtype)
                number = draw.choice([extreme_of(draw, value.dtype), nearby])
                flat[at] = np.clip(number, bounds.min, bounds.max)
                if value.ndim and draw.random() < 0.1:
                    value = value[:-1].copy()
            elif value.dtype == bool:
                value = ~value
            call.attributes[name] = np.asarray(value)
        elif kind <= 3 and place is not None:
            call.operands[place] = spoil_numbers(draw, call.operands[place])
        elif kind == 4 and place is not None:
            array = call.operands[place]
            shape = other_shape(draw, array.shape)
            if array.size:
                call.operands[place] = np.resize(array, shape)
            else:
                call.operands[place] = np.zeros(shape, array.dtype)
        elif kind == 5 and call.results:
            at = int(draw.integers(len(call.results)))
            shape, dtype = call.results[at]
            call.results[at] = other_shape(draw, shape), dtype
        elif kind == 6 and place is not None:
            dtype = np.dtype(draw.choice(["int32", "float32", "uint32", "int8", "float16"]))
            with np.errstate(all="ignore"):
                call.operands[place] = call.operands[place].astype(dtype)
        elif kind == 7 and place is not None:
            if draw.random() < 0.3:
                call.aliases.clear()
            elif draw.random() < 0.5:
                del call.operands[place]
            else:
                copied = call.operands[int(draw.integers(len(call.operands)))]
                call.operands.insert(place, copied)
