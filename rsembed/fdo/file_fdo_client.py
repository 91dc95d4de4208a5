"""Statistics in NumPy's `.npz` files: one file per process, holding every record since the start, or their maximum."""

from __future__ import annotations

import io

import numpy as np

from rsembed.fdo.client import FileFDOClient
from rsembed.fdo.statistics import History
from rsembed.fdo.statistics import SparseDenseMatmulInputStats as SparseDenseMatmulInputStats


class NPZFileFDOClient(FileFDOClient):
    """Keeps one row per recorded batch and exchanges them through files in a shared folder.

    With several processes, `publish` and `load` wait for one another: every process must call both, in the same
    order. A folder belongs to one run, but whoever reads it, one process or several, gets the maximum of all files.

    Args:
      base_dir: the folder; all processes must see it.
      retain_history: keep every record; False keeps the running maximum alone, so that files never grow.

    Example:
      >>> import tempfile
      >>> client = NPZFileFDOClient(tempfile.mkdtemp())
      >>> client.record(SparseDenseMatmulInputStats(max_ids_per_partition={"words": [3, 4]}))
      >>> client.publish()
      >>> client.load().max_ids_per_partition["words"].tolist()
      [3, 4]
    """

    _extension = "npz"

    @staticmethod
    def _encode(history: History) -> bytes:
        content = io.BytesIO()
        arrays: dict = dict(history)
        np.savez(content, **arrays)
        return content.getvalue()

    @staticmethod
    def _decode(content: bytes) -> History:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
