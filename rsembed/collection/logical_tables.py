"""Tables of a state by name, with rows in the order of ids or keys: out of the arrays that keep them, and in again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Num, PRNGKeyArray

from rsembed.bags import is_traced
from rsembed.checks import check_type, did_you_mean
from rsembed.collection.devices import Devices
from rsembed.collection.evicting import Evictor
from rsembed.collection.fetching import Fetching
from rsembed.collection.stack import Stack
from rsembed.collection.state import EmbeddingState
from rsembed.fingerprint import Fingerprint
from rsembed.homes import Hashed
from rsembed.homes.hashed_rows import DynamicTable
from rsembed.homes.home import on_host
from rsembed.homes.logical_rows import as_dtype, check_reason, keys_to_leave
from rsembed.specs import TableSpec

OF_ROWS = ("keys", "values", "last_step", "count", "first_step", "waiting_keys", "waiting_last_step", "waiting_count")
"""What a table with keys says of its rows, beside slots."""
FIRST_KEY = "initial_key"
"""What new keys of a table start from, beside the rows of those it has."""


class LogicalTables:
    """The tables of a collection, whatever keeps them.

    Args:
      specs: tables by name.
      stacks: what keeps them, by name.
      on_host: those stacks whose rows are on the host.
      devices: the mesh.
    """

    def __init__(
        self,
        specs: Mapping[str, TableSpec],
        stacks: Mapping[str, Stack],
        on_host: Mapping[str, Fetching],
        devices: Devices,
    ):
        self.specs, self.stacks, self.on_host, self.devices = specs, stacks, on_host, devices
        self._evictors: dict[str, Evictor] = {}
        everywhere = PartitionSpec()
        self._all_rows = {
            table.name: jax.jit(devices.on_each(partial(stack.all_rows, number=number), everywhere, everywhere))
            for stack in stacks.values()
            if not stack.is_dense
            for number, table in enumerate(stack.tables)
        }

    def tables(self, state: EmbeddingState) -> dict[str, Any]:
        """See `EmbeddingCollection.tables`."""
        result: dict[str, Any] = {}
        for name, stack in self.stacks.items():
            if name in self.on_host:
                fetching = self.on_host[name]
                result[fetching.table.name] = fetching.arrays(state.tables[name], state.slots.get(name))[0]
            elif stack.home.takes_keys:
                result |= stack.all_rows_of(state.tables[name], state.slots.get(name, ()))
            elif not stack.is_dense:
                result |= {table.name: self._all_rows[table.name](state.tables[name]) for table in stack.tables}
            else:
                dense = self.devices.place(state.tables[name], PartitionSpec())
                for table in stack.layout.stack.tables:
                    result[table.name] = _copy_of(dense, stack.layout.all_rows(table.name, table.rows))
        return result

    def slots(self, state: EmbeddingState) -> dict[str, Any]:
        """See `EmbeddingCollection.slots`."""
        result: dict[str, Any] = {}
        for name, stack in self.stacks.items():
            rule = stack.layout.stack.spec.optimizer
            if name in self.on_host:
                fetching = self.on_host[name]
                _, *arrays = fetching.arrays(state.tables[name], state.slots[name])
                result[fetching.table.name] = rule.pack_slots(tuple(map(jnp.asarray, arrays)))
            elif stack.home.takes_keys:
                for table_name, rows in stack.all_rows_of(state.tables[name], state.slots[name]).items():
                    own_slots = tuple(jnp.asarray(rows[key]) for key in rows if key.startswith("slot_"))
                    result[table_name] = rule.pack_slots(own_slots)
            elif not stack.is_dense:
                for table_name, (_, own_slots) in stack.apart(state.tables[name], state.slots[name]).items():
                    result[table_name] = self.devices.place(jax.tree.map(jnp.copy, own_slots), PartitionSpec())
            else:
                slots = self.devices.place(state.slots[name], PartitionSpec())
                for table in stack.layout.stack.tables:
                    own = stack.layout.all_rows(table.name, table.rows)
                    result[table.name] = rule.pack_slots(tuple(_copy_of(slot, own) for slot in slots))
        return result

    def with_tables(self, state: EmbeddingState, tables: Mapping[str, Any]) -> EmbeddingState:
        """See `EmbeddingCollection.with_tables`."""
        replaced, slots = dict(state.tables), dict(state.slots)
        stored: dict[str, dict[str, Any]] = {}
        kept_on_host: dict[str, list[Any]] = {}
        for table_name, values in tables.items():
            self._check_known(table_name)
            for part, array in _parts(values):
                check_type(array, Num[np.ndarray, "..."], f"table {table_name!r}: its {part}")
            spec, stack = self.specs[table_name], self._stack_of(table_name)
            name = stack.layout.stack.name
            if (stack.home.takes_keys or name in self.on_host) and is_traced((state, values)):
                raise RuntimeError(
                    f"table {table_name!r} is kept as {spec.storage}: with_tables writes its rows beside compiled "
                    "programs; call it outside of jit, between two steps."
                )
            if stack.home.takes_keys and not isinstance(values, Mapping):
                values = {"keys": np.arange(len(values)), "values": values}
            if stack.home.takes_keys and isinstance(values, Mapping) and "last_step" not in values:
                # They count as used now: else they would be the first to go.
                values = {**values, "last_step": np.full(np.shape(values.get("keys", ())), int(on_host(state.step)))}
            if isinstance(values, Mapping) and (stack.is_dense or name in self.on_host):
                values = self._with_rows_of_keys(state, table_name, values)
            if not stack.is_dense and name not in self.on_host:
                stored.setdefault(name, {})[table_name] = values
                continue
            shape = (spec.vocabulary_size, spec.embedding_dim)
            if np.shape(values) != shape:
                raise ValueError(f"table {table_name!r} has shape {shape}, the new values {np.shape(values)}.")
            if not is_traced(values):  # through the host, as they may come from another mesh
                values = as_dtype(on_host(values), spec.dtype, f"table {table_name!r}", "values")
            if name in self.on_host:
                _, *kept = self.on_host[name].arrays(state.tables[name], state.slots[name])
                kept_on_host[name] = [values, *kept]
                continue
            rows = stack.layout.all_rows(table_name, spec.vocabulary_size)
            whole = self.devices.place(replaced[name], PartitionSpec())
            whole = whole.at[rows].set(jnp.asarray(values, whole.dtype))
            replaced[name] = self.devices.place(whole, stack.partition)
        for name, rows_of in stored.items():  # tables that share a home are written at once
            replaced[name], slots[name] = self.stacks[name].with_rows(state.tables[name], state.slots[name], rows_of)
        for name, arrays in kept_on_host.items():  # last, as what is refused must leave the store with the given state
            replaced[name] = self.on_host[name].with_arrays(state.tables[name], arrays)
        return state._replace(tables=replaced, slots=slots)

    def evicted(self, state: EmbeddingState, table_name: str, **reason: Any) -> tuple[EmbeddingState, dict[str, Any]]:
        """See `EmbeddingCollection.evict`."""
        check_reason(f"evict from table {table_name!r}", **reason)
        if is_traced(state):
            raise RuntimeError("evict works beside compiled programs; call it outside of jit, between two steps.")
        evictor = self._evictor(table_name)
        name = evictor.stack_name
        params, step = state.tables[name], int(on_host(state.step))
        given = {"keep": reason["keep"], "unused_for": reason["unused_for"]}
        squares = None if reason["norm_below"] is None else float(reason["norm_below"]) ** 2
        is_own = evictor.is_own(params)
        keys = keys_to_leave(params, evictor.score, is_own, **given, squares_below=squares, step=step)
        params, rows = evictor.take_out(params, state.slots.get(name, ()), keys)
        if (unused_for := reason["unused_for"]) is not None:
            params = evictor.forget_older(params, state.step, unused_for)
        return state._replace(tables=state.tables | {name: params}), rows

    def _evictor(self, table_name: str) -> Evictor:
        """What takes rows out of a table with keys. Raises: ValueError: the table is unknown, or has none."""
        if table_name in self._evictors:
            return self._evictors[table_name]
        self._check_known(table_name)
        stack = self._stack_of(table_name)
        if not isinstance(stack.home, Hashed):
            raise ValueError(
                f"table {table_name!r} is kept as {self.specs[table_name].storage or 'an array'}: rows leave tables of "
                "keys, with storage=Hashed(...)."
            )
        evictor = Evictor(stack.rows, stack.layout.stack.name, table=self.specs[table_name])
        return self._evictors.setdefault(table_name, evictor)

    def _check_known(self, table_name: str) -> None:
        if table_name not in self.specs:
            near = did_you_mean(table_name, self.specs)
            raise ValueError(f"unknown table {table_name!r}{near}; the collection has {list(self.specs)}.")

    def _with_rows_of_keys(self, state: EmbeddingState, name: str, rows: Mapping[str, Any]) -> np.ndarray:
        """A table whose ids are rows, with those that a table with keys has."""
        whole = np.array(self.tables(state)[name])
        keys, values = (np.asarray(rows.get(part, ())) for part in ("keys", "values"))
        if unknown := sorted(part for part in rows if part not in OF_ROWS and not part.startswith("slot_")):
            raise ValueError(f"table {name!r}: cannot take {unknown} of rows by key; it takes 'keys' and 'values'.")
        if values.shape != (keys.size, whole.shape[1]) or not np.issubdtype(keys.dtype, np.integer):
            raise ValueError(
                f"table {name!r} takes rows by key as 'keys' [n] and 'values' [n, {whole.shape[1]}], got "
                f"{ {part: np.shape(array) for part, array in rows.items()} }."
            )
        if (is_outside := (keys < 0) | (keys >= len(whole))).any():
            raise ValueError(
                f"table {name!r} has {len(whole)} rows, none for key {keys[is_outside][0]} "
                f"({int(is_outside.sum())} such keys); hash them into the table, or keep it as rsembed.Hashed."
            )
        distinct, counts = np.unique(keys, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"table {name!r}: keys must be distinct, but {distinct[counts > 1][0]} comes twice.")
        whole[keys] = as_dtype(values, whole.dtype, f"table {name!r}", "values")
        return whole

    # For files

    def apart(self) -> dict[str, Stack]:
        """Stacks whose arrays mean nothing to a file: rows found by key, or on the host."""
        return {name: stack for name, stack in self.stacks.items() if name in self.on_host or stack.home.takes_keys}

    def parted(self, state: EmbeddingState) -> tuple[EmbeddingState, dict[str, Any], dict[str, Any]]:
        """The state without stacks that are `apart`, and their tables as files have them: rows, and slots by name."""
        tables: dict[str, Any] = {}
        slots: dict[str, Any] = {}
        for name, stack in self.apart().items():
            given, table = (state.tables[name], state.slots[name]), stack.table.name
            if name in self.on_host:
                tables[table], *arrays = self.on_host[name].arrays(*given)
                slots[table] = dict(zip(self._slot_names(stack), arrays, strict=True))
                continue
            keys = on_host(jax.random.key_data(given[0].key))  # of all shards, which have the same ones
            impl = jax.random.key_impl(given[0].key)
            for number, (table, rows) in enumerate(stack.all_rows_of(*given).items()):
                first = jax.random.wrap_key_data(jnp.asarray(keys[number]), impl=impl)
                tables[table], slots[table] = rows | {FIRST_KEY: first}, {}
        return self.without_apart(state), tables, slots

    def without_apart(self, state: EmbeddingState) -> EmbeddingState:
        """The state, or a template of one, without stacks that are `apart`."""
        apart = self.apart()
        tables, slots = ({n: v for n, v in part.items() if n not in apart} for part in (state.tables, state.slots))
        facts = {} if state.layout is None else state.layout.facts
        layout = Fingerprint.of({name: stack for name, stack in facts.items() if name not in apart})
        return EmbeddingState(tables, slots, state.step, state.key, layout)

    def templates(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes of those tables in `parted` of which a file has as many rows as there are ids."""
        tables, slots = {}, {}
        for fetching in self.on_host.values():
            spec = fetching.table
            row = jax.ShapeDtypeStruct((1, spec.embedding_dim), jnp.float32)
            shapes = [(row.shape, jnp.dtype(spec.dtype))]
            shapes += [(slot.shape, slot.dtype) for slot in jax.eval_shape(spec.optimizer.init_slots, row)]
            tables[spec.name], *own = (
                np.broadcast_to(np.zeros((), dtype), (spec.vocabulary_size, *shape[1:])) for shape, dtype in shapes
            )
            slots[spec.name] = dict(zip(self._slot_names(fetching.stack), own, strict=True))
        return tables, slots

    def whole(
        self, state: EmbeddingState, tables: Mapping[str, Any], slots: Mapping[str, Any], layout: Fingerprint
    ) -> EmbeddingState:
        """The inverse of `parted`."""
        all_tables, all_slots = dict(state.tables), dict(state.slots)
        # Rows on the host last, as what is refused must leave their store with the state that it has.
        for name, stack in sorted(self.apart().items(), key=lambda pair: pair[0] in self.on_host):
            part = stack.partition
            fresh = jax.jit(self.devices.on_each(stack.rows.init, PartitionSpec(), (part, part)))
            params, own_slots = fresh(jax.random.key(0))
            if name in self.on_host:
                rows = tables[stack.table.name]
                arrays = [rows, *(slots[stack.table.name][slot] for slot in self._slot_names(stack))]
                params = self.on_host[name].with_arrays(params, arrays)
            else:
                params = self._with_keys(stack, params, [tables[own.name][FIRST_KEY] for own in stack.tables])
                given = {
                    own.name: {key: array for key, array in tables[own.name].items() if key != FIRST_KEY}
                    for own in stack.tables
                }
                params, own_slots = stack.with_rows(params, own_slots, given)
            all_tables[name], all_slots[name] = params, own_slots
        return EmbeddingState(all_tables, all_slots, state.step, state.key, layout)

    def _stack_of(self, table_name: str) -> Stack:
        for stack in self.stacks.values():
            if any(table.name == table_name for table in stack.layout.stack.tables):
                return stack
        raise KeyError(table_name)

    def _with_keys(self, stack: Stack, params: DynamicTable, keys: Sequence[PRNGKeyArray]) -> DynamicTable:
        """Parameters of all shards whose new keys start from what these say, one for each table."""
        data = np.stack([np.asarray(jax.random.key_data(key)) for key in keys] * stack.rows.num_shards)
        (placed,) = self.devices.place_from_host([data], stack.partition)
        return params._replace(key=jax.random.wrap_key_data(placed, impl=jax.random.key_impl(keys[0])))

    def _slot_names(self, stack: Stack) -> list[str]:
        rule = stack.layout.stack.spec.optimizer
        return list(getattr(rule.slot_type, "_fields", map(str, range(rule.slot_variables_count()))))


def _parts(values: Any) -> Iterable[tuple[Any, Any]]:
    """The arrays of a table by name: of keys, of cores in a row, or one."""
    if isinstance(values, Mapping):
        return values.items()
    return ((f"part {k}", part) for k, part in enumerate(values)) if isinstance(values, tuple) else [("values", values)]


def _copy_of(array: Any, rows: Any) -> Any:
    """Some rows; indexing by all of them would give the array itself, which a donated step deletes."""
    own = array[rows]
    return jnp.copy(own) if own is array else own
