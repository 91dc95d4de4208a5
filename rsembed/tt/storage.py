"""Stores a table of an `EmbeddingCollection` as a tensor train: `storage=TensorTrain(...)`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import cast, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed import specs
from rsembed.arrays import is_traced
from rsembed.checks import NonNegativeInt, PositiveInt, check_fields
from rsembed.initial_values import table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.keys import Keys
from rsembed.optimizers.base import OptimizerSpec, Slots
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import as_dtype
from rsembed.storage.protocol import (
    Found,
    Pool,
    ReadAhead,
    State,
    Storage,
    TableRows,
    Vectors,
    on_host,
    parts,
)
from rsembed.tt import hot_rows
from rsembed.tt.cores import Cores, digits_of, entries_of, full_weight, pooled_rows
from rsembed.tt.hot_rows import CachedTrain, Directory
from rsembed.tt.new_cores import WeightDistribution, from_dense, init_cores
from rsembed.tt.spec import TTSpec

_FIRST_FACTOR = re.compile(r"(?<=tt_p_shapes=\()\d+")
Params = Cores | CachedTrain
"""Parameters of a table: the cores, or a `CachedTrain` if the storage has a cache."""
AllSlots = tuple[PyTree, ...]
"""Optimizer state: the slots of each core.

With a cache, a pair: the slots of the cores, and the slots of the cached rows.
"""


@no_type_check  # Arguments may be any sequences, which `__post_init__` converts to tuples.
@dataclasses.dataclass(frozen=True, repr=False)
class TensorTrain(Storage):
    """Stores a table as tensor-train cores, in a small fraction of the bytes of a dense table.

    A row is computed when it is looked up. The gradient of a row goes to one slice of each core.
    The optimizer of the table updates the cores, and treats a slice like a row of a dense table.
    Every step updates all slices, so an optimizer with momentum also moves slices that no id of the
    batch reads.

    Args:
      tt_ranks: inner ranks, one fewer than cores. None: the largest ranks that fit `bytes`.
      tt_p_shapes: row factors. Default: `suggested_tt_shapes` of the number of rows.
      tt_q_shapes: column factors. Default: `suggested_tt_shapes` of the embedding dimension.
      bytes: maximum size of the cores in bytes, as an alternative to ranks and factors. See
        `TTSpec.for_budget`.
      weight_dist: distribution of the initial weights, "normal" by default. See `init_cores`. The
        `initializer` of the `TableSpec` has no effect.
      cache_rows: number of rows to cache as float32 vectors. The rows with the most reads are
        cached. A lookup of a cached row reads a stored vector and multiplies no slices, and a step
        updates the stored vector. With `cache_rows=0`, the default, the storage has no cache. See
        `hot_rows`.
      counted_ids: maximum number of ids for which reads are counted. A row without a read count
        cannot enter the cache. 0, the default: 16 ids per cached row, rounded up to a power of two.
      populate_every: interval of `hot_rows.populate` in steps, 100 by default. `hot_rows.populate`
        fills the cache with the most-read rows, and halves all read counts.
      tables: tables that share this storage. Users leave this field empty: collections and modules
        set the field. The cores of the tables have slices of equal shapes, and are concatenated
        along the first axis. The row numbers of a table are offset by the number of rows of all
        earlier tables.

    Raises: ValueError: both or neither of `tt_ranks` and `bytes` are set, or the distribution is
      unknown.

    Example:
      >>> import jax, rsembed as rs
      >>> from rsembed.tt import TensorTrain
      >>> table = rs.TableSpec(name="item", vocabulary_size=10_000, embedding_dim=16, storage=TensorTrain((8, 8)))
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="history", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> collection.lookup(state, {"history": [[17, 4], [9_999]]})["history"].shape
      (2, 16)
    """

    tt_ranks: tuple[int, ...] | None = None
    tt_p_shapes: tuple[int, ...] | None = None
    tt_q_shapes: tuple[int, ...] | None = None
    bytes: int | None = None
    weight_dist: WeightDistribution = "normal"
    cache_rows: NonNegativeInt = 0
    counted_ids: NonNegativeInt = 0
    populate_every: PositiveInt = 100
    tables: tuple[TableSpec, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tt_ranks", "tt_p_shapes", "tt_q_shapes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if (self.tt_ranks is None) == (self.bytes is None):
            raise ValueError("TensorTrain needs either tt_ranks or bytes.")
        if self.bytes is not None and (self.tt_p_shapes or self.tt_q_shapes):
            raise ValueError(
                "TensorTrain: bytes chooses the factors too; leave tt_p_shapes and tt_q_shapes out."
            )

    def __repr__(self) -> str:
        """Description of the storage in checkpoints.

        The description mentions the cache only if the storage has a cache.
        """
        num_fields = 8 if self.cache_rows else 5
        descriptions = []
        for field in dataclasses.fields(self)[:num_fields]:
            descriptions.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"TensorTrain({', '.join(descriptions)})"

    @property
    def sums_gradients(self) -> bool:
        """True if the storage has no cache, so that every step updates all parameters.

        With a cache, a step does not change cached rows that were not read.
        """
        return not self.cache_rows

    def spec_of(self, table: TableSpec) -> TTSpec:
        """Factors and ranks of the cores of `table`."""
        return _spec_of(self, table.vocabulary_size, table.embedding_dim, table.dtype)

    def specs_of(self, table: TableSpec) -> tuple[TTSpec, ...]:
        """Factors and ranks of all tables that share the storage with `table`."""
        all_specs = []
        for member in self.tables_of(table):
            storage = cast(TensorTrain, member.storage)
            all_specs.append(storage.spec_of(member))
        return tuple(all_specs)

    def resolved(self, table: TableSpec) -> TensorTrain:
        """A copy of the storage with explicit ranks and factors, and the distribution "normal".

        Two storages can load each other's cores if their `resolved` copies are equal.
        """
        spec = self.spec_of(table)
        return dataclasses.replace(
            self,
            tt_ranks=spec.tt_ranks,
            tt_p_shapes=spec.tt_p_shapes,
            tt_q_shapes=spec.tt_q_shapes,
            bytes=None,
            weight_dist="normal",
        )

    def resizable(self, table: TableSpec, saved: str) -> bool:
        """Whether `saved` and this storage differ at most in the first row factor.

        `saved` is the description of the storage that wrote a file. The first row factor belongs to
        the most significant digit of an id, so slices that are appended to the first core and its
        slots add rows at the end of the table.
        """
        current = repr(self.resolved(table))
        return _FIRST_FACTOR.sub("", saved) == _FIRST_FACTOR.sub("", current)

    def part_sizes(self, table: TableSpec) -> tuple[int, ...]:
        """Number of slices that `table` has in each core."""
        return self.spec_of(table).tt_p_shapes

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Shapes of the slices of each core. Tables with equal slice shapes can share a storage.

        A storage with a cache is not shared, so the key is None.
        """
        return None if self.cache_rows else self.spec_of(table).slice_shapes

    def sharing(self, tables: Sequence[TableSpec]) -> TensorTrain:
        """A copy of this storage for `tables`, which must have slices of equal shapes."""
        return dataclasses.replace(self, tables=tuple(tables))

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All tables that share the storage, in the order of their cores."""
        return self.tables or (table,)

    def unstack(
        self,
        params: Params,
        slots: AllSlots,
        table: TableSpec,
        num_shards: int,
    ) -> list[tuple[Params, AllSlots]]:
        """Cores and slots of each table that shares the storage, without the cache.

        If the field `tables` is empty, the storage belongs to one table, and the result is a list
        with one pair: the unchanged `params` and `slots`, including the cache.
        """
        del num_shards
        if not self.tables:
            return [(params, slots)]
        sizes = [spec.tt_p_shapes for spec in self.specs_of(table)]
        cores = parts(cores_of(params), sizes)
        core_slots: list[AllSlots] = [()] * len(cores)
        if slots:
            core_slots = parts(self.core_slots(slots), sizes)
        return list(zip(cores, core_slots, strict=True))

    def stack(
        self,
        parts: Sequence[tuple[Params, AllSlots]],
        like: Params,
        num_shards: int,
    ) -> State:
        """Concatenates the cores and slots of all tables. Inverse of `unstack`."""
        del like, num_shards
        cores, slots = zip(*parts, strict=True)
        return joined(cores), joined(slots)

    def check(self, table: TableSpec) -> None:
        """Checks that this storage can store the table.

        Raises: ValueError: the ranks, factors or bytes do not fit the sizes of the table, or the
          dtype or rounding of the table is unsupported.
        """
        if table.dtype == "float16" or table.stochastic_rounding:
            raise ValueError(
                f"table {table.name!r}: TensorTrain keeps float32 or bfloat16 cores, rounded to "
                f"nearest; got dtype {table.dtype!r} and "
                f"stochastic_rounding={table.stochastic_rounding}."
            )
        if table.initializer is not specs.default_initializer:
            logging.getLogger("rsembed").warning(
                "table %r: its initializer has no effect: TensorTrain draws cores by "
                "weight_dist=%r. Give a whole table to collection.with_tables for the train "
                "closest to it.",
                table.name,
                self.weight_dist,
            )
        try:
            self.spec_of(table)
        except ValueError as error:
            raise ValueError(f"table {table.name!r}: {error}") from error

    def init(
        self,
        key: PRNGKeyArray,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        """Parameters with random cores and an empty cache, and their initial slots."""
        del shard, num_shards
        names = [member.name for member in self.tables_of(table)]
        return self.init_from_keys(table_keys(key, names), table)

    def init_from_keys(
        self,
        keys: PRNGKeyArray,
        table: TableSpec,
        weight_dist: WeightDistribution | None = None,
    ) -> tuple[Params, AllSlots]:
        """Parameters with random cores and an empty cache, and their initial slots.

        Args:
          keys: one random key for each table that shares the storage.
          table: spec of any table that shares the storage.
          weight_dist: distribution of the initial weights. None, the default: each table has the
            distribution `weight_dist` of its `TensorTrain`.
        """
        tables = self.tables_of(table)
        numbers_by_kind: dict[tuple[TTSpec, WeightDistribution], list[int]] = {}
        for number, member in enumerate(tables):
            storage = cast(TensorTrain, member.storage)
            kind = (storage.spec_of(member), weight_dist or storage.weight_dist)
            numbers_by_kind.setdefault(kind, []).append(number)
        cores_by_number: dict[int, Cores] = {}
        # One vmapped program draws all tables of equal shape and distribution.
        for (spec, dist), numbers in numbers_by_kind.items():
            draw = functools.partial(init_cores, spec=spec, weight_dist=dist, dtype=table.dtype)
            kind_keys = keys[np.asarray(numbers)]
            batched_cores = jax.vmap(draw)(kind_keys)
            for k, number in enumerate(numbers):
                cores_by_number[number] = tuple(core[k] for core in batched_cores)
        cores_of_tables = [cores_by_number[number] for number in range(len(tables))]
        cores = joined(cores_of_tables)
        slots = init_core_slots(table.optimizer, cores)
        return self.with_empty_cache(cores, slots, table)

    def with_empty_cache(
        self,
        cores: Cores,
        slots: AllSlots,
        table: TableSpec,
    ) -> tuple[Params, AllSlots]:
        """Adds an empty cache to cores and their slots, if the storage has a cache."""
        if not self.cache_rows:
            return cores, slots
        capacity = min(self.cache_rows, self.num_ids(table))
        rows = jnp.zeros((capacity, table.embedding_dim), jnp.float32)
        row_slots = table.optimizer.init_slots(rows)
        num_counts = hot_rows.num_counts_of(capacity, self.counted_ids)
        directory = hot_rows.empty(capacity, num_counts)
        return CachedTrain(cores, rows, directory), (slots, row_slots)

    def num_ids(self, table: TableSpec) -> int:
        """Number of rows of all tables that share the storage."""
        return sum(member.vocabulary_size for member in self.tables_of(table))

    def look_up(
        self,
        params: Params,
        call: Call,
        table: TableSpec,
    ) -> list[Float[Array, "_ dim"]]:
        """Pooled rows of every segment of a kernel call, in float32.

        The pooled rows are differentiable with respect to cores, cached rows and weights.
        """
        all_specs = self.specs_of(table)
        output_shapes, _ = call.outputs([table.embedding_dim])
        sizes = [shape[0] for shape in output_shapes]
        rows, bags, gains = entries_of(call)
        digits, is_row = digits_of(all_specs, rows)
        bags = jnp.where(is_row, bags, NO_ROW)
        cache_outputs: Sequence[Array] = ()
        if isinstance(params, CachedTrain):
            cache_slots, cache_call = _cache_call(params.directory, call, rows, bags, gains)
            bags = jnp.where(cache_slots == NO_ROW, bags, NO_ROW)
            cache_outputs = api.lookup((params.rows,), cache_call)
        # `pooled_rows` gets the default implementation as an argument, because the default can
        # change between calls, and `jit` compiles `pooled_rows` again only if an argument changes.
        implementation = "plain" if api.default_implementation() == "reference" else None
        pooled = pooled_rows(
            cores_of(params),
            digits,
            bags,
            gains,
            slice_shapes=all_specs[0].slice_shapes,
            num_bags=sum(sizes),
            implementation=implementation,
        )
        ends = np.cumsum(sizes).tolist()
        outputs = jnp.split(pooled, ends[:-1])
        for number, cache_output in enumerate(cache_outputs):
            outputs[number] = outputs[number] + cache_output
        return outputs

    def pooled(
        self,
        params: Params,
        keys: Keys,
        call: Call,
        table: TableSpec,
        pool: Pool,
        ahead: ReadAhead | None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """See `Storage.pooled`.

        Without a `quantization_config`, `look_up` computes the pooled rows, and `pool` is not
        called.
        """
        if table.quantization_config is not None:
            return super().pooled(params, keys, call, table, pool, ahead)
        num_missing = jnp.zeros((), jnp.int32)
        return self.look_up(params, call, table), num_missing

    def read(
        self,
        params: Params,
        keys: Keys,
        table: TableSpec,
        ahead: ReadAhead | None = None,
    ) -> Vectors:
        """Rows of `keys` in float32, from the cache or the cores.

        The second result, the number of keys without a row, is always 0.
        """
        del ahead
        num_missing = jnp.zeros((), jnp.int32)
        return self.vectors(params, _rows(keys), table), num_missing

    def vectors(
        self,
        params: Params,
        rows: Int[Array, " nnz"],
        table: TableSpec,
    ) -> Float[Array, "nnz dim"]:
        """Rows with the row numbers `rows`, in float32, from the cache or the cores."""
        call = Call.of([IdList.single(rows)], ["sum"])
        return self.look_up(params, call, table)[0]

    def whole(
        self,
        params: Params,
        table: TableSpec,
        number: int,
    ) -> Float[Array, "vocab dim"]:
        """All rows of one of the tables that share the storage, in float32.

        Args:
          params: parameters of the storage.
          table: spec of any of the tables.
          number: index of the table among the tables that share the storage.
        """
        specs = self.specs_of(table)
        sizes = [spec.tt_p_shapes for spec in specs]
        cores_of_tables = parts(cores_of(params), sizes)
        rows = full_weight(specs[number], cores_of_tables[number])
        if not isinstance(params, CachedTrain):
            return rows
        first_row = sum(spec.num_embeddings for spec in specs[:number])
        ids = params.directory.ids
        table_ids = jnp.where(ids < first_row, NO_ROW, ids - first_row)
        return rows.at[table_ids].set(params.rows, mode="drop")

    def rows(
        self,
        params: Params,
        slots: AllSlots,
        table: TableSpec,
        num_shards: int,
    ) -> dict[str, Array]:
        """Dictionary with one entry, "values": all rows of a table in float32."""
        storage = cast(TensorTrain, table.storage)
        return {"values": storage.whole(params, table, 0)}

    def optimizer_state(
        self,
        params: Params,
        slots: AllSlots,
        table: TableSpec,
        num_shards: int,
    ) -> AllSlots:
        """A copy of `slots`: the slots of the cores and, with a cache, also of the cached rows."""
        return jax.tree.map(jnp.copy, slots)

    def find(
        self,
        params: PyTree,
        slots: AllSlots,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        """Parameters and slots after the reads are counted, and the row number of each key.

        With a cache, `find` counts the reads, and calls `populate` every `populate_every` steps.
        Without a cache, parameters and slots are returned unchanged.
        """
        rows = _rows(keys)
        if not self.cache_rows:
            return params, slots, rows
        directory = hot_rows.count(params.directory, rows, occurrences)
        params = params._replace(directory=directory)
        number = jnp.int32(0) if step.number is None else step.number
        is_due = number % self.populate_every == self.populate_every - 1

        def populate(
            _: Array,
            state: tuple[CachedTrain, AllSlots],
        ) -> tuple[CachedTrain, AllSlots]:
            params, slots = state
            return self.populate(params, slots, table)

        # `fori_loop` with at most one iteration updates arrays in place, but `lax.cond` may copy
        # arrays.
        num_iterations = is_due.astype(jnp.int32)
        params, slots = jax.lax.fori_loop(0, num_iterations, populate, (params, slots))
        return params, slots, rows

    def populate(
        self,
        params: CachedTrain,
        slots: AllSlots,
        table: TableSpec,
    ) -> tuple[CachedTrain, AllSlots]:
        """Fills the cache with the most-read rows, and returns new parameters and slots.

        See `hot_rows.populate`.
        """
        core_slots, row_slots = slots
        specs = self.specs_of(table)
        params, row_slots = hot_rows.populate(specs, params, row_slots, table.optimizer)
        return params, (core_slots, row_slots)

    def step(
        self,
        params: Params,
        slots: AllSlots,
        gradients: CallGradients,
        table: TableSpec,
        step: Step,
        d_cores: Cores | None = None,
    ) -> State:
        """Updates all cores and the cached rows that were read.

        The method returns new parameters and slots. Cached rows that were not read do not change,
        and neither do their slots.

        Args:
          params: cores, and with a cache also the cached rows.
          slots: optimizer state of `params`.
          gradients: kernel call of the lookup, and gradients of its outputs.
          table: spec of the table.
          step: number and hyperparameters of the optimizer step.
          d_cores: gradients of the cores, if the caller has already computed these gradients. None,
            the default: `step` computes the gradients of the cores.
        """
        if d_cores is None:
            d_cores = self.gradients(params, gradients, table)
        core_slots = self.core_slots(slots)
        cores, core_slots = self.step_all(cores_of(params), core_slots, d_cores, table, step)
        if not isinstance(params, CachedTrain):
            return cores, core_slots
        entries = entries_of(gradients.call)
        _, cache_call = _cache_call(params.directory, gradients.call, *entries)
        row_gradients = dataclasses.replace(gradients, call=cache_call)
        rows, row_slots = api.update(params.rows, slots[1], row_gradients, step)
        return params._replace(cores=cores, rows=rows), (core_slots, row_slots)

    def core_slots(self, slots: AllSlots) -> AllSlots:
        """Optimizer state of the cores, without the optimizer state of cached rows."""
        if self.cache_rows:
            return cast(AllSlots, slots[0])
        return slots

    def gradients(
        self,
        params: Params,
        gradients: CallGradients,
        table: TableSpec,
    ) -> Cores:
        """Gradients of all cores in float32, before they are rounded to the dtype of the cores."""

        def widened(leaf: Array) -> Array:
            return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

        wide_params = jax.tree.map(widened, params)
        d_cores, _ = self.pulled(wide_params, gradients, table)
        return d_cores

    def pulled(
        self,
        params: Params,
        gradients: CallGradients,
        table: TableSpec,
    ) -> tuple[Cores, Float[Array, " nnz"] | None]:
        """Gradients of all cores in their dtype, and of the weights in the first list of ids.

        Without weights, the second result is None.
        """
        look_up = functools.partial(self.look_up, table=table)
        _, pull = jax.vjp(look_up, params, gradients.call)
        d_outputs = [d_output.astype(jnp.float32) for d_output in gradients.d_outputs]
        d_params, d_call = pull(d_outputs)
        return cores_of(d_params), d_call.lists[0].weights

    def step_all(
        self,
        params: Cores,
        slots: AllSlots,
        gradients: Cores,
        table: TableSpec,
        step: Step,
    ) -> State:
        """Updates all slices in float32, and returns new cores and slots.

        Before the update, gradients are rounded to the dtype of the cores.
        """
        new_cores = []
        new_slots = []
        for core, core_slots, gradient in zip(params, slots, gradients, strict=True):
            rounded = gradient.astype(core.dtype).astype(jnp.float32)
            wide = core.astype(jnp.float32)
            stepped, stepped_slots = table.optimizer.step_rows(
                wide,
                core_slots,
                rounded,
                step.hyper,
            )
            new_cores.append(stepped.astype(core.dtype))
            new_slots.append(stepped_slots)
        return tuple(new_cores), tuple(new_slots)

    def with_rows(
        self,
        params: Params,
        slots: AllSlots,
        rows: TableRows,
        table: TableSpec,
        num_shards: int,
    ) -> State:
        """Replaces the cores, empties the cache, and returns new parameters and unchanged slots.

        Args:
          params: parameters before the replacement.
          slots: optimizer state, which is returned unchanged.
          rows: a tuple of cores, a dictionary from core numbers to cores, as in checkpoints, or a
            dense table, which `from_dense` decomposes.
          table: spec of the table.
          num_shards: not used, because every device has all cores.

        Raises: ValueError: the shapes of the cores or of the dense table do not match the table.
        """
        del num_shards
        spec = cast(TensorTrain, table.storage).spec_of(table)
        dense_shape = (table.vocabulary_size, table.embedding_dim)
        dtype = cores_of(params)[0].dtype
        where = f"table {table.name!r}"
        cores = rows
        if isinstance(rows, Mapping):
            # The names in `rows` are core numbers, so they are sorted as numbers: "2" before "10".
            names = sorted(rows, key=lambda name: (len(name), name))
            cores = [rows[name] for name in names]
        is_list = isinstance(cores, (tuple, list))
        if is_list and tuple(map(np.shape, cores)) == spec.core_shapes:
            if not is_traced(cores):
                host_cores = []
                for k, core in enumerate(cores):
                    host_cores.append(as_dtype(on_host(core), dtype, where, f"core {k}"))
                cores = host_cores
            new_cores = tuple(jnp.asarray(core, dtype) for core in cores)
        elif not isinstance(rows, (Mapping, tuple)) and np.shape(rows) == dense_shape:
            new_cores = from_dense(spec, as_dtype(cores, np.float32, where, "values"), dtype=dtype)
        else:
            raise ValueError(
                f"{where} is kept as a tensor train: pass a whole table {list(dense_shape)}, which "
                f"is decomposed, or a tuple of cores {list(spec.core_shapes)}."
            )
        if not isinstance(params, CachedTrain):
            return new_cores, slots
        directory = params.directory.forget(0, table.vocabulary_size)
        return params._replace(cores=new_cores, directory=directory), slots

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Number of values in the cores and the cache, and number of values in their slots."""
        spec = self.spec_of(table)
        num_cached = min(self.cache_rows, table.vocabulary_size)
        cache_shape = (num_cached, table.embedding_dim)
        arrays = []
        for shape in (*spec.core_shapes, cache_shape):
            arrays.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        init_slots = functools.partial(init_core_slots, table.optimizer)
        slots = jax.eval_shape(init_slots, arrays)
        num_slot_values = sum(leaf.size for leaf in jax.tree.leaves(slots))
        return spec.num_params + math.prod(cache_shape), num_slot_values

    def counts(
        self,
        params: Params,
        num_shards: int,
    ) -> dict[str, np.ndarray]:
        """Dictionary from the fields of the `CacheReport` to arrays with one number per shard.

        Each array contains the same number for every shard. The dictionary is empty if the storage
        has no cache.
        """
        if not isinstance(params, CachedTrain):
            return {}
        report = params.directory.report()._asdict()
        return {name: np.full(num_shards, value) for name, value in report.items()}


