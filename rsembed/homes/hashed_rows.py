"""One shard of a table that grows as keys arrive: keys to rows, rows to vectors, one optimizer step per row.

```
translate   keys ──▶ rows     in training, new keys get rows, initial values and fresh optimizer state
read        rows ──▶ vectors
step        rows and gradients ──▶ the table
```

All functions are pure and run inside `jit` and `shard_map`; with the table donated, its rows stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from rsembed.homes import hash_table, row_map
from rsembed.homes.hash_table import compact, first_occurrences, mix
from rsembed.homes.home import on_host
from rsembed.homes.row_map import EVICTIONS, Eviction, RowMap
from rsembed.initial_values import table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.keys import KEY_DTYPES, Keys
from rsembed.optimizers import OptimizerSpec, SGDOptimizerSpec, Slots
from rsembed.specs import TABLE_DTYPES

WhenFull = Literal["error", "grow", "evict", "zero"]
WHEN_FULL: tuple[WhenFull, ...] = ("error", "grow", "evict", "zero")
MAX_CAPACITY = 2**29
# New rows are made in blocks of one size, whatever the batch: the work follows their number, and the same program
# makes every row, so that its bits cannot depend on its company.
INITIAL_BLOCK = 256


def uniform_initializer(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Uniform values in [-0.05, 0.05). Source: the default of `sok.DistributedEmbedding`."""
    return jax.random.uniform(key, shape, jnp.float32, -0.05, 0.05)


@no_type_check  # wrong values are refused by name in __post_init__
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTableSpec:
    """One table of key-value rows.

    Args:
      name: unique among the tables of a model; initial values depend on it.
      embedding_dim: columns.
      capacity: rows of one shard.
      optimizer: how touched rows are stepped; `sok.optimizers.Adam` moves all rows.
      initializer: called as `(key, (1, embedding_dim))` for every new key, with a PRNG key that depends on the model's
        PRNG key, the table's name and the key alone.
      dtype: `float32`, `bfloat16` or `float16`.
      key_dtype: what `export` returns keys as.
      when_full: what happens to a new key when all rows are taken. "error", "grow" and "zero" leave it without a row
        and count it in `failed`; it is the caller who raises, grows the table or carries on. "evict" takes a row from
        another key.
      eviction: whose row: of the key used longest ago ("lru"), or least often ("lfu"). Never one of the same step.
      steps_to_live: `evict_older` takes rows that were not used in training for more than this many steps; None keeps
        them.
      admission_count: a key gets a row in the first training batch after which it has occurred more often than this;
        until then it reads zeros and is not trained. 0 admits every key at once.
      admission_capacity: how many keys may wait for that at a time; None means `capacity`. When there are more, they
        are treated as `when_full` says.
    """

    name: str
    embedding_dim: int
    capacity: int
    optimizer: OptimizerSpec = dataclasses.field(default_factory=SGDOptimizerSpec)
    initializer: Callable[..., Any] = uniform_initializer
    dtype: str = "float32"
    key_dtype: str = "int64"
    when_full: WhenFull = "error"
    eviction: Eviction = "lru"
    steps_to_live: int | None = None
    admission_count: int = 0
    admission_capacity: int | None = None

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"DynamicTableSpec: name must be a non-empty string, got {self.name!r}.")
        for field, least in (("embedding_dim", 1), ("capacity", 1), ("steps_to_live", 0), ("admission_count", 0)):
            _check_int(getattr(self, field), where, field, least, optional=field == "steps_to_live")
        _check_int(self.admission_capacity, where, "admission_capacity", 1, optional=True)
        if max(self.capacity, self.admission_capacity or 0) > MAX_CAPACITY:
            raise ValueError(f"{where}: at most {MAX_CAPACITY} rows per shard are possible; use more shards.")
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        object.__setattr__(self, "key_dtype", np.dtype(self.key_dtype).name)
        choices = (
            ("dtype", TABLE_DTYPES),
            ("key_dtype", KEY_DTYPES),
            ("when_full", WHEN_FULL),
            ("eviction", EVICTIONS),
        )
        for field, allowed in choices:
            if getattr(self, field) not in allowed:
                raise ValueError(f"{where}: {field} {getattr(self, field)!r} is not one of {', '.join(allowed)}.")
        if not isinstance(self.optimizer, OptimizerSpec):
            raise TypeError(f"{where}: optimizer must be an OptimizerSpec, got {type(self.optimizer).__name__}.")
        if not callable(self.initializer):
            raise TypeError(f"{where}: initializer must be a function of (key, shape), got {self.initializer!r}.")
        shape = jax.eval_shape(lambda: self.initializer(jax.random.key(0), (1, self.embedding_dim))).shape
        if shape != (1, self.embedding_dim):
            raise ValueError(f"{where}: the initializer returned shape {shape} for (1, {self.embedding_dim}).")


