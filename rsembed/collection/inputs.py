"""Batches as users have them, checked and brought into canonical form.

On one device that is `Bags`, or where an array was given an array `[batch, ids]` (or a pair of it and weights). On a
mesh it is always such an array, padded, because all devices must run the same program on equal shapes: sample `b` of
`B` lies with device `b * num_devices // B`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.bags import (
    PAD_ID,
    Bags,
    as_bags,
    check_bags,
    check_ids_dtype,
    check_values,
    common_width,
    cut_on_device,
    device_copy,
    is_traced,
    narrow_ids,
    on_device,
    padded_size,
)
from rsembed.checks import check_type, did_you_mean
from rsembed.collection.devices import Devices
from rsembed.collection.stack import Batch, ByName
from rsembed.keys import Keys
from rsembed.parallel.agreement import Agreement, is_global
from rsembed.row_gradients import check_gradient
from rsembed.specs import FeatureSpec
from rsembed.storage.protocol import Storage


def check_names(features: Mapping[str, object], given: Mapping[str, object], what: str) -> None:
    """Raises: TypeError or ValueError: `given` is no mapping, or does not name every feature once."""
    check_type(given, Mapping, f"{what}, with one entry for each of {sorted(features)},")
    missing, unknown = sorted(set(features) - set(given)), sorted(set(given) - set(features), key=str)
    if missing or unknown:
        near = did_you_mean(unknown[0], missing) if unknown else ""
        raise ValueError(
            f"{what} does not match the features: missing {missing}, unknown {unknown}{near}; it needs exactly one "
            f"entry for each of {sorted(features)}."
        )


def prepare(
    features: Mapping[str, FeatureSpec],
    given: PyTree,
    devices: Devices,
    *,
    bounds_check: str,
    what: str = "the batch",
    read: Callable[[PyTree], Batch] | None = None,
) -> ByName:
    """The batch in canonical form; see `EmbeddingCollection.prepare`.

    Args:
      features: by name.
      given: the batch, or what `read` makes one of.
      devices: the mesh.
      bounds_check: see the collection.
      what: the subject of messages of what processes disagree in.
      read: a wing's own checks, which refuse in all processes together.
    """
    with Agreement(devices.known_mesh, what, given) as agreement:
        batch = given if read is None else read(given)
        check_names(features, batch, "batch")
        for leaf in jax.tree.leaves([own for own in batch.values() if isinstance(own, (Bags, jax.Array))]):
            if isinstance(leaf, jax.Array) and not is_unknown(leaf):
                leaf.copy_to_host_async()  # all at once, where an accelerator holds them; they are read one by one
        if devices.mesh is None and (plain := _of_arrays(features, batch, bounds_check)) is not None:
            return plain
        bags = {name: _checked(feature, batch[name], bounds_check) for name, feature in features.items()}
        if devices.mesh is None:
            for name, own in bags.items():
                _check_batch_size(features[name], own, own.num_bags)
            canonical = on_device([_canonical(features[name], own, batch[name]) for name, own in bags.items()])
            return dict(zip(bags, canonical, strict=True))  # a tree would sort them
        for name, own in bags.items():
            form, width = _form_and_width(name, own)
            agreement.bring(f"feature {name!r}", form, width=width)
            num_samples = own.num_bags * (1 if is_unknown(own) else devices.num_processes)
            _check_batch_size(features[name], own, num_samples)
            if num_samples % devices.num_devices:
                raise ValueError(
                    f"feature {name!r}: a batch of {num_samples} samples cannot be split over {devices.num_devices} "
                    "devices; leave some samples out, or add samples without ids."
                )
    place = functools.partial(jax.make_array_from_process_local_data, devices.sharding(devices.split))
    found: ByName = {}
    for name, own in bags.items():
        arrays = _padded(own, agreement.width(f"feature {name!r}"))
        found[name] = arrays if is_unknown(own) else jax.tree.map(lambda array: place(np.asarray(array)), arrays)
    return found


def _of_arrays(features: Mapping[str, FeatureSpec], batch: Batch, bounds_check: str) -> ByName | None:
    """The canonical form of a batch whose features are all arrays of integers, made of all in one go, or None.

    It is None where a table takes keys or a batch size is declared, and where an id lies outside its table: the way
    through `Bags`, which takes ten times as long for 26 features of one sample, then checks each feature and names it.
    """
    given: ByName = {name: batch[name] for name in features}
    specs = [feature.table_spec for feature in features.values() if feature.num_samples is None]
    takes_keys = any(spec.storage is not None and spec.storage.key_dtype is not None for spec in specs)
    is_array = [type(own) is np.ndarray or isinstance(own, jax.Array) for own in given.values()]
    if takes_keys or len(specs) < len(given) or not all(is_array) or is_unknown(given):
        return None
    if any(own.dtype not in (np.int32, np.int64) or own.ndim not in (1, 2) for own in given.values()):
        return None
    arrays = [np.asarray(own) for own in given.values()]
    ids = np.concatenate([own.reshape(-1) for own in arrays])
    limits = np.repeat([spec.vocabulary_size for spec in specs], [own.size for own in arrays])
    if bounds_check != "ignore" and ((ids < PAD_ID) | (ids >= limits)).any():
        return None
    if all(isinstance(own, jax.Array) and own.dtype == np.int32 for own in given.values()):
        return given
    return dict(zip(features, cut_on_device(narrow_ids(ids), tuple(own.shape for own in arrays)), strict=True))


def _checked(feature: FeatureSpec, value: PyTree, bounds_check: str) -> Bags:
    """Bags of a feature with ids and weights in the dtypes of the canonical form."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, np.integer) and not is_unknown(value):
        value = np.asarray(value)  # numpy needs no program for a check
    bags, table = as_bags(value, feature=feature.name), feature.table_spec
    # Whoever differentiates by weights hides these alone.
    visible = dataclasses.replace(bags, weights=None) if isinstance(bags.weights, jax.core.Tracer) else bags
    ids: PyTree
    if table.storage is not None and table.storage.key_dtype is not None:
        if not is_unknown(visible):
            check_bags(visible, feature=feature.name)
        ids = cast(Storage, table.storage).checked(bags.ids, table, f"feature {feature.name!r}")
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
    weights = None if bags.weights is None else bags.weights.astype(np.float32)
    return dataclasses.replace(bags, ids=ids, weights=weights)


