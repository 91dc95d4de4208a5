"""XLA's own SparseCore operations, with any elementwise optimizer: compile-only, numerics unproven.

XLA exchanges ids, combines gradients and steps rows itself, from buffers that the host partitioned. Nothing but a TPU
can run these operations, so no test here has seen their numbers: they compile for v5p, v6e and TPU7x, and that is all.
`sparsecore` carries what we claim.

Source: the custom calls of openxla/xla for `SparseDenseMatmul*`, and their operands in jax-tpu-embedding 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir
from jaxtyping import Array, Float, Int

from rsembed.kernels.traced_rules import ELEMENTWISE, trace_rule
from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots

_PRIMITIVES = ELEMENTWISE | {"pow", "log", "log1p", "expm1", "tanh"}
_WIDTH_MULTIPLE = 8
_NO_ID = 2**31 - 1


class Buffers(NamedTuple):
    """A device's part of a preprocessed batch of one stack, as `rsembed.sparsecore` lays it out."""

    row_pointers: Int[Array, " pointers"]
    embedding_ids: Int[Array, " nnz"]
    sample_ids: Int[Array, " nnz"]
    gains: Float[Array, " nnz"]


class Limits(NamedTuple):
    """What the batch was partitioned under."""

    max_ids_per_partition: int
    max_unique_ids_per_partition: int


def sparse_dense_matmul(
    table: Float[Array, "rows dim"], buffers: Buffers, *, num_samples: int, limits: Limits
) -> Float[Array, "samples dim"]:
    """Activations of this device's samples, inside `shard_map`. Compiles for SparseCore; numerics unproven.

    Raises: NotImplementedError: rows are not float32, or not a multiple of 8 numbers long.
    """
    _check_table(table)
    start = jnp.zeros((num_samples, table.shape[1]), jnp.float32)
    (activations,) = _lookup_p.bind(*buffers, table, start, limits=limits)
    return activations


def sparse_dense_matmul_update(
    table: Float[Array, "rows dim"],
    slots: Slots,
    buffers: Buffers,
    gradients: Float[Array, "samples dim"],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    *,
    limits: Limits,
) -> tuple[Float[Array, "rows dim"], Slots]:
    """Table and slots after one step of every looked-up row. Compiles for SparseCore; numerics unproven.

    Args:
      table: this device's rows; give it and the slots the layout of `sparsecore.row_layout`.
      slots: state of the same shape.
      buffers: what was looked up.
      gradients: of the activations.
      hyper: from `rule.get_hyperparameters`.
      rule: an optimizer whose rule treats the entries of a row alike.
      limits: as given to the lookup.

    Raises: NotImplementedError: the rule uses a primitive that is not elementwise (XLA's compiler would crash), which
      is named; or rows as in `sparse_dense_matmul`.
    """
    _check_table(table)
    trace_rule(rule, table, slots, len(hyper), elementwise=_PRIMITIVES, means=False)
    if any(slot.shape != table.shape for slot in slots):
        raise NotImplementedError(
            f"XLA's SparseCore calls step slots as long as the row; {rule.short_name()} has others"
        )
    numbers = [jnp.asarray(value, jnp.float32) for value in hyper]
    new_table, *new_slots = _update_p.bind(
        *buffers, gradients, table, *slots, *numbers, rule=rule, num_slots=len(slots), limits=limits
    )
    return new_table, tuple(new_slots)


def _check_table(table: Array) -> None:
    if table.dtype != jnp.float32 or table.shape[1] % _WIDTH_MULTIPLE:
        raise NotImplementedError(
            f"XLA's SparseCore calls take float32 rows of a multiple of {_WIDTH_MULTIPLE} numbers, not {table.dtype} "
            f"rows of {table.shape[1]}"
        )


_lookup_p, _update_p = Primitive("rsembed_sparse_dense_matmul"), Primitive("rsembed_sparse_dense_matmul_update")
_lookup_p.multiple_results = _update_p.multiple_results = True


@_lookup_p.def_abstract_eval
def _lookup_shapes(*avals: Any, limits: Limits) -> list[Any]:
    return [avals[-1]]


@_update_p.def_abstract_eval
def _update_shapes(*avals: Any, rule: OptimizerSpec, num_slots: int, limits: Limits) -> list[Any]:
    return list(avals[5 : 6 + num_slots])


def _custom_call(target: str, results: Sequence[Any], operands: Any, limits: Limits, **more: Any) -> Any:
    matmul = limits._asdict() | {"sharding_strategy": 1, "pad_value": _NO_ID} | more.pop("config", {})
    config = {"sparse_dense_matmul_config": matmul, "device_type": "DEVICE_TYPE_SPARSECORE"}
    return stablehlo.CustomCallOp(
        results,
        operands,
        call_target_name=ir.StringAttr.get(target),
        api_version=mlir.i32_attr(1),
        has_side_effect=ir.BoolAttr.get(False),
        backend_config=ir.StringAttr.get(json.dumps(config)),
        **more,
    )


def _lower_lookup(ctx: Any, *operands: Any, limits: Limits) -> Any:
    return _custom_call("SparseDenseMatmulOp", [operands[-1].type], operands, limits).results


def _lower_update(ctx: Any, *operands: Any, rule: OptimizerSpec, num_slots: int, limits: Limits) -> Any:
    num_hyper = len(operands) - 6 - num_slots
    module = _rule_module(rule, ctx.avals_out[0].shape[1], num_slots, num_hyper)
    symbols = ctx.module_context.symbol_table
    name = mlir.merge_mlir_modules(ctx.module_context.module, "row_rule", module, dst_symtab=symbols)
    results = [operand.type for operand in operands[5 : 6 + num_slots]]
    call = _custom_call(
        "SparseDenseMatmulGradOpWithOptimizerUpdate",
        [ir.TupleType.get_tuple(results)],
        operands,
        limits,
        called_computations=ir.ArrayAttr.get([ir.FlatSymbolRefAttr.get(name)]),
        config={"num_slot_variables": num_slots, "num_hyperparameters": num_hyper},
    )
    return [stablehlo.get_tuple_element(call.results[0], mlir.i32_attr(k)) for k in range(len(results))]


def _rule_module(rule: OptimizerSpec, dim: int, num_slots: int, num_hyper: int) -> ir.Module:
    """The rule as XLA wants it: `(gradient, table, slots..., hyperparameters...) -> tuple`, all of shape `[1, dim]`."""

    def step(gradient: Array, row: Array, *rest: Array) -> tuple[Array, ...]:
        new, new_slots = rule.step_rows(row, rest[:num_slots], gradient, rest[num_slots:])
        return new, *new_slots

    row = jax.ShapeDtypeStruct((1, dim), jnp.float32)
    traced = jax.jit(step).trace(*[row] * (2 + num_slots + num_hyper))
    module = ir.Module.parse(traced.lower(lowering_platforms=("tpu",)).as_text())
    with module.context, ir.Location.unknown():
        functions: list[Any] = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
        (main,) = [function for function in functions if function.name.value == "main"]
        old = list(main.entry_block.operations)[-1]
        with ir.InsertionPoint(old):
            packed = stablehlo.tuple(list(old.operands))
            func.ReturnOp([packed])
        old.erase()
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(main.type.inputs, [packed.type]))
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
    return module


mlir.register_lowering(_lookup_p, _lower_lookup, platform="tpu")
mlir.register_lowering(_update_p, _lower_update, platform="tpu")
