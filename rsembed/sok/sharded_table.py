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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.fingerprint import Fingerprint
from rsembed.homes import hashed_rows
from rsembed.homes.hashed_rows import Counters, DynamicTable, DynamicTableSpec
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.keys import Keys, num_invalid, owners
from rsembed.parallel import Wanted, ask, default_capacity, distinct
from rsembed.sok import static_table
from rsembed.sok.initialize import Context
from rsembed.sok.optimizers import Adam
from rsembed.specs import Combiner


@dataclasses.dataclass(frozen=True)
class ShardedTable:
    """What a table over a mesh is; its arrays are in a `TableState`.

    Attributes:
      spec: the share of one device.
      context: the devices.
      use_hashtable: keys get rows when they are first trained; else key `k` has row `k // n` of its device.
      exchange_capacity: places per block of the exchange, see `parallel.rounds.ask`; None means `default_capacity`.
    """

    spec: DynamicTableSpec
    context: Context
    use_hashtable: bool = True
    exchange_capacity: int | None = None

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: PRNGKeyArray) -> TableState:
        """An empty table, or a full one without hash table."""
        context = self.context

        def on_device(key: PRNGKeyArray) -> DynamicTable:
            if self.use_hashtable:
                return hashed_rows.init(self.spec, key)
            return static_table.init(self.spec, key, jax.lax.axis_index(context.axis), context.num_devices)

        return TableState(context.on_each(on_device, P())(key), jnp.zeros((), jnp.int32), self.layout)

    @functools.cached_property
    def layout(self) -> Fingerprint:
        """What a state means: it makes sense with an equal table only. Room for rows shows in the arrays."""
        spec = self.spec
        facts = {
            "name": spec.name,
            "embedding_dim": spec.embedding_dim,
            "dtype": spec.dtype,
            "key_dtype": spec.key_dtype,
            "rule": spec.optimizer.identity,
            "use_hashtable": self.use_hashtable,
            "devices": self.context.num_devices,
        }
        return Fingerprint.of(facts)

    def on_shards(self, function: Callable[[Any, Array], Any], state: TableState) -> TableState:
        """The state after `(shard, step) -> shard` on every device."""
        (shards,) = _on_devices(lambda table, own: function(own.shards, own.step), [self], [state])
        return state._replace(shards=shards)


class TableState(NamedTuple):
    """Everything that training changes in one table.

    Attributes:
      shards: `DynamicTable`; the shares of the devices lie side by side along the leading axis.
      step: updates so far.
      layout: `ShardedTable.layout` of the table that it belongs to.
    """

    shards: Any
    step: Int[Array, ""]
    layout: Fingerprint


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBags:
    """Keys of a feature, cut among devices by bag.

    Attributes:
      keys: lanes `[bags, width]`.
      weights: one per key; None means ones.
      combiner: of the keys of a bag.
    """

    keys: Keys
    weights: Float[Array, "bags width"] | None
    combiner: Combiner = dataclasses.field(metadata={"static": True})


class Trip(NamedTuple):
    """Where the keys of a lookup went: what its backward pass needs.

    Attributes:
      wanted: distinct keys of every device.
      rows: row of each at its owner, `NO_ROW` for a key without one.
      features: the batch.
    """

    wanted: Wanted
    rows: Int[Array, " nnz"]
    features: Sequence[KeyBags]


Outputs = tuple[Float[Array, "_ _"], ...]
"""Of each feature `[bags, dim]`, or `[bags * width, dim]` for combiner "none"."""


def look_up(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]], *, train: bool
) -> list[tuple[TableState, Outputs, Trip]]:
    """Pooled rows of every feature of every table.

    Args:
      tables: what the states belong to; all over the same devices.
      states: see `ShardedTable.init`; unchanged but for counters unless `train`.
      batch: keys of every feature of every table.
      train: new keys get rows.

    Returns: for each table its new state, its outputs, and its trip.
    """
    results = _on_devices(functools.partial(_look_up, train=train), tables, states, batch)
    return [(state._replace(shards=shard), *rest) for state, (shard, *rest) in zip(states, results, strict=True)]


def evaluate(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[Counters, Outputs, Trip]]:
    """A lookup that changes nothing: new counters instead of states."""
    results = look_up(tables, states, batch, train=False)
    return [(state.shards.counters, outputs, trip) for state, outputs, trip in results]


def update(
    tables: Sequence[ShardedTable],
    states: Sequence[TableState],
    trips: Sequence[Trip],
    d_outputs: Sequence[Sequence[Float[Array, "_ _"]]],
) -> list[TableState]:
    """One optimizer step of every row that a lookup read.

    Args:
      tables: as for `look_up`.
      states: as the lookup left them.
      trips: from the lookup.
      d_outputs: gradients of its outputs: of the mean over all samples if the loss is one.
    """
    shards = _on_devices(_step, tables, states, trips, d_outputs)
    return [state._replace(shards=shard, step=state.step + 1) for shard, state in zip(shards, states, strict=True)]


def _on_devices(
    function: Callable[..., Any], tables: Sequence[ShardedTable], states: Sequence[TableState], *args: Iterable[Any]
) -> list[Any]:
    """`function` of each table, and of what a device has of its state and arguments; one program on every device.

    Raises: ValueError: no table is given, or they lie on different devices.
    """
    meshes = {(table.context.mesh, table.context.axis) for table in tables}
    if len(meshes) != 1:
        raise ValueError(f"a group needs tables over the same devices, got {len(meshes)} different meshes.")
    context = tables[0].context

    def on_device(*own: Any) -> list[Any]:
        return [function(*of_table) for of_table in zip(tables, *own, strict=True)]

    part = P(context.axis)
    in_specs = ([TableState(part, cast(Any, P()), state.layout) for state in states], *[part] * len(args))
    results: list[Any] = context.on_each(on_device, in_specs)(list(states), *map(list, args))
    return results


