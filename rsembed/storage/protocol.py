"""Protocol between the engine and the storage of a table, and groups of tables that share one."""

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
"""Facts about the step that follows a lookup: `(occurrences, step number, arrival)`.

`occurrences` counts each key in the batch. New keys get rows in `find` in ascending order of
`arrival`. If `arrival` is None, they get rows in the order of the keys."""
Params: TypeAlias = PyTree
"""Parameters of a storage: one array, or a pytree of arrays."""
SlotTree: TypeAlias = PyTree
"""Optimizer state of a storage's parameters: a tuple of arrays, or a pytree of arrays."""
State: TypeAlias = tuple[Params, SlotTree]
"""Parameters and slots of a storage."""
Found: TypeAlias = tuple[Params, SlotTree, Int[Array, " nnz"]]
"""Parameters, slots, and the row of each key. A key without a row has `NO_ROW`."""
Vectors: TypeAlias = tuple[Float[Array, "nnz dim"], Int[Array, ""]]
"""Vector of each key, and the number of distinct keys without a row."""
TableRows: TypeAlias = PyTree
"""Rows of one table for users: an array, a dictionary of arrays, or the storage's parameters."""
ByTable: TypeAlias = Mapping[str, PyTree]
"""One array or pytree for each table, by the table's name."""
Pool: TypeAlias = Callable[[Array, Int[Array, " nnz"]], PyTree]
"""Function `(vectors, index of each key's vector) -> pooled output`."""


