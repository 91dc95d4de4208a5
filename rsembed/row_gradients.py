"""Gradients of the rows that a batch looked up: small, sparse, and composable before they are applied."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num, PyTree

from rsembed import opaque
from rsembed.bags import foreign_to_numpy, is_traced
from rsembed.checks import check_fields, check_type, check_within, describe, validated
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, as_rows
from rsembed.storage.row_map import combine as combine_by_key
from rsembed.storage.row_map import unnamed


class ReadRows(dict[str, Any]):
    """Rows by stack as `RowGradients.rows` shows them: a copy, which cannot be written into."""

    def __setitem__(self, name: str, rows: Any) -> None:
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


def _rows_of_children(names: tuple[str, ...], arrays: Iterable[Any]) -> ReadRows:
    return ReadRows(zip(names, arrays, strict=True))


jax.tree_util.register_pytree_with_keys(ReadRows, _children_of_rows, _rows_of_children)


def _opaque(rows: Any) -> Any:
    """The opaque array of the rows of a stack, 0 where no row is: `jnp.zeros_like` of row gradients has no rows.

    What is no array of such numbers comes back, for later checks.
    """
    if not isinstance(rows, (jax.Array, np.ndarray)) or not jnp.issubdtype(rows.dtype, jnp.integer):
        return rows
    if rows.dtype == jnp.uint32:
        return opaque.wrap(rows, "key_lane")
    numbers = as_rows(rows)
    if (
        not is_traced(rows)
        and rows.dtype.itemsize > 4
        and np.any(np.asarray(rows) != np.asarray(numbers))
    ):
        return rows  # a number that 32 bits do not hold, which `check_belong` refuses
    return _opaque_numbers(numbers)


@partial(jax.jit, inline=True)
def _opaque_numbers(numbers: Array) -> Array:
    return opaque.wrap(numbers ^ np.int32(NO_ROW), "row")


@partial(jax.jit, inline=True)
def _plain_numbers(array: Array) -> Array:
    numbers: Array = opaque.unwrap(array)
    return numbers ^ np.int32(NO_ROW)


def _integers(array: Any) -> Any:
    """The inverse of `_opaque`."""
    if opaque.kind_of(array) == "row":
        return _plain_numbers(array)
    return opaque.unwrap(array)


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct rows, per stack.

    `first + second` is `combine`, and `2 * gradients` is `scale`. Numbers of rows are kept in arrays that refuse
    arithmetic, so that `jax.tree.map(jnp.add, first, second)` is a TypeError instead of gradients of other rows.

    Args:
      rows: distinct row numbers in ascending order; `NO_ROW` marks unused places at the end. On a mesh, this is true of
        the part of every device. Of a table with keys uint32 `[capacity, 3]`: the upper and lower half of each key, and
        how often it occurred, 0 in unused places; of several tables `[capacity, 4]`, with the number of the table.
      values: float32 gradient of each row; zeros in unused places.
      num_rows: rows of each stack's table, as sorted `(stack, rows)` pairs.
      shardings: on a mesh, how rows and values of each stack are split, as sorted `(stack, rows, values)`.
      layout: fingerprint of the collection that they belong to, compared before they are applied.
    """

    rows: dict[str, Int[Array, "*capacity"]]
    values: dict[str, Float[Array, "*capacity dim"]]
    num_rows: tuple[tuple[str, int], ...]
    shardings: tuple[tuple[str, NamedSharding, NamedSharding], ...] | None = None
    layout: Fingerprint | None = None
    opaque_rows: Any = dataclasses.field(
        init=False, repr=False, compare=False
    )  # what `rows` reads and sets

    _made: ClassVar[tuple[list[Array], PyTree]] = ([], None)
    __array_ufunc__: ClassVar[None] = None  # `np.float32(2) * gradients` then asks `__rmul__`

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[jax.tree_util.GetAttrKey, Any], ...], tuple[Any, ...]]:
        """Opaque rows and values, and what is static."""
        rows = (jax.tree_util.GetAttrKey("rows"), self.opaque_rows)
        values = (jax.tree_util.GetAttrKey("values"), self.values)
        return (rows, values), (self.num_rows, self.shardings, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: Iterable[Any]) -> RowGradients:
        """The inverse of `tree_flatten_with_keys`; children may be anything that JAX puts into a tree."""
        gradients = object.__new__(cls)
        fields = zip(
            ("opaque_rows", "values", "num_rows", "shardings", "layout"),
            (*children, *static),
            strict=True,
        )
        for name, value in fields:
            object.__setattr__(gradients, name, value)
        return gradients

    def with_values(self, values: Mapping[str, Array]) -> RowGradients:
        """Gradients of the same rows that have other values."""
        _, static = self.tree_flatten_with_keys()
        return self.tree_unflatten(static, (self.opaque_rows, values))

    def __add__(self, other: Any) -> RowGradients:
        if not isinstance(other, RowGradients):
            return NotImplemented
        return combine(self, other)

    def __radd__(self, other: Any) -> RowGradients:
        if isinstance(other, int) and other == 0:  # the start of `sum`
            return self
        return NotImplemented

    def __mul__(self, factor: Any) -> RowGradients:
        if isinstance(factor, RowGradients):
            return NotImplemented
        return scale(self, as_factor(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> RowGradients:
        if isinstance(divisor, RowGradients):
            return NotImplemented
        return scale(self, 1.0 / as_factor(divisor))

    @property
    def summands(self) -> tuple[Any, Mapping[str, PyTree], Mapping[str, Array]] | None:
        """Engine of the collection, batch, and gradients of what features pooled, from which the values are summed.

        They are known where they were made, while a program is traced: a step takes them in place of the sums, which
        are as large as all occurrences and which XLA leaves out then. None once somebody put other arrays in.
        """
        arrays, summands = self._made
        return summands if all(map(operator.is_, arrays, jax.tree.leaves(self))) else None

    def summed_from(
        self, engine: Any, batch: Mapping[str, PyTree], d_outputs: Mapping[str, Array]
    ) -> RowGradients:
        """A copy of these gradients that has these `summands`."""
        found = self.with_values(self.values)
        object.__setattr__(found, "_made", (jax.tree.leaves(found), (engine, batch, d_outputs)))
        return found

    def num_touched(self) -> dict[str, Int[Array, ""]]:
        """Number of distinct rows with a gradient, per stack."""
        return {
            name: jnp.sum(rows != NO_ROW if rows.ndim == 1 else rows[:, 2] > 0)
            for name, rows in self.rows.items()
        }


def _read_rows(gradients: RowGradients) -> Any:
    if not isinstance(gradients.opaque_rows, Mapping):
        return gradients.opaque_rows
    return ReadRows({name: _integers(array) for name, array in gradients.opaque_rows.items()})


def _keep_rows(gradients: RowGradients, rows: Any) -> None:
    if isinstance(rows, Mapping):
        rows = {name: _opaque(array) for name, array in rows.items()}
    object.__setattr__(gradients, "opaque_rows", rows)


# Set below the class, because `dataclass` would take a property in it for the default of the field.
setattr(RowGradients, "rows", property(_read_rows, _keep_rows))  # noqa: B010


def as_factor(factor: Any) -> float | Float[Array, ""]:
    """The number that gradients are multiplied by, as Python or JAX has it.

    Raises: TypeError, ValueError: it is no single finite number.
    """
    name = "the factor of gradients"
    check_type(factor, float | Float[Array, ""], name)
    if isinstance(factor, jax.Array):  # its value may be known only later
        return factor
    check_within("(-inf, inf)", factor, name)
    return float(factor)


def check_gradient(value: Any, name: str) -> None:
    """Raises: TypeError: a gradient is not an array of floats; a cast to integers would have cut its values."""
    check_type(value, Num[Array, "..."], name)
    if not jnp.issubdtype(
        getattr(foreign_to_numpy(value), "dtype", None) or np.asarray(value).dtype, jnp.floating
    ):
        raise TypeError(
            f"{name} must be an array of floats, got {describe(value)}; cast it with .astype('float32')."
        )


def check_belong(
    row_gradients: RowGradients,
    layout: Fingerprint | None,
    num_rows: tuple[tuple[str, int], ...],
    axes: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Checks that row gradients fit the tables that take them.

    Args:
      row_gradients: whatever is used as some.
      layout: of the tables.
      num_rows: of each stack.
      axes: number of axes of rows, and length of values, of each stack; None admits any.

    Raises: TypeError: they are none. ValueError: they count rows otherwise, or a row has not one vector of its dim.
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
    for name, most in num_rows:
        found = all_rows.get(name)
        rows, values = (
            getattr(own, "shape", ()) for own in (found, row_gradients.values.get(name))
        )
        fits = len(values) > 1 and rows[: len(values) - 1] == values[:-1]
        fits = fits and (
            len(rows) < len(values) or rows[-1:] > (2,)
        )  # both halves of a key, and how often it occurred
        fits = fits and (axes is None or (len(rows), *values[-1:]) == axes[name])
        if fits and row_gradients.layout is None and len(rows) == 1 and not is_traced(found):
            numbers = np.asarray(found, np.int64)
            fits = bool((np.diff(numbers[numbers != NO_ROW], prepend=-1, append=most) > 0).all())
        if not fits:
            raise ValueError(
                f"row gradients of stack {name!r}: rows {rows} and values {values} do not fit each other or the table, "
                f"or rows do not ascend from 0 to {most - 1}; rs.combine adds gradients of several batches."
            )


@validated
def global_norm(row_gradients: RowGradients) -> Float[Array, ""]:
    """Euclidean norm over all rows of all stacks; equals the norm of the dense gradients."""
    if row_gradients.summands is not None:
        engine, *given = row_gradients.summands
        squares = engine.squared_norm(*given)
    else:
        squares = {name: jnp.sum(values * values) for name, values in row_gradients.values.items()}
    return jnp.sqrt(sum(squares.values(), start=jnp.zeros(())))


@validated
def scale(row_gradients: RowGradients, factor: float | Float[Array, ""]) -> RowGradients:
    """Row gradients with all values multiplied by `factor`.

    Raises: ValueError: it is not finite.
    """
    if not isinstance(factor, jax.Array):  # nobody waits for a number of a device
        check_within("(-inf, inf)", factor, "scale: factor")

    def scaled(arrays: PyTree) -> PyTree:
        return jax.tree.map(lambda array: array * jnp.asarray(factor, array.dtype), arrays)

    found = row_gradients.with_values(scaled(row_gradients.values))
    if row_gradients.summands is None:
        return found
    engine, batch, d_outputs = row_gradients.summands
    return found.summed_from(engine, batch, scaled(d_outputs))


@validated
def clip_by_global_norm(
    row_gradients: RowGradients,
    max_norm: float | Float[Array, ""],
    *,
    other_norm: Float[Array, ""] | float = 0.0,
) -> RowGradients:
    """Scales all values down so that their global norm is at most `max_norm`.

    Args:
      row_gradients: gradients with equal rows combined (as `pullback` returns them).
      max_norm: the largest norm allowed.
      other_norm: norm of the dense gradients (`optax.tree.norm`), to clip both by their common norm.

    Raises: ValueError: a norm is negative, which would turn the gradients round, or NaN.
    """
    check_within("[0, inf]", max_norm, "clip_by_global_norm: max_norm")
    if not isinstance(other_norm, jax.Array):
        check_within("[0, inf]", other_norm, "clip_by_global_norm: other_norm")
    norm = jnp.sqrt(
        jnp.square(global_norm(row_gradients)) + jnp.square(jnp.asarray(other_norm, jnp.float32))
    )
    return scale(
        row_gradients, jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, 1e-38), 1.0)
    )


@validated
def combine(first: RowGradients, *others: RowGradients) -> RowGradients:
    """The sum of several row gradients, equal rows added up: gradient accumulation over micro-batches.

    A `lax.scan` over micro-batches stacks its results along a leading axis; such stacked gradients are accepted too.

    Raises: ValueError: they belong to different collections.
    """
    every = (first, *others)
    for own in every:
        check_belong(own, first.layout, first.num_rows)
    shardings = {name: split for name, *split in first.shardings or ()}
    all_rows = [own.rows for own in every]
    rows, values = {}, {}
    for name, num_rows in first.num_rows:
        parts = [
            (own_rows[name], own.values[name])
            for own_rows, own in zip(all_rows, every, strict=True)
        ]
        rows[name], values[name] = _combine_stack(num_rows, parts, shardings.get(name))
    return dataclasses.replace(first, rows=rows, values=values)


def _combine_stack(
    num_rows: int, parts: list[tuple[Array, Array]], split: list[NamedSharding] | None
) -> tuple[Array, Array]:
    bound = split[0].shard_shape((num_rows,))[0] if split else num_rows  # of one device

    def on_device(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        flat_values = [values.reshape(-1, values.shape[-1]) for _, values in parts]
        if parts[0][0].dtype == jnp.uint32:
            lanes = jnp.concatenate([rows.reshape(-1, rows.shape[-1]) for rows, _ in parts])
            return combine_by_key(*unnamed(lanes), jnp.concatenate(flat_values))
        lists = [IdList.single(rows.reshape(-1)) for rows, _ in parts]
        call = Call.of(lists, ["sum"] * len(lists))
        gradients = CallGradients(call, tuple(flat_values), (flat_values[0].shape[1],))
        rows, values = api.row_gradients(num_rows, gradients)
        return rows[:bound], values[:bound]

    if not split:
        return on_device(parts)
    specs = tuple(sharding.spec for sharding in split)
    behind = [
        tuple(PartitionSpec(*[None] * (values.ndim - 2), *spec) for spec in specs)
        for _, values in parts
    ]
    on_each = jax.shard_map(
        on_device, mesh=split[0].mesh, in_specs=(behind,), out_specs=specs, check_vma=False
    )
    return on_each(parts)
