"""The JAX SparseCore embedding API on any backend: stacking, partitioned input, fused lookup and update.

Modules keep the published names: `embedding`, `embedding_spec`, `table_stacking`, `utils`, `linen.embed`,
`linen.embed_optimizer`, `nnx.embed` and `embedding_pipelining_utils`.
"""

from rsembed.sparsecore.alias import install_as_jax_tpu_embedding as install_as_jax_tpu_embedding
