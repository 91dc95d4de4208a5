"""Table-batched lookup and training as pure functions of a plan and a state: what `TableBatchedEmbeddingBags` calls.

Every function can be traced; states may be donated. Ids of cached tables are slots of the cache here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, JaggedBatch
from rsembed.kernels.reference import Rounding, jagged_segment
from rsembed.optimizers import Slots, global_decay_factor
from rsembed.row_gradients import RowGradients
from rsembed.tbe.full_table import emainplace_pass, ensemble_pass, refreshed_max_counter
from rsembed.tbe.plan import TablePlan, TBEPlan
from rsembed.tbe.rounding import round_with_noise, rounding_noise


class TBEState(NamedTuple):
    """Everything that training changes; one entry per group of the plan.

    Args:
      weights: rows of the group's tables, or the rows in its cache.
      slots: optimizer state of those rows.
      averages: slow copies of the tables (ENSEMBLE_ROWWISE_ADAGRAD), else None.
      resident_rows: row of the group that each place of its cache holds, `NO_ROW` for none; None without a cache.
      step: updates done so far.
      passed_step: last step whose passes over whole tables were run.
      learning_rates: one per group.
      max_counter: largest row counter plus 1, of counter-based regularization.
      key: where stochastic rounding starts from.
      generation: counts the changes that it shares with tables on the host, see `HostRows`; None without such.
      layout: of the plan that it belongs to, which compares it.
    """

    weights: tuple[Float[Array, "rows dim"], ...]
    slots: tuple[Slots, ...]
    averages: tuple[Float[Array, "rows dim"] | None, ...]
    resident_rows: tuple[Int[Array, " rows"] | None, ...]
    step: Int[Array, ""]
    passed_step: Int[Array, ""]
    learning_rates: Float[Array, " groups"]
    max_counter: Float[Array, ""]
    key: PRNGKeyArray
    generation: UInt32[Array, ""] | None = None
    layout: Fingerprint | None = None

    def with_group(self, number: int, **arrays: Any) -> TBEState:
        """The state with other arrays of one group, by the name of their field."""
        changed: dict[str, Any] = {}
        for name, array in arrays.items():
            old = getattr(self, name)
            changed[name] = (*old[:number], array, *old[number + 1 :])
        return self._replace(**changed)

    def arrays(self, number: int) -> tuple[Array, ...]:
        """All arrays of a group: weights, slots and, where it has them, slow copy and resident rows."""
        others = (self.averages[number], self.resident_rows[number])
        return (self.weights[number], *self.slots[number], *(array for array in others if array is not None))

    def with_arrays(self, number: int, arrays: Sequence[Array]) -> TBEState:
        """The state with other `arrays` of one group."""
        weights, slots = arrays[0], tuple(arrays[1 : 1 + len(self.slots[number])])
        average = None if self.averages[number] is None else arrays[1 + len(slots)]
        resident = None if self.resident_rows[number] is None else arrays[-1]
        return self.with_group(number, weights=weights, slots=slots, averages=average, resident_rows=resident)


def init_state(plan: TBEPlan, key: PRNGKeyArray, num_rows: Sequence[int] | None = None) -> TBEState:
    """A state with zero weights, as the original starts.

    Args:
      plan: the tables.
      key: see `TBEState`.
      num_rows: rows of every group's array; None takes all rows of its tables.
    """
    weights, slots, averages, resident = [], [], [], []
    for number, group in enumerate(plan.groups):
        table = plan.table_of(group)
        rows = group.num_rows if num_rows is None else num_rows[number]
        weights.append(api.allocate((rows, table.dim), jnp.dtype(table.dtype), 0.0))
        one_row = () if table.rule is None else table.rule.init_slots(jnp.zeros((1, table.dim), jnp.float32))
        slots.append(tuple(api.allocate((rows, *v.shape[1:]), v.dtype, float(v[0, 0])) for v in one_row))
        passes = table.passes
        averages.append(None if passes.ensemble is None else jnp.zeros((rows, table.dim), passes.average_dtype))
        resident.append(jnp.full(rows, NO_ROW, jnp.int32) if table.is_cached else None)
    rates = [plan.table_of(group).learning_rate for group in plan.groups]
    return TBEState(
        tuple(weights),
        tuple(slots),
        tuple(averages),
        tuple(resident),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.asarray([0.0 if callable(rate) else rate for rate in rates], jnp.float32),
        jnp.ones((), jnp.float32),
        key,
        layout=plan.layout,
    )


def check_state(plan: TBEPlan, state: TBEState) -> None:
    """Raises: ValueError: the state belongs to another plan, whatever the shapes of its arrays."""
    if state.layout is not None:
        way_out = "Copy modules by state_dict and load_state_dict, where they hold the same tables and optimizers."
        check_same(state.layout, plan.layout, what="the state does not belong to this module", way_out=way_out)


def clip(d_output: Float[Array, "*output"], max_gradient: float | None) -> Float[Array, "*output"]:
    """Every entry of the output's gradient within `[-max_gradient, max_gradient]`; None leaves it alone."""
    return d_output if max_gradient is None else jnp.clip(d_output.astype(jnp.float32), -max_gradient, max_gradient)


