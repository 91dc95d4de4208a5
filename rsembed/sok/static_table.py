"""Rows without hash table: key `k` has row `k // n` of device `k % n`, and all rows are there from the start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from rsembed.homes import hashed_rows
from rsembed.homes.hashed_rows import (
    INITIAL_BLOCK,
    Counters,
    DynamicTable,
    DynamicTableSpec,
    allocate,
    initial_values,
)
from rsembed.homes.home import Home
from rsembed.initial_values import table_key
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.keys import Keys, local_rows
from rsembed.optimizers import Slots
from rsembed.specs import TableSpec

INIT_BLOCK_VALUES = 1 << 20


def init(spec: DynamicTableSpec, key: PRNGKeyArray, shard: Int[Array, ""], num_shards: int) -> DynamicTable:
    """All rows with the initial values that a hash table would give to their keys, made block by block."""
    own_key = table_key(key, spec.name)
    block = min(spec.capacity, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))

    def fill(i: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        first = jnp.minimum(i * block, spec.capacity - block)
        low = (first + jnp.arange(block, dtype=jnp.int32)).astype(jnp.uint32) * jnp.uint32(num_shards)
        low = low + shard.astype(jnp.uint32)
        parts = _initial_rows(spec, own_key, low)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), first, 0)
            for array, part in zip(arrays, parts, strict=True)
        )

    arrays = jax.lax.fori_loop(0, -(-spec.capacity // block), fill, allocate(spec, spec.capacity, fill=None))
    return DynamicTable(None, arrays[0], arrays[1:], None, Counters.zeros("unknown"), own_key[None])


def _initial_rows(spec: DynamicTableSpec, own_key: PRNGKeyArray, low: UInt32[Array, " rows"]) -> tuple[Array, ...]:
    values = initial_values(spec, own_key, Keys(jnp.zeros_like(low), low, jnp.ones(low.shape, bool)))
    return values, *spec.optimizer.init_slots(values)


@functools.partial(jax.jit, static_argnums=0)
def _initial_block(spec: DynamicTableSpec, own_key: PRNGKeyArray, first: Array) -> tuple[Array, ...]:
    values, *slots = _initial_rows(spec, own_key, first + jnp.arange(INITIAL_BLOCK, dtype=jnp.uint32))
    return values.astype(spec.dtype), *slots


def initial_rows(spec: DynamicTableSpec, own_key: PRNGKeyArray, first: int, last: int) -> list[np.ndarray]:
    """What the vectors and slots of keys `first : last` started from, on the host.

    Args:
      spec: of the table.
      own_key: as the table's state has it.
      first: the first key.
      last: the first key behind them.
    """
    blocks = [
        jax.tree.map(np.asarray, _initial_block(spec, own_key, jnp.uint32(start)))
        for start in range(first, max(last, first + 1), INITIAL_BLOCK)
    ]
    return [np.concatenate(parts)[: last - first] for parts in zip(*blocks, strict=True)]


def num_used(spec: DynamicTableSpec, own_key: PRNGKeyArray, arrays: Sequence[np.ndarray]) -> int:
    """How many rows reach up to the last one that is no more what it started from.

    Args:
      spec: of the table.
      own_key: as the table's state has it.
      arrays: vectors and slots of all keys, in ascending order of the keys.
    """
    last = arrays[0].shape[0]
    while last > 0:
        first = max(0, last - INITIAL_BLOCK)
        fresh = initial_rows(spec, own_key, first, last)
        differs = [
            (own[first:last] != new).reshape(last - first, -1).any(1) for own, new in zip(arrays, fresh, strict=True)
        ]
        if (is_used := np.logical_or.reduce(differs)).any():
            return first + int(np.flatnonzero(is_used)[-1]) + 1
        last = first
    return 0


@dataclasses.dataclass(frozen=True)
class Direct(Home):
    """The home of keys that are row numbers.

    Args:
      spec: of one device's share.
      num_shards: how many devices share the keys.
    """

    spec: DynamicTableSpec
    num_shards: int
    key_dtype: str = "int64"
    placements: ClassVar[tuple[str, ...]] = ("row",)

    def check(self, table: TableSpec) -> None:
        """Every table can be kept like this."""

    def init(
        self, key: PRNGKeyArray, table: TableSpec, *, shard: Int[Array, ""], num_shards: int
    ) -> tuple[DynamicTable, Slots]:
        """All rows."""
        del table
        state = init(self.spec, key, shard, num_shards)
        return state._replace(slots=()), state.slots

    def read(
        self, params: DynamicTable, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"] | None = None
    ) -> tuple[Float[Array, "nnz dim"], Int[Array, ""]]:
        """Rows, float32; keys beyond the table are unknown."""
        del occurrences
        rows = self._rows(params, keys)
        return self.vectors(params, rows, table), jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)

    def vectors(self, params: DynamicTable, rows: Int[Array, " nnz"], table: TableSpec) -> Float[Array, "nnz dim"]:
        """Rows, float32."""
        return hashed_rows.read(params, rows)

    def find(
        self, params: Any, slots: Any, keys: Keys, table: TableSpec, *, occurrences: Int[Array, " nnz"], step: Step
    ) -> tuple[Any, Any, Int[Array, " nnz"]]:
        """Every row is there; keys beyond the table are counted."""
        del table, occurrences, step
        rows = self._rows(params, keys)
        unknown = jnp.sum(keys.is_key & (rows == NO_ROW), dtype=jnp.int32)
        return params._replace(counters=params.counters.add(unknown=unknown)), slots, rows

    def step(
        self,
        params: DynamicTable,
        slots: Slots,
        segments: Sequence[Segment],
        d_outputs: Sequence[Float[Array, "_ dim"]],
        table: TableSpec,
        *,
        step: Step,
    ) -> tuple[DynamicTable, Slots]:
        """As of any array of rows."""
        return hashed_rows.step(params, slots, segments, d_outputs, step)

    def _rows(self, params: DynamicTable, keys: Keys) -> Int[Array, " nnz"]:
        rows: Int[Array, " nnz"] = local_rows(keys, self.num_shards, params.rows.shape[0])
        return rows
