"""Checks of arguments and fields against their annotations, for users without a type checker."""

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
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

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
_KEYS: tuple[Any, ...] = (jax.dtypes.prng_key,)
_INTEGERS: tuple[Any, ...] = (np.integer,)
_REALS: tuple[Any, ...] = (np.integer, np.floating)
_NUMBERS: dict[Any, tuple[Any, ...]] = {bool: (np.bool_,), int: _INTEGERS, float: _REALS}
_SEQUENCES = (Sequence, Iterable, list, tuple)
_MAPPINGS = (Mapping, dict)
_MAX_ENTRIES = 1000  # Entries of a list or mapping with more than 1000 entries are not checked.


def validated(function: Function) -> Function:
    """Decorator that checks arguments of a function or fields of a dataclass against annotations.

    A value that does not match its annotation raises an error, such as
    `plan_stacking: num_shards must be an integer, got '2' (str).`

    A NumPy scalar becomes a Python number if its annotation allows a number.

    The decorator is meant for functions that run rarely, such as constructors and functions that
    load or save. `validated` would slow down a function that runs in every step outside `jit`. The
    decorator does not check `*args`, so a function that takes `*args` must check them itself. For a
    dataclass, put `@validated` below `@dataclass`.
    """
    if isinstance(function, type):
        function.__post_init__ = check_fields  # type: ignore[attr-defined]
        return function
    annotated = inspect.unwrap(function)
    positional = inspect.getfullargspec(annotated).args

    @functools.wraps(function)
    def validate_and_call(*args: object, **kwargs: object) -> Any:
        hints = _hints(annotated)
        arguments = [*zip(positional, args, strict=False), *kwargs.items()]
        where = annotated.__qualname__
        if annotated.__name__ == "__init__":
            where = type(args[0]).__name__
        for name, value in arguments:
            if name == "name" and isinstance(value, str):
                where += f" {value!r}"
                break
        checked = []
        for name, value in arguments:
            if name in hints:
                check_type(value, hints[name], f"{where}: {name}")
                value = _plain(value, hints[name])
            checked.append(value)
        num_named = len(arguments) - len(kwargs)
        named = dict(zip(kwargs, checked[num_named:], strict=True))
        return function(*checked[:num_named], *args[num_named:], **named)

    return cast(Function, validate_and_call)


def _plain(value: Any, hint: object) -> Any:
    """Converts a NumPy scalar to a Python number if `hint` allows a number.

    JSON has no NumPy scalars, and products of NumPy integers overflow.
    """
    if not isinstance(value, np.generic) or not _allows_number(hint):
        return value
    # `item` returns a `np.longdouble` as it is.
    return float(value) if isinstance(value, np.floating) else value.item()


def _allows_number(hint: object) -> bool:
    kind = get_origin(hint) or hint
    if kind is Annotated:
        return _allows_number(get_args(hint)[0])
    if kind in (Union, types.UnionType):
        return any(map(_allows_number, get_args(hint)))
    return kind in _NUMBERS


def within(interval: str, *, default: object = dataclasses.MISSING) -> Any:
    """A dataclass field for a number in `interval`, such as `(0, inf]`.

    `check_fields` raises an error for NaN and for a number outside the interval.
    """
    return dataclasses.field(default=default, metadata={"interval": interval})


def check_fields(record: Any, where: str | None = None) -> None:
    """Checks all fields of a dataclass against their annotations and intervals.

    Fields with NumPy scalars are set to Python numbers if the annotation allows a number.

    Args:
      record: dataclass instance that has the fields to check.
      where: start of the error message, by default the name of the class.

    Raises: TypeError, ValueError: a value does not match its annotation or interval.
    """
    kind: Any = type(record)
    hints = _hints(kind)
    where = where or kind.__name__
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        name = f"{where}: {field.name}"
        interval = field.metadata.get("interval")
        if interval is not None:
            check_within(interval, value, name)
        if field.name in hints:
            check_type(value, hints[field.name], name)
            plain = _plain(value, hints[field.name])
            if plain is not value:
                # The dataclass may be frozen.
                object.__setattr__(record, field.name, plain)


def check_within(interval: str, value: Any, name: str) -> None:
    """Checks that a value is a number in `interval`.

    None, functions (such as schedules) and traced values are accepted without a check.

    Raises: TypeError, ValueError: `value` is not a number, or is outside `interval`.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    check_type(value, float, name)
    number = float(value)
    low, high = map(float, interval[1:-1].split(","))
    is_low_end = number == low and interval.startswith("[")
    is_high_end = number == high and interval.endswith("]")
    if not (low < number < high or is_low_end or is_high_end):
        raise ValueError(f"{name} must be in {interval}, got {value}.")


_BYTES_PER_BLOCK = 1 << 22
"""Size in bytes of the blocks in which `check_finite` checks an array in host memory.

