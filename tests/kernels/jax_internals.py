"""Classes of `jax._src` for the indices of a kernel's references."""

from jax._src.state.indexing import NDIndexer as NDIndexer, Slice as Slice
from jax._src.state.types import TransformedRef as TransformedRef
