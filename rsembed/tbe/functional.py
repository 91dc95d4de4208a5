"""Table-batched lookup and training as pure functions of a plan and a state.

`TableBatchedEmbeddingBags` calls them. Every function can be traced, and states may be donated. Ids
of cached tables are cache slots here, except in `row_gradients`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from rsembed.arrays import check_not_taken, is_traced
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, Step
from rsembed.kernels.reference import Rounding, rows_of_list
from rsembed.optimizers.base import Slots
from rsembed.optimizers.regularization import global_decay_factor
from rsembed.optimizers.regularized import CounterAdagrad
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients
from rsembed.tbe.plan import AnyBatch, GroupPlan, TBEPlan, engine_of, with_list

Group = TypeVar("Group")


class TBEState(NamedTuple):
    """Everything that training changes. The tuples have one entry per group of the plan.

    Args:
      weights: rows of the group's tables, or the rows in its cache.
      slots: optimizer state of these rows. ENSEMBLE_ROWWISE_ADAGRAD appends its slow copy of the
        tables.
      resident_rows: for each slot of the group's cache, the row of the group in it, or `NO_ROW` if
        it is empty. None without a cache.
      step: number of updates so far.
      passed_step: number of the last step (1 for the first) whose passes over whole tables were
        run.
      learning_rates: one per group.
      max_counter: largest row counter plus 1, for counter-based regularization.
      key: PRNG key of stochastic rounding and of uniform initial weights.
      generation: see `storage.backing_store.Generation`. None without tables on the host.
      layout: fingerprint of the plan that the state belongs to.
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
        """All arrays of a group: weights, slots and, for a cached group, its resident rows."""
        resident = self.resident_rows[number]
        return (
            self.weights[number],
            *self.slots[number],
            *(() if resident is None else (resident,)),
        )

    def with_arrays(self, number: int, arrays: Sequence[Array]) -> TBEState:
        """A copy of the state with other arrays for one group, in the order of `arrays`."""
        weights, *others = arrays
        resident = None if self.resident_rows[number] is None else others.pop()
        changes = (("weights", weights), ("slots", tuple(others)), ("resident_rows", resident))
        old: dict[str, PyTree] = self._asdict()
        changed: PyTree = {
            name: (*old[name][:number], new, *old[name][number + 1 :]) for name, new in changes
        }
        return self._replace(**changed)


def num_rows(plan: TBEPlan) -> tuple[int, ...]:
    """Number of rows of every group's array, including padding for the devices of a mesh."""
    return tuple(stack.layout.num_rows for stack in engine_of(plan).stacks.values())


def everywhere(plan: TBEPlan, tree: PyTree) -> PyTree:
    """The arrays of `tree` replicated over the plan's mesh. Unchanged without a mesh."""
    return plan.devices.place(tree, PartitionSpec())


def rows_of(plan: TBEPlan, table: int, ids: Int[np.ndarray, " ids"]) -> Int[np.ndarray, " ids"]:
    """Row of each id of a table in the arrays of its group."""
    group, _ = plan.places[table]
    stack = list(engine_of(plan).stacks.values())[group]
    rows: np.ndarray = stack.layout.rows(plan.tables[table].name, ids)
    return rows


def by_stack(plan: TBEPlan, by_group: Iterable[Group]) -> dict[str, Group]:
    """Values of the groups by stack name, in the form of the engine's arguments."""
    return dict(zip(engine_of(plan).stacks, by_group, strict=True))


def by_group(plan: TBEPlan, by_stack: Mapping[str, Group]) -> tuple[Group, ...]:
    """The inverse of `by_stack`."""
    return tuple(by_stack[name] for name in engine_of(plan).stacks)


def _checked(plan: TBEPlan, batch: AnyBatch) -> AnyBatch:
    """The batch unchanged.

    Raises: ValueError: the tables are on a mesh, but the batch is not split.
    """
    if plan.is_shared and isinstance(batch, Call):
        raise ValueError("a mesh shares the tables: split the batch by module.prepare.")
    return batch


def init_state(
    plan: TBEPlan, key: PRNGKeyArray, num_places: Mapping[int, int] | None = None
) -> TBEState:
    """A state with zero weights, which are FBGEMM's initial weights.

    Args:
      plan: the tables.
      key: PRNG key of stochastic rounding and of uniform initial weights.
      num_places: number of cache slots of each cached group. Other groups have arrays of all rows.
    """
    weights, slots, resident = [], [], []
    for number, (group, all_rows) in enumerate(zip(plan.groups, num_rows(plan), strict=True)):
        size = (num_places or {}).get(number, all_rows)
        allocate: Callable[..., Array] = api.allocate
        if plan.is_shared:
            allocate = functools.partial(_split_array, plan, number)
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


