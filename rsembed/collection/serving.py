"""Lookups for serving: plain JAX, which `jax.export` writes into a file for any platform."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from rsembed.bags import as_bags, check_ids_dtype
from rsembed.checks import check_finite, describe, dtype_among, validated
from rsembed.collection.dense_rows import list_of
from rsembed.collection.embeddings import EmbeddingCollection
from rsembed.collection.engine import to_activation
from rsembed.collection.inputs import check_names
from rsembed.collection.stack import Activations, Batch, EmbeddingState
from rsembed.kernels import reference
from rsembed.kernels.contract import NO_ROW, Call
from rsembed.keys import Keys, as_keys, check_not_cut, split_keys
from rsembed.specs import FeatureSpec
from rsembed.storage.protocol import Storage

DTYPES = ("float32", "bfloat16", "float16", "int8")

ServedTable = dict[str, Array]
"""A table as it is served: `rows`, with `int8` the `scales` of rows, and of keys the lanes `high` and `low`."""


@validated
def for_serving(
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
) -> tuple[Callable[..., Activations], dict[str, ServedTable]]:
    """A lookup of plain JAX and the tables that it reads, for `jax.export` and for processes without this library.

    Args:
      collection: whose features.
      state: whose tables, on any mesh. Not inside `jit`.
      dtype: "float32", "bfloat16", "float16" or "int8", which has a scale for each row; None keeps that of the tables.
      allow_nonfinite: whether rows may hold NaN or infinity, or become infinite because `dtype` is too narrow. By
        default they are refused: with "int8", one NaN would make its whole row NaN.

    Returns: `lookup(tables, batch)`, which gives the activations of `collection.lookup`, and these tables: one copy of
      each, trains and rows on the host written out. Ids outside their table contribute nothing. Under `jax.jit`, JAX
      cuts numpy's integers of 64 bits to 32 before the lookup sees them: ids of a dense table must fit into int32,
      and 64-bit keys come as `rsembed.keys.split_keys(keys)`; an array of int32 for them is refused.

    Raises: TypeError or ValueError: `dtype` is unknown, the state is not the collection's, or a number is not finite.

    Example:
      >>> import jax, jax.numpy as jnp, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> lookup, tables = rs.for_serving(collection, collection.init(jax.random.key(0)), dtype="int8")
      >>> lookup(tables, {"context": jnp.array([[1, 2], [3, -1]])})["context"].shape
      (2, 4)
    """
    tables = {}
    for name, values in collection.tables(state).items():
        tables[name] = _served(values, dtype, name, allow_nonfinite)
    return partial(lookup, collection.features), tables


def _served(values: PyTree, dtype: str | None, table: str, allow_nonfinite: bool) -> ServedTable:
    """A table of `EmbeddingCollection.tables` in the form that a served lookup reads."""
    keys: ServedTable = {}
    if isinstance(values, Mapping):
        order = np.argsort(values["keys"].astype(np.uint64))  # of their bits, as the search takes them
        lanes = split_keys(values["keys"][order])
        keys, values = {"high": jnp.asarray(lanes.high), "low": jnp.asarray(lanes.low)}, values["values"][order]
    rows = jnp.asarray(values)
    where = f"for_serving: table {table!r}"
    if not allow_nonfinite:
        check_finite(rows, where)
    if dtype is None:
        return {"rows": rows} | keys
    if dtype_among(DTYPES, dtype, f"for_serving: dtype of table {table!r}") != "int8":
        narrow = rows.astype(dtype)
        if not allow_nonfinite:
            way_out = 'its numbers are too large; take dtype="bfloat16", "float32" or "int8", or allow_nonfinite=True'
            check_finite(narrow, f"{where} in {dtype}", way_out=way_out)
        return {"rows": narrow} | keys
    rows = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(rows), axis=1) / 127.0
    steps = jnp.round(rows / jnp.where(scales == 0.0, 1.0, scales)[:, None])
    return {"rows": steps.astype(jnp.int8), "scales": scales} | keys


def lookup(features: Mapping[str, FeatureSpec], tables: Mapping[str, ServedTable], batch: Batch) -> Activations:
    """Activations of every feature, as `EmbeddingCollection.lookup` has them; ids outside contribute nothing.

    Raises: TypeError, ValueError: the batch lacks a feature, or the tables are those of another collection.
    """
    check_names(features, batch, "batch")
    _check_tables(features, tables)
    return {name: _activation(feature, tables, batch[name]) for name, feature in features.items()}


def _check_tables(features: Mapping[str, FeatureSpec], tables: Mapping[str, ServedTable]) -> None:
    """Raises: TypeError, ValueError: a table that the features read is missing, or has another size or kind."""
    way_out = "give the tables that for_serving returned beside this lookup"
    if not isinstance(tables, Mapping):
        raise TypeError(f"lookup: the tables must be a mapping, got {describe(tables)}; {way_out}.")
    for feature in features.values():
        spec = feature.table_spec
        if spec.name not in tables:
            raise ValueError(
                f"lookup: feature {feature.name!r} reads table {spec.name!r}, which the tables {sorted(tables)} lack; "
                f"{way_out}."
            )
        storage, table = cast(Storage | None, spec.storage), tables[spec.name]
        rows: Any = None
        has_keys = False
        if isinstance(table, Mapping):
            rows, has_keys = table.get("rows"), "high" in table
        if storage is not None and storage.takes_keys:
            wanted = f"keys, and rows of {spec.embedding_dim} columns"
            is_right = has_keys and np.shape(rows)[1:] == (spec.embedding_dim,)
        else:
            shape = (spec.vocabulary_size, spec.embedding_dim)
            wanted = f"rows {list(shape)}"
            is_right = not has_keys and np.shape(rows) == shape
        if not is_right:
            raise ValueError(f"lookup: table {spec.name!r} must have {wanted}, got {describe(rows)}; {way_out}.")


def _activation(feature: FeatureSpec, tables: Mapping[str, ServedTable], ids: PyTree) -> Array:
    bags = as_bags(ids, feature=feature.name)
    combiner, table = feature.pooling, tables[feature.table_spec.name]
    if "high" in table:
        storage = cast(Storage, feature.table_spec.storage)
        check_not_cut(bags.ids, storage.key_dtype, f"feature {feature.name!r}")
        rows, is_id = _rows_of_keys(table, as_keys(bags.ids))
    else:
        check_ids_dtype(bags, feature=feature.name)
        rows = bags.ids  # of 64 bits where they come from numpy, of which JAX would keep the lower half
        is_id = (rows >= 0) & (rows < table["rows"].shape[0])
        rows = jnp.where(is_id, rows, NO_ROW).astype(jnp.int32)
    (vectors,) = reference.gather_rows((table["rows"],), rows)
    vectors = vectors.astype(jnp.float32)
    if "scales" in table:
        vectors = vectors * reference.gather_rows((table["scales"],), rows)[0][:, None]
    # A key without a row reads zeros, and counts in means all the same.
    counted = jnp.where(is_id, jnp.int32(0), NO_ROW)
    entries = reference.entries_of(Call.of([list_of(bags, counted)], [combiner]), 0, 0, 1)
    bag, gains, _ = reference.entry_gains(entries, 1)
    terms = gains[:, None] * vectors
    if combiner == "none" or entries.offsets is None:
        return to_activation(feature, bags.dense_shape, terms)
    if bags.dense_shape is None:
        return to_activation(feature, bags.dense_shape, jax.ops.segment_sum(terms, bag, bags.num_bags))
    # Bags of one length are summed while their rows are read.
    width = math.prod(bags.dense_shape[1:])
    return to_activation(
        feature, bags.dense_shape, jnp.sum(terms.reshape(bags.dense_shape[0], width, terms.shape[1]), axis=1)
    )


def _rows_of_keys(table: ServedTable, keys: Keys) -> tuple[Int[Array, " nnz"], Bool[Array, " nnz"]]:
    """The row of each key by binary search, and which are keys; those without a row read zeros."""
    num_rows = table["rows"].shape[0]

    def halved(_: PyTree, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = bounds
        middle = (first + last) // 2
        high, low = table["high"][middle], table["low"][middle]
        is_behind = (high < keys.high) | ((high == keys.high) & (low < keys.low))
        return jnp.where(is_behind, middle + 1, first), jnp.where(is_behind, last, middle)

    if num_rows == 0:
        return jnp.full_like(keys.low, NO_ROW, jnp.int32), keys.is_key
    bounds = jnp.zeros_like(keys.low, jnp.int32), jnp.full_like(keys.low, num_rows, jnp.int32)
    row, _ = jax.lax.fori_loop(0, int(np.ceil(np.log2(num_rows))) + 1, halved, bounds)
    place = jnp.minimum(row, num_rows - 1)
    is_there = keys.is_key & (table["high"][place] == keys.high) & (table["low"][place] == keys.low)
    return jnp.where(is_there, row, NO_ROW), keys.is_key
