"""Batches of users, checked and brought into bags of all tables of a module."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rsembed.bags import PAD_ID, Bags, check_bags, check_ids_dtype, check_unmasked, check_values, is_traced
from rsembed.checks import check_type
from rsembed.parallel.agreement import check_not_forked
from rsembed.tt.meshes import on_every_device
from rsembed.tt.spec import TTSpec

TRACED_SIZES_TO_LOG = 8
"""Different numbers of ids in one kind of module, after which tracing is worth a word."""

_TRACED_SIZES: dict[tuple[str, tuple[TTSpec, ...]], set[int]] = {}
_LOG = logging.getLogger("rsembed")


def read_bags(
    specs: Sequence[TTSpec],
    indices: Any,
    offsets: Any,
    per_sample_weights: Any,
    *,
    name: str,
    include_last_offset: bool | None,
    allow_out_of_range: bool,
) -> Bags:
    """Checked bags, of which bag `b` belongs to table `b // batch`, `batch` being an equal share of them.

    Of what is inside `jit` only the size is known: a step that is traced for one size after the other is logged.

    Args:
      specs: the tables, whose bags follow each other.
      indices: flat ids with `offsets`; or, without, a dense array `[tables * batch, ids per bag]` where -1 stands for
        no id, `Bags`, or a list of lists.
      offsets: start of each bag; the end of the last may follow.
      per_sample_weights: one per id, in the form of `indices`.
      name: of the module, for messages.
      include_last_offset: whether `offsets` end with the end of the last bag. None finds out: with several tables from
        the number of offsets, with one from the last offset being the number of ids, which needs its value.
      allow_out_of_range: warns of ids outside their table instead of refusing them.

    Raises:
      TypeError: ids or offsets are not integers.
      ValueError: the forms do not go together, bags do not divide by tables, offsets fall, an id lies outside its
        table, or a weight is not finite; the message names the id, the bag and the table.
    """
    check_not_forked(name)
    bags = _as_bags(indices, offsets, per_sample_weights, len(specs), include_last_offset)
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise ValueError(f"per_sample_weights have {bags.weights.size} numbers for {bags.ids.size} indices.")
    if bags.num_bags % len(specs):
        raise ValueError(
            f"{bags.num_bags} bags cannot be shared equally by {len(specs)} tables; the bags of table 0 come first, "
            "then as many of table 1, and so on."
        )
    check_ids_dtype(bags, feature="indices")
    if is_traced(bags):
        _note_size(bags.ids.shape[0], name, tuple(specs))
    else:
        _check_values(bags, specs, name, allow_out_of_range)
    return bags


def _as_bags(
    indices: Any, offsets: Any, per_sample_weights: Any, num_tables: int, include_last_offset: bool | None
) -> Bags:
    check_unmasked((indices, offsets), "indices or offsets")
    check_unmasked(indices, "indices")
    indices, offsets, per_sample_weights = (
        on_every_device(x) if isinstance(x, (jax.Array, Bags)) else x for x in (indices, offsets, per_sample_weights)
    )
    if isinstance(indices, Bags):
        if offsets is not None or per_sample_weights is not None:
            raise ValueError("Bags hold offsets and weights; pass neither beside them.")
        return indices
    if offsets is not None:
        ids = indices if isinstance(indices, jax.Array) else np.asarray(indices)
        if ids.ndim != 1:
            raise ValueError(f"offsets go with flat indices, got shape {ids.shape}; leave offsets out for dense ids.")
        check_type(per_sample_weights, Float[np.ndarray, " nnz"] | None, "per_sample_weights")
        if isinstance(per_sample_weights, (list, tuple)):
            per_sample_weights = np.asarray(per_sample_weights, np.float32)
        return Bags(ids, _with_last(offsets, ids.shape[0], num_tables, include_last_offset), per_sample_weights)
    if isinstance(indices, (list, tuple)) and any(np.ndim(row) for row in indices):
        return Bags.from_lists(indices, per_sample_weights)
    ids = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if ids.ndim != 2:
        raise ValueError(f"indices of shape {ids.shape} need offsets; only dense ids [bags, ids per bag] do not.")
    return Bags.from_dense(ids, per_sample_weights)


def _with_last(offsets: Any, num_ids: int, num_tables: int, include_last_offset: bool | None) -> Any:
    offsets = offsets if isinstance(offsets, jax.Array) else np.asarray(offsets)
    if offsets.ndim != 1 or not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise TypeError(f"offsets must be a flat array of integers, got {offsets.dtype} of shape {offsets.shape}.")
    if include_last_offset is None:
        if num_tables > 1:
            include_last_offset = offsets.shape[0] % num_tables == 1
        elif isinstance(offsets, jax.core.Tracer):
            raise ValueError(
                "inside jit the values of offsets are unknown; say include_last_offset=True or False to the module, or "
                "pass Bags."
            )
        else:
            include_last_offset = offsets.shape[0] > 1 and int(offsets[-1]) == num_ids
    if include_last_offset:
        return offsets
    xp: Any = np if isinstance(offsets, np.ndarray) else jnp
    return xp.concatenate([offsets, xp.full(1, num_ids, offsets.dtype)])


def _check_values(bags: Bags, specs: Sequence[TTSpec], name: str, allow_out_of_range: bool) -> None:
    check_bags(bags, feature="indices")
    ids, offsets, num_outside = np.asarray(bags.ids), np.asarray(bags.offsets), 0
    batch = bags.num_bags // len(specs)
    for k, spec in enumerate(specs):
        cut = offsets[k * batch : (k + 1) * batch + 1]
        own = ids[cut[0] : cut[-1]]
        check_values(
            Bags(own, cut - cut[0]),
            feature="indices",
            table=name if len(specs) == 1 else f"{name} {k}",
            vocabulary_size=spec.num_embeddings,
            allow_out_of_range=allow_out_of_range,
        )
        num_outside += int(((own != PAD_ID) & ((own < 0) | (own >= spec.num_embeddings))).sum())
    if num_outside:
        warnings.warn(f"rsembed.tt: {num_outside} ids outside their table contribute nothing.", stacklevel=6)


def _note_size(num_ids: int, name: str, specs: tuple[TTSpec, ...]) -> None:
    sizes = _TRACED_SIZES.setdefault((name, specs), set())
    is_new = num_ids not in sizes
    sizes.add(num_ids)
    if is_new and len(sizes) == TRACED_SIZES_TO_LOG:
        _LOG.warning(
            "a step with a %s was traced for %d different numbers of ids, the last of them %d, and is compiled for "
            "each; pad the bags outside of it, as in Bags.from_lists(ids).pad_to(%d).",
            name,
            len(sizes),
            num_ids,
            1 << (max(sizes) - 1).bit_length(),
        )
