"""Reads of trains by bags of ids: a slice of every core for each id, and the bag that the row goes into."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.bags import Bags, is_traced, narrow_ids
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.tt.spec import TTSpec

Mode = Literal["sum", "mean"]

SMALLEST_ROOM_BITS = 5


class Lookups(NamedTuple):
    """Reads of a batch in one group of tables, id by id.

    A group is tables with equal column factors and ranks, whose cores stand one behind the other.

    Attributes:
      digits: for every core the slice that each id takes.
      bags: bag of each id, those of the group's first table first; `NO_ROW` for what is not looked up here.
      offsets: of these bags; between the bags of two tables may lie ids of others.
      ids: row numbers plus the rows of the group's tables before; any number where the bag is `NO_ROW`.
      places: where the rows are that a cache holds, `NO_ROW` for others; None without one.
    """

    digits: tuple[Int[Array, " nnz"], ...]
    bags: Int[Array, " nnz"]
    offsets: Int[Array | np.ndarray, " bags_plus_1"]
    ids: Int[Array | np.ndarray, " nnz"]
    places: Int[Array, " nnz"] | None = None

    @property
    def num_bags(self) -> int:
        """Bags of all tables of the group."""
        return self.offsets.shape[0] - 1

    def cached(self, gains: Float[Array, " nnz"]) -> Segment:
        """The cached rows, where there is a cache."""
        return Segment(cast(Array, self.places), jnp.asarray(self.offsets), gains)


def lookups_of(
    bags: Bags, specs: Sequence[TTSpec], groups: Sequence[Sequence[int]], padding_idx: int | None = None
) -> list[Lookups]:
    """Reads of a batch in every group of tables.

    Args:
      bags: those of table 0, then as many of table 1, and so on.
      specs: one per table.
      groups: tables of every group.
      padding_idx: an id that contributes nothing.
    """
    is_row = np.True_ if padding_idx is None else bags.ids != padding_idx
    all_bags, batch = bags_of_entries(bags, is_row), bags.num_bags // len(specs)
    found = []
    for group in groups:
        own = [specs[k] for k in group]
        inside, group_bags, offsets, ids = None, all_bags, bags.offsets, narrow_ids(bags.ids)
        if len(specs) > 1:
            xp: Any = np if isinstance(offsets, np.ndarray) else jnp
            tables = jnp.minimum(all_bags // max(batch, 1), len(specs) - 1)
            place = np.full(len(specs), -1, np.int32)
            place[list(group)] = np.arange(len(group))
            places = jnp.asarray(place)[tables]
            inside = jnp.maximum(places, 0)
            is_here = (places >= 0) & (all_bags < bags.num_bags)
            group_bags = jnp.where(is_here, places * batch + all_bags % max(batch, 1), NO_ROW)
            starts = offsets[:-1].reshape(len(specs), batch)[np.asarray(group)]
            offsets = xp.concatenate([starts.reshape(-1), offsets[-1:]])
            first_rows = np.minimum(np.cumsum([0, *(spec.num_embeddings for spec in own)]), NO_ROW)
            ids = jnp.asarray(ids) + jnp.asarray(first_rows, jnp.int32)[inside]
        digits, valid = digits_of(own, bags.ids, inside)
        found.append(Lookups(digits, jnp.where(valid, group_bags, NO_ROW), offsets, ids))
    return found


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
