"""A pipelined trainer gives the numbers of a sequential one whose activations miss one update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.optimizers.rules import TensorFlowAdam
from rsembed.sparsecore import (
    embedding,
    embedding_pipelining_utils as pipelining,
    embedding_spec,
    mesh_lookup,
)
from tests import oracles
from tests.sparsecore import small_world
from tests.world import mesh_of

NUM_BATCHES = 4
CORES = 1
OPTIMIZER = embedding_spec.AdamOptimizerSpec(0.1)
SLOT_TOLERANCE = 1e-4
"""Moments add gradients of size ten, and their squares, over all batches."""


def mesh():
    return Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def dense_step(activations, targets, train_state, sc_fwd_aux):
    """Moves activations towards `scale * targets`; the scale is the dense parameter."""
    assert sc_fwd_aux is None
    gradients = {
        name: activations[name] - train_state["scale"] * targets[name] for name in activations
    }
    loss = sum(0.5 * jnp.sum(value * value) for value in gradients.values())
    train_state = {"scale": train_state["scale"] * 0.9, "steps": train_state["steps"] + 1}
    return gradients, loss, train_state, None


def batch(number):
    """Even and odd batches share many rows, so that staleness shows."""
    ids, targets = small_world.draw_batch(number)
    return {name: rows // 2 for name, rows in ids.items()}, targets


@functools.cache
def pipelined_run():
    """Losses by cycle, and tables, slots and dense state at the end."""
    specs = small_world.placed_specs(4, CORES, optimizer=OPTIMIZER)
    tables = mesh_lookup.MeshTables(
        feature_specs=specs, devices=mesh_lookup.table_mesh(mesh(), ("x", "y"))
    )
    data, replicated = NamedSharding(mesh(), P(("x", "y"))), NamedSharding(mesh(), P())
    variables = embedding.init_embedding_variables(
        jax.random.key(1),
        embedding.get_table_specs(specs),
        NamedSharding(mesh(), P(("x", "y"), None)),
        CORES,
    )
    before = small_world.logical_tables(variables, specs)
    look_up = pipelining.get_default_sc_fwd_function(specs, mesh())
    update = pipelining.get_default_sc_bwd_function(specs, mesh())

    def input_of(number):
        ids, targets = batch(number)
        processed = small_world.prepare(tables, ids)
        return pipelining.CurrentStepInput(processed, jax.device_put(targets, data))

    first = input_of(0)
    train_state = jax.device_put({"scale": jnp.float32(1), "steps": jnp.int32(0)}, replicated)
    state = pipelining.get_initial_state(
        first, train_state, variables, look_up, dense_step, data, data
    )
    shardings = pipelining.get_pipeline_state_sharding(
        pipelining.PipelineState, data, data, replicated, replicated
    )

    # The flag is traced here: one program for all cycles. The case of the published schedule passes it as a bool.
    @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
    def cycle(pipeline_input, train_state, variables, state, is_fake):
        return pipelining.step(
            pipeline_input,
            train_state,
            variables,
            state,
            look_up,
            dense_step,
            update,
            fake_tc_step=is_fake,
        )

    state, losses = jax.device_put(state, shardings), []
    for number in range(pipelining.get_pipeline_train_steps(NUM_BATCHES)):
        given = input_of(number) if number < NUM_BATCHES else jax.tree.map(jnp.zeros_like, first)
        is_fake = not pipelining.is_output_valid(number, NUM_BATCHES)
        loss, aux, train_state, variables, state = cycle(
            given, train_state, variables, state, is_fake
        )
        assert aux is None
        losses.append(float(loss))
    assert int(state.pipeline_step) == NUM_BATCHES + 2
    small_world.assert_padding_is_zero(specs, variables)
    return (
        losses,
        before,
        small_world.logical_variables(variables, specs),
        jax.tree.map(float, train_state),
    )


def sequential_run(tables, delay):
    """Losses and final tables of dense loops in which the update of a batch comes `delay` batches late."""
    slots, scale, waiting, losses = small_world.full_slots(0.0, 0.0), 1.0, [], []

    def apply(number, ids, gradients):
        return small_world.dense_step(
            tables,
            slots,
            ids,
            gradients,
            oracles.adam_step,
            learning_rate=0.1,
            step=number,
        )

    for number in range(NUM_BATCHES):
        if len(waiting) > delay:
            tables, slots = apply(*waiting.pop(0))
        ids, targets = batch(number)
        activations = small_world.dense_activations(tables, ids)
        gradients = {name: activations[name] - scale * targets[name] for name in activations}
        losses.append(sum(0.5 * np.sum(value**2) for value in gradients.values()))
        scale *= 0.9
        waiting.append((number, ids, gradients))
    for late in waiting:
        tables, slots = apply(*late)
    return losses, tables, slots


def test_pipelining_equals_sequential_training_with_one_late_update():
    losses, before, after, train_state = pipelined_run()
    expected_losses, tables, slots = sequential_run(before, delay=1)
    assert losses[0] == losses[-1] == 0.0
    assert_allclose(losses[1:-1], expected_losses, rtol=1e-5)
    small_world.assert_close({name: table.table for name, table in after.items()}, tables)
    for name, table in after.items():
        for slot, expected in zip(table.slot, slots[name], strict=True):
            assert_allclose(slot, expected, atol=SLOT_TOLERANCE, rtol=SLOT_TOLERANCE)
    assert train_state == {"scale": pytest.approx(0.9**NUM_BATCHES), "steps": NUM_BATCHES}


def test_aux_travels_from_stage_to_stage():
    def look_up(sparse, variables):
        return sparse * variables, sparse + 100

    def dense(activations, dense_inputs, state, seen):
        return activations, seen, state, dense_inputs + 1000

    def update(sparse, gradients, variables, tc_aux):
        return variables, tc_aux

    def input_of(number):
        return pipelining.CurrentStepInput(jnp.float32(number), jnp.float32(number))

    state = pipelining.get_initial_state(input_of(1), None, jnp.float32(1), look_up, dense)
    seen = []
    for number in range(1, 5):
        output, aux, _, _, state = pipelining.step(
            input_of(number),
            None,
            jnp.float32(1),
            state,
            look_up,
            dense,
            update,
            fake_tc_step=number == 1,
        )
        seen.append((float(output), float(aux)))
    assert seen == [(0, 0), (101, 0), (102, 1001), (103, 1002)]


def one_table(rows, rule):
    """A table on one device: its specs, its variables, and the stages of a pipeline with gradients of ones."""
    specs = small_world.place(
        small_world.feature_specs({"t": rows}, {"f": ("t", 8)}, optimizer=rule)
    )
    one = mesh_of(1)
    tables = mesh_lookup.MeshTables(feature_specs=specs, devices=mesh_lookup.table_mesh(one, "x"))

    def dense(activations, dense_inputs, train_state, aux):
        return {"f": jnp.ones((8, 8))}, 0.0, train_state, None

    stages = (
        pipelining.get_default_sc_fwd_function(specs, one),
        dense,
        pipelining.get_default_sc_bwd_function(specs, one),
    )
    return specs, tables, tables.init(jax.random.key(0)), stages


def test_cycles_without_gradients_move_no_rows_also_of_rules_that_move_all():
    specs, tables, variables, stages = one_table(16, TensorFlowAdam(0.1))
    inputs = [
        small_world.prepare(tables, {"f": [[i, (i + k) % 16] for i in range(8)]}) for k in (1, 5)
    ]
    variables = tables.update({"f": jnp.ones((8, 8))}, variables, 0, inputs[0])  # there is momentum
    given = pipelining.CurrentStepInput(inputs[1], None)
    state = pipelining.get_initial_state(given, None, variables, *stages[:2])
    found = [np.asarray(small_world.logical_tables(variables, specs)["t"])]
    for cycle in range(3):
        *_, variables, state = pipelining.step(
            given, None, variables, state, *stages, fake_tc_step=cycle == 0
        )
        found.append(np.asarray(small_world.logical_tables(variables, specs)["t"]))
    assert_array_equal(found[1], found[0])
    assert_array_equal(found[2], found[0])
    assert (found[3] != found[0]).any()


@pytest.mark.parametrize("rule", [TensorFlowAdam(0.1), embedding_spec.AdagradOptimizerSpec(0.1)])
def test_a_cycle_with_or_without_gradients_steps_donated_tables_where_they_lie(rule):
    """Also where a branch tells cycles apart: beside its arrays it holds the gradient of a table at most."""
    _, tables, variables, stages = one_table(1 << 14, rule)
    inputs = pipelining.CurrentStepInput(
        small_world.prepare(tables, {"f": [[i] for i in range(8)]}), None
    )

    def cycle(variables, state):
        return pipelining.step(inputs, None, variables, state, *stages, fake_tc_step=False)[3:]

    state = pipelining.get_initial_state(inputs, None, variables, *stages[:2])
    memory = (
        jax.jit(cycle, donate_argnums=(0, 1)).lower(variables, state).compile().memory_analysis()
    )
    table_bytes = (1 << 14) * 8 * 4
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    assert memory.temp_size_in_bytes < table_bytes * (1.2 if rule.moves_all_rows else 0.2)


def test_the_delay_is_exactly_one_update():
    losses, before, *_ = pipelined_run()
    for delay in (0, 2):
        expected, *_ = sequential_run(before, delay)
        assert not np.allclose(losses[1:-1], expected, rtol=1e-3)
