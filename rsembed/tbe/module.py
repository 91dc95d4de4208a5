"""FBGEMM's table-batched training module as an `nnx.Module`, trained by its backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from rsembed.arrays import AnyArray, is_traced
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection.prepared import PreparedBatch
from rsembed.kernels.contract import Call
from rsembed.optimizers import regularization
from rsembed.optimizers.regularization import WeightDecayMode
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients, check_belong, check_gradient
from rsembed.storage.donation import kept
from rsembed.tbe import arguments, batches, functional, host_rows, plan as plans
from rsembed.tbe.arguments import (
    Arguments,
    BoundsCheckMode,
    CacheAlgorithm,
    EmbOptimType,
    PoolingMode,
    SparseType,
)
from rsembed.tbe.functional import TBEState
from rsembed.tbe.host_rows import HostRows
from rsembed.tbe.plan import AnyBatch
from rsembed.tbe.tables import TBEVariable, TrainedTables, learning_rates

_lookup = jax.jit(functional.lookup, static_argnums=0, static_argnames="output_dtype")
_begin_step = jax.jit(functional.begin_step, static_argnums=0, donate_argnums=1)
_backward = jax.jit(
    functional.backward,
    static_argnums=0,
    donate_argnums=1,
    static_argnames=("max_gradient", "wants_weight_gradients"),
)
_row_gradients = jax.jit(functional.row_gradients, static_argnums=0, static_argnames="max_gradient")
_apply = jax.jit(functional.apply, static_argnums=0, donate_argnums=1)
WeightGradients: TypeAlias = Array | dict[str, Array | np.ndarray] | None
"""Gradients of `per_sample_weights`.

