"""Optimizer rules inside kernels: evaluates the jaxpr of a rule on one row in registers.

Rules are written for arrays `[rows, dim]`, but a kernel splits a row by columns into several
consecutive arrays ("pieces") of equal shape. The last piece of a row may end with padding. A number
that belongs to the whole row, such as a hyperparameter or a mean, is an array of the same shape as
a piece, with this number in every entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array

from rsembed.optimizers.base import OptimizerSpec, Slots

_ELEMENTWISE_NAMES = """
    add sub mul div neg abs sign max min exp sqrt rsqrt square integer_pow
    select_n clamp eq ne lt le gt ge and or not convert_element_type
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
"""Elementwise primitives that every accelerator computes."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
"""Primitives that call a jaxpr, and the name of the parameter that contains this jaxpr."""
_RESHAPES = frozenset(
    ["broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient"],
)


Row = tuple[Array, ...]
"""One row, split by columns into a tuple of consecutive arrays ("pieces") of equal shape."""


def trace_rule(
    rule: OptimizerSpec,
    table: Array,
    slots: Slots,
    num_hyperparameters: int,
    *,
    elementwise: frozenset[str] = ELEMENTWISE,
) -> ClosedJaxpr:
    """Jaxpr of an optimizer rule for one row.

    The inputs of the jaxpr are the row, its slots, its gradient and the hyperparameters.

    Args:
      rule: optimizer to trace.
      table: table of any float dtype. The traced rule computes in float32.
      slots: optimizer state, float32 `[rows, dim]` or `[rows, 1]`.
      num_hyperparameters: number of hyperparameters of the rule.
      elementwise: elementwise primitives that the kernel can compute.

    Raises: NotImplementedError: a slot has the wrong shape or dtype, or the rule uses a primitive
      that the kernel cannot compute.
    """
    num_rows, dim = table.shape
    shapes = {(num_rows, dim), (num_rows, 1)}
    for number, slot in enumerate(slots):
        if slot.dtype != jnp.float32 or slot.shape not in shapes:
            raise NotImplementedError(
                f"slot {number} of {rule.short_name()} is {slot.dtype}{list(slot.shape)}; kernels "
                "step slots that are float32 and have one entry per row, or as many as the row"
            )
    row = jax.ShapeDtypeStruct((1, dim), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    state = []
    for slot in slots:
        shape = (1, slot.shape[1])
        state.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    hyper = (scalar,) * num_hyperparameters
    trace = jax.make_jaxpr(rule.step_rows)
    jaxpr = trace(row, tuple(state), row, hyper)
    for primitive, params in _primitives(jaxpr, dim):
        is_sum = primitive == "reduce_sum" and params["axes"] == (1,)
        if primitive not in elementwise and not is_sum:
            raise NotImplementedError(
                f"the row rule {rule.short_name()} uses the primitive `{primitive}`",
            )
    return jaxpr


def _primitives(
    closed: ClosedJaxpr,
    dim: int,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and parameters of all primitives that a kernel must compute, also in inner jaxprs.

    `_primitives` leaves out primitives that only broadcast, reshape or copy one number or one row.
    A constant with several numbers is reported as a primitive named "constant array".
    """
    for const in closed.consts:
        if np.size(const) != 1:
            yield "constant array", {}
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        result: Any = eqn.outvars[0].aval
        size = math.prod(result.shape)
        if name in CALLS:
            yield from _primitives(called_jaxpr(eqn), dim)
        elif name not in _RESHAPES or size not in (1, dim):
            yield name, eqn.params


def called_jaxpr(call: Any) -> ClosedJaxpr:
    """The jaxpr that an equation calls."""
    parameter = CALLS[call.primitive.name]
    inner = call.params[parameter]
    if isinstance(inner, ClosedJaxpr):
        return inner
    return ClosedJaxpr(inner, ())


def evaluate(
    closed: ClosedJaxpr,
    arguments: Sequence[Row | Array],
    *,
    dim: int,
    swaps: Mapping[str, Callable[[Array], Array]] | None = None,
) -> list[Row | Array]:
    """Results of a traced rule for one row that is divided into pieces (see `Row`).

    Args:
      closed: result of `trace_rule`.
      arguments: value of each input of the rule: a `Row`, or for a single number an array of the
        same shape as a piece, with this number in every entry.
      dim: length of the row. If the pieces together are longer than the row, the end of the last
        piece is padding.
      swaps: dictionary from the name of a primitive to a function that replaces the primitive,
        because the kernel's compiler does not support it. None, the default: no primitive is
        replaced.
    """
    piece = next(argument[0] for argument in arguments if isinstance(argument, tuple))
    evaluation = _Evaluation(piece.shape, dim, swaps or {})
    return evaluation.run(closed, arguments)


