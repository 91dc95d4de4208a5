"""Computes the row number of each id in a stack of tables, by one formula for three layouts.

```
table, id  ──rows──▶  shard * rows_per_shard + row in the shard  ──ids, tables_and_ids──▶  table, id
```

* Whole layout (`spread=1`): one shard contains all rows of a table. The shard can contain several
  tables, one after the other.
* Interleaved layout (`spread` is the number of shards): consecutive ids of a table are in different
  shards, so frequent ids are spread over all shards.
* Rotated layout: an interleaved layout in which the tables of a stack have their id 0 in different
  shards. The rotation puts the first ids of the tables, which are often frequent, into different
  shards.

All functions in `places` accept and return numbers, NumPy arrays or JAX arrays, which may be
traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

Numbers: TypeAlias = Any
"""A number, a NumPy array of numbers, or a JAX array of numbers, which may be traced."""


class Place(NamedTuple):
    """Position of a table in the shards of its stack.

    The argument `spread` of the methods is the number of shards that hold rows of the table. Id `i`
    is row `(first + i) // spread` of shard `owner + (first + rotation + i) % spread`.

    Args:
      owner: index of the first shard that holds rows of the table.
      first: total number of rows that precede this table in the shards that hold its rows.
      rotation: number of shards by which all ids of the table are shifted, 0 by default.
    """

    owner: Numbers
    first: Numbers
    rotation: Numbers = 0

    def shards(self, ids: Numbers, *, spread: int) -> Numbers:
        """Index of the shard that holds the row of each id."""
        return self.owner + (ids + (self.first + self.rotation) % spread) % spread

    def rows_in_shard(self, ids: Numbers, *, spread: int) -> Numbers:
        """Row number of each id within the shard that holds the row."""
        return (self.first + ids) // spread

    def rows(self, ids: Numbers, *, spread: int, rows_per_shard: int) -> Numbers:
        """Row number of each id in the array `[num_shards * rows_per_shard, dim]` of all shards.

        The result is meaningless for ids outside the table.
        """
        # If `spread` is 1, the row number is the id plus a constant. One addition instead of the
        # general formula makes programs with a thousand features compile faster.
        if spread == 1:
            first_row = self.owner * rows_per_shard + self.first
            return ids + first_row
        shards = self.shards(ids, spread=spread)
        first_rows = shards * rows_per_shard
        return first_rows + self.rows_in_shard(ids, spread=spread)

    def all_rows(
        self, count: int, *, spread: int, rows_per_shard: int
    ) -> slice | Int[np.ndarray, " vocab"]:
        """Index that selects all rows of a table from the array of its stack, in order of the ids.

        The index is a slice if all rows of the table are in one shard, else an array.

        Args:
          count: number of rows of the table.
          spread: number of shards that hold rows of the table.
          rows_per_shard: number of rows of the stack in each shard. The array of the stack is
            `[num_shards * rows_per_shard, dim]`.
        """
        if spread > 1:
            ids = np.arange(count)
            return self.rows(ids, spread=spread, rows_per_shard=rows_per_shard)
        first = self.rows(0, spread=spread, rows_per_shard=rows_per_shard)
        return slice(first, first + count)

    def ids(self, shard: Numbers, row: Numbers, *, spread: int) -> Numbers:
        """Id of each row of a shard, the inverse of `shards` and `rows_in_shard`.

        The id of a row that belongs to another table is negative, or larger than all ids of this
        table.
        """
        phase = shard - self.owner
        # Remainders and quotients of division by 1 would be a fifth of the program of small tables.
        offset = 0 if spread == 1 else (phase - self.rotation) % spread
        ids = row * spread + offset - self.first
        has_table = (phase >= 0) & (phase < spread)
        return _where(has_table, ids, -1)

    def first_row(self, shard: Numbers, *, spread: int) -> Numbers:
        """The smallest row number of a shard for which `ids` returns an id that is not negative."""
        if spread == 1:
            return self.first
        id_of_row_0 = (shard - self.owner - self.rotation) % spread - self.first
        return -(id_of_row_0 // spread)


def tables_and_ids(
    table_places: Sequence[Place],
    sizes: Sequence[int],
    shard: Numbers,
    row: Numbers,
    *,
    spread: int,
) -> tuple[Numbers, Numbers]:
    """For each row of a shard, the index of its table in `table_places`, and the id of the row.

    If a row belongs to no table, both the index of the table and the id are -1.
    """
    tables = row * 0 - 1
    ids = tables
    for position, (place, size) in enumerate(zip(table_places, sizes, strict=True)):
        table_ids = place.ids(shard, row, spread=spread)
        is_in_table = (table_ids >= 0) & (table_ids < size)
        tables = _where(is_in_table, position, tables)
        ids = _where(is_in_table, table_ids, ids)
    return tables, ids


def _where(condition: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    for value in (condition, yes, no):
        if isinstance(value, jax.Array):
            return jnp.where(condition, yes, no)
    return np.where(condition, yes, no)
