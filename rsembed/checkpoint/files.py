"""Checksummed checkpoints of any pytree, and of embedding collections by table name.

```
checkpoint/
  manifest.json   names, shapes, dtypes, step, what states belong to, the checksums of all files, and its own
  0000/ ...       one array each, of the zarr format: its rows in order, in chunks of about 4 MiB
```

A save goes to a hidden folder beside, reaches the disk, and takes its name in one rename: there is no half of a
checkpoint, and none is ever replaced. A load verifies every byte and refuses, by name, what does not match. Nothing
depends on stacking, mesh or number of processes: a state of embedding tables, wherever it stands in the tree, is kept
by table name with its rows in the order of their ids (`states`).

TensorStore carries the arrays, and whatever else knows zarr can read them. What it does not do stands here: states by
table name, all arrays of an instant or none, and a refusal of files that are missing or in each other's place.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import socket
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rsembed.checkpoint.arrays import as_saved, check_entry, copied, open_array, write_arrays
from rsembed.checkpoint.states import (
    CorruptCheckpointError,
    SavedArray,
    TableRows,
    belongings,
    logical,
    sharded,
    with_states,
)
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection import EmbeddingCollection
from rsembed.fingerprint import ELSEWHERE, Fingerprint, check_same
from rsembed.parallel.agreement import check_not_forked

LAYOUT_VERSION = 3
MANIFEST = "manifest.json"


@validated
def manifest(path: str | os.PathLike[str]) -> dict[str, PyTree]:
    """The verified manifest of a checkpoint: `step`, `metadata`, `arrays`, ... The arrays are not read.

    Raises: FileNotFoundError, CorruptCheckpointError, ValueError: as `load`.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}. An interrupted save leaves none.")
    data = file.read_bytes()
    try:
        body = json.loads(data)["manifest"]
        is_intact = encoded(body) == data and {"layout_version", "step", "metadata", "arrays"} <= body.keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        is_intact = False
    if not is_intact:
        raise CorruptCheckpointError(f"{file} is not what was written; take an older checkpoint.")
    if body["layout_version"] != LAYOUT_VERSION:
        raise ValueError(
            f"{path} has layout {body['layout_version']}, but this version of rsembed reads layout "
            f"{LAYOUT_VERSION}; read it with the version that wrote it."
        )
    for number, entry in enumerate(body["arrays"]):
        check_entry(entry, number)
    return body


def encoded(body: Mapping[str, PyTree]) -> bytes:
    """The manifest with its checksum as bytes; equal manifests give equal bytes, which a load compares."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    return json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1).encode()


def flattened(tree: PyTree) -> dict[tuple[str, ...], Any]:
    """Leaves of the tree by path. Raises: ValueError: two leaves have the same path as text."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {_parts(keys): leaf for keys, leaf in found}
    if len(leaves) < len(found):
        names = [joined(_parts(keys)) for keys, _ in found]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of the tree are called {repeated}; give them keys that differ as text.")
    return leaves


def _parts(keys: PyTree) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def joined(parts: Sequence[str]) -> str:
    """A path as one text, its parts joined by `/`."""
    return "/".join(parts) or "the array"


def opened(path: Path, entries: Sequence[Mapping[str, PyTree]]) -> dict[tuple[str, ...], Any]:
    """Arrays of some manifest entries by path, still on disk except PRNG keys."""
    arrays = {}
    for entry in entries:
        array: PyTree = open_array(path, entry, joined(entry["path"]))
        if entry["prng"] is not None:
            array = jax.random.wrap_key_data(jnp.asarray(array.whole()), impl=entry["prng"])
        arrays[tuple(entry["path"])] = array
    return arrays


def _in_memory(array: PyTree) -> PyTree:
    return array.whole() if isinstance(array, SavedArray) else array


def nested(path: Path, entries: Sequence[Mapping[str, PyTree]]) -> PyTree:
    """Arrays of manifest entries in memory, in nested dictionaries by the parts of their names."""
    from flax.traverse_util import unflatten_dict

    arrays = {parts: _in_memory(array) for parts, array in opened(path, entries).items()}
    return arrays[()] if () in arrays else unflatten_dict(arrays)


