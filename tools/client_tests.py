"""A plugin of pytest for tests of libraries that are written for jax-tpu-embedding, and for that library's own.

CPUs pass for devices with SparseCores, and this wing for their library. `make test-clients` runs, in checkouts:

    python -m pytest -p tools.client_tests keras_rs/src/layers/embedding/jax
    python -m pytest -p tools.client_tests recml/layers/linen/sparsecore_test.py
    python -m pytest -p tools.client_tests jax_tpu_embedding/sparsecore/lib/nn
"""

import functools
import importlib.util
import os
import re
import sys
import unittest
from pathlib import Path

import jax
from absl import flags

from rsembed.sparsecore import install_as_jax_tpu_embedding, table_stacking
from rsembed.sparsecore.embedding_spec import EmbeddingSpecRecord

install_as_jax_tpu_embedding()
# Helpers of the tests, and modules that the wing has not, are those of the checkout.
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "jax_tpu_embedding" and getattr(module, "__path__", None) == []:
        module.__path__.append(str(Path(*name.split(".")).absolute()))


def _of_one_stack(stacked_table, stacked_table_specs, donate=False):
    """What forty tests call by a private name."""
    specs, name = (
        EmbeddingSpecRecord(stacked_table_specs=(stacked_table_specs,)),
        stacked_table_specs.stack_name,
    )
    return table_stacking.unstack_and_unshard_stacked_tables({name: stacked_table}, specs, donate)


table_stacking._unstack_and_unshard_stacked_table = _of_one_stack

if importlib.util.find_spec("keras_rs"):
    from keras_rs.src.layers.embedding.jax.distributed_embedding import DistributedEmbedding

    DistributedEmbedding.has_sparsecores = classmethod(lambda cls: True)


def _of_any_platform(function):
    """The function of `jax`, to which TPUs are what the machine has."""
    return functools.wraps(function)(
        lambda backend=None: function(None if backend == "tpu" else backend)
    )


def pytest_runtest_setup(item):
    """Six tests of jax-tpu-embedding hold numbers of devices of 2 cores."""
    has_two = re.search(r"matmul_two_(tables|chips_sharded)\d", item.name)
    os.environ["RSEMBED_CORES_PER_DEVICE"] = "2" if has_two else "4"


_skip = unittest.TestCase.skipTest
unittest.TestCase.skipTest = lambda test, reason: (
    None if "supported on TPUs" in reason else _skip(test, reason)
)
jax.devices, jax.device_count = _of_any_platform(jax.devices), _of_any_platform(jax.device_count)
flags.FLAGS(["pytest"])
