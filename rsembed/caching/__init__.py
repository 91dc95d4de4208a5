"""Tables larger than device memory: which rows to keep in a cache, where the others live, and what it costs.

The policy runs on the host in numpy and knows only ids and slot numbers; whoever uses it moves the rows.
"""

from rsembed.caching.backing import BackingStore as BackingStore
from rsembed.caching.backing import Generation as Generation
from rsembed.caching.near_rows import NearRows as NearRows
from rsembed.caching.near_rows import call_host as call_host
from rsembed.caching.set_associative import NUM_WAYS as NUM_WAYS
from rsembed.caching.set_associative import Admission as Admission
from rsembed.caching.set_associative import SetAssociativeCache as SetAssociativeCache
from rsembed.caching.set_associative import num_sets_for as num_sets_for
from rsembed.caching.set_associative import set_of as set_of
from rsembed.caching.statistics import CacheCounts as CacheCounts
from rsembed.caching.statistics import CacheStatistics as CacheStatistics
from rsembed.caching.statistics import unique_misses_by_group as unique_misses_by_group
