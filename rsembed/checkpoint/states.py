"""Arrays of a file, and what a file holds of an `EmbeddingState`: rows of every table in the order of their ids.

A state's `layout` says which row of its arrays belongs to which table and id. Saving reads tables through it, block by
block; loading lays the rows out for the state that is wanted. So no file depends on a mesh or a stacking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rsembed.collection import EmbeddingState
from rsembed.collection.dense_rows import Place
from rsembed.fingerprint import ELSEWHERE, Fingerprint
from rsembed.kernels import api
from rsembed.storage import ROWS_BY_KEY
from rsembed.storage.protocol import parts


class CorruptCheckpointError(ValueError):
    """The files of a checkpoint are missing or are not what was written."""


Blocks = Iterator[tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint: its shape and dtype, and a reader of its numbers, which are still on the disk.

    Attributes:
      shape: of the array.
      dtype: of the array.
      read: reads into rows of an array, given or of its own, and yields those that have arrived, with the first one's
        number. A number alone counts as one row.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[np.ndarray | None], Blocks]

    def blocks(self) -> Blocks:
        """Blocks of rows in order, a few MiB each, with the number of their first row.

        Raises: CorruptCheckpointError: the next ones are not what was written.
        """
        return self.read(None)

    def whole(self) -> np.ndarray:
        """The array in memory of the host.

        Raises: CorruptCheckpointError: it is not what was written.
        """
        array = np.empty(self.shape, self.dtype)
        for _ in self.read(array if self.shape else array.reshape(1)):
            pass
        return array


def sharded(
    shape: tuple[int, ...], dtype: Any, sharding: Any, pieces: Iterable[tuple[np.ndarray, np.ndarray]]
) -> jax.Array:
    """An array on the devices of a sharding (None: JAX's default device), from rows that arrive in pieces.

    The host holds no more of it than its own devices do.

    Args:
      shape: of the whole array, with at least one dimension.
      dtype: of the array.
      sharding: sharding of the result.
      pieces: row numbers, and the rows; rows that never come are zeros.
    """

    def bounds(index: Any) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    everything = (slice(None),) * len(shape)
    indices = [everything] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
    shards = {
        part: np.zeros([stop - start for start, stop in part], dtype) for part in {bounds(index) for index in indices}
    }
    for rows, values in pieces:
        for ((start, stop), *columns), shard in shards.items():
            is_inside = (rows >= start) & (rows < stop)
            part: tuple[PyTree, ...] = (is_inside, *(slice(*bound) for bound in columns))
            shard[rows[is_inside] - start] = values[part]
    if sharding is None:
        return jax.device_put(shards[bounds(everything)])
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[bounds(index)])


@dataclasses.dataclass(frozen=True)
class TableRows:
    """The rows of one table inside the array of its stack, in the order of ids: a leaf of the tree that is written."""

    array: PyTree
    place: Place
    spread: int
    rows_per_shard: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows as an array of their own."""
        return (self.count, *self.array.shape[1:])

    @property
    def dtype(self) -> PyTree:
        """Dtype of the array."""
        return self.array.dtype

    def rows(self, first: int, count: int) -> np.ndarray:
        """Row numbers in the array of `count` neighbouring ids."""
        ids = np.arange(first, first + count)
        return self.place.rows(ids, spread=self.spread, rows_per_shard=self.rows_per_shard)


@dataclasses.dataclass(frozen=True)
class PickedRows:
    """Rows of an array, in the order of their `places` in it: a leaf of the tree that is written, block by block."""

    array: PyTree
    places: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows as an array of their own."""
        return (self.places.size, *self.array.shape[1:])

    @property
    def dtype(self) -> PyTree:
        """Dtype of the array."""
        return self.array.dtype

    def rows(self, first: int, count: int) -> np.ndarray:
        """Row numbers in the array of `count` neighbouring picked rows."""
        return self.places[first : first + count]


def is_state(node: Any) -> TypeGuard[EmbeddingState]:
    """Whether the node is an `EmbeddingState` with a layout."""
    return isinstance(node, EmbeddingState) and node.layout is not None


def logical(tree: PyTree) -> PyTree:
    """The tree with dicts of tables and slots by table name in place of states; nothing is copied."""
    return jax.tree.map(lambda node: _by_table(node) if is_state(node) else node, tree, is_leaf=is_state)


def with_states(like: PyTree, tree: PyTree) -> PyTree:
    """The inverse of `logical`: the tree with states, laid out like those of `like`, in place of the dicts."""
    return jax.tree.map(
        lambda node, value: _laid_out(node, value) if is_state(node) else value, like, tree, is_leaf=is_state
    )


def belongings(tree: PyTree) -> dict[str, PyTree]:
    """Facts of the fingerprints of all states and other owners of one in the tree, by path."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: isinstance(node, Fingerprint) or _layout_of(node) is not None
        )
    except ValueError as error:
        raise TypeError("checkpoint: keys of one dictionary must have an order; let all of them be texts.") from error
    found = {}
    for keys, leaf in leaves:
        name = jax.tree_util.keystr(keys, simple=True, separator="/") or "state"
        if is_state(leaf):
            found[name] = tables_of(leaf)
            tables = {name: table for stack in stacks_of(leaf).values() for name, table in stack["tables"].items()}
            if apart := [n for n, t in tables.items() if t["storage"] is not None and t["in_files"] != t["storage"]]:
                found[name][ELSEWHERE] = f"tables {apart} keep rows by key or on the host; use save_collection."
        elif isinstance(leaf, Fingerprint):
            found[name] = leaf.facts
        elif (layout := _layout_of(leaf)) is not None:
            found[name] = layout.facts
    return found


