"""Tables as other programs keep them: `.npz`, safetensors, and state dicts of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from rsembed.checks import validated

Arrays = dict[str, np.ndarray]
_PART = "."
"""Between the name of a table with keys and those of its arrays."""


@validated
def state_dict(tables: Mapping[str, Any], *, name: str = "{table}.weight") -> Arrays:
    """Tables under the names of another program's parameters.

    Args:
      tables: as `collection.tables` returns them.
      name: where `{table}` stands for a table's: `"embedding_bags.{table}.weight"`, or `"weight"` for a single table.
        Of a table with keys, the names of its arrays follow, as in `user.weight.keys`.

    Raises: ValueError: two tables get one name.

    Example:
      >>> import numpy as np
      >>> list(state_dict({"item": np.zeros((3, 2))}, name="encoder.{table}.weight"))
      ['encoder.item.weight']
    """
    arrays: Arrays = {}
    for table, rows in tables.items():
        own = _named(name, table)
        if isinstance(rows, Mapping):
            arrays |= {f"{own}{_PART}{part}": np.asarray(array) for part, array in rows.items()}
        elif own in arrays:
            raise ValueError(f"name={name!r} gives all of {sorted(tables)} one name; put {{table}} into it.")
        else:
            arrays[own] = np.asarray(rows)
    return arrays


@validated
def tables_of_state_dict(state_dict: Mapping[str, Any], *, name: str = "{table}.weight") -> dict[str, Any]:
    """The inverse of `state_dict`, for `collection.with_tables`: tables by name, those with keys as dictionaries.

    Args:
      state_dict: arrays or torch tensors by name; those that do not fit `name` are left out.
      name: see `state_dict`; without `{table}`, the one table is called "table".

    Raises: ValueError: nothing fits; says which names there are.
    """
    stem = re.escape(name).replace(re.escape("{table}"), r"(?P<table>.+?)", 1)
    pattern = re.compile(stem.replace(re.escape("{table}"), r"(?P=table)") + r"(\.(?P<part>\w+))?")
    tables: dict[str, Any] = {}
    for key, value in state_dict.items():
        if (match := pattern.fullmatch(key)) is None:
            continue
        table = match.groupdict().get("table", "table")
        if match["part"] is None:
            tables[table] = _as_numpy(value)
        else:
            tables.setdefault(table, {})[match["part"]] = _as_numpy(value)
    if not tables:
        raise ValueError(f"no name fits {name!r}; there are {sorted(state_dict)}.")
    return tables


@validated
def export_tables(path: str | os.PathLike[str], tables: Mapping[str, Any], *, name: str = "{table}") -> None:
    """Writes tables into one file that other programs read.

    Args:
      path: ending in `.npz` (numpy; bfloat16 becomes float32, which numpy can name), `.safetensors` (needs the package
        of that name) or `.pt` (needs torch). It takes its name when it is complete; an older file of that name goes.
      tables: as `collection.tables` returns them.
      name: see `state_dict`.

    Raises:
      ImportError: the package for this ending is missing.
      ValueError: another ending.
    """
    path = Path(path)
    write = _format(path)[0]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial, state_dict(tables, name=name))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@validated
def import_tables(path: str | os.PathLike[str], *, name: str = "{table}") -> dict[str, Any]:
    """Tables of a file, for `collection.with_tables`.

    Args:
      path: see `export_tables`; `.pth` and `.bin` are read as `.pt`. Nothing in a file is executed.
      name: see `tables_of_state_dict`.

    Raises: ImportError, ValueError: as `export_tables` and `tables_of_state_dict`.

    Example:
      >>> import tempfile, numpy as np
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     export_tables(f"{folder}/tables.npz", {"item": np.ones((3, 2))})
      ...     import_tables(f"{folder}/tables.npz")["item"].shape
      (3, 2)
    """
    return tables_of_state_dict(_format(Path(path))[1](Path(path)), name=name)


# Formats


def _named(name: str, table: str) -> str:
    return name.replace("{table}", table)


def _as_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, of which numpy takes all dtypes but one
        tensor = value.detach().cpu().contiguous()
        if str(tensor.dtype) == "torch.bfloat16":
            return np.asarray(tensor.view(_needed("torch").int16).numpy()).view(jnp.bfloat16)
        return np.asarray(tensor.numpy())
    return np.asarray(value)


def _format(path: Path) -> tuple[Callable[[Path, Arrays], None], Callable[[Path], Mapping[str, Any]]]:
    formats = {
        ".npz": (_write_npz, _read_npz),
        ".safetensors": (_write_safetensors, _read_safetensors),
        **dict.fromkeys((".pt", ".pth", ".bin"), (_write_torch, _read_torch)),
    }
    if path.suffix not in formats:
        raise ValueError(f"{path}: the ending says the format; there are {', '.join(formats)}.")
    return formats[path.suffix]


def _needed(module: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"such files need the package {module.split('.')[0]!r}; install it, or use .npz.") from error


def _write_npz(path: Path, arrays: Arrays) -> None:
    with open(path, "wb") as file:
        wide = {key: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for key, a in arrays.items()}
        np.savez(file, **wide)  # type: ignore[arg-type]  # of names, one could be that of an option


def _read_npz(path: Path) -> Mapping[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _write_safetensors(path: Path, arrays: Arrays) -> None:
    contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    _needed("safetensors.numpy").save_file(contiguous, path)


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    tensors: Mapping[str, Any] = _needed("safetensors.numpy").load_file(path)
    return tensors


def _write_torch(path: Path, arrays: Arrays) -> None:
    torch = _needed("torch")

    def as_tensor(array: np.ndarray) -> Any:
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    torch.save({key: as_tensor(array) for key, array in arrays.items()}, path)


def _read_torch(path: Path) -> Mapping[str, Any]:
    tensors: Mapping[str, Any] = _needed("torch").load(path, map_location="cpu", weights_only=True)
    return tensors