def is_unknown(given: PyTree) -> bool:
    """Whether values cannot be read here: inside `jit`, or because other processes hold some of them."""
    return is_traced(given) or any(map(is_global, jax.tree.leaves(given)))


def _canonical(feature: FeatureSpec, bags: Bags, given: PyTree) -> PyTree:
    """The checked bags of a feature as compiled programs take them: as an array, or as bags of any length.

    What was `given` is taken itself where it is such an array already. Bags have room for a power of two of ids, so
    that few programs serve all batches. Those that somebody padded, what is inside `jit`, and features without a
    combiner, whose activations have one vector per id, get no more room.
    """
    if bags.dense_shape is not None:
        is_there = isinstance(given, jax.Array) and not isinstance(bags.ids, Keys) and given.dtype == bags.ids.dtype
        return given if is_there else _padded(bags, 0)
    is_exact = not is_traced(bags) and int(np.asarray(bags.offsets)[-1]) == bags.ids.shape[0]
    if is_exact and feature.pooling != "none":
        bags = bags.pad_to(max(padded_size(bags.ids.shape[0]), 1))
    return dataclasses.replace(bags, offsets=bags.offsets.astype(np.int32))


def _check_batch_size(feature: FeatureSpec, bags: Bags, num_samples: int) -> None:
    expected, got, unit = feature.num_samples, num_samples, "samples"
    if feature.pooling == "none" and feature.output_shape is not None:
        got, unit = bags.ids.shape[0] * num_samples // max(bags.num_bags, 1), "ids"
    if expected is not None and expected != got:
        raise ValueError(
            f"feature {feature.name!r}: the batch has {got} {unit}, but the spec declares {expected}; change the "
            "batch, or leave input_shape and output_shape None to accept any."
        )


