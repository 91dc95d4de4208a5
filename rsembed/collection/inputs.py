"""Checks the batch that a user passes, and converts it to the canonical form: a `PreparedBatch`.

The bags of all ragged features that read one stack of tables are joined into one list of ids, see
`prepared.py`. On a mesh, the list has one part per device. Of `B` samples on `D` devices, sample
`b` goes to device `b * D // B`. An array of ids `[batch, ids]` keeps its shape. On a mesh, a ragged
feature without a combiner becomes an array `[batch, ids]`, with all bags padded to one length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.arrays import cut_on_device, device_copy, is_traced, on_device
from rsembed.bags import (
    PAD_ID,
    Bags,
    Jagged,
    as_bags,
    check_bags,
    check_ids_dtype,
    check_values,
    narrow_ids,
)
from rsembed.checks import check_type, did_you_mean
from rsembed.collection.devices import Devices
from rsembed.collection.prepared import Listed, PreparedBatch, joined, room_for
from rsembed.collection.stack import (
    ActivationGradients,
    Batch,
    ByName,
)
from rsembed.keys import Keys
from rsembed.lists import offsets_of, small_ids_of_lists
from rsembed.parallel.agreement import Agreement, is_global
from rsembed.row_gradients import check_gradient
from rsembed.sizes import common_width, padded_size, size_of_list
from rsembed.specs import FeatureSpec, TableSpec
from rsembed.storage.protocol import Storage


def check_names(features: Mapping[str, object], entries: Mapping[str, object], what: str) -> None:
    """Checks that `entries` is a mapping with exactly one entry per feature.

    Raises:
      TypeError: `entries` is not a mapping.
      ValueError: features are missing or unknown.
    """
    check_type(entries, Mapping, f"{what}, with one entry for each of {sorted(features)},")
    missing = sorted(set(features) - set(entries))
    unknown = sorted(set(entries) - set(features), key=str)
    if missing or unknown:
        near = did_you_mean(unknown[0], missing) if unknown else ""
        raise ValueError(
            f"{what} does not match the features: missing {missing}, unknown {unknown}{near}; it needs exactly one "
            f"entry for each of {sorted(features)}."
        )


def prepare(
    features: Mapping[str, FeatureSpec],
    source: PyTree,
    devices: Devices,
    *,
    bounds_check: str,
    what: str = "the batch",
    read: Callable[[PyTree], Batch] | None = None,
    lists: Mapping[str, str] | None = None,
    made_for: str | None = None,
) -> PreparedBatch:
    """Checks a batch and converts it to canonical form, see `EmbeddingCollection.prepare`.

    Args:
      features: features by name.
      source: a batch, or if `read` is passed, any value that `read` converts to a batch.
      devices: devices of the mesh.
      bounds_check: "raise" or "ignore", see `EmbeddingCollection`.
      what: name of the batch, for the error message if the batches of the processes do not match.
      read: function that checks `source` and returns the batch. If `read` raises an error in one
        process, all processes raise an error. None: `source` is the batch.
      lists: by feature name, the name of the feature's stack. The bags of all ragged features of a
        stack are joined into one list of ids. None: no bags are joined.
      made_for: identity of the collection, from `identity_of`. If `source` is a `PreparedBatch` for
        a collection with this identity, `source` is returned unchanged.
    """
    if isinstance(source, PreparedBatch) and made_for is not None and source.made_for == made_for:
        return source
    if lists is None:
        lists = {}
    with Agreement(devices.known_mesh, what, source) as agreement:
        batch = source if read is None else read(source)
        check_names(features, batch, "batch")
        if not isinstance(batch, Jagged):
            # A `Jagged` is always in host memory, so no arrays of a `Jagged` are copied to the
            # host.
            _start_copies_to_host(batch)
            if devices.mesh is None:
                plain = _of_arrays(features, batch, bounds_check)
                if plain is not None:
                    return PreparedBatch({}, plain, (), tuple(features), made_for)
        bags: dict[str, Bags] = {}
        ragged = _in_one_pass(features, batch, lists, bounds_check)
        if ragged is not None:
            if devices.mesh is None:
                return on_device(_in_lists(ragged, lists, made_for))
            bags = {name: ragged.bags_of([name]) for name in features}
        else:
            for name, feature in features.items():
                bags[name] = _checked(feature, batch[name], bounds_check)
        members = _members(features, bags, lists)
        num_parts = devices.num_parts_here
        num_bags = {}
        for name, bags_of_feature in bags.items():
            _check_num_samples(features[name], bags_of_feature, devices)
            num_bags[name] = bags_of_feature.num_bags // num_parts
        places = _places(members, num_bags)
        listed = dict(places)
        if devices.mesh is not None:
            for name, bags_of_feature in bags.items():
                form, width = _form_and_width(name, bags_of_feature, is_listed=name in listed)
                agreement.bring(f"feature {name!r}", form, width=width)
        for stack in dict.fromkeys(lists.values()):
            bags_in_list = [bags[name] for name in members.get(stack, ())]
            room = room_for(bags_in_list, num_parts)
            agreement.bring(f"the ids of stack {stack!r}", "one list", width=room)
    joined_lists = {}
    for stack, names in members.items():
        room = agreement.width(f"the ids of stack {stack!r}")
        bags_in_list = [bags[name] for name in names]
        joined_lists[stack] = joined(bags_in_list, room, num_parts)
    arrays: ByName = {}
    for name, bags_of_feature in bags.items():
        if name in listed:
            continue
        if devices.mesh is None:
            arrays[name] = _canonical(features[name], bags_of_feature, batch[name])
        else:
            width = agreement.width(f"feature {name!r}")
            arrays[name] = _padded(bags_of_feature, width)
    prepared = PreparedBatch(joined_lists, arrays, places, tuple(features), made_for)
    if devices.mesh is None:
        return on_device(prepared)
    return _on_mesh(prepared, devices)


def _start_copies_to_host(batch: Batch) -> None:
    """Starts copying all arrays to the host, so that the copies run at the same time."""
    values = [value for value in batch.values() if isinstance(value, (Bags, jax.Array))]
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, jax.Array) and not is_unknown(leaf):
            leaf.copy_to_host_async()


def _on_mesh(batch: PreparedBatch, devices: Devices) -> PreparedBatch:
    """Makes global arrays, split over devices, from the samples of every process."""
    sharding = devices.sharding(devices.split)

    def placed(leaf: PyTree) -> jax.Array:
        if is_unknown(leaf):
            # `leaf` is already a global array, or is traced.
            return leaf
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(placed, batch)


def _members(
    features: Mapping[str, FeatureSpec],
    bags: Mapping[str, Bags],
    lists: Mapping[str, str],
) -> dict[str, list[str]]:
    """By stack, names of the ragged features with bags that go into the stack's list of ids.

    Features with traced bags are left out, because these bags are not joined into a list.
    """
    members: dict[str, list[str]] = {}
    for name, bags_of_feature in bags.items():
        is_ragged = bags_of_feature.dense_shape is None and features[name].pooling != "none"
        if is_ragged and name in lists and not is_traced(bags_of_feature):
            members.setdefault(lists[name], []).append(name)
    return members


def _places(
    members: Mapping[str, Sequence[str]],
    num_bags: Mapping[str, int],
) -> tuple[tuple[str, Listed], ...]:
    """For each ragged feature, its name and the position of its bags in `PreparedBatch.lists`.

    The result is sorted by name.

    Args:
      members: by stack, names of the features with bags in the stack's list of ids, in the order of
        the bags.
      num_bags: by feature name, number of bags that each device gets.
    """
    places = {}
    for stack, names in members.items():
        first_bag = 0
        for name in names:
            places[name] = Listed(stack, first_bag, num_bags[name])
            first_bag += num_bags[name]
    return tuple(sorted(places.items()))


class Ragged(NamedTuple):
    """The bags of ragged features in NumPy arrays, feature after feature.

    Args:
      ids: ids of all features.
      offsets: offsets of all bags in `ids`.
      num_bags: number of bags of each feature, by feature name in the order of the bags.
    """

    ids: np.ndarray
    offsets: np.ndarray
    num_bags: dict[str, int]

    @property
    def first_bags(self) -> np.ndarray:
        """Index of each feature's first bag, followed by the total number of bags."""
        return offsets_of(np.fromiter(self.num_bags.values(), np.int64))

    def bags_of(self, names: Sequence[str]) -> Bags:
        """The bags of the features `names`, feature after feature."""
        if list(names) == list(self.num_bags):
            return Bags(self.ids, self.offsets)
        lengths = np.diff(self.offsets)
        first_bag_of = dict(zip(self.num_bags, self.first_bags.tolist(), strict=False))
        ids_of_features = []
        lengths_of_features = []
        for name in names:
            first_bag = first_bag_of[name]
            last_bag = first_bag + self.num_bags[name]
            ids_of_features.append(self.ids[self.offsets[first_bag] : self.offsets[last_bag]])
            lengths_of_features.append(lengths[first_bag:last_bag])
        offsets = offsets_of(np.concatenate(lengths_of_features), np.int32)
        return Bags(np.concatenate(ids_of_features), offsets)


