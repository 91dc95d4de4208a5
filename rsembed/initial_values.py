"""Initial table values that depend only on the random key, the table and the row.

`initial_rows` computes some rows of the initial table `initializer(key, (vocabulary, dim))`. The
initializer is traced for the logical shape of the table, so that scales computed from the shape are
right. The traced computation is evaluated for the requested rows only, and the random bits of a row
depend only on the random key and the row number. So initial values do not depend on stacking,
sharding or the number of devices. `initial_rows` builds the whole table only if a row may depend on
other rows, as in an orthogonal matrix.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import KeyOrKeys
from rsembed.kernels.devices import vary_alike
from rsembed.kernels.traced_rules import CALLS, called_jaxpr
from rsembed.specs import CallableTableInitializer, TableSpec


def table_key(key: PRNGKeyArray, table_name: str) -> PRNGKeyArray:
    """The random key of one table, from the random key of the model and the name of the table."""
    return jax.random.fold_in(key, zlib.crc32(table_name.encode()))


def table_keys(key: PRNGKeyArray, table_names: Sequence[str]) -> KeyOrKeys:
    """One array with the random key of each table, the same key that `table_key` returns."""
    numbers = [zlib.crc32(name.encode()) for name in table_names]
    fold_in = functools.partial(jax.random.fold_in, key)
    # With keys of the kind "unsafe_rbg", the results of `vmap` would depend on all names together.
    return jax.lax.map(fold_in, jnp.asarray(numbers, jnp.uint32))


def initial_rows(
    key: PRNGKeyArray,
    table: TableSpec,
    rows: Int[Array, " rows"],
    *,
    width: int | None = None,
    factors: Float[Array, " factors"] | None = None,
) -> Float[Array, "rows width"]:
    """Initial float32 values of some rows of a table.

    Args:
      key: random key of the table, `table_key(model_key, table.name)`.
      table: the table. The initializer of the table is called with the logical shape
        `(vocabulary_size, embedding_dim)`.
      rows: row numbers in any order.
      width: number of columns to compute, as for `form`. The first `embedding_dim` columns hold the
        row. None, the default: `embedding_dim`.
      factors: values that replace the factors of the initializer, in the order of `Form.factors`,
        so that one compiled program serves several tables. None, the default: the initializer's
        factors.

    Raises:
      TypeError: the initializer does not accept `(key, shape)`.
      ValueError: the initializer does not return one array with the logical shape.
    """
    shape = (table.vocabulary_size, table.embedding_dim)
    trace = traced_initializer(table, shape)
    evaluator = _RowEvaluator(rows, table.vocabulary_size, dim=table.embedding_dim, width=width)
    if factors is not None:
        remaining = iter(factors)
        evaluator.replace_factor = lambda factor: next(remaining)
    try:
        return evaluator.evaluate(trace, key).astype(jnp.float32)
    except _MixesRowsError:
        # A row may depend on the whole table, as in an orthogonal matrix.
        whole_table = table.initializer(key, shape).astype(jnp.float32)
        return whole_table[rows]


def fresh_rows(key: PRNGKeyArray, ids: Int[Array, " rows"], table: TableSpec) -> tuple[Array, ...]:
    """Initial values of some rows in the dtype of the table, and the initial slots of the rows.

    The values and slots of a row are the same as in a state from `EmbeddingCollection.init`.

    Args:
      key: random key of the table, `table_key(model_key, table.name)`.
      ids: row numbers in any order.
      table: the table with initializer and optimizer.
    """
    values = initial_rows(key, table, ids)
    slots = table.optimizer.init_slots(values)
    return values.astype(table.dtype), *slots


class Form(NamedTuple):
    """Describes how `initial_rows` computes the rows of a table. See `form`.

    Args:
      program: cache key of the computation, without the values of `factors`.
      width: number of columns that the computation returns.
      factors: float32 numbers by which the computation multiplies all values of a row, in the order
        of the computation. If the computation divides by a constant, the factor is the reciprocal
        of the constant.
    """

    program: Hashable
    width: int
    factors: tuple[float, ...]


def form(table: TableSpec, width: int | None = None) -> Form:
    """Describes how `initial_rows` computes the rows of a table.

    Tables with equal `program` and `width` can share a compiled program, even if their `factors`
    differ.

    Usually `Form.program` is the printed jaxpr of the computation for a single row. So separate
    initializer functions with equal jaxprs share a compiled program, for example all functions in
    `[normal(0.01) for _ in tables]`. The program is the initializer function and the shape of the
    table if the initializer does not compute every row independently, if a value may depend on the
    number of rows, or if the jaxpr contains constant arrays.

    Args:
      table: the table.
      width: number of columns to compute, at least the dim of the table, so that tables with
        different dims can have equal programs. The result has the dim of the table as its `width`
        if the initializer cannot compute more columns. The first random bits that are drawn from a
        key must not depend on how many bits are drawn. By default, `width` is the dim of the table.
    """
    shape = (table.vocabulary_size, table.embedding_dim)
    trace = traced_initializer(table, shape)
    num_rows, dim = shape
    exact_form = Form((table.initializer, *shape), dim, ())
    if _has_constants(trace):
        return exact_form
    factors: list[float] = []

    def record(factor: float) -> np.float32:
        factors.append(factor)
        return np.float32(1)

    def one_row(key: PRNGKeyArray, row: Int[Array, " 1"]) -> Array:
        evaluator = _RowEvaluator(row, num_rows, only_cuts=True, dim=dim, width=width)
        evaluator.replace_factor = record
        return evaluator.evaluate(trace, key)

    try:
        program = jax.make_jaxpr(one_row)(jax.random.key(0), jnp.zeros(1, jnp.int32))
    except _MixesRowsError:
        return exact_form if width in (None, dim) else form(table)
    return Form(str(program), width or dim, tuple(factors))


def keyed_rows(
    key: KeyOrKeys,
    initializer: CallableTableInitializer,
    lanes: Sequence[UInt32[Array, " rows"]],
    dim: int,
    table: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows dim"]:
    """Float32 rows `initializer(row_key, (1, dim))`, where `row_key` is `key` folded with `lanes`.

    Args:
      key: random key of the table or, with `table`, one random key for each of several tables.
      initializer: function `(key, shape)`.
      lanes: 32-bit numbers that identify each row, such as the two halves of a 64-bit id.
      dim: length of a row.
      table: index of the table of each row, if `key` has one random key for each of several tables.
        None, the default, if `key` is the random key of a single table.
    """
    trace = _trace_of_one_row(initializer, dim)
    evaluator = _RowEvaluator(
        jnp.zeros(lanes[0].shape, jnp.int32),
        1,
        lanes=lanes,
        only_key=key,
        table=table,
    )
    try:
        return evaluator.evaluate(trace, key).astype(jnp.float32)
    except _MixesRowsError:
        # `_RowEvaluator` rejects an initializer that splits its random key or sums over a row. A
        # rejected initializer is called once for each row, with the shape `(1, dim)`.
        def one_row(key: PRNGKeyArray, *row_lanes: Array) -> Array:
            row_key = functools.reduce(jax.random.fold_in, row_lanes, key)
            rows = initializer(row_key, (1, dim))
            return rows[0].astype(jnp.float32)

        if table is None:
            row_of_lanes = functools.partial(one_row, key)
            return jax.vmap(row_of_lanes)(*lanes)
        table_keys_of_rows = key.at[table].get(mode="clip")
        return jax.vmap(one_row)(table_keys_of_rows, *lanes)


def _trace_of_one_row(initializer: CallableTableInitializer, dim: int) -> ClosedJaxpr:
    def one_row(key: PRNGKeyArray) -> Array:
        return initializer(key, (1, dim))

    return jax.make_jaxpr(one_row)(jax.random.key(0))


def keyed_form(initializer: CallableTableInitializer, dim: int) -> Hashable:
    """Cache key of an initializer.

    If two initializers have equal cache keys, `keyed_rows` returns equal rows for both.
    """
    trace = _trace_of_one_row(initializer, dim)
    if _has_constants(trace):
        return initializer, dim
    return str(trace), dim


def traced_initializer(table: TableSpec, shape: tuple[int, int]) -> ClosedJaxpr:
    """Jaxpr of the table's initializer, traced for an array of `shape`.

    Raises:
      TypeError: the initializer does not accept `(key, shape)`.
      ValueError: the initializer does not return one array of `shape`.
    """
    try:
        trace = jax.make_jaxpr(lambda key: table.initializer(key, shape))(jax.random.key(0))
    except TypeError as error:
        raise TypeError(
            f"table {table.name!r}: the initializer could not be called as initializer(key, "
            f"{shape}): {error}. Write it as `lambda key, shape: ...`, or use one of "
            "jax.nn.initializers."
        ) from error
    shapes = [aval.shape for aval in trace.out_avals]
    if shapes != [shape]:
        raise ValueError(
            f"table {table.name!r}: the initializer returned {shapes} for shape {shape}; it must "
            "return one array of the shape it is given."
        )
    return trace


def _has_constants(trace: ClosedJaxpr) -> bool:
    """Whether the jaxpr `trace` contains constant arrays.

    `str(trace)` does not show the values of constant arrays, so different initializers can have
    equal strings.
    """
    if trace.consts:
        return True
    for equation in trace.jaxpr.eqns:
        for operand in equation.invars:
            if isinstance(operand, Literal) and np.ndim(operand.val):
                return True
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr) and _has_constants(value):
                return True
    return False


_ELEMENTWISE = """
    abs add and atan2 bitcast_convert_type cbrt ceil clamp convert_element_type copy copy_p cos div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne
    neg nextafter not or pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sqrt square stop_gradient sub tan tanh xor
