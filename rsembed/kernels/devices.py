"""Target device of a computation, threads of CPU devices, and the library of native kernels.

This is the only file that imports private modules of JAX. rsembed needs two pieces of information
that have no public name in JAX.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import distributed
from jax._src.xla_bridge import backends_are_initialized
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jaxtyping import Array, PyTree

TARGETS = {
    "v5p": AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu"),
    "v6e": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
    "tpu7x": AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu"),
    "h100": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "h200": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
}
"""JAX's description of each device that `tracing_for` accepts, by short name."""


def has_devices() -> bool:
    """Whether JAX has created its devices.

    Settings such as `NPROC` have no effect after JAX has created its devices.
    """
    return backends_are_initialized()


def service_of_processes() -> Any:
    """Client of the key-value service that JAX processes share, or None in a single process."""
    return distributed.global_state.client


def target_device() -> AbstractDevice:
    """Device that JAX traces for: the device of the abstract mesh, else JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    return _default_device(jax.default_backend())


@functools.cache  # Cached, because every eager call needs the default device.
def _default_device(platform: str) -> AbstractDevice:
    first = jax.devices(platform)[0]
    return AbstractDevice(first.device_kind, getattr(first, "num_cores", None), platform)


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
    """Context in which JAX traces and lowers for a device that this machine may lack.

    Example:
      >>> with tracing_for("v6e"):
      ...     target_device().platform
      'tpu'

    Raises: ValueError: the name is not in `TARGETS`.
    """
    if name not in TARGETS:
        raise ValueError(f"unknown device {name!r}; choose one of {', '.join(TARGETS)}.")
    axis_types = (AxisType.Auto,)
    device = TARGETS[name]
    mesh = AbstractMesh((1,), ("device",), axis_types=axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


FEWEST_PER_DEVICE = 2
"""Minimum number of threads per CPU device.

With fewer than `FEWEST_PER_DEVICE` threads per CPU device, collectives can block each other.
"""
_PER_DEVICE = 4
_LIKELY_DEVICES = 4  # Scripts may request CPU devices after `import rsembed`.
_SHARED_POOL = jax.__version_info__ < (0, 12)  # Before JAX 0.12, CPU devices share a thread pool.
_FAKE_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_num_threads: int | None = None  # Size of XLA's pool, None before `provide_threads` runs.


def provide_threads() -> None:
    """Sets `NPROC` so that XLA's pool has enough threads for the CPU devices.

    `NPROC` does not change if it is high enough, or if JAX has already created its devices.
    `check_threads` warns if XLA's pool is too small for a mesh.
    """
    global _num_threads
    fake = _FAKE_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    num_fake = int(fake[-1]) if fake else 1
    config: Any = jax.config  # Some type stubs of JAX lack `jax_num_cpu_devices`.
    if not has_devices():
        num_devices = max(config.jax_num_cpu_devices, num_fake, 1)
        os.environ.update(thread_settings(num_devices))
    elif _num_threads is not None:
        return
    _num_threads = _pool_size()


def thread_settings(num_devices: int) -> dict[str, str]:
    """Environment variables for a process with `num_devices` CPU devices.

    The dictionary is empty if the CPU devices need no more threads than XLA's pool has, or if each
    device has a separate pool.
    """
    is_set = os.environ.get("NPROC", "").isdecimal()
    likely = max(num_devices, _LIKELY_DEVICES)
    expected = num_devices if is_set else likely
    if not _SHARED_POOL or expected == 1 or _pool_size() >= FEWEST_PER_DEVICE * expected:
        return {}
    return {"NPROC": str(_PER_DEVICE * likely)}


def check_threads(mesh: Mesh) -> None:
    """Warns if XLA's pool has too few threads for the CPU devices of a mesh in this process."""
    num_devices = 0
    for device in mesh.devices.flat:
        if device.platform == "cpu" and device.process_index == jax.process_index():
            num_devices += 1
    if not _SHARED_POOL or num_devices < 2:
        return
    threads = max(_num_threads or _pool_size(), len(jax.local_devices(backend="cpu")))
    if threads < FEWEST_PER_DEVICE * num_devices:
        warnings.warn(
            f"a mesh has {num_devices} CPU devices of this process, but XLA's pool has {threads} "
            "threads: collectives can block each other for ever, and XLA then aborts the process. "
            f"Use at least {FEWEST_PER_DEVICE} threads a device: start Python with the environment "
            f"variable NPROC={_PER_DEVICE * num_devices}, or import rsembed and ask for the "
            "devices (jax_num_cpu_devices) before JAX makes its first array.",
            RuntimeWarning,
            stacklevel=1,  # Python shows warnings with the same location only once.
        )


