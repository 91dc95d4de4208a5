"""The tables of one module, each group of which the train storage keeps; both published classes build on it."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array, Float, PyTree

from rsembed.bags import Bags, check_not_taken, is_traced, narrow_ids
from rsembed.checks import NonNegativeInt, PositiveInt, dtype_among, validated
from rsembed.optimizers import OptimizerSpec
from rsembed.row_gradients import SingleUse, check_gradient
from rsembed.specs import MAX_ROWS
from rsembed.stacking import split_by_memory
from rsembed.tt import hot_rows, programs
from rsembed.tt.cores import AnyCores, Mode, check_cores, check_implementation, check_mode, with_room
from rsembed.tt.hot_rows import CacheReport
from rsembed.tt.programs import FusedParam, FusedState, HotRows, OptimType, TTGradients, rule_of
from rsembed.tt.spec import CORE_DTYPES, specs_of_tables
from rsembed.tt.storage import CachedTrain, cores_of, init_core_slots

Rate = Annotated[float, "[0, inf)"]
STEPPED = "this backward has already stepped the cores; look the batch up again."


class TTTables(nnx.Module):
    """State and behaviour that both modules share; they add the published constructor.

    Tables with equal column factors and ranks form a group, whose cores stand one behind the other along their first
    axis: one lookup serves the group, whatever the tables' sizes.

    Attributes:
      is_single: whether one table comes and goes without an axis of tables.
      specs: one per table.
      groups: tables of every group.
      storages: what keeps each group.
      core_groups: per group, one variable `[sum of p_t over its tables, R_{t-1} * q_t * R_t]` per core.
      learning_rate: of the fused update; a variable, so changing it compiles nothing.
    """

    is_single: ClassVar[bool]

    @validated
    def __init__(
        self,
        num_tables: PositiveInt,
        num_embeddings: int | Sequence[int],
        embedding_dim: int | Sequence[int],
        *,
        tt_ranks: Sequence[Any],
        tt_p_shapes: Sequence[Any] | None = None,
        tt_q_shapes: Sequence[Any] | None = None,
        enforce_embedding_dim: bool = True,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        optimizer: OptimType | str = OptimType.SGD,
        learning_rate: Rate = 0.1,
        eps: Rate = 1e-10,
        weight_dist: str = "normal",
        dtype: Any = jnp.float32,
        mode: str = "sum",
        padding_idx: int | None = None,
        bounds_check: str = "raise",
        include_last_offset: bool | None = None,
        implementation: str | None = None,
        use_cache: bool = False,
        cache_size: NonNegativeInt = 0,
        hashtbl_size: NonNegativeInt = 0,
        rngs: nnx.Rngs | None = None,
    ):
        del enforce_embedding_dim  # it always is
        for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
            if value:
                raise NotImplementedError(f"{name}={value!r} is not offered: no row is stored that it could change.")
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        shapes = {"tt_ranks": tt_ranks, "tt_p_shapes": tt_p_shapes, "tt_q_shapes": tt_q_shapes}
        specs = specs_of_tables(num_tables, **sizes, **shapes)
        num_rows = [spec.num_embeddings for spec in specs]
        dtype = jnp.dtype(dtype_among(CORE_DTYPES, dtype, "dtype"))
        check_implementation(implementation)
        check_mode(mode)
        if bounds_check not in ("raise", "ignore"):
            raise ValueError(f"bounds_check must be 'raise' or 'ignore', got {bounds_check!r}.")
        if padding_idx is not None and not 0 <= padding_idx < min(num_rows):
            raise ValueError(f"padding_idx={padding_idx} is no row of every table; it must be an id that all have.")
        by_shape: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
        for k, spec in enumerate(specs):
            by_shape.setdefault(spec.slice_shapes, []).append(k)
        groups = split_by_memory(by_shape.values(), dict(enumerate(num_rows)), MAX_ROWS)
        self.specs = nnx.static(tuple(specs))
        self.groups = nnx.static(tuple(map(tuple, groups)))
        self.optimizer, self.eps = OptimType(optimizer), eps
        rule = rule_of(self.optimizer, eps)
        # An optimizer outside has slots of its own.
        self.rule: OptimizerSpec = nnx.static(rule if sparse else rule_of(OptimType.SGD, eps))
        self.sparse, self.mode, self.padding_idx = sparse, cast(Mode, mode), padding_idx
        self.bounds_check, self.include_last_offset = bounds_check, include_last_offset
        self.implementation, self.weight_dist, self.dtype = implementation, weight_dist, dtype
        self.deterministic = False
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
        self.caches = nnx.List([HotRows(params, slots[1], kind) for params, slots in drawn] if use_cache else [])

    def _draw(self, weight_dist: str, rngs: nnx.Rngs | None) -> list[tuple[PyTree, PyTree]]:
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

    def reset_parameters(self, weight_dist: str | None = None, *, rngs: nnx.Rngs | None = None) -> None:
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
        return tuple(self.storages[g].unstack(*self._state(g), self.storages[g].tables[0], 1)[number][0])

    def set_cores(self, cores: AnyCores, table: int = 0) -> None:
        """Puts cores in place of those of a table, such as those of `from_dense`.

        The optimizer state of the old cores and the cached rows of the table are forgotten; read counts stay, and so
        does the number of steps where there are other tables.

        Raises: ValueError: their shapes do not fit, or a number is not finite.
        """
        g, number, first = self._place_of(table)
        new = tuple(core.astype(self.dtype) for core in check_cores(self.specs[table], cores))
        for t, core in enumerate(new):
            if not is_traced(core) and not bool(jnp.isfinite(core).all()):
                raise ValueError(f"core {t} for table {table} has a number that is not finite; clean the cores first.")
        storage, (params, slots) = self.storages[g], self._state(g)
        parts = storage.unstack(params, slots, storage.tables[0], 1)
        parts[number] = new, init_core_slots(self.rule, new)
        all_cores, core_slots = storage.stack(parts, params, 1)
        if not self.caches:
            self._put(g, all_cores, core_slots)
        else:
            directory = hot_rows.forget(params.directory, first, first + self.specs[table].num_embeddings)
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

    @property
    def num_embeddings(self) -> int | list[int]:
        """Rows: of each table, or one number where all have as many; so do the next ones."""
        return _of_all([spec.num_embeddings for spec in self.specs])

    @property
    def embedding_dim(self) -> int | list[int]:
        """Length of a row."""
        return _of_all([spec.embedding_dim for spec in self.specs])

    @property
    def tt_p_shapes(self) -> list[int] | list[list[int]]:
        """Row factors."""
        return _of_all([list(spec.tt_p_shapes) for spec in self.specs])

    @property
    def tt_q_shapes(self) -> list[int] | list[list[int]]:
        """Column factors."""
        return _of_all([list(spec.tt_q_shapes) for spec in self.specs])

    @property
    def tt_ranks(self) -> list[int] | list[list[int]]:
        """All ranks, from 1 to 1."""
        return _of_all([list(spec.ranks) for spec in self.specs])

    @property
    def tt_ndim(self) -> int | list[int]:
        """Number of cores."""
        return _of_all([spec.num_cores for spec in self.specs])

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
        """
        if offsets is None and len(self.specs) == 1 and not isinstance(indices, Bags):
            flat = jnp.asarray(indices) if all(np.ndim(own) == 0 for own in indices) else None
            indices = indices if flat is None else flat.reshape(-1, 1)
        self._count(self._by_group(self._read(indices, offsets, None)))

    def cache_populate(self) -> None:
        """Keeps the most read rows from now on; those that leave the cache are what their cores give. See `hot_rows`.

        Warns where no read was counted, which inside `jit` nobody knows.
        """
        directories = [cache.directory.get_value() for cache in self.caches]
        if directories and not is_traced(directories) and not any(own.lookups for own in self.cache_reports()):
            warnings.warn("cache_populate: nothing was counted, so nothing is cached.", stacklevel=2)
        for g, _ in enumerate(self.caches):
            self._put(g, *programs.populated(self.storages[g], *self._state(g)))

    def _count(self, batch: Sequence[Bags]) -> None:
        for g, cache in enumerate(self.caches):
            counted = programs.counted(self._state(g)[0].directory, batch[g].ids)
            with contextlib.suppress(TraceContextError):  # a plain jit that closes over the module changes nothing
                cache.directory.set_value(counted)

    def reset_cache(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Forgets counts and cached rows; returns, per group, the ids and rows that were learned."""
        learned = [cache.learned() for cache in self.caches]
        for g, _ in enumerate(self.caches):
            (params, slots), storage = self._state(g), self.storages[g]
            self._put(g, *storage.with_no_rows(params.cores, slots[0], storage.tables[0]))
        return learned

    def cache_reports(self) -> list[CacheReport]:
        """Contents, hits and evictions, per group of tables."""
        return [hot_rows.report(cache.directory.get_value()) for cache in self.caches]

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
        how, permit = (self.mode, self.implementation), SingleUse(STEPPED)
        outputs, params, batch = self._look_up(bags)
        shapes = [output.shape for output in outputs]

        def backward(d_output: PyTree) -> TTGradients | None:
            d_outputs = [d_output] if self.is_single else list(d_output)
            for table, (own, shape) in enumerate(zip(d_outputs, shapes, strict=True)):
                check_gradient(own, f"d_output of table {table}")
                if np.shape(own) != shape:
                    raise ValueError(f"d_output of table {table} has shape {np.shape(own)}, its output {shape}.")
            every = [jnp.asarray(d, jnp.float32) for d in d_outputs]
            by_group = [jnp.concatenate([every[k] for k in group]) for group in self.groups]
            given = zip(self.storages, params, batch, by_group, strict=True)
            if self.sparse:
                permit.use()
                pulled, rate, number = [], self.learning_rate.get_value(), self.step.get_value()
                for g, (storage, *own) in enumerate(given):
                    *new, d_weights = programs.stepped(storage, *how, *self._state(g), *own, rate, number)
                    self._put(g, *new)
                    pulled.append(((), (), d_weights))
                self.step.set_value(number + 1)
            else:
                pulled = [programs.pulled(storage, *how, *own) for storage, *own in given]
            d_cores, d_rows, d_weights = zip(*pulled, strict=True)
            d_weight = None if bags.weights is None else sum(d_weights)[: bags.ids.shape[0]]
            if not self.sparse:
                return TTGradients(d_cores, d_rows if self.caches else (), d_weight)
            return None if d_weight is None else TTGradients((), (), d_weight)

        return self._joined(outputs), backward

    def _joined(self, tables: list[Array]) -> PyTree:
        """What is of every table, in the form of the module."""
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
            pooled = programs.looked_up(given[0], self.mode, self.implementation, *given[1:])
            by_table.update(zip(group, pooled.reshape(len(group), -1, pooled.shape[1]), strict=True))
        return [by_table[k] for k in range(len(self.specs))], params, batch

    def _by_group(self, bags: Bags) -> list[Bags]:
        """What a batch asks every group for: rows, numbered from table to table, in the bags of its tables."""
        sizes = tuple(spec.num_embeddings for spec in self.specs)
        bags = with_room(dataclasses.replace(bags, ids=narrow_ids(bags.ids)))
        return programs.rows_by_group(self.groups, sizes, self.padding_idx, bags)

    def _read(self, *given: PyTree) -> Bags:
        """Checked bags, those of table 0 first."""
        name, ignores = type(self).__name__, self.bounds_check == "ignore"
        return programs.read_bags(self.specs, *given, name=name, last=self.include_last_offset, ignores=ignores)


def _of_all(values: list[Any]) -> Any:
    """One value, if it is the same for all tables, or one for each."""
    if len(values) > 1 and (isinstance(values[0], Array) or any(value != values[0] for value in values)):
        return values
    return values[0]
