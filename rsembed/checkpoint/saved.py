"""An array that lies in a checkpoint: read block by block, and verified while it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np


class CorruptCheckpointError(ValueError):
    """The files are not what was written."""


Blocks = Iterator[tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """What an array of a checkpoint is, and the way to its numbers, which are still on the disk.

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
        """Its rows in order, a few MiB at a time, each with the number of its first row.

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
    """An array on the devices of a sharding, None for the usual one, from rows that come piece by piece.

    The host holds no more of it than its own devices do.

    Args:
      shape: of the whole array, with at least one dimension.
      dtype: of the array.
      sharding: where it goes.
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
            part: tuple[Any, ...] = (is_inside, *(slice(*bound) for bound in columns))
            shard[rows[is_inside] - start] = values[part]
    if sharding is None:
        return jax.device_put(shards[bounds(everything)])
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[bounds(index)])
