"""Saves and loads checkpoints of any pytree, and of embedding collections by table name.

```
checkpoint/
  manifest.json   names, shapes, dtypes, step, fingerprints of states, checksums
  0000/ ...       one zarr array each: the rows in order, in chunks of about 4 MiB
```

A checkpoint is complete or does not exist, because a save writes to a hidden folder, syncs the
folder to the disk and renames it. A save never replaces a checkpoint. A load verifies every byte,
and the error for a damaged file names the file or the array.

A state of embedding tables, anywhere in the tree, is written by table name with rows in id order
(see `states`), so the files of a checkpoint do not depend on stacking, mesh or number of processes.
TensorStore reads and writes the arrays, and other zarr readers can open them.
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
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rsembed import opaque
from rsembed.checkpoint.arrays import (
    ArrayToSave,
    as_saved,
    copied,
    new_entry,
    open_array,
    write_arrays,
)
from rsembed.checkpoint.entries import Body, Entry, check_body, refuse
from rsembed.checkpoint.resizing import accepted_facts, resized
from rsembed.checkpoint.states import (
    CorruptCheckpointError,
    Facts,
    Leaf,
    LeafPath,
    SavedArray,
    Tables,
    Template,
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
from rsembed.collection.host_stack import FIRST_KEY
from rsembed.fingerprint import ELSEWHERE, Fingerprint, check_same
from rsembed.parallel.agreement import check_not_forked

LAYOUT_VERSION = 4
MANIFEST = "manifest.json"
Metadata = Mapping[str, Any]
"""Mapping from names to values that can be encoded as JSON."""
Others: TypeAlias = PyTree
"""Any pytree that is saved with a state, such as dense parameters and their optimizer state."""


@validated
def manifest(path: str | os.PathLike[str]) -> Body:
    """The verified manifest of a checkpoint, with `step`, `metadata`, `arrays` and other entries.

    `manifest` reads only the file `manifest.json`, and no array.

    Raises: FileNotFoundError, CorruptCheckpointError, ValueError: see `load`.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        why = f"it has no {MANIFEST}. An interrupted save leaves none"
        raise FileNotFoundError(f"{path} is no checkpoint: {why}.")
    data = file.read_bytes()
    try:
        body = json.loads(data)["manifest"]
        version = body["layout_version"]
        is_intact = encoded(body) == data and isinstance(version, int)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CorruptCheckpointError(f"{file} is not what was written; take an older checkpoint.")
    if version != LAYOUT_VERSION:
        raise ValueError(
            f"{path} has layout {version}, but this version of rsembed reads layout "
            f"{LAYOUT_VERSION}; read it with the version that wrote it."
        )
    check_body(file, body)
    return body


def encoded(body: Body) -> bytes:
    """Manifest and its checksum as JSON bytes.

    To verify a manifest, a load encodes it again and compares the bytes with the file.
    """
    checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    document = {"crc32": f"{checksum:08x}", "manifest": body}
    return json.dumps(document, sort_keys=True, indent=1).encode()


def opened(folder: Path, entries: Sequence[Entry]) -> dict[LeafPath, Leaf]:
    """Opens the arrays of the given manifest entries. Returns a dictionary from paths to arrays.

    Arrays of PRNG keys and arrays of `rsembed.opaque` are loaded into memory. Arrays of plain
    numbers become `SavedArray`s, which read rows from the disk on demand.
    """
    arrays: dict[LeafPath, Leaf] = {}
    for entry in entries:
        path = tuple(entry["path"])
        name = joined(path)
        array = open_array(folder, entry, name)
        arrays[path] = array
        if entry["prng"] is None:
            continue
        key_data = jnp.asarray(array.whole())
        try:
            implementation = opaque.implementation(entry["prng"])
            arrays[path] = jax.random.wrap_key_data(key_data, impl=implementation)
        except (TypeError, ValueError) as error:
            refuse(folder / MANIFEST, f"{name!r} holds no PRNG keys of {entry['prng']!r}: {error}")
    return arrays


