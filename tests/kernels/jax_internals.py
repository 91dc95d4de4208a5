"""The only place that reaches into `jax._src`: what stands between a kernel's references and their indices."""

from jax._src.state.indexing import NDIndexer as NDIndexer, Slice as Slice
from jax._src.state.types import TransformedRef as TransformedRef