One array with a gradient per id or, for a batch prepared on a mesh, a dictionary with one array per
feature. None if the batch has no weights.
"""
_EVALUATES = "the module is in evaluation mode, which never trains; call train() first."


class TableBatchedEmbeddingBags(TrainedTables):
    """Looks up embedding bags of many tables in one call. The backward pass trains the tables.

    `tbe(indices, offsets)` looks up rows without training. The lookup of a training step is
    `out, backward = tbe.vjp(indices, offsets)`. `backward(d_out)` sums the gradients of equal rows
    over the whole batch, then applies one optimizer step to every looked-up row. Rows that no id
    reads keep their bits, and so do their optimizer states. The module can be called eagerly or
    under `nnx.jit`. An eager call runs compiled programs.

    Weights start at zero, as in FBGEMM. `init_embedding_weights_uniform` draws random weights. The
    module warns about arguments that have no effect because of the other arguments. Unlike in
    FBGEMM, `optimizer` and `learning_rate` may be lists with one entry per table, the learning rate
    may be a function of the step number, and tables may have any dim.

    An eager training step donates the module's arrays, so copies that share them (`nnx.clone`,
    `nnx.split`) cannot be used afterwards. With cached tables, `nnx.state` contains only the rows
    in the cache. The state of a module with cached tables can be used only with the same module,
    and becomes invalid when the module looks up or changes rows. To copy a module or to go back to
    an earlier state, use `state_dict` and `load_state_dict`.

    Arguments that are enum members can also be passed by name or value ("exact_sgd", 0). The
    environment variable `FBGEMM_TBE_BOUNDS_CHECK_MODE` overrides `bounds_check_mode`.

    Args:
      embedding_specs: `(rows, dim, location, compute device)` of every table. The compute device
        is ignored, because all tables are on `device`. MANAGED_CACHING keeps rows and states on
        the host, with one device cache for each group of tables with equal dim and optimizer.
        With the default `cache_precision`, training with a cache gives exactly the same result as
        training without a cache. On accelerators, MANAGED and HOST keep rows on the host, and each
        batch copies its rows to the device and back. On CPUs, MANAGED and HOST are the same as
        DEVICE.
      feature_table_map: for every feature, the index of the table that the feature reads. The
        indices may be in any order, and may repeat. By default, each table has one feature.
      cache_algorithm: eviction policy of caches, LRU by default.
      cache_load_factor: fraction of a group's rows that its cache can hold, 0.2 by default.
      cache_sets: number of sets of 32 rows in each cache. 0, the default: the number of sets
        follows from `cache_load_factor`.
      cache_reserved_memory: GiB of device memory that caches leave free, 0 by default.
        `cache_reserved_memory` is ignored, with a warning, if `cache_sets` is set, or if the device
        (such as a CPU) does not report its memory.
      cache_precision: dtype of cached rows. None, the default: `weights_precision`. If
        `cache_precision` differs from `weights_precision`, training with a cache gives other
        results than training without a cache. If `cache_precision` is narrower than
        `weights_precision`, rows are rounded to nearest when they enter the cache, and an updated
        row is rounded like a row of a table with dtype `cache_precision`. If `cache_precision` is
        wider than `weights_precision`, a row is rounded when it leaves the cache, like an updated
        row of an uncached table.
      weights_precision: dtype of the stored rows: FP32 (default), FP16 or BF16.
      output_dtype: dtype of the output: FP32 (default), FP16 or BF16. Sums are computed in float32.
      enforce_hbm: whether tables with location MANAGED_CACHING are stored whole on the device, as
        with DEVICE, False by default.
      optimizer: optimizer of all tables, or a list with one optimizer per table. See
        `EmbOptimType`. `optimizer` can be an optimizer of rsembed, such as
        `rsembed.optimizers.FTRL(...)`. An optimizer of rsembed takes the learning rate and all
        other hyperparameters from its own fields, and not from the arguments of the module.
      record_cache_metrics: a `RecordCacheMetrics`, with a flag that enables
        `get_cache_miss_counter`, and a flag that enables `get_table_wise_cache_miss`. None, the
        default: `get_cache_miss_counter` and `get_table_wise_cache_miss` raise an error.
      gather_uvm_cache_stats: whether `get_uvm_cache_stats` and `reset_uvm_cache_stats` can be
        called, False by default.
      stochastic_rounding: whether updated FP16 and BF16 rows are rounded stochastically, True by
        default.
      gradient_clipping: whether every entry of the output's gradient is clipped to
        `[-max_gradient, max_gradient]`, False by default.
      max_gradient: bound on the absolute values of the output's gradient, for `gradient_clipping`.
      max_norm: maximum norm of updated rows, for row-wise Adagrad. 0, the default: norms are not
        limited.
      learning_rate: a number, or a function that takes no argument or the step number (from 0).
        Pass one learning rate for all tables, or a list with one per table.
      eps: number that is added to the square root in the denominator of an update. The default is
        1e-8, as in FBGEMM. `torch.optim.Adagrad` has the default 1e-10.
      momentum: momentum of LARS_SGD.
      weight_decay: strength of weight decay. Weight decay is decoupled for ADAM, LAMB and
        their PARTIAL_ROWWISE variants, and added to the gradient for LARS_SGD. For row-wise
        Adagrad, `weight_decay_mode` selects the kind of weight decay.
      weight_decay_mode: kind of weight decay of row-wise Adagrad.
      eta: trust coefficient of LARS_SGD.
      beta1: decay of the first moment, for the ADAM and LAMB families.
      beta2: decay of the second moment, for the ADAM and LAMB families.
      ensemble_mode: settings of ENSEMBLE_ROWWISE_ADAGRAD.
      counter_based_regularization: settings of weight decay mode COUNTER. Required in mode COUNTER,
        and not allowed in other modes.
      cowclip_regularization: settings of weight decay mode COWCLIP. Required in mode COWCLIP, and
        not allowed in other modes.
      pooling_mode: SUM, MEAN (the weighted sum divided by the number of ids) or NONE (one row per
        id).
      device: device of the tables. None, the default: the default device of JAX.
      bounds_check_mode: treatment of ids and offsets that are out of range. The id -1 is in range
        and means no id.
      uvm_non_rowwise_momentum: no effect, because states are always stored beside their rows.
      use_experimental_tbe: no effect.
      prefetch_pipeline: whether rows of a prefetched batch stay in the cache until the batch is
        looked up, False by default. `prefetch_pipeline=True` needs `cache_algorithm` LRU.
      stats_reporter_config: settings of periodic reports about training outside `jit`. None, the
        default: no reports.
      table_names: names of the tables in error messages and state dicts, `table_0`, `table_1` and
        so on by default.
      optimizer_state_dtypes: dictionary from the names of optimizer states, `momentum1` and
        `momentum2`, to their dtypes (FP32, FP16 or BF16). FP32 by default.
      multipass_prefetch_config: settings that split the prefetch of a long batch into several
        passes. By default, a prefetch copies all rows in one pass.
      global_weight_decay: settings of weight decay mode DECOUPLE_GLOBAL. Required in mode
        DECOUPLE_GLOBAL, and not allowed in other modes.
      uvm_host_mapped: no effect.
      emainplace_mode: settings of EMAINPLACE_ROWWISE_ADAGRAD.
      feature_names: names of the features in error messages. For a batch prepared on a mesh, the
        gradients of `per_sample_weights` are a dictionary with the feature names as keys. By
        default, a feature has the name of its table, with an index if several features read the
        table.
      mesh: devices that share the tables and the samples of a batch. None, the default: one device.
        See `prepare`.
      sharding_axis: axes of the mesh over which tables and samples are split. None, the default:
        all axes of the mesh.
      placement: placement of all tables on a mesh, or a dictionary from table names to placements.
        See `rsembed.EmbeddingCollection`.
      rngs: source of the PRNG key for initial weights and stochastic rounding. Default:
        `nnx.Rngs(0)`.

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
        embedding_specs: Sequence[plans.EmbeddingSpec],
        feature_table_map: Sequence[int] | None = None,
        cache_algorithm: CacheAlgorithm | str | int = CacheAlgorithm.LRU,
        cache_load_factor: Annotated[float, "[0, 1]"] = 0.2,
        cache_sets: NonNegativeInt = 0,
        cache_reserved_memory: Annotated[float, "[0, inf)"] = 0.0,
        cache_precision: SparseType | str | None = None,
        weights_precision: SparseType | str | int = SparseType.FP32,
        output_dtype: SparseType | str | int = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: arguments.AnyOptimizer
        | Sequence[arguments.AnyOptimizer] = EmbOptimType.EXACT_SGD,
        record_cache_metrics: arguments.RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: Annotated[float, "(0, inf]"] = 1.0,
        max_norm: Annotated[float, "[0, inf]"] = 0.0,
        learning_rate: Any = 0.01,
        eps: float = 1e-8,
        momentum: Annotated[float, "[0, 1]"] = 0.9,
        weight_decay: Annotated[float, "[0, inf)"] = 0.0,
        weight_decay_mode: WeightDecayMode | str | int = WeightDecayMode.NONE,
        eta: Annotated[float, "[0, inf)"] = 0.001,
        beta1: Annotated[float, "[0, 1)"] = 0.9,
        beta2: Annotated[float, "[0, 1)"] = 0.999,
        ensemble_mode: regularization.EnsembleModeDefinition | None = None,
        counter_based_regularization: regularization.CounterBasedRegularizationDefinition
        | None = None,
        cowclip_regularization: regularization.CowClipDefinition | None = None,
        pooling_mode: PoolingMode | str | int = PoolingMode.SUM,
        device: jax.Device | str | int | None = None,
        bounds_check_mode: BoundsCheckMode | str | int = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: arguments.TBEStatsReporterConfig | None = None,
        table_names: Sequence[str] | None = None,
        optimizer_state_dtypes: Mapping[str, SparseType] | None = None,
        multipass_prefetch_config: arguments.MultiPassPrefetchConfig | None = None,
        global_weight_decay: regularization.GlobalWeightDecayDefinition | None = None,
        uvm_host_mapped: bool = False,
        *,
        emainplace_mode: regularization.EmainplaceModeDefinition | None = None,
        feature_names: Sequence[str] | None = None,
        mesh: Mesh | None = None,
        sharding_axis: str | Sequence[str] | None = None,
        placement: str | Mapping[str, str] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        settings = Arguments.of(locals(), inspect.signature(TableBatchedEmbeddingBags.__init__))
        self.arguments = nnx.static(settings)
        self.bounds_check_mode = settings.bounds_check_mode
        self.plan = plans.make_plan(settings)
        self.feature_names = self.plan.feature_names
        host_rows.warn_of_arguments(self.plan, settings)
        self.output_dtype = settings.output_dtype.dtype
        self.max_gradient = max_gradient if gradient_clipping else None
        self.deterministic = False
        self._has_warned = False
        self._host_rows = HostRows(self.plan, settings) if self.plan.has_cache else None
        num_places: dict[str, int] = {}
        if self._host_rows is not None:
            for name, group in self._host_rows.groups.items():
                num_places[name] = group.num_slots
        jax_device = plans.device_of(device)
        if not rngs:
            rngs = nnx.Rngs(0)
        key = rngs.params()
        state = functional.init_state(self.plan, key, num_places)
        if jax_device is not None:
            state = jax.device_put(state, jax_device)
        self.state = TBEVariable(state)
        if self._host_rows is not None:
            self._host_rows.end(self.state)
        self.bounds_check_warning = TBEVariable(jnp.zeros((), jnp.int32))

    def __call__(
        self,
        indices: ArrayLike | AnyBatch,
        offsets: ArrayLike | None = None,
        per_sample_weights: ArrayLike | None = None,
        feature_requires_grad: ArrayLike | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> Float[Array, "*output"]:
        """Pooled rows of all features, from a lookup that does not train the tables.

        Args:
          indices: ids of all features, feature after feature, or the result of `prepare`. The id -1
            means no id.
          offsets: bag `b` of feature `f` holds
            `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`, for a batch of `B` bags per
            feature.
          per_sample_weights: array with one weight per id, which multiplies the row that the id
            reads. `jax.grad` can differentiate the pooled rows with respect to the weights. None,
            the default: all weights are 1.
          feature_requires_grad: ignored, because only `vjp` uses it.
          batch_size_per_feature_per_rank: nested list of bag counts, for features with different
            numbers of bags. Entry `[f][r]` is the number of bags of feature `f` from rank `r`.
          total_unique_indices: ignored, because only `vjp` uses it.

        Returns: `[B, sum of dims]`, with the features side by side. For PoolingMode.NONE,
          `[nnz, longest dim]`, where shorter rows are padded with zeros. With
          `batch_size_per_feature_per_rank`, one flat array: the outputs of rank 0, then of rank 1,
          and so on. The outputs of a rank are the flattened `[bags, dim]` arrays of all features.
        """
        del feature_requires_grad, total_unique_indices
        batch = self._read(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        with self._alone():
            return self._pooled(self._brought(batch))

    def vjp(
        self,
        indices: ArrayLike | AnyBatch,
        offsets: ArrayLike | None = None,
        per_sample_weights: ArrayLike | None = None,
        feature_requires_grad: ArrayLike | None = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
        total_unique_indices: int | None = None,
    ) -> tuple[Float[Array, "*output"], TablesBackward]:
        """Looks up the batch of a training step.

        Args:
          indices: see `__call__`.
          offsets: see `__call__`.
          per_sample_weights: see `__call__`.
          feature_requires_grad: for each feature, 1 to compute the gradients of its
            `per_sample_weights`, or 0 to get zeros instead. `feature_requires_grad` has no effect
            on the training of looked-up rows.
          batch_size_per_feature_per_rank: see `__call__`.
          total_unique_indices: maximum number of rows per group of tables in a `RowGradients`. A
            `RowGradients` is the result of `backward.row_gradients`, and of `backward` with
            OptimType.NONE. Default: the number of indices.

        Returns: the output as from `__call__`, and the function `backward(d_output)`, which trains
          the tables with the gradient of the output.

        Raises: RuntimeError: the module is in evaluation mode, which a call of `train()` ends.
        """
        if self.deterministic:
            raise RuntimeError(_EVALUATES)
        batch = self._read(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        mask = None
        if feature_requires_grad is not None:
            mask = batches.mask_of_ids(self.plan, batch, feature_requires_grad)
        with self._alone():
            # `_read` checks the batch before `_begin_step`, because `_begin_step` may change
            # tables, and a call with an invalid batch must not change tables.
            self._begin_step()
            near = self._brought(batch)
            output = self._pooled(near)
            return output, TablesBackward(
                self, batch, near, output.shape, mask, total_unique_indices
            )

    def apply(self, row_gradients: RowGradients) -> None:
        """Applies one optimizer step to every row in `row_gradients`.

        Args:
          row_gradients: result of `backward.row_gradients`, which may have been clipped, or summed
            over several batches.

        Raises: ValueError: the gradients belong to a module with other tables, or rows and values
          differ in length.
        """
        num_rows = functional.row_counts(self.plan)
        axes = {name: (1, group.dim) for name, group in self.plan.groups.items()}
        check_belong(row_gradients, self.plan.row_layout, num_rows, axes)
        with self._alone():
            self._begin_step()
            host = self.host_rows
            rates = learning_rates(self.plan, self.whole_state)
            if host is not None:
                row_gradients = host.bring_rows(self.state, row_gradients)

            def program(*operands: Any) -> tuple[TBEState, None]:
                return _apply(*operands), None

            self._step(host, program, row_gradients, rates)

    def prepare(
        self, indices: ArrayLike, offsets: ArrayLike, per_sample_weights: ArrayLike | None = None
    ) -> AnyBatch:
        """Checks a batch and copies it to the devices.

        Pass the result to `__call__` or `vjp` in place of `indices`, also inside `jit`.

        On a mesh, the samples are split over the devices, and each process passes its part of the
        batch. On one device, the number of ids is padded to a power of two (not for
        PoolingMode.NONE), so that a stream of batches needs only a few compiled programs.

        For a batch that was prepared on one device, the gradient of `per_sample_weights` that
        `backward` returns is an array with one entry per id, including padding. For a batch that
        was prepared on a mesh, the gradient is a dictionary with one array per feature.

        Raises: RuntimeError: `prepare` is called inside `jit`.
        """
        batch = self._read(indices, offsets, per_sample_weights)
        if is_traced(batch):
            raise RuntimeError(
                "prepare brings a batch to the devices before a compiled step; call it outside of jit."
            )
        if self.plan.is_shared or not isinstance(batch, Call):
            return self._brought(batch)
        if self.plan.pooling != "none":
            batch = batches.with_room(batch)
        on_device: Call = jax.tree.map(jnp.asarray, batch)
        return on_device

    def prefetch(
        self,
        indices: ArrayLike,
        offsets: ArrayLike,
        forward_stream: object = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Copies the rows of a batch into the cache before the batch is looked up.

        Other batches may be looked up between the prefetch of a batch and its lookup.

        Args:
          indices: see `__call__`.
          offsets: see `__call__`.
          forward_stream: ignored, and accepted only because FBGEMM's method has this argument.
          batch_size_per_feature_per_rank: see `__call__`.

        Raises: RuntimeError: `prefetch` is called inside `jit`, or 100 prefetched batches have not
          been looked up yet.
        """
        del forward_stream
        with self._alone():
            host = self.host_rows
            if host is None:
                return
            batch = self._read(indices, offsets, None, batch_size_per_feature_per_rank)
            if not isinstance(batch, Call) or is_traced(batch):
                raise RuntimeError(
                    "prefetch works beside compiled programs; call it outside of jit."
                )
            host.prefetch(self.state, batch)

    def _begin_step(self) -> None:
        """Calls `functional.begin_step` for the next training step, if an optimizer needs it."""
        if self.plan.has_passes:
            kept(self.state.set_value, _begin_step, self.plan, self.whole_state)

    def _step(
        self, host: HostRows | None, program: Callable[..., tuple[TBEState, Any]], *operands: PyTree
    ) -> Any:
        """Runs a program that updates rows. Updated rows that are not cached are copied to the host.

        Args:
          host: the module's `host_rows`.
          program: function that is called with the plan, the state and `*operands`. The function
            donates the state, and returns the new state and a second result.
          *operands: arguments of `program` after the plan and the state.

        Returns: the second result of `program`.
        """
        state = self.whole_state
        if host is not None and not is_traced((state, operands)):
            host.begin(state, steps=True)

        def keep(results: tuple[TBEState, Any]) -> None:
            self.state.set_value(results[0])

        _, result = kept(keep, program, self.plan, state, *operands)
        if host is not None:
            host.write_back(self.state)
        return result

    def _read(self, *arguments: Any) -> AnyBatch:
        """Reads and checks the arguments of a call. Warns once about ids and offsets out of range.

        `bounds_check_warning` is set to the number of ids and offsets that are out of range, or to
        0 in mode IGNORE. `_read` does not change `bounds_check_warning` in mode NONE or for a
        prepared batch.
        """
        batch, num_corrected, mistake = batches.read(self.plan, self.bounds_check_mode, *arguments)
        # Inside a transformation such as `nnx.jit`, the variables of a module can be set only if
        # the module is an argument of the transformed function. If the module is not an argument of
        # the transformed function, the number of ids and offsets out of range is not stored.
        with contextlib.suppress(TraceContextError):
            if mistake and not self._has_warned:
                message = (
                    f"rsembed.tbe: {mistake} It was corrected, as in FBGEMM. Later batches do not warn: "
                    "bounds_check_warning has the number of corrections in the last batch."
                )
                warnings.warn(message, stacklevel=3)
                self._has_warned = True
            if num_corrected is not None and self.bounds_check_mode != BoundsCheckMode.NONE:
                self.bounds_check_warning.set_value(jnp.asarray(num_corrected, jnp.int32))
        return batch

    def _brought(self, batch: AnyBatch, *, admit: bool = True) -> AnyBatch:
        """Copies the rows of a batch to the device. Returns a batch for `functional.lookup`.

        On a mesh, the batch is split by sample. Ids of cached tables are replaced by cache slots.

        Args:
          batch: result of `_read`.
          admit: whether rows that are not in the cache enter the cache, True by default.

        Raises: RuntimeError: a table is cached, and the module is not an argument of the
          surrounding transformation, such as `nnx.jit`.
        """
        functional.check_state(self.plan, self.state.get_value())
        if isinstance(batch, PreparedBatch):
            return batch
        if self.plan.is_shared:
            return batches.split(self.plan, self.bounds_check_mode, batch)
        host = self.host_rows
        if host is None:
            return batch
        try:
            self.state.set_value(self.state.get_value())
        except TraceContextError as error:
            raise RuntimeError(
                "a lookup moves rows of tables on the host, which needs the module as an argument of the surrounding "
                "transformation: nnx.jit or nnx.grad of a function of (..., module)."
            ) from error
        return host.bring(self.state, batch, admit=admit)

    def _pooled(self, batch: AnyBatch) -> Array:
        """Pooled rows of a batch that `_brought` has prepared for the lookup."""
        # NumPy arrays are passed to the compiled function without conversion, because a conversion
        # to JAX arrays before the call is slower.
        return _lookup(self.plan, self.state.get_value(), batch, output_dtype=self.output_dtype)


SplitTableBatchedEmbeddingBagsCodegen = TableBatchedEmbeddingBags
"""FBGEMM's name for `TableBatchedEmbeddingBags`."""


@dataclasses.dataclass(eq=False, repr=False)
class TablesBackward:
    """Backward function of one lookup, which trains the looked-up rows or returns their gradients.

    Each object can be used once: `backward(d_out)` or `backward.row_gradients(d_out)`.
    """

    _module: TableBatchedEmbeddingBags
    _batch: AnyBatch
    _near: AnyBatch
    _shape: tuple[int, ...]
    _mask: AnyArray | dict[str, Array] | None
    _bound: int | None

    def __post_init__(self) -> None:
        # A training step uses the learning rate at the time of its lookup, even if the rate changes
        # between the lookup and the update.
        self._rates = learning_rates(self._module.plan, self._module.whole_state)
        self._generation = self._module.state.get_value().generation
        self._is_used = False

    def __call__(
        self, d_output: ArrayLike, *, per_sample_weights_grad: bool = True
    ) -> WeightGradients | RowGradients:
        """Applies one optimizer step to every looked-up row.

        The gradient of a row is the sum of its gradients over the whole batch.

        Args:
          d_output: gradient of the output of `vjp`, in the shape of the output.
          per_sample_weights_grad: whether the gradient of `per_sample_weights` is computed, True by
            default. `backward` is faster with `per_sample_weights_grad=False`.

        Returns: the gradient of `per_sample_weights`, in the structure of the weights, or None
          without weights. For a batch prepared on a mesh, the gradient is a dictionary with one
          array per feature. For OptimType.NONE, no row is updated, and the result is a
          `RowGradients`.

        Raises: RuntimeError: the backward function has already been used, or the module is in
          evaluation mode.
        """
        with self._module._alone():
            return self._trained(d_output, per_sample_weights_grad)

    def _trained(
        self, d_output: ArrayLike, per_sample_weights_grad: bool
    ) -> WeightGradients | RowGradients:
        module = self._module
        host = module.host_rows
        if module.plan.tables[0].optimizer == EmbOptimType.NONE:
            return self.row_gradients(d_output)
        gradient = self._gradient(d_output)
        functional.check_state(module.plan, module.state.get_value())
        self._is_used = True
        module._begin_step()
        # If the state has changed since the call of `vjp`, rows of the batch may have left the
        # device, so `_brought` copies the rows of the batch to the device again.
        if module.state.get_value().generation is not self._generation:
            self._near = module._brought(self._batch, admit=False)
        program = functools.partial(
            _backward,
            max_gradient=module.max_gradient,
            wants_weight_gradients=per_sample_weights_grad,
        )
        d_weights = module._step(host, program, self._near, gradient, self._rates)
        module._report(self._batch, gradient)
        if d_weights is None:
            return None
        if module.plan.is_shared:
            d_weights = batches.weights_as_passed(d_weights, self._batch)
        if self._mask is not None:
            d_weights = jax.tree.map(jnp.multiply, d_weights, self._mask)
        weight_gradients: WeightGradients = d_weights
        return weight_gradients

    def row_gradients(self, d_output: ArrayLike) -> RowGradients:
        """Gradients of all looked-up rows, without an update of the rows.

        The gradients can be clipped, or summed over several batches, and passed to `apply` later.

        Args:
          d_output: gradient of the output of `vjp`, in the shape of the output.

        Returns: row numbers and gradients for each group of tables with equal dim, optimizer and
          placement. The name of a group is the name of its first table. Rows are numbered
          consecutively over the tables of a group.

        Raises: ValueError: more rows of a group than `total_unique_indices` were looked up.
        """
        module = self._module
        gradient = self._gradient(d_output)
        batch = self._near if module.plan.is_shared else self._batch
        gradients: RowGradients = _row_gradients(
            module.plan, batch, gradient, max_gradient=module.max_gradient
        )
        if self._bound is not None:
            gradients = functional.cut(gradients, self._bound)
        self._is_used = True
        return gradients

    def _gradient(self, d_output: ArrayLike) -> Array:
        """Checks the gradient of the output, and returns it as a JAX array.

        Raises:
          TypeError: `d_output` is not an array of floats.
          ValueError: `d_output` does not have the shape of the output.
          RuntimeError: the backward function has already been used, or the module is in evaluation
            mode.
        """
        check_not_forked("the module")
        module = self._module
        check_gradient(d_output, "the gradient of the output")
        d_output = jnp.asarray(d_output)
        if d_output.shape != self._shape:
            raise ValueError(
                f"the gradient has shape {d_output.shape}, but the output has {self._shape}."
            )
        if self._is_used:
            raise RuntimeError("this backward was used already; call vjp again for a second step.")
        if module.deterministic:
            raise RuntimeError(_EVALUATES)
        return d_output
