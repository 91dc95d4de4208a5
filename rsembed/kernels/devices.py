"""The devices that a computation is for, here or only compiled for, and the threads that CPU devices share."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from rsembed.jax_internals import has_devices

TARGETS = {
    "v5p": AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu"),
    "v6e": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
    "tpu7x": AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu"),
    "h100": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "h200": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
}
"""Devices by short name, as JAX describes them."""


def target_device() -> AbstractDevice:
    """The device that the surrounding trace is for: that of its mesh, or JAX's default."""
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
    """Context in which JAX traces and lowers for a device that this machine need not have.

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


FEWEST_PER_DEVICE = 2
_PER_DEVICE, _LIKELY_DEVICES = 4, 4  # scripts may ask for their devices after `import rsembed`
_SHARED_POOL = jax.__version_info__ < (0, 12)
_FAKE_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_num_threads: int | None = None  # of the pool that XLA will make, or has made


def provide_threads() -> None:
    """Sets `NPROC`, unless it is high enough or JAX has made its devices; `check_threads` warns of the latter."""
    global _num_threads
    fake = _FAKE_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    config: Any = jax.config  # whose settings the stubs of some versions do not know
    num_devices = max(config.jax_num_cpu_devices, int(fake[-1]) if fake else 1, 1)
    if not has_devices():
        os.environ.update(thread_settings(num_devices))
    elif _num_threads is not None:
        return
    _num_threads = _pool_size()


def thread_settings(num_devices: int) -> dict[str, str]:
    """Environment variables that a process with so many CPU devices needs; empty where it has enough threads."""
    given = os.environ.get("NPROC", "")
    expected = num_devices if given.isdecimal() else max(num_devices, _LIKELY_DEVICES)
    if not _SHARED_POOL or expected == 1 or _pool_size() >= FEWEST_PER_DEVICE * expected:
        return {}
    return {"NPROC": str(_PER_DEVICE * max(num_devices, _LIKELY_DEVICES))}


def check_threads(mesh: Mesh) -> None:
    """Warns where the devices of a mesh may block each other for want of threads."""
    own = [d for d in mesh.devices.flat if d.platform == "cpu" and d.process_index == jax.process_index()]
    threads = max(_num_threads or _pool_size(), len(jax.local_devices(backend="cpu")) if own else 0)
    if _SHARED_POOL and len(own) > 1 and threads < FEWEST_PER_DEVICE * len(own):
        warnings.warn(
            f"a mesh has {len(own)} CPU devices of this process, but XLA's pool has {threads} threads: collectives can "
            f"block each other for ever, and XLA then aborts the process. Use at least {FEWEST_PER_DEVICE} threads a "
            f"device: start Python with the environment variable NPROC={_PER_DEVICE * len(own)}, or import rsembed and "
            "ask for the devices (jax_num_cpu_devices) before JAX makes its first array.",
            RuntimeWarning,
            stacklevel=1,  # of one place, wherever meshes enter, so that it is shown once
        )


def granted_cores() -> int:
    """Number of cores that this process may run on, which a container or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool_size() -> int:
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() else granted_cores()


provide_threads()  # importing any part of rsembed is early enough, if no array was made before