def _check_int(value: Any, where: str, field: str, least: int, *, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: {field} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{where}: {field} must be at least {least}, got {value}.")


class Counters(NamedTuple):
    """Keys since the table was made; a key counts once for every call of `translate` that it occurs in.

    Numbers of 64 bits, as a high and a low lane. Without hash table there is only `unknown`, the others are None.

    Attributes:
      inserted: keys that got a row.
      evicted: keys that lost theirs, in `translate` or `evict_older`.
      failed: keys of training that found no room, in the table or among those that wait for admission.
      not_admitted: keys of training that had not occurred often enough.
      forgotten: keys whose occurrences are no longer counted, to make room for others or in `evict_older`.
      unknown: keys of evaluation without a row.
      stale: keys whose gradients came when their row belonged to another key already, and were dropped.
      invalid: negative numbers other than -1, and keys beyond `key_dtype`, in a traced batch, where they cannot be
        refused.
    """

    inserted: UInt32[Array, "1 2"] | None = None
    evicted: UInt32[Array, "1 2"] | None = None
    failed: UInt32[Array, "1 2"] | None = None
    not_admitted: UInt32[Array, "1 2"] | None = None
    forgotten: UInt32[Array, "1 2"] | None = None
    unknown: UInt32[Array, "1 2"] | None = None
    stale: UInt32[Array, "1 2"] | None = None
    invalid: UInt32[Array, "1 2"] | None = None

    @classmethod
    def zeros(cls, *names: str) -> Counters:
        """These counters at 0."""
        return cls(**{name: jnp.zeros((1, 2), jnp.uint32) for name in names})

    def add(self, **numbers: Array) -> Counters:
        """Counters with some of them raised, by less than 2**32."""
        return self._replace(**{name: _sum(getattr(self, name), number) for name, number in numbers.items()})


def _sum(lanes: UInt32[Array, "1 2"], number: Array) -> UInt32[Array, "1 2"]:
    more = number.reshape(1).astype(jnp.uint32)
    low = lanes[:, 1] + more
    return jnp.stack([lanes[:, 0] + (low < more).astype(jnp.uint32), low], axis=1)


class DynamicTable(NamedTuple):
    """State of one shard; all leaves have a leading axis, along which the shards of a table lie side by side.

    Attributes:
      keys: a `RowMap`, which key has which row; None without hash table.
      rows: the vectors.
      slots: optimizer state of every row.
      waiting: how often keys that wait for admission have occurred; None if every key is admitted at once.
      counters: what happened so far.
      key: PRNG key of the table.
    """

    keys: Any
    rows: Float[Array, "rows dim"]
    slots: Slots
    waiting: RowMap | None
    counters: Counters
    key: PRNGKeyArray


def init(spec: DynamicTableSpec, key: PRNGKeyArray) -> DynamicTable:
    """An empty table. All shards of a table take the same PRNG key: initial values do not depend on the shard."""
    arrays = allocate(spec, spec.capacity, fill=0)
    waiting = row_map.empty(spec.admission_capacity or spec.capacity) if spec.admission_count else None
    counters = Counters.zeros(*Counters._fields)
    return DynamicTable(
        row_map.empty(spec.capacity), arrays[0], arrays[1:], waiting, counters, table_key(key, spec.name)[None]
    )


def allocate(spec: DynamicTableSpec, capacity: int, *, fill: int | None) -> tuple[Array, ...]:
    """Rows and slots, all of them `fill`, or unspecified where they will be overwritten."""
    one_row = jax.ShapeDtypeStruct((1, spec.embedding_dim), jnp.float32)
    slots = jax.eval_shape(spec.optimizer.init_slots, one_row)
    shapes = [((capacity, spec.embedding_dim), jnp.dtype(spec.dtype))]
    shapes += [((capacity, *slot.shape[1:]), slot.dtype) for slot in slots]
    return tuple(api.allocate(shape, dtype, fill) for shape, dtype in shapes)


def translate(
    spec: DynamicTableSpec,
    table: DynamicTable,
    keys: Keys,
    step: int | Int[Array, ""],
    *,
    train: bool,
    occurrences: Int[Array, " nnz"] | None = None,
) -> tuple[DynamicTable, Int[Array, " nnz"]]:
    """The row of every key; in training, new keys get rows in order of their first occurrence.

    Args:
      spec: of the table.
      table: its state.
      keys: one axis; keys may repeat.
      step: number of the training step, at least 0 and below 2**31 - 1. Several calls may share a step: none of them
        evicts a row that another one used.
      train: False finds rows and changes nothing but the count of unknown keys.
      occurrences: how many occurrences each entry stands for, where repeated keys were combined before; None means
        one each.

    Returns: the table, and rows with `NO_ROW` for padding and for keys without a row. Reading `NO_ROW` gives zeros,
    and stepping it does nothing.
    """
    keys, n = Keys(*map(jnp.asarray, keys)), keys.low.shape[0]
    first = first_occurrences(keys)
    is_first = first == jnp.arange(n, dtype=jnp.int32)
    distinct = keys._replace(is_key=is_first)
    rows = row_map.find(table.keys, distinct)
    if not train:
        unknown = jnp.sum(is_first & (rows == NO_ROW), dtype=jnp.int32)
        table = table._replace(counters=table.counters.add(unknown=unknown))
    else:
        ones = jnp.ones(n, jnp.int32) if occurrences is None else occurrences
        totals = jnp.zeros(n, jnp.int32).at[first].add(ones, mode="drop")
        table, rows = _train(spec, table, distinct, rows, jnp.asarray(step, jnp.int32), totals)
    return table, rows.at[first].get(mode="fill", fill_value=NO_ROW)


def _train(
    spec: DynamicTableSpec, table: DynamicTable, keys: Keys, rows: Array, step: Array, totals: Array
) -> tuple[DynamicTable, Array]:
    """`translate` of distinct keys, whose rows were looked up and whose occurrences were counted."""
    evict = spec.eviction if spec.when_full == "evict" else None
    counts = row_map.add_counts(row_map.count_of(table.keys, rows), totals)
    known = row_map.touch(table.keys, rows, step, counts)
    is_new = keys.is_key & (rows == NO_ROW)
    is_admitted, waiting = is_new, table.waiting
    if waiting is not None:
        waiting_rows = row_map.find(waiting, keys._replace(is_key=is_new))
        totals = row_map.add_counts(totals, row_map.count_of(waiting, waiting_rows))
        is_admitted = is_new & (totals > spec.admission_count)
    known, new_rows, evicted = row_map.assign(known, keys._replace(is_key=is_admitted), step, totals, evict=evict)
    is_left = is_new & (new_rows == NO_ROW)
    failed, forgotten = is_admitted & is_left, jnp.zeros(1, jnp.int32)
    if waiting is not None:
        waiting = row_map.release(waiting, jnp.where(is_left, NO_ROW, waiting_rows))
        waiting = row_map.touch(waiting, jnp.where(is_left, waiting_rows, NO_ROW), step, totals)
        strangers = keys._replace(is_key=is_left & (waiting_rows == NO_ROW))
        waiting, stranger_rows, forgotten = row_map.assign(waiting, strangers, step, totals, evict=evict)
        failed = failed | (strangers.is_key & (stranger_rows == NO_ROW))
    arrays = _in_blocks(spec, table.key[0], keys, new_rows, (table.rows, *table.slots))
    counters = table.counters.add(
        inserted=jnp.sum(new_rows != NO_ROW, dtype=jnp.int32),
        evicted=evicted,
        failed=jnp.sum(failed, dtype=jnp.int32),
        not_admitted=jnp.sum(is_new & ~is_admitted, dtype=jnp.int32),
        forgotten=forgotten,
    )
    table = DynamicTable(known, arrays[0], arrays[1:], waiting, counters, table.key)
    return table, jnp.where(is_new, new_rows, rows)


def initial_values(spec: DynamicTableSpec, key: PRNGKeyArray, keys: Keys) -> Float[Array, "nnz dim"]:
    """What the rows of `keys` start from; `key` is the table's."""

    def one_row(high: Array, low: Array) -> Array:
        own_key = jax.random.fold_in(jax.random.fold_in(key, high), low)
        return spec.initializer(own_key, (1, spec.embedding_dim))[0].astype(jnp.float32)

    return jax.vmap(one_row)(keys.high, keys.low)


def _in_blocks(
    spec: DynamicTableSpec,
    key: PRNGKeyArray,
    keys: Keys,
    rows: Int[Array, " nnz"],
    arrays: tuple[Array, ...],
    *,
    slots: bool = True,
) -> tuple[Array, ...]:
    """The arrays with the initial values (and slots) of `keys` in `rows`."""
    num_blocks = -(-rows.shape[0] // INITIAL_BLOCK)
    order = compact(rows != NO_ROW, num_blocks * INITIAL_BLOCK)
    num_used = -(-jnp.sum(rows != NO_ROW, dtype=jnp.int32) // INITIAL_BLOCK)

    def fill_block(i: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        entries = jax.lax.dynamic_slice_in_dim(order, i * INITIAL_BLOCK, INITIAL_BLOCK)
        high, low = (lane.at[entries].get(mode="fill", fill_value=0) for lane in (keys.high, keys.low))
        values = initial_values(spec, key, Keys(high, low, entries != NO_ROW))
        parts = (values, *(spec.optimizer.init_slots(values) if slots else ()))
        return api.scatter_rows(arrays, rows.at[entries].get(mode="fill", fill_value=NO_ROW), parts)

    return jax.lax.fori_loop(0, num_used, fill_block, arrays)


def read(table: DynamicTable, rows: Int[Array, " nnz"]) -> Float[Array, "nnz dim"]:
    """Rows, float32; zeros for `NO_ROW`."""
    return api.lookup(table.rows, [Segment(rows, None, None, "none")])[0]


def read_ahead(
    spec: DynamicTableSpec, table: DynamicTable, keys: Keys, occurrences: Int[Array, " nnz"]
) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
    """What rows are going to hold when `translate` has given the keys theirs, and how many keys have none yet.

    A key that will find the table full reads as what it would have started from.
    """
    rows, position = row_map.find(table.keys, keys), jnp.arange(keys.low.shape[0], dtype=jnp.int32)
    strangers = keys.only(rows == NO_ROW)

    def with_strangers(vectors: Array) -> tuple[Array, Array]:
        first = first_occurrences(strangers)
        starts = first == position
        if spec.admission_count:
            assert table.waiting is not None
            totals = jnp.zeros(position.shape, jnp.int32).at[first].add(occurrences, mode="drop")
            seen = row_map.count_of(table.waiting, row_map.find(table.waiting, strangers))
            starts &= row_map.add_counts(totals, seen) > spec.admission_count
        entries = jnp.where(starts, position, NO_ROW)
        (fresh,) = _in_blocks(spec, table.key[0], keys, entries, (vectors,), slots=False)
        ahead = fresh.at[first].get(mode="fill", fill_value=0)
        return jnp.where((first == NO_ROW)[:, None], vectors, ahead), jnp.sum(first == position, dtype=jnp.int32)

    def without(vectors: Array) -> tuple[Array, Array]:
        return vectors, hash_table.varying_zero(strangers.is_key)

    # Late in training most batches have no strangers, and need none of their work.
    return jax.lax.cond(jnp.any(strangers.is_key), with_strangers, without, read(table, rows))


def step(
    table: DynamicTable,
    slots: Slots,
    segments: Sequence[Segment],
    d_outputs: Sequence[Float[Array, "_ dim"]],
    step: Step,
) -> tuple[DynamicTable, Slots]:
    """One optimizer step of the rows that segments read, as `translate` gave them.

    16-bit rows are rounded with noise that belongs to the key, whichever row it has.
    """

    def rounding(values: Array, dtype: Any, rows: Array) -> Array:
        lanes = (lane.at[rows].get(mode="fill", fill_value=0) for lane in (table.keys.high, table.keys.low))
        rounded: Array = step.rounding(values, dtype, mix(*lanes).astype(jnp.int32))  # type: ignore[misc]
        return rounded

    how = step.hyper, step.rule
    by_key = None if step.rounding is None else rounding
    rows, slots = api.update(table.rows, slots, segments, d_outputs, *how, rounding=by_key)
    return table._replace(rows=rows), slots


def evict_older(spec: DynamicTableSpec, table: DynamicTable, step: int | Int[Array, ""]) -> DynamicTable:
    """The table without keys that training did not use for more than `spec.steps_to_live` steps before `step`.

    Looks at every row, so call it now and then: as often as keys are to go, or before a checkpoint.

    Raises: ValueError: the spec sets no `steps_to_live`.
    """
    if spec.steps_to_live is None:
        raise ValueError(f"table {spec.name!r}: evict_older needs steps_to_live in the spec.")
    step = jnp.asarray(step, jnp.int32)
    left = row_map.release_older(table.keys, step, spec.steps_to_live)
    counters = table.counters.add(evicted=left.num_free - table.keys.num_free)
    table = table._replace(keys=left, counters=counters)
    if table.waiting is None:
        return table
    waiting = row_map.release_older(table.waiting, step, spec.steps_to_live)
    counters = counters.add(forgotten=waiting.num_free - table.waiting.num_free)
    return table._replace(waiting=waiting, counters=counters)


def grow(spec: DynamicTableSpec, table: DynamicTable, capacity: int) -> DynamicTable:
    """The table with room for `capacity` rows; every key keeps its row. Programs are compiled anew for the new shape.

    Raises: ValueError: that is less than the table has.
    """
    old = table.rows.shape[0]
    if not old <= capacity <= MAX_CAPACITY:
        raise ValueError(f"table {spec.name!r} has {old} rows and cannot grow to {capacity} (at most {MAX_CAPACITY}).")
    arrays = tuple(
        jax.lax.dynamic_update_slice_in_dim(fresh, array, 0, 0)
        for fresh, array in zip(allocate(spec, capacity, fill=0), (table.rows, *table.slots), strict=True)
    )
    waiting = table.waiting
    if waiting is not None and waiting.last_step.shape[0] < capacity:
        waiting = row_map.grow(waiting, capacity)
    return table._replace(keys=row_map.grow(table.keys, capacity), rows=arrays[0], slots=arrays[1:], waiting=waiting)


def counts(table: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
    """Rows in use and all counters of each shard, int64, on the host."""
    num_free = np.zeros(num_shards, int) if table.keys is None else on_host(table.keys.num_free)
    found = {"rows": table.rows.shape[0] // num_shards - num_free}
    for name, lanes in table.counters._asdict().items():
        if lanes is not None:
            found[name] = numbers_of(lanes)
    return found


def numbers_of(lanes: Array) -> np.ndarray:
    """A counter of each shard, int64, on the host."""
    high, low = on_host(lanes).astype(np.int64).T
    return (high << 32) + low


def hold(table: DynamicTable, keys: Keys, step: Int[Array, ""]) -> DynamicTable:
    """The table, in which no row of `keys` will be evicted in this step: several `translate` calls may share it."""
    rows = row_map.find(table.keys, keys)
    return table._replace(keys=table.keys._replace(last_step=table.keys.last_step.at[rows].set(step, mode="drop")))


def still_theirs(table: DynamicTable, rows: Int[Array, " nnz"], keys: Keys) -> tuple[DynamicTable, Int[Array, " nnz"]]:
    """`rows` without those that belong to other keys by now, which are counted."""
    known = table.keys
    if known is None:
        return table, rows
    lanes = (known.high, known.low, known.last_step)
    high, low, last_step = (lane.at[rows].get(mode="fill", fill_value=0) for lane in lanes)
    is_stale = (rows != NO_ROW) & ((high != keys.high) | (low != keys.low) | (last_step == row_map.FREE))
    table = table._replace(counters=table.counters.add(stale=jnp.sum(is_stale, dtype=jnp.int32)))
    return table, jnp.where(is_stale, NO_ROW, rows)
