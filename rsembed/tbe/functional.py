"""Table-batched lookup and training as pure functions of a plan and a state: what `TableBatchedEmbeddingBags` calls.

Every function can be traced; states may be donated. Ids of cached tables are places of the cache here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from rsembed.bags import check_not_taken, is_traced
from rsembed.collection.dense_rows import numbers_of_rows
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, JaggedBatch, JaggedGradients, Step
from rsembed.kernels.reference import Rounding, jagged_segment
from rsembed.optimizers.base import Slots
from rsembed.optimizers.regularization import global_decay_factor
from rsembed.optimizers.regularized import CounterAdagrad
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients
from rsembed.tbe.meshes import AnyBatch, tables_on_mesh
from rsembed.tbe.plan import GroupPlan, TBEPlan


class TBEState(NamedTuple):
    """Everything that training changes; one entry per group of the plan.

    Args:
      weights: rows of the group's tables, or the rows in its cache.
      slots: optimizer state of those rows; last the slow copy of the tables, of ENSEMBLE_ROWWISE_ADAGRAD.
      resident_rows: row of the group that each place of its cache holds, `NO_ROW` for none; None without a cache.
      step: updates done so far.
      passed_step: last step whose passes over whole tables were run.
      learning_rates: one per group.
      max_counter: largest row counter plus 1, of counter-based regularization.
      key: PRNG key of stochastic rounding.
      generation: see `storage.host_cached.Generation`; None without tables on the host.
      layout: fingerprint of the plan that it belongs to.
    """

    weights: tuple[Float[Array, "rows dim"], ...]
    slots: tuple[Slots, ...]
    resident_rows: tuple[Int[Array, " rows"] | None, ...]
    step: Int[Array, ""]
    passed_step: Int[Array, ""]
    learning_rates: Float[Array, " groups"]
    max_counter: Float[Array, ""]
    key: PRNGKeyArray
    generation: UInt32[Array, ""] | None = None
    layout: Fingerprint | None = None

    def arrays(self, number: int) -> tuple[Array, ...]:
        """All arrays of a group: weights, slots and, for a cached group, the numbers of its resident rows."""
        resident = self.resident_rows[number]
        return (self.weights[number], *self.slots[number], *(() if resident is None else (resident,)))

    def with_arrays(self, number: int, arrays: Sequence[Array]) -> TBEState:
        """A copy of the state in which one group has other arrays, in the order of `arrays`."""
        weights, *others = arrays
        resident = None if self.resident_rows[number] is None else others.pop()
        changes = (("weights", weights), ("slots", tuple(others)), ("resident_rows", resident))
        old: dict[str, PyTree] = self._asdict()
        changed: PyTree = {name: (*old[name][:number], new, *old[name][number + 1 :]) for name, new in changes}
        return self._replace(**changed)


def num_rows(plan: TBEPlan) -> tuple[int, ...]:
    """Number of rows in every group's array, padding for the devices of a mesh included."""
    if plan.devices is None:
        return tuple(group.num_rows for group in plan.groups)
    return tuple(stack.layout.num_rows for stack in tables_on_mesh(plan).stacks)


def everywhere(plan: TBEPlan, tree: PyTree) -> PyTree:
    """The arrays of `tree` replicated over the devices of the plan's mesh; unchanged without a mesh."""
    return tree if plan.devices is None else plan.devices.place(tree, PartitionSpec())


def rows_of(plan: TBEPlan, table: int, ids: Int[np.ndarray, " ids"]) -> Int[np.ndarray, " ids"]:
    """Row numbers of a table's ids in the arrays of its group."""
    group, first_row = plan.places[table]
    if plan.devices is None:
        return ids + first_row
    rows: np.ndarray = tables_on_mesh(plan).stacks[group].layout.rows(plan.tables[table].name, ids)
    return rows