class Storage(abc.ABC):
    """Stores the rows of a table that one device owns.

    `params` and `slots` are any pytrees, and all functions of them are pure and traced. If a table
    is split over a mesh, every leaf has a leading axis along which the shards are concatenated. A
    storage does not depend on the mesh, on bags or on other tables. Ids arrive as `Keys`, which may
    repeat. A storage is frozen and hashable, because it is part of a spec.

    Two arguments have the same meaning in all methods. `table` is the spec of the table. `step` is
    the current optimizer step: its number, rule and hyperparameters.
    """

    placements: ClassVar[tuple[str, ...]] = ("replicated",)
    # Integer dtype of the keys. None: ids are row numbers. Keyed storages override `key_dtype` with
    # a field.
    key_dtype: Any = None

    rows_on_host: ClassVar[bool] = False
    """Whether `rows` and `with_rows` work on the host, outside `jit`.

    If True, a checkpoint has the rows of each table instead of `params`."""

    @property
    def sums_gradients(self) -> bool:
        """True if a step updates all `params`.

        If True, devices with full copies compute the `gradients` of their samples, and call
        `step_all` with the sum over devices. Every id has a row, and `find` changes nothing.
        """
        return False

    @property
    def takes_keys(self) -> bool:
        """True if ids are 64-bit keys, False if they are row numbers below `vocabulary_size`."""
        return self.key_dtype is not None

    @property
    def makes_room(self) -> bool:
        """True if `find` may evict a key to give its row to a new key. `hold` protects keys."""
        return False

    @property
    def in_files(self) -> str | None:
        """Description that must be equal in a file and in the table that loads it.

        None: the file has a row for every id.
        """
        return repr(self)

    def resizable(self, table: TableSpec, saved: str) -> tuple[tuple[str, ...], ...] | None:
        """Path prefixes of the arrays that may have a different length in a file than in `table`.

        Only the leading axis of these arrays may differ.

        Args:
          table: the table that loads the file.
          saved: `in_files` of the storage that wrote the file.

        Returns: the prefixes, or None if arrays of a different size cannot be loaded into `table`.
        """
        del table, saved
        return None

    def resolved(self, table: TableSpec) -> Storage:
        """The storage with all options filled in that depend on `table`.

        States of storages that resolve to equal ones have the same meaning.
        """
        del table
        return self

    def sharing_key(self, table: TableSpec) -> Hashable:
        """Key that is equal for tables that may share one storage.

        None: `table` shares its storage with no other table.

        The key need not contain dim, dtype and rule, because only tables that agree in these are
        compared.
        """
        del table
        return None

    def sharing_groups(self, tables: Sequence[TableSpec]) -> list[list[TableSpec]]:
        """Splits tables with equal `sharing_key` into groups.

        The tables of a group share one storage.
        """
        return [list(tables)]

    def tables_of(self, table: TableSpec) -> tuple[TableSpec, ...]:
        """All tables that share the storage, `table` included, in their order in every leaf."""
        return (table,)

    def sharing(self, tables: Sequence[TableSpec]) -> Storage:
        """One storage for several tables of equal `sharing_key`.

        Raises: NotImplementedError: this kind of storage has one table only.
        """
        raise NotImplementedError(
            f"{self} keeps one table, not {[table.name for table in tables]}."
        )

    def part_sizes(self, table: TableSpec) -> tuple[int, ...] | None:
        """Number of rows of `table` in each part of `params`, if tables are concatenated there.

        None: `params` is not concatenated from tables.
        """
        del table
        return None

    def unstack(
        self, params: Params, slots: SlotTree, table: TableSpec, num_shards: int
    ) -> list[State]:
        """`params` and slots of each table of `tables_of`, from the arrays of all shards.

        For several tables, call `unstack` outside `jit`.
        """
        del table, num_shards
        return [(params, slots)]

    def stack(self, parts: Sequence[State], like: Params, num_shards: int) -> State:
        """Arrays of all shards, from the `params` and slots of each table; inverse of `unstack`.

        `like` is the `params` that `unstack` got.
        """
        del like, num_shards
        return parts[0]

    @abc.abstractmethod
    def check(self, table: TableSpec) -> None:
        """Raises: ValueError or NotImplementedError: this storage does not support the table."""

    def num_rows(self, table: TableSpec) -> int:
        """Maximum number of rows on all devices together."""
        return table.vocabulary_size

    def num_values(self, table: TableSpec) -> tuple[int, int]:
        """Number of parameters, and number of optimizer state values, over all devices."""
        row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
        slots = sum(slot.size for slot in jax.eval_shape(table.optimizer.init_slots, row))
        return self.num_rows(table) * table.embedding_dim, self.num_rows(table) * slots

    def num_ids(self, table: TableSpec) -> int:
        """Exclusive upper bound of ids. The bound applies if ids are row numbers, not keys."""
        return table.vocabulary_size

    def checked(self, ids: PyTree, table: TableSpec, feature: str) -> Keys:
        """Keys from the ids of a batch. Traced ids that do not fit `key_dtype` become padding.

        Raises: TypeError or ValueError: see `checked_keys`.
        """
        del table
        return checked_keys(ids, self.key_dtype, feature=feature)

    def owners(self, keys: Keys, num_shards: int) -> Int[Array, " nnz"]:
        """The shard that owns the row of each key; `num_shards` for padding."""
        owner: Int[Array, " nnz"] = owners(keys, num_shards)
        return owner

    def keys_after(self, keys: Keys, gradients: Sequence[Array]) -> Keys:
        """`keys` that depend on the gradients, so that a compiled step creates new rows last.

        Without the dependence, XLA could create the rows in parallel with the lookup, and would
        copy the table for that. XLA removes barriers before it decides about copies, so the keys
        depend on a condition that never holds: one number equals both infinities.
        """
        number = jnp.zeros((), jnp.float32)
        for gradient in gradients:
            number += gradient.reshape(-1)[:1].sum()
        return keys.only(~((number == jnp.inf) & (number == -jnp.inf)))

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
        """Rounding of one shard's rows, from the rounding of the collection.

        Args:
          rounding: rounding of the collection. None: round to nearest.
          shard: index of the shard.
          resident_rows: see `Step`.
        """
        del shard, resident_rows
        return rounding

    @abc.abstractmethod
    def init(
        self, key: PRNGKeyArray, table: TableSpec, shard: Int[Array, ""], num_shards: int
    ) -> State:
        """Initial `params` and slots of one shard. `key` is the key of the model."""

    @abc.abstractmethod
    def read(
        self, params: Params, keys: Keys, table: TableSpec, ahead: ReadAhead | None = None
    ) -> Vectors:
        """Vectors of the keys, and the number of distinct keys without a row.

        Args:
          params: parameters of one shard.
          keys: keys and padding. Padding and keys without a row read zeros.
          table: spec of the table.
          ahead: the step that follows. A key without a row then reads the initial value of the row
            that `find` will give it, and only keys that `find` will try to give a row are counted.
            None, the default: no step follows.
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
        """Pooled vectors of the keys, and the number of distinct keys without a row, as in `read`.

        A storage can override this to pool from its rows directly, without an array of the vectors.

        Args:
          params: parameters of one shard.
          keys: keys and padding.
          call: kernel call that reads the same ids, if ids are row numbers.
          table: spec of the table.
          pool: function that pools vectors.
          ahead: the step that follows, as in `read`. None: no step follows.
        """
        del call
        vectors, num_unknown = self.read(params, keys, table, ahead)
        index_of_vector = jnp.arange(keys.shape[0], dtype=jnp.int32)
        return pool(vectors, jnp.where(keys.is_key, index_of_vector, NO_ROW)), num_unknown

    @abc.abstractmethod
    def vectors(
        self, params: Params, rows: Int[Array, " nnz"], table: TableSpec
    ) -> Float[Array, "nnz dim"]:
        """Vectors of the rows that `find` returned; zeros for `NO_ROW`."""

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
        """Parameters, slots and the row of each key, for the step that follows.

        New keys get rows first.

        Args:
          params: parameters of one shard.
          slots: slots of the same shard.
          keys: keys and padding, which may repeat.
          occurrences: number of times that each key occurred in the batch.
          table: spec of the table.
          step: the step that follows.

        Returns: updated parameters, updated slots, and the row of each key. Padding, and keys that
          got no row, have `NO_ROW`.
        """

    def hold(self, params: Params, keys: Keys, step: Step) -> Params:
        """`params` that protect the rows and counts of these keys until the end of the step."""
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
        """`params` and slots after one optimizer step of the rows that a call read.

        Args:
          params: parameters of one shard, from `find`.
          slots: slots of the same shard, from `find`.
          gradients: gradients of the outputs of the call. The ids of the call are the rows from
            `find`.
          table: spec of the table.
          step: rule, hyperparameters and number of the step.
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
        """`params` and slots after one optimizer step of distinct rows, with gradients `values`."""
        return self.step(params, slots, CallGradients.of_rows(rows, values), table, step)

    def gradients(self, params: Params, gradients: CallGradients, table: TableSpec) -> PyTree:
        """Gradient of all `params`, float32, from output gradients; only if `sums_gradients`.

        Raises: NotImplementedError: a step of this storage updates single rows.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, and a step of this storage updates single rows."
        )

    def step_all(
        self, params: Params, slots: SlotTree, gradients: PyTree, table: TableSpec, step: Step
    ) -> State:
        """`params` and slots after one optimizer step of all `params`; only if `sums_gradients`.

        Raises: NotImplementedError: a step of this storage updates single rows.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, and a step of this storage updates single rows."
        )

    # Whole tables by name. From here on, `params` and `slots` have the rows of all shards.

    def rows(
        self, params: Params, slots: SlotTree, table: TableSpec, num_shards: int
    ) -> dict[str, PyTree]:
        """All rows of a table as `values`, and each of its slots as `slot_<name>`, in id order.

        A keyed table is in ascending order of its keys. The dictionary then also has `keys` and
        other arrays about the keys, such as `last_step`.

        Raises: NotImplementedError: the storage has no rows that can be exported.
        """
        raise NotImplementedError(
            f"table {table.name!r} is kept as {self}, which has no rows to be taken out."
        )

    def optimizer_state(
        self, params: Params, slots: SlotTree, table: TableSpec, num_shards: int
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
          values: rows from the user.
          table: spec of the table.
          step: number of steps that the state has made.

        Raises: ValueError: the rows have the wrong shape, dtype or names for the table.
        """
        del table, step
        return values

    def with_rows(
        self, params: Params, slots: SlotTree, rows: TableRows, table: TableSpec, num_shards: int
    ) -> State:
        """Writes `rows` to a table, and returns the new `params` and slots.

        Args:
          params: parameters of all shards.
          slots: slots of all shards.
          rows: result of `checked_rows` or `rows`.
          table: spec of the table.
          num_shards: number of shards.

        Raises: NotImplementedError: the storage does not support new rows.
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
          rows: new rows by table name, as in `with_rows`.
          table: spec of any table of the storage.
          num_shards: number of shards.
          new_slots: new slots by table name, each as `optimizer_state` returns them. The mapping is
            empty if `rows_on_host`, because `rows` then contain the slots.
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
        """Raises: ValueError: parts of `params` do not match, such as an average of two states."""
        del params, table

    def check_step(self, before: Params, after: Params, table: TableSpec) -> None:
        """Checks a step outside `jit`, from the parameters before and after it.

        Raises: RuntimeError: the step failed to store new keys.
        """
        del before, after, table

    def counts(self, params: Params, num_shards: int) -> dict[str, np.ndarray]:
        """Counters of each shard, on the host.

        The dictionary is empty for storages without counters.
        """
        del params, num_shards
        return {}


def on_host(array: PyTree) -> np.ndarray:
    """A global array as a NumPy array, in every process.

    Raises: RuntimeError: inside `jit`.
    """
    if is_traced(array):
        raise RuntimeError("rows by key, and counts, come to the host; read them outside of jit.")
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


MOST_EMPTY = 1 / 16
"""Largest padding of tables of unequal size that share storage, as a fraction of all rows."""


def of_near_sizes(
    tables: Sequence[TableSpec], *, most_rows: int, num_waiting: int = 0
) -> list[list[TableSpec]]:
    """Groups of tables of similar size. Each table is padded to the largest of its group.

    Groups of neighbouring sizes are merged, cheapest first, as long as the padding of all tables
    stays within `MOST_EMPTY`. The number of groups is the smallest possible, or one or two more.

    Args:
      tables: tables that may share one storage.
      most_rows: maximum number of rows of a group, padding included. A single table may have more
        rows than that.
      num_waiting: number of keys that may wait for admission in each table, 0 by default. A group
        also has room for at most `most_rows` waiting keys.
    """
    size = operator.attrgetter("vocabulary_size")
    groups = []
    for _, same_size in itertools.groupby(sorted(tables, key=size), key=size):
        groups.append(list(same_size))
    room = MOST_EMPTY * sum(map(size, tables))
    while len(groups) > 1:
        costs = []
        for group, larger in itertools.pairwise(groups):
            costs.append(len(group) * (size(larger[-1]) - size(group[-1])))
        cost = min(costs)
        if cost > room:
            break
        room -= cost
        cheapest = costs.index(cost)
        groups[cheapest : cheapest + 2] = [groups[cheapest] + groups[cheapest + 1]]
    parts_of_groups: list[list[TableSpec]] = []
    for group in groups:
        most_tables = max(most_rows // max(size(group[-1]), num_waiting), 1)
        in_order = [table for table in tables if table in group]
        for first in range(0, len(in_order), most_tables):
            parts_of_groups.append(in_order[first : first + most_tables])
    return parts_of_groups


def parts(trees: tuple[PyTree, ...], sizes: Sequence[Sequence[int]]) -> list[tuple[PyTree, ...]]:
    """Trees of single tables, cut out of trees with several concatenated tables.

    Args:
      trees: trees of arrays, or of `jax.ShapeDtypeStruct`s.
      sizes: for each table, its number of rows in the arrays of each tree.
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
    """Rows `first : first + size` of every leaf of a tree."""

    def cut(leaf: PyTree) -> PyTree:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(size, *leaf.shape[1:]))
        return leaf[first : first + size]

    return jax.tree.map(cut, tree)