def restored(path: Path, entries: Sequence[Mapping[str, PyTree]], like: PyTree) -> PyTree:
    """Arrays of some manifest entries in the structure of `like`, a tree without states; see `load`.

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


def _shaped(leaf: PyTree) -> PyTree:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def _native(dtype: Any) -> PyTree:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype  # that of a PRNG key has no byte order


def _would_narrow(array: PyTree, leaf: PyTree) -> bool:
    is_for_jax = not isinstance(leaf, (bool, int, float, np.ndarray, np.generic, TableRows))
    return is_for_jax and isinstance(array, SavedArray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype


def _from_disk(array: PyTree, leaf: PyTree) -> PyTree:
    """As `placed`, but an array for several devices is read in pieces, never whole in host memory."""
    if isinstance(leaf, TableRows):
        return array
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1 or not isinstance(array, SavedArray) or not array.shape:
        return placed(_in_memory(array), leaf)
    pieces = ((np.arange(first, first + len(rows)), rows) for first, rows in array.blocks())
    return sharded(array.shape, array.dtype, sharding, pieces)


def placed(array: PyTree, leaf: PyTree) -> PyTree:
    """The array with the Python or array type, and on the devices, of the template `leaf`."""
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


Said = TypeVar("Said", bool, int)


class Contents(NamedTuple):
    """Contents of a checkpoint before it is written.

    Attributes:
      leaves: arrays by path, each with the implementation of the PRNG keys that it stands for, if any.
      body: body of the manifest without the entries of arrays.
    """

    leaves: dict[tuple[str, ...], tuple[Any, str | None]]
    body: dict[str, PyTree]

    @staticmethod
    def of(tree: PyTree, owners: Mapping[str, PyTree], *, step: int, metadata: Mapping[str, PyTree] | None) -> Contents:
        """Contents that hold a tree.

        Raises: TypeError, ValueError: as `save`.
        """
        check_not_forked("checkpoint")
        for name, facts in owners.items():
            if ELSEWHERE in facts:
                raise ValueError(f"checkpoint: {name!r} is not whole: {facts[ELSEWHERE]}")
        body: dict[str, PyTree] = {
            "layout_version": LAYOUT_VERSION,
            "step": int(step),
            "prng_implementation": jax.random.key_impl(jax.random.key(0)),
            "belongs_to": dict(owners),
            "metadata": dict(metadata or {}),
        }
        try:
            text = json.dumps(body)
        except (TypeError, ValueError) as error:
            raise TypeError(f"checkpoint: metadata must be what JSON can hold: {error}.") from error
        leaves = {parts: as_saved(leaf, joined(parts)) for parts, leaf in flattened(logical(tree)).items()}
        # As a load will see it (keys are texts); what JSON cannot hold is an error now, not after an hour of writing.
        return Contents(leaves, json.loads(text))

    def in_memory(self) -> Contents:
        """Contents with copies that no step changes, in process 0; elsewhere the arrays are left out.

        All processes call this: they send each other what they hold.
        """
        return Contents({parts: (copied(array), prng) for parts, (array, prng) in self.leaves.items()}, self.body)


def write(path: Path, contents: Contents) -> None:
    """Writes a checkpoint; all processes call this.

    Raises: FileExistsError, OSError: as `save`.
    """
    if agreed(path.exists()):
        raise already_there(path)
    failure = written(path, contents)
    if agreed(failure is not None):
        raise failure or OSError(f"checkpoint {path}: process 0 could not write it; its own error says why.")


def written(path: Path, contents: Contents, *, show: bool | None = None) -> OSError | None:
    """Writes a checkpoint, and returns why that could not be done.

    Args:
      path: the checkpoint's folder.
      contents: arrays anywhere; all processes call this, unless the arrays are `in_memory`.
      show: the progress, see `rsembed.progress`.
    """
    partial, failure = None, None
    with contextlib.ExitStack() as cleanup:
        if jax.process_index() == 0:
            partial, failure = _partial_folder(path)
            cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
        arrays = [array for array, _ in contents.leaves.values()]
        entries, problem = write_arrays(None if failure else partial, arrays, show=show)
        failure = failure or problem
        if partial is not None and failure is None:
            for entry, (parts, (_, prng)) in zip(entries, contents.leaves.items(), strict=True):
                entry |= {"path": list(parts), "prng": prng}
            failure = _published(partial, path, encoded(contents.body | {"arrays": entries}))
    return failure


def agreed(said: Said) -> Said:
    """The value of process 0, returned in every process."""
    return type(said)(multihost_utils.broadcast_one_to_all(np.asarray(said))) if jax.process_count() > 1 else said


def already_there(path: Path) -> FileExistsError:
    """The error for a save to a path that already has a checkpoint."""
    return FileExistsError(f"{path} exists; checkpoints are never replaced: give every step a folder of its own.")


def _partial_folder(path: Path) -> tuple[Path, OSError | None]:
    """A hidden folder of this save alone, and why it could not be made.

    Those that interrupted saves of the path left behind go.
    """
    for torn in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        if _is_abandoned(torn):
            shutil.rmtree(torn, ignore_errors=True)
    partial = hidden_beside(path)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        return partial, error
    return partial, None


def hidden_beside(path: Path) -> Path:
    """A hidden path beside `path` with the host and process that write there; no checkpoint has such a name."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{_PROCESS}-{secrets.token_hex(4)}.partial")


_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_PROCESS = secrets.token_hex(4)  # process numbers come again: in a container, every time it starts


