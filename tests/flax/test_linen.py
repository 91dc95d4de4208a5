"""Tests of the Linen layer, which must train tables as the functional core does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from numpy.testing import assert_allclose

import rsembed as rs
from rsembed import opaque
from tests.flax import world
from tests.world import assert_same


class Model(nn.Module):
    collection: rs.EmbeddingCollection
    frozen: bool = False

    @nn.compact
    def __call__(self, ids):
        vectors = rs.linen.Embeddings(self.collection, frozen=self.frozen, name="words")(ids)
        return nn.Dense(
            1, use_bias=False, name="head", kernel_init=lambda *_: jnp.asarray(world.HEAD)
        )(world.joined(vectors))


def new(*storages, on_mesh=False, **options):
    """A collection, its batches, a model and its train state."""
    collection = world.collection(*storages, on_mesh=on_mesh)
    batches, model = world.batches(collection), Model(collection, **options)
    variables = model.init(jax.random.key(1), batches[0])
    state = rs.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=world.TX)
    return (
        collection,
        batches,
        model,
        state.replace(embeddings={"words": collection.init(world.KEY)}),
    )


def loss_fn(apply, ids):
    return world.loss_of(apply(ids))


def step(state, ids):
    loss, gradients = rs.linen.value_and_grad(loss_fn)(state, ids)
    return state.apply_gradients(gradients), loss


train_step = jax.jit(step, donate_argnums=0)


def trained_parts(collection, state):
    """Kernel of the head, and contents of the tables."""
    return state.params["head"]["kernel"], world.contents(collection, state.embeddings["words"])


@pytest.mark.slow_rows("True")
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_model_trains_as_the_functional_core(on_mesh):
    storages = ("dense",) if on_mesh else world.ALL
    collection, batches, _, state = new(*storages, on_mesh=on_mesh)
    arrays = jax.tree.leaves(state.embeddings["words"].tables)
    losses = []
    for batch in batches:
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    assert all(array.is_deleted() for array in arrays)
    world.assert_same_run(world.core_run(*storages), losses, *trained_parts(collection, state))
    assert int(state.step) == len(losses)


class Normalized(nn.Module):
    """A model with tables and batch normalization."""

    collection: rs.EmbeddingCollection

    @nn.compact
    def __call__(self, ids, *, train):
        vectors = rs.linen.Embeddings(self.collection, name="words")({"dense": ids})["dense"]
        return nn.BatchNorm(use_running_average=not train)(vectors)


def test_several_calls_are_one_step_of_the_sum_and_statistics_are_kept():
    ids = np.arange(8).reshape(4, 2) % 5
    model = Normalized(world.collection("dense"))
    variables = model.init(jax.random.key(0), ids, train=False)
    state = rs.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))

    def of_parts(apply, *parts):
        outputs = [apply(part, train=False) for part in parts]
        _, changed = apply(ids, train=True, mutable=["batch_stats"])
        return jnp.sum(jnp.concatenate(outputs) ** 3), changed

    @jax.jit
    def step(state, *parts):
        (loss, changed), gradients = rs.linen.value_and_grad(of_parts, has_aux=True)(state, *parts)
        state = state.apply_gradients(gradients, variables=changed)
        return loss, state.embeddings["words"][:2], state.variables, gradients

    *whole, _ = step(state, ids)
    *halves, gradients = step(state, ids[:2], ids[2:])
    assert len(gradients.calls["words"]) == 3
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.any(whole[2]["batch_stats"]["BatchNorm_0"]["mean"] != 0)


def test_frozen_tables_are_read_while_the_rest_trains():
    collection, (batch, *_), _, state = new("dense", frozen=True)
    stepped, _ = jax.jit(step)(state, batch)
    head, (tables, *_) = trained_parts(collection, stepped)
    assert_same(tables, collection.tables(state.embeddings["words"]))
    assert np.any(head != world.HEAD)
    jax.eval_shape(
        jax.grad(lambda params: jnp.sum(state.replace(params=params).apply(batch))), state.params
    )


def test_tables_of_another_model_are_read_by_a_loss():
    """The teacher has a layer at the same path. It is not trained."""
    collection, (batch, *_), _, student = new("dense")
    teacher = student.replace(embeddings={"words": collection.init(jax.random.key(7))})

    def distilled(apply, *, ids):
        return loss_fn(apply, ids) + loss_fn(teacher.apply, ids)

    loss, gradients = rs.linen.value_and_grad(distilled)(student, ids=batch)
    alone, wanted = rs.linen.value_and_grad(loss_fn)(student, batch)
    assert_allclose(loss - alone, loss_fn(teacher.apply, batch), rtol=1e-5)
    assert_same(*opaque.unwrap_all((gradients.rows, wanted.rows)))


def test_a_model_that_is_only_a_layer_has_a_name_too():
    layer = rs.linen.Embeddings(world.collection("dense"))
    ids = {"dense": np.arange(4).reshape(2, 2)}
    variables = layer.init(jax.random.key(0), ids)
    state = rs.linen.TrainState.create(apply_fn=layer.apply, variables=variables, tx=world.TX)
    _, gradients = rs.linen.value_and_grad(lambda apply, ids: jnp.sum(apply(ids)["dense"]))(
        state, ids
    )
    assert set(gradients.rows) == set(state.embeddings) == {""}
