"""Blocks of a fixed size between the devices of a mesh: all that travels, travels here.

A function here runs inside `shard_map` over the mesh axis (or axes) named by `axis_name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rsembed.kernels import api
from rsembed.kernels.blocks import word_dtype

AxisName = str | tuple[str, ...]


def trade(parcels: Sequence[Any], axis_name: AxisName, entries: Sequence[Array] | None = None) -> list[Any]:
    """Block `i` of every parcel goes to device `i`, and comes from it.

    Args:
      parcels: pytrees of arrays, each with a capacity of its own. Arrays of one kind travel together, and all lanes of
        32 bits are of one kind: programs and networks pay for every exchange by itself.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.
      entries: for each parcel which of its entries, `[nnz, ...]`, are in the places `[devices, capacity]` of its
        blocks; a place outside `[0, nnz)` is empty. None where parcels are blocks `[devices, capacity, ...]` already.

    Returns: the same pytrees of arrays `[devices, capacity, ...]`. Places that the sender left empty hold `NO_ROW` in
      int32 arrays, so that owners ignore them, and zeros in others.
    """
    leaves, tree = jax.tree.flatten(list(parcels))
    rows: list[Any] = [None] * len(leaves)
    if entries is not None:
        rows = [own for parcel, own in zip(parcels, entries, strict=True) for _ in jax.tree.leaves(parcel)]
    found: dict[int, Array] = {}
    kinds: dict[Any, list[int]] = {}
    for number, (array, own) in enumerate(zip(leaves, rows, strict=True)):
        row = array.shape[1:] if own is not None else array.shape[2:]
        dtype = jnp.dtype(jnp.uint32) if array.dtype == jnp.bool_ else array.dtype
        kinds.setdefault((word_dtype(dtype, is_lane=not row), row), []).append(number)
    for (_, row), numbers in kinds.items():
        arrays = [_without_bool(leaves[number]) for number in numbers]
        picked = [rows[number] for number in numbers]
        arrived = jax.lax.all_to_all(
            api.pack_blocks(arrays, picked), axis_name, split_axis=0, concat_axis=0, tiled=True
        )
        shapes = [
            jax.ShapeDtypeStruct((*(array if own is None else own).shape[:2], *row), array.dtype)
            for array, own in zip(arrays, picked, strict=True)
        ]
        found |= zip(numbers, api.unpack_blocks(arrived, shapes), strict=True)
    blocks = [found[n] != 0 if leaf.dtype == jnp.bool_ else found[n] for n, leaf in enumerate(leaves)]
    parts: list[Any] = jax.tree.unflatten(tree, blocks)
    return parts


def _without_bool(array: Array) -> Array:
    return array.astype(jnp.uint32) if array.dtype == jnp.bool_ else array
