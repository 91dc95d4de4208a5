"""What the modules refuse when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.tt.spec import TTSpec


def check_options(
    specs: Sequence[TTSpec], *, mode: str, bounds_check: str, dtype: np.dtype[Any], padding_idx: int | None
) -> None:
    """Raises: ValueError: an option is unknown, or the padding id is no row of every table."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}; max is not a linear function of the cores.")
    if bounds_check not in ("raise", "ignore"):
        raise ValueError(f"bounds_check must be 'raise' or 'ignore', got {bounds_check!r}.")
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}.")
    if padding_idx is not None and not 0 <= padding_idx < min(spec.num_embeddings for spec in specs):
        raise ValueError(f"padding_idx={padding_idx} is no row of every table; it must be an id that all have.")


def check_numbers(*, eps: float, **whole_numbers: Any) -> None:
    """Raises: ValueError: `eps` is negative or not finite, or one of the others is no whole number of at least 0."""
    check_not_negative(eps=eps)
    for name, value in whole_numbers.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 0.")


def check_not_negative(**numbers: float | None) -> None:
    """Raises: ValueError: one of the numbers is given, and negative or not finite."""
    for name, value in numbers.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value} must be a finite number of at least 0.")


def check_learning_rate(learning_rate: Any) -> None:
    """Raises: ValueError: it is known, and negative or not finite."""
    if not isinstance(learning_rate, jax.core.Tracer):
        check_not_negative(learning_rate=learning_rate)
