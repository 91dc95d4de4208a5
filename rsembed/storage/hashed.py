"""Storage for 64-bit keys, `TableSpec(..., storage=Hashed(...))`, with a hash table of the keys."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from rsembed.arrays import is_traced
from rsembed.checks import PositiveInt, check_fields, dtype_among
from rsembed.initial_values import keyed_form, table_keys, traced_initializer
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, KeyOrKeys, Step
from rsembed.kernels.keyed import varying_zero
from rsembed.keys import KEY_DTYPES, Keys
from rsembed.optimizers.base import Slots
from rsembed.specs import TableSpec
from rsembed.storage import hashed_rows, logical_rows, row_map
from rsembed.storage.hashed_rows import MAX_CAPACITY, DynamicTable, numbers_of
from rsembed.storage.logical_rows import Export
from rsembed.storage.protocol import (
    Found,
    Pool,
    ReadAhead,
    SlotTree,
    State,
    Storage,
    Vectors,
    of_near_sizes,
    on_host,
    positions_of,
)
from rsembed.storage.row_map import Eviction, RowMap

ROWS_BY_KEY = "rows by key"
WhenFull = Literal["error", "grow", "evict", "zero"]


class DynamicRows(Storage):
    """Base class of storages with a `DynamicTable` as `params`.

    Subclasses of `DynamicRows` define how a key finds its row.
    """

    rows_on_host: ClassVar[bool] = True

    def init(
        self,
        key: PRNGKeyArray,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        names = [member.name for member in self.tables_of(table)]
        return self.init_from_keys(table_keys(key, names), table, shard, num_shards)

    @abc.abstractmethod
    def init_from_keys(
        self,
        keys: KeyOrKeys,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        """Initial `params` and slots of one shard, which do not depend on the names of the tables.

        Args:
          keys: PRNG key of each table that shares the storage, from `initial_values.table_keys`.
          table: spec of the table.
          shard: index of the shard.
          num_shards: number of shards.
        """

    def vector_dtype(self, table: TableSpec) -> DTypeLike:
        """Dtype of the table. Devices exchange rows of a 16-bit table as 16-bit numbers."""
        return jnp.dtype(table.dtype)

    def read(
        self,
        params: DynamicTable,
        keys: Keys,
        table: TableSpec,
        ahead: ReadAhead | None = None,
    ) -> Vectors:
        """See `Storage.read`."""

        def gather(vectors: Array, index: Array) -> Array:
            (gathered,) = api.gather_rows((vectors,), index)
            return gathered

        empty_call = Call((), ())
        return self.pooled(params, keys, empty_call, table, gather, ahead)

    def step(
        self,
        params: DynamicTable,
        slots: Slots,
        gradients: CallGradients,
        table: TableSpec,
        step: Step,
    ) -> State:
        step = hashed_rows.rounding_by_key(params, step)
        rows, slots = api.update(params.rows, slots, gradients, step)
        return params._replace(rows=rows), slots

    def step_distinct(
        self,
        params: DynamicTable,
        slots: Slots,
        rows: Array,
        values: Array,
        table: TableSpec,
        step: Step,
    ) -> State:
        """See `Storage.step_distinct`. The numbers in `rows` may be in any order."""
        step = hashed_rows.rounding_by_key(params, step)
        stepped, slots = api.apply_rows(params.rows, slots, rows, values, step)
        return params._replace(rows=stepped), slots

    def counts(self, params: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
        """Counters of each shard by name, as int64.

        Counter `rows` is the number of rows that have a key. In a table without a hash table,
        counter `rows` is the number of all rows.
        """
        capacity = params.rows.shape[0] // num_shards
        num_rows = np.full(num_shards, capacity, np.int64)
        if params.keys is not None:
            num_free = on_host(params.keys.num_free)
            num_rows = num_rows - num_free
        counts = {"rows": num_rows}
        for name, lanes in params.counters._asdict().items():
            if lanes is not None:
                counts[name] = numbers_of(lanes)
        return counts

    def rows(
        self,
        params: DynamicTable,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> dict[str, np.ndarray]:
        positions, exported = logical_rows.places_by_key(params, table, num_shards)
        names = logical_rows.array_names(table, slots)
        arrays = (params.rows, *slots)
        for name, array in zip(names, arrays, strict=True):
            exported[name] = on_host(array)[positions]
        return exported

    def checked_rows(self, values: PyTree, table: TableSpec, step: Int[Array, ""]) -> Export:
        """See `Storage.checked_rows`. If `values` is an array, the keys are its row numbers."""
        if not isinstance(values, Mapping):
            row_numbers = np.arange(len(values))
            values = {"keys": row_numbers, "values": values}
        if "last_step" in values:
            return values
        # An imported row counts as last used in the current step. With step 0 as last use, imported
        # rows would be evicted before all other rows.
        keys = values.get("keys", ())
        current_step = int(on_host(step))
        last_step = np.full(np.shape(keys), current_step)
        return {**values, "last_step": last_step}

    def with_rows(
        self,
        params: DynamicTable,
        slots: SlotTree,
        rows: Export,
        table: TableSpec,
        num_shards: int,
    ) -> State:
        return logical_rows.import_rows(params, slots, rows, table, num_shards)


class NewKeys(NamedTuple):
    """Distinct keys of a batch that have no row yet.

    Attributes:
      keys: distinct new keys, followed by padding.
      entry_of: for each key of the batch, its index in `keys`. `NO_ROW` for keys that already have
        a row in the table.
      first_of: for each new key, the position of its first occurrence in the batch.
      occurrences: for each new key, its number of occurrences in this batch and, if it waits for
        admission, in earlier batches.
      waiting_rows: for each new key, its row in the map of keys that wait for admission. None if
        keys do not wait for admission.
      is_admitted: mask of the new keys that may get a row.
    """

    keys: Keys
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    occurrences: Int[Array, " nnz"]
    waiting_rows: Int[Array, " nnz"] | None
    is_admitted: Bool[Array, " nnz"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed(DynamicRows):
    """Storage for 64-bit keys. A key gets a row when it is first trained.

    A key keeps its row until the key is evicted. The table's `vocabulary_size` is the number of
    rows on all devices together. On a mesh, key `k` belongs to device `k % num_devices`, and all
    devices have the same number of rows.

    The initial value of a row is `initializer(prng_key, (1, embedding_dim))`. The PRNG key of a row
    depends only on the model's key, the table's name and the id of the row, so its initial value
    does not depend on the batch or on the number of devices.

    `lookup` uses zeros as the vector of a key without a row, and a mean counts the zeros as a
    vector. `lookup_vjp` uses the initial value of a new key, and the next step assigns a row to the
    key. If no row is free for a new key, `lookup_vjp` uses zeros as the vector of the key.

    Args:
      when_full: what happens to a new key if all rows of its device are in use. With
        `when_full="error"`, the default, a new key without a free row gets no row, and a step
        outside `jit` raises RuntimeError. A step inside `jit` raises no error, but adds the new key
        to the counter `failed`, see `collection.counts`. With "zero", the new key gets no row, and
        no step raises an error. With "evict", the new key gets the row of another key.
      eviction: key that is evicted with `when_full="evict"`: the least recently used ("lru", the
        default) or the least often used ("lfu"). Among equally recent (or equally frequent) keys,
        the smallest key is evicted. Keys of the current batch are never evicted.
      admission_count: number of occurrences in training that a key must exceed to get a row. A key
        that waits for admission reads as zeros and is not trained. 0, the default: a key gets a row
        in its first training batch.
      admission_capacity: maximum number of keys on a device that wait for admission. None, the
        default: the number of rows on the device.
      admission_probability: probability that one occurrence of a new key in training admits the
        key, 1 by default. Keys that are not admitted need no memory. The random draws depend only
        on the model's key, the table's name, the step and the id.
      key_dtype: dtype of the keys: int32, int64 (the default), uint32 or uint64. Ids outside the
        range of the dtype are rejected. Signed keys may be negative, except -1, which means no id.

    Raises: ValueError: an argument is unknown or out of range. The arguments of `Hashed` are
      checked by `TableSpec`, not by the constructor.

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
    admission_count: Annotated[int, "[0, 2147483648)"] = 0
    admission_capacity: PositiveInt | None = None
    admission_probability: Annotated[float, "(0, 1]"] = 1.0
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row",)
    always_has_room: ClassVar[bool] = False

    @property
    def in_files(self) -> str:
        """Text that describes the storage in checkpoints, the same for all `Hashed` storages.

        A checkpoint can be loaded into a table of a different size, because `in_files` does not
        contain the number of rows.
        """
        return ROWS_BY_KEY

    def check(self, table: TableSpec) -> None:
        where = f"table {table.name!r}"
        dtype_among(KEY_DTYPES, self.key_dtype, f"{where}: key_dtype")
        check_fields(self, where)
        if self.when_full == "grow":
            raise ValueError(
                f"{where}: when_full='grow' needs arrays that change their size, which a state of a "
                "collection never does; take a larger vocabulary_size, to which load_collection brings saved rows."
            )
        if self.admission_capacity is not None:
            if not self.admission_count:
                raise ValueError(
                    f"{where}: admission_capacity is of keys that wait, which takes an admission_count."
                )
            if self.admission_capacity > MAX_CAPACITY:
                raise ValueError(
                    f"{where}: at most {MAX_CAPACITY} keys can wait on a device; use more devices."
                )
        if self.admission_count and self.admission_probability < 1:
            raise ValueError(
                f"{where}: keys are admitted by admission_count or by admission_probability, not by both."
            )
        traced_initializer(table, (1, table.embedding_dim))

    def init_from_keys(
        self,
        keys: KeyOrKeys,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        del shard  # A new shard contains no keys.
        capacities = []
        for member in self.tables_of(table):
            capacities.append(-(-member.vocabulary_size // num_shards))
        num_waiting = None
        if self.admission_count:
            num_waiting = []
            for capacity in capacities:
                num_waiting.append(self.admission_capacity or capacity)
        return hashed_rows.empty(table, capacities, keys, num_waiting=num_waiting)

    def pooled(
        self,
        params: DynamicTable,
        keys: Keys,
        call: Call,
        table: TableSpec,
        pool: Pool,
        ahead: ReadAhead | None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """See `Storage.pooled`.

        If every key has a row, `pool` reads the vectors directly from the table.

        If any key has no row, `pool` reads from a new array with one vector for each key. `pooled`
        allocates only one array of vectors, because allocating an array of more than 64 MB is slow:
        in every call, the operating system provides the memory of the array page by page.
        """
        rows, num_absent = row_map.search(params.keys, keys)
        is_bound = hashed_rows.is_bound(params.bond, params.keys.signature)

        def from_rows() -> tuple[PyTree, Array]:
            return pool(params.rows, rows), varying_zero(rows)

        def from_vectors() -> tuple[PyTree, Array]:
            # The vectors have the dtype of the table, so that initial values are rounded in a
            # lookup as in an optimizer step.
            (vectors,) = api.gather_rows((params.rows,), rows)
            # If the rows and keys come from different states, lookups return NaN, because a
            # compiled function cannot raise an error.
            nan = jnp.asarray(jnp.nan, vectors.dtype)
            vectors = jnp.where(is_bound, vectors, nan)
            strangers = keys.only(rows == NO_ROW)
            index = positions_of(keys)
            if ahead is None:
                once = jnp.ones(keys.shape, jnp.int32)
                _, distinct, _, _ = row_map.entries(strangers, once)
                is_unknown = distinct.is_key
            else:
                occurrences, number, arrival = ahead
                new = self._new_keys(params, strangers, occurrences, number)
                gets_row = new.is_admitted
                if not self.always_has_room:
                    gets_row = self._gets_row(params, rows, new, number, arrival)
                # In `vectors`, the initial value of a new key is written at the first occurrence of
                # the key. All occurrences of a new key read the vector at the first occurrence.
                targets = jnp.where(gets_row, new.first_of, NO_ROW)
                (vectors,) = hashed_rows.with_initial_values(
                    (vectors,),
                    targets,
                    new.keys,
                    table,
                    params.own_key,
                    slots=False,
                )
                (first,) = api.gather_rows((new.first_of,), new.entry_of, missing=NO_ROW)
                index = jnp.where(first == NO_ROW, index, first)
                is_unknown = new.is_admitted
            num_unknown = jnp.sum(is_unknown, dtype=jnp.int32)
            return pool(vectors, index), num_unknown

        # Late in training, most batches have no new keys, so they take the faster branch
        # `from_rows`.
        has_all = (num_absent == 0) & is_bound
        return jax.lax.cond(has_all, from_rows, from_vectors)

    def _new_keys(
        self,
        params: DynamicTable,
        strangers: Keys,
        occurrences: Array,
        number: Array,
    ) -> NewKeys:
        """Distinct new keys of a batch, and whether each of these keys is admitted.

        Args:
          params: parameters of one shard before the step.
          strangers: keys that have no row yet, with repetitions, and padding in place of keys that
            have a row.
          occurrences: for each entry of `strangers`, the number of ids of the batch that were
            merged into the entry.
          number: index of the step.
        """
        entry_of, distinct, first_of, totals = row_map.entries(strangers, occurrences)
        waiting_rows = None
        if params.waiting is not None:
            waiting_rows = row_map.find(params.waiting, distinct)
            counts_before = row_map.count_of(params.waiting, waiting_rows)
            totals = row_map.add_counts(totals, counts_before)
        if self.admission_probability < 1:
            is_admitted = is_drawn(
                params.own_key,
                distinct,
                number,
                totals,
                self.admission_probability,
            )
        else:
            is_admitted = distinct.is_key & (totals > self.admission_count)
        return NewKeys(
            keys=distinct,
            entry_of=entry_of,
            first_of=first_of,
            occurrences=totals,
            waiting_rows=waiting_rows,
            is_admitted=is_admitted,
        )

    def _gets_row(
        self,
        params: DynamicTable,
        rows: Int[Array, " nnz"],
        new: NewKeys,
        number: Array,
        arrival: Int[Array, " nnz"] | None,
    ) -> Bool[Array, " nnz"]:
        """Mask of the new keys that will get a row in step `number`.

        If there are fewer free rows than admitted keys, the first admitted keys get the rows.

        Args:
          params: parameters of one shard before the step.
          rows: row of each key of the lookup, `NO_ROW` for keys without a row.
          new: the new keys among the keys of the lookup.
          number: index of the step.
          arrival: priority of each key of the lookup. New keys get rows in ascending order of
            `arrival`. If None, new keys get rows in the order of the lookup.
        """

        def first_ones() -> Bool[Array, " nnz"]:
            earliest = None
            if arrival is not None:
                latest = jnp.full_like(arrival, NO_ROW)
                earliest = latest.at[new.entry_of].min(arrival, mode="drop")
            room = row_map.room(params.keys, rows, number, evicts=self.makes_room)
            return row_map.first_marked(new.is_admitted, earliest, new.keys.table, room)

        # If every table has enough free rows for all admitted keys of all tables, every admitted key
        # gets a row. Comparing `num_admitted` with the smallest number of free rows is cheaper than
        # counting the admitted keys of each table.
        num_admitted = jnp.sum(new.is_admitted, dtype=jnp.int32)
        can_be_short = num_admitted > jnp.min(params.keys.num_free)
        return jax.lax.cond(can_be_short, first_ones, lambda: new.is_admitted)

    def find(
        self,
        params: DynamicTable,
        slots: Slots,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        """See `Storage.find`. New keys get rows in the order of their first occurrence.

        A step may call `find` several times. A call of `find` never evicts a row that an earlier
        call in the same step used.
        """
        number = cast(Array, step.number)
        rows, num_absent = row_map.search(params.keys, keys)
        params = params._replace(keys=row_map.use(params.keys, rows, number, occurrences))

        def admit(_: Array, state: Found) -> Found:
            params, slots, rows = state
            # Compute `strangers` (keys without a row) from the loop state `rows`, so that XLA
            # cannot hoist the work on new keys out of the loop. Hoisted code would run even in
            # steps without new keys.
            strangers = keys.only(rows == NO_ROW)
            params, slots, new_rows = self._admit(
                params,
                slots,
                strangers,
                table,
                number,
                occurrences,
            )
            rows = jnp.where(strangers.is_key, new_rows, rows)
            return params, slots, rows

        # The loop calls `admit` once if the batch has new keys, and otherwise not at all. XLA
        # updates the table in place in a loop, but may copy the table in a `lax.cond`.
        num_iterations = jnp.minimum(num_absent, 1)
        result: Found = jax.lax.fori_loop(0, num_iterations, admit, (params, slots, rows))
        return result

    def _admit(
        self,
        params: DynamicTable,
        slots: Slots,
        strangers: Keys,
        table: TableSpec,
        number: Array,
        occurrences: Array,
    ) -> tuple[DynamicTable, Slots, Array]:
        """Assigns rows to new keys, and returns the table, the slots and the row of each key.

        Args:
          params: parameters of one shard before the step.
          slots: slots of the table.
          strangers: keys that have no row yet, with repetitions, and padding in place of keys that
            have a row.
          table: spec of the table.
          number: index of the step.
          occurrences: for each entry of `strangers`, the number of ids of the batch that were
            merged into the entry.
        """
        new = self._new_keys(params, strangers, occurrences, number)
        admitted = new.keys.only(new.is_admitted)
        known, rows, num_evicted, num_failed = self._assign(
            params.keys,
            admitted,
            number,
            new.occurrences,
        )

        # Events that cannot happen with the options of the storage are not counted, because each
        # counter adds a loop to the program.
        events = {"inserted": params.keys.num_free - known.num_free}
        if self.makes_room:
            events["inserted"] = events["inserted"] + num_evicted
            events["evicted"] = num_evicted
        if self.admission_count or self.admission_probability < 1:
            is_refused = new.keys.is_key & ~new.is_admitted
            events["not_admitted"] = row_map.counts_of(
                is_refused,
                new.keys.table,
                params.num_tables,
            )

        waiting = params.waiting
        if waiting is not None:
            waiting, has_failed, events["forgotten"] = self._wait(waiting, new, rows, number)
            num_failed = row_map.counts_of(has_failed, new.keys.table, params.num_tables)

        arrays = (params.rows, *slots)
        vectors, *new_slots = hashed_rows.with_initial_values(
            arrays,
            rows,
            new.keys,
            table,
            params.own_key,
        )
        counters = params.counters.add(failed=num_failed, **events)
        params = hashed_rows.with_keys(params, known)
        params = params._replace(rows=vectors, waiting=waiting, counters=counters)
        (row_of_key,) = api.gather_rows((rows,), new.entry_of, missing=NO_ROW)
        return params, tuple(new_slots), row_of_key

    def _wait(
        self,
        waiting: RowMap,
        new: NewKeys,
        rows: Int[Array, " nnz"],
        number: Array,
    ) -> tuple[RowMap, Bool[Array, " nnz"], Int[Array, " tables"]]:
        """Updates the map of the keys that wait for admission, in step `number`.

        New keys that got a row are removed from `waiting`. New keys without a row are added to
        `waiting` if the map has room.

        Args:
          waiting: map of the keys that wait for admission, before the step.
          new: the new keys of the step.
          rows: row of each new key, `NO_ROW` for keys that got no row.
          number: index of the step.

        Returns: a tuple of the new map, a mask of the keys that failed, and the number of keys of
          each table that were removed from the map to make room. A key fails if it is admitted but
          gets no row, or if it must wait but the map has no room.
        """
        waiting_rows = cast(Array, new.waiting_rows)
        is_without_row = new.keys.is_key & (rows == NO_ROW)
        freed_rows = jnp.where(is_without_row, NO_ROW, waiting_rows)
        waiting = row_map.release(waiting, freed_rows)
        kept_rows = jnp.where(is_without_row, waiting_rows, NO_ROW)
        waiting = row_map.touch(waiting, kept_rows, number, new.occurrences)
        starts_to_wait = is_without_row & (waiting_rows == NO_ROW)
        added = new.keys.only(starts_to_wait)
        waiting, added_rows, num_forgotten, _ = self._assign(
            waiting,
            added,
            number,
            new.occurrences,
        )
        lacks_row = new.is_admitted & is_without_row
        lacks_waiting_row = added.is_key & (added_rows == NO_ROW)
        has_failed = lacks_row | lacks_waiting_row
        return waiting, has_failed, num_forgotten

    def _assign(
        self,
        maps: RowMap,
        keys: Keys,
        number: Array,
        occurrences: Int[Array, " nnz"],
    ) -> tuple[RowMap, Int[Array, " nnz"], Int[Array, " tables"], Int[Array, " tables"]]:
        """Calls `row_map.assign` with the eviction policy and the key dtype of the storage."""
        evict = None
        if self.makes_room:
            evict = self.eviction
        is_signed = not self.key_dtype.startswith("u")
        return row_map.assign(
            maps,
            keys,
            number,
            occurrences,
            evict=evict,
            is_signed=is_signed,
        )

    @property
    def makes_room(self) -> bool:
        return self.when_full == "evict"

    def hold(self, params: DynamicTable, keys: Keys, step: Step) -> DynamicTable:
        def with_use(maps: RowMap) -> RowMap:
            rows = row_map.find(maps, keys)
            last_step = maps.last_step.at[rows].set(step.number, mode="drop")
            return maps._replace(last_step=last_step)

        held = params._replace(keys=with_use(params.keys))
        if params.waiting is None:
            return held
        return held._replace(waiting=with_use(params.waiting))

    def check_params(self, params: DynamicTable, table: TableSpec) -> None:
        arrays = params.bond, params.keys.signature
        for leaf in arrays:
            # A traced array has no values to check. Inside `jit`, `pooled` returns NaN if rows and
            # keys come from different states.
            if not isinstance(leaf, (jax.Array, np.ndarray)) or is_traced(leaf):
                return
            if not getattr(leaf, "is_fully_addressable", True):
                return
        if not hashed_rows.is_bound(*map(np.asarray, arrays)):
            names = ", ".join(member.name for member in self.tables_of(table))
            raise ValueError(
                f"table {names!r}: the rows of this state do not belong to its keys. An average of two states, taken "
                "array by array, mixes the rows of different keys, because the same key has different rows in both; "
                "average collection.tables(state) key by key, and write that with collection.with_tables."
            )

    def check_step(self, before: DynamicTable, after: DynamicTable, table: TableSpec) -> None:
        if self.when_full != "error":
            return
        tables = self.tables_of(table)
        num_before = numbers_of(cast(Array, before.counters.failed))
        num_after = numbers_of(cast(Array, after.counters.failed))
        num_failed_by_shard = (num_after - num_before).reshape(-1, len(tables))
        num_failed_by_table = num_failed_by_shard.sum(axis=0).tolist()
        for member, num_failed in zip(tables, num_failed_by_table, strict=True):
            if num_failed:
                raise RuntimeError(
                    f"table {member.name!r} is full: {num_failed} new keys found no room in {member.vocabulary_size} "
                    "rows. They read as zeros and were not trained; nothing else was lost. Make vocabulary_size (or "
                    "admission_capacity) larger, or choose Hashed(when_full='evict') or 'zero'."
                )

    def sharing_key(self, table: TableSpec) -> Hashable:
        # A subclass of `Hashed` may behave differently than `HashedTables`, so tables of a subclass
        # never share a storage.
        if type(self) is not Hashed:
            return None
        form = keyed_form(table.initializer, table.embedding_dim)
        return self, form

    def sharing_groups(self, tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
        num_waiting = 0
        if self.admission_count and self.admission_capacity is not None:
            num_waiting = self.admission_capacity
        return of_near_sizes(tables, most_rows=MAX_CAPACITY, num_waiting=num_waiting)

    def sharing(self, tables: Sequence[TableSpec]) -> HashedTables:
        settings = dataclasses.asdict(self)
        return HashedTables(**settings, tables=tuple(tables))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowingKeys(Hashed):
    """Keyed storage for tables that are enlarged when new keys need rows.

    If a lookup finds new keys, the caller must enlarge the table before the optimizer step.
    """

    always_has_room: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashedTables(Hashed):
    """Storage shared by several keyed tables that differ only in name and size.

    One compiled program reads or updates all tables of a `HashedTables`. Each table is padded to
    the size of the largest table.

    Args:
      tables: specs of the tables, in the order in which the arrays contain the tables.
    """

    tables: tuple[TableSpec, ...]

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        return self.tables

    def unstack(
        self,
        params: PyTree,
        slots: PyTree,
        table: TableSpec,
        num_shards: int,
    ) -> list[State]:
        without_key = params._replace(key=None)
        return hashed_rows.unstack((without_key, slots), len(self.tables), num_shards)

    def stack(self, parts: Sequence[State], like: PyTree, num_shards: int) -> State:
        written, slots = hashed_rows.stack(parts, num_shards)
        # `parts` contains no PRNG keys, because `unstack` leaves out the PRNG keys. Take the PRNG
        # keys from the parameters `like`.
        return written._replace(key=like.key), slots

    def counts(self, params: DynamicTable, num_shards: int) -> dict[str, np.ndarray]:
        num_devices = num_shards // len(self.tables)
        capacities = []
        for table in self.tables:
            capacities.append(-(-table.vocabulary_size // num_devices))
        num_padding_rows = max(capacities) - np.asarray(capacities)
        counts = super().counts(params, num_shards)
        counts["rows"] = counts["rows"] - np.tile(num_padding_rows, num_devices)
        return counts


DRAWS = 0x61646D74
"""Number that is folded into a table's PRNG key before the random draws for admission.

Folding in `DRAWS` makes the draws for admission independent of the random initial values of the
rows."""


def is_drawn(
    key: KeyOrKeys,
    keys: Keys,
    number: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    probability: float,
) -> Bool[Array, " nnz"]:
    """Mask of the keys that a random draw admits in step `number`.

    Each occurrence of a key admits the key with `probability`. The probability that no occurrence
    admits the key is `(1 - probability) ** occurrences`. For each key and step, one 32-bit number
    is drawn from the table's PRNG key, folded with `DRAWS`, the step and the two 32-bit lanes of
    the key. A key is admitted if its drawn number, divided by `2**32`, is at least the probability
    that no occurrence admits the key. The probability that no occurrence admits a key is computed
    as a product of float32 numbers, so that the rounding is the same with every compiler.

    Args:
      key: PRNG key of the table, or one PRNG key for each table that shares the storage.
      keys: distinct keys and padding.
      number: index of the step.
      occurrences: number of occurrences of each key in the batch.
      probability: probability that one occurrence of a key admits the key, in (0, 1].
    """

    def key_of_step(table_key: PRNGKeyArray) -> PRNGKeyArray:
        key_of_draws = jax.random.fold_in(table_key, DRAWS)
        return jax.random.fold_in(key_of_draws, number)

    keys_of_step = jax.vmap(key_of_step)(key.reshape(-1))
    if not key.ndim:
        keys_of_step = keys_of_step[0]
    bits = api.row_bits(keys_of_step, (keys.high, keys.low), 1, keys.table)
    draws = bits[:, 0].astype(jnp.float32) * 2.0**-32

    # `squares[bit]` is `(1 - probability) ** (2**bit)`. The probability that no occurrence admits a
    # key is the product of `squares[bit]` over all bits that are 1 in `occurrences`.
    powers = [(1.0 - probability) ** (2**bit) for bit in range(31)]
    squares = jnp.asarray(powers, jnp.float32)

    def multiply(bit: Array, chance: Array) -> Array:
        has_bit = (occurrences >> bit) & 1 == 1
        return jnp.where(has_bit, chance * squares[bit], chance)

    start = jnp.ones(keys.shape, jnp.float32) + varying_zero(occurrences).astype(jnp.float32)
    chance_of_refusal = jax.lax.fori_loop(0, 31, multiply, start)
    return keys.is_key & (draws >= chance_of_refusal)
