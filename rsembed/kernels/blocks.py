"""Blocks that carry several arrays between devices in one exchange, in plain JAX."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, Shaped, UInt32

from rsembed.kernels.contract import NO_ROW

Rows = Int[Array, "devices _"] | None
"""Rows that go into the places of an array's blocks; None for an array of blocks."""


def pack_blocks(arrays: Sequence[Array], rows: Sequence[Rows]) -> Shaped[Array, "devices places *row"]:
    """One array with the blocks of several arrays side by side, to be sent in one exchange.

    Args:
      arrays: `[n, ...]`, or blocks `[devices, capacity, ...]`; of one kind: rows of one shape and type, or lanes of 32
        bits, which become uint32.
      rows: for each array those rows that go into the places of its blocks, or for none. A row outside is an empty
        place, with `NO_ROW` in int32 arrays and zeros in others.
    """
    blocks = []
    for array, own in zip(arrays, rows, strict=True):
        if own is not None:
            filler = NO_ROW if array.dtype == jnp.int32 else 0
            places = jnp.where(own < 0, NO_ROW, own)
            array = array.at[places].get(mode="fill", fill_value=filler) if array.shape[0] else _nothing(own, array)
        blocks.append(_as_words(array) if array.ndim == 2 else array)
    return jnp.concatenate(blocks, axis=1)


def unpack_blocks(packed: Shaped[Array, "devices places *row"], shapes: Sequence[PyTree]) -> tuple[Array, ...]:
    """The inverse of `pack_blocks`: the blocks of each array, with the given shapes and dtypes."""
    ends = list(itertools.accumulate(shape.shape[1] for shape in shapes))
    parts = jnp.split(packed, ends[:-1], axis=1)
    return tuple(_from_words(part, shape.dtype) for part, shape in zip(parts, shapes, strict=True))


class Queue(NamedTuple):
    """Entries that wait to travel, grouped by owner and ascending in each group.

    Attributes:
      offsets: entries `offsets[d] : offsets[d + 1]` belong to device `d`.
      cursor: number of each owner's entries that have been sent.
      lanes: integers that distinguish the entries of one owner, int32 or uint32, most significant first.
      capacity: places for each owner in a round.
    """

    offsets: Int[Array, " devices_plus_1"]
    cursor: Int[Array, " devices"]
    lanes: tuple[Shaped[Array, " nnz"], ...]
    capacity: int


def block_ends(
    queues: Sequence[Queue],
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """Whether the entries left in each queue for each owner fit into this round: 1 if all do, else 0.

    Where they have not, what tells the first one without a place from others, as words of the same order: one per lane
    of the queue that has most, of others the last again. Zeros where all fit.
    """
    fit, behind = [], []
    for queue in queues:
        ends = queue.offsets[:-1] + queue.cursor + queue.capacity
        own = (ends >= queue.offsets[1:]).astype(jnp.int32)
        fit.append(own)
        behind.append([jnp.where(own == 1, jnp.uint32(0), lane) for lane in _ordered_lanes(queue, ends)])
    num_levels = max(map(len, behind))
    words = [jnp.stack([lanes[min(level, len(lanes) - 1)] for lanes in behind]) for level in range(num_levels)]
    return jnp.stack(fit), jnp.stack(words)


def round_places(
    queues: Sequence[Queue], fit: Int[Array, "queues devices"], cuts: UInt32[Array, "levels queues devices"]
) -> tuple[Sequence[Int[Array, "devices _"]], Sequence[Int[Array, " devices"]], Bool[Array, ""]]:
    """Entries that every queue sends to every owner in one round.

    Args:
      queues: the queues of one device.
      fit: 1 where no device has more entries for an owner than places, 0 where some has.
      cuts: and then the least entry without a place, in the words of `block_ends`; only those before it travel.

    Returns: of each queue the entries in the places, `NO_ROW` in empty ones, and the cursor behind them; and whether
      any queue has entries left.
    """
    places, cursors, are_left = [], [], []
    for number, queue in enumerate(queues):
        ahead = queue.cursor[:, None] + jnp.arange(queue.capacity, dtype=jnp.int32)[None, :]
        entries, lengths = queue.offsets[:-1, None] + ahead, jnp.diff(queue.offsets)
        is_below, is_equal = jnp.zeros(entries.shape, bool), jnp.ones(entries.shape, bool)
        for word, cut in zip(_ordered_lanes(queue, entries), cuts, strict=False):
            is_below |= is_equal & (word < cut[number][:, None])
            is_equal &= word == cut[number][:, None]
        is_sent = (ahead < lengths[:, None]) & (is_below | (fit[number][:, None] == 1))
        places.append(jnp.where(is_sent, entries, NO_ROW))
        cursors.append(queue.cursor + jnp.sum(is_sent, axis=1, dtype=jnp.int32))
        are_left.append(jnp.any(cursors[-1] < lengths))
    return places, cursors, jnp.any(jnp.stack(are_left))


def _ordered_lanes(queue: Queue, entries: Int[Array, "*places"]) -> list[UInt32[Array, "*places"]]:
    """Lanes of entries as uint32 words that sort in the same order."""
    lanes = [
        lane.at[entries].get(mode="fill", fill_value=0) if lane.shape[0] else jnp.zeros(entries.shape, lane.dtype)
        for lane in queue.lanes
    ]
    return [lane if lane.dtype == jnp.uint32 else lane.astype(jnp.uint32) ^ jnp.uint32(2**31) for lane in lanes]


def word_dtype(dtype: np.dtype[Any], is_lane: bool) -> np.dtype[Any]:
    """Dtype in which an array is sent: uint32 for every lane of 32 bits."""
    return jnp.dtype(jnp.uint32) if is_lane and dtype.itemsize == 4 else dtype


def _nothing(rows: Int[Array, "devices _"], array: Array) -> Array:
    filler = NO_ROW if array.dtype == jnp.int32 else 0
    return jnp.full((*rows.shape, *array.shape[1:]), filler, array.dtype)


def _as_words(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, word_dtype(array.dtype, is_lane=True))


def _from_words(array: Array, dtype: DTypeLike) -> Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
