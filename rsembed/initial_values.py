"""Initial table values that depend on the key, the table and the row alone.

An initializer written for a whole table, `initializer(key, (vocabulary, dim))`, is evaluated for any subset of rows
without building the table: its computation is traced once at the full logical shape (so that scales computed from the
shape are right), and the trace is then evaluated for the wanted rows only, with random bits that belong to the row.
Stacking, sharding and device count therefore never change a table, and building one needs no second copy of it.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import KeyOrKeys
from rsembed.kernels.devices import vary_alike
from rsembed.specs import TableSpec


def table_key(key: PRNGKeyArray, table_name: str) -> PRNGKeyArray:
    """The key of one table: the model's key and the table's name."""
    return jax.random.fold_in(key, zlib.crc32(table_name.encode()))


def table_keys(key: PRNGKeyArray, table_names: Sequence[str]) -> KeyOrKeys:
    """The keys that `table_key` gives for several tables, made by one operation."""
    numbers = np.asarray([zlib.crc32(name.encode()) for name in table_names], np.uint32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(numbers)


def initial_rows(key: PRNGKeyArray, table: TableSpec, rows: Int[Array, " rows"]) -> Float[Array, "rows dim"]:
    """Initial float32 values of some rows of a table.

    Args:
      key: the table's own key, `table_key(model_key, table.name)`.
      table: its initializer sees the logical shape `(vocabulary_size, embedding_dim)`.
      rows: row numbers, in any order.

    Raises:
      TypeError: the initializer does not accept `(key, shape)`.
      ValueError: it returns another shape than it was asked for.
    """
    shape = (table.vocabulary_size, table.embedding_dim)
    trace = traced_initializer(table, shape)
    try:
        return _RowEvaluator(rows, shape[0]).evaluate(trace, key).astype(jnp.float32)
    except _MixesRowsError:  # an orthogonal matrix, a given array, ...: build it whole and pick
        return table.initializer(key, shape).astype(jnp.float32)[rows]


def fresh_rows(key: PRNGKeyArray, ids: Int[Array, " rows"], table: TableSpec) -> tuple[Array, ...]:
    """Values of some rows in the table's dtype, and their slots: what `EmbeddingCollection.init` makes of them.

    Args:
      key: the table's own key, see `initial_rows`.
      ids: row numbers, in any order.
      table: its initializer and rule.
    """
    values = initial_rows(key, table, ids)
    return values.astype(table.dtype), *table.optimizer.init_slots(values)


def form(table: TableSpec) -> Hashable:
    """Key that is equal for tables whose rows one compiled program of `initial_rows` can make.

    That is what the initializer computes and the length of rows, if it makes every row by itself and their number
    enters no value; else the initializer and both numbers. What it computes is its trace, so that functions made one by
    one, as `[normal(0.01) for _ in tables]` are, are not compiled one by one.
    """
    shape = (table.vocabulary_size, table.embedding_dim)
    trace, whole = traced_initializer(table, shape), (table.initializer, *shape)
    text = " ".join(str(trace).split())  # where its lines break depends on the length of numbers
    if _has_constants(trace):
        return whole
    evaluator = _RowEvaluator(jnp.zeros(1, jnp.int32), shape[0], only_cuts=True)
    try:
        jax.eval_shape(functools.partial(evaluator.evaluate, trace), jax.random.key(0))
    except _MixesRowsError:
        return whole
    return shape[1], re.sub(rf"(?<=[\[(]){shape[0]}(?=,)", "rows", text)


def keyed_rows(
    key: KeyOrKeys,
    initializer: Callable[..., PyTree],
    lanes: Sequence[UInt32[Array, " rows"]],
    dim: int,
    table: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows dim"]:
    """Float32 `initializer(own_key, (1, dim))` of rows, whose own keys are `key` folded with their lanes.

    With `table`, `key` has several, of which it says whose is folded.
    """
    trace = jax.make_jaxpr(lambda key: initializer(key, (1, dim)))(jax.random.key(0))
    evaluator = _RowEvaluator(jnp.zeros(lanes[0].shape, jnp.int32), 1, lanes=lanes, only_key=key, table=table)
    try:
        return evaluator.evaluate(trace, key).astype(jnp.float32)
    except _MixesRowsError:  # it splits its key, or sums over a row

        def one_row(key: PRNGKeyArray, *own: Array) -> Array:
            return initializer(functools.reduce(jax.random.fold_in, own, key), (1, dim))[0].astype(jnp.float32)

        if table is None:
            return jax.vmap(functools.partial(one_row, key))(*lanes)
        return jax.vmap(one_row)(key.at[table].get(mode="clip"), *lanes)


def keyed_form(initializer: Callable[..., PyTree], dim: int) -> Hashable:
    """Key that is equal for initializers that make the same rows in `keyed_rows`."""
    trace = jax.make_jaxpr(lambda key: initializer(key, (1, dim)))(jax.random.key(0))
    return (initializer if _has_constants(trace) else str(trace)), dim


def traced_initializer(table: TableSpec, shape: tuple[int, int]) -> ClosedJaxpr:
    """The table's initializer for an array of `shape`.

    Raises: TypeError, ValueError: it takes other arguments, or returns anything but one array of that shape.
    """
    try:
        trace = jax.make_jaxpr(lambda key: table.initializer(key, shape))(jax.random.key(0))
    except TypeError as error:
        raise TypeError(
            f"table {table.name!r}: the initializer could not be called as initializer(key, {shape}): {error}. "
            "Write it as `lambda key, shape: ...`, or use one of jax.nn.initializers."
        ) from error
    found = [aval.shape for aval in trace.out_avals]
    if found != [shape]:
        raise ValueError(
            f"table {table.name!r}: the initializer returned {found} for shape {shape}; it must return one array of "
            "the shape it is given."
        )
    return trace


def _has_constants(trace: ClosedJaxpr) -> bool:
    """Whether the trace contains constant arrays, whose values its printed text leaves out."""
    equations = trace.jaxpr.eqns
    operands = (operand for equation in equations for operand in equation.invars)
    inner = (value for equation in equations for value in equation.params.values())
    return (
        bool(trace.consts)
        or any(isinstance(operand, Literal) and np.ndim(operand.val) for operand in operands)
        or any(_has_constants(value) for value in inner if isinstance(value, ClosedJaxpr))
    )


_ELEMENTWISE = """
    abs add and atan2 bitcast_convert_type cbrt ceil clamp convert_element_type copy copy_p cos div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne
    neg nextafter not or pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sqrt square stop_gradient sub tan tanh xor
