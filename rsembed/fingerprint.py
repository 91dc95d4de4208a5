"""Fingerprints of the tables and the layout that a state, an input or a file belongs to.

An array does not record what its rows mean: on two and on four devices, one table can have equal
array shapes but different row orders. A `Fingerprint` holds the metadata that define the meaning
(tables, sizes, optimizers, shards, owners) as plain JSON values. A fingerprint is a static part of
a pytree, so `jit` and `tree.map` keep it, and raise an error if two different ones are mixed. Files
contain fingerprints. `check_same` compares two and names their differences.
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
"""Name of the entry which records that a part of a state is stored outside it.

The value of this entry tells users what to save instead.
"""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Facts about an array or a state, compared and hashed by value.

    Args:
      text: the metadata as a canonical JSON string. Use `Fingerprint.of` to make a fingerprint.

    Example:
      >>> Fingerprint.of({"tables": {"word": {"rows": 10}}, "shards": 4}).text
      '{"shards":4,"tables":{"word":{"rows":10}}}'
    """

    text: str

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Fingerprint:
        """The fingerprint of JSON values. The order of keys does not matter."""
        return cls(json.dumps(facts, sort_keys=True, separators=(",", ":")))

    @property
    def facts(self) -> dict[str, Any]:
        """The metadata as a dictionary of JSON values."""
        return json.loads(self.text)

    def __hash__(self) -> int:
        return hash(self.text)  # jit hashes in every call. Python caches the hash of a string.

    def __repr__(self) -> str:
        return f"Fingerprint({hashlib.sha256(self.text.encode()).hexdigest()[:12]})"


def check_same(actual: Fingerprint, expected: Fingerprint, *, what: str, way_out: str) -> None:
    """Checks that two fingerprints are equal.

    Args:
      actual: fingerprint of the state, input or file.
      expected: fingerprint that the state, input or file should have.
      what: start of the message, such as `"the state does not belong to this collection"`.
      way_out: sentence at the end of the message that tells users what to do.

    Raises: ValueError: the fingerprints differ. The message lists the differences.
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
    """Name and structure of an optimizer or function, without the values of its numbers.

    Two optimizers with interchangeable state have the same identity, for any learning rates.
    Booleans, strings and functions in an optimizer are part of its identity, since they select
    formulas (`nesterov=True`). Optax transformations are closures; the variables in the closure are
    included. A lambda is identified by the names in its code.

    Example:
      >>> import optax
      >>> identity(optax.adam(1e-3))
      'chain(update_fns=(scale_by_adam(mu_dtype=None, nesterov=False), scale))'
      >>> [identity(optax.adam(1e-3)) == identity(rule) for rule in (optax.adam(0.2), optax.nadam(0.2))]
      [True, False]
    """
    return _identity(value, frozenset())


def _identity(value: object, above: frozenset[int]) -> str:
    if value is None or isinstance(value, (bool, str, type, np.dtype, np.bool_)):
        return value.__qualname__ if isinstance(value, type) else str(value)
    if isinstance(value, (numbers.Number, np.ndarray, np.generic, jax.Array)):
        return "number"
    if id(value) in above:
        return "itself"
    inside = functools.partial(_identity, above=above | {id(value)})
    if isinstance(value, tuple) and hasattr(value, "update"):
        import optax

        if isinstance(value, optax.GradientTransformation):
            return inside(value.update)
    if isinstance(value, Mapping):
        return _call("", {str(key): inside(entry) for key, entry in value.items()})
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(inside, value))})"
    if isinstance(value, functools.partial):
        return _call(
            inside(value.func), {str(name): inside(entry) for name, entry in value.keywords.items()}
        )
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: inside(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return _call(type(value).__qualname__, fields)
    if hasattr(value, "__wrapped__"):
        return inside(value.__wrapped__)
    if not isinstance(value, FunctionType):
        return type(value).__qualname__
    code = value.__code__
    closed = {}
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        if cell != CellType():  # A cell is empty until its variable is assigned.
            closed[name] = inside(cell.cell_contents)
    name = value.__qualname__.replace(".<locals>", "").removesuffix(".update_fn")
    # The functions that optax wraps here depend on the version of optax.
    if name == "with_extra_args_support.update":
        return next(iter(closed.values()), name)
    if name.endswith("<lambda>"):
        name = f"lambda {' '.join(code.co_varnames[: code.co_argcount])}: {' '.join(code.co_names)}"
    return _call(name, closed)


def _call(name: str, arguments: Mapping[str, str]) -> str:
    shown = [f"{key}={value}" for key, value in sorted(arguments.items()) if value != "number"]
    return f"{name}({', '.join(shown)})" if shown else name


def _differences(actual: object, expected: object, path: str) -> Iterator[str]:
    """One line for every entry that differs between two fingerprints."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in sorted(actual.keys() | expected.keys()):
            where = f"{path}/{key}" if path else key
            if key not in expected:
                yield f"{where} is not expected"
            elif key not in actual:
                yield f"{where} is missing"
            else:
                yield from _differences(actual[key], expected[key], where)
    elif actual != expected:
        yield f"{path} is {_shortened(actual)}, expected {_shortened(expected)}"


def _shortened(fact: object) -> str:
    """A value of the metadata as JSON with at most 120 characters."""
    text = json.dumps(fact)
    return text if len(text) <= 120 else f"{text[:117]}..."
