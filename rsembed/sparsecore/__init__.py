"""The JAX SparseCore embedding API on any backend: stacking, partitioned input, fused lookup and update.

Modules keep the published names: `embedding`, `embedding_spec`, `table_stacking`, `utils`, `linen.embed`,
`linen.embed_optimizer`, `nnx.embed` and `embedding_pipelining_utils`.
"""

from rsembed.refusals import refused_names as _refused_names
from rsembed.sparsecore.refused import NAMES as _REFUSED

__getattr__ = _refused_names(__name__, _REFUSED, globals())
