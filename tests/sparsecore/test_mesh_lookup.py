"""Lookup and update over meshes of any shape equal dense loops on one device."""

import collections
import functools

import jax
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import Mesh

from rsembed.sparsecore import mesh_lookup
from tests import oracles
from tests.sparsecore import small_world
from tests.world import assert_same

MESHES = {
    "three devices": ((3,), "x", "x", 2),
    "one of two equal axes": ((2, 2), "xy", "x", 2),
    "two of three axes, out of order": ((2, 2, 2), "xyz", ("z", "x"), 1),
}


def mesh_of(shape, names):
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), tuple(names))


@functools.cache
def trained(name):
    """Initial tables, the activations of three batches, and the tables after each."""
    shape, names, axes, cores = MESHES[name]
    devices = mesh_lookup.table_mesh(mesh_of(shape, names), axes)
    specs = small_world.placed_specs(devices.num_devices, cores, is_stacked=name != "three devices")
    tables = mesh_lookup.MeshTables(feature_specs=specs, devices=devices, num_sc_per_device=cores)
    variables = tables.init(jax.random.key(5))
    small_world.assert_padding_is_zero(specs, variables)

    @jax.jit
    def run(variables, inputs, gradients):
        activations = tables.look_up(variables, inputs)
        return activations, tables.update(gradients, variables, None, inputs)

    found = [(small_world.logical_tables(variables, specs), None)]
    for seed in range(3):
        ids, gradients = small_world.draw_batch(seed)
        inputs = small_world.prepare(tables, ids)
        activations, variables = run(variables, inputs, gradients)
        small_world.assert_padding_is_zero(specs, variables)
        found.append((small_world.logical_tables(variables, specs), activations))
    return [jax.tree.map(np.asarray, pair) for pair in found]


@pytest.mark.slow_rows("one of two equal axes")
@pytest.mark.parametrize("name", MESHES)
def test_lookup_and_update_equal_dense_loops(name):
    found = trained(name)
    tables, slots = found[0][0], small_world.full_slots(0.1)
    for seed, (updated, activations) in enumerate(found[1:]):
        ids, gradients = small_world.draw_batch(seed)
        small_world.assert_close(activations, small_world.dense_activations(tables, ids))
        tables, slots = small_world.dense_step(
            tables, slots, ids, gradients, oracles.adagrad_step, learning_rate=0.5
        )
        small_world.assert_close(updated, tables)


def test_updated_tables_keep_their_names_in_any_container():
    specs = small_world.placed_specs(2, 2, is_stacked=False)
    tables = mesh_lookup.MeshTables(
        feature_specs=specs,
        devices=mesh_lookup.table_mesh(mesh_of((2,), "x"), "x"),
        num_sc_per_device=2,
    )
    ids, gradients = small_world.draw_batch(0)
    inputs, variables = small_world.prepare(tables, ids), tables.init(jax.random.key(5))
    update = jax.jit(lambda variables: tables.update(gradients, variables, None, inputs))
    wanted = update(variables)
    for container in (collections.OrderedDict, FrozenDict):
        given = container(dict(reversed(variables.items())))
        found = update(given)
        assert jax.tree.structure(found) == jax.tree.structure(given)
        for name, updated in wanted.items():
            assert_same(found[name], updated)
