"""`TTEmbeddingBag` and `TableBatchedTTEmbeddingBag`: drop-ins for embedding bags whose tables are tensor trains."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array, Float, PyTree

from rsembed.bags import Bags, check_not_taken, is_traced, narrow_ids
from rsembed.checks import NonNegativeInt, PositiveInt, check_finite, dtype_among, validated
from rsembed.optimizers import OptimizerSpec
from rsembed.row_gradients import check_gradient
from rsembed.specs import MAX_ROWS
from rsembed.stacking import split_by_memory
from rsembed.tt import programs
from rsembed.tt.cores import AnyCores, Mode, check_cores, padded_bags
from rsembed.tt.hot_rows import CacheReport
from rsembed.tt.new_cores import WeightDistribution
from rsembed.tt.programs import FusedParam, FusedState, OptimType, TTGradients, rule_of
from rsembed.tt.spec import CORE_DTYPES, TTSpec, specs_of_tables
from rsembed.tt.storage import CachedTrain, cores_of, init_core_slots

Rate = Annotated[float, "[0, inf)"]


def _of_all(values: list[Any]) -> Any:
    """One value, if it is the same for all tables, or one for each."""
    if len(values) > 1 and (isinstance(values[0], Array) or any(value != values[0] for value in values)):
        return values
    return values[0]


def _no_cache(module: str) -> NotImplementedError:
    """The error for a cache in a module that an optimizer outside trains."""
    return NotImplementedError(
        f"{module}: sparse=False has no cache of rows. An optimizer outside keeps its state by place in the cache, and "
        "cache_populate gives places to other rows, which would then move by what the rows before them have learned. "
        "Take sparse=True, which moves the state with the row, or use_cache=False; or train the table with any optax "
        "rule and a cache in the core: TableSpec(optimizer=rsembed.from_optax(...), "
        "storage=rsembed.tt.TensorTrain(tt_ranks, cache_rows=...))."
    )


def _of_tables(read: Callable[[TTSpec], Any], doc: str) -> property:
    """A published attribute: one value where all tables have the same, else a list of one for each."""
    return property(lambda self: _of_all([read(spec) for spec in self.specs]), doc=doc)


class TableBatchedTTEmbeddingBag(nnx.Module):
    """Embedding bags over several tables that are never stored, only their tensor-train cores.

    Sizes, dimensions, ranks and factors are those of all tables, or sequences of one per table. Tables with equal
    column factors and ranks form a group, whose cores stand one behind the other along their first axis: one lookup
    serves the group, whatever the tables' sizes.

    Args:
      num_tables: number of tables.
      num_embeddings: rows.
      embedding_dim: any length of row.
      tt_ranks: one per boundary between cores, so `d - 1` of them make `d` cores.
      tt_p_shapes: row factors, of product at least `num_embeddings`; None takes `suggested_tt_shapes`.
      tt_q_shapes: column factors, of product `embedding_dim`; None takes `suggested_tt_shapes` without rounding up.
      sparse: True steps the cores in `backward` (see `vjp`) with `optimizer` and hides them from `nnx.grad`; False
        makes them `nnx.Param`s that any optax rule trains, without a cache.
      optimizer: of the fused step: SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD (one state per core slice) or ADAM.
      learning_rate: of the fused step.
      eps: added to the denominator, both Adagrads only.
      weight_dist: see `init_cores`.
      dtype: of the cores, float32 or bfloat16. Rows and sums are float32.
      mode: "sum" or "mean", which divides by the number of ids.
      include_last_offset: see `__call__`; must be said under `jit`.
      enforce_embedding_dim: accepted; the dimension is always enforced.
      use_cache: keep the most read rows uncompressed and train them by themselves, from the first `cache_populate` on.
        None is True for a `TTEmbeddingBag` with `sparse=True`, as published, and False otherwise. With `sparse=False`
        a cache is refused: an optimizer outside keeps its state by place, and places change their rows.
      cache_size: rows kept, per group of tables of equal column factors and ranks; 0 takes a thousandth.
      hashtbl_size: ids counted at most; 0, or less than six per cached row, takes 16.
      rngs: its stream `params` draws the cores; None means `nnx.Rngs(0)`, as the published calls pass none.

    Attributes:
      is_single: whether one table comes and goes without an axis of tables.
      specs: one per table.
      groups: tables of every group.
      storages: what keeps each group.
      core_groups: per group, one variable `[sum of p_t over its tables, R_{t-1} * q_t * R_t]` per core.
      caches: per group, `rows` of all places, their optimizer `state`, and the `directory` of whose they are.
      learning_rate: of the fused update; a variable, so changing it compiles nothing.

    Raises:
      ValueError: shapes do not fit, a sequence has not one entry per table, or an option is unknown.
      NotImplementedError: the optimizer or option is not offered, or `use_cache=True` meets `sparse=False`.

    Source: FBTT-Embedding, `TableBatchedTTEmbeddingBag`.

    Example:
      >>> import jax.numpy as jnp
      >>> tables = TableBatchedTTEmbeddingBag(2, [10, 600], 4, tt_ranks=[2], sparse=False)
      >>> tables(jnp.asarray([[1, 2], [3, -1], [599, 0], [7, 7]])).shape  # two bags a table
      (2, 2, 4)
    """

    is_single: ClassVar[bool] = False

    @validated
    def __init__(
        self,
        num_tables: PositiveInt,
        num_embeddings: int | Sequence[int],
        embedding_dim: int | Sequence[int],
        tt_ranks: Sequence[Any] | None = None,
        tt_p_shapes: Sequence[Any] | None = None,
        tt_q_shapes: Sequence[Any] | None = None,
        optimizer: OptimType = OptimType.SGD,
        learning_rate: Rate = 0.1,
        eps: Rate = 1e-10,
        sparse: bool = True,
        use_cache: bool | None = None,
        cache_size: NonNegativeInt = 0,
        hashtbl_size: NonNegativeInt = 0,
        weight_dist: WeightDistribution = "normal",
        enforce_embedding_dim: bool = True,
        *,
        dtype: Any = jnp.float32,
        mode: Mode = "sum",
        include_last_offset: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        del enforce_embedding_dim  # it always is
        if tt_ranks is None:
            raise TypeError(
                "tt_ranks is missing: one rank per boundary between cores, such as tt_ranks=[16] for two cores."
            )
        if use_cache is None:
            use_cache = self.is_single and sparse
        if use_cache and not sparse:
            raise _no_cache(type(self).__name__)
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        shapes = {"tt_ranks": tt_ranks, "tt_p_shapes": tt_p_shapes, "tt_q_shapes": tt_q_shapes}
        specs = specs_of_tables(num_tables, **sizes, **shapes)
        dtype = jnp.dtype(dtype_among(CORE_DTYPES, dtype, "dtype"))
        by_shape: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
        for k, spec in enumerate(specs):
            by_shape.setdefault(spec.slice_shapes, []).append(k)
        groups = split_by_memory(by_shape.values(), {k: spec.num_embeddings for k, spec in enumerate(specs)}, MAX_ROWS)
        self.specs = nnx.static(tuple(specs))
        self.groups = nnx.static(tuple(map(tuple, groups)))
        self.optimizer, self.eps = optimizer, eps
        rule = rule_of(optimizer, eps)
        # An optimizer outside has slots of its own.
        self.rule: OptimizerSpec = nnx.static(rule if sparse else rule_of(OptimType.SGD, eps))
        self.sparse, self.mode, self.include_last_offset = sparse, mode, include_last_offset
        self.weight_dist, self.dtype, self.deterministic = weight_dist, dtype, False
        cache = (cache_size, hashtbl_size) if use_cache else None
        kind = FusedParam if sparse else nnx.Param
        like = {"optimizer": self.rule, "dtype": dtype.name}
        storages = [programs.storage_of([specs[k] for k in own], cache, like) for own in groups]
        self.storages = nnx.static(tuple(storages))
        drawn = self._draw(weight_dist, rngs)
        self.core_groups = nnx.List([nnx.List([kind(core) for core in cores_of(params)]) for params, _ in drawn])
        self.slots = nnx.List([FusedState(slots[0] if use_cache else slots) for _, slots in drawn])
        self.learning_rate = FusedState(jnp.asarray(learning_rate, jnp.float32))
        self.step = FusedState(jnp.zeros((), jnp.int32))
        self.caches = nnx.List(
            nnx.Dict(rows=FusedParam(params.rows), state=FusedState(slots[1]), directory=FusedState(params.directory))
            for params, slots in (drawn if use_cache else [])
        )

    def _draw(self, weight_dist: WeightDistribution, rngs: nnx.Rngs | None) -> list[tuple[PyTree, PyTree]]:
        """Initial parameters and slots of every group."""
        key, num_tables = (rngs or nnx.Rngs(0)).params(), len(self.specs)
        keys = jax.random.split(key, num_tables) if num_tables > 1 else key[None]
        groups = zip(self.storages, self.groups, strict=True)
        return [storage.start(keys[np.asarray(own)], storage.tables[0], weight_dist) for storage, own in groups]

    def _state(self, g: int) -> tuple[PyTree, PyTree]:
        """Parameters and slots of a group, as its storage has them.

        Raises: RuntimeError: a step took arrays of the module over.
        """
        cores, slots = tuple(core.get_value() for core in self.core_groups[g]), self.slots[g].get_value()
        state: PyTree = cores, slots
        if self.caches:
            cache = self.caches[g]
            stored = CachedTrain(cores, cache.rows.get_value(), cache.directory.get_value())
            state = stored, (slots, cache.state.get_value())
        way_out = (
            "where an error or Ctrl-C broke that step off, nnx.update(module, state) with the nnx.state that was saved "
            "last; where a copy that shared the arrays took it, go on with the copy"
        )
        check_not_taken(state, f"{type(self).__name__} has lost its cores", way_out)
        return state

    def _put(self, g: int, params: PyTree, slots: PyTree) -> None:
        """The inverse of `_state`."""
        for variable, core in zip(self.core_groups[g], cores_of(params), strict=True):
            nnx.Variable.set_value(variable, core)
        self.slots[g].set_value(self.storages[g].core_slots(slots))
        if self.caches:
            nnx.Variable.set_value(self.caches[g].rows, params.rows)
            self.caches[g].state.set_value(slots[1])
            self.caches[g].directory.set_value(params.directory)

    def reset_parameters(self, weight_dist: WeightDistribution | None = None, *, rngs: nnx.Rngs | None = None) -> None:
        """Draws all cores anew, by default as the constructor did; forgets optimizer state, counts and cached rows."""
        for g, drawn in enumerate(self._draw(weight_dist or self.weight_dist, rngs)):
            self._put(g, *drawn)
        self.step.set_value(jnp.zeros((), jnp.int32))

    @validated
    def set_learning_rate(self, lr: Rate | Float[Array, ""]) -> None:
        """Learning rate of the fused updates from now on. Raises: ValueError: it is negative or not finite."""
        self.learning_rate.set_value(jnp.asarray(lr, jnp.float32))

    def _place_of(self, table: int) -> tuple[int, int, int]:
        """A table's group, and its number and first row there."""
        if not 0 <= table < len(self.specs):
            raise ValueError(f"there is no table {table}, only {len(self.specs)} tables.")
        ((g, group),) = [(g, group) for g, group in enumerate(self.groups) if table in group]
        number = group.index(table)
        return g, number, sum(self.specs[k].num_embeddings for k in group[:number])

    def cores_of(self, table: int = 0) -> tuple[Array, ...]:
        """The cores of one table."""
        g, number, _ = self._place_of(table)
        return cores_of(self.storages[g].unstack(*self._state(g), self.storages[g].tables[0], 1)[number][0])

    def set_cores(self, cores: AnyCores, table: int = 0) -> None:
        """Puts cores in place of those of a table, such as those of `from_dense`.

        The optimizer state of the old cores and the cached rows of the table are forgotten; read counts stay, and so
        does the number of steps where there are other tables.

        Raises: ValueError: their shapes do not fit, or a number is not finite.
        """
        g, number, first = self._place_of(table)
        new = tuple(core.astype(self.dtype) for core in check_cores(self.specs[table], cores))
        for t, core in enumerate(new):
            check_finite(core, f"core {t} for table {table}", way_out="clean the cores first")
        storage, (params, slots) = self.storages[g], self._state(g)
        parts = storage.unstack(params, slots, storage.tables[0], 1)
        parts[number] = new, init_core_slots(self.rule, new)
        all_cores, core_slots = storage.stack(parts, params, 1)
        if not self.caches:
            self._put(g, all_cores, core_slots)
        else:
            directory = params.directory.forget(first, first + self.specs[table].num_embeddings)
            self._put(g, params._replace(cores=all_cores, directory=directory), (core_slots, slots[1]))
        if len(self.specs) == 1:
            self.step.set_value(jnp.zeros((), jnp.int32))

    def get_params(self) -> list[Array]:
        """The values of all cores, group after group, then those of cached rows; changes nothing."""
        return [core.get_value() for core in [*self.tt_cores, *(cache.rows for cache in self.caches)]]

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.specs)

    num_embeddings = _of_tables(lambda spec: spec.num_embeddings, "Rows.")
    embedding_dim = _of_tables(lambda spec: spec.embedding_dim, "Length of a row.")
    tt_p_shapes = _of_tables(lambda spec: list(spec.tt_p_shapes), "Row factors.")
    tt_q_shapes = _of_tables(lambda spec: list(spec.tt_q_shapes), "Column factors.")
    tt_ranks = _of_tables(lambda spec: list(spec.ranks), "All ranks, from 1 to 1.")
    tt_ndim = _of_tables(lambda spec: spec.num_cores, "Number of cores.")

    @property
    def tt_cores(self) -> list[nnx.Variable]:
        """The cores' variables, group after group; tables of a group stand one behind the other."""
        return [core for group in self.core_groups for core in group]

    @property
    def optimizer_state(self) -> list[Array]:
        """The state of the fused update, one array per core and slot."""
        return [leaf for own in self.slots for leaf in jax.tree.leaves(own.get_value())]

    @property
    def use_cache(self) -> bool:
        """Whether rows may be cached."""
        return bool(self.caches)

    @property
    def cache_weight(self) -> Any:
        """All places of stored rows `[places, dim]`, in a list of one per group of tables; None without a cache."""
        return _of_all([cache.rows.get_value() for cache in self.caches]) if self.caches else None

    def full_weight(self, table: int | None = None) -> PyTree:
        """One table, expanded, cached rows included; or all: `[tables, vocab, dim]` when they are of one size.

        Tables of different sizes come as a list, and a module of one table has that alone.
        """
        if table is None:
            return self._joined([self.full_weight(k) for k in range(len(self.specs))])
        g, number, _ = self._place_of(table)
        whole: Array = self.storages[g].whole(self._state(g)[0], self.storages[g].tables[0], number)
        return whole

    def update_cache(self, indices: PyTree, offsets: object = None) -> None:
        """Counts reads without a lookup. A lookup counts as well, except after `eval()`.

        Args:
          indices: ids as for a lookup; of one table also flat ids without offsets.
          offsets: as for a lookup.

        Raises: NotImplementedError: the module was made with `sparse=False`, which has no cache.
        """
        self._check_may_cache()
        if offsets is None and len(self.specs) == 1 and not isinstance(indices, Bags):
            flat = jnp.asarray(indices) if all(np.ndim(own) == 0 for own in indices) else None
            indices = indices if flat is None else flat.reshape(-1, 1)
        self._count(self._by_group(self._read(indices, offsets, None)))

    def cache_populate(self) -> None:
        """Keeps the most read rows from now on; those that leave the cache are what their cores give. See `hot_rows`.

        Warns if no read was counted; inside `jit` that is unknown.

        Raises: NotImplementedError: the module was made with `sparse=False`, which has no cache.
        """
        self._check_may_cache()
        directories = [cache.directory.get_value() for cache in self.caches]
        if directories and not is_traced(directories) and not any(own.lookups for own in self.cache_reports()):
            warnings.warn("cache_populate: nothing was counted, so nothing is cached.", stacklevel=2)
        for g, _ in enumerate(self.caches):
            self._put(g, *programs.populated(self.storages[g], *self._state(g)))

    def _check_may_cache(self) -> None:
        if not self.sparse:
            raise _no_cache(type(self).__name__)

    def _count(self, batch: Sequence[Bags]) -> None:
        for g, cache in enumerate(self.caches):
            counted = programs.counted(self._state(g)[0].directory, batch[g].ids)
            with contextlib.suppress(TraceContextError):  # a plain jit that closes over the module changes nothing
                cache.directory.set_value(counted)

    def reset_cache(self) -> None:
        """Forgets counts and cached rows, and what these have learned; `full_weight` has it before."""
        for g, _ in enumerate(self.caches):
            (params, slots), storage = self._state(g), self.storages[g]
            self._put(g, *storage.with_no_rows(params.cores, slots[0], storage.tables[0]))

    def cache_reports(self) -> list[CacheReport]:
        """Contents, hits and evictions, per group of tables."""
        return [cache.directory.get_value().report() for cache in self.caches]

    def __call__(
        self, indices: object, offsets: object = None, per_sample_weights: object = None, warmup: bool = True
    ) -> PyTree:
        """Pooled rows of every bag, of which an empty one gives zeros.

        They are `[batch, dim]` of `TTEmbeddingBag`, `[tables, batch, dim]` of `TableBatchedTTEmbeddingBag`, and there
        one array per table when their dimensions differ.

        Args:
          indices: flat ids; or a dense array `[bags, ids per bag]`, -1 for no id; or `Bags`; or lists of ids. The bags
            of table 0 come first, then as many of table 1, and so on.
          offsets: start of each bag of flat ids; the end of the last may follow. Of one table, a last entry equal to
            the number of ids is taken for that end unless `include_last_offset=False` says that an empty bag starts
            there.
          per_sample_weights: one float per id.
          warmup: accepted, without effect.

        Raises: ValueError or TypeError: naming the id, bag or offset that is wrong.
        """
        del warmup
        bags = self._read(indices, offsets, per_sample_weights)
        return self._joined(self._look_up(bags)[0])

    def vjp(
        self, indices: object, offsets: object = None, per_sample_weights: object = None
    ) -> tuple[PyTree, Callable[[PyTree], TTGradients | None]]:
        """Pooled rows, and `backward(d_output)`.

        With `sparse=True` backward steps the cores, once, and returns None. With `sparse=False` it changes nothing and
        returns `TTGradients`.
        """
        bags = self._read(indices, offsets, per_sample_weights)
        is_used = False
        outputs, params, batch = self._look_up(bags)
        shapes = [output.shape for output in outputs]

        def backward(d_output: PyTree) -> TTGradients | None:
            nonlocal is_used
            d_outputs = [d_output] if self.is_single else list(d_output)
            for table, (own, shape) in enumerate(zip(d_outputs, shapes, strict=True)):
                check_gradient(own, f"d_output of table {table}")
                if np.shape(own) != shape:
                    raise ValueError(f"d_output of table {table} has shape {np.shape(own)}, its output {shape}.")
            every = [jnp.asarray(d, jnp.float32) for d in d_outputs]
            by_group = [jnp.concatenate([every[k] for k in group]) for group in self.groups]
            given = zip(self.storages, params, batch, by_group, strict=True)
            if self.sparse:
                if is_used:
                    raise RuntimeError("this backward has already stepped the cores; look the batch up again.")
                is_used = True
                pulled, rate, number = [], self.learning_rate.get_value(), self.step.get_value()
                for g, (storage, *own) in enumerate(given):
                    *new, d_weights = programs.stepped(storage, self.mode, *self._state(g), *own, rate, number)
                    self._put(g, *new)
                    pulled.append(((), d_weights))
                self.step.set_value(number + 1)
            else:
                pulled = [programs.pulled(storage, self.mode, *own) for storage, *own in given]
            d_cores, d_weights = zip(*pulled, strict=True)
            d_weight = None if bags.weights is None else sum(d_weights)[: bags.ids.shape[0]]
            if not self.sparse:
                return TTGradients(d_cores, d_weight)
            return None if d_weight is None else TTGradients((), d_weight)

        return self._joined(outputs), backward

    def _joined(self, tables: list[Array]) -> PyTree:
        """The arrays of all tables as the module returns them; of equal shape, they are stacked."""
        if self.is_single:
            return tables[0]
        return jnp.stack(tables) if len({table.shape for table in tables}) == 1 else tables

    def _look_up(self, bags: Bags) -> tuple[list[Array], list[PyTree], list[Bags]]:
        """Pooled rows of every table, and the parameters and the batch of every group that gave them."""
        batch = self._by_group(bags)
        if not self.deterministic:
            self._count(batch)
        params = [self._state(g)[0] for g in range(len(self.groups))]
        by_table: dict[int, Array] = {}
        for group, *given in zip(self.groups, self.storages, params, batch, strict=True):
            pooled = programs.looked_up(given[0], self.mode, *given[1:])
            by_table.update(zip(group, pooled.reshape(len(group), -1, pooled.shape[1]), strict=True))
        return [by_table[k] for k in range(len(self.specs))], params, batch

    def _by_group(self, bags: Bags) -> list[Bags]:
        """The batch as one `Bags` per group of like tables, whose ids are numbered on from each table to the next."""
        sizes = tuple(spec.num_embeddings for spec in self.specs)
        bags = padded_bags(dataclasses.replace(bags, ids=narrow_ids(bags.ids)))
        return programs.rows_by_group(self.groups, sizes, bags)

    def _read(self, *given: PyTree) -> Bags:
        """Checked bags, those of table 0 first."""
        return programs.read_bags(self.specs, *given, name=type(self).__name__, last=self.include_last_offset)


