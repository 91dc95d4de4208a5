"""Helpers for arrays on the host and on devices: checks of traced, masked and donated ones."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree

AnyArray: TypeAlias = Array | np.ndarray
"""An array of JAX, traced or not, or of NumPy."""


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf of the tree is traced, by `jit` or another transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def numpy_or_jax(tree: PyTree) -> Any:
    """Module that computes with the arrays of a tree: `numpy` on the host, else `jax.numpy`."""
    first = tree
    if not isinstance(tree, (np.ndarray, jax.Array)):
        first = jax.tree.leaves(tree)[0]
    return np if isinstance(first, np.ndarray) else jnp


def foreign_to_numpy(value: object) -> Any:
    """`value` as a numpy array if it has `__array__`, as a tensor has.

    Other values, and JAX and numpy arrays, are returned unchanged.
    """
    if not hasattr(value, "__array__") or isinstance(value, (jax.Array, np.ndarray)):
        return value
    try:
        return np.asarray(value)
    except TypeError:
        # `value` may be a torch tensor of bfloat16: numpy has no such dtype, but JAX has.
        if not hasattr(value, "__dlpack__"):
            raise
        return np.asarray(jnp.from_dlpack(value))


def check_unmasked(value: object, name: str) -> None:
    """Checks for masked arrays, because a conversion would lose their masks.

    Raises: TypeError: `value` or one of its rows is a masked array.
    """
    rows: Any = ()
    if isinstance(value, (list, tuple)):
        rows = value
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        rows = value.flat
    if np.ma.isMaskedArray(value) or any(map(np.ma.isMaskedArray, rows)):
        raise TypeError(
            f"{name} are in a masked array, whose mask has no meaning here; fill it, as in ids.filled(-1)."
        )


def check_not_taken(tree: PyTree, what: str, way_out: str) -> None:
    """Checks that no array of a tree was donated to a step.

    Args:
      tree: arrays that are to be used.
      what: beginning of the message, which names the lost arrays.
      way_out: end of the message: what the user can do.

    Raises: RuntimeError: an array was deleted, because it was donated to a step.
    """
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        if leaf.is_deleted():
            raise RuntimeError(f"{what} to a step that took its arrays over: {way_out}.")


def device_copy(array: ArrayLike, dtype: DTypeLike) -> Array:
    """The array on the device, as from `jnp.asarray`. A numpy array is copied first.

    Data loaders often write the next batch into the same memory. JAX may use the memory of a numpy
    array without a copy if it gets the array with a dtype. Without a dtype, JAX copies the array,
    but it compiles a copying program for every shape.
    """
    if isinstance(array, np.ndarray):
        array = np.array(array, dtype)
    return jnp.asarray(array, dtype)


def on_device(tree: PyTree) -> PyTree:
    """The tree with copies of numpy arrays on the device.

    Numpy arrays are copied, because data loaders often write the next batch into the same memory.
    The arrays are passed to a compiled function: for 26 arrays, this takes a third of the time of
    `device_put`.
    """
    if is_traced(tree):
        return tree
    leaves, form = jax.tree.flatten(tree)
    positions = [k for k, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    # The caller requested a transfer, so a transfer guard must permit it.
    with jax.transfer_guard_host_to_device("allow"):
        copies = _returned([leaves[k] for k in positions])
    for k, copy in zip(positions, copies, strict=True):
        leaves[k] = copy
    return jax.tree.unflatten(form, leaves)


_returned = jax.jit(lambda arrays: arrays)


def cut_on_device(values: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    """Arrays of these shapes on the device, cut from one flat array that holds them in order."""
    with jax.transfer_guard_host_to_device("allow"):
        return _cut(values, shapes)


@functools.partial(jax.jit, static_argnums=1)
def _cut(values: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = jnp.split(values, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