def _flat(d_output: Array) -> Float[Array, " size"]:
    return d_output.astype(jnp.float32).reshape(-1)


def shape_of(table: TablePlan, num_rows: int | None = None) -> jax.ShapeDtypeStruct:
    """Shape of a table's rows, as rules are asked for the states of; `num_rows` other than its own on request."""
    return jax.ShapeDtypeStruct((table.num_rows if num_rows is None else num_rows, table.dim), jnp.float32)


def slot_shapes(table: TablePlan, num_rows: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the rule's states for a table's rows, or for another number of rows."""
    return () if table.rule is None else jax.eval_shape(table.rule.init_slots, shape_of(table, num_rows))


def learning_rates(plan: TBEPlan, state: TBEState) -> Float[Array, " groups"]:
    """The rate of every group at the step that comes next."""
    check_state(plan, state)
    rates = []
    for group, stored in zip(plan.groups, state.learning_rates, strict=True):
        table = plan.table_of(group)
        is_schedule = callable(table.learning_rate) and table.rule is not None
        rates.append(jnp.asarray(table.rule.get_learning_rate(state.step), jnp.float32) if is_schedule else stored)  # type: ignore[union-attr]
    return jnp.stack(rates)


def begin_step(plan: TBEPlan, state: TBEState) -> TBEState:
    """Runs what the next training step does to whole tables before its lookup, once per step."""
    check_state(plan, state)
    t = state.step + 1
    is_new = state.passed_step != t
    for number, group in enumerate(plan.groups):
        passes = plan.table_of(group).passes
        if passes.ensemble is not None:
            average_all = functools.partial(ensemble_pass, t=t, config=passes.ensemble)
            old = state.weights[number], state.averages[number]
            weights, average = jax.lax.cond(is_new, average_all, lambda *arrays: arrays, *old)
            state = state.with_group(number, weights=weights, averages=average)
        if passes.emainplace is not None:
            follow = functools.partial(emainplace_pass, t=t, config=passes.emainplace)
            weights = jax.lax.cond(is_new, follow, lambda weights: weights, state.weights[number])
            state = state.with_group(number, weights=weights)
    counting = [n for n, group in enumerate(plan.groups) if plan.table_of(group).passes.counter is not None]
    if counting:
        config = plan.table_of(plan.groups[counting[0]]).passes.counter
        counters = [state.slots[n][2] for n in counting]
        refreshed = refreshed_max_counter(counters, t, state.max_counter, config)  # type: ignore[arg-type]
        state = state._replace(max_counter=jnp.where(is_new, refreshed, state.max_counter))
    return state._replace(passed_step=t)


def lookup(
    plan: TBEPlan, state: TBEState, batch: JaggedBatch, output_dtype: str = "float32"
) -> Float[Array, "*output"]:
    """Pooled rows, `[bags, sum of dims]`, `[nnz, longest dim]` or flat; differentiable in the weights of the ids."""
    factors = _decay_factors(plan, state, batch, learning_rates(plan, state))
    if factors is not None:
        batch = dataclasses.replace(batch, weights=factors if batch.weights is None else factors * batch.weights)
    return _lookup(state.weights, batch).astype(output_dtype).reshape(batch.output_shape(plan.dims()))


@jax.custom_vjp
def _lookup(tables: tuple[Array, ...], batch: JaggedBatch) -> Array:
    return api.lookup_jagged(tables, batch)


def _lookup_forward(tables: tuple[Array, ...], batch: JaggedBatch) -> Any:
    return _lookup(tables, batch), (tables, batch)


def _lookup_backward(saved: Any, d_output: Array) -> Any:
    """Tables are trained by `update`, never by autodiff: a dense gradient would be as large as they are."""
    tables, batch = saved
    d_weights = None if batch.weights is None else api.weight_gradients(tables, batch, d_output)
    integers = np.zeros(batch.ids.shape, jax.dtypes.float0), np.zeros(batch.offsets.shape, jax.dtypes.float0)
    return None, dataclasses.replace(batch, ids=integers[0], offsets=integers[1], weights=d_weights)


_lookup.defvjp(_lookup_forward, _lookup_backward)


def weight_gradients(
    plan: TBEPlan,
    state: TBEState,
    batch: JaggedBatch,
    d_output: Float[Array, "*output"],
    rates: Float[Array, " groups"],
) -> Float[Array, " nnz"]:
    """Gradients of the ids' weights, from the rows that `lookup` reads at these rates."""
    gradients = api.weight_gradients(state.weights, batch, _flat(d_output))
    factors = _decay_factors(plan, state, batch, rates)
    return gradients if factors is None else factors * gradients


def row_gradients(
    plan: TBEPlan, batch: JaggedBatch, d_output: Float[Array, "*output"], *, max_gradient: float | None = None
) -> RowGradients:
    """Gradients of all rows that the batch reads; ids of cached tables are rows here, not slots."""
    d_output = clip(d_output, max_gradient)
    rows, values, sizes = {}, {}, []
    for number, group in enumerate(plan.groups):
        name = plan.group_name(group)
        arguments = (group.num_rows, number, plan.dims(), _first_reads(plan, number, batch), _flat(d_output))
        rows[name], values[name] = api.row_gradients_jagged(*arguments)
        sizes.append((name, group.num_rows))
    return RowGradients(rows, values, tuple(sorted(sizes)), layout=plan.row_layout)


def check_row_gradients(plan: TBEPlan, row_gradients: RowGradients) -> None:
    """Raises: ValueError: they count rows otherwise than this plan does."""
    what, way_out = (
        "the row gradients do not belong to this module",
        "Apply them to the module whose backward made them.",
    )
    if row_gradients.layout is not None:
        check_same(row_gradients.layout, plan.row_layout, what=what, way_out=way_out)
    own = tuple(sorted((plan.group_name(group), group.num_rows) for group in plan.groups))
    if row_gradients.num_rows != own:
        raise ValueError(f"{what}: they have rows {row_gradients.num_rows}, it has {own}. {way_out}")


def update(
    plan: TBEPlan,
    state: TBEState,
    batch: JaggedBatch,
    d_output: Float[Array, "*output"],
    rates: Float[Array, " groups"],
) -> TBEState:
    """One optimizer step of every row that the batch reads, with its summed gradient.

    Args:
      plan: the tables.
      state: after `begin_step`.
      batch: what was looked up.
      d_output: gradient of what `lookup` returned.
      rates: learning rate of every group.
    """
    for number, group in enumerate(plan.groups):
        if plan.table_of(group).rule is not None:
            reads = _first_reads(plan, number, batch)
            gradient = (number, plan.dims(), reads, _flat(d_output))
            state = _step_group(plan, number, state, rates[number], api.update_jagged, gradient)
    return state._replace(step=state.step + 1)


def apply(plan: TBEPlan, state: TBEState, row_gradients: RowGradients, rates: Float[Array, " groups"]) -> TBEState:
    """One optimizer step of every row in `row_gradients`; rows of cached tables are places of the cache here.

    Raises: ValueError: a table has no optimizer.
    """
    for number, group in enumerate(plan.groups):
        name = plan.group_name(group)
        if plan.table_of(group).rule is None:
            raise ValueError(
                f"tables {name!r} have no optimizer (OptimType.NONE), so row gradients cannot be applied to them; "
                "construct the module with one."
            )
        gradient = (row_gradients.rows[name], row_gradients.values[name])
        state = _step_group(plan, number, state, rates[number], api.apply_rows, gradient)
    return state._replace(step=state.step + 1)


def _step_group(
    plan: TBEPlan, number: int, state: TBEState, rate: Array, kernel: Callable[..., Any], gradient: tuple[Any, ...]
) -> TBEState:
    """The state after `kernel` has stepped rows of one group."""
    check_state(plan, state)
    table = plan.table_of(plan.groups[number])
    changes: dict[str, Any] = {"learning_rate": lambda: rate}
    if table.passes.counter is not None:
        changes["max_counter"] = lambda: state.max_counter
    hyper = dataclasses.replace(table.rule, **changes).get_hyperparameters(state.step)  # type: ignore[type-var, union-attr]
    rounding = _rounding(plan, number, state, state.weights[number].dtype, use=None)
    weights, slots = kernel(state.weights[number], state.slots[number], *gradient, hyper, table.rule, rounding=rounding)
    return state.with_group(number, weights=weights, slots=slots)


def decayed_tables(plan: TBEPlan, state: TBEState) -> TBEState:
    """The state with the decay of DECOUPLE_GLOBAL that rows are still owed written into them, as lookups read them."""
    rates = learning_rates(plan, state)
    for number, group in enumerate(plan.groups):
        passes = plan.table_of(group).passes
        if passes.global_decay is not None:
            old, (accumulator, prev_iter) = state.weights[number], state.slots[number]
            factor = global_decay_factor(
                prev_iter, state.step + 1, rates[number], passes.weight_decay, passes.global_decay
            )
            round_rows = _rounding(plan, number, state, old.dtype, use=_DECAY) or _round_to_nearest
            weights = round_rows(old.astype(jnp.float32) * factor, old.dtype, jnp.arange(old.shape[0]))
            prev_iter = jnp.where(prev_iter > 0, state.step, prev_iter)
            state = state.with_group(number, weights=weights, slots=(accumulator, prev_iter))
    return state


def _decay_factors(
    plan: TBEPlan, state: TBEState, batch: JaggedBatch, rates: Float[Array, " groups"]
) -> Float[Array, " nnz"] | None:
    """What lookups multiply the row of each id by; None if no table decays globally."""
    factors = None
    for number, group in enumerate(plan.groups):
        passes = plan.table_of(group).passes
        if passes.global_decay is not None:
            rows = jagged_segment(batch, number).rows
            prev_iter = state.slots[number][1].at[rows].get(mode="fill", fill_value=0)[:, 0]
            own = global_decay_factor(
                prev_iter, state.step + 1, rates[number], passes.weight_decay, passes.global_decay
            )
            factors = own if factors is None else factors * own  # rows of other groups read as never touched: 1
    return factors


_DECAY, _STORE = 2**32 - 1, 2**32 - 2
"""What beside steps rounds rows, with other noise: the numbers of tables that nobody has."""


def _round_to_nearest(values: Array, dtype: Any, rows: Array) -> Array:
    return values.astype(dtype)


def _rounding(plan: TBEPlan, number: int, state: TBEState, dtype: Any, *, use: int | None) -> Rounding | None:
    """How rows of a group become `dtype`; None to nearest. They may be in a cache, whose dtype is not the tables'."""
    group, resident_rows = plan.groups[number], state.resident_rows[number]
    if not plan.table_of(group).rounds_stochastically or dtype == jnp.float32:
        return None
    key = jax.random.fold_in(state.key, state.step)
    key = key if use is None else jax.random.fold_in(key, use)
    first_rows, numbers = jnp.asarray(group.first_rows, jnp.int32), jnp.asarray(group.tables, jnp.int32)

    def round_rows(values: Array, dtype: Any, rows: Array) -> Array:
        own = rows if resident_rows is None else resident_rows.at[rows].get(mode="fill", fill_value=NO_ROW)
        member = jnp.searchsorted(first_rows, own, side="right") - 1
        noise = rounding_noise(key, numbers[member], own - first_rows[member], values.shape[1])
        return round_with_noise(values, noise, dtype)

    return round_rows


def stored_rows(plan: TBEPlan, number: int, state: TBEState, places: Int[Array, " n"]) -> tuple[Array, ...]:
    """All arrays of a group at places of its cache, with weights in the dtype of the tables."""
    weights, *others = api.gather_rows(state.arrays(number), places)
    dtype = jnp.dtype(plan.table_of(plan.groups[number]).dtype)
    if weights.dtype != dtype:
        round_rows = _rounding(plan, number, state, dtype, use=_STORE) or _round_to_nearest
        weights = round_rows(weights.astype(jnp.float32), dtype, places)
    return (weights, *others)


def _first_reads(plan: TBEPlan, number: int, batch: JaggedBatch) -> JaggedBatch:
    """The batch; with the write-back hook, only the first bag that reads a row gives it a gradient."""
    if not plan.table_of(plan.groups[number]).passes.writes_first_gradient_only:
        return batch
    rows = jagged_segment(batch, number).rows
    order = jnp.argsort(rows, stable=True)
    is_first = jnp.concatenate([jnp.ones(min(1, rows.size), bool), rows[order][1:] != rows[order][:-1]])
    keep = jnp.zeros(rows.shape, jnp.float32).at[order].set(is_first.astype(jnp.float32))
    return dataclasses.replace(batch, weights=keep if batch.weights is None else keep * batch.weights)


def backward(
    plan: TBEPlan,
    state: TBEState,
    batch: JaggedBatch,
    d_output: Float[Array, "*output"],
    rates: Float[Array, " groups"],
    *,
    max_gradient: float | None = None,
    wants_weight_gradients: bool = False,
) -> tuple[TBEState, Float[Array, " nnz"] | None]:
    """`update`, and before it the gradients of the ids' weights, if somebody reads them."""
    d_output = clip(d_output, max_gradient)
    if not wants_weight_gradients:
        return update(plan, state, batch, d_output, rates), None
    d_weights = weight_gradients(plan, state, batch, d_output, rates)
    # Without this dependence, whose sum is 0, the update could be scheduled first, on a copy of the tables.
    total = jnp.nan_to_num(jnp.sum(jnp.abs(d_weights)))
    d_output = d_output + jnp.minimum(total, 0.0).astype(d_output.dtype)
    return update(plan, state, batch, d_output, rates), d_weights
