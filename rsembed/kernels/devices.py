"""The devices that a computation is for, the threads of CPU devices, and the shared library of native kernels.

It is the only file that reaches into JAX, for two facts that have no public name.
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
"""Devices by short name, as JAX describes them."""


def has_devices() -> bool:
    """Whether JAX has made its devices, after which settings of theirs come too late."""
    return backends_are_initialized()


def service_of_processes() -> Any:
    """The key-value service through which processes found each other, or None in a single process."""
    return distributed.global_state.client


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


LIBRARY = "librsembed_kernels.so"
# Names a library to load instead of the installed one, for work on the C++ itself.
LIBRARY_VARIABLE = "RSEMBED_NATIVE_LIBRARY"
# Names the best instruction set to use, which the library reads itself.
ISA_VARIABLE = "RSEMBED_ISA"
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps for the next results."""
# Whoever sets one of these has chosen what the allocator does.
_ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_TARGETS = (
    *("rsembed_lookup", "rsembed_row_gradients", "rsembed_squared_norm", "rsembed_update", "rsembed_apply_rows"),
    *("rsembed_lookup_jagged", "rsembed_row_gradients_jagged", "rsembed_update_jagged", "rsembed_weight_gradients"),
    *("rsembed_gather_rows", "rsembed_scatter_rows", "rsembed_rows_by_bag", "rsembed_allocate"),
    *("rsembed_distinct", "rsembed_unique_keys", "rsembed_find_keys", "rsembed_insert_keys"),
    *("rsembed_count_uses", "rsembed_row_bits", "rsembed_rows_of_ids", "rsembed_count_ids"),
    *("rsembed_compact", "rsembed_take_rows", "rsembed_pack_blocks", "rsembed_unpack_blocks"),
    *("rsembed_block_ends", "rsembed_round_places", "rsembed_entries_by_sample"),
    *("rsembed_pair_products", "rsembed_pull_pairs"),
    *("rsembed_train_rows", "rsembed_train_pull"),  # called by rsembed/tt/cores.py
)


def library_paths() -> tuple[Path, ...]:
    """Paths at which the library may be, in the order of the search; an editable install keeps it off the sources."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        return (Path(named),)
    folders = [Path(__file__).parent]
    folders += [Path(sysconfig.get_path(key)) / "rsembed" / "kernels" for key in ("platlib", "purelib")]
    return tuple(folder / LIBRARY for folder in dict.fromkeys(folders))


@functools.cache
def shared_library() -> ctypes.CDLL | str:
    """The library with its handlers registered, or the reason why there is none, whatever JAX's backend.

    Raises: ValueError: `RSEMBED_ISA` names no instruction set, so that its author would measure another one unawares.
    """
    if (limit := os.environ.get(ISA_VARIABLE, "")) not in ("", *INSTRUCTION_SETS):
        raise ValueError(f"{ISA_VARIABLE}={limit!r} names no instruction set; it knows {', '.join(INSTRUCTION_SETS)}.")
    path = next((path for path in library_paths() if path.is_file()), None)
    if path is None and (named := os.environ.get(LIBRARY_VARIABLE)):
        return f"{LIBRARY_VARIABLE} names {named}, which is no file"
    if path is None:
        return f"{LIBRARY} is not installed; reinstall rsembed where a C++ compiler is found"
    try:
        library = ctypes.CDLL(str(path))
        library.rsembed_instruction_set.restype = ctypes.c_char_p
        library.rsembed_num_cores.restype = ctypes.c_int64
        library.rsembed_keep_freed_memory.argtypes = (ctypes.c_size_t,)
    except (OSError, AttributeError) as error:  # not loadable here, or of another version
        return f"{path} cannot be used: {error}"
    try:
        for name in _TARGETS:
            if (handler := getattr(library, name, None)) is not None:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        # pip builds with the newest jaxlib of its index, whose handlers the one installed here may not know.
        return (
            f"{path} was not made for jaxlib {jaxlib.__version__}: {error}; reinstall rsembed with "
            f"PIP_CONSTRAINT naming a file that says jaxlib=={jaxlib.__version__}"
        )
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        library.rsembed_keep_freed_memory(KEPT_BYTES)
    return library


def unavailable_because() -> str | None:
    """Why these kernels cannot run here, or None if they can."""
    library = shared_library()
    if isinstance(library, str):
        return library
    platform = target_device().platform
    if platform != "cpu":
        return f"the native kernels run on CPUs, but the computation is for {platform}"
    return None


def warn_of_slow_cpu() -> None:
    """Warns once, where a computation for the CPU does without the native kernels since there is no library."""
    library = shared_library()
    if isinstance(library, str) and target_device().platform == "cpu":
        _warn_of_no_library(library)


@functools.cache
def _warn_of_no_library(reason: str) -> None:
    warnings.warn(
        f"rsembed computes without its native CPU kernels, correctly but slower: {reason}. "
        "`rsembed doctor` says whether they are live. With RSEMBED_REQUIRE_NATIVE=1 in the environment, pip stops "
        "at what the compiler says.",
        RuntimeWarning,
        stacklevel=1,  # of one place, so that it is shown once
    )


def instruction_set() -> str | None:
    """Instruction set that the library chose: `baseline`, `avx2` or `avx512`; None without a library."""
    library = shared_library()
    return None if isinstance(library, str) else library.rsembed_instruction_set().decode()


def num_cores() -> int | None:
    """Most threads that work on one call: the cores granted to this process; None without a library."""
    library = shared_library()
    return None if isinstance(library, str) else library.rsembed_num_cores()


def call_handler(
    target: str,
    results: Sequence[Array | jax.ShapeDtypeStruct],
    *operands: Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> PyTree:
    """Results of a handler of the library, a tuple of arrays.

    Args:
      target: name of the handler.
      results: anything that has the shape and dtype of each result.
      operands: arrays that the handler reads.
      aliases: operands that it changes where they lie, and the results that they become.
      attributes: numbers that are known when the call is traced; integers of Python, and lists of them, become int64.

    Raises: NotImplementedError: the library was built from sources without this handler.
    """
    if getattr(shared_library(), target, None) is None:
        raise NotImplementedError(f"the installed {LIBRARY} is older than {target}; reinstall rsembed")
    shapes = [jax.ShapeDtypeStruct(own.shape, own.dtype) for own in results]
    call = jax.ffi.ffi_call(target, shapes, vmap_method="sequential", input_output_aliases=aliases)
    numbers = {name: np.int64(value) if type(value) in (int, list) else value for name, value in attributes.items()}
    varying = vary_alike(operands)
    returned = call(*varying, **numbers)
    # JAX does not infer for the results of a foreign call over which axes they vary.
    return tuple(vary_alike([*returned, *varying[:1]])[: len(returned)])


def vary_alike(arrays: Sequence[PyTree]) -> list[PyTree]:
    """The arrays cast so that all vary over the same mesh axes, as one operation in `shard_map` needs them."""
    varying = [jax.typeof(array).mat.varying for array in arrays]
    axes, alike = frozenset[str]().union(*varying), []
    for array, own in zip(arrays, varying, strict=True):
        missing = tuple(sorted(axes - own))
        alike.append(jax.lax.pcast(array, missing, to="varying") if missing else array)
    return alike


provide_threads()  # importing any part of rsembed is early enough, if no array was made before
