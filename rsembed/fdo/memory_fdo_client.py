"""Statistics in memory: nothing is written."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.fdo.client import FDOClient
from rsembed.fdo.statistics import (
    History,
    SparseDenseMatmulInputStats,
    append_history,
    record_of,
    running_maximum,
    to_statistics,
)


class MemoryFDOClient(FDOClient):
    """Keeps the running maximum; with several processes, `load` asks all of them through the devices.

    Every process must record the same stacks with the same layout, and call `load` together with the others.
    """

    def __init__(self) -> None:
        self._recorded: History = {}
        self._published: History = {}

    def record(self, data: SparseDenseMatmulInputStats) -> None:
        """Raises the running maximum."""
        self._recorded = running_maximum(append_history(self._recorded, record_of(data)))

    def publish(self) -> None:
        """Makes the running maximum the one that `load` returns."""
        self._published = dict(self._recorded)

    def load(self) -> SparseDenseMatmulInputStats:
        """The running maximum over all processes.

        Raises:
          LookupError: nothing was published.
        """
        if not self._published:
            raise LookupError("nothing was published yet; call record() and publish() before load().")
        merged = self._published
        if jax.process_count() > 1:
            # Counts fit 32 bits (a device holds at most 2^26 samples), the widest integer that travels by default.
            narrow = {key: values.astype(np.int32) for key, values in merged.items()}
            gathered = multihost_utils.process_allgather(narrow)
            merged = {key: np.max(values, axis=0).astype(np.int64) for key, values in gathered.items()}
        return to_statistics(merged)
