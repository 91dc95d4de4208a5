"""Tables over the devices of a mesh: the row of key `k` lies on device `k % n`, whatever else changes.

What a device does is the engine of the core (`collection/rows.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.devices import Devices
from rsembed.collection.evicting import Evictor
from rsembed.collection.rows import Rows, asks_nobody
from rsembed.fingerprint import Fingerprint
from rsembed.homes import Hashed
from rsembed.initial_values import SameRows, keyed_form
from rsembed.kernels.contract import Step
from rsembed.parallel import Asking, together
from rsembed.sok.initialize import Context
from rsembed.sok.row_numbers import RowNumbers
from rsembed.specs import TableSpec


class TableState(NamedTuple):
    """Everything that training changes in one table.

    Attributes:
      shards: the rows; the shares of the devices lie side by side along the leading axis.
      slots: their optimizer state.
      step: updates so far.
      layout: `ShardedTable.layout` of the table that it belongs to; None inside programs that tables share.
    """

    shards: Any
    slots: Any
    step: Int[Array, ""]
    layout: Fingerprint


@dataclasses.dataclass(frozen=True)
class ShardedTable:
    """What a table over a mesh is; its arrays are in a `TableState`.

    Attributes:
      spec: the table of the core, kept as `Hashed`, or as `RowNumbers` where key `k` has row `k // n` of its device.
      context: the devices.
      exchange_capacity: places per block of the exchange, see `parallel.rounds.ask`; None means `default_capacity`.
      grows: whether it is made larger before new keys find it full.
      steps_to_live: after how many steps without use a key is old; None means never.
      l2_weight_threshold: of which half of a squared L2 norm a row is too small; None means of none.
    """

    spec: TableSpec
    context: Context
    exchange_capacity: int | None = None
    grows: bool = False
    steps_to_live: int | None = None
    l2_weight_threshold: float | None = None

    @property
    def home(self) -> Hashed | RowNumbers:
        """What keeps the rows of a device."""
        return cast(Hashed | RowNumbers, self.spec.storage)

    @property
    def use_hashtable(self) -> bool:
        """Whether keys get rows when they are first trained."""
        return isinstance(self.home, Hashed)

    @functools.cached_property
    def engine(self) -> Rows:
        """What a device does."""
        devices = Devices(self.context.mesh, (self.context.axis,))
        if devices.num_devices > 1:
            return AskedRows(devices, self.spec, self.home, capacity=self.exchange_capacity)
        return Rows(devices, self.spec, self.home)

    @functools.cached_property
    def model(self) -> ShardedTable:
        """What compiled steps know of the table, equal for tables that are alike: neither its name nor its layout."""
        form = keyed_form(self.spec.initializer, self.spec.embedding_dim)
        spec = dataclasses.replace(self.spec, name="any", initializer=SameRows(form, self.spec.initializer))
        return dataclasses.replace(self, spec=spec)

    @functools.cached_property
    def evictor(self) -> Evictor:
        """What takes rows out of a hash table between two steps."""
        return Evictor(self.engine, partition=self.engine.devices.split)

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: PRNGKeyArray) -> TableState:
        """An empty table, or a full one without hash table."""
        shards, slots = self.context.on_each(self.engine.init, P())(key)
        return TableState(shards, slots, jnp.zeros((), jnp.int32), self.layout)

    @functools.cached_property
    def layout(self) -> Fingerprint:
        """What a state means: it makes sense with an equal table only. Room for rows shows in the arrays."""
        spec = self.spec
        facts = {
            "name": spec.name,
            "embedding_dim": spec.embedding_dim,
            "dtype": spec.dtype,
            "key_dtype": self.home.key_dtype,
            "rule": spec.optimizer.identity,
            "use_hashtable": self.use_hashtable,
            "devices": self.context.num_devices,
        }
        return Fingerprint.of(facts)

    def step_of(self, state: TableState) -> Step:
        """The optimizer step that a state is before."""
        rule = self.spec.optimizer
        return Step(rule.get_hyperparameters(state.step), rule, None, state.step)

    def on_shards(self, function: Callable[[TableState], tuple[Any, Any]], state: TableState) -> TableState:
        """The state after `function` gave shards and slots of every device anew."""

        @asks_nobody
        def on_device(table: ShardedTable, own: TableState) -> tuple[Any, Any]:
            return function(own)

        ((shards, slots),) = on_devices(on_device, [self], [state])
        return state._replace(shards=shards, slots=slots)


def on_devices(
    function: Callable[..., Asking[Any]],
    tables: Sequence[ShardedTable],
    states: Sequence[TableState],
    *args: Iterable[Any],
) -> list[Any]:
    """`function` of each table, and of what a device has of its state and arguments; one program on every device.

    Questions of all tables travel together.

    Raises: ValueError: no table is given, or they lie on different devices.
    """
    meshes = {(table.context.mesh, table.context.axis) for table in tables}
    if len(meshes) != 1:
        raise ValueError(f"a group needs tables over the same devices, got {len(meshes)} different meshes.")
    context = tables[0].context

    def on_device(*own: Any) -> list[Any]:
        return together([function(*of_table) for of_table in zip(tables, *own, strict=True)], context.axis)

    part = P(context.axis)
    in_specs = ([TableState(part, part, cast(Any, P()), state.layout) for state in states], *[part] * len(args))
    results: list[Any] = context.on_each(on_device, in_specs)(list(states), *map(list, args))
    return results
