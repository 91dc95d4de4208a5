"""Programs that import `jax_tpu_embedding` find this wing instead, on any backend."""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "lib.nn.embedding": "rsembed.sparsecore.embedding",
    "lib.nn.embedding_spec": "rsembed.sparsecore.embedding_spec",
    "lib.nn.table_stacking": "rsembed.sparsecore.table_stacking",
    "lib.nn.embedding_pipelining_utils": "rsembed.sparsecore.embedding_pipelining_utils",
    "lib.flax.linen.embed": "rsembed.sparsecore.linen.embed",
    "lib.flax.linen.embed_optimizer": "rsembed.sparsecore.linen.embed_optimizer",
    "lib.flax.nnx.embed": "rsembed.sparsecore.nnx.embed",
    "lib.fdo.fdo_client": "rsembed.fdo.client",
    "lib.fdo.file_fdo_client": "rsembed.fdo.client",
    "lib.fdo.csv_file_fdo_client": "rsembed.fdo.client",
    "utils.utils": "rsembed.sparsecore.utils",
}
"""Modules below `jax_tpu_embedding.sparsecore`, and the modules that replace them."""
ROOT = "jax_tpu_embedding"


def install_as_jax_tpu_embedding() -> contextlib.ExitStack:
    """From now on, `import jax_tpu_embedding.sparsecore...` finds this wing, in this process.

    For libraries that are clients of the JAX SparseCore API, such as `keras_rs.layers.DistributedEmbedding`: call it
    before they are imported. A script need not be changed, `python -m rsembed.sparsecore SCRIPT` runs it so.

    Returns: a context that takes the modules away again where it ends; without `with`, they stay.

    Raises: RuntimeError: the original was imported before.

    Example:
      >>> with install_as_jax_tpu_embedding():
      ...     from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec
      >>> embedding_spec.__name__
      'rsembed.sparsecore.embedding_spec'
    """
    if ROOT in sys.modules:
        raise RuntimeError(
            f"{ROOT} was imported before, from {getattr(sys.modules[ROOT], '__file__', None) or 'this alias'}; call "
            "install_as_jax_tpu_embedding first, and once."
        )
    undo = contextlib.ExitStack()
    for name, own in MODULES.items():
        _place(f"{ROOT}.sparsecore.{name}", importlib.import_module(own), undo)
    return undo


def _place(name: str, module: ModuleType, undo: contextlib.ExitStack) -> None:
    """Makes a module importable under a name, in packages that are made where they are missing."""
    sys.modules[name] = module
    undo.callback(sys.modules.pop, name, None)
    package, _, own_name = name.rpartition(".")
    if package:
        if package not in sys.modules:
            made = ModuleType(package, "A package of jax-tpu-embedding, of which rsembed has the modules.")
            made.__path__, made.__spec__ = [], ModuleSpec(package, None, is_package=True)
            _place(package, made, undo)
        setattr(sys.modules[package], own_name, module)