def joined(parts: Sequence[tuple[PyTree, ...]]) -> PyTree:
    """Concatenates the leaves of several trees, one tree per table, along the first axis."""
    if len(parts) == 1:
        return parts[0]

    def concatenated(*leaves: Array) -> Array:
        return jnp.concatenate(leaves)

    return jax.tree.map(concatenated, *parts)


@functools.cache
def _spec_of(
    storage: TensorTrain,
    rows: int,
    dim: int,
    dtype: str,
) -> TTSpec:
    """Factors and ranks of a storage for a table with `rows` rows and `dim` columns."""
    if storage.tt_ranks is None:
        return TTSpec.for_budget(rows, dim, bytes=cast(int, storage.bytes), dtype=dtype)
    return TTSpec.suggest(rows, dim, storage.tt_ranks, storage.tt_p_shapes, storage.tt_q_shapes)


def init_core_slots(
    rule: OptimizerSpec,
    cores: Sequence[PyTree],
) -> tuple[Slots, ...]:
    """Initial optimizer state of each core."""
    slots = []
    for core in cores:
        wide_core = core.astype(jnp.float32)
        slots.append(rule.init_slots(wide_core))
    return tuple(slots)


def cores_of(params: Params) -> Cores:
    """The cores in the parameters of a table, with or without a cache."""
    return params.cores if isinstance(params, CachedTrain) else params


