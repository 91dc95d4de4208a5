"""Compiled functions of a tensor-train module: reading batches, lookups, steps and caches of each group of tables.

The rules and variables of the fused update come first.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, PyTree

from rsembed.bags import Bags, as_bags, check_bags, check_ids_dtype, check_unmasked, check_values, is_traced
from rsembed.checks import check_type
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from rsembed.kernels.reference import rows_of_list
from rsembed.optimizers import SGD, Adam, OptimizerSpec, RowWiseAdagrad, TorchAdagrad
from rsembed.parallel.agreement import check_not_forked
from rsembed.specs import TableSpec
from rsembed.tt import hot_rows
from rsembed.tt.cores import Mode, call_of
from rsembed.tt.spec import TTSpec
from rsembed.tt.storage import CachedTrain, TensorTrain, cores_of

LEAST_ROWS = 32
"""Rows of a cache whose size is not given, or a thousandth of the tables' if that is more."""


class FusedParam(nnx.Variable):
    """Cores that only the fused update trains: no `nnx.Param`, so neither `nnx.grad` nor optax sees them."""

    def set_value(self, value: object, **how: object) -> None:
        """Cores have optimizer states and cached rows beside them, which the module replaces with them.

        Raises: ValueError: always, and names `set_cores`.
        """
        raise ValueError(
            "the cores of a module with sparse=True have an optimizer state and cached rows beside them, which would "
            "stay those of the old cores; use module.set_cores(cores, table)."
        )


class FusedState(nnx.Variable):
    """A variable of the fused update (states, counts, steps, learning rate), which optimizers outside leave alone."""


class TTGradients(NamedTuple):
    """Gradients that `backward` returns: all with `sparse=False`, those of weights with `sparse=True`, too.

    Attributes:
      cores: in the structure of `core_groups`: per group of tables, one array per core; empty with `sparse=True`.
      per_sample_weights: of the weights, None without.
    """

    cores: tuple[tuple[Array, ...], ...]
    per_sample_weights: Float[Array, " nnz"] | None


