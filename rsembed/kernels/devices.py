"""The device a computation is for: the one JAX would run it on, or one that is not here and is only compiled for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

TARGETS = {
    "v5p": AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu"),
    "v6e": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
    "tpu7x": AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu"),
    "h100": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "h200": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
}
"""Devices by short name, as JAX describes them."""


def target_device() -> AbstractDevice:
    """The device that is traced for: that of the surrounding mesh, or JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    return _default_device(jax.default_backend())


@functools.cache  # asked in every eager call
def _default_device(platform: str) -> AbstractDevice:
    first = jax.devices(platform)[0]
    return AbstractDevice(first.device_kind, getattr(first, "num_cores", None), platform)


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Traces and lowers for a device that need not be here.

    Example:
      >>> with tracing_for("v6e"):
      ...     target_device().platform
      'tpu'

    Raises: ValueError: the name is not in `TARGETS`.
    """
    if name not in TARGETS:
        raise ValueError(f"unknown device {name!r}; choose one of {', '.join(TARGETS)}.")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=TARGETS[name])
    with jax.sharding.use_abstract_mesh(mesh):
        yield
