"""Lookups for serving, in plain JAX, so that `jax.export` can save them for any platform."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from rsembed.bags import as_bags, check_ids_dtype
from rsembed.checks import check_finite, describe, dtype_among, validated
from rsembed.collection.embeddings import EmbeddingCollection
from rsembed.collection.engine import to_activation
from rsembed.collection.inputs import check_names
from rsembed.collection.stack import Activations, Batch, EmbeddingState
from rsembed.kernels import reference
from rsembed.kernels.contract import NO_ROW, Call
from rsembed.keys import Keys, as_keys, check_not_cut, split_keys
from rsembed.specs import FeatureSpec
from rsembed.storage.protocol import Storage
from rsembed.storage.row_layout import list_of

DTYPES = ("float32", "bfloat16", "float16", "int8")

ServedTable = dict[str, Array]
"""The arrays of a served table, by name.

`rows` is an array `[rows, dim]`. In an int8 table, `scales` has one factor per row. In a keyed
table, `high` and `low` have the two 32-bit words of each row's key. Keyed rows are sorted by key.
"""


@validated
def for_serving(
    collection: EmbeddingCollection,
    state: EmbeddingState,
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
) -> tuple[Callable[..., Activations], dict[str, ServedTable]]:
    """A lookup function in plain JAX, and the tables that it reads.

    `jax.export` can save the lookup function, which can run in a process without the collection.

    Args:
      collection: collection with the features to look up.
      state: state to serve, on one device or on a mesh. Call `for_serving` outside `jit`.
      dtype: "float32", "bfloat16", "float16", or "int8" with a scale for each row. None: the dtype
        of the tables.
      allow_nonfinite: whether to accept rows with NaN or infinity, and numbers that become infinite
        in `dtype`. By default, NaN or infinity is an error. With "int8", lookups of a row that
        contains NaN return only NaN.

    Returns: a function `lookup(tables, batch)` that returns the activations of `collection.lookup`,
      and a copy of each table. A tensor train or a table on the host is copied as an array that
      contains all rows. Ids outside their table contribute nothing.

    Under `jax.jit`, JAX cuts numpy's 64-bit integers to 32 bits before the lookup sees them. Inside
    `jit`, ids of a dense table must fit into int32, and 64-bit keys must be passed as
    `rsembed.keys.split_keys(keys)`. An array of int32 is rejected if a table has 64-bit keys.

    Raises: TypeError or ValueError: `dtype` is unknown, the state belongs to a different
      collection, or a number is not finite.

    Example:
      >>> import jax, jax.numpy as jnp, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> lookup, tables = rs.for_serving(collection, collection.init(jax.random.key(0)), dtype="int8")
      >>> lookup(tables, {"context": jnp.array([[1, 2], [3, -1]])})["context"].shape
      (2, 4)
    """
    tables = {}
    for name, values in collection.each_table(state):
        tables[name] = _served(values, dtype, name, allow_nonfinite)
    return partial(lookup, collection.features), tables


def _served(values: PyTree, dtype: str | None, table: str, allow_nonfinite: bool) -> ServedTable:
    """Converts an entry of `EmbeddingCollection.tables` to a served table."""
    keys: ServedTable = {}
    if isinstance(values, Mapping):
        # Sort the keys as unsigned integers, because `_rows_of_keys` compares unsigned words of
        # keys.
        order = np.argsort(values["keys"].astype(np.uint64))
        lanes = split_keys(values["keys"][order])
        keys["high"] = jnp.asarray(lanes.high)
        keys["low"] = jnp.asarray(lanes.low)
        values = values["values"][order]
    rows = jnp.asarray(values)
    where = f"for_serving: table {table!r}"
    if not allow_nonfinite:
        check_finite(rows, where)
    if dtype is None:
        return {"rows": jnp.copy(rows)} | keys
    if dtype_among(DTYPES, dtype, f"for_serving: dtype of table {table!r}") != "int8":
        narrow = jnp.copy(rows) if rows.dtype == dtype else rows.astype(dtype)
        if not allow_nonfinite:
            way_out = 'its numbers are too large; take dtype="bfloat16", "float32" or "int8", or allow_nonfinite=True'
            check_finite(narrow, f"{where} in {dtype}", way_out=way_out)
        return {"rows": narrow} | keys
    steps, scales = _int8(rows)
    return {"rows": steps, "scales": scales} | keys


@jax.jit  # Compiled to one program, `_int8` makes no float32 copy of the table.
def _int8(rows: Array) -> tuple[Array, Array]:
    """Rows as int8, and for each row a scale: the row's largest absolute value divided by 127."""
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=1)
    scales = largest / 127.0
    divisors = jnp.where(scales == 0.0, 1.0, scales)
    steps = jnp.round(rows / divisors[:, None])
    return steps.astype(jnp.int8), scales


