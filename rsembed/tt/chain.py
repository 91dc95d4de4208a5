"""The products that turn core slices into rows, pooled into bags: in C++ on CPUs, in plain JAX elsewhere.

The C++ kernels make each distinct row of a call once, take it apart again in the backward pass, and sum in a fixed
order; nothing is kept between the two but integers. Plain JAX gathers a slice of every core for each lookup, tile by
tile, which it does anew in the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from rsembed.bags import Bags
from rsembed.kernels import native
from rsembed.kernels.contract import NO_ROW

IMPLEMENTATIONS = ("native", "plain")
MAX_CORES = 16
"""Of the C++ kernels."""
TILE_BYTES = 2**21
"""Bound of the slices and products of a tile."""

Cores = tuple[Array, ...]
AnyCores = Sequence[Array | np.ndarray]
"""Cores as users have them."""
SliceShapes = tuple[tuple[int, int, int], ...]


def check_implementation(implementation: str | None) -> None:
    """Raises: ValueError: there is none of this name."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {', '.join(IMPLEMENTATIONS)}.")


def unavailable_because(cores: Sequence[Array] = ()) -> str | None:
    """Why the C++ kernels cannot run here, or cannot serve these cores; None if they can."""
    too_many = f"the native kernels take up to {MAX_CORES} cores, not {len(cores)}"
    return native.unavailable_because() or (too_many if len(cores) > MAX_CORES else None)


