"""A second tier for tables with keys: rows that find no room on the devices wait on the host, or on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from rsembed.bags import is_traced
from rsembed.checks import PositiveInt, validated
from rsembed.collection.embeddings import EmbeddingCollection
from rsembed.collection.moving import Moving
from rsembed.collection.state import Batch, EmbeddingState
from rsembed.homes.home import on_host
from rsembed.homes.keyed_store import KeyedStore


class SecondTier:
    """Rows of a table with keys that leave the devices with all that belongs to them, and come back when they are read.

    `fetch` goes before every compiled step, with the batch that it reads: keys of the batch whose rows are here get
    them back, with their optimizer state and counts, and for these and for new keys others leave, by the table's
    `eviction`. So a step never finds the table full, and training gives the numbers of a table that has room for all.
    Nothing moves inside of a step: with `when_full="error"`, which says so if `fetch` was forgotten, nothing is lost.

    The tier belongs to the newest state. Save both together, `tier.rows()` by `checkpoint.save`, and give them back to
    `put` beside the state that was saved with them.

    Args:
      collection: the tables.
      table: name of one with `storage=Hashed(...)`.
      num_rows: room for so many rows; space is taken for those that are used.
      folder: where they are kept, in files without a name that last as long as the tier; None keeps them in memory.

    Raises:
      ValueError: there is no such table, it has no keys, or its rule moves all rows in every step.
      NotImplementedError: several processes would share the rows.

    Example:
      >>> import jax, numpy as np, rsembed as rs
      >>> table = rs.TableSpec(name="user", vocabulary_size=4, embedding_dim=2, storage=rs.Hashed())
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="who", table_spec=table)])
      >>> state, tier = collection.init(jax.random.key(0)), rs.SecondTier(collection, "user", num_rows=1_000)
      >>> for keys in ([1, 2, 3], [4, 5, 6], [1, 2]):
      ...     batch = {"who": np.array(keys)}
      ...     state = tier.fetch(state, batch)
      ...     state = collection.update(state, batch, {"who": np.ones((len(keys), 2), np.float32)})
      >>> collection.tables(state)["user"]["keys"].tolist(), tier.rows()["keys"].tolist()
      ([1, 2, 5, 6], [3, 4])
    """

    @validated
    def __init__(
        self,
        collection: EmbeddingCollection,
        table: str,
        *,
        num_rows: PositiveInt,
        folder: str | os.PathLike[str] | None = None,
    ):
        self.collection, self._moving = collection, collection.logical.moving(table)
        self.exchange = Exchange(self._moving, num_rows, folder)
        self._name = self._moving.stack_name

    def __len__(self) -> int:
        return len(self.exchange.store)

    def fetch(self, state: EmbeddingState, batch: Batch) -> EmbeddingState:
        """The state with the rows of a batch on the devices, and with room for new keys; not inside `jit`.

        The state is given away, as to a step that donates it. It waits for the step before.

        Raises: RuntimeError: the keys of the batch find no room, those that leave find none here, or this is inside
          `jit`.
        """
        self.collection.check_state(state)
        batch = self.collection.prepare(batch)
        if is_traced((state, batch)):
            raise RuntimeError("fetch works beside compiled programs; call it outside of jit, before the step.")
        params, slots = self.exchange(state.tables[self._name], state.slots[self._name], batch, state.step)
        return state._replace(tables=state.tables | {self._name: params}, slots=state.slots | {self._name: slots})

    def rows(self) -> dict[str, np.ndarray]:
        """All rows that are here by key, as `collection.tables` returns them (copies)."""
        return self.exchange.store.rows()

    def put(self, rows: Mapping[str, Any]) -> None:
        """Keeps rows: of another tier, of a file, or those that `collection.evict` returned.

        Raises: ValueError: an array is missing or does not fit. RuntimeError: there is no room for so many.
        """
        self.exchange.store.put(rows)


class Exchange:
    """What `fetch` does to parameters and slots of a table, which are given away."""

    def __init__(self, moving: Moving, num_rows: int, folder: str | os.PathLike[str] | None):
        table, devices = moving.table, moving.rows.devices
        if table.optimizer.moves_all_rows:
            raise ValueError(
                f"table {table.name!r}: {type(table.optimizer).__name__} moves all rows in every step, also those in a "
                "second tier; take a rule of the rows of a batch."
            )
        if devices.num_processes > 1:
            raise NotImplementedError(
                f"table {table.name!r}: one process must hold the rows of a second tier; make the mesh of one process' "
                "devices."
            )
        self.moving, self.store = moving, KeyedStore(table, num_rows, folder)

    def __call__(self, params: Any, slots: Any, batch: Any, number: Any) -> tuple[Any, Any]:
        """Raises: RuntimeError: there is no room; then nothing has changed."""
        found, store = self.moving.strangers(params, batch, number), self.store
        is_back, num_shards = store.has(found.keys), found.num_free.size
        num_back, num_coming = (
            np.bincount(found.shard[mask], minlength=num_shards) for mask in (is_back, is_back | found.is_admitted)
        )
        num_rows = self.moving.num_rows(params)
        # There may be fewer that can leave than new keys want: for these the step has its own rule.
        num_leaving = np.clip(num_coming - found.num_free, 0, num_rows - found.num_free - found.num_held)
        self._check_room(num_back, num_rows - found.num_held, int(num_leaving.sum()))
        coming = store.take(found.keys[is_back])
        coming["last_step"][:] = int(on_host(number))  # so that changes since the last step have them
        if num_leaving.any():
            params, gone = self.moving.make_room(params, slots, batch, num_leaving)
            store.put(gone)
        if is_back.any():
            params, slots = self.moving.take_in(params, slots, coming)
        return params, slots

    def _check_room(self, num_back: np.ndarray, room: np.ndarray, num_leaving: int) -> None:
        where, store = f"table {self.store.table.name!r}", self.store
        if (missing := np.maximum(num_back - room, 0).sum()) > 0:
            raise RuntimeError(
                f"{where}: {missing} keys that come back find no room beside those of the batch in "
                f"{store.table.vocabulary_size} rows, of which each device has its share; make vocabulary_size larger, "
                "or the batch smaller."
            )
        if (missing := len(store) - int(num_back.sum()) + num_leaving - store.num_rows) > 0:
            raise RuntimeError(
                f"{where}: {missing} rows that leave find no room among num_rows={store.num_rows} of the second tier; "
                "make it larger, or let keys go for good, with collection.evict."
            )
