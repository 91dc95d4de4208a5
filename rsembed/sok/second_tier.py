"""A second tier of the wing: rows of an embedding variable that find no room on the devices, on the host or on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rsembed.bags import is_traced, padded_size
from rsembed.checks import PositiveInt, validated
from rsembed.collection.second_tier import Exchange
from rsembed.sok.key_bags import read_keys
from rsembed.sok.variables import EmbeddingVariable, state_of


class SecondTier:
    """Rows of an embedding variable that leave the devices with all that belongs to them, and come back.

    `fetch` goes before every training step, with the keys that it looks up; see `rsembed.SecondTier`, which this is for
    a variable. Where the original hands evicted pairs to the caller (`sparse_read_and_evict`), nothing is left to do.

    Args:
      variable: the table.
      num_rows: room for so many rows; space is taken for those that are used.
      folder: where they are kept, in files without a name that last as long as the tier; None keeps them in memory.

    Raises:
      ValueError: its rule moves all rows in every step.
      NotImplementedError: it has no hash table, or several processes would share the rows.

    Example:
      >>> import jax, numpy as np
      >>> from rsembed import sok
      >>> context = sok.Init(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("shard",)))
      >>> layer = sok.DistributedEmbedding("sum", 4, 2, slot_num=1, max_nnz=3, name="user")
      >>> tier = sok.SecondTier(layer.variable, num_rows=1_000)
      >>> for keys in ([[[1, 2, 3]]], [[[4, 5, 6]]], [[[1, 2, -1]]]):
      ...     tier.fetch(np.array(keys))
      ...     out, backward = layer.vjp(np.array(keys))
      ...     backward(np.ones_like(out))
      >>> sok.export_rows(layer.variable)["keys"].tolist(), tier.rows()["keys"].tolist()
      ([1, 2, 5, 6], [3, 4])
    """

    @validated
    def __init__(
        self, variable: EmbeddingVariable, *, num_rows: PositiveInt, folder: str | os.PathLike[str] | None = None
    ):
        table = variable.table
        if not table.use_hashtable:
            raise NotImplementedError(f"table {table.spec.name!r} has no hash table; its keys keep their rows.")
        self.variable, self._exchange = variable, Exchange(table.moving, num_rows, folder)

    def __len__(self) -> int:
        return len(self._exchange.store)

    def fetch(self, keys: Any) -> None:
        """Brings the rows of these keys back, and makes room for new ones; not inside `jit`.

        Args:
          keys: as the lookup takes them: an integer array in which -1 is no key, `Bags`, or lists of keys.

        Raises: RuntimeError: the keys find no room, those that leave find none here, or this is inside `jit`.
        """
        if is_traced((keys, self.variable.get_value())):
            raise RuntimeError("fetch works beside compiled programs; call it outside of jit, before the step.")
        table, state = self.variable.table, state_of(self.variable)
        if isinstance(keys, (np.ndarray, jax.Array)):
            keys = keys.reshape(-1, 1)
        lanes = jax.tree.map(np.asarray, read_keys(table, keys, None, "none").keys.reshape(-1))
        num_devices, num_keys = table.context.num_devices, lanes.is_key.size
        places = -(-padded_size(max(num_keys, 1)) // num_devices) * num_devices
        padded = jax.tree.map(lambda lane: np.pad(lane, (0, places - num_keys)), lanes)
        shards, slots = self._exchange(state.shards, state.slots, table.context.place(padded), state.step)
        self.variable.set_value(state._replace(shards=shards, slots=slots))

    def rows(self) -> dict[str, np.ndarray]:
        """All rows that are here by key, as `export_rows` returns them (copies)."""
        return self._exchange.store.rows()

    def put(self, rows: Mapping[str, Any]) -> None:
        """Keeps rows: of another tier, of a file, or those that `variable.evict` returned.

        Raises: ValueError: an array is missing or does not fit. RuntimeError: there is no room for so many.
        """
        self._exchange.store.put(rows)
