"""Tables of a state by name, whatever keeps them: out of the arrays of a collection, and in again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Num, PyTree

from rsembed.bags import is_traced
from rsembed.checks import check_type, did_you_mean
from rsembed.collection.host_stack import HostStack
from rsembed.collection.keyed_stack import KeyedStack
from rsembed.collection.stack import Stack
from rsembed.collection.state import ByName, EmbeddingState
from rsembed.fingerprint import Fingerprint
from rsembed.specs import TableSpec
from rsembed.storage import Hashed
from rsembed.storage.logical_rows import check_reasons


class LogicalTables:
    """The tables of a collection.

    Args:
      specs: tables by name.
      stacks: what keeps them, by name.
    """

    def __init__(self, specs: Mapping[str, TableSpec], stacks: Mapping[str, Stack]):
        self.specs, self.stacks = specs, stacks
        self.on_host = {name: own for name, own in stacks.items() if isinstance(own, HostStack)}
        self.apart = {name: own for name, own in stacks.items() if isinstance(own, (KeyedStack, HostStack))}
        """Stacks whose arrays mean nothing to a file: rows found by key, or on the host."""
        self._stack_of = {table.name: name for name, s in stacks.items() for table in s.layout.stack.tables}

    def with_tables(self, state: EmbeddingState, tables: Mapping[str, PyTree]) -> EmbeddingState:
        """See `EmbeddingCollection.with_tables`."""
        new: dict[str, ByName] = {}
        for table_name, values in tables.items():
            self._check_known(table_name)
            for part, array in _parts(values):
                check_type(array, Num[np.ndarray, "..."], f"table {table_name!r}: its {part}")
            name = self._stack_of[table_name]
            given = state.tables[name], state.slots.get(name), self.specs[table_name], values, state.step
            new.setdefault(name, {})[table_name] = self.stacks[name].checked(*given)
        replaced, slots = dict(state.tables), dict(state.slots)
        # Rows on the host last, as what is refused must leave their store with the state that it has.
        for name in sorted(new, key=self.on_host.__contains__):
            written = self.stacks[name].replaced(replaced[name], slots.get(name), new[name])
            replaced[name], slots[name] = written
        return state._replace(tables=replaced, slots=slots)

    def evicted(self, state: EmbeddingState, table_name: str, **reasons: float | None) -> tuple[EmbeddingState, ByName]:
        """See `EmbeddingCollection.evict`."""
        check_reasons(f"evict from table {table_name!r}", **reasons)
        if is_traced(state):
            raise RuntimeError("evict works beside compiled programs; call it outside of jit, between two steps.")
        self._check_known(table_name)
        name, spec = self._stack_of[table_name], self.specs[table_name]
        own = self.stacks[name]
        if not (isinstance(own, KeyedStack) and isinstance(own.storage, Hashed)):
            raise ValueError(
                f"table {table_name!r} is kept as {spec.storage or 'an array'}: rows leave tables of keys, with "
                "storage=Hashed(...)."
            )
        params, rows = own.evicted(state.tables[name], state.slots.get(name, ()), spec, state.step, reasons)
        return state._replace(tables=state.tables | {name: params}), rows

    def _check_known(self, table_name: str) -> None:
        if table_name not in self.specs:
            near = did_you_mean(table_name, self.specs)
            raise ValueError(f"unknown table {table_name!r}{near}; the collection has {list(self.specs)}.")

    # For files

    def parted(self, state: EmbeddingState) -> tuple[EmbeddingState, ByName, ByName]:
        """The state without stacks that are `apart`, and their tables as files have them: rows, and slots by name."""
        saved = [own.saved(state.tables[name], state.slots[name]) for name, own in self.apart.items()]
        return self.without_apart(state), *_united(saved)

    def without_apart(self, state: EmbeddingState) -> EmbeddingState:
        """The state, or a template of one, without stacks that are `apart`."""
        parts = state.tables, state.slots, {} if state.layout is None else state.layout.facts
        tables, slots, facts = ({name: own for name, own in p.items() if name not in self.apart} for p in parts)
        return EmbeddingState(tables, slots, state.step, state.key, Fingerprint.of(facts))

    def templates(self) -> tuple[ByName, ByName]:
        """Shapes of those tables in `parted` of which a file has as many rows as there are ids."""
        return _united([own.template() for own in self.on_host.values()])

    def whole(
        self, state: EmbeddingState, tables: Mapping[str, PyTree], slots: Mapping[str, PyTree], layout: Fingerprint
    ) -> EmbeddingState:
        """The inverse of `parted`."""
        all_tables, all_slots = dict(state.tables), dict(state.slots)
        for name in sorted(self.apart, key=self.on_host.__contains__):  # as in `with_tables`
            all_tables[name], all_slots[name] = self.apart[name].restored(tables, slots)
        return EmbeddingState(all_tables, all_slots, state.step, state.key, layout)


def _united(
    pairs: Iterable[tuple[ByName, ByName]],
) -> tuple[ByName, ByName]:
    tables: ByName = {}
    slots: ByName = {}
    for own_tables, own_slots in pairs:
        tables |= own_tables
        slots |= own_slots
    return tables, slots


def _parts(values: PyTree) -> Iterable[tuple[PyTree, PyTree]]:
    """The arrays of a table by name: of keys, of cores in a row, or one."""
    if isinstance(values, Mapping):
        return values.items()
    return ((f"part {k}", part) for k, part in enumerate(values)) if isinstance(values, tuple) else [("values", values)]
