"""Whole tables of a module, wherever they live: read, written, drawn and counted.

The functions that have published names are its methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from rsembed.bags import is_taken
from rsembed.checks import check_type, check_within
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.homes.logical_rows import as_dtype
from rsembed.tbe import functional
from rsembed.tbe.construction import per_table
from rsembed.tbe.plan import TablePlan, TBEPlan

if TYPE_CHECKING:
    from rsembed.tbe.module import TableBatchedEmbeddingBags

ROWS_PER_BLOCK = 1 << 16


def rates_of_groups(plan: TBEPlan, learning_rate: float | Sequence[float]) -> Float[Array, " groups"]:
    """One rate per group. Raises: ValueError: tables of a group differ, or a schedule would be overruled."""
    by_table = per_table(learning_rate, len(plan.tables), "learning_rate")
    for rate in by_table:
        check_within("[0, inf)", rate, "learning_rate")
    rates = []
    for group in plan.groups:
        if callable(group.table.learning_rate):
            raise ValueError("the learning rate is a schedule; construct the module with a number to set it later.")
        own = {by_table[t] for t in group.tables}
        if len(own) > 1:
            names = [plan.tables[t].name for t in group.tables]
            raise ValueError(
                f"tables {names} share an array and so one learning rate, but were given {sorted(own)}; construct the "
                "module with different rates to keep them apart."
            )
        rates.append(own.pop())
    return jnp.asarray(rates, jnp.float32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform_rows(key: PRNGKeyArray, first_row: Any, num_rows: int, dim: int, low: Any, high: Any) -> Array:
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(lambda row: low + (high - low) * jax.random.uniform(jax.random.fold_in(key, row), (dim,)))(rows)


@functools.partial(jax.jit, donate_argnums=0)
def _put_block(array: Array, block: Array, first_row: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), first_row, 0)


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(array: Array, values: Array, rows: Array) -> Array:
    """On a mesh, rows of a table are here and there."""
    return array.at[rows].set(values.astype(array.dtype), unique_indices=True)


def init_embedding_weights_uniform(
    module: TableBatchedEmbeddingBags, min_val: float, max_val: float, *, key: PRNGKeyArray | None = None
) -> None:
    """Draws all weights from U(min_val, max_val). Equal keys and tables give equal bits, however they are stored.

    Args:
      module: whose tables these are.
      min_val: lowest weight.
      max_val: bound above.
      key: None takes the one that the module was made with.
    """
    check_within("(-inf, inf)", max_val, "init_embedding_weights_uniform: max_val")
    check_within(f"(-inf, {max_val}]", min_val, "init_embedding_weights_uniform: min_val")
    key = module.whole_state.key if key is None else key
    bounds = jnp.float32(min_val), jnp.float32(max_val)
    for number, table in enumerate(module.plan.tables):
        own_key = jax.random.fold_in(key, number)

        # Block by block, every row from its own key: no second table is ever needed.
        def rows(first: int, last: int, own_key: Any = own_key, dim: int = table.dim) -> Array:
            return _uniform_rows(own_key, first, last - first, dim, *bounds)

        write_table(module, number, rows)


def bring_home(module: TableBatchedEmbeddingBags) -> None:
    """Writes all cached rows and states to the host; they stay cached."""
    if (host_rows := module.host_rows) is not None:
        host_rows.flush(module.state.get_value())


def write_table(
    module: TableBatchedEmbeddingBags, table: int, rows: Callable[[int, int], Any], *, array: int = 0
) -> None:
    """Overwrites a table (or with `array` k its k-th state) with `rows(first, last)`, in blocks."""
    state = module.whole_state
    number, first_row = module.plan.places[table]
    num_rows = module.plan.tables[table].num_rows
    blocks = [(first, min(first + ROWS_PER_BLOCK, num_rows)) for first in range(0, num_rows, ROWS_PER_BLOCK)]
    if module.plan.tables[table].is_cached:
        module.reset_cache_states()
        stored = module.host_rows.arrays_of(table)[array]  # type: ignore[union-attr]
        for first, last in blocks:
            stored[first_row + first : first_row + last] = rows(first, last)
        return
    arrays = list(state.arrays(number))
    for first, last in blocks:
        values = np.array(rows(first, last))
        if module.plan.split is None:
            arrays[array] = _put_block(arrays[array], values, first_row + first)
        else:
            arrays[array] = _put_rows(arrays[array], values, module.plan.rows_of(table, np.arange(first, last)))
    module.state.set_value(state.with_arrays(number, arrays))


def read_table(module: TableBatchedEmbeddingBags, table: int) -> list[Any]:
    """Weights and states of one table, after `bring_home`."""
    state = module.whole_state
    (number, first_row), num_rows = module.plan.places[table], module.plan.tables[table].num_rows
    if module.plan.tables[table].is_cached:
        views = [stored[first_row : first_row + num_rows] for stored in module.host_rows.arrays_of(table)]  # type: ignore[union-attr]
        for view in views:
            view.flags.writeable = False
        return views
    arrays = state.arrays(number)
    if module.plan.split is not None:
        return module.plan.on_mesh.everywhere_rows(arrays, module.plan.rows_of(table, np.arange(num_rows)))
    # A slice of everything would be the array itself, which the next training step takes over.
    return [jnp.array(array[first_row : first_row + num_rows], copy=True) for array in arrays]


def _entries(table: TablePlan) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights and states as a state dict has them, by name; row-wise states are flat, as their arrays are not."""
    slots = table._replace(dim=2).first_slots()  # in a table of dim 1, shapes would not tell
    kinds = [(False, table.dtype), *((slot.shape[1] == 1, slot.dtype) for slot in slots)]
    labels = [f"{table.name}.{label}" for label in ("weight", *table.torch_state_names)]
    whole, flat = (table.num_rows, table.dim), (table.num_rows,)
    entries = [jax.ShapeDtypeStruct(flat if is_flat else whole, dtype) for is_flat, dtype in kinds]
    return dict(zip(labels, entries, strict=True))


