"""Threads for the CPU devices of this process, asked for before XLA makes them.

Until jax 0.12, XLA runs the parts of all CPU devices on one pool, with as many threads as there are cores or devices.
A collective holds its thread until all devices have joined. With several programs under way, the threads can all be
held by devices that wait for one that has none, and after 40 s XLA aborts the process. Below two threads a device we
saw that in nearly every run with programs under way (2 to 16 devices on 2 cores), from two on never. XLA reads the
number from the environment variable `NPROC`. From 0.12 on every device has a thread of its own for this.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from rsembed.jax_internals import has_devices

FEWEST_PER_DEVICE = 2
_PER_DEVICE, _LIKELY_DEVICES = 4, 4  # scripts may ask for their devices after `import rsembed`
_SHARED_POOL = jax.__version_info__ < (0, 12)
_FAKE_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_num_threads: int | None = None  # of the pool that XLA will make, or has made


def provide_threads() -> None:
    """Sets `NPROC` unless it is set high enough, or JAX has made its devices already; then `check_threads` says so."""
    global _num_threads
    fake = _FAKE_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    config: Any = jax.config  # whose settings the stubs of some versions do not know
    num_devices = max(config.jax_num_cpu_devices, int(fake[-1]) if fake else 1, 1)
    if not has_devices():
        os.environ.update(settings(num_devices))
    elif _num_threads is not None:
        return
    _num_threads = _pool_size()


def settings(num_devices: int) -> dict[str, str]:
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
    """Cores that this process may run on: a container, a batch system or `taskset` may grant fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool_size() -> int:
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() else granted_cores()


provide_threads()  # importing any part of rsembed is early enough, if no array was made before