def _split_array(
    plan: TBEPlan, number: int, shape: Sequence[int], dtype: DTypeLike, fill: float
) -> Array:
    """An array for the rows of a group, filled with `fill` and sharded over the mesh."""
    stack = list(engine_of(plan).stacks.values())[number]
    whole = functools.partial(jnp.full, shape, fill, dtype)
    return jax.jit(whole, out_shardings=plan.devices.sharding(stack.partition))()


def check_state(plan: TBEPlan, state: TBEState) -> None:
    """Checks that a state can be used with a plan.

    Raises:
      ValueError: the state belongs to another plan.
      RuntimeError: a step took the state's arrays over, or this process was forked.
    """
    check_not_forked("the module")
    # A compiled program for several devices that gets deleted arrays ends the process.
    check_not_taken(
        (state.weights, state.slots, state.resident_rows, state.step, state.generation),
        "the module has lost its tables, perhaps by way of a copy that shared them, or by Ctrl-C or an error,",
        "make a new module, and load a state dict of the copy or of the latest checkpoint into it; copy modules by "
        "state_dict and load_state_dict",
    )
    if state.layout is not None:
        way_out = "Copy modules by state_dict and load_state_dict, where they hold the same tables and optimizers."
        check_same(
            state.layout,
            plan.layout,
            what="the state does not belong to this module",
            way_out=way_out,
        )


def learning_rates(plan: TBEPlan, state: TBEState) -> Float[Array, " groups"]:
    """Learning rate of every group at the next step."""
    check_state(plan, state)
    rates = []
    for group, stored in zip(plan.groups, state.learning_rates, strict=True):
        rule = group.table.rule
        if rule is not None and callable(group.table.learning_rate):
            stored = jnp.asarray(rule.get_learning_rate(state.step), jnp.float32)
        rates.append(stored)
    return jnp.stack(rates)


def begin_step(plan: TBEPlan, state: TBEState) -> TBEState:
    """State after the passes over whole tables that precede the next training step's lookup.

    A second call for the same step changes nothing.
    """
    check_state(plan, state)
    t = state.step + 1
    is_new = state.passed_step != t
    for number, group in enumerate(plan.groups):
        if (mode := group.table.whole_table_mode) is not None:
            slots, copies = _parted(group, state.slots[number])
            run = functools.partial(mode.before_step, t=t)
            weights, copies = jax.lax.cond(
                is_new, run, lambda *old: old, state.weights[number], copies
            )
            state = state.with_arrays(number, (weights, *slots, *copies))
    rules = {number: group.table.rule for number, group in enumerate(plan.groups)}
    counting = {number: rule for number, rule in rules.items() if isinstance(rule, CounterAdagrad)}
    if counting:
        config = next(iter(counting.values())).regularization
        refreshed = config.refreshed_max_counter(
            [state.slots[number][2] for number in counting], t, state.max_counter
        )
        state = state._replace(max_counter=jnp.where(is_new, refreshed, state.max_counter))
    return state._replace(passed_step=t)


def _parted(group: GroupPlan, slots: Slots) -> tuple[Slots, Slots]:
    """A group's slots in two parts: the slots of its rule, and copies of its tables."""
    num_slots = len(slots) - len(group.table.copy_dtypes)
    return slots[:num_slots], slots[num_slots:]


def lookup(
    plan: TBEPlan, state: TBEState, batch: AnyBatch, output_dtype: str = "float32"
) -> Float[Array, "*output"]:
    """Pooled rows, differentiable with respect to the weights of the ids.

    The shape is `[bags, sum of dims]`, or `[nnz, longest dim]` without pooling. It is flat for
    variable batch sizes.
    """
    return _pooled(plan, state, batch, learning_rates(plan, state)).astype(output_dtype)


def _pooled(
    plan: TBEPlan, state: TBEState, batch: AnyBatch, rates: Float[Array, " groups"]
) -> Float[Array, "*output"]:
    """Output of a lookup, with global weight decay applied at these learning rates."""
    batch = _checked(plan, batch)
    if isinstance(batch, Call):  # Tables on a mesh have no global weight decay.
        batch = _decayed(plan, state, batch, rates)
    output, _ = engine_of(plan).lookup(by_stack(plan, state.weights), batch)
    return output


