"""Flax modules with tensor-train tables: `TTEmbeddingBag` and `TableBatchedTTEmbeddingBag`."""

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

from rsembed.arrays import check_not_taken, is_traced
from rsembed.bags import Bags, narrow_ids
from rsembed.checks import NonNegativeInt, PositiveInt, check_finite, dtype_among, validated
from rsembed.kernels.contract import Call, CallGradients
from rsembed.optimizers import OptimizerSpec
from rsembed.row_gradients import check_gradient
from rsembed.specs import MAX_ROWS
from rsembed.stacking import split_by_memory
from rsembed.storage.protocol import State
from rsembed.tt import programs
from rsembed.tt.cores import AnyCores, Cores, Mode, SliceShapes, check_cores, padded_bags
from rsembed.tt.hot_rows import CacheReport
from rsembed.tt.new_cores import WeightDistribution
from rsembed.tt.programs import FusedParam, FusedState, OptimType, TTGradients, rule_of
from rsembed.tt.spec import CORE_DTYPES, TTSpec, specs_of_tables
from rsembed.tt.storage import CachedTrain, cores_of, init_core_slots

Rate = Annotated[float, "[0, inf)"]


def _no_cache(module: str) -> NotImplementedError:
    """Error that says why a module with `sparse=False` cannot have a cache."""
    return NotImplementedError(
        f"{module}: a module with sparse=False has no cache of rows. An external optimizer stores "
        "its state by cache slot, and cache_populate puts other rows into the slots, which would "
        "then be stepped with the state of earlier rows. Pass sparse=True, which moves the state "
        "with the row, or use_cache=False; or train the table in an EmbeddingCollection with any "
        "optax optimizer and a cache: TableSpec(optimizer=rsembed.from_optax(...), "
        "storage=rsembed.tt.TensorTrain(tt_ranks, cache_rows=...))."
    )


def _table_property(
    read: Callable[[TTSpec], Any],
    doc: str,
) -> property:
    """Property that reads one value from the spec of each table, and has the same name in FBTT.

    If the values of all tables are equal, the property returns this value, else a list with one
    value per table.
    """

    def read_all(self: TableBatchedTTEmbeddingBag) -> Any:
        values = [read(spec) for spec in self.specs]
        if all(value == values[0] for value in values):
            return values[0]
        return values

    return property(read_all, doc=doc)


