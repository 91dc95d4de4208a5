"""Keys in whatever form users have them, checked at the door and made into dense lanes `[bags, width]`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Float

from rsembed.bags import PAD_ID, Bags, as_bags, check_bags, check_unmasked, common_width, is_traced
from rsembed.checks import check_type
from rsembed.collection.inputs import padded
from rsembed.keys import Keys, checked_keys
from rsembed.parallel.agreement import Agreement, is_global
from rsembed.sok.initialize import Context
from rsembed.sok.sharded_table import ShardedTable
from rsembed.specs import Combiner


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBags:
    """Keys of a feature, cut among devices by bag.

    Attributes:
      keys: lanes `[bags, width]`.
      weights: one per key; None means ones.
      combiner: of the keys of a bag.
    """

    keys: Keys
    weights: Float[Array, "bags width"] | None
    combiner: Combiner = dataclasses.field(metadata={"static": True})


def checked_combiner(combiner: str, what: str) -> Combiner:
    """The combiner in small letters. Raises: ValueError: it does not pool; names `what` asked for it."""
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
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
      width: keys per bag at most; bags and lists are padded to it. None takes their `common_width`.

    Raises: TypeError or ValueError, naming the table, the position and the way out.
    """
    name = f"table {table.spec.name!r}"
    check_unmasked(value, f"{name}: keys")
    if isinstance(value, (Bags, list, tuple)) and not isinstance(value, Keys):
        keys, weights = _from_bags(table, value, weights, width)
    else:
        value, weights = jax.tree.map(functools.partial(_from_device, table), (value, weights))
        is_array = isinstance(value, (Keys, jax.Array))
        keys = checked_keys(value if is_array else _as_array(value), table.home.key_dtype, feature=name)
        weights = np.asarray(weights, np.float32) if isinstance(weights, (list, tuple)) else weights
    if len(keys.shape) < 2:
        raise ValueError(f"{name}: keys need an axis of bags and one of keys per bag, got shape {keys.shape}.")
    if width is not None and keys.shape[-1] > width:
        raise ValueError(
            f"{name}: {keys.shape[-1]} keys per bag, but at most {width} were agreed (max_nnz); raise it, or cut the "
            "bags."
        )
    if weights is not None:
        check_type(weights, Float[Array, "..."], f"{name}: weights")
    if weights is not None and np.shape(weights) != keys.shape:
        raise ValueError(f"{name}: weights have shape {np.shape(weights)}, keys {keys.shape}.")
    if not table.use_hashtable and _is_seen(keys.is_key):
        _check_row_numbers(table, keys)
    if weights is not None and _is_seen(weights) and not (finite := np.isfinite(np.asarray(weights))).all():
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"{name}: the weight at {place} is {np.asarray(weights)[place]}; clean the weights.")
    weights = None if weights is None else weights.reshape(-1, keys.shape[-1]).astype(np.float32)
    return KeyBags(keys.reshape(-1, keys.shape[-1]), weights, combiner)


def bring(
    agreement: Agreement, entry: str, bags: KeyBags, context: Context, what: str, *, bags_per_sample: int = 1
) -> None:
    """Notes what all processes must bring alike, but for the width, on which they agree.

    Raises: ValueError: the samples do not divide among the devices; naming `what`.
    """
    num_samples = bags.keys.shape[0] // bags_per_sample
    if not isinstance(bags.keys.is_key, jax.Array):  # a traced or global batch has its samples in place already
        context.check_batch(num_samples, what)
    slots = f" of {bags_per_sample} slots" if bags_per_sample > 1 else ""
    weights = "without" if bags.weights is None else "with"
    agreement.bring(entry, f"{num_samples} samples{slots} {weights} weights", width=bags.keys.shape[1])


def widened(bags: KeyBags, width: int) -> KeyBags:
    """The bags with room for `width` keys each."""
    missing = width - bags.keys.shape[1]
    if not missing:
        return bags
    return jax.tree.map(lambda lane: np.pad(lane, ((0, 0), (0, missing))), bags)


def _from_device(table: ShardedTable, array: Any) -> Any:
    """Arrays that are not cut among the table's devices yet come back to the host, to be checked and cut there."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return array
    return array if array.sharding.is_equivalent_to(table.context.sharding, array.ndim) else np.asarray(array)


def _from_bags(table: ShardedTable, value: Any, weights: Any, width: int | None) -> tuple[Keys, Any]:
    name = table.spec.name
    try:
        bags = as_bags(value if weights is None else (value, weights), feature=name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} Lists hold one flat list of keys per bag: [[1, 2], [3], []].") from error
    if is_traced(bags):
        raise TypeError(
            f"table {name!r}: the lengths of bags are unknown inside jit; pass an array [bags, width] with -1, or Keys "
            "that split_keys made before."
        )
    check_bags(bags, feature=name)
    lengths = np.diff(np.asarray(bags.offsets))
    if width is not None and lengths.max(initial=0) > width:
        raise ValueError(
            f"table {name!r}: bag {lengths.argmax()} has {lengths.max()} keys, but at most {width} were agreed "
            "(max_nnz); raise it, or cut the bag."
        )
    ids = bags.ids if isinstance(bags.ids, Keys) else np.asarray(bags.ids)
    keys = checked_keys(ids, table.home.key_dtype, feature=f"table {name!r}")
    bags = dataclasses.replace(bags, ids=jax.tree.map(np.asarray, keys), dense_shape=None)
    return cast(tuple[Keys, Any], padded(bags, width or common_width(bags)))


def _as_array(keys: Any) -> np.ndarray:
    """Lists as an array; of no keys, numpy would make floats."""
    array = np.asarray(keys)
    return array if array.size else array.astype(np.int64)


def _is_seen(array: Any) -> bool:
    """Whether all values are here to be checked."""
    return not isinstance(array, jax.core.Tracer) and not is_global(array)


def _check_row_numbers(table: ShardedTable, keys: Keys) -> None:
    num_devices, limit = table.context.num_devices, table.spec.vocabulary_size
    high, low, is_key = map(np.asarray, (keys.high, keys.low, keys.is_key))
    is_outside = is_key & ((high > 0) | (low >= limit))
    if is_outside.any():
        place = tuple(int(i) for i in np.argwhere(is_outside)[0])
        raise ValueError(
            f"table {table.spec.name!r}: key {(int(high[place]) << 32) | int(low[place])} at {place} is not below "
            f"{limit} = {limit // num_devices} rows on each of {num_devices} devices ({int(is_outside.sum())} such "
            f"keys); raise max_vocabulary_size_per_gpu, pass {PAD_ID} for no key, or use_hashtable=True."
        )
