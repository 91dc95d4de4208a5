"""Parts of a tensor-train module: its variables, optimizers, batch reader and compiled functions.

Each compiled function except `calls_of_groups` handles one group of tables.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from rsembed.arrays import check_unmasked, is_traced
from rsembed.bags import Bags, as_bags, check_bags, check_ids_dtype, check_values
from rsembed.checks import check_type
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment, Step
from rsembed.kernels.reference import rows_of_list
from rsembed.optimizers import SGD, Adam, OptimizerSpec, RowWiseAdagrad, TorchAdagrad
from rsembed.parallel.agreement import check_not_forked
from rsembed.specs import TableSpec
from rsembed.tt import hot_rows
from rsembed.tt.cores import COMBINERS, Mode, weights_of
from rsembed.tt.spec import TTSpec
from rsembed.tt.storage import AllSlots, CachedTrain, Params, TensorTrain

MIN_CACHE_ROWS = 32
"""Smallest default cache of a group of tables, in rows.

The default cache of a large group holds a thousandth of the rows of the group.
"""


class FusedParam(nnx.Variable):
    """Cores or cached rows, which `backward` updates and external optimizers do not change.

    A `FusedParam` is not an `nnx.Param`, so neither `nnx.grad` nor optax sees the array.
    """

    def set_value(
        self,
        value: object,
        **options: object,
    ) -> None:
        """Refuses a new value, because cores must change together with optimizer state and cache.

        Raises: ValueError: always, with the advice to call the method `set_cores`.
        """
        raise ValueError(
            "cores of a module with sparse=True cannot be set alone, because their optimizer state "
            "and cached rows would still belong to the old cores; use module.set_cores(cores, "
            "table)."
        )


class FusedState(nnx.Variable):
    """Variable for optimizer state, a cache directory, the step number or the learning rate.

    A `FusedState` is not an `nnx.Param`, so external optimizers do not change it.
    """


class TTGradients(NamedTuple):
    """Gradients that `backward` returns.

    Attributes:
      cores: gradients of the cores: for each group of tables, one array per core, as in
        `core_groups`. With `sparse=True`, the tuple `cores` is empty.
      per_sample_weights: gradient of the weights. None if the lookup had no weights.
    """

    cores: tuple[tuple[Array, ...], ...]
    per_sample_weights: Float[Array, " nnz"] | None


class OptimType(enum.Enum):
    """Optimizers under the names of FBTT-Embedding."""

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
    """The optimizer of rsembed that implements an `OptimType`.

    The learning rate of the returned optimizer has no effect, because every step of the module
    passes a learning rate.

    Args:
      optimizer: FBTT's name for the optimizer.
      eps: number that both Adagrad optimizers add to the denominator. Adam ignores `eps` and adds
        1e-8 to the denominator.

    Raises: NotImplementedError: the module has no fused update for the optimizer.
    """
    rules: dict[str, OptimizerSpec] = {
        "SGD": SGD(),
        "EXACT_SGD": SGD(),
        "EXACT_ADAGRAD": TorchAdagrad(1.0, epsilon=eps),
        "EXACT_ROWWISE_ADAGRAD": RowWiseAdagrad(1.0, epsilon=eps),
        "ADAM": Adam(),
    }
    if optimizer.name not in rules:
        raise NotImplementedError(
            f"OptimType.{optimizer.name} has no fused update; use {', '.join(rules)}, or take "
            "sparse=False and any optax rule."
        )
    return rules[optimizer.name]


def storage_of(
    specs: Sequence[TTSpec],
    cache_sizes: tuple[int, int] | None,
    common_fields: dict[str, Any],
) -> TensorTrain:
    """Storage of a group of tables with equal column factors and ranks.

    Args:
      specs: size, factors and ranks of every table.
      cache_sizes: `cache_size` and `hashtbl_size` of FBTT. None for a module without a cache.
      common_fields: fields of the `TableSpec` that all tables share, such as dtype and optimizer.
    """
    cache_rows = 0
    counted_ids = 0
    if cache_sizes is not None:
        cache_size, counted_ids = cache_sizes
        num_rows = sum(spec.num_embeddings for spec in specs)
        cache_rows = min(num_rows, cache_size or max(MIN_CACHE_ROWS, num_rows // 1000))
    tables = []
    for k, spec in enumerate(specs):
        train = TensorTrain(
            spec.tt_ranks,
            spec.tt_p_shapes,
            spec.tt_q_shapes,
            cache_rows=cache_rows,
            counted_ids=counted_ids,
        )
        table = TableSpec(
            name=f"{k}",
            vocabulary_size=spec.num_embeddings,
            embedding_dim=spec.embedding_dim,
            storage=train,
            **common_fields,
        )
        tables.append(table)
    return train.sharing(tables)


looked_up = jax.jit(TensorTrain.look_up, static_argnums=(0, 3))
pulled = jax.jit(TensorTrain.pulled, static_argnums=(0, 3))
populated = jax.jit(TensorTrain.populate, static_argnums=(0, 3))
counted = jax.jit(hot_rows.count)


@functools.partial(jax.jit, static_argnums=0)
def stepped(
    storage: TensorTrain,
    params: Params,
    slots: AllSlots,
    lookup_params: Params,
    gradients: CallGradients,
    rate: Array,
    number: Array,
) -> tuple[Params, AllSlots, Array | None]:
    """Runs one optimizer step. Returns new parameters and slots, and the gradient of the weights.

    Args:
      storage: storage of the group of tables.
      params: parameters before the step.
      slots: optimizer state before the step.
      lookup_params: parameters at the time of the lookup. The gradients of cores and weights are
        computed at `lookup_params`.
      gradients: kernel call of the lookup, and gradients of its outputs.
      rate: learning rate of the optimizer step.
      number: index of the optimizer step, from 0.
    """
    table = storage.tables[0]
    rule = table.optimizer
    d_cores, d_weights = storage.pulled(lookup_params, gradients, table)
    if isinstance(lookup_params, CachedTrain) and isinstance(params, CachedTrain):
        # Rows may have entered or left the cache between lookup and update. If a row is in the
        # cache at the time of the update, the gradient of the row goes to the cached row. The
        # gradient of an evicted row goes to the cores.
        current_params = lookup_params._replace(directory=params.directory)
        d_cores, _ = storage.pulled(current_params, gradients, table)
    hyper = dataclasses.replace(rule, learning_rate=lambda: rate).get_hyperparameters(number)
    step = Step(hyper, rule, None, number)
    params, slots = storage.step(params, slots, gradients, table, step, d_cores)
    return params, slots, d_weights


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def calls_of_groups(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
    mode: Mode,
    bags: Bags,
) -> list[Call]:
    """One kernel call per group of tables, with one output per table of the group.

    The ids of a call are row numbers: the rows of a group are numbered consecutively over its
    tables. In the call of a group, the ids of all other groups are replaced by `NO_ROW`.

    Args:
      groups: for every group, the indices of its tables.
      sizes: number of rows of every table.
      mode: "sum" or "mean".
      bags: bags of table 0, then an equal number of bags of table 1, and so on.
    """
    offsets = jnp.asarray(bags.offsets).astype(jnp.int32)
    ids = IdList(jnp.asarray(bags.ids), offsets, weights_of(bags))
    batch = bags.num_bags // len(sizes)
    segments = []
    for g, group in enumerate(groups):
        first_row = 0
        for k in group:
            segments.append(Segment(0, k * batch, batch, "sum", g, first_row, sizes[k]))
            first_row += sizes[k]
    all_tables = Call((ids,), tuple(segments))
    starts = offsets[:-1].reshape(len(sizes), batch)
    calls = []
    for g, group in enumerate(groups):
        rows = rows_of_list(all_tables, 0, g, NO_ROW)
        group_offsets = jnp.append(starts[np.asarray(group)], offsets[-1])
        outputs = []
        for number in range(len(group)):
            outputs.append(Segment(0, number * batch, batch, COMBINERS[mode]))
        calls.append(Call((IdList(rows, group_offsets, ids.weights),), tuple(outputs)))
    return calls


def read_bags(
    specs: Sequence[TTSpec],
    indices: Any,
    offsets: Any,
    weights: Any,
    *,
    name: str,
    last: bool | None,
) -> Bags:
    """Reads and checks a batch: `batch` bags of table 0, then `batch` bags of table 1, and so on.

    Args:
      specs: size, factors and ranks of every table.
      indices: with `offsets`, flat ids. Without `offsets`, a dense array
        `[tables * batch, ids per bag]` with -1 for no id, `Bags`, or a list of lists.
      offsets: start of each bag, optionally followed by the end of the last bag.
      weights: one weight per id, in the same structure as `indices`. None: all weights are 1.
      name: name of the module in error messages.
      last: whether the last entry of `offsets` is the end of the last bag. If `last` is None, as by
        default in the modules, `read_bags` infers the answer. For several tables, the last entry is
        an end if the number of offsets is one more than a multiple of the number of tables. For one
        table, the last entry is an end if the entry equals the number of ids. For one table and
        traced offsets, `last=None` raises an error, because the values of traced offsets are
        unknown.

    Raises:
      TypeError: ids or offsets are not integers.
      ValueError: the structures or lengths of the arguments do not match, the number of bags is not
        a multiple of the number of tables, offsets decrease, an id is outside its table, or a
        weight is not finite. For an id outside its table, the error message names the id, the bag
        and the table.
    """
    check_not_forked(name)
    check_unmasked(indices, "indices")
    for leaf in jax.tree.leaves((indices, offsets)):
        if not isinstance(leaf, jax.Array):
            continue
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            raise ValueError(
                f"{name}: ids are split over explicit axes of a mesh; call it inside "
                "jax.sharding.auto_axes, or train the table in an EmbeddingCollection(mesh=...), "
                "with storage=TensorTrain(...)."
            )
    if isinstance(indices, Bags) and not (offsets is None and weights is None):
        raise ValueError("Bags hold offsets and weights; pass neither beside them.")
    if offsets is not None:
        if not isinstance(indices, jax.Array):
            indices = np.asarray(indices)
        if indices.ndim != 1:
            raise ValueError(
                f"offsets go with flat indices, got shape {indices.shape}; leave them out for dense ids."
            )
        check_type(weights, Float[np.ndarray, " nnz"] | None, "per_sample_weights")
        if isinstance(weights, (list, tuple)):
            weights = np.asarray(weights, np.float32)
        all_offsets = _with_last(offsets, indices.shape[0], len(specs), last)
        bags = Bags(indices, all_offsets, weights)
    elif isinstance(indices, Bags):
        bags = as_bags(indices, feature="indices")
    else:
        bags = as_bags((indices, weights), feature="indices")
        if bags.dense_shape is not None and len(bags.dense_shape) != 2:
            raise ValueError(
                f"indices of shape {bags.dense_shape} need offsets; only dense ids [bags, ids per bag] do not."
            )
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise ValueError(
            f"per_sample_weights have {bags.weights.size} numbers for {bags.ids.size} indices."
        )
    if bags.num_bags % len(specs):
        raise ValueError(
            f"{bags.num_bags} bags cannot be shared equally by {len(specs)} tables; the bags of "
            "table 0 come first, then as many of table 1, and so on."
        )
    check_ids_dtype(bags, feature="indices")
    if is_traced(bags):
        return bags
    check_bags(bags, feature="indices")
    ids = np.asarray(bags.ids)
    offsets = np.asarray(bags.offsets)
    batch = bags.num_bags // len(specs)
    for k, spec in enumerate(specs):
        table_offsets = offsets[k * batch : (k + 1) * batch + 1]
        first = table_offsets[0]
        table_bags = Bags(ids[first : table_offsets[-1]], table_offsets - first)
        table_name = name if len(specs) == 1 else f"{name} {k}"
        check_values(
            table_bags,
            feature="indices",
            table=table_name,
            vocabulary_size=spec.num_embeddings,
        )
    return bags


def _with_last(
    offsets: object,
    num_ids: int,
    num_tables: int,
    last: bool | None,
) -> Array | np.ndarray:
    """Adds the end of the last bag to the offsets, unless the offsets already include this end.

    If `last` is True, the offsets already include the end of the last bag. For `last=None`, see
    `read_bags`.
    """
    check_type(offsets, Int[np.ndarray, " bags"], "offsets")
    if not isinstance(offsets, jax.Array):
        offsets = np.asarray(offsets)
    if last is None and num_tables > 1:
        last = offsets.shape[0] % num_tables == 1
    elif last is None and is_traced(offsets):
        raise ValueError(
            "inside jit the values of offsets are unknown; pass include_last_offset=True or False "
            "to the module, or pass Bags."
        )
    if last or (last is None and offsets.shape[0] > 1 and int(offsets[-1]) == num_ids):
        return offsets
    xp: Any = np if isinstance(offsets, np.ndarray) else jnp
    return xp.concatenate([offsets, xp.full(1, num_ids, offsets.dtype)])