def _in_one_pass(
    features: Mapping[str, FeatureSpec], batch: Batch, lists: Mapping[str, str], bounds_check: str
) -> Ragged | None:
    """Fast path of `prepare` for ragged features: the bags of all features, with int32 ids.

    `_in_one_pass` checks the ids. The result is None if a table has keys, a feature declares its
    batch size, has no combiner or is not in `lists`, the data are neither numpy arrays nor lists of
    integers, or the batch has an error. If the result is None, the caller checks one feature after
    the other, so that an error message can name the feature.
    """
    for name, feature in features.items():
        is_declared = feature.num_samples is not None or feature.pooling == "none"
        if is_declared or name not in lists or _has_keys(feature.table_spec):
            return None
    ragged = _everything(features, batch)
    if ragged is None:
        return None
    ids = ragged.ids
    first_ids = ragged.offsets[ragged.first_bags]
    if bounds_check != "ignore" and not _are_in_tables(features, ids, first_ids):
        return None
    if ids.dtype != np.int32:
        ids = narrow_ids(ids)
    return ragged._replace(ids=ids)


def _are_in_tables(
    features: Mapping[str, FeatureSpec],
    ids: np.ndarray,
    first_ids: np.ndarray,
) -> bool:
    """True if each id is padding, or a row number of its table.

    Args:
      features: features by name.
      ids: ids of all features, feature after feature.
      first_ids: index in `ids` of each feature's first id, followed by the total number of ids.
    """
    if not ids.size:
        return True
    limits = np.asarray([feature.table_spec.vocabulary_size for feature in features.values()])
    has_ids = np.flatnonzero(np.diff(first_ids))
    largest = np.maximum.reduceat(ids, first_ids[has_ids])
    return bool(ids.min() >= PAD_ID and (largest < limits[has_ids]).all())


