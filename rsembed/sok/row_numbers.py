"""Rows without hash table: key `k` has row `k // n` of device `k % n`, and all rows are there from the start."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.homes import hashed_rows
from rsembed.homes.hashed import RowsByKey
from rsembed.homes.hashed_rows import Counters, DynamicTable
from rsembed.homes.home import Ahead
from rsembed.initial_values import table_key
from rsembed.kernels.contract import NO_ROW, Step
from rsembed.keys import Keys, local_rows
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec

BLOCK_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowNumbers(RowsByKey):
    """The home of keys that are row numbers; they start from what a hash table would give them.

    Args:
      num_shards: how many devices share the keys.
      key_dtype: what larger keys are refused for.
    """

    num_shards: int
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    def check(self, table: TableSpec) -> None:
        hashed_rows.check(table)

    def init(
        self, key: PRNGKeyArray, table: TableSpec, *, shard: Int[Array, ""], num_shards: int
    ) -> tuple[DynamicTable, Slots]:
        return self.start(table_key(key, table.name), table, table.vocabulary_size // num_shards, shard=shard)

    def start(
        self, own_key: PRNGKeyArray, table: TableSpec, capacity: int, *, shard: Int[Array, ""]
    ) -> tuple[DynamicTable, Slots]:
        """A shard of `capacity` rows, given the table's own key; made block by block."""

        def fill(first: Array, fresh: tuple[Array, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), first, 0)
                for array, part in zip(arrays, fresh, strict=True)
            )

        rows, slots = hashed_rows.allocate(table, capacity, fill=None)
        rows, *slots = self._block_by_block(fill, (rows, *slots), own_key, table, capacity, shard)
        return DynamicTable(None, rows, None, Counters.zeros("unknown"), own_key[None]), tuple(slots)

    def last_used(self, params: DynamicTable, slots: Slots, table: TableSpec, shard: Int[Array, ""]) -> Int[Array, "1"]:
        """The last row of a shard that, or whose slots, are no more what they started from; -1 if there is none."""

        def look(first: Array, fresh: tuple[Array, ...], last: Array) -> Array:
            differs = jnp.zeros(fresh[0].shape[0], bool)
            for array, part in zip((params.rows, *slots), fresh, strict=True):
                own = jax.lax.dynamic_slice_in_dim(array, first, part.shape[0])
                differs |= (own != part.astype(array.dtype)).reshape(part.shape[0], -1).any(axis=1)
            numbers = first + jnp.arange(differs.shape[0], dtype=jnp.int32)
            return jnp.maximum(last, jnp.max(jnp.where(differs, numbers, -1)))

        last: Int[Array, ""] = self._block_by_block(
            look, jnp.full((), -1, jnp.int32), params.key[0], table, params.rows.shape[0], shard
        )
        return last[None]

    def _block_by_block(
        self, function: Any, state: Any, own_key: PRNGKeyArray, table: TableSpec, capacity: int, shard: Array
    ) -> Any:
        """`state` after `function(first row, vectors and slots that a block starts from, state)` for all blocks."""
        size = min(capacity, max(1, BLOCK_VALUES // table.embedding_dim))

        def block(number: Array, state: Any) -> Any:
            first = jnp.minimum(number * size, capacity - size)
            low = (first + jnp.arange(size, dtype=jnp.int32)).astype(jnp.uint32) * jnp.uint32(self.num_shards)
            low = low + shard.astype(jnp.uint32)
            keys = Keys(jnp.zeros_like(low), low, jnp.ones(low.shape, bool))
            values = hashed_rows.initial_values(table, own_key, keys)
            return function(first, (values, *table.optimizer.init_slots(values)), state)

        return jax.lax.fori_loop(0, -(-capacity // size), block, state)

    def read(
        self, params: DynamicTable, keys: Keys, table: TableSpec, *, ahead: Ahead | None = None
    ) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
        del ahead
        rows = self._rows(params, keys)
        return hashed_rows.read(params, rows), jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)

    def find(
        self, params: Any, slots: Slots, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"], step: Step
    ) -> tuple[DynamicTable, Slots, Int[Array, " nnz"]]:
        del table, occurrences, step
        rows = self._rows(params, keys)
        unknown = jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)
        return params._replace(counters=params.counters.add(unknown=unknown)), slots, rows

    def _rows(self, params: DynamicTable, keys: Keys) -> Int[Array, " nnz"]:
        rows: Int[Array, " nnz"] = local_rows(keys, self.num_shards, params.rows.shape[0])
        return rows
