"""Prepared batches: the ragged features of a stack in one list of ids, features of arrays by themselves."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, no_type_check

import jax
import numpy as np
from jaxtyping import PyTree

from rsembed.bags import Bags, is_traced, size_of_list
from rsembed.collection.devices import Devices
from rsembed.keys import Keys
from rsembed.specs import FeatureSpec


class Listed(NamedTuple):
    """Where the bags of a ragged feature are: name of the list, number of its first bag there, and number of bags."""

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

    Args:
      lists: by stack, the bags of its ragged features, feature after feature.
      arrays: of every other feature the array, the pair of ids and weights, or its `Bags`.
      listed: sorted pairs of a ragged feature and its place in the lists.
      features: names of all features, in the order of the collection.
      made_for: identity of the features and tables for which the batch was checked.
    """

    lists: dict[str, Bags]
    arrays: dict[str, PyTree]
    listed: tuple[tuple[str, Listed], ...] = dataclasses.field(default=(), metadata={"static": True})
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

    def in_list(self, feature: str) -> PyTree:
        """The feature's array; or its `Bags` with all ids of their list, in which the offsets count."""
        place = self.place(feature)
        if place is None:
            return self.arrays[feature]
        bags = self.lists[place.list]
        last_bag = place.first_bag + place.num_bags
        return Bags(bags.ids, bags.offsets[..., place.first_bag : last_bag + 1], bags.weights)

    def __getitem__(self, feature: str) -> PyTree:
        """The feature's array or `Bags`. Inside `jit`, its offsets count in the whole list, and need not begin at 0."""
        place = self.place(feature)
        if place is None or is_traced(self.lists[place.list]) or self.lists[place.list].offsets.ndim > 1:
            return self.in_list(feature)
        bags = self.lists[place.list]
        last_bag = place.first_bag + place.num_bags
        offsets = np.asarray(bags.offsets)[place.first_bag : last_bag + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        ids = jax.tree.map(lambda lane: lane[first:last], bags.ids)
        weights = None if bags.weights is None else bags.weights[first:last]
        return Bags(ids, offsets - np.int32(first), weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        parts = []
        for name, bags in self.lists.items():
            own = [feature for feature, place in self.listed if place.list == name]
            room = bags.ids.shape[-1]
            known = "" if is_traced(bags) or bags.offsets.ndim > 1 else f"{int(bags.offsets[-1])} ids, "
            parts.append(f"{len(own)} ragged features of stack {name!r}: {known}room for {room}")
        if self.arrays:
            parts.append(f"{len(self.arrays)} features by themselves")
        return f"PreparedBatch({', '.join(self.features)}: {'; '.join(parts)})"


def joined(bags: Sequence[Bags]) -> Bags:
    """The bags of several features in one list on the host, with room as `size_of_list` gives it.

    The room of features that somebody padded stays as it is where all of them are padded.
    """
    counts = [int(own.offsets[-1]) for own in bags]
    rooms = [own.ids.shape[0] for own in bags]
    are_padded = all(count < room for count, room in zip(counts, rooms, strict=True))
    size = sum(rooms) if are_padded else size_of_list(sum(rooms))
    firsts = np.cumsum([0, *counts])
    offsets = [np.zeros(1, np.int32)]
    for own, first in zip(bags, firsts, strict=False):
        offsets.append((np.asarray(own.offsets[1:]) + first).astype(np.int32))
    ids = _joined_ids(bags, counts, size)
    weights = None
    if any(own.weights is not None for own in bags):
        weights = np.zeros(size, np.float32)
        for own, first, count in zip(bags, firsts, counts, strict=False):
            weights[first : first + count] = 1.0 if own.weights is None else np.asarray(own.weights)[:count]
    return Bags(ids, np.concatenate(offsets), weights)


def _joined_ids(bags: Sequence[Bags], counts: Sequence[int], size: int) -> PyTree:
    """Ids of all bags one after the other, in `size` places; the last hold no id."""

    def filled(parts: Sequence[np.ndarray], fill: int) -> np.ndarray:
        ids = np.full(size, fill, parts[0].dtype)
        np.concatenate(parts, out=ids[: sum(counts)])
        return ids

    if isinstance(bags[0].ids, Keys):
        lanes = []
        for own, count in zip(bags, counts, strict=True):
            lanes.append(jax.tree.map(lambda lane, count=count: np.asarray(lane)[:count], own.ids))
        return jax.tree.map(lambda *parts: filled(parts, 0), *lanes)
    return filled([np.asarray(own.ids)[:count] for own, count in zip(bags, counts, strict=True)], -1)


def identity_of(
    features: Mapping[str, FeatureSpec], lists: Mapping[str, str], devices: Devices, bounds_check: str
) -> str:
    """Digest of all on which a prepared batch depends: features, what ids their tables admit, lists and devices."""
    facts = [f"{devices.num_devices} {bounds_check}"]
    for name, feature in features.items():
        table = feature.table_spec
        key_dtype = None if table.storage is None else table.storage.key_dtype
        facts.append(repr((name, lists[name], table.name, table.vocabulary_size, key_dtype, feature.pooling)))
        facts.append(repr((feature.num_samples, feature.output_shape)))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()
