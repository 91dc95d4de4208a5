"""Arrays of a file, and what a file holds of an `EmbeddingState`: rows of every table in the order of their ids.

A state's `layout` says which row of its arrays belongs to which table and id. Saving reads tables through it, block by
block; loading lays the rows out for the state that is wanted. So no file depends on a mesh or a stacking.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from rsembed.storage.logical_rows import SavedArray
from rsembed.storage.protocol import parts


class CorruptCheckpointError(ValueError):
    """The files of a checkpoint are missing or are not what was written."""


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
class PickedRows:
    """Rows of an array, in the order of a file: a leaf of the tree that is written, block by block.

    Attributes:
      array: that has the rows among others, such as those of a stack.
      count: how many they are.
      positions: of rows of the file in the array, by their numbers.
    """

    array: PyTree
    count: int
    positions: Callable[[np.ndarray], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array of the rows alone."""
        return (self.count, *self.array.shape[1:])

    @property
    def dtype(self) -> PyTree:
        """Dtype of the array."""
        return self.array.dtype


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


def flattened(tree: PyTree) -> dict[tuple[str, ...], Any]:
    """The leaves by their path."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {tuple(jax.tree_util.keystr((key,), simple=True) for key in keys): leaf for keys, leaf in found}
    if len(leaves) < len(found):
        names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in found]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of the tree are called {repeated}; give them keys that differ as text.")
    return leaves


def joined(parts: Sequence[str]) -> str:
    """A path in one word."""
    return "/".join(parts) or "the array"


def restored(arrays: Mapping[tuple[str, ...], PyTree], like: PyTree, where: object) -> PyTree:
    """The arrays of a file in the structure of `like`, which has no states in it; see `load`.

    In place of the rows of tables stand those on the disk, for `with_states`.
    """
    wanted = flattened(like)
    problems = [f"{joined(path)!r} is missing" for path in wanted if path not in arrays]
    problems += [f"{joined(path)!r} is not wanted" for path in arrays if path not in wanted]
    for path in wanted.keys() & arrays.keys():
        array, leaf = arrays[path], wanted[path]
        shaped = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        has, wants = (f"{x.dtype.name}{list(x.shape)}" for x in (array, shaped))  # whatever the order of bytes
        is_for_jax = not isinstance(leaf, (bool, int, float, np.ndarray, np.generic, PickedRows))
        if has != wants:
            problems.append(f"{joined(path)!r} is {has}, wanted {wants}")
        elif is_for_jax and isinstance(array, SavedArray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            problems.append(
                f"{joined(path)!r} is {has}, which a JAX array cannot hold here: give a numpy array as its template, "
                "or set jax_enable_x64"
            )
    if problems:
        raise ValueError(f"checkpoint {where} does not match: {'; '.join(sorted(problems))}.")
    return jax.tree.unflatten(jax.tree.structure(like), [placed(arrays[path], leaf) for path, leaf in wanted.items()])


def placed(array: PyTree, leaf: PyTree) -> PyTree:
    """The array where and as what the leaf is; on several devices, without the whole of it in memory of the host."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, PickedRows):
        return array
    if isinstance(array, SavedArray) and array.shape and sharding is not None and len(sharding.device_set) > 1:
        pieces = ((np.arange(first, first + len(rows)), rows) for first, rows in array.blocks())
        return sharded(array.shape, array.dtype, sharding, pieces)
    array = in_memory(array)
    if isinstance(leaf, (bool, int, float)):
        return type(leaf)(array[()])
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    if sharding is None or not getattr(leaf, "committed", True):
        return jax.device_put(array)  # tied to no device, as the leaf is, or steps would be compiled anew for it
    if isinstance(array, jax.Array):  # a PRNG key; device_put knows only devices of this process
        data = placed(np.asarray(jax.random.key_data(array)), leaf)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def in_memory(array: PyTree) -> PyTree:
    """An array of a file in memory of the host; a PRNG key as it is."""
    return array.whole() if isinstance(array, SavedArray) else array


