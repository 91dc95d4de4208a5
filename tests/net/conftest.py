"""The tables of the net begin as when its bits were recorded."""

import pytest


@pytest.fixture
def quick_initial_values() -> None:
    """None: the record has the library's own."""
