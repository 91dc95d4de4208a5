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
"""Number of rows of each stack's table, as sorted `(stack, rows)` pairs."""
Shardings: TypeAlias = tuple[tuple[str, NamedSharding, NamedSharding], ...] | None
"""Shardings of rows and values, as sorted `(stack, rows, values)`. None if there is no mesh."""


class ReadRows(dict[str, Any]):
    """Rows by stack, as `RowGradients.rows` returns them: a copy that cannot be written to."""

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

    `NO_ROW` becomes 0, so `jnp.zeros_like` of row gradients returns gradients without rows. A value
    that is not an array of row numbers is returned unchanged, and later checks reject it.
    """
    if not isinstance(rows, (jax.Array, np.ndarray)) or not jnp.issubdtype(rows.dtype, jnp.integer):
        return rows
    if rows.dtype == jnp.uint32:
        return opaque.wrap(rows, "key_lane")
    numbers = as_rows(rows)
    if rows.dtype.itemsize > 4 and not is_traced(rows):
        is_cut = np.asarray(rows) != np.asarray(numbers)
        if is_cut.any():
            # `rows` has a number that is too large for 32 bits. `check_belong` will reject `rows`.
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
    """Inputs from which row gradients are computed.

    Args:
      engine: the engine of the collection. The engine can step the summands without their sums.
      batch: prepared batch that was looked up.
      d_outputs: gradients of the pooled outputs.
    """

    engine: Any
    batch: Any
    d_outputs: Mapping[str, PyTree]


class _Unsummed(NamedTuple):
    """Summands, and the arrays of the row gradients that were summed from them."""

    summands: Summands
    sums: list[Array]


@no_type_check  # Unchecked: JAX fills pytrees with placeholders.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct rows, for each stack.

    `first + second` is `combine`, and `2 * gradients` is `scale`. Row numbers are kept in arrays
    that reject arithmetic. For this reason `jax.tree.map(jnp.add, first, second)` is a TypeError
    and does not return gradients of wrong rows.

    Inside `jit`, gradients of a collection also have their `summands`. The summands are not in the
    pytree, so copies of the gradients and results of compiled programs do not have them.

    Args:
      rows: distinct row numbers in ascending order, with `NO_ROW` as padding at the end. On a mesh,
        this holds for the part of each device. For a table with keys, uint32 `[capacity, 3]`: upper
        and lower half of each key, and how often it occurred, 0 for padding. For several tables
        with keys, `[capacity, 4]`, with the index of the table.
      values: float32 gradient of each row; zeros for padding.
      num_rows: rows of each stack's table, as sorted `(stack, rows)` pairs.
      shardings: on a mesh, shardings of rows and values of each stack, as sorted
        `(stack, rows, values)`. None if there is no mesh.
      layout: fingerprint of the collection that the gradients belong to. The fingerprint is
        compared when the gradients are applied.
    """

    rows: dict[str, Int[Array, "*capacity"]]
    values: dict[str, Float[Array, "*capacity dim"]]
    num_rows: NumRows
    shardings: Shardings = None
    layout: Fingerprint | None = None
    # Read and written by the property `rows`, which is attached below the class.
    opaque_rows: Any = dataclasses.field(init=False, repr=False, compare=False)
    # `summed_from` sets this field, and `summands` reads it.
    unsummed: _Unsummed | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    __array_ufunc__: ClassVar[None] = None  # Makes `np.float32(2) * gradients` call `__rmul__`.

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[jax.tree_util.GetAttrKey, Any], ...], tuple[Any, ...]]:
        """Opaque rows and values as children, and the static fields."""
        rows = (jax.tree_util.GetAttrKey("rows"), self.opaque_rows)
        values = (jax.tree_util.GetAttrKey("values"), self.values)
        return (rows, values), (self.num_rows, self.shardings, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: Iterable[object]) -> RowGradients:
        """Row gradients from the parts that `tree_flatten_with_keys` returned.

        Children may be anything that JAX puts into a tree.
        """
        gradients = object.__new__(cls)
        names = ("opaque_rows", "values", "num_rows", "shardings", "layout")
        for name, value in zip(names, (*children, *static), strict=True):
            object.__setattr__(gradients, name, value)
        return gradients

    def with_values(self, values: Mapping[str, Array]) -> RowGradients:
        """Gradients of the same rows with other values."""
        _, static = self.tree_flatten_with_keys()
        return self.tree_unflatten(static, (self.opaque_rows, values))

    def __add__(self, other: object) -> RowGradients:
        if not isinstance(other, RowGradients):
            return NotImplemented
        return combine(self, other)

    def __radd__(self, other: object) -> RowGradients:
        if isinstance(other, int) and other == 0:  # Python's `sum` starts with 0.
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
        """Inputs from which the values are computed, while the program that made them is traced.

        A step uses the summands instead of the sums. XLA then leaves out the sums. The sums are as
        large as all occurrences of ids. The summands are None if another array was put into the
        gradients.
        """
        if self.unsummed is None:
            return None
        arrays = jax.tree.leaves(self)
        is_unchanged = all(map(operator.is_, arrays, self.unsummed.sums))
        return self.unsummed.summands if is_unchanged else None

    def summed_from(
        self, engine: object, batch: object, d_outputs: Mapping[str, PyTree]
    ) -> RowGradients:
        """A copy of these gradients with these `summands`."""
        copy = self.with_values(self.values)
        unsummed = _Unsummed(Summands(engine, batch, d_outputs), jax.tree.leaves(copy))
        object.__setattr__(copy, "unsummed", unsummed)
        return copy

    def num_touched(self) -> dict[str, Int[Array, ""]]:
        """Number of distinct rows with a gradient, for each stack."""
        counts = {}
        for name, rows in self.rows.items():
            # The third word of a key is its number of occurrences, 0 for padding.
            is_touched = rows != NO_ROW if rows.ndim == 1 else rows[:, 2] > 0
            counts[name] = jnp.sum(is_touched)
        return counts


