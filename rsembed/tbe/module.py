"""FBGEMM's table-batched training module as an `nnx.Module`: many tables, one call, training in the backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from rsembed.bags import is_traced, kept
from rsembed.checks import NonNegativeInt, validated
from rsembed.collection.prepared import PreparedBatch
from rsembed.kernels.contract import Call
from rsembed.optimizers import regularization
from rsembed.optimizers.regularization import WeightDecayMode
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients, check_belong, check_gradient
from rsembed.tbe import arguments, batches, functional, host_rows
from rsembed.tbe import plan as plans
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
_EVALUATES = "the module is in evaluation mode, which never trains; call train() first."


class TableBatchedEmbeddingBags(TrainedTables):
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
      cache_algorithm: eviction policy of caches.
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
        `rsembed.optimizers.FTRL(...)`, with its own settings and learning rate.
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
      beta2: of the ADAM and LAMB families.
      ensemble_mode: of ENSEMBLE_ROWWISE_ADAGRAD.
      counter_based_regularization: if and only if the mode is COUNTER.
      cowclip_regularization: if and only if the mode is COWCLIP.
      pooling_mode: SUM; MEAN, divided by the number of ids whatever their weights; NONE, one row per id.
      device: where tables live; None is JAX's default device.
      bounds_check_mode: what happens to ids and offsets outside their range. An id of -1 stands for no id.
      uvm_non_rowwise_momentum: no effect, as use_experimental_tbe and uvm_host_mapped; states follow their rows.
      use_experimental_tbe: see there.
      prefetch_pipeline: rows of prefetched batches stay in the cache until they were used; LRU only.
      stats_reporter_config: reports numbers and bytes every so many steps outside `jit`.
      table_names: for messages and state dicts; `table_0`, ... by default.
      optimizer_state_dtypes: FP32, FP16 or BF16 by state name; for momentum1 and momentum2 of any optimizer.
      multipass_prefetch_config: prefetch long batches in parts.
      global_weight_decay: if and only if the mode is DECOUPLE_GLOBAL.
      uvm_host_mapped: see uvm_non_rowwise_momentum.
      emainplace_mode: of EMAINPLACE_ROWWISE_ADAGRAD.
      feature_names: for messages; by default the table's name, numbered if it is shared.
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
        given = Arguments.of(locals(), inspect.signature(TableBatchedEmbeddingBags.__init__))
        self.arguments = nnx.static(given)
        self.bounds_check_mode = given.bounds_check_mode
        self.plan = plans.make_plan(given)
        self.feature_names = self.plan.feature_names
        host_rows.warn_of_arguments(self.plan, given)
        self.output_dtype = given.output_dtype.dtype
        self.max_gradient = max_gradient if gradient_clipping else None
        self.deterministic = self._has_warned = False
        self._host_rows = HostRows(self.plan, given) if self.plan.has_cache else None
        key = (rngs or nnx.Rngs(0)).params()
        self.state = TBEVariable(
            host_rows.first_state(self.plan, key, self._host_rows, plans.device_of(device))
        )
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
        """Looks up, and changes no weight, state or step.

        Args:
          indices: ids of all features, feature after feature; -1 is no id. Or what `prepare` returned.
          offsets: bag `b` of feature `f` holds `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
          per_sample_weights: factor of every looked-up row; differentiable by `jax.grad`.
          feature_requires_grad: used by `vjp` only.
          batch_size_per_feature_per_rank: `[feature][rank]` bags, when features differ.
          total_unique_indices: used by `vjp` only.

        Returns: `[B, sum of dims]`, features side by side; `[nnz, dim]` for PoolingMode.NONE (shorter rows filled with
          zeros). With `batch_size_per_feature_per_rank` one flat array: for each rank, for each feature, its
          `[bags, dim]`.
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
        """The lookup of a training step, and the function that trains with the gradient of its output.

        Arguments are those of `__call__`. `feature_requires_grad` has 1 or 0 per feature; 0 makes the gradients of its
        per_sample_weights zero, and its rows are trained all the same. OptimType.NONE returns `total_unique_indices`
        rows per group at most; None means one per index.

        Raises: RuntimeError: the module is in evaluation mode; call `train()` first.
        """
        if self.deterministic:
            raise RuntimeError(_EVALUATES)
        batch = self._read(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        mask = (
            None
            if feature_requires_grad is None
            else batches.mask_of_ids(self.plan, batch, feature_requires_grad)
        )
        with self._alone():
            self._begin_step()  # a batch that is refused leaves the tables as they are
            near = self._brought(batch)
            output = self._pooled(near)
            return output, TablesBackward(
                self, batch, near, output.shape, mask, total_unique_indices
            )

    def apply(self, row_gradients: RowGradients) -> None:
        """One optimizer step of every row in `row_gradients`, which `backward.row_gradients` returned.

        Raises: ValueError: they are those of a module with other tables, or have not a vector of its dim for each row.
        """
        rows, tables = functional.row_counts(self.plan), [group.table for group in self.plan.groups]
        axes = {table.name: (1, table.dim) for table in tables}
        check_belong(row_gradients, self.plan.row_layout, rows, axes)
        with self._alone():
            self._begin_step()
            host, keep = self.host_rows, self.state.set_value
            state = self.whole_state
            rates = learning_rates(self.plan, state)
            if host is not None:
                state, row_gradients = host.bring_rows(state, row_gradients, keep)
                self.state.set_value(state)  # the host has moved on, whatever becomes of the step
                host.begin(state, steps=True)
            state = kept(keep, _apply, self.plan, state, row_gradients, rates)
            if host is not None:
                self.state.set_value(host.write_back(state))
                host.end()

    def prepare(
        self, indices: ArrayLike, offsets: ArrayLike, per_sample_weights: ArrayLike | None = None
    ) -> AnyBatch:
        """Checks a batch on the host and brings it to the devices: goes in place of `indices`, into `jit` too.

        On a mesh its samples are split, which inside `jit` cannot be done, and each process gives its own. On one
        device it has room for a power of two of ids, so that few programs are compiled. Gradients of
        `per_sample_weights` come in this form: on a mesh `{feature: [bags, ids]}`.
        """
        batch = self._read(indices, offsets, per_sample_weights)
        if is_traced(batch):
            raise RuntimeError(
                "prepare brings a batch to the devices before a compiled step; call it outside of jit."
            )
        if self.plan.is_shared:
            batch = self._brought(batch)
        elif isinstance(batch, Call):
            batch = jax.tree.map(
                jnp.asarray, batch if self.plan.pooling == "none" else batches.with_room(batch)
            )
        return batch

    def prefetch(
        self,
        indices: ArrayLike,
        offsets: ArrayLike,
        forward_stream: object = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Brings rows of a later batch into the cache; other batches may be looked up in between.

        Arguments are those of `__call__`; `forward_stream` has no meaning here, and is there for the original's sake.

        Raises: RuntimeError: inside `jit`, or 100 prefetched batches wait already.
        """
        del forward_stream
        with self._alone():
            if (host := self.host_rows) is None:
                return
            batch = self._read(indices, offsets, None, batch_size_per_feature_per_rank)
            if not isinstance(batch, Call) or is_traced(
                (batch.lists[0].ids, batch.lists[0].offsets)
            ):
                raise RuntimeError(
                    "prefetch works beside compiled programs; call it outside of jit."
                )
            self.state.set_value(host.prefetch(self.state.get_value(), batch, self.state.set_value))
            host.end()

    def _begin_step(self) -> None:
        """Runs the passes over whole tables that the next step still owes, for example after a second `vjp`."""
        if self.plan.has_passes:
            kept(self.state.set_value, _begin_step, self.plan, self.whole_state)

    def _read(self, *arguments: Any) -> AnyBatch:
        """The checked batch of a call; `bounds_check_warning` receives the number of corrected ids and offsets."""
        batch, num_corrected, mistake = batches.read(self.plan, self.bounds_check_mode, *arguments)
        # A module that a transformation did not get as an argument cannot be written to inside: the count is lost.
        with contextlib.suppress(TraceContextError):
            if mistake and not self._has_warned:
                message = (
                    f"rsembed.tbe: {mistake} It was corrected as FBGEMM does. This is told once; afterwards "
                    "bounds_check_warning tells how many the last batch had."
                )
                warnings.warn(message, stacklevel=3)
                self._has_warned = True
            if num_corrected is not None and self.bounds_check_mode != BoundsCheckMode.NONE:
                self.bounds_check_warning.set_value(jnp.asarray(num_corrected, jnp.int32))
        return batch

    def _brought(self, batch: AnyBatch, *, admit: bool = True) -> AnyBatch:
        """The batch where the tables can read it: on a mesh split by sample, and with places for ids of cached tables.

        Their rows are brought; `admit` lets them into the cache.
        """
        functional.check_state(self.plan, self.state.get_value())
        if isinstance(batch, PreparedBatch):
            return batch
        if self.plan.is_shared:
            return batches.split(self.plan, self.bounds_check_mode, batch)
        if (host := self.host_rows) is None:
            return batch
        try:
            self.state.set_value(self.state.get_value())
        except TraceContextError as error:
            raise RuntimeError(
                "a lookup moves rows of tables on the host, which needs the module as an argument of the surrounding "
                "transformation: nnx.jit or nnx.grad of a function of (..., module)."
            ) from error
        state, near = host.bring(self.state.get_value(), batch, self.state.set_value, admit=admit)
        self.state.set_value(state)
        if not is_traced(state):
            host.end()
        return near

    def _pooled(self, batch: AnyBatch) -> Array:
        """Output of a lookup of a batch that `_brought` has returned."""
        # Arrays of numpy go into compiled functions as they are, which is faster than turning them into JAX's first.
        return _lookup(self.plan, self.state.get_value(), batch, output_dtype=self.output_dtype)


SplitTableBatchedEmbeddingBagsCodegen = TableBatchedEmbeddingBags
"""FBGEMM's name of `TableBatchedEmbeddingBags`."""


@dataclasses.dataclass(eq=False, repr=False)
class TablesBackward:
    """Trains the tables of one `vjp` call: `backward(d_out)` once, or `backward.row_gradients(d_out)`."""

    _module: TableBatchedEmbeddingBags
    _batch: AnyBatch
    _near: AnyBatch
    _shape: tuple[int, ...]
    _mask: PyTree
    _bound: int | None

    def __post_init__(self) -> None:
        # The rate of this step is the one that its lookup saw.
        self._rates = learning_rates(self._module.plan, self._module.whole_state)
        self._generation = self._module.state.get_value().generation
        self._is_used = False

    def __call__(self, d_output: ArrayLike, *, per_sample_weights_grad: bool = True) -> PyTree:
        """One optimizer step of every row that was looked up, with its gradients summed over the whole call.

        Args:
          d_output: gradient of what `vjp` returned, in its form.
          per_sample_weights_grad: False saves the time for gradients that nobody reads.

        Returns: the gradient of per_sample_weights (None without weights), in their form; of a prepared batch on a mesh
          `{feature: [bags, ids]}`. For OptimType.NONE nothing is stepped, and the `RowGradients` are returned.

        Raises: RuntimeError: it was called before, or the module went into evaluation mode since.
        """
        with self._module._alone():
            return self._trained(d_output, per_sample_weights_grad)

    def _trained(self, d_output: ArrayLike, per_sample_weights_grad: bool) -> PyTree:
        module, host = self._module, self._module.host_rows
        if module.plan.tables[0].rule is None:
            return self.row_gradients(d_output)
        gradient = self._gradient(d_output)
        functional.check_state(module.plan, module.state.get_value())
        self._is_used = True
        module._begin_step()
        if (
            module.state.get_value().generation is not self._generation
        ):  # other batches may have moved rows since
            self._near = module._brought(self._batch, admit=False)
        state = module.whole_state
        if host is not None and not is_traced((state, self._near, gradient)):
            host.begin(state, steps=True)
        step = functools.partial(
            _backward,
            max_gradient=module.max_gradient,
            wants_weight_gradients=per_sample_weights_grad,
        )

        def keep(found: tuple[TBEState, PyTree]) -> None:
            module.state.set_value(found[0])

        state, d_weights = kept(keep, step, module.plan, state, self._near, gradient, self._rates)
        if host is not None:
            module.state.set_value(host.write_back(state))
            if not is_traced(state):
                host.end()
        if (config := module.arguments.stats_reporter_config) is not None:
            host_rows.report(config, module.plan, module.state.get_value(), self._batch, gradient)
        if d_weights is None:
            return None
        if isinstance(self._batch, PreparedBatch):
            d_weights = batches.weights_by_feature(d_weights)
        elif module.plan.is_shared:
            d_weights = batches.weights_in_order(d_weights, self._batch)
        if self._mask is not None:
            d_weights = jax.tree.map(jnp.multiply, d_weights, self._mask)
        return d_weights

    def row_gradients(self, d_output: ArrayLike) -> RowGradients:
        """The summed gradient of every looked-up row, to be clipped, accumulated and applied later; steps nothing.

        Args:
          d_output: gradient of what `vjp` returned, in its form.

        Returns: one entry per group of tables of equal dim, optimizer and placement, by the name of the first of them.
          Its rows count through the tables of the group.

        Raises: ValueError: more rows than `total_unique_indices` were looked up.
        """
        gradient, module = self._gradient(d_output), self._module
        batch = self._near if module.plan.is_shared else self._batch
        gradients = _row_gradients(module.plan, batch, gradient, max_gradient=module.max_gradient)
        gradients = gradients if self._bound is None else functional.cut(gradients, self._bound)
        self._is_used = True
        return gradients

    def _gradient(self, d_output: ArrayLike) -> Array:
        """The output's gradient as a JAX array, after checks of its form and of whether this backward may be used.

        Raises: TypeError, ValueError: it has another form. RuntimeError: this was used, or the module never trains.
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
            raise RuntimeError("this backward was used already; a second step needs its own vjp.")
        if module.deterministic:
            raise RuntimeError(_EVALUATES)
        return d_output