def lookup(
    features: Mapping[str, FeatureSpec],
    tables: Mapping[str, ServedTable],
    batch: Batch,
) -> Activations:
    """Activations of every feature, as in `EmbeddingCollection.lookup`.

    An id outside its table contributes nothing.

    Raises: TypeError, ValueError: the batch lacks a feature, or the tables belong to a different
      collection.
    """
    check_names(features, batch, "batch")
    _check_tables(features, tables)
    activations = {}
    for name, feature in features.items():
        activations[name] = _activation(feature, tables, batch[name])
    return activations


def _check_tables(features: Mapping[str, FeatureSpec], tables: Mapping[str, ServedTable]) -> None:
    """Raises: TypeError, ValueError: a table is missing, or does not have the size of its spec."""
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
        storage = cast(Storage | None, spec.storage)
        table = tables[spec.name]
        rows: Any = None
        has_keys = False
        if isinstance(table, Mapping):
            rows = table.get("rows")
            has_keys = "high" in table
        if storage is not None and storage.takes_keys:
            wanted = f"keys, and rows of {spec.embedding_dim} columns"
            is_right = has_keys and np.shape(rows)[1:] == (spec.embedding_dim,)
        else:
            expected_shape = spec.vocabulary_size, spec.embedding_dim
            wanted = f"rows {list(expected_shape)}"
            is_right = not has_keys and np.shape(rows) == expected_shape
        if not is_right:
            raise ValueError(
                f"lookup: table {spec.name!r} must have {wanted}, got {describe(rows)}; {way_out}."
            )


def _activation(feature: FeatureSpec, tables: Mapping[str, ServedTable], ids: PyTree) -> Array:
    """Activations of one feature, as in `EmbeddingCollection.lookup`."""
    bags = as_bags(ids, feature=feature.name)
    combiner = feature.pooling
    table = tables[feature.table_spec.name]
    if "high" in table:
        storage = cast(Storage, feature.table_spec.storage)
        check_not_cut(bags.ids, storage.key_dtype, f"feature {feature.name!r}")
        keys = as_keys(bags.ids)
        is_id = keys.is_key
        rows = _rows_of_keys(table, keys)
    else:
        check_ids_dtype(bags, feature=feature.name)
        # Compare 64-bit ids while they are numpy arrays: JAX would cut them to 32 bits first.
        num_rows = table["rows"].shape[0]
        is_id = (bags.ids >= 0) & (bags.ids < num_rows)
        rows = jnp.where(is_id, bags.ids, NO_ROW)
        rows = rows.astype(jnp.int32)
    (vectors,) = reference.gather_rows((table["rows"],), rows)
    vectors = vectors.astype(jnp.float32)
    if "scales" in table:
        (scales,) = reference.gather_rows((table["scales"],), rows)
        vectors = vectors * scales[:, None]
    # A key without a row reads zeros, but the mean of a bag counts the key.
    counted = jnp.where(is_id, jnp.int32(0), NO_ROW)
    call = Call.of([list_of(bags, counted)], [combiner])
    entries = reference.entries_of(call, 0, 0, 1)
    bag, gains, _ = reference.entry_gains(entries, 1)
    terms = gains[:, None] * vectors
    if combiner == "none" or entries.offsets is None:
        pooled = terms
    elif bags.dense_shape is None:
        pooled = jax.ops.segment_sum(terms, bag, bags.num_bags)
    else:
        # If all bags have the same length, XLA can fuse the sum over the rows of a bag with the
        # gather of the rows.
        num_bags = bags.dense_shape[0]
        width = math.prod(bags.dense_shape[1:])
        terms_of_bags = terms.reshape(num_bags, width, terms.shape[1])
        pooled = jnp.sum(terms_of_bags, axis=1)
    return to_activation(feature, bags.dense_shape, pooled)


def _rows_of_keys(table: ServedTable, keys: Keys) -> Int[Array, " nnz"]:
    """Row of each key, by binary search, or `NO_ROW` for padding and keys without a row."""
    num_rows = table["rows"].shape[0]

    def halved(_: PyTree, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = bounds
        middle = (first + last) // 2
        high = table["high"][middle]
        low = table["low"][middle]
        is_less = (high < keys.high) | ((high == keys.high) & (low < keys.low))
        new_first = jnp.where(is_less, middle + 1, first)
        new_last = jnp.where(is_less, last, middle)
        return new_first, new_last

    if num_rows == 0:
        return jnp.full_like(keys.low, NO_ROW, jnp.int32)
    first = jnp.zeros_like(keys.low, jnp.int32)
    last = jnp.full_like(keys.low, num_rows, jnp.int32)
    num_halvings = int(np.ceil(np.log2(num_rows))) + 1
    row, _ = jax.lax.fori_loop(0, num_halvings, halved, (first, last))
    candidate = jnp.minimum(row, num_rows - 1)
    is_same_high = table["high"][candidate] == keys.high
    is_same_low = table["low"][candidate] == keys.low
    is_same = is_same_high & is_same_low
    return jnp.where(keys.is_key & is_same, row, NO_ROW)
