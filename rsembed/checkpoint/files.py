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
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rsembed import opaque
from rsembed.checkpoint.arrays import as_saved, copied, open_array, write_arrays
from rsembed.checkpoint.entries import check_body, refuse
from rsembed.checkpoint.resizing import accepted_facts, resized
from rsembed.checkpoint.states import (
    CorruptCheckpointError,
    SavedArray,
    belongings,
    flattened,
    in_memory,
    joined,
    logical,
    placed,
    restored,
    tables_of,
    with_states,
)
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection import EmbeddingCollection, EmbeddingState
from rsembed.collection.stack import FIRST_KEY
from rsembed.fingerprint import ELSEWHERE, Fingerprint, check_same
from rsembed.parallel.agreement import check_not_forked

LAYOUT_VERSION = 4
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
        is_intact = encoded(body) == data
    except (ValueError, KeyError, TypeError, RecursionError):
        is_intact = False
    if not is_intact or not isinstance(body, dict) or not isinstance(body.get("layout_version"), int):
        raise CorruptCheckpointError(f"{file} is not what was written; take an older checkpoint.")
    if body["layout_version"] != LAYOUT_VERSION:
        raise ValueError(
            f"{path} has layout {body['layout_version']}, but this version of rsembed reads layout "
            f"{LAYOUT_VERSION}; read it with the version that wrote it."
        )
    check_body(file, body)
    return body


def encoded(body: Mapping[str, PyTree]) -> bytes:
    """The manifest with its checksum as bytes; equal manifests give equal bytes, which a load compares."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    return json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1).encode()


def opened(path: Path, entries: Sequence[Mapping[str, PyTree]]) -> dict[tuple[str, ...], Any]:
    """Arrays of some manifest entries by path, still on disk except PRNG keys and opaque numbers."""
    arrays = {}
    for entry in entries:
        name = joined(entry["path"])
        array: PyTree = open_array(path, entry, name)
        if entry["prng"] is not None:
            try:
                key_data = jnp.asarray(array.whole())
                array = jax.random.wrap_key_data(key_data, impl=opaque.implementation(entry["prng"]))
            except (TypeError, ValueError) as error:
                if isinstance(error, CorruptCheckpointError):
                    raise
                refuse(path / MANIFEST, f"{name!r} holds no PRNG keys of {entry['prng']!r}: {error}")
        arrays[tuple(entry["path"])] = array
    return arrays


def nested(arrays: Mapping[tuple[str, ...], PyTree], path: Path) -> PyTree:
    """Arrays of a file, in memory, in dictionaries by the parts of their names.

    Raises: CorruptCheckpointError: an array has the name of a dictionary with others.
    """
    from flax.traverse_util import unflatten_dict

    for parts in arrays:
        for length in range(len(parts)):
            if parts[:length] in arrays:
                names = joined(parts[:length]), joined(parts)
                refuse(path / MANIFEST, f"{names[0]!r} is an array, and so is {names[1]!r}")
    found = {parts: in_memory(array) for parts, array in arrays.items()}
    return found[()] if () in found else unflatten_dict(found)


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
    with raised_alike(path):
        write_folder(path, contents)


@contextlib.contextmanager
def raised_alike(path: Path) -> Iterator[None]:
    """Raises in all processes what went wrong inside the block in process 0, which writes into the path."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if agreed(failure is not None) or failure is not None:
        raise failure or OSError(f"{path}: process 0 could not write; its own error says why.")


def write_folder(path: Path, contents: Contents) -> None:
    """Writes a complete checkpoint folder, or nothing.

    Args:
      path: the checkpoint's folder.
      contents: arrays anywhere; all processes call this, unless the arrays are `in_memory`.

    Raises: FileExistsError, OSError: in process 0, as `save`.
    """
    partial = hidden_beside(path) if jax.process_index() == 0 else None
    try:
        entries = write_arrays(partial, [array for array, _ in contents.leaves.values()])
        if partial is None:
            return
        for entry, (parts, (_, prng)) in zip(entries, contents.leaves.items(), strict=True):
            entry |= {"path": list(parts), "prng": prng}
        with open(partial / MANIFEST, "wb") as file:
            file.write(encoded(contents.body | {"arrays": entries}))
            os.fsync(file.fileno())
        _sync_folder(partial)
        try:
            partial.rename(path)
        except OSError:
            if path.exists():  # another save of the path was faster
                raise already_there(path) from None
            raise
        _sync_folder(path.parent)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def agreed(number: int) -> int:
    """The number, or truth value, that process 0 gave, in every process."""
    return int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def already_there(path: Path) -> FileExistsError:
    """The error for a save to a path that already has a checkpoint."""
    return FileExistsError(
        f"{path} exists; checkpoints are never replaced: give every step a folder of its own. Go on from what is there "
        "with checkpoint.load or load_collection, or remove it; a CheckpointManager names the folders by step, and its "
        "restore goes on from the newest."
    )


