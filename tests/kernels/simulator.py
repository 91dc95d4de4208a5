"""Runs SparseCore kernels in numpy: interprets the traced body of a kernel for each tile.

The simulator interprets the same equations that are lowered for the TPU. Tiles run one after
another, so the simulator looks for mistakes that this order could hide. It raises an error for:

* an index outside an array, or a row id outside the table other than the ignored value;
* a copy that is never waited for, or waited for twice. A copy moves its data when it is waited for;
* a number that one tile writes and another tile reads or writes later;
* a number that is not a multiple of the divisor that `multiple_of` claims.

Scratch memory and outputs start as NaN or the smallest integer, so reading memory before writing it
gives wrong results.

The simulator does not check the layout of memory, the timing, or what a vector unit supports.
Lowering checks the last. The simulator has no barriers and no memory that tiles share, because the
kernels use neither.
"""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu_sc as plsc
from jax.extend.core import ClosedJaxpr, Literal

from tests.kernels.jax_internals import NDIndexer, Slice, TransformedRef

_NOBODY = -1


class KernelError(Exception):
    """A kernel made a mistake."""


class Buffer:
    """An array that kernels refer to, with the tile that last wrote each number if it is shared."""

    def __init__(self, shape, dtype, value=None, shared=False):
        dtype = np.dtype(dtype)
        if value is None:
            value = np.nan if dtype.kind == "f" else np.iinfo(dtype).min
        self.array = np.array(np.broadcast_to(value, shape), dtype)
        self.writer = np.full(shape, _NOBODY) if shared else None

    def read(self, indices, tile):
        self._check(indices, tile, "reads what tile {} wrote")
        return self.array[indices].copy()

    def write(self, indices, values, tile, adds=False):
        if adds:
            self._check(indices, tile, "adds to what tile {} wrote")
            np.add.at(self.array, indices, values)
        else:
            self._check(indices, tile, "overwrites what tile {} wrote")
            self.array[indices] = values
        if self.writer is not None:
            self.writer[indices] = tile

    def _check(self, indices, tile, what):
        if self.writer is not None:
            strangers = set(np.unique(self.writer[indices])) - {_NOBODY, tile}
            if strangers:
                raise KernelError(f"race: tile {tile} " + what.format(strangers.pop()))

    def end_kernel(self):
        """Forgets which tile wrote each number, because the next kernel may use all of them."""
        if self.writer is not None:
            self.writer[:] = _NOBODY


class Tile:
    """The run of a kernel on one tile, with its pending copies by semaphore."""

    def __init__(self, number, place):
        self.number, self.place = number, place
        self.copies = defaultdict(list)


def simulate(function, *args):
    """The result of `function(*args)` with simulated SparseCore kernels.

    Must be called inside `tracing_for`.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
    return jax.tree.unflatten(jax.tree.structure(shapes), _run_outside(closed, leaves))


def _run_outside(closed, values):
    """Runs a program on the CPU, and simulates its kernels.

    The equations between two kernels are compiled as one program.
    """
    jaxpr = closed.jaxpr
    known = _bound(jaxpr, values, closed.consts)
    waiting = []
    for number, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        inner = None
        if name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name not in _SPECIAL and "mpmd_map" not in str(inner):
            waiting.append(eqn)
            continue
        used_later = [v for later in jaxpr.eqns[number:] for v in later.invars]
        _compute(waiting, known, [*used_later, *jaxpr.outvars])
        waiting = []
        inputs = _read(known, eqn.invars)
        if name == "mpmd_map":
            outputs = _run_kernel(eqn, inputs)
        elif name == "new_ref":
            outputs = [_shared(inputs[0])]
        elif name == "freeze":
            outputs = [jnp.asarray(inputs[0].array)]
        else:
            outputs = _run_outside(inner, inputs)
        known |= zip(eqn.outvars, outputs, strict=True)
    _compute(waiting, known, jaxpr.outvars)
    return _read(known, jaxpr.outvars)


_CALLS = {"jit", "pjit", "custom_vjp_call", "custom_jvp_call"}
_SPECIAL = {"mpmd_map", "new_ref", "freeze"}


def _bound(jaxpr, values, consts):
    """Values of a program's inputs and constants by variable."""
    known = dict(zip(jaxpr.invars, values, strict=True))
    known |= zip(jaxpr.constvars, consts, strict=True)
    return known


def _read(known, variables):
    values = []
    for v in variables:
        values.append(np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else known[v])
    return values


def _shared(array):
    return Buffer(array.shape, array.dtype, np.asarray(array), shared=True)


