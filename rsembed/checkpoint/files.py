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

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rsembed.checkpoint.manifests import MANIFEST, manifest
from rsembed.checkpoint.reading import nested, opened, restored
from rsembed.checkpoint.saved import SavedArray
from rsembed.checkpoint.states import belongings, logical, with_states
from rsembed.checkpoint.writing import Contents, write
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection import EmbeddingCollection
from rsembed.fingerprint import Fingerprint, check_same


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


@validated
def save(
    path: str | os.PathLike[str], tree: Any, *, step: NonNegativeInt = 0, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes a checkpoint folder; it appears complete or not at all.

    With several processes all call this with the same tree, on storage that process 0 can write: it gathers arrays
    chunk by chunk and writes them. Of several savers of one path the first to finish has it, the others get an error.

    Args:
      path: a folder that does not exist yet, such as `runs/a/step_001000`.
      tree: any pytree of numpy or JAX arrays, numbers and PRNG keys, of one instant. An `EmbeddingState` in it is
        written as `tables/<table>` and `slots/<table>/<slot>`, rows in the order of ids.
      step: number of updates behind the tree; `latest` compares it.
      metadata: what JSON can hold.

    Raises:
      FileExistsError: `path` exists.
      OSError: the storage cannot take it; nothing is left of it.
      TypeError: a leaf is no array of numbers, or more than that (a mask, fields), or `metadata` no JSON.
      ValueError: two leaves have the same name, or part of the state in the tree is elsewhere.
    """
    write(Path(path), Contents.of(tree, belongings(tree), step=step, metadata=metadata))


@validated
def load(path: str | os.PathLike[str], like: Any = None) -> Checkpoint:
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


def check_owners(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises: ValueError: what was saved belongs to something else than what is wanted."""
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