def _has_keys(table: TableSpec) -> bool:
    """True if ids of the table are 64-bit keys."""
    return table.storage is not None and table.storage.key_dtype is not None


def _in_lists(ragged: Ragged, lists: Mapping[str, str], made_for: str | None) -> PreparedBatch:
    """Joins ragged features into one list of ids per stack, for a single device, in host memory.

    `_in_lists` makes the same lists as `joined` in less time, because `joined` needs the `Bags` of
    each feature.
    """
    members: dict[str, list[str]] = {}
    for name in ragged.num_bags:
        members.setdefault(lists[name], []).append(name)
    joined_lists = {}
    for stack, names in members.items():
        bags = ragged.bags_of(names)
        joined_lists[stack] = bags.pad_to(size_of_list(bags.ids.size))
    places = _places(members, ragged.num_bags)
    return PreparedBatch(joined_lists, {}, places, tuple(ragged.num_bags), made_for)


def _everything(features: Mapping[str, FeatureSpec], batch: Batch) -> Ragged | None:
    """The bags of all features.

    The result is None if the batch has weights, or if it is not a `Jagged`, lists of lists of `int`
    or valid `Bags` of numpy arrays.
    """
    if isinstance(batch, Jagged) and batch.features == tuple(features):
        everything = batch.bags
        if everything.weights is not None or not _is_int_vector(everything.ids):
            return None
        num_samples = everything.num_bags // len(features)
        num_bags = dict.fromkeys(features, num_samples)
        return Ragged(everything.ids, np.asarray(everything.offsets), num_bags)
    values = [batch[name] for name in features]
    if set(map(type, values)) == {list}:
        ids_and_offsets = small_ids_of_lists(list(itertools.chain.from_iterable(values)))
        if ids_and_offsets is None:
            return None
        num_bags = {name: len(rows) for name, rows in zip(features, values, strict=True)}
        return Ragged(*ids_and_offsets, num_bags)
    for value in values:
        if type(value) is not Bags or value.dense_shape is not None or value.weights is not None:
            return None
        if not _is_int_vector(value.ids) or not _is_int_vector(value.offsets):
            return None
        offsets = value.offsets
        if not offsets.size or offsets[0] != 0 or offsets[-1] != value.ids.size:
            return None
    lengths = np.concatenate([value.offsets[1:] - value.offsets[:-1] for value in values])
    if (lengths < 0).any():
        return None
    ids = np.concatenate([value.ids for value in values])
    num_bags = {name: value.num_bags for name, value in zip(features, values, strict=True)}
    return Ragged(ids, offsets_of(lengths, np.int32), num_bags)


