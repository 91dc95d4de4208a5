"""From 64-bit keys to row numbers, inside `jit`: open addressing with linear probing.

A slot is empty, deleted, claimed, or holds a key and its row. All keys of a call probe at the same time; of those that
find the same free slot, the first in the call gets it, so equal calls give equal tables. Few keys need many probes:
the loop narrows to those still searching, so the work follows the number of probes and not their maximum.

Of the slots at most half hold keys and at most a quarter more are deleted, so every search meets an empty slot.

Source: the lanes, the hash and the claims by scatter-min follow the usual lock-free GPU tables (for example SlabHash
and WarpCore), with a minimum in place of the race; the hash ends in MurmurHash3's finaliser (Appleby).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys

EMPTY, DELETED = -1, -2
# A claim in flight is one of the lowest int32 values, plus the position of the claimant: the first one is the least.
CLAIM = -(2**31)
MIN_WIDTH = 2048
REBUILD_BLOCK = 16_384


class HashTable(NamedTuple):
    """Slots; their number is a power of two.

    Attributes:
      keys: high and low lane of the key in every slot.
      rows: its row, `EMPTY` or `DELETED`.
      num_keys: how many slots hold a key.
      num_deleted: how many slots are deleted.
    """

    keys: UInt32[Array, "slots 2"]
    rows: Int[Array, " slots"]
    num_keys: Int[Array, "1"]
    num_deleted: Int[Array, "1"]


def empty(max_keys: int) -> HashTable:
    """A table for at most `max_keys` keys."""
    num_slots = 1 << (2 * max(max_keys, 1) - 1).bit_length()
    rows = jnp.full(num_slots, EMPTY, jnp.int32)
    return HashTable(jnp.zeros((num_slots, 2), jnp.uint32), rows, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))


def mix(high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """32 well-spread bits of a key."""
    h = low ^ (high * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def find(table: HashTable, keys: Keys) -> Int[Array, " nnz"]:
    """The row of every key, `NO_ROW` for absent keys and padding; a key may occur several times."""
    return table.rows.at[_find_slots(table, keys)].get(mode="fill", fill_value=NO_ROW)


def insert(table: HashTable, keys: Keys, rows: Int[Array, " nnz"]) -> HashTable:
    """The table with distinct, absent keys added; padding is skipped.

    The caller sees to it that there are no more keys than the table was made for; far beyond, keys are left out.
    """
    num_slots = table.rows.shape[0]
    room = num_slots * 3 // 4 - table.num_keys - table.num_deleted
    keys = keys._replace(is_key=keys.is_key & (jnp.cumsum(keys.is_key, dtype=jnp.int32) <= room))

    def probe(lane: Array, seekers: _Seekers, places: Array, active: Array) -> tuple[Array, Array, Array]:
        state, claim = lane[places], CLAIM + seekers.positions
        is_free = active & ((state == EMPTY) | (state == DELETED))
        lane = lane.at[jnp.where(is_free, places, num_slots)].min(claim, mode="drop")
        is_won = is_free & (lane[places] == claim)
        return lane, is_won, places

    lane, slots = _probe_all(probe, table.rows + varying_zero(table.rows, keys.low), keys, num_slots)
    was_deleted = table.rows.at[slots].get(mode="fill", fill_value=EMPTY) == DELETED
    lanes, lane = api.scatter_rows((table.keys, lane), slots, (jnp.stack([keys.high, keys.low], axis=1), rows))
    return HashTable(
        lanes,
        lane,
        table.num_keys + jnp.sum(keys.is_key, dtype=jnp.int32),
        table.num_deleted - jnp.sum(was_deleted, dtype=jnp.int32),
    )


def remove(table: HashTable, keys: Keys) -> HashTable:
    """The table without these distinct keys; absent keys and padding are skipped."""
    slots = _find_slots(table, keys)
    num_removed = jnp.sum(slots != NO_ROW, dtype=jnp.int32)
    table = table._replace(
        rows=table.rows.at[slots].set(DELETED, mode="drop"),
        num_keys=table.num_keys - num_removed,
        num_deleted=table.num_deleted + num_removed,
    )
    return jax.lax.cond(table.num_deleted[0] > table.rows.shape[0] // 4, rebuild, lambda same: same, table)


def rebuild(table: HashTable, max_keys: int | None = None) -> HashTable:
    """The same keys and rows, without deleted slots; in a table for `max_keys` keys, or as large as before."""
    num_slots = table.rows.shape[0]
    block = min(num_slots, REBUILD_BLOCK)
    fresh = empty(num_slots // 2 if max_keys is None else max_keys)
    zero = varying_zero(table.rows)
    fresh = jax.tree.map(lambda x: x + zero.astype(x.dtype), fresh)

    def add_block(i: Array, fresh: HashTable) -> HashTable:
        rows, lanes = (jax.lax.dynamic_slice_in_dim(x, i * block, block) for x in (table.rows, table.keys))
        return insert(fresh, Keys(lanes[:, 0], lanes[:, 1], rows >= 0), rows)

    return jax.lax.fori_loop(0, num_slots // block, add_block, fresh)


def first_occurrences(keys: Keys) -> Int[Array, " nnz"]:
    """For every key the first position at which it occurs; `NO_ROW` for padding.

    The keys go into a table of positions made for this call alone: a stable sort of two lanes takes three times as
    long.
    """
    num_slots = 1 << (2 * max(keys.low.shape[0], 1) - 1).bit_length()

    def probe(lane: Array, seekers: _Seekers, places: Array, active: Array) -> tuple[Array, Array, Array]:
        is_free = active & (lane[places] == NO_ROW)
        lane = lane.at[jnp.where(is_free, places, num_slots)].min(seekers.positions, mode="drop")
        there = lane[places]  # copies of a key probe in step, so it was its first one that claimed the slot
        is_same = (keys.high[there] == seekers.high) & (keys.low[there] == seekers.low)
        return lane, active & is_same, there

    lane = jnp.full(num_slots, NO_ROW, jnp.int32) + varying_zero(keys.low, keys.is_key)
    return _probe_all(probe, lane, keys, num_slots)[1]


def combine(
    keys: Keys, occurrences: Int[Array, " nnz"], values: Float[Array, "nnz dim"]
) -> tuple[UInt32[Array, "nnz 3"], Float[Array, "nnz dim"]]:
    """Distinct keys as `(high, low, occurrences)`, in the order of their first occurrence, and sums of their values.

    Behind the last one there are zeros.
    """
    first, position = first_occurrences(keys), jnp.arange(keys.low.shape[0], dtype=jnp.int32)
    is_first = first == position
    number = jnp.where(is_first, jnp.cumsum(is_first, dtype=jnp.int32) - 1, NO_ROW)
    place = number.at[first].get(mode="fill", fill_value=NO_ROW)
    lanes = jnp.zeros((position.size, 3), jnp.uint32)
    lanes = lanes.at[number, :2].set(jnp.stack([keys.high, keys.low], axis=1), mode="drop")
    lanes = lanes.at[place, 2].add(occurrences.astype(jnp.uint32), mode="drop")
    return lanes, jnp.zeros_like(values).at[place].add(values, mode="drop")


def num_distinct(keys: Keys) -> Int[Array, ""]:
    """How many different keys there are; costs next to nothing where there is none."""

    def count(keys: Keys) -> Int[Array, ""]:
        return jnp.sum(first_occurrences(keys) == jnp.arange(keys.low.shape[0], dtype=jnp.int32), dtype=jnp.int32)

    return jax.lax.cond(jnp.any(keys.is_key), count, lambda keys: varying_zero(keys.is_key), keys)


def compact(mask: Bool[Array, " n"], size: int) -> Int[Array, " size"]:
    """Positions of the first `size` True entries, and `NO_ROW` behind them."""
    counts = jnp.cumsum(mask, dtype=jnp.int32)
    places = jnp.searchsorted(counts, jnp.arange(1, size + 1, dtype=jnp.int32)).astype(jnp.int32)
    return jnp.where(places < mask.shape[0], places, NO_ROW)


def varying_zero(*arrays: Array) -> Int[Array, ""]:
    """Zero that, inside `shard_map`, varies over all mesh axes that any array varies over, as a loop's carry must."""
    first = [jnp.sum(x.reshape(-1)[:1].astype(jnp.int32)) for x in arrays]
    return sum(first, start=jnp.int32(0)) * 0


