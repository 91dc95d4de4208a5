"""Base class of storages, and functions for tables that share a storage."""

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

from rsembed.arrays import is_traced
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, Rounding, Step
from rsembed.keys import Keys, checked_keys, owners
from rsembed.specs import TableSpec

ReadAhead: TypeAlias = tuple[Int[Array, " nnz"], Int[Array, ""], Int[Array, " nnz"] | None]
"""Data about the optimizer step that follows a lookup, as `(occurrences, step number, arrival)`.

`occurrences` has one number for each key of the lookup: how many ids of the batch the key
represents. `arrival` has one number for each key of the lookup, which defines the order of the
keys. In the step, `find` gives rows to new keys in ascending order of their numbers in `arrival`.
If `arrival` is None, `find` gives rows to new keys in the order of the lookup."""
Params: TypeAlias = PyTree
"""Parameters of a storage: one array, or a pytree of arrays."""
SlotTree: TypeAlias = PyTree
"""Slots (optimizer state) of a storage's parameters: a tuple of arrays, or a pytree of arrays."""
State: TypeAlias = tuple[Params, SlotTree]
"""Parameters and slots of a storage."""
Found: TypeAlias = tuple[Params, SlotTree, Int[Array, " nnz"]]
"""Result of `find`: parameters, slots, and the row of each key (`NO_ROW` if it has no row)."""
Vectors: TypeAlias = tuple[Float[Array, "nnz dim"], Int[Array, ""]]
"""Result of `read`: the vector of each key, and the number of distinct keys without a row."""
TableRows: TypeAlias = PyTree
"""All rows of one table, as users get and pass them: an array, or a dictionary of arrays.

If a storage cannot export rows, the parameters of the storage take the place of the rows."""
ByTable: TypeAlias = Mapping[str, PyTree]
"""Mapping from the name of a table to an array or pytree of the table."""
Pool: TypeAlias = Callable[[Array, Int[Array, " nnz"]], PyTree]
"""Function `(vectors, index) -> pooled output`.

The vector of key `i` is `vectors[index[i]]`, or zeros if `index[i]` is `NO_ROW`."""


