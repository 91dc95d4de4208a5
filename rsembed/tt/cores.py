"""Tensor-train tables as functions of a spec and its cores: rows, bags of rows, the whole table."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from rsembed.bags import Bags
from rsembed.checks import check_type
from rsembed.kernels.contract import NO_ROW
from rsembed.tt.chain import AnyCores, Cores, pooled_rows, varying_zero
from rsembed.tt.lookups import Mode, digits_of, gains_of_entries, lookups_of, with_room
from rsembed.tt.meshes import on_every_device
from rsembed.tt.spec import TTSpec


def rows(
    spec: TTSpec, cores: AnyCores, ids: Integer[Array | np.ndarray, "*batch"], *, implementation: str | None = None
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
    check_type(ids, Int[Array, "..."], "rows: ids")
    arrays, ids = on_every_device((check_cores(spec, cores), ids))
    found = rows_of((spec,), arrays, ids.reshape(-1), implementation=implementation)
    return found.reshape(*ids.shape, spec.embedding_dim)


def rows_of(
    specs: Sequence[TTSpec],
    cores: Cores,
    ids: Integer[Array | np.ndarray, " nnz"],
    tables: Int[Array | np.ndarray, " nnz"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "nnz dim"]:
    """Rows of tables whose cores stand one behind the other; arguments as for `digits_of` and `rows`."""
    digits, valid = digits_of(specs, ids, tables)
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
    check_type(bags, Bags, "bag: bags, which Bags.from_lists makes of lists,")
    cores, bags = on_every_device((check_cores(spec, cores), bags))
    bags = with_room(bags)
    (found,) = lookups_of(bags, (spec,), ((0,),), padding_idx)
    return pooled_rows(
        cores,
        found.digits,
        found.bags,
        gains_of_entries(found.bags, bags.num_bags, bags.weights, mode),
        slice_shapes=spec.slice_shapes,
        num_bags=bags.num_bags,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnums=0)
def full_weight(spec: TTSpec, cores: AnyCores) -> Float[Array, "vocab dim"]:
    """The whole table, written block after block of equal first digits; needs the table and one block of memory."""
    arrays: Cores = on_every_device(check_cores(spec, cores))
    num_rows, size = spec.num_embeddings, spec.strides[0]
    whole = num_rows // size

    def put(k: Array | int, table: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(table, weight_block(spec, arrays, k), k * size, 0)

    nothing = jnp.full((num_rows, spec.embedding_dim), varying_zero(*arrays).astype(jnp.float32))
    table = jax.lax.fori_loop(0, whole, put, nothing)
    if whole * size < num_rows:
        rest = weight_block(spec, arrays, whole)[: num_rows - whole * size]
        table = jax.lax.dynamic_update_slice_in_dim(table, rest, whole * size, 0)
    return table


def weight_block(spec: TTSpec, cores: AnyCores, first_digit: Int[Array, ""] | int) -> Float[Array, "block dim"]:
    """Rows `first_digit * strides[0]` and following, as many as share that digit, padding rows included."""
    p, shapes, cores = spec.tt_p_shapes, spec.slice_shapes, check_cores(spec, cores)
    product = cores[0][first_digit].astype(jnp.float32).reshape(1, *shapes[0][1:])  # [rows, columns, rank]
    for t in range(1, spec.num_cores):
        core = cores[t].astype(jnp.float32).reshape(p[t], *shapes[t])
        product = jnp.einsum("acr,prqs->apcqs", product, core, precision="highest")
        product = product.reshape(math.prod(p[1 : t + 1]), -1, shapes[t][2])
    return product.reshape(spec.strides[0], spec.embedding_dim)


def check_cores(spec: TTSpec, cores: AnyCores) -> Cores:
    """The cores as a tuple of JAX arrays.

    Raises: ValueError: their shapes are not those of the spec. TypeError: there is no spec.
    """
    check_type(spec, TTSpec, "spec")
    found = tuple(tuple(core.shape) for core in cores)
    if found != spec.core_shapes:
        raise ValueError(f"cores have shapes {found}, but the spec asks for {spec.core_shapes}.")
    return tuple(map(jnp.asarray, cores))
