"""Admission, eviction and initial values of rows, by the names of DeepRec, SOK and Keras."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """Admits a key once it has occurred more than `filter_freq` times. Source: DeepRec, `tf.CounterFilter`."""

    filter_freq: int = 0


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """Evicts keys not used for more than `steps_to_live` steps. Source: DeepRec, `tf.GlobalStepEvict`."""

    steps_to_live: int | None = None


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """Evicts keys whose row has half a squared L2 norm below the threshold; none if that is negative.

    Source: DeepRec, `tf.L2WeightEvict`, whose pages say norm and whose code takes half of the sum of squares.
    """

    l2_weight_threshold: float = -1.0


@dataclasses.dataclass(frozen=True)
class EmbeddingVariableOption:
    """Options of an embedding variable. Source: DeepRec, `tf.EmbeddingVariableOption`.

    Args:
      evict_option: which keys `variable.evict()` lets go; None keeps all.
      filter_option: which keys get rows; None admits every key at once.
    """

    evict_option: GlobalStepEvict | L2WeightEvict | None = None
    filter_option: CounterFilter | None = None

    def as_policies(self) -> dict[str, float]:
        """The same options as arguments of `embedding_variable`."""
        evict, admit = self.evict_option, self.filter_option
        said: dict[str, float] = {} if admit is None else {"admission_count": admit.filter_freq}
        if isinstance(evict, GlobalStepEvict) and evict.steps_to_live is not None:
            said["steps_to_live"] = evict.steps_to_live
        if isinstance(evict, L2WeightEvict) and evict.l2_weight_threshold >= 0:
            said["l2_weight_threshold"] = evict.l2_weight_threshold
        return said


def core_policies(where: str, option: EmbeddingVariableOption | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Policies as `steps_to_live`, `l2_weight_threshold` and `rsembed.Hashed` arguments, from any published form.

    Args:
      where: names the table in errors.
      option: policies in DeepRec's form.
      given: policies as arguments, or SOK's `evict_strategy` and `filter_ratio`; None leaves one of these four out.

    Raises: ValueError: a strategy has no counterpart, or two arguments say the same.
    """
    may_be_none = ("steps_to_live", "l2_weight_threshold", "evict_strategy", "filter_ratio")
    policies = {name: value for name, value in given.items() if value is not None or name not in may_be_none}
    published: dict[str, dict[str, Any]] = {"ev_option": {} if option is None else option.as_policies()}
    if (strategy := policies.pop("evict_strategy", None)) is not None:
        published["evict_strategy"] = {"when_full": "evict", "eviction": str(strategy).lower()}
        if str(strategy).lower() not in ("lru", "lfu"):
            raise ValueError(
                f"{where}: evict_strategy {strategy!r} has no counterpart; choose 'LRU' or 'LFU', or when_full='evict' "
                "with eviction='age' or 'l2'."
            )
    if (ratio := policies.pop("filter_ratio", None)) is not None:
        published["filter_ratio"] = {"admission_probability": ratio}
    for source, own in published.items():
        if both := sorted(set(policies) & set(own)):
            raise ValueError(f"{where}: {source} says what {', '.join(both)} says, too; leave one of them out.")
        policies |= own
    return policies


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


def named_initializer(initializer: str | float | Callable[..., Array], table_name: str) -> Callable[..., Array]:
    """An initializer `(key, shape) -> array` from a function, a name, or a constant (a number, or it as text).

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
