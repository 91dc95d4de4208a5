"""Checksummed checkpoints of any pytree, and of embedding collections by table name.

```
checkpoint/
  manifest.json   names, shapes, dtypes, step, PRNG, metadata, the CRC32 of every chunk, and its own
  0000.bin ...    one array each: its rows in order, in chunks of about 4 MiB
```

A save goes to a hidden folder beside, reaches the disk, and takes its name in one rename: there is no half of a
checkpoint, and none is ever replaced. A load verifies every byte and refuses, by name, what does not match. Nothing
depends on stacking, mesh or number of processes: tables are kept by name with their rows in order.

Orbax, which this library installs for Flax models, restores a data file with a flipped bit without noticing, and its
arrays know nothing of tables. What tables need beyond it is small enough to stand here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.kernels import api
from rsembed.progress import progress
from rsembed.specs import TableSpec
from rsembed.stacking import StackPlan

LAYOUT_VERSION = 1
CHUNK_BYTES = 1 << 22
_MANIFEST = "manifest.json"


class CorruptCheckpointError(ValueError):
    """The files are not what was written."""


class Checkpoint(NamedTuple):
    """What `load` returns.

    Attributes:
      tree: the arrays.
      step: as given to `save`.
      metadata: as given to `save`.
    """

    tree: Any
    step: int
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a stacked array that belong to one table: a leaf of the tree, cut when it is written."""

    array: Any
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def save(path: str | os.PathLike[str], tree: Any, *, step: int = 0, metadata: Mapping[str, Any] | None = None) -> None:
    """Writes a checkpoint folder; it appears complete or not at all.

    With several processes all call this with the same tree, on storage that process 0 can write: it gathers arrays
    chunk by chunk and writes them.

    Args:
      path: a folder that does not exist yet, such as `runs/a/step_001000`.
      tree: any pytree of numpy or JAX arrays, numbers and PRNG keys, of one instant.
      step: number of updates behind the tree; `latest` compares it.
      metadata: what JSON can hold.

    Raises:
      FileExistsError: `path` exists.
      TypeError: a leaf is no array, or `metadata` no JSON.
      ValueError: two leaves have the same name.
    """
    path = Path(path)
    leaves = _flatten(tree)
    body: dict[str, Any] = {
        "layout_version": LAYOUT_VERSION,
        "step": int(step),
        "prng_implementation": jax.random.key_impl(jax.random.key(0)),
        "metadata": dict(metadata or {}),
    }
    # As a load will see it (keys are texts); what JSON cannot hold is an error now, not after an hour of writing.
    body = json.loads(json.dumps(body))
    is_writer = jax.process_index() == 0
    exists = path.exists()
    if jax.process_count() > 1:
        exists = bool(multihost_utils.broadcast_one_to_all(np.asarray(exists)))
    if exists:
        raise FileExistsError(f"{path} exists; checkpoints are never replaced: give every step a folder of its own.")
    partial = path.with_name(f".{path.name}.partial")
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
        partial.mkdir(parents=True)
    watched = progress(leaves.items(), description="saving", delay=1.0, leave=False)
    arrays = [
        {"path": list(parts), **_write_array(partial / f"{number:04d}.bin", leaf, _name(parts), is_writer)}
        for number, (parts, leaf) in enumerate(watched)
    ]
    if is_writer:
        with open(partial / _MANIFEST, "wb") as file:
            file.write(_encode(body | {"arrays": arrays}))
            os.fsync(file.fileno())
        _sync_folder(partial)
        partial.rename(path)
        _sync_folder(path.parent)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"rsembed checkpoint {path.name}")