"""
"""Primitives that work elementwise."""
_Value = tuple[Any, bool]
"""A pair `(array, is_cut)`. If `is_cut` is True, the array holds only the requested rows."""


class _MixesRowsError(Exception):
    """`_RowEvaluator` cannot compute only some rows, because a row may depend on other rows."""


class _RowEvaluator:
    """Evaluates a traced computation for some rows of its arrays.

    Arrays without a row axis are computed in full.

    Args:
      rows: row numbers to evaluate.
      num_rows: number of rows of the table. If the first axis of a two-dimensional array has this
        length, this axis is the row axis.
      lanes: 32-bit numbers that identify each requested row. The numbers of a row are folded into
        the random key one after the other. None, the default: the row number is folded into the
        random key.
      only_key: random key of the initializer. With `only_key`, random bits must be drawn directly
        from this key, and a computation that splits the key is rejected.
      table: index of the table of each requested row, if `only_key` has one random key for each of
        several tables. None, the default, if `only_key` is a single random key.
      only_cuts: whether to raise `_MixesRowsError` if an array that is computed in full has an axis
        of length `num_rows`, because the values of such an array may depend on the number of rows.
        False by default.
      dim: length of a row. Only needed with `width`.
      width: number of columns to compute instead of `dim`. None, the default: `dim`. A computation
        that depends on the number of columns is rejected.

    Attributes:
      replace_factor: function that maps a float32 constant, by which row values are multiplied, to
        the factor to use. If row values are divided by a constant, the function gets the reciprocal
        of the constant. None, the default: row values are multiplied by the constant itself.
    """

    replace_factor: Callable[[float], ArrayLike] | None = None

    def __init__(
        self,
        rows: Int[Array, " rows"],
        num_rows: int,
        *,
        lanes: Sequence[Array] | None = None,
        only_key: KeyOrKeys | None = None,
        table: Array | None = None,
        only_cuts: bool = False,
        dim: int = 0,
        width: int | None = None,
    ):
        self.rows = rows
        self.num_rows = num_rows
        self.lanes = [rows.astype(jnp.uint32)] if lanes is None else lanes
        self.only_key = only_key
        self.table = table
        self.only_cuts = only_cuts
        self.dim = dim
        self.width = dim if width is None else width
        # For the `id` of each result of `_scaled`: the result, the array before any factor was
        # applied, and the product of all factors.
        self.unscaled: dict[int, tuple[Array, Array, np.float32]] = {}

    def evaluate(self, trace: ClosedJaxpr, key: KeyOrKeys) -> Array:
        results = self._run(trace.jaxpr, trace.consts, [(key, False)])
        ((result, is_cut),) = results
        if is_cut:
            return result
        all_rows = jnp.asarray(result)
        return all_rows[self.rows]

    def _run(
        self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], inputs: Sequence[_Value]
    ) -> list[_Value]:
        values: dict[Any, _Value] = {}
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = (const, False)
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def value(variable: object) -> _Value:
            if isinstance(variable, Literal):
                return variable.val, False
            return values[variable]

        for equation in jaxpr.eqns:
            operands = [value(variable) for variable in equation.invars]
            results = self._equation(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def _scaled(self, array: Array, factor: np.float32) -> Array:
        """An array times a constant.

        If an array is multiplied by several constants in turn, the product of the constants becomes
        a single factor. XLA merges factors in the same way, but only factors that are constants at
        compile time. If `_scaled` did not merge factors, row values would depend on whether the
        factors are constants at compile time.
        """
        if id(array) in self.unscaled:
            _, array, previous = self.unscaled[id(array)]
            factor = factor * previous
        value: ArrayLike = factor
        if self.replace_factor is not None:
            value = self.replace_factor(float(factor))
        factors = jnp.broadcast_to(value, array.shape)
        scaled = jax.lax.mul(*vary_alike([array, factors]))
        self.unscaled[id(scaled)] = scaled, array, factor
        return scaled

    def _equation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        """Results of one equation of a jaxpr.

        Raises: _MixesRowsError: the equation cannot be evaluated for the requested rows only.
        """
        name = equation.primitive.name
        params = equation.params
        bind = equation.primitive.bind
        if name in CALLS:
            inner = called_jaxpr(equation)
            return self._run(inner.jaxpr, inner.consts, inputs)
        arrays = [array for array, _ in inputs]
        uncut_arrays = [array for array, is_cut in inputs if not is_cut]
        has_cut_arrays = len(uncut_arrays) < len(arrays)
        if has_cut_arrays:
            is_elementwise = name in _ELEMENTWISE.split()
            if not is_elementwise or any(map(_spans_rows, uncut_arrays)):
                raise _MixesRowsError
            factor = _constant_factor(equation)
            if factor is not None:
                (cut_array,) = [array for array, is_cut in inputs if is_cut]
                return [(self._scaled(cut_array, factor), True)]
            result = bind(*vary_alike(arrays), **params)
            return [(result, True)]
        shape = params.get("shape", ())
        has_row_axis = len(shape) == 2 and shape[0] == self.num_rows
        is_widened = self.width != self.dim
        if is_widened and has_row_axis and shape[1] != self.dim:
            raise _MixesRowsError
        if has_row_axis and name == "random_bits":
            bit_width = params["bit_width"]
            # With `only_key`, an initializer that draws 16-bit random numbers is rejected, because
            # its values would depend on how XLA fuses operations.
            key = arrays[0]
            is_direct = key is self.only_key and bit_width == 32
            if self.only_key is None or is_direct:
                if is_widened and bit_width != 32:
                    raise _MixesRowsError
                num_columns = self.width if is_widened else shape[1]
                bits = _row_bits(key, self.lanes, bit_width, num_columns, self.table)
                return [(bits, True)]
        uses_only_key = any(array is self.only_key for array in arrays)
        if self.only_key is not None and uses_only_key:
            raise _MixesRowsError
        if has_row_axis and name == "broadcast_in_dim" and 0 not in params["broadcast_dimensions"]:
            num_columns = self.width if is_widened else shape[1]
            cut_shape = (self.rows.shape[0], num_columns)
            result = bind(*arrays, **{**params, "shape": cut_shape})
            return [(result, True)]
        results = bind(*arrays, **params)
        if not equation.primitive.multiple_results:
            results = [results]
        shapes = [jnp.shape(result) for result in results]
        if self.only_cuts and any(self.num_rows in shape for shape in shapes):
            raise _MixesRowsError
        if is_widened and any(self.dim in shape for shape in shapes):
            raise _MixesRowsError
        return [(result, False) for result in results]


def _constant_factor(equation: Any) -> np.float32 | None:
    """Constant float32 number by which an equation multiplies an array, or None.

    If the equation divides by a constant, the result is the reciprocal of the constant, because XLA
    compiles a division by a constant to a multiplication.
    """
    name = equation.primitive.name
    if name not in ("mul", "div"):
        return None
    first, second = equation.invars
    if name == "mul" and isinstance(first, Literal):
        first, second = second, first
    if not isinstance(second, Literal) or isinstance(first, Literal):
        return None
    if np.ndim(second.val) or jax.typeof(second.val).dtype != jnp.float32:
        return None
    factor = np.float32(second.val)
    if name == "div":
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / factor
    return factor


def _spans_rows(array: ArrayLike) -> bool:
    """Whether an array has more than one entry along its first axis."""
    return jnp.ndim(array) > 0 and jnp.shape(array)[0] != 1


def _row_bits(
    key: Array, lanes: Sequence[Array], bit_width: int, dim: int, table: Array | None
) -> Array:
    """Random bits of each row, drawn from `key` folded with the `lanes` of the row."""
    if bit_width == 32:
        return api.row_bits(key, lanes, dim, table)

    dtype = jnp.dtype(f"uint{bit_width}")

    def one_row(*row_lanes: Array) -> Array:
        row_key = functools.reduce(jax.random.fold_in, row_lanes, key)
        return jax.random.bits(row_key, (dim,), dtype)

    return jax.vmap(one_row)(*lanes)
