"""FBGEMM's dense variant: table-batched lookups whose tables are parameters, trained by whoever trains the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rsembed.checks import validated
from rsembed.kernels import api
from rsembed.kernels.contract import JaggedBatch
from rsembed.refusals import refuses_names
from rsembed.tbe import construction, records, refused
from rsembed.tbe.door import Door
from rsembed.tbe.plan import TablePlan, TBEPlan
from rsembed.tbe.records import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SparseType,
)
from rsembed.tbe.training import mask_of_ids, output_by_feature


@refuses_names({"log": refused.METHODS["log"]})
class DenseTableBatchedEmbeddingBags(nnx.Module):
    """Embedding bags of many tables in one call, whose tables are `nnx.Param`s: gradients are dense, as of any layer.

    Use it where every row must move in every step, or to compare; else `TableBatchedEmbeddingBags` trains the rows that
    were read, in place. Weights start at zero, as in the original.

    Args:
      embedding_specs: `(rows, dim)` of every table.
      feature_table_map: table of every feature; by default one feature per table.
      weights_precision: FP32, FP16 or BF16.
      pooling_mode: SUM; MEAN; NONE, one row per id.
      use_cpu: no effect, as use_mtia; arrays live where JAX puts them.
      output_dtype: FP32, FP16 or BF16; sums are float32.
      use_mtia: see there.
      table_names: for messages; `table_0`, ... by default.
      bounds_check_mode: what happens to ids and offsets outside their range.

    Attributes:
      weights: one array per group of tables of equal dim, one under the other.

    Source: FBGEMM, DenseTableBatchedEmbeddingBagsCodegen.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> tables = DenseTableBatchedEmbeddingBags([(9, 2)])
      >>> ids, offsets = jnp.array([4, 4, 7]), jnp.array([0, 2, 3])
      >>> gradients = nnx.grad(lambda tables: tables(ids, offsets).sum())(tables)
      >>> jax.tree.leaves(gradients)[0][4].tolist()
      [2.0, 2.0]
    """

    @validated
    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int]],
        feature_table_map: Sequence[int] | None = None,
        weights_precision: SparseType | str = SparseType.FP32,
        pooling_mode: PoolingMode | str = PoolingMode.SUM,
        use_cpu: bool = False,
        output_dtype: SparseType | str = SparseType.FP32,
        use_mtia: bool = False,
        *,
        table_names: Sequence[str] | None = None,
        bounds_check_mode: BoundsCheckMode | str = BoundsCheckMode.WARNING,
    ):
        del use_cpu, use_mtia
        names = tuple(table_names or (f"table_{t}" for t in range(len(embedding_specs))))
        features = tuple(range(len(names))) if feature_table_map is None else tuple(feature_table_map)
        self.feature_names = tuple(construction.default_feature_names(features, names))
        place = EmbeddingLocation.DEVICE, ComputeDevice.CPU
        placed = [(rows, dim, *place) for rows, dim in embedding_specs]
        construction.check_specs(placed, features, names, self.feature_names)
        dtype = records.dtype_of(records.member(SparseType, weights_precision), "weights_precision")
        tables = (
            TablePlan(name, EmbOptimType.NONE, rows, dim, 0.0, dtype.name)
            for name, (rows, dim) in zip(names, embedding_specs, strict=True)
        )
        self.plan = TBEPlan(tuple(tables), features, records.member(PoolingMode, pooling_mode).name.lower())
        self.output_dtype = records.dtype_of(records.member(SparseType, output_dtype), "output_dtype").name
        self.door = nnx.static(Door(records.bounds_check_mode(bounds_check_mode), self.feature_names))
        self.weights = nnx.List(
            [nnx.Param(jnp.zeros((group.num_rows, group.table.dim), dtype)) for group in self.plan.groups]
        )

    def __call__(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Any = None,
        feature_requires_grad: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Pooled rows; differentiable in the tables and in `per_sample_weights`.

        Arguments and result are those of `TableBatchedEmbeddingBags.__call__`. `feature_requires_grad` has 1 or 0 per
        feature; 0 makes the gradients of its `per_sample_weights` zero.
        """
        batch, _ = self.door.read(self.plan, indices, offsets, per_sample_weights, batch_size_per_feature_per_rank)
        batch = jax.tree.map(jnp.asarray, batch)
        if feature_requires_grad is not None and batch.weights is not None:
            batch = dataclasses.replace(batch, weights=_with_gradients(self.plan, batch, feature_requires_grad))
        output = _pooled(self.plan, tuple(own.get_value() for own in self.weights), batch)
        output = output.astype(self.output_dtype).reshape(batch.output_shape(self.plan.dims))
        by_feature = isinstance(indices, Mapping)
        return output_by_feature(self.plan, self.feature_names, output, batch) if by_feature else output

    def split_embedding_weights(self) -> list[Float[Array, "rows dim"]]:
        """The weights of every table (copies)."""
        found = []
        for table, (group, first) in zip(self.plan.tables, self.plan.places, strict=True):
            found.append(jnp.array(self.weights[group].get_value()[first : first + table.num_rows], copy=True))
        return found

    def init_embedding_weights_uniform(self, min_val: float, max_val: float, *, rngs: nnx.Rngs | None = None) -> None:
        """Draws all weights from U(min_val, max_val)."""
        keys = jax.random.split((rngs or nnx.Rngs(0)).params(), len(self.weights))
        for key, own in zip(keys, self.weights, strict=True):
            drawn = jax.random.uniform(key, own.get_value().shape, jnp.float32, min_val, max_val)
            own.set_value(drawn.astype(own.get_value().dtype))


def _with_gradients(plan: TBEPlan, batch: JaggedBatch, feature_requires_grad: Any) -> Float[Array, " nnz"]:
    """The weights, without gradients for features that need none."""
    mask = mask_of_ids(plan, batch, feature_requires_grad)
    weights = jnp.asarray(batch.weights)
    return mask * weights + jax.lax.stop_gradient((1 - mask) * weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pooled(plan: TBEPlan, weights: tuple[Array, ...], batch: JaggedBatch) -> Array:
    return api.lookup_jagged(weights, batch)


def _pooled_forward(plan: TBEPlan, weights: tuple[Array, ...], batch: JaggedBatch) -> Any:
    return _pooled(plan, weights, batch), (weights, batch)


def _pooled_backward(plan: TBEPlan, saved: Any, d_output: Array) -> Any:
    weights, batch = saved
    (d_batch,) = jax.vjp(functools.partial(api.lookup_jagged, weights), batch)[1](d_output)
    d_weights = []
    for number, (group, own) in enumerate(zip(plan.groups, weights, strict=True)):
        rows, values = api.row_gradients_jagged(group.num_rows, number, plan.dims, batch, d_output)
        (dense,) = api.scatter_rows((jnp.zeros(own.shape, jnp.float32),), rows, (values,))
        d_weights.append(dense.astype(own.dtype))
    return tuple(d_weights), d_batch


_pooled.defvjp(_pooled_forward, _pooled_backward)

DenseTableBatchedEmbeddingBagsCodegen = DenseTableBatchedEmbeddingBags
"""The original's name."""