def _is_int_vector(array: object) -> bool:
    """True if `array` is a one-dimensional NumPy array of int32 or int64."""
    return type(array) is np.ndarray and array.dtype in (np.int32, np.int64) and array.ndim == 1


def _of_arrays(
    features: Mapping[str, FeatureSpec], batch: Batch, bounds_check: str
) -> ByName | None:
    """Fast path of `prepare` for a batch of integer arrays, or None if the slow path is needed.

    The fast path checks all arrays together, and copies all arrays to the device together. For 26
    features of one sample, the slow path, which makes `Bags` of each feature, takes ten times as
    long. The result is None in four cases: a table has keys, a feature declares its batch size, the
    batch has anything but integer arrays, or `bounds_check` is "raise" and an id is out of range.
    The slow path of `prepare` names the feature in its error messages.
    """
    values: ByName = {}
    are_on_device = True
    for name, feature in features.items():
        value = batch[name]
        is_on_device = isinstance(value, jax.Array)
        if feature.num_samples is not None or _has_keys(feature.table_spec):
            return None
        if not is_on_device and type(value) is not np.ndarray:
            return None
        if value.dtype not in (np.int32, np.int64):
            return None
        if value.ndim not in (1, 2):
            return None
        are_on_device &= is_on_device and value.dtype == np.int32
        values[name] = value
    if is_unknown(values):
        return None
    arrays = [np.asarray(value) for value in values.values()]
    ids = np.concatenate([array.reshape(-1) for array in arrays])
    first_ids = offsets_of(np.asarray([array.size for array in arrays]))
    if bounds_check != "ignore" and not _are_in_tables(features, ids, first_ids):
        return None
    if are_on_device:
        return values
    shapes = tuple(array.shape for array in arrays)
    parts = cut_on_device(narrow_ids(ids), shapes)
    return dict(zip(features, parts, strict=True))


