"""Table-batched lookup and training as pure functions of a plan and a state.

`TableBatchedEmbeddingBags` calls the functions of this file. Every function can be traced by
`jit`, and `jit` may donate the state. In all functions except `row_gradients`, the argument `batch`
contains cache slots as the ids of a cached table, because the caller has replaced the row ids. In
`row_gradients`, `batch` contains row ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from rsembed.arrays import check_not_taken, is_traced
from rsembed.collection.prepared import PreparedBatch
from rsembed.collection.stack import ByName
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, Step
from rsembed.kernels.reference import Rounding, rows_of_list
from rsembed.optimizers.base import Slots
from rsembed.optimizers.regularization import global_decay_factor
from rsembed.optimizers.regularized import CounterAdagrad
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients
from rsembed.tbe.arguments import EmbOptimType
from rsembed.tbe.plan import AnyBatch, TablePlan, TBEPlan, engine_of, list_of, with_list

Rates = Float[Array, " groups"]
"""Learning rate of every group."""
LookupOutput = Float[Array, "*output"]
"""Output of a lookup, or the gradient of a lookup's output."""


class TBEState(NamedTuple):
    """State of a table-batched module: everything that training changes.

    Args:
      arrays: arrays of each group of tables, by the name of the group. The first array has the
        weights, and the next arrays have the optimizer state of the same rows. For
        ENSEMBLE_ROWWISE_ADAGRAD, the last state is the slow copy of the tables. For a cached group,
        the arrays have only the rows on the device, and one more array has the row number of the
        row in each cache slot, or `NO_ROW` for an empty slot. The rows after the cache slots belong
        to the scratch area.
      step: number of updates so far.
      passed_step: number of the last training step for which `begin_step` was called, 1 for the
        first step.
      learning_rates: learning rate of each group.
      max_counter: largest row counter of all tables plus 1, for weight decay mode COUNTER.
      key: PRNG key of stochastic rounding and of uniform initial weights.
      layout: fingerprint of the plan that the state belongs to.
      generation: generation of the state, see `storage.backing_store.Generation`. None if no table
        is on the host.
    """

    arrays: dict[str, tuple[Array, ...]]
    step: Int[Array, ""]
    passed_step: Int[Array, ""]
    learning_rates: Rates
    max_counter: Float[Array, ""]
    key: PRNGKeyArray
    layout: Fingerprint
    generation: UInt32[Array, ""] | None = None

    @property
    def weights(self) -> dict[str, Float[Array, "rows dim"]]:
        """Weights of each group, by the name of the group."""
        return {name: arrays[0] for name, arrays in self.arrays.items()}

    def with_arrays(self, group: str, arrays: Iterable[Array]) -> TBEState:
        """A copy of the state with new arrays for a group."""
        return self._replace(arrays=self.arrays | {group: tuple(arrays)})


def everywhere(plan: TBEPlan, tree: PyTree) -> PyTree:
    """Replicates the arrays of `tree` over the plan's mesh.

    If the plan has no mesh, `tree` is returned unchanged.
    """
    return plan.devices.place(tree, PartitionSpec())


def _checked(plan: TBEPlan, batch: AnyBatch) -> AnyBatch:
    """Checks that a batch for tables on a mesh is split, and returns the batch unchanged.

    Raises: ValueError: the tables are on a mesh, but the batch is not split.
    """
    if plan.is_shared and isinstance(batch, Call):
        raise ValueError("the tables are on a mesh: split the batch with module.prepare.")
    return batch