def _look_up(
    table: ShardedTable, state: TableState, features: Sequence[KeyBags], *, train: bool
) -> tuple[DynamicTable, Outputs, Trip]:
    num_devices, shard, step = table.context.num_devices, state.shards, state.step
    keys = jax.tree.map(
        lambda *lanes: jnp.concatenate([lane.reshape(-1) for lane in lanes]), *[f.keys for f in features]
    )
    wanted = distinct(owners(keys, num_devices), (keys.high, keys.low), num_devices=num_devices)
    counter = "invalid" if table.use_hashtable else "unknown"
    shard = shard._replace(counters=shard.counters.add(**{counter: num_invalid(keys)}))
    exists = wanted.first_of != NO_ROW
    counts = jnp.zeros(keys.low.shape, jnp.int32).at[wanted.entry_of].add(1, mode="drop")

    def answer(shard: DynamicTable, arrived: tuple[Keys, Array, Array]) -> tuple[DynamicTable, Any]:
        asked, first_of, counts = arrived
        if table.use_hashtable:
            order = _in_order_of_occurrence(first_of, num_devices)
            asked, counts = jax.tree.map(lambda x: x[order], (asked, counts))
            shard, rows = hashed_rows.translate(table.spec, shard, asked, step, train=train, occurrences=counts)
            rows = jnp.zeros_like(rows).at[order].set(rows)
        else:
            shard, rows = static_table.translate(shard, asked, num_devices)
        return shard, (rows, hashed_rows.read(shard, rows))

    own_keys, exchange = Keys(wanted.lanes[0], wanted.lanes[1], exists), _exchange(table, wanted)
    if train and table.use_hashtable and table.spec.when_full == "evict":
        # What a later round asks for must not make room in an earlier one.
        shard, _, _ = exchange(own_keys, lambda shard, asked: (hashed_rows.hold(shard, asked, step), None), shard)
    shard, (rows, vectors), _ = exchange((own_keys, wanted.first_of, counts), answer, shard)
    outputs = api.lookup(vectors, _segments(wanted, features))
    return shard, outputs, Trip(wanted, jnp.where(exists, rows, NO_ROW), features)


def _in_order_of_occurrence(first_of: Array, num_devices: int) -> Int[Array, " nnz"]:
    """What puts arrived keys into the order in which the devices, one after the other, met them."""
    place = jnp.arange(first_of.shape[0], dtype=jnp.int32)
    device = place // max(first_of.shape[0] // num_devices, 1)
    order: Array = jax.lax.sort((device, first_of, place), num_keys=2, is_stable=True)[2]
    return order


def _step(table: ShardedTable, state: TableState, trip: Trip, d_outputs: Sequence[Array]) -> DynamicTable:
    spec, wanted, num_entries = table.spec, trip.wanted, trip.rows.shape[0]
    hyper = spec.optimizer.get_hyperparameters(state.step)
    entries, values = api.row_gradients(num_entries, _segments(wanted, trip.features), d_outputs)
    gradients = jnp.zeros((num_entries, spec.embedding_dim), jnp.float32).at[entries].set(values, mode="drop")

    def step_rows(shard: DynamicTable, arrived: tuple[Array, Keys, Array]) -> tuple[DynamicTable, None]:
        rows, keys, gradients = arrived
        shard, rows = hashed_rows.still_theirs(shard, rows, keys)
        return hashed_rows.step(spec, shard, rows, gradients, hyper), None

    def add_up(state: tuple[DynamicTable, Array], arrived: tuple[Array, Keys, Array]) -> tuple[Any, None]:
        (shard, sums), (rows, keys, gradients) = state, arrived
        shard, rows = hashed_rows.still_theirs(shard, rows, keys)
        return (shard, sums.at[rows].add(gradients, mode="drop")), None

    exchange, shard = _exchange(table, wanted), state.shards
    payload = (trip.rows, Keys(wanted.lanes[0], wanted.lanes[1], trip.rows != NO_ROW), gradients)
    if not isinstance(spec.optimizer, Adam):
        return exchange(payload, step_rows, shard)[0]
    # A rule that moves all rows must run once, not once a round: first everything is brought together.
    shard, sums = exchange(payload, add_up, (shard, jnp.zeros(shard.rows.shape, jnp.float32)))[0]
    return hashed_rows.step(spec, shard, jnp.arange(sums.shape[0], dtype=jnp.int32), sums, hyper)


def _exchange(table: ShardedTable, wanted: Wanted) -> Callable[..., Any]:
    """`ask` about these keys, as the table wants it."""
    context, capacity = table.context, table.exchange_capacity
    if capacity is None:
        capacity = default_capacity(wanted.entry_of.shape[0], context.num_devices)
    return functools.partial(ask, wanted, capacity=capacity, axis_name=context.axis)


def _segments(wanted: Wanted, features: Sequence[KeyBags]) -> list[Segment]:
    """The features' keys as places in the list of distinct ones."""
    segments, first = [], 0
    for feature in features:
        num_bags, width = feature.keys.shape
        weights = None if feature.weights is None else feature.weights.reshape(-1)
        offsets = None if feature.combiner == "none" else jnp.arange(num_bags + 1, dtype=jnp.int32) * width
        entries = wanted.entry_of[first : first + num_bags * width]
        segments.append(Segment(entries, offsets, weights, feature.combiner))
        first += num_bags * width
    return segments
