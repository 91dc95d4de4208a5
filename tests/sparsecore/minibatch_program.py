"""One step of a model that needs minibatches, in one process or several."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec
from tests.sparsecore import small_world
from tests.world import mesh_of

ROWS, DIM, BATCH, IDS = 64, 8, 32, 6
TIGHT = {"max_ids_per_partition": 24, "max_unique_ids_per_partition": 6}
"""With them a batch takes several minibatches."""


def specs_for(devices, cores=1, **limits):
    fields = {"initializer": jax.nn.initializers.normal(), "combiner": "mean"} | limits
    rule = embedding_spec.AdagradMomentumOptimizerSpec(0.5)
    specs = small_world.feature_specs(
        {"words": ROWS}, {"history": ("words", BATCH)}, optimizer=rule, **fields
    )
    return small_world.place(specs, devices, cores)


def make_ids():
    """The first half of the batch repeats two ids and needs no minibatch, the second half has many."""
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH, IDS))
    ids[: BATCH // 2] %= 2
    return ids


def run_step(devices, limits=None, **options):
    """Minibatches, activations and the updated table, on the first devices of all processes."""
    mesh = mesh_of(devices)
    specs = specs_for(devices, **(limits or {}))
    share = BATCH // jax.process_count()
    ids = make_ids()[jax.process_index() * share :][:share]
    processed, statistics = small_world.preprocess(
        specs, {"history": ids}, devices=devices, local=mesh.local_mesh.size, **options
    )
    enable = options.get("enable_minibatching", False)

    def step(processed, variables):
        matmul_options = {"global_device_count": devices, "enable_minibatching": enable}
        activations = embedding.sparse_dense_matmul(processed, variables, specs, **matmul_options)
        updated = embedding.sparse_dense_matmul_grad(
            activations, processed, variables, specs, **matmul_options
        )
        return processed.num_minibatches, activations["history"], updated["words"].table

    sharding = NamedSharding(mesh, P("x"))
    on_mesh = jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(sharding, array), processed
    )
    variables = small_world.init(specs, devices)
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    gathered = multihost_utils.process_allgather(run(on_mesh, variables), tiled=True)
    return [np.asarray(array) for array in gathered], statistics
