"""Storages of table rows: dense arrays, tables with 64-bit keys, and tables in host memory.

A storage works with the rows of one device and does not know about other devices.
`collection/rows.py` and, for sharded rows, `collection/asked_rows.py` pass ids to a storage and get
vectors back.
`TableSpec(storage=...)` chooses the storage of a table. By default, the rows are in one array.

    protocol.py         the interface of all storages, and groups of tables that share one storage
    row_layout.py       position of each row of a stack in one array
    dense_rows.py       storage in one array
    initial_states.py   initial rows and slots of the dense tables of a collection
    hashed.py           storage for 64-bit keys; a key gets a row when it is first trained
    row_numbers.py      storage for 64-bit keys that are row numbers
    hashed_rows.py      arrays of a keyed table on one device: initial values, rounding, growth
    backing_store.py    rows in host memory, and their exchange with a device cache
    host_cached.py      device cache of rows in host memory, searched by compiled programs
    set_associative.py  set-associative device cache of rows in host memory, managed on the host
    logical_rows.py     reads and writes the rows of keyed tables by key
    donation.py         calls programs that donate arrays, so that Ctrl-C does not lose the arrays
    row_map.py          map from keys to rows: a hash table, the free rows, and the uses of each key
"""

from rsembed.storage.hashed import (
    ROWS_BY_KEY as ROWS_BY_KEY,
    Hashed as Hashed,
)
from rsembed.storage.host_cached import HostCached as HostCached
from rsembed.storage.protocol import Storage as Storage
from rsembed.storage.row_numbers import RowNumbers as RowNumbers
from rsembed.storage.set_associative import (
    Admission as Admission,
    CacheCounts as CacheCounts,
    SetAssociativeCache as SetAssociativeCache,
)
