"""Storages: what keeps the rows of tables.

A storage works with the rows of one device and does not know about others. `collection/rows.py`
brings ids to it and vectors back, on one device or a mesh. `TableSpec(storage=...)` chooses one;
without it, rows are in an array.

    protocol.py         what every storage must be able to do, and which tables share one
    dense_rows.py       rows in an array, and the layouts that say where each row is
    hashed.py           rows for 64-bit keys, made when a key appears; or for all keys below a bound
    hashed_rows.py      what a device keeps of such a table, first values of rows, and steps
    backing_store.py    rows on the host, and their exchange with a cache on the device
    host_cached.py      a cache of such rows that compiled programs search
    set_associative.py  a set-associative cache of such rows, decided on the host
    logical_rows.py     rows out of a keyed table and into one, by key
    donation.py         results of programs that donate arrays, safe from Ctrl-C
    row_map.py          which key has which row: open addressing, rows given and taken back, counts
"""

from rsembed.storage.hashed import ROWS_BY_KEY as ROWS_BY_KEY
from rsembed.storage.hashed import Hashed as Hashed
from rsembed.storage.hashed import RowNumbers as RowNumbers
from rsembed.storage.host_cached import HostCached as HostCached
from rsembed.storage.protocol import Storage as Storage
from rsembed.storage.set_associative import Admission as Admission
from rsembed.storage.set_associative import CacheCounts as CacheCounts
from rsembed.storage.set_associative import SetAssociativeCache as SetAssociativeCache