def nested(arrays: Mapping[LeafPath, Leaf], folder: Path) -> PyTree:
    """Loads arrays into host memory, as nested dictionaries.

    Each part of a path becomes a dictionary key.

    Raises: CorruptCheckpointError: the path of an array is a prefix of another array's path.
    """
    from flax.traverse_util import unflatten_dict

    for path in arrays:
        for length in range(len(path)):
            if path[:length] in arrays:
                shorter = joined(path[:length])
                why = f"{shorter!r} is an array, and so is {joined(path)!r}"
                refuse(folder / MANIFEST, why)
    leaves = {path: in_memory(array) for path, array in arrays.items()}
    if () in leaves:
        return leaves[()]
    return unflatten_dict(leaves)


class Contents(NamedTuple):
    """Contents of a checkpoint, collected before the checkpoint is written.

    Attributes:
      arrays: arrays to write, from `as_saved`.
      body: the manifest. `write_arrays` adds the checksums of the files to its list of arrays.
    """

    arrays: list[ArrayToSave]
    body: Body

    @staticmethod
    def of(tree: PyTree, owners: Facts, *, step: int, metadata: Metadata | None) -> Contents:
        """Contents of the checkpoint that `save` writes for a tree.

        Args:
          tree: tree to save, see `save`.
          owners: metadata of the tables that the arrays in `tree` belong to, from `belongings`. A
            load compares the saved metadata of the tables with the metadata of the template.
          step: number of updates done so far.
          metadata: values that can be encoded as JSON, see `save`.

        Raises: TypeError, ValueError: see `save`.
        """
        check_not_forked("checkpoint")
        for name, facts in owners.items():
            if ELSEWHERE in facts:
                raise ValueError(f"checkpoint: {name!r} is not whole: {facts[ELSEWHERE]}")
        body = {
            "layout_version": LAYOUT_VERSION,
            "step": int(step),
            "belongs_to": dict(owners),
            "metadata": dict(metadata or {}),
        }
        # Encode the metadata as JSON before the arrays are written: an error should not come after
        # an hour of writing. Decoding the JSON makes `body` equal to the body that a load will
        # read, for example with strings as dictionary keys.
        try:
            body = json.loads(json.dumps(body))
        except (TypeError, ValueError) as error:
            raise TypeError(f"checkpoint: metadata must be what JSON can hold: {error}.") from error
        arrays: list[ArrayToSave] = []
        entries = []
        for path, leaf in flattened(logical(tree)).items():
            array, prng = as_saved(leaf, joined(path))
            entries.append(new_entry(len(arrays), path, array, prng))
            arrays.append(array)
        return Contents(arrays, body | {"arrays": entries})

    def in_memory(self) -> Contents:
        """The contents with copies of all arrays in the memory of process 0.

        A training step that donates the original arrays does not change the copies. All processes
        must call `in_memory`, because together they gather the arrays. Process 0 gets the copies,
        and every other process gets None in place of each array.
        """
        copies: list[Any] = []
        for entry, array in zip(self.body["arrays"], self.arrays, strict=True):
            copies.append(copied(entry, array))
        return Contents(copies, self.body)


def write(path: Path, contents: Contents) -> None:
    """Writes a checkpoint.

    All processes must call `write`.

    Raises: FileExistsError, OSError: see `save`.
    """
    if from_first_process(path.exists()):
        raise already_exists(path)
    with same_error_everywhere(path):
        write_folder(path, contents)