class Storage(abc.ABC):
    """Stores the rows of a table that one device owns.

    A storage decides the structure of `params` and `slots`, which are pytrees of arrays. The
    methods that compute with `params` are pure and may be traced. If a table is split over a mesh,
    every leaf of `params` and `slots` is the concatenation of its shards. A storage knows nothing
    about the mesh, about bags or about other tables. The methods of a storage receive ids as
    `Keys`, in which the same id may occur several times. A storage is frozen and hashable, because
    it is a part of a `TableSpec`.

    In all methods, argument `table` is the spec of the table, or of one of the tables that share
    the storage. Argument `step` of `checked_rows` is the number of optimizer steps so far. In all
    other methods, argument `step` is the current optimizer step, with its number, rule and
    hyperparameters.
    """

    placements: ClassVar[tuple[str, ...]] = ("replicated",)
    # Name of the integer dtype of keys, or None if ids are row numbers. In keyed storages,
    # `key_dtype` is a dataclass field, so users choose the dtype.
    key_dtype: Any = None

    rows_on_host: ClassVar[bool] = False
    """True if `rows` and `with_rows` run on the host, outside `jit`.

    If `rows_on_host` is True, a checkpoint contains the rows of each table instead of `params`."""

    @property
    def sums_gradients(self) -> bool:
        """True if an optimizer step updates all `params`, not only the rows that a batch reads.

        If `sums_gradients` is True, each device has a full copy of `params`. The engine calls
        `gradients` on each device, and passes the sum of the results over all devices to
        `step_all`. Every id must have a row, and `find` must not change `params`.
        """
        return False

    @property
    def takes_keys(self) -> bool:
        """True if ids are 64-bit keys, False if they are row numbers below `vocabulary_size`."""
        return self.key_dtype is not None

    @property
    def makes_room(self) -> bool:
        """True if `find` may evict a key, and give the row of this key to a new key.

        Call `hold` first for keys that `find` must not evict.
        """
        return False

    @property
    def in_files(self) -> str | None:
        """Description of the storage in checkpoints.

        A table can load a checkpoint without being resized only if the description in the
        checkpoint equals the description of the table's storage. A storage has no description
        (None) if its checkpoints contain one row for every id, like the checkpoints of a table
        without `storage`.
        """
        return repr(self)

    def resizable(self, table: TableSpec, saved: str) -> bool:
        """Whether arrays in a checkpoint file may have a longer or shorter leading axis.

        Args:
          table: the table that loads the file.
          saved: description of the storage that wrote the file, from its method `in_files`.
        """
        del table, saved
        return False

    def resolved(self, table: TableSpec) -> Storage:
        """Copy of the storage with values for all options that depend on `table`.

        If `resolved` returns equal copies for two storages, each storage can use states of the
        other storage.
        """
        del table
        return self

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Hashable key that is equal for tables that may share one storage.

        None if `table` cannot share a storage with other tables. The sharing key need not contain
        the dtype and the optimizer, because the caller groups only tables with equal dtype and
        optimizer.
        """
        del table
        return None

    def sharing_groups(self, tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
        """Splits tables with equal `sharing_key` into groups.

        The tables of a group share one storage.
        """
        return [list(tables)]

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All tables that share the storage, in the order in which the arrays contain them.

        One of the returned tables is `table` itself.
        """
        return (table,)

    def sharing(self, tables: Sequence[TableSpec]) -> Storage:
        """Creates a storage that several tables share.

        Args:
          tables: specs of the tables, which have equal `sharing_key`.

        Raises: NotImplementedError: tables cannot share this kind of storage.
        """
        raise NotImplementedError(
            f"{self} keeps one table, not {[table.name for table in tables]}."
        )

    def part_sizes(self, table: TableSpec) -> tuple[int, ...] | None:
        """Number of rows of `table` in each element of the tuple `params`.

        The function `parts` uses the part sizes to cut arrays that several tables share. None for a
        storage that does not use `parts`.
        """
        del table
        return None

    def unstack(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> list[State]:
        """Cuts the arrays of all shards into `params` and slots of each table in `tables_of`.

        If there are several tables, call `unstack` outside `jit`.
        """
        del table, num_shards
        return [(params, slots)]

    def stack(self, parts: Sequence[State], like: Params, num_shards: int) -> State:
        """Joins `params` and slots of single tables into the arrays of all shards.

        Args:
          parts: result of `unstack`, in which the caller may have changed values.
          like: the `params` that were passed to `unstack`.
          num_shards: number of shards.
        """
        del like, num_shards
        return parts[0]

    @abc.abstractmethod
    def check(self, table: TableSpec) -> None:
        """Checks that the storage supports a table.

        Raises: ValueError or NotImplementedError: the storage does not support the table.
        """

    def num_rows(self, table: TableSpec) -> int:
        """Maximum number of rows of a table, on all devices together."""
        return table.vocabulary_size

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Number of values in all rows of a table, and number of values in all its slots."""
        num_rows = self.num_rows(table)
        row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
        slots = jax.eval_shape(table.optimizer.init_slots, row)
        slot_size = sum(slot.size for slot in slots)
        return num_rows * table.embedding_dim, num_rows * slot_size

    def num_ids(self, table: TableSpec) -> int:
        """Exclusive upper bound of the ids, if the ids are row numbers and not keys."""
        return table.vocabulary_size

    def checked(self, ids: PyTree, table: TableSpec, feature: str) -> Keys:
        """Checks the ids of a batch, and returns them as `Keys`.

        Traced ids that do not fit `key_dtype` become padding.

        Raises: TypeError or ValueError: see `checked_keys`.
        """
        del table
        return checked_keys(ids, self.key_dtype, feature=feature)

    def owners(self, keys: Keys, num_shards: int) -> Int[Array, " nnz"]:
        """Shard that owns the row of each key, or `num_shards` for padding."""
        owner: Int[Array, " nnz"] = owners(keys, num_shards)
        return owner

    def keys_after(self, keys: Keys, gradients: Sequence[Array]) -> Keys:
        """Returns `keys` with a data dependency on the gradients.

        The data dependency makes a compiled step create new rows only after the lookup. Without the
        data dependency, XLA could create new rows before the lookup has read the table, and would
        have to copy the table. An optimization barrier would not prevent XLA from copying the
        table, because XLA removes barriers before it decides which arrays to copy. The data
        dependency is a condition that is never true, because a sum of gradient values cannot equal
        both infinity and minus infinity.
        """
        number = jnp.zeros((), jnp.float32)
        for gradient in gradients:
            number += gradient.reshape(-1)[:1].sum()
        is_never_true = (number == jnp.inf) & (number == -jnp.inf)
        return keys.only(~is_never_true)

    def vector_dtype(self, table: TableSpec) -> DTypeLike:
        """Dtype of the vectors that `read` returns."""
        del table
        return jnp.float32

    def rounding(
        self,
        rounding: Rounding | None,
        shard: Int[Array, ""] | int,
        resident_rows: Int[Array, " places"] | None = None,
    ) -> Rounding | None:
        """Rounding function for the rows of one shard.

        Args:
          rounding: rounding function of the collection, or None for rounding to nearest.
          shard: index of the shard.
          resident_rows: row in each cache slot if the parameters are a device cache, see `Step`.
            None, the default, if the parameters contain all rows of the shard.
        """
        del shard, resident_rows
        return rounding

    @abc.abstractmethod
    def init(
        self,
        key: PRNGKeyArray,
        table: TableSpec,
        shard: Int[Array, ""],
        num_shards: int,
    ) -> State:
        """Initial `params` and slots of one shard.

        Args:
          key: PRNG key of the model.
          table: spec of the table.
          shard: index of the shard.
          num_shards: number of shards.
        """

    @abc.abstractmethod
    def read(
        self,
        params: Params,
        keys: Keys,
        table: TableSpec,
        ahead: ReadAhead | None = None,
    ) -> Vectors:
        """Vectors of the keys, and the number of distinct keys without a row.

        Args:
          params: parameters of one shard.
          keys: keys, which may include padding. The vector of padding, and of a key without a row,
            is zeros.
          table: spec of the table.
          ahead: data about the optimizer step that follows the lookup, see `ReadAhead`. If a new
            key will get a row in the optimizer step, the returned vector is the initial value of
            the row. With `ahead`, a key without a row is counted only if the step tries to assign a
            row to the key. None, the default, means that no step follows the lookup.
        """

    def pooled(
        self,
        params: Params,
        keys: Keys,
        call: Call,
        table: TableSpec,
        pool: Pool,
        ahead: ReadAhead | None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """Pooled vectors of the keys, and the number of distinct keys without a row.

        `Storage.pooled` calls `read`, and passes the vectors to `pool`. A subclass of `Storage` can
        override `pooled`, so that `pool` reads the rows directly from the table.

        Args:
          params: parameters of one shard.
          keys: keys, which may include padding.
          call: kernel call of the lookup. The ids in `call` are row numbers, so only storages
            without keys can use `call`.
          table: spec of the table.
          pool: function that pools the vectors of each bag, see `Pool`.
          ahead: data about the optimizer step that follows the lookup, or None, see `read`.
        """
        del call
        vectors, num_unknown = self.read(params, keys, table, ahead)
        return pool(vectors, positions_of(keys)), num_unknown

    @abc.abstractmethod
    def find(
        self,
        params: Params,
        slots: SlotTree,
        keys: Keys,
        occurrences: Array,
        table: TableSpec,
        step: Step,
    ) -> Found:
        """Assigns rows to new keys, and returns the row of each key for an optimizer step.

        Args:
          params: parameters of one shard.
          slots: slots of the shard with the parameters `params`.
          keys: keys, which may repeat and may include padding.
          occurrences: for each entry of `keys`, how many ids of the batch the entry represents.
          table: spec of the table.
          step: the optimizer step that uses the rows.

        Returns: new parameters, new slots, and the row of each key. The row of padding, and of a
          key that got no row, is `NO_ROW`.
        """

    def hold(self, params: Params, keys: Keys, step: Step) -> Params:
        """Protects keys from eviction until the end of the step, and returns the new `params`.

        Args:
          params: parameters of one shard.
          keys: keys to protect, which may include padding. A protected key that waits for admission
            is not removed from the map of waiting keys.
          step: the current optimizer step.
        """
        del keys, step
        return params

    @abc.abstractmethod
    def step(
        self,
        params: Params,
        slots: SlotTree,
        gradients: CallGradients,
        table: TableSpec,
        step: Step,
    ) -> State:
        """Updates the rows that a kernel call read, and returns the new `params` and slots.

        Args:
          params: parameters of one shard, as `find` returned them.
          slots: slots of the same shard, as `find` returned them.
          gradients: a kernel call, and the gradients of the call's outputs. The ids in the kernel
            call are the rows that `find` returned.
          table: spec of the table.
          step: number, rule and hyperparameters of the optimizer step.
        """

    def step_distinct(
        self,
        params: Params,
        slots: SlotTree,
        rows: Array,
        values: Array,
        table: TableSpec,
        step: Step,
    ) -> State:
        """Updates distinct rows with their gradients, and returns the new `params` and slots.

        Args:
          params: parameters of one shard, as `find` returned them.
          slots: slots of the same shard, as `find` returned them.
          rows: distinct rows. `NO_ROW` is skipped.
          values: gradient of each row.
          table: spec of the table.
          step: number, rule and hyperparameters of the optimizer step.
        """
        gradients = CallGradients.of_rows(rows, values)
        return self.step(params, slots, gradients, table, step)

    def gradients(self, params: Params, gradients: CallGradients, table: TableSpec) -> PyTree:
        """Float32 gradients of all `params`, for storages with `sums_gradients`.

        Args:
          params: parameters of one device.
          gradients: a kernel call, and the gradients of the call's outputs.
          table: spec of the table.

        Raises: NotImplementedError: `sums_gradients` is False, because a step of this storage
          updates only the rows that a batch reads.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, and a step of this storage updates single rows."
        )

    def step_all(
        self,
        params: Params,
        slots: SlotTree,
        gradients: PyTree,
        table: TableSpec,
        step: Step,
    ) -> State:
        """Updates all `params` of a storage with `sums_gradients`, and returns params and slots.

        Args:
          params: parameters of one device.
          slots: slots of the same device.
          gradients: results of `gradients`, summed over devices.
          table: spec of the table.
          step: number, rule and hyperparameters of the optimizer step.

        Raises: NotImplementedError: `sums_gradients` is False, because a step of this storage
          updates only the rows that a batch reads.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, and a step of this storage updates single rows."
        )

    # The methods from `rows` to `with_tables` read and write whole tables, so their arguments
    # `params` and `slots` contain the rows of all shards.

    def rows(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> dict[str, PyTree]:
        """All rows of a table, in a dictionary of arrays.

        The dictionary contains the array `values` with the vectors of the rows, and an array
        `slot_<name>` for each slot of the optimizer. The rows of a table without keys are in the
        order of the ids. The rows of a keyed table are in ascending order of the keys. For a keyed
        table, the dictionary contains the array `keys`, and can contain arrays such as `last_step`,
        the index of the step that last used each key.

        Raises: NotImplementedError: the storage cannot export rows.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, which has no rows to be taken out."
        )

    def optimizer_state(
        self,
        params: Params,
        slots: SlotTree,
        table: TableSpec,
        num_shards: int,
    ) -> SlotTree:
        """Slots of all rows of a table, in the named tuple of its optimizer."""
        rows = self.rows(params, slots, table, num_shards)
        slots_of_rows = []
        for name, array in rows.items():
            if name.startswith("slot_"):
                slots_of_rows.append(jnp.asarray(array))
        return table.optimizer.pack_slots(tuple(slots_of_rows))

    def checked_rows(self, values: TableRows, table: TableSpec, step: Int[Array, ""]) -> TableRows:
        """Checks rows that a user passes for a table, and converts them for `with_rows`.

        Args:
          values: rows that the user passes: an array, or a dictionary of arrays.
          table: spec of the table.
          step: number of optimizer steps so far.

        Raises: ValueError: an array has a wrong name, shape or dtype for the table.
        """
        del table, step
        return values

    def with_rows(
        self,
        params: Params,
        slots: SlotTree,
        rows: TableRows,
        table: TableSpec,
        num_shards: int,
    ) -> State:
        """Writes rows to a table, and returns the new `params` and slots.

        Args:
          params: parameters of all shards.
          slots: slots of all shards.
          rows: rows to write, a result of the method `checked_rows` or `rows`.
          table: spec of the table.
          num_shards: number of shards.

        Raises: NotImplementedError: the storage cannot write rows.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, which cannot take any rows; replace what state.tables holds."
        )

    def with_tables(
        self,
        params: Params,
        slots: SlotTree,
        rows: ByTable,
        table: TableSpec,
        num_shards: int,
        new_slots: ByTable,
    ) -> State:
        """Replaces rows or slots of some tables, and returns the new `params` and slots.

        Args:
          params: parameters of all shards.
          slots: slots of all shards.
          rows: mapping from table name to the new rows of the table, see `with_rows`.
          table: spec of any table of the storage.
          num_shards: number of shards.
          new_slots: mapping from table name to the new slots of the table, as `optimizer_state`
            returns them. If `rows_on_host` is True, `new_slots` is empty, because `rows` contains
            the slots.
        """
        parts = self.unstack(params, slots, table, num_shards)
        for number, member in enumerate(self.tables_of(table)):
            name = member.name
            if name in rows:
                parts[number] = self.with_rows(*parts[number], rows[name], member, num_shards)
            if name in new_slots:
                params_of_member, _ = parts[number]
                parts[number] = params_of_member, new_slots[name]
        return self.stack(parts, params, num_shards)

    def check_params(self, params: Params, table: TableSpec) -> None:
        """Checks that the arrays in `params` come from one state.

        Raises: ValueError: the arrays do not fit together, for example because they are averages of
          two states.
        """
        del params, table

    def check_step(self, before: Params, after: Params, table: TableSpec) -> None:
        """Outside `jit`, checks that an optimizer step found room for all new keys.

        Args:
          before: parameters before the step.
          after: parameters after the step.
          table: spec of any table of the storage.

        Raises: RuntimeError: no row was free for a new key of the step.
        """
        del before, after, table

    def counts(self, params: Params, num_shards: int) -> dict[str, np.ndarray]:
        """Dictionary from counter name to the counts of all shards, in host memory.

        The dictionary of a storage without counters is empty.
        """
        del params, num_shards
        return {}


def positions_of(keys: Keys) -> Int[Array, " nnz"]:
    """Position of each key in `keys`, and `NO_ROW` for padding."""
    positions = jnp.arange(keys.shape[0], dtype=jnp.int32)
    return jnp.where(keys.is_key, positions, NO_ROW)


def on_host(array: PyTree) -> np.ndarray:
    """A global array as a NumPy array with all values, in every process.

    Raises: RuntimeError: inside `jit`.
    """
    if is_traced(array):
        raise RuntimeError("rows by key, and counts, come to the host; read them outside of jit.")
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


MOST_EMPTY = 1 / 16
"""Largest padding for tables of unequal size that share a storage, as a fraction of all rows."""


def of_near_sizes(
    tables: Sequence[TableSpec],
    *,
    most_rows: int,
    num_waiting: int = 0,
) -> list[list[TableSpec]]:
    """Splits tables into groups of similar size, because a group is padded to its largest table.

    `of_near_sizes` starts with one group for each table size, and repeatedly merges two groups with
    neighbouring sizes. Each merge takes the two groups that need the least padding. The merging
    stops before the total padding exceeds `MOST_EMPTY`. Greedy merging does not always find the
    smallest possible number of groups.

    Args:
      tables: tables that may share one storage.
      most_rows: maximum number of rows of a group, padding included. A table with more than
        `most_rows` rows gets a group of its own.
      num_waiting: maximum number of keys that wait for admission in each table, 0 by default. In a
        group of several tables, `num_waiting` times the number of tables is at most `most_rows`.
    """
    size = operator.attrgetter("vocabulary_size")
    groups = []
    for _, same_size in itertools.groupby(sorted(tables, key=size), key=size):
        groups.append(list(same_size))
    room = MOST_EMPTY * sum(map(size, tables))
    while len(groups) > 1:
        costs = []
        for group, larger in itertools.pairwise(groups):
            padding_of_table = size(larger[-1]) - size(group[-1])
            costs.append(len(group) * padding_of_table)
        cost = min(costs)
        if cost > room:
            break
        room -= cost
        cheapest = costs.index(cost)
        next_group = groups.pop(cheapest + 1)
        groups[cheapest] += next_group
    parts_of_groups: list[list[TableSpec]] = []
    for group in groups:
        largest_size = max(size(group[-1]), num_waiting)
        most_tables = max(most_rows // largest_size, 1)
        in_order = [table for table in tables if table in group]
        for first in range(0, len(in_order), most_tables):
            parts_of_groups.append(in_order[first : first + most_tables])
    return parts_of_groups


def parts(trees: tuple[PyTree, ...], sizes: Sequence[Sequence[int]]) -> list[tuple[PyTree, ...]]:
    """Cuts arrays that contain several tables into separate arrays for each table.

    Args:
      trees: pytrees of arrays, or of `jax.ShapeDtypeStruct`s. Each array in `trees` is the
        concatenation of the rows of all tables.
      sizes: number of rows of each table in each pytree. `sizes[i][j]` is the number of rows of
        table `i` in each array of the pytree `trees[j]`.
    """
    parts_of_tables = []
    firsts = [0] * len(trees)
    for sizes_of_table in sizes:
        parts_of_table = []
        for number, (tree, size) in enumerate(zip(trees, sizes_of_table, strict=True)):
            parts_of_table.append(_cut(tree, firsts[number], size))
            firsts[number] += size
        parts_of_tables.append(tuple(parts_of_table))
    return parts_of_tables


def _cut(tree: PyTree, first: int, size: int) -> PyTree:
    """Copy of `tree` with only the rows `first : first + size` of each leaf."""

    def cut(leaf: PyTree) -> PyTree:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(size, *leaf.shape[1:]))
        return leaf[first : first + size]

    return jax.tree.map(cut, tree)