def init_state(
    plan: TBEPlan,
    key: PRNGKeyArray,
    num_places: Mapping[str, int] = MappingProxyType({}),
) -> TBEState:
    """State with zero weights, as in FBGEMM, and with initial optimizer states.

    Args:
      plan: plan of the module's tables.
      key: PRNG key of stochastic rounding and of uniform initial weights.
      num_places: mapping from the name of each cached group to the number of its cache slots. For a
        group without a cache, the arrays of the state contain all rows of the tables.
    """
    arrays_of_groups: dict[str, tuple[Array, ...]] = {}
    rates: list[float] = []
    for name, table in plan.groups.items():
        stack = engine_of(plan).stacks[name]
        size = num_places.get(name, stack.layout.num_rows)
        arrays = []
        for row in table._replace(dtype=table.near_dtype).first_row():
            shape = (size, *row.shape[1:])
            fill = float(row[0, 0])
            if plan.is_shared:
                full = functools.partial(jnp.full, shape, fill, row.dtype)
                sharding = plan.devices.sharding(stack.partition)
                arrays.append(jax.jit(full, out_shardings=sharding)())
            else:
                arrays.append(api.allocate(shape, row.dtype, fill))
        if table.is_cached:
            arrays.append(jnp.full(size, NO_ROW, jnp.int32))
        arrays_of_groups[name] = tuple(arrays)
        rate = table.rule.learning_rate
        rates.append(0.0 if callable(rate) else rate)
    step = jnp.zeros((), jnp.int32)
    passed_step = step + 0
    max_counter = jnp.ones((), jnp.float32)
    learning_rates = jnp.asarray(rates, jnp.float32)
    others = (step, passed_step, learning_rates, max_counter, key, plan.layout)
    return TBEState(arrays_of_groups, *everywhere(plan, others))


def check_state(plan: TBEPlan, state: TBEState) -> None:
    """Checks that a state can be used with a plan.

    Raises:
      ValueError: the state belongs to a different plan.
      RuntimeError: the state's arrays were donated to a step, or this process was forked.
    """
    check_not_forked("the module")
    # If an argument of a compiled program for several devices is a deleted array, XLA aborts the
    # process, so deleted arrays are rejected here.
    check_not_taken(
        (state.arrays, state.step, state.generation),
        "the module has lost its tables (perhaps because of a copy that shared them, Ctrl-C or an error)",
        "make a new module, and load a state dict of the copy or of the latest checkpoint into it; copy modules with "
        "state_dict and load_state_dict",
    )
    check_same(
        state.layout,
        plan.layout,
        what="the state does not belong to this module",
        way_out="To copy a module with the same tables and optimizers, use state_dict and load_state_dict.",
    )


def learning_rates(
    plan: TBEPlan,
    state: TBEState,
) -> Rates:
    """Learning rate of every group at the next step."""
    check_state(plan, state)
    rates = []
    for table, rate in zip(plan.groups.values(), state.learning_rates, strict=True):
        rule = table.rule
        if callable(rule.learning_rate):
            rate = jnp.asarray(rule.get_learning_rate(state.step), jnp.float32)
        rates.append(rate)
    return jnp.stack(rates)


def begin_step(plan: TBEPlan, state: TBEState) -> TBEState:
    """Does the work on whole tables that some optimizers need before the lookup of a training step.

    If `begin_step` has been called before for the same training step, the second call returns the
    state unchanged.
    """
    check_state(plan, state)
    t = state.step + 1
    is_new = state.passed_step != t
    counting: CounterAdagrad | None = None
    counters: list[Array] = []
    for name, table in plan.groups.items():
        rule = table.rule
        weights, *states = state.arrays[name]
        if table.whole_table_mode is not None:
            num_slots = rule.slot_variables_count()
            run = functools.partial(table.whole_table_mode.before_step, t=t)
            weights, copies = jax.lax.cond(
                is_new,
                run,
                lambda *old: old,
                weights,
                tuple(states[num_slots:]),
            )
            state = state.with_arrays(name, (weights, *states[:num_slots], *copies))
        if isinstance(rule, CounterAdagrad):
            counting = counting or rule
            counters.append(states[2])
    if counting is not None:
        old = state.max_counter
        refreshed = counting.regularization.refreshed_max_counter(counters, t, old)
        state = state._replace(max_counter=jnp.where(is_new, refreshed, old))
    return state._replace(passed_step=t)