def _read_rows(gradients: RowGradients) -> Any:
    if not isinstance(gradients.opaque_rows, Mapping):
        return gradients.opaque_rows
    return ReadRows({name: _integers(array) for name, array in gradients.opaque_rows.items()})


def _keep_rows(gradients: RowGradients, rows: object) -> None:
    if isinstance(rows, Mapping):
        rows = {name: _opaque(array) for name, array in rows.items()}
    object.__setattr__(gradients, "opaque_rows", rows)


# Set after the class: `dataclass` would take a property in the class for the field's default.
setattr(RowGradients, "rows", property(_read_rows, _keep_rows))  # noqa: B010


def as_factor(factor: Any) -> float | Float[Array, ""]:
    """The factor of gradients as a Python float or JAX array.

    Raises: TypeError, ValueError: the factor is not a single finite number.
    """
    name = "the factor of gradients"
    check_type(factor, float | Float[Array, ""], name)
    # The value of a JAX array may be traced, or may not have been computed yet.
    if isinstance(factor, jax.Array):
        return factor
    check_within("(-inf, inf)", factor, name)
    return float(factor)


def check_gradient(value: object, name: str) -> None:
    """Raises: TypeError: a gradient is not an array of floats.

    A gradient of integers is an error, because it was probably cast and its values were rounded.
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
    """Checks that row gradients fit the tables that they are applied to.

    Args:
      row_gradients: the argument to check, of any type.
      layout: fingerprint of the tables, or None.
      num_rows: number of rows of each stack.
      axes: for each stack, number of axes of rows and length of a value. If None, they are not
        checked.

    Raises:
      TypeError: the argument is not `RowGradients`.
      ValueError: the gradients have other row numbers, or not one value of the table's dim per row.
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
        # Gradients with a layout were made by this library, so their rows ascend.
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
    """Whether arrays of rows and values with these shapes fit, stacked by `lax.scan` or not."""
    if len(values) < 2 or rows[: len(values) - 1] != values[:-1]:
        return False
    if len(rows) < len(values):
        return True
    # Each key has three numbers or more: both halves, and the number of occurrences.
    return rows[-1] > 2


