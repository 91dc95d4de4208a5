"""Lookup and update on meshes of different shapes equal dense loops on one device."""

import collections

import jax
import pytest
from flax.core import FrozenDict

from rsembed.sparsecore import mesh_lookup
from tests import oracles
from tests.sparsecore import small_world
from tests.world import assert_same, mesh_of

MESHES = {
    "three devices": ((3,), "x", 2),
    "two of three axes, out of order": ((2, 2, 2), ("z", "x"), 1),
}


@pytest.mark.slow_rows("three devices")
@pytest.mark.parametrize("name", MESHES)
def test_lookup_and_update_equal_dense_loops(name):
    shape, axes, cores = MESHES[name]
    devices = mesh_lookup.table_mesh(mesh_of(*shape), axes)
    specs = small_world.placed_specs(devices.num_devices, cores, is_stacked=name != "three devices")
    tables = mesh_lookup.ShardedTables(
        feature_specs=specs, devices=devices, num_sc_per_device=cores
    )

    @jax.jit
    def train(variables, inputs, gradients):
        activations = tables.look_up(variables, inputs)
        return activations, tables.update(gradients, variables, None, inputs)

    variables = tables.init(jax.random.key(5))
    wanted, slots = small_world.logical_tables(variables, specs), small_world.full_slots(0.1)
    for seed in range(3):
        ids, gradients = small_world.draw_batch(seed)
        activations, variables = train(variables, small_world.prepare(tables, ids), gradients)
        small_world.assert_close(activations, small_world.dense_activations(wanted, ids))
        wanted, slots = small_world.dense_step(
            wanted, slots, ids, gradients, oracles.adagrad_step, learning_rate=0.5
        )
        small_world.assert_close(small_world.logical_tables(variables, specs), wanted)
        small_world.assert_padding_is_zero(specs, variables)


def test_updated_tables_keep_their_names_in_any_container():
    specs = small_world.placed_specs(1, 2, is_stacked=False)
    tables = mesh_lookup.ShardedTables(
        feature_specs=specs, devices=mesh_lookup.table_mesh(mesh_of(1), "x")
    )
    ids, gradients = small_world.draw_batch()
    inputs, variables = small_world.prepare(tables, ids), tables.init(jax.random.key(5))
    update = jax.jit(lambda variables: tables.update(gradients, variables, None, inputs))
    wanted = update(variables)
    for container in (collections.OrderedDict, FrozenDict):
        reversed_variables = container(dict(reversed(variables.items())))
        actual = update(reversed_variables)
        assert jax.tree.structure(actual) == jax.tree.structure(reversed_variables)
        assert_same(dict(actual), wanted)