`check_finite` works in blocks to keep its boolean masks small.
"""
ALLOW_NONFINITE = "clean the numbers, or pass allow_nonfinite=True"


def check_finite(
    values: object, name: str, *, may_be_negative: bool = True, way_out: str = ALLOW_NONFINITE
) -> None:
    """Checks that a user's array has no NaN, no infinity and, if required, no negative number.

    An array in host memory is checked by NumPy, block by block. An array on an accelerator, or
    distributed over several hosts, is checked by a compiled JAX program. Traced values are accepted
    without a check.

    Args:
      values: array or nested list of numbers.
      name: description of the array, at the start of the error message.
      may_be_negative: whether negative numbers are accepted, True by default. `may_be_negative` is
        False for numbers that an optimizer never makes negative, such as counts and sums of
        squares.
      way_out: end of the error message, which says what the user can do.

    Raises: ValueError: a number is not finite, or is negative although `may_be_negative` is False.
      The error message names the first wrong number and its row, if this process can read all of
      the array.
    """
    if isinstance(values, jax.core.Tracer):
        return
    array: Any = values
    if not isinstance(values, (jax.Array, np.ndarray)):
        array = np.asarray(values)
    has_floats = jnp.issubdtype(array.dtype, np.floating)
    has_sign = array.dtype.kind == "i"
    if not has_floats and (may_be_negative or not has_sign):
        return
    parts = [(0, array)]
    if isinstance(array, jax.Array):
        devices: Any = array.sharding.device_set
        is_in_host_memory = all(device.platform == "cpu" for device in devices)
        if is_in_host_memory and array.is_fully_addressable and array.ndim:
            # NumPy can check an array in host memory block by block. A JAX program that checks the
            # numbers would need memory for a boolean mask of the whole array.
            parts = [(shard.index[0].start or 0, shard.data) for shard in array.addressable_shards]
        elif bool(jax.device_get(_all_are_good(array, may_be_negative))):
            # `device_get` is an explicit transfer, which `jax.transfer_guard` permits.
            return
        elif not array.is_fully_addressable:
            raise ValueError(
                f"{name}: there are numbers that are not finite, or negative where none may be; {way_out}."
            )
    for first_row, part in parts:
        host_part = np.atleast_1d(jax.device_get(part))
        _check_part(host_part, first_row, name, may_be_negative, way_out)


def _check_part(
    array: np.ndarray, first_row: int, name: str, may_be_negative: bool, way_out: str
) -> None:
    """Checks a part of an array on the host, see `check_finite`.

    `first_row` is the index of the part's first row in the whole array.
    """
    rows_per_block = max(1, _BYTES_PER_BLOCK * len(array) // max(array.nbytes, 1))
    for first in range(0, len(array), rows_per_block):
        block = array[first : first + rows_per_block]
        is_good = _are_good(np, block, may_be_negative)
        if is_good.all():
            continue
        index = np.unravel_index(int(is_good.argmin()), block.shape)
        number = float(block[index])
        complaint = "is not finite"
        if math.isfinite(number):
            complaint = "is negative"
        row = first_row + first + int(index[0])
        raise ValueError(f"{name}: {number} in row {row} {complaint}; {way_out}.")


def _are_good(xp: Any, array: Any, may_be_negative: bool) -> Any:
    is_finite = xp.isfinite(array)
    if may_be_negative:
        return is_finite
    return is_finite & (array >= 0)


@functools.partial(jax.jit, static_argnums=1)
def _all_are_good(array: jax.Array, may_be_negative: bool) -> jax.Array:
    return jnp.all(_are_good(jnp, array, may_be_negative))


def check_type(value: object, hint: object, name: str) -> None:
    """Checks a value against an annotation.

    `check_type` accepts more than a type checker does: any sequence except a string matches a list
    or tuple, NumPy and JAX scalars match numbers, integers match floats, and lists of numbers match
    arrays.

    Args:
      value: value to check.
      hint: annotation that the value must match.
      name: name of the value in the error message.

    Raises:
      TypeError: the value has the wrong type.
      ValueError: an array has the wrong number of axes, or a number or string is not an allowed
        value.
    """
    misfit = _misfit(value, hint, name)
    if misfit is not None:
        raise misfit.error(
            f"{misfit.name} must be {_words_for(misfit.hint)}, got {describe(misfit.value)}."
        )


def describe(value: Any) -> str:
    """Describes a value in an error message.

    An array is described by its dtype and shape, a short number, string or list by its text and
    type, and any other value by its type.
    """
    if hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple):
        article = "a masked" if np.ma.isMaskedArray(value) else "an"
        return f"{article} array of {value.dtype} with shape {tuple(value.shape)}"
    is_plain = isinstance(
        value, (str, numbers.Number, list, tuple, dict, enum.Enum, types.NoneType)
    )
    kind = type(value).__name__
    if is_plain:
        text = repr(value)
        if len(text) <= 60:
            return f"{text} ({kind})"
    return f"a value of type {kind}"


def dtype_among(allowed: Sequence[str], dtype: Any, name: str) -> str:
    """The name of a dtype as a string, such as "float32".

    Raises: ValueError: `dtype` is not among `allowed`, or not a dtype.
    """
    # Ignore the TypeError of `jnp.dtype` for a string that names no dtype, because `allowed` does
    # not contain the string.
    if dtype is not None:
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(dtype).name
    if dtype not in allowed:
        raise ValueError(f"{name} {dtype!r} is not one of {', '.join(allowed)}.")
    return dtype


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Hint for an error message with the most similar known name, or "" if no name is similar."""
    similar = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    """Annotations of the arguments of a function, or of the fields of a class, by name.

    Annotations of a class are left out if they use names that exist only for a type checker.
    """
    parts = [owner]
    if isinstance(owner, type):
        parts = list(reversed(owner.__mro__))
    hints: dict[str, Any] = {}
    for part in parts:
        # `get_type_hints` returns no hints for a class with `@no_type_check`, so pass a new class
        # that has only the annotations.
        namespace = {
            "__annotations__": inspect.get_annotations(part),
            "__module__": part.__module__,
        }
        with contextlib.suppress(NameError):
            hints |= get_type_hints(type("Annotations", (), namespace), include_extras=True)
    return hints