def _compute(eqns, known, wanted):
    """Runs equations, and adds the results that are in `wanted` to `known`."""
    made = {v for eqn in eqns for v in eqn.outvars}
    used = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
    inputs_of_body = list(used - made)
    results = list(made.intersection(v for v in wanted if not isinstance(v, Literal)))

    def run(values):
        here = dict(zip(inputs_of_body, values, strict=True))
        for eqn in eqns:
            outputs = inputs = _read(here, eqn.invars)
            if eqn.primitive.name != "reshard":
                outputs = eqn.primitive.bind(*inputs, **eqn.params)
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
            here |= zip(eqn.outvars, outputs, strict=True)
        return _read(here, results)

    # The program runs on the CPU, not on the device that the kernels are traced for.
    if results:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            known |= zip(results, jax.jit(run)(_read(known, inputs_of_body)), strict=True)


def _run_kernel(eqn, inputs):
    (body,), (mesh,) = eqn.params["jaxprs"], eqn.params["meshes"]
    num_cores, num_tiles = dict(mesh.shape)["core"], dict(mesh.shape)["tile"]
    shared_inputs = [x if isinstance(x, Buffer) else _shared(x) for x in inputs]
    outputs = [_fresh(v.aval, shared=True) for v in eqn.outvars]
    common = [*shared_inputs, *outputs]
    for core in range(num_cores):
        for number in range(num_tiles):
            tile = Tile(core * num_tiles + number, {"core": core, "tile": number})
            scratch = [_fresh(v.aval) for v in body.invars[len(common) :]]
            with np.errstate(all="ignore"):
                _run_inside(body, [*common, *scratch], tile)
            if any(tile.copies.values()):
                raise KernelError("a copy was started and never waited for")
    for buffer in common:
        buffer.end_kernel()
    return [jnp.asarray(buffer.array) for buffer in outputs]


def _run_inside(jaxpr, values, tile, consts=None):
    """Outputs of a kernel's equations, computed in numpy."""
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, consts = jaxpr.jaxpr, jaxpr.consts if consts is None else consts
    known = _bound(jaxpr, values, consts or ())
    for eqn in jaxpr.eqns:
        outputs = _run_equation(eqn, _read(known, eqn.invars), tile)
        for v, output in zip(eqn.outvars, outputs, strict=True):
            if not isinstance(output, Buffer):
                output = np.asarray(output, v.aval.dtype)
                if output.shape != v.aval.shape:
                    raise KernelError(
                        f"{eqn.primitive.name} gave shape {output.shape}, not {v.aval.shape}"
                    )
            known[v] = output
    return _read(known, jaxpr.outvars)


def _run_equation(eqn, inputs, tile):
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        return _run_inside(params["jaxpr"], inputs, tile)
    if name == "scan":
        body = params["jaxpr"]
        # A kernel's loop has only constants and a carry as inputs.
        num_consts = len(inputs) - len(body.jaxpr.outvars)
        consts, carry = inputs[:num_consts], inputs[num_consts:]
        for _ in range(params["length"]):
            carry = _run_inside(body, [*consts, *carry], tile)
        return carry
    if name == "while":
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        for_condition = inputs[:first]
        for_body = inputs[first:last]
        carry = inputs[last:]
        while _run_inside(params["cond_jaxpr"], [*for_condition, *carry], tile)[0]:
            carry = _run_inside(params["body_jaxpr"], [*for_body, *carry], tile)
        return carry
    if name == "run_scoped":
        body = params["jaxpr"]
        fresh = (body.jaxpr if isinstance(body, ClosedJaxpr) else body).invars
        return _run_inside(body, [_fresh(v.aval) for v in fresh], tile, consts=inputs)
    if name in _MEMORY:
        return _MEMORY[name](inputs, params, tile)
    if name == "axis_index":
        return [tile.place[params["axis_name"]]]
    if name not in _ARITHMETIC:
        raise KernelError(f"the simulator does not know the primitive {name}")
    return [_ARITHMETIC[name](*inputs, **{k: v for k, v in params.items() if k in _USED_PARAMS})]


def _fresh(aval, shared=False):
    """A buffer that no tile has written. A semaphore is a buffer with a single number."""
    if "sem" in str(aval.dtype):
        return Buffer((), np.int32, 0)
    return Buffer(aval.shape, aval.dtype, shared=shared)


def _places(reference):
    """Buffer of a reference, numpy indices into it, and mask of the real rows (None: all rows)."""
    if isinstance(reference, Buffer):
        return reference, (), None
    transforms = [t for t in reference.transforms if isinstance(t, NDIndexer)]
    if len(transforms) != len(reference.transforms) or len(transforms) > 1:
        raise KernelError(
            f"the simulator knows one index per reference, not {reference.transforms}"
        )
    return _indexed(reference.ref, transforms[0])