@contextlib.contextmanager
def same_error_everywhere(path: Path) -> Iterator[None]:
    """Context manager that raises an error in all processes if its block fails in process 0."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if from_first_process(failure is not None) or failure is not None:
        raise failure or OSError(f"{path}: process 0 could not write; its own error says why.")


def write_folder(path: Path, contents: Contents) -> None:
    """Writes the folder of a checkpoint. If the write fails, no folder remains.

    Args:
      path: folder of the checkpoint.
      contents: contents to write. All processes must call `write_folder`, unless the contents are
        `in_memory`.

    Raises: FileExistsError, OSError: in process 0, see `save`.
    """
    partial = None
    if jax.process_index() == 0:
        partial = partial_path(path)
    try:
        write_arrays(partial, contents.body["arrays"], contents.arrays)
        if partial is None:
            return
        with open(partial / MANIFEST, "wb") as file:
            file.write(encoded(contents.body))
            os.fsync(file.fileno())
        _sync_folder(partial)
        try:
            partial.rename(path)
        except OSError:
            if path.exists():  # Another save created `path`.
                raise already_exists(path) from None
            raise
        _sync_folder(path.parent)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def from_first_process(number: int) -> int:
    """Broadcasts `number` (or a truth value) from process 0 to all processes, and returns it.

    All processes must call `from_first_process`.
    """
    return int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def already_exists(path: Path) -> FileExistsError:
    """Error for a save to a path that already has a checkpoint."""
    return FileExistsError(
        f"{path} exists; checkpoints are never replaced: give every step a folder of its own. Go on "
        "from what is there with checkpoint.load or load_collection, or remove it; a "
        "CheckpointManager names the folders by step, and its restore goes on from the newest."
    )


def partial_path(path: Path) -> Path:
    """A hidden path beside `path`, with a random part in its name, for an unfinished checkpoint."""
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
      tree: loaded arrays, in the structure of `like`, or in nested dictionaries if `like` is None.
      step: the `step` that the caller passed to `save`: the number of updates before the save.
      metadata: the `metadata` that the caller passed to `save`.
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
    metadata: Metadata | None = None,
) -> None:
    """Writes the folder of a checkpoint. If the save fails, no folder remains.

    In a run of several processes, all processes must call `save` with the same tree. Process 0
    gathers the arrays chunk by chunk and writes them, so `path` must be on storage that process 0
    can write. If two saves use the same path, the save that finishes first succeeds, and the other
    save raises an error. If the process is killed during a save, a hidden folder
    `.<name>.<number>.partial` remains, which you can remove.

    Args:
      path: a folder that does not exist yet, such as `runs/a/step_001000`.
      tree: any pytree of numpy or JAX arrays, numbers and PRNG keys, all from the same step. An
        `EmbeddingState` in the tree is written as `tables/<table>` and `slots/<table>/<slot>`, with
        rows in id order.
      step: number of updates done so far.
      metadata: values that can be encoded as JSON.

    Raises:
      FileExistsError: `path` exists.
      OSError: the checkpoint cannot be written to the disk.
      TypeError: a leaf is not a plain array of numbers (for example, it is a masked or structured
        array), or `metadata` cannot be encoded as JSON.
      ValueError: two leaves have the same path, or an `EmbeddingState` in the tree does not contain
        the rows of all its tables, because some tables are keyed or on the host. Save keyed tables
        and tables on the host with `save_collection`.
    """
    write(Path(path), Contents.of(tree, belongings(tree), step=step, metadata=metadata))


@validated
def load(path: str | os.PathLike[str], like: Template = None) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Args:
      path: folder of the checkpoint.
      like: template for the result, a pytree of arrays or `jax.ShapeDtypeStruct`s. A loaded array
        has the sharding of its template, which may differ from the saved sharding. An
        `EmbeddingState` in the template, such as `collection.template`, defines the layout that the
        saved rows are loaded into. By default, the result has nested dictionaries of numpy arrays.
        List indices and field names become dictionary keys, as strings.

    Raises:
      FileNotFoundError: `path` has no checkpoint.
      CorruptCheckpointError: a file is missing or damaged. The error message names the file and,
        for damaged rows, the chunk, the array and the rows.
      ValueError: the checkpoint does not match `like` (the message names the arrays, or the
        differences of the tables), or another version of rsembed wrote the checkpoint.
      TypeError: `like` is an `EmbeddingCollection`, which only `load_collection` accepts.
    """
    if isinstance(like, EmbeddingCollection):
        way_out = "load_collection takes a collection"
        raise TypeError(f"load: like must be a tree, such as collection.template; {way_out}.")
    path = Path(path)
    body = manifest(path)
    if like is None:
        tree = nested(opened(path, body["arrays"]), path)
    else:
        owners = belongings(like)
        saved_owners = {name: body["belongs_to"].get(name) for name in owners}
        check_owners(path, saved_owners, owners)
        arrays = restored(opened(path, body["arrays"]), logical(like), path)
        tree = with_states(like, arrays)
    return Checkpoint(tree, body["step"], body["metadata"])