class TableBatchedTTEmbeddingBag(nnx.Module):
    """Embedding bags over several tables that are stored as tensor-train cores.

    Every argument about sizes, dimensions, ranks or factors is one value for all tables, or a
    sequence with one value per table. Tables with equal column factors and ranks form a group:
    their cores are concatenated along the first axis, and one lookup handles the whole group.

    Args:
      num_tables: number of tables.
      num_embeddings: number of rows.
      embedding_dim: length of a row, which can be any positive integer.
      tt_ranks: inner ranks, one rank per boundary between two cores. `d - 1` ranks give `d` cores.
      tt_p_shapes: row factors with a product of at least `num_embeddings`. Default:
        `suggested_tt_shapes`.
      tt_q_shapes: column factors with the product `embedding_dim`. Default: `suggested_tt_shapes`
        without rounding up.
      sparse: if True (default), `backward` (see `vjp`) updates the cores with `optimizer`, and the
        cores are hidden from `nnx.grad`. If False, the cores are `nnx.Param`s, which any optax
        optimizer can train, and a cache is not allowed.
      optimizer: optimizer of the update in `backward`: SGD (default), EXACT_ADAGRAD,
        EXACT_ROWWISE_ADAGRAD (one state per core slice) or ADAM.
      learning_rate: learning rate of the update in `backward`, 0.1 by default.
      eps: number that both Adagrad optimizers add to the denominator, 1e-10 by default. SGD and
        Adam ignore `eps`.
      weight_dist: distribution of the initial weights, "normal" by default. See `init_cores`.
      dtype: dtype of the cores, float32 (default) or bfloat16. Rows and sums are float32.
      mode: "sum" (default) or "mean", which divides the sum of a bag by its number of ids.
      include_last_offset: whether the last entry of `offsets` is the end of the last bag. None, the
        default: every call infers the answer from its offsets, as `__call__` describes. Under
        `jit`, a module with one table needs `include_last_offset=True` or False, because the values
        of the offsets are unknown.
      enforce_embedding_dim: ignored, because rows always have exactly `embedding_dim` columns.
      use_cache: whether to store the most-read rows uncompressed and to train them directly. The
        cache stays empty until the first call of `cache_populate`. None, the default: True for a
        `TTEmbeddingBag` with `sparse=True`, as in FBTT, and False otherwise. A cache needs
        `sparse=True`, because an external optimizer would store one state per cache slot, and the
        row in a cache slot can change.
      cache_size: number of cached rows of each group. 0, the default: a thousandth of the group's
        rows, but at least 32 rows, or all rows of a group with fewer than 32 rows.
      hashtbl_size: maximum number of ids for which reads are counted. 0, the default: 16 ids per
        cached row, rounded up to a power of two. A `hashtbl_size` below six times the number of
        cached rows is replaced by the default, with a warning. A `hashtbl_size` below the number of
        cached rows raises an error.
      rngs: random streams. The cores are drawn from the stream `params`. Default: `nnx.Rngs(0)`,
        because calls written for FBTT pass no random streams.

    Attributes:
      is_single: whether the module is a `TTEmbeddingBag`, which has one table and returns outputs
        without an axis of tables.
      specs: the `TTSpec` of each table.
      groups: indices of the tables in each group.
      storages: the `TensorTrain` storage of each group.
      core_groups: for each group, one variable `[sum of p_t over its tables, R_{t-1} * q_t * R_t]`
        per core.
      caches: for each group, the cached `rows`, their optimizer `state`, and the `directory` of
        cached ids.
      learning_rate: learning rate of the update in `backward`. The learning rate is a variable, so
        a new learning rate does not cause a recompilation.

    Raises:
      ValueError: shapes do not match, the length of a sequence differs from the number of tables,
        or an option is unknown.
      NotImplementedError: the module has no fused update for `optimizer`, or `use_cache=True` is
        combined with `sparse=False`.

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
        dtype: object = jnp.float32,
        mode: Mode = "sum",
        include_last_offset: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        del enforce_embedding_dim  # Rows always have exactly `embedding_dim` columns.
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
        groups = self._grouped(specs)
        self.specs = nnx.static(tuple(specs))
        self.groups = nnx.static(tuple(map(tuple, groups)))
        self.optimizer = optimizer
        self.eps = eps
        rule = rule_of(optimizer, eps)
        if not sparse:
            # With `sparse=False`, an external optimizer updates the cores and stores its own state.
            # The module declares SGD as its optimizer, because SGD has no state.
            rule = rule_of(OptimType.SGD, eps)
        self.rule: OptimizerSpec = nnx.static(rule)
        self.sparse = sparse
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.weight_dist = weight_dist
        self.dtype = dtype
        self.deterministic = False
        cache_sizes = None
        if use_cache:
            cache_sizes = (cache_size, hashtbl_size)
        common_fields = {"optimizer": self.rule, "dtype": dtype.name}
        storages = []
        for group in groups:
            group_specs = [specs[k] for k in group]
            storages.append(programs.storage_of(group_specs, cache_sizes, common_fields))
        self.storages = nnx.static(tuple(storages))
        core_variable = FusedParam if sparse else nnx.Param
        self.core_groups: nnx.List[Any] = nnx.List([])
        self.slots: nnx.List[Any] = nnx.List([])
        self.caches: nnx.List[Any] = nnx.List([])
        self.learning_rate = FusedState(jnp.asarray(learning_rate, jnp.float32))
        self.step = FusedState(jnp.zeros((), jnp.int32))
        initial_states = self._initial_states(weight_dist, rngs)
        for storage, (params, slots) in zip(storages, initial_states, strict=True):
            variables = [core_variable(core) for core in cores_of(params)]
            self.core_groups.append(nnx.List(variables))
            self.slots.append(FusedState(storage.core_slots(slots)))
            if use_cache:
                cache = nnx.Dict(
                    rows=FusedParam(params.rows),
                    state=FusedState(slots[1]),
                    directory=FusedState(params.directory),
                )
                self.caches.append(cache)

    @staticmethod
    def _grouped(specs: Sequence[TTSpec]) -> list[list[int]]:
        """Indices of the tables in each group.

        The tables of a group have slices of equal shapes. All tables of a group together have at
        most `MAX_ROWS` rows.
        """
        by_shape: dict[SliceShapes, list[int]] = {}
        num_rows = {}
        for k, spec in enumerate(specs):
            by_shape.setdefault(spec.slice_shapes, []).append(k)
            num_rows[k] = spec.num_embeddings
        return split_by_memory(by_shape.values(), num_rows, MAX_ROWS)

    def _initial_states(
        self,
        weight_dist: WeightDistribution,
        rngs: nnx.Rngs | None,
    ) -> list[State]:
        """Initial parameters and slots of every group."""
        if not rngs:
            rngs = nnx.Rngs(0)
        key = rngs.params()
        keys = key[None]
        if len(self.specs) > 1:
            keys = jax.random.split(key, len(self.specs))
        states = []
        for storage, group in zip(self.storages, self.groups, strict=True):
            group_keys = keys[np.asarray(group)]
            table = storage.tables[0]
            states.append(storage.init_from_keys(group_keys, table, weight_dist))
        return states

    def _state(self, g: int) -> State:
        """Parameters and slots of group `g`, in the form that the storage of the group expects.

        Raises: RuntimeError: the arrays of the module were donated to a step, so they are deleted.
        """
        cores = tuple(core.get_value() for core in self.core_groups[g])
        slots = self.slots[g].get_value()
        state: State = (cores, slots)
        if self.caches:
            cache = self.caches[g]
            rows = cache.rows.get_value()
            directory = cache.directory.get_value()
            params = CachedTrain(cores, rows, directory)
            row_slots = cache.state.get_value()
            state = (params, (slots, row_slots))
        way_out = (
            "if an error or Ctrl-C stopped the step, call nnx.update(module, state) with the "
            "nnx.state that was saved last; if the step was that of a copy that shared the arrays, "
            "continue with the copy"
        )
        check_not_taken(state, f"{type(self).__name__} has lost its cores", way_out)
        return state

    def _put(
        self,
        g: int,
        params: PyTree,
        slots: PyTree,
    ) -> None:
        """Sets the variables of group `g` to new parameters and slots, in the form of `_state`."""
        for variable, core in zip(self.core_groups[g], cores_of(params), strict=True):
            nnx.Variable.set_value(variable, core)
        core_slots = self.storages[g].core_slots(slots)
        self.slots[g].set_value(core_slots)
        if self.caches:
            cache = self.caches[g]
            nnx.Variable.set_value(cache.rows, params.rows)
            cache.state.set_value(slots[1])
            cache.directory.set_value(params.directory)

    def reset_parameters(
        self,
        weight_dist: WeightDistribution | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Draws new cores, and resets optimizer state, step number, read counts and cache.

        Args:
          weight_dist: distribution of the new weights. Default: the `weight_dist` that was passed
            to the constructor.
          rngs: random streams. Default: `nnx.Rngs(0)`.
        """
        states = self._initial_states(weight_dist or self.weight_dist, rngs)
        for g, (params, slots) in enumerate(states):
            self._put(g, params, slots)
        self.step.set_value(jnp.zeros((), jnp.int32))

    @validated
    def set_learning_rate(self, lr: Rate | Float[Array, ""]) -> None:
        """Sets the learning rate of the update in `backward`.

        Raises: ValueError: `lr` is negative or not finite.
        """
        self.learning_rate.set_value(jnp.asarray(lr, jnp.float32))

    def _place_of(self, table: int) -> tuple[int, int]:
        """Index of a table's group, and index of the table in the group."""
        for g, group in enumerate(self.groups):
            if table in group:
                return g, group.index(table)
        raise ValueError(f"there is no table {table}, only {len(self.specs)} tables.")

    def cores_of(self, table: int = 0) -> Cores:
        """The cores of one table."""
        g, number = self._place_of(table)
        storage = self.storages[g]
        params, slots = self._state(g)
        parts = storage.unstack(params, slots, storage.tables[0], 1)
        table_params, _ = parts[number]
        return cores_of(table_params)

    def set_cores(
        self,
        cores: AnyCores,
        table: int = 0,
    ) -> None:
        """Replaces the cores of a table, for example by the result of `from_dense`.

        `set_cores` resets the optimizer state of the cores and removes the rows of the table from
        the cache. The read counts of the rows that leave the cache are kept. The step counter is
        reset only if the module has no other table.

        Args:
          cores: new cores with the shapes `specs[table].core_shapes`.
          table: index of the table.

        Raises: ValueError: a core has the wrong shape, or contains NaN or infinity.
        """
        g, number = self._place_of(table)
        spec = self.specs[table]
        arrays = check_cores(spec, cores)
        new_cores = tuple(core.astype(self.dtype) for core in arrays)
        for t, core in enumerate(new_cores):
            check_finite(core, f"core {t} for table {table}", way_out="clean the cores first")
        new_slots = init_core_slots(self.rule, new_cores)
        storage = self.storages[g]
        params, slots = self._state(g)
        parts = storage.unstack(params, slots, storage.tables[0], 1)
        parts[number] = (new_cores, new_slots)
        all_cores, core_slots = storage.stack(parts, params, 1)
        if self.caches:
            # The rows of a group are numbered consecutively over its tables.
            first_row = sum(self.specs[k].num_embeddings for k in self.groups[g][:number])
            end_row = first_row + spec.num_embeddings
            directory = params.directory.forget(first_row, end_row)
            new_params = params._replace(cores=all_cores, directory=directory)
            self._put(g, new_params, (core_slots, slots[1]))
        else:
            self._put(g, all_cores, core_slots)
        if len(self.specs) == 1:
            self.step.set_value(jnp.zeros((), jnp.int32))

    def get_params(self) -> list[Array]:
        """Values of all cores, followed by the cached rows of each group of tables."""
        params = [core.get_value() for core in self.tt_cores]
        for cache in self.caches:
            params.append(cache.rows.get_value())
        return params

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.specs)

    num_embeddings = _table_property(lambda spec: spec.num_embeddings, "Number of rows.")
    embedding_dim = _table_property(lambda spec: spec.embedding_dim, "Length of a row.")
    tt_p_shapes = _table_property(lambda spec: list(spec.tt_p_shapes), "Row factors.")
    tt_q_shapes = _table_property(lambda spec: list(spec.tt_q_shapes), "Column factors.")
    tt_ranks = _table_property(
        lambda spec: list(spec.ranks), "All ranks, including 1 at both ends."
    )
    tt_ndim = _table_property(lambda spec: spec.num_cores, "Number of cores.")

    @property
    def tt_cores(self) -> list[nnx.Variable]:
        """Variables of all cores, in the order of the groups of tables.

        A core is shared by all tables of its group.
        """
        variables = []
        for group in self.core_groups:
            variables += group
        return variables

    @property
    def optimizer_state(self) -> list[Array]:
        """Optimizer state of the cores: one array per core and slot."""
        slots_of_groups = [slots.get_value() for slots in self.slots]
        return jax.tree.leaves(slots_of_groups)

    @property
    def use_cache(self) -> bool:
        """Whether the module has a cache."""
        return bool(self.caches)

    @property
    def cache_weight(self) -> Any:
        """Cached rows `[cached rows, dim]`, or a list if there are several groups.

        None if the module has no cache.
        """
        if not self.caches:
            return None
        rows_of_groups = [cache.rows.get_value() for cache in self.caches]
        if len(rows_of_groups) == 1:
            return rows_of_groups[0]
        return rows_of_groups

    def full_weight(self, table: int | None = None) -> PyTree:
        """All rows of one table or of all tables, including cached rows.

        Args:
          table: index of the table. None, the default: all tables, as one array
            `[tables, vocab, dim]` if all tables have equal shapes, else a list of arrays. For a
            `TTEmbeddingBag`, which has one table, the result is `[vocab, dim]`.
        """
        if table is None:
            tables = [self.full_weight(k) for k in range(len(self.specs))]
            return self._joined(tables)
        g, number = self._place_of(table)
        storage = self.storages[g]
        params, _ = self._state(g)
        rows: Array = storage.whole(params, storage.tables[0], number)
        return rows

    def update_cache(
        self,
        indices: PyTree,
        offsets: object = None,
    ) -> None:
        """Counts one read of each id for `cache_populate`, but looks up no rows.

        Every lookup counts one read of each id, except after `eval()`.

        Args:
          indices: ids, in any form that `__call__` accepts. With one table, flat ids need no
            offsets.
          offsets: start of each bag of flat ids, as for `__call__`.

        Raises: NotImplementedError: the module has `sparse=False`, so it has no cache.
        """
        self._check_may_cache()
        if offsets is None and len(self.specs) == 1 and not isinstance(indices, Bags):
            is_flat = all(np.ndim(entry) == 0 for entry in indices)
            if is_flat:
                indices = jnp.asarray(indices).reshape(-1, 1)
        bags = self._read(indices, offsets, None)
        self._count(self._calls_of(bags))

    def cache_populate(self) -> None:
        """Fills the cache with the most-read rows, and writes evicted rows back to the TT cores.

        See `hot_rows`. Outside `jit`, the method warns if no read has been counted.

        Raises: NotImplementedError: the module has `sparse=False`, so it has no cache.
        """
        self._check_may_cache()
        directories = [cache.directory.get_value() for cache in self.caches]
        if directories and not is_traced(directories):
            num_lookups = sum(report.lookups for report in self.cache_reports())
            if num_lookups == 0:
                warnings.warn(
                    "cache_populate: nothing was counted, so nothing is cached.", stacklevel=2
                )
        for g in range(len(self.caches)):
            storage = self.storages[g]
            params, slots = programs.populated(storage, *self._state(g), storage.tables[0])
            self._put(g, params, slots)

    def _check_may_cache(self) -> None:
        if not self.sparse:
            raise _no_cache(type(self).__name__)

    def _count(self, calls: Sequence[Call]) -> None:
        """Counts the reads of a batch, which has one kernel call per group of tables."""
        for g, cache in enumerate(self.caches):
            params, _ = self._state(g)
            counted = programs.counted(params.directory, calls[g].lists[0].ids)
            # A function under plain `jax.jit` that closes over the module cannot change the
            # module's variables, so reads in such a function are not counted.
            with contextlib.suppress(TraceContextError):
                cache.directory.set_value(counted)

    def reset_cache(self) -> None:
        """Removes all rows from the cache and all read counts.

        `reset_cache` does not write cached rows back to the cores, so all updates of a cached row
        since the row entered the cache are lost. To save the trained rows, call `full_weight`
        before `reset_cache`.
        """
        for g in range(len(self.caches)):
            storage = self.storages[g]
            params, (core_slots, _) = self._state(g)
            table = storage.tables[0]
            self._put(g, *storage.with_empty_cache(params.cores, core_slots, table))

    def cache_reports(self) -> list[CacheReport]:
        """Cache statistics of each group of tables, such as cached rows, hits and evictions."""
        return [cache.directory.get_value().report() for cache in self.caches]

    def __call__(
        self,
        indices: object,
        offsets: object = None,
        per_sample_weights: object = None,
        warmup: bool = True,
    ) -> PyTree:
        """Pooled rows of every bag. An empty bag gives zeros.

        The result is `[batch, dim]` for `TTEmbeddingBag` and `[tables, batch, dim]` for
        `TableBatchedTTEmbeddingBag`, or a list of one array per table if their dimensions differ.

        Args:
          indices: flat ids, a dense array `[bags, ids per bag]` with -1 for no id, `Bags`, or lists
            of ids. The bags of table 0 come first, then an equal number of bags of table 1, and so
            on.
          offsets: start of each bag of flat ids, optionally followed by the end of the last bag.
            With several tables, the last offset is taken as the end of the last bag if the number
            of offsets is one more than a multiple of the number of tables. With one table, the last
            offset is taken as the end if it equals the number of ids. If the last offset is the
            start of an empty bag, construct the module with `include_last_offset=False`.
          per_sample_weights: one float per id. None, the default: all weights are 1.
          warmup: ignored.

        Raises:
          TypeError: ids or offsets are not integers.
          ValueError: the structures or lengths of the arguments do not match, offsets decrease, an
            id is outside its table, or a weight is not finite. For an id outside its table, the
            error message names the id and the bag.
        """
        del warmup
        bags = self._read(indices, offsets, per_sample_weights)
        outputs, _, _ = self._look_up(bags)
        return self._joined(outputs)

    def vjp(
        self,
        indices: object,
        offsets: object = None,
        per_sample_weights: object = None,
    ) -> tuple[PyTree, Callable[[PyTree], TTGradients | None]]:
        """Pooled rows as from `__call__`, and a function `backward(d_output)`.

        With `sparse=True`, `backward` can be called only once. With `sparse=True`, `backward`
        applies one optimizer step to the cores and the cached rows that were read, and returns a
        `TTGradients` with the gradient of `per_sample_weights`, or None if the lookup had no
        weights. With `sparse=False`, `backward` changes nothing, and returns the gradients of the
        cores and of `per_sample_weights`.
        """
        bags = self._read(indices, offsets, per_sample_weights)
        is_used = False
        outputs, params, calls = self._look_up(bags)
        shapes = [output.shape for output in outputs]

        def backward(d_output: PyTree) -> TTGradients | None:
            nonlocal is_used
            gradients = self._gradients_of_groups(d_output, shapes, calls)
            d_cores: list[Cores] = []
            d_weights = []
            if self.sparse:
                if is_used:
                    raise RuntimeError(
                        "this backward has already stepped the cores; look the batch up again."
                    )
                is_used = True
                d_weights = self._step(params, gradients)
            else:
                for g, storage in enumerate(self.storages):
                    group_d_cores, group_d_weights = programs.pulled(
                        storage,
                        params[g],
                        gradients[g],
                        storage.tables[0],
                    )
                    d_cores.append(group_d_cores)
                    d_weights.append(group_d_weights)
            d_weight = None
            if bags.weights is not None:
                # Cut off the gradients of the padding, which follow the gradients of the ids.
                num_ids = bags.ids.shape[0]
                d_weight = sum(d_weights)[:num_ids]
            if self.sparse and d_weight is None:
                return None
            return TTGradients(tuple(d_cores), d_weight)

        return self._joined(outputs), backward

    def _gradients_of_groups(
        self,
        d_output: PyTree,
        shapes: Sequence[tuple[int, ...]],
        calls: Sequence[Call],
    ) -> list[CallGradients]:
        """Checks the output gradients of all tables, and adds them to the call of each group."""
        d_outputs = [d_output] if self.is_single else list(d_output)
        wide = []
        for table, (gradient, shape) in enumerate(zip(d_outputs, shapes, strict=True)):
            check_gradient(gradient, f"d_output of table {table}")
            if np.shape(gradient) != shape:
                raise ValueError(
                    f"d_output of table {table} has shape {np.shape(gradient)}, its output {shape}."
                )
            wide.append(jnp.asarray(gradient, jnp.float32))
        gradients = []
        for group, call in zip(self.groups, calls, strict=True):
            d_tables = tuple(wide[k] for k in group)
            gradients.append(CallGradients(call, d_tables, (self.specs[group[0]].embedding_dim,)))
        return gradients

    def _step(
        self,
        lookup_params: Sequence[PyTree],
        gradients: Sequence[CallGradients],
    ) -> list[Any]:
        """Applies one optimizer step to the cores and cached rows of all groups.

        Returns: for each group, the gradients of `per_sample_weights`.
        """
        rate = self.learning_rate.get_value()
        number = self.step.get_value()
        d_weights = []
        for g, storage in enumerate(self.storages):
            params, slots = self._state(g)
            params, slots, group_d_weights = programs.stepped(
                storage,
                params,
                slots,
                lookup_params[g],
                gradients[g],
                rate,
                number,
            )
            self._put(g, params, slots)
            d_weights.append(group_d_weights)
        self.step.set_value(number + 1)
        return d_weights

    def _joined(self, tables: list[Array]) -> PyTree:
        """Combines a list with one array per table into one result for the caller.

        For a `TTEmbeddingBag`, the result is the array of the only table. For a
        `TableBatchedTTEmbeddingBag`, the result is one stacked array if the arrays of all tables
        have equal shapes, else the list of arrays.
        """
        if self.is_single:
            return tables[0]
        shapes = {table.shape for table in tables}
        if len(shapes) == 1:
            return jnp.stack(tables)
        return tables

    def _look_up(self, bags: Bags) -> tuple[list[Array], list[PyTree], list[Call]]:
        """Pooled rows of every table, and the parameters and kernel call of every group."""
        calls = self._calls_of(bags)
        if not self.deterministic:
            self._count(calls)
        params = []
        output_of_table: dict[int, Array] = {}
        for g, group in enumerate(self.groups):
            storage = self.storages[g]
            group_params, _ = self._state(g)
            params.append(group_params)
            outputs = programs.looked_up(storage, group_params, calls[g], storage.tables[0])
            output_of_table.update(zip(group, outputs, strict=True))
        all_outputs = [output_of_table[k] for k in range(len(self.specs))]
        return all_outputs, params, calls

    def _calls_of(self, bags: Bags) -> list[Call]:
        """The kernel call of every group of tables. See `programs.calls_of_groups`."""
        sizes = tuple(spec.num_embeddings for spec in self.specs)
        bags = dataclasses.replace(bags, ids=narrow_ids(bags.ids))
        return programs.calls_of_groups(self.groups, sizes, self.mode, padded_bags(bags))

    def _read(
        self,
        indices: PyTree,
        offsets: PyTree,
        weights: PyTree,
    ) -> Bags:
        """Checked bags of all tables. See `programs.read_bags`."""
        return programs.read_bags(
            self.specs,
            indices,
            offsets,
            weights,
            name=type(self).__name__,
            last=self.include_last_offset,
        )


