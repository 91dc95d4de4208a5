"""Storages: where the rows of a table are kept, other than in an array.

A storage holds the rows of one device and knows nothing of others; `TableSpec(storage=...)` names it, and the engine
in `collection/rows.py` brings ids to it and vectors back, on one device or a mesh.

    protocol.py      what every storage must be able to do, and which tables share one
    hashed.py        rows for keys of 64 bits, handed out as keys appear; or for keys below a bound, all there at first
    hashed_rows.py   what a device keeps of them, what a row starts from, and steps
    host_cached.py   rows on the host, those of late batches on the device
    set_associative.py   which of them those are, decided on the host
    logical_rows.py  rows out of such a table and into one, by key
    row_map.py       which key has which row: found by open addressing, handed out, taken back, counted
"""

from rsembed.storage.hashed import ROWS_BY_KEY as ROWS_BY_KEY
from rsembed.storage.hashed import Hashed as Hashed
from rsembed.storage.hashed import RowNumbers as RowNumbers
from rsembed.storage.host_cached import HostCached as HostCached
from rsembed.storage.protocol import Storage as Storage
from rsembed.storage.set_associative import Admission as Admission
from rsembed.storage.set_associative import CacheCounts as CacheCounts
from rsembed.storage.set_associative import SetAssociativeCache as SetAssociativeCache
