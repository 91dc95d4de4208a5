"""Rows of a table with keys between two steps: out to the host with all that belongs to them, and in again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Integer

from rsembed.bags import padded_size
from rsembed.collection.rows import Occurrences, Rows
from rsembed.homes import Hashed, hashed_rows, row_map
from rsembed.homes.hashed_rows import DynamicTable
from rsembed.homes.home import Ahead, on_host
from rsembed.homes.logical_rows import array_names
from rsembed.homes.row_map import FREE
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import Keys, join_keys, owners, split_keys
from rsembed.specs import TableSpec

MOST_KEYS, LEAST_KEYS = 1 << 16, 1 << 8
"""Rows of a device that one program moves at most; and for which there is room in each, so that there are few."""


class Strangers(NamedTuple):
    """Distinct keys of a batch that have no row.

    Attributes:
      keys: their numbers.
      is_admitted: whether the next step is to give them one.
      shard: whose they are.
      num_free: of each shard, rows that have no key.
      num_held: of each shard, rows of keys of the batch.
    """

    keys: Integer[np.ndarray, " strangers"]
    is_admitted: np.ndarray
    shard: np.ndarray
    num_free: np.ndarray
    num_held: np.ndarray


class Leaving(NamedTuple):
    """Places of rows that lose their keys, of one shard after the other, and what was noted of them."""

    rows: Int[Array, " size"]
    high: Array
    low: Array
    last_step: Array
    counts: Array
    first_step: Any


class Coming(NamedTuple):
    """Rows with their keys, of one shard after the other; padding between them."""

    keys: Any
    last_step: Any
    counts: Any
    first_step: Any
    arrays: tuple[Any, ...]


class Moving:
    """What moves rows of one table. Parameters and slots are given away to whatever returns them anew.

    Programs that change which keys have rows do without the rows, which they would copy on a mesh.

    Args:
      rows: the engine of the table.
      occurrences: of a batch, on one device.
      stack_name: what the table is called in a state, or those that share its home.
      partition: how parameters and slots are split; None is as the engine has it.
      table: whose rows; None is the one that the engine has.
    """

    def __init__(
        self,
        rows: Rows,
        occurrences: Callable[[Any], Occurrences],
        stack_name: str = "",
        partition: PartitionSpec | None = None,
        table: TableSpec | None = None,
    ):
        self.table = rows.table if table is None else table
        self.rows, self.home, self.occurrences = rows, cast(Hashed, rows.home), occurrences
        self.stack_name, self.partition = stack_name, rows.partition if partition is None else partition
        tables = [own.name for own in self.home.tables_of(self.table)]
        self.number = tables.index(self.table.name) if len(tables) > 1 else None
        part, split, everywhere = self.partition, rows.devices.split, PartitionSpec()
        on_each = rows.devices.on_each
        forget = functools.partial(hashed_rows.forget_older, number=self.number)
        release, take_in = (functools.partial(function, number=self.number) for function in (_release, _take_in))
        self._look = jax.jit(on_each(self._look_on_device, (part, split, everywhere), part))
        self._gather = jax.jit(on_each(_gather, (part, part, part), part))
        self._choose = functools.cache(
            lambda size: jax.jit(
                on_each(functools.partial(self._choose_on_device, size), (part, part, split, part), (part, part)),
                donate_argnums=0,
            )
        )
        self._release = jax.jit(on_each(release, (part, part), (part, part)), donate_argnums=0)
        self._forget = jax.jit(on_each(forget, (part, everywhere, everywhere), part), donate_argnums=0)
        self._take_in = jax.jit(on_each(take_in, (part, part, part), (part, part)), donate_argnums=(0, 1))

    def is_own(self, params: DynamicTable) -> np.ndarray | bool:
        """Which rows of all shards belong to the table."""
        if self.number is None:
            return True
        num_tables = len(self.home.tables_of(self.table))
        numbers = np.arange(params.num_tables) % num_tables  # of every shard one behind the other
        return np.repeat(numbers == self.number, params.rows.shape[0] // params.num_tables)

    def num_rows(self, params: DynamicTable) -> int:
        """Rows of the table on each device."""
        if self.number is None:
            return params.rows.shape[0] // params.num_tables
        return -(-self.table.vocabulary_size // self.rows.num_shards)

    def score(self, params: DynamicTable) -> Array:
        """What each row is worth, as unsigned numbers: the least go first."""
        return self.home.scores(params)[0](params.keys)

    def forget_older(self, params: DynamicTable, step: Any, unused_for: int) -> DynamicTable:
        """Keys that wait for admission and did not occur for so many steps before `step` are not counted any more."""
        return self._forget(_bare(params), step, np.int32(unused_for))._replace(rows=params.rows)

    def strangers(self, params: DynamicTable, batch: Any, number: Any) -> Strangers:
        """Keys of a batch without a row, before the step of this number."""
        high, low, is_admitted, count, *numbers = map(on_host, self._look(_bare(params), batch, number))
        is_here = (np.arange(high.size // count.size) < count[:, None]).reshape(-1)
        shard = np.arange(count.size).repeat(high.size // count.size)
        return Strangers(join_keys(high, low)[is_here], is_admitted[is_here], shard[is_here], *numbers)

    def make_room(
        self, params: DynamicTable, slots: Any, batch: Any, num_wanted: Integer[np.ndarray, " shards"]
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """Takes rows from so many keys of each shard, those that its eviction lets go first, but none of the batch.

        Returns: the parameters, and the rows by key, in ascending order. There may be too few of them.
        """
        (wanted,) = self._placed([num_wanted.astype(np.int32)])
        size = padded_size(max(LEAST_KEYS, int(num_wanted.max())))
        found, leaving = self._choose(size)(_bare(params), params.rows, batch, wanted)
        return found._replace(rows=params.rows), self._left([(leaving, params.rows, slots)])

    def take_out(
        self, params: DynamicTable, slots: Any, keys: Integer[np.ndarray, " n"]
    ) -> tuple[DynamicTable, dict[str, np.ndarray]]:
        """Takes their rows from distinct keys. Returns: the parameters, and the rows by key, in ascending order."""
        rows, blocks = params.rows, []
        for places in self._blocks(keys):
            (lanes,) = self._placed([_taken(split_keys(keys), places)])
            params, leaving = self._release(_bare(params), lanes)
            blocks.append((leaving, rows, slots))
        return params._replace(rows=rows), self._left(blocks)

    def take_in(self, params: DynamicTable, slots: Any, rows: Mapping[str, np.ndarray]) -> tuple[DynamicTable, Any]:
        """Gives keys their rows back, as `make_room` and `take_out` return them.

        There must be room for them.
        """
        names = array_names(self.table, slots)
        parts = Coming(
            split_keys(rows["keys"]), rows["last_step"], rows["count"], rows.get("first_step", rows["last_step"]),
            tuple(rows[name] for name in names),
        )  # fmt: skip
        for places in self._blocks(rows["keys"]):
            block = self._placed([_taken(parts, places)])[0]
            params, slots = self._take_in(params, slots, block)
        return params, slots

    def _blocks(self, keys: Integer[np.ndarray, " n"]) -> Iterator[np.ndarray]:
        """Which of the keys are moved together, of one shard after the other, equally many with -1 for none."""
        shard, num_shards = owners(split_keys(keys), self.rows.num_shards), self.rows.num_shards
        of_shard = [np.flatnonzero(shard == number) for number in range(num_shards)]
        most = max(map(len, of_shard))
        for first in range(0, max(most, 1), MOST_KEYS):
            parts = [own[first : first + MOST_KEYS] for own in of_shard]
            places = np.full((num_shards, padded_size(max(LEAST_KEYS, *map(len, parts)))), -1, np.int64)
            for own, part in zip(places, parts, strict=True):
                own[: len(part)] = part
            yield places.reshape(-1)

    def _left(self, blocks: list[tuple[Leaving, Array, Any]]) -> dict[str, np.ndarray]:
        table = self.table
        found: dict[str, list[np.ndarray]] = {}
        for leaving, rows, slots in blocks:
            is_row = on_host(leaving.rows) != NO_ROW
            lanes = {name: on_host(lane) for name, lane in leaving._asdict().items() if lane is not None}
            arrays = dict(zip(array_names(table, slots), self._gather(rows, slots, leaving.rows), strict=True))
            keys = join_keys(lanes.pop("high"), lanes.pop("low"), dtype=self.home.key_dtype)
            lanes |= {"keys": keys, "count": lanes.pop("counts")}
            del lanes["rows"]
            for name, array in (lanes | arrays).items():
                found.setdefault(name, []).append(on_host(array)[is_row])
        joined = {name: np.concatenate(parts) for name, parts in found.items()}
        order = np.argsort(joined["keys"])
        return {name: array[order] for name, array in joined.items()}

    def _placed(self, trees: list[Any]) -> list[Any]:
        placed: list[Any] = self.rows.devices.place_from_host(trees, self.partition)
        return placed

    # On one device

    def _keys_here(self, batch: Any) -> Keys:
        """The table's keys of the global batch whose rows are here."""
        keys = self.rows.own_keys(self.occurrences(batch))
        return keys if self.number is None else keys.only(keys.table == self.number)

    def _of_table(self, by_table: Int[Array, " tables"]) -> Int[Array, "1"]:
        return by_table if self.number is None else by_table[self.number, None]

    def _look_on_device(self, params: DynamicTable, batch: Any, number: Array) -> tuple[Array, ...]:
        keys = self._keys_here(batch)
        rows = row_map.find(params.keys, keys)
        is_held, strangers = _marked(params, rows), keys.only(rows == NO_ROW)
        ones = jnp.ones(keys.shape, jnp.int32)
        _, own, _, is_admitted = self.home.newcomers(params, strangers, Ahead(ones, number))
        num_held = jnp.sum(is_held, dtype=jnp.int32)
        count = jnp.sum(own.is_key, dtype=jnp.int32)
        num_free = self._of_table(params.keys.num_free)
        return own.high, own.low, is_admitted, count.reshape(1), num_free, num_held.reshape(1)

    def _choose_on_device(
        self, size: int, params: DynamicTable, rows: Array, batch: Any, num_wanted: Int[Array, "1"]
    ) -> tuple[DynamicTable, Leaving]:
        keys, known = self._keys_here(batch), params.keys
        score, _ = self.home.scores(params._replace(rows=rows))
        may_leave = (known.last_step != FREE) & ~_marked(params, row_map.find(known, keys))
        if self.number is not None:
            num_wanted = jnp.zeros(known.num_tables, jnp.int32).at[self.number].set(num_wanted[0])
        chosen = row_map.least(known, score, may_leave, num_wanted)
        return _without(params, api.compact(chosen, size)[0])