def output_shape(plan: TBEPlan, batch: AnyBatch) -> tuple[int, ...]:
    """Shape of the output of `lookup` for this batch."""
    if isinstance(batch, JaggedBatch):
        return batch.output_shape(plan.dims)
    return jax.tree.leaves(batch)[0].shape[0], sum(plan.tables[t].dim for t in plan.features)


def _here(plan: TBEPlan, batch: JaggedBatch) -> JaggedBatch:
    """The batch unchanged. Raises: ValueError: the tables are on a mesh, which needs a split batch."""
    if plan.devices is not None:
        raise ValueError("a mesh shares the tables: split the batch by module.prepare.")
    return batch


def init_state(plan: TBEPlan, key: PRNGKeyArray, num_places: Mapping[int, int] | None = None) -> TBEState:
    """A state with zero weights, as the original starts.

    Args:
      plan: the tables.
      key: see `TBEState`.
      num_places: size of the cache of each cached group; other groups have arrays of all rows.
    """
    weights, slots, resident = [], [], []
    for number, (group, all_rows) in enumerate(zip(plan.groups, num_rows(plan), strict=True)):
        size = (num_places or {}).get(number, all_rows)
        allocate: Any = api.allocate if plan.devices is None else functools.partial(tables_on_mesh(plan).empty, number)
        table, first = group.table, group.table.first_slots()
        weights.append(allocate((size, table.dim), jnp.dtype(table.near_dtype), 0.0))
        slots.append(tuple(allocate((size, *v.shape[1:]), v.dtype, float(v[0, 0])) for v in first))
        resident.append(jnp.full(size, NO_ROW, jnp.int32) if table.is_cached else None)
    rates = [group.table.learning_rate for group in plan.groups]
    numbers: tuple[PyTree, ...] = (
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.asarray([0.0 if callable(rate) else rate for rate in rates], jnp.float32),
        jnp.ones((), jnp.float32),
        key,
    )
    state = TBEState(tuple(weights), tuple(slots), tuple(resident), *everywhere(plan, numbers))
    return state._replace(layout=plan.layout)


def check_state(plan: TBEPlan, state: TBEState) -> None:
    """Raises: ValueError: the state is of another plan. RuntimeError: a step took its arrays over, or a fork."""
    check_not_forked("the module")
    # Compiled programs for several devices end the process when they are given such arrays.
    check_not_taken(
        (state.weights, state.slots, state.resident_rows, state.step, state.generation),
        "the module has lost its tables, perhaps by way of a copy that shared them, or by Ctrl-C or an error,",
        "make a new module, and load a state dict of the copy or of the latest checkpoint into it; copy modules by "
        "state_dict and load_state_dict",
    )
    if state.layout is not None:
        way_out = "Copy modules by state_dict and load_state_dict, where they hold the same tables and optimizers."
        check_same(state.layout, plan.layout, what="the state does not belong to this module", way_out=way_out)


def learning_rates(plan: TBEPlan, state: TBEState) -> Float[Array, " groups"]:
    """Learning rate of every group at the next step."""
    check_state(plan, state)
    rates = []
    for group, stored in zip(plan.groups, state.learning_rates, strict=True):
        rule = group.table.rule
        is_schedule = callable(group.table.learning_rate) and rule is not None
        rates.append(jnp.asarray(rule.get_learning_rate(state.step), jnp.float32) if is_schedule else stored)  # type: ignore[union-attr]
    return jnp.stack(rates)


def begin_step(plan: TBEPlan, state: TBEState) -> TBEState:
    """State after the passes over whole tables that precede the lookup of the next training step, once a step."""
    check_state(plan, state)
    t = state.step + 1
    is_new = state.passed_step != t
    for number, group in enumerate(plan.groups):
        if (mode := group.table.whole_table_mode) is not None:
            slots, copies = _parted(group, state.slots[number])
            run = functools.partial(mode.before_step, t=t)
            weights, copies = jax.lax.cond(is_new, run, lambda *old: old, state.weights[number], copies)
            state = state.with_arrays(number, (weights, *slots, *copies))
    rules = {number: group.table.rule for number, group in enumerate(plan.groups)}
    counting = {number: rule for number, rule in rules.items() if isinstance(rule, CounterAdagrad)}
    if counting:
        config = next(iter(counting.values())).regularization
        refreshed = config.refreshed_max_counter([state.slots[number][2] for number in counting], t, state.max_counter)
        state = state._replace(max_counter=jnp.where(is_new, refreshed, state.max_counter))
    return state._replace(passed_step=t)


