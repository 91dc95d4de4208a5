"""Tensor-train tables as functions of a spec and its cores: rows, bags of rows, the whole table."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from rsembed.bags import Bags, is_traced, narrow_ids
from rsembed.kernels.contract import NO_ROW
from rsembed.tt.chain import Cores, pooled_rows
from rsembed.tt.meshes import as_on_automatic_axes
from rsembed.tt.spec import TTSpec

Mode = Literal["sum", "mean"]

SMALLEST_ROOM_BITS = 5


@as_on_automatic_axes
def rows(
    spec: TTSpec, cores: Cores, ids: Integer[Array | np.ndarray, "*batch"], *, implementation: str | None = None
) -> Float[Array, "*batch dim"]:
    """The rows of `ids`, float32; an id outside the table has a row of zeros.

    Works under `jit`, `grad`, `vmap` and `shard_map`, and stores nothing per lookup for the backward pass but integers.
    Temporary memory is about `chain.TILE_BYTES` forward and twice that backward, beside a few integers per lookup.

    Args:
      spec: the table.
      cores: its cores, float32 or bfloat16; sums are float32.
      ids: row numbers. Tables of 2^31 rows and more need int64 ids of NumPy, outside `jit`.
      implementation: see `chain.pooled_rows`.

    Example:
      >>> spec = TTSpec(6, (2, 3), (1, 2), (1,))
      >>> cores = (jnp.asarray([[1.0], [10.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
      >>> rows(spec, cores, jnp.asarray([1, 3])).tolist()
      [[3.0, 4.0], [10.0, 20.0]]
    """
    flat = ids.reshape(-1)
    digits, valid = digits_of((spec,), flat)
    places = jnp.where(valid, jnp.arange(flat.size, dtype=jnp.int32), NO_ROW)
    found = pooled_rows(
        check_cores(spec, cores),
        digits,
        places,
        jnp.ones(flat.size),
        slice_shapes=spec.slice_shapes,
        num_bags=flat.size,
        implementation=implementation,
    )
    return found.reshape(*ids.shape, spec.embedding_dim)


@as_on_automatic_axes
def bag(
    spec: TTSpec,
    cores: Cores,
    bags: Bags,
    *,
    mode: Mode = "sum",
    padding_idx: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """Weighted sums or means of the rows of every bag, float32; an empty bag gives zeros.

    Args:
      spec: the table.
      cores: its cores.
      bags: ids and optional weights; ids outside the table, -1 among them, contribute nothing and are not counted.
      mode: "sum", or "mean", which divides by the number of ids and not by the sum of weights.
      padding_idx: an id that contributes nothing either.
      implementation: see `chain.pooled_rows`.
    """
    bags = with_room(bags)
    digits, valid = digits_of((spec,), bags.ids)
    if padding_idx is not None:
        valid &= bags.ids != padding_idx
    entry_bags = bags_of_entries(bags, valid)
    return pooled_rows(
        check_cores(spec, cores),
        digits,
        entry_bags,
        gains_of_entries(entry_bags, bags.num_bags, bags.weights, mode),
        slice_shapes=spec.slice_shapes,
        num_bags=bags.num_bags,
        implementation=implementation,
    )


@as_on_automatic_axes
@functools.partial(jax.jit, static_argnums=0)
def full_weight(spec: TTSpec, cores: Cores) -> Float[Array, "vocab dim"]:
    """The whole table, written block after block of equal first digits; needs the table and one block of memory."""
    check_cores(spec, cores)
    num_rows, size = spec.num_embeddings, spec.strides[0]
    whole = num_rows // size

    def put(k: Array | int, table: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(table, weight_block(spec, cores, k), k * size, 0)

    table = jax.lax.fori_loop(0, whole, put, jnp.zeros((num_rows, spec.embedding_dim)))
    if whole * size < num_rows:
        table = table.at[whole * size :].set(weight_block(spec, cores, whole)[: num_rows - whole * size])
    return table


def weight_block(spec: TTSpec, cores: Cores, first_digit: Int[Array, ""] | int) -> Float[Array, "block dim"]:
    """Rows `first_digit * strides[0]` and following, as many as share that digit, padding rows included."""
    p, shapes = spec.tt_p_shapes, spec.slice_shapes
    product = cores[0][first_digit].astype(jnp.float32).reshape(1, *shapes[0][1:])  # [rows, columns, rank]
    for t in range(1, spec.num_cores):
        core = cores[t].astype(jnp.float32).reshape(p[t], *shapes[t])
        product = jnp.einsum("acr,prqs->apcqs", product, core, precision="highest")
        product = product.reshape(math.prod(p[1 : t + 1]), -1, shapes[t][2])
    return product.reshape(spec.strides[0], spec.embedding_dim)


def check_cores(spec: TTSpec, cores: Cores) -> Cores:
    """The cores as a tuple.

    Raises: ValueError: their shapes are not those of the spec.
    """
    found = tuple(tuple(core.shape) for core in cores)
    if found != spec.core_shapes:
        raise ValueError(f"cores have shapes {found}, but the spec asks for {spec.core_shapes}.")
    return tuple(cores)


def digits_of(specs: Sequence[TTSpec], ids: Any, tables: Any = None) -> tuple[tuple[Int[Array, " nnz"], ...], Any]:
    """Digits of every id, one array per core, and whether the id lies in its table.

    Integers throughout: float32 cannot tell ids above 2^24 apart. NumPy ids are taken apart on the host, in 64 bits.

    Args:
      specs: tables of equally many cores, whose cores stand one behind the other: digits count on from table to table.
      ids: row numbers.
      tables: place in `specs` of every id's table; None means the first.

    Raises: TypeError: ids are not integers.
    """
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}.")
    ids = ids.astype(np.int64) if xp is np else narrow_ids(ids)
    tables = np.asarray(tables) if xp is np and tables is not None else tables

    def of_table(values: Sequence[int]) -> Any:
        numbers = np.minimum(values, np.iinfo(ids.dtype).max).astype(ids.dtype)
        return numbers[0] if tables is None else xp.asarray(numbers)[tables]

    valid = (ids >= 0) & (ids < of_table([spec.num_embeddings for spec in specs]))
    digits = []
    for t in range(specs[0].num_cores):
        p = [spec.tt_p_shapes[t] for spec in specs]
        first = of_table([0, *itertools.accumulate(p)])
        digits.append(ids // of_table([spec.strides[t] for spec in specs]) % of_table(p) + first)
    return tuple(jnp.asarray(digit, jnp.int32) for digit in digits), valid


def with_room(bags: Bags) -> Bags:
    """Bags of any lengths with room for a power of two of ids, so that few programs serve all batches.

    What the room holds is in no bag. Left as they are: dense arrays, bags that somebody padded, what is inside `jit`,
    and what lies on several devices.
    """
    arrays = jax.tree.leaves(bags)
    if bags.dense_shape is not None or is_traced(bags) or any(_is_spread(array) for array in arrays):
        return bags
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    if offsets[-1] != ids.size:
        return bags
    weights = None if bags.weights is None else np.asarray(bags.weights)
    return Bags(ids, offsets, weights).pad_to(1 << max(SMALLEST_ROOM_BITS, (ids.size - 1).bit_length()))


def _is_spread(array: Any) -> bool:
    return isinstance(array, jax.Array) and len(array.sharding.device_set) > 1


def bags_of_entries(bags: Bags, valid: Any) -> Int[Array, " nnz"]:
    """Bag of every id; `NO_ROW` where the id is not valid or lies behind the last offset."""
    num_entries, offsets = bags.ids.shape[0], jnp.asarray(bags.offsets).astype(jnp.int32)
    starts = jnp.zeros(num_entries + 1, jnp.int32).at[offsets].add(1)
    entry_bags = jnp.cumsum(starts[:num_entries]) - 1
    return jnp.where(valid & (entry_bags < bags.num_bags), entry_bags, NO_ROW)


def gains_of_entries(
    entry_bags: Int[Array, " nnz"], num_bags: int, weights: Any | None, mode: Mode
) -> Float[Array, " nnz"]:
    """Factor of every row: its weight, over the number of ids in its bag for mode "mean"."""
    gains = jnp.ones(entry_bags.shape) if weights is None else jnp.asarray(weights, jnp.float32)
    if mode == "mean":
        counts = jnp.zeros(num_bags, jnp.int32).at[entry_bags].add(1, mode="drop")
        gains = gains / jnp.maximum(counts, 1).at[entry_bags].get(mode="clip").astype(jnp.float32)
    elif mode != "sum":
        raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}; max is not a linear function of the cores.")
    return gains
