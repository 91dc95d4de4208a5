"""Tables must have the initial values with which the results were recorded."""

import pytest


@pytest.fixture
def quick_initial_values() -> None:
    """Keeps the library's initial values, because the record was made with them."""
