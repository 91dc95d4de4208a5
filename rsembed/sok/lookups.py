"""Lookups of several embedding variables in one program, and the step that may follow each of them once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import TraceContextError
from jaxtyping import Array, Float

from rsembed.bags import device_copy
from rsembed.collection.asked_rows import keys_of
from rsembed.collection.engine import STACKS_TOGETHER
from rsembed.collection.rows import Occurrences, Trip
from rsembed.homes import Hashed
from rsembed.homes.hashed_rows import Counters, DynamicTable, numbers_of
from rsembed.homes.home import on_host
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import join_keys, num_invalid
from rsembed.parallel import Asking
from rsembed.row_gradients import SingleUse, check_gradient
from rsembed.sok.key_bags import KeyBags
from rsembed.sok.sharded_table import ShardedTable, TableState, on_devices
from rsembed.sok.variables import EmbeddingVariable, grown, state_of

Outputs = tuple[Float[Array, "_ _"], ...]
"""Of each feature `[bags, dim]`, or `[bags * width, dim]` for combiner "none"."""


TRAINED = "backward was called before: a lookup trains once. Look up again for another step."


@dataclasses.dataclass(eq=False)
class StepOnce:
    """Trains the tables of a lookup with the gradients of its outputs, once."""

    variables: Sequence[EmbeddingVariable]
    trips: Sequence[Trip]
    order: Sequence[int]  # which of the variables each output comes from
    shapes: list[tuple[int, ...]]
    permit: SingleUse = dataclasses.field(default_factory=functools.partial(SingleUse, TRAINED))

    def __call__(self, *d_outputs: Any) -> None:
        """One optimizer step of every row that the lookup read.

        An error in the step of a large group leaves each table either stepped or as it was, as its `step` says.

        Args:
          *d_outputs: gradient of each output; of the loss over the global batch.

        Raises:
          RuntimeError: a second call.
          ValueError: a gradient has another shape than its output.
        """
        if len(d_outputs) != len(self.shapes):
            raise ValueError(f"the lookup has {len(self.shapes)} outputs, but {len(d_outputs)} gradients came.")
        gradients: list[list[Array]] = [[] for _ in self.variables]
        for number, d_output, shape in zip(self.order, d_outputs, self.shapes, strict=True):
            name = self.variables[number].table.spec.name
            check_gradient(d_output, f"table {name!r}: the gradient")
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"table {name!r}: the gradient has shape {gradient.shape}, the output {shape}.")
            gradients[number].append(gradient.reshape(-1, shape[-1]))
        self.permit.use()
        _in_programs(_step, _keep, self.variables, self.trips, gradients)


def look_up_variables(
    variables: Sequence[EmbeddingVariable], batch: Sequence[KeyBags], *, training: bool
) -> tuple[list[Array], StepOnce]:
    """Rows of several features in one program, and the function that trains their tables.

    Args:
      variables: the table of each feature; features may share one.
      batch: keys of each feature.
      training: new keys get rows.

    Raises: RuntimeError: a table is full and its policy is to say so. Inside `jit` the `counts` say it.
    """
    if not variables:
        return [], StepOnce((), (), (), [])
    own = list({id(variable): variable for variable in variables}.values())
    numbers = {id(variable): number for number, variable in enumerate(own)}
    order = [numbers[id(variable)] for variable in variables]
    features: list[list[KeyBags]] = [[] for _ in own]
    for number, bags in zip(order, batch, strict=True):
        is_placed = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(bags))
        features[number].append(bags if is_placed else own[number].table.context.place(bags))
    outputs, trips = (_trained if training else _evaluated)(own, features)
    found = [iter(of_variable) for of_variable in outputs]
    ordered = [next(found[number]) for number in order]
    return ordered, StepOnce(own, trips, order, [output.shape for output in ordered])


def _trained(
    variables: Sequence[EmbeddingVariable], batch: Sequence[Sequence[KeyBags]]
) -> tuple[list[Outputs], list[Trip]]:
    """Outputs of each variable, in which new keys get rows, and what its step needs to know."""
    is_eager = not any(
        isinstance(leaf, jax.core.Tracer)
        for leaf in jax.tree.leaves((batch, [variable.get_value() for variable in variables]))
    )
    if is_eager:
        for variable, features in zip(variables, batch, strict=True):
            if variable.table.grows:
                _make_room(variable, features)
        failed = [_num_failed(variable) for variable in variables]
    results = _in_programs(_admit, lambda variable, found: _keep(variable, found[0]), variables, batch)
    outputs, trips = [own for _, own, _ in results], [trip for *_, trip in results]
    if is_eager:
        for variable, before, trip in zip(variables, failed, trips, strict=True):
            _check_room(variable, before, trip)
    return outputs, trips


def _evaluated(
    variables: Sequence[EmbeddingVariable], batch: Sequence[Sequence[KeyBags]]
) -> tuple[list[Outputs], list[Trip]]:
    """Outputs of each variable, of which nothing changes but counters."""

    def keep(variable: EmbeddingVariable, found: tuple[Counters, Outputs]) -> None:
        state = state_of(variable)
        with contextlib.suppress(TraceContextError):
            variable.set_value(state._replace(shards=state.shards._replace(counters=found[0])))

    return [own for _, own in _in_programs(_evaluate, keep, variables, batch)], []


def _keep(variable: EmbeddingVariable, state: TableState) -> None:
    variable.set_value(state._replace(layout=variable.table.layout))


def _in_programs(
    function: Callable[..., list[Any]],
    keep: Callable[[EmbeddingVariable, Any], None],
    variables: Sequence[EmbeddingVariable],
    *args: Any,
) -> list[Any]:
    """`function` of tables, states and what belongs to each of them, in programs of few tables.

    To compile one takes time that grows with the square of its tables, and tables that are alike share what is
    compiled: of a hundred like tables, a quarter at a time. A program takes the old states away, so what it gives is
    kept before the next one begins: an error there must not cost the tables of this one.
    """
    numbers: dict[ShardedTable, int] = {}
    kinds = [numbers.setdefault(variable.table.model, len(numbers)) for variable in variables]
    like_beside_like = sorted(range(len(variables)), key=kinds.__getitem__)
    num_programs = -(-len(variables) // STACKS_TOGETHER)
    size, results = -(-len(variables) // num_programs), dict[int, Any]()
    for first in range(0, len(variables), size):
        own = like_beside_like[first : first + size]
        tables = tuple(variables[number].table.model for number in own)
        states = [state_of(variables[number])._replace(layout=cast(Any, None)) for number in own]
        found = function(tables, states, *([of_all[number] for number in own] for of_all in args))
        for number, result in zip(own, found, strict=True):
            keep(variables[number], result)
            results[number] = result
    return [results[number] for number in range(len(variables))]


def _make_room(variable: EmbeddingVariable, features: Sequence[KeyBags]) -> None:
    """Grows the table, and the room of keys that wait for a row, so that all new keys of the batch find a place."""
    table, state = variable.table, state_of(variable)
    maps = [rows for rows in (state.shards.keys, state.shards.waiting) if rows is not None]
    free = [on_host(rows.num_free) for rows in maps]
    if np.min(free) >= sum(feature.keys.is_key.size for feature in features):
        return
    (needed,) = _in_programs(_places_wanted, lambda *_: None, [variable], [features])
    old = [rows.last_step.shape[0] // table.context.num_devices for rows in maps]
    missing = [int((on_host(own) - left).max()) for own, left in zip(needed, free, strict=False)]
    new = [max(2 * size, size + short) if short > 0 else size for size, short in zip(old, missing, strict=True)]
    if new != old:
        variable.set_value(grown(table, state, *new, *[0] * (2 - len(new))))


def _num_failed(variable: EmbeddingVariable) -> int:
    home = variable.table.home
    if not isinstance(home, Hashed) or home.when_full == "zero":
        return 0  # nobody asks, so that nobody waits for the device either
    return int(numbers_of(state_of(variable).shards.counters.failed).sum())


def _check_room(variable: EmbeddingVariable, failed_before: int, trip: Trip) -> None:
    spec, num_failed = variable.table.spec, _num_failed(variable) - failed_before
    if not num_failed:
        return
    keys = trip.batch.all_keys() if trip.wanted is None else keys_of(trip.wanted)
    lost = on_host(keys.is_key & (trip.rows == NO_ROW))
    place = int(lost.argmax())
    (key,) = join_keys(*(on_host(lane)[place : place + 1] for lane in (keys.high, keys.low)))
    raise RuntimeError(
        f"table {spec.name!r} is full: {num_failed} new keys found no room, among them {key}; the devices use "
        f"{variable.counts()['rows'].tolist()} rows. They read as zeros and are not trained; nothing else was lost. "
        "Make max_vocabulary_size_per_gpu (or admission_capacity) larger, or choose when_full='grow', 'evict' (which "
        "spares the rows of the same step) or 'zero'."
    )


# Compiled, for tables over the same devices


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _admit(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[TableState, Outputs, Trip]]:
    """Of each table its state with rows for new keys, pooled rows of its features, and what its step needs to know."""

    def on_device(table: ShardedTable, state: TableState, features: Sequence[KeyBags]) -> Asking[Any]:
        shards, own = _counted(table, state.shards, features)
        shards, slots, outputs, trip = yield from table.engine.admit(shards, state.slots, own, table.step_of(state))
        return shards, slots, tuple(outputs), trip

    found = on_devices(on_device, tables, states, batch)
    return [
        (state._replace(shards=shards, slots=slots), outputs, trip)
        for state, (shards, slots, outputs, trip) in zip(states, found, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[Counters, Outputs]]:
    """Of each table its counters after a lookup that changes nothing else, and pooled rows of its features."""

    def on_device(table: ShardedTable, state: TableState, features: Sequence[KeyBags]) -> Asking[Any]:
        shards, own = _counted(table, state.shards, features)
        outputs, num_unknown, _ = yield from table.engine.look_up(shards, own, None)
        return shards.counters.add(unknown=num_unknown), tuple(outputs)

    return on_devices(on_device, tables, states, batch)


@functools.partial(jax.jit, static_argnums=0)
def _places_wanted(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[Array, Array]]:
    """Of each table how many keys of the batch want a row on each device, and how many will wait for one at most."""

    def on_device(table: ShardedTable, state: TableState, features: Sequence[KeyBags]) -> Asking[Any]:
        _, own = _counted(table, state.shards, features)
        _, num_rows, _ = yield from table.engine.look_up(state.shards, own, state.step)
        _, num_unknown, _ = yield from table.engine.look_up(state.shards, own, None)
        return num_rows[None], (num_unknown - num_rows)[None]

    return on_devices(on_device, tables, states, batch)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(
    tables: Sequence[ShardedTable],
    states: Sequence[TableState],
    trips: Sequence[Trip],
    d_outputs: Sequence[Sequence[Float[Array, "_ _"]]],
) -> list[TableState]:
    """The states, as `_admit` left them, after one step with gradients of its outputs."""

    def on_device(table: ShardedTable, state: TableState, trip: Trip, own: Sequence[Array]) -> Asking[Any]:
        return table.engine.step_found(state.shards, state.slots, trip, own, table.step_of(state))

    stepped = on_devices(on_device, tables, states, trips, d_outputs)
    return [
        state._replace(shards=shards, slots=slots, step=state.step + 1)
        for state, (shards, slots) in zip(states, stepped, strict=True)
    ]


def _counted(table: ShardedTable, shard: DynamicTable, features: Sequence[KeyBags]) -> tuple[DynamicTable, Occurrences]:
    """The keys of a device, and its shard after counting what was none although it looks like one."""
    number, found = jnp.zeros((), jnp.int32), []
    for feature in features:
        num_bags, width = feature.keys.shape
        weights = None if feature.weights is None else feature.weights.reshape(-1)
        offsets = None if feature.combiner == "none" else jnp.arange(num_bags + 1, dtype=jnp.int32) * width
        number, keys = number + num_invalid(feature.keys), feature.keys.reshape(-1)
        found.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
    counters = shard.counters.add(**{"invalid" if table.use_hashtable else "unknown": number})
    return shard._replace(counters=counters), Occurrences.of(found)