def belongings(tree: PyTree) -> dict[str, PyTree]:
    """Facts of the fingerprints of all states and other owners of one in the tree, by path."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: _fingerprint_of(node) is not None)
    except ValueError as error:
        raise TypeError("checkpoint: keys of one dictionary must have an order; let all of them be texts.") from error
    found = {}
    for keys, leaf in leaves:
        name = jax.tree_util.keystr(keys, simple=True, separator="/") or "state"
        if is_state(leaf):
            found[name] = tables_of(leaf)
            if apart := [n for n, t in _tables_in(leaf).items() if t["storage"] not in (None, t["in_files"])]:
                found[name][ELSEWHERE] = f"tables {apart} keep rows by key or on the host; use save_collection."
        elif (fingerprint := _fingerprint_of(leaf)) is not None:
            found[name] = fingerprint.facts
    return found


def _fingerprint_of(node: Any) -> Fingerprint | None:
    """The node itself, or the layout that a state, of the core or of a wing, carries."""
    layout = getattr(node, "layout", None) if isinstance(node, tuple) else node
    return layout if isinstance(layout, Fingerprint) else None


def stacks_of(state: EmbeddingState) -> dict[str, PyTree]:
    """Facts of a state's layout by stack; empty without a layout."""
    return {} if state.layout is None else state.layout.facts


def tables_of(state: EmbeddingState) -> dict[str, PyTree]:
    """Facts of the tables in the layout of a state, without the places of their rows."""
    found = {}
    for name, table in _tables_in(state).items():
        facts = {key: fact for key, fact in table.items() if key not in (*Place._fields, "in_files", "part_sizes")}
        found[name] = facts | {"storage": table["in_files"]}
        if table["in_files"] == ROWS_BY_KEY:
            found[name]["vocabulary_size"] = None
    return found


def _tables_in(state: EmbeddingState) -> dict[str, PyTree]:
    return {name: table for stack in stacks_of(state).values() for name, table in stack["tables"].items()}


def _by_table(state: EmbeddingState) -> dict[str, PyTree]:
    tables, slots = {}, {}
    for stack, facts in stacks_of(state).items():
        sizes = [table.get("part_sizes") for table in facts["tables"].values()]
        for number, (name, table) in enumerate(facts["tables"].items()):
            params, state_of_rule = state.tables[stack], state.slots[stack]
            if table["storage"] is None:
                place, spread = Place(table["owner"], table["first"]), facts["spread"]
                positions = functools.partial(place.rows, spread=spread, rows_per_shard=facts["rows_per_shard"])
                params, *own = (
                    PickedRows(array, table["vocabulary_size"], positions) for array in (params, *state_of_rule)
                )
                state_of_rule = dict(zip(facts["slots"], own, strict=True))
            elif "part_sizes" in table:  # of several tables that share a storage
                params, state_of_rule = (parts(own, sizes)[number] for own in (params, state_of_rule))
            tables[name], slots[name] = params, state_of_rule
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
        tables[stack] = _array([(wanted["tables"][name], values["tables"][name]) for name in names], facts)
        slots[stack] = tuple(
            _array([(wanted["slots"][name][field], values["slots"][name][field]) for name in names], facts)
            for field in facts["slots"]
        )
    return EmbeddingState(tables, slots, values["step"], values["key"], like.layout)


def _array(pieces: list[tuple[PickedRows, SavedArray]], stack: Mapping[str, PyTree]) -> jax.Array:
    """One array with the given rows of its tables; all others are zeros."""
    like = pieces[0][0].array
    sharding = getattr(like, "sharding", None)
    blocks = (
        (table.positions(np.arange(first, first + len(rows))), rows)
        for table, saved in pieces
        for first, rows in saved.blocks()
    )
    if stack["spread"] > 1 or (sharding is not None and len(sharding.device_set) > 1):
        return sharded(like.shape, like.dtype, sharding, blocks)
    # In memory that is laid out as that of fresh tables.
    is_padded = sum(table.count for table, _ in pieces) < like.shape[0]
    allocate = jax.jit(api.allocate, static_argnums=(0, 1, 2), out_shardings=sharding)
    update = jax.lax.dynamic_update_slice_in_dim
    write = jax.jit(update, static_argnums=3, donate_argnums=0, out_shardings=sharding)
    array = allocate(like.shape, like.dtype, 0.0 if is_padded else None)
    for numbers, rows in blocks:
        array = write(array, rows, np.int32(numbers[0]), 0)
    return array