def split_embedding_weights(module: TableBatchedEmbeddingBags) -> list[Any]:
    """The weights of every table, `[rows, dim]`: copies; of tables on the host, read-only views of the store."""
    bring_home(module)
    return [read_table(module, table)[0] for table in range(len(module.plan.tables))]


def set_embedding_weights(module: TableBatchedEmbeddingBags, table: int | str, weights: Any) -> None:
    """Overwrites the weights of one table; optimizer states stay.

    Args:
      module: whose table it is.
      table: its number or name.
      weights: `[rows, dim]`, of numpy, JAX or torch.

    Raises: ValueError: there is no such table, or it has another shape.
    """
    names = [own.name for own in module.plan.tables]
    number = names.index(table) if table in names else table
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise ValueError(f"there is no table {table!r}; there are {names}.")
    values, shape = np.asarray(weights), (module.plan.tables[number].num_rows, module.plan.tables[number].dim)
    check_type(values, Num[np.ndarray, "rows dim"], f"weights of table {names[number]!r}")
    if values.shape != shape:
        raise ValueError(f"table {names[number]!r} has shape {shape}, the new weights {values.shape}.")
    values = as_dtype(values, module.plan.tables[number].dtype, f"table {names[number]!r}", "weights")
    write_table(module, number, lambda first, last: values[first:last])


def split_optimizer_states(module: TableBatchedEmbeddingBags) -> list[list[Any]]:
    """The states of every table, in the order of its optimizer's `state_names`; row-wise ones are `[rows]`.

    Raises: NotImplementedError: OptimType.NONE has none.
    """
    if module.plan.tables[0].rule is None:
        raise NotImplementedError("OptimType.NONE keeps no optimizer states.")
    bring_home(module)
    found = []
    for number, table in enumerate(module.plan.tables):
        arrays = zip(read_table(module, number), _entries(table).values(), strict=True)
        found.append([array.reshape(entry.shape) for array, entry in arrays][1:])
    return found