class OptimType(enum.Enum):
    """The published names."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LAMB = "lamb"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"


def rule_of(optimizer: OptimType, eps: float) -> OptimizerSpec:
    """The row rule of a published name; its learning rate is given at every step.

    Args:
      optimizer: the name.
      eps: added to the denominator of both Adagrads. Adam keeps its own, 1e-8.

    Raises: NotImplementedError: the rule is not offered.
    """
    rules: dict[str, OptimizerSpec] = {
        **{"SGD": SGD(), "EXACT_SGD": SGD(), "EXACT_ADAGRAD": TorchAdagrad(1.0, epsilon=eps)},
        **{"EXACT_ROWWISE_ADAGRAD": RowWiseAdagrad(1.0, epsilon=eps), "ADAM": Adam()},
    }
    if optimizer.name not in rules:
        raise NotImplementedError(
            f"OptimType.{optimizer.name} has no fused update; use {', '.join(rules)}, or take sparse=False and any "
            "optax rule."
        )
    return rules[optimizer.name]


def storage_of(specs: Sequence[TTSpec], cache: tuple[int, int] | None, like: dict[str, PyTree]) -> TensorTrain:
    """Storage of a group of tables, given the published `cache_size` and `hashtbl_size` where rows are cached."""
    tables, sizes = [], (0, 0)
    if cache is not None:
        num_rows = sum(spec.num_embeddings for spec in specs)
        sizes = min(num_rows, cache[0] or max(LEAST_ROWS, num_rows // 1000)), cache[1]
    for k, spec in enumerate(specs):
        rows, dim = spec.num_embeddings, spec.embedding_dim
        shapes = spec.tt_ranks, spec.tt_p_shapes, spec.tt_q_shapes
        train = TensorTrain(*shapes, cache_rows=sizes[0], counted_ids=sizes[1])
        tables.append(TableSpec(name=f"{k}", vocabulary_size=rows, embedding_dim=dim, storage=train, **like))
    return train.sharing(tables)


@functools.partial(jax.jit, static_argnums=(0, 1))
def looked_up(storage: TensorTrain, mode: Mode, params: PyTree, batch: Bags) -> Float[Array, "bags dim"]:
    """Pooled rows of a group: stored rows where there are such, chains of products for the others."""
    return storage.look_up(params, call_of(batch, batch.ids, mode), storage.tables[0])[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def pulled(storage: TensorTrain, mode: Mode, params: PyTree, batch: Bags, d_output: Array) -> tuple[PyTree, PyTree]:
    """Gradients of cores and of weights."""

    def output(params: PyTree, weights: PyTree) -> Array:
        weighted = dataclasses.replace(batch, weights=weights)
        pooled: Array = looked_up(storage, mode, params, weighted)
        return pooled

    d_params, d_weights = jax.vjp(output, params, batch.weights)[1](d_output)
    return cores_of(d_params), d_weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def stepped(
    storage: TensorTrain,
    mode: Mode,
    params: PyTree,
    slots: PyTree,
    then: PyTree,
    batch: Bags,
    d_output: Array,
    rate: Array,
    number: Array,
) -> tuple[PyTree, PyTree, PyTree]:
    """Parameters and slots after a step with the gradients of a lookup in parameters `then`; gradients of weights."""
    table, rule = storage.tables[0], storage.tables[0].optimizer
    d_cores, d_weights = pulled(storage, mode, then, batch, d_output)
    if isinstance(then, CachedTrain):  # rows that were stored or let go since train where they lie now
        d_cores, _ = pulled(storage, mode, then._replace(directory=params.directory), batch, d_output)
    hyper = dataclasses.replace(rule, learning_rate=lambda: rate).get_hyperparameters(number)
    gradients = CallGradients(call_of(batch, batch.ids, mode), (d_output,), (d_output.shape[1],))
    return *storage.step(params, slots, gradients, table, Step(hyper, rule, None, number), d_cores), d_weights


counted = jax.jit(hot_rows.count)


@functools.partial(jax.jit, static_argnums=0)
def populated(storage: TensorTrain, params: PyTree, slots: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and slots after the most read rows were chosen anew."""
    return storage.populate(params, slots, storage.tables[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def rows_by_group(groups: Sequence[Sequence[int]], sizes: Sequence[int], bags: Bags) -> list[Bags]:
    """Bags of every group, with rows numbered from table to table.

    Args:
      groups: tables of every group.
      sizes: rows of every table.
      bags: those of table 0, then as many of table 1, and so on.
    """
    ids, offsets = jnp.asarray(bags.ids), jnp.asarray(bags.offsets).astype(jnp.int32)
    segments = []
    batch = bags.num_bags // len(sizes)
    for g, group in enumerate(groups):
        ends = itertools.accumulate(sizes[k] for k in group)
        for k, end in zip(group, ends, strict=True):
            segments.append(Segment(0, k * batch, batch, "sum", g, end - sizes[k], sizes[k]))
    weights = None if bags.weights is None else jnp.asarray(bags.weights, jnp.float32)
    every = Call((IdList(ids, offsets, weights),), tuple(segments))
    starts = offsets[:-1].reshape(len(sizes), batch)
    by_group = []
    for g, group in enumerate(groups):
        rows = rows_of_list(every, 0, g, NO_ROW)
        by_group.append(Bags(rows, jnp.append(starts[np.asarray(group)], offsets[-1]), weights))
    return by_group


def read_bags(
    specs: Sequence[TTSpec], indices: Any, offsets: Any, weights: Any, *, name: str, last: bool | None
) -> Bags:
    """Checked bags, of which bag `b` belongs to table `b // batch`, `batch` being an equal share of them.

    Args:
      specs: the tables, whose bags follow each other.
      indices: flat ids with `offsets`; or, without, a dense array `[tables * batch, ids per bag]` where -1 stands for
        no id, `Bags`, or a list of lists.
      offsets: start of each bag; the end of the last may follow.
      weights: one per id, in the form of `indices`.
      name: of the module, for messages.
      last: whether `offsets` end with the end of the last bag. None finds out: with several tables from the number of
        offsets, with one from the last offset being the number of ids, which needs its value.

    Raises:
      TypeError: ids or offsets are not integers.
      ValueError: the forms do not go together, bags do not divide by tables, offsets fall, an id lies outside its
        table, or a weight is not finite; the message names the id, the bag and the table.
    """
    check_not_forked(name)
    for given, what in (((indices, offsets), "indices or offsets"), (indices, "indices")):
        check_unmasked(given, what)
    shardings = [
        jax.typeof(leaf).sharding for leaf in jax.tree.leaves((indices, offsets)) if isinstance(leaf, jax.Array)
    ]
    if any(AxisType.Explicit in own.mesh.axis_types and any(own.spec) for own in shardings):
        raise ValueError(
            f"{name}: ids are split over explicit axes of a mesh; call it inside jax.sharding.auto_axes, or train the "
            "table in an EmbeddingCollection(mesh=...), with storage=TensorTrain(...)."
        )
    if isinstance(indices, Bags) and not (offsets is None and weights is None):
        raise ValueError("Bags hold offsets and weights; pass neither beside them.")
    if offsets is not None:
        indices = indices if isinstance(indices, jax.Array) else np.asarray(indices)
        if indices.ndim != 1:
            raise ValueError(f"offsets go with flat indices, got shape {indices.shape}; leave them out for dense ids.")
        check_type(weights, Float[np.ndarray, " nnz"] | None, "per_sample_weights")
        weights = np.asarray(weights, np.float32) if isinstance(weights, (list, tuple)) else weights
        bags = Bags(indices, _with_last(offsets, indices.shape[0], len(specs), last), weights)
    elif isinstance(indices, Bags):
        bags = as_bags(indices, feature="indices")
    else:
        bags = as_bags((indices, weights), feature="indices")
        if bags.dense_shape is not None and len(bags.dense_shape) != 2:
            raise ValueError(
                f"indices of shape {bags.dense_shape} need offsets; only dense ids [bags, ids per bag] do not."
            )
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise ValueError(f"per_sample_weights have {bags.weights.size} numbers for {bags.ids.size} indices.")
    if bags.num_bags % len(specs):
        raise ValueError(
            f"{bags.num_bags} bags cannot be shared equally by {len(specs)} tables; the bags of table 0 come first, "
            "then as many of table 1, and so on."
        )
    check_ids_dtype(bags, feature="indices")
    if is_traced(bags):
        return bags
    check_bags(bags, feature="indices")
    ids, offsets, batch = np.asarray(bags.ids), np.asarray(bags.offsets), bags.num_bags // len(specs)
    for k, spec in enumerate(specs):
        cut = offsets[k * batch : (k + 1) * batch + 1]
        own, table = Bags(ids[cut[0] : cut[-1]], cut - cut[0]), name if len(specs) == 1 else f"{name} {k}"
        check_values(own, feature="indices", table=table, vocabulary_size=spec.num_embeddings)
    return bags


def _with_last(offsets: PyTree, num_ids: int, num_tables: int, last: bool | None) -> Array | np.ndarray:
    check_type(offsets, Int[np.ndarray, " bags"], "offsets")
    offsets = offsets if isinstance(offsets, jax.Array) else np.asarray(offsets)
    if last is None and num_tables > 1:
        last = offsets.shape[0] % num_tables == 1
    elif last is None and is_traced(offsets):
        raise ValueError(
            "inside jit the values of offsets are unknown; say include_last_offset=True or False to the module, or "
            "pass Bags."
        )
    if last or (last is None and offsets.shape[0] > 1 and int(offsets[-1]) == num_ids):
        return offsets
    xp: Any = np if isinstance(offsets, np.ndarray) else jnp
    return xp.concatenate([offsets, xp.full(1, num_ids, offsets.dtype)])