def _gradient(d_output: Array, max_gradient: float | None = None) -> Float[Array, "*output"]:
    """Gradient of the output in float32, clipped to `[-max_gradient, max_gradient]`.

    `max_gradient` None clips nothing.
    """
    d_output = d_output.astype(jnp.float32)
    if max_gradient is None:
        return d_output
    return jnp.clip(d_output, -max_gradient, max_gradient)


def row_gradients(
    plan: TBEPlan,
    batch: AnyBatch,
    d_output: Float[Array, "*output"],
    *,
    max_gradient: float | None = None,
) -> RowGradients:
    """Gradients of all rows that the batch reads.

    `batch` has row ids, not cache slots, also for cached tables.
    """
    engine = engine_of(plan)
    gradient = _gradient(d_output, max_gradient)
    found = by_group(plan, engine.row_gradients(_checked(plan, batch), gradient))
    names = [group.table.name for group in plan.groups]
    rows = {name: own for name, (own, _) in zip(names, found, strict=True)}
    values = {name: own for name, (_, own) in zip(names, found, strict=True)}
    shardings = engine.gradient_shardings()
    if shardings is not None:
        name_of = by_stack(plan, names)
        shardings = tuple(
            sorted((name_of[stack], of_rows, of_values) for stack, of_rows, of_values in shardings)
        )
    return RowGradients(rows, values, row_counts(plan), shardings, plan.row_layout)


def cut(gradients: RowGradients, bound: int) -> RowGradients:
    """The first `bound` rows of every group. On a mesh, all rows.

    Raises: ValueError: more than `bound` rows have a gradient. Not checked inside `jit`.
    """
    touched = gradients.num_touched()
    if not is_traced(touched) and (most := max(map(int, touched.values()))) > bound:
        raise ValueError(
            f"total_unique_indices is {bound}, but {most} rows were read; raise it or leave it out."
        )
    if gradients.shardings is not None:  # Every device's part has padding at its end.
        return gradients
    rows = {name: rows[:bound] for name, rows in gradients.rows.items()}
    values = {name: values[:bound] for name, values in gradients.values.items()}
    return dataclasses.replace(gradients, rows=rows, values=values)