class _Seekers(NamedTuple):
    """Keys that still probe, and where they stand in the call."""

    high: Array
    low: Array
    positions: Array


Probe = Callable[[Any, _Seekers, Array, Array], tuple[Any, Array, Array]]
"""`(state, seekers, places, active) -> (state, is_done, results)`: looks at one slot for every seeker."""


def _find_slots(table: HashTable, keys: Keys) -> Int[Array, " nnz"]:
    """The slot of every key; `NO_ROW` for absent keys and padding."""

    def probe(zero: Array, seekers: _Seekers, places: Array, active: Array) -> tuple[Array, Array, Array]:
        rows, found = table.rows[places], table.keys[places]
        is_hit = active & (rows >= 0) & (found[:, 0] == seekers.high) & (found[:, 1] == seekers.low)
        return zero, is_hit | (active & (rows == EMPTY)), jnp.where(is_hit, places, NO_ROW)

    return _probe_all(probe, varying_zero(table.rows, keys.low), keys, table.rows.shape[0])[1]


def _probe_all(probe: Probe, state: Any, keys: Keys, num_slots: int) -> tuple[Any, Int[Array, " nnz"]]:
    """Moves every key from its home from slot to slot until `probe` is done with it.

    Returns: the final state, which must vary as the keys do from the start; and the result of every key's last probe,
    `NO_ROW` for padding.
    """
    n = keys.low.shape[0]
    zero = varying_zero(state, keys.low, keys.is_key)
    seekers = _Seekers(keys.high, keys.low, jnp.arange(n, dtype=jnp.int32))
    places = (mix(keys.high, keys.low) & jnp.uint32(num_slots - 1)).astype(jnp.int32) + zero
    active, results = keys.is_key & (zero == 0), jnp.full(n, NO_ROW, jnp.int32)
    for width, next_width in itertools.pairwise([*_widths(n), 0]):

        def is_wide(carry: tuple[Any, ...], next_width: int = next_width) -> Array:
            return jnp.sum(carry[2], dtype=jnp.int32) > next_width

        def probe_once(carry: tuple[Any, ...], seekers: _Seekers = seekers) -> tuple[Any, ...]:
            state, places, active, found = carry
            state, is_done, result = probe(state, seekers, places, active)
            found = jnp.where(is_done, result, found)
            return state, (places + 1) & (num_slots - 1), active & ~is_done, found

        start = (state, places, active, jnp.full(width, NO_ROW, jnp.int32) + zero)
        state, places, still_active, found = jax.lax.while_loop(is_wide, probe_once, start)
        if width == n:
            results = found
        else:
            is_done = active & ~still_active
            results = results.at[jnp.where(is_done, seekers.positions, n)].set(found, mode="drop")
        if next_width:
            kept = compact(still_active, next_width)
            seekers, places = _take((seekers, places), kept)
            active = kept != NO_ROW
    return state, results


def _take(arrays: Any, places: Array) -> Any:
    return jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), arrays)


def _widths(num_keys: int) -> list[int]:
    """How many keys probe at a time: fewer and fewer of a large call."""
    widths = [num_keys]
    while widths[-1] > MIN_WIDTH:
        widths.append(widths[-1] // 8)
    return widths
