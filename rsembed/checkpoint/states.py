"""Converts an `EmbeddingState` to tables in id order, as stored in files, and back.

The `layout` of a state records the table and id of each row of its arrays. With the layout, a save
reads the rows of each table in id order, and a load writes the rows into a state with another
layout. A file has rows in id order, so the file does not depend on a mesh or on stacking.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rsembed.collection import EmbeddingState
from rsembed.fingerprint import ELSEWHERE, Fingerprint
from rsembed.kernels import api
from rsembed.storage import ROWS_BY_KEY
from rsembed.storage.dense_rows import Place
from rsembed.storage.logical_rows import SavedArray
from rsembed.storage.protocol import parts

LeafPath = tuple[str, ...]
"""Path of a leaf in a tree: the dictionary keys, list indices and field names, as strings."""
Leaf = Any
"""Leaf of a tree: an array, a number, a PRNG key, `PickedRows` or a `SavedArray`."""
Template: TypeAlias = PyTree
"""Tree that defines the structure, shapes, dtypes and shardings of a tree to load."""
Tables = dict[str, Any]
"""Dictionary from table names to arrays or metadata."""
Facts = Mapping[str, Any]
"""Metadata of a fingerprint, as a mapping from names to JSON values."""
Index = tuple[slice, ...]
"""Slices that select a block of an array."""
Blocks = Iterable[tuple[np.ndarray, np.ndarray]]
"""Blocks of rows of an array, as pairs `(indices, rows)` with the index of each row."""


class CorruptCheckpointError(ValueError):
    """Error for a checkpoint with missing or damaged files."""


def sharded(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: jax.sharding.Sharding | None,
    pieces: Blocks,
) -> jax.Array:
    """Makes an array with the given sharding, and fills it block by block.

    The host memory of a process needs room for the shards of its devices, not for the whole array.

    Args:
      shape: shape of the whole array, with at least one dimension.
      dtype: dtype of the array.
      sharding: sharding of the array. With None, the array is on JAX's default device.
      pieces: blocks of rows, as pairs `(row indices, rows)`. Rows of the array that are in no block
        are zero.
    """
    indices: list[Any] = [(slice(None),) * len(shape)]
    shard_shape = shape
    if sharding is not None:
        indices = [*sharding.addressable_devices_indices_map(shape).values()]
        shard_shape = sharding.shard_shape(shape)
    # Devices with equal indices share a shard. The keys are strings, because slices have no hash.
    shards: dict[str, tuple[Any, np.ndarray]] = {}
    for index in indices:
        if str(index) not in shards:
            shards[str(index)] = (index, np.zeros(shard_shape, dtype))
    for rows, values in pieces:
        for (row_slice, *columns), shard in shards.values():
            start, stop, _ = row_slice.indices(shape[0])
            is_inside = (rows >= start) & (rows < stop)
            part: Any = (is_inside, *columns)
            shard[rows[is_inside] - start] = values[part]

    def read_shard(index: Index | None) -> np.ndarray:
        _, shard = shards[str(index)]
        return shard

    if sharding is None:
        return jax.device_put(read_shard(indices[0]))
    return jax.make_array_from_callback(shape, sharding, read_shard)


@dataclasses.dataclass(frozen=True)
class PickedRows:
    """Some rows of an array, in the order in which a save writes them to a file.

    Attributes:
      array: array that contains the rows, such as the array of a stack.
      count: number of rows to write.
      positions: function from row numbers in the file to row indices in `array`.
    """

    array: np.ndarray | jax.Array | jax.ShapeDtypeStruct
    count: int
    positions: Callable[[np.ndarray], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the file."""
        return (self.count, *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array in the file."""
        return self.array.dtype


def is_state(node: object) -> TypeGuard[EmbeddingState]:
    """True if `node` is an `EmbeddingState` with a layout."""
    return isinstance(node, EmbeddingState) and node.layout is not None


def logical(tree: PyTree) -> PyTree:
    """Copy of `tree` with each state replaced by its tables and slots, by table name.

    The arrays are not copied: `PickedRows` in the result refer to the arrays of the state.
    """

    def convert(node: object) -> Any:
        if is_state(node):
            return _by_table(node)
        return node

    return jax.tree.map(convert, tree, is_leaf=is_state)


def with_states(like: Template, tree: PyTree) -> PyTree:
    """Packs the tables of `tree` into states with the layouts of `like`. The inverse of `logical`.

    Args:
      like: tree with `EmbeddingState`s. The states in the result have the layouts of the states in
        `like`.
      tree: tables and slots by name, as `restored` returns them for the template `logical(like)`.
    """

    def convert(node: Any, value: Any) -> Any:
        if is_state(node):
            return _state_from_tables(node, value)
        return value

    return jax.tree.map(convert, like, tree, is_leaf=is_state)


def flattened(tree: PyTree) -> dict[LeafPath, Leaf]:
    """Dictionary from the paths of a tree to its leaves.

    Raises: ValueError: the paths of two leaves are equal as strings.
    """
    leaves: dict[LeafPath, Leaf] = {}
    repeated = set()
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if path in leaves:
            repeated.add("/".join(path))
        leaves[path] = leaf
    if repeated:
        way_out = "give them keys that differ as text"
        raise ValueError(f"two leaves of the tree are called {sorted(repeated)}; {way_out}.")
    return leaves


def joined(path: LeafPath | list[str]) -> str:
    """A path as one string, for error messages."""
    return "/".join(path) or "the array"


def restored(arrays: Mapping[LeafPath, Leaf], like: Template, where: object) -> PyTree:
    """Arrays of a checkpoint in the structure of `like`, after a check of shapes and dtypes.

    The rows of tables stay on disk: where `like` has `PickedRows`, the result has a `SavedArray`,
    from which `with_states` reads the rows.

    Args:
      arrays: result of `files.opened`.
      like: template from `logical`, with leaves that define shapes, dtypes and shardings.
      where: folder of the checkpoint, for error messages.

    Raises: ValueError: arrays are missing, not in `like`, or of a different shape or dtype. The
      error message names every wrong or missing array.
    """
    templates = flattened(like)
    problems = []
    for path, template in templates.items():
        problem: str | None = "missing"
        if path in arrays:
            problem = _mismatch(arrays[path], template)
        if problem is not None:
            problems.append(f"{joined(path)!r} is {problem}")
    for path in arrays:
        if path not in templates:
            problems.append(f"{joined(path)!r} is not wanted")
    if problems:
        raise ValueError(f"checkpoint {where} does not match: {'; '.join(sorted(problems))}.")
    leaves = []
    for path, template in templates.items():
        leaves.append(placed(arrays[path], template))
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, leaves)


def _mismatch(array: Leaf, template: Leaf) -> str | None:
    """Reason why an array of a checkpoint does not match its template, or None if it matches."""
    is_for_numpy = isinstance(template, (bool, int, float, np.ndarray, np.generic, PickedRows))
    if not hasattr(template, "shape"):
        template = np.asarray(template)
    # Compare dtypes by name, because the name does not depend on the byte order.
    actual = f"{array.dtype.name}{list(array.shape)}"
    expected = f"{template.dtype.name}{list(template.shape)}"
    if actual != expected:
        return f"{actual}, wanted {expected}"
    if is_for_numpy or not isinstance(array, SavedArray):
        return None
    if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
        return None
    way_out = "give a numpy array as its template, or set jax_enable_x64"
    return f"{actual}, which a JAX array cannot hold here: {way_out}"


def placed(array: Leaf, template: Leaf) -> Leaf:
    """An array of a checkpoint, converted to the type and sharding of its template.

    If the template is on several devices, a process never has the whole array in host memory.
    """
    if isinstance(template, PickedRows):
        return array
    sharding = getattr(template, "sharding", None)
    is_distributed = sharding is not None and len(sharding.device_set) > 1
    if is_distributed and isinstance(array, SavedArray) and array.shape:
        blocks = _numbered_blocks(array)
        return sharded(array.shape, array.dtype, sharding, blocks)
    array = in_memory(array)
    if isinstance(template, (bool, int, float)):
        number = array[()]
        return type(template)(number)
    if isinstance(template, (np.ndarray, np.generic)):
        return array
    is_committed = getattr(template, "committed", True)
    if sharding is None or not is_committed:
        # If the template is uncommitted, the array must be uncommitted, because `jit` would compile
        # a function again for an array that is committed to a device.
        return jax.device_put(array)
    if isinstance(array, jax.Array):
        # Place the key data and wrap the result as PRNG keys, because `jax.device_put` rejects an
        # array of PRNG keys if the sharding spans several processes.
        key_data = np.asarray(jax.random.key_data(array))
        implementation = jax.random.key_impl(array)
        placed_data = placed(key_data, template)
        return jax.random.wrap_key_data(placed_data, impl=implementation)

    def read_shard(index: Index | None) -> np.ndarray:
        return np.asarray(array[index])

    return jax.make_array_from_callback(array.shape, sharding, read_shard)


def _numbered_blocks(saved: SavedArray) -> Blocks:
    """Blocks of saved rows, with the index of each row in the array of the checkpoint."""
    for first, rows in saved.blocks():
        yield np.arange(first, first + len(rows)), rows


def in_memory(array: Leaf) -> Leaf:
    """Reads a `SavedArray` into host memory, and returns any other leaf unchanged."""
    if isinstance(array, SavedArray):
        return array.whole()
    return array


def belongings(tree: PyTree) -> Facts:
    """Metadata of the tables that the arrays in a tree belong to, by path in the tree.

    The metadata are read from the fingerprints in the tree. Each path in the result is the path of
    an `EmbeddingState`, of another named tuple with a fingerprint in its field `layout`, or of a
    single fingerprint.

    Raises: TypeError: keys of a dictionary in the tree cannot be sorted.
    """

    def has_fingerprint(node: object) -> bool:
        return _fingerprint_of(node) is not None

    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_fingerprint)
    except ValueError as error:
        needed = "keys of one dictionary must have an order; let all of them be texts"
        raise TypeError(f"checkpoint: {needed}.") from error
    facts = {}
    for keys, leaf in leaves:
        fingerprint = _fingerprint_of(leaf)
        if fingerprint is None:
            continue
        name = jax.tree_util.keystr(keys, simple=True, separator="/") or "state"
        facts[name] = fingerprint.facts
        if is_state(leaf):
            facts[name] = _state_facts(fingerprint)
    return facts


def _state_facts(layout: Fingerprint) -> Tables:
    """Metadata of the tables of a state, from the state's layout.

    If the rows of some tables are not in the state (keyed tables, tables on the host), the entry
    `ELSEWHERE` names these tables.
    """
    facts = tables_of(layout)
    not_in_state = []
    for name, table in _tables_in(layout).items():
        if table["storage"] not in (None, table["in_files"]):
            not_in_state.append(name)
    if not_in_state:
        why = f"tables {not_in_state} keep rows by key or on the host"
        facts[ELSEWHERE] = f"{why}; use save_collection."
    return facts


def _fingerprint_of(node: object) -> Fingerprint | None:
    """Fingerprint of a node in a tree, or None if the node has no fingerprint.

    The node is a `Fingerprint`, or a named tuple with a fingerprint in its field `layout`.
    """
    if isinstance(node, tuple):
        node = getattr(node, "layout", None)
    if isinstance(node, Fingerprint):
        return node
    return None


def tables_of(layout: Fingerprint) -> Tables:
    """Metadata of each table in a state's layout, without values that depend on the placement."""
    tables = {}
    for name, table in _tables_in(layout).items():
        facts = dict(table)
        for of_placement in ("place", "in_files", "part_sizes"):
            facts.pop(of_placement, None)
        facts["storage"] = table["in_files"]
        if table["in_files"] == ROWS_BY_KEY:
            facts["vocabulary_size"] = None
        tables[name] = facts
    return tables


def _tables_in(layout: Fingerprint) -> Tables:
    tables: Tables = {}
    for stack in layout.facts.values():
        tables |= stack["tables"]
    return tables


def _stacks_of(state: EmbeddingState) -> Facts:
    """Metadata of each stack of a state with a layout."""
    return cast(Fingerprint, state.layout).facts


def _by_table(state: EmbeddingState) -> dict[str, Any]:
    """Tables and slots of a state by table name, and the state's step and key."""
    tables: Tables = {}
    slots: Tables = {}
    for stack_name, stack in _stacks_of(state).items():
        arrays = state.tables[stack_name], state.slots[stack_name]
        table_arrays = _arrays_by_table(stack, *arrays)
        for name, (rows, slots_of_table) in zip(stack["tables"], table_arrays, strict=True):
            tables[name] = rows
            slots[name] = slots_of_table
    return {
        "tables": tables,
        "slots": slots,
        "step": state.step,
        "key": state.key,
    }


def _arrays_by_table(stack: Facts, params: PyTree, slots: PyTree) -> list[tuple[PyTree, PyTree]]:
    """Parameters and slots of each table of a stack. Slots of dense tables are dictionaries."""
    facts_of_tables = list(stack["tables"].values())
    if _is_dense(stack):
        arrays = params, dict(zip(stack["slots"], slots, strict=True))
        picked = []
        for table in facts_of_tables:
            pick = functools.partial(_picked_rows, table, stack)
            picked.append(jax.tree.map(pick, arrays))
        return picked
    if len(facts_of_tables) == 1:
        return [(params, slots)]
    sizes = [table["part_sizes"] for table in facts_of_tables]
    return list(zip(parts(params, sizes), parts(slots, sizes), strict=True))


def _is_dense(stack: Facts) -> bool:
    """Whether the tables of a stack are rows of one array. All of them have the same storage."""
    return all(table["storage"] is None for table in stack["tables"].values())


def _picked_rows(table: Facts, stack: Facts, array: Leaf) -> PickedRows:
    """The rows of one table in an array of its stack, in id order."""
    positions = functools.partial(
        Place(*table["place"]).rows,
        spread=stack["spread"],
        rows_per_shard=stack["rows_per_shard"],
    )
    return PickedRows(array, table["vocabulary_size"], positions)


def _state_from_tables(like: EmbeddingState, values: Mapping[str, Any]) -> EmbeddingState:
    """State with the layout of `like` from tables and slots by table name."""
    wanted = _by_table(like)
    tables: Tables = {}
    slots: Tables = {}
    for stack_name, stack in _stacks_of(like).items():
        trees = []
        for arrays in (wanted, values):
            for name in stack["tables"]:
                trees.append((arrays["tables"][name], arrays["slots"][name]))
        join = functools.partial(_joined_tables, stack)
        tables[stack_name], joined_slots = jax.tree.map(join, *trees)
        if _is_dense(stack):
            joined_slots = tuple(joined_slots[slot] for slot in stack["slots"])
        slots[stack_name] = joined_slots
    return EmbeddingState(
        tables,
        slots,
        values["step"],
        values["key"],
        like.layout,
    )


def _joined_tables(stack: Facts, *leaves: Leaf) -> jax.Array:
    """An array of a stack, from one array of each of its tables.

    Args:
      stack: metadata of the stack.
      *leaves: for each table of the stack, an array of the template, then for each table, the same
        array of the checkpoint.
    """
    num_tables = len(stack["tables"])
    saved = leaves[num_tables:]
    if _is_dense(stack):
        return _stack_array([*zip(leaves, saved, strict=False)], stack)
    if num_tables == 1:
        return saved[0]
    return jnp.concatenate(saved)


Pieces = list[tuple[PickedRows, SavedArray]]
"""For each table of a stack, its rows in the stack's array, and its array in the checkpoint."""


def _stack_array(pieces: Pieces, stack: Facts) -> jax.Array:
    """The array of a stack, filled with the saved rows of its tables. Padding rows are zero."""
    like = pieces[0][0].array
    sharding = getattr(like, "sharding", None)
    blocks = _positioned_blocks(pieces)
    is_distributed = sharding is not None and len(sharding.device_set) > 1
    if stack["spread"] > 1 or is_distributed:
        return sharded(like.shape, like.dtype, sharding, blocks)
    # `api.allocate` puts a large array on huge pages, if it can. Every call of `write` donates the
    # array, so the blocks of rows are written in place.
    num_rows = sum(table.count for table, _ in pieces)
    fill = None
    if num_rows < like.shape[0]:
        fill = 0.0
    allocate = jax.jit(api.allocate, static_argnums=(0, 1, 2), out_shardings=sharding)
    write = jax.jit(
        jax.lax.dynamic_update_slice_in_dim,
        static_argnums=3,
        donate_argnums=0,
        out_shardings=sharding,
    )
    array = allocate(like.shape, like.dtype, fill)
    for positions, rows in blocks:
        array = write(array, rows, np.int32(positions[0]), 0)
    return array


def _positioned_blocks(pieces: Pieces) -> Blocks:
    """Blocks of saved rows, with the index of each row in the array of the stack."""
    for table, saved in pieces:
        for numbers, rows in _numbered_blocks(saved):
            yield table.positions(numbers), rows
