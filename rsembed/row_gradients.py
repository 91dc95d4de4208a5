"""Gradients of looked-up rows, which can be summed, scaled and clipped before a step."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num, PyTree

from rsembed import opaque
from rsembed.arrays import foreign_to_numpy, is_traced
from rsembed.checks import check_fields, check_type, check_within, describe, validated
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, as_rows
from rsembed.storage.row_map import combine as combine_by_key, unnamed

NumRows: TypeAlias = tuple[tuple[str, int], ...]
"""Number of rows of each stack, as pairs `(stack name, number of rows)` sorted by name."""
Shardings: TypeAlias = tuple[tuple[str, NamedSharding, NamedSharding], ...] | None
"""Triples `(stack name, sharding of rows, sharding of values)` by name, or None without a mesh."""


class ReadRows(dict[str, Any]):
    """Read-only copy of row numbers by stack, which `RowGradients.rows` returns."""

    def __setitem__(self, name: str, rows: object) -> None:
        raise TypeError(
            f"rows[{name!r}] = ... would change a copy; use dataclasses.replace(row_gradients, rows=...)."
        )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _children_of_rows(
    rows: ReadRows,
) -> tuple[list[tuple[jax.tree_util.DictKey, Any]], tuple[str, ...]]:
    names = tuple(sorted(rows))
    return [(jax.tree_util.DictKey(name), rows[name]) for name in names], names


def _rows_of_children(names: tuple[str, ...], arrays: Iterable[object]) -> ReadRows:
    return ReadRows(zip(names, arrays, strict=True))


jax.tree_util.register_pytree_with_keys(ReadRows, _children_of_rows, _rows_of_children)


def _opaque(rows: object) -> Any:
    """Row numbers of a stack as an array that rejects arithmetic.

    The array stores 0 for `NO_ROW`, so `jnp.zeros_like` of row gradients returns gradients without
    rows. A value that is not an array of row numbers is returned unchanged, and later checks reject
    the value.
    """
    if not isinstance(rows, (jax.Array, np.ndarray)) or not jnp.issubdtype(rows.dtype, jnp.integer):
        return rows
    if rows.dtype == jnp.uint32:
        return opaque.wrap(rows, "key_lane")
    numbers = as_rows(rows)
    if rows.dtype.itemsize > 4 and not is_traced(rows):
        is_cut = np.asarray(rows) != np.asarray(numbers)
        if is_cut.any():
            # At least one row number does not fit in 32 bits. Return `rows` unchanged, so that
            # `check_belong` raises an error.
            return rows
    return _opaque_numbers(numbers)


@partial(jax.jit, inline=True)
def _opaque_numbers(numbers: Array) -> Array:
    return opaque.wrap(numbers ^ np.int32(NO_ROW), "row")


@partial(jax.jit, inline=True)
def _plain_numbers(array: Array) -> Array:
    numbers: Array = opaque.unwrap(array)
    return numbers ^ np.int32(NO_ROW)


def _integers(array: object) -> Any:
    """Row numbers of a stack as integers, from their opaque array (inverse of `_opaque`)."""
    if opaque.kind_of(array) == "row":
        return _plain_numbers(array)
    return opaque.unwrap(array)


class Summands(NamedTuple):
    """Inputs from which `RowGradients.values` are computed.

    Args:
      engine: the engine of the collection, which can update tables directly from `Summands`,
        without computing `RowGradients.values`.
      batch: prepared batch that was looked up.
      d_outputs: gradients of the pooled outputs.
    """

    engine: Any
    batch: Any
    d_outputs: Mapping[str, PyTree]


class _Unsummed(NamedTuple):
    """`Summands`, and the arrays of row gradients that `summed_from` stored together with them.

    After an array of the row gradients is replaced, `RowGradients.summands` is None, because the
    summands no longer match the arrays.
    """

    summands: Summands
    sums: list[Array]


@no_type_check  # JAX puts placeholders into fields of pytrees, so field types are not checked.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct rows, for each stack.

    `first + second` calls `combine`, and `2 * gradients` calls `scale`. Row numbers are stored in
    arrays that reject arithmetic, so `jax.tree.map(jnp.add, first, second)` raises a TypeError
    instead of returning gradients of wrong rows.

    Inside `jit`, row gradients that a collection computes have `summands`, the inputs from which
    `values` are computed. The summands are not in the pytree, so copies of the gradients and
    results of compiled programs have no summands.

    Args:
      rows: distinct row numbers in ascending order, with `NO_ROW` as padding at the end. On a mesh,
        the rows on each device are in ascending order. For a table with keys, `rows` is a uint32
        array `[capacity, 3]`. The columns of `rows` are the upper 32 bits of each key, the lower 32
        bits of the key, and the number of occurrences of the key, which is 0 for padding. If a
        stack has several tables with keys, a fourth column contains the index of the table.
      values: float32 gradient of each row, zeros for padding.
      num_rows: number of rows of each stack, as pairs `(stack name, number of rows)` sorted by
        name.
      shardings: on a mesh, triples `(stack name, sharding of rows, sharding of values)` sorted by
        name. None if the tables are not on a mesh.
      layout: fingerprint of the collection that computed the gradients. A step raises an error if
        the fingerprint of the tables to update differs from `layout`.
    """

    rows: dict[str, Int[Array, "*capacity"]]
    values: dict[str, Float[Array, "*capacity dim"]]
    num_rows: NumRows
    shardings: Shardings = None
    layout: Fingerprint | None = None
    # The field `opaque_rows` stores the row numbers in arrays that reject arithmetic. The property
    # `rows`, which is defined after the class, reads and writes `opaque_rows`.
    opaque_rows: Any = dataclasses.field(init=False, repr=False, compare=False)
    # The method `summed_from` sets the field `unsummed`, and the property `summands` reads it.
    unsummed: _Unsummed | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    # If `__array_ufunc__` is None, NumPy calls `__rmul__` for `np.float32(2) * gradients`.
    __array_ufunc__: ClassVar[None] = None

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[jax.tree_util.GetAttrKey, Any], ...], tuple[Any, ...]]:
        """The pytree's children (opaque rows and values) and auxiliary data (the static fields)."""
        rows = (jax.tree_util.GetAttrKey("rows"), self.opaque_rows)
        values = (jax.tree_util.GetAttrKey("values"), self.values)
        static = (self.num_rows, self.shardings, self.layout)
        return (rows, values), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: Iterable[object]) -> RowGradients:
        """Row gradients from the parts that `tree_flatten_with_keys` returned.

        Instead of arrays, JAX may pass placeholders of any type as `children`.
        """
        gradients = object.__new__(cls)
        names = ("opaque_rows", "values", "num_rows", "shardings", "layout")
        fields = (*children, *static)
        for name, value in zip(names, fields, strict=True):
            object.__setattr__(gradients, name, value)
        return gradients

    def with_values(self, values: Mapping[str, Array]) -> RowGradients:
        """A copy of the gradients with the same row numbers and the new `values`."""
        _, static = self.tree_flatten_with_keys()
        return self.tree_unflatten(static, (self.opaque_rows, values))

    def __add__(self, other: object) -> RowGradients:
        if not isinstance(other, RowGradients):
            return NotImplemented
        return combine(self, other)

    def __radd__(self, other: object) -> RowGradients:
        # `sum([first, second])` first computes `0 + first`, so 0 is accepted.
        if isinstance(other, int) and other == 0:
            return self
        return NotImplemented

    def __mul__(self, factor: object) -> RowGradients:
        if isinstance(factor, RowGradients):
            return NotImplemented
        return scale(self, as_factor(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> RowGradients:
        if isinstance(divisor, RowGradients):
            return NotImplemented
        return scale(self, 1.0 / as_factor(divisor))

    @property
    def summands(self) -> Summands | None:
        """Inputs of `values`, or None outside the trace that computed `values`.

        `values` contains, for each distinct row, the sum of the gradients of all ids that read the
        row. An optimizer step uses the summands instead of `values`, so XLA does not compute
        `values`, an array with space for one row per looked-up id. After an array of the row
        gradients is replaced, `summands` is None.
        """
        if self.unsummed is None:
            return None
        arrays = jax.tree.leaves(self)
        is_unchanged = all(map(operator.is_, arrays, self.unsummed.sums))
        if not is_unchanged:
            return None
        return self.unsummed.summands

    def summed_from(
        self, engine: object, batch: object, d_outputs: Mapping[str, PyTree]
    ) -> RowGradients:
        """A copy of the gradients that also stores `Summands(engine, batch, d_outputs)`."""
        copy = self.with_values(self.values)
        summands = Summands(engine, batch, d_outputs)
        unsummed = _Unsummed(summands, jax.tree.leaves(copy))
        object.__setattr__(copy, "unsummed", unsummed)
        return copy

    def num_touched(self) -> dict[str, Int[Array, ""]]:
        """Number of distinct rows with a gradient, for each stack."""
        counts = {}
        for name, rows in self.rows.items():
            if rows.ndim == 1:
                counts[name] = jnp.sum(rows != NO_ROW)
            else:
                # In rows with keys, column 2 is the number of occurrences, 0 for padding.
                counts[name] = jnp.sum(rows[:, 2] > 0)
        return counts


def _read_rows(gradients: RowGradients) -> Any:
    opaque_rows = gradients.opaque_rows
    if not isinstance(opaque_rows, Mapping):
        return opaque_rows
    rows = {name: _integers(array) for name, array in opaque_rows.items()}
    return ReadRows(rows)


def _keep_rows(gradients: RowGradients, rows: object) -> None:
    if isinstance(rows, Mapping):
        rows = {name: _opaque(array) for name, array in rows.items()}
    object.__setattr__(gradients, "opaque_rows", rows)


# The property `rows` is defined here, because `dataclass` would take a property in the class body
# for the default value of the field `rows`.
setattr(RowGradients, "rows", property(_read_rows, _keep_rows))  # noqa: B010


def as_factor(factor: Any) -> float | Float[Array, ""]:
    """The factor by which gradients are multiplied, as a Python float or a JAX array.

    Raises: TypeError, ValueError: the factor is not a single finite number.
    """
    name = "the factor of gradients"
    check_type(factor, float | Float[Array, ""], name)
    # A JAX array may be traced or not computed yet, so its value is not checked.
    if isinstance(factor, jax.Array):
        return factor
    check_within("(-inf, inf)", factor, name)
    return float(factor)


def check_gradient(value: object, name: str) -> None:
    """Checks that a gradient is an array of floats.

    An array of integers is rejected, because a cast to integers has probably rounded the gradient.

    Raises: TypeError: the gradient is not an array of floats.
    """
    check_type(value, Num[Array, "..."], name)
    array = foreign_to_numpy(value)
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be an array of floats, got {describe(value)}; cast it with .astype('float32')."
        )


def check_belong(
    row_gradients: RowGradients,
    layout: Fingerprint | None,
    num_rows: NumRows,
    axes: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Checks that row gradients can update given tables, or be added to other row gradients.

    Args:
      row_gradients: the value to check, of any type.
      layout: fingerprint of the tables. If None, fingerprints are not compared.
      num_rows: number of rows of each stack.
      axes: for each stack, the number of axes of `rows`, and the length of the last axis of
        `values`. If `axes` is None, any shapes are accepted for which `rows` and `values` match.

    Raises:
      TypeError: the value is not `RowGradients`.
      ValueError: the gradients belong to different tables, row numbers are not in ascending order,
        or the shape of `rows` or `values` is wrong.
    """
    check_type(
        row_gradients, RowGradients, "row gradients, which lookup_vjp and backward passes make,"
    )
    what = "the row gradients belong to another collection or module"
    way_out = "Apply or combine those that one lookup_vjp or backward made."
    if row_gradients.layout is not None and layout is not None:
        check_same(row_gradients.layout, layout, what=what, way_out=way_out)
    if row_gradients.num_rows != num_rows:
        raise ValueError(
            f"{what}: they have rows {row_gradients.num_rows}, expected {num_rows}. {way_out}"
        )
    check_fields(row_gradients)
    all_rows = row_gradients.rows
    for name, table_rows in num_rows:
        rows = all_rows.get(name)
        row_shape: tuple[int, ...] = getattr(rows, "shape", ())
        value_shape: tuple[int, ...] = getattr(row_gradients.values.get(name), "shape", ())
        fits = _shapes_fit(row_shape, value_shape)
        if fits and axes is not None:
            fits = (len(row_shape), value_shape[-1]) == axes[name]
        # Check the order of the rows only if `row_gradients.layout` is None. Row gradients with a
        # layout come from a collection, which sorts the rows.
        if fits and row_gradients.layout is None and len(row_shape) == 1 and not is_traced(rows):
            numbers = np.asarray(rows, np.int64)
            used = numbers[numbers != NO_ROW]
            fits = bool((np.diff(used, prepend=-1, append=table_rows) > 0).all())
        if not fits:
            raise ValueError(
                f"row gradients of stack {name!r}: rows {row_shape} and values {value_shape} do not fit each other or "
                f"the table, or rows do not ascend from 0 to {table_rows - 1}; rs.combine adds gradients of several "
                "batches."
            )


def _shapes_fit(rows: tuple[int, ...], values: tuple[int, ...]) -> bool:
    """Whether an array of row numbers and an array of row gradients have matching shapes.

    Row numbers and row gradients may have leading axes that `lax.scan` added.

    Args:
      rows: shape of the array of row numbers.
      values: shape of the array of row gradients.
    """
    if len(values) < 2 or rows[: len(values) - 1] != values[:-1]:
        return False
    if len(rows) < len(values):
        return True
    # The table has keys. The last axis of the row array has at least three entries: the upper 32
    # bits of a key, the lower 32 bits, and the number of occurrences.
    return rows[-1] > 2


@validated
def global_norm(row_gradients: RowGradients) -> Float[Array, ""]:
    """Euclidean norm over all values of all stacks.

    The norm equals the norm of the gradients as dense arrays, which have the shapes of the tables.
    """
    summands = row_gradients.summands
    if summands is not None:
        squares = summands.engine.squared_norm(summands.batch, summands.d_outputs)
    else:
        squares = {}
        for name, values in row_gradients.values.items():
            squares[name] = jnp.sum(values * values)
    total = sum(squares.values(), start=jnp.zeros(()))
    return jnp.sqrt(total)


@validated
def scale(row_gradients: RowGradients, factor: float | Float[Array, ""]) -> RowGradients:
    """Row gradients with all values multiplied by `factor`.

    Raises: ValueError: the factor is a Python or NumPy number that is not finite.
    """
    # A JAX array is not checked, because reading the array would wait for the device.
    if not isinstance(factor, jax.Array):
        check_within("(-inf, inf)", factor, "scale: factor")

    def scaled(arrays: PyTree) -> PyTree:
        return jax.tree.map(lambda array: array * jnp.asarray(factor, array.dtype), arrays)

    summands = row_gradients.summands
    values = scaled(row_gradients.values)
    result = row_gradients.with_values(values)
    if summands is None:
        return result
    d_outputs = scaled(summands.d_outputs)
    return result.summed_from(summands.engine, summands.batch, d_outputs)


@validated
def clip_by_global_norm(
    row_gradients: RowGradients,
    max_norm: float | Float[Array, ""],
    *,
    other_norm: Float[Array, ""] | float = 0.0,
) -> RowGradients:
    """Row gradients scaled down so that their global norm is at most `max_norm`.

    Args:
      row_gradients: gradients of distinct rows, as returned by the pullback of `lookup_vjp`. If
        `lax.scan` stacked gradients along a leading axis, sum the gradients with `combine` first.
      max_norm: maximum global norm.
      other_norm: norm of the dense gradients (`optax.tree.norm`), 0 by default. `max_norm` is
        compared with the norm of the row gradients and the dense gradients together.

    Raises: ValueError: a norm is NaN, or is negative, which would flip the sign of the gradients.
    """
    check_within("[0, inf]", max_norm, "clip_by_global_norm: max_norm")
    if not isinstance(other_norm, jax.Array):
        check_within("[0, inf]", other_norm, "clip_by_global_norm: other_norm")
    square = jnp.square(global_norm(row_gradients))
    other_square = jnp.square(jnp.asarray(other_norm, jnp.float32))
    norm = jnp.sqrt(square + other_square)
    factor = jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, 1e-38), 1.0)
    return scale(row_gradients, factor)


@validated
def combine(first: RowGradients, *others: RowGradients) -> RowGradients:
    """The sum of several row gradients. Gradients of the same row are added.

    Use `combine` to accumulate gradients over micro-batches. The gradients of the micro-batches can
    be separate arguments, or can be stacked along a leading axis by `lax.scan`.

    Raises: ValueError: the gradients belong to different collections.
    """
    every = (first, *others)
    for gradients in every:
        check_belong(gradients, first.layout, first.num_rows)
    shardings = {}
    for name, rows_sharding, values_sharding in first.shardings or ():
        shardings[name] = (rows_sharding, values_sharding)
    all_rows = [gradients.rows for gradients in every]
    rows = {}
    values = {}
    for name, num_rows in first.num_rows:
        parts = []
        for gradients, rows_by_stack in zip(every, all_rows, strict=True):
            parts.append((rows_by_stack[name], gradients.values[name]))
        stack_rows, stack_values = _combine_stack(num_rows, parts, shardings.get(name))
        rows[name] = stack_rows
        values[name] = stack_values
    return dataclasses.replace(first, rows=rows, values=values)


def _combine_stack(
    num_rows: int,
    parts: list[tuple[Array, Array]],
    shardings: tuple[NamedSharding, NamedSharding] | None,
) -> tuple[Array, Array]:
    """Rows and values of one stack, combined from the rows and values of all `parts`."""
    if shardings is None:
        return _combine_parts(num_rows, num_rows, parts)
    (rows_per_device,) = shardings[0].shard_shape((num_rows,))
    specs = tuple(sharding.spec for sharding in shardings)
    in_specs = []
    for _, values in parts:
        # Leading axes that `lax.scan` added are not split over devices.
        stacked_axes = [None] * (values.ndim - 2)
        in_specs.append(tuple(PartitionSpec(*stacked_axes, *spec) for spec in specs))
    on_each = jax.shard_map(
        partial(_combine_parts, num_rows, rows_per_device),
        mesh=shardings[0].mesh,
        in_specs=(in_specs,),
        out_specs=specs,
        check_vma=False,
    )
    return on_each(parts)


def _combine_parts(
    num_rows: int, capacity: int, parts: list[tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Distinct rows of all `parts` on one device, and for each row the sum of its values.

    At most `capacity` row numbers can be distinct, so all entries after the first `capacity` are
    padding, and are removed. For a table with keys, no padding is removed.
    """
    first_rows, first_values = parts[0]
    dim = first_values.shape[-1]
    flat_values = [values.reshape(-1, dim) for _, values in parts]
    if first_rows.dtype == jnp.uint32:
        num_words = first_rows.shape[-1]
        flat_lanes = [rows.reshape(-1, num_words) for rows, _ in parts]
        lanes = jnp.concatenate(flat_lanes)
        return combine_by_key(*unnamed(lanes), jnp.concatenate(flat_values))
    lists = [IdList.single(rows.reshape(-1)) for rows, _ in parts]
    call = Call.of(lists, ["sum"] * len(lists))
    gradients = CallGradients(call, tuple(flat_values), (dim,))
    rows, values = api.row_gradients(num_rows, gradients)
    return rows[:capacity], values[:capacity]