class _Misfit(NamedTuple):
    """A value, or an entry of a value, that does not match its annotation."""

    error: type[Exception]
    name: str
    hint: Any
    value: Any


def _misfit(value: Any, hint: Any, name: str) -> _Misfit | None:
    """First mismatch between `hint` and a value or its entries. None if everything matches."""
    kind = get_origin(hint) or hint
    args = get_args(hint)
    if kind is Annotated:
        inner = _misfit(value, args[0], name)
        if inner is None:
            check_within(hint.__metadata__[0], value, name)
        return inner
    if kind is Literal:
        # Every `Literal[...]` in an annotation of this package lists strings.
        if not isinstance(value, str):
            return _Misfit(TypeError, name, hint, value)
        if value in args:
            return None
        return _Misfit(ValueError, name, hint, value)
    if kind in (Union, types.UnionType):
        return _misfit_of_union(value, hint, name)
    if _dtypes_of(kind):
        array_error = _array_error(value, kind)
        if array_error is None:
            return None
        return _Misfit(array_error, name, hint, value)
    if not _has_type(value, hint, kind):
        return _Misfit(TypeError, name, hint, value)
    has_entries = isinstance(value, (list, tuple, Mapping))
    if not args or not has_entries or len(value) > _MAX_ENTRIES:
        return None
    return _misfit_of_entries(value, hint, name)


def _has_type(value: Any, hint: Any, kind: Any) -> bool:
    """Whether a value has the type `kind`, without a check of its entries.

    Args:
      value: value to check.
      hint: the whole annotation, such as `list[int]`.
      kind: the annotation without the types of entries, such as `list` for `list[int]`.
    """
    if kind is Callable:
        return callable(value)
    if kind in _MAPPINGS:
        return isinstance(value, Mapping)
    if kind in _SEQUENCES:
        if not hasattr(value, "__iter__") or isinstance(value, (str, bytes, Mapping)):
            return False
        if _is_record(hint) and isinstance(value, Sized):
            return len(value) == len(get_args(hint))
        return True
    if kind in _NUMBERS:
        is_scalar = hasattr(value, "dtype") and np.ndim(value) == 0
        if is_scalar and _is_among(value.dtype, _NUMBERS[kind]):
            return True
        if isinstance(value, bool):
            return kind is bool
        return isinstance(value, (int, float) if kind is float else kind)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _misfit_of_entries(
    value: Sequence[Any] | Mapping[Any, Any], hint: object, name: str
) -> _Misfit | None:
    """The first entry of a list or mapping that does not match `hint`. None if all match."""
    args = get_args(hint)
    if isinstance(value, Mapping):
        entries: Iterable[Any] = value.items()
    else:
        entries = enumerate(value)
    if _is_record(hint):
        entry_hints = args
    elif get_origin(hint) in _MAPPINGS:
        entry_hints = (args[1],) * len(value)
    else:
        entry_hints = (args[0],) * len(value)
    for (key, entry), entry_hint in zip(entries, entry_hints, strict=True):
        misfit = _misfit(entry, entry_hint, f"{name}[{key!r}]")
        if misfit is not None:
            return misfit
    return None