# On a mesh


def _form_and_width(name: str, bags: Bags) -> tuple[str, int]:
    """The part of a feature's form in which all processes must agree; and ids per sample, 0 where an array says it."""
    if is_unknown(bags):
        if bags.dense_shape is None:
            raise ValueError(
                f"feature {name!r}: on a mesh, bags of any length cannot be split inside jit; bring the batch into "
                "canonical form before, with batch = collection.prepare(batch), or pass a padded array [batch, ids]."
            )
        return "its part of a global array", 0
    form = "bags" if bags.dense_shape is None else f"samples of an array {list(bags.dense_shape)}"
    form = f"{bags.num_bags} {form} {'without' if bags.weights is None else 'with'} weights"
    return form, common_width(bags) if bags.dense_shape is None else 0


def _padded(bags: Bags, width: int) -> PyTree:
    """Ids `[bags, width]` (or of the shape they had) filled up with `-1`; in a pair with weights, filled up with 0."""
    ids, weights = bags.ids, bags.weights
    if bags.dense_shape is not None:
        shaped = ids.reshape(*bags.dense_shape)
        return shaped if weights is None else (shaped, weights.reshape(bags.dense_shape))
    offsets = np.asarray(bags.offsets)
    is_used = np.arange(width)[None, :] < np.diff(offsets)[:, None]

    def spread(values: PyTree, fill: float) -> np.ndarray:
        dense = np.full(is_used.shape, fill, values.dtype)
        dense[is_used] = np.asarray(values)[: offsets[-1]]
        return dense

    spread_ids = jax.tree.map(lambda lane: spread(lane, 0), ids) if isinstance(ids, Keys) else spread(ids, PAD_ID)
    return spread_ids if weights is None else (spread_ids, spread(weights, 0.0))


def check_output_shapes(features: Mapping[str, FeatureSpec], devices: Devices) -> None:
    """Raises: ValueError: activations of a declared shape cannot be split by sample."""
    for name, feature in features.items():
        if feature.output_shape is not None and feature.output_shape[0] % devices.num_devices:
            raise ValueError(
                f"feature {name!r}: the first axis of output_shape {feature.output_shape} cannot be split over "
                f"{devices.num_devices} devices; leave it None, or change its first size."
            )


# Gradients


def d_outputs(features: Mapping[str, FeatureSpec], batch: Batch, d_activations: Mapping[str, PyTree]) -> ByName:
    """Gradients of features' activations, each as one float32 row `[outputs, dim]` per output of its kernel call.

    Raises: ValueError: one has another shape than its activations. TypeError: one is no array of floats.
    """
    check_names(features, d_activations, "the activation gradients")
    found: ByName = {}
    for name, feature in features.items():
        bags, columns = as_bags(batch[name], feature=name), feature.output_dim
        check_gradient(d_activations[name], f"feature {name!r}: the activation gradient")
        gradient = device_copy(d_activations[name], jnp.float32)
        num_outputs = bags.ids.shape[0] if feature.pooling == "none" else bags.num_bags
        if gradient.ndim < 2 or gradient.shape[-1] != columns or gradient.size != num_outputs * columns:
            raise ValueError(
                f"feature {name!r}: the activation gradient has shape {gradient.shape}, but the activations hold "
                f"{num_outputs} vectors of {columns}."
            )
        missing = feature.table_spec.embedding_dim - columns
        gradient = gradient.reshape(num_outputs, columns)
        found[name] = jnp.pad(gradient, ((0, 0), (0, missing))) if missing else gradient
    return found