@validated
def save_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    others: Others = None,
    metadata: Metadata | None = None,
) -> None:
    """Saves the tables and slots of a state by table name, with its step, PRNG key and `others`.

    The arrays of the checkpoint are `tables/<table>`, `slots/<table>/<slot>`, `key` and
    `others/...`. The rows of a table are saved in id order, on any mesh and for tables on the host.
    A keyed table is saved as `tables/<table>/keys`, `tables/<table>/values` and further arrays with
    one value per key, such as `last_step`. A tensor-train table is saved as its cores.

    Args:
      path: see `save`.
      collection: collection that the state belongs to.
      state: state of the collection, with all arrays from the same step.
      others: any pytree, such as dense parameters and their optimizer state.
      metadata: values that can be encoded as JSON. `manifest(path)["metadata"]["user"]` is the
        saved metadata.

    Raises:
      ValueError: the state does not belong to the collection.
      FileExistsError, OSError, TypeError: see `save`.
    """
    write(Path(path), contents_of(collection, state, others=others, metadata=metadata))


def contents_of(
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    others: Others,
    metadata: Metadata | None,
) -> Contents:
    """Contents of the checkpoint that `save_collection` writes."""
    collection.check_state(state)
    owners = {"tables": tables_of(collection.layout)}
    state = state._replace(layout=collection.layout)
    arrays, tables, slots = collection.logical.parted(state)
    tree = logical(arrays) | {"others": others}
    del tree["step"]  # The step is stored in the manifest, not as an array.
    tree["tables"] |= tables
    tree["slots"] |= slots
    user_metadata = {"user": dict(metadata or {})}
    return Contents.of(tree, owners, step=int(state.step), metadata=user_metadata)


Resize = bool | Literal["shrink"]


@validated
def load_collection(
    path: str | os.PathLike[str],
    collection: EmbeddingCollection,
    *,
    others: Others = None,
    resize: Resize = False,
) -> PyTree:
    """Loads the state of a saved collection, for a collection with the same tables.

    Stacking, mesh and placement of the saved collection and of `collection` may differ.

    Args:
      path: see `load`.
      collection: collection with the same tables as the saved collection. Learning rates and other
        hyperparameters are taken from `collection`, not from the checkpoint.
      others: template for the saved `others`, see `like` of `load`. By default, the saved `others`
        are not read.
      resize: whether tables may differ from the checkpoint in size or dtype. With `resize=False`,
        the default, a different size or dtype is an error, because a wrong size is usually a
        mistake. With `resize=True`, a table may have more rows or another dtype than in the
        checkpoint. With `resize="shrink"`, a table may have more or fewer rows or another dtype,
        and extra rows at the end of the saved table are not loaded. New rows and their slots have
        the initial values of `collection.init(state.key)` for the returned `state`. If the dtype of
        a table is narrower than in the checkpoint, the saved values are rounded to nearest. A keyed
        table with enough rows loads all saved keys, whatever `resize` is. To resize a tensor train,
        pass the old `tt_p_shapes` with a different first number.

    Returns: the `EmbeddingState`, or with `others` a pair of the state and the loaded `others`.

    Raises:
      CorruptCheckpointError, FileNotFoundError: see `load`.
      ValueError: the collection has other tables than the checkpoint, a table has a different
        storage or optimizer, `resize` does not allow the size or dtype of a table, or a saved
        number is too large for the dtype of its table.
    """
    path = Path(path)
    body = manifest(path)
    template = collection.template
    saved_facts = body["belongs_to"].get("tables", {})
    expected_facts = tables_of(collection.layout)
    if not isinstance(saved_facts, dict):
        refuse(path / MANIFEST, f"tables of belongs_to must be an object, got {saved_facts!r:.60}")
    facts = saved_facts
    if resize:
        shrinks = resize == "shrink"
        specs = collection.table_specs
        facts = accepted_facts(saved_facts, specs, expected_facts, shrinks=shrinks)
    check_owners(path, {"tables": facts}, {"tables": expected_facts})

    entries = body["arrays"]
    if others is None:
        entries = [entry for entry in entries if entry["path"][:1] != ["others"]]
    arrays = opened(path, entries)
    key = arrays.pop(("key",), None)
    if not is_one_key(key):
        refuse(path / MANIFEST, "the array 'key' must be one PRNG key")
    if body["step"] > np.iinfo(np.int32).max:
        refuse(path / MANIFEST, f"step must fit 32 bits, got {body['step']}")
    if resize:
        arrays = resized(arrays, collection.table_specs, key)

    without_apart = collection.logical.without_apart(template)
    like = logical(without_apart) | {"others": logical(others)}
    del like["step"]  # The step is stored in the manifest, not as an array.
    del like["key"]  # The saved key may have any PRNG implementation.
    # Keyed tables and tables on the host are loaded separately. There is no template for the arrays
    # of a keyed table, because only the checkpoint tells how many keys the table has.
    names_apart = collection.table_specs.keys() - like["tables"].keys()
    tables_apart = nested(_pop_tables(arrays, names_apart), path)
    check_apart(path, collection, tables_apart)
    tree = restored(arrays, like, path)
    tree["key"] = placed(key, template.key)
    tree["step"] = placed(np.asarray(body["step"], np.int32), template.step)
    state = with_states(without_apart, tree)
    if collection.logical.apart:
        tables = tables_apart.get("tables", {})
        slots = tables_apart.get("slots", {})
        try:
            state = collection.logical.whole(state, tables, slots, collection.layout)
        except ValueError as error:  # Add the path, because the message of `error` lacks it.
            raise ValueError(f"checkpoint {path} does not match: {error}") from error
    if others is None:
        return state
    return state, with_states(others, tree["others"])


