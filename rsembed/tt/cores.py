"""Computes rows, pooled bags or the whole table of a tensor train from its spec and its cores.

The C++ kernels compute every distinct row of a call once and sum in a fixed order. The plain JAX
version gathers one slice of every core for each lookup, and computes a tile of lookups at a time.
The backward pass of the C++ kernels and of the plain JAX version computes the rows again, so that
the forward pass saves no rows.
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

from rsembed.arrays import is_traced, numpy_or_jax
from rsembed.bags import Bags, narrow_ids
from rsembed.checks import check_type
from rsembed.kernels import native, reference
from rsembed.kernels.contract import NO_ROW, Call, Combiner, IdList
from rsembed.kernels.keyed import varying_zero
from rsembed.sizes import padded_size
from rsembed.tt.spec import TTSpec

Mode = Literal["sum", "mean"]
Implementation = Literal["native", "plain"]

COMBINERS: dict[Mode, Combiner] = {"sum": "sum", "mean": "mean_by_count"}
"""Combiner of a kernel call for each mode.

In mode "mean", the weighted sum of a bag is divided by the number of ids in the bag.
"""
MIN_PADDED_IDS = 32
"""Minimum number of ids to which a batch on the host is padded."""
MAX_CORES = 16
"""Largest number of cores that the C++ kernels can multiply."""
TILE_BYTES = 2**21
"""Maximum memory of one tile of lookups in the plain JAX version, in bytes.

