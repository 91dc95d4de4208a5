"""What fields and arguments must be, declared beside them: of which kind, and in which interval if they are numbers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Hashable, Iterator
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

import jax
import numpy as np

from rsembed.kinds import check_kind

Record = TypeVar("Record")
Function = TypeVar("Function", bound=Callable[..., Any])
Count = Annotated[int, "[1, inf)"]
"""A number of things of which there must be one."""
Size = Annotated[int, "[0, inf)"]
"""A number of things of which there may be none."""


def within(interval: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field whose numbers `check_fields` holds to an interval.

    Args:
      interval: as in a textbook, such as `[0, 1)` or `(0, inf]`. NaN lies in none.
      default: the field's default.
    """
    return dataclasses.field(default=default, metadata={"interval": interval})


def check_fields(record: Any) -> None:
    """Raises: TypeError, ValueError: a field is of another kind than annotated, or outside the interval of `within`."""
    kind: Any = type(record)
    hints = _hints(kind)
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{kind.__name__}: {field.name}"
        if interval := field.metadata.get("interval"):
            check_within(interval, value, name)
        elif field.name in hints:
            _check(value, hints[field.name], name)


def door(function: Function) -> Function:
    """The function, which refuses arguments of another kind than its signature says, or outside their interval.

    For what is called seldom: whoever declares, plans, loads or saves. What runs in every step checks what it is given
    by itself.

    Example:
      >>> @door
      ... def cut(num_parts: Count) -> int:
      ...     return num_parts
      >>> cut("2")
      Traceback (most recent call last):
        ...
      TypeError: cut: num_parts must be an integer, got '2' (str).
    """
    own = inspect.unwrap(function)
    code, where = own.__code__, own.__qualname__
    positional = code.co_varnames[: code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        hints = _hints(own)
        given = [*zip(positional, args, strict=False), *((rest, value) for value in args[len(positional) :])]
        given += kwargs.items()
        what = type(args[0]).__name__ if own.__name__ == "__init__" else where
        label = next((f" {value!r}" for name, value in given if name == "name" and isinstance(value, str)), "")
        for name, value in given:
            if name in hints:
                _check(value, hints[name], f"{what}{label}: {name}")
        return function(*args, **kwargs)

    return cast(Function, checked)


@functools.cache
def _hints(owner: Hashable) -> dict[str, Any]:
    """Annotations of a function or of a class with its bases; without those that only a type checker can read."""
    return dict(_read_hints(owner))


def _read_hints(owner: Any) -> Iterator[tuple[str, Any]]:
    for part in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        names = vars(inspect.getmodule(part) or part)
        for name, hint in getattr(part, "__annotations__", {}).items():
            try:
                yield name, eval(hint, names) if isinstance(hint, str) else hint
            except (NameError, TypeError, AttributeError, SyntaxError):
                continue


def _check(value: Any, hint: Any, name: str) -> None:
    check_kind(value, hint, name)
    for own in (hint, *get_args(hint)):  # also of one that may be None
        if get_origin(own) is Annotated:
            check_within(own.__metadata__[0], value, name)


def checked(record: type[Record]) -> type[Record]:
    """A class, to be made a dataclass, whose objects hold their numbers to the intervals of their fields."""
    record.__post_init__ = check_fields  # type: ignore[attr-defined]
    return record


def check_within(interval: str, value: Any, name: str) -> None:
    """Raises: TypeError, ValueError: `value` is no number, or outside `interval`.

    Functions (schedules, initializers) and traced values are known only later, and pass; so does None, for a number
    that may be left out.

    Example:
      >>> check_within("[0, 1)", 1.0, "Adam: beta_1")
      Traceback (most recent call last):
        ...
      ValueError: Adam: beta_1 must be in [0, 1), got 1.0.
    """
    if value is None or callable(value) or isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number in {interval}, got {type(value).__name__}.")
    number, (low, high) = float(value), map(float, interval[1:-1].split(","))
    is_above = low <= number if interval[0] == "[" else low < number
    is_below = number <= high if interval[-1] == "]" else number < high
    if not (is_above and is_below):
        raise ValueError(f"{name} must be in {interval}, got {value}.")
