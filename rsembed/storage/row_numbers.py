"""Rows without hash table: key `k` has row `k // n` of device `k % n`, and all rows are there from the start."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from rsembed.bags import PAD_ID
from rsembed.initial_values import table_key
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.keys import Keys, join_keys, local_rows
from rsembed.specs import TableSpec
from rsembed.storage import hashed_rows
from rsembed.storage.hashed import RowsByKey
from rsembed.storage.hashed_rows import Counters, DynamicTable
from rsembed.storage.protocol import Found, ReadAhead, State, Vectors

BLOCK_VALUES = 1 << 20
MAX_KEYS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowNumbers(RowsByKey):
    """The storage of keys that are row numbers; they start from what a hash table would give them.

    Args:
      num_shards: how many devices share the keys.
      key_dtype: keys that it cannot hold are refused.
    """

    num_shards: int
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    def check(self, table: TableSpec) -> None:
        hashed_rows.check(table)
        if table.vocabulary_size > MAX_KEYS:
            raise ValueError(
                f"table {table.name!r}: {table.vocabulary_size} rows are more than 2**32; keep rows by key as "
                "rsembed.Hashed."
            )

    def checked(self, ids: PyTree, table: TableSpec, feature: str) -> Keys:
        keys = super().checked(ids, table, feature)
        if isinstance(keys.is_key, np.ndarray):
            is_outside = keys.is_key & ((keys.high > 0) | (keys.low >= table.vocabulary_size))
            if is_outside.any():
                (key,) = join_keys(keys.high[is_outside][:1], keys.low[is_outside][:1], dtype=self.key_dtype)
                raise ValueError(
                    f"{feature}: key {key} is not below {table.vocabulary_size}, the rows of table {table.name!r} on "
                    f"{self.num_shards} devices ({int(is_outside.sum())} such keys); make the table larger, pass "
                    f"{PAD_ID} for no key, or keep rows by key as rsembed.Hashed."
                )
        return keys

    def init(self, key: PRNGKeyArray, table: TableSpec, shard: Int[Array, ""], num_shards: int) -> State:
        """Made block by block: nothing else is as large as the rows."""
        own_key, capacity = table_key(key, table.name), table.vocabulary_size // num_shards
        size = min(capacity, max(1, BLOCK_VALUES // table.embedding_dim))

        def fill(number: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            first = jnp.minimum(number * size, capacity - size)
            low = (first + jnp.arange(size, dtype=jnp.int32)).astype(jnp.uint32) * jnp.uint32(num_shards)
            low = low + shard.astype(jnp.uint32)
            values = hashed_rows.initial_values(table, own_key, Keys(jnp.zeros_like(low), low, jnp.ones(size, bool)))
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), first, 0)
                for array, part in zip(arrays, (values, *table.optimizer.init_slots(values)), strict=True)
            )

        rows, slots = hashed_rows.allocate(table, capacity, fill=None)
        rows, *slots = jax.lax.fori_loop(0, -(-capacity // size), fill, (rows, *slots))
        return DynamicTable(None, rows, None, Counters(), own_key[None]), tuple(slots)

    def read(self, params: DynamicTable, keys: Keys, table: TableSpec, ahead: ReadAhead | None = None) -> Vectors:
        del ahead
        rows = self._rows(params, keys)
        return hashed_rows.read(params, rows), jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)

    def find(
        self, params: PyTree, slots: PyTree, keys: Keys, occurrences: Array, table: TableSpec, step: Step
    ) -> Found:
        del table, occurrences, step
        return params, slots, self._rows(params, keys)

    def _rows(self, params: DynamicTable, keys: Keys) -> Int[Array, " nnz"]:
        rows: Int[Array, " nnz"] = local_rows(keys, self.num_shards, params.rows.shape[0])
        return rows
