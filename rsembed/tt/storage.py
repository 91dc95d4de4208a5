"""A tensor train as what a table of the core is made of: `TableSpec(..., storage=TensorTrain(...))`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import cast, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed import specs
from rsembed.bags import is_traced
from rsembed.checks import NonNegativeInt, PositiveInt, check_fields
from rsembed.initial_values import table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Step
from rsembed.keys import Keys
from rsembed.optimizers.base import OptimizerSpec, Slots
from rsembed.specs import TableSpec
from rsembed.storage.logical_rows import as_dtype
from rsembed.storage.protocol import Found, Pool, ReadAhead, State, Storage, Vectors, on_host, parts
from rsembed.tt import hot_rows
from rsembed.tt.cores import Cores, digits_of, entries_of, full_weight, pooled_rows
from rsembed.tt.hot_rows import CachedTrain, Directory
from rsembed.tt.new_cores import WeightDistribution, from_dense, init_cores
from rsembed.tt.spec import TTSpec

_FIRST_FACTOR = re.compile(r"(?<=tt_p_shapes=\()\d+")
Params = Cores | CachedTrain
AllSlots = tuple[PyTree, ...]
"""Slots of each core; with stored rows a pair: the slots of the cores, and those of the rows."""


@no_type_check  # sequences become tuples in __post_init__
@dataclasses.dataclass(frozen=True, repr=False)
class TensorTrain(Storage):
    """Keeps a table as tensor-train cores, at a small part of its bytes.

    A row is made when it is looked up. Its gradient is spread over one slice per core, and the table's optimizer steps
    the cores, a slice being what a row is for a dense table. All slices are stepped: an optimizer with moments moves
    slices that no id named, too.

    Args:
      tt_ranks: inner ranks, one fewer than cores; None takes what `bytes` affords.
      tt_p_shapes: row factors; None suggests them.
      tt_q_shapes: column factors; None suggests them.
      bytes: budget of the cores, instead of ranks and factors; see `TTSpec.for_budget`.
      weight_dist: distribution of the initial table, see `init_cores`. The table's own initializer has no effect.
      cache_rows: keep so many of the most read rows as they are, in float32, and train them by themselves: they cost no
        products. See `hot_rows`.
      counted_ids: ids whose reads are counted, to find these rows; 0 takes 16 per row.
      populate_every: steps after which the rows are chosen anew, and counts are halved.
      tables: set by a collection: those whose cores, of equal slices, stand one behind the other, as do their rows'
        numbers.

    Raises: ValueError: neither or both of ranks and bytes are given, or the distribution is unknown.

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
            object.__setattr__(self, name, None if value is None else tuple(value))
        if (self.tt_ranks is None) == (self.bytes is None):
            raise ValueError("TensorTrain needs either tt_ranks or bytes.")
        if self.bytes is not None and (self.tt_p_shapes or self.tt_q_shapes):
            raise ValueError("TensorTrain: bytes chooses the factors too; leave tt_p_shapes and tt_q_shapes out.")

    def __repr__(self) -> str:
        """Description of the storage that files keep; a cache is in it only where there is one."""
        names = [field.name for field in dataclasses.fields(self)]
        shown = (f"{name}={getattr(self, name)!r}" for name in names[: 8 if self.cache_rows else 5])
        return f"TensorTrain({', '.join(shown)})"

    @property
    def sums_gradients(self) -> bool:
        """Stored rows are stepped one by one, where a batch reads them."""
        return not self.cache_rows

    def spec_of(self, table: TableSpec) -> TTSpec:
        """The train that keeps `table`."""
        return _train_of(self, table.vocabulary_size, table.embedding_dim, table.dtype)

    def specs_of(self, table: TableSpec) -> tuple[TTSpec, ...]:
        """The trains of all tables that share the storage."""
        return tuple(cast(TensorTrain, own.storage).spec_of(own) for own in self.tables_of(table))

    def resolved(self, table: TableSpec) -> TensorTrain:
        """Ranks and factors said, however they were chosen; how cores were drawn no longer matters."""
        spec = self.spec_of(table)
        factors = {"tt_p_shapes": spec.tt_p_shapes, "tt_q_shapes": spec.tt_q_shapes}
        return dataclasses.replace(self, tt_ranks=spec.tt_ranks, **factors, bytes=None, weight_dist="normal")  # type: ignore[arg-type]

    def resizable(self, table: TableSpec, saved: str) -> tuple[tuple[str, ...], ...] | None:
        """The first core and its slots, where trains differ in the first row factor alone.

        It is the most significant digit of an id, so that slices at the end of the core add rows at the end.
        """
        here = repr(self.resolved(table))
        if _FIRST_FACTOR.sub("", saved) != _FIRST_FACTOR.sub("", here):
            return None
        if self.cache_rows:
            return ("tables", table.name, "cores", "0"), ("slots", table.name, "0", "0")
        return ("tables", table.name, "0"), ("slots", table.name, "0")

    def part_sizes(self, table: TableSpec) -> tuple[int, ...]:
        """Its rows in each core."""
        return self.spec_of(table).tt_p_shapes

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Trains whose cores have equal slices stand one behind the other, but for those with stored rows."""
        return None if self.cache_rows else self.spec_of(table).slice_shapes

    def sharing(self, tables: Sequence[TableSpec]) -> TensorTrain:
        """One storage for tables with equal slices, and stored rows as this one has."""
        return dataclasses.replace(self, tables=tuple(tables))

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All that share the storage."""
        return self.tables or (table,)

    def unstack(
        self, params: Params, slots: AllSlots, table: TableSpec, num_shards: int
    ) -> list[tuple[Params, AllSlots]]:
        """Cores and slots of each table, of those slots that there are; of one that shares nothing, all as it is."""
        del num_shards
        if not self.tables:
            return [(params, slots)]
        sizes = [spec.tt_p_shapes for spec in self.specs_of(table)]
        cores = parts(cores_of(params), sizes)
        return list(zip(cores, parts(self.core_slots(slots), sizes) if slots else [()] * len(cores), strict=True))

    def stack(self, parts: Sequence[tuple[Params, AllSlots]], like: Params, num_shards: int) -> State:
        """The inverse of `unstack`, of trains without stored rows where several share."""
        del like, num_shards
        return joined([cores for cores, _ in parts]), joined([slots for _, slots in parts])

    def check(self, table: TableSpec) -> None:
        """Raises: ValueError: the factors do not fit the table, or it asks for what trains of cores cannot do."""
        if table.dtype == "float16" or table.stochastic_rounding:
            raise ValueError(
                f"table {table.name!r}: TensorTrain keeps float32 or bfloat16 cores, rounded to nearest; got dtype "
                f"{table.dtype!r} and stochastic_rounding={table.stochastic_rounding}."
            )
        if table.initializer is not specs.default_initializer:
            logging.getLogger("rsembed").warning(
                "table %r: its initializer has no effect: TensorTrain draws cores by weight_dist=%r. Give a whole "
                "table to collection.with_tables for the train closest to it.",
                table.name,
                self.weight_dist,
            )
        try:
            self.spec_of(table)
        except ValueError as error:
            raise ValueError(f"table {table.name!r}: {error}") from error

    def init(self, key: PRNGKeyArray, table: TableSpec, shard: Int[Array, ""], num_shards: int) -> State:
        """Random cores, and the slots of each; no stored rows."""
        del shard, num_shards
        tables = self.tables_of(table)
        return self.start(table_keys(key, [own.name for own in tables]), table)

    def start(
        self, keys: PRNGKeyArray, table: TableSpec, weight_dist: WeightDistribution | None = None
    ) -> tuple[Params, AllSlots]:
        """The same, given the key of each table; `weight_dist` is of all, or each table's own."""
        tables, by_kind = self.tables_of(table), dict[tuple[TTSpec, WeightDistribution], list[int]]()
        for number, own in enumerate(tables):
            storage = cast(TensorTrain, own.storage)
            by_kind.setdefault((storage.spec_of(own), weight_dist or storage.weight_dist), []).append(number)
        drawn: dict[int, Cores] = {}
        for (spec, dist), numbers in by_kind.items():  # like tables in one program
            draw = functools.partial(init_cores, spec=spec, weight_dist=dist, dtype=table.dtype)
            found = jax.vmap(draw)(keys[np.asarray(numbers)])
            drawn |= {number: tuple(core[k] for core in found) for k, number in enumerate(numbers)}
        cores = joined([drawn[number] for number in range(len(tables))])
        return self.with_no_rows(cores, init_core_slots(table.optimizer, cores), table)

    def with_no_rows(self, cores: Cores, slots: AllSlots, table: TableSpec) -> tuple[Params, AllSlots]:
        """Parameters and slots of these cores, without stored rows where there may be some."""
        if not self.cache_rows:
            return cores, slots
        capacity = min(self.cache_rows, self.num_ids(table))
        rows = jnp.zeros((capacity, table.embedding_dim), jnp.float32)
        directory = hot_rows.empty(capacity, hot_rows.num_counts_of(capacity, self.counted_ids))
        return CachedTrain(cores, rows, directory), (slots, table.optimizer.init_slots(rows))

    def num_ids(self, table: TableSpec) -> int:
        """Rows of all tables that share the storage, which are numbered through."""
        return sum(own.vocabulary_size for own in self.tables_of(table))

    def look_up(self, params: Params, call: Call, table: TableSpec) -> list[Float[Array, "_ dim"]]:
        """Pooled rows of every list, float32; differentiable in cores, stored rows and weights."""
        all_specs, sizes = self.specs_of(table), [shape[0] for shape in call.outputs([table.embedding_dim])[0]]
        rows, bags, gains = entries_of(call)
        digits, is_row = digits_of(all_specs, rows)
        bags, stored = jnp.where(is_row, bags, NO_ROW), None
        if isinstance(params, CachedTrain):
            places, stored = _stored_call(params.directory, call, rows, bags, gains)
            bags = jnp.where(places == NO_ROW, bags, NO_ROW)
        # The choice is an argument of the compiled function, which would otherwise remember the first one.
        implementation = "plain" if api.default_implementation() == "reference" else None
        pooled = pooled_rows(
            *(cores_of(params), digits, bags, gains),
            slice_shapes=all_specs[0].slice_shapes,
            num_bags=sum(sizes),
            implementation=implementation,
        )
        outputs = jnp.split(pooled, np.cumsum(sizes)[:-1].tolist())
        if not isinstance(params, CachedTrain) or stored is None:
            return outputs
        return [own + more for own, more in zip(outputs, api.lookup((params.rows,), stored), strict=True)]

    def pooled(
        self, params: PyTree, keys: Keys, call: Call, table: TableSpec, pool: Pool, ahead: ReadAhead | None
    ) -> tuple[PyTree, Int[Array, ""]]:
        """As every storage; rows are pooled as they are made."""
        if table.quantization_config is not None:
            return super().pooled(params, keys, call, table, pool, ahead)
        return self.look_up(params, call, table), jnp.zeros((), jnp.int32)

    def read(self, params: Params, keys: Keys, table: TableSpec, ahead: ReadAhead | None = None) -> Vectors:
        """Rows, float32, made of their slices or stored."""
        del ahead
        return self.vectors(params, _rows(keys), table), jnp.zeros((), jnp.int32)

    def vectors(self, params: Params, rows: Int[Array, " nnz"], table: TableSpec) -> Float[Array, "nnz dim"]:
        """Rows, float32, made of their slices or stored."""
        return self.look_up(params, Call.of([IdList.single(rows)], ["sum"]), table)[0]

    def whole(self, params: Params, table: TableSpec, number: int) -> Float[Array, "vocab dim"]:
        """All rows of one of the tables that share the storage, float32, made of their slices or stored."""
        specs = self.specs_of(table)
        first = sum(spec.num_embeddings for spec in specs[:number])
        made = full_weight(specs[number], parts(cores_of(params), [spec.tt_p_shapes for spec in specs])[number])
        if not isinstance(params, CachedTrain):
            return made
        ids = params.directory.ids
        return made.at[jnp.where(ids < first, NO_ROW, ids - first)].set(params.rows, mode="drop")

    def rows(self, params: Params, slots: AllSlots, table: TableSpec, num_shards: int) -> dict[str, Array]:
        """All rows of a table, made of its own cores or stored, float32."""
        return {"values": cast(TensorTrain, table.storage).whole(params, table, 0)}

    def optimizer_state(self, params: Params, slots: AllSlots, table: TableSpec, num_shards: int) -> AllSlots:
        """Copies of the slots of each core."""
        return jax.tree.map(jnp.copy, slots)

    def find(
        self, params: PyTree, slots: PyTree, keys: Keys, occurrences: Array, table: TableSpec, step: Step
    ) -> Found:
        """Every row is there; where some are stored, reads are counted and, now and then, rows chosen."""
        rows = _rows(keys)
        if not self.cache_rows:
            return params, slots, rows
        params = params._replace(directory=hot_rows.count(params.directory, rows, occurrences))
        number = jnp.int32(0) if step.number is None else step.number
        is_turn = (number % self.populate_every == self.populate_every - 1).astype(jnp.int32)
        # A loop of one turn or none keeps arrays where they lie, a branch may not.
        populate = functools.partial(self.populate, table=table)
        return *jax.lax.fori_loop(0, is_turn, lambda _, state: populate(*state), (params, slots)), rows

    def populate(self, params: CachedTrain, slots: AllSlots, table: TableSpec) -> tuple[CachedTrain, AllSlots]:
        """Caches the most read rows from now on; see `hot_rows.populate`."""
        params, row_slots = hot_rows.populate(self.specs_of(table), params, slots[1], table.optimizer)
        return params, (slots[0], row_slots)

    def step(
        self,
        params: Params,
        slots: AllSlots,
        gradients: CallGradients,
        table: TableSpec,
        step: Step,
        d_cores: Cores | None = None,
    ) -> State:
        """One step of all cores with the gradients of rows, pulled back, and of the stored rows that were read.

        The other stored rows and their slots keep their bits; `d_cores` are the cores' gradients where these are known.
        """
        d_cores = self.gradients(params, gradients, table) if d_cores is None else d_cores
        cores, core_slots = self.step_all(cores_of(params), self.core_slots(slots), d_cores, table, step)
        if not isinstance(params, CachedTrain):
            return cores, core_slots
        _, stored = _stored_call(params.directory, gradients.call, *entries_of(gradients.call))
        rows, row_slots = api.update(params.rows, slots[1], dataclasses.replace(gradients, call=stored), step)
        return params._replace(cores=cores, rows=rows), (core_slots, row_slots)

    def core_slots(self, slots: AllSlots) -> AllSlots:
        """Slots of the cores, without those of stored rows."""
        return cast(AllSlots, slots[0]) if self.cache_rows else slots

    def gradients(self, params: Params, gradients: CallGradients, table: TableSpec) -> Cores:
        """Gradients of all cores."""
        # Of cores in float32, so that nothing is rounded before it is summed.
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, params)
        _, pull = jax.vjp(lambda params: self.look_up(params, gradients.call, table), wide)
        (d_params,) = pull([d_output.astype(jnp.float32) for d_output in gradients.d_outputs])
        return cores_of(d_params)

    def step_all(self, params: Cores, slots: AllSlots, gradients: Cores, table: TableSpec, step: Step) -> State:
        """One step of all slices of all cores, in float32, with gradients rounded as the cores are."""
        stepped = [
            table.optimizer.step_rows(
                core.astype(jnp.float32), own, gradient.astype(core.dtype).astype(jnp.float32), step.hyper
            )
            for core, own, gradient in zip(params, slots, gradients, strict=True)
        ]
        cores = tuple(new.astype(core.dtype) for (new, _), core in zip(stepped, params, strict=True))
        return cores, tuple(kept for _, kept in stepped)

    def with_rows(self, params: Params, slots: AllSlots, rows: PyTree, table: TableSpec, num_shards: int) -> State:
        """Cores in a tuple, or in a dictionary as files have them, or those closest to a whole table; slots stay.

        No row is stored then.

        Raises: ValueError: they do not fit the table.
        """
        del num_shards
        spec = cast(TensorTrain, table.storage).spec_of(table)
        whole, dtype = (table.vocabulary_size, table.embedding_dim), cores_of(params)[0].dtype
        where, by_number = f"table {table.name!r}", lambda key: (len(key), key)
        cores = [rows[key] for key in sorted(rows, key=by_number)] if isinstance(rows, Mapping) else rows
        if isinstance(cores, (tuple, list)) and [np.shape(core) for core in cores] == list(spec.core_shapes):
            if not is_traced(cores):
                cores = [as_dtype(on_host(core), dtype, where, f"core {k}") for k, core in enumerate(cores)]
            new = tuple(jnp.asarray(core, dtype) for core in cores)
        elif not isinstance(rows, (Mapping, tuple)) and np.shape(rows) == whole:
            new = from_dense(spec, as_dtype(cores, np.float32, where, "values"), dtype=dtype)
        else:
            raise ValueError(
                f"{where} is kept as a tensor train: give a whole table {list(whole)}, for the closest train, "
                f"or a tuple of cores {list(spec.core_shapes)}."
            )
        if not isinstance(params, CachedTrain):
            return new, slots
        return params._replace(cores=new, directory=params.directory.forget(0, table.vocabulary_size)), slots

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Numbers in the cores and stored rows, and in their slots."""
        spec, rows = self.spec_of(table), min(self.cache_rows, table.vocabulary_size)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in spec.core_shapes]
        arrays.append(jax.ShapeDtypeStruct((rows, table.embedding_dim), jnp.float32))
        slots = jax.eval_shape(lambda arrays: init_core_slots(table.optimizer, arrays), arrays)
        return spec.num_params + rows * table.embedding_dim, sum(leaf.size for leaf in jax.tree.leaves(slots))

    def counts(self, params: Params, num_shards: int) -> dict[str, np.ndarray]:
        """Numbers of the cache on each shard, by the names of `CacheReport`."""
        if not isinstance(params, CachedTrain):
            return {}
        return {name: np.full(num_shards, value) for name, value in params.directory.report()._asdict().items()}


def joined(parts: Sequence[tuple[PyTree, ...]]) -> PyTree:
    """Arrays of each core, those of several tables one behind the other."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@functools.cache
