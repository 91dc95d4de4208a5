"""Tensor-train tables as functions of a spec and its cores: rows, bags of rows, the whole table.

The C++ kernels make each distinct row of a call once, take it apart again in the backward pass, and sum in a fixed
order; nothing is kept between the two but integers. Plain JAX gathers a slice of every core for each lookup, tile by
tile, which it does anew in the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, PyTree

from rsembed.bags import Bags, is_traced, narrow_ids, padded_size
from rsembed.checks import check_type
from rsembed.kernels import native, reference
from rsembed.kernels.contract import NO_ROW, Call, IdList
from rsembed.kernels.keyed import varying_zero
from rsembed.tt.spec import TTSpec

Mode = Literal["sum", "mean"]
Implementation = Literal["native", "plain"]

LEAST_ROOM = 32
MAX_CORES = 16
"""Most cores of a train that the C++ kernels multiply."""
TILE_BYTES = 2**21
"""Bound of the slices and products of a tile."""

Cores = tuple[Array, ...]
AnyCores = Sequence[Array | np.ndarray]
"""Cores as users have them."""
SliceShapes = tuple[tuple[int, int, int], ...]


def rows(
    spec: TTSpec, cores: AnyCores, ids: Integer[Array | np.ndarray, "*batch"], *, implementation: str | None = None
) -> Float[Array, "*batch dim"]:
    """The rows of `ids`, float32; an id outside the table has a row of zeros.

    Works under `jit`, `grad`, `vmap` and `shard_map`, and stores nothing per lookup for the backward pass but integers.
    In plain JAX a row per lookup is held beside a tile of `cores.TILE_BYTES`.

    Args:
      spec: the table.
      cores: its cores, float32 or bfloat16; sums are float32.
      ids: row numbers. Tables of 2^31 rows and more need int64 ids of NumPy, outside `jit`.
      implementation: see `cores.pooled_rows`.

    Example:
      >>> spec = TTSpec(6, (2, 3), (1, 2), (1,))
      >>> cores = (jnp.asarray([[1.0], [10.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
      >>> rows(spec, cores, jnp.asarray([1, 3])).tolist()
      [[3.0, 4.0], [10.0, 20.0]]
    """
    check_type(ids, Int[Array, "..."], "rows: ids")
    found = rows_of((spec,), check_cores(spec, cores), ids.reshape(-1), implementation=implementation)
    return found.reshape(*ids.shape, spec.embedding_dim)


def rows_of(
    specs: Sequence[TTSpec],
    cores: Cores,
    ids: Integer[Array | np.ndarray, " nnz"],
    *,
    implementation: str | None = None,
) -> Float[Array, "nnz dim"]:
    """Rows of tables whose cores stand one behind the other; arguments as for `digits_of` and `rows`."""
    digits, valid = digits_of(specs, ids)
    return pooled_rows(
        cores,
        digits,
        jnp.where(valid, jnp.arange(ids.shape[0], dtype=jnp.int32), NO_ROW),
        jnp.ones(ids.shape[0]),
        slice_shapes=specs[0].slice_shapes,
        num_bags=ids.shape[0],
        implementation=implementation,
    )


def bag(
    spec: TTSpec,
    cores: AnyCores,
    bags: Bags,
    *,
    mode: Mode = "sum",
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """Weighted sums or means of the rows of every bag, float32; an empty bag gives zeros.

    Args:
      spec: the table.
      cores: its cores.
      bags: ids and optional weights; ids outside the table, -1 among them, contribute nothing and are not counted.
      mode: "sum", or "mean", which divides by the number of ids and not by the sum of weights.
      implementation: see `cores.pooled_rows`.
    """
    check_type(bags, Bags, "bag: bags, which Bags.from_lists makes of lists,")
    check_type(mode, Mode, "mode")
    cores, bags = check_cores(spec, cores), with_room(bags)
    digits, valid = digits_of((spec,), bags.ids)
    _, outputs, gains = entries_of(call_of(bags, jnp.where(valid, 0, NO_ROW), mode))
    shapes = {"slice_shapes": spec.slice_shapes, "num_bags": bags.num_bags}
    return pooled_rows(cores, digits, outputs, gains, **shapes, implementation=implementation)


def full_weight(spec: TTSpec, cores: AnyCores) -> Float[Array, "vocab dim"]:
    """The whole table, written block after block of equal first digits; needs the table and one block of memory."""
    whole: Array = _full_weight(spec, check_cores(spec, cores))
    return whole


@functools.partial(jax.jit, static_argnums=0)
def _full_weight(spec: TTSpec, arrays: Cores) -> Float[Array, "vocab dim"]:
    num_rows, size, p, shapes = spec.num_embeddings, spec.strides[0], spec.tt_p_shapes, spec.slice_shapes
    whole = num_rows // size

    def block(first_digit: Array | int) -> Float[Array, "block dim"]:
        product = arrays[0][first_digit].astype(jnp.float32).reshape(1, *shapes[0][1:])  # [rows, columns, rank]
        for t in range(1, spec.num_cores):
            core = arrays[t].astype(jnp.float32).reshape(p[t], *shapes[t])
            product = jnp.einsum("acr,prqs->apcqs", product, core, precision="highest")
            product = product.reshape(math.prod(p[1 : t + 1]), -1, shapes[t][2])
        return product.reshape(size, spec.embedding_dim)

    def put(k: Array | int, table: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(table, block(k), k * size, 0)

    nothing = jnp.full((num_rows, spec.embedding_dim), varying_zero(*arrays).astype(jnp.float32))
    table = jax.lax.fori_loop(0, whole, put, nothing)
    if whole * size < num_rows:
        rest = block(whole)[: num_rows - whole * size]
        table = jax.lax.dynamic_update_slice_in_dim(table, rest, whole * size, 0)
    return table


def check_cores(spec: TTSpec, cores: AnyCores) -> Cores:
    """The cores as a tuple of JAX arrays.

    Raises: ValueError: their shapes are not those of the spec. TypeError: there is no spec, or no list of cores.
    """
    check_type(spec, TTSpec, "spec")
    check_type(cores, Sequence[Any], "cores")
    found = tuple(np.shape(core) for core in cores)
    if found != spec.core_shapes:
        raise ValueError(f"cores have shapes {found}, but the spec asks for {spec.core_shapes}.")
    return tuple(map(jnp.asarray, cores))


def digits_of(specs: Sequence[TTSpec], ids: Any) -> tuple[tuple[Int[Array, " nnz"], ...], Any]:
    """Digits of every id, one array per core, and whether there is a row of it.

    Integers throughout: float32 cannot tell ids above 2^24 apart. NumPy ids are taken apart on the host, in 64 bits.

    Args:
      specs: tables of equally many cores, whose cores stand one behind the other: digits count on from table to table.
      ids: row numbers, which count on from table to table, too.

    Raises: TypeError: ids are not integers.
    """
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}.")
    ids = ids.astype(np.int64) if xp is np else narrow_ids(ids)
    sizes = [spec.num_embeddings for spec in specs]
    last_rows = np.minimum(np.cumsum(sizes[:-1]), np.iinfo(ids.dtype).max).astype(ids.dtype)
    tables = None if len(specs) == 1 else xp.searchsorted(xp.asarray(last_rows), ids, side="right")

    def of_table(values: Sequence[int]) -> Any:
        numbers = np.minimum(values, np.iinfo(ids.dtype).max).astype(ids.dtype)
        # Equal numbers need no table.
        return numbers[0] if (numbers == numbers[0]).all() else xp.asarray(numbers)[tables]

    valid = ids >= 0
    ids = ids - of_table([0, *itertools.accumulate(sizes[:-1])])
    valid &= ids < of_table(sizes)
    digits = []
    for t in range(specs[0].num_cores):
        p = [spec.tt_p_shapes[t] for spec in specs]
        first = of_table([0, *itertools.accumulate(p[:-1])])
        digits.append(ids // of_table([spec.strides[t] for spec in specs]) % of_table(p) + first)
    return tuple(jnp.asarray(digit, jnp.int32) for digit in digits), valid


def entries_of(call: Call) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Float[Array, " nnz"]]:
    """Row of each entry of all lists, the output that it goes into, and its gain.

    Outputs are the bags of all lists, numbered through; that of an entry that contributes nothing is `NO_ROW`. Lists
    without a combiner have an output an entry.
    """
    rows, outputs, gains, first = [], [], [], 0
    for number in range(len(call.lists)):
        entries = reference.entries_of(call, number, 0, NO_ROW)
        bag, gain, is_listed = reference.entry_gains(entries, NO_ROW)
        rows.append(entries.rows)
        outputs.append(jnp.where(is_listed, bag + first, NO_ROW))
        gains.append(gain)
        first += entries.num_outputs
    return jnp.concatenate(rows), jnp.concatenate(outputs), jnp.concatenate(gains)


def call_of(bags: Bags, rows: Int[Array, " nnz"], mode: Mode) -> Call:
    """A call of bags that read `rows`; their mean divides by the number of ids, weighted or not."""
    weights = None if bags.weights is None else jnp.asarray(bags.weights, jnp.float32)
    ids = IdList(rows, jnp.asarray(bags.offsets), weights)
    return Call.of([ids], ["mean_by_count" if mode == "mean" else mode])


def with_room(bags: Bags) -> Bags:
    """Bags of any lengths with room for a power of two of ids, so that few programs serve all batches.

    What the room holds is in no bag. Left as they are: dense arrays, what is inside `jit`, and what lies on several
    devices.
    """
    if bags.dense_shape is not None or is_traced(bags):
        return bags
    if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in jax.tree.leaves(bags)):
        return bags
    bags_on_host: Bags = jax.tree.map(np.asarray, bags)
    return bags_on_host.pad_to(max(LEAST_ROOM, padded_size(bags.ids.shape[0])))


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
    check_type(implementation, Implementation | None, "implementation")
    too_many = f"the native kernels take up to {MAX_CORES} cores, not {len(cores)}"
    reason = native.unavailable_because() or (too_many if len(cores) > MAX_CORES else None)
    if implementation == "native" and reason is not None:
        raise NotImplementedError(f"implementation 'native' cannot run here: {reason}")
    zero = varying_zero(*cores, *digits, bags, gains)
    cores, gains = jax.tree.map(lambda x: x + zero.astype(x.dtype), (cores, gains))
    bags = jnp.where(bags < 0, NO_ROW, bags)  # JAX would count negative numbers from the end
    if bags.shape[0] == 0:
        return jnp.full((num_bags, math.prod(q for _, q, _ in slice_shapes)), zero.astype(jnp.float32))
    run = _plain if implementation == "plain" or reason is not None else _native
    return run(slice_shapes, num_bags, cores, digits, bags, gains)


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
