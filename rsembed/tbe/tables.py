"""Whole tables of a module: reading, writing, drawing and counting them, wherever they live."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from rsembed.tbe import functional
from rsembed.tbe.construction import per_table
from rsembed.tbe.plan import TBEPlan

if TYPE_CHECKING:
    from rsembed.tbe.module import TableBatchedEmbeddingBags

ROWS_PER_BLOCK = 1 << 16


def rates_of_groups(plan: TBEPlan, learning_rate: float | Sequence[float]) -> Float[Array, " groups"]:
    """One rate per group. Raises: ValueError: tables of a group differ, or a schedule would be overruled."""
    by_table = per_table(learning_rate, len(plan.tables), "learning_rate")
    rates = []
    for group in plan.groups:
        if callable(plan.table_of(group).learning_rate):
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


def init_uniform(module: TableBatchedEmbeddingBags, low: float, high: float, key: PRNGKeyArray) -> None:
    """Draws every row from its own key, block by block: no second table is ever needed."""
    bounds = jnp.float32(low), jnp.float32(high)
    for number, table in enumerate(module.plan.tables):
        own_key = jax.random.fold_in(key, number)

        def rows(first: int, last: int, own_key: Any = own_key, dim: int = table.dim) -> Array:
            return _uniform_rows(own_key, first, last - first, dim, *bounds)

        write_table(module, number, rows)


def write_table(
    module: TableBatchedEmbeddingBags, table: int, rows: Callable[[int, int], Any], *, array: int = 0
) -> None:
    """Overwrites a table (or with `array` k its k-th state) with `rows(first, last)`, in blocks."""
    number, first_row = module.plan.place(table)
    num_rows = module.plan.tables[table].num_rows
    blocks = [(first, min(first + ROWS_PER_BLOCK, num_rows)) for first in range(0, num_rows, ROWS_PER_BLOCK)]
    if module.plan.tables[table].is_cached:
        module.reset_cache_states()
        stores, _ = module.host_rows.store_of(table)  # type: ignore[union-attr]
        for first, last in blocks:
            values = np.asarray(rows(first, last)).astype(stores[array].dtype)
            stores[array].write(first_row + np.arange(first, last), values)
        return
    arrays = list(module.state.get_value().arrays(number))
    for first, last in blocks:
        arrays[array] = _put_block(arrays[array], jnp.asarray(rows(first, last)), first_row + first)
    module.state.set_value(module.state.get_value().with_arrays(number, arrays))


def _read_table(module: TableBatchedEmbeddingBags, table: int) -> list[Any]:
    """Weights and states of one table; the module must have been flushed."""
    number, first_row = module.plan.place(table)
    last_row = first_row + module.plan.tables[table].num_rows
    if module.plan.tables[table].is_cached:
        stores, _ = module.host_rows.store_of(table)  # type: ignore[union-attr]
        return [store.view(first_row, last_row) for store in stores]
    # A slice of everything would be the array itself, which the next training step takes over.
    return [jnp.array(array[first_row:last_row], copy=True) for array in module.state.get_value().arrays(number)]


def split_weights(module: TableBatchedEmbeddingBags) -> list[Any]:
    """See `TableBatchedEmbeddingBags.split_embedding_weights`."""
    module.flush()
    return [_read_table(module, table)[0] for table in range(len(module.plan.tables))]


def split_states(module: TableBatchedEmbeddingBags) -> list[list[Any]]:
    """See `TableBatchedEmbeddingBags.split_optimizer_states`."""
    if module.plan.tables[0].rule is None:
        raise NotImplementedError("OptimType.NONE keeps no optimizer states.")
    module.flush()
    found = []
    for table in range(len(module.plan.tables)):
        states = _read_table(module, table)[1:]
        found.append(
            [
                state[:, 0] if state.shape[1] == 1 and _is_row_wise(module, table, k) else state
                for k, state in enumerate(states)
            ]
        )
    return found


def _is_row_wise(module: TableBatchedEmbeddingBags, table: int, state: int) -> bool:
    """Whether a state has one number per row, which a table of dim 1 does not tell by its shape."""
    rule = module.plan.tables[table].rule
    wide = jax.eval_shape(rule.init_slots, jax.ShapeDtypeStruct((1, 2), jnp.float32))  # type: ignore[union-attr]
    return state < len(wide) and wide[state].shape[1] == 1


def state_dict(module: TableBatchedEmbeddingBags) -> dict[str, np.ndarray]:
    """See `TableBatchedEmbeddingBags.state_dict`."""
    states = [[]] * len(module.plan.tables) if module.plan.tables[0].rule is None else split_states(module)
    found: dict[str, np.ndarray] = {}
    for table, weights, own in zip(module.plan.tables, split_weights(module), states, strict=True):
        found[f"{table.name}.weight"] = np.array(weights)
        for name, values in zip(table.torch_state_names, own, strict=True):
            found[f"{table.name}.{name}"] = np.array(values)
    state = module.state.get_value()
    rates = np.asarray(state.learning_rates)
    found["step"] = np.asarray(state.step)
    found["learning_rate"] = np.asarray([rates[module.plan.place(t)[0]] for t in range(len(module.plan.tables))])
    found["max_counter"] = np.asarray(state.max_counter)
    found["key"] = np.asarray(jax.random.key_data(state.key))
    return found


def _block(values: np.ndarray, first: int, last: int) -> np.ndarray:
    return values[first:last]


_OPTIONAL = {"step", "learning_rate", "max_counter", "key"}


def load_state_dict(module: TableBatchedEmbeddingBags, given: Mapping[str, Any]) -> None:
    """See `TableBatchedEmbeddingBags.load_state_dict`."""
    expected = state_shapes(module)
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected) - _OPTIONAL)
    if missing or unknown:
        raise ValueError(f"the state dict lacks {missing} and has unknown entries {unknown}.")
    for name, shape in expected.items():
        if np.shape(given[name]) != shape:
            raise ValueError(f"{name!r} has shape {np.shape(given[name])}, but the module has {shape}.")
    module.flush()
    for number, table in enumerate(module.plan.tables):
        labels = ["weight", *table.torch_state_names]
        for k, label in enumerate(labels):
            values = np.asarray(given[f"{table.name}.{label}"]).reshape(table.num_rows, -1)
            write_table(module, number, functools.partial(_block, values), array=k)
    state = module.state.get_value()
    changes: dict[str, Any] = {}
    if "step" in given:
        changes |= {name: jnp.asarray(int(given["step"]), jnp.int32) for name in ("step", "passed_step")}
    if "max_counter" in given:
        changes["max_counter"] = jnp.asarray(given["max_counter"], jnp.float32)
    if "key" in given:
        changes["key"] = jax.random.wrap_key_data(jnp.asarray(given["key"], jnp.uint32))
    rates = given.get("learning_rate")
    if rates is not None and not any(callable(table.learning_rate) for table in module.plan.tables):
        changes["learning_rates"] = rates_of_groups(
            module.plan, np.broadcast_to(rates, len(module.plan.tables)).tolist()
        )
    module.state.set_value(state._replace(**changes))


def state_shapes(module: TableBatchedEmbeddingBags) -> dict[str, tuple[int, ...]]:
    """Shapes of all entries of the state dict that must be there."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, table in enumerate(module.plan.tables):
        shapes[f"{table.name}.weight"] = (table.num_rows, table.dim)
        for k, name in enumerate(table.torch_state_names):
            is_row_wise = _is_row_wise(module, number, k)
            shapes[f"{table.name}.{name}"] = (table.num_rows,) if is_row_wise else (table.num_rows, table.dim)
    return shapes


