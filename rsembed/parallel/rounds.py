"""Questions to the devices that own the rows, in rounds of `all_to_all` that are exact at any capacity.

```
ids ──distinct──▶ entries, grouped by owner ──ask──▶ owners answer, and may change what they own
                     ▲                                        │
occurrences ◀────────┴──────────── entry_of ◀──── one reply per distinct entry
```

Blocks have a fixed size, but nothing is ever dropped: what does not fit travels in a later round, and all devices agree
on how many there are. Rounds are *row-complete*: everything that concerns one row arrives in the same round, so an
owner sees the whole gradient of a row at once, and optimizers that are not linear stay exact. The device that has most
left to send sends a full block, so every round moves forward.

All functions run inside `shard_map` over the mesh axis (or axes) named by `axis_name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.parallel.exchange import AxisName, send, send_back


class Wanted(NamedTuple):
    """The distinct entries that this device has questions about, grouped by owner and ascending in each group.

    Attributes:
      lanes: what tells entries of one owner apart, most significant first; zeros behind the last entry.
      entry_of: the entry of every occurrence, `NO_ROW` for occurrences without an owner.
      first_of: the first occurrence of every entry, `NO_ROW` behind the last one.
      offsets: entries `offsets[d] : offsets[d + 1]` belong to device `d`.
    """

    lanes: tuple[Shaped[Array, " nnz"], ...]
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    offsets: Int[Array, " devices_plus_1"]


def distinct(owners: Int[Array, " nnz"], lanes: Sequence[Shaped[Array, " nnz"]], *, num_devices: int) -> Wanted:
    """Equal occurrences made one.

    Args:
      owners: owner of every occurrence; outside `[0, num_devices)` it asks nobody.
      lanes: integer arrays that together name an entry: a row, or the halves of a key.
      num_devices: size of the mesh axis.

    Example:
      >>> wanted = distinct(jnp.asarray([1, 0, 1, 7]), [jnp.asarray([5, 3, 5, 0])], num_devices=2)
      >>> wanted.lanes[0].tolist()[:2], wanted.offsets.tolist(), wanted.entry_of.tolist()[:3]
      ([3, 5], [0, 1, 2], [1, 0, 1])
    """
    entries, entry_of, first_of, offsets = api.distinct(owners, lanes, num_owners=num_devices)
    return Wanted(entries, entry_of, first_of, offsets)


def default_capacity(num_occurrences: int, num_devices: int) -> int:
    """Places per block that usually need one round: a quarter more than an even share of all-distinct ids."""
    return min(num_occurrences, -(-5 * num_occurrences // (4 * num_devices)) + 8)


def ask(
    wanted: Wanted,
    payload: Any,
    answer: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    *,
    capacity: int,
    axis_name: AxisName,
) -> tuple[Any, Any, Int[Array, ""]]:
    """Sends the payload of every distinct entry to its owner and brings the replies back.

    Args:
      wanted: from `distinct`.
      payload: pytree of arrays `[nnz, ...]`, one value per distinct entry. Empty places of a block hold `NO_ROW` in
        int32 arrays and zero in all others.
      answer: `(state, arrived) -> (state, replies)`, the owner's part, called once a round. Leaves of `arrived` are
        `[devices * capacity, ...]`, grouped by asking device; `replies` is a pytree of arrays with the same leading
        axis, or None.
      state: what the owner may change, for example its table.
      capacity: places per block. Any number from 1 up gives the same result; few places save memory, many save rounds.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.

    Returns: the new state, one reply per distinct entry (zeros behind the last one), and the number of rounds.
    Raises: ValueError: a capacity below 1.
    """
    num_entries = wanted.entry_of.shape[0]
    num_devices = wanted.offsets.shape[0] - 1
    if capacity < 1 and num_entries:
        raise ValueError(f"capacity must be at least 1 place per block, got {capacity}.")
    counts = jnp.diff(wanted.offsets)

    def trade(state: Any, picked: Array) -> tuple[Any, Any]:
        def delivered(x: Array) -> Array:
            blocks = send(x, picked, axis_name, fill_value=NO_ROW if x.dtype == jnp.int32 else 0)
            return blocks.reshape(-1, *x.shape[1:])

        state, replies = answer(state, jax.tree.map(delivered, payload))
        return state, jax.tree.map(lambda x: send_back(x.reshape(*picked.shape, *x.shape[1:]), axis_name), replies)

    columns = jnp.arange(max(capacity, 1), dtype=jnp.int32)[None, :]
    shapes = jax.eval_shape(lambda: trade(state, jnp.zeros((num_devices, columns.size), jnp.int32))[1])
    replies = jax.tree.map(lambda x: jnp.zeros((num_entries, *x.shape[1:]), x.dtype), shapes)

    def one_round(carry: Any) -> Any:
        cursor, num_rounds, state, replies, _ = carry
        ahead = cursor[:, None] + columns
        picked = wanted.offsets[:-1, None] + ahead
        travels = ahead < counts[:, None]
        if capacity < num_entries:
            travels &= _is_before_cut(wanted, picked, cursor + capacity < counts, axis_name)
        picked = jnp.where(travels, picked, NO_ROW)
        state, answers = trade(state, picked)
        olds, tree = jax.tree.flatten(replies)
        news = jax.tree.leaves(answers)
        replies = jax.tree.unflatten(tree, api.scatter_rows(olds, picked.reshape(-1), news) if olds else ())
        cursor = cursor + jnp.sum(travels, axis=1, dtype=jnp.int32)
        any_left = jax.lax.pmax(jnp.any(cursor < counts), axis_name) if capacity < num_entries else jnp.asarray(False)
        return cursor, num_rounds + 1, state, replies, any_left

    # A loop from the first round on: what an owner does is a large program, which is compiled once.
    in_rounds = functools.partial(jax.lax.while_loop, lambda carry: carry[4], one_round)
    run = in_rounds if capacity < num_entries else one_round
    carry = jnp.zeros(num_devices, jnp.int32), jnp.zeros((), jnp.int32), state, replies, jnp.asarray(True)
    _, num_rounds, state, replies, _ = run(carry)
    return state, replies, num_rounds


def _is_before_cut(wanted: Wanted, picked: Array, is_cut: Bool[Array, " devices"], axis_name: AxisName) -> Array:
    """Whether every device can send this entry in this round: it lies before all first entries that found no place."""
    is_below, is_equal = jnp.zeros(picked.shape, bool), jnp.ones(picked.shape, bool)
    capacity = picked.shape[1]
    # A device without a cut takes no part in the minimum: the leading lane is 1 there and 0 elsewhere.
    own = jnp.where(is_cut, 0, 1)
    lowest = jax.lax.pmin(own, axis_name)
    takes_part = own == lowest
    for lane in wanted.lanes:
        after = lane.at[picked[:, 0] + capacity].get(mode="fill", fill_value=0)
        highest = jnp.iinfo(lane.dtype).max
        cut = jax.lax.pmin(jnp.where(takes_part, after, jnp.asarray(highest, lane.dtype)), axis_name)
        takes_part &= after == cut
        value = lane.at[picked].get(mode="fill", fill_value=0)
        is_below |= is_equal & (value < cut[:, None])
        is_equal &= value == cut[:, None]
    return is_below | (lowest[:, None] == 1)