def _pop_tables(arrays: dict[LeafPath, Leaf], names: set[str]) -> dict[LeafPath, Leaf]:
    """Removes the values and slots of the tables `names` from `arrays`, and returns them."""
    prefixes = set()
    for name in names:
        prefixes |= {("tables", name), ("slots", name)}
    popped = {}
    for path in list(arrays):
        if path[:2] in prefixes:
            popped[path] = arrays.pop(path)
    return popped


def is_one_key(array: Leaf) -> bool:
    """True if `array` is a single PRNG key."""
    if not isinstance(array, jax.Array):
        return False
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return is_key and array.shape == ()


def check_apart(path: Path, collection: EmbeddingCollection, arrays: Tables) -> None:
    """Checks that `arrays` has all arrays of the keyed tables and of the tables on the host.

    Raises: CorruptCheckpointError: an array of a table is missing. The error message names the
      manifest file and the table.
    """
    tables = arrays.get("tables", {})
    slots = arrays.get("slots", {})
    for stack in collection.logical.apart.values():
        for table in stack.tables:
            parts = tables.get(table.name)
            if stack.storage.takes_keys:
                has_arrays = isinstance(parts, dict) and is_one_key(parts.get(FIRST_KEY))
                for name in ("keys", "values"):
                    has_arrays = has_arrays and isinstance(parts.get(name), np.ndarray)
                wanted = f"arrays keys, values and a PRNG {FIRST_KEY}"
            else:
                has_slots = isinstance(slots.get(table.name, {}), dict)
                has_arrays = isinstance(parts, np.ndarray) and has_slots
                wanted = "one array of rows, and slots by name"
            if not has_arrays:
                refuse(path / MANIFEST, f"table {table.name!r} must have {wanted}")


def check_owners(path: Path, saved: Facts, expected: Facts) -> None:
    """Checks that a checkpoint was saved from the tables that the tree or collection expects.

    Raises: ValueError: the metadata of the tables differ. The error message lists the first
      differences.
    """
    check_same(
        Fingerprint.of(saved),
        Fingerprint.of(expected),
        what=f"checkpoint {path} does not match",
        way_out="Load it into what it was saved from. load_collection(..., resize=True) takes "
        "another size or dtype of a table. To take over tables and slots alone, load(path).tree has "
        "them as arrays (keys and trains: collection.tables of what it was saved from), and "
        "collection.with_tables(state, tables, slots=slots) takes them.",
    )


@validated
def verify(path: str | os.PathLike[str]) -> None:
    """Reads every byte of a checkpoint and compares the checksums.

    Arrays of plain numbers are read chunk by chunk, with about 16 MiB in memory at the same time.

    Raises: FileNotFoundError, CorruptCheckpointError, ValueError: see `load`.
    """
    path = Path(path)
    arrays = opened(path, manifest(path)["arrays"])
    for array in arrays.values():
        if isinstance(array, SavedArray):
            for _ in array.blocks():
                pass
