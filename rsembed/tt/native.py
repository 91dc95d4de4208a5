"""The products of slices in C++ for CPUs: what `chain.py` computes, each distinct row of a call once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.kernels import native

SliceShapes = tuple[tuple[int, int, int], ...]

MAX_CORES = 16


def unavailable_because(cores: Sequence[Array] = ()) -> str | None:
    """Why these kernels cannot run here, or cannot serve these cores; None if they can."""
    too_many = f"the native kernels take up to {MAX_CORES} cores, not {len(cores)}"
    return native.unavailable_because() or (too_many if len(cores) > MAX_CORES else None)


def pooled(
    cores: Sequence[Array],
    digits: Sequence[Int[Array, " nnz"]],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    *,
    slice_shapes: SliceShapes,
    num_bags: int,
) -> Float[Array, "bags dim"]:
    """Sum of `gain * row` of every bag; arguments as for `chain.pooled_rows`."""
    dim = int(np.prod([q for _, q, _ in slice_shapes]))
    result = jax.ShapeDtypeStruct((num_bags, dim), jnp.float32)
    call = jax.ffi.ffi_call("rsembed_train_rows", result, vmap_method="sequential")
    return call(bags, gains, *_operands(cores, digits), **_attributes(slice_shapes))


def pull(
    cores: Sequence[Array],
    digits: Sequence[Int[Array, " nnz"]],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    d_pooled: Float[Array, "bags dim"],
    *,
    slice_shapes: SliceShapes,
) -> tuple[tuple[Array, ...], Float[Array, " nnz"]]:
    """Float32 gradients of cores and gains from that of `pooled`."""
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (*cores, gains)]
    call = jax.ffi.ffi_call("rsembed_train_pull", results, vmap_method="sequential")
    attributes = _attributes(slice_shapes) | {"num_bags": np.int64(d_pooled.shape[0])}
    *d_cores, d_gains = call(bags, gains, d_pooled, *_operands(cores, digits), **attributes)
    return tuple(d_cores), d_gains


def _operands(cores: Sequence[Array], digits: Sequence[Array]) -> list[Array]:
    """Digits and core of every position, one after the other."""
    pairs = zip(digits, cores, strict=True)
    return [x for digit, core in pairs for x in (digit, core.astype(jnp.float32))]


def _attributes(slice_shapes: SliceShapes) -> dict[str, np.ndarray | np.int64]:
    sizes = [int(np.prod(shape)) for shape in slice_shapes]
    return {"slice_shapes": np.asarray(slice_shapes, np.int64).reshape(-1), "grouped": np.int64(np.argmax(sizes))}
