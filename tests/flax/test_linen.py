"""A layer of Linen trains tables as the functional core does, and nobody forgets to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen as nn
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import opaque
from tests.flax import world

ALL = tuple(world.STORAGES)


class Model(nn.Module):
    collection: rs.EmbeddingCollection
    frozen: bool = False

    @nn.compact
    def __call__(self, ids):
        found = rs.linen.Embeddings(self.collection, frozen=self.frozen, name="words")(ids)
        return nn.Dense(
            1, use_bias=False, name="head", kernel_init=lambda *_: jnp.asarray(world.HEAD)
        )(world.joined(found))


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
    return world.loss_of(apply(ids), jnp.asarray(world.LABELS))


def step(state, ids):
    loss, gradients = rs.linen.value_and_grad(loss_fn)(state, ids)
    return state.apply_gradients(gradients), loss


train_step = jax.jit(step, donate_argnums=0)


def train(state, batches):
    losses = []
    for batch in batches:
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return state, losses


def trained_parts(collection, state):
    """The head, and tables and slots."""
    return state.params["head"]["kernel"], world.contents(collection, state.embeddings["words"])


@pytest.mark.slow_rows("True")
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_model_trains_as_the_functional_core(on_mesh):
    storages = ("dense",) if on_mesh else ALL
    collection, batches, _, state = new(*storages, on_mesh=on_mesh)
    given = jax.tree.leaves(state.embeddings["words"].tables)
    state, losses = train(state, batches)
    assert all(array.is_deleted() for array in given)
    world.assert_same_run(world.core_run(*storages), losses, *trained_parts(collection, state))
    assert int(state.step) == len(losses)


class Normalized(nn.Module):
    """Tables, and statistics of batches."""

    collection: rs.EmbeddingCollection

    @nn.compact
    def __call__(self, ids, *, train):
        found = rs.linen.Embeddings(self.collection, name="words")({"dense": ids})["dense"]
        return nn.BatchNorm(use_running_average=not train)(found)


def test_several_calls_are_one_step_of_the_sum_and_statistics_are_kept():
    collection, ids = world.collection("dense"), np.arange(8).reshape(4, 2) % 5
    model = Normalized(collection)
    state = rs.linen.TrainState.create(
        apply_fn=model.apply,
        variables=model.init(jax.random.key(0), ids, train=False),
        tx=optax.sgd(0.1),
    )

    def of_parts(apply, *parts):
        found = [apply(part, train=False) for part in parts]
        _, changed = apply(ids, train=True, mutable=["batch_stats"])
        return jnp.sum(jnp.concatenate(found) ** 3), changed

    @jax.jit
    def step(state, *parts):
        (loss, changed), gradients = rs.linen.value_and_grad(of_parts, has_aux=True)(state, *parts)
        return state.apply_gradients(gradients, variables=changed), loss, gradients

    (whole, loss, _), (halves, same_loss, gradients) = (
        step(state, ids),
        step(state, ids[:2], ids[2:]),
    )
    assert len(gradients.calls["words"]) == 3
    assert_allclose(loss, same_loss, rtol=1e-6)
    for one, other in zip(
        jax.tree.leaves(whole.embeddings["words"][:2]),
        jax.tree.leaves(halves.embeddings["words"][:2]),
        strict=True,
    ):
        assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert set(whole.variables) == {"batch_stats"}
    assert np.any(whole.variables["batch_stats"]["BatchNorm_0"]["mean"] != 0)


def test_frozen_tables_are_read_while_the_rest_trains():
    _, (batch, *_), model, state = new("dense", frozen=True)
    stepped, _ = jax.jit(step)(state, batch)
    jax.tree.map(
        assert_array_equal,
        stepped.embeddings["words"].tables,
        state.embeddings["words"].tables,
    )
    assert np.any(stepped.params["head"]["kernel"] != world.HEAD)
    variables = {"embeddings": {"words": {"tables": state.embeddings["words"]}}}
    jax.eval_shape(
        jax.grad(lambda params: jnp.sum(model.apply({"params": params} | variables, batch))),
        state.params,
    )


def test_gradients_that_forget_the_tables_are_refused():
    _, (batch, *_), _, state = new("dense")
    with pytest.raises(
        RuntimeError,
        match=r"layer of tables 'dense' would stay untrained.* rs\.linen\.value_and_grad",
    ):
        jax.grad(lambda params: jnp.sum(state.replace(params=params).apply(batch)))(state.params)


def test_a_lookup_in_a_transformation_inside_the_model_is_refused_by_name():
    class Rematerialized(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return world.joined(
                nn.remat(rs.linen.Embeddings)(world.collection("dense"), name="words")(ids)
            )

    ids, model = {"dense": np.arange(4).reshape(2, 2)}, Rematerialized()
    variables = model.init(jax.random.key(0), ids)
    state = rs.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))
    assert state.apply(ids).shape == (2, world.DIM)
    with pytest.raises(
        RuntimeError, match=r"rows of the layers \['words'\].* call the layer before it"
    ):
        rs.linen.value_and_grad(lambda apply, ids: jnp.sum(apply(ids)))(state, ids)


def test_tables_of_another_model_are_read_by_a_loss():
    """The teacher has its layer at the same path, and stays as it is."""
    collection, (batch, *_), _, student = new("dense")
    teacher = student.replace(embeddings={"words": collection.init(jax.random.key(7))})

    def distilled(apply, *, ids):
        return loss_fn(apply, ids) + loss_fn(teacher.apply, ids)

    loss, gradients = rs.linen.value_and_grad(distilled)(student, ids=batch)
    alone, wanted = rs.linen.value_and_grad(loss_fn)(student, batch)
    assert_allclose(loss - alone, loss_fn(teacher.apply, batch), rtol=1e-5)
    jax.tree.map(assert_array_equal, *opaque.unwrap_all((gradients.rows, wanted.rows)))


def test_a_model_that_is_only_a_layer_has_a_name_too():
    collection = world.collection("dense")
    layer, ids = rs.linen.Embeddings(collection), {"dense": np.arange(4).reshape(2, 2)}
    state = rs.linen.TrainState.create(
        apply_fn=layer.apply, variables=layer.init(jax.random.key(0), ids), tx=optax.sgd(0.1)
    )
    _, gradients = rs.linen.value_and_grad(lambda apply, ids: jnp.sum(apply(ids)["dense"]))(
        state, ids
    )
    assert set(gradients.rows) == set(state.embeddings) == {""}


def test_tables_on_the_host_train_as_dense_ones():
    feature = rs.FeatureSpec("dense", world.table("dense", rs.HostCached(cache_rows=8)))
    collection = rs.EmbeddingCollection([feature])
    batches, model = world.batches(collection), Model(collection)
    tables = collection.init(world.KEY)
    variables = {"params": {"words": {"guard": 0.0}, "head": {"kernel": jnp.asarray(world.HEAD)}}}
    variables |= {"embeddings": {"words": {"tables": tables}}}
    state, losses = (
        rs.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=world.TX),
        [],
    )
    for batch in batches:
        state = state.replace(
            embeddings={"words": collection.prefetch(state.embeddings["words"], batch)}
        )
        state, loss = train_step(state, batch)
        losses.append(loss)
    world.assert_same_run(world.core_run("dense"), losses, *trained_parts(collection, state))


@pytest.mark.slow
def test_training_goes_on_from_files_of_orbax(tmp_path):
    collection, batches, _, state = new(*ALL)
    state, losses = train(state, batches[:1])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "saved", new(*ALL)[3])
    state, more = train(state, batches[1:])
    world.assert_same_run(world.core_run(*ALL), losses + more, *trained_parts(collection, state))
