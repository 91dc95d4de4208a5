"""Multithreaded C++ partitioner, which returns bit for bit the same results as `partitioner.py`.

One call of the C++ library partitions all stacks of a batch. The C++ library reads ids of any
integer dtype without copies, and releases the GIL, so a Python thread can partition the next batch
during a training step.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np

from rsembed.arrays import AnyArray
from rsembed.bags import Bags
from rsembed.fdo.statistics import TableDrops
from rsembed.kernels import native
from rsembed.kernels.devices import granted_cores
from rsembed.sparsecore import partitioner
from rsembed.sparsecore.layout import number_from_environment
from rsembed.sparsecore.partitioner import (
    BUFFER_DTYPES,
    HostBatch,
    StackBuffers,
    record_drops,
)
from rsembed.specs import FeatureSpec
from rsembed.stacking import SUBLANES, round_up

THREADS_VARIABLE = "SPARSECORE_INPUT_PREPROCESSING_THREADS"
"""Environment variable with the maximum number of threads that partition a batch.

By default, at most one thread per available CPU core partitions a batch.

"""

# Starting a thread takes longer than partitioning fewer than `_MIN_IDS_PER_THREAD` ids.
_MIN_IDS_PER_THREAD = 16384
# Codes of combiners and id types, as in csrc/partition.h.
_GAIN_RULES = {"sum": 0, "mean": 1, "sqrtn": 2}
_ID_TYPES = {
    np.dtype(name): code
    for code, name in enumerate(
        ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    )
}
_LINE_BYTES = 64  # JAX does not copy arrays that begin at a multiple of 64 bytes.
_HUGE_PAGE_BYTES = 2 << 20
_PARTITIONED, _BAD_ENTRY = 0, 1


class _Feature(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("ids_per_sample", ctypes.c_int64),
        ("samples_per_core", ctypes.c_int64),
        ("vocabulary_size", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("first_sample", ctypes.c_int64),
        ("rotation", ctypes.c_int64),
        ("id_type", ctypes.c_int32),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("features", ctypes.POINTER(_Feature)),
        ("num_features", ctypes.c_int64),
        ("num_cores", ctypes.c_int64),
        ("num_shards", ctypes.c_int64),
        ("samples_per_core", ctypes.c_int64),
        ("max_ids", ctypes.c_int64),
        ("max_unique", ctypes.c_int64),
        ("places_per_core", ctypes.c_int64),
        ("pointers_per_core", ctypes.c_int64),
        ("row_pointers", ctypes.c_void_p),
        ("embedding_ids", ctypes.c_void_p),
        ("sample_ids", ctypes.c_void_p),
        ("gains", ctypes.c_void_p),
        ("num_ids", ctypes.c_void_p),
        ("num_unique", ctypes.c_void_p),
        ("drops", ctypes.c_void_p),
        ("gain_rule", ctypes.c_int32),
        ("drops_something", ctypes.c_int32),
    )


@functools.cache
def _partition_function() -> Any:
    """The partition function of the C++ library, or a string that says why it is missing."""
    library = native.shared_library()
    if isinstance(library, str):
        return library
    try:
        function = library.rsembed_partition
    except AttributeError:
        return "the installed library has no host partitioner; reinstall rsembed"
    function.argtypes = (ctypes.POINTER(_Stack), ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
    function.restype = ctypes.c_int32
    return function


def unavailable_because() -> str | None:
    """Reason why the C++ partitioner cannot run on this machine, or None if it can run."""
    function = _partition_function()
    return function if isinstance(function, str) else None


def num_threads() -> int:
    """Number of threads that partition a large batch.

    Raises: ValueError: the environment variable `THREADS_VARIABLE` is not a positive integer.
    """
    available = granted_cores()
    return min(available, number_from_environment(THREADS_VARIABLE, available))


def partition_stacks(batch: HostBatch) -> dict[str, StackBuffers]:
    """Input buffers of all stacks. Without the C++ library, `partitioner` computes the buffers.

    Raises:
      ValueError: an id is out of range, a weight is not finite, a limit is exceeded, or a buffer is
        too small.
    """
    if unavailable_because():
        return {name: partitioner.partition_stack(batch, name) for name in batch.layouts}
    tasks = {name: _StackTask(batch, name) for name in batch.layouts}
    block = _Block(sum(task.num_bytes for task in tasks.values()))
    for task in tasks.values():
        task.place_buffers(block)
    descriptors = (_Stack * len(tasks))(*(task.descriptor for task in tasks.values()))
    num_ids = sum(bags.ids.size for bags in batch.bags.values())
    threads = min(num_threads(), 1 + num_ids // _MIN_IDS_PER_THREAD)
    status = _partition_function()(descriptors, len(tasks), batch.allow_id_dropping, threads)
    if status == _BAD_ENTRY:
        for layout in batch.layouts.values():
            for feature in layout.features:
                partitioner.check_entries(feature, batch.bags[feature.name])
    if status != _PARTITIONED:
        raise MemoryError("no memory to partition a batch; use smaller batches or fewer threads.")
    buffers = {}
    for (name, task), descriptor in zip(tasks.items(), descriptors, strict=True):
        if batch.allow_id_dropping or not descriptor.drops_something:
            task.record(batch)
            buffers[name] = task.buffers
        else:
            # If ids exceed a limit or the buffer, the NumPy partitioner raises an error that names
            # the limit.
            buffers[name] = partitioner.partition_stack(batch, name)
    return buffers


class _Block:
    """One block of memory for the buffers of all stacks.

    With pages of normal size, the page faults of new memory take as long as sorting the ids. NumPy
    requests huge pages for large arrays, but only the parts of an array that fill a whole huge page
    get one. To get huge pages, a large block starts at the boundary of a huge page, and its size is
    rounded up to whole huge pages. The padding at the end of a block is never written.
    """

    def __init__(self, num_bytes: int) -> None:
        unit = _HUGE_PAGE_BYTES if num_bytes >= 2 * _HUGE_PAGE_BYTES else _LINE_BYTES
        self._memory = np.empty(round_up(num_bytes, unit) + unit, np.uint8)
        self._address = self._memory.ctypes.data
        self._next = -self._address % unit

    def cut(self, size: int, dtype: str) -> tuple[np.ndarray, int]:
        """A new, uninitialised array in the block, and its address."""
        first = self._next
        self._next += round_up(4 * size, _LINE_BYTES)
        return np.ndarray(size, dtype, self._memory, first), self._address + first


class _StackTask:
    """Description of one stack for the C++ library.

    The C++ library gets only the addresses of arrays. A `_StackTask` keeps references to the
    arrays, so that Python does not free the arrays.
    """

    def __init__(self, batch: HostBatch, name: str) -> None:
        self.layout = layout = batch.layouts[name]
        num_cores = batch.local_device_count * layout.num_cores
        num_shards = layout.num_shards
        # The C++ library requires that the features of a table are consecutive, in the order of
        # their samples. `layout.features` are in the order of their samples.
        features = sorted(layout.features, key=lambda feature: feature.id_transformation.col_offset)
        self.inputs: list[np.ndarray | None] = []
        self.features = (_Feature * len(features))()
        for number, feature in enumerate(features):
            self.features[number] = self._describe(feature, batch.bags[feature.name])
        size = layout.buffer_size_per_device() * batch.local_device_count
        pointers = max(num_shards, SUBLANES)
        self.sizes = (num_cores * pointers, size, size, size)
        self.num_bytes = sum(round_up(4 * size, _LINE_BYTES) for size in self.sizes)
        num_partitions = num_cores * num_shards
        drops_shape = (num_cores, len(features), len(TableDrops._fields))
        counts = np.zeros(2 * num_partitions + math.prod(drops_shape), np.int64)
        self.num_ids = counts[:num_partitions]
        self.num_unique = counts[num_partitions : 2 * num_partitions]
        self.drops = counts[2 * num_partitions :].reshape(drops_shape)
        address = counts.ctypes.data
        self.descriptor = _Stack(
            self.features,
            *(len(features), num_cores, num_shards, layout.samples_per_core),
            *(layout.spec.max_ids_per_partition, layout.spec.max_unique_ids_per_partition),
            *(size // num_cores, pointers),
            *(None, None, None, None),  # addresses of the four buffers, set by `place_buffers`
            *(address, address + 8 * num_partitions, address + 16 * num_partitions),
            _GAIN_RULES[layout.spec.combiner],
        )

    def _describe(self, feature: FeatureSpec, bags: Bags) -> _Feature:
        """The struct from which the C++ library reads the ids and weights of one feature."""
        placement = feature.id_transformation
        num_shards = self.layout.num_shards
        ids = _plain(bags.ids)
        shape = bags.dense_shape
        # The C++ library needs no offsets of samples that all have the same number of ids.
        offsets = np.asarray(bags.offsets, np.int64) if shape is None else None
        weights = None if bags.weights is None else _plain(bags.weights)
        arrays = (ids, offsets, weights)
        self.inputs += arrays
        return _Feature(
            *(None if array is None else array.ctypes.data for array in arrays),
            0 if shape is None else shape[1],
            (feature.num_samples or 0) // num_shards,
            feature.table_spec.vocabulary_size,
            placement.col_offset // num_shards,
            placement.row_offset // num_shards,
            placement.col_shift,
            _ID_TYPES[ids.dtype],
        )

    def place_buffers(self, block: _Block) -> None:
        """Takes the memory for the buffers of this stack from `block`."""
        self.buffers: StackBuffers = {}
        for (field, dtype), size in zip(BUFFER_DTYPES.items(), self.sizes, strict=True):
            self.buffers[field], address = block.cut(size, dtype)
            setattr(self.descriptor, field, address)

    def record(self, batch: HostBatch) -> None:
        """Stores the id counts from the C++ library in the statistics of the batch."""
        partitioner.record_counts(batch, self.layout, self.num_ids, self.num_unique, self.num_ids)
        dropped = {}
        if self.drops.any():
            first_rows = np.asarray([feature.first_row for feature in self.features])
            num_dropped = self.drops.sum(axis=0)
            for code, kind in enumerate(TableDrops._fields):
                dropped[kind] = (first_rows, num_dropped[:, code])
        record_drops(batch.statistics, self.layout, dropped)


def _plain(array: AnyArray) -> np.ndarray:
    """The array, contiguous and in native byte order, copied only if necessary."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