def _layout_of(node: Any) -> Fingerprint | None:
    """The layout fingerprint of a state of the core or a wing; None for other nodes."""
    layout = getattr(node, "layout", None) if isinstance(node, tuple) else None
    return layout if isinstance(layout, Fingerprint) else None


def stacks_of(state: EmbeddingState) -> dict[str, PyTree]:
    """Facts of a state's layout by stack; empty without a layout."""
    return {} if state.layout is None else state.layout.facts


def tables_of(state: EmbeddingState) -> dict[str, PyTree]:
    """Facts of each table in a state's layout, without the places of its rows."""
    tables = {name: table for stack in stacks_of(state).values() for name, table in stack["tables"].items()}
    return {name: _in_files(table) for name, table in tables.items()}


def _in_files(table: Mapping[str, PyTree]) -> dict[str, PyTree]:
    facts = {key: fact for key, fact in table.items() if key not in (*Place._fields, "in_files", "part_sizes")}
    facts["storage"] = table["in_files"]
    return facts | {"vocabulary_size": None} if table["in_files"] == ROWS_BY_KEY else facts


def _by_table(state: EmbeddingState) -> dict[str, PyTree]:
    tables, slots = {}, {}
    for stack, facts in stacks_of(state).items():
        for name, table in facts["tables"].items():
            if table["storage"] is not None:
                tables[name], slots[name] = state.tables[stack], state.slots[stack]
                if "part_sizes" in table:  # of several tables that share a storage
                    number, sizes = (
                        list(facts["tables"]).index(name),
                        [t["part_sizes"] for t in facts["tables"].values()],
                    )
                    tables[name], slots[name] = (parts(own, sizes)[number] for own in (tables[name], slots[name]))
                continue
            where = Place(table["owner"], table["first"]), facts["spread"], facts["rows_per_shard"]
            tables[name] = TableRows(state.tables[stack], *where, table["vocabulary_size"])
            slots[name] = {
                field: TableRows(slot, *where, table["vocabulary_size"])
                for field, slot in zip(facts["slots"], state.slots[stack], strict=True)
            }
    return {"tables": tables, "slots": slots, "step": state.step, "key": state.key}


def _laid_out(like: EmbeddingState, values: Mapping[str, PyTree]) -> EmbeddingState:
    wanted, tables, slots = _by_table(like), {}, {}
    for stack, facts in stacks_of(like).items():
        names = list(facts["tables"])
        if any(facts["tables"][name]["storage"] is not None for name in names):
            tables[stack], slots[stack] = (
                jax.tree.map(
                    lambda *own: own[0] if len(own) == 1 else jnp.concatenate(own), *map(values[of].get, names)
                )
                for of in ("tables", "slots")
            )
            continue
        tables[stack] = _array([(wanted["tables"][name], values["tables"][name]) for name in names])
        slots[stack] = tuple(
            _array([(wanted["slots"][name][field], values["slots"][name][field]) for name in names])
            for field in facts["slots"]
        )
    return EmbeddingState(tables, slots, values["step"], values["key"], like.layout)


def _array(pieces: list[tuple[TableRows, SavedArray]]) -> jax.Array:
    """One array with the given rows of its tables; all others are zeros."""
    like = pieces[0][0].array
    sharding = getattr(like, "sharding", None)
    blocks = ((table.rows(first, len(rows)), rows) for table, saved in pieces for first, rows in saved.blocks())
    if pieces[0][0].spread > 1 or (sharding is not None and len(sharding.device_set) > 1):
        return sharded(like.shape, like.dtype, sharding, blocks)
    # In memory that is laid out as that of fresh tables.
    is_padded = sum(table.count for table, _ in pieces) < like.shape[0]
    allocate = jax.jit(api.allocate, static_argnums=(0, 1, 2), out_shardings=sharding)
    write = jax.jit(_with_rows, donate_argnums=0, out_shardings=sharding)
    array = allocate(like.shape, like.dtype, 0.0 if is_padded else None)
    for numbers, rows in blocks:
        array = write(array, rows, np.int32(numbers[0]))
    return array


def _with_rows(array: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, 0)
