"""The JAX SparseCore embedding API on any backend.

The JAX SparseCore API has table stacking, partitioned input, and fused lookup and update.

Modules are named as in jax-tpu-embedding: `embedding`, `embedding_spec`, `table_stacking`, `utils`,
`linen.embed`, `linen.embed_optimizer`, `nnx.embed` and `embedding_pipelining_utils`.
"""

import contextlib
import importlib.machinery
import sys
import types

__all__ = ["install_as_jax_tpu_embedding"]
_MODULES = {
    "lib.nn.embedding": "rsembed.sparsecore.embedding",
    "lib.nn.embedding_spec": "rsembed.sparsecore.embedding_spec",
    "lib.nn.table_stacking": "rsembed.sparsecore.table_stacking",
    "lib.nn.embedding_proto_utils": "rsembed.sparsecore.embedding",
    "lib.nn.embedding_pipelining_utils": "rsembed.sparsecore.embedding_pipelining_utils",
    "lib.flax.linen.embed": "rsembed.sparsecore.linen.embed",
    "lib.flax.linen.embed_optimizer": "rsembed.sparsecore.linen.embed_optimizer",
    "lib.flax.nnx.embed": "rsembed.sparsecore.nnx.embed",
    "lib.fdo.fdo_client": "rsembed.fdo.client",
    "lib.fdo.file_fdo_client": "rsembed.fdo.client",
    "lib.fdo.csv_file_fdo_client": "rsembed.fdo.client",
    "utils.utils": "rsembed.sparsecore.utils",
    "examples.models.shakespeare.dataset": "rsembed.datasets.text",
}
"""Modules in `jax_tpu_embedding.sparsecore`, and the modules of rsembed that replace them."""


def install_as_jax_tpu_embedding() -> contextlib.ExitStack:
    """Makes `import jax_tpu_embedding.sparsecore...` import `rsembed.sparsecore` in this process.

    Call `install_as_jax_tpu_embedding` before you import a library that uses the JAX SparseCore
    API, such as `keras_rs`. After the call, `keras_rs.layers.DistributedEmbedding` runs on rsembed.
    To run a script unchanged, use `python -m rsembed.sparsecore SCRIPT`.

    Returns: a context manager that removes the `jax_tpu_embedding` modules of rsembed from
      `sys.modules` at the end of its `with` block. Without a `with` statement, the
      `jax_tpu_embedding` modules of rsembed stay in `sys.modules`.

    Raises: RuntimeError: jax-tpu-embedding itself has already been imported.

    Example:
      >>> with install_as_jax_tpu_embedding():
      ...     from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec
      >>> embedding_spec.__name__
      'rsembed.sparsecore.embedding_spec'
    """
    if original := sys.modules.get("jax_tpu_embedding"):
        raise RuntimeError(
            "jax_tpu_embedding was imported before, from "
            f"{getattr(original, '__file__', None) or 'this alias'}; call "
            "install_as_jax_tpu_embedding first, and once."
        )
    modules: dict[str, types.ModuleType] = {}
    for path, rsembed_name in _MODULES.items():
        name = f"jax_tpu_embedding.sparsecore.{path}"
        modules[name] = importlib.import_module(rsembed_name)
        # An import of a module first imports its parent packages, so add an empty package for each.
        while (name := name.rpartition(".")[0]) and name not in modules:
            package = types.ModuleType(name, "A package with modules of rsembed.")
            package.__path__ = []
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            modules[name] = package
    undo = contextlib.ExitStack()
    for name, module in modules.items():
        sys.modules[name] = module
        undo.callback(sys.modules.pop, name, None)
        parent_name, _, child_name = name.rpartition(".")
        if parent_name:
            setattr(modules[parent_name], child_name, module)
    return undo