def state_dict(module: TableBatchedEmbeddingBags) -> dict[str, np.ndarray]:
    """All that training changes as numpy arrays: `TABLE.weight`, `TABLE.sum`, ..., `step`, `learning_rate`.

    `contents` tells what it belongs to, for `load_state_dict` to compare.
    """
    state, plan, found = module.whole_state, module.plan, {}
    bring_home(module)
    for number, table in enumerate(plan.tables):
        for (name, entry), array in zip(_entries(table).items(), read_table(module, number), strict=True):
            found[name] = np.array(array).reshape(entry.shape)
    rates = np.asarray(state.learning_rates)
    found["step"] = np.asarray(state.step)
    if plan.has_passes and state.passed_step != state.step:  # a lookup to be trained has begun the next step
        found["passed_step"] = np.asarray(state.passed_step)
    found["learning_rate"] = np.asarray([rates[plan.places[t][0]] for t in range(len(plan.tables))])
    found["max_counter"] = np.asarray(state.max_counter)
    found["key"] = np.asarray(jax.random.key_data(state.key))
    found["contents"] = np.frombuffer(plan.contents.text.encode(), np.uint8)  # numbers, which any file can hold
    return found


_OPTIONAL = {"step", "passed_step", "learning_rate", "max_counter", "key", "contents"}


def load_state_dict(module: TableBatchedEmbeddingBags, state_dict: Mapping[str, Any]) -> None:
    """Takes over a `state_dict`, of a module with other hyperparameters, precision or placement too.

    Raises: ValueError: an entry is missing, unknown, of another shape or out of range, or `contents` has other
      optimizers. TypeError: it is no mapping, or an entry no array of numbers. Then nothing changes.
    """
    check_type(state_dict, Mapping, "the state dict")
    plan, given, expected = module.plan, state_dict, dict[str, jax.ShapeDtypeStruct]()
    for table in plan.tables:
        expected |= _entries(table)
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected) - _OPTIONAL)
    if missing or unknown:
        raise ValueError(f"the state dict lacks {missing} and has unknown entries {unknown}.")
    for name, entry in expected.items():
        check_type(given[name], Num[np.ndarray, "..."], repr(name))
        if np.shape(given[name]) != entry.shape:
            raise ValueError(f"{name!r} has shape {np.shape(given[name])}, but the module has {entry.shape}.")
        as_dtype(given[name], entry.dtype, "the state dict", name)
    if "contents" in given:
        found = Fingerprint(np.asarray(given["contents"], np.uint8).tobytes().decode())
        way_out = "Construct the module as the saved one was; to take the numbers all the same, leave out 'contents'."
        check_same(found, plan.contents, what="the state dict does not belong to this module", way_out=way_out)
    changes = _numbers_of(module, given)
    if is_taken(module.state.get_value()):
        _begin_anew(module)
    module.reset_cache_states(discard=True)  # all of it is replaced, from whatever time it is
    for number, table in enumerate(plan.tables):
        for k, name in enumerate(_entries(table)):
            values = np.asarray(given[name]).reshape(table.num_rows, -1)
            write_table(module, number, lambda first, last, values=values: values[first:last], array=k)  # type: ignore[misc]
    module.state.set_value(module.state.get_value()._replace(**module.plan.everywhere(changes)))


