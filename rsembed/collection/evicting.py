"""Rows of a table with keys that leave it between two steps, to the host with all that belongs to them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Integer

from rsembed.bags import padded_size
from rsembed.collection.rows import Rows
from rsembed.homes import Hashed, hashed_rows, row_map
from rsembed.homes.hashed_rows import DynamicTable
from rsembed.homes.home import on_host
from rsembed.homes.logical_rows import array_names
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys, join_keys, owners, split_keys
from rsembed.specs import TableSpec

MOST_KEYS, LEAST_KEYS = 1 << 16, 1 << 8
"""Rows of a device that one program moves at most; and for which there is room in each, so that there are few."""


class Leaving(NamedTuple):
    """Places of rows that lose their keys, of one shard after the other, and what was noted of them."""

    rows: Int[Array, " size"]
    high: Array
    low: Array
    last_step: Array
    counts: Array
    first_step: Any


class Evictor:
    """What takes rows out of one table. Parameters are given away to whatever returns them anew.

    Programs that change which keys have rows do without the rows, which they would copy on a mesh.

    Args:
      rows: the engine of the table.
      stack_name: what the table is called in a state, or those that share its home.
      partition: how parameters and slots are split; None is as the engine has it.
      table: whose rows; None is the one that the engine has.
    """

    def __init__(
        self,
        rows: Rows,
        stack_name: str = "",
        partition: PartitionSpec | None = None,
        table: TableSpec | None = None,
    ):
        self.table = rows.table if table is None else table
        self.rows, self.home = rows, cast(Hashed, rows.home)
        self.stack_name, self.partition = stack_name, rows.partition if partition is None else partition
        tables = [own.name for own in self.home.tables_of(self.table)]
        self.number = tables.index(self.table.name) if len(tables) > 1 else None
        part, everywhere = self.partition, PartitionSpec()
        on_each = rows.devices.on_each
        forget = functools.partial(hashed_rows.forget_older, number=self.number)
        release = functools.partial(_release, number=self.number)
        self._gather = jax.jit(on_each(_gather, (part, part, part), part))
        self._release = jax.jit(on_each(release, (part, part), (part, part)), donate_argnums=0)
        self._forget = jax.jit(on_each(forget, (part, everywhere, everywhere), part), donate_argnums=0)

    def is_own(self, params: DynamicTable) -> np.ndarray | bool:
        """Which rows of all shards belong to the table."""
        if self.number is None:
            return True
        num_tables = len(self.home.tables_of(self.table))
        numbers = np.arange(params.num_tables) % num_tables  # of every shard one behind the other
        return np.repeat(numbers == self.number, params.rows.shape[0] // params.num_tables)

    def score(self, params: DynamicTable) -> Array:
        """What each row is worth, as unsigned numbers: the least go first."""
        return self.home.scores(params)[0](params.keys)

    def forget_older(self, params: DynamicTable, step: Any, unused_for: int) -> DynamicTable:
        """Keys that wait for admission and did not occur for so many steps before `step` are not counted any more."""
        return self._forget(_bare(params), step, np.int32(unused_for))._replace(rows=params.rows)

    def take_out(
        self, params: DynamicTable, slots: Any, keys: Integer[np.ndarray, " n"]
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """Takes their rows from distinct keys. Returns: the parameters, and the rows by key, in ascending order."""
        rows = params.rows
        found: dict[str, list[np.ndarray]] = {}
        for block in self._blocks(keys):
            (lanes,) = self.rows.devices.place_from_host([block], self.partition)
            params, leaving = self._release(_bare(params), lanes)
            for name, array in self._left(leaving, rows, slots).items():
                found.setdefault(name, []).append(array)
        joined = {name: np.concatenate(parts) for name, parts in found.items()}
        order = np.argsort(joined["keys"])
        return params._replace(rows=rows), {name: array[order] for name, array in joined.items()}

    def _blocks(self, keys: Integer[np.ndarray, " n"]) -> Iterator[Keys]:
        """Keys that leave together, of one shard after the other, equally many with padding."""
        lanes, num_shards = split_keys(keys), self.rows.num_shards
        shard = owners(lanes, num_shards)
        of_shard = [np.flatnonzero(shard == number) for number in range(num_shards)]
        for first in range(0, max(1, *map(len, of_shard)), MOST_KEYS):
            parts = [own[first : first + MOST_KEYS] for own in of_shard]
            size = padded_size(max(LEAST_KEYS, *map(len, parts)))
            yield jax.tree.map(
                lambda lane, parts=parts, size=size: np.concatenate(
                    [np.pad(lane[own], (0, size - own.size)) for own in parts]
                ),
                lanes,
            )

    def _left(self, leaving: Leaving, rows: Array, slots: Any) -> dict[str, np.ndarray]:
        lanes = {name: on_host(lane) for name, lane in leaving._asdict().items() if lane is not None}
        is_row = lanes.pop("rows") != NO_ROW
        keys = join_keys(lanes.pop("high"), lanes.pop("low"), dtype=self.home.key_dtype)
        arrays = dict(zip(array_names(self.table, slots), self._gather(rows, slots, leaving.rows), strict=True))
        found = lanes | {"keys": keys, "count": lanes.pop("counts")} | arrays
        return {name: on_host(array)[is_row] for name, array in found.items()}


def _bare(params: DynamicTable) -> DynamicTable:
    """The parameters without their rows."""
    nothing: Any = ()
    return params._replace(rows=nothing)


def _gather(rows: Array, slots: Any, places: Array) -> tuple[Array, ...]:
    return api.gather_rows((rows, *slots), places)


def _release(params: DynamicTable, keys: Keys, *, number: int | None) -> tuple[DynamicTable, Leaving]:
    known = params.keys
    keys = keys if number is None else keys._replace(table=jnp.full(keys.shape, number, jnp.int32))
    rows = row_map.find(known, keys)
    noted: dict[str, Any] = {"high": known.high, "low": known.low, "last_step": known.last_step, "counts": known.counts}
    noted |= {} if known.first_step is None else {"first_step": known.first_step}
    lanes: dict[str, Any] = dict(zip(noted, api.gather_rows(list(noted.values()), rows), strict=True))
    left = row_map.release(known, rows)
    counters = params.counters.add(evicted=left.num_free - known.num_free)
    return params._replace(keys=left, counters=counters), Leaving(rows, **({"first_step": None} | lanes))
