"""One step of a model with or without minibatches, in one or several processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from rsembed.sparsecore import embedding_spec, mesh_lookup
from tests.sparsecore import small_world
from tests.world import mesh_of

ROWS, DIM, BATCH, IDS = 64, 8, 32, 6
TIGHT = {"max_ids_per_partition": 24, "max_unique_ids_per_partition": 6}
"""Limits for which a batch needs several minibatches."""


def specs_for(devices, cores=1, **limits):
    fields = {"initializer": jax.nn.initializers.normal(), "combiner": "mean"} | limits
    rule = embedding_spec.AdagradMomentumOptimizerSpec(0.5)
    specs = small_world.feature_specs(
        {"words": ROWS}, {"history": ("words", BATCH)}, optimizer=rule, **fields
    )
    return small_world.place(specs, devices, cores)


def make_ids():
    """Ids of a batch. The first half has only two distinct ids and fits into one minibatch."""
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH, IDS))
    ids[: BATCH // 2] %= 2
    return ids


def run_step(devices, limits=None, *, enable_minibatching=False, **options):
    """Numbers of minibatches, activations and updated table, and the statistics of the process.

    The step runs on the first `devices` devices of all processes.
    """
    tables = mesh_lookup.ShardedTables(
        feature_specs=specs_for(devices, **(limits or {})),
        devices=mesh_lookup.table_mesh(mesh_of(devices), "x"),
        enable_minibatching=enable_minibatching,
    )
    share = BATCH // jax.process_count()
    ids = make_ids()[jax.process_index() * share :][:share]
    processed, statistics = tables.preprocess({"history": ids}, **options)

    @jax.jit
    def step(processed, variables):
        activations = tables.look_up(variables, processed)
        updated = tables.update(activations, variables, None, processed)
        return processed.num_minibatches, activations["history"], updated["words"].table

    sharding = tables.devices.sharding(tables.devices.split)
    on_mesh = jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(sharding, array), processed
    )
    stepped = step(on_mesh, tables.init(jax.random.key(0)))
    return multihost_utils.process_allgather(stepped, tiled=True), statistics
