"""What the rows of new keys start from, by the names of Keras and of SOK."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


def uniform_initializer(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Uniform values in [-0.05, 0.05). Source: the default of `sok.DistributedEmbedding`."""
    return jax.random.uniform(key, shape, jnp.float32, -0.05, 0.05)


NAMED_INITIALIZERS: dict[str, Callable[..., Array]] = {
    "uniform": uniform_initializer,
    "normal": lambda key, shape: 0.05 * jax.random.normal(key, shape, jnp.float32),
    "truncated_normal": lambda key, shape: 0.05 * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32),
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
}
"""Keras' names and scales; `random_uniform`, `RandomUniform`, SOK's `random` and so on mean the same."""
_ALIASES = {"random": "uniform", "zero": "zeros", "one": "ones"}
_OF_WHOLE_TABLES = re.compile(r"glorot|xavier|he_|lecun|variance_scaling|orthogonal|identity")


def named_initializer(initializer: Any, table_name: str) -> Callable[..., Array]:
    """`(key, shape) -> array` from such a function, a name, or a number that all rows start from, also as a text.

    Raises: ValueError: the name is unknown, or means values that follow from the number of rows.
    """
    if callable(initializer):
        return initializer
    given = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(initializer)).lower()
    known = given.removeprefix("random_")
    known = _ALIASES.get(known, known)
    if known in NAMED_INITIALIZERS:
        return NAMED_INITIALIZERS[known]
    try:
        return jax.nn.initializers.constant(float(given))
    except ValueError:
        pass
    if _OF_WHOLE_TABLES.match(given):
        raise ValueError(
            f"table {table_name!r}: initializer {initializer!r} follows from the number of rows, and rows for keys are "
            "made one by one; pass a function of (key, shape) with a scale of your own."
        )
    raise ValueError(
        f"table {table_name!r}: unknown initializer {initializer!r}; choose one of {', '.join(NAMED_INITIALIZERS)}, or "
        "pass a number or a function of (key, shape)."
    )
