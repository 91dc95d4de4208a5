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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from rsembed.kernels import api
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
    entries = jnp.where(is_filled, _take(order, positions, NO_ROW), NO_ROW)
    all_places = jnp.arange(num_devices * capacity, dtype=jnp.int32)
    (places,) = api.scatter_rows((jnp.full(owners.shape, NO_ROW, jnp.int32),), entries.reshape(-1), (all_places,))
    num_left_behind = jnp.sum(jnp.maximum(jnp.diff(offsets) - capacity, 0))
    return Routes(entries, places, num_left_behind)


def send(
    values: Shaped[Array, "nnz *feature"],
    entries: Int[Array, "devices capacity"],
    axis_name: AxisName,
    *,
    fill_value: float | int,
) -> Shaped[Array, "devices capacity *feature"]:
    """What the other devices sent to this one; row `i` of the result comes from device `i`.

    Args:
      values: one value or vector per entry.
      entries: the entry in every place of the outgoing blocks; a place outside `[0, nnz)` is empty.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.
      fill_value: what empty places hold; `NO_ROW` for rows, so that the owner ignores them.
    """
    blocks = _take(values, entries, fill_value)
    return jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0, tiled=True)


def send_back(
    replies: Shaped[Array, "devices capacity *feature"], axis_name: AxisName
) -> Shaped[Array, "places *feature"]:
    """The owners' replies to this device; entry `e` finds its own at `routes.places[e]`.

    Args:
      replies: one reply to everything that `send` delivered, in the same order.
      axis_name: as given to `send`.
    """
    returned = jax.lax.all_to_all(replies, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return returned.reshape(-1, *replies.shape[2:])


def _take(values: Array, places: Array, fill_value: float | int) -> Array:
    """`values[places]`, and the fill value for places outside; unlike plain indexing, also of an empty array."""
    if values.shape[0] == 0:
        return jnp.full((*places.shape, *values.shape[1:]), fill_value, values.dtype)
    if values.ndim == 1:
        return values.at[places].get(mode="fill", fill_value=fill_value)
    (found,) = api.gather_rows((values,), places.reshape(-1))  # zeros for places outside
    found = found.reshape(*places.shape, *values.shape[1:])
    if fill_value == 0:
        return found
    is_inside = (places >= 0) & (places < values.shape[0])
    return jnp.where(jnp.expand_dims(is_inside, range(places.ndim, found.ndim)), found, fill_value)
