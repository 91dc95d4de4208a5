"""Tensor-train tables as functions of a spec and its cores: rows, bags of rows, the whole table."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from rsembed.bags import Bags, is_traced, narrow_ids
from rsembed.checks import check_type
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.tt.chain import AnyCores, Cores, on_every_device, pooled_rows, varying_zero
from rsembed.tt.spec import TTSpec

Mode = Literal["sum", "mean"]

SMALLEST_ROOM_BITS = 5


def rows(
    spec: TTSpec, cores: AnyCores, ids: Integer[Array | np.ndarray, "*batch"], *, implementation: str | None = None
) -> Float[Array, "*batch dim"]:
    """The rows of `ids`, float32; an id outside the table has a row of zeros.

    Works under `jit`, `grad`, `vmap` and `shard_map`, and stores nothing per lookup for the backward pass but integers.
    In plain JAX a row per lookup is held beside a tile of `chain.TILE_BYTES`.

    Args:
      spec: the table.
      cores: its cores, float32 or bfloat16; sums are float32.
      ids: row numbers. Tables of 2^31 rows and more need int64 ids of NumPy, outside `jit`.
      implementation: see `chain.pooled_rows`.

    Example:
      >>> spec = TTSpec(6, (2, 3), (1, 2), (1,))
      >>> cores = (jnp.asarray([[1.0], [10.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
      >>> rows(spec, cores, jnp.asarray([1, 3])).tolist()
      [[3.0, 4.0], [10.0, 20.0]]
    """
    check_type(ids, Int[Array, "..."], "rows: ids")
    arrays, ids = on_every_device((check_cores(spec, cores), ids))
    found = rows_of((spec,), arrays, ids.reshape(-1), implementation=implementation)
    return found.reshape(*ids.shape, spec.embedding_dim)


def rows_of(
    specs: Sequence[TTSpec],
    cores: Cores,
    ids: Integer[Array | np.ndarray, " nnz"],
    *,
    implementation: str | None = None,
) -> Float[Array, "nnz dim"]:
    """Rows of tables whose cores stand one behind the other; arguments as for `digits_of` and `rows`."""
    digits, valid = digits_of(specs, ids)
    return pooled_rows(
        cores,
        digits,
        jnp.where(valid, jnp.arange(ids.shape[0], dtype=jnp.int32), NO_ROW),
        jnp.ones(ids.shape[0]),
        slice_shapes=specs[0].slice_shapes,
        num_bags=ids.shape[0],
        implementation=implementation,
    )


def squared_norm(specs: Sequence[TTSpec], left: Cores, change: Cores, right: Cores) -> Float[Array, ""]:
    """Sum of the squares of all numbers of all tables, as `sum over t of left_1 .. left_{t-1} change_t right_{t+1} ..`.

    Of `left` cores and `right = left + change`, these are the changes of the tables; of `left` cores twice, they are
    linear in `change`. Rows of padding count as well. No row is made: Gram matrices go from core to core.
    """
    gram = jnp.zeros((len(specs), 2, 2)).at[:, 0, 0].set(1.0)
    for t, (above, q, below) in enumerate(specs[0].slice_shapes):
        table = np.repeat(np.arange(len(specs)), [spec.tt_p_shapes[t] for spec in specs])
        a, b, c = (cores[t].reshape(-1, above, q, below) for cores in (left, change, right))
        # Through the first block until a core is a change, through the second one from there on.
        blocks = jnp.concatenate([jnp.concatenate([a, b], 3), jnp.concatenate([jnp.zeros_like(a), c], 3)], 1)
        half = jnp.einsum("pij,piqk->pjqk", gram[table], blocks, precision="highest")
        own = jnp.einsum("pjqk,pjql->pkl", half, blocks, precision="highest")
        gram = jax.ops.segment_sum(own, table, len(specs))
    return jnp.sum(gram[:, 1, 1])


def bag(
    spec: TTSpec,
    cores: AnyCores,
    bags: Bags,
    *,
    mode: Mode = "sum",
    padding_idx: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "bags dim"]:
    """Weighted sums or means of the rows of every bag, float32; an empty bag gives zeros.

    Args:
      spec: the table.
      cores: its cores.
      bags: ids and optional weights; ids outside the table, -1 among them, contribute nothing and are not counted.
      mode: "sum", or "mean", which divides by the number of ids and not by the sum of weights.
      padding_idx: an id that contributes nothing either.
      implementation: see `chain.pooled_rows`.
    """
    check_type(bags, Bags, "bag: bags, which Bags.from_lists makes of lists,")
    check_mode(mode)
    cores, bags = on_every_device((check_cores(spec, cores), bags))
    bags = with_room(bags)
    digits, valid = digits_of((spec,), bags.ids)
    valid = valid if padding_idx is None else valid & (bags.ids != padding_idx)
    _, outputs, gains = entries_of([segment_of(bags, jnp.where(valid, 0, NO_ROW), mode)])
    shapes = {"slice_shapes": spec.slice_shapes, "num_bags": bags.num_bags}
    return pooled_rows(cores, digits, outputs, gains, **shapes, implementation=implementation)


def full_weight(spec: TTSpec, cores: AnyCores) -> Float[Array, "vocab dim"]:
    """The whole table, written block after block of equal first digits; needs the table and one block of memory."""
    whole: Array = _full_weight(spec, on_every_device(check_cores(spec, cores)))
    return whole


@functools.partial(jax.jit, static_argnums=0)
def _full_weight(spec: TTSpec, arrays: Cores) -> Float[Array, "vocab dim"]:
    num_rows, size, p, shapes = spec.num_embeddings, spec.strides[0], spec.tt_p_shapes, spec.slice_shapes
    whole = num_rows // size

    def block(first_digit: Array | int) -> Float[Array, "block dim"]:
        product = arrays[0][first_digit].astype(jnp.float32).reshape(1, *shapes[0][1:])  # [rows, columns, rank]
        for t in range(1, spec.num_cores):
            core = arrays[t].astype(jnp.float32).reshape(p[t], *shapes[t])
            product = jnp.einsum("acr,prqs->apcqs", product, core, precision="highest")
            product = product.reshape(math.prod(p[1 : t + 1]), -1, shapes[t][2])
        return product.reshape(size, spec.embedding_dim)

    def put(k: Array | int, table: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(table, block(k), k * size, 0)

    nothing = jnp.full((num_rows, spec.embedding_dim), varying_zero(*arrays).astype(jnp.float32))
    table = jax.lax.fori_loop(0, whole, put, nothing)
    if whole * size < num_rows:
        rest = block(whole)[: num_rows - whole * size]
        table = jax.lax.dynamic_update_slice_in_dim(table, rest, whole * size, 0)
    return table


def check_cores(spec: TTSpec, cores: AnyCores) -> Cores:
    """The cores as a tuple of JAX arrays.

    Raises: ValueError: their shapes are not those of the spec. TypeError: there is no spec, or no list of cores.
    """
    check_type(spec, TTSpec, "spec")
    check_type(cores, Sequence[Any], "cores")
    found = tuple(np.shape(core) for core in cores)
    if found != spec.core_shapes:
        raise ValueError(f"cores have shapes {found}, but the spec asks for {spec.core_shapes}.")
    return tuple(map(jnp.asarray, cores))


def digits_of(specs: Sequence[TTSpec], ids: Any) -> tuple[tuple[Int[Array, " nnz"], ...], Any]:
    """Digits of every id, one array per core, and whether there is a row of it.

    Integers throughout: float32 cannot tell ids above 2^24 apart. NumPy ids are taken apart on the host, in 64 bits.

    Args:
      specs: tables of equally many cores, whose cores stand one behind the other: digits count on from table to table.
      ids: row numbers, which count on from table to table, too.

    Raises: TypeError: ids are not integers.
    """
    xp: Any = np if isinstance(ids, np.ndarray) else jnp
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}.")
    ids = ids.astype(np.int64) if xp is np else narrow_ids(ids)
    sizes = [spec.num_embeddings for spec in specs]
    last_rows = np.minimum(np.cumsum(sizes[:-1]), np.iinfo(ids.dtype).max).astype(ids.dtype)
    tables = None if len(specs) == 1 else xp.searchsorted(xp.asarray(last_rows), ids, side="right")

    def of_table(values: Sequence[int]) -> Any:
        numbers = np.minimum(values, np.iinfo(ids.dtype).max).astype(ids.dtype)
        # Equal numbers need no table.
        return numbers[0] if (numbers == numbers[0]).all() else xp.asarray(numbers)[tables]

    valid = ids >= 0
    ids = ids - of_table([0, *itertools.accumulate(sizes[:-1])])
    valid &= ids < of_table(sizes)
    digits = []
    for t in range(specs[0].num_cores):
        p = [spec.tt_p_shapes[t] for spec in specs]
        first = of_table([0, *itertools.accumulate(p[:-1])])
        digits.append(ids // of_table([spec.strides[t] for spec in specs]) % of_table(p) + first)
    return tuple(jnp.asarray(digit, jnp.int32) for digit in digits), valid


def entries_of(segments: Sequence[Segment]) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Float[Array, " nnz"]]:
    """Of the entries of all segments: the row, the output that it goes into, and its gain.

    Outputs of all segments are numbered through; that of an entry that contributes nothing is `NO_ROW`.
    """
    num_entries, starts, numbers = 0, [], list[int]()
    num_outputs = [segment.num_outputs for segment in segments]
    for segment, first in zip(segments, itertools.accumulate(num_outputs, initial=0), strict=False):
        offsets = np.arange(segment.num_outputs + 1) if segment.offsets is None else segment.offsets
        starts.append(jnp.asarray(offsets).astype(jnp.int32) + num_entries)
        numbers += [*range(first, first + segment.num_outputs), NO_ROW]  # behind the last bag
        num_entries += segment.rows.shape[0]
    rows = jnp.concatenate([segment.rows for segment in segments])
    is_start = jnp.zeros(num_entries + 1, jnp.int32).at[jnp.concatenate(starts)].add(1)
    bags = jnp.asarray(numbers, jnp.int32)[jnp.cumsum(is_start[:num_entries]) - 1]
    bags = jnp.where(rows == NO_ROW, NO_ROW, bags)
    gains = [jnp.ones(s.rows.shape[0]) if s.weights is None else jnp.asarray(s.weights, jnp.float32) for s in segments]
    return rows, bags, _normalised(jnp.concatenate(gains), bags, np.repeat([s.combiner for s in segments], num_outputs))


def _normalised(gains: Array, bags: Array, combiners: np.ndarray) -> Array:
    """Gains over what the combiner of their output divides by."""
    is_mean, is_root = combiners == "mean", combiners == "sqrtn"
    if not (is_mean | is_root).any():
        return gains
    terms = gains if is_mean.all() else jnp.where(jnp.asarray(is_root)[bags], gains * gains, gains)
    total = jnp.zeros(len(combiners)).at[bags].add(terms, mode="drop")
    safe = jnp.where(total == 0, 1.0, total)
    divisor = safe if is_mean.all() else jnp.where(is_root, jnp.sqrt(safe), safe)
    factor = jnp.where(is_mean | is_root, jnp.where(total == 0, 0.0, 1.0 / divisor), 1.0)
    return gains * factor.at[bags].get(mode="fill", fill_value=0.0)


def segment_of(bags: Bags, rows: Int[Array, " nnz"], mode: Mode) -> Segment:
    """Bags that read `rows`. Their mean divides by the number of ids; that of a segment by the sum of weights."""
    offsets = jnp.asarray(bags.offsets)
    if bags.weights is None or mode == "sum":
        return Segment(rows, offsets, cast(Any, bags.weights), mode)
    _, _, shares = entries_of([Segment(rows, offsets, None, "mean")])
    return Segment(rows, offsets, jnp.asarray(bags.weights, jnp.float32) * shares)


def check_mode(mode: str) -> None:
    """Raises: ValueError: there is none of this name."""
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode must be 'sum' or 'mean', got {mode!r}; max is not a linear function of the cores.")


def with_room(bags: Bags) -> Bags:
    """Bags of any lengths with room for a power of two of ids, so that few programs serve all batches.

    What the room holds is in no bag. Left as they are: dense arrays, bags that somebody padded, what is inside `jit`,
    and what lies on several devices.
    """
    if bags.dense_shape is not None or is_traced(bags):
        return bags
    if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in jax.tree.leaves(bags)):
        return bags
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    if offsets[-1] != ids.size:
        return bags
    weights = None if bags.weights is None else np.asarray(bags.weights)
    return Bags(ids, offsets, weights).pad_to(1 << max(SMALLEST_ROOM_BITS, (ids.size - 1).bit_length()))
