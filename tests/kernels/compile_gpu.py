"""Compiles the GPU kernels with JAX's CUDA plugin for an H100, which this machine may lack.

    python -m tests.kernels.compile_gpu adam "adagrad 100 bfloat16"

The program prints a line of JSON for each case.
"""

import json
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import rsembed as rs
from rsembed.kernels import gpu
from tests.kernels.cases import training_step

# The description of the GPU that the compiler needs. The numbers are from NVIDIA's data sheet.
H100 = """
gpu_device_info { cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  clock_rate_ghz: 1.98 threads_per_block_limit: 1024 threads_per_core_limit: 2048 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84978434048 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def first_state():
    """A function that makes the state of two stacked tables, and the shapes of its arguments."""
    tables = [rs.TableSpec(name, 500, 64) for name in ("a", "b")]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(table.name, table) for table in tables])
    return collection.init, (jax.eval_shape(lambda: jax.random.key(0)),)


def compile_case(mesh, name, dim="128", dtype="float32"):
    train, shapes = first_state() if name == "init" else training_step(gpu, name, int(dim), dtype)
    whole = NamedSharding(mesh, P())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        donated = () if name == "init" else (0, 1)
        jitted = jax.jit(train, in_shardings=whole, out_shardings=whole, donate_argnums=donated)
        compiled = jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    state = jax.tree.leaves(shapes[:2])
    return {
        "kernels": compiled.as_text().count("__gpu$xla.gpu.triton"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "state_bytes": sum(array.size * array.dtype.itemsize for array in state),
    }


def main(*cases):
    # This call registers the plugin.
    jax.devices()
    topology = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    for case in cases:
        print(json.dumps({"case": case, **compile_case(mesh, *case.split())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
