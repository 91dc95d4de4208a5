"""FBGEMM's table-batched training module as an `nnx.Module`: many tables, one call, training in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from rsembed.caching import CacheCounts, CacheStatistics
from rsembed.checks import NonNegativeInt, check_within, dtype_among, validated
from rsembed.row_gradients import RowGradients, check_belong
from rsembed.tbe import construction, functional, records, whole_tables
from rsembed.tbe.arguments import CacheArguments, OptimizerArguments, chosen
from rsembed.tbe.door import Door, PreparedBatch, is_by_feature
from rsembed.tbe.host_rows import HostRows
from rsembed.tbe.plan import TBEPlan
from rsembed.tbe.records import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbOptimType,
    PoolingMode,
    SparseType,
    TableOptimizer,
    WeightDecayMode,
)
from rsembed.tbe.reporting import StatisticsReporter
from rsembed.tbe.training import TablesBackward, bring_near, learning_rates, pooled, prefetch, prepared, read_batch

_apply = jax.jit(functional.apply, static_argnums=0, donate_argnums=1)
_begin_step = jax.jit(functional.begin_step, static_argnums=0, donate_argnums=1)


class TBEVariable(nnx.Variable):
    """Tables, optimizer states and counters of a module: trained by its backward pass, not by optax."""


class TableBatchedEmbeddingBags(nnx.Module):
    """Embedding bags of many tables in one call; the backward pass is the optimizer.

    `tbe(indices, offsets)` looks up and trains nothing. `out, backward = tbe.vjp(indices, offsets)` does the same for
    training; `backward(d_out)` sums the gradients of equal rows over the whole call and steps every touched row once.
    Rows and states that no id touched keep their bits. Runs eagerly (compiled inside) and under `nnx.jit`.

    Weights start at zero, as in the original: see `init_embedding_weights_uniform`. An argument that has no effect,
    here or together with the others, is named in a warning. Beyond the original: `optimizer` and `learning_rate` may
    be lists with one entry per table, the learning rate a schedule (of the 0-based step), any dim is allowed.

    An eager training step takes over the module's arrays: copies that share them (`nnx.clone`, `nnx.split`) end there.
    With tables behind a cache `nnx.state` holds the cache alone; one that is not of this moment and module is refused.
    `state_dict` and `load_state_dict` copy a module, and take it back to another time. Members of enums may also be
    given by name or value ("exact_sgd", 0); `FBGEMM_TBE_BOUNDS_CHECK_MODE` in the environment overrules the bounds
    check's.

    Args:
      embedding_specs: `(rows, dim, location, compute device)` of every table. Tables live on `device` whatever their
        compute device is called. On accelerators, MANAGED and HOST rows stay on the host and visit for each batch; on
        CPUs they are as DEVICE. MANAGED_CACHING keeps rows and states on the host behind a cache of each group of
        tables with equal dim and optimizer; training gives the same bits as without it.
      feature_table_map: table of every feature, in any order; by default one feature per table.
      cache_algorithm: which cached row makes room.
      cache_load_factor: rows of the cache as a share of all rows of the group.
      cache_sets: sets of 32 rows, instead of the load factor; 0 uses that.
      cache_reserved_memory: GiB of device memory that caches leave alone, where the device tells how much it has; where
        it does not, as on CPUs, or `cache_sets` says the size, a warning says that this changes nothing.
      cache_precision: dtype of cached rows; None is that of the weights. With another one, training no longer equals
        that of uncached tables: a narrower one rounds rows to nearest when they enter the cache and as steps are
        rounded in it; a wider one rounds them as steps are rounded when they leave it.
      weights_precision: FP32, FP16 or BF16.
      output_dtype: FP32, FP16 or BF16; sums are float32.
      enforce_hbm: MANAGED_CACHING as DEVICE.
      optimizer: rule of all tables, or one per table; see `EmbOptimType`. Also a rule of the core, such as
        `rsembed.FTRLOptimizerSpec(...)`, with its own settings and learning rate.
      record_cache_metrics: allows `get_cache_miss_counter` and `get_table_wise_cache_miss`.
      gather_uvm_cache_stats: allows `get_uvm_cache_stats` and its companions.
      stochastic_rounding: of FP16 and BF16 rows when they are stepped.
      gradient_clipping: clip every entry of the output's gradient to `[-max_gradient, max_gradient]`.
      max_gradient: see there.
      max_norm: bound on the norm of updated rows, of row-wise Adagrad; 0 for none.
      learning_rate: a number, a callable of nothing, or a callable of the 0-based step; for all tables, or one each.
      eps: added outside the square root; torch's Adagrad has 1e-10.
      momentum: of LARS_SGD.
      weight_decay: of LARS_SGD, ADAM, LAMB and their partial forms (decoupled), and of row-wise Adagrad.
      weight_decay_mode: of row-wise Adagrad.
      eta: trust coefficient of LARS_SGD.
      beta1: of the ADAM and LAMB families.
      beta2: likewise.
      ensemble_mode: of ENSEMBLE_ROWWISE_ADAGRAD.
      counter_based_regularization: if and only if the mode is COUNTER.
      cowclip_regularization: if and only if the mode is COWCLIP.
      pooling_mode: SUM; MEAN, divided by the number of ids whatever their weights; NONE, one row per id.
      device: where tables live; None is JAX's default device.
      bounds_check_mode: what happens to ids and offsets outside their range. An id of -1 stands for no id.
      uvm_non_rowwise_momentum: no effect, as use_experimental_tbe and uvm_host_mapped; states follow their rows.
      use_experimental_tbe: see there.
      prefetch_pipeline: rows of prefetched batches stay in the cache until they were used; LRU only.
      stats_reporter_config: reports bytes, sizes and cache counts every so many steps outside `jit`.
      table_names: for messages and state dicts; `table_0`, ... by default.
      optimizer_state_dtypes: FP32, FP16 or BF16 by state name; for momentum1 and momentum2 of any optimizer.
      multipass_prefetch_config: prefetch long batches in parts.
      global_weight_decay: if and only if the mode is DECOUPLE_GLOBAL.
      uvm_host_mapped: see uvm_non_rowwise_momentum.
      embedding_table_index_type: int32 or int64, without effect: ids of any integer type are taken.
      embedding_table_offset_type: likewise, of offsets.
      emainplace_mode: of EMAINPLACE_ROWWISE_ADAGRAD.
      extra_optimizer_config: options of ADAM and EXACT_SGD.
      ar_alpha: shrinkage per step of ROWWISE_RMSPROP_AR, in learning rates.
      ema_beta: decay of its mean.
      min_shrinkage: its smallest factor.
      feature_names: for messages and `{feature: Bags}` input; by default the table's name, numbered if it is shared.
      mesh: devices that share the tables and the samples of a batch; None keeps all on one. See `prepare`.
      sharding_axis: axes of the mesh over which these are split; None takes all.
      placement: of tables on a mesh, by name or one for all, as for `rsembed.EmbeddingCollection`.
      rngs: source of the key of initial values and stochastic rounding.

    Source: FBGEMM, SplitTableBatchedEmbeddingBagsCodegen.

    Example:
      >>> import jax.numpy as jnp
      >>> from rsembed.tbe import TableBatchedEmbeddingBags, EmbeddingLocation, ComputeDevice, OptimType
      >>> specs = [(9, 2, EmbeddingLocation.HOST, ComputeDevice.CPU)]
      >>> tbe = TableBatchedEmbeddingBags(specs, optimizer=OptimType.EXACT_SGD, learning_rate=0.5)
      >>> out, backward = tbe.vjp(jnp.array([4, 4, 7]), jnp.array([0, 2, 3]))
      >>> backward(jnp.ones_like(out))
      >>> tbe(jnp.array([4, 7]), jnp.array([0, 1, 2])).tolist()
      [[-1.0, -1.0], [-0.5, -0.5]]
    """

    @validated
    def __init__(
        self,
        embedding_specs: Sequence[construction.EmbeddingSpec],
        feature_table_map: Sequence[int] | None = None,
        cache_algorithm: CacheAlgorithm | str | int = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: SparseType | str | None = None,
        weights_precision: SparseType | str | int = SparseType.FP32,
        output_dtype: SparseType | str | int = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: TableOptimizer | str | Sequence[TableOptimizer | str] = EmbOptimType.EXACT_SGD,
        record_cache_metrics: records.RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: Any = 0.01,
        eps: float = 1e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode | str | int = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: records.EnsembleModeDefinition | None = None,
        counter_based_regularization: records.CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: records.CowClipDefinition | None = None,
        pooling_mode: PoolingMode | str | int = PoolingMode.SUM,
        device: Any = None,
        bounds_check_mode: BoundsCheckMode | str | int = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: records.TBEStatsReporterConfig | None = None,
        table_names: Sequence[str] | None = None,
        optimizer_state_dtypes: Mapping[str, SparseType] | None = None,
        multipass_prefetch_config: records.MultiPassPrefetchConfig | None = None,
        global_weight_decay: records.GlobalWeightDecayDefinition | None = None,
        uvm_host_mapped: bool = False,
        *,
        embedding_table_index_type: Any = np.int64,
        embedding_table_offset_type: Any = np.int64,
        emainplace_mode: records.EmainplaceModeDefinition | None = None,
        extra_optimizer_config: records.UserEnabledConfigDefinition | None = None,
        ar_alpha: float = 0.0,
        ema_beta: float = 0.99,
        min_shrinkage: float = 0.1,
        feature_names: Sequence[str] | None = None,
        mesh: Mesh | None = None,
        sharding_axis: str | Sequence[str] | None = None,
        placement: str | Mapping[str, str] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        dtype_among(("int32", "int64"), embedding_table_index_type, "embedding_table_index_type")
        dtype_among(("int32", "int64"), embedding_table_offset_type, "embedding_table_offset_type")
        cache_algorithm = records.member(CacheAlgorithm, cache_algorithm)
        weights_precision = records.member(SparseType, weights_precision)
        output_dtype = records.member(SparseType, output_dtype)
        weight_decay_mode = records.member(WeightDecayMode, weight_decay_mode)
        pooling_mode = records.member(PoolingMode, pooling_mode)
        bounds_check_mode = records.bounds_check_mode(bounds_check_mode)
        if cache_precision is not None:
            cache_precision = records.member(SparseType, cache_precision)
        if cache_precision == weights_precision:
            cache_precision = None  # no other one
        optimizer = records.optimizers(optimizer)
        given = {name: value for name, value in locals().items() if name != "learning_rate"}  # each table has its own
        names = tuple(table_names or (f"table_{t}" for t in range(len(embedding_specs))))
        features = tuple(range(len(names))) if feature_table_map is None else tuple(feature_table_map)
        self.feature_names = tuple(feature_names or construction.default_feature_names(features, names))
        construction.check_specs(embedding_specs, features, names, self.feature_names)
        check_within("(0, inf]", max_gradient, "max_gradient")
        arguments, self.caching = chosen(OptimizerArguments, given), chosen(CacheArguments, given)
        tables = construction.tables_of(
            embedding_specs,
            names,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weights_precision=weights_precision,
            enforce_hbm=enforce_hbm,
            stochastic_rounding=stochastic_rounding,
        )
        split = construction.split_of(self.feature_names, mesh, sharding_axis, device)
        with_rules = construction.with_rules(tables, arguments)
        shared = construction.shared_tables(with_rules, split, placement, pooling_mode)
        self.plan = TBEPlan(shared, features, pooling_mode.name.lower(), split)
        construction.warn_of_arguments(self.plan, self.caching, given)
        self.output_dtype = records.dtype_of(output_dtype, "output_dtype").name
        self.max_gradient = max_gradient if gradient_clipping else None
        self.reporter = None if stats_reporter_config is None else StatisticsReporter(stats_reporter_config)
        self.deterministic = False
        self.door = nnx.static(Door(bounds_check_mode, self.feature_names))
        self.optimizer_arguments = nnx.static(arguments)
        self._host_rows = construction.host_rows_of(self.plan, self.caching)
        key = (rngs or nnx.Rngs(0)).params()
        where = construction.device_of(device)
        state = construction.first_state(self.plan, key, self._host_rows, self.caching, where)
        self.state = TBEVariable(state)
        self.bounds_check_warning = TBEVariable(jnp.zeros((), jnp.int32))

    @property
    def whole_state(self) -> functional.TBEState:
        """The state, which is there and the module's. Raises: as `functional.check_state`."""
        state: functional.TBEState = self.state.get_value()
        functional.check_state(self.plan, state)
        return state

    @property
    def host_rows(self) -> HostRows | None:
        """The host side of tables that live there, or None; the one door to it for all that runs outside of `jit`.

        Raises: RuntimeError: the module's state is of another time, or of another module.
        """
        if self._host_rows is not None:
            self._host_rows.settle(self.state.get_value())
        return self._host_rows

    def __call__(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Any = None,
        feature_requires_grad: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> Any:
        """Looks up, and changes no weight, state or step.

        Args:
          indices: ids of all features, feature after feature; -1 is no id. Or `{feature: Bags}` for all features.
          offsets: bag `b` of feature `f` holds `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
          per_sample_weights: factor of every looked-up row; differentiable by `jax.grad`.
          feature_requires_grad: used by `vjp` only.
          batch_size_per_feature_per_rank: `[feature][rank]` bags, when features differ.
          total_unique_indices: used by `vjp` only.

        Returns: `[B, sum of dims]`, features side by side; `[nnz, dim]` for PoolingMode.NONE (shorter rows filled with
          zeros). With `batch_size_per_feature_per_rank` one flat array: for each rank, for each feature, its
          `[bags, dim]`. For `{feature: Bags}` the same as `{feature: [bags, dim]}`.
        """
        del feature_requires_grad, total_unique_indices
        batch = read_batch(self, indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        return pooled(self, bring_near(self, batch), by_feature=is_by_feature(indices))

    def vjp(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Any = None,
        feature_requires_grad: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> tuple[Any, TablesBackward]:
        """The lookup of a training step, and the function that trains with the gradient of its output.

        Arguments are those of `__call__`. `feature_requires_grad` has 1 or 0 per feature; 0 makes the gradients of its
        per_sample_weights zero, and its rows are trained all the same. OptimType.NONE returns `total_unique_indices`
        rows per group at most; None means one per index.

        Raises: RuntimeError: the module is in evaluation mode; call `train()` first.
        """
        if self.deterministic:
            raise RuntimeError("the module is in evaluation mode, which never trains; call train() first.")
        batch = read_batch(self, indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        if self.plan.has_passes:  # a batch that is refused leaves the tables as they are
            self.state.set_value(_begin_step(self.plan, self.whole_state))
        near, by_feature = bring_near(self, batch), is_by_feature(indices)
        output = pooled(self, near, by_feature=by_feature)
        backward = TablesBackward(self, batch, near, feature_requires_grad, total_unique_indices, by_feature=by_feature)
        return output, backward

    def apply(self, row_gradients: RowGradients) -> None:
        """One optimizer step of every row in `row_gradients`, which `backward.row_gradients` returned.

        Raises: ValueError: they are those of a module with other tables, or have not a vector of its dim for each row.
        """
        layout, way_out = self.plan.row_layout, "Apply them to the module whose backward made them."
        check_belong(row_gradients, layout, functional.row_counts(self.plan), owner="module", way_out=way_out)
        functional.check_gradients(self.plan, row_gradients)
        state, host_rows = self.whole_state, self.host_rows
        rates = learning_rates(self.plan, state)
        if host_rows is not None:
            state, row_gradients = host_rows.bring_rows(state, row_gradients)
            self.state.set_value(state)  # the host has moved on, whatever becomes of the step
        state = _apply(self.plan, state, row_gradients, rates)
        self.state.set_value(state if host_rows is None else host_rows.write_back(state))

    def prepare(self, indices: Any, offsets: Any = None, per_sample_weights: Any = None) -> PreparedBatch:
        """Checks a batch on the host and brings it to the devices: goes in place of `indices`, into `jit` too.

        On a mesh its samples are split, which inside `jit` cannot be done, and each process gives its own. On one
        device it has room for a power of two of ids, so that few programs are compiled. Gradients of
        `per_sample_weights` come in this form: on a mesh `{feature: [bags, ids]}`.
        """
        return prepared(self, indices, offsets, per_sample_weights)

    def prefetch(
        self,
        indices: Any,
        offsets: Any,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Brings rows of a later batch into the cache; other batches may be looked up in between.

        Arguments are those of `__call__`; `forward_stream` has no meaning here, and is there for the original's sake.

        Raises: RuntimeError: inside `jit`, or 100 prefetched batches wait already.
        """
        del forward_stream
        if self.host_rows is not None:
            prefetch(self, indices, offsets, None, batch_size_per_feature_per_rank)

    def set_learning_rate(self, lr: float | Sequence[float]) -> None:
        """Sets the rate of all tables, or one each. A lookup keeps the rate that it saw for its backward pass.

        Raises: ValueError: tables that share an array (see the class) are given different rates.
        """
        rates = whole_tables.rates_of_groups(self.plan, lr)
        self.state.set_value(self.whole_state._replace(learning_rates=self.plan.everywhere(rates)))

    def get_learning_rate(self) -> float | list[float]:
        """The rate of the next step: one number, or one per table where they differ."""
        rates = np.asarray(learning_rates(self.plan, self.whole_state))
        by_table = [float(rates[group]) for group, _ in self.plan.places]
        return by_table[0] if len(set(by_table)) == 1 else by_table

    @validated
    def set_optimizer_step(self, step: NonNegativeInt) -> None:
        """Sets how many updates were done; the next training step is `step + 1`. Works at any time."""
        done = self.plan.everywhere(jnp.asarray(step, jnp.int32))
        self.state.set_value(self.whole_state._replace(step=done, passed_step=done + 0))

    @property
    def step(self) -> Array:
        """Updates done so far."""
        return self.whole_state.step + 0  # the array itself goes to the next update

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Changes `lr`, `eps`, `beta1`, `beta2`, `weight_decay` or `lower_bound` (of global decay) from now on.

        All but `lr` are compiled into steps. What no table's optimizer reads has no effect, and a warning says so.

        Raises: NotImplementedError: a name is none of these.
        """
        parameters = dict(params_dict)
        rates = parameters.pop("lr", None)
        if rates is not None:
            whole_tables.rates_of_groups(self.plan, rates)  # nothing changes if one of them is refused
        changed = construction.with_hyper_parameters(self.plan, self.optimizer_arguments, parameters)
        if rates is not None:
            self.set_learning_rate(rates)
        if parameters:
            self.plan, self.optimizer_arguments = changed[0], nnx.static(changed[1])
            if self.host_rows is not None:
                self.host_rows.plan = self.plan

    # What concerns whole tables is written where they are: these are functions of a module.
    init_embedding_weights_uniform = whole_tables.init_embedding_weights_uniform
    split_embedding_weights = whole_tables.split_embedding_weights
    set_embedding_weights = whole_tables.set_embedding_weights
    split_optimizer_states = whole_tables.split_optimizer_states
    state_dict = whole_tables.state_dict
    load_state_dict = whole_tables.load_state_dict
    reset_embedding_weight_momentum = whole_tables.reset_embedding_weight_momentum
    state_bytes = whole_tables.state_bytes

    def get_optimizer_state(self) -> list[dict[str, Any]]:
        """The same by the names of torch's optimizers, such as `sum`, `exp_avg` and `exp_avg_sq`.

        Where there is `prev_iter`, which is counted in them, the number of steps is there, too, as `iter`.
        """
        by_table = zip(self.plan.tables, self.split_optimizer_states(), strict=True)
        return [
            dict(zip(table.torch_state_names, states, strict=True))
            | ({"iter": self.step} if "prev_iter" in table.state_names else {})
            for table, states in by_table
        ]

    def get_optimizer_buffer(self, state: str) -> Array:
        """One state of all tables, flat and one after the other: `momentum1`, `momentum2_dev`, ...; or `iter`.

        Raises: ValueError: no table has it; names those that there are.
        """
        if state == "iter":
            return self.step.reshape(1)
        wanted = state.removesuffix("_dev").removesuffix("_host").removesuffix("_uvm")
        by_table = zip(self.plan.tables, self.split_optimizer_states(), strict=True)
        named = [pair for table, states in by_table for pair in zip(table.state_names, states, strict=True)]
        found = [own for name, own in named if name == wanted]
        if not found:
            known = sorted({name for name, _ in named} | {"iter"})
            raise ValueError(f"no optimizer state is called {state!r}; there are {', '.join(known)}.")
        return jnp.concatenate([jnp.asarray(own).reshape(-1) for own in found])

    def flush(self) -> None:
        """Writes all cached rows and states to the host; they stay cached."""
        whole_tables.bring_home(self)

    def reset_cache_states(self, *, discard: bool = False) -> None:
        """Empties the cache. With `discard`, what training did to the rows in it is lost, as in the original."""
        if self._host_rows is not None:
            if not discard:
                whole_tables.bring_home(self)
            self.state.set_value(self._host_rows.forget(self.state.get_value()))

    def get_uvm_cache_stats(self) -> CacheCounts:
        """Counts of all lookups so far. Raises: RuntimeError: `gather_uvm_cache_stats` is off, or nothing is cached."""
        return self._statistics("gather_uvm_cache_stats").totals

    def reset_uvm_cache_stats(self) -> None:
        """Starts counting again from zero. Raises: as `get_uvm_cache_stats`."""
        self._statistics("gather_uvm_cache_stats").reset()

    def print_uvm_cache_stats(self) -> None:
        """Prints means per call since the last print. Raises: as `get_uvm_cache_stats`."""
        print(self._statistics("gather_uvm_cache_stats").report())

    def get_cache_miss_counter(self) -> tuple[int, int]:
        """Batches with a miss, and unique misses. Raises: RuntimeError: `record_cache_metrics` does not ask for it."""
        return self._statistics("record_cache_miss_counter").miss_counter

    def get_table_wise_cache_miss(self) -> np.ndarray:
        """Unique misses of every feature. Raises: RuntimeError: `record_cache_metrics` does not ask for it."""
        return self._statistics("record_tablewise_cache_miss").unique_misses_by_group.copy()

    def _statistics(self, argument: str) -> CacheStatistics:
        asked = vars(self.caching) | vars(self.caching.record_cache_metrics)
        if self.host_rows is None or not asked[argument]:
            raise RuntimeError(f"needs a table with MANAGED_CACHING, and {argument}=True at construction.")
        return self.host_rows.statistics


SplitTableBatchedEmbeddingBagsCodegen = TableBatchedEmbeddingBags
"""The original's name."""
