"""Storages of the rows of tables: in an array, by 64-bit key, or on the host.

A storage works with the rows of one device and does not know about other devices.
`collection/rows.py` passes ids to it and gets vectors back, on one device or a mesh.
`TableSpec(storage=...)` chooses the storage. Without `storage`, rows are in an array.

    protocol.py         the interface of all storages, and groups of tables that share one storage
    dense_rows.py       rows in an array, and the layouts that give the position of each row
    hashed.py           rows for 64-bit keys, which get a row when they are first trained
    hashed_rows.py      arrays of keyed tables on one device: initial values, rounding, growth
    backing_store.py    rows on the host, and their exchange with a cache on the device
    host_cached.py      a cache of such rows, searched by compiled programs
    set_associative.py  a set-associative cache of such rows, controlled on the host
    logical_rows.py     reads and writes the rows of keyed tables by key
    donation.py         calls of programs that donate arrays, safe from Ctrl-C
    row_map.py          map from keys to rows: open addressing, free rows, last uses and counts
"""

from rsembed.storage.hashed import (
    ROWS_BY_KEY as ROWS_BY_KEY,
    Hashed as Hashed,
    RowNumbers as RowNumbers,
)
from rsembed.storage.host_cached import HostCached as HostCached
from rsembed.storage.protocol import Storage as Storage
from rsembed.storage.set_associative import (
    Admission as Admission,
    CacheCounts as CacheCounts,
    SetAssociativeCache as SetAssociativeCache,
)