def _checked(feature: FeatureSpec, value: PyTree, bounds_check: str) -> Bags:
    """Checks the value of a feature, and converts it to bags with int32 ids and float32 weights.

    For a keyed table, the ids become 64-bit `Keys`.
    """
    if (
        isinstance(value, jax.Array)
        and jnp.issubdtype(value.dtype, np.integer)
        and not is_unknown(value)
    ):
        value = np.asarray(value)  # Checks of a JAX array would compile programs.
    bags = as_bags(value, feature=feature.name)
    table = feature.table_spec
    visible = bags
    if isinstance(bags.weights, jax.core.Tracer):
        # If the user differentiates with respect to the weights, the weights are tracers. The ids
        # can be checked without the weights.
        visible = dataclasses.replace(bags, weights=None)
    ids: PyTree
    if _has_keys(table):
        if not is_unknown(visible):
            check_bags(visible, feature=feature.name)
        storage = cast(Storage, table.storage)
        ids = storage.checked(bags.ids, table, f"feature {feature.name!r}")
    else:
        check_ids_dtype(bags, feature=feature.name)
        if not is_unknown(visible):
            check_values(
                visible,
                feature=feature.name,
                table=table.name,
                vocabulary_size=table.vocabulary_size,
                allow_out_of_range=bounds_check == "ignore",
                way_to_drop="let EmbeddingCollection(bounds_check='ignore') drop them",
            )
        ids = narrow_ids(bags.ids)
    weights = None
    if bags.weights is not None:
        weights = bags.weights.astype(np.float32)
    return dataclasses.replace(bags, ids=ids, weights=weights)


def is_unknown(values: PyTree) -> bool:
    """True if values cannot be read, because the values are traced or partly in other processes."""
    if is_traced(values):
        return True
    return any(map(is_global, jax.tree.leaves(values)))


def _canonical(feature: FeatureSpec, bags: Bags, value: PyTree) -> PyTree:
    """Converts the checked bags of a feature to an array or `Bags` for compiled programs.

    The ids of `Bags` are padded to a power of two, so a stream of batches needs few compiled
    programs. `Bags` that are traced or already padded get no padding. `Bags` of a feature without a
    combiner are not padded, because the feature has one activation per id.

    Args:
      feature: spec of the feature.
      bags: checked bags of the feature.
      value: the user's value. A JAX array of the right dtype is returned unchanged.
    """
    if bags.dense_shape is not None:
        has_numbers = isinstance(value, jax.Array) and not isinstance(bags.ids, Keys)
        if has_numbers and value.dtype == bags.ids.dtype:
            return value
        return _padded(bags, 0)
    if not is_traced(bags) and feature.pooling != "none":
        num_ids = int(np.asarray(bags.offsets)[-1])
        room = bags.ids.shape[0]
        is_padded = num_ids < room
        if not is_padded:
            bags = bags.pad_to(max(padded_size(room), 1))
    offsets = bags.offsets.astype(np.int32)
    return dataclasses.replace(bags, offsets=offsets)


def _check_num_samples(feature: FeatureSpec, bags: Bags, devices: Devices) -> None:
    """Raises: ValueError: the batch size is not as declared, or cannot be split over devices."""
    num_samples = bags.num_bags
    if devices.mesh is not None and not is_unknown(bags):
        num_samples *= devices.num_devices // devices.num_parts_here
    expected = feature.num_samples
    got = num_samples
    unit = "samples"
    if feature.pooling == "none" and feature.output_shape is not None:
        num_ids = bags.ids.shape[0]
        got = num_ids * num_samples // max(bags.num_bags, 1)
        unit = "ids"
    if expected is not None and expected != got:
        raise ValueError(
            f"feature {feature.name!r}: the batch has {got} {unit}, but the spec declares {expected}; change the "
            "batch, or leave input_shape and output_shape None to accept any."
        )
    if devices.mesh is not None and num_samples % devices.num_devices:
        raise ValueError(
            f"feature {feature.name!r}: a batch of {num_samples} samples cannot be split over {devices.num_devices} "
            "devices; leave some samples out, or add samples without ids."
        )


# Functions for batches that are split over a mesh