def _misfit_of_union(value: object, hint: object, name: str) -> _Misfit | None:
    """The mismatch to report for a union type. None if the value matches a type in the union."""
    misfits = []
    for alternative in get_args(hint):
        misfit = _misfit(value, alternative, name)
        if misfit is None:
            return None
        misfits.append(misfit)
    # If a list or mapping has a wrong entry, report the entry. If a value has an expected type but
    # is not an allowed value, report a ValueError.
    for misfit in misfits:
        if misfit.name != name:
            return misfit
        if misfit.error is ValueError:
            return misfit._replace(hint=hint, value=value)
    return _Misfit(TypeError, name, hint, value)


def _array_error(value: Any, hint: Any) -> type[Exception] | None:
    """Class of the error if `value` does not match the array annotation `hint`, else None."""
    try:
        array = value
        is_array = isinstance(value, (jax.Array, np.ndarray))
        is_foreign = hasattr(value, "__array__") and not is_array
        if is_foreign or isinstance(value, (list, tuple)):
            array = np.asarray(value)
        dtype = array.dtype
        shape = tuple(array.shape)
    except (ValueError, AttributeError, TypeError):
        # NumPy cannot convert the value, or the value is not an array.
        return TypeError
    dtypes = _dtypes_of(hint)
    axes = hint.dim_str.split()
    if dtypes == _INTEGERS and 0 in shape:
        # NumPy converts an empty list of integers to floats.
        dtypes = _REALS
    if np.ma.isMaskedArray(array) or not _is_among(dtype, dtypes):
        return TypeError
    accepts_any_rank = any(axis[0] in "*." for axis in axes)
    if accepts_any_rank or len(shape) == len(axes):
        return None
    return ValueError


def _words_for(hint: Any) -> str:
    """Text for an error message about the values that an annotation allows."""
    kind = get_origin(hint) or hint
    args = get_args(hint)
    if kind is Annotated:
        return _words_for(args[0])
    if kind is Literal:
        return " or ".join(map(repr, args))
    if kind in (Union, types.UnionType):
        if any(_dtypes_of(arg) == _KEYS for arg in args):
            # In a union with a typed PRNG key (`jax.random.key`), an integer array means a raw key
            # (`jax.random.PRNGKey`), which the error message does not mention.
            args = tuple(arg for arg in args if _dtypes_of(arg) != _INTEGERS)
        return " or ".join(dict.fromkeys(map(_words_for, args)))
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _SEQUENCES:
        if _is_record(hint):
            return f"({', '.join(map(_words_for, args))})"
        if not args or args[0] is Any:
            return "a list"
        return f"a list (each {_words_for(args[0])})"
    if kind in _MAPPINGS:
        if not args or args[1] is Any:
            return "a mapping"
        return f"a mapping (each {_words_for(args[1])})"
    dtypes = _dtypes_of(kind)
    if dtypes == _KEYS:
        return "a PRNG key, such as jax.random.key(0)"
    if dtypes:
        axes = kind.dim_str.replace("...", "").split()
        words = "an array of numbers" if kind.dim_str else "a number"
        if dtypes == _INTEGERS:
            words = "an array of integers"
        if axes:
            words += f" [{', '.join(axes)}]"
        return words
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"a member of {name}, such as {name}.{next(iter(kind)).name}"
    if name == "Rngs":
        return "of type Rngs, as in nnx.Rngs(0)"
    return f"of type {name}"


def _is_record(hint: object) -> bool:
    """Whether `hint` describes a tuple of fixed length, such as `tuple[int, str]`."""
    return get_origin(hint) is tuple and get_args(hint)[-1:] != (...,)


def _dtypes_of(hint: object) -> tuple[Any, ...]:
    """Kinds of dtypes that an array annotation accepts, or () for other annotations.

    An annotation of a float array accepts floats and integers.
    """
    if not isinstance(hint, type) or not issubclass(hint, AbstractArray):
        return ()
    word = hint.__name__.partition("[")[0]
    if word == "Key":
        return _KEYS
    return _INTEGERS if "Int" in word else _REALS


def _is_among(dtype: Any, kinds: tuple[Any, ...]) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
