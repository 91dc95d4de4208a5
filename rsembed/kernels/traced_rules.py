"""Row rules inside kernels: the jaxpr of a rule, evaluated on the pieces of one row that a kernel holds in registers.

A kernel has no arrays `[rows, dim]` but pieces of one row, all of one shape, the last one filled up. A number of the
whole row (a hyperparameter, a mean) is a piece that repeats it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array, PyTree

from rsembed.optimizers.base import OptimizerSpec, Slots

ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "sign", "max", "min", "exp", "sqrt", "rsqrt", "square", "integer_pow"}
    | {"select_n", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "convert_element_type"}
)
"""Primitives that every accelerator computes entry by entry."""

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient"})


Row = tuple[Array, ...]
"""Consecutive pieces of one row."""


def trace_rule(
    rule: OptimizerSpec,
    table: Array,
    slots: Slots,
    num_hyperparameters: int,
    *,
    elementwise: frozenset[str] = ELEMENTWISE,
) -> ClosedJaxpr:
    """The rule traced for one row: a jaxpr of row, slots, gradient and hyperparameters.

    Args:
      rule: the optimizer.
      table: rows, of any float type; rules compute in float32.
      slots: the optimizer's state, float32 `[rows, dim]` or `[rows, 1]`.
      num_hyperparameters: number of the rule's hyperparameters.
      elementwise: primitives the kernel can do.

    Raises: NotImplementedError: a slot has another shape, or the rule uses another primitive, which is named.
    """
    dim = table.shape[1]
    for number, slot in enumerate(slots):
        if slot.dtype != jnp.float32 or slot.shape not in {(table.shape[0], dim), (table.shape[0], 1)}:
            raise NotImplementedError(
                f"slot {number} of {rule.short_name()} is {slot.dtype}{list(slot.shape)}; kernels step slots that are "
                f"float32 and have one entry per row, or as many as the row"
            )
    row, scalar = jax.ShapeDtypeStruct((1, dim), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    state = tuple(jax.ShapeDtypeStruct((1, slot.shape[1]), jnp.float32) for slot in slots)
    jaxpr = jax.make_jaxpr(rule.step_rows)(row, state, row, (scalar,) * num_hyperparameters)
    for primitive, params in _primitives(jaxpr, dim):
        is_sum = primitive == "reduce_sum" and params["axes"] == (1,)
        if primitive not in elementwise and not is_sum:
            raise NotImplementedError(f"the row rule {rule.short_name()} uses the primitive `{primitive}`")
    return jaxpr


def _primitives(closed: ClosedJaxpr, dim: int) -> Iterator[tuple[str, Mapping[str, PyTree]]]:
    """Primitives of a jaxpr with calls unfolded, without those that only repeat a number or change a shape."""
    yield from (("constant array", {}) for const in closed.consts if np.size(const) != 1)
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        result: PyTree = eqn.outvars[0].aval
        if name in _CALLS:
            yield from _primitives(_body(eqn), dim)
        elif name not in _RESHAPES or math.prod(result.shape) not in (1, dim):
            yield name, eqn.params


def _body(call: Any) -> ClosedJaxpr:
    inner = call.params[_CALLS[call.primitive.name]]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def evaluate(
    closed: ClosedJaxpr,
    arguments: Sequence[Row | Array],
    *,
    dim: int,
    swaps: Mapping[str, Callable[[Array], Array]] | None = None,
) -> list[Row | Array]:
    """Results of a traced rule on pieces.

    Args:
      closed: result of `trace_rule`.
      arguments: one for each input: a row, or a piece that repeats a number.
      dim: entries of the row; the pieces hold more where its length is not a multiple of theirs.
      swaps: replacements, by name, of primitives that the kernel's compiler lacks.
    """
    piece = next(argument[0] for argument in arguments if isinstance(argument, tuple))

    def spread(number: Any, of: Any) -> Array:
        return jnp.full(piece.shape, np.asarray(number).reshape(()), of.aval.dtype)

    def add_up(value: Row | Array) -> Array:
        if not isinstance(value, tuple):
            return value
        total = jnp.zeros(piece.shape, jnp.float32)
        for number, part in enumerate(value):
            left = dim - number * piece.shape[0]
            if left < piece.shape[0]:
                part = jnp.where(jax.lax.iota(jnp.int32, piece.shape[0]) < left, part, 0.0)
            total = total + part
        return jnp.full(piece.shape, jnp.sum(total), jnp.float32)

    def run(jaxpr: Jaxpr, consts: Sequence[PyTree], values: Sequence[Row | Array]) -> list[Row | Array]:
        known: dict[Any, Row | Array] = dict(zip(jaxpr.invars, values, strict=True))
        known |= {v: spread(c, v) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        for eqn in jaxpr.eqns:
            inputs = [spread(v.val, v) if isinstance(v, Literal) else known[v] for v in eqn.invars]
            name = eqn.primitive.name
            if name in _CALLS:
                body = _body(eqn)
                outputs = run(body.jaxpr, body.consts, inputs)
            elif name in _RESHAPES:
                outputs = [inputs[0]]
            elif name == "reduce_sum":
                outputs = [add_up(inputs[0])]
            else:
                function = _elementwise(eqn, swaps or {})
                num_pieces = max((len(value) for value in inputs if isinstance(value, tuple)), default=0)
                columns = [value if isinstance(value, tuple) else (value,) * num_pieces for value in inputs]
                pieces = tuple(function(*own) for own in zip(*columns, strict=True))
                outputs = [pieces if num_pieces else function(*inputs)]
            known |= dict(zip(eqn.outvars, outputs, strict=True))
        return [spread(v.val, v) if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, arguments)


def _elementwise(eqn: Any, swaps: Mapping[str, Callable[[Array], Array]]) -> Callable[..., Array]:
    name = eqn.primitive.name
    if name in swaps:
        return swaps[name]
    if name in ("square", "integer_pow"):
        exponent = eqn.params.get("y", 2)
        return lambda x: _multiplied(x, exponent) if exponent > 0 else 1.0 / _multiplied(x, -exponent)
    if name == "convert_element_type":
        return lambda x: x.astype(eqn.params["new_dtype"])
    return lambda *values: eqn.primitive.bind(*values, **eqn.params)


def _multiplied(x: Array, exponent: int) -> Array:
    return functools.reduce(lambda product, _: product * x, range(exponent - 1), x)
