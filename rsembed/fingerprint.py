"""Fingerprints: values that travel with a state, an input or a file and say what it belongs to.

Arrays do not know what they mean: rows of a table on four devices and on two may have one shape and another order. A
`Fingerprint` holds the facts on which the meaning depends (tables, sizes, rules, shards, owners) as plain JSON values.
It is a static leaf of a pytree, so it passes through `jit` and `tree.map`, which refuse to mix two of them; it is
written into files; and `check_same` is the one place that compares two and says what differs.
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
import optax

MAX_DIFFERENCES_SHOWN = 6
ELSEWHERE = "elsewhere"
"""Name of the fact that part of a state is kept elsewhere; its value says what to save, since files refuse it."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Facts, compared and hashed by value.

    Args:
      text: the facts as canonical JSON; use `Fingerprint.of` to make one.

    Example:
      >>> Fingerprint.of({"tables": {"word": {"rows": 10}}, "shards": 4}).text
      '{"shards":4,"tables":{"word":{"rows":10}}}'
    """

    text: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of what JSON can hold; the order of keys does not matter."""
        return cls(json.dumps(facts, sort_keys=True, separators=(",", ":")))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts as a dictionary that JSON can hold."""
        return json.loads(self.text)

    def __hash__(self) -> int:
        return hash(self.text)  # a text keeps its hash; jit asks for it in every call

    def __repr__(self) -> str:
        return f"Fingerprint({hashlib.sha256(self.text.encode()).hexdigest()[:12]})"


def check_same(found: Fingerprint, expected: Fingerprint, *, what: str, way_out: str) -> None:
    """Compares two fingerprints; the error lists the facts that differ.

    Args:
      found: fingerprint of the given thing.
      expected: fingerprint that it should have.
      what: the sentence's beginning, such as `"the state does not belong to this collection"`.
      way_out: a sentence that says what to do about it.

    Raises: ValueError: they differ; names the facts.
    """
    if found == expected:
        return
    differences = list(_differences(found.facts, expected.facts, ""))
    shown = "; ".join(differences[:MAX_DIFFERENCES_SHOWN])
    more = len(differences) - MAX_DIFFERENCES_SHOWN
    raise ValueError(f"{what}: {shown}{f'; and {more} more' if more > 0 else ''}. {way_out}")


def identity(value: Any) -> str:
    """Identity of a rule or function: its name and structure, without the values of its numbers.

    Two rules whose state means the same have one identity, whatever their learning rates are. Truth values, texts and
    functions inside a rule count, since they choose between formulas (`nesterov=True`). Transformations of optax are
    closures; what they close over is part of them. A function without a name is told by the names in its code.

    Example:
      >>> import optax
      >>> identity(optax.adam(1e-3))
      'chain(update_fns=(scale_by_adam(mu_dtype=None, nesterov=False), scale))'
      >>> [identity(optax.adam(1e-3)) == identity(rule) for rule in (optax.adam(0.2), optax.nadam(0.2))]
      [True, False]
    """
    return _identity(value, frozenset())


def _identity(value: Any, above: frozenset[int]) -> str:
    if value is None or isinstance(value, (bool, str, type, np.dtype, np.bool_)):
        return value.__qualname__ if isinstance(value, type) else str(value)
    if isinstance(value, (numbers.Number, np.ndarray, np.generic, jax.Array)):
        return "number"
    if id(value) in above:
        return "itself"
    inside = functools.partial(_identity, above=above | {id(value)})
    if isinstance(value, optax.GradientTransformation):
        return inside(value.update)
    if isinstance(value, Mapping):
        return _call("", {str(key): inside(entry) for key, entry in value.items()})
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(inside, value))})"
    if isinstance(value, functools.partial):
        return _call(inside(value.func), {str(name): inside(entry) for name, entry in value.keywords.items()})
    if dataclasses.is_dataclass(value):
        fields = {field.name: inside(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return _call(type(value).__qualname__, fields)
    if hasattr(value, "__wrapped__"):
        return inside(value.__wrapped__)
    if not isinstance(value, FunctionType):
        return type(value).__qualname__
    code, cells = value.__code__, zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    # A cell is empty while the function that it is to hold is being made.
    closed = {name: inside(cell.cell_contents) for name, cell in cells if cell != CellType()}
    name = value.__qualname__.replace(".<locals>", "").removesuffix(".update_fn")
    if name == "with_extra_args_support.update":  # versions of optax wrap other functions than others in it
        return next(iter(closed.values()), name)
    if name.endswith("<lambda>"):
        name = f"lambda {' '.join(code.co_varnames[: code.co_argcount])}: {' '.join(code.co_names)}"
    return _call(name, closed)


def _call(name: str, arguments: Mapping[str, str]) -> str:
    shown = [f"{key}={value}" for key, value in sorted(arguments.items()) if value != "number"]
    return f"{name}({', '.join(shown)})" if shown else name


def _differences(own: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(own, dict) and isinstance(other, dict):
        for key in sorted(own.keys() | other.keys()):
            where = f"{path}/{key}" if path else key
            if key not in other:
                yield f"{where} is not expected"
            elif key not in own:
                yield f"{where} is missing"
            else:
                yield from _differences(own[key], other[key], where)
    elif own != other:
        texts = map(json.dumps, (own, other))
        short, other_short = (text if len(text) <= 120 else f"{text[:117]}..." for text in texts)
        yield f"{path} is {short}, expected {other_short}"
