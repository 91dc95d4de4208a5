"""A module's variables as a flat dictionary of NumPy arrays, and back into a module of the same kind."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rsembed.bags import check_not_taken
from rsembed.checks import check_type
from rsembed.fingerprint import Fingerprint, check_same

FINGERPRINT = "fingerprint"
# Spilled rows make the arrays of a cache longer.
_OF_ANY_LENGTH = re.compile(r"caches/\d+/(rows|state|ids|places|is_cached)/.*")


def saved_state(module: nnx.Module, fingerprint: Fingerprint) -> dict[str, np.ndarray]:
    """All variables by path and number of leaf, and the fingerprint as bytes. Raises: as `check_whole`."""
    check_whole(module, nnx.state(module))
    arrays = {name: np.asarray(leaf) for name, leaf in _leaves(module).items()}
    return arrays | {FINGERPRINT: np.frombuffer(fingerprint.text.encode(), np.uint8)}


def check_whole(module: nnx.Module, values: Any) -> None:
    """Raises: RuntimeError: a step took arrays of the module over."""
    way_out = (
        "where an error or Ctrl-C broke that step off, load_state_dict of the latest checkpoint; where a copy that "
        "shared the arrays took it, go on with the copy"
    )
    check_not_taken(values, f"{type(module).__name__} has lost its cores", way_out)


def _leaves(module: nnx.Module) -> dict[str, Any]:
    return {
        f"{_name(path)}/{k}": x
        for path, leaf in nnx.to_flat_state(nnx.state(module))
        for k, x in enumerate(jax.tree.leaves(leaf.get_value()))
    }


def load_saved_state(module: nnx.Module, state: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    """Puts a `saved_state` into the variables.

    Raises: TypeError: it is no mapping. ValueError: names, shapes, dtypes or the fingerprint are those of another
      module. Then nothing changes.
    """
    check_type(state, Mapping, "the state")
    own = _leaves(module)
    if differ := {*own, FINGERPRINT} ^ state.keys():
        raise ValueError(f"the state is that of another module: {sorted(differ)} are not in both.")
    saved = {name: np.asarray(array) for name, array in state.items()}
    for name in own:
        ours, theirs, first = own[name], saved[name], int(_OF_ANY_LENGTH.fullmatch(name) is not None)
        if ours.shape[first:] != theirs.shape[first:]:
            raise ValueError(f"{name} has shape {theirs.shape} in the state and {ours.shape} in this module.")
        # NumPy files know bfloat16 only as two bytes.
        if theirs.dtype not in (ours.dtype, np.dtype(f"V{ours.dtype.itemsize}")):
            raise ValueError(f"{name} has dtype {theirs.dtype} in the state and {ours.dtype} in this module.")
    check_same(
        Fingerprint(saved[FINGERPRINT].tobytes().decode()),
        fingerprint,
        what="the state is that of another module",
        way_out="Make this module with the arguments of the one that was saved.",
    )
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        leaves, structure = jax.tree.flatten(leaf.get_value())
        arrays = [_like(old, saved[f"{_name(path)}/{k}"].view(old.dtype)) for k, old in enumerate(leaves)]
        variable: Any = functools.reduce(_part, path, module)
        nnx.Variable.set_value(variable, jax.tree.unflatten(structure, arrays))


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _like(old: Any, values: np.ndarray) -> Any:
    """The array in the kind of the one that it replaces: a numpy array stays on the host."""
    return values.copy() if isinstance(old, np.ndarray) else jnp.asarray(values)


def _part(of: Any, name: Any) -> Any:
    return of[name] if isinstance(name, int) else getattr(of, name)
