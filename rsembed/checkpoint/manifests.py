"""What a checkpoint says of itself: a text with its own checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rsembed.checkpoint.arrays import check_entry
from rsembed.checkpoint.saved import CorruptCheckpointError
from rsembed.checks import validated

LAYOUT_VERSION = 3
MANIFEST = "manifest.json"


@validated
def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
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


def encoded(body: Mapping[str, Any]) -> bytes:
    """The manifest with its checksum, always with the same bytes, so that a load can compare them all."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    return json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1).encode()


def flattened(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves by their path."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {_parts(keys): leaf for keys, leaf in found}
    if len(leaves) < len(found):
        names = [joined(_parts(keys)) for keys, _ in found]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of the tree are called {repeated}; give them keys that differ as text.")
    return leaves


def _parts(keys: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def joined(parts: Sequence[str]) -> str:
    """A path in one word."""
    return "/".join(parts) or "the array"
