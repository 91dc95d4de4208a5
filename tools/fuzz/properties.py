"""Targets: property tests of the suite, which run for minutes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis

from tests.sparsecore import test_native_partitioner
from tests.storage import test_set_associative

SETTINGS = hypothesis.settings(
    max_examples=50,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def tried(property_: Callable[..., Any], seed: int, **drawn: Any) -> int:
    """Runs a property test with drawn arguments, and returns the number of cases."""
    inner = property_.hypothesis.inner_test  # type: ignore[attr-defined]
    cases = 0

    @hypothesis.seed(seed)
    @SETTINGS
    @hypothesis.given(hypothesis.strategies.fixed_dictionaries(drawn))
    def each(arguments: dict[str, Any]) -> None:
        nonlocal cases
        cases += 1
        inner(**arguments)

    each()
    return cases


def partitioner(seed: int) -> int:
    """Compares the buffers and counts of the C++ partitioner with those of the NumPy one."""
    return tried(
        test_native_partitioner.test_equals_the_definition,
        seed,
        problem=test_native_partitioner.problems(),
    )


def cache(seed: int) -> int:
    """Compares the set-associative cache with a simulation, batch by batch."""
    integers = hypothesis.strategies.integers
    return tried(
        test_set_associative.test_admission_equals_the_simulation,
        seed,
        algorithm=hypothesis.strategies.sampled_from(["lru", "lfu"]),
        batches=test_set_associative.batches,
        num_sets=integers(1, 3),
        num_ways=integers(1, 4),
        num_ids=hypothesis.strategies.just(test_set_associative.NUM_IDS),
    )