def _parted(group: GroupPlan, slots: Slots) -> tuple[Slots, Slots]:
    """A group's slots in two parts: those that its rule reads, and copies of its tables."""
    num_slots = len(slots) - len(group.table.copy_dtypes)
    return slots[:num_slots], slots[num_slots:]


def lookup(plan: TBEPlan, state: TBEState, batch: AnyBatch, output_dtype: str = "float32") -> Float[Array, "*output"]:
    """Pooled rows, `[bags, sum of dims]`, `[nnz, longest dim]` or flat; differentiable in the weights of the ids."""
    if isinstance(batch, dict):
        check_state(plan, state)
        return tables_on_mesh(plan).lookup(state.weights, batch).astype(output_dtype)
    factors = _owed_factors(plan, state, _here(plan, batch), learning_rates(plan, state))
    if factors is not None:
        batch = dataclasses.replace(batch, weights=factors if batch.weights is None else factors * batch.weights)
    output = api.lookup_jagged(state.weights, batch)
    return output.astype(output_dtype).reshape(output_shape(plan, batch))


def _flat(d_output: Array, max_gradient: float | None = None) -> Float[Array, " size"]:
    """The output's gradient as a flat float32 array, clipped to `[-max_gradient, max_gradient]` if that is given."""
    d_output = d_output.astype(jnp.float32).reshape(-1)
    return d_output if max_gradient is None else jnp.clip(d_output, -max_gradient, max_gradient)


def row_gradients(
    plan: TBEPlan, batch: AnyBatch, d_output: Float[Array, "*output"], *, max_gradient: float | None = None
) -> RowGradients:
    """Gradients of all rows that the batch reads, by id also where a table is cached."""
    flat, shardings = _flat(d_output, max_gradient), None
    if isinstance(batch, dict):
        tables = tables_on_mesh(plan)
        by_stack = tables.engine.row_gradients(tables.with_gains(batch), tables.by_feature(flat))
        found, shardings = tables.by_group(by_stack), tables.gradient_shardings()
    else:
        batch = _here(plan, batch)
        found = [
            api.row_gradients(group.num_rows, JaggedGradients(batch, flat, number, plan.dims))
            for number, group in enumerate(plan.groups)
        ]
    rows, values = (
        dict(zip((group.table.name for group in plan.groups), own, strict=True)) for own in zip(*found, strict=True)
    )
    return RowGradients(rows, values, row_counts(plan), shardings, plan.row_layout)


def cut(gradients: RowGradients, bound: int) -> RowGradients:
    """The first `bound` rows of every group. Raises: ValueError: there are more."""
    touched = gradients.num_touched()
    if not is_traced(touched) and (most := max(map(int, touched.values()))) > bound:
        raise ValueError(f"total_unique_indices is {bound}, but {most} rows were read; raise it or leave it out.")
    if gradients.shardings is not None:  # each device has its own at the front of its part
        return gradients
    rows = {name: rows[:bound] for name, rows in gradients.rows.items()}
    values = {name: values[:bound] for name, values in gradients.values.items()}
    return dataclasses.replace(gradients, rows=rows, values=values)


def row_counts(plan: TBEPlan) -> tuple[tuple[str, int], ...]:
    """Sorted pairs of group name and number of rows, as `RowGradients.num_rows` has them."""
    return tuple(sorted(zip((group.table.name for group in plan.groups), num_rows(plan), strict=True)))


