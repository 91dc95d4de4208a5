"""Numbers that must lie in an interval, declared beside the field or argument they belong to."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, TypeVar

import jax
import numpy as np

Record = TypeVar("Record")


def within(interval: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field whose numbers `check_fields` holds to an interval.

    Args:
      interval: as in a textbook, such as `[0, 1)` or `(0, inf]`. NaN lies in none.
      default: the field's default.
    """
    return dataclasses.field(default=default, metadata={"interval": interval})


def check_fields(record: Any) -> None:
    """Raises: TypeError, ValueError: a field made by `within` holds no number, or one outside its interval."""
    for field in dataclasses.fields(record):
        if interval := field.metadata.get("interval"):
            check_within(interval, getattr(record, field.name), f"{type(record).__name__}: {field.name}")


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