class TTEmbeddingBag(TableBatchedTTEmbeddingBag):
    """An embedding bag over one table of `num_embeddings` rows, kept as tensor-train cores, and cached by default.

    Args:
      num_embeddings: rows.
      embedding_dim: any length of row.
      published: by position, as published: `tt_ranks, tt_p_shapes, tt_q_shapes, optimizer, learning_rate, eps, sparse,
        use_cache, cache_size, hashtbl_size, weight_dist, enforce_embedding_dim`; from `tt_p_shapes` on where `tt_ranks`
        is a keyword, as in the example.
      options: the arguments of `TableBatchedTTEmbeddingBag` by keyword.

    Raises: as `TableBatchedTTEmbeddingBag`.

    Source: FBTT-Embedding, `TTEmbeddingBag`.

    Example:
      >>> import jax.numpy as jnp
      >>> embedding_sum = TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2], sparse=False)
      >>> embedding_sum(jnp.asarray([1, 2, 4, 5, 4, 3, 2, 9]), jnp.asarray([0, 4])).shape
      (2, 3)
    """

    is_single = True

    def __init__(self, num_embeddings: int, embedding_dim: int, *published: Any, **options: Any):
        if "tt_ranks" in options:
            published = options.pop("tt_ranks"), *published
        super().__init__(1, num_embeddings, embedding_dim, *published, **options)

    @property
    def spec(self) -> TTSpec:
        """Rows, factors and ranks."""
        return self.specs[0]