def _bare(params: DynamicTable) -> DynamicTable:
    """The parameters without their rows."""
    nothing: Any = ()
    return params._replace(rows=nothing)


def _marked(params: DynamicTable, rows: Int[Array, " nnz"]) -> Bool[Array, " rows"]:
    return jnp.zeros(params.keys.last_step.shape, bool).at[rows].set(True, mode="drop")


def _taken(parts: Any, places: np.ndarray) -> Any:
    """Of every array what stands in these places, and zeros for -1."""

    def taken(array: Any) -> np.ndarray:
        found = np.asarray(array)[np.maximum(places, 0)] if len(array) else np.zeros_like(array, shape=places.shape)
        found[places < 0] = 0
        return found

    return jax.tree.map(taken, parts)


def _gather(rows: Array, slots: Any, places: Array) -> tuple[Array, ...]:
    return api.gather_rows((rows, *slots), places)


def _in_table(keys: Keys, number: int | None) -> Keys:
    return keys if number is None else keys._replace(table=jnp.full(keys.shape, number, jnp.int32))


def _release(params: DynamicTable, keys: Keys, *, number: int | None) -> tuple[DynamicTable, Leaving]:
    return _without(params, row_map.find(params.keys, _in_table(keys, number)))


def _without(params: DynamicTable, rows: Int[Array, " size"]) -> tuple[DynamicTable, Leaving]:
    known = params.keys
    noted: dict[str, Any] = {"high": known.high, "low": known.low, "last_step": known.last_step, "counts": known.counts}
    noted |= {} if known.first_step is None else {"first_step": known.first_step}
    lanes: dict[str, Any] = dict(zip(noted, api.gather_rows(list(noted.values()), rows), strict=True))
    left = row_map.release(known, rows)
    counters = params.counters.add(evicted=left.num_free - known.num_free)
    return params._replace(keys=left, counters=counters), Leaving(rows, **({"first_step": None} | lanes))


def _take_in(params: DynamicTable, slots: Any, coming: Coming, *, number: int | None) -> tuple[DynamicTable, Any]:
    noted = coming.last_step, coming.counts, coming.first_step
    known, places, num_new = row_map.find_or_assign(params.keys, _in_table(coming.keys, number), *noted)
    rows, *kept = api.scatter_rows((params.rows, *slots), places, coming.arrays)
    counters = params.counters.add(inserted=num_new)
    return params._replace(keys=known, rows=rows, counters=counters), tuple(kept)
