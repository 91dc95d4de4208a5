"""Statistics in text files that a spreadsheet opens."""

from __future__ import annotations

import csv
import io

import numpy as np

from rsembed.fdo.client import FileFDOClient
from rsembed.fdo.statistics import History

HEADER = ["key", "values"]


class CSVFileFDOClient(FileFDOClient):
    """Keeps statistics like `NPZFileFDOClient`, in CSV files: `<stack>_<statistic>,<values>`, a line per record.

    Args:
      base_dir: the folder; all processes must see it.
      retain_history: keep every record; False keeps the running maximum alone, so that files stay small.
    """

    _extension = "csv"

    @staticmethod
    def _encode(history: History) -> bytes:
        content = io.StringIO(newline="")
        writer = csv.writer(content, lineterminator="\r\n")
        writer.writerow(HEADER)
        for key, values in history.items():
            writer.writerows([key, " ".join(map(str, row))] for row in np.atleast_2d(values).tolist())
        return content.getvalue().encode()

    @staticmethod
    def _decode(content: bytes) -> History:
        if not content.endswith(b"\n"):
            raise ValueError("the last line has no end; the file was cut off.")
        header, *lines = list(csv.reader(io.StringIO(content.decode(), newline=""))) or [[]]
        if header != HEADER:
            raise ValueError(f"a statistics file starts with the line {','.join(HEADER)!r}, got {','.join(header)!r}.")
        rows: dict[str, list[list[int]]] = {}
        for line in lines:
            if len(line) != len(HEADER):
                raise ValueError(f"a line of a statistics file is {','.join(HEADER)!r}, got {','.join(line)!r}.")
            key, values = line
            rows.setdefault(key, []).append([int(value) for value in values.split()])
        arrays = {key: np.asarray(values, np.int64) for key, values in rows.items()}
        return {key: values[0] if len(values) == 1 else values for key, values in arrays.items()}
