"""Both Flax layers train tables as dense loops do, with and without autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.core import meta

from rsembed.sparsecore import embedding_spec
from rsembed.sparsecore.linen import embed as linen_embed, embed_optimizer
from rsembed.sparsecore.nnx import embed as nnx_embed
from tests import oracles
from tests.sparsecore import small_world
from tests.sparsecore.small_world import squared_error
from tests.world import assert_same, mesh_of

ADAM = embedding_spec.AdamOptimizerSpec(0.1)
CORES = 1
STEPS = (None, None, 7, None, 0)
"""Step argument of each call. None: the layer's counter."""
STEPS_TAKEN = (0, 1, 7, 8, 0)
COUNTERS = (1, 2, 8, 9, 1)
"""Counter of the layer after each call."""


def mesh():
    """A mesh that splits tables along "model" and copies them along "data"."""
    return mesh_of(2, 2, axes=("data", "model"))


def linen_layer(specs, **options):
    return linen_embed.SparseCoreEmbed(specs, "model", mesh(), num_sc_per_device=CORES, **options)


def nnx_layer(specs):
    return nnx_embed.SparseCoreEmbed(specs, "model", mesh(), nnx.Rngs(0), num_sc_per_device=CORES)


def initial_params(model, inputs):
    return jax.jit(model.init)(jax.random.key(0), inputs)["params"]


@functools.cache
def linen_run():
    """A layer, its specs, a batch, and the parameters before and after each call.

    The batch exceeds the limits, so it has several minibatches.
    """
    specs = small_world.placed_specs(
        2, CORES, is_stacked=False, optimizer=ADAM, max_unique_ids_per_partition=8
    )
    layer = linen_layer(specs, enable_minibatching=True)
    inputs, _ = layer.prepare_batch(small_world.draw_batch()[0])
    assert int(inputs.num_minibatches[0]) > 1

    @functools.partial(jax.jit, static_argnames="step")
    @jax.grad
    def updated(params, step):
        return squared_error(layer.apply({"params": params}, inputs, step))

    results = [initial_params(layer, inputs)]
    for step in STEPS:
        results.append(updated(results[-1], step=step))
    return layer, specs, inputs, results


def dense_adam(tables):
    """Tables after each step of Adam on the squared error of one batch."""
    ids, _ = small_world.draw_batch()
    slots = small_world.full_slots(0.0, 0.0)
    stepped = []
    for step in STEPS_TAKEN:
        gradients = small_world.dense_activations(tables, ids)
        made_of = {"learning_rate": 0.1, "step": step}
        tables, slots = small_world.dense_step(
            tables, slots, ids, gradients, oracles.adam_step, **made_of
        )
        stepped.append(tables)
    return stepped


def test_linen_autodiff_trains_as_dense_loops():
    _, specs, _, (params, *updated) = linen_run()
    expected = dense_adam(small_world.logical_tables(params, specs))
    for after, tables, counter in zip(updated, expected, COUNTERS, strict=True):
        small_world.assert_close(small_world.logical_tables(after, specs), tables)
        assert float(linen_embed.step_number(after[linen_embed.STEP_PARAM_NAME])) == counter


def test_linen_apply_gradient_equals_autodiff():
    layer, _, inputs, (params, updated, *_) = linen_run()
    activations = jax.jit(layer.apply)({"params": params}, inputs)
    bound = layer.bind({"params": params})
    assert_same(bound.embedding_table, meta.unbox(params)[linen_embed.EMBEDDING_PARAM_NAME])
    model = LinenModel(layer)

    @jax.jit
    def apply_gradient(params, *args):
        variables = {"params": {"layer": params}}
        return model.apply(variables, *args, method=lambda m, *args: m.layer.apply_gradient(*args))

    # The path of a layer is part of the names of its parameters.
    wanted = {f"layer/{name}": value for name, value in meta.unbox(updated).items()}
    assert_same(apply_gradient(params, activations, inputs), wanted)


