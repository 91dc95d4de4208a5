"""Tables larger than device memory: which rows to keep in a cache, where the others live, and what it costs.

The policy runs on the host in numpy and knows only ids and slot numbers; whoever uses it moves the rows.
"""

from rsembed.caching.set_associative import Admission as Admission
from rsembed.caching.set_associative import CacheCounts as CacheCounts
from rsembed.caching.set_associative import CacheStatistics as CacheStatistics
from rsembed.caching.set_associative import SetAssociativeCache as SetAssociativeCache
