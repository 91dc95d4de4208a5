"""Writing a checkpoint: to a hidden folder beside, onto the disk, and then its name in one rename."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.checkpoint.arrays import as_saved, copied, write_arrays
from rsembed.checkpoint.manifests import LAYOUT_VERSION, MANIFEST, encoded, flattened, joined
from rsembed.checkpoint.states import logical
from rsembed.fingerprint import ELSEWHERE
from rsembed.parallel.agreement import check_not_forked

Said = TypeVar("Said", bool, int)


class Contents(NamedTuple):
    """What a checkpoint will hold.

    Attributes:
      leaves: arrays by path, each with the implementation of the PRNG keys that it stands for, if any.
      body: of the manifest, but for what is said of the arrays.
    """

    leaves: dict[tuple[str, ...], tuple[Any, str | None]]
    body: dict[str, Any]

    @staticmethod
    def of(tree: Any, owners: Mapping[str, Any], *, step: int, metadata: Mapping[str, Any] | None) -> Contents:
        """Of a tree, of which the caller says what it belongs to.

        Raises: TypeError, ValueError: as `save`.
        """
        check_not_forked("checkpoint")
        for name, facts in owners.items():
            if ELSEWHERE in facts:
                raise ValueError(f"checkpoint: {name!r} is not whole: {facts[ELSEWHERE]}")
        body: dict[str, Any] = {
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
        """The same with copies that no step changes, in process 0; elsewhere the arrays are left out.

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
      path: where.
      contents: with arrays in any place; all processes call this, unless they are `in_memory`.
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
    """What process 0 says."""
    return type(said)(multihost_utils.broadcast_one_to_all(np.asarray(said))) if jax.process_count() > 1 else said


def already_there(path: Path) -> FileExistsError:
    """The error of whoever would write over a checkpoint."""
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
    """A name that no checkpoint has, and that says which process uses it."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{_PROCESS}-{secrets.token_hex(4)}.partial")


_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_PROCESS = secrets.token_hex(4)  # process numbers come again: in a container, every time it starts


def _is_abandoned(partial: Path) -> bool:
    """Whether the process that wrote a partial folder is no more; of another machine's nothing is known."""
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
    """Gives a complete folder its name; why that could not be done."""
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