def _indexed(buffer, indexer):
    index_arrays, is_real = [], None
    for index, size in zip(indexer.indices, buffer.array.shape, strict=True):
        if isinstance(index, Slice):
            start = int(index.start)
            if start < 0 or start + (index.size - 1) * index.stride >= size:
                raise KernelError(f"slice {start}:+{index.size} is outside an axis of {size}")
            index_arrays.append(slice(start, start + index.size * index.stride, index.stride))
            continue
        ignored = None
        if isinstance(index, plsc.Indices):
            ignored = index.ignored_value
            (index,) = [v for k, v in vars(index).items() if k != "ignored_value"]
        if isinstance(index, (Buffer, TransformedRef)):
            owner, where, _ = _places(index)
            index = owner.array[where]
        index = np.asarray(index)
        if ignored is not None:
            is_real = index != ignored
        checked = index if is_real is None else index[is_real]
        if checked.size and (checked.min() < 0 or checked.max() >= size):
            raise KernelError(
                f"index {checked.min()}..{checked.max()} is outside an axis of {size}"
            )
        index_arrays.append(index)
    return buffer, tuple(index_arrays), is_real


def _real_rows(index_arrays, is_real):
    return index_arrays if is_real is None else (index_arrays[0][is_real], *index_arrays[1:])


def _start_copy(inputs, params, tile):
    source, destination, semaphore, *_ = params["tree"].unflatten(inputs)
    tile.copies[id(_places(semaphore)[0])].append((source, destination))
    return []


def _wait_copy(inputs, params, tile):
    *_, semaphore = params["tree"].unflatten(inputs)[:3]
    queue = tile.copies[id(_places(semaphore)[0])]
    if not queue:
        raise KernelError("waits for a copy that nobody started")
    source, destination = queue.pop(0)
    from_buffer, from_places, from_real = _places(source)
    to_buffer, to_places, to_real = _places(destination)
    from_shape = from_buffer.array[_zeros(from_places)].shape
    to_shape = to_buffer.array[_zeros(to_places)].shape
    if from_shape != to_shape:
        raise KernelError(f"copies shape {from_shape} to {to_shape}")
    if from_real is not None and (not to_places or isinstance(to_places[0], slice)):
        to_places = (from_real, *to_places[1:])
    values = from_buffer.read(_real_rows(from_places, from_real), tile.number)
    if to_real is not None:
        values = values[to_real]
    to_buffer.write(_real_rows(to_places, to_real), values, tile.number)
    return []


def _zeros(index_arrays):
    """Indices of the same shape that are inside the buffer. Ignored ids can be outside of it."""
    return tuple(
        place if isinstance(place, slice) else np.zeros_like(place) for place in index_arrays
    )


def _get(inputs, params, tile):
    buffer, indices, _ = _indexed_by(inputs, params)
    return [buffer.read(indices, tile.number)]


def _swap(inputs, params, tile):
    buffer, value, *rest = inputs
    buffer, indices, _ = _indexed_by([buffer, *rest], params)
    old = buffer.array[indices].copy()
    buffer.write(indices, value, tile.number)
    return [old]


def _indexed_by(inputs, params):
    buffer, *rest = inputs
    indexers = params["tree"].unflatten(rest)
    return _indexed(buffer, indexers[0]) if indexers else (buffer, (), None)


def _lane_places(buffer, indices, mask):
    for index, size in zip(indices, buffer.array.shape, strict=True):
        inside = (index >= 0) & (index < size)
        if not np.all(inside if mask is None else inside | ~mask):
            raise KernelError(f"a lane's index is outside an axis of {size}")
    return tuple(index if mask is None else index[mask] for index in indices)


def _load_lanes(inputs, params, tile):
    buffer, transforms, indices, mask = params["tree"].unflatten(inputs)
    if transforms or mask is not None:
        raise KernelError("the simulator knows plain gathers of lanes only")
    return [buffer.read(_lane_places(buffer, indices, mask), tile.number)]


def _store_lanes(inputs, params, tile):
    buffer, transforms, indices, values, mask = params["tree"].unflatten(inputs)
    if transforms:
        raise KernelError("the simulator knows scatters into whole buffers only")
    lane_indices = _lane_places(buffer, indices, mask)
    values = values if mask is None else values[mask]
    buffer.write(lane_indices, values, tile.number, adds=params["add"])
    return []


def _divide(x, y):
    return x / y if x.dtype.kind == "f" else np.trunc(x / y)


def _multiple_of(x, values):
    if int(x) % values[0]:
        raise KernelError(f"{int(x)} is claimed to be a multiple of {values[0]}")
    return x


_MEMORY = {
    "dma_start": _start_copy,
    "dma_wait": _wait_copy,
    "get": _get,
    "swap": _swap,
    "gather": _load_lanes,
    "scatter": _store_lanes,
}
_USED_PARAMS = {"values", "new_dtype", "shape", "axes"}
_ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "shift_right_arithmetic": np.right_shift,
    "convert_element_type": lambda x, new_dtype: x.astype(new_dtype),
    "bitcast_convert_type": lambda x, new_dtype: x.view(new_dtype),
    "broadcast_in_dim": lambda x, shape: np.broadcast_to(x, shape),
    "iota": lambda shape: np.arange(shape[0]),
    "reduce_sum": lambda x, axes: np.sum(x, axis=axes),
    "multiple_of": _multiple_of,
    "reshard": lambda x: x,
    "copy": lambda x: x,
}
