"""EmbeddingCollection: the embedding tables of a model, on one device or on a mesh.

```
embeddings.py        EmbeddingCollection: the public methods
├─ inputs.py         checks a batch and converts it to the form of compiled programs
├─ prepared.py       the form of compiled programs: lists of ids, one part per device of a mesh
├─ placement.py      placements of tables, and whole tables read and written by name
├─ devices.py        the devices of a mesh, and functions that run on each of them
├─ engine.py         lookups, row gradients and steps of all stacks
├─ serving.py        lookups in plain JAX, for files and other processes
└─ stack.py          the state, and stacks: tables in one storage, with the features that read them
     host_stack.py   stacks that are read and written on the host
     occurrences.py  ids of a batch as row numbers or keys, with their bags
     rows.py         lookups and steps of tables that are copied to every device, or split by column
     asked_rows.py   lookups and steps of sharded rows, which are requested from their owners
     host_rows.py    moves rows between host and device
```

The storages, which hold the arrays of rows, are in `rsembed.storage`.
"""

from rsembed.collection.embeddings import (
    EmbeddingCollection as EmbeddingCollection,
    value_and_grad as value_and_grad,
)
from rsembed.collection.engine import LookupStatistics as LookupStatistics
from rsembed.collection.serving import for_serving as for_serving
from rsembed.collection.stack import EmbeddingState as EmbeddingState
