"""Place law: the formula for the row of each id, of which every layout is a setting.

```
table, id  ──rows──▶  shard * rows_per_shard + row in the shard  ──ids, tables_and_ids──▶  table, id
```

* Whole: a table lies in one shard, under others or alone (`spread=1`).
* Dealt: neighbouring ids have different owners, so that frequent ones spread evenly (`spread` = all shards).
* Rotated: dealt, and each further table of a stack begins some shards later, so that first ids spread, too.

Ids, shards and rows are numbers, numpy or JAX arrays, traced or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree


class Place(NamedTuple):
    """Place of a table: id `i` is row `(first + i) // spread` of shard `owner + (first + rotation + i) % spread`.

    Args:
      owner: the first of the `spread` shards that have a part of it.
      first: rows before it in those shards, all of them counted.
      rotation: shards by which ids are moved on.
    """

    owner: Any
    first: Any
    rotation: Any = 0

    def shards(self, ids: PyTree, *, spread: int) -> PyTree:
        """Shard of each id."""
        return self.owner + (ids + (self.first + self.rotation) % spread) % spread

    def rows_in_shard(self, ids: PyTree, *, spread: int) -> PyTree:
        """Row of each id in its shard."""
        return (self.first + ids) // spread

    def rows(self, ids: PyTree, *, spread: int, rows_per_shard: int) -> PyTree:
        """Row of each id in an array `[num_shards * rows_per_shard, dim]`; ids must lie inside the table."""
        if spread == 1:  # one operation in place of many, which a program of a thousand features feels
            return ids + (self.owner * rows_per_shard + self.first)
        return self.shards(ids, spread=spread) * rows_per_shard + self.rows_in_shard(ids, spread=spread)

    def all_rows(self, count: int, *, spread: int, rows_per_shard: int) -> slice | Int[np.ndarray, " vocab"]:
        """Index of a whole table of `count` rows in the array of `rows`; a slice where they lie in order."""
        if spread > 1:
            return self.rows(np.arange(count), spread=spread, rows_per_shard=rows_per_shard)
        first = self.rows(0, spread=spread, rows_per_shard=rows_per_shard)
        return slice(first, first + count)

    def ids(self, shard: Any, row: Any, *, spread: int) -> PyTree:
        """The id in a row of a shard, the inverse of `rows`; outside the table, or -1, in rows of other tables."""
        phase = shard - self.owner
        ids = row * spread + (phase - self.rotation) % spread - self.first
        return _where((phase >= 0) & (phase < spread), ids, -1)

    def first_row(self, shard: Any, *, spread: int) -> PyTree:
        """The first row of a shard that may belong to the table."""
        return -(((shard - self.owner - self.rotation) % spread - self.first) // spread)


def tables_and_ids(places: Sequence[Place], sizes: Sequence[int], shard: Any, row: Any, *, spread: int) -> PyTree:
    """The table in each row of a shard, as a position in `places`, and the id there; -1 and -1 in rows of no table."""
    tables = ids = row * 0 - 1
    for position, (place, size) in enumerate(zip(places, sizes, strict=True)):
        own = place.ids(shard, row, spread=spread)
        is_own = (own >= 0) & (own < size)
        tables, ids = _where(is_own, position, tables), _where(is_own, own, ids)
    return tables, ids


def _where(condition: Any, yes: Any, no: Any) -> PyTree:
    xp = jnp if any(isinstance(value, jax.Array) for value in (condition, yes, no)) else np
    return xp.where(condition, yes, no)
