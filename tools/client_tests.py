"""Pytest plugin that runs tests of jax-tpu-embedding, and of libraries that use it, with rsembed.

The SparseCore wing takes the place of jax-tpu-embedding, and CPUs take the place of devices with
SparseCores. `make test-clients` runs these commands in checkouts of the libraries:

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
# Modules that the wing does not have, such as helpers of tests, are imported from the checkout.
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "jax_tpu_embedding" and getattr(module, "__path__", None) == []:
        module.__path__.append(str(Path(*name.split(".")).absolute()))


def _of_one_stack(stacked_table, stacked_table_specs, donate=False):
    """Takes the place of a private function that forty tests call."""
    specs = EmbeddingSpecRecord(stacked_table_specs=(stacked_table_specs,))
    name = stacked_table_specs.stack_name
    return table_stacking.unstack_and_unshard_stacked_tables({name: stacked_table}, specs, donate)


table_stacking._unstack_and_unshard_stacked_table = _of_one_stack

if importlib.util.find_spec("keras_rs"):
    from keras_rs.src.layers.embedding.jax.distributed_embedding import DistributedEmbedding

    DistributedEmbedding.has_sparsecores = classmethod(lambda cls: True)


def _of_any_platform(function):
    """A function of `jax` that uses the default devices of this machine in place of TPUs."""

    @functools.wraps(function)
    def on_default_backend(backend=None):
        if backend == "tpu":
            backend = None
        return function(backend)

    return on_default_backend


def pytest_runtest_setup(item):
    """Sets 2 cores per device for six tests of jax-tpu-embedding, which need them, else 4."""
    has_two = re.search(r"matmul_two_(tables|chips_sharded)\d", item.name)
    os.environ["RSEMBED_CORES_PER_DEVICE"] = "2" if has_two else "4"


_skip = unittest.TestCase.skipTest


def _skip_unless_for_tpus(test, reason):
    """Skips a test, unless the reason is that it needs TPUs."""
    if "supported on TPUs" not in reason:
        _skip(test, reason)


unittest.TestCase.skipTest = _skip_unless_for_tpus
jax.devices = _of_any_platform(jax.devices)
jax.device_count = _of_any_platform(jax.device_count)
flags.FLAGS(["pytest"])
