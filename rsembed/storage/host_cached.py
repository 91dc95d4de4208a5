"""Tables larger than the device: rows on the host, with a device cache of recently used rows."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PRNGKeyArray, PyTree
from numpy.typing import ArrayLike

from rsembed.checks import PositiveInt, check_fields, check_finite
from rsembed.initial_values import fresh_rows, table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.keys import Keys
from rsembed.sizes import padded_size
from rsembed.specs import TableSpec, default_initializer
from rsembed.storage import hashed_rows, row_map
from rsembed.storage.hashed import DynamicRows
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.protocol import Found, ReadAhead, State, Vectors, on_host
from rsembed.storage.row_map import Eviction

Rows = Int[np.ndarray, "..."]
FIRST_VALUES_BLOCK = 4096


class Lock:
    """Reentrant lock for an object that may be copied or pickled. The copy gets a new lock.

    Example:
      >>> lock = Lock()
      >>> with lock, lock:
      ...     print("mine")
      mine
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[object, ...]:
        return Lock, ()


class Generation:
    """Version counter shared by a host store and the state on the device.

    It starts at a random number, and the state contains it, too. A state that is older than the
    store, or that belongs to another store, is refused. Its cache has other rows than the host
    assumes.

    Example:
      >>> generation = Generation("the state is of another time; begin anew.")
      >>> state = generation.number
      >>> generation.advance(state)
      >>> generation.check(state)
      Traceback (most recent call last):
        ...
      RuntimeError: the state is of another time; begin anew. (It has another generation than the host.)
    """

    def __init__(self, refusal: str):
        """A counter with a random start.

        Args:
          refusal: error message for a state of another generation, with the way out.
        """
        self.number, self._refusal = secrets.randbits(31), refusal
        self.lock = Lock()

    def check(self, found: ArrayLike | None) -> None:
        """Raises: RuntimeError: a number in `found` is not the current generation."""
        if (np.asarray(found) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, found: ArrayLike | None) -> None:
        """Starts a change of the store and the state. Raises: RuntimeError: see `check`."""
        found = np.asarray(found)
        with self.lock:  # If two threads use one state, the second one is refused.
            self.check(found)
            self.number = (self.number + 1) % 2**32


class BackingStore:
    """Host copies of a table and its slots. Rows that a device caches may be stale here.

    Attributes:
      arrays: the table and its slots. Rows are updated in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[ArrayLike]] | None = None,
        near_dtype: DTypeLike | None = None,
    ):
        """A store with initial values in all rows.

        Args:
          arrays: arrays with equally many rows. The system allocates memory of `np.zeros` only when
            rows are first written.
          first_values: function that computes the initial values of rows, for all arrays. It is
            called when rows are read that were never written. It is called with few different
            numbers of rows, and a row may occur in several calls. None, the default: `arrays` has
            the initial values.
          near_dtype: dtype of the first array on the device, if the device rounds it. A number that
            the device did not change keeps the unrounded value of the store. None, the default: the
            device does not round.
        """
        self.arrays, self._first_values, self._near_dtype = tuple(arrays), first_values, near_dtype
        self._is_written = np.zeros(0 if first_values is None else self.arrays[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of the given rows, from all arrays."""
        arrays = [array[rows] for array in self.arrays]
        if self._first_values is not None:
            fresh = np.flatnonzero(~self._is_written[rows])
            for start in range(0, fresh.size, FIRST_VALUES_BLOCK):
                some = fresh[start : start + FIRST_VALUES_BLOCK]
                padded = np.zeros(padded_size(some.size), np.int32)
                padded[: some.size] = rows[some]
                for array, values in zip(arrays, self._first_values(padded), strict=True):
                    array[some] = np.asarray(values)[: some.size]
        return arrays

    def write(self, rows: Rows, arrays: Sequence[ArrayLike]) -> None:
        """Writes distinct rows of all arrays. Values after the last row are padding."""
        own = [np.asarray(values)[: rows.size] for values in arrays]
        if self._near_dtype is not None:
            kept = self.arrays[0][rows]
            with np.errstate(over="ignore"):
                is_same = kept.astype(self._near_dtype).astype(kept.dtype) == own[0]
            own[0] = np.where(is_same, kept, own[0])
        for array, values in zip(self.arrays, own, strict=True):
            array[rows] = values
        if self._first_values is not None:
            self._is_written[rows] = True

    def exchange(self, left: Rows, arrays: Sequence[ArrayLike], come: Rows) -> list[np.ndarray]:
        """Rows for the device, after a write of the rows that it evicted.

        Args:
          left: ids of the evicted rows.
          arrays: values of the evicted rows, which may be padded.
          come: ids of the rows to read. They may include evicted rows, so the write is first.
        """
        self.write(left, arrays)
        return self.read(come)