@functools.partial(jax.jit, static_argnames=("slice_shapes", "num_bags", "implementation"))
def pooled_rows(
    cores: Cores,
    digits: tuple[Int[Array, " nnz"], ...],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    *,
    slice_shapes: SliceShapes,
    num_bags: int,
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """Sum of `gain * row` over the lookups of every bag, float32; differentiable in cores and gains.

    Args:
      cores: arrays `[p_t, R_{t-1} * q_t * R_t]`.
      digits: for every core the slice that each lookup takes.
      bags: bag of each lookup, in any order; a lookup whose bag lies outside `[0, num_bags)` contributes nothing.
      gains: factor of each lookup.
      slice_shapes: `(R_{t-1}, q_t, R_t)` of every core.
      num_bags: bags in the result.
      implementation: "native" (CPUs), or "plain", which has forward-mode and second derivatives, too. None takes
        "native" where it can run.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: it is "native", which cannot run here.
    """
    check_implementation(implementation)
    reason = None if implementation == "plain" else unavailable_because(cores)
    if implementation == "native" and reason is not None:
        raise NotImplementedError(f"implementation 'native' cannot run here: {reason}")
    zero = varying_zero(*cores, *digits, bags, gains)
    cores, gains = jax.tree.map(lambda x: x + zero.astype(x.dtype), (cores, gains))
    bags = jnp.where(bags < 0, NO_ROW, bags)  # JAX would count negative numbers from the end
    if bags.shape[0] == 0:
        return jnp.full((num_bags, math.prod(q for _, q, _ in slice_shapes)), zero.astype(jnp.float32))
    if implementation == "plain" or reason is not None:
        return _plain(slice_shapes, num_bags, cores, digits, bags, gains)
    return _native(slice_shapes, num_bags, cores, digits, bags, gains)


def varying_zero(*arrays: Array) -> Array:
    """Zero that, inside `shard_map`, varies over all mesh axes that any array varies over, as a loop's result does.

    Whatever is added to it has a gradient that `shard_map` sums over those axes. Outside, XLA removes the addition.
    """
    first = [x.reshape(-1)[:1] for x in arrays]
    return sum((jnp.sum(x != x, dtype=jnp.int32) * 0 for x in first), start=jnp.zeros((), jnp.int32))


def _plain(
    shapes: SliceShapes, num_bags: int, cores: Cores, digits: tuple[Array, ...], bags: Array, gains: Array
) -> Array:
    @jax.checkpoint
    def row(lookup: tuple[PyTree, ...]) -> Array:
        *places, gain = lookup
        product = gain.reshape(1, 1)
        for core, place, (left, q, right) in zip(cores, places, shapes, strict=True):
            # Zeros where nothing is looked up, so that nothing unasked for, NaN included, reaches a sum.
            piece = core.at[place].get(mode="fill", fill_value=0).astype(jnp.float32).reshape(left, q * right)
            product = jnp.matmul(product, piece, precision="highest").reshape(-1, right)
        return product.reshape(-1)

    places = tuple(jnp.where(bags < num_bags, digit, NO_ROW) for digit in digits)
    columns, floats = 1, 0
    for left, q, right in shapes:
        columns *= q
        floats += columns * right + left * q * right
    rows = jax.lax.map(row, (*places, gains), batch_size=max(1, min(bags.shape[0], TILE_BYTES // (4 * floats))))
    return jnp.zeros((num_bags, rows.shape[1])).at[bags].add(rows, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _native(
    shapes: SliceShapes, num_bags: int, cores: Cores, digits: tuple[Array, ...], bags: Array, gains: Array
) -> Array:
    return _forward(shapes, num_bags, cores, digits, bags, gains)[0]


def _forward(shapes: SliceShapes, num_bags: int, cores: Cores, digits: PyTree, bags: Array, gains: Array) -> PyTree:
    result = jax.ShapeDtypeStruct((num_bags, math.prod(q for _, q, _ in shapes)), jnp.float32)
    call = jax.ffi.ffi_call("rsembed_train_rows", result, vmap_method="sequential")
    pooled = call(bags, gains, *_operands(cores, digits), **_attributes(shapes))
    return pooled + varying_zero(gains).astype(jnp.float32), (cores, digits, bags, gains)


def _backward(shapes: SliceShapes, num_bags: int, saved: PyTree, d_pooled: Array) -> tuple[PyTree, ...]:
    cores, digits, bags, gains = saved
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (*cores, gains)]
    call = jax.ffi.ffi_call("rsembed_train_pull", results, vmap_method="sequential")
    attributes = _attributes(shapes) | {"num_bags": np.int64(num_bags)}
    *d_cores, d_gains = call(bags, gains, d_pooled, *_operands(cores, digits), **attributes)
    zero = varying_zero(gains).astype(jnp.float32)
    pulled = tuple((d + zero).astype(core.dtype) for d, core in zip(d_cores, cores, strict=True))
    no_cotangent = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (digits, bags))
    return pulled, *no_cotangent, d_gains + zero


_native.defvjp(_forward, _backward)


def _operands(cores: Cores, digits: Sequence[Array]) -> list[Array]:
    """Digits and core of every position, one after the other."""
    pairs = zip(digits, cores, strict=True)
    return [x for digit, core in pairs for x in (digit, core.astype(jnp.float32))]


def _attributes(shapes: SliceShapes) -> dict[str, np.ndarray | np.int64]:
    sizes = [math.prod(shape) for shape in shapes]
    return {"slice_shapes": np.asarray(shapes, np.int64).reshape(-1), "grouped": np.int64(np.argmax(sizes))}


# Arrays on a mesh with explicit axes, which is what `jax.make_mesh` gives by default, have types that say how they are
# split, and most operations then want to be told how their result is. Here nobody knows, so functions and modules work
# on copies on every device. Modules make the rows, which takes almost all of the time, on the devices over which the
# type of the ids splits them.


def on_every_device(tree: PyTree) -> PyTree:
    """The tree, in which arrays lie whole on every device of a mesh with explicit axes: their own, or that is set."""
    return jax.tree.map(_whole, tree)


def _whole(array: PyTree) -> PyTree:
    if not isinstance(array, jax.Array):
        return array
    sharding = jax.typeof(array).sharding
    mesh = jax.sharding.get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    if AxisType.Explicit not in mesh.axis_types or (mesh is sharding.mesh and not any(sharding.spec)):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


def on_copies(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`function(*args)`; on a mesh with explicit axes, each device calls it with copies. Inside `jit`."""
    args = on_every_device(args)
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return function(*args)
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(*args)


def split_axes(indices: PyTree) -> tuple[str, ...]:
    """The axes of a mesh over which the type of ids splits them by position; none where there are no ids."""
    ids = indices.ids if isinstance(indices, Bags) else indices
    if not isinstance(ids, jax.Array) or ids.size == 0:
        return ()
    mesh, spec = jax.typeof(ids).sharding.mesh, jax.typeof(ids).sharding.spec
    if not mesh.axis_names or set(mesh.axis_types) != {AxisType.Explicit} or not spec or spec[0] is None:
        return ()
    return spec[0] if isinstance(spec[0], tuple) else (spec[0],)


def shared_rows(
    axes: tuple[str, ...],
    cores: Cores,
    digits: tuple[Int[Array, " nnz"], ...],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    **options: PyTree,
) -> Float[Array, "bags dim"]:
    """`pooled_rows`, of which each device along `axes` makes its share, and pulls their gradients back."""
    if not axes:
        return pooled_rows(cores, digits, bags, gains, **options)
    size = -(-bags.shape[0] // jax.lax.axis_size(axes))
    own = jax.lax.axis_index(axes) * size + jnp.arange(size, dtype=jnp.int32)
    digits, gains = jax.tree.map(lambda x: x.at[own].get(mode="fill", fill_value=0), (digits, gains))
    bags = bags.at[own].get(mode="fill", fill_value=NO_ROW)
    return jax.lax.psum(pooled_rows(cores, digits, bags, gains, **options), axes)
