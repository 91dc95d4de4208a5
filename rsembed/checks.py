"""Checks of arguments and fields against their annotations: users call without a type checker."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import numbers
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray

Function = TypeVar("Function", bound=Callable[..., Any])
PositiveInt = Annotated[int, "[1, inf)"]
NonNegativeInt = Annotated[int, "[0, inf)"]

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
_KEYS, _INTEGERS, _REALS = (jax.dtypes.prng_key,), (np.integer,), (np.integer, np.floating)
_NUMBERS: dict[Any, tuple[Any, ...]] = {bool: (np.bool_,), int: _INTEGERS, float: _REALS}
_SEQUENCES, _MAPPINGS = (Sequence, Iterable, list, tuple), (Mapping, dict)
_MAX_ENTRIES = 1000  # of a list or mapping, up to which each is checked


def validated(function: Function) -> Function:
    """The function, or the class below `@dataclass`, made to refuse values that its annotations do not admit.

    For what is called seldom: to declare, plan, load or save. What runs in every step, or takes `*args`, checks its
    arguments itself. An error reads `plan_stacking: num_shards must be an integer, got '2' (str).`
    """
    if isinstance(function, type):
        function.__post_init__ = check_fields  # type: ignore[attr-defined]
        return function
    annotated = inspect.unwrap(function)
    positional = inspect.getfullargspec(annotated).args

    @functools.wraps(function)
    def validate_and_call(*args: Any, **kwargs: Any) -> Any:
        hints = _hints(annotated)
        arguments = [*zip(positional, args, strict=False), *kwargs.items()]
        where = type(args[0]).__name__ if annotated.__name__ == "__init__" else annotated.__qualname__
        label = next((f" {value!r}" for name, value in arguments if name == "name" and isinstance(value, str)), "")
        for name, value in arguments:
            if name in hints:
                check_type(value, hints[name], f"{where}{label}: {name}")
        return function(*args, **kwargs)

    return cast(Function, validate_and_call)


def within(interval: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field whose number `check_fields` holds to an interval, such as `(0, inf]`; NaN lies in none."""
    return dataclasses.field(default=default, metadata={"interval": interval})


def check_fields(record: Any, where: str | None = None) -> None:
    """Raises: TypeError, ValueError, of `where` or the class: a field's annotation or interval refuses its value."""
    kind: Any = type(record)
    hints, where = _hints(kind), where or kind.__name__
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{where}: {field.name}"
        if interval := field.metadata.get("interval"):
            check_within(interval, value, name)
        if field.name in hints:
            check_type(value, hints[field.name], name)