Moves: TypeAlias = tuple[
    Int[Array, " batch"],
    Int[Array, " batch"],
    Int[Array, " batch"],
    Int[Array, "1"],
    Int[Array, "1"],
]
"""Row moves of one shard: `(slots, inserted ids, evicted ids, number of moves, conflicts)`.

The evicted id is -1 if the slot was free. The last array counts ids that got no cache slot. Entries
after the last move are padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCached(DynamicRows):
    """Storage for tables on the host, with a device cache of recently used rows and their slots.

    Results are the same as with a table on the device, except for the noise of
    `stochastic_rounding`.

    `collection.prefetch` copies the rows of a batch to the device. Call it before a compiled step,
    which cannot read from the host and raises an error if a row is missing. Outside `jit`, lookups
    and steps call it themselves. The host needs memory only for rows that were trained or evicted.

    The collection has one store at a time. `init` and `load_collection` replace it. A state from
    before an exchange of rows is refused, because the store no longer has its rows. To go back,
    load a checkpoint.

    Args:
      cache_rows: number of rows in the cache, over all devices. It must be at least the number of
        distinct rows of a batch. On a mesh, id `k` belongs to device `k % num_devices`.
      eviction: rows that are evicted for new rows: the least recently fetched ("lru", the default)
        or the least often fetched ("lfu"). Rows of the current batch are never evicted.

    Raises: ValueError: an argument is out of range. It is raised when a table uses the storage.

    Example:
      >>> import jax, rsembed as rs
      >>> table = rs.TableSpec(
      ...     name="item", vocabulary_size=1_000_000, embedding_dim=8, storage=rs.HostCached(cache_rows=1_000)
      ... )
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="history", table_spec=table)])
      >>> state, batch = collection.init(jax.random.key(0)), collection.prepare({"history": [[999_999, 5], [7]]})
      >>> state = collection.prefetch(state, batch)
      >>> jax.jit(collection.lookup)(state, batch)["history"].shape
      (2, 8)
    """

    cache_rows: PositiveInt
    eviction: Eviction = "lru"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    @property
    def in_files(self) -> None:
        """None: a file has a row for every id."""
        return None

    def num_rows(self, table: TableSpec) -> int:
        return self.cache_rows

    def check(self, table: TableSpec) -> None:
        check_fields(self, f"table {table.name!r}")
        if table.optimizer.moves_all_rows:
            raise ValueError(
                f"table {table.name!r}: {type(table.optimizer).__name__} moves all rows in every step, also those on "
                "the host; take a rule of the rows of a batch."
            )

    def init(
        self, key: PRNGKeyArray, table: TableSpec, shard: Int[Array, ""], num_shards: int
    ) -> State:
        del shard  # All shards are empty at the start.
        empty, slots = hashed_rows.empty(
            table, [-(-self.cache_rows // num_shards)], table_key(key, table.name)
        )
        # No bond: the generation already detects states that do not match the store.
        return empty._replace(generation=jnp.zeros(1, jnp.uint32), bond=None), slots

    def read(
        self, params: DynamicTable, keys: Keys, table: TableSpec, ahead: ReadAhead | None = None
    ) -> Vectors:
        del ahead
        return self.vectors(params, _found(params, keys, table.name), table), jnp.zeros(
            (), jnp.int32
        )

    def find(
        self,
        params: PyTree,
        slots: PyTree,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        del occurrences, step  # `make_room` has counted the uses.
        return params, slots, _found(params, keys, table.name)

    def backing_store(self, table: TableSpec, key: PRNGKeyArray) -> BackingStore:
        """A store with the initial values of the table. `key` is the PRNG key of the table."""
        first_values = functools.partial(fresh_rows, key, table=table)
        one_row = jax.eval_shape(first_values, jax.ShapeDtypeStruct((1,), jnp.int32))
        shapes = [((table.vocabulary_size, *array.shape[1:]), array.dtype) for array in one_row]
        compiled = jax.jit(first_values)

        def checked_values(ids: Rows) -> Sequence[Array]:
            arrays: Sequence[Array] = compiled(ids)
            if table.initializer is not default_initializer:
                where = (
                    f"table {table.name!r}: what its initializer gives for {len(ids)} of its rows"
                )
                check_finite(
                    arrays[0],
                    where,
                    way_out="give one that makes finite numbers of the table's dtype",
                )
            return arrays

        return BackingStore([np.zeros(shape, dtype) for shape, dtype in shapes], checked_values)

    def counts(self, params: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
        counts = super().counts(params, num_shards)
        return {"rows": counts["rows"], "fetched": counts["inserted"], "evicted": counts["evicted"]}

    def residents(self, params: DynamicTable) -> tuple[np.ndarray, np.ndarray]:
        """Cache slots in use, over all shards, and the id in each."""
        places = np.flatnonzero(on_host(params.keys.last_step) != row_map.FREE)
        return places, on_host(params.keys.low)[places]

    def make_room(self, params: DynamicTable, keys: Keys) -> tuple[DynamicTable, Moves]:
        """The cache after new keys got slots, and the row moves that the caller has to make.

        The caller must copy the rows into these slots before the next lookup. The clock for "lru"
        counts calls, not training steps, because many batches may be looked up between two steps.
        """
        known = params.keys
        now = jnp.max(known.last_step) + 1
        _, distinct, _, uses = row_map.entries(keys, jnp.ones(keys.shape, jnp.int32))
        rows = row_map.find(known, distinct)
        touched = row_map.touch(
            known, rows, now, row_map.add_counts(row_map.count_of(known, rows), uses)
        )
        strangers = distinct.only(rows == NO_ROW)
        filled, new_rows, evicted, num_without = row_map.assign(
            touched, strangers, now, uses, evict=self.eviction
        )
        had_key = (
            touched.last_step.at[new_rows].get(mode="fill", fill_value=row_map.FREE) != row_map.FREE
        )
        left = jnp.where(
            had_key, touched.low.at[new_rows].get(mode="fill", fill_value=0).astype(jnp.int32), -1
        )
        moved, count = api.compact(new_rows != NO_ROW, new_rows.shape[0])

        def first_ones(lane: Array, fill: int) -> Array:
            return lane.at[moved].get(mode="fill", fill_value=fill)

        counters = params.counters.add(inserted=count, evicted=evicted)
        come = first_ones(distinct.low.astype(jnp.int32), -1)
        moves = (
            first_ones(new_rows, NO_ROW),
            come,
            first_ones(left, -1),
            count.reshape(1),
            num_without.reshape(1),
        )
        return params._replace(keys=filled, counters=counters), moves


def _found(params: DynamicTable, keys: Keys, table_name: str) -> Int[Array, " nnz"]:
    """Cache slots of the keys. The program stops with an error if a key is not in the cache."""
    rows = row_map.find(params.keys, keys)
    num_missing = jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)

    def stop(num_missing: Array) -> None:
        raise RuntimeError(
            f"rsembed.storage: {int(num_missing)} ids of the batch have no row of table {table_name!r} on the device; "
            "call collection.prefetch(state, batch) before the compiled step, with the batch that it reads."
        )

    # Under `vmap`, a branch runs for every sample, and a host callback cannot. So one branch checks
    # all samples.
    @jax.custom_batching.custom_vmap
    def checked(rows: Array, num_missing: Array) -> Array:
        jax.lax.cond(num_missing > 0, lambda: io_callback(stop, None, num_missing), lambda: None)
        return rows

    @checked.def_vmap
    def checked_of_all(
        size: int, is_batched: Sequence[bool], rows: Array, num_missing: Array
    ) -> tuple[Array, bool]:
        del size
        return checked(rows, jnp.sum(num_missing)), is_batched[0]

    found: Int[Array, " nnz"] = checked(rows, num_missing)
    return found