"""
"""Primitives that treat every entry alone."""
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


_Value = tuple[PyTree, bool]
"""An array, and whether it has only the wanted rows of one whose leading axis counts all rows."""


class _MixesRowsError(Exception):
    """The computation cannot be cut into rows."""


class _RowEvaluator:
    """Evaluates a traced computation for some rows of its arrays; what has no row axis is computed as it stands.

    Args:
      rows: the wanted rows.
      num_rows: length of the arrays' leading axis.
      lanes: numbers folded into the key of each wanted row, one after the other; by default the row's number.
      only_key: if given, that of the initializer: what draws from another one, or makes one of it, cannot be cut.
      table: where there is a key for each of several tables, which of them is folded for each of the wanted rows.
      only_cuts: refuse arrays as long as there are rows that cannot be cut; what follows from one knows their number.
    """

    def __init__(
        self,
        rows: Int[Array, " rows"],
        num_rows: int,
        *,
        lanes: Sequence[Array] | None = None,
        only_key: KeyOrKeys | None = None,
        table: Array | None = None,
        only_cuts: bool = False,
    ):
        self.table = table
        self.rows, self.num_rows, self.only_key, self.only_cuts = rows, num_rows, only_key, only_cuts
        self.lanes = [rows.astype(jnp.uint32)] if lanes is None else lanes

    def evaluate(self, trace: ClosedJaxpr, key: KeyOrKeys) -> Array:
        ((result, is_cut),) = self._run(trace.jaxpr, trace.consts, [(key, False)])
        return result if is_cut else jnp.asarray(result)[self.rows]

    def _run(self, jaxpr: Jaxpr, consts: Sequence[PyTree], inputs: Sequence[_Value]) -> list[_Value]:
        given = [*((const, False) for const in consts), *inputs]
        values: dict[Any, _Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

        def value(variable: Any) -> _Value:
            return (variable.val, False) if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [value(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        name, params, bind = equation.primitive.name, equation.params, equation.primitive.bind
        if name in _CALLS:
            inner: ClosedJaxpr = params[_CALLS[name]]
            return self._run(inner.jaxpr, inner.consts, inputs)
        arrays = [array for array, _ in inputs]
        if any(is_cut for _, is_cut in inputs):
            spans_rows = any(not is_cut and jnp.ndim(x) > 0 and jnp.shape(x)[0] != 1 for x, is_cut in inputs)
            if name not in _ELEMENTWISE.split() or spans_rows:
                raise _MixesRowsError
            return [(bind(*vary_alike(arrays), **params), True)]
        shape = params.get("shape", ())
        cuts = len(shape) == 2 and shape[0] == self.num_rows
        draws = cuts and name == "random_bits"
        # Numbers of 16 bits come out otherwise where XLA fuses them otherwise.
        if draws and (self.only_key is None or (arrays[0] is self.only_key and params["bit_width"] == 32)):
            return [(_row_bits(arrays[0], self.lanes, params["bit_width"], shape[1], self.table), True)]
        if self.only_key is not None and any(x is self.only_key for x in arrays):
            raise _MixesRowsError
        if cuts and name == "broadcast_in_dim" and 0 not in params["broadcast_dimensions"]:
            return [(bind(*arrays, **{**params, "shape": (self.rows.shape[0], shape[1])}), True)]
        results = bind(*arrays, **params)
        results = list(results) if equation.primitive.multiple_results else [results]
        if self.only_cuts and any(self.num_rows in jnp.shape(result) for result in results):
            raise _MixesRowsError
        return [(result, False) for result in results]


def _row_bits(key: Array, lanes: Sequence[Array], bit_width: int, dim: int, table: Array | None) -> Array:
    """Random bits of each row from a key of its own."""
    if bit_width == 32:
        return api.row_bits(key, lanes, dim, table)

    def one_row(*own: Array) -> Array:
        return jax.random.bits(functools.reduce(jax.random.fold_in, own, key), (dim,), jnp.dtype(f"uint{bit_width}"))

    return jax.vmap(one_row)(*lanes)
