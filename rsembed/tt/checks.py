"""Checks of modules and functions before they begin."""

from __future__ import annotations

import numbers
from typing import Any

from rsembed.checks import check_within

CORE_DTYPES = ("float32", "bfloat16")


def check_options(num_rows: int, *, mode: str, bounds_check: str, padding_idx: int | None) -> None:
    """Raises: ValueError: an option is unknown, or the padding id is none of the `num_rows` that every table has."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}; max is not a linear function of the cores.")
    if bounds_check not in ("raise", "ignore"):
        raise ValueError(f"bounds_check must be 'raise' or 'ignore', got {bounds_check!r}.")
    if padding_idx is not None and not 0 <= padding_idx < num_rows:
        raise ValueError(f"padding_idx={padding_idx} is no row of every table; it must be an id that all have.")


def check_numbers(**given: Any) -> None:
    """Raises: TypeError, ValueError: one of the numbers is negative or not finite. None and traced ones pass."""
    for name, value in given.items():
        check_within("[0, inf)", value, name)


def check_one_of(what: str, **given: Any) -> None:
    """Raises: ValueError: `what` was not given exactly one of these, or a number that is negative or not finite."""
    names = [f"{name}=" for name in given]
    if sum(value is not None for value in given.values()) != 1:
        raise ValueError(
            f"{what} needs exactly one of {', '.join(names[:-1])} and {names[-1]}, got "
            f"{', '.join(map(str, given.values()))}."
        )
    check_numbers(**{name: value for name, value in given.items() if isinstance(value, numbers.Real)})