def _cache_call(
    directory: Directory,
    call: Call,
    rows: Array,
    bags: Array,
    gains: Array,
) -> tuple[Int[Array, " nnz"], Call]:
    """Cache slot of every id in `call`, and a kernel call that pools only the cached rows.

    Args:
      directory: the directory of the cache.
      call: kernel call of the lookup.
      rows: row number of every id, from `entries_of`.
      bags: output index of every id. An id with output index `NO_ROW` counts as not cached.
      gains: for every id, the factor that multiplies its row. The gains become the weights of the
        returned call, because the divisor of a mean depends on all ids of the bag, including ids
        that are not cached.
    """
    read_rows = jnp.where(bags == NO_ROW, NO_ROW, rows)
    cache_slots = directory.find(read_rows)
    lists = []
    first = 0
    for ids in call.with_ids(cache_slots).lists:
        last = first + ids.num_entries
        lists.append(dataclasses.replace(ids, weights=gains[first:last]))
        first = last
    segments = []
    for segment in call.segments:
        if segment.combiner != "none":
            segment = segment._replace(combiner="sum")
        segments.append(segment)
    return cache_slots, Call(tuple(lists), tuple(segments))


def _rows(keys: Keys) -> Int[Array, " nnz"]:
    """Row numbers of `keys`, with `NO_ROW` for padding."""
    rows = keys.low.astype(jnp.int32)
    return jnp.where(keys.is_key, rows, NO_ROW)