def check_within(interval: str, value: Any, name: str) -> None:
    """Raises: TypeError, ValueError: `value` is no number, or outside `interval`.

    Functions (schedules, initializers) and traced values are known only later, and pass; so does None, for a number
    that may be left out.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    check_type(value, float, name)
    number, (low, high) = float(value), map(float, interval[1:-1].split(","))
    is_above = low <= number if interval[0] == "[" else low < number
    is_below = number <= high if interval[-1] == "]" else number < high
    if not (is_above and is_below):
        raise ValueError(f"{name} must be in {interval}, got {value}.")


_BYTES_PER_BLOCK = 1 << 22
"""Bytes of a host array that are compared at once, so that the answers need little memory."""
ALLOW_NONFINITE = "clean the numbers, or pass allow_nonfinite=True"


def check_finite(values: Any, name: str, *, may_be_negative: bool = True, way_out: str = ALLOW_NONFINITE) -> None:
    """Refuses an array from outside that has NaN, infinity or, where it means nothing, a number below 0.

    One pass over the array where it is: on its device, or block by block on the host. Traced values pass, as they are
    known only later; integers are finite.

    Args:
      values: array or nested list of numbers.
      name: words for the array, with which the message begins.
      may_be_negative: False for sums of squares, counts and other numbers that a rule never makes negative.
      way_out: end of the message.

    Raises: ValueError: naming the first such number and its row.
    """
    if isinstance(values, jax.core.Tracer):
        return
    array: Any = values if isinstance(values, (jax.Array, np.ndarray)) else np.asarray(values)
    if not jnp.issubdtype(array.dtype, np.floating) and (may_be_negative or array.dtype.kind not in "i"):
        return
    parts = [(0, array)]
    if isinstance(array, jax.Array):
        devices: Any = array.sharding.device_set
        is_in_host_memory = all(device.platform == "cpu" for device in devices)
        if is_in_host_memory and array.is_fully_addressable and array.ndim:
            # Read where it is: a program would write down which numbers are good, a quarter of a table's bytes.
            parts = [(shard.index[0].start or 0, shard.data) for shard in array.addressable_shards]
        # Asked for in so many words, which a guard against transfers allows.
        elif bool(jax.device_get(_all_are_good(array, may_be_negative))):
            return
        elif not array.is_fully_addressable:
            raise ValueError(
                f"{name}: there are numbers that are not finite, or negative where none may be; {way_out}."
            )
    for first_row, part in parts:
        _check_part(np.atleast_1d(jax.device_get(part)), first_row, name, may_be_negative, way_out)


def _check_part(array: np.ndarray, first_row: int, name: str, may_be_negative: bool, way_out: str) -> None:
    """As `check_finite`, of an array on the host that begins with row `first_row`."""
    rows_per_block = max(1, _BYTES_PER_BLOCK * len(array) // max(array.nbytes, 1))
    for first in range(0, len(array), rows_per_block):
        block = array[first : first + rows_per_block]
        is_good = _are_good(np, block, may_be_negative)
        if is_good.all():
            continue
        place = np.unravel_index(int(is_good.argmin()), block.shape)
        number = float(block[place])
        complaint = "is negative" if math.isfinite(number) else "is not finite"
        row = first_row + first + int(place[0])
        raise ValueError(f"{name}: {number} in row {row} {complaint}; {way_out}.")


def _are_good(xp: Any, array: Any, may_be_negative: bool) -> Any:
    is_good = xp.isfinite(array)
    return is_good if may_be_negative else is_good & (array >= 0)


@functools.partial(jax.jit, static_argnums=1)
def _all_are_good(array: jax.Array, may_be_negative: bool) -> jax.Array:
    return jnp.all(_are_good(jnp, array, may_be_negative))


def check_type(value: Any, hint: Any, name: str) -> None:
    """Raises: TypeError: `hint` does not admit `value`. ValueError: its axes, its number or its text is not allowed.

    More is admitted than a type checker would: any sequence of the right entries where a list or tuple is asked for
    (texts are none), scalars of numpy and JAX as numbers, integers as floats, lists of numbers as arrays.
    """
    if misfit := _misfit(value, hint, name):
        error, place, wanted, entry = misfit
        raise error(f"{place} must be {_words_for(wanted)}, got {describe(entry)}.")


def describe(value: Any) -> str:
    """The value as errors show it: itself where that is short, else its type."""
    if hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple):
        article = "a masked" if np.ma.isMaskedArray(value) else "an"
        return f"{article} array of {value.dtype} with shape {tuple(value.shape)}"
    is_plain = isinstance(value, (str, numbers.Number, list, tuple, dict, enum.Enum, types.NoneType))
    kind, text = type(value).__name__, repr(value) if is_plain else ""
    return f"{text} ({kind})" if 0 < len(text) <= 60 else f"a value of type {kind}"


def dtype_among(allowed: Sequence[str], dtype: Any, name: str) -> str:
    """The name of a dtype. Raises: ValueError: it is none of those that are allowed, or of none."""
    with contextlib.suppress(TypeError):  # a word that names no dtype is not allowed either
        dtype = dtype if dtype is None else jnp.dtype(dtype).name
    if dtype not in allowed:
        raise ValueError(f"{name} {dtype!r} is not one of {', '.join(allowed)}.")
    return dtype


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The nearest known name as the end of a sentence, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    """Annotations of a function or class, without those of a user's class that name what only a type checker sees."""
    hints: dict[str, Any] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        # `get_type_hints` finds nothing in a class with `@no_type_check`, which is meant for other checkers.
        own = {"__annotations__": inspect.get_annotations(part), "__module__": part.__module__}
        with contextlib.suppress(NameError):
            hints |= get_type_hints(type("Annotations", (), own), include_extras=True)
    return hints