def _numbers_of(module: TableBatchedEmbeddingBags, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a state dict changes beside tables. Raises: ValueError, TypeError: a number is of another kind or range."""
    plan, changes = module.plan, dict[str, Any]()

    def number(name: str, dtype: Any, interval: str) -> Array:
        value = np.asarray(given[name])
        if value.shape != () or not np.issubdtype(value.dtype, np.number):
            raise ValueError(f"{name!r} must be one number, got {value.dtype} of shape {value.shape}.")
        check_within(interval, value.item(), repr(name))
        if value != (fitting := value.astype(dtype)) and np.issubdtype(dtype, np.integer):
            raise ValueError(f"{name!r} must be an integer, got {value.item()}.")
        return jnp.asarray(fitting)

    for name in ("step", "passed_step"):
        if name in given:
            changes[name] = number(name, np.int32, f"[0, {np.iinfo(np.int32).max}]")
    if "step" in changes:
        changes.setdefault("passed_step", changes["step"] + 0)
    if "max_counter" in given:
        changes["max_counter"] = number("max_counter", np.float32, "[0, inf)")
    if "key" in given:
        data, shape = np.asarray(given["key"]), jax.random.key_data(jax.random.key(0)).shape
        if data.shape != shape or not np.issubdtype(data.dtype, np.integer):
            raise ValueError(f"'key' must be integers of shape {shape}, got {data.dtype} of shape {data.shape}.")
        changes["key"] = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32))
    rates = given.get("learning_rate")
    if rates is not None and not any(callable(table.learning_rate) for table in plan.tables):
        if np.shape(rates) not in ((), (1,), (len(plan.tables),)):
            raise ValueError(f"'learning_rate' has shape {np.shape(rates)}; give one number, or one for each table.")
        changes["learning_rates"] = rates_of_groups(plan, np.broadcast_to(rates, len(plan.tables)).tolist())
    return changes


def _begin_anew(module: TableBatchedEmbeddingBags) -> None:
    """Arrays in place of those that a copy has taken over, where the old ones were; all of it is to be overwritten."""
    old, plan = module.state.get_value(), module.plan
    if plan.has_cache:
        raise RuntimeError(
            "a copy of the module has taken over its arrays, and with them the rows that its host is to have: make a "
            "new module, and load the state dict into that."
        )
    new = functional.init_state(plan, jax.random.key(0))
    if plan.split is None:
        new = jax.tree.map(lambda own, was: jax.device_put(own, was.sharding), new, old)
    module.state.set_value(new)


def reset_embedding_weight_momentum(
    module: TableBatchedEmbeddingBags,
    pruned_indices: Any,
    pruned_indices_offsets: Any,
    logical_table_ids: Any,
    buffer_ids: Any = None,
) -> None:
    """Zeroes rows and all their optimizer states.

    Args:
      module: whose rows these are.
      pruned_indices: rows, table after table.
      pruned_indices_offsets: entry `k` of the lists below owns `pruned_indices[offsets[k] : offsets[k + 1]]`.
      logical_table_ids: tables.
      buffer_ids: no meaning here; accepted for the original's sake.

    Raises: ValueError: there is no such table or row.
    """
    del buffer_ids
    rows, offsets = np.asarray(pruned_indices), np.asarray(pruned_indices_offsets)
    pruned: list[tuple[int, np.ndarray]] = []
    for k, table in enumerate(np.asarray(logical_table_ids).tolist()):
        if not 0 <= table < len(module.plan.tables):
            raise ValueError(f"logical_table_ids: there is no table {table}, only {len(module.plan.tables)} tables.")
        own = np.unique(rows[offsets[k] : offsets[k + 1]].astype(np.int64))
        plan = module.plan.tables[table]
        if own.size and not 0 <= own[0] <= own[-1] < plan.num_rows:
            raise ValueError(f"rows {own[0]} to {own[-1]} leave table {plan.name!r} of {plan.num_rows} rows.")
        pruned.append((table, own))
    module.reset_cache_states()
    for table, own in pruned:
        number, first_row = module.plan.places[table]
        if module.plan.tables[table].is_cached:
            for stored in module.host_rows.arrays_of(table):  # type: ignore[union-attr]
                stored[own + first_row] = 0
            continue
        state = module.whole_state
        arrays = [array.at[module.plan.rows_of(table, own)].set(0) for array in state.arrays(number)]
        module.state.set_value(state.with_arrays(number, arrays))


def state_bytes(module: TableBatchedEmbeddingBags) -> dict[str, dict[str, int]]:
    """Bytes of `weights`, `optimizer_states` and, where there is one, `cache`, of every table and as `total`."""
    found: dict[str, dict[str, int]] = {}
    for table in module.plan.tables:
        found[table.name] = {
            "weights": table.num_rows * table.dim * jnp.dtype(table.dtype).itemsize,
            "optimizer_states": table.num_rows * sum(slot.nbytes for slot in table.first_slots()),
        }
    total = {what: sum(own[what] for own in found.values()) for what in ("weights", "optimizer_states")}
    if module.host_rows is not None:
        state = module.state.get_value()
        cached = [group.number for group in module.host_rows.groups]
        total["cache"] = sum(leaf.nbytes for n in cached for leaf in (state.weights[n], *state.slots[n]))
    return {**found, "total": total}
