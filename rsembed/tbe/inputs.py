"""The arguments of a table-batched call, checked at the door and brought into one form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.bags import PAD_ID, as_bags, narrow_ids
from rsembed.tbe.bounds import first_mistake, is_sound, repair
from rsembed.tbe.plan import BagSizes, TBEPlan
from rsembed.tbe.records import BoundsCheckMode

_WARNING = (BoundsCheckMode.WARNING, BoundsCheckMode.V2_WARNING)
_FATAL = (BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)


def is_traced(*values: Any) -> bool:
    """Whether some of the values are unknown because they are inside `jit`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


class Call(NamedTuple):
    """What a module was called with; `TableBatchedEmbeddingBags.__call__` says what it means."""

    indices: Any
    offsets: Any
    per_sample_weights: Any
    batch_size_per_feature_per_rank: Any


class Inputs(NamedTuple):
    """A call's ids; numpy arrays unless traced.

    Args:
      ids: int32, of all features.
      offsets: int32, of all bags and the end of the last.
      weights: float32 per id, or None.
      sizes: bags by feature and rank, or None if every feature has equally many.
      num_bags: bags of every feature.
    """

    ids: Any
    offsets: Any
    weights: Any
    sizes: BagSizes | None
    num_bags: tuple[int, ...]

    def in_parts(self, num_parts: int, min_ids: int) -> list[Inputs]:
        """The batch in at most `num_parts` parts, one or more, of at least `min_ids` ids, each with all bags."""
        num_ids = len(self.ids)
        size = max(-(-num_ids // num_parts), min_ids)
        return [
            self._replace(ids=self.ids[first : first + size], offsets=np.clip(self.offsets - first, 0, size))
            for first in range(0, max(num_ids, 1), size)
        ]

    @property
    def is_traced(self) -> bool:
        """Whether ids or offsets are unknown because they are inside `jit`."""
        return is_traced(self.ids, self.offsets)


def read_inputs(
    plan: TBEPlan, feature_names: Sequence[str], mode: BoundsCheckMode, call: Call, *, warns: bool
) -> tuple[Inputs, Any]:
    """Checked inputs, and how many ids and offsets had to be corrected (counted by WARNING; 0 in other modes).

    The caller's arrays are never changed. Inside `jit` nothing can be raised: FATAL then lets bad ids contribute
    nothing, and counts them. WARNING `warns` or not: the caller lets it do so once.

    Raises: TypeError or ValueError.
    """
    if isinstance(call.indices, Mapping):
        call = _features_of_dict(plan, feature_names, call.indices)
    if call.offsets is None:
        raise TypeError("offsets is missing; pass indices and offsets, or {feature: Bags}.")
    ids, ends, sizes = _integers(call.indices, "indices"), _integers(call.offsets, "offsets"), None
    if call.batch_size_per_feature_per_rank is not None:
        sizes = tuple(tuple(int(n) for n in own) for own in call.batch_size_per_feature_per_rank)
        if plan.pooling == "none":
            raise ValueError(
                "batch_size_per_feature_per_rank needs pooled bags; PoolingMode.NONE returns one row per id."
            )
    inputs = Inputs(ids, ends, None, sizes, plan.num_bags(ends.shape[0], sizes))
    weights = _weights(plan, call.per_sample_weights, ids)
    num_corrected: Any = 0
    if mode != BoundsCheckMode.NONE:
        inputs, num_corrected = _check(plan, feature_names, mode, inputs, warns=warns)
    fits = {"ids": narrow_ids(inputs.ids), "offsets": narrow_ids(inputs.offsets), "weights": weights}
    return inputs._replace(**fits), num_corrected


def _check(
    plan: TBEPlan, feature_names: Sequence[str], mode: BoundsCheckMode, inputs: Inputs, *, warns: bool
) -> tuple[Inputs, Any]:
    num_rows = [plan.tables[t].num_rows for t in plan.features]
    arguments = (inputs.ids, inputs.offsets, inputs.num_bags, num_rows)
    if not inputs.is_traced:
        if is_sound(*arguments) and (inputs.offsets[0] == 0 or mode not in _FATAL):
            return inputs, 0
        mistake = first_mistake(*arguments, feature_names, [plan.tables[t].name for t in plan.features])
        if mode in _FATAL:
            raise ValueError(mistake)
        if mode in _WARNING and warns:
            message = f"{mistake} It was corrected as FBGEMM does; this is told once, bounds_check_warning counts on."
            warnings.warn(message, stacklevel=4)
    ids, offsets, num_corrected = repair(*arguments)
    if mode in _FATAL:
        return inputs, num_corrected
    return inputs._replace(ids=ids, offsets=offsets), num_corrected if mode in _WARNING else 0


def _features_of_dict(plan: TBEPlan, feature_names: Sequence[str], bags_by_feature: Mapping[str, Any]) -> Call:
    """The flat call for `{feature: Bags}` (or anything `as_bags` takes)."""
    if set(bags_by_feature) != set(feature_names):
        raise ValueError(f"the batch has features {sorted(bags_by_feature)}, the module {sorted(feature_names)}.")
    bags = [as_bags(bags_by_feature[name], feature=name) for name in feature_names]
    xp: Any = jnp if is_traced(bags) else np
    ids, ends, weights, first = [], [xp.zeros(1, xp.int32)], [], 0
    for own in bags:
        # What stands behind a feature's last bag would fall into the first bag of the next one.
        is_used = xp.arange(own.ids.shape[0]) < own.offsets[-1]
        ids.append(xp.where(is_used, xp.asarray(own.ids), PAD_ID))
        ends.append((xp.asarray(own.offsets)[1:] + first).astype(xp.int32))
        weights.append(xp.ones(own.ids.shape[0], xp.float32) if own.weights is None else xp.asarray(own.weights))
        first += own.ids.shape[0]
    if len(bags) and first:
        last = ends[-1]
        ends[-1] = xp.concatenate([last[:-1], xp.full(min(last.shape[0], 1), first, xp.int32)])
    num_bags = [own.num_bags for own in bags]
    sizes = None if len(set(num_bags)) == 1 else tuple((n,) for n in num_bags)
    has_weights = any(own.weights is not None for own in bags)
    return Call(xp.concatenate(ids), xp.concatenate(ends), xp.concatenate(weights) if has_weights else None, sizes)


def _integers(values: Any, what: str) -> Any:
    array: Any = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int32)  # an empty list would become float64
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{what} must be a flat array of integers, got {array.dtype} of shape {array.shape}.")
    return array


def _weights(plan: TBEPlan, weights: Any, ids: Any) -> Any:
    if weights is None:
        return None
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