def lookup(
    plan: TBEPlan,
    state: TBEState,
    batch: AnyBatch,
    output_dtype: str = "float32",
    *,
    rates: Rates | None = None,
) -> LookupOutput:
    """Pooled rows, differentiable with respect to the weights of the ids.

    The output has shape `[B, sum of dims]` for `B` bags per feature, or `[nnz, longest dim]`
    without pooling. If the batch was made with `batch_size_per_feature_per_rank`, the output is a
    one-dimensional array.

    Args:
      plan: plan of the module's tables.
      state: state of the module.
      batch: batch to look up.
      output_dtype: dtype of the output.
      rates: learning rate of every group, for global weight decay. None, the default: the learning
        rates of the next step.
    """
    if rates is None:
        rates = learning_rates(plan, state)
    batch = _checked(plan, batch)
    if isinstance(batch, Call):  # Tables on a mesh have no global weight decay.
        batch = _decayed(plan, state, batch, rates)
    output, _ = engine_of(plan).lookup(state.weights, batch)
    return output.astype(output_dtype)


def _gradient(
    d_output: Array,
    max_gradient: float | None = None,
) -> LookupOutput:
    """Gradient of the output in float32, clipped to `[-max_gradient, max_gradient]`.

    The gradient is not clipped if `max_gradient` is None.
    """
    d_output = d_output.astype(jnp.float32)
    if max_gradient is None:
        return d_output
    return jnp.clip(d_output, -max_gradient, max_gradient)


def row_gradients(
    plan: TBEPlan,
    batch: AnyBatch,
    d_output: LookupOutput,
    *,
    max_gradient: float | None = None,
) -> RowGradients:
    """Gradients of all rows that the batch reads.

    The ids of the batch must be row ids, and not cache slots, even if a table is cached.
    """
    engine = engine_of(plan)
    gradient = _gradient(d_output, max_gradient)
    rows, values = engine.row_gradients(_checked(plan, batch), gradient)
    shardings = engine.gradient_shardings()
    return RowGradients(rows, values, row_counts(plan), shardings, plan.row_layout)


def cut(gradients: RowGradients, bound: int) -> RowGradients:
    """Keeps the first `bound` rows of the gradients of every group, and drops padding at the end.

    On a mesh, the gradients are returned unchanged.

    Raises: ValueError: more than `bound` rows of a group have a gradient. Inside `jit`, the number
      of rows is not checked.
    """
    touched = gradients.num_touched()
    if not is_traced(touched):
        most = max(map(int, touched.values()))
        if most > bound:
            raise ValueError(
                f"total_unique_indices is {bound}, but {most} rows were read; raise it or leave it out."
            )
    if gradients.shardings is not None:
        # On a mesh, the rows of each device are followed by padding, so the first `bound` rows of
        # the whole array would not contain all gradients.
        return gradients

    def first(array: Array) -> Array:
        return array[:bound]

    rows, values = jax.tree.map(first, (gradients.rows, gradients.values))
    return dataclasses.replace(gradients, rows=rows, values=values)


def row_counts(plan: TBEPlan) -> tuple[tuple[str, int], ...]:
    """Value for `RowGradients.num_rows`: pairs (group name, number of rows), sorted by name."""
    counts = []
    for name, stack in engine_of(plan).stacks.items():
        counts.append((name, stack.layout.num_rows))
    return tuple(sorted(counts))


def update(
    plan: TBEPlan,
    state: TBEState,
    batch: AnyBatch,
    d_output: LookupOutput,
    rates: Rates,
) -> TBEState:
    """Applies one optimizer step to every row that the batch reads.

    The gradient of a row is the sum of its gradients over the whole batch.

    Args:
      plan: plan of the module's tables.
      state: result of `begin_step`.
      batch: the batch that was looked up.
      d_output: gradient of the output of `lookup`.
      rates: learning rate of every group.
    """
    return _stepped(
        plan,
        state,
        rates,
        engine_of(plan).update,
        _checked(plan, batch),
        _gradient(d_output),
    )


