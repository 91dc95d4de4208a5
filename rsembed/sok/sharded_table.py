"""Tables over the devices of a mesh: the row of key `k` lies on device `k % n`, whatever else changes.

```
keys ──distinct──▶ owner: key -> row (and a new row, in training), read ──▶ vectors ──pool──▶ output
table ◀──step── owner: sum of equal rows ◀────── gradients of distinct keys ◀──spread── d(output)
```

Lookups and steps of several tables are one compiled program. Everything is exact at any exchange capacity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.parallel import Wanted, ask, default_capacity, distinct
from rsembed.sok import dynamic_table, static_table
from rsembed.sok.dynamic_table import DynamicTableSpec
from rsembed.sok.initialize import Context
from rsembed.sok.keys import Keys, num_invalid, owners
from rsembed.sok.optimizers import Adam, update_rows
from rsembed.specs import Combiner

Combiners = Sequence[tuple[Combiner, ...]]
"""For each table, the combiner of each feature that reads it."""


@dataclasses.dataclass(frozen=True)
class ShardedTable:
    """What a table over a mesh is; its arrays are in a `TableState`.

    Attributes:
      spec: the share of one device.
      context: the devices.
      use_hashtable: keys get rows when they are first trained; else key `k` has row `k // n` of its device.
    """

    spec: DynamicTableSpec
    context: Context
    use_hashtable: bool = True

    def init(self, key: PRNGKeyArray) -> TableState:
        """An empty table, or a full one without hash table."""
        return _init(self, key)

    def on_shards(self, function: Callable[[Any, Array], Any], state: TableState) -> TableState:
        """The state after `(shard, step) -> shard` on every device."""
        part = P(self.context.axis)
        mapped = jax.shard_map(function, mesh=self.context.mesh, in_specs=(part, P()), out_specs=part, check_vma=False)
        return TableState(mapped(state.shards, state.step), state.step)


class TableState(NamedTuple):
    """Everything that training changes in one table.

    Attributes:
      shards: `DynamicTable` or `StaticTable`; the shares of the devices lie side by side along the leading axis.
      step: updates so far.
    """

    shards: Any
    step: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=0)
def _init(table: ShardedTable, key: PRNGKeyArray) -> TableState:
    axis = table.context.axis

    def on_device(key: PRNGKeyArray) -> Any:
        if table.use_hashtable:
            return dynamic_table.init(table.spec, key)
        return static_table.init(table.spec, key, jax.lax.axis_index(axis), table.context.num_devices)

    mapped = jax.shard_map(on_device, mesh=table.context.mesh, in_specs=P(), out_specs=P(axis), check_vma=False)
    return TableState(mapped(key), jnp.zeros((), jnp.int32))


class KeyBags(NamedTuple):
    """Keys of a batch, cut among devices by bag.

    Attributes:
      keys: lanes `[bags, width]`.
      weights: one per key; None means ones.
    """

    keys: Keys
    weights: Float[Array, "bags width"] | None


class Trip(NamedTuple):
    """Where the keys of a lookup went: what its backward pass needs.

    Attributes:
      wanted: distinct keys of every device.
      rows: row of each at its owner, `NO_ROW` for a key without one.
      features: the batch.
      num_rounds: rounds of the exchange.
    """

    wanted: Wanted
    rows: Int[Array, " nnz"]
    features: tuple[KeyBags, ...]
    num_rounds: Int[Array, " devices"]


def look_up(
    tables: Sequence[ShardedTable],
    combiners: Combiners,
    states: Sequence[TableState],
    batch: Sequence[tuple[KeyBags, ...]],
    *,
    train: bool,
    capacity: int | None = None,
) -> tuple[list[TableState], list[tuple[Float[Array, "_ _"], ...]], list[Trip]]:
    """Pooled rows of every feature of every table.

    Args:
      tables: what the states belong to; all over the same devices.
      combiners: of every feature of every table.
      states: see `ShardedTable.init`; unchanged but for counters unless `train`.
      batch: keys of every feature of every table.
      train: new keys get rows.
      capacity: places per block of the exchange, see `parallel.rounds.ask`.

    Returns: new states; for each table, outputs `[bags, dim]` of its features, `[bags * width, dim]` for "none"; trips.
    """
    context = common_context(tables)
    steps = [state.step for state in states]

    def on_device(shards: Any, steps: Any, batch: Any) -> Any:
        results = []
        for table, own, shard, step, features in zip(tables, combiners, shards, steps, batch, strict=True):
            results.append(_look_up(table, own, shard, step, features, train, capacity))
        return tuple(zip(*results, strict=True))

    part = P(context.axis)
    mapped = jax.shard_map(on_device, mesh=context.mesh, in_specs=(part, P(), part), out_specs=part, check_vma=False)
    shards, outputs, trips = mapped([state.shards for state in states], steps, list(batch))
    return [TableState(*new) for new in zip(shards, steps, strict=True)], list(outputs), list(trips)


def evaluate(
    tables: Sequence[ShardedTable],
    combiners: Combiners,
    states: Sequence[TableState],
    batch: Sequence[tuple[KeyBags, ...]],
    *,
    capacity: int | None = None,
) -> tuple[list[Any], list[tuple[Array, ...]], list[Trip]]:
    """A lookup that changes nothing: new counters, which `with_counters` takes, instead of states.

    Args:
      tables: as for `look_up`, like all others.
      combiners: see there.
      states: see there.
      batch: see there.
      capacity: see there.
    """
    new_states, outputs, trips = look_up(tables, combiners, states, batch, train=False, capacity=capacity)
    counters = [
        state.shards.counters if table.use_hashtable else state.shards.unknown
        for table, state in zip(tables, new_states, strict=True)
    ]
    return counters, outputs, trips


def with_counters(state: TableState, counters: Any) -> TableState:
    """The state with counters that `evaluate` returned."""
    field = "counters" if isinstance(state.shards, dynamic_table.DynamicTable) else "unknown"
    return state._replace(shards=state.shards._replace(**{field: counters}))


def update(
    tables: Sequence[ShardedTable],
    combiners: Combiners,
    states: Sequence[TableState],
    trips: Sequence[Trip],
    d_outputs: Sequence[Sequence[Float[Array, "_ _"]]],
    *,
    capacity: int | None = None,
) -> list[TableState]:
    """One optimizer step of every row that a lookup read.

    Args:
      tables: as for `look_up`, like combiners and capacity.
      combiners: see there.
      states: as the lookup left them.
      trips: from the lookup.
      d_outputs: gradients of its outputs: of the mean over all samples if the loss is one.
      capacity: see there.
    """
    context = common_context(tables)
    steps = [state.step for state in states]

    def on_device(shards: Any, steps: Any, trips: Any, d_outputs: Any) -> Any:
        return [
            _step(table, own, shard, step, trip, d_own, capacity)
            for table, own, shard, step, trip, d_own in zip(
                tables, combiners, shards, steps, trips, d_outputs, strict=True
            )
        ]

    part = P(context.axis)
    specs = (part, P(), part, part)
    mapped = jax.shard_map(on_device, mesh=context.mesh, in_specs=specs, out_specs=part, check_vma=False)
    shards = mapped([state.shards for state in states], steps, list(trips), [list(own) for own in d_outputs])
    return [TableState(shard, step + 1) for shard, step in zip(shards, steps, strict=True)]


def common_context(tables: Sequence[ShardedTable]) -> Context:
    """Raises: ValueError: no table is given, or they lie on different devices."""
    contexts = {(table.context.mesh, table.context.axis): table.context for table in tables}
    if len(contexts) != 1:
        raise ValueError(f"a group needs tables over the same devices, got {len(contexts)} different meshes.")
    return next(iter(contexts.values()))


def _look_up(
    table: ShardedTable,
    combiners: tuple[Combiner, ...],
    shard: Any,
    step: Array,
    features: tuple[KeyBags, ...],
    train: bool,
    capacity: int | None,
) -> tuple[Any, tuple[Array, ...], Trip]:
    num_devices = table.context.num_devices
    keys = jax.tree.map(
        lambda *lanes: jnp.concatenate([lane.reshape(-1) for lane in lanes]), *[f.keys for f in features]
    )
    wanted = distinct(owners(keys, num_devices), (keys.high, keys.low), num_devices=num_devices)
    if table.use_hashtable:
        shard = shard._replace(counters=shard.counters.add(invalid=num_invalid(keys)))
    else:
        shard = shard._replace(unknown=shard.unknown + num_invalid(keys))
    exists = wanted.first_of != NO_ROW
    counts = jnp.zeros(keys.low.shape, jnp.int32).at[wanted.entry_of].add(1, mode="drop")

    def answer(shard: Any, arrived: tuple[Keys, Array, Array]) -> tuple[Any, Any]:
        asked, first_of, counts = arrived
        if table.use_hashtable:
            order = _in_order_of_occurrence(first_of, num_devices)
            asked, counts = jax.tree.map(lambda x: x[order], (asked, counts))
            shard, rows = dynamic_table.translate(table.spec, shard, asked, step, train=train, occurrences=counts)
            rows = jnp.zeros_like(rows).at[order].set(rows)
        else:
            shard, rows = static_table.translate(shard, asked, num_devices)
        return shard, (rows, api.lookup(shard.rows, [Segment(rows, None, None, "none")])[0])

    own_keys = Keys(wanted.lanes[0], wanted.lanes[1], exists)
    exchange = functools.partial(
        ask, wanted, capacity=_capacity(capacity, wanted, num_devices), axis_name=table.context.axis
    )
    if train and table.use_hashtable and table.spec.when_full == "evict":
        # What a later round asks for must not make room in an earlier one.
        shard, _, _ = exchange(own_keys, lambda shard, asked: (dynamic_table.hold(shard, asked, step), None), shard)
    shard, (rows, vectors), num_rounds = exchange((own_keys, wanted.first_of, counts), answer, shard)
    outputs = api.lookup(vectors, _segments(wanted, features, combiners))
    trip = Trip(wanted, jnp.where(exists, rows, NO_ROW), features, num_rounds[None])
    return shard, outputs, trip


def _in_order_of_occurrence(first_of: Array, num_devices: int) -> Int[Array, " nnz"]:
    """What puts arrived keys into the order in which the devices, one after the other, met them."""
    place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
    device = place // max(first_of.shape[0] // num_devices, 1)
    order: Array = jax.lax.sort((device, first_of, place), num_keys=2, is_stable=True)[2]
    return order


def _step(
    table: ShardedTable,
    combiners: tuple[Combiner, ...],
    shard: Any,
    step: Array,
    trip: Trip,
    d_outputs: Sequence[Array],
    capacity: int | None,
) -> Any:
    wanted, num_entries = trip.wanted, trip.rows.shape[0]
    optimizer, dim = table.spec.optimizer, table.spec.embedding_dim
    hyper = optimizer.get_hyperparameters(step)
    entries, values = api.row_gradients(num_entries, _segments(wanted, trip.features, combiners), d_outputs)
    gradients = jnp.zeros((num_entries, dim), jnp.float32).at[entries].set(values, mode="drop")

    def stepped(shard: Any, rows: Array, gradients: Array) -> Any:
        rows, slots = update_rows(shard.rows, shard.slots, rows, gradients, hyper, optimizer)
        return shard._replace(rows=rows, slots=slots)

    def checked(shard: Any, rows: Array, keys: Keys) -> tuple[Any, Array]:
        return dynamic_table.still_theirs(shard, rows, keys) if table.use_hashtable else (shard, rows)

    def step_rows(shard: Any, arrived: tuple[Array, Keys, Array]) -> tuple[Any, None]:
        shard, rows = checked(shard, *arrived[:2])
        return stepped(shard, rows, arrived[2]), None

    def add_up(state: tuple[Any, Array], arrived: tuple[Array, Keys, Array]) -> tuple[tuple[Any, Array], None]:
        shard, rows = checked(state[0], *arrived[:2])
        return (shard, state[1].at[rows].add(arrived[2], mode="drop")), None

    send = functools.partial(
        ask,
        wanted,
        (trip.rows, Keys(wanted.lanes[0], wanted.lanes[1], trip.rows != NO_ROW), gradients),
        capacity=_capacity(capacity, wanted, table.context.num_devices),
        axis_name=table.context.axis,
    )
    if not isinstance(optimizer, Adam):
        return send(answer=step_rows, state=shard)[0]
    # A rule that moves all rows must run once, not once a round: first everything is brought together.
    shard, sums = send(answer=add_up, state=(shard, jnp.zeros(shard.rows.shape, jnp.float32)))[0]
    return stepped(shard, jnp.arange(sums.shape[0], dtype=jnp.int32), sums)


def _segments(wanted: Wanted, features: Sequence[KeyBags], combiners: Sequence[Combiner]) -> list[Segment]:
    """The features' keys as places in the list of distinct ones."""
    segments, first = [], 0
    for feature, combiner in zip(features, combiners, strict=True):
        num_bags, width = feature.keys.is_key.shape
        weights = None if feature.weights is None else feature.weights.reshape(-1)
        offsets = None if combiner == "none" else jnp.arange(num_bags + 1, dtype=jnp.int32) * width
        entries = wanted.entry_of[first : first + num_bags * width]
        segments.append(Segment(entries, offsets, weights, combiner))
        first += num_bags * width
    return segments


def _capacity(capacity: int | None, wanted: Wanted, num_devices: int) -> int:
    return default_capacity(wanted.entry_of.shape[0], num_devices) if capacity is None else capacity