def row_counts(plan: TBEPlan) -> tuple[tuple[str, int], ...]:
    """Sorted pairs of group name and number of rows, in the form of `RowGradients.num_rows`."""
    return tuple(
        sorted(zip((group.table.name for group in plan.groups), num_rows(plan), strict=True))
    )


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
      state: result of `begin_step`.
      batch: the batch that was looked up.
      d_output: gradient of the output of `lookup`.
      rates: learning rate of every group.
    """
    return _stepped(
        plan, state, rates, engine_of(plan).update, _checked(plan, batch), _gradient(d_output)
    )


def apply(
    plan: TBEPlan, state: TBEState, row_gradients: RowGradients, rates: Float[Array, " groups"]
) -> TBEState:
    """One optimizer step of every row in `row_gradients`.

    Rows of cached tables must be given as cache slots.

    Raises: ValueError: a table has no optimizer.
    """
    rows = row_gradients.rows
    names = [group.table.name for group in plan.groups]
    gradients = [(rows[name], row_gradients.values[name]) for name in names]
    return _stepped(plan, state, rates, engine_of(plan).apply, by_stack(plan, gradients))


def _stepped(
    plan: TBEPlan,
    state: TBEState,
    rates: Float[Array, " groups"],
    function: Callable[..., PyTree],
    *gradients: PyTree,
) -> TBEState:
    """State after one step of all groups.

    Args:
      plan: the tables.
      state: state before the step.
      rates: learning rate of every group.
      function: `update` or `apply` of the engine.
      *gradients: arguments of `function` between the slots and the steps.
    """
    steps = [_step_of(plan, number, state, rate) for number, rate in enumerate(rates)]
    slots, copies = zip(*map(_parted, plan.groups, state.slots), strict=True)
    stepped = function(
        by_stack(plan, state.weights), by_stack(plan, slots), *gradients, by_stack(plan, steps)
    )
    weights, slots = (by_group(plan, own) for own in stepped)
    all_slots = tuple((*own, *copy) for own, copy in zip(slots, copies, strict=True))
    return state._replace(weights=weights, slots=all_slots, step=state.step + 1)


def _step_of(plan: TBEPlan, number: int, state: TBEState, rate: Array) -> Step:
    """Rule, hyperparameters and rounding of a group's step.

    Raises: ValueError: the group has no optimizer.
    """
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
    noise = _noise(plan, number, state, state.weights[number].dtype)
    return Step(hyper, rule, noise, state.step, state.resident_rows[number])


def _decayed(plan: TBEPlan, state: TBEState, batch: Call, rates: Float[Array, " groups"]) -> Call:
    """The batch with weights that apply the global weight decay to the row of each id.

    Unchanged if no table has global weight decay.
    """
    factors: Array | None = None
    for number, group in enumerate(plan.groups):
        if group.table.global_decay is not None:
            rows = rows_of_list(batch, 0, number, state.weights[number].shape[0])
            prev_iter = state.slots[number][1].at[rows].get(mode="fill", fill_value=0)[:, 0]
            weight_decay = group.table.rule.weight_decay  # type: ignore[union-attr]
            own = global_decay_factor(
                prev_iter, state.step + 1, rates[number], weight_decay, group.table.global_decay
            )
            # Ids of other groups read `prev_iter` 0, which gives the factor 1.
            factors = own if factors is None else factors * own
    if factors is None:
        return batch
    weights = batch.lists[0].weights
    return with_list(batch, weights=factors if weights is None else factors * weights)


_STORE = 2**32 - 2
"""Folded into the key for host write-backs, so that their rounding noise is not that of a step."""


def _noise(
    plan: TBEPlan, number: int, state: TBEState, dtype: DTypeLike, *, use: int | None = None
) -> Rounding | None:
    """Stochastic rounding of a group's rows to `dtype`; None rounds to nearest.

    Args:
      plan: the tables.
      number: index of the group.
      state: gives the key and the step.
      dtype: dtype of the rounded rows.
      use: folded into the key. None is the noise of a training step.
    """
    if not plan.groups[number].table.rounds_stochastically or dtype == jnp.float32:
        return None
    key = jax.random.fold_in(state.key, state.step)
    if use is not None:
        key = jax.random.fold_in(key, use)
    return api.stochastic_rounding(key)


def stored_rows(
    plan: TBEPlan, number: int, state: TBEState, places: Int[Array, " n"]
) -> tuple[Array, ...]:
    """Weights and slots in some cache slots of a group, in the dtype of the host's store."""
    group, (weights, *slots) = (
        plan.groups[number],
        api.gather_rows(state.arrays(number)[:-1], places),
    )
    dtype = jnp.dtype(group.table.dtype)
    if weights.dtype != dtype:
        storage = list(engine_of(plan).stacks.values())[number].storage
        noise = _noise(plan, number, state, dtype, use=_STORE)
        round_rows = storage.rounding(noise, 0, state.resident_rows[number])
        weights = weights.astype(jnp.float32)
        weights = (
            weights.astype(dtype) if round_rows is None else round_rows(weights, dtype, places)
        )
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
    """State after `update`, and the gradients of the ids' weights.

    The gradients are an array. For a prepared batch, they are the batch with gradients in place of
    the weights. They are None if `wants_weight_gradients` is False or the batch has no weights.
    """
    gradient = _gradient(d_output, max_gradient)
    weights, with_weights = _weights_of(batch)
    if not wants_weight_gradients or not weights:
        return update(plan, state, batch, gradient, rates), None

    def weighted(weights: list[Array]) -> Array:
        return _pooled(plan, state, with_weights(weights), rates)

    output, pull_back = jax.vjp(weighted, weights)
    (d_weights,) = pull_back(gradient.reshape(output.shape))
    # The zero that is added makes the update depend on `d_weights`. Otherwise XLA could schedule
    # the update first, on a copy of the tables.
    total = jnp.nan_to_num(sum(jnp.sum(jnp.abs(own)) for own in d_weights))
    stepped = update(plan, state, batch, gradient + jnp.minimum(total, 0.0), rates)
    if isinstance(batch, Call):
        return stepped, d_weights[0]
    return stepped, with_weights(d_weights)


def _weights_of(batch: AnyBatch) -> tuple[list[Array], Callable[[list[Array]], AnyBatch]]:
    """The arrays of weights in a batch, and a function that replaces them."""
    leaves, form = jax.tree.flatten(batch)
    is_weight = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def with_weights(weights: list[Array]) -> AnyBatch:
        others = iter(weights)
        changed = [
            next(others) if is_own else leaf for leaf, is_own in zip(leaves, is_weight, strict=True)
        ]
        batch: AnyBatch = jax.tree.unflatten(form, changed)
        return batch

    return [leaf for leaf, is_own in zip(leaves, is_weight, strict=True) if is_own], with_weights