@pytest.mark.slow_rows("autodiff")
@pytest.mark.parametrize("way", ["autodiff", "apply_gradient"])
def test_nnx_trains_as_dense_loops(way):
    specs = small_world.placed_specs(2, CORES, optimizer=ADAM)
    layer = nnx_layer(specs)
    inputs, statistics = layer.prepare_batch(small_world.draw_batch()[0])
    assert set(statistics.max_ids_per_partition) == {"first_second"}

    @nnx.jit(static_argnames="step")
    def train(layer, inputs, step):
        if way == "apply_gradient":
            layer.apply_gradient(layer(inputs), inputs, step)
        else:
            grads = nnx.grad(lambda layer: squared_error(layer(inputs, step)))(layer)
            nnx.update(layer, nnx.state(grads, nnx_embed.is_embedding_variables))

    expected = dense_adam(small_world.logical_tables(nnx.state(layer), specs))
    for step, tables, counter in zip(STEPS, expected, COUNTERS, strict=True):
        train(layer, inputs, step=step)
        small_world.assert_close(small_world.logical_tables(nnx.state(layer), specs), tables)
        assert nnx_embed.step_number(layer.step.get_value()) == counter


class LinenModel(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1)(self.layer(inputs)["a"])


class NNXModel(nnx.Module):
    def __init__(self, layer):
        self.layer = layer
        self.head = nnx.Linear(small_world.DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, inputs):
        return self.head(self.layer(inputs)["a"])


def test_quantized_lookup_with_a_custom_rule():
    """Rows are rounded to halves in [-1, 1] for lookups. A step adds ±0.1 to unrounded rows."""
    rule = embedding_spec.CustomOptimizerSpec(0.1, lambda g, w, lr: w - lr * jnp.sign(g))
    config = embedding_spec.QuantizationConfig(-1.0, 1.0, 5)
    specs = small_world.placed_specs(2, CORES, quantization_config=config, optimizer=rule)
    layer = nnx_layer(specs)
    ids, _ = small_world.draw_batch()
    before = small_world.logical_tables(nnx.state(layer), specs)

    @nnx.jit
    def train(layer, inputs):
        activations = layer(inputs)
        layer.apply_gradient(activations, inputs)
        return activations

    def sign_step(row, slots, gradient):
        row -= 0.1 * np.sign(gradient)

    activations = train(layer, layer.preprocess_inputs(0, ids, None))
    rounded = {}
    for name, table in before.items():
        rounded[name] = np.clip(np.floor(table * 2 + 0.5) / 2, -1, 1)
    wanted = small_world.dense_activations(rounded, ids)
    small_world.assert_close(activations, wanted)
    after, _ = small_world.dense_step(before, small_world.full_slots(), ids, wanted, sign_step)
    small_world.assert_close(small_world.logical_tables(nnx.state(layer), specs), after)


def test_the_partitioned_optimizers_keep_tables_from_optax():
    specs = small_world.placed_specs(2, CORES, optimizer=embedding_spec.SGDOptimizerSpec(0.1))
    ids, _ = small_world.draw_batch()
    layer = linen_layer(specs)
    inputs = layer.preprocess_inputs(0, ids, None)
    linen_model, nnx_model = LinenModel(layer), NNXModel(nnx_layer(specs))
    params = initial_params(linen_model, inputs)

    # Both models start with the same parameters. The NNX step donates its arrays, so it has copies.
    tables = meta.unbox(params["layer"][linen_embed.EMBEDDING_PARAM_NAME])
    nnx_model.layer.embedding_table.set_value(jax.tree.map(jnp.copy, tables))
    nnx_model.head.kernel.set_value(jnp.copy(params["Dense_0"]["kernel"]))

    tx = embed_optimizer.create_optimizer_for_sc_model(params, optax.sgd(0.05))
    optimizer = nnx_embed.PartitionedOptimizer(nnx_model, optax.sgd(0.05))

    @jax.jit
    def linen_step(params, opt_state):
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((linen_model.apply({"params": p}, inputs) - 1) ** 2)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return embed_optimizer.apply_updates_for_sc_model(params, updates), opt_state, loss

    shardings = tuple(nnx_embed.get_named_sharding(node, mesh()) for node in (nnx_model, optimizer))

    @nnx.jit(in_shardings=(*shardings, None), donate_argnums=(0, 1))
    def nnx_step(model, optimizer, inputs):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(inputs) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    opt_state, losses = tx.init(params), []
    for _ in range(3):
        params, opt_state, loss = linen_step(params, opt_state)
        losses.append(float(loss))
        np.testing.assert_allclose(nnx_step(nnx_model, optimizer, inputs), loss, rtol=1e-5)
    assert losses[2] < losses[0]
    small_world.assert_close(
        small_world.logical_tables(nnx.state(nnx_model), specs),
        small_world.logical_tables(params, specs),
    )
    np.testing.assert_allclose(
        nnx_model.head.kernel.get_value(), params["Dense_0"]["kernel"], rtol=1e-5
    )
