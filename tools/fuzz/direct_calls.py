"""Calls native handlers without XLA, a thousand times faster, in place of `jax.ffi.ffi_call`."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rsembed.kernels.devices import shared_library

# Values of XLA_FFI_DataType in xla/ffi/api/c_api.h.
DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
}


class Refused(Exception):
    """The handler refused a call, or XLA would refuse it."""


@dataclasses.dataclass
class Call:
    """A call of a native handler. `aliases` maps operands to results that share their memory."""

    target: str
    operands: list[np.ndarray]
    results: list[tuple[tuple[int, ...], np.dtype]]
    aliases: dict[int, int]
    attributes: dict[str, np.ndarray]


class _Array(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("operand", ctypes.c_int32),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("is_array", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("size", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class Driver:
    """Calls native handlers. `ffi_call` replaces `jax.ffi.ffi_call`.

    Args:
      path: path of the driver's library.

    Attributes:
      before: function that gets each call before it is made. Does nothing by default.
    """

    def __init__(self, path: str) -> None:
        self._call = ctypes.CDLL(path).fuzz_call
        self._call.restype = ctypes.c_bool
        self.before: Callable[[Call], None] = lambda call: None

    def ffi_call(
        self,
        target: str,
        shapes: Any,
        *,
        vmap_method: str,
        input_output_aliases: dict[int, int] | None = None,
    ) -> Callable[..., Any]:
        del vmap_method
        specs = shapes if isinstance(shapes, Sequence) else [shapes]

        def made(*operands: jax.Array, **attributes: Any) -> Any:
            call = Call(
                target=target,
                operands=[np.asarray(operand) for operand in operands],
                results=[(spec.shape, np.dtype(spec.dtype)) for spec in specs],
                aliases=dict(input_output_aliases or {}),
                attributes={name: np.asarray(value) for name, value in attributes.items()},
            )
            self.before(call)
            results = [jax.device_put(result) for result in self.made(call)]
            return results if isinstance(shapes, Sequence) else results[0]

        return made

    def made(self, call: Call) -> list[np.ndarray]:
        """Makes a call, and returns its results.

        Raises: Refused: the handler or XLA refuses the call.
        """
        call.operands = [np.asarray(operand, order="C") for operand in call.operands]
        sources = {result: operand for operand, result in call.aliases.items()}
        for result, operand in sources.items():
            if operand < len(call.operands):
                array = call.operands[operand]
                if call.results[result] == (array.shape, array.dtype):
                    continue
            raise Refused("XLA: an operand and its result differ in shape")
        results = [np.empty(shape, dtype) for shape, dtype in call.results]
        kept: list[np.ndarray] = []

        def arrays(values: Sequence[np.ndarray], operands: Sequence[int]) -> Any:
            kept.extend(np.asarray(value.shape, np.int64) for value in values)
            dims = kept[len(kept) - len(values) :]
            structures = []
            for value, operand, dim in zip(values, operands, dims, strict=True):
                structure = _Array(
                    DTYPES[str(value.dtype)],
                    operand,
                    value.ndim,
                    dim.ctypes.data,
                    value.nbytes,
                    value.ctypes.data,
                )
                structures.append(structure)
            return (_Array * len(values))(*structures)

        attribute_list = []
        for name, value in sorted(call.attributes.items()):
            attribute = _Attribute(
                name.encode(),
                value.ndim,
                DTYPES[str(value.dtype)],
                value.size,
                value.ctypes.data,
            )
            attribute_list.append(attribute)
        attributes = (_Attribute * len(attribute_list))(*attribute_list)
        sources_of_results = [sources.get(k, -1) for k in range(len(results))]
        complaint = ctypes.create_string_buffer(4096)
        is_made = self._call(
            ctypes.cast(getattr(shared_library(), call.target), ctypes.c_void_p),
            arrays(call.operands, [-1] * len(call.operands)),
            ctypes.c_int64(len(call.operands)),
            arrays(results, sources_of_results),
            ctypes.c_int64(len(results)),
            attributes,
            ctypes.c_int64(len(attributes)),
            complaint,
            ctypes.c_int64(len(complaint)),
        )
        if not is_made:
            raise Refused(complaint.value.decode())
        return results
