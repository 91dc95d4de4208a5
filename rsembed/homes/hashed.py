"""Keys of 64 bits as ids of a table of the core: `TableSpec(..., storage=Hashed(...))`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.homes import hashed_rows, logical_rows, row_map
from rsembed.homes.hash_table import num_distinct
from rsembed.homes.hashed_rows import DynamicTable, DynamicTableSpec, WhenFull, numbers_of
from rsembed.homes.home import Home
from rsembed.homes.row_map import Eviction
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.keys import Keys
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec

ROWS_BY_KEY = "rows by key"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed(Home):
    """Any number of 64 bits is an id: a key gets a row when it is first trained, and keeps it while there is room.

    The table's `vocabulary_size` is the number of rows, over all devices; on a mesh, key `k` belongs to device
    `k % num_devices`, each of which has an equal share of the rows. A row starts from the table's `initializer`, called
    as `(key, (1, embedding_dim))` with a PRNG key that belongs to the model, the table and the id, so that neither
    company nor devices change it. `lookup` reads zeros for keys without a row, which count in means; `lookup_vjp` reads
    what they will start from, and the step that follows gives them their rows.

    Args:
      when_full: what happens to a new key when all rows of its device are taken. "error" leaves it without a row, and
        steps outside `jit` raise; inside, `collection.counts` has them as `failed`. "zero" does the same and never
        raises. "evict" takes a row from another key.
      eviction: whose: of the key used longest ago ("lru"), or least often ("lfu"). Never one of the same batch.
      admission_count: a key gets a row in the first training batch after which it has occurred more often than this;
        until then it reads zeros and is not trained. 0 admits every key at once.
      admission_capacity: how many keys may wait for that at a time on a device; None means as many as have rows.
      key_dtype: int32, int64, uint32 or uint64; larger keys are refused.

    Raises: ValueError: an argument is unknown or out of range, once a table uses it.

    Example:
      >>> import jax, numpy as np, rsembed as rs
      >>> table = rs.TableSpec(name="user", vocabulary_size=1_000, embedding_dim=4, storage=rs.Hashed())
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="who", table_spec=table)])
      >>> state, batch = collection.init(jax.random.key(0)), {"who": np.array([2**40, 7, 2**40])}
      >>> activations, pullback = collection.lookup_vjp(state, batch)
      >>> state = collection.apply(state, pullback(activations))
      >>> int(collection.counts(state)["user"]["inserted"].sum())
      2
    """

    when_full: WhenFull = "error"
    eviction: Eviction = "lru"
    admission_count: int = 0
    admission_capacity: int | None = None
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row", "replicated")

    @property
    def in_files(self) -> str:
        """Rows by key, however many there is room for."""
        return ROWS_BY_KEY

    def rows_of(self, table: TableSpec, capacity: int | None = None) -> DynamicTableSpec:
        """What `hashed_rows` is told about one device's share of `capacity` rows."""
        return _spec_of(self, table, table.vocabulary_size if capacity is None else capacity)

    def check(self, table: TableSpec) -> None:
        if self.when_full == "grow":
            raise ValueError(
                f"table {table.name!r}: when_full='grow' needs arrays that change their size, which a state of a "
                "collection never does; take a larger vocabulary_size, to which load_collection brings saved rows."
            )
        self.rows_of(table)

    def init(
        self, key: PRNGKeyArray, table: TableSpec, *, shard: Int[Array, ""], num_shards: int
    ) -> tuple[DynamicTable, Slots]:
        del shard  # all begin empty
        state = hashed_rows.init(self.rows_of(table, -(-table.vocabulary_size // num_shards)), key)
        return state._replace(slots=()), state.slots

    def read(
        self, params: DynamicTable, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"] | None = None
    ) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
        if occurrences is not None:
            return hashed_rows.read_ahead(self.rows_of(table), params, keys, occurrences)
        rows = row_map.find(params.keys, keys)
        return hashed_rows.read(params, rows), num_distinct(keys.only(rows == NO_ROW))

    def vectors(self, params: DynamicTable, rows: Int[Array, " nnz"], table: TableSpec) -> Float[Array, "nnz dim"]:
        return hashed_rows.read(params, rows)

    def find(
        self,
        params: DynamicTable,
        slots: Slots,
        keys: Keys,
        table: TableSpec,
        *,
        occurrences: Int[Array, " nnz"],
        step: Step,
    ) -> tuple[DynamicTable, Slots, Int[Array, " nnz"]]:
        state, rows = hashed_rows.translate(
            self.rows_of(table),
            params._replace(slots=slots),
            keys,
            _number(step),
            train=True,
            occurrences=occurrences,
        )
        return state._replace(slots=()), state.slots, rows

    def still_theirs(
        self, params: DynamicTable, rows: Int[Array, " nnz"], keys: Keys
    ) -> tuple[DynamicTable, Int[Array, " nnz"]]:
        return hashed_rows.still_theirs(params, rows, keys)

    def hold(self, params: DynamicTable, keys: Keys, step: Step) -> DynamicTable:
        return hashed_rows.hold(params, keys, _number(step)) if self.when_full == "evict" else params

    def step(
        self,
        params: DynamicTable,
        slots: Slots,
        segments: Sequence[Segment],
        d_outputs: Sequence[Float[Array, "_ dim"]],
        table: TableSpec,
        *,
        step: Step,
    ) -> tuple[DynamicTable, Slots]:
        return hashed_rows.step(params, slots, segments, d_outputs, step)

    def rows(self, params: DynamicTable, slots: Slots, table: TableSpec, num_shards: int) -> dict[str, np.ndarray]:
        return logical_rows.export(self.rows_of(table), params._replace(slots=slots), num_shards)

    def with_rows(
        self, params: DynamicTable, slots: Slots, rows: Any, table: TableSpec, num_shards: int
    ) -> tuple[Any, Any]:
        if not isinstance(rows, Mapping):
            raise ValueError(
                f"table {table.name!r} has keys: give a dictionary of 'keys' [n] and 'values' "
                f"[n, {table.embedding_dim}], as collection.tables returns it, not {type(rows).__name__}."
            )
        state = logical_rows.import_rows(self.rows_of(table), params._replace(slots=slots), rows, num_shards)
        return state._replace(slots=()), state.slots

    def check_step(self, before: DynamicTable, after: DynamicTable, table: TableSpec) -> None:
        if self.when_full != "error":
            return
        num_failed = int((_failed(after) - _failed(before)).sum())
        if num_failed:
            raise RuntimeError(
                f"table {table.name!r} is full: {num_failed} new keys found no room in {table.vocabulary_size} rows. "
                "They read as zeros and were not trained; nothing else was lost. Make vocabulary_size (or "
                "admission_capacity) larger, or choose Hashed(when_full='evict') or 'zero'."
            )

    def counts(self, params: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
        return hashed_rows.counts(params, num_shards)


@functools.lru_cache(maxsize=1024)
def _spec_of(home: Hashed, table: TableSpec, capacity: int) -> DynamicTableSpec:
    return DynamicTableSpec(
        name=table.name,
        embedding_dim=table.embedding_dim,
        capacity=capacity,
        optimizer=table.optimizer,
        initializer=table.initializer,
        dtype=table.dtype,
        key_dtype=home.key_dtype,
        when_full=home.when_full,
        eviction=home.eviction,
        admission_count=home.admission_count,
        admission_capacity=home.admission_capacity,
    )


def _failed(params: DynamicTable) -> Any:
    assert params.counters.failed is not None
    return numbers_of(params.counters.failed)


def _number(step: Step) -> Int[Array, ""]:
    if step.number is None:
        raise ValueError("a hashed table notes when a row was used: the step needs its number.")
    return step.number