class _Evaluation(NamedTuple):
    """Evaluates jaxprs for one row of `dim` columns, divided into pieces of shape `shape`."""

    shape: tuple[int, ...]
    dim: int
    swaps: Mapping[str, Callable[[Array], Array]]

    def run(
        self,
        closed: ClosedJaxpr,
        values: Sequence[Row | Array],
    ) -> list[Row | Array]:
        """Results of the jaxpr for the inputs `values`, which are `Row`s or single arrays."""
        jaxpr = closed.jaxpr
        known: dict[Any, Row | Array] = dict(zip(jaxpr.invars, values, strict=True))
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            known[variable] = self.repeat(constant, variable)
        for eqn in jaxpr.eqns:
            inputs = [self.read(known, variable) for variable in eqn.invars]
            name = eqn.primitive.name
            if name in CALLS:
                outputs = self.run(called_jaxpr(eqn), inputs)
            elif name in _RESHAPES:
                outputs = [inputs[0]]
            elif name == "reduce_sum":
                summed: Any = eqn.invars[0].aval
                outputs = [self.add_up(inputs[0], summed.shape[1])]
            else:
                function = _elementwise(eqn, self.swaps)
                outputs = [_apply_to_pieces(function, inputs)]
            known |= dict(zip(eqn.outvars, outputs, strict=True))
        return [self.read(known, variable) for variable in jaxpr.outvars]

    def read(
        self,
        known: Mapping[Any, Row | Array],
        variable: object,
    ) -> Row | Array:
        """Value of a variable or literal of a jaxpr."""
        if isinstance(variable, Literal):
            return self.repeat(variable.val, variable)
        return known[variable]

    def repeat(self, number: Any, variable: Any) -> Array:
        """Array of shape `shape` that repeats `number`, in the dtype of `variable`."""
        scalar = np.asarray(number).reshape(())
        return jnp.full(self.shape, scalar, variable.aval.dtype)

    def add_up(self, value: Row | Array, num_columns: int) -> Array:
        """Sum of a row without its padding, repeated in an array of shape `shape`.

        Args:
          value: the row, or an array that repeats the single number in all columns of the row.
          num_columns: number of columns that are summed.
        """
        if not isinstance(value, tuple):
            return value * num_columns
        (size,) = self.shape
        total = jnp.zeros(size, jnp.float32)
        for number, part in enumerate(value):
            num_entries = self.dim - number * size
            if num_entries < size:
                is_entry = jax.lax.iota(jnp.int32, size) < num_entries
                part = jnp.where(is_entry, part, 0.0)
            total = total + part
        row_sum = jnp.sum(total)
        return jnp.full(size, row_sum, jnp.float32)


def _apply_to_pieces(
    function: Callable[..., Array],
    inputs: Sequence[Row | Array],
) -> Row | Array:
    """Applies an elementwise function to the inputs, separately for each piece of the row.

    Returns: a `Row` if any input is a `Row`, else a single array.
    """
    num_pieces = 0
    for value in inputs:
        if isinstance(value, tuple):
            num_pieces = len(value)
    if num_pieces == 0:
        return function(*inputs)
    rows = []
    for value in inputs:
        row = value if isinstance(value, tuple) else (value,) * num_pieces
        rows.append(row)
    results = []
    for pieces in zip(*rows, strict=True):
        results.append(function(*pieces))
    return tuple(results)


def _elementwise(
    eqn: Any,
    swaps: Mapping[str, Callable[[Array], Array]],
) -> Callable[..., Array]:
    """Function that applies the primitive of a jaxpr equation to one piece of each input.

    A function in `swaps` replaces the primitive of the same name.
    """
    name = eqn.primitive.name
    if name in swaps:
        return swaps[name]
    if name in ("square", "integer_pow"):
        exponent = eqn.params.get("y", 2)
        return functools.partial(_power, exponent=exponent)
    if name == "convert_element_type":
        return lambda x: x.astype(eqn.params["new_dtype"])
    return functools.partial(eqn.primitive.bind, **eqn.params)


def _power(x: Array, *, exponent: int) -> Array:
    """`x**exponent` by repeated multiplication, for any integer `exponent` except 0."""
    product = x
    for _ in range(abs(exponent) - 1):
        product = product * x
    if exponent < 0:
        return 1.0 / product
    return product
