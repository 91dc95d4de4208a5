"""Prepared batches: the ragged features of a stack in one list of ids, features of arrays by themselves."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.bags import PAD_ID, Bags, is_traced, size_of_list
from rsembed.collection.devices import Devices
from rsembed.keys import Keys
from rsembed.parallel.agreement import is_global
from rsembed.specs import FeatureSpec


class Listed(NamedTuple):
    """Where the bags of a ragged feature are.

    Args:
      list: name of the list.
      first_bag: number of the feature's first bag in each part of the list.
      num_bags: number of its bags in each part.
    """

    list: str
    first_bag: int
    num_bags: int


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PreparedBatch(Mapping[str, PyTree]):
    """A batch as compiled programs take it; reads as a mapping from features to `Bags` or arrays.

    It is a pytree: it goes into `jit`, may be donated, and batches of equal sizes stack for `lax.scan`. The ids of all
    ragged features that share a stack of tables are one list, so a few sizes of lists serve all batches.

    On a mesh, a list has a part for each device, which holds the bags of that device's samples. All parts have the same
    room. They follow each other in global arrays that are split over the devices: ids `[parts * room]`, offsets
    `[parts * (bags + 1)]`, which count from the beginning of each part, and weights `[parts * room]`.

    Args:
      lists: by stack, the bags of its ragged features, feature after feature in each part.
      arrays: of every other feature the array, the pair of ids and weights, or its `Bags`.
      listed: sorted pairs of a ragged feature and its place in the lists.
      features: names of all features, in the order of the collection.
      made_for: identity of the features, tables and devices for which the batch was checked.
    """

    lists: dict[str, Bags]
    arrays: dict[str, PyTree]
    listed: tuple[tuple[str, Listed], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    features: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    made_for: str | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def of(batch: Mapping[str, PyTree]) -> PreparedBatch:
        """The batch unchanged if it is prepared; else one in which every feature is by itself."""
        if isinstance(batch, PreparedBatch):
            return batch
        return PreparedBatch({}, dict(batch), features=tuple(batch))

    def place(self, feature: str) -> Listed | None:
        """The place of a ragged feature in the lists; None for a feature that is by itself."""
        return dict(self.listed).get(feature)

    def num_parts(self, name: str) -> int:
        """Number of parts of a list; inside `shard_map`, where a device has one of them, 1."""
        num_bags = sum(place.num_bags for _, place in self.listed if place.list == name)
        return self.lists[name].offsets.shape[-1] // (num_bags + 1)

    def in_list(self, feature: str) -> PyTree:
        """The feature's array; or its `Bags` with all ids of a list of one part, in which the offsets count."""
        place = self.place(feature)
        if place is None:
            return self.arrays[feature]
        bags = self.lists[place.list]
        last_bag = place.first_bag + place.num_bags
        return Bags(bags.ids, bags.offsets[..., place.first_bag : last_bag + 1], bags.weights)

    def __getitem__(self, feature: str) -> PyTree:
        """The feature's array or `Bags`; where processes share a mesh, the bags of this process.

        Inside `jit`, the ids of other features may be before and after those of the bags: read ids by the offsets.

        Raises: ValueError: several batches of a mesh are stacked here.
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
            return self.in_list(feature)
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
            room = str(bags.ids.shape[-1])
            if num_parts > 1:
                room = f"{num_parts} x {bags.ids.shape[-1] // num_parts}"
            count = ""
            if not is_traced(bags) and bags.offsets.ndim == 1 and not is_global(bags.offsets):
                count = f"{int(np.asarray(bags.offsets).reshape(num_parts, -1)[:, -1].sum())} ids, "
            texts.append(
                f"{len(features)} ragged features of stack {name!r}: {count}room for {room}"
            )
        if self.arrays:
            texts.append(f"{len(self.arrays)} features by themselves")
        return f"PreparedBatch({', '.join(self.features)}: {'; '.join(texts)})"


def _part_of_process(array: PyTree) -> np.ndarray:
    """The numbers of a global array, split along its first axis, that this process holds."""
    if not is_global(array):
        return np.asarray(array)
    parts = {}
    for shard in array.addressable_shards:  # several devices may hold copies of one part
        parts[shard.index[0].start or 0] = np.asarray(shard.data)
    return np.concatenate([parts[start] for start in sorted(parts)])


def in_order_of_features(bags: Bags, places: Sequence[Listed], num_parts: int, fill: int) -> Bags:
    """The bags of some features out of all parts of a list: feature after feature, those of the first part first.

    Args:
      bags: a list of several parts.
      places: of the features.
      num_parts: parts of the list.
      fill: id that fills the result up, with weight 0. Inside `jit` it has room for all ids of the list.
    """
    is_known = not is_traced(bags)
    xp: Any = np if is_known else jnp
    offsets = bags.offsets.reshape(num_parts, -1)
    room = bags.ids.shape[0] // num_parts
    starts = offsets[:, :-1] + xp.arange(num_parts, dtype=np.int32)[:, None] * room
    columns = [slice(place.first_bag, place.first_bag + place.num_bags) for place in places]
    first_entries = xp.concatenate([starts[:, own].reshape(-1) for own in columns])
    lengths = xp.concatenate([xp.diff(offsets, axis=1)[:, own].reshape(-1) for own in columns])
    ends = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lengths, dtype=np.int32)])
    moved_by = first_entries - ends[:-1]
    if is_known:
        entries = np.arange(ends[-1]) + np.repeat(moved_by, lengths)
        ids = jax.tree.map(lambda lane: lane[entries], bags.ids)
        weights = None if bags.weights is None else bags.weights[entries]
        return Bags(ids, ends, weights)
    if not lengths.shape[0]:
        return Bags(bags.ids, ends, bags.weights)
    position = jnp.arange(num_parts * room, dtype=jnp.int32)
    entries = position + jnp.repeat(moved_by, lengths, total_repeat_length=position.shape[0])
    is_id = position < ends[-1]
    ids = jax.tree.map(lambda lane: lane[entries], bags.ids)
    ids = ids.only(is_id) if isinstance(ids, Keys) else jnp.where(is_id, ids, fill)
    weights = None if bags.weights is None else jnp.where(is_id, bags.weights[entries], 0.0)
    return Bags(ids, ends, weights)


def room_for(bags: Sequence[Bags], num_parts: int) -> int:
    """The room that the bags of several features need in each part of a list, as `size_of_list` gives it.

    Where somebody padded all the features, the list has their room.
    """
    if not bags:
        return 0
    rooms = [own.ids.shape[0] for own in bags]
    counts = [int(own.offsets[-1]) for own in bags]
    are_padded = all(count < room for count, room in zip(counts, rooms, strict=True))
    if num_parts == 1:
        return sum(rooms) if are_padded else size_of_list(sum(rooms))
    in_parts = sum(np.diff(_ends_of_parts(own, num_parts)) for own in bags)
    needed = size_of_list(int(np.max(in_parts)))
    return max(needed, -(-sum(rooms) // num_parts)) if are_padded else needed


def _ends_of_parts(bags: Bags, num_parts: int) -> np.ndarray:
    """Where the ids of each part begin, and the end of the last part."""
    return np.asarray(bags.offsets)[np.arange(num_parts + 1) * (bags.num_bags // num_parts)]


def joined(bags: Sequence[Bags], room: int, num_parts: int) -> Bags:
    """The bags of several features in one list on the host; each part has `room` for ids.

    Sample `b` of `B` is in part `b * num_parts // B`.
    """
    ends = [_ends_of_parts(own, num_parts) for own in bags]

    def in_parts(of_features: Sequence[PyTree], fill: float) -> np.ndarray:
        arrays = [np.asarray(own) for own in of_features]
        whole = np.full(num_parts * room, fill, arrays[0].dtype)
        for part in range(num_parts):
            pieces = [own[end[part] : end[part + 1]] for own, end in zip(arrays, ends, strict=True)]
            count = sum(piece.shape[0] for piece in pieces)
            np.concatenate(pieces, out=whole[part * room : part * room + count])
        return whole

    offsets = []
    for part in range(num_parts):
        offsets.append(np.zeros(1, np.int32))
        first_entry = 0
        for own, end in zip(bags, ends, strict=True):
            num_bags = own.num_bags // num_parts
            own_ends = np.asarray(own.offsets)[part * num_bags + 1 : (part + 1) * num_bags + 1]
            offsets.append((own_ends + (first_entry - end[part])).astype(np.int32))
            first_entry += int(end[part + 1] - end[part])
    all_ids = [own.ids for own in bags]
    if isinstance(all_ids[0], Keys):
        ids = jax.tree.map(lambda *lanes: in_parts(lanes, 0), *all_ids)
    else:
        ids = in_parts(all_ids, PAD_ID)
    weights = None
    if any(own.weights is not None for own in bags):
        all_weights = []
        for own in bags:
            all_weights.append(
                np.ones(own.ids.shape[0], np.float32) if own.weights is None else own.weights
            )
        weights = in_parts(all_weights, 0.0)
    return Bags(ids, np.concatenate(offsets), weights)


def identity_of(
    features: Mapping[str, FeatureSpec],
    lists: Mapping[str, str],
    devices: Devices,
    bounds_check: str,
) -> str:
    """Digest of all on which a prepared batch depends: features, what ids their tables admit, lists and devices."""
    facts = [f"{devices.identity} {bounds_check}"]
    for name, feature in features.items():
        table = feature.table_spec
        key_dtype = None if table.storage is None else table.storage.key_dtype
        facts.append(
            repr((name, lists[name], table.name, table.vocabulary_size, key_dtype, feature.pooling))
        )
        facts.append(repr((feature.num_samples, feature.output_shape)))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