def granted_cores() -> int:
    """Number of CPU cores that this process may use, which a container or `taskset` can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pool_size() -> int:
    """Number of threads in XLA's pool: `NPROC`, or by default the number of granted CPU cores."""
    num_threads = os.environ.get("NPROC", "")
    return int(num_threads) if num_threads.isdecimal() else granted_cores()


LIBRARY = "librsembed_kernels.so"
LIBRARY_VARIABLE = "RSEMBED_NATIVE_LIBRARY"
"""Environment variable with the path of a native library to load instead of the installed one."""
ISA_VARIABLE = "RSEMBED_ISA"
"""Environment variable that limits the instruction set of the native kernels.

The native library reads `RSEMBED_ISA`.
"""
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

KEPT_BYTES = 256 << 20
"""Bytes of freed memory that the process keeps for later results."""
# Environment variables with which a user sets up the allocator. rsembed changes the allocator's
# settings only if none of `_ALLOCATOR_VARIABLES` is set.
_ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_HANDLERS = """
    lookup row_gradients squared_norm update apply_rows weight_gradients gather_rows scatter_into
    allocate distinct unique_keys find_keys insert_keys count_uses row_bits rows_of_ids count_ids
    compact take_rows pack_blocks unpack_blocks block_ends round_places entries_by_sample
    pair_products pull_pairs train_rows train_pull
"""  # `rsembed/tt/cores.py` calls `train_rows` and `train_pull`, `native.py` the others.