def load(path: str | os.PathLike[str], like: Any = None) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Args:
      path: the folder.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the wanted structure and, if they have one, sharding,
        which may be another one than at the time of the save. None returns nested dicts of numpy arrays, in which
        positions and field names are keys.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CorruptCheckpointError: a byte differs from what was written; names file, chunk, array and rows.
      ValueError: it does not match `like` (names the arrays), or a newer version of the library wrote it.
    """
    path = Path(path)
    found = manifest(path)
    arrays = _read_arrays(path, found["arrays"])
    tree = _nested(arrays) if like is None else _restored(path, arrays, like)
    return Checkpoint(tree, found["step"], found["metadata"])


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The verified manifest of a checkpoint: `step`, `metadata`, `arrays`, ... The arrays are not read.

    Raises: FileNotFoundError, CorruptCheckpointError, ValueError: as `load`.
    """
    file = Path(path) / _MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {_MANIFEST}. An interrupted save leaves none.")
    data = file.read_bytes()
    try:
        body = json.loads(data)["manifest"]
        is_intact = _encode(body) == data
    except (ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise CorruptCheckpointError(f"{file} is not what was written; take an older checkpoint.")
    if body["layout_version"] != LAYOUT_VERSION:
        raise ValueError(
            f"{path} has layout {body['layout_version']}, but this version of rsembed reads layout {LAYOUT_VERSION}; "
            "read it with the version that wrote it."
        )
    return body


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the highest step, or None; interrupted saves do not count.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for step in (9, 10):
      ...         save(f"{folder}/step_{step}", {"x": jnp.arange(3)}, step=step)
      ...     latest(folder).name, load(latest(folder)).tree["x"].tolist()
      ('step_10', [0, 1, 2])
    """
    found = [file.parent for file in Path(folder).glob(f"*/{_MANIFEST}") if not file.parent.name.startswith(".")]
    return max(found, key=lambda path: manifest(path)["step"], default=None)


# Names


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves by their path."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {_parts(keys): leaf for keys, leaf in found}
    if len(leaves) < len(found):
        names = [_name(_parts(keys)) for keys, _ in found]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of the tree are called {repeated}; give them keys that differ as text.")
    return leaves


def _parts(keys: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _name(parts: Sequence[str]) -> str:
    return "/".join(parts) or "the array"


def _nested(arrays: dict[tuple[str, ...], Any]) -> Any:
    from flax.traverse_util import unflatten_dict

    return arrays[()] if () in arrays else unflatten_dict(arrays)


# Writing


def _write_array(file: Path, leaf: Any, name: str, is_writer: bool) -> dict[str, Any]:
    shape, prng, first, array = _shaped(leaf).shape, None, 0, leaf
    if isinstance(leaf, _Rows):
        first, array = leaf.first, leaf.array
    elif isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        prng, array = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        shape = array.shape
    elif not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        if array.dtype.kind in "OUSMm":
            raise TypeError(f"checkpoint: leaf {name!r} is {array.dtype}; only arrays of numbers can be saved.")
    array = array.reshape(1) if array.ndim == 0 else array
    count = shape[0] if shape else 1
    row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
    rows_per_chunk = max(1, CHUNK_BYTES // row_bytes)
    checksums = []
    with open(file if is_writer else os.devnull, "wb") as output:
        for start in range(0, count, rows_per_chunk):
            rows = _chunk(array, first + start, min(rows_per_chunk, count - start))
            chunk = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
            checksums.append(f"{zlib.crc32(chunk):08x}")
            output.write(chunk)
        if is_writer:
            os.fsync(output.fileno())
    return {
        "file": file.name, "shape": list(shape), "dtype": array.dtype.name, "prng": prng,
        "rows_per_chunk": rows_per_chunk, "crc32": checksums,
    }  # fmt: skip


def _chunk(array: Any, first: int, count: int) -> np.ndarray:
    """Rows of a host or global array; every process calls this, and process 0 gets what others hold."""
    if isinstance(array, np.ndarray):
        return array[first : first + count]
    if array.is_fully_replicated:
        return _host_rows(array.addressable_data(0), first, count)
    chunk = np.zeros((count, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        own = shard.index[0].indices(array.shape[0])
        start, stop = max(first, own[0]), min(first + count, own[1])
        if shard.replica_id == 0 and start < stop:
            place = (slice(start - first, stop - first), *shard.index[1:])
            chunk[place] = _host_rows(shard.data, start - own[0], stop - start)
    if array.is_fully_addressable:
        return chunk
    # Every element has one process that holds its first replica; all others send zeros, so adding bytes is exact.
    gathered = multihost_utils.process_allgather(chunk.reshape(-1).view(np.uint8))
    return gathered.sum(axis=0, dtype=np.uint8).view(array.dtype).reshape(chunk.shape)


def _host_rows(data: jax.Array, first: int, count: int) -> np.ndarray:
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[first : first + count]
    # On an accelerator np.asarray would keep a copy of the whole array on the host.
    return np.asarray(jax.lax.dynamic_slice_in_dim(data, np.int32(first), count))


def _encode(body: Mapping[str, Any]) -> bytes:
    """The manifest with its checksum, always with the same bytes, so that a load can compare them all."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    return json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1).encode()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def _read_arrays(path: Path, entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    watched = progress(entries, description="loading", delay=1.0, leave=False)
    return {tuple(entry["path"]): _read_array(path, entry) for entry in watched}


def _read_array(path: Path, entry: Mapping[str, Any]) -> Any:
    name, file = _name(entry["path"]), path / entry["file"]
    array = np.empty(entry["shape"], jnp.dtype(entry["dtype"]))
    flat = array.reshape(-1).view(np.uint8)
    size = file.stat().st_size if file.is_file() else None
    if size != flat.size:
        was = "missing" if size is None else f"{size} bytes long"
        raise CorruptCheckpointError(f"{file} is {was}, but {name!r} has {flat.size} bytes; take an older checkpoint.")
    count, rows_per_chunk = (array.shape[0] if array.ndim else 1), entry["rows_per_chunk"]
    row_bytes = flat.size // max(count, 1)
    with open(file, "rb") as data:
        for number, checksum in enumerate(entry["crc32"]):
            first, last = number * rows_per_chunk, min((number + 1) * rows_per_chunk, count)
            chunk = flat[first * row_bytes : last * row_bytes].data
            data.readinto(chunk)
            if f"{zlib.crc32(chunk):08x}" != checksum:
                raise CorruptCheckpointError(
                    f"{file}: chunk {number}, rows {first} to {last - 1} of {name!r}, is not what was written (CRC32 "
                    "differs); take an older checkpoint, and have the storage looked at."
                )
    return array if entry["prng"] is None else jax.random.wrap_key_data(jnp.asarray(array), impl=entry["prng"])


def _restored(path: Path, arrays: Mapping[tuple[str, ...], Any], like: Any) -> Any:
    wanted = _flatten(like)
    problems = [f"{_name(parts)!r} is missing" for parts in wanted if parts not in arrays]
    problems += [f"{_name(parts)!r} is not wanted" for parts in arrays if parts not in wanted]
    for parts in wanted.keys() & arrays.keys():
        has, wants = (f"{x.dtype}{list(x.shape)}" for x in (arrays[parts], _shaped(wanted[parts])))
        if has != wants:
            problems.append(f"{_name(parts)!r} is {has}, wanted {wants}")
    if problems:
        raise ValueError(f"checkpoint {path} does not match: {'; '.join(sorted(problems))}.")
    leaves = [_placed(arrays[parts], leaf) for parts, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _shaped(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def _placed(array: Any, leaf: Any) -> Any:
    """The array where and as what the leaf is."""
    if isinstance(leaf, (bool, int, float)):
        return type(leaf)(array[()])
    if isinstance(leaf, (np.ndarray, np.generic, _Rows)):
        return array
    sharding = getattr(leaf, "sharding", None)
    if isinstance(array, jax.Array) or sharding is None:  # a PRNG key, or no wish
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


# Collections


def save_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    others: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Saves every table and its slots by table name, with step and key, and what else belongs to the instant.

    The arrays are `tables/<table>`, `slots/<table>/<slot>`, `key` and `others/...`; of a table with `storage=`, what
    it keeps instead of rows.

    Args:
      path: see `save`.
      collection: whose state it is.
      state: of one instant.
      others: any pytree, such as dense parameters and their optimizer state.
      metadata: what JSON can hold; `manifest(path)["metadata"]["user"]` returns it.

    Raises: as `save`.
    """
    described = {name: _description(table) for name, table in collection.table_specs.items()}
    info = {"tables": described, "user": dict(metadata or {})}
    tree = _logical(collection, state) | {"others": others}
    save(path, tree, step=int(state.step), metadata=info)


def load_collection(path: str | os.PathLike[str], collection: EmbeddingCollection, *, others: Any = None) -> Any:
    """The state of a saved collection, for one with the same tables, stacked as it may be.

    Args:
      path: see `load`.
      collection: its tables must be those that were saved; learning rates and other hyperparameters are its own.
      others: a template for what was saved as `others`, see `like` of `load`; None leaves that alone.

    Returns: the `EmbeddingState`; with a template, the pair of it and the others.

    Raises:
      CorruptCheckpointError, FileNotFoundError: as `load`.
      ValueError: a table is missing or too many, or has another size, dtype, storage or kind of optimizer.
    """
    found = manifest(path)
    was = found["metadata"].get("tables", {})
    now = {name: _description(table) for name, table in collection.table_specs.items()}
    problems = [f"table {name!r} is not in the checkpoint" for name in sorted(now.keys() - was.keys())]
    problems += [f"table {name!r} is not in the collection" for name in sorted(was.keys() - now.keys())]
    for name in sorted(now.keys() & was.keys()):
        changed = [field for field in now[name] if was[name].get(field) != now[name][field]]
        problems += [f"table {name!r}: {field} was {was[name].get(field)}, is {now[name][field]}" for field in changed]
    if problems:
        raise ValueError(
            f"checkpoint {path} does not match the collection: {'; '.join(problems)}. To take over tables alone, use "
            "collection.with_tables(state, load(path).tree['tables'])."
        )
    empty = jax.eval_shape(collection.init, jax.random.key(0))
    like = _logical(collection, empty)
    implementation = next(entry["prng"] for entry in found["arrays"] if entry["path"] == ["key"])
    like["key"] = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    like["others"] = others
    wanted = [entry for entry in found["arrays"] if others is not None or entry["path"][0] != "others"]
    tree = _restored(Path(path), _read_arrays(Path(path), wanted), like)
    tables, slots = {}, {}
    for stack in collection.plan.stacks:
        names = [table.name for table in stack.tables]
        if collection.table_specs[names[0]].storage is not None:
            tables[stack.name], slots[stack.name] = tree["tables"][names[0]], tree["slots"][names[0]]
            continue
        tables[stack.name] = _stacked(collection, stack, [tree["tables"][name] for name in names])
        slots[stack.name] = tuple(
            _stacked(collection, stack, [tree["slots"][name][field] for name in names]) for field in _slot_names(stack)
        )
    state = EmbeddingState(tables, slots, jnp.asarray(found["step"], jnp.int32), tree["key"])
    return state if others is None else (state, tree["others"])


def _description(table: TableSpec) -> dict[str, Any]:
    """What must not change between save and load."""
    return {
        "vocabulary_size": table.vocabulary_size,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer.short_name(),
        "storage": None if table.storage is None else repr(table.storage),
    }


def _slot_names(stack: StackPlan) -> list[str]:
    optimizer = stack.spec.optimizer
    return list(getattr(optimizer.slot_type, "_fields", map(str, range(optimizer.slot_variables_count()))))


def _logical(collection: EmbeddingCollection, state: EmbeddingState) -> dict[str, Any]:
    """The state by table name; rows of stacked arrays are marked, not copied."""
    tables, slots = {}, {}
    for stack in collection.plan.stacks:
        array, own = state.tables[stack.name], state.slots[stack.name]
        for table in stack.tables:
            if collection.table_specs[table.name].storage is None:
                first, count = table.setting.row_offset_in_shard, table.rows
                tables[table.name] = _Rows(array, first, count)
                slots[table.name] = {
                    field: _Rows(slot, first, count) for field, slot in zip(_slot_names(stack), own, strict=True)
                }
            else:
                tables[table.name], slots[table.name] = array, own
    return {"tables": tables, "slots": slots, "key": state.key}


def _stacked(collection: EmbeddingCollection, stack: StackPlan, pieces: list[np.ndarray]) -> jax.Array:
    """Tables under each other, in memory that is laid out as that of fresh ones."""
    offsets = [table.setting.row_offset_in_shard for table in stack.tables]

    @jax.jit
    def fill(pieces: list[jax.Array]) -> jax.Array:
        shape = (stack.spec.stack_vocab_size, *pieces[0].shape[1:])
        array = api.allocate(shape, pieces[0].dtype, implementation=collection.implementation)
        for first, piece in zip(offsets, pieces, strict=True):
            array = jax.lax.dynamic_update_slice_in_dim(array, piece, first, 0)
        return array

    return fill(pieces)
