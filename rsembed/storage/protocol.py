"""The protocol between the engine and a storage, and which tables share one."""

from __future__ import annotations

import abc
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from rsembed.bags import is_traced
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, Rounding, Step
from rsembed.keys import Keys, checked_keys, owners
from rsembed.specs import TableSpec

ReadAhead: TypeAlias = tuple[Int[Array, " nnz"], Int[Array, ""], Int[Array, " nnz"] | None]
"""How often each key of a lookup occurred in the batch; the number of the step that will follow; and a number for each
key that says in which order `find` will serve them, None where that is the order of the lookup."""
State: TypeAlias = tuple[PyTree, PyTree]
"""Parameters and slots."""
Found: TypeAlias = tuple[PyTree, PyTree, Int[Array, " nnz"]]
"""Parameters, slots, and the row of each key; `NO_ROW` where it has none."""
Vectors: TypeAlias = tuple[Float[Array, "nnz dim"], Int[Array, ""]]
"""Rows, and how many distinct keys have none."""
Pool: TypeAlias = Callable[[Array, Int[Array, " nnz"]], PyTree]
"""From rows, and the place of each key's own among them, to whatever is pooled of them."""


class Storage(abc.ABC):
    """A storage: keeps those rows of a table that one device owns.

    `params` and `slots` are any pytrees, and all functions of them are pure and traced. On a mesh over which a table is
    split, every leaf has a leading axis, along which the shares of the devices lie side by side. A storage knows
    nothing of meshes, bags or other tables. Ids come as `Keys`, which may repeat. Frozen and hashable, as it is part of
    a spec.

    Arguments that all functions share: `table` is whose rows these are, and `step` the optimizer step that is being
    made: its number, rule and hyperparameters.
    """

    placements: ClassVar[tuple[str, ...]] = ("replicated",)
    key_dtype: Any = None  # of ids that are keys; a storages' own field where it has some

    ids_are_rows: ClassVar[bool] = False
    """Whether `params` is an array and ids are its rows, so that kernels may read and step whole bags."""

    rows_on_host: ClassVar[bool] = False
    """Whether `rows` and `with_rows` work on the host, outside `jit`; a file then has rows by table, not `params`."""

    @property
    def sums_gradients(self) -> bool:
        """Whether a step is one of all `params`.

        Devices with copies may then each pull back the `gradients` of their own samples and `step_all` with the sum.
        Every id has its row, and `find` changes nothing.
        """
        return False

    @property
    def takes_keys(self) -> bool:
        """Whether ids are keys of 64 bits, not row numbers below `vocabulary_size`."""
        return self.key_dtype is not None

    @property
    def makes_room(self) -> bool:
        """Whether `find` may take the row of one key for another, unless it is on `hold`."""
        return False

    @property
    def in_files(self) -> str | None:
        """Description in which a file and the table must agree; None where the file has a row for every id."""
        return repr(self)

    def resizable(self, table: TableSpec, saved: str) -> tuple[tuple[str, ...], ...] | None:
        """Paths of arrays in a file that `table` can take with another length of their leading axis.

        `saved` is `in_files` of the storage that the file is of. None: arrays of its size do not fit `table`.
        """
        del table, saved
        return None

    def resolved(self, table: TableSpec) -> Storage:
        """The storage with every choice resolved that follows from `table`; equal ones give states the same meaning."""
        del table
        return self

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Key that is equal for tables of equal dim, dtype and rule that one storage may keep; None keeps one alone."""
        del table
        return None

    def sharing_groups(self, tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
        """Tables of equal `sharing_key` in groups that each share one storage."""
        return [list(tables)]

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All that share the storage, in the order in which they lie in every leaf; `table` is one of them."""
        return (table,)

    def sharing(self, tables: Sequence[TableSpec]) -> Storage:
        """One storage for tables of equal `sharing_key`."""
        raise NotImplementedError(
            f"{self} keeps one table, not {[table.name for table in tables]}."
        )

    def part_sizes(self, table: TableSpec) -> tuple[int, ...] | None:
        """Rows that `table` has in each part of `params`, where those of tables that share it follow each other.

        None where `params` have no such parts.
        """
        del table
        return None

    def unstack(
        self, params: PyTree, slots: PyTree, table: TableSpec, num_shards: int
    ) -> list[State]:
        """`params` and slots of all shards as those of each of `tables_of`; of several, outside `jit`."""
        del table, num_shards
        return [(params, slots)]

    def stack(self, parts: Sequence[State], like: PyTree, num_shards: int) -> State:
        """The inverse of `unstack`; `like` are `params` as they were."""
        del like, num_shards
        return parts[0]

    @abc.abstractmethod
    def check(self, table: TableSpec) -> None:
        """Raises: ValueError or NotImplementedError: the table cannot be kept like this."""

    def num_rows(self, table: TableSpec) -> int:
        """Rows that the devices have room for, all together."""
        return table.vocabulary_size

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Numbers kept in place of rows, and beside them for the optimizer, over all devices."""
        row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
        slots = sum(slot.size for slot in jax.eval_shape(table.optimizer.init_slots, row))
        return self.num_rows(table) * table.embedding_dim, self.num_rows(table) * slots

    def num_ids(self, table: TableSpec) -> int:
        """Ids that are no keys lie below it."""
        return table.vocabulary_size

    def checked(self, ids: PyTree, table: TableSpec, feature: str) -> Keys:
        """Ids of a batch as keys, of which those that can be seen were checked. Raises: as `checked_keys`."""
        del table
        return checked_keys(ids, self.key_dtype, feature=feature)

    def owners(self, keys: Keys, num_shards: int) -> Int[Array, " nnz"]:
        """The shard that has the row of each key; `num_shards` for what is no key."""
        owner: Int[Array, " nnz"] = owners(keys, num_shards)
        return owner

    def vector_dtype(self, table: TableSpec) -> DTypeLike:
        """Dtype of the rows that `read` and `vectors` return."""
        del table
        return jnp.float32

    def rounding(
        self,
        rounding: Rounding | None,
        shard: Int[Array, ""] | int,
        resident_rows: Int[Array, " places"] | None = None,
    ) -> Rounding | None:
        """How a shard's rows are rounded, from the rounding of the collection; `resident_rows` as in `Step`."""
        del shard, resident_rows
        return rounding

    @abc.abstractmethod
    def init(
        self, key: PRNGKeyArray, table: TableSpec, shard: Int[Array, ""], num_shards: int
    ) -> State:
        """Initial `params` and slots of one of the shards. `key` is the model's, equal for all of them."""

    @abc.abstractmethod
    def read(
        self, params: PyTree, keys: Keys, table: TableSpec, ahead: ReadAhead | None = None
    ) -> Vectors:
        """Rows, zeros for what is no key or has no row; and how many distinct keys have none.

        `ahead` of a step, keys without a row read as what `find` is going to give them, and those are counted that it
        wants to give one. None only looks.
        """

    def pooled(
        self,
        params: PyTree,
        keys: Keys,
        call: Call,
        table: TableSpec,
        pool: Pool,
        ahead: ReadAhead | None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """`pool(vectors, row of each key among them)` of what `read` gives, which need not be written down for it.

        `call` reads the same ids, where these are row numbers.
        """
        del call
        vectors, num_unknown = self.read(params, keys, table, ahead)
        return pool(
            vectors, jnp.where(keys.is_key, jnp.arange(keys.shape[0], dtype=jnp.int32), NO_ROW)
        ), num_unknown

    @abc.abstractmethod
    def vectors(
        self, params: PyTree, rows: Int[Array, " nnz"], table: TableSpec
    ) -> Float[Array, "nnz dim"]:
        """The rows that `find` gave; zeros for `NO_ROW`."""

    @abc.abstractmethod
    def find(
        self,
        params: PyTree,
        slots: PyTree,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        """Before a step: the row of every key, after giving one to those without; `NO_ROW` where there is none."""

    def hold(self, params: PyTree, keys: Keys, step: Step) -> PyTree:
        """`params`, in which the rows (and counts) of these keys stay where they are until the step is done."""
        del keys, step
        return params

    @abc.abstractmethod
    def step(
        self, params: PyTree, slots: PyTree, gradients: CallGradients, table: TableSpec, step: Step
    ) -> State:
        """One optimizer step of the rows that a call read, as `find` gave them, with gradients of their outputs."""

    def step_distinct(
        self,
        params: PyTree,
        slots: PyTree,
        rows: Array,
        values: Array,
        table: TableSpec,
        step: Step,
    ) -> State:
        """One optimizer step of rows of which none comes twice, with gradients `values`."""
        return self.step(params, slots, CallGradients.of_rows(rows, values), table, step)

    def gradients(self, params: PyTree, gradients: CallGradients, table: TableSpec) -> PyTree:
        """Where it `sums_gradients`: those of all `params`, float32, from gradients of what segments of ids read."""
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, of which a step touches single rows."
        )

    def step_all(
        self, params: PyTree, slots: PyTree, gradients: PyTree, table: TableSpec, step: Step
    ) -> State:
        """One optimizer step of all `params` with their gradients."""
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, of which a step touches single rows."
        )

    # Tables by name; `params` and `slots` are those of all shards

    def rows(
        self, params: PyTree, slots: PyTree, table: TableSpec, num_shards: int
    ) -> dict[str, PyTree]:
        """All rows of a table, `values`, and `slot_<name>` of what `slots` there are, in the order of ids.

        Where ids are keys: in ascending order of `keys`, with what else belongs to these.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, which has no rows to be taken out."
        )

    def optimizer_state(
        self, params: PyTree, slots: PyTree, table: TableSpec, num_shards: int
    ) -> PyTree:
        """The slots of all rows of a table, in the named tuple of its rule."""
        rows = self.rows(params, slots, table, num_shards)
        own = tuple(jnp.asarray(array) for name, array in rows.items() if name.startswith("slot_"))
        return table.optimizer.pack_slots(own)

    def checked_rows(self, values: PyTree, table: TableSpec, step: Int[Array, ""]) -> PyTree:
        """Rows that a user gives for a table as `with_rows` takes them. Raises: ValueError: they do not fit it."""
        del table, step
        return values

    def with_rows(
        self, params: PyTree, slots: PyTree, rows: PyTree, table: TableSpec, num_shards: int
    ) -> State:
        """`params` and slots with rows of a table written, which `checked_rows` or `rows` returned."""
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, which cannot take any rows; replace what state.tables holds."
        )

    def with_tables(
        self,
        params: PyTree,
        slots: PyTree,
        rows: Mapping[str, PyTree],
        table: TableSpec,
        num_shards: int,
        new_slots: Mapping[str, PyTree],
    ) -> State:
        """`params` and slots with rows of some of `tables_of` written, by name; see `with_rows`.

        `new_slots` replace the slots of some tables, in the form of `optimizer_state`. Where `rows_on_host`, `rows`
        have them instead.
        """
        parts = self.unstack(params, slots, table, num_shards)
        for number, own in enumerate(self.tables_of(table)):
            if own.name in rows:
                parts[number] = self.with_rows(*parts[number], rows[own.name], own, num_shards)
            if own.name in new_slots:
                own_params, _ = parts[number]
                parts[number] = own_params, new_slots[own.name]
        return self.stack(parts, params, num_shards)

    def check_params(self, params: PyTree, table: TableSpec) -> None:
        """Raises: ValueError: parts of `params` do not belong together."""
        del params, table

    def check_step(self, before: PyTree, after: PyTree, table: TableSpec) -> None:
        """Raises: RuntimeError: between two states of a step outside `jit`, something was lost that must not be."""
        del before, after, table

    def counts(self, params: PyTree, num_shards: int) -> dict[str, np.ndarray]:
        """Counters of every shard, on the host; empty for storages that count nothing."""
        del params, num_shards
        return {}


def on_host(array: PyTree) -> np.ndarray:
    """A global array as one of numpy, in every process."""
    if is_traced(array):
        raise RuntimeError("rows by key, and counts, come to the host; read them outside of jit.")
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


MOST_EMPTY = 1 / 16
"""Largest share of rows that may stay empty where tables of unequal size share storage."""


def of_near_sizes(
    tables: Sequence[TableSpec], *, most_rows: int, num_waiting: int = 0
) -> list[list[TableSpec]]:
    """Tables in few groups, which leave few rows empty where each of a group takes the place of the largest.

    Neighbours in size join, those first that cost the fewest rows. That is the fewest groups there can be, or one or
    two more.

    Args:
      tables: the tables.
      most_rows: place for so many in a group, or for one table.
      num_waiting: keys that may wait for a row in each table; there is place for `most_rows` in a group, too.
    """
    size = operator.attrgetter("vocabulary_size")
    groups = [list(own) for _, own in itertools.groupby(sorted(tables, key=size), key=size)]
    room = MOST_EMPTY * sum(map(size, tables))
    while len(groups) > 1:
        costs = [
            len(own) * (size(larger[-1]) - size(own[-1]))
            for own, larger in itertools.pairwise(groups)
        ]
        if (cost := min(costs)) > room:
            break
        room, place = room - cost, costs.index(cost)
        groups[place : place + 2] = [groups[place] + groups[place + 1]]
    found: list[list[TableSpec]] = []
    for group in groups:
        most_tables = max(most_rows // max(size(group[-1]), num_waiting), 1)
        own = [table for table in tables if table in group]
        found += [own[first : first + most_tables] for first in range(0, len(own), most_tables)]
    return found


def parts(trees: tuple[PyTree, ...], sizes: Sequence[Sequence[int]]) -> list[tuple[PyTree, ...]]:
    """Trees of single tables, cut out of trees whose arrays hold the rows of several tables one behind the other.

    Args:
      trees: of arrays, or of shapes.
      sizes: of each table, its rows in the arrays of each tree.
    """

    def cut(leaf: PyTree, first: int, size: int) -> PyTree:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(size, *leaf.shape[1:]))
        return leaf[first : first + size]

    found, firsts = [], [0] * len(trees)
    for own in sizes:
        places = zip(trees, firsts, own, strict=True)
        found.append(
            tuple(
                jax.tree.map(lambda leaf, at=(a, n): cut(leaf, *at), tree) for tree, a, n in places
            )
        )
        firsts = [first + size for first, size in zip(firsts, own, strict=True)]
    return found