def library_paths() -> tuple[Path, ...]:
    """Paths where the native library may be, in search order.

    An editable install puts the library in site-packages and not beside the sources.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return (Path(named),)
    folders = [Path(__file__).parent]
    for key in ("platlib", "purelib"):
        folder = Path(sysconfig.get_path(key)) / "rsembed" / "kernels"
        if folder not in folders:
            folders.append(folder)
    return tuple(folder / LIBRARY for folder in folders)


@functools.cache
def shared_library() -> ctypes.CDLL | str:
    """The native library with its handlers registered, or the reason why it cannot be used.

    The library is loaded even if the default backend of JAX is not the CPU.

    Raises: ValueError: `RSEMBED_ISA` is not the name of an instruction set. The native library
      itself ignores a wrong name and uses the best instruction set.
    """
    limit = os.environ.get(ISA_VARIABLE, "")
    if limit not in ("", *INSTRUCTION_SETS):
        known = ", ".join(INSTRUCTION_SETS)
        raise ValueError(f"{ISA_VARIABLE}={limit!r} names no instruction set; it knows {known}.")
    path = next((path for path in library_paths() if path.is_file()), None)
    if path is None:
        named = os.environ.get(LIBRARY_VARIABLE)
        if named:
            return f"{LIBRARY_VARIABLE} names {named}, which is no file"
        return f"{LIBRARY} is not installed; reinstall rsembed where a C++ compiler is found"
    try:
        library = ctypes.CDLL(str(path))
        library.rsembed_instruction_set.restype = ctypes.c_char_p
        library.rsembed_keep_freed_memory.argtypes = (ctypes.c_size_t,)
    except (OSError, AttributeError) as error:
        # The library cannot be loaded here, or was built from a different version of rsembed.
        return f"{path} cannot be used: {error}"
    try:
        for name in _HANDLERS.split():
            target = f"rsembed_{name}"
            handler = getattr(library, target, None)
            if handler is not None:
                jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        # pip compiles the library for the newest jaxlib that it finds. An older jaxlib in the
        # user's environment may reject the handlers of the library.
        return (
            f"{path} was not made for jaxlib {jaxlib.__version__}: {error}; reinstall rsembed with "
            f"PIP_CONSTRAINT naming a file that says jaxlib=={jaxlib.__version__}"
        )
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        library.rsembed_keep_freed_memory(KEPT_BYTES)
    return library


def unavailable_because() -> str | None:
    """Reason why the native kernels cannot run here, or None if they can."""
    library = shared_library()
    if isinstance(library, str):
        return library
    platform = target_device().platform
    if platform != "cpu":
        return f"the native kernels run on CPUs, but the computation is for {platform}"
    return None


@functools.cache
def warn_of_slow_cpu(reason: str) -> None:
    """Warns once that a computation for the CPU cannot use the native library.

    Args:
      reason: why the library cannot be used.
    """
    warnings.warn(
        f"rsembed computes without its native CPU kernels, correctly but slower: {reason}. "
        "`rsembed doctor` says whether they are live. With RSEMBED_REQUIRE_NATIVE=1 in the "
        "environment, pip stops at what the compiler says.",
        RuntimeWarning,
        stacklevel=1,  # Python shows warnings with the same location only once.
    )


def instruction_set() -> str | None:
    """Instruction set in use: `baseline`, `avx2`, `avx512`, or None without native library."""
    library = shared_library()
    if isinstance(library, str):
        return None
    return library.rsembed_instruction_set().decode()


def call_handler(
    target: str,
    results: Sequence[Array | jax.ShapeDtypeStruct],
    *operands: Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> PyTree:
    """Calls a handler of the native library, and returns its results as a tuple of arrays.

    Args:
      target: name of the handler.
      results: arrays or `ShapeDtypeStruct` objects with the shape and dtype of each result.
      operands: arrays that the handler reads.
      aliases: index of each operand that the handler updates in place, mapped to the index of the
        result that the operand becomes. None, the default: the handler updates no operand.
      attributes: arguments that are known at trace time. Python integers and lists of integers
        become int64.

    Raises: NotImplementedError: the library was built from sources without this handler.
    """
    if getattr(shared_library(), target, None) is None:
        raise NotImplementedError(
            f"the installed {LIBRARY} is older than {target}; reinstall rsembed",
        )
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    numbers = {}
    for name, value in attributes.items():
        numbers[name] = np.int64(value) if type(value) in (int, list) else value
    call = jax.ffi.ffi_call(
        target,
        shapes,
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    varying = vary_alike(operands)
    returned = call(*varying, **numbers)
    # `vary_alike` makes the results of a foreign call vary over the same mesh axes as an operand,
    # because JAX does not infer the mesh axes of the results.
    cast = vary_alike([*returned, *varying[:1]])
    num_results = len(returned)
    return tuple(cast[:num_results])


def vary_alike(arrays: Sequence[PyTree]) -> list[PyTree]:
    """The arrays, cast so that all of them vary over the same mesh axes.

    Each result varies over all mesh axes over which at least one of `arrays` varies. In
    `shard_map`, the operands of an operation must vary over the same mesh axes.
    """
    varying = [jax.typeof(array).mat.varying for array in arrays]
    all_axes = frozenset[str]().union(*varying)
    cast = []
    for array, axes in zip(arrays, varying, strict=True):
        missing = tuple(sorted(all_axes - axes))
        if missing:
            array = jax.lax.pcast(array, missing, to="varying")
        cast.append(array)
    return cast


# `provide_threads` takes effect only if rsembed is imported before JAX creates its first array.
provide_threads()
