"""Arrays of a keyed table on one device, their counters, initial values, rounding and growth.

Most functions in this file are pure and run inside `jit` and `shard_map`. A program that donates a
state updates the rows of the state in place. `unstack`, `stack` and `numbers_of` run on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

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
# New rows are initialised in blocks of `INITIAL_BLOCK` rows, so the work is proportional to the
# number of new keys, not to the size of the batch. All blocks have one shape, so the initial bits
# of a row do not depend on the number of new rows.
INITIAL_BLOCK = 1024


class Counters(NamedTuple):
    """Numbers of keys that were inserted, evicted and so on, since the table was created.

    A counter grows by at most one for each distinct key of a batch. Each counter is a 64-bit number
    in two 32-bit words (lanes), high and low. In a table without a hash table, all counters are
    None.

    Attributes:
      inserted: number of keys that got a row.
      evicted: number of keys that lost their row to another key, or by a call of `evict`.
      failed: number of new keys in training that got no row because all rows were in use, or that
        could not wait for admission because the map of waiting keys was full.
      not_admitted: number of new keys in training that were not admitted.
      forgotten: number of keys that waited for admission and were removed, to make room for a new
        key or because of their age.
    """

    inserted: UInt32[Array, "tables 2"] | None = None
    evicted: UInt32[Array, "tables 2"] | None = None
    failed: UInt32[Array, "tables 2"] | None = None
    not_admitted: UInt32[Array, "tables 2"] | None = None
    forgotten: UInt32[Array, "tables 2"] | None = None

    def add(self, **numbers: Array) -> Counters:
        """Copy of the counters, with `numbers` added to the counters of the same names.

        Args:
          **numbers: by counter name, an array with the addend for each table, below 2**32.
        """
        sums = {}
        for name, number in numbers.items():
            sums[name] = increased(getattr(self, name), number)
        return self._replace(**sums)


class DynamicTable(NamedTuple):
    """Rows of one shard of a table, or of several tables that share a storage.

    If several tables share a storage, every leaf is a concatenation of the tables. `unstack` cuts a
    `DynamicTable` into single tables, and `stack` joins single tables. Outside `shard_map`, every
    leaf of a `DynamicTable` is a concatenation of all shards.

    Attributes:
      keys: `RowMap` from keys to rows. None if the table has no hash table.
      rows: vector of each row. The slots (optimizer state) of the rows are in separate arrays.
      waiting: `RowMap` with the keys that wait for admission. None if new keys never wait.
      counters: numbers of keys that were inserted, evicted and so on.
      key: PRNG key of each table.
      generation: version of the state, see `Generation`. None if the table has no rows on the host.
      bond: copy of the integer `keys.signature` as four floats, one for each byte. `is_bound`
        compares `bond` with `keys.signature`, to detect an average of two states with different
        keys. If a program averages the float arrays of two states, but takes the integer arrays of
        one state, `bond` differs from `keys.signature`. None in tables without a hash table, and in
        `HostCached`.
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
        """Number of tables."""
        return self.key.shape[0]

    @property
    def own_key(self) -> KeyOrKeys:
        """PRNG key of the table, or an array of PRNG keys if there are several tables."""
        if self.num_tables == 1:
            return self.key[0]
        return self.key


def empty(
    table: TableSpec,
    capacities: Sequence[int],
    key: KeyOrKeys,
    *,
    num_waiting: Sequence[int] | None = None,
) -> tuple[DynamicTable, Slots]:
    """Arrays and slots of a new shard, in which no key has a row yet.

    Args:
      table: spec of the table, or of any of the tables that share the storage.
      capacities: number of rows of each table.
      key: PRNG key of the table, see `initial_values.table_key`, or one PRNG key for each table
        that shares the storage. Pass the same PRNG keys for all shards.
      num_waiting: for each table, the maximum number of keys that wait for admission. None, the
        default: keys do not wait for admission.
    """
    # A raw PRNG key (an array of uint32) becomes a typed PRNG key.
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(key))
    num_tables = len(capacities)
    num_rows = max(capacities) * num_tables
    rows, slots = allocate(table, num_rows, fill=0)
    keys = row_map.empty(*capacities)
    waiting = None
    if num_waiting is not None:
        waiting = row_map.empty(*num_waiting)
    counters = {}
    for name in Counters._fields:
        counters[name] = jnp.zeros((num_tables, 2), jnp.uint32)
    params = DynamicTable(
        keys=keys,
        rows=rows,
        waiting=waiting,
        counters=Counters(**counters),
        key=key.reshape(-1),
        bond=bond_of(keys.signature),
    )
    return params, slots


