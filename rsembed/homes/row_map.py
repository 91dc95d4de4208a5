"""Which key has which row: rows are handed out, remembered, taken back and handed out again."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from rsembed.homes import hash_table
from rsembed.homes.hash_table import HashTable, compact
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.kernels.keyed import MAX_COUNT, varying_zero
from rsembed.keys import Keys

Eviction = Literal["lru", "lfu"]
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu")
FREE = -1


class RowMap(NamedTuple):
    """Rows and their keys. All leaves have a leading axis, so that shards can lie side by side along it.

    Attributes:
      hashed: the row of every key.
      high: upper half of the key of every row.
      low: lower half of it.
      last_step: the step that used the row last; `FREE` if it has no key.
      counts: how often its key occurred in training, up to `MAX_COUNT`.
      free: stack of rows without a key; the first `num_free` places count, and the last of them is next.
      num_free: height of the stack.
    """

    hashed: HashTable
    high: UInt32[Array, " rows"]
    low: UInt32[Array, " rows"]
    last_step: Int[Array, " rows"]
    counts: Int[Array, " rows"]
    free: Int[Array, " rows"]
    num_free: Int[Array, "1"]


def empty(capacity: int) -> RowMap:
    """All rows free; they will be handed out as 0, 1, 2, ..."""
    return RowMap(
        hashed=hash_table.empty(capacity),
        high=api.allocate((capacity,), jnp.uint32, 0),
        low=api.allocate((capacity,), jnp.uint32, 0),
        last_step=api.allocate((capacity,), jnp.int32, FREE),
        counts=api.allocate((capacity,), jnp.int32, 0),
        free=jnp.arange(capacity - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.full(1, capacity, jnp.int32),
    )


def find(row_map: RowMap, keys: Keys) -> Int[Array, " nnz"]:
    """The row of every key; `NO_ROW` for unknown keys and padding."""
    return hash_table.find(row_map.hashed, keys)


def assign(
    row_map: RowMap,
    keys: Keys,
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    *,
    evict: Eviction | None = None,
) -> tuple[RowMap, Int[Array, " nnz"], Int[Array, "1"]]:
    """Rows for distinct, unknown keys, in their order.

    Args:
      row_map: the map.
      keys: those that want a row; padding gets none.
      step: number of the current step, at least 0. Rows last used by this very step are not evicted.
      occurrences: how often every key has occurred so far.
      evict: whose rows to take when there are too few free ones: of the keys used longest ago ("lru") or least often
        ("lfu"), and of equal ones the lowest rows. None takes none.

    Returns: the map, the row of every key (`NO_ROW` where there was none left), and the number of evicted keys.
    """
    num_before = row_map.num_free
    if evict is not None:
        short = jnp.sum(keys.is_key, dtype=jnp.int32) - num_before[0]
        row_map = jax.lax.cond(
            short > 0, lambda m: _evict_least(m, short, step, evict, keys.low.shape[0]), lambda m: m, row_map
        )
    num_evicted = row_map.num_free - num_before
    rank = jnp.cumsum(keys.is_key, dtype=jnp.int32) - 1
    gets_row = keys.is_key & (rank < row_map.num_free)
    places = jnp.where(gets_row, row_map.num_free - 1 - rank, NO_ROW)
    rows = row_map.free.at[places].get(mode="fill", fill_value=NO_ROW)
    lanes = (row_map.high, row_map.low, row_map.last_step, row_map.counts)
    steps = jnp.broadcast_to(step, rows.shape)
    high, low, last_step, counts = api.scatter_rows(lanes, rows, (keys.high, keys.low, steps, occurrences))
    hashed = hash_table.insert(row_map.hashed, keys._replace(is_key=gets_row), rows)
    num_free = row_map.num_free - jnp.sum(gets_row, dtype=jnp.int32)
    return RowMap(hashed, high, low, last_step, counts, row_map.free, num_free), rows, num_evicted


def touch(
    row_map: RowMap, rows: Int[Array, " nnz"], step: Int[Array, "*nnz"], occurrences: Int[Array, " nnz"]
) -> RowMap:
    """Notes that distinct `rows` were used by `step`, and how often their keys have occurred so far."""
    steps = jnp.broadcast_to(step, rows.shape)
    last_step, counts = api.scatter_rows((row_map.last_step, row_map.counts), rows, (steps, occurrences))
    return row_map._replace(last_step=last_step, counts=counts)


def use(row_map: RowMap, rows: Int[Array, " nnz"], step: Int[Array, ""], occurrences: Int[Array, " nnz"]) -> RowMap:
    """Notes that `rows`, which may repeat, were used by `step`, and so many occurrences of their keys."""
    last_step, counts = api.count_uses(row_map.last_step, row_map.counts, rows, step, occurrences)
    return row_map._replace(last_step=last_step, counts=counts)


def count_of(row_map: RowMap, rows: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """How often the keys of `rows` have occurred; 0 for `NO_ROW`."""
    return row_map.counts.at[rows].get(mode="fill", fill_value=0)


def add_counts(one: Int[Array, " nnz"], other: Int[Array, " nnz"]) -> Int[Array, " nnz"]:
    """Their sums, up to `MAX_COUNT`."""
    return jnp.where(one > MAX_COUNT - other, MAX_COUNT, one + other)


def release(row_map: RowMap, rows: Int[Array, " nnz"]) -> RowMap:
    """Takes distinct `rows` from their keys; the first of them will be handed out first. `NO_ROW` is skipped."""
    is_row = rows != NO_ROW
    high, low = api.gather_rows((row_map.high, row_map.low), rows)
    num_released = jnp.sum(is_row, dtype=jnp.int32)
    places = row_map.num_free + num_released - jnp.cumsum(is_row, dtype=jnp.int32)
    return row_map._replace(
        hashed=hash_table.remove(row_map.hashed, Keys(high, low, is_row)),
        last_step=row_map.last_step.at[rows].set(FREE, mode="drop"),
        free=row_map.free.at[jnp.where(is_row, places, NO_ROW)].set(rows, mode="drop"),
        num_free=row_map.num_free + num_released,
    )


def release_older(row_map: RowMap, step: Int[Array, ""], steps_to_live: int) -> RowMap:
    """Takes all rows that were last used more than `steps_to_live` steps before `step`."""
    is_old = (row_map.last_step != FREE) & (step - row_map.last_step > steps_to_live)
    rows = jnp.arange(is_old.shape[0], dtype=jnp.int32)
    return release(row_map, jnp.where(is_old, rows, NO_ROW))


def grow(row_map: RowMap, capacity: int) -> RowMap:
    """The same keys in the same rows, and new rows behind them, to be handed out after those that are free now."""
    old = row_map.last_step.shape[0]

    def extend(lane: Array, value: int) -> Array:
        return jnp.concatenate([lane, jnp.full(capacity - old, value, lane.dtype)])

    return RowMap(
        hashed=hash_table.rebuild(row_map.hashed, capacity),
        high=extend(row_map.high, 0),
        low=extend(row_map.low, 0),
        last_step=extend(row_map.last_step, FREE),
        counts=extend(row_map.counts, 0),
        free=jnp.concatenate([jnp.arange(capacity - 1, old - 1, -1, dtype=jnp.int32), row_map.free]),
        num_free=row_map.num_free + (capacity - old),
    )


def _evict_least(
    row_map: RowMap, num_wanted: Int[Array, ""], step: Int[Array, ""], policy: Eviction, most: int
) -> RowMap:
    score = row_map.last_step if policy == "lru" else row_map.counts
    is_candidate = (row_map.last_step != FREE) & (row_map.last_step != step)
    return release(row_map, compact(_least(score, is_candidate, num_wanted), most))


def _least(score: Int[Array, " rows"], is_candidate: Bool[Array, " rows"], num_wanted: Array) -> Bool[Array, " rows"]:
    """The `num_wanted` candidates of least score, of equal ones the first; all candidates if there are fewer.

    The score of the last one is found bit by bit: 31 passes over the scores take a fraction of the time of a sort.
    """

    def set_bit(i: Array, bound: Array) -> Array:
        higher = bound | (jnp.int32(1) << (30 - i))
        num_below = jnp.sum(is_candidate & (score < higher), dtype=jnp.int32)
        return jnp.where(num_below < num_wanted, higher, bound)

    zero = varying_zero(score, num_wanted, is_candidate)
    bound = jax.lax.fori_loop(0, 31, set_bit, zero)
    is_below, is_at = is_candidate & (score < bound), is_candidate & (score == bound)
    num_at = num_wanted - jnp.sum(is_below, dtype=jnp.int32)
    return is_below | (is_at & (jnp.cumsum(is_at, dtype=jnp.int32) <= num_at))
