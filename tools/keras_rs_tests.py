"""A plugin of pytest for keras-rs' own tests: CPUs pass for devices with SparseCores, and this wing for their library.

python -m pytest -p tools.keras_rs_tests keras_rs/src/layers/embedding/jax       (see `make test-clients`)
"""

import functools

import jax

from rsembed.sparsecore.alias import install_as_jax_tpu_embedding

install_as_jax_tpu_embedding()

from keras_rs.src.layers.embedding.jax.distributed_embedding import DistributedEmbedding  # noqa: E402

DistributedEmbedding.has_sparsecores = classmethod(lambda cls: True)


def _of_any_platform(function):
    """The function of `jax`, to which TPUs are what the machine has."""
    return functools.wraps(function)(lambda backend=None: function(None if backend == "tpu" else backend))


jax.devices, jax.device_count = _of_any_platform(jax.devices), _of_any_platform(jax.device_count)