def _misfit(value: Any, hint: Any, name: str) -> tuple[type[Exception], str, Any, Any] | None:
    """The error, place, annotation and value of the first entry that an annotation does not admit, or None."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    misfit = (TypeError, name, hint, value)
    if kind is Annotated:
        if not (inner := _misfit(value, args[0], name)):
            check_within(hint.__metadata__[0], value, name)
        return inner
    if kind is Literal:  # of texts
        is_text = isinstance(value, str)
        return None if is_text and value in args else (ValueError if is_text else TypeError, name, hint, value)
    if kind in (Union, types.UnionType):
        misfits = [_misfit(value, alternative, name) for alternative in args]
        nearest = [own for own in misfits if own and (own[0] is ValueError or own[1] != name)]
        first = (nearest or [misfit])[0]
        return None if None in misfits else first if first[1] != name else (first[0], name, hint, value)
    if _dtypes_of(kind):
        error = _array_error(value, kind)
        return (error, name, hint, value) if error else None
    if kind is Callable:
        is_admitted = callable(value)
    elif kind in _MAPPINGS:
        is_admitted = isinstance(value, Mapping)
    elif kind in _SEQUENCES:
        is_list = hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))
        is_admitted = is_list and not (_is_record(hint) and isinstance(value, Sized) and len(value) != len(args))
    elif kind in _NUMBERS:
        is_scalar = hasattr(value, "dtype") and np.ndim(value) == 0 and _is_among(value.dtype, _NUMBERS[kind])
        is_number = isinstance(value, (int, float) if kind is float else kind)
        is_admitted = is_scalar or (is_number and (kind is bool or not isinstance(value, bool)))
    else:
        is_admitted = kind is Any or not isinstance(kind, type) or isinstance(value, kind)
    if not (args and is_admitted):
        return None if is_admitted else misfit
    if not isinstance(value, (list, tuple, Mapping)) or len(value) > _MAX_ENTRIES:
        return None
    entries: Iterable[Any] = value.items() if isinstance(value, Mapping) else enumerate(value)
    hints = args if _is_record(hint) else (args[kind in _MAPPINGS],) * len(value)
    misfits = [_misfit(entry, own, f"{name}[{place!r}]") for (place, entry), own in zip(entries, hints, strict=True)]
    return next(filter(None, misfits), None)


def _array_error(value: Any, hint: Any) -> type[Exception] | None:
    try:
        is_foreign = hasattr(value, "__array__") and not isinstance(value, (jax.Array, np.ndarray))
        array = np.asarray(value) if is_foreign or isinstance(value, (list, tuple)) else value
        dtype, shape = array.dtype, tuple(array.shape)
    except (ValueError, AttributeError, TypeError):  # rows of other lengths; no array
        return TypeError
    dtypes, axes = _dtypes_of(hint), hint.dim_str.split()
    is_untyped = dtypes == _INTEGERS and 0 in shape  # an empty list has no dtype yet
    if np.ma.isMaskedArray(array) or not _is_among(dtype, _REALS if is_untyped else dtypes):
        return TypeError
    return None if any(axis[0] in "*." for axis in axes) or len(shape) == len(axes) else ValueError


def _words_for(hint: Any) -> str:
    """Words for the values that an annotation allows."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _words_for(args[0])
    if kind is Literal:
        return " or ".join(map(repr, args))
    if kind in (Union, types.UnionType):
        if any(_dtypes_of(own) == _KEYS for own in args):  # which arrays of integers may stand for
            args = tuple(own for own in args if _dtypes_of(own) != _INTEGERS)
        return " or ".join(dict.fromkeys(map(_words_for, args)))
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _SEQUENCES:
        if _is_record(hint):
            return f"({', '.join(map(_words_for, args))})"
        return "a list" if not args or args[0] is Any else f"a list (each {_words_for(args[0])})"
    if kind in _MAPPINGS:
        return "a mapping" if not args or args[1] is Any else f"a mapping (each {_words_for(args[1])})"
    if (dtypes := _dtypes_of(kind)) == _KEYS:
        return "a PRNG key, such as jax.random.key(0)"
    if dtypes:
        axes = kind.dim_str.replace("...", "").split()
        words = "an array of integers" if dtypes == _INTEGERS else "an array of numbers" if kind.dim_str else "a number"
        return words + (f" [{', '.join(axes)}]" if axes else "")
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"a member of {name}, such as {name}.{next(iter(kind)).name}"
    return f"of type {name}" + (", as in nnx.Rngs(0)" if name == "Rngs" else "")


def _is_record(hint: Any) -> bool:
    """Whether a tuple has a meaning for each place."""
    return get_origin(hint) is tuple and get_args(hint)[-1:] != (...,)


def _dtypes_of(hint: Any) -> tuple[Any, ...]:
    """Kinds of dtypes that an annotation of arrays admits (integers stand for numbers); none for other annotations."""
    if not isinstance(hint, type) or not issubclass(hint, AbstractArray):
        return ()
    word = hint.__name__.partition("[")[0]
    return _KEYS if word == "Key" else _INTEGERS if "Int" in word else _REALS


def _is_among(dtype: Any, kinds: tuple[Any, ...]) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