`TILE_BYTES` limits the memory for the slices of the cores and their products. A tile has at least
one lookup, even if a single lookup needs more bytes.
"""

Cores = tuple[Array, ...]
"""One array `[p_t, R_{t-1} * q_t * R_t]` per core, as `TTSpec` describes."""
AnyCores = Sequence[Array | np.ndarray]
"""Cores as users pass them: any sequence of JAX or NumPy arrays."""
Digits = tuple[Int[Array, " nnz"], ...]
"""For each core, the index of the slice that each lookup reads."""
SliceShapes = tuple[tuple[int, int, int], ...]
"""For each core, the shape `(R_{t-1}, q_t, R_t)` of a slice."""


def rows(
    spec: TTSpec,
    cores: AnyCores,
    ids: Integer[Array | np.ndarray, "*batch"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch dim"]:
    """Rows of the table for `ids`, in float32. An id outside the table gives zeros.

    The function works under `jit`, `grad`, `vmap` and `shard_map`. The backward pass computes the
    rows again, so that the forward pass saves no rows. The plain JAX version needs memory for the
    rows of all lookups, and `TILE_BYTES` for the slices and products of one tile of lookups.

    Args:
      spec: size, factors and ranks of the table.
      cores: cores of the table, float32 or bfloat16. Sums are computed in float32.
      ids: row numbers. For a table of 2^31 rows or more, pass NumPy int64 ids outside `jit`.
      implementation: see `cores.pooled_rows`.

    Example:
      >>> spec = TTSpec(6, (2, 3), (1, 2), (1,))
      >>> cores = (jnp.asarray([[1.0], [10.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
      >>> rows(spec, cores, jnp.asarray([1, 3])).tolist()
      [[3.0, 4.0], [10.0, 20.0]]
    """
    check_type(ids, Int[Array, "..."], "rows: ids")
    arrays = check_cores(spec, cores)
    flat_ids = ids.reshape(-1)
    vectors = rows_of((spec,), arrays, flat_ids, implementation=implementation)
    return vectors.reshape(*ids.shape, spec.embedding_dim)


def rows_of(
    specs: Sequence[TTSpec],
    cores: Cores,
    ids: Integer[Array | np.ndarray, " nnz"],
    *,
    implementation: str | None = None,
) -> Float[Array, "nnz dim"]:
    """Rows of several tables with concatenated cores.

    For the arguments, see the functions `digits_of` and `rows`.
    """
    num_ids = ids.shape[0]
    digits, is_row = digits_of(specs, ids)
    positions = jnp.arange(num_ids, dtype=jnp.int32)
    bags = jnp.where(is_row, positions, NO_ROW)
    gains = jnp.ones(num_ids)
    return pooled_rows(
        cores,
        digits,
        bags,
        gains,
        slice_shapes=specs[0].slice_shapes,
        num_bags=num_ids,
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
    """Weighted sum or mean of the rows of every bag, in float32. An empty bag gives zeros.

    Args:
      spec: size, factors and ranks of the table.
      cores: cores of the table.
      bags: ids and optional weights. Ids outside the table (including -1) contribute nothing and
        are not counted in the divisor of a mean.
      mode: "sum", or "mean", which divides by the number of ids rather than by the sum of weights.
      implementation: see `cores.pooled_rows`.
    """
    check_type(bags, Bags, "bag: bags, which Bags.from_lists makes of lists,")
    check_type(bags.ids, Int[Array, "..."], "bag: ids")
    check_type(mode, Mode, "mode")
    arrays = check_cores(spec, cores)
    bags = padded_bags(bags)
    digits, is_row = digits_of((spec,), bags.ids)
    # The row number of each id in `call` only shows whether the id is valid: 0 for an id of the
    # table, and `NO_ROW` for padding and other ids. The slices of a row are selected by `digits`.
    rows = jnp.where(is_row, 0, NO_ROW)
    ids = IdList(rows, jnp.asarray(bags.offsets), weights_of(bags))
    call = Call.of([ids], [COMBINERS[mode]])
    _, outputs, gains = entries_of(call)
    return pooled_rows(
        arrays,
        digits,
        outputs,
        gains,
        slice_shapes=spec.slice_shapes,
        num_bags=bags.num_bags,
        implementation=implementation,
    )


def full_weight(
    spec: TTSpec,
    cores: AnyCores,
) -> Float[Array, "vocab dim"]:
    """The whole table in float32.

    The function computes the table in blocks of rows. All rows of a block have the same first digit
    (see `TTSpec`). The function needs memory for the table and for one block of rows.
    """
    arrays = check_cores(spec, cores)
    table: Array = _full_weight(spec, arrays)
    return table


@functools.partial(jax.jit, static_argnums=0)
def _full_weight(
    spec: TTSpec,
    cores: Cores,
) -> Float[Array, "vocab dim"]:
    num_rows = spec.num_embeddings
    block_rows = spec.strides[0]
    num_full_blocks = num_rows // block_rows

    def block(first_digit: Array | int) -> Float[Array, "block dim"]:
        first_slice = cores[0][first_digit, None]
        # `product` is the product of the first cores, an array [rows, columns, rank].
        product = jnp.ones((1, 1, 1))
        for core, shape in zip((first_slice, *cores[1:]), spec.slice_shapes, strict=True):
            slices = core.astype(jnp.float32).reshape(-1, *shape)
            num_product_rows = product.shape[0] * slices.shape[0]
            product = jnp.einsum("acr,prqs->apcqs", product, slices, precision="highest")
            product = product.reshape(num_product_rows, -1, shape[2])
        return product.reshape(block_rows, spec.embedding_dim)

    def with_block(k: Array | int, table: Array) -> Array:
        block_of_table = block(k)
        first_row = k * block_rows
        return jax.lax.dynamic_update_slice_in_dim(table, block_of_table, first_row, 0)

    zero = varying_zero(*cores).astype(jnp.float32)
    table = jnp.full((num_rows, spec.embedding_dim), zero)
    table = jax.lax.fori_loop(0, num_full_blocks, with_block, table)
    start = num_full_blocks * block_rows
    if start < num_rows:
        last_rows = block(num_full_blocks)[: num_rows - start]
        table = jax.lax.dynamic_update_slice_in_dim(table, last_rows, start, 0)
    return table


def check_cores(spec: TTSpec, cores: AnyCores) -> Cores:
    """The cores as a tuple of JAX arrays.

    Raises:
      ValueError: the shapes of the cores differ from `spec.core_shapes`.
      TypeError: `spec` is not a `TTSpec`, or `cores` is not a sequence.
    """
    check_type(spec, TTSpec, "spec")
    check_type(cores, Sequence[Any], "cores")
    shapes = tuple(map(np.shape, cores))
    if shapes != spec.core_shapes:
        raise ValueError(f"cores have shapes {shapes}, but the spec asks for {spec.core_shapes}.")
    return tuple(map(jnp.asarray, cores))


def digits_of(
    specs: Sequence[TTSpec],
    ids: Any,
) -> tuple[Digits, Any]:
    """For each id, the index of its slice in every core, and whether the id is a row of a table.

    All arithmetic uses integers, because float32 cannot tell ids above 2^24 apart. NumPy ids are
    split into digits on the host, in 64 bits.

    Args:
      specs: specs of the tables with concatenated cores, all with the same number of cores. The
        slice indices of a table are offset by the number of slices of all earlier tables.
      ids: row numbers of the concatenated tables. The row numbers of a table are offset by the
        number of rows of all earlier tables. Several tables have fewer than 2^31 rows together.
    """
    xp = numpy_or_jax(ids)
    ids = ids.astype(np.int64) if xp is np else narrow_ids(ids)
    max_id = np.iinfo(ids.dtype).max
    sizes = [spec.num_embeddings for spec in specs]
    first_rows = _offsets(sizes)
    table = None
    if len(specs) > 1:
        ends = xp.asarray(first_rows[1:], ids.dtype)
        table = xp.searchsorted(ends, ids, side="right")

    def of_table(values: Sequence[int]) -> Any:
        """For each id, the entry of `values` for its table.

        If all entries of `values` are equal, the result is a scalar.
        """
        by_table = np.minimum(values, max_id).astype(ids.dtype)
        if (by_table == by_table[0]).all():
            return by_table[0]
        return xp.asarray(by_table)[table]

    is_row = ids >= 0
    ids = ids - of_table(first_rows)
    is_row &= ids < of_table(sizes)
    digits = []
    for t in range(specs[0].num_cores):
        num_slices = [spec.tt_p_shapes[t] for spec in specs]
        strides = [spec.strides[t] for spec in specs]
        offset = of_table(_offsets(num_slices))
        stride = of_table(strides)
        digit = ids // stride % of_table(num_slices)
        slice_index = digit + offset
        digits.append(jnp.asarray(slice_index, jnp.int32))
    return tuple(digits), is_row


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Start of each part in a concatenation of parts with the sizes `sizes`."""
    ends = itertools.accumulate(sizes[:-1])
    return [0, *ends]


def entries_of(
    call: Call,
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Float[Array, " nnz"]]:
    """Row number, output index and gain of every id in a kernel call.

    The gain of an id is the factor that multiplies the row of the id. The ids of all lists are
    concatenated, and so are their outputs. A list has one output per bag or, with the combiner
    "none", one output per id. An id that contributes nothing has the output index `NO_ROW`.
    """
    rows = []
    outputs = []
    gains = []
    first_output = 0
    for number in range(len(call.lists)):
        entries = reference.entries_of(call, number, 0, NO_ROW)
        bag, gain, is_listed = reference.entry_gains(entries, NO_ROW)
        output = jnp.where(is_listed, bag + first_output, NO_ROW)
        rows.append(entries.rows)
        outputs.append(output)
        gains.append(gain)
        first_output += entries.num_outputs
    all_rows = jnp.concatenate(rows)
    all_outputs = jnp.concatenate(outputs)
    all_gains = jnp.concatenate(gains)
    return all_rows, all_outputs, all_gains


def weights_of(bags: Bags) -> Float[Array, " nnz"] | None:
    """Weights of bags in float32, or None if all weights are 1."""
    if bags.weights is None:
        return None
    return jnp.asarray(bags.weights, jnp.float32)


def padded_bags(bags: Bags) -> Bags:
    """Pads the number of ids to a power of two, so that a few compiled programs handle all batches.

    The padding belongs to no bag. Bags from a dense array, traced bags, and bags with arrays on
    several devices are returned unchanged.
    """
    if bags.dense_shape is not None or is_traced(bags):
        return bags
    for array in jax.tree.leaves(bags):
        if not isinstance(array, jax.Array):
            continue
        num_devices = len(array.sharding.device_set)
        if num_devices > 1:
            return bags
    host_bags: Bags = jax.tree.map(np.asarray, bags)
    num_ids = bags.ids.shape[0]
    num_padded_ids = max(MIN_PADDED_IDS, padded_size(num_ids))
    return host_bags.pad_to(num_padded_ids)


@functools.partial(jax.jit, static_argnames=("slice_shapes", "num_bags", "implementation"))
def pooled_rows(
    cores: Cores,
    digits: Digits,
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    *,
    slice_shapes: SliceShapes,
    num_bags: int,
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """For every bag, the sum of `gain * row` over the lookups of the bag, in float32.

    The sum is differentiable with respect to `cores` and `gains`.

    Args:
      cores: arrays `[p_t, R_{t-1} * q_t * R_t]`.
      digits: for every core, the index of the slice that each lookup reads.
      bags: for each lookup, the index of its bag. The indices may be in any order. A lookup with
        an index outside `[0, num_bags)` contributes nothing.
      gains: for each lookup, the factor that multiplies its row.
      slice_shapes: shape `(R_{t-1}, q_t, R_t)` of the slices of every core.
      num_bags: number of bags in the result.
      implementation: "native" runs C++ kernels on CPUs. "plain" runs JAX operations, which support
        forward-mode and second derivatives. None, the default, chooses "native" if it can run, else
        "plain".

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: with `implementation="native"`, the C++ kernels are not available, or do
        not support so many cores.
    """
    check_type(implementation, Implementation | None, "implementation")
    reason = native.unavailable_because()
    if reason is None and len(cores) > MAX_CORES:
        reason = f"the native kernels take up to {MAX_CORES} cores, not {len(cores)}"
    if implementation == "native" and reason is not None:
        raise NotImplementedError(f"implementation 'native' cannot run here: {reason}")
    zero = varying_zero(*cores, *digits, bags, gains)
    cores = tuple(core + zero.astype(core.dtype) for core in cores)
    gains = gains + zero.astype(gains.dtype)
    bags = jnp.where(bags < 0, NO_ROW, bags)  # In JAX, the index -1 means the last element.
    if bags.shape[0] == 0:
        shape = (num_bags, _dim(slice_shapes))
        return jnp.full(shape, zero.astype(jnp.float32))
    if implementation == "plain" or reason is not None:
        return _plain(slice_shapes, num_bags, cores, digits, bags, gains)
    return _native(slice_shapes, num_bags, cores, digits, bags, gains)


def _plain(
    shapes: SliceShapes,
    num_bags: int,
    cores: Cores,
    digits: Digits,
    bags: Array,
    gains: Array,
) -> Array:
    @jax.checkpoint
    def row(lookup: tuple[Array, ...]) -> Array:
        *lookup_digits, gain = lookup
        product = gain.reshape(1, 1)
        for t, core in enumerate(cores):
            rank, q, next_rank = shapes[t]
            # An id that belongs to no bag gets zeros instead of a slice, so that a NaN in a slice
            # reaches only the bags that read this slice.
            piece = core.at[lookup_digits[t]].get(mode="fill", fill_value=0)
            piece = piece.astype(jnp.float32)
            piece = piece.reshape(rank, q * next_rank)
            product = jnp.matmul(product, piece, precision="highest")
            product = product.reshape(-1, next_rank)
        return product.reshape(-1)

    is_in_bag = bags < num_bags
    valid_digits = [jnp.where(is_in_bag, digit, NO_ROW) for digit in digits]
    columns = 1
    floats_per_lookup = 0
    for rank, q, next_rank in shapes:
        columns *= q
        product_size = columns * next_rank
        slice_size = rank * q * next_rank
        floats_per_lookup += product_size + slice_size
    max_lookups = TILE_BYTES // (4 * floats_per_lookup)
    tile = max(1, min(bags.shape[0], max_lookups))
    rows = jax.lax.map(row, (*valid_digits, gains), batch_size=tile)
    pooled = jnp.zeros((num_bags, rows.shape[1]))
    return pooled.at[bags].add(rows, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _native(
    shapes: SliceShapes,
    num_bags: int,
    cores: Cores,
    digits: Digits,
    bags: Array,
    gains: Array,
) -> Array:
    pooled, _ = _forward(shapes, num_bags, cores, digits, bags, gains)
    return pooled


def _forward(
    shapes: SliceShapes,
    num_bags: int,
    cores: Cores,
    digits: Digits,
    bags: Array,
    gains: Array,
) -> tuple[Array, PyTree]:
    """Pooled rows, and the arguments that the backward pass needs."""
    result = jax.ShapeDtypeStruct((num_bags, _dim(shapes)), jnp.float32)
    call = jax.ffi.ffi_call("rsembed_train_rows", result, vmap_method="sequential")
    operands = _operands(cores, digits)
    pooled = call(bags, gains, *operands, **_attributes(shapes))
    zero = varying_zero(gains).astype(jnp.float32)
    saved = (cores, digits, bags, gains)
    return pooled + zero, saved


def _backward(
    shapes: SliceShapes,
    num_bags: int,
    saved: PyTree,
    d_pooled: Array,
) -> tuple[PyTree, ...]:
    """Gradients of `cores` and `gains`. The integers `digits` and `bags` have no gradients."""
    cores, digits, bags, gains = saved
    results = []
    for array in (*cores, gains):
        results.append(jax.ShapeDtypeStruct(array.shape, jnp.float32))
    call = jax.ffi.ffi_call("rsembed_train_pull", results, vmap_method="sequential")
    operands = _operands(cores, digits)
    attributes = _attributes(shapes)
    attributes["num_bags"] = np.int64(num_bags)
    *d_cores, d_gains = call(bags, gains, d_pooled, *operands, **attributes)
    zero = varying_zero(gains).astype(jnp.float32)
    core_gradients = []
    for d_core, core in zip(d_cores, cores, strict=True):
        gradient = d_core + zero
        core_gradients.append(gradient.astype(core.dtype))

    def no_gradient(integers: Array) -> np.ndarray:
        return np.zeros(integers.shape, jax.dtypes.float0)

    d_digits = tuple(map(no_gradient, digits))
    d_bags = no_gradient(bags)
    return tuple(core_gradients), d_digits, d_bags, d_gains + zero


_native.defvjp(_forward, _backward)


def _dim(shapes: SliceShapes) -> int:
    """Length of a row: the product of all column factors."""
    return math.prod(q for _, q, _ in shapes)


def _operands(
    cores: Cores,
    digits: Digits,
) -> list[Array]:
    """Operands of a kernel call: for each core in turn, the slice indices, then the core."""
    operands = []
    for core, digit in zip(cores, digits, strict=True):
        operands += [digit, core.astype(jnp.float32)]
    return operands


def _attributes(shapes: SliceShapes) -> dict[str, np.ndarray | np.int64]:
    """Attributes of a kernel call: all slice shapes, and index of the core with largest slices."""
    slice_sizes = [math.prod(shape) for shape in shapes]
    flat_shapes = np.asarray(shapes, np.int64).reshape(-1)
    return {
        "slice_shapes": flat_shapes,
        "grouped": np.int64(np.argmax(slice_sizes)),
    }