class TTEmbeddingBag(TableBatchedTTEmbeddingBag):
    """Embedding bags over one table that is stored as tensor-train cores, with a cache by default.

    Args:
      num_embeddings: number of rows.
      embedding_dim: length of a row, which can be any positive integer.
      published: positional arguments in the order of FBTT-Embedding: `tt_ranks, tt_p_shapes,
        tt_q_shapes, optimizer, learning_rate, eps, sparse, use_cache, cache_size, hashtbl_size,
        weight_dist, enforce_embedding_dim`. If `tt_ranks` is passed as a keyword, as in the
        example, the positional arguments start at `tt_p_shapes`.
      options: keyword arguments of `TableBatchedTTEmbeddingBag`.

    Raises: see `TableBatchedTTEmbeddingBag`.

    Source: FBTT-Embedding, `TTEmbeddingBag`.

    Example:
      >>> import jax.numpy as jnp
      >>> embedding_sum = TTEmbeddingBag(10, 3, None, None, tt_ranks=[2, 2], sparse=False)
      >>> embedding_sum(jnp.asarray([1, 2, 4, 5, 4, 3, 2, 9]), jnp.asarray([0, 4])).shape
      (2, 3)
    """

    is_single = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *published: Any,
        **options: Any,
    ):
        if "tt_ranks" in options:
            published = (options.pop("tt_ranks"), *published)
        super().__init__(1, num_embeddings, embedding_dim, *published, **options)

    @property
    def spec(self) -> TTSpec:
        """Size of the table, with the factors and ranks of its tensor train."""
        return self.specs[0]
