"""The arguments of a table-batched call, checked at the door and brought into the form that kernels read."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.bags import PAD_ID, as_bags, check_end, check_unmasked, is_traced, narrow_ids
from rsembed.checks import check_type
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.kernels.contract import JaggedBatch
from rsembed.parallel.agreement import is_global
from rsembed.tbe.bounds import first_mistake, is_sound, repair
from rsembed.tbe.meshes import MeshTables, SplitBatch
from rsembed.tbe.plan import TBEPlan
from rsembed.tbe.records import BoundsCheckMode

_WARNING = (BoundsCheckMode.WARNING, BoundsCheckMode.V2_WARNING)
_FATAL = (BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedBatch:
    """What `prepare` of a module makes of its arguments; goes in place of `indices`.

    Args:
      batch: as the module's tables read it.
      is_by_feature: whether it was `{feature: Bags}`, and so the output is `{feature: array}`.
      layout: of the tables that read it, which compare it.
    """

    batch: JaggedBatch | SplitBatch
    is_by_feature: bool = dataclasses.field(metadata={"static": True})
    layout: Fingerprint = dataclasses.field(metadata={"static": True})


def is_by_feature(indices: Any) -> bool:
    """Whether the output of a call with these is `{feature: array}`."""
    return indices.is_by_feature if isinstance(indices, PreparedBatch) else isinstance(indices, Mapping)


@dataclasses.dataclass(eq=False)
class Door:
    """Where the calls of a module come in.

    Args:
      mode: what happens to ids and offsets outside their range.
      feature_names: for messages and `{feature: Bags}`.
      has_warned: WARNING does so once.
    """

    mode: BoundsCheckMode
    feature_names: tuple[str, ...]
    has_warned: bool = False

    def read(
        self,
        plan: TBEPlan,
        indices: Any,
        offsets: Any,
        per_sample_weights: Any = None,
        batch_size_per_feature_per_rank: Sequence[Sequence[int]] | None = None,
    ) -> tuple[JaggedBatch | SplitBatch, Any]:
        """A batch, in numpy unless traced, and how many ids and offsets WARNING had to correct; 0 in other modes.

        `TableBatchedEmbeddingBags.__call__` says what the arguments mean; arrays of the caller are never changed.
        Inside `jit` nothing can be raised: FATAL then lets bad ids contribute nothing, and counts them. On a mesh, the
        batch of such a call is split already.

        Raises: TypeError or ValueError.
        """
        sizes: Any = batch_size_per_feature_per_rank
        if isinstance(indices, PreparedBatch):
            if offsets is not None or per_sample_weights is not None or sizes is not None:
                raise ValueError("a prepared batch holds offsets, weights and sizes; pass none of them beside it.")
            what = "the batch was prepared for other tables than the module's"
            check_same(indices.layout, plan.row_layout, what=what, way_out="Prepare it by the module that reads it.")
            return indices.batch, 0
        if plan.split is not None and _is_unknown((indices, offsets, per_sample_weights)):
            return self._split_unseen(plan.on_mesh, indices)
        if isinstance(indices, Mapping):
            if offsets is not None or per_sample_weights is not None or sizes is not None:
                raise ValueError("{feature: Bags} hold offsets, weights and sizes; pass none of them beside it.")
            indices, offsets, per_sample_weights, sizes = self._flat(indices)
        if offsets is None:
            raise TypeError("offsets is missing; pass indices and offsets, or {feature: Bags}.")
        ids, ends = _integers(indices, "indices"), _integers(offsets, "offsets")
        if sizes is not None:
            check_type(sizes, Sequence[Sequence[int]], "batch_size_per_feature_per_rank [feature][rank]")
            sizes = tuple(tuple(int(n) for n in own) for own in sizes)
            if plan.split is not None:
                num_bags = [sum(own) for own in sizes]
                way_out = "add bags without ids, and " if len(set(num_bags)) > 1 else ""
                raise ValueError(
                    f"on a mesh all features need equally many bags, got {num_bags}; {way_out}leave "
                    "batch_size_per_feature_per_rank out, which has no meaning there."
                )
            if plan.pooling == "none":
                raise ValueError(
                    "batch_size_per_feature_per_rank needs pooled bags; PoolingMode.NONE returns one row per id."
                )
        batch, num_corrected = plan.batch(ids, ends, _weights(plan, per_sample_weights, ids), sizes), 0
        if self.mode != BoundsCheckMode.NONE:
            batch, num_corrected = self._checked(plan, batch)
        fits = {"ids": narrow_ids(batch.ids), "offsets": narrow_ids(batch.offsets)}
        return dataclasses.replace(batch, **fits), num_corrected

    def _split_unseen(self, tables: MeshTables, indices: Any) -> tuple[SplitBatch, Any]:
        """A batch whose ids cannot be read here."""
        if not isinstance(indices, Mapping):
            raise ValueError(
                "on a mesh, indices and offsets cannot be split inside jit; bring them into form before, with batch = "
                "module.prepare(indices, offsets), and pass batch in their place."
            )
        batch = tables.read(indices)
        if self.mode in (BoundsCheckMode.NONE, *_FATAL):  # what is in no table contributes nothing
            return batch, tables.repaired(batch)[1] if self.mode in _FATAL else 0
        batch, num_corrected = tables.repaired(batch)
        return batch, num_corrected if self.mode in _WARNING else 0

    def _flat(self, bags_by_feature: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """The arguments of a flat call for `{feature: Bags}` (or anything `as_bags` takes)."""
        if set(bags_by_feature) != set(self.feature_names):
            raise ValueError(
                f"the batch has features {sorted(bags_by_feature)}, the module {sorted(self.feature_names)}."
            )
        bags = [as_bags(bags_by_feature[name], feature=name) for name in self.feature_names]
        xp: Any = jnp if is_traced(bags) else np
        ids, ends, weights, first = [], [xp.zeros(1, xp.int32)], [], 0
        for name, own in zip(self.feature_names, bags, strict=True):
            if xp is np:
                check_end(own, f"feature {name!r}")
            # What stands behind a feature's last bag would fall into the first bag of the next one.
            is_used = xp.arange(own.ids.shape[0]) < own.offsets[-1]
            ids.append(xp.where(is_used, xp.asarray(own.ids), PAD_ID))
            ends.append((xp.asarray(own.offsets)[1:] + first).astype(xp.int32))
            weights.append(xp.ones(own.ids.shape[0], xp.float32) if own.weights is None else xp.asarray(own.weights))
            first += own.ids.shape[0]
        if first:
            last = ends[-1]
            ends[-1] = xp.concatenate([last[:-1], xp.full(min(last.shape[0], 1), first, xp.int32)])
        num_bags = [own.num_bags for own in bags]
        sizes = None if len(set(num_bags)) == 1 else [[n] for n in num_bags]
        has_weights = any(own.weights is not None for own in bags)
        return xp.concatenate(ids), xp.concatenate(ends), xp.concatenate(weights) if has_weights else None, sizes

    def _checked(self, plan: TBEPlan, batch: JaggedBatch) -> tuple[JaggedBatch, Any]:
        tables = [plan.tables[t] for t in plan.features]
        ids_and_offsets: tuple[Any, Any] = (batch.ids, batch.offsets)
        arguments = (*ids_and_offsets, plan.bags_of(batch), [table.num_rows for table in tables])
        if not is_traced(ids_and_offsets):
            if self.mode in _FATAL and batch.weights is not None and not is_traced(batch.weights):
                _check_finite(np.asarray(batch.weights))
            if is_sound(*arguments) and (batch.offsets[0] == 0 or self.mode not in _FATAL):
                return batch, 0
            mistake = first_mistake(*arguments, self.feature_names, [table.name for table in tables])
            if self.mode in _FATAL:
                raise ValueError(mistake)
            if self.mode in _WARNING and not self.has_warned:
                self.has_warned = True
                message = (
                    f"rsembed.tbe: {mistake} It was corrected as FBGEMM does. This is told once; afterwards "
                    "bounds_check_warning tells how many the last batch had."
                )
                warnings.warn(message, stacklevel=5)
        ids, offsets, num_corrected = repair(*arguments)
        if self.mode in _FATAL:
            return batch, num_corrected
        return dataclasses.replace(batch, ids=ids, offsets=offsets), num_corrected if self.mode in _WARNING else 0


def _is_unknown(given: Any) -> bool:
    """Whether values cannot be read here: inside `jit`, or because other processes hold some of them."""
    return is_traced(given) or any(map(is_global, jax.tree.leaves(given)))


def _integers(values: Any, what: str) -> Any:
    check_unmasked(values, what)
    array: Any = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int32)  # an empty list would become float64
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{what} must be a flat array of integers, got {array.dtype} of shape {array.shape}.")
    return array


def _check_finite(weights: np.ndarray) -> None:
    if not (is_finite := np.isfinite(weights)).all():
        place = int(is_finite.argmin())
        raise ValueError(f"per_sample_weights: {weights[place]} at index {place} is not finite; clean the weights.")


def _weights(plan: TBEPlan, weights: Any, ids: Any) -> Any:
    if weights is None:
        return None
    check_unmasked(weights, "per_sample_weights")
    weights = weights if isinstance(weights, jax.Array) else np.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"per_sample_weights must be floats, got {weights.dtype}.")
    if weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights has shape {tuple(weights.shape)}, but there are {ids.shape[0]} indices; pass one "
            "weight per index."
        )
    if plan.pooling == "none":
        raise ValueError(
            "per_sample_weights has no meaning for PoolingMode.NONE, which returns rows as they are (the original "
            "drops it silently); multiply the output, or pool."
        )
    return weights.astype(np.float32)
