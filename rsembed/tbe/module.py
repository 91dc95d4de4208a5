"""FBGEMM's table-batched training module as an `nnx.Module`: many tables, one call, training in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rsembed.caching import CacheCounts, CacheStatistics
from rsembed.intervals import check_within
from rsembed.row_gradients import RowGradients
from rsembed.tbe import construction, functional, records, tables
from rsembed.tbe.host_rows import HostRows
from rsembed.tbe.inputs import Call
from rsembed.tbe.plan import TablePasses
from rsembed.tbe.records import BoundsCheckMode, CacheAlgorithm, EmbOptimType, PoolingMode, SparseType, WeightDecayMode
from rsembed.tbe.reporting import StatisticsReporter
from rsembed.tbe.training import Backward, Notes, forward, learning_rates, prefetch

_apply = jax.jit(functional.apply, static_argnums=0, donate_argnums=1)
_decayed_tables = jax.jit(functional.decayed_tables, static_argnums=0)
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
    `state_dict` and `load_state_dict` copy a module, and take it back to another time.

    Args:
      embedding_specs: `(rows, dim, location, compute device)` of every table. Tables live on `device` whatever their
        compute device is called. On accelerators, MANAGED and HOST rows stay on the host and visit for each batch; on
        CPUs they are as DEVICE. MANAGED_CACHING keeps rows and states on the host behind a cache of each group of
        tables with equal dim and optimizer; training gives the same bits as without it.
      feature_table_map: table of every feature, in any order; by default one feature per table.
      cache_algorithm: which cached row makes room.
      cache_load_factor: rows of the cache as a share of all rows of the group.
      cache_sets: sets of 32 rows, instead of the load factor; 0 uses that.
      cache_reserved_memory: GiB of device memory that caches leave alone.
      cache_precision: dtype of cached rows; None is that of the weights. With another one, training no longer equals
        that of uncached tables: a narrower one rounds rows to nearest when they enter the cache and as steps are
        rounded in it; a wider one rounds them as steps are rounded when they leave it.
      weights_precision: FP32, FP16 or BF16.
      output_dtype: FP32, FP16 or BF16; sums are float32.
      enforce_hbm: MANAGED_CACHING as DEVICE.
      optimizer: rule of all tables, or one per table; see `EmbOptimType`.
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
      stats_reporter_config: reports bytes, sizes and cache counts every so many steps.
      table_names: for messages and state dicts; `table_0`, ... by default.
      optimizer_state_dtypes: FP32, FP16 or BF16 by state name; for momentum1 and momentum2 of any optimizer.
      multipass_prefetch_config: prefetch long batches in parts.
      global_weight_decay: if and only if the mode is DECOUPLE_GLOBAL.
      uvm_host_mapped: see uvm_non_rowwise_momentum.
      emainplace_mode: of EMAINPLACE_ROWWISE_ADAGRAD.
      extra_optimizer_config: options of ADAM and EXACT_SGD.
      ar_alpha: shrinkage per step of ROWWISE_RMSPROP_AR, in learning rates.
      ema_beta: decay of its mean.
      min_shrinkage: its smallest factor.
      feature_names: for messages and `{feature: Bags}` input; by default the table's name, numbered if it is shared.
      storage_folder: keep tables behind a cache in memory-mapped files there, which may be larger than memory. Files
        that exist are continued from the last `flush()`, with its step, after a pass over them; files of other tables
        or optimizers, damaged ones, and those that training has changed since a `flush()` are refused, as a process
        that is killed leaves them. None keeps tables in host memory.
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

    def __init__(
        self,
        embedding_specs: Sequence[construction.EmbeddingSpec],
        feature_table_map: Sequence[int] | None = None,
        cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: SparseType | None = None,
        weights_precision: SparseType = SparseType.FP32,
        output_dtype: SparseType = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: EmbOptimType | Sequence[EmbOptimType] = EmbOptimType.EXACT_SGD,
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
        weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: records.EnsembleModeDefinition | None = None,
        counter_based_regularization: records.CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: records.CowClipDefinition | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: Any = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
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
        emainplace_mode: records.EmainplaceModeDefinition | None = None,
        extra_optimizer_config: records.UserEnabledConfigDefinition | None = None,
        ar_alpha: float = 0.0,
        ema_beta: float = 0.99,
        min_shrinkage: float = 0.1,
        feature_names: Sequence[str] | None = None,
        storage_folder: str | Path | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if cache_precision == weights_precision:
            cache_precision = None  # no other one
        given = SimpleNamespace(**locals())
        num_tables = len(embedding_specs)
        names = tuple(table_names or (f"table_{t}" for t in range(num_tables)))
        features = tuple(range(num_tables)) if feature_table_map is None else tuple(feature_table_map)
        self.feature_names = tuple(feature_names or construction.default_feature_names(features, names))
        construction.check_specs(embedding_specs, features, names, self.feature_names)
        arguments = construction.optimizer_arguments(given)
        self.plan = construction.plan_of(given, features, names, arguments)
        construction.warn_of_arguments(self.plan, given)
        if prefetch_pipeline and cache_algorithm != CacheAlgorithm.LRU:
            raise ValueError("prefetch_pipeline needs cache_algorithm LRU: LFU cannot keep the rows of later batches.")
        self.output_dtype = records.dtype_of(output_dtype, "output_dtype").name
        self.max_gradient = max_gradient if gradient_clipping else None
        self.bounds_check_mode = bounds_check_mode
        self.prefetch_pipeline = prefetch_pipeline
        self.multipass_prefetch_config = multipass_prefetch_config
        self.record_cache_metrics = record_cache_metrics or records.RecordCacheMetrics(False, False)
        self.gather_uvm_cache_stats = bool(gather_uvm_cache_stats)
        self.reporter = None if stats_reporter_config is None else StatisticsReporter(stats_reporter_config)
        self.deterministic = False
        self._host_rows = construction.host_rows_of(self.plan, given)
        self.notes = nnx.static(Notes(arguments))
        key = (rngs or nnx.Rngs(0)).params()
        where = construction.device_of(device)
        self.state = TBEVariable(construction.first_state(self.plan, key, self._host_rows, cache_precision, where))
        self.bounds_check_warning = TBEVariable(jnp.zeros((), jnp.int32))

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
        return forward(self, Call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank))[0]

    def vjp(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Any = None,
        feature_requires_grad: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> tuple[Any, Backward]:
        """The lookup of a training step, and the function that trains with the gradient of its output.

        Args:
          indices: see `__call__`, as for the others.
          offsets: see there.
          per_sample_weights: see there.
          feature_requires_grad: 1 or 0 per feature; 0 makes the gradients of its per_sample_weights zero. Its rows
            are trained all the same.
          batch_size_per_feature_per_rank: see there.
          total_unique_indices: OptimType.NONE returns this many rows per group at most; None means one per index.

        Raises: RuntimeError: the module is in evaluation mode; call `train()` first.
        """
        if self.deterministic:
            raise RuntimeError("the module is in evaluation mode, which never trains; call train() first.")
        if any(table.passes != TablePasses() for table in self.plan.tables):
            self.state.set_value(_begin_step(self.plan, self.state.get_value()))
        call = Call(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        output, looked_up = forward(self, call)
        return output, Backward(self, looked_up, feature_requires_grad, total_unique_indices)

    def apply(self, row_gradients: RowGradients) -> None:
        """One optimizer step of every row in `row_gradients`, which `backward.row_gradients` returned.

        Raises: ValueError: they are those of a module with other tables.
        """
        functional.check_row_gradients(self.plan, row_gradients)
        state, host_rows = self.state.get_value(), self.host_rows
        rates = learning_rates(self.plan, state)
        if host_rows is not None:
            state, row_gradients = host_rows.bring_rows(state, row_gradients)
        state = _apply(self.plan, state, row_gradients, rates)
        self.state.set_value(state if host_rows is None else host_rows.write_back(state))

    def prefetch(
        self,
        indices: Any,
        offsets: Any,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Brings rows of a later batch into the cache; other batches may be looked up in between.

        Args:
          indices: see `__call__`, as for the others.
          offsets: see there.
          forward_stream: no meaning here; accepted for the original's sake.
          batch_size_per_feature_per_rank: see there.

        Raises: RuntimeError: inside `jit`, or 100 prefetched batches wait already.
        """
        del forward_stream
        if self.host_rows is not None:
            prefetch(self, Call(indices, offsets, None, batch_size_per_feature_per_rank))

    def set_learning_rate(self, learning_rate: float | Sequence[float]) -> None:
        """Sets the rate of all tables, or one each. A lookup keeps the rate that it saw for its backward pass.

        Raises: ValueError: tables that share an array (see the class) are given different rates.
        """
        rates = tables.rates_of_groups(self.plan, learning_rate)
        self.state.set_value(self.state.get_value()._replace(learning_rates=rates))

    def get_learning_rate(self) -> float | list[float]:
        """The rate of the next step: one number, or one per table where they differ."""
        rates = np.asarray(learning_rates(self.plan, self.state.get_value()))
        by_table = [float(rates[self.plan.place(t)[0]]) for t in range(len(self.plan.tables))]
        return by_table[0] if len(set(by_table)) == 1 else by_table

    def set_optimizer_step(self, step: int) -> None:
        """Sets how many updates were done; the next training step is `step + 1`. Works at any time."""
        check_within("[0, inf)", step, "set_optimizer_step: step")
        done = jnp.asarray(step, jnp.int32)
        self.state.set_value(self.state.get_value()._replace(step=done, passed_step=done + 0))

    @property
    def step(self) -> Array:
        """Updates done so far."""
        return self.state.get_value().step + 0  # the array itself goes to the next update

    def update_hyper_parameters(self, parameters: Mapping[str, float]) -> None:
        """Changes `lr`, `eps`, `beta1`, `beta2`, `weight_decay` or `lower_bound` (of global decay) from now on.

        All but `lr` are compiled into steps. Raises: NotImplementedError: no table's optimizer reads the name.
        """
        parameters = dict(parameters)
        if "lr" in parameters:
            self.set_learning_rate(parameters.pop("lr"))
        if parameters:
            changed = construction.with_hyper_parameters(self.plan, self.notes.optimizer_arguments, parameters)
            self.plan, self.notes.optimizer_arguments = changed
            if self.host_rows is not None:
                self.host_rows.plan = self.plan

    def init_embedding_weights_uniform(self, min_val: float, max_val: float, *, key: Array | None = None) -> None:
        """Draws all weights from U(min_val, max_val). Equal keys and tables give equal bits, however they are stored.

        Args:
          min_val: lowest weight.
          max_val: bound above.
          key: None takes the one that the module was made with.
        """
        tables.init_uniform(self, min_val, max_val, self.state.get_value().key if key is None else key)

    def split_embedding_weights(self) -> list[Any]:
        """The weights of every table, `[rows, dim]`: copies; of tables on the host, read-only views of the store."""
        tables.bring_home(self)
        return [tables.read_table(self, table)[0] for table in range(len(self.plan.tables))]

    def split_optimizer_states(self) -> list[list[Any]]:
        """The states of every table, in the order of its optimizer's `state_names`; row-wise ones are `[rows]`.

        Raises: NotImplementedError: OptimType.NONE has none.
        """
        return tables.split_states(self)

    def get_optimizer_state(self) -> list[dict[str, Any]]:
        """The same by the names of torch's optimizers, such as `sum`, `exp_avg` and `exp_avg_sq`."""
        by_table = zip(self.plan.tables, self.split_optimizer_states(), strict=True)
        return [dict(zip(table.torch_state_names, states, strict=True)) for table, states in by_table]

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that training changes as numpy arrays: `TABLE.weight`, `TABLE.sum`, ..., `step`, `learning_rate`.

        `contents` tells what it belongs to, for `load_state_dict` to compare.
        """
        return tables.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a `state_dict`, of a module with other hyperparameters, precision or placement too.

        Raises: ValueError: an entry is missing, unknown or of another shape, or `contents` has other optimizers.
        """
        tables.load_state_dict(self, state_dict)

    def reset_embedding_weight_momentum(
        self, pruned_indices: Any, pruned_indices_offsets: Any, logical_table_ids: Any, buffer_ids: Any = None
    ) -> None:
        """Zeroes rows and all their optimizer states.

        Args:
          pruned_indices: rows, table after table.
          pruned_indices_offsets: entry `k` of the lists below owns `pruned_indices[offsets[k] : offsets[k + 1]]`.
          logical_table_ids: tables.
          buffer_ids: no meaning here; accepted for the original's sake.
        """
        del buffer_ids
        tables.reset_rows(self, pruned_indices, pruned_indices_offsets, logical_table_ids)

    def apply_global_weight_decay(self) -> None:
        """Writes the decay that DECOUPLE_GLOBAL still owes to untouched rows into the tables.

        Lookups stay the same, but for the rounding of FP16 and BF16 rows, which is that of a step.
        """
        if not any(table.passes.global_decay for table in self.plan.tables):
            raise NotImplementedError("no table of this module has WeightDecayMode.DECOUPLE_GLOBAL.")
        if self.plan.has_cache:
            raise NotImplementedError(
                "the decay of tables on the host cannot be written out; their rows pay when read."
            )
        self.state.set_value(_decayed_tables(self.plan, self.state.get_value()))

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of `weights`, `optimizer_states` and, where there is one, `cache`, of every table and as `total`."""
        return tables.state_bytes(self)

    def flush(self) -> None:
        """Writes all cached rows and states to the host, where they stay cached, and makes a `storage_folder` whole."""
        tables.bring_home(self)
        if (host_rows := self.host_rows) is not None and host_rows.storage is not None:
            host_rows.storage.commit(int(self.step))

    def reset_cache_states(self, *, discard: bool = False) -> None:
        """Empties the cache. With `discard`, what training did to the rows in it is lost, as in the original."""
        if self._host_rows is not None:
            if not discard:
                tables.bring_home(self)
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
        given = {"gather_uvm_cache_stats": self.gather_uvm_cache_stats, **vars(self.record_cache_metrics)}
        if self.host_rows is None or not given[argument]:
            raise RuntimeError(f"needs a table with MANAGED_CACHING, and {argument}=True at construction.")
        return self.host_rows.statistics


SplitTableBatchedEmbeddingBagsCodegen = TableBatchedEmbeddingBags
"""The original's name."""