def apply(
    plan: TBEPlan,
    state: TBEState,
    row_gradients: RowGradients,
    rates: Rates,
) -> TBEState:
    """Applies one optimizer step to every row in `row_gradients`.

    For cached tables, the row numbers in `row_gradients` must be cache slots.

    Raises: ValueError: a table has no optimizer.
    """
    rows = dict(row_gradients.rows)
    return _stepped(plan, state, rates, engine_of(plan).apply, rows, row_gradients.values)


def _stepped(
    plan: TBEPlan,
    state: TBEState,
    rates: Rates,
    function: Callable[..., tuple[ByName, ByName]],
    *gradients: AnyBatch | Array | Mapping[str, Array],
) -> TBEState:
    """Applies one optimizer step to all groups, and returns the new state.

    Args:
      plan: plan of the module's tables.
      state: state before the step.
      rates: learning rate of every group.
      function: the method `update` or `apply` of the plan's `Engine`. `_stepped` calls `function`
        with the weights, the slots, `*gradients`, and the `Step` of each group.
      *gradients: the batch and the output gradients for `update`, or the rows and the values of the
        row gradients by group name for `apply`.
    """
    steps: dict[str, Step] = {}
    old_slots: dict[str, Slots] = {}
    for (name, table), rate in zip(plan.groups.items(), rates, strict=True):
        steps[name] = _step_of(table, state, rate)
        num_slots = table.rule.slot_variables_count()
        old_slots[name] = state.arrays[name][1 : 1 + num_slots]
    weights, slots = function(state.weights, old_slots, *gradients, steps)
    arrays = {}
    for name, old in state.arrays.items():
        stepped = (weights[name], *slots[name])
        # A slow copy of the table, and the row numbers in cache slots, do not change.
        arrays[name] = (*stepped, *old[len(stepped) :])
    return state._replace(arrays=arrays, step=state.step + 1)


def _step_of(table: TablePlan, state: TBEState, rate: Array) -> Step:
    """The `Step` of a group: update rule, hyperparameters, and PRNG key of stochastic rounding.

    Raises: ValueError: the group has no optimizer.
    """
    rule = table.rule
    if table.optimizer == EmbOptimType.NONE:
        raise ValueError(
            f"table {table.name!r} has no optimizer (OptimType.NONE), so row gradients cannot be applied to it; "
            "construct the module with one."
        )
    changes: dict[str, Any] = {"learning_rate": lambda: rate}
    if isinstance(rule, CounterAdagrad):
        changes["max_counter"] = lambda: state.max_counter
    current_rule = dataclasses.replace(rule, **changes)
    hyper = current_rule.get_hyperparameters(state.step)
    weights, *others = state.arrays[table.name]
    resident_rows = others[-1] if table.is_cached else None
    noise = _noise(table, state, weights.dtype)
    return Step(hyper, rule, noise, state.step, resident_rows)


def _decayed(
    plan: TBEPlan,
    state: TBEState,
    batch: Call,
    rates: Rates,
) -> Call:
    """Multiplies the weight of each id by the global weight decay of the row that the id selects.

    If no table has global weight decay, the batch is returned unchanged.
    """
    factors: Array | None = None
    for number, table in enumerate(plan.groups.values()):
        if table.global_decay is not None:
            weights, _, prev_iter, *_ = state.arrays[table.name]
            rows = rows_of_list(batch, 0, number, weights.shape[0])
            prev_iter = prev_iter.at[rows].get(mode="fill", fill_value=0)[:, 0]
            weight_decay = table.rule.weight_decay  # type: ignore[attr-defined]
            of_group = global_decay_factor(
                prev_iter,
                state.step + 1,
                rates[number],
                weight_decay,
                table.global_decay,
            )
            # An id of another group has no row in group `number`, so its `prev_iter` is filled with
            # 0, and its decay factor is 1.
            factors = of_group if factors is None else factors * of_group
    if factors is None:
        return batch
    weights_of_ids = batch.lists[0].weights
    if weights_of_ids is not None:
        factors = factors * weights_of_ids
    return with_list(batch, weights=factors)


