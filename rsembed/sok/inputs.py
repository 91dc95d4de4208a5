"""Keys in whatever form users have them, checked at the door and made into dense lanes `[bags, width]`."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from rsembed.bags import PAD_ID, Bags, as_bags
from rsembed.keys import Keys, check_fits, split_keys, without_beyond
from rsembed.parallel.agreement import is_global
from rsembed.sok.sharded_table import KeyBags, ShardedTable
from rsembed.specs import Combiner


def checked_combiner(combiner: str, what: str) -> Combiner:
    """The combiner in small letters. Raises: ValueError: it does not pool; names `what` asked for it."""
    if combiner.lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def read_keys(
    table: ShardedTable, value: Any, weights: Any, combiner: Combiner, *, width: int | None = None
) -> KeyBags:
    """One bag of keys per leading position of `value`.

    Args:
      table: gives the name for messages, the devices, and the range of keys without a hash table.
      value: an integer array `[..., keys per bag]` in which -1 is no key (signed dtypes), `Keys` of that shape,
        `Bags`, or lists of keys. Inside `jit` an array of 32-bit keys, or `Keys`.
      weights: one float per key, in the same form, or None.
      combiner: of the keys of a bag.
      width: keys per bag at most; bags and lists are padded to it. None pads to a power of two.

    Raises: TypeError or ValueError, naming the table, the position and the way out.
    """
    name = table.spec.name
    if not isinstance(value, (list, tuple)) or isinstance(value, Keys):
        value, weights = (jax.tree.map(lambda x: _from_device(x, table), tree) for tree in (value, weights))
    if isinstance(weights, (list, tuple)) and not isinstance(value, (Bags, list, tuple)):
        weights = np.asarray(weights, np.float32)
    if isinstance(value, Keys):
        keys = value
    elif isinstance(value, (Bags, list, tuple)):
        if weights is not None:
            value = (value, weights)
        keys, weights = _from_bags(_as_bags(value, name), name, width)
    else:
        numbers = value if isinstance(value, jax.Array) else np.asarray(value)
        keys = split_keys(numbers, feature=f"table {name!r}")
    if len(keys.shape) < 2:
        raise ValueError(f"table {name!r}: keys need an axis of bags and one of keys per bag, got shape {keys.shape}.")
    if width is not None and keys.shape[-1] > width:
        raise ValueError(
            f"table {name!r}: {keys.shape[-1]} keys per bag, but at most {width} were agreed (max_nnz); raise "
            "it, or cut the bags."
        )
    if weights is not None and np.shape(weights) != keys.shape:
        raise ValueError(f"table {name!r}: weights have shape {np.shape(weights)}, keys {keys.shape}.")
    if any(isinstance(x, jax.core.Tracer) or is_global(x) for x in (*keys, weights)):
        keys = without_beyond(keys, table.spec.key_dtype)  # they cannot be seen here, only counted
    else:
        _check_values(table, keys, weights)
    lanes = Keys(*(_flat(lane) for lane in keys))
    return KeyBags(lanes, None if weights is None else _flat(weights).astype(np.float32), combiner)


def shape_in_words(bags: KeyBags, bags_per_sample: int = 1) -> str:
    """What all processes must bring alike; they agree on the width."""
    slots = f" of {bags_per_sample} slots" if bags_per_sample > 1 else ""
    weights = "without" if bags.weights is None else "with"
    return f"{bags.keys.shape[0] // bags_per_sample} samples{slots} {weights} weights"


def widened(bags: KeyBags, width: int) -> KeyBags:
    """The bags with room for `width` keys each."""
    missing = width - bags.keys.shape[1]
    if not missing:
        return bags
    return jax.tree.map(lambda lane: np.pad(lane, ((0, 0), (0, missing))), bags)


def _from_device(array: Any, table: ShardedTable) -> Any:
    """Arrays that are not cut among the table's devices yet come back to the host, to be checked and cut there."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return array
    return array if array.sharding.is_equivalent_to(table.context.sharding, array.ndim) else np.asarray(array)


def _as_bags(value: Any, name: str) -> Bags:
    try:
        return as_bags(value, feature=name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} Lists hold one flat list of keys per bag: [[1, 2], [3], []].") from error


def _flat(array: Any) -> Any:
    return array.reshape(-1, array.shape[-1])


def _from_bags(bags: Bags, name: str, width: int | None) -> tuple[Keys, np.ndarray | None]:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(bags)):
        raise TypeError(
            f"table {name!r}: the lengths of bags are unknown inside jit; pass an array [bags, width] with -1, or Keys "
            "that split_keys made before."
        )
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=1))
    if width is None:
        width = 1 << (longest - 1).bit_length()
    elif longest > width:
        bag = int(lengths.argmax())
        raise ValueError(
            f"table {name!r}: bag {bag} has {longest} keys, but at most {width} were agreed (max_nnz); raise it, or "
            "cut the bag."
        )
    is_key = np.arange(width)[None, :] < lengths[:, None]

    def filled_up(values: Any, dtype: Any) -> np.ndarray:
        dense = np.zeros(is_key.shape, dtype)
        dense[is_key] = np.asarray(values)[: offsets[-1]]
        return dense

    keys = split_keys(filled_up(ids, ids.dtype), feature=f"table {name!r}")
    keys = keys._replace(is_key=keys.is_key & is_key)
    return keys, None if bags.weights is None else filled_up(bags.weights, np.float32)


def _check_values(table: ShardedTable, keys: Keys, weights: Any) -> None:
    name, limit = table.spec.name, table.spec.capacity * table.context.num_devices
    keys = Keys(*map(np.asarray, keys))
    check_fits(keys, table.spec.key_dtype, f"table {name!r}")
    if not table.use_hashtable:
        high, low, is_key = keys
        is_outside = is_key & ((high > 0) | (low >= limit))
        if is_outside.any():
            place = tuple(int(i) for i in np.argwhere(is_outside)[0])
            raise ValueError(
                f"table {name!r}: key {(int(high[place]) << 32) | int(low[place])} at {place} is not below {limit} = "
                f"{table.spec.capacity} rows on each of {table.context.num_devices} devices ({int(is_outside.sum())} "
                f"such keys); raise max_vocabulary_size_per_gpu, pass {PAD_ID} for no key, or use_hashtable=True."
            )
    if weights is not None:
        finite = np.isfinite(np.asarray(weights))
        if not finite.all():
            place = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise ValueError(
                f"table {name!r}: the weight at {place} is {np.asarray(weights)[place]}; clean the weights."
            )
