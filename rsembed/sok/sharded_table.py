"""Tables over the devices of a mesh: the row of key `k` lies on device `k % n`, whatever else changes.

What a device does is the engine of the core (`collection/stored_table.py`). Here are the published ways to call it:
tables of several variables in one program, keys that get rows in the lookup, and a backward pass that trains them.
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

from rsembed.collection.devices import Devices
from rsembed.collection.stored_table import Occurrences, StoredTable, Trip
from rsembed.fingerprint import Fingerprint
from rsembed.homes import Hashed
from rsembed.homes.hashed_rows import Counters, DynamicTable, DynamicTableSpec
from rsembed.kernels.contract import Segment, Step
from rsembed.keys import Keys, num_invalid
from rsembed.optimizers import Slots
from rsembed.sok.initialize import Context
from rsembed.sok.static_table import Direct
from rsembed.specs import MAX_ROWS, Combiner, TableSpec


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

    @functools.cached_property
    def engine(self) -> StoredTable:
        """What a device does."""
        spec, num_devices = self.spec, self.context.num_devices
        policies = ("eviction", "admission_count", "admission_capacity", "key_dtype")
        storage = Hashed(
            # Growing is the caller's part: until then a table is full.
            when_full="error" if spec.when_full == "grow" else spec.when_full,
            **{name: getattr(spec, name) for name in policies},
        )
        table = TableSpec(
            name=spec.name,
            vocabulary_size=min(spec.capacity * num_devices, MAX_ROWS),
            embedding_dim=spec.embedding_dim,
            initializer=spec.initializer,
            optimizer=spec.optimizer,
            dtype=spec.dtype,
            storage=storage if self.use_hashtable else Direct(spec, num_devices),
        )
        devices = Devices(self.context.mesh, (self.context.axis,))
        return StoredTable(devices, table, is_split=num_devices > 1, capacity=self.exchange_capacity)

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: PRNGKeyArray) -> TableState:
        """An empty table, or a full one without hash table."""

        def on_device(key: PRNGKeyArray) -> DynamicTable:
            params, slots = self.engine.init(key)
            shard: DynamicTable = params._replace(slots=slots)
            return shard

        return TableState(self.context.on_each(on_device, P())(key), jnp.zeros((), jnp.int32), self.layout)

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


Outputs = tuple[Float[Array, "_ _"], ...]
"""Of each feature `[bags, dim]`, or `[bags * width, dim]` for combiner "none"."""


def look_up(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[TableState, Outputs, Trip]]:
    """Pooled rows of every feature of every table, for training: new keys get rows.

    Args:
      tables: what the states belong to; all over the same devices.
      states: see `ShardedTable.init`.
      batch: keys of every feature of every table.

    Returns: for each table its new state, its outputs, and its trip.
    """
    results = _on_devices(_look_up, tables, states, batch)
    return [(state._replace(shards=shard), *rest) for state, (shard, *rest) in zip(states, results, strict=True)]


def evaluate(
    tables: Sequence[ShardedTable], states: Sequence[TableState], batch: Sequence[Sequence[KeyBags]]
) -> list[tuple[Counters, Outputs]]:
    """A lookup that changes nothing but counters, which it returns."""
    return _on_devices(_evaluate, tables, states, batch)


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


def _look_up(table: ShardedTable, state: TableState, features: Sequence[KeyBags]) -> tuple[DynamicTable, Outputs, Trip]:
    batch, shard = _occurrences(features), _with_invalid(table, state.shards, features)
    params, slots, outputs, trip = table.engine.admit(*_parted(shard), batch, _how(table, state))
    return params._replace(slots=slots), tuple(outputs), trip


def _evaluate(table: ShardedTable, state: TableState, features: Sequence[KeyBags]) -> tuple[Counters, Outputs]:
    outputs, num_unknown, _ = table.engine.look_up(state.shards, _occurrences(features), train=False)
    counters = _with_invalid(table, state.shards, features).counters
    return counters.add(unknown=num_unknown), tuple(outputs)


def _step(table: ShardedTable, state: TableState, trip: Trip, d_outputs: Sequence[Array]) -> DynamicTable:
    params, slots = table.engine.step_found(*_parted(state.shards), trip, d_outputs, _how(table, state))
    shard: DynamicTable = params._replace(slots=slots)
    return shard


def _how(table: ShardedTable, state: TableState) -> Step:
    rule = table.spec.optimizer
    return Step(rule.get_hyperparameters(state.step), rule, None, state.step)


def _parted(shard: DynamicTable) -> tuple[DynamicTable, Slots]:
    return shard._replace(slots=()), shard.slots


def _with_invalid(table: ShardedTable, shard: DynamicTable, features: Sequence[KeyBags]) -> DynamicTable:
    """The shard after counting what was no key although it looks like one."""
    number = sum((num_invalid(feature.keys) for feature in features), start=jnp.zeros((), jnp.int32))
    return shard._replace(counters=shard.counters.add(**{"invalid" if table.use_hashtable else "unknown": number}))


def _occurrences(features: Sequence[KeyBags]) -> Occurrences:
    found = []
    for feature in features:
        num_bags, width = feature.keys.shape
        weights = None if feature.weights is None else feature.weights.reshape(-1)
        offsets = None if feature.combiner == "none" else jnp.arange(num_bags + 1, dtype=jnp.int32) * width
        keys = feature.keys.reshape(-1)
        found.append((keys, Segment(keys.low.astype(jnp.int32), offsets, weights, feature.combiner)))
    return Occurrences.of(found)