def update(
    plan: TBEPlan,
    state: TBEState,
    batch: AnyBatch,
    d_output: Float[Array, "*output"],
    rates: Float[Array, " groups"],
) -> TBEState:
    """One optimizer step of every row that the batch reads, with its summed gradient.

    Args:
      plan: the tables.
      state: after `begin_step`.
      batch: the batch that was looked up.
      d_output: gradient of what `lookup` returned.
      rates: learning rate of every group.
    """
    flat = _flat(d_output)
    if isinstance(batch, dict):
        tables = tables_on_mesh(plan)
        return _stepped(plan, state, rates, tables.engine.update, tables.with_gains(batch), tables.by_feature(flat))
    batch = _here(plan, batch)
    gradients = [JaggedGradients(batch, flat, number, plan.dims) for number in range(len(plan.groups))]
    return _stepped(plan, state, rates, api.update, gradients)


def apply(plan: TBEPlan, state: TBEState, row_gradients: RowGradients, rates: Float[Array, " groups"]) -> TBEState:
    """One optimizer step of every row in `row_gradients`; rows of cached tables are places of the cache here.

    Raises: ValueError: a table has no optimizer.
    """
    names = [group.table.name for group in plan.groups]
    rows, values = ([own[name] for name in names] for own in (row_gradients.rows, row_gradients.values))
    if plan.devices is None:
        return _stepped(plan, state, rates, api.apply_rows, rows, values)
    tables = tables_on_mesh(plan)
    return _stepped(plan, state, rates, tables.engine.apply, tables.by_name(zip(rows, values, strict=True)))


def _stepped(
    plan: TBEPlan, state: TBEState, rates: Float[Array, " groups"], function: Callable[..., PyTree], *gradients: PyTree
) -> TBEState:
    """State after one step of all groups, by one kernel call each, or on a mesh by one call of the engine."""
    steps = [_step_of(plan, number, state, rate) for number, rate in enumerate(rates)]
    slots, copies = zip(*map(_parted, plan.groups, state.slots), strict=True)
    if plan.devices is None:
        given = zip(state.weights, slots, *gradients, steps, strict=True)
        found: PyTree = zip(*itertools.starmap(function, given), strict=True)
    else:
        tables = tables_on_mesh(plan)
        by_name = function(*map(tables.by_name, (state.weights, slots)), *gradients, tables.by_name(steps))
        found = map(tables.by_group, by_name)
    weights, stepped = found
    all_slots = tuple((*own, *copy) for own, copy in zip(stepped, copies, strict=True))
    return state._replace(weights=tuple(weights), slots=all_slots, step=state.step + 1)


def _step_of(plan: TBEPlan, number: int, state: TBEState, rate: Array) -> Step:
    """Rule, hyperparameters and rounding of a group's step. Raises: ValueError: the group has no optimizer."""
    group = plan.groups[number]
    if (rule := group.table.rule) is None:
        raise ValueError(
            f"table {group.table.name!r} has no optimizer (OptimType.NONE), so row gradients cannot be applied to it; "
            "construct the module with one."
        )
    changes: dict[str, Any] = {"learning_rate": lambda: rate}
    if isinstance(rule, CounterAdagrad):
        changes["max_counter"] = lambda: state.max_counter
    hyper = dataclasses.replace(rule, **changes).get_hyperparameters(state.step)
    return Step(hyper, rule, _rounding(plan, number, state, state.weights[number].dtype, use=None), state.step)


def _owed_factors(
    plan: TBEPlan, state: TBEState, batch: JaggedBatch, rates: Float[Array, " groups"]
) -> Float[Array, " nnz"] | None:
    """Factors by which lookups multiply the row of each id; None if no table decays globally."""
    factors = None
    for number, group in enumerate(plan.groups):
        if group.table.global_decay is not None:
            rows = jagged_segment(batch, number).rows
            prev_iter = state.slots[number][1].at[rows].get(mode="fill", fill_value=0)[:, 0]
            weight_decay = group.table.rule.weight_decay  # type: ignore[union-attr]
            own = global_decay_factor(prev_iter, state.step + 1, rates[number], weight_decay, group.table.global_decay)
            factors = own if factors is None else factors * own  # rows of other groups read as never touched: 1
    return factors


