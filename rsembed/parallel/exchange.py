"""Rows and vectors between the devices of a mesh, in rounds of `all_to_all` with blocks of a fixed size.

Every device holds *entries*, each of which belongs to one *owner* device: a row to be read there, or a gradient to be
applied there. A round sends one block per owner; block `o` holds the entries of owner `o` in their order, and empty
places behind them.

```
lookup   rows ──send──▶ owner reads its table ──send_back──▶ vectors, one per entry
update   rows and gradients ──send──▶ owner steps its rows
```

All functions run inside `shard_map` over the mesh axis (or axes) named by `axis_name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rsembed.kernels import api
from rsembed.kernels.blocks import word_dtype
from rsembed.kernels.contract import NO_ROW

AxisName = str | tuple[str, ...]


class Routes(NamedTuple):
    """Where this device's entries travel.

    Attributes:
      entries: the entry in every place of the outgoing blocks, `NO_ROW` where a place is empty.
      places: the place `owner * capacity + position` of every entry, `NO_ROW` if the entry does not travel.
      num_left_behind: entries with an owner that found their block full.
    """

    entries: Int[Array, "devices capacity"]
    places: Int[Array, " nnz"]
    num_left_behind: Int[Array, ""]


def plan_routes(owners: Int[Array, " nnz"], *, num_devices: int, capacity: int) -> Routes:
    """Routes of entries to their owners.

    Args:
      owners: owner of every entry; entries of an owner outside `[0, num_devices)` stay at home.
      num_devices: size of the mesh axis.
      capacity: places per block. Blocks have the size of the fullest one that may occur, so a tight bound saves
        memory and traffic; entries beyond it are left behind and counted.

    Example:
      >>> routes = plan_routes(jnp.asarray([1, 0, 1, 7]), num_devices=2, capacity=2)
      >>> routes.places.tolist()[:3], int(routes.num_left_behind)
      ([2, 0, 3], 0)
    """
    offsets, order = api.rows_by_bag(owners, num_devices)
    column = jnp.arange(capacity, dtype=offsets.dtype)
    positions = offsets[:-1, None] + column[None, :]
    is_filled = positions < offsets[1:, None]
    (ordered,) = api.gather_rows((order,), positions.reshape(-1))
    entries = jnp.where(is_filled, ordered.reshape(positions.shape), NO_ROW)
    all_places = jnp.arange(num_devices * capacity, dtype=jnp.int32)
    (places,) = api.scatter_rows((jnp.full(owners.shape, NO_ROW, jnp.int32),), entries.reshape(-1), (all_places,))
    num_left_behind = jnp.sum(jnp.maximum(jnp.diff(offsets) - capacity, 0))
    return Routes(entries, places, num_left_behind)


def send(values: Any, entries: Int[Array, "devices capacity"], axis_name: AxisName) -> Any:
    """What the other devices sent to this one; row `i` of a result comes from device `i`.

    Args:
      values: pytree of arrays `[nnz, ...]`, one number or vector per entry.
      entries: the entry in every place of the outgoing blocks; a place outside `[0, nnz)` is empty.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.

    Returns: the same pytree of arrays `[devices, capacity, ...]`. Empty places hold `NO_ROW` in int32 arrays, so that
      owners ignore them, and zeros in others.
    """
    (blocks,) = trade([values], axis_name, [entries])
    return blocks


def send_back(replies: Any, axis_name: AxisName) -> Any:
    """The owners' replies to this device; entry `e` finds its own at `routes.places[e]`.

    Args:
      replies: pytree of arrays `[devices, capacity, ...]`, with one reply to everything that `send` delivered, in the
        same order.
      axis_name: as given to `send`.

    Returns: the same pytree of arrays `[devices * capacity, ...]`.
    """
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trade([replies], axis_name)[0])


def trade(parcels: Sequence[Any], axis_name: AxisName, entries: Sequence[Array] | None = None) -> list[Any]:
    """Block `i` of every parcel goes to device `i`, and comes from it.

    Args:
      parcels: pytrees of arrays, each with a capacity of its own. Arrays of one kind travel together, and all lanes of
        32 bits are of one kind: programs and networks pay for every exchange by itself.
      axis_name: as given to `send`.
      entries: for each parcel the entries in its places, as for `send`, the arrays being `[nnz, ...]`; None where they
        are blocks `[devices, capacity, ...]` already.
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