def _is_abandoned(partial: Path) -> bool:
    """Whether the process that wrote a partial folder has ended; False for a process of another machine."""
    host, *rest = partial.name.split(".")[-2].split("-")
    if host != _HOST or len(rest) != 3:
        return False
    process_id, process, _ = rest
    if int(process_id) == os.getpid():
        return process != _PROCESS
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _published(partial: Path, path: Path, manifest_bytes: bytes) -> OSError | None:
    """Renames a complete folder to its final name; returns the error if that failed."""
    try:
        with open(partial / MANIFEST, "wb") as file:
            file.write(manifest_bytes)
            os.fsync(file.fileno())
        _sync_folder(partial)
        partial.rename(path)  # fails where another save of the path was faster
        _sync_folder(path.parent)
    except OSError as error:
        return already_there(path) if path.exists() and partial.exists() else error
    return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoint(NamedTuple):
    """A loaded checkpoint.

    Attributes:
      tree: the arrays.
      step: as given to `save`.
      metadata: as given to `save`.
    """

    tree: PyTree
    step: int
    metadata: dict[str, PyTree]


@validated
def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *,
    step: NonNegativeInt = 0,
    metadata: Mapping[str, PyTree] | None = None,
) -> None:
    """Writes a checkpoint folder; it appears complete or not at all.

    With several processes all call this with the same tree, on storage that process 0 can write: it gathers arrays
    chunk by chunk and writes them. Of several savers of one path the first to finish has it, the others get an error.

    Args:
      path: a folder that does not exist yet, such as `runs/a/step_001000`.
      tree: any pytree of numpy or JAX arrays, numbers and PRNG keys, of one instant. An `EmbeddingState` in it is
        written as `tables/<table>` and `slots/<table>/<slot>`, rows in the order of ids.
      step: number of updates behind the tree; `latest` compares it.
      metadata: values that JSON can hold.

    Raises:
      FileExistsError: `path` exists.
      OSError: the storage cannot take it; nothing is left of it.
      TypeError: a leaf is no array of numbers, or more than that (a mask, fields), or `metadata` no JSON.
      ValueError: two leaves have the same name, or part of the state in the tree is elsewhere.
    """
    write(Path(path), Contents.of(tree, belongings(tree), step=step, metadata=metadata))


@validated
def load(path: str | os.PathLike[str], like: PyTree = None) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Args:
      path: the folder.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the wanted structure and, if they have one, sharding,
        which may be another one than at the time of the save. An `EmbeddingState` in it, such as
        `collection.template`, gets the rows of its tables wherever they lie with it. None returns nested dicts of numpy
        arrays, in which positions and field names are keys.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CorruptCheckpointError: a byte differs from what was written; names file, chunk, array and rows.
      ValueError: it does not match `like` (names the arrays, or what their tables differ in), or a newer version of
        the library wrote it.
      TypeError: `like` is a collection.
    """
    if isinstance(like, EmbeddingCollection):
        raise TypeError("load: like must be a tree, such as collection.template; load_collection takes a collection.")
    path = Path(path)
    found = manifest(path)
    if like is None:
        return Checkpoint(nested(path, found["arrays"]), found["step"], found["metadata"])
    owners = belongings(like)
    check_owners(path, {name: found["belongs_to"].get(name) for name in owners}, owners)
    tree = with_states(like, restored(path, found["arrays"], logical(like)))
    return Checkpoint(tree, found["step"], found["metadata"])


def check_owners(path: Path, found: Mapping[str, PyTree], wanted: Mapping[str, PyTree]) -> None:
    """Raises: ValueError: the fingerprint of the saved tree or collection differs from the expected one."""
    check_same(
        Fingerprint.of(found),
        Fingerprint.of(wanted),
        what=f"checkpoint {path} does not match",
        way_out="Load it into what it was saved from, or take over tables alone: load(path).tree has them as arrays, "
        "and collection.with_tables takes them.",
    )


@validated
def verify(path: str | os.PathLike[str]) -> None:
    """Reads every byte of a checkpoint, a few MiB at a time.

    Raises: FileNotFoundError, CorruptCheckpointError, ValueError: as `load`.
    """
    path = Path(path)
    for array in opened(path, manifest(path)["arrays"]).values():
        if isinstance(array, SavedArray):
            for _ in array.blocks():
                pass


@validated
def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the highest step, or None.

    Interrupted saves do not count; a checkpoint whose manifest is damaged is passed over with a warning.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for step in (9, 10):
      ...         save(f"{folder}/step_{step}", {"x": jnp.arange(3)}, step=step)
      ...     latest(folder).name, load(latest(folder)).tree["x"].tolist()
      ('step_10', [0, 1, 2])
    """
    steps: dict[Path, int] = {}
    for file in sorted(Path(folder).glob(f"*/{MANIFEST}")):
        if file.parent.name.startswith("."):
            continue
        try:
            steps[file.parent] = manifest(file.parent)["step"]
        except (OSError, ValueError) as error:
            warnings.warn(f"{file.parent} is passed over: {error}", stacklevel=2)
    return max(steps, key=lambda path: steps[path], default=None)