MOST_ROUNDING = 0.25
"""Upper limit of the differences between `bond` and the signature that `is_bound` accepts.

If a program averages states with equal keys, rounding may change the average of their `bond`."""


def bond_of(signature: PyTree) -> PyTree:
    """Value of `DynamicTable.bond`: the signature of a map as four floats, one for each byte."""
    shifts = np.arange(0, 32, 8, dtype=np.uint32)
    signature_bytes = (signature[:, None] >> shifts[None]) & np.uint32(255)
    return signature_bytes.astype(np.float32)


def with_keys(params: DynamicTable, keys: RowMap) -> DynamicTable:
    """Copy of a shard with the row map `keys`, and with its `bond`."""
    return params._replace(keys=keys, bond=bond_of(keys.signature))


def is_bound(bond: PyTree, signature: PyTree) -> PyTree:
    """Whether the rows and the keys of a shard come from the same state.

    False if the state is an average of states with different keys.

    Args:
      bond: see `DynamicTable.bond`.
      signature: signature of the shard's map from keys to rows.
    """
    difference = bond - bond_of(signature)
    is_close = abs(difference) < MOST_ROUNDING
    return is_close.all()


def unstack(tree: PyTree, num_tables: int, num_shards: int) -> list[PyTree]:
    """Cuts arrays of several tables into the arrays of each table, in host memory.

    Args:
      tree: arrays of all shards, shard after shard. Within each shard, the arrays of the tables are
        concatenated.
      num_tables: number of tables in each shard.
      num_shards: number of shards.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves_of_tables: list[list[np.ndarray]] = [[] for _ in range(num_tables)]
    for leaf in leaves:
        row_shape = leaf.shape[1:]
        by_table = on_host(leaf).reshape(num_shards, num_tables, -1, *row_shape)
        for number, leaves_of_table in enumerate(leaves_of_tables):
            leaves_of_table.append(by_table[:, number].reshape(-1, *row_shape))
    trees = []
    for leaves_of_table in leaves_of_tables:
        trees.append(jax.tree.unflatten(structure, leaves_of_table))
    return trees


def stack(trees: Sequence[PyTree], num_shards: int) -> PyTree:
    """Joins the arrays of single tables into arrays of all tables, as the inverse of `unstack`.

    Args:
      trees: for each table, its arrays of all shards, in host memory.
      num_shards: number of shards.
    """

    def stacked(*leaves: PyTree) -> np.ndarray:
        by_shard = []
        for leaf in leaves:
            by_shard.append(np.asarray(leaf).reshape(num_shards, -1, *leaf.shape[1:]))
        joined = np.concatenate(by_shard, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    return jax.tree.map(stacked, *trees)


def allocate(table: TableSpec, capacity: int, *, fill: int | None) -> tuple[Array, Slots]:
    """Allocates the rows and slots of a shard.

    Args:
      table: spec of the table.
      capacity: number of rows.
      fill: initial value of all numbers in the arrays. None: the values are undefined, and the
        caller must write them.

    Raises: ValueError: `capacity` is above `MAX_CAPACITY`.
    """
    if capacity > MAX_CAPACITY:
        raise ValueError(
            f"table {table.name!r}: at most {MAX_CAPACITY} rows per shard are possible; use more shards."
        )
    shape = (capacity, table.embedding_dim)
    rows = api.allocate(shape, jnp.dtype(table.dtype), fill)
    float_rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    slots = []
    for slot in jax.eval_shape(table.optimizer.init_slots, float_rows):
        slots.append(api.allocate(slot.shape, slot.dtype, fill))
    return rows, tuple(slots)


def with_initial_values(
    arrays: tuple[Array, ...],
    rows: Int[Array, " nnz"],
    keys: Keys,
    table: TableSpec,
    key: KeyOrKeys,
    *,
    slots: bool = True,
) -> tuple[Array, ...]:
    """Writes the initial vectors and slots of new keys to their rows, and returns the new arrays.

    Args:
      arrays: array of vectors, followed by the arrays of the slots if `slots` is True.
      rows: row to write for each key. A key with row `NO_ROW` is skipped.
      keys: new keys. Entries with row `NO_ROW` may be padding instead of keys.
      table: spec of the table.
      key: PRNG key of the table, or one PRNG key for each table that shares the storage.
      slots: whether `arrays` contains the slots, True by default.
    """
    if not rows.shape[0]:
        return arrays
    num_blocks = -(-rows.shape[0] // INITIAL_BLOCK)
    order, num_new = api.compact(rows != NO_ROW, num_blocks * INITIAL_BLOCK)
    num_new_and_padding = num_new + jnp.int32(INITIAL_BLOCK - 1)
    num_used = jax.lax.div(num_new_and_padding, jnp.int32(INITIAL_BLOCK))

    def fill_block(number: Array | int, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        first = number * INITIAL_BLOCK
        entries = jax.lax.dynamic_slice_in_dim(order, first, INITIAL_BLOCK)
        block_rows, *lanes = api.gather_rows((rows, *keys.lanes), entries, missing=NO_ROW)
        new = Keys.of_lanes(lanes, entries != NO_ROW)
        values = keyed_rows(
            key,
            table.initializer,
            (new.high, new.low),
            table.embedding_dim,
            new.table,
        )
        initial = [values]
        if slots:
            initial += table.optimizer.init_slots(values)
        return api.scatter_rows(arrays, block_rows, tuple(initial))

    if num_blocks == 1:
        return fill_block(0, arrays)
    return jax.lax.fori_loop(0, num_used, fill_block, arrays)


def rounding_by_key(params: DynamicTable, step: Step) -> Step:
    """Copy of `step` with rounding noise that depends on the keys of rows, not on row numbers."""
    if step.rounding is None:
        return step
    rounding = step.rounding

    def by_key(values: Array, dtype: DTypeLike, rows: Array) -> Array:
        high = params.keys.high.at[rows].get(mode="fill", fill_value=0)
        low = params.keys.low.at[rows].get(mode="fill", fill_value=0)
        numbers = mix(high, low).astype(jnp.int32)
        table = row_map.table_of(params.keys, rows)
        if table is None:
            return rounding(values, dtype, numbers)
        return rounding(values, dtype, numbers, table=table)

    return dataclasses.replace(step, rounding=by_key)


def forget_older(
    params: DynamicTable,
    step: Int[Array, ""],
    steps_to_live: Int[Array, ""],
    number: Int[Array, ""],
) -> DynamicTable:
    """Removes old keys of one table from `params.waiting`, and returns the changed `params`.

    Args:
      params: arrays of the shard.
      step: index of the current step.
      steps_to_live: number of steps. A waiting key is removed if its last occurrence was more than
        `steps_to_live` steps before `step`.
      number: index of the table.
    """
    waiting = params.waiting
    if waiting is None:
        return params
    rows = jnp.arange(waiting.last_step.shape[0], dtype=jnp.int32)
    has_key = waiting.last_step != row_map.FREE
    is_old = has_key & (step - waiting.last_step > steps_to_live)
    is_old &= rows // waiting.rows_per_table == number
    old_rows = jnp.where(is_old, rows, NO_ROW)
    shorter = row_map.release(waiting, old_rows)
    num_forgotten = shorter.num_free - waiting.num_free
    counters = params.counters.add(forgotten=num_forgotten)
    return params._replace(waiting=shorter, counters=counters)


def grow(
    params: DynamicTable,
    slots: Slots,
    table: TableSpec,
    capacity: int,
    num_waiting: int = 0,
) -> tuple[DynamicTable, Slots]:
    """Enlarges a shard and its slots to `capacity` rows, without changing the row of any key.

    After `grow`, programs that use the shard are compiled again for the new shapes of its arrays.

    Args:
      params: arrays of the shard.
      slots: slots of the shard.
      table: spec of the table.
      capacity: number of rows of the enlarged shard, more than the present number of rows.
      num_waiting: minimum number of rows in the map of keys that wait for admission. A map with
        fewer rows is enlarged. 0, the default: the map is not enlarged.

    Raises: ValueError: `capacity` is above `MAX_CAPACITY`.
    """

    def copied(larger: Array, array: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(larger, array, 0, axis=0)

    rows, slots = jax.tree.map(
        copied,
        allocate(table, capacity, fill=0),
        (params.rows, tuple(slots)),
    )
    waiting = params.waiting
    if waiting is not None and waiting.last_step.shape[0] < num_waiting:
        waiting = row_map.grow(waiting, num_waiting)
    keys = row_map.grow(params.keys, capacity)
    grown = with_keys(params, keys)
    grown = grown._replace(rows=rows, waiting=waiting)
    return grown, slots


def increased(lanes: UInt32[Array, "counters 2"], addends: Array) -> UInt32[Array, "counters 2"]:
    """64-bit counters after `addends` were added, one number below 2**32 for each counter."""
    addends = addends.reshape(-1).astype(jnp.uint32)
    low = lanes[:, 1] + addends
    carry = (low < addends).astype(jnp.uint32)
    high = lanes[:, 0] + carry
    return jnp.stack([high, low], axis=1)


def numbers_of(lanes: Array) -> np.ndarray:
    """Values of a counter as int64 in host memory, one for each table of each shard."""
    high, low = on_host(lanes).astype(np.int64).T
    return (high << 32) + low
