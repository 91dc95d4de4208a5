"""Fingerprints, which identify the tables and the layout of a state, an input or a file.

The shape of an array does not tell which row belongs to which id: the arrays of one table on two
and on four devices can have equal shapes, but different orders of rows. A `Fingerprint` holds the
metadata that define the meaning of arrays (tables, sizes, optimizers, shards, owners) as JSON
values. A fingerprint is a static part of a pytree, so `jit` and `tree.map` keep it, and trees with
different fingerprints cannot be combined. A checkpoint contains the fingerprints of the saved
states. `check_same` compares two fingerprints and names their differences.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import numbers
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import jax
import numpy as np

MAX_DIFFERENCES_SHOWN = 6
ELSEWHERE = "elsewhere"
"""Name of the metadata entry that marks a state as incomplete, such as a state without host rows.

The value of the entry "elsewhere" tells users what to save in place of the incomplete state.
"""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Metadata of an array or a state, compared and hashed by value.

    `Fingerprint.of` makes a fingerprint from JSON values.

    Args:
      text: the metadata as a canonical JSON string.

    Example:
      >>> Fingerprint.of({"tables": {"word": {"rows": 10}}, "shards": 4}).text
      '{"shards":4,"tables":{"word":{"rows":10}}}'
    """

    text: str

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Fingerprint:
        """The fingerprint of JSON values. The order of entries in dictionaries does not matter."""
        return cls(json.dumps(facts, sort_keys=True, separators=(",", ":")))

    @property
    def facts(self) -> dict[str, Any]:
        """The metadata as a dictionary of JSON values."""
        return json.loads(self.text)

    def __hash__(self) -> int:
        # `jit` hashes the fingerprint in every call, and Python caches the hash of a string.
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Fingerprint({hashlib.sha256(self.text.encode()).hexdigest()[:12]})"


def check_same(actual: Fingerprint, expected: Fingerprint, *, what: str, way_out: str) -> None:
    """Checks that two fingerprints are equal.

    Args:
      actual: fingerprint of the state, input or file.
      expected: fingerprint that the state, input or file should have.
      what: start of the message, such as `"the state does not belong to this collection"`.
      way_out: sentence at the end of the message that tells users what to do.

    Raises: ValueError: the fingerprints differ. The error message lists the entries that differ, at
      most `MAX_DIFFERENCES_SHOWN`.
    """
    if actual == expected:
        return
    differences = list(_differences(actual.facts, expected.facts, ""))
    shown = "; ".join(differences[:MAX_DIFFERENCES_SHOWN])
    num_hidden = len(differences) - MAX_DIFFERENCES_SHOWN
    if num_hidden > 0:
        shown += f"; and {num_hidden} more"
    raise ValueError(f"{what}: {shown}. {way_out}")


def identity(value: object) -> str:
    """Name and structure of an optimizer or function, without numbers such as learning rates.

    Two optimizers with interchangeable state have the same identity, even if their learning rates
    differ. Booleans, strings and functions in an optimizer are part of its identity, because they
    select formulas (`nesterov=True`). An optax transformation is a closure, and the variables of
    the closure are part of its identity. A lambda is identified by the names in its code.

    Example:
      >>> import optax
      >>> identity(optax.adam(1e-3))
      'chain(update_fns=(scale_by_adam(mu_dtype=None, nesterov=False), scale))'
      >>> [identity(optax.adam(1e-3)) == identity(rule) for rule in (optax.adam(0.2), optax.nadam(0.2))]
      [True, False]
    """
    return _identity(value, frozenset())


def _identity(value: Any, above: frozenset[int]) -> str:
    if value is None or isinstance(value, (bool, str, np.dtype, np.bool_)):
        return str(value)
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, (numbers.Number, np.ndarray, np.generic, jax.Array)):
        return "number"
    if id(value) in above:
        return "itself"
    inside = functools.partial(_identity, above=above | {id(value)})
    # An optax transformation is a named tuple of two functions.
    if getattr(value, "_fields", None) == ("init", "update"):
        return inside(value.update)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(inside, value))})"
    name = type(value).__qualname__
    parts: dict[str, Any] = {}
    if isinstance(value, Mapping):
        name = ""
        parts = {str(key): entry for key, entry in value.items()}
    elif isinstance(value, functools.partial):
        name = inside(value.func)
        parts = value.keywords
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            parts[field.name] = getattr(value, field.name)
    elif hasattr(value, "__wrapped__"):
        return inside(value.__wrapped__)
    elif isinstance(value, FunctionType):
        name = _name_of(value)
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            # The cell of a closure variable is empty until the variable is assigned.
            if cell != CellType():
                parts[variable] = cell.cell_contents
        # Some versions of optax put the wrapper `with_extra_args_support` around an update
        # function. The identity leaves out the wrapper, so that an update function has the same
        # identity in all versions of optax.
        if name == "with_extra_args_support.update" and parts:
            return inside(next(iter(parts.values())))
    shown = []
    for part_name, part in sorted(parts.items()):
        text = inside(part)
        if text != "number":
            shown.append(f"{part_name}={text}")
    if not shown:
        return name
    return f"{name}({', '.join(shown)})"


def _name_of(function: FunctionType) -> str:
    name = function.__qualname__.replace(".<locals>", "").removesuffix(".update_fn")
    if not name.endswith("<lambda>"):
        return name
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    return f"lambda {' '.join(arguments)}: {' '.join(code.co_names)}"


def _differences(actual: object, expected: object, path: str) -> Iterator[str]:
    """A description of every entry that differs between the metadata of two fingerprints."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in sorted(actual.keys() | expected.keys()):
            where = key
            if path:
                where = f"{path}/{key}"
            if key not in expected:
                yield f"{where} is not expected"
            elif key not in actual:
                yield f"{where} is missing"
            else:
                yield from _differences(actual[key], expected[key], where)
    elif actual != expected:
        yield f"{path} is {_shortened(actual)}, expected {_shortened(expected)}"


def _shortened(fact: object) -> str:
    """A metadata value as JSON, cut to at most 120 characters."""
    text = json.dumps(fact)
    if len(text) > 120:
        return f"{text[:117]}..."
    return text
