"""What users pass to a module, as bags of all its tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rsembed.bags import PAD_ID, Bags, check_ids_dtype, check_values, is_traced, narrow_ids
from rsembed.kernels.contract import NO_ROW
from rsembed.tt.cores import bags_of_entries, digits_of
from rsembed.tt.meshes import on_every_device
from rsembed.tt.spec import TTSpec

TRACED_SIZES_TO_LOG = 8
"""Different numbers of ids in one kind of module, after which tracing is worth a word."""

_TRACED_SIZES: dict[tuple[str, tuple[TTSpec, ...]], set[int]] = {}
_LOG = logging.getLogger("rsembed")


def table_bags(
    indices: Any, offsets: Any, per_sample_weights: Any, *, num_tables: int, include_last_offset: bool | None
) -> Bags:
    """Bags in which bag `b` belongs to table `b // batch`, `batch` being a `num_tables`-th of them.

    Args:
      indices: flat ids with `offsets`; or, without, a dense array `[num_tables * batch, ids per bag]` where -1 stands
        for no id, `Bags`, or a list of lists.
      offsets: start of each bag; the end of the last may follow.
      per_sample_weights: one per id, in the form of `indices`.
      num_tables: tables, whose bags follow each other.
      include_last_offset: whether `offsets` end with the end of the last bag. None finds out: with several tables from
        the number of offsets, with one from the last offset being the number of ids, which needs its value.

    Raises:
      TypeError: ids or offsets are not integers.
      ValueError: the forms do not go together, or bags do not divide by tables.
    """
    indices, offsets, per_sample_weights = (
        on_every_device(x) if isinstance(x, (jax.Array, Bags)) else x for x in (indices, offsets, per_sample_weights)
    )
    if isinstance(indices, Bags):
        if offsets is not None or per_sample_weights is not None:
            raise ValueError("Bags hold offsets and weights; pass neither beside them.")
        bags = indices
    elif offsets is not None:
        ids = indices if isinstance(indices, jax.Array) else np.asarray(indices)
        if ids.ndim != 1:
            raise ValueError(f"offsets go with flat indices, got shape {ids.shape}; leave offsets out for dense ids.")
        bags = Bags(ids, _with_last(offsets, ids.shape[0], num_tables, include_last_offset), per_sample_weights)
    elif isinstance(indices, (list, tuple)) and any(np.ndim(row) for row in indices):
        bags = Bags.from_lists(indices, per_sample_weights)
    else:
        ids = indices if isinstance(indices, jax.Array) else np.asarray(indices)
        if ids.ndim != 2:
            raise ValueError(f"indices of shape {ids.shape} need offsets; only dense ids [bags, ids per bag] do not.")
        bags = Bags.from_dense(ids, per_sample_weights)
    if bags.weights is not None and bags.weights.shape != bags.ids.shape:
        raise ValueError(f"per_sample_weights have {bags.weights.size} numbers for {bags.ids.size} indices.")
    if bags.num_bags % num_tables:
        raise ValueError(
            f"{bags.num_bags} bags cannot be shared equally by {num_tables} tables; the bags of table 0 come first, "
            "then as many of table 1, and so on."
        )
    check_ids_dtype(bags, feature="indices")
    return bags


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


def check_bounds(bags: Bags, specs: Sequence[TTSpec], name: str, *, allow_out_of_range: bool) -> int:
    """Checks concrete bags on the host; returns how many ids lie outside their table and are not -1.

    Of what is inside `jit` only the size is known: a step that is traced for one size after the other is logged.

    Raises: ValueError: an id lies outside its table and that is not allowed, offsets fall, or a weight is not finite;
      the message names the id, the bag and the table.
    """
    if is_traced(bags):
        _note_size(bags.ids.shape[0], name, tuple(specs))
        return 0
    ids, offsets, num_outside = np.asarray(bags.ids), np.asarray(bags.offsets), 0
    batch = bags.num_bags // len(specs)
    for k, spec in enumerate(specs):
        cut = offsets[k * batch : (k + 1) * batch + 1]
        first, last = (int(cut[0]), int(cut[-1])) if len(specs) > 1 else (0, ids.size)
        part = ids[first:last]
        weights = None if bags.weights is None else np.asarray(bags.weights)[first:last]
        num_outside += int(((part != PAD_ID) & ((part < 0) | (part >= spec.num_embeddings))).sum())
        check_values(
            Bags(part, cut - first, weights),
            feature="indices",
            table=name if len(specs) == 1 else f"{name} {k}",
            vocabulary_size=spec.num_embeddings,
            allow_out_of_range=allow_out_of_range,
        )
    return num_outside


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


class Entries(NamedTuple):
    """Where every id of a batch points, for one group of tables."""

    digits: tuple[Array, ...]
    bags: Array
    num_bags: int
    ids: Array
    """Row numbers plus the rows of the group's tables before; any number where the bag is `NO_ROW`."""


def entries_of(
    bags: Bags, specs: Sequence[TTSpec], groups: Sequence[Sequence[int]], padding_idx: int | None
) -> list[Entries]:
    """Ids taken apart for every group."""
    is_row = np.True_ if padding_idx is None else bags.ids != padding_idx
    all_bags, batch = bags_of_entries(bags, is_row), bags.num_bags // len(specs)
    if len(specs) == 1:
        digits, valid = digits_of(specs, bags.ids)
        return [Entries(digits, jnp.where(valid, all_bags, NO_ROW), batch, jnp.asarray(narrow_ids(bags.ids)))]
    found = []
    tables = jnp.minimum(all_bags // max(batch, 1), len(specs) - 1)
    for group in groups:
        place = np.full(len(specs), -1, np.int32)
        place[list(group)] = np.arange(len(group))
        places = jnp.asarray(place)[tables]
        tables_in_group, inside = [specs[k] for k in group], jnp.maximum(places, 0)
        digits, valid = digits_of(tables_in_group, bags.ids, inside)
        valid = valid & (places >= 0) & (all_bags < bags.num_bags)
        group_bags = jnp.where(valid, places * batch + all_bags % max(batch, 1), NO_ROW)
        ends = np.cumsum([spec.num_embeddings for spec in tables_in_group])
        first_rows = np.minimum(np.r_[0, ends[:-1]], NO_ROW)
        ids = jnp.asarray(narrow_ids(bags.ids)) + jnp.asarray(first_rows, jnp.int32)[inside]
        found.append(Entries(digits, group_bags, len(group) * batch, ids))
    return found
