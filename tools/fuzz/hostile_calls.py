"""What turns a valid call of a native handler into one that it must refuse, or survive."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from tools.fuzz.direct_calls import Call

Draw = np.random.Generator
INT64 = np.iinfo(np.int64)
EXTREMES = (
    *(
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
    ),
    *(2**63 - 2, 2**62 + 1, -(2**62), 2**63 - 1000),
)
HUGE_AXES = (2**31, 2**40, 2**58, 2**58 + 1)
"""Of arrays without an entry; numpy and XLA refuse longer ones."""
MOST_ENTRIES = 2**20


def extreme_of(draw: Draw, dtype: np.dtype) -> int:
    """A border of the type, if it has whole numbers."""
    bounds = np.iinfo(dtype)
    return int(np.clip(draw.choice(EXTREMES), bounds.min, bounds.max))


def spoil_numbers(draw: Draw, array: np.ndarray) -> np.ndarray:
    """Some entries, or all, at the borders of their type."""
    array = np.array(array)
    chosen = draw.random(array.shape) < draw.choice([0.01, 0.2, 1.0])
    if array.dtype.kind in "iu":
        array[chosen] = (
            extreme_of(draw, array.dtype)
            if draw.random() < 0.5
            else draw.integers(-3, 9, chosen.sum())
        )
        if draw.random() < 0.2:
            array = np.flip(array).copy()
    elif array.dtype.kind == "f" or array.dtype == jnp.bfloat16:
        with np.errstate(over="ignore"):
            array[chosen] = np.asarray(
                draw.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-42]), array.dtype
            )
    return array


def other_shape(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape near this one, if it has a few entries or none."""
    other = _other_shape(draw, shape)
    return other if math.prod(other) <= MOST_ENTRIES else shape


def _other_shape(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another length of an axis, one axis more or less, or no entry but an axis that no memory could hold."""
    kind = draw.integers(4)
    if kind == 0:
        return (*shape, int(draw.integers(0, 3)))
    if kind == 1 or not shape:
        return shape[1:]
    axis, size = int(draw.integers(len(shape))), list(shape)
    if kind == 2 and len(shape) > 1:
        size[axis], size[axis - 1] = 0, int(draw.choice(HUGE_AXES))
        return tuple(size[:2])
    size[axis] = int(
        draw.choice([0, 1, max(size[axis] - 1, 0), size[axis] + 1, 2 * size[axis] + 3])
    )
    return tuple(size)


def spoil(draw: Draw, call: Call) -> None:
    """One to three changes, each of a kind that the next line of defence might not expect."""
    for _ in range(draw.integers(1, 4)):
        kind = draw.integers(8)
        place = int(draw.integers(len(call.operands))) if call.operands else None
        if kind <= 1 and call.attributes:
            name = str(draw.choice(sorted(call.attributes)))
            value = call.attributes[name].copy()
            if value.dtype != bool and value.size:
                flat = value.reshape(-1)  # of a copy, so that it writes through
                at = draw.integers(flat.size)
                nearby = int(
                    np.clip(int(flat[at]) + int(draw.integers(-2, 3)), INT64.min, INT64.max)
                )
                bounds = np.iinfo(value.dtype)
                flat[at] = np.clip(
                    draw.choice([extreme_of(draw, value.dtype), nearby]), bounds.min, bounds.max
                )
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
            call.operands[place] = (
                np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
            )
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
                call.operands.insert(place, call.operands[int(draw.integers(len(call.operands)))])
