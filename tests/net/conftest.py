"""The net is compiled, and its tables begin, as when its bits were recorded."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def as_recorded(more_optimizations: None) -> None:
    """For every run of the net."""


@pytest.fixture
def quick_initial_values() -> None:
    """None: the record has the library's own."""
