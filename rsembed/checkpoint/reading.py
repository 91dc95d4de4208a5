"""Reading a checkpoint: arrays that stay on the disk until they are wanted, in the structure of a template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.checkpoint import increments, old_layouts
from rsembed.checkpoint.arrays import open_array
from rsembed.checkpoint.manifests import checksum, flattened, joined, manifest
from rsembed.checkpoint.saved import CorruptCheckpointError, InOrder, SavedArray, sharded
from rsembed.checkpoint.states import TableRows


def opened(path: Path, found: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    """The arrays of some entries of a manifest, still on the disk but for PRNG keys."""

    def on_disk(entry: Mapping[str, Any], name: str) -> SavedArray:
        return (open_array if "folder" in entry else old_layouts.open_array)(path, entry, name)

    arrays, base = {}, functools.cache(lambda: _base(path, found))
    for entry in entries:
        parts, name = tuple(entry["path"]), joined(entry["path"])
        array: Any = on_disk(entry, name)
        if (changed := entry.get("changed")) is not None:
            rows = on_disk(found["row_numbers"][changed["rows"]], f"{name}, numbers of its rows")
            keys = next((other for other in found["arrays"] if other["path"] == [*parts[:-1], increments.KEYS]), None)
            own_keys = on_disk(keys, joined(keys["path"])) if changed["by_key"] and keys else None
            array = increments.patched(parts, changed, rows, array, base(), own_keys)
        if entry["prng"] is not None:
            array = jax.random.wrap_key_data(jnp.asarray(array.whole()), impl=entry["prng"])
        arrays[parts] = array
    return arrays


def _base(path: Path, found: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The arrays that an incremental checkpoint says the changes of."""
    base = path.with_name(found["base"]["name"])
    try:
        of_base = manifest(base)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} holds changes of {base}, which is gone; take an older one.") from error
    if checksum(of_base) != found["base"]["crc32"] or of_base["step"] >= found["step"]:
        raise CorruptCheckpointError(f"{path} holds changes of another {base} than is there; take an older one.")
    return opened(base, of_base, of_base["arrays"])


def in_order(array: Any) -> Any:
    """One of `opened`, to be written into another checkpoint."""
    return InOrder(array) if isinstance(array, SavedArray) else np.asarray(jax.random.key_data(array))


def _in_memory(array: Any) -> Any:
    return array.whole() if isinstance(array, SavedArray) else array


def nested(path: Path, found: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Any:
    """The arrays of entries, in memory, in dictionaries by the parts of their names."""
    from flax.traverse_util import unflatten_dict

    arrays = {parts: _in_memory(array) for parts, array in opened(path, found, entries).items()}
    return arrays[()] if () in arrays else unflatten_dict(arrays)


def restored(path: Path, found: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], like: Any) -> Any:
    """The arrays of some entries of a manifest in the structure of `like`, which has no states in it; see `load`.

    In place of the rows of tables stand those on the disk, for `with_states`.
    """
    arrays, wanted = opened(path, found, entries), flattened(like)
    problems = [f"{joined(parts)!r} is missing" for parts in wanted if parts not in arrays]
    problems += [f"{joined(parts)!r} is not wanted" for parts in arrays if parts not in wanted]
    for parts in wanted.keys() & arrays.keys():
        has, wants = (f"{_native(x.dtype)}{list(x.shape)}" for x in (arrays[parts], _shaped(wanted[parts])))
        if has != wants:
            problems.append(f"{joined(parts)!r} is {has}, wanted {wants}")
        elif _would_narrow(arrays[parts], wanted[parts]):
            problems.append(
                f"{joined(parts)!r} is {has}, which a JAX array cannot hold here: give a numpy array as its template, "
                "or set jax_enable_x64"
            )
    if problems:
        raise ValueError(f"checkpoint {path} does not match: {'; '.join(sorted(problems))}.")
    leaves = [_from_disk(arrays[parts], leaf) for parts, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _shaped(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def _native(dtype: Any) -> Any:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype  # that of a PRNG key has no byte order


def _would_narrow(array: Any, leaf: Any) -> bool:
    is_for_jax = not isinstance(leaf, (bool, int, float, np.ndarray, np.generic, TableRows))
    return is_for_jax and isinstance(array, SavedArray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype


def _from_disk(array: Any, leaf: Any) -> Any:
    """The array where and as what the leaf is; on several devices, without the whole of it in memory of the host."""
    if isinstance(leaf, TableRows):
        return array
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1 or not isinstance(array, SavedArray) or not array.shape:
        return placed(_in_memory(array), leaf)
    pieces = ((np.arange(first, first + len(rows)), rows) for first, rows in array.blocks())
    return sharded(array.shape, array.dtype, sharding, pieces)


def placed(array: Any, leaf: Any) -> Any:
    """The array where and as what the leaf is."""
    if isinstance(leaf, (bool, int, float)):
        return type(leaf)(array[()])
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return jax.device_put(array)  # tied to no device, as the leaf is, or steps would be compiled anew for it
    if isinstance(array, jax.Array):  # a PRNG key; device_put knows only devices of this process
        data = placed(np.asarray(jax.random.key_data(array)), leaf)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
