"""Storage for 64-bit keys that are row numbers, so that no key has to be searched."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from rsembed.bags import PAD_ID
from rsembed.checks import dtype_among
from rsembed.initial_values import traced_initializer
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Call, KeyOrKeys, Step
from rsembed.keys import KEY_DTYPES, Keys, join_keys, local_rows
from rsembed.optimizers.base import Slots
from rsembed.specs import TableSpec
from rsembed.storage import hashed_rows
from rsembed.storage.hashed import DynamicRows
from rsembed.storage.hashed_rows import Counters, DynamicTable
from rsembed.storage.protocol import Found, Pool, ReadAhead, State, positions_of

MAX_KEYS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowNumbers(DynamicRows):
    """Storage for keys that are row numbers.

    A key has the same initial row as in a table with storage `Hashed`.

    Args:
      num_shards: number of devices that share the keys.
      key_dtype: dtype of the keys: int32, int64 (the default), uint32 or uint64. Ids outside the
        range of the dtype are rejected.
    """

    num_shards: int
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    def check(self, table: TableSpec) -> None:
        dtype_among(KEY_DTYPES, self.key_dtype, f"table {table.name!r}: key_dtype")
        traced_initializer(table, (1, table.embedding_dim))
        if table.vocabulary_size > MAX_KEYS:
            raise ValueError(
                f"table {table.name!r}: {table.vocabulary_size} rows are more than 2**32; keep rows by key as "
                "rsembed.Hashed."
            )

    def checked(self, ids: PyTree, table: TableSpec, feature: str) -> Keys:
        keys = super().checked(ids, table, feature)
        if isinstance(keys.is_key, np.ndarray):
            is_too_large = (keys.high > 0) | (keys.low >= table.vocabulary_size)
            is_outside = keys.is_key & is_too_large
            if is_outside.any():
                high = keys.high[is_outside]
                low = keys.low[is_outside]
                (key,) = join_keys(high[:1], low[:1], dtype=self.key_dtype)
                raise ValueError(
                    f"{feature}: key {key} is not below {table.vocabulary_size}, the rows of table {table.name!r} on "
                    f"{self.num_shards} devices ({int(is_outside.sum())} such keys); make the table larger, pass "
                    f"{PAD_ID} for no key, or keep rows by key as rsembed.Hashed."
                )
        return keys

    def init_from_keys(
        self,
        keys: KeyOrKeys,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        capacity = table.vocabulary_size // num_shards
        rows = jnp.arange(capacity, dtype=jnp.int32)
        first_keys = rows.astype(jnp.uint32) * jnp.uint32(num_shards)
        low = first_keys + shard.astype(jnp.uint32)
        high = jnp.zeros_like(low)
        row_keys = Keys(high, low, jnp.ones(capacity, bool))
        vectors, slots = hashed_rows.allocate(table, capacity, fill=None)
        vectors, *slots_of_rows = hashed_rows.with_initial_values(
            (vectors, *slots),
            rows,
            row_keys,
            table,
            keys[0],
        )
        params = DynamicTable(
            keys=None,
            rows=vectors,
            waiting=None,
            counters=Counters(),
            key=keys,
        )
        return params, tuple(slots_of_rows)

    def pooled(
        self,
        params: DynamicTable,
        keys: Keys,
        call: Call,
        table: TableSpec,
        pool: Pool,
        ahead: ReadAhead | None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """See `Storage.pooled`.

        If all keys are in range, `pool` reads the vectors directly from the table.
        """
        rows = self._rows(params, keys)
        is_beyond = keys.is_key & (rows == NO_ROW)
        num_beyond = jnp.sum(is_beyond, dtype=jnp.int32)

        def from_rows() -> PyTree:
            return pool(params.rows, rows)

        def from_vectors() -> PyTree:
            (vectors,) = api.gather_rows((params.rows,), rows)
            return pool(vectors, positions_of(keys))

        output = jax.lax.cond(num_beyond == 0, from_rows, from_vectors)
        return output, num_beyond

    def find(
        self,
        params: DynamicTable,
        slots: Slots,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        del table, occurrences, step
        return params, slots, self._rows(params, keys)

    def _rows(self, params: DynamicTable, keys: Keys) -> Int[Array, " nnz"]:
        capacity = params.rows.shape[0]
        rows: Int[Array, " nnz"] = local_rows(keys, self.num_shards, capacity)
        return rows