_STORE = 2**32 - 2
"""Number of a table that nobody has: noise of rounding outside of steps, which differs from that of steps."""


def _rounding(plan: TBEPlan, number: int, state: TBEState, dtype: DTypeLike, *, use: int | None) -> Rounding | None:
    """Stochastic rounding of a group's rows, perhaps cached ones, to `dtype`; None rounds to nearest."""
    group, resident_rows = plan.groups[number], state.resident_rows[number]
    if not group.table.rounds_stochastically or dtype == jnp.float32:
        return None
    key = jax.random.fold_in(state.key, state.step)
    key = key if use is None else jax.random.fold_in(key, use)
    if plan.devices is not None:  # where rows come with their numbers
        return api.stochastic_rounding(key)
    names, first_rows = [plan.tables[t].name for t in group.tables], jnp.asarray(group.first_rows, jnp.int32)

    def round_rows(values: Array, dtype: DTypeLike, rows: Array) -> Array:
        own = rows if resident_rows is None else resident_rows.at[rows].get(mode="fill", fill_value=NO_ROW)
        member = jnp.searchsorted(first_rows, own, side="right") - 1
        rows = numbers_of_rows(names, member, own - first_rows[member])
        return api.stochastic_rounding(key)(values, dtype, rows)

    return round_rows


def stored_rows(plan: TBEPlan, number: int, state: TBEState, places: Int[Array, " n"]) -> tuple[Array, ...]:
    """Weights and slots at some places of a group's cache, in the dtype of the host's store."""
    group, (weights, *slots) = plan.groups[number], api.gather_rows(state.arrays(number)[:-1], places)
    dtype = jnp.dtype(group.table.dtype)
    if weights.dtype != dtype:
        round_rows = _rounding(plan, number, state, dtype, use=_STORE)
        weights = weights.astype(jnp.float32)
        weights = weights.astype(dtype) if round_rows is None else round_rows(weights, dtype, places)
    return (weights, *slots)


def backward(
    plan: TBEPlan,
    state: TBEState,
    batch: AnyBatch,
    d_output: Float[Array, "*output"],
    rates: Float[Array, " groups"],
    *,
    max_gradient: float | None = None,
    wants_weight_gradients: bool = False,
) -> tuple[TBEState, PyTree]:
    """State after `update`, and the gradients of the ids' weights if there are any and they are wanted."""
    flat, weights = _flat(d_output, max_gradient), cast(PyTree, None)
    if isinstance(batch, JaggedBatch):
        weights = batch.weights
    else:
        weights = {name: own[1] for name, own in batch.items() if isinstance(own, tuple)}
    if not wants_weight_gradients or not jax.tree.leaves(weights):
        return update(plan, state, batch, flat, rates), None
    d_weights: PyTree
    if isinstance(batch, dict):

        def weighted(weights: PyTree) -> Array:
            return lookup(plan, state, batch | {name: (batch[name][0], own) for name, own in weights.items()})

        output, pull_back = jax.vjp(weighted, weights)
        (d_weights,) = pull_back(flat.reshape(output.shape))
    else:
        d_weights = api.weight_gradients(state.weights, _here(plan, batch), flat)
        factors = _owed_factors(plan, state, batch, rates)
        d_weights = d_weights if factors is None else factors * d_weights
    # Without this dependence, whose sum is 0, the update could be scheduled first, on a copy of the tables.
    total = jnp.nan_to_num(sum(jnp.sum(jnp.abs(own)) for own in jax.tree.leaves(d_weights)))
    return update(plan, state, batch, flat + jnp.minimum(total, 0.0), rates), d_weights
