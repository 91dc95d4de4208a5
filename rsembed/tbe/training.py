"""A training step of a module: from ids to its output, and from the gradient of that to stepped rows."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import TraceContextError
from jaxtyping import Array

from rsembed.bags import PAD_ID, is_traced, padded_size
from rsembed.kernels.contract import JaggedBatch
from rsembed.parallel.agreement import Agreement
from rsembed.row_gradients import RowGradients, SingleUse, check_gradient
from rsembed.tbe import functional
from rsembed.tbe.bounds import feature_starts, repeat_by_feature
from rsembed.tbe.door import PreparedBatch, is_by_feature
from rsembed.tbe.functional import AnyBatch
from rsembed.tbe.meshes import SplitBatch
from rsembed.tbe.plan import TBEPlan
from rsembed.tbe.records import BoundsCheckMode

if TYPE_CHECKING:
    from rsembed.tbe.module import TableBatchedEmbeddingBags

MAX_PREFETCHES = 100

_lookup = jax.jit(functional.lookup, static_argnums=0, static_argnames="output_dtype")
_backward = jax.jit(
    functional.backward,
    static_argnums=0,
    donate_argnums=1,
    static_argnames=("max_gradient", "wants_weight_gradients"),
)
_weight_gradients = jax.jit(functional.weight_gradients, static_argnums=0, static_argnames="max_gradient")
_row_gradients = jax.jit(functional.row_gradients, static_argnums=0, static_argnames="max_gradient")
learning_rates = jax.jit(functional.learning_rates, static_argnums=0)


def read_batch(module: TableBatchedEmbeddingBags, *arguments: Any) -> AnyBatch:
    """The checked batch of a call; the module notes how many ids and offsets had to be corrected."""
    mesh = None if module.plan.split is None else module.plan.split.devices.known_mesh
    with Agreement(mesh, "the batch", arguments):  # a process that refuses its part tells the others
        batch, num_corrected = module.door.read(module.plan, *arguments)
    if isinstance(arguments[0], PreparedBatch):
        return batch
    if module.door.mode != BoundsCheckMode.NONE:
        # A module that a transformation did not get as an argument cannot be written to inside: the count is lost.
        with contextlib.suppress(TraceContextError):
            module.bounds_check_warning.set_value(jnp.asarray(num_corrected, jnp.int32))
    return batch


def prepared(module: TableBatchedEmbeddingBags, indices: Any, *arguments: Any) -> PreparedBatch:
    """See `TableBatchedEmbeddingBags.prepare`."""
    batch = read_batch(module, indices, *arguments)
    if is_traced(batch):
        raise RuntimeError("prepare brings a batch to the devices before a compiled step; call it outside of jit.")
    if module.plan.split is not None:
        batch = bring_near(module, batch)
    elif isinstance(batch, JaggedBatch):
        batch = jax.tree.map(jnp.asarray, batch if module.plan.pooling == "none" else _with_room(batch))
    return PreparedBatch(batch, is_by_feature(indices), module.plan.row_layout)


def _with_room(batch: JaggedBatch) -> JaggedBatch:
    """The batch with a power of two of ids; those behind the last offset are in no bag."""
    missing = padded_size(batch.ids.shape[0]) - batch.ids.shape[0]
    changes: dict[str, Any] = {"ids": np.pad(batch.ids, (0, missing), constant_values=PAD_ID)}
    if batch.weights is not None:
        changes["weights"] = np.pad(batch.weights, (0, missing))
    return dataclasses.replace(batch, **changes)


def bring_near(module: TableBatchedEmbeddingBags, batch: AnyBatch, *, admit: bool = True) -> AnyBatch:
    """The batch where the tables can read it: on a mesh split by sample, and with places for ids of cached tables.

    Their rows are brought; `admit` lets them into the cache.
    """
    functional.check_state(module.plan, module.state.get_value())
    if module.plan.split is not None:
        return batch if isinstance(batch, SplitBatch) else module.plan.on_mesh.of_jagged(batch)
    if isinstance(batch, SplitBatch) or (host_rows := module.host_rows) is None:
        return batch
    try:
        module.state.set_value(module.state.get_value())
    except TraceContextError as error:
        raise RuntimeError(
            "a lookup moves rows of tables on the host, which needs the module as an argument of the surrounding "
            "transformation: nnx.jit or nnx.grad of a function of (..., module)."
        ) from error
    state, near = host_rows.bring(module.state.get_value(), batch, admit=admit)
    module.state.set_value(state)
    return near


def pooled(module: TableBatchedEmbeddingBags, batch: AnyBatch, *, by_feature: bool) -> Any:
    """The output of a lookup in the form that the caller expects."""
    # Arrays of numpy go into compiled functions as they are, which is faster than turning them into JAX's first.
    output = _lookup(module.plan, module.state.get_value(), batch, output_dtype=module.output_dtype)
    return output_by_feature(module.plan, module.feature_names, output, batch) if by_feature else output


def prefetch(module: TableBatchedEmbeddingBags, *arguments: Any) -> None:
    """Brings rows of a later batch into the cache."""
    host_rows, config = module.host_rows, module.caching.multipass_prefetch_config
    assert host_rows is not None
    started = time.perf_counter()
    batch = read_batch(module, *arguments)
    if not isinstance(batch, JaggedBatch) or is_traced((batch.ids, batch.offsets)):
        raise RuntimeError("prefetch works beside compiled programs; call it outside of jit.")
    if len(host_rows.prefetched) >= MAX_PREFETCHES:
        raise RuntimeError(
            f"{MAX_PREFETCHES} prefetched batches wait for their lookup: prefetch() is called too often, or other "
            "batches are looked up."
        )
    parts = [batch] if config is None else _in_parts(batch, config.num_passes, config.min_splitable_pass_size)
    module.state.set_value(host_rows.prefetch(module.state.get_value(), parts, lock=module.caching.prefetch_pipeline))
    if module.reporter is not None:
        module.reporter.note_prefetch(batch.ids, time.perf_counter() - started)


def _in_parts(batch: JaggedBatch, num_parts: int, min_ids: int) -> list[JaggedBatch]:
    """The batch in at most `num_parts` parts, one or more, of at least `min_ids` ids, each with all bags."""
    num_ids, offsets = len(batch.ids), np.asarray(batch.offsets)
    size = max(-(-num_ids // num_parts), min_ids)
    changes: list[dict[str, Any]] = [
        {"ids": batch.ids[first : first + size], "offsets": np.clip(offsets - first, 0, size), "weights": None}
        for first in range(0, max(num_ids, 1), size)
    ]
    return [dataclasses.replace(batch, **own) for own in changes]


class TablesBackward:
    """Trains the tables of one `vjp` call: `backward(d_out)` once, or `backward.row_gradients(d_out)`.

    `backward.weight_gradients(d_out)` before that gives the gradients of `per_sample_weights` alone.
    """

    def __init__(
        self,
        module: TableBatchedEmbeddingBags,
        batch: AnyBatch,
        near: AnyBatch,
        feature_requires_grad: Any,
        total_unique_indices: int | None,
        *,
        by_feature: bool,
    ):
        self._module, self._batch, self._near, self._by_feature = module, batch, near, by_feature
        self._mask, self._bound = feature_requires_grad, total_unique_indices
        # The rate of this step is the one that its lookup saw.
        self._rates = learning_rates(module.plan, module.whole_state)
        self._generation = module.state.get_value().generation
        self._permit = SingleUse("this backward was used already; a second step needs its own vjp.")

    def __call__(self, d_output: Any, *, per_sample_weights_grad: bool = True) -> Any:
        """One optimizer step of every row that was looked up, with its gradients summed over the whole call.

        Args:
          d_output: gradient of what `vjp` returned, in its form.
          per_sample_weights_grad: False saves the time for gradients that nobody reads.

        Returns: the gradient of per_sample_weights (None without weights). For OptimType.NONE nothing is stepped, and
          the `RowGradients` are returned.

        Raises: RuntimeError: it was called before, or the module went into evaluation mode since.
        """
        module, host_rows = self._module, self._module.host_rows
        if module.plan.tables[0].rule is None:
            return self.row_gradients(d_output)
        gradient, mask = self._gradient(d_output), self._mask_of_ids()
        self._check_use()
        functional.check_state(module.plan, module.state.get_value())
        self._permit.use()
        self._bring_near()
        state, d_weights = _backward(
            module.plan,
            module.whole_state,
            self._near,
            gradient,
            self._rates,
            max_gradient=module.max_gradient,
            wants_weight_gradients=per_sample_weights_grad and self._batch.weights is not None,
        )
        module.state.set_value(state if host_rows is None else host_rows.write_back(state))
        if module.reporter is not None:
            module.reporter.step(module, self._batch, d_output)
        return d_weights if d_weights is None else self._masked(d_weights, mask)

    def weight_gradients(self, d_output: Any) -> Any:
        """The gradient of `per_sample_weights`, changing nothing: for OptimType.NONE, and beside `row_gradients`.

        Of a prepared batch on a mesh `{feature: [bags, ids]}`, else in the form of the weights.

        Args:
          d_output: gradient of what `vjp` returned, in its form.

        Raises:
          ValueError: the lookup had no weights.
          RuntimeError: this backward has been used, and tables may have changed since.
        """
        if self._batch.weights is None:
            raise ValueError("weight_gradients needs a lookup with per_sample_weights; give them to vjp.")
        gradient, mask = self._gradient(d_output), self._mask_of_ids()
        self._permit.check()
        self._bring_near()
        state, module = self._module.whole_state, self._module
        d_weights = _weight_gradients(
            module.plan, state, self._near, gradient, self._rates, max_gradient=module.max_gradient
        )
        return self._masked(d_weights, mask)

    def _mask_of_ids(self) -> Any:
        return None if self._mask is None else mask_of_ids(self._module.plan, self._batch, self._mask)

    def _masked(self, d_weights: Any, mask: Any) -> Any:
        """Gradients of weights in the form in which these were given, 0 where the mask is."""
        if self._module.plan.split is not None and isinstance(self._batch, JaggedBatch):
            d_weights = self._module.plan.on_mesh.in_order(d_weights, self._batch)
        if mask is not None:
            d_weights = jax.tree.map(jnp.multiply, d_weights, mask)
        if isinstance(d_weights, tuple):
            return dict(zip(self._module.feature_names, d_weights, strict=True))
        return d_weights

    def _bring_near(self) -> None:
        """Rows may have moved since the lookup, if other batches came between."""
        if self._module.state.get_value().generation is not self._generation:
            self._near = bring_near(self._module, self._batch, admit=False)

    def row_gradients(self, d_output: Any) -> RowGradients:
        """The summed gradient of every looked-up row, changing nothing: to be clipped, accumulated and applied later.

        Args:
          d_output: gradient of what `vjp` returned, in its form.

        Returns: one entry per group of tables of equal dim, optimizer and placement. Its rows count through the tables
          of the group.

        Raises: ValueError: more rows than `total_unique_indices` were looked up.
        """
        gradient = self._gradient(d_output)
        self._check_use()
        batch = self._batch if self._module.plan.split is None else self._near
        arguments = (self._module.plan, batch, gradient)
        gradients = _row_gradients(*arguments, max_gradient=self._module.max_gradient)
        gradients = gradients if self._bound is None else _cut(gradients, self._bound)
        self._permit.use()
        return gradients

    def _check_use(self) -> None:
        self._permit.check()
        if self._module.deterministic:
            raise RuntimeError("the module is in evaluation mode, which never trains; call train() first.")

    def _gradient(self, d_output: Any) -> Array:
        """The gradient in the form of an output that is no dict. Raises: TypeError, ValueError: it has another one."""
        module, shape = self._module, self._module.plan.output_shape(self._near)
        if self._by_feature:
            d_output = gradient_of_dict(module.feature_names, d_output, is_flat=len(shape) == 1)
        check_gradient(d_output, "the gradient of the output")
        d_output = jnp.asarray(d_output)
        if d_output.shape != shape:
            raise ValueError(f"the gradient has shape {d_output.shape}, but the output has {shape}.")
        return d_output


def mask_of_ids(plan: TBEPlan, batch: AnyBatch, feature_requires_grad: Any) -> Any:
    """`feature_requires_grad` by id. Raises: ValueError: it has another length than there are features."""
    num_features, mask = len(plan.features), jnp.asarray(feature_requires_grad, jnp.float32)
    if mask.shape != (num_features,):
        raise ValueError(f"feature_requires_grad has shape {mask.shape}; give {num_features} numbers.")
    if isinstance(batch, SplitBatch):
        return tuple(mask)
    num_bags = plan.bags_of(batch)
    starts = feature_starts(jnp.asarray(batch.offsets), num_bags)
    return repeat_by_feature(jnp.concatenate([jnp.zeros(1), mask]), starts, batch.ids.shape[0])


def _cut(gradients: RowGradients, bound: int) -> RowGradients:
    touched = gradients.num_touched()
    if not is_traced(touched) and (most := max(map(int, touched.values()))) > bound:
        raise ValueError(f"total_unique_indices is {bound}, but {most} rows were read; raise it or leave it out.")
    if gradients.shardings is not None:  # each device has its own at the front of its part
        return gradients
    rows = {name: rows[:bound] for name, rows in gradients.rows.items()}
    values = {name: values[:bound] for name, values in gradients.values.items()}
    return dataclasses.replace(gradients, rows=rows, values=values)


def output_by_feature(plan: TBEPlan, names: Sequence[str], output: Array, batch: AnyBatch) -> dict[str, Array]:
    """`{feature: [bags, dim]}`. Raises: TypeError: PoolingMode.NONE, whose rows belong to ids."""
    if plan.pooling == "none":
        raise TypeError(
            "PoolingMode.NONE returns one row per id in the order of the ids; pass indices and offsets, not a dict."
        )
    dims = [plan.tables[t].dim for t in plan.features]
    sizes = (
        dims
        if not isinstance(batch, JaggedBatch) or batch.layout == "columns"
        else [n * d for n, d in zip(plan.bags_of(batch), dims, strict=True)]
    )
    parts = jnp.split(output, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    return {name: part.reshape(-1, dim) for name, part, dim in zip(names, parts, dims, strict=True)}


def gradient_of_dict(names: Sequence[str], d_output: Any, *, is_flat: bool) -> Array:
    """The other way round. Raises: ValueError: not a dict of exactly these features."""
    if not isinstance(d_output, Mapping) or set(d_output) != set(names):
        raise ValueError(f"the output was {{feature: array}}; its gradient needs the features {sorted(names)}.")
    for name in names:
        check_gradient(d_output[name], f"the gradient of the output of feature {name!r}")
    parts = [jnp.asarray(d_output[name]) for name in names]
    return jnp.concatenate([part.reshape(-1) for part in parts]) if is_flat else jnp.concatenate(parts, axis=1)
