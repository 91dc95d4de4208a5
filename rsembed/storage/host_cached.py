"""Tables larger than the device: rows on the host, and those of late batches near."""

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

from rsembed.bags import padded_size
from rsembed.checks import PositiveInt, check_fields, check_finite
from rsembed.initial_values import fresh_rows, table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.keys import Keys
from rsembed.specs import TableSpec, default_initializer
from rsembed.storage import hashed_rows, row_map
from rsembed.storage.hashed import DynamicRows
from rsembed.storage.hashed_rows import DynamicTable
from rsembed.storage.protocol import Found, ReadAhead, State, Vectors, on_host
from rsembed.storage.row_map import Eviction

Rows = Int[np.ndarray, "..."]
FIRST_VALUES_BLOCK = 4096


class Lock:
    """A lock that one thread may take again while it holds it; a copy of its owner gets a lock of its own.

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
    """Counts the changes that a host and a device make together, from a random number on.

    The state on the device carries the number, too. One of another time or of another owner, whose places hold other
    rows than the host believes, is noticed before it is used.

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
        """`refusal` says what is wrong with a state of another generation, and the way out."""
        self.number, self._refusal = secrets.randbits(31), refusal
        self.lock = Lock()

    def check(self, found: ArrayLike | None) -> None:
        """Raises: RuntimeError: a number is not the present one."""
        if (np.asarray(found) != self.number).any():
            raise RuntimeError(f"{self._refusal} (It has another generation than the host.)")

    def advance(self, found: ArrayLike | None) -> None:
        """Begins a change of host and device. Raises: as `check`."""
        found = np.asarray(found)
        with self.lock:  # of two threads with one state, one is refused
            self.check(found)
            self.number = (self.number + 1) % 2**32


class BackingStore:
    """The rows of an array and of what belongs to it, such as optimizer state; those that a device has may be stale.

    Attributes:
      arrays: the rows, changed in place.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        first_values: Callable[[Rows], Sequence[ArrayLike]] | None = None,
        near_dtype: DTypeLike | None = None,
    ):
        """A store of rows that were not written yet.

        Args:
          arrays: with equally many rows. Of zeros the system hands memory out as rows are first written.
          first_values: what rows hold in all arrays until they are written, which is made when they are read. It is
            called with few different numbers of rows, of which it may be asked again. None leaves it to `arrays`.
          near_dtype: what a device rounds the first array to, if it does. A number that comes back as it left keeps
            what the store has.
        """
        self.arrays, self._first_values, self._near_dtype = tuple(arrays), first_values, near_dtype
        self._is_written = np.zeros(0 if first_values is None else self.arrays[0].shape[0], bool)

    def read(self, rows: Rows) -> list[np.ndarray]:
        """Copies of rows of all arrays."""
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
        """Replaces distinct rows of all arrays by the first of the values, which may be more."""
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
        """Writes rows that left the device, then reads those that come to it: they may be the same."""
        self.write(left, arrays)
        return self.read(come)


Moves: TypeAlias = tuple[
    Int[Array, " batch"],
    Int[Array, " batch"],
    Int[Array, " batch"],
    Int[Array, "1"],
    Int[Array, "1"],
]
"""Places of a shard, ids that come to them and ids that leave them (-1 where a place was free); how many of these move;
and for how many ids there was no place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCached(DynamicRows):
    """Rows stay on the host; the device has those that the last batches read, and their optimizer state.

    Numbers are those of a table on the device, but for the noise of `stochastic_rounding`. `prefetch` of the
    collection brings the rows of a batch near; call it before a compiled step, which cannot reach the host and stops
    with an error where a row is missing. Outside `jit`, lookups and steps call it themselves. Memory of the host is
    taken for rows that were trained or evicted.

    The store belongs to the collection, which has one at a time: `init` and `load_collection` begin a new one. States
    from before an exchange are refused, since the host does not hold their rows any more; go back with a checkpoint.

    Args:
      cache_rows: rows near, over all devices; at least those of a batch. On a mesh, id `k` belongs to device
        `k % num_devices`.
      eviction: who leaves for new rows: those fetched longest ago ("lru"), or least often ("lfu"); never rows of the
        batch itself.

    Raises: ValueError: an argument is out of range, once a table uses it.

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
        """A row for every id."""
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
        del shard  # all begin empty
        empty, slots = hashed_rows.empty(
            table, [-(-self.cache_rows // num_shards)], table_key(key, table.name)
        )
        # States of another time are refused by their generation.
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
        del occurrences, step  # uses were counted when the rows came
        return params, slots, _found(params, keys, table.name)

    def backing_store(self, table: TableSpec, key: PRNGKeyArray) -> BackingStore:
        """A store without rows; `key` is the table's, from which its initial rows follow."""
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
        """Places in use, over all shards, and whose they are."""
        places = np.flatnonzero(on_host(params.keys.last_step) != row_map.FREE)
        return places, on_host(params.keys.low)[places]

    def make_room(self, params: DynamicTable, keys: Keys) -> tuple[DynamicTable, Moves]:
        """Places for those of the keys that have none; their rows must follow before anything else.

        Time is counted in calls, not in training steps: between two steps many batches may be looked up.
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
    """The rows of keys, all of which must be near."""
    rows = row_map.find(params.keys, keys)
    num_missing = jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)

    def stop(num_missing: Array) -> None:
        raise RuntimeError(
            f"rsembed.storage: {int(num_missing)} ids of the batch have no row of table {table_name!r} on the device; "
            "call collection.prefetch(state, batch) before the compiled step, with the batch that it reads."
        )

    # `vmap` makes a branch run for every sample, which a call of the host cannot: one branch serves all samples.
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