@validated
def global_norm(row_gradients: RowGradients) -> Float[Array, ""]:
    """Euclidean norm over all rows of all stacks.

    The norm equals the norm of the dense gradients.
    """
    summands = row_gradients.summands
    if summands is not None:
        squares = summands.engine.squared_norm(summands.batch, summands.d_outputs)
    else:
        squares = {name: jnp.sum(values * values) for name, values in row_gradients.values.items()}
    return jnp.sqrt(sum(squares.values(), start=jnp.zeros(())))


@validated
def scale(row_gradients: RowGradients, factor: float | Float[Array, ""]) -> RowGradients:
    """Row gradients with all values multiplied by `factor`.

    Raises: ValueError: the factor is not finite. A JAX array is not checked.
    """
    if not isinstance(factor, jax.Array):  # Reading a device array would wait for the device.
        check_within("(-inf, inf)", factor, "scale: factor")

    def scaled(arrays: PyTree) -> PyTree:
        return jax.tree.map(lambda array: array * jnp.asarray(factor, array.dtype), arrays)

    summands = row_gradients.summands
    result = row_gradients.with_values(scaled(row_gradients.values))
    if summands is None:
        return result
    return result.summed_from(summands.engine, summands.batch, scaled(summands.d_outputs))


@validated
def clip_by_global_norm(
    row_gradients: RowGradients,
    max_norm: float | Float[Array, ""],
    *,
    other_norm: Float[Array, ""] | float = 0.0,
) -> RowGradients:
    """Row gradients scaled down so that their global norm is at most `max_norm`.

    Args:
      row_gradients: gradients of distinct rows, as returned by the function from `lookup_vjp`. Sum
        gradients that `lax.scan` stacked with `combine` first.
      max_norm: maximum global norm of the result.
      other_norm: norm of the dense gradients (`optax.tree.norm`), to clip both by their common
        norm. 0 by default.

    Raises: ValueError: a norm is negative, which would flip the sign of the gradients, or NaN.
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
    """The sum of several row gradients. Gradients of equal rows are added.

    Use `combine` to accumulate gradients over micro-batches. `lax.scan` over micro-batches stacks
    its results along a leading axis. `combine` also accepts and sums these stacked gradients.

    Raises: ValueError: the gradients belong to different collections.
    """
    every = (first, *others)
    for gradients in every:
        check_belong(gradients, first.layout, first.num_rows)
    shardings = {name: (rows, values) for name, rows, values in first.shardings or ()}
    all_rows = [gradients.rows for gradients in every]
    rows = {}
    values = {}
    for name, num_rows in first.num_rows:
        parts = []
        for gradients, rows_by_stack in zip(every, all_rows, strict=True):
            parts.append((rows_by_stack[name], gradients.values[name]))
        rows[name], values[name] = _combine_stack(num_rows, parts, shardings.get(name))
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
    """Distinct rows of all parts on one device, at most `capacity`, and their summed values."""
    flat_values = [values.reshape(-1, values.shape[-1]) for _, values in parts]
    first_rows, _ = parts[0]
    if first_rows.dtype == jnp.uint32:
        lanes = jnp.concatenate([rows.reshape(-1, rows.shape[-1]) for rows, _ in parts])
        return combine_by_key(*unnamed(lanes), jnp.concatenate(flat_values))
    lists = [IdList.single(rows.reshape(-1)) for rows, _ in parts]
    call = Call.of(lists, ["sum"] * len(lists))
    dims = (flat_values[0].shape[1],)
    gradients = CallGradients(call, tuple(flat_values), dims)
    rows, values = api.row_gradients(num_rows, gradients)
    return rows[:capacity], values[:capacity]
