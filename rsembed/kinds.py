"""Which values an annotation admits, and how to say so: users call without a type checker."""

from __future__ import annotations

import difflib
import enum
import functools
import numbers
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    os.PathLike: "a path",
    Callable: "a function",
    jax.sharding.Mesh: "a mesh (jax.make_mesh makes one)",
}
_NUMBERS: dict[Any, Any] = {bool: (bool, np.bool_), int: numbers.Integral, float: numbers.Real}
_SEQUENCES, _MAPPINGS = (Sequence, Iterable, list, tuple), (Mapping, dict)
_FEW = 1000
"""Entries of a list or mapping up to which each of them is looked at."""


def check_kind(value: Any, hint: Any, name: str) -> None:
    """Raises: TypeError: the annotation does not admit the value. ValueError: an array has other axes."""
    if is_kind(value, hint):
        return
    for own in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        for place, entry, entry_hint in _entries(value, own):
            check_kind(entry, entry_hint, f"{name}[{place!r}]")
    error = ValueError if is_kind(value, hint, by_axes=False) else TypeError
    raise error(f"{name} must be {words_for(hint)}, got {shown(value)}.")


def is_kind(value: Any, hint: Any, *, by_axes: bool = True) -> bool:
    """Whether an annotation admits a value; where it cannot be told without a long look, it does.

    More is admitted than a type checker would: any sequence of the right entries where a list or tuple is asked for
    (texts are none), scalars of numpy and JAX as numbers, integers as floats, lists of numbers as arrays.

    Args:
      value: any.
      hint: the annotation.
      by_axes: whether an array must have as many axes as its annotation.
    """
    kind, args = get_origin(hint) or hint, get_args(hint)
    is_own = functools.partial(is_kind, by_axes=by_axes)
    if kind is Annotated:
        return is_own(value, args[0])
    if kind in (Union, types.UnionType):
        return any(is_own(value, own) for own in args)
    if kind is Callable:
        return callable(value)
    if kind in (*_SEQUENCES, *_MAPPINGS):
        if kind in _MAPPINGS and not isinstance(value, Mapping):
            return False
        if kind in _SEQUENCES and (isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__")):
            return False
        if _is_record(hint) and isinstance(value, (list, tuple)) and len(value) != len(args):
            return False
        return all(is_own(entry, own) for _, entry, own in _entries(value, hint))
    if kind in (Any, object) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if issubclass(kind, AbstractArray):
        return _is_array(value, kind, by_axes)
    if kind in _NUMBERS:
        is_number = isinstance(value, _NUMBERS[kind]) and (kind is bool or not isinstance(value, bool))
        is_scalar = hasattr(value, "dtype") and getattr(value, "ndim", None) == 0
        return is_number or (is_scalar and _is_dtype(value.dtype, {bool: "b", int: "i"}.get(kind, "n")))
    return isinstance(value, kind)


def words_for(hint: Any) -> str:
    """What an annotation asks for, in words."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return words_for(args[0])
    if kind in (Union, types.UnionType):
        keys = [own for own in args if _letter(own) == "k"]  # which arrays of integers may stand for
        return " or ".join(dict.fromkeys(words_for(own) for own in args if not keys or own in (*keys, type(None))))
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _SEQUENCES:
        if _is_record(hint):
            return f"({', '.join(map(words_for, args))})"
        is_open = not args or args[0] is Any or isinstance(args[0], TypeVar)
        return "a list" if is_open else f"a list (each {words_for(args[0])})"
    if kind in _MAPPINGS:
        return "a mapping" if not args or args[1] is Any else f"a mapping (each {words_for(args[1])})"
    if (letter := _letter(kind)) == "k":
        return "a PRNG key, such as jax.random.key(0)"
    if letter:
        what, axes = {"i": "integers", "b": "booleans"}.get(letter, "numbers"), kind.dim_str.split()
        if not axes:
            return "an integer" if letter == "i" else "a number"
        return f"an array of {what}" + (f" [{', '.join(axes)}]" if axes != ["..."] else "")
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"a member of {name}, such as {name}.{next(iter(kind)).name}"
    return f"of type {name}" + (", as in nnx.Rngs(0)" if name == "Rngs" else "")


def shown(value: Any) -> str:
    """A value in an error: itself where that is short, else what it is."""
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of {value.dtype} with shape {tuple(value.shape)}"
    is_plain = value is None or isinstance(value, (str, numbers.Number, list, tuple, dict, enum.Enum))
    return f"{text} ({kind})" if is_plain and len(text := repr(value)) <= 60 else f"a value of type {kind}"


def dtype_among(allowed: Sequence[str], given: Any, name: str) -> str:
    """The name of a dtype. Raises: ValueError: it is none of those that are allowed, or of none."""
    try:
        found = jnp.dtype(given).name
    except TypeError:
        found = given
    if found not in allowed:
        raise ValueError(f"{name} {found!r} is not one of {', '.join(allowed)}.")
    return found


def as_dtype(values: Any, dtype: Any, where: str, name: str) -> np.ndarray:
    """Numbers from outside in the dtype that keeps them. Raises: ValueError: some are too large for it."""
    given = np.asarray(values)
    with np.errstate(over="ignore"):
        fitting: np.ndarray = given.astype(dtype, copy=False)
    if not np.can_cast(given.dtype, dtype) and (lost := int(np.sum(np.isfinite(given) & ~np.isfinite(fitting)))):
        raise ValueError(
            f"{where}: {lost} numbers of imported {name!r} are too large for {fitting.dtype}; clip them, or take a "
            "wider dtype."
        )
    return fitting


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The nearest known name as the end of a sentence, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _entries(value: Any, hint: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Places and entries of a list or mapping that is not long, each with its own annotation."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if args and kind in _MAPPINGS and isinstance(value, Mapping) and len(value) <= _FEW:
        yield from ((name, entry, args[1]) for name, entry in value.items())
    elif args and kind in _SEQUENCES and isinstance(value, (list, tuple)) and len(value) <= _FEW:
        if not _is_record(hint):
            args = (args[0],) * len(value)
        if len(args) == len(value):
            yield from zip(range(len(value)), value, args, strict=True)


def _is_record(hint: Any) -> bool:
    """Whether a tuple has a meaning for each place."""
    return get_origin(hint) is tuple and get_args(hint)[-1:] != (...,)


def _letter(hint: Any) -> str:
    """Of arrays, what they hold: `i`ntegers, `b`ooleans, PRNG `k`eys, other `n`umbers; of all else nothing."""
    if not isinstance(hint, type) or not issubclass(hint, AbstractArray):
        return ""
    names = vars(hint).get("dtypes")
    for letter, part in (("k", "prng_key"), ("b", "bool"), ("i", "int")):
        if isinstance(names, tuple) and all(part in name for name in names):
            return letter
    return "n"


def _is_array(value: Any, hint: Any, by_axes: bool) -> bool:
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:  # rows of other lengths
            return False
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or not _is_dtype(value.dtype, _letter(hint), value):
        return False
    axes = hint.dim_str.split()
    return not by_axes or any(axis[0] in "*." for axis in axes) or len(value.shape) == len(axes)


def _is_dtype(dtype: Any, letter: str, value: Any = 0) -> bool:
    """Whether numbers of a dtype may stand where a letter of `_letter` is asked for; an empty list has no dtype yet."""
    if letter == "k" or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return letter == "k" and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if letter == "b":
        return bool(dtype == np.bool_)
    wanted = np.integer if letter == "i" and np.size(value) else np.number
    return jnp.issubdtype(dtype, wanted) and not jnp.issubdtype(dtype, np.complexfloating)
