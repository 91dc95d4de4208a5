"""Prepared batches, in which all ragged features of a stack share one list of ids."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.arrays import is_traced
from rsembed.bags import PAD_ID, Bags, as_bags
from rsembed.collection.devices import Devices
from rsembed.kernels.contract import Segment
from rsembed.keys import Keys
from rsembed.parallel.agreement import is_global
from rsembed.sizes import size_of_list
from rsembed.specs import FeatureSpec


class Listed(NamedTuple):
    """Position of a ragged feature's bags in the field `lists` of `PreparedBatch`.

    Args:
      list: name of the list.
      first_bag: index of the feature's first bag in each part of the list.
      num_bags: number of the feature's bags in each part.
    """

    list: str
    first_bag: int
    num_bags: int


@no_type_check  # JAX puts placeholders of other types into the fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PreparedBatch(Mapping[str, PyTree]):
    """A batch that compiled programs accept, as a mapping from the name of a feature to its ids.

    A `PreparedBatch` is a pytree: a prepared batch can be an argument of `jit` and can be donated,
    and prepared batches of equal sizes can be stacked for `lax.scan`. The ids of all ragged
    features that read the same stack of tables are concatenated to one list. The list is padded to
    one of the lengths that `size_of_list` returns, so a stream of batches needs few compiled
    programs.

    On a mesh, the list consists of one part for each device, with the bags of the device's samples.
    All parts are padded to the same length, `room`. The parts are concatenated to global arrays
    with `parts * room` ids, `parts * room` weights and `parts * (bags + 1)` offsets, which are
    split over the devices. The offsets of each part start at 0.

    Args:
      lists: mapping from the name of each stack with ragged features to a list with the bags of
        these features. Within each part of the list, the bags of a feature are consecutive.
      arrays: ids of the features that are not in `lists`, by feature name: an array, a pair of ids
        and weights, or `Bags`.
      listed: pairs of the name of a ragged feature and a `Listed`, sorted by name. A `Listed` shows
        where the bags of a feature are in `lists`.
      features: names of all features, in the order of the collection.
      made_for: identity (`identity_of`) of the collection that checked the batch. None: the batch
        was not checked.
    """

    lists: dict[str, Bags]
    arrays: dict[str, PyTree]
    listed: tuple[tuple[str, Listed], ...] = dataclasses.field(
        default=(),
        metadata={"static": True},
    )
    features: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={"static": True},
    )
    made_for: str | None = dataclasses.field(
        default=None,
        metadata={"static": True},
    )

    @staticmethod
    def of(batch: Mapping[str, PyTree]) -> PreparedBatch:
        """Converts a mapping from features to ids to a `PreparedBatch`.

        `PreparedBatch.of` does not concatenate the ids of ragged features, and returns a
        `PreparedBatch` unchanged.
        """
        if isinstance(batch, PreparedBatch):
            return batch
        return PreparedBatch({}, dict(batch), features=tuple(batch))

    def place(self, feature: str) -> Listed | None:
        """Position of a feature's bags in its stack's list. None if the ids are in `arrays`."""
        return dict(self.listed).get(feature)

    def num_parts(self, name: str) -> int:
        """Number of parts of the list `name`: one per device, and 1 inside `shard_map`."""
        num_bags = 0
        for _, place in self.listed:
            if place.list == name:
                num_bags += place.num_bags
        offsets_of_part = num_bags + 1
        return self.lists[name].offsets.shape[-1] // offsets_of_part

    def bags(self, feature: str) -> Bags:
        """Bags of a feature, without a copy.

        If the feature is part of a list, the list must have only one part, as inside `shard_map`.
        The `Bags` of such a feature have the ids of all features in the list. Ids before the first
        offset and after the last offset belong to other features.
        """
        place = self.place(feature)
        if place is None:
            return as_bags(self.arrays[feature], feature=feature)
        bags = self.lists[place.list]
        last_bag = place.first_bag + place.num_bags
        offsets = bags.offsets[..., place.first_bag : last_bag + 1]
        return Bags(bags.ids, offsets, bags.weights)

    def __getitem__(self, feature: str) -> PyTree:
        """Ids of a feature: an array, or `Bags` with the samples of this process.

        Inside `jit`, the `Bags` may have ids of other features before the first offset and after
        the last offset. The ids of bag `b` are `ids[offsets[b] : offsets[b + 1]]`.

        Raises: ValueError: several batches on a mesh are stacked in this object, for `lax.scan`.
        """
        place = self.place(feature)
        if place is None:
            return self.arrays[feature]
        bags = self.lists[place.list]
        num_parts = self.num_parts(place.list)
        is_stacked = bags.offsets.ndim > 1
        if is_stacked and num_parts > 1:
            raise ValueError(
                f"feature {feature!r}: several batches are stacked here; read one of them, as in "
                "jax.tree.map(lambda leaf: leaf[0], batches)[feature]."
            )
        if is_stacked or (is_traced(bags) and num_parts == 1):
            return self.bags(feature)
        if not is_traced(bags):
            num_offsets = bags.offsets.shape[0] // num_parts
            bags = jax.tree.map(_part_of_process, bags)
            num_parts = bags.offsets.shape[0] // num_offsets
        return in_order_of_features(bags, [place], num_parts, PAD_ID)

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        texts = []
        for name, bags in self.lists.items():
            features = [feature for feature, place in self.listed if place.list == name]
            num_parts = self.num_parts(name)
            length = bags.ids.shape[-1]
            room = str(length)
            if num_parts > 1:
                room = f"{num_parts} x {length // num_parts}"
            num_ids = ""
            is_stacked = bags.offsets.ndim > 1
            is_known = not is_traced(bags) and not is_global(bags.offsets)
            if is_known and not is_stacked:
                offsets = np.asarray(bags.offsets).reshape(num_parts, -1)
                ends = offsets[:, -1]
                num_ids = f"{int(ends.sum())} ids, "
            texts.append(
                f"{len(features)} ragged features of stack {name!r}: {num_ids}room for {room}"
            )
        if self.arrays:
            texts.append(f"{len(self.arrays)} features by themselves")
        return f"PreparedBatch({', '.join(self.features)}: {'; '.join(texts)})"


def _part_of_process(array: PyTree) -> np.ndarray:
    """The rows of a global array that this process holds. Only axis 0 of the array is split."""
    if not is_global(array):
        return np.asarray(array)
    parts = {}
    # Several devices of this process may hold copies of one part of the array. `parts` has one
    # entry per part, not per copy.
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        parts[start] = np.asarray(shard.data)
    in_order = [parts[start] for start in sorted(parts)]
    return np.concatenate(in_order)


def in_order_of_features(
    bags: Bags,
    places: Sequence[Listed | Segment],
    num_parts: int,
    fill: int,
) -> Bags:
    """Collects the bags of some features from a list with one part per device.

    The result has all bags of the first feature, then all bags of the second feature, and so on.
    Among the bags of one feature, the bags from part 0 of the list come first, then the bags from
    part 1, and so on.

    Args:
      bags: the list, as it is stored in a `PreparedBatch`.
      places: position of each feature's bags in the list.
      num_parts: number of parts of the list.
      fill: padding id. Inside `jit`, the result is as long as the list: ids are padded with `fill`,
        and weights with 0.
    """
    is_known = not is_traced(bags)
    xp: Any = np if is_known else jnp
    offsets = bags.offsets.reshape(num_parts, -1)
    room = bags.ids.shape[0] // num_parts
    starts_in_part = offsets[:, :-1]
    first_ids = xp.arange(num_parts, dtype=np.int32)[:, None] * room
    starts = starts_in_part + first_ids
    lengths_of_parts = xp.diff(offsets, axis=1)
    starts_of_features = []
    lengths_of_features = []
    for place in places:
        columns = slice(place.first_bag, place.first_bag + place.num_bags)
        starts_of_features.append(starts[:, columns].reshape(-1))
        lengths_of_features.append(lengths_of_parts[:, columns].reshape(-1))
    first_entries = xp.concatenate(starts_of_features)
    lengths = xp.concatenate(lengths_of_features)
    zero = xp.zeros(1, np.int32)
    ends = xp.concatenate([zero, xp.cumsum(lengths, dtype=np.int32)])
    moved_by = first_entries - ends[:-1]
    size = ends[-1]
    options = {}
    if not is_known:
        if not lengths.shape[0]:
            return Bags(bags.ids, ends, bags.weights)
        size = num_parts * room
        options = {"total_repeat_length": size}
    position = xp.arange(size, dtype=np.int32)
    entries = position + xp.repeat(moved_by, lengths, **options)
    is_id = position < ends[-1]
    ids = jax.tree.map(lambda lane: lane[entries], bags.ids)
    ids = ids.only(is_id) if isinstance(ids, Keys) else xp.where(is_id, ids, fill)
    weights = None
    if bags.weights is not None:
        weights = xp.where(is_id, bags.weights[entries], np.float32(0.0))
    return Bags(ids, ends, weights)


def room_for(bags: Sequence[Bags], num_parts: int) -> int:
    """Number of ids, padding included, in each part of a list with the bags of several features.

    If a feature's ids have no padding, the result is one of the sizes that `size_of_list` returns.
    If the ids of every feature are padded, a list with one part has exactly as many ids as the
    padded features together, and a list with several parts has at least as many ids in all parts
    together.
    """
    if not bags:
        return 0
    total_room = 0
    are_padded = True
    for bags_of_feature in bags:
        room = bags_of_feature.ids.shape[0]
        total_room += room
        are_padded &= int(bags_of_feature.offsets[-1]) < room
    if num_parts == 1:
        if are_padded:
            return total_room
        return size_of_list(total_room)
    counts_of_parts = np.zeros(num_parts, np.int64)
    for bags_of_feature in bags:
        ends = _ends_of_parts(bags_of_feature, num_parts)
        counts_of_parts += np.diff(ends)
    needed = size_of_list(int(counts_of_parts.max()))
    if are_padded:
        room_per_part = -(-total_room // num_parts)
        return max(needed, room_per_part)
    return needed


def _ends_of_parts(bags: Bags, num_parts: int) -> np.ndarray:
    """Boundaries between `num_parts` groups of consecutive bags, as indices into the feature's ids.

    The first boundary is 0, and the last boundary is the number of ids without padding.
    """
    bags_per_part = bags.num_bags // num_parts
    first_bags = np.arange(num_parts + 1) * bags_per_part
    return np.asarray(bags.offsets)[first_bags]


def joined(bags: Sequence[Bags], room: int, num_parts: int) -> Bags:
    """Joins the bags of several features into one list, in host memory.

    Args:
      bags: bags of each feature. If a feature has `B` bags, bag `b` goes to part
        `b * num_parts // B`.
      room: number of ids in each part, padding included.
      num_parts: number of parts of the list.
    """
    lengths = []
    for bags_of_feature in bags:
        lengths_of_feature = np.diff(bags_of_feature.offsets)
        lengths.append(lengths_of_feature.reshape(num_parts, -1))
    lengths_of_parts = np.concatenate(lengths, axis=1)
    num_offsets = lengths_of_parts.shape[1] + 1
    offsets = np.zeros((num_parts, num_offsets), np.int32)
    np.cumsum(lengths_of_parts, axis=1, out=offsets[:, 1:])
    ends_of_features = [_ends_of_parts(bags_of_feature, num_parts) for bags_of_feature in bags]

    def in_parts(*of_features: PyTree) -> np.ndarray:
        arrays = [np.asarray(array) for array in of_features]
        dtype = arrays[0].dtype
        # Row numbers are int32. Zeros are padding of the lanes of keys, and of weights.
        fill = PAD_ID if dtype == np.int32 else 0
        whole = np.full((num_parts, room), fill, dtype)
        for part, num_ids in enumerate(offsets[:, -1]):
            pieces = []
            for array, ends in zip(arrays, ends_of_features, strict=True):
                pieces.append(array[ends[part] : ends[part + 1]])
            np.concatenate(pieces, out=whole[part, :num_ids])
        return whole.reshape(-1)

    has_weights = any(bags_of_feature.weights is not None for bags_of_feature in bags)
    contents = []
    for bags_of_feature in bags:
        weights = bags_of_feature.weights
        if has_weights and weights is None:
            weights = np.ones(bags_of_feature.ids.shape[0], np.float32)
        contents.append((bags_of_feature.ids, weights))
    ids, weights = jax.tree.map(in_parts, *contents)
    return Bags(ids, offsets.reshape(-1), weights)


def identity_of(
    features: Mapping[str, FeatureSpec],
    lists: Mapping[str, str],
    devices: Devices,
    bounds_check: str,
) -> str:
    """Digest of everything in a collection that a prepared batch depends on.

    The digest covers the features, the range or dtype of each table's ids, the name of the list
    that each feature belongs to if it is ragged, the devices, and `bounds_check`.
    """
    facts = [f"{devices.identity} {bounds_check}"]
    for name, feature in features.items():
        table = feature.table_spec
        key_dtype = None
        if table.storage is not None:
            key_dtype = table.storage.key_dtype
        facts_of_feature = (
            name,
            lists[name],
            table.name,
            table.vocabulary_size,
            key_dtype,
            feature.pooling,
            feature.num_samples,
            feature.output_shape,
        )
        facts.append(repr(facts_of_feature))
    text = "\n".join(facts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
