"""Pipelined training equals sequential training with each update one batch late."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.optimizers.rules import TensorFlowAdam
from rsembed.sparsecore import (
    embedding_pipelining_utils as pipelining,
    embedding_spec,
    mesh_lookup,
)
from tests import oracles
from tests.sparsecore import small_world
from tests.world import mesh_of

NUM_BATCHES = 4
SLOT_TOLERANCE = 1e-4
"""Tolerance of moments, which sum gradients of about 10, and their squares, over all batches."""


def dense_step(activations, targets, train_state, sc_fwd_aux):
    """Moves activations towards `scale * targets`, where `scale` is the dense parameter."""
    assert sc_fwd_aux is None
    gradients = {
        name: activations[name] - train_state["scale"] * targets[name] for name in activations
    }
    loss = small_world.squared_error(gradients)
    train_state = {"scale": train_state["scale"] * 0.9, "steps": train_state["steps"] + 1}
    return gradients, loss, train_state, None


def batch(number):
    """A batch. Batches share many rows, so that the delay of an update changes the losses."""
    ids, targets = small_world.draw_batch(number)
    return {name: rows // 2 for name, rows in ids.items()}, targets


def sequential_run(tables, delay):
    """Losses, final tables and slots of dense loops that apply each update `delay` batches late."""
    slots, scale, waiting, losses = small_world.full_slots(0.0, 0.0), 1.0, [], []

    def apply(number, ids, gradients):
        made_of = {"learning_rate": 0.1, "step": number}
        return small_world.dense_step(tables, slots, ids, gradients, oracles.adam_step, **made_of)

    for number in range(NUM_BATCHES):
        if len(waiting) > delay:
            tables, slots = apply(*waiting.pop(0))
        ids, targets = batch(number)
        gradients = small_world.dense_activations(tables, ids)
        for name in gradients:
            gradients[name] -= scale * targets[name]
        losses.append(small_world.squared_error(gradients))
        scale *= 0.9
        waiting.append((number, ids, gradients))
    for late in waiting:
        tables, slots = apply(*late)
    return losses, tables, slots


def test_pipelining_equals_sequential_training_with_one_late_update():
    mesh = mesh_of(2, 2)
    specs = small_world.placed_specs(4, 1, optimizer=embedding_spec.AdamOptimizerSpec(0.1))
    tables = mesh_lookup.ShardedTables(
        feature_specs=specs, devices=mesh_lookup.table_mesh(mesh, ("x", "y"))
    )
    data, replicated = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P())
    variables = tables.init(jax.random.key(1))
    before = small_world.logical_tables(variables, specs)
    look_up = pipelining.get_default_sc_fwd_function(specs, mesh)
    update = pipelining.get_default_sc_bwd_function(specs, mesh)
    inputs = []
    for number in range(NUM_BATCHES):
        ids, targets = batch(number)
        dense_inputs = jax.device_put(targets, data)
        inputs.append(pipelining.CurrentStepInput(small_world.prepare(tables, ids), dense_inputs))
    inputs += 2 * [jax.tree.map(jnp.zeros_like, inputs[0])]
    train_state = jax.device_put({"scale": jnp.float32(1), "steps": jnp.int32(0)}, replicated)
    state = pipelining.get_initial_state(
        inputs[0], train_state, variables, look_up, dense_step, data, data
    )
    shardings = pipelining.get_pipeline_state_sharding(
        pipelining.PipelineState, data, data, replicated, replicated
    )
    state, losses = jax.device_put(state, shardings), []

    # The flag is traced, so one program runs all cycles. `test_cases` passes a bool instead.
    @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
    def cycle(pipeline_input, train_state, variables, state, is_fake):
        arguments = (pipeline_input, train_state, variables, state)
        return pipelining.step(*arguments, look_up, dense_step, update, fake_tc_step=is_fake)

    for number, step_input in enumerate(inputs):
        is_fake = not pipelining.is_output_valid(number, NUM_BATCHES)
        loss, aux, train_state, variables, state = cycle(
            step_input, train_state, variables, state, is_fake
        )
        assert aux is None
        losses.append(float(loss))
    expected_losses, tables, slots = sequential_run(before, delay=1)
    assert losses[0] == losses[-1] == 0.0
    assert_allclose(losses[1:-1], expected_losses, rtol=1e-5)
    for name, variables_of_table in small_world.logical_variables(variables, specs).items():
        small_world.assert_close({name: variables_of_table.table}, {name: tables[name]})
        for slot, expected in zip(variables_of_table.slot, slots[name], strict=True):
            assert_allclose(slot, expected, atol=SLOT_TOLERANCE, rtol=SLOT_TOLERANCE)
    assert jax.tree.map(float, train_state) == {
        "scale": pytest.approx(0.9**NUM_BATCHES),
        "steps": NUM_BATCHES,
    }
    for delay in (0, 2):
        expected_losses, *_ = sequential_run(before, delay)
        assert not np.allclose(losses[1:-1], expected_losses, rtol=1e-3)


def test_aux_travels_from_stage_to_stage():
    def look_up(sparse, variables):
        return sparse * variables, sparse + 100

    def dense(activations, dense_inputs, state, seen):
        return activations, seen, state, dense_inputs + 1000

    def update(sparse, gradients, variables, tc_aux):
        return variables, tc_aux

    batches = [pipelining.CurrentStepInput(*jnp.float32([k, k])) for k in range(1, 5)]
    variables = jnp.float32(1)
    state = pipelining.get_initial_state(batches[0], None, variables, look_up, dense)
    seen = []
    for number, step_input in enumerate(batches):
        is_fake = number == 0
        output, aux, _, _, state = pipelining.step(
            step_input, None, variables, state, look_up, dense, update, fake_tc_step=is_fake
        )
        seen.append((float(output), float(aux)))
    assert seen == [(0, 0), (101, 0), (102, 1001), (103, 1002)]


def one_table(rows, rule):
    """Specs of one table on one device, and the stages of a pipeline with gradients of ones."""
    specs = small_world.place(
        small_world.feature_specs({"t": rows}, {"f": ("t", 8)}, optimizer=rule)
    )

    def dense(activations, dense_inputs, train_state, aux):
        return {"f": jnp.ones((8, 8))}, 0.0, train_state, None

    look_up = pipelining.get_default_sc_fwd_function(specs, mesh_of(1))
    update = pipelining.get_default_sc_bwd_function(specs, mesh_of(1))
    return specs, (look_up, dense, update)


def pipeline_input(specs, ids):
    return pipelining.CurrentStepInput(small_world.preprocess(specs, {"f": ids})[0], None)


def test_cycles_without_gradients_move_no_rows_also_of_rules_that_move_all():
    specs, stages = one_table(16, TensorFlowAdam(0.1))
    look_up, dense, update = stages
    first = pipeline_input(specs, [[i, (i + 1) % 16] for i in range(8)])
    ones = {"f": jnp.ones((8, 8))}
    # After this update, the slots have momentum.
    variables, _ = update(first.sparse_inputs, ones, small_world.init(specs), step=0)
    inputs = pipeline_input(specs, [[i, (i + 5) % 16] for i in range(8)])
    state = pipelining.get_initial_state(inputs, None, variables, look_up, dense)
    tables = [np.asarray(variables["t"].table)]
    for cycle in range(3):
        *_, variables, state = pipelining.step(
            inputs, None, variables, state, *stages, fake_tc_step=cycle == 0
        )
        tables.append(np.asarray(variables["t"].table))
    assert_array_equal(tables[1], tables[0])
    assert_array_equal(tables[2], tables[0])
    assert (tables[3] != tables[0]).any()


@pytest.mark.parametrize("rule", [TensorFlowAdam(0.1), embedding_spec.AdagradOptimizerSpec(0.1)])
def test_a_cycle_with_or_without_gradients_steps_donated_tables_where_they_lie(rule):
    """A rule that moves all rows is in a branch, which needs memory for one dense gradient."""
    specs, stages = one_table(1 << 14, rule)
    variables = small_world.init(specs)
    inputs = pipeline_input(specs, [[i] for i in range(8)])

    def cycle(variables, state):
        return pipelining.step(inputs, None, variables, state, *stages, fake_tc_step=False)[3:]

    state = pipelining.get_initial_state(inputs, None, variables, *stages[:2])
    compiled = jax.jit(cycle, donate_argnums=(0, 1)).lower(variables, state).compile()
    memory = compiled.memory_analysis()
    table_bytes = (1 << 14) * 8 * 4
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    assert memory.temp_size_in_bytes < table_bytes * (1.2 if rule.moves_all_rows else 0.2)
