"""Rows by key on the host: in memory, or in files without a name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from rsembed.caching import BackingStore, RowStore
from rsembed.homes.home import Home
from rsembed.homes.logical_rows import array_names, as_dtype, checked_rows_keys
from rsembed.keys import join_keys
from rsembed.specs import TableSpec

LANES = ("last_step", "count", "first_step")


class KeyedStore:
    """Rows of a table with keys, each with its optimizer state, when it was used, and how often.

    Space is taken for rows that were put in. Rows go in and out as dictionaries of arrays, as tables with keys export
    them.

    Args:
      table: whose rows these are.
      num_rows: room for so many.
      folder: where the files are made, which last as long as the store; None keeps rows in memory.
    """

    def __init__(self, table: TableSpec, num_rows: int, folder: str | os.PathLike[str] | None = None):
        row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
        slots = jax.eval_shape(table.optimizer.init_slots, row)
        parts = [(row.shape, table.dtype), *((slot.shape, slot.dtype) for slot in slots), *(((1,), np.int32),) * 3]
        shapes = [((num_rows, *shape[1:]), jnp.dtype(dtype)) for shape, dtype in parts]
        if folder is None:
            stores = [RowStore.in_memory(*shape) for shape in shapes]
        else:
            stores = [RowStore.in_nameless_file(folder, *shape) for shape in shapes]
        self.table, self.num_rows, self._store = table, num_rows, BackingStore(stores)
        self._names = [*array_names(table, slots), *LANES]
        self._places: dict[int, int] = {}
        self._free = np.zeros(0, np.int64)  # places that were used before

    def __len__(self) -> int:
        return len(self._places)

    def has(self, keys: Integer[np.ndarray, " n"]) -> np.ndarray:
        """Which of the keys have a row here."""
        return np.fromiter(map(self._places.__contains__, keys.tolist()), bool, keys.size)

    def put(self, rows: Mapping[str, Any]) -> None:
        """Keeps rows; those of keys that are here already are replaced.

        Raises: ValueError: an array is missing or does not fit. RuntimeError: there is no room for so many.
        """
        where = f"table {self.table.name!r}"
        if missing := sorted({"keys", *self._names} - {"first_step"} - set(rows)):
            raise ValueError(f"{where}: rows that are kept need {missing}, too; give them as the table exports them.")
        checked = checked_rows_keys(self.table, rows)
        keys = join_keys(checked.high, checked.low).tolist()
        places = np.fromiter(map(self._places.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        is_new = places < 0
        if len(self) + (num_new := int(is_new.sum())) > self.num_rows:
            raise RuntimeError(
                f"{where}: {num_new} more rows find no room beside {len(self)} of num_rows={self.num_rows}; make it "
                "larger."
            )
        used, next_place = self._free[:num_new], len(self) + self._free.size
        fresh = np.arange(next_place, next_place + num_new - used.size)
        places[is_new] = np.concatenate([used, fresh])
        given = {"first_step": rows["last_step"], **rows}
        fitting = []
        for name, store in zip(self._names, self._store.stores, strict=True):
            values, shape = np.asarray(given[name]), (len(keys), *store.shape[1:])
            if values.shape != shape:
                raise ValueError(f"{where}: {name!r} of rows that are kept has shape {values.shape}, not {shape}.")
            fitting.append(as_dtype(values, store.dtype, where, name))
        self._store.write(places, fitting)
        self._free = self._free[used.size :]
        self._places.update(zip(keys, places.tolist(), strict=True))

    def take(self, keys: Integer[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The rows of those of the distinct keys that are here, in ascending order; they are no longer kept."""
        keys = np.sort(keys)
        places = np.fromiter(map(self._places.pop, keys.tolist(), itertools.repeat(-1)), np.int64, keys.size)
        is_here = places >= 0
        self._free = np.concatenate([self._free, places[is_here]])
        return self._read(keys[is_here], places[is_here])

    def rows(self) -> dict[str, np.ndarray]:
        """All rows, in ascending order of their keys (copies)."""
        keys = np.sort(np.fromiter(self._places, np.uint64, len(self)))
        return self._read(keys, np.fromiter(map(self._places.__getitem__, keys.tolist()), np.int64, keys.size))

    def _read(self, keys: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
        dtype = cast(str, cast(Home, self.table.storage).key_dtype)
        return {"keys": keys.astype(dtype), **dict(zip(self._names, self._store.read(places), strict=True))}
