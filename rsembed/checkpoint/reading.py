"""Reading a checkpoint: arrays that stay on the disk until they are wanted, in the structure of a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.checkpoint.arrays import open_array
from rsembed.checkpoint.manifests import flattened, joined
from rsembed.checkpoint.saved import SavedArray, sharded
from rsembed.checkpoint.states import TableRows


def opened(path: Path, entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    """The arrays of some entries of a manifest, still on the disk but for PRNG keys."""
    arrays = {}
    for entry in entries:
        array: Any = open_array(path, entry, joined(entry["path"]))
        if entry["prng"] is not None:
            array = jax.random.wrap_key_data(jnp.asarray(array.whole()), impl=entry["prng"])
        arrays[tuple(entry["path"])] = array
    return arrays


def _in_memory(array: Any) -> Any:
    return array.whole() if isinstance(array, SavedArray) else array


def nested(path: Path, entries: Sequence[Mapping[str, Any]]) -> Any:
    """The arrays of entries, in memory, in dictionaries by the parts of their names."""
    from flax.traverse_util import unflatten_dict

    arrays = {parts: _in_memory(array) for parts, array in opened(path, entries).items()}
    return arrays[()] if () in arrays else unflatten_dict(arrays)


def restored(path: Path, entries: Sequence[Mapping[str, Any]], like: Any) -> Any:
    """The arrays of some entries of a manifest in the structure of `like`, which has no states in it; see `load`.

    In place of the rows of tables stand those on the disk, for `with_states`.
    """
    arrays, wanted = opened(path, entries), flattened(like)
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