def _form_and_width(name: str, bags: Bags, *, is_listed: bool) -> tuple[str, int]:
    """A text that describes the bags of a feature, and the width of their array after the split.

    The text must be equal in all processes. On a mesh, ragged bags that are not joined into a list
    become an array `[bags, width]`. For ragged bags that become an array, the returned width is the
    `common_width` of the bags of this process. For all other bags, the returned width is 0.

    Raises: ValueError: ragged bags are traced, so they cannot be split over the mesh.
    """
    if is_unknown(bags):
        if bags.dense_shape is None:
            raise ValueError(
                f"feature {name!r}: on a mesh, bags of any length cannot be split inside jit; bring the batch into "
                "canonical form before, with batch = collection.prepare(batch), or pass a padded array [batch, ids]."
            )
        return "its part of a global array", 0
    form = "bags" if bags.dense_shape is None else f"samples of an array {list(bags.dense_shape)}"
    with_weights = "without weights" if bags.weights is None else "with weights"
    width = 0
    if bags.dense_shape is None and not is_listed:
        width = common_width(bags)
    return f"{bags.num_bags} {form} {with_weights}", width


def _padded(bags: Bags, width: int) -> PyTree:
    """Converts bags to an array of ids, or if they have weights, to a pair `(ids, weights)`.

    Ragged bags become arrays `[bags, width]`. Ids are padded with `-1`, and weights with 0. If the
    bags come from an array, the result has the shape of that array.
    """
    weights = bags.weights
    if bags.dense_shape is not None:
        shaped_ids = bags.ids.reshape(*bags.dense_shape)
        if weights is None:
            return shaped_ids
        return shaped_ids, weights.reshape(bags.dense_shape)
    offsets = np.asarray(bags.offsets)
    num_ids = offsets[-1]
    lengths = np.diff(offsets)
    columns = np.arange(width)
    is_used = columns[None, :] < lengths[:, None]

    def spread(values: PyTree, fill: float) -> np.ndarray:
        dense = np.full(is_used.shape, fill, values.dtype)
        dense[is_used] = np.asarray(values)[:num_ids]
        return dense

    if isinstance(bags.ids, Keys):
        spread_ids = jax.tree.map(lambda lane: spread(lane, 0), bags.ids)
    else:
        spread_ids = spread(bags.ids, PAD_ID)
    if weights is None:
        return spread_ids
    return spread_ids, spread(weights, 0.0)


def check_output_shapes(features: Mapping[str, FeatureSpec], devices: Devices) -> None:
    """Raises: ValueError: activations of a declared shape cannot be split by sample."""
    for name, feature in features.items():
        if feature.output_shape is None:
            continue
        if feature.output_shape[0] % devices.num_devices:
            raise ValueError(
                f"feature {name!r}: the first axis of output_shape {feature.output_shape} cannot be split over "
                f"{devices.num_devices} devices; leave it None, or change its first size."
            )


# Gradients


def d_outputs(
    features: Mapping[str, FeatureSpec], batch: Batch, d_activations: ActivationGradients
) -> ByName:
    """Converts gradients of activations to gradients of kernel outputs, float32 `[outputs, dim]`.

    Args:
      features: features by name.
      batch: batch of the lookup.
      d_activations: gradients of the activations, by feature name.

    Raises:
      ValueError: a gradient and its activations differ in shape.
      TypeError: a gradient is not an array of floats.
    """
    batch = PreparedBatch.of(batch)
    check_names(features, d_activations, "the activation gradients")
    gradients: ByName = {}
    for name, feature in features.items():
        columns = feature.output_dim
        check_gradient(d_activations[name], f"feature {name!r}: the activation gradient")
        gradient = device_copy(d_activations[name], jnp.float32)
        place = batch.place(name)
        if place is not None:
            num_outputs = place.num_bags * batch.num_parts(place.list)
        else:
            bags = batch.bags(name)
            num_outputs = bags.num_bags
            if feature.pooling == "none":
                num_outputs = bags.ids.shape[0]
        has_columns = gradient.ndim >= 2 and gradient.shape[-1] == columns
        if not has_columns or gradient.size != num_outputs * columns:
            raise ValueError(
                f"feature {name!r}: the activation gradient has shape {gradient.shape}, but the activations hold "
                f"{num_outputs} vectors of {columns}."
            )
        missing = feature.table_spec.embedding_dim - columns
        gradient = gradient.reshape(num_outputs, columns)
        if missing:
            gradient = jnp.pad(gradient, ((0, 0), (0, missing)))
        gradients[name] = gradient
    return gradients
