"""Shared library of native kernels: finding it, its abilities on this machine, and calls of its handlers."""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jaxtyping import Array, PyTree

from rsembed.kernels.devices import target_device

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
    *("rsembed_train_rows", "rsembed_train_pull"),  # called by rsembed/tt/chain.py
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