_STORE = 2**32 - 2
"""Number that is folded into the PRNG key when rows are rounded and written back to the host.

`_STORE` makes the random bits for write-backs differ from the random bits of all training steps.
"""


def _noise(
    table: TablePlan,
    state: TBEState,
    dtype: DTypeLike,
    *,
    use: int | None = None,
) -> Rounding | None:
    """Stochastic rounding of a group's rows to `dtype`, or None for rounding to nearest.

    Args:
      table: plan of the group.
      state: the state. The PRNG key of the rounding is made from `state.key` and `state.step`.
      dtype: dtype of the rounded rows.
      use: number to fold into the PRNG key, so that the random bits differ from the random bits of
        training steps. Training steps use None, the default.
    """
    if not table.rounds_stochastically or dtype == jnp.float32:
        return None
    key = jax.random.fold_in(state.key, state.step)
    if use is not None:
        key = jax.random.fold_in(key, use)
    return api.stochastic_rounding(key)


def stored_rows(
    plan: TBEPlan,
    group: str,
    state: TBEState,
    places: Int[Array, " n"],
) -> tuple[Array, ...]:
    """Rows in the cache slots `places`, and their optimizer state, in the host store's dtypes."""
    *arrays, resident_rows = state.arrays[group]
    weights, *slots = api.gather_rows(tuple(arrays), places)
    table = plan.groups[group]
    dtype = jnp.dtype(table.dtype)
    if weights.dtype != dtype:
        noise = _noise(table, state, dtype, use=_STORE)
        storage = engine_of(plan).stacks[group].storage
        round_rows = storage.rounding(noise, 0, resident_rows)
        weights = weights.astype(jnp.float32)
        if round_rows is not None:
            weights = round_rows(weights, dtype, places)
        weights = weights.astype(dtype)
    return (weights, *slots)


def backward(
    plan: TBEPlan,
    state: TBEState,
    batch: AnyBatch,
    d_output: LookupOutput,
    rates: Rates,
    *,
    max_gradient: float | None = None,
    wants_weight_gradients: bool = False,
) -> tuple[TBEState, Array | PreparedBatch | None]:
    """Runs `update`. Returns the new state, and the gradient of the loss for the weight of each id.

    If the batch is a `Call`, the gradients of the weights are one array. If the batch is a
    `PreparedBatch`, the gradients are returned as a copy of the batch, with gradients in place of
    the weights. The returned gradient is None if `wants_weight_gradients` is False or the batch has
    no weights.
    """
    gradient = _gradient(d_output, max_gradient)
    weights = list_of(batch).weights
    if not wants_weight_gradients or weights is None:
        return update(plan, state, batch, gradient, rates), None

    def weighted(weights: Array) -> Array:
        return lookup(plan, state, with_list(batch, weights=weights), rates=rates)

    output, pull_back = jax.vjp(weighted, weights)
    (d_weights,) = pull_back(gradient.reshape(output.shape))
    # `zero` is 0, but it is computed from `d_weights`, so XLA must compute `d_weights` before the
    # update. If XLA ran the update before it has computed `d_weights`, XLA would have to keep a
    # copy of the old tables, because `d_weights` is computed from the old tables.
    total = jnp.nan_to_num(jnp.sum(jnp.abs(d_weights)))
    zero = jnp.minimum(total, 0.0)
    stepped = update(plan, state, batch, gradient + zero, rates)
    if isinstance(batch, Call):
        return stepped, d_weights
    return stepped, with_list(batch, weights=d_weights)
