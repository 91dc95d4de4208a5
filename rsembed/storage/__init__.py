"""Storages of the rows of tables: in an array, by 64-bit key, or on the host.

A storage works with the rows of one device and does not know about other devices.
`collection/rows.py` passes ids to it and gets vectors back, on one device or a mesh.
`TableSpec(storage=...)` chooses the storage. Without `storage`, rows are in an array.

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
