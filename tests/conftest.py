"""What every test runs under: eight CPU devices, strict dtypes and ranks, no figure left open."""

import os
import sys
from collections.abc import Iterator

import jax
import matplotlib
import pytest

# Settings go through jax and matplotlib, not the environment: notebooks run in child processes of the
# same test run, and must see what a user sees.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
matplotlib.use("Agg")


def pytest_sessionstart() -> None:
    """Tests of the native kernels may skip where there are none, but not where they were required."""
    from rsembed.kernels import native  # by now the hook that checks shapes is in place

    reason = native.unavailable_because()
    if reason is not None and os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
        raise pytest.UsageError(f"RSEMBED_REQUIRE_NATIVE=1, but {reason}")


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