def _train_of(storage: TensorTrain, rows: int, dim: int, dtype: str) -> TTSpec:
    if storage.tt_ranks is None:
        return TTSpec.for_budget(rows, dim, bytes=cast(int, storage.bytes), dtype=dtype)
    return TTSpec.suggest(rows, dim, storage.tt_ranks, storage.tt_p_shapes, storage.tt_q_shapes)


def init_core_slots(rule: OptimizerSpec, cores: Sequence[PyTree]) -> tuple[Slots, ...]:
    """Optimizer state beside each core."""
    return tuple(rule.init_slots(core.astype(jnp.float32)) for core in cores)


def cores_of(params: Params) -> Cores:
    """Cores of a train, with or without stored rows."""
    return params.cores if isinstance(params, CachedTrain) else params


def _stored_call(
    directory: Directory, call: Call, rows: Array, bags: Array, gains: Array
) -> tuple[Int[Array, " nnz"], Call]:
    """Places of entries, see `entries_of`, and the call that reads them with the gains that they have among all."""
    places = directory.find(jnp.where(bags == NO_ROW, NO_ROW, rows))
    stored = call.with_ids(places)
    lists = []
    first = 0
    for ids in stored.lists:
        last = first + ids.num_entries
        lists.append(dataclasses.replace(ids, weights=gains[first:last]))
        first = last
    segments = [own._replace(combiner="none" if own.combiner == "none" else "sum") for own in call.segments]
    return places, Call(tuple(lists), tuple(segments))


def _rows(keys: Keys) -> Int[Array, " nnz"]:
    return jnp.where(keys.is_key, keys.low.astype(jnp.int32), NO_ROW)