def hidden_beside(path: Path) -> Path:
    """A hidden path beside `path` that nobody else has; no checkpoint has such a name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


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
    One that is killed leaves a hidden folder `.<name>.<number>.partial`, which nobody needs.

    Args:
      path: a folder that does not exist yet, such as `runs/a/step_001000`.
      tree: any pytree of numpy or JAX arrays, numbers and PRNG keys, of one instant. An `EmbeddingState` in it is
        written as `tables/<table>` and `slots/<table>/<slot>`, rows in the order of ids.
      step: number of updates behind the tree.
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
        return Checkpoint(nested(opened(path, found["arrays"]), path), found["step"], found["metadata"])
    owners = belongings(like)
    check_owners(path, {name: found["belongs_to"].get(name) for name in owners}, owners)
    tree = with_states(like, restored(opened(path, found["arrays"]), logical(like), path))
    return Checkpoint(tree, found["step"], found["metadata"])


@validated
def save_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    others: PyTree = None,
    metadata: Mapping[str, PyTree] | None = None,
) -> None:
    """Saves every table and its slots by table name, with step and key, and what else belongs to the instant.

    The arrays are `tables/<table>`, `slots/<table>/<slot>`, `key` and `others/...`. Rows are in the order of ids,
    whatever mesh they lie on, and whether on the device or on the host. A table with keys has `tables/<table>/keys`,
    `.../values` and what else belongs to each key; a tensor train its cores.

    Args:
      path: see `save`.
      collection: whose state it is.
      state: of one instant.
      others: any pytree, such as dense parameters and their optimizer state.
      metadata: what JSON can hold; `manifest(path)["metadata"]["user"]` returns it.

    Raises:
      ValueError: the state is not this collection's.
      FileExistsError, OSError, TypeError: as `save`.
    """
    write(Path(path), contents_of(collection, state, others=others, metadata=metadata))


def contents_of(
    collection: EmbeddingCollection, state: EmbeddingState, *, others: PyTree, metadata: Mapping[str, PyTree] | None
) -> Contents:
    """Contents of the checkpoint that `save_collection` writes."""
    collection.check_state(state)
    owners = {"tables": tables_of(collection.template)}
    arrays, tables, slots = collection.logical.parted(state._replace(layout=collection.layout))
    tree = logical(arrays) | {"others": others}
    del tree["step"]  # which is the checkpoint's own
    tree["tables"] |= tables
    tree["slots"] |= slots
    return Contents.of(tree, owners, step=int(state.step), metadata={"user": dict(metadata or {})})


Resize = bool | Literal["shrink"]


@validated
def load_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    *,
    others: PyTree = None,
    resize: Resize = False,
) -> PyTree:
    """The state of a saved collection, for one with the same tables, stacked and placed as it may be.

    Args:
      path: see `load`.
      collection: its tables must be those that were saved; learning rates and other hyperparameters are its own.
      others: a template for what was saved as `others`, see `like` of `load`; None leaves that alone.
      resize: True lets tables have more rows than in the file, or another dtype; slots, step and key go on. A new row
        and its slots are those of `collection.init(state.key)`, where `state` is the one that this returns. Values
        are rounded to the nearest of a narrower dtype. "shrink" leaves out rows beyond a smaller `vocabulary_size`,
        too. False, the default, refuses all that, as a wrong size is more often a mistake. Tables with keys take as
        many keys as they have room for in any case, and lose none. A tensor train has a new size where only its first
        row factor differs: give it the old `tt_p_shapes` with another first number.

    Returns: the `EmbeddingState`; with a template, the pair of it and the others.

    Raises:
      CorruptCheckpointError, FileNotFoundError: as `load`.
      ValueError: a table is missing or too many, or has another storage or optimizer, or another size or dtype than
        `resize` allows; or numbers are too large for a narrower dtype.
    """
    path = Path(path)
    found, template = manifest(path), collection.template
    saved, expected = found["belongs_to"].get("tables", {}), tables_of(template)
    if not isinstance(saved, dict):
        refuse(path / MANIFEST, f"tables of belongs_to must be an object, got {saved!r:.60}")
    specs, accepted = collection.table_specs, saved
    if resize:
        accepted = accepted_facts(saved, specs, expected, shrinks=resize == "shrink")
    check_owners(path, {"tables": accepted}, {"tables": expected})
    arrays = collection.logical.without_apart(template)
    like = logical(arrays) | {"others": logical(others)}
    del like["step"], like["key"]  # the step is the checkpoint's own, the key of any implementation
    apart = {table.name for own in collection.logical.apart.values() for table in own.tables}
    entries = [e for e in found["arrays"] if others is not None or e["path"][:1] != ["others"]]
    saved_arrays = opened(path, entries)
    saved_key = saved_arrays.pop(("key",), None)
    if not is_one_key(saved_key):
        refuse(path / MANIFEST, "the array 'key' must be one PRNG key")
    if found["step"] > np.iinfo(np.int32).max:
        refuse(path / MANIFEST, f"step must fit 32 bits, got {found['step']}")
    if resize:
        saved_arrays = resized(saved_arrays, specs, saved, saved_key)
    # How many keys a table has, its file alone knows.
    names = [name for name in saved_arrays if len(name) > 1 and name[0] in ("tables", "slots") and name[1] in apart]
    rows = nested({name: saved_arrays.pop(name) for name in names}, path)
    check_apart(path, collection, rows)
    key = placed(saved_key, template.key)
    step = placed(np.asarray(found["step"], np.int32), template.step)
    tree = restored(saved_arrays, like, path)
    state = with_states(arrays, tree | {"step": step, "key": key})
    if apart:
        try:
            state = collection.logical.whole(state, rows.get("tables", {}), rows.get("slots", {}), collection.layout)
        except ValueError as error:  # which names the table alone
            raise ValueError(f"checkpoint {path} does not match: {error}") from error
    return state if others is None else (state, with_states(others, tree["others"]))


def is_one_key(array: PyTree) -> bool:
    """Whether this is a single PRNG key."""
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return is_key and array.shape == ()


def check_apart(path: Path, collection: EmbeddingCollection, rows: Mapping[str, PyTree]) -> None:
    """Raises: CorruptCheckpointError: arrays of a table with keys, or on the host, are missing; names file, table."""
    tables, slots = rows.get("tables", {}), rows.get("slots", {})
    for stack in collection.logical.apart.values():
        for table in stack.tables:
            found = tables.get(table.name)
            if not stack.storage.takes_keys:
                if not isinstance(found, np.ndarray) or not isinstance(slots.get(table.name, {}), dict):
                    refuse(path / MANIFEST, f"table {table.name!r} must have one array of rows, and slots by name")
                continue
            parts = found if isinstance(found, dict) else {}
            has_arrays = all(isinstance(parts.get(name), np.ndarray) for name in ("keys", "values"))
            if not has_arrays or not is_one_key(parts.get(FIRST_KEY)):
                refuse(path / MANIFEST, f"table {table.name!r} must have arrays keys, values and a PRNG {FIRST_KEY}")


def check_owners(path: Path, found: Mapping[str, PyTree], wanted: Mapping[str, PyTree]) -> None:
    """Raises: ValueError: the fingerprint of the saved tree or collection differs from the expected one."""
    check_same(
        Fingerprint.of(found),
        Fingerprint.of(wanted),
        what=f"checkpoint {path} does not match",
        way_out="Load it into what it was saved from. load_collection(..., resize=True) takes another size or dtype of "
        "a table. To take over tables and slots alone, load(path).tree has them as arrays (keys and trains: "
        "collection.tables of what it was saved from), and collection.with_tables(state, tables, slots=slots) takes "
        "them.",
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