def reset_rows(module: TableBatchedEmbeddingBags, rows: Any, offsets: Any, table_ids: Any) -> None:
    """See `TableBatchedEmbeddingBags.reset_embedding_weight_momentum`."""
    rows, offsets, table_ids = np.asarray(rows), np.asarray(offsets), np.asarray(table_ids)
    module.reset_cache_states()
    for k, table in enumerate(table_ids.tolist()):
        own = rows[offsets[k] : offsets[k + 1]].astype(np.int64)
        plan = module.plan.tables[table]
        if own.size and not 0 <= own.min() <= own.max() < plan.num_rows:
            raise ValueError(f"rows {own.min()} to {own.max()} leave table {plan.name!r} of {plan.num_rows} rows.")
        number, first_row = module.plan.place(table)
        if plan.is_cached:
            for store in module.host_rows.store_of(table)[0]:  # type: ignore[union-attr]
                store.write(np.unique(own) + first_row, np.zeros((np.unique(own).size, *store.shape[1:]), store.dtype))
            continue
        state = module.state.get_value()
        arrays = [array.at[own + first_row].set(0) for array in state.arrays(number)]
        module.state.set_value(state.with_arrays(number, arrays))


def write_out_decay(module: TableBatchedEmbeddingBags) -> None:
    """See `TableBatchedEmbeddingBags.apply_global_weight_decay`."""
    if not any(table.passes.global_decay for table in module.plan.tables):
        raise NotImplementedError("no table of this module has WeightDecayMode.DECOUPLE_GLOBAL.")
    if module.plan.has_cache:
        raise NotImplementedError("the decay of tables on the host cannot be written out; their rows pay when read.")
    module.state.set_value(functional.decayed_tables(module.plan, module.state.get_value()))


def state_bytes(module: TableBatchedEmbeddingBags) -> dict[str, dict[str, int]]:
    """See `TableBatchedEmbeddingBags.state_bytes`."""
    found: dict[str, dict[str, int]] = {}
    for table in module.plan.tables:
        slots = () if table.rule is None else jax.eval_shape(table.rule.init_slots, functional.shape_of(table))
        states = sum(slot.size * slot.dtype.itemsize for slot in slots)
        if table.passes.ensemble is not None:
            states += table.num_rows * table.dim * 4
        found[table.name] = {
            "weights": table.num_rows * table.dim * np.dtype(jnp.dtype(table.dtype)).itemsize,
            "optimizer_states": int(states),
        }
    total = {what: sum(own[what] for own in found.values()) for what in ("weights", "optimizer_states")}
    if module.host_rows is not None:
        state = module.state.get_value()
        cached = [group.number for group in module.host_rows.groups]
        total["cache"] = sum(leaf.nbytes for n in cached for leaf in (state.weights[n], *state.slots[n]))
    return {**found, "total": total}
