"""Rows by key on one device: what is kept, what a row starts from, one optimizer step of some of them.

All functions are pure and run inside `jit` and `shard_map`; with the state donated, its rows stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rsembed.initial_values import keyed_rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, KeyOrKeys, Step
from rsembed.kernels.keyed import mix
from rsembed.keys import Keys
from rsembed.optimizers.base import Slots
from rsembed.specs import TableSpec
from rsembed.storage import row_map
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import RowMap

MAX_CAPACITY = 2**29
# New rows are made in blocks of one size, whatever the batch: the work follows their number, and the same program
# makes every row, so that its bits cannot depend on its company.
INITIAL_BLOCK = 1024


class Counters(NamedTuple):
    """Keys of each table since it was made; a key counts once for every batch that it occurs in.

    Numbers of 64 bits, as a high and a low lane; without hash table there are none.

    Attributes:
      inserted: keys that got a row.
      evicted: keys that lost theirs, to others or by their age.
      failed: keys of training that found no room, in the table or among those that wait for admission.
      not_admitted: keys of training that had not occurred often enough.
      forgotten: keys whose occurrences are no longer counted, to make room for others or by their age.
    """

    inserted: UInt32[Array, "tables 2"] | None = None
    evicted: UInt32[Array, "tables 2"] | None = None
    failed: UInt32[Array, "tables 2"] | None = None
    not_admitted: UInt32[Array, "tables 2"] | None = None
    forgotten: UInt32[Array, "tables 2"] | None = None

    def add(self, **numbers: Array) -> Counters:
        """Counters with some of them raised, by less than 2**32, one number for each table."""
        raised = {}
        for name, number in numbers.items():
            lanes, more = getattr(self, name), number.reshape(-1).astype(jnp.uint32)
            low = lanes[:, 1] + more
            raised[name] = jnp.stack([lanes[:, 0] + (low < more).astype(jnp.uint32), low], axis=1)
        return self._replace(**raised)


class DynamicTable(NamedTuple):
    """Rows of one device; all leaves have a leading axis, along which the shards of a table lie side by side.

    Where several tables share a storage, they lie one behind the other in every leaf of a shard, as `unstack` and
    `stack` say.

    Attributes:
      keys: a `RowMap`, which key has which row; None without hash table.
      rows: the vectors. Optimizer state of every row stands beside, in slots.
      waiting: a `RowMap` of keys that wait for admission, which counts them; None if every key is admitted at once.
      counters: what happened so far.
      key: PRNG key of each table.
      generation: how often rows were exchanged with the host, from a random number on; None where none are there.
      bond: signature of `keys`, byte by byte as floats; None where rows have fixed keys. Programs average the floats of
        two states, rows among them, and take the keys of one: then the bond is no longer that of the keys.
    """

    keys: PyTree
    rows: Float[Array, "rows dim"]
    waiting: PyTree
    counters: Counters
    key: KeyOrKeys
    generation: UInt32[Array, "1"] | None = None
    bond: Float[Array, "tables 4"] | None = None

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return self.key.shape[0]

    @property
    def own_key(self) -> KeyOrKeys:
        """The key of the one table there is, or all keys."""
        return self.key[0] if self.key.shape[0] == 1 else self.key


def empty(
    table: TableSpec,
    capacities: Sequence[int],
    key: KeyOrKeys,
    *,
    num_waiting: Sequence[int] | None = None,
) -> tuple[DynamicTable, Slots]:
    """A shard without keys, and its slots.

    Args:
      table: whose rows these will be; of several tables, one that stands for all.
      capacities: how many of each.
      key: the table's, see `initial_values.table_key`, or one for each of several; the same in all shards.
      num_waiting: how many keys of each may wait for admission; None where every key is admitted at once.
    """
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):  # numbers, as keys once were
        key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(key))
    rows, slots = allocate(table, max(capacities) * len(capacities), fill=0)
    keys, waiting = (
        row_map.empty(*capacities),
        None if num_waiting is None else row_map.empty(*num_waiting),
    )
    counters = Counters(*(jnp.zeros((len(capacities), 2), jnp.uint32) for _ in Counters._fields))
    return DynamicTable(keys, rows, waiting, counters, key.reshape(-1), bond=bond_of(keys)), slots


MOST_ROUNDING = 0.25
"""Largest error of a bond that comes from rounding, where equal bonds were averaged."""


def bond_of(keys: RowMap) -> PyTree:
    """The signature of each table, byte by byte as floats."""
    signature: PyTree = keys.signature
    xp: Any = np if isinstance(signature, np.ndarray) else jnp
    parts = [(signature >> np.uint32(shift)) & np.uint32(255) for shift in (0, 8, 16, 24)]
    return xp.stack(parts, axis=1).astype(np.float32)


def with_keys(params: DynamicTable, keys: RowMap) -> DynamicTable:
    """The shard with other keys, in which the rows are theirs."""
    bond = None if params.bond is None else bond_of(keys)
    return params._replace(keys=keys, bond=bond)


def is_bound(params: DynamicTable) -> PyTree:
    """Whether the rows belong to the keys: False in an average of states whose keys have different rows."""
    if params.bond is None:
        return np.bool_(True)
    return (abs(params.bond - bond_of(params.keys)) < MOST_ROUNDING).all()


def unstack(tree: PyTree, num_tables: int, num_shards: int) -> list[PyTree]:
    """Arrays of all shards, on the host, as those of each table."""
    tree = jax.tree.map(
        lambda leaf: on_host(leaf).reshape(num_shards, num_tables, -1, *leaf.shape[1:]), tree
    )
    return [
        jax.tree.map(lambda leaf, number=number: leaf[:, number].reshape(-1, *leaf.shape[3:]), tree)
        for number in range(num_tables)
    ]


def stack(trees: Sequence[PyTree], num_shards: int) -> PyTree:
    """The inverse of `unstack`."""

    def joined(*leaves: PyTree) -> np.ndarray:
        stacked = np.concatenate(
            [leaf.reshape(num_shards, -1, *leaf.shape[1:]) for leaf in leaves], axis=1
        )
        return stacked.reshape(-1, *stacked.shape[2:])

    return jax.tree.map(joined, *trees)


def allocate(table: TableSpec, capacity: int, *, fill: int | None) -> tuple[Array, Slots]:
    """Rows and slots, all of them `fill`, or unspecified where they will be overwritten.

    Raises: ValueError: those are more than a shard can have.
    """
    if capacity > MAX_CAPACITY:
        raise ValueError(
            f"table {table.name!r}: at most {MAX_CAPACITY} rows per shard are possible; use more shards."
        )
    slots = jax.eval_shape(
        table.optimizer.init_slots, jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
    )
    rows = api.allocate((capacity, table.embedding_dim), jnp.dtype(table.dtype), fill)
    return rows, tuple(
        api.allocate((capacity, *slot.shape[1:]), slot.dtype, fill) for slot in slots
    )


def with_initial_values(
    arrays: tuple[Array, ...],
    rows: Int[Array, " nnz"],
    keys: Keys,
    table: TableSpec,
    key: KeyOrKeys,
    *,
    slots: bool = True,
) -> tuple[Array, ...]:
    """The arrays with the initial values (and slots) of `keys` in `rows`."""
    if not rows.shape[0]:
        return arrays
    num_blocks = -(-rows.shape[0] // INITIAL_BLOCK)
    order, num_new = api.compact(rows != NO_ROW, num_blocks * INITIAL_BLOCK)
    num_used = jax.lax.div(num_new + jnp.int32(INITIAL_BLOCK - 1), jnp.int32(INITIAL_BLOCK))

    def fill_block(i: Array | int, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        entries = jax.lax.dynamic_slice_in_dim(order, i * INITIAL_BLOCK, INITIAL_BLOCK)
        own, *lanes = api.gather_rows((rows, *keys.lanes), entries, missing=NO_ROW)
        lane = Keys.of_lanes(lanes, entries != NO_ROW)
        values = keyed_rows(
            key, table.initializer, (lane.high, lane.low), table.embedding_dim, lane.table
        )
        parts = (values, *(table.optimizer.init_slots(values) if slots else ()))
        return api.scatter_rows(arrays, own, parts)

    if num_blocks == 1:
        return fill_block(0, arrays)
    return jax.lax.fori_loop(0, num_used, fill_block, arrays)


def rounding_by_key(params: DynamicTable, step: Step) -> Step:
    """A step whose 16-bit rows are rounded with noise that belongs to the key, whichever row it has."""
    if step.rounding is None:
        return step
    rounding = step.rounding

    def by_key(values: Array, dtype: DTypeLike, rows: Array) -> Array:
        lanes = (
            lane.at[rows].get(mode="fill", fill_value=0)
            for lane in (params.keys.high, params.keys.low)
        )
        numbers, table = mix(*lanes).astype(jnp.int32), row_map.table_of(params.keys, rows)
        return (
            rounding(values, dtype, numbers)
            if table is None
            else rounding(values, dtype, numbers, table=table)
        )

    return dataclasses.replace(step, rounding=by_key)


def forget_older(
    params: DynamicTable,
    step: Int[Array, ""],
    steps_to_live: Int[Array, ""],
    number: Int[Array, ""],
) -> DynamicTable:
    """The shard without keys of the table of this number that wait for admission and have not occurred for long.

    That is for more than `steps_to_live` steps.
    """
    if (waiting := params.waiting) is None:
        return params
    rows = jnp.arange(waiting.last_step.shape[0], dtype=jnp.int32)
    is_old = (waiting.last_step != row_map.FREE) & (step - waiting.last_step > steps_to_live)
    is_old &= rows // waiting.rows_per_table == number
    left = row_map.release(waiting, jnp.where(is_old, rows, NO_ROW))
    return params._replace(
        waiting=left, counters=params.counters.add(forgotten=left.num_free - waiting.num_free)
    )


def grow(
    params: DynamicTable, slots: Slots, table: TableSpec, capacity: int, num_waiting: int = 0
) -> tuple[DynamicTable, Slots]:
    """The shard with room for `capacity` rows; every key keeps its row. Programs are compiled anew for the new shape.

    At least `num_waiting` keys can wait for admission then, where they have to.

    Raises: ValueError: that is less than the shard has.
    """
    old = params.rows.shape[0]
    if not old <= capacity <= MAX_CAPACITY:
        raise ValueError(
            f"table {table.name!r} has {old} rows and cannot grow to {capacity} (at most {MAX_CAPACITY})."
        )
    rows, slots = jax.tree.map(
        lambda fresh, array: jax.lax.dynamic_update_slice_in_dim(fresh, array, 0, 0),
        allocate(table, capacity, fill=0),
        (params.rows, tuple(slots)),
    )
    waiting = params.waiting
    if waiting is not None and waiting.last_step.shape[0] < num_waiting:
        waiting = row_map.grow(waiting, num_waiting)
    grown = with_keys(params, row_map.grow(params.keys, capacity))
    return grown._replace(rows=rows, waiting=waiting), slots


def numbers_of(lanes: Array) -> np.ndarray:
    """A counter of each shard, int64, on the host."""
    high, low = on_host(lanes).astype(np.int64).T
    return (high << 32) + low
