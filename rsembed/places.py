"""Computes the row of each id. All layouts use one formula, with a `Place` of parameters per table.

```
table, id  ──rows──▶  shard * rows_per_shard + row in the shard  ──ids, tables_and_ids──▶  table, id
```

* Whole: all rows of a table are in one shard, alone or after other tables (`spread=1`).
* Interleaved: neighbouring ids are in different shards, so frequent ids are spread (`spread` =
  number of shards).
* Rotated: interleaved, and each table of a stack starts some shards after the table before it, so
  the first ids are also spread.

The functions accept and return numbers, NumPy arrays or JAX arrays, which may be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

Numbers: TypeAlias = Any
"""A number, or numbers in an array of NumPy or JAX, traced or not."""


class Place(NamedTuple):
    """Position of a table in the shards of its stack.

    Id `i` is row `(first + i) // spread` of shard `owner + (first + rotation + i) % spread`.

    Args:
      owner: the first of the `spread` shards that hold rows of the table.
      first: number of rows before the table, summed over these shards.
      rotation: ids are shifted by this number of shards, 0 by default.
    """

    owner: Numbers
    first: Numbers
    rotation: Numbers = 0

    def shards(self, ids: Numbers, *, spread: int) -> Numbers:
        """Shard that holds the row of each id."""
        return self.owner + (ids + (self.first + self.rotation) % spread) % spread

    def rows_in_shard(self, ids: Numbers, *, spread: int) -> Numbers:
        """Row of each id in its shard."""
        return (self.first + ids) // spread

    def rows(self, ids: Numbers, *, spread: int, rows_per_shard: int) -> Numbers:
        """Row of each id in an array `[num_shards * rows_per_shard, dim]`.

        Ids must be inside the table.
        """
        # With `spread` 1, one addition is enough. Fewer operations matter in a program of a
        # thousand features.
        if spread == 1:
            return ids + (self.owner * rows_per_shard + self.first)
        first_rows = self.shards(ids, spread=spread) * rows_per_shard
        return first_rows + self.rows_in_shard(ids, spread=spread)

    def all_rows(
        self, count: int, *, spread: int, rows_per_shard: int
    ) -> slice | Int[np.ndarray, " vocab"]:
        """Index of all rows of a table, in the order of the ids, in the array of the stack.

        `count` is the number of rows of the table. The array of the stack is `[num_shards *
        rows_per_shard, dim]`. The index is a slice if the rows are contiguous.
        """
        if spread > 1:
            return self.rows(np.arange(count), spread=spread, rows_per_shard=rows_per_shard)
        first = self.rows(0, spread=spread, rows_per_shard=rows_per_shard)
        return slice(first, first + count)

    def ids(self, shard: Numbers, row: Numbers, *, spread: int) -> Numbers:
        """Id in a row of a shard, the inverse of `rows`.

        For rows of other tables the result is -1 or an id outside the table.
        """
        phase = shard - self.owner
        ids = row * spread + (phase - self.rotation) % spread - self.first
        return _where((phase >= 0) & (phase < spread), ids, -1)

    def first_row(self, shard: Numbers, *, spread: int) -> Numbers:
        """The first row of a shard that can belong to the table."""
        return -(((shard - self.owner - self.rotation) % spread - self.first) // spread)


def tables_and_ids(
    table_places: Sequence[Place],
    sizes: Sequence[int],
    shard: Numbers,
    row: Numbers,
    *,
    spread: int,
) -> tuple[Numbers, Numbers]:
    """Table, as an index into `table_places`, and id of each row of a shard.

    Table and id are -1 for a row that belongs to no table.
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
    xp = jnp if any(isinstance(value, jax.Array) for value in (condition, yes, no)) else np
    return xp.where(condition, yes, no)
