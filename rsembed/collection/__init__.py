"""EmbeddingCollection: all tables of a model behind three functional calls, on one device or a mesh.

```
embeddings.py   what users call; every method is one function of what a single device holds
├─ inputs.py    batches in canonical form: bags on one device, padded arrays split by sample on a mesh
├─ devices.py   the mesh: which axes, how functions run on every device, what is gathered
├─ engine.py    lookups, row gradients and steps of all stacks, each one function on every device
├─ serving.py   lookups that need nothing of this library, for files and other devices
└─ stack.py     the state, rows of one table or several, the features that read them, and the tables by name
     rows.py        the way to rows that are here, whole or by column, or have an owner each, whom all devices ask
     dense_rows.py  an array of rows, and where each lies; see `rsembed.storage` for other storages
     host_rows.py   rows on the host, which travel
```
"""

from rsembed.collection.embeddings import EmbeddingCollection as EmbeddingCollection
from rsembed.collection.embeddings import value_and_grad as value_and_grad
from rsembed.collection.engine import LookupStatistics as LookupStatistics
from rsembed.collection.serving import for_serving as for_serving
from rsembed.collection.stack import EmbeddingState as EmbeddingState
