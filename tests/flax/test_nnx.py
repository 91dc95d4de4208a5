"""Tests of the NNX layer, which must train tables as the functional core does."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

import rsembed as rs
from rsembed import checkpoint, opaque
from tests.flax import world
from tests.world import assert_same


class Model(nnx.Module):
    def __init__(self, collection):
        self.embeddings = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
        self.embeddings.set_state(collection.init(world.KEY))
        self.head = nnx.Linear(world.DIM, 1, use_bias=False, rngs=nnx.Rngs(0))
        self.head.kernel.set_value(jnp.asarray(world.HEAD))

    def __call__(self, ids):
        return self.head(world.joined(self.embeddings(ids)))


def loss_fn(model, ids):
    return world.loss_of(model(ids))


def new(*storages, on_mesh=False):
    """A collection, its batches, a model and its optimizer."""
    collection = world.collection(*storages, on_mesh=on_mesh)
    model = Model(collection)
    return collection, world.batches(collection), model, rs.nnx.Optimizer(model, world.TX)


def step(model, optimizer, ids):
    loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ids)
    optimizer.update(model, gradients)
    return loss


train_step = nnx.jit(step, donate_argnums=(0, 1))


def trained_parts(model):
    """Kernel of the head, and contents of the tables."""
    return model.head.kernel.get_value(), world.contents(
        model.embeddings.collection, model.embeddings.state
    )


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_model_trains_as_the_functional_core(on_mesh):
    _, batches, model, optimizer = new(*world.ALL, on_mesh=on_mesh)
    losses = [train_step(model, optimizer, batch) for batch in batches]
    world.assert_same_run(world.core_run(*world.ALL), losses, *trained_parts(model))


def test_steps_may_be_scanned():
    _, batches, model, optimizer = new("dense")

    @nnx.jit
    def train(model, optimizer, batches):
        def body(both, batch):
            return both, step(*both, batch)

        return nnx.scan(body, in_axes=(nnx.Carry, 0))((model, optimizer), batches)[1]

    losses = train(model, optimizer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
    world.assert_same_run(world.core_run("dense"), losses, *trained_parts(model))


def test_several_calls_of_a_layer_are_one_step_of_the_sum():
    collection, _, model, optimizer = new("dense")
    other, other_optimizer = Model(collection), rs.nnx.Optimizer(model, world.TX)
    ids = np.arange(8).reshape(4, 2) % 5

    @nnx.jit
    def step_of_halves(model, optimizer, ids):
        def halves(model):
            first, second = (model({"dense": half}) for half in jnp.split(ids, 2))
            return world.loss_of(jnp.concatenate([first, second]))

        loss, gradients = rs.nnx.value_and_grad(halves)(model)
        optimizer.update(model, gradients)
        return loss

    expected = nnx.jit(step)(model, optimizer, {"dense": ids})
    loss = step_of_halves(other, other_optimizer, ids)
    world.assert_same_run(([expected], *trained_parts(model)), [loss], *trained_parts(other))


class TwoTowers(nnx.Module):
    def __init__(self, first, second):
        self.towers = nnx.List([first, second])
        self.again = first

    def __call__(self, ids):
        towers = [*self.towers, self.again]
        return sum(jnp.sum(tower({"dense": ids})["dense"] ** 2) for tower in towers)


def test_every_layer_has_its_gradients_by_path_and_a_shared_one_has_one():
    layers = [rs.nnx.Embeddings(world.collection("dense"), rngs=nnx.Rngs(k)) for k in range(2)]
    model, ids = TwoTowers(*layers), np.arange(4).reshape(2, 2)
    optimizer = rs.nnx.Optimizer(model, optax.sgd(0.1))
    before = [np.array(layer.state.tables["dense"]) for layer in layers]

    @nnx.jit
    def train_step(model, optimizer, ids):
        gradients = rs.nnx.value_and_grad(lambda model: model(ids))(model)[1]
        optimizer.update(model, gradients)
        return gradients

    gradients = train_step(model, optimizer, ids)
    num_calls = {name: len(calls) for name, calls in gradients.calls.items()}
    assert num_calls == {"again": 2, "towers/1": 1}
    assert model.again is model.towers[0]
    for layer, table in zip(layers, before, strict=True):
        assert int(layer.state.step) == 1
        has_moved = np.any(layer.state.tables["dense"] != table, axis=1)
        assert_array_equal(np.flatnonzero(has_moved), np.arange(4))


def test_frozen_tables_are_read_while_the_rest_trains():
    collection, (batch, *_), model, optimizer = new("dense")
    model.set_attributes(rs.nnx.Embeddings, frozen=True)
    before = collection.tables(model.embeddings.state)

    @nnx.jit
    def both(model, optimizer, ids):
        loss, plain = nnx.value_and_grad(loss_fn)(model, ids)
        same_loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ids)
        optimizer.update(model, gradients)
        assert gradients.calls == {}
        return (loss, plain["head"]), (same_loss, gradients.dense["head"])

    assert_same(*both(model, optimizer, batch))
    head, (tables, *_) = trained_parts(model)
    assert np.any(head != world.HEAD)
    assert_same(tables, before)


def gradients_of_a_split_model(model, ids):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params, rest), ids))(params)


FORGETFUL = {
    "nnx.grad inside jit and remat": nnx.jit(nnx.grad(nnx.remat(loss_fn))),
    "jax.grad of a split model": gradients_of_a_split_model,
}


@pytest.mark.parametrize("way", FORGETFUL)
def test_gradients_that_forget_the_tables_are_refused(way):
    _, (batch, *_), model, _ = new("dense")
    with pytest.raises(
        RuntimeError,
        match=r"layer of tables 'dense' would stay untrained.* rs\.nnx\.value_and_grad",
    ):
        nnx.eval_shape(FORGETFUL[way], model, batch)


def test_gradients_by_other_things_than_the_model_need_no_tables():
    _, (batch, *_), model, _ = new("dense")
    by_scale = jax.eval_shape(jax.grad(lambda scale: jnp.sum(scale * model(batch))), 1.0)
    assert by_scale.shape == ()


LOOPS = {
    "jax.lax.scan": lambda m, b: jax.lax.scan(
        lambda total, _: (total + loss_fn(m, b), None), 0.0, length=2
    )[0],
    "nnx.scan, of a model that is only read": lambda m, b: (
        loss_fn(m, b)
        + nnx.scan(lambda m, _: loss_fn(m, b), in_axes=(None, 0), out_axes=0)(m, jnp.ones(2)).sum()
    ),
    "nnx.cond": lambda m, b: nnx.cond(True, loss_fn, lambda m, b: 0.0 * loss_fn(m, b), m, b),
    "nnx.remat": lambda m, b: nnx.remat(loss_fn)(m, b),
    "nnx.jit": lambda m, b: nnx.jit(loss_fn)(m, b),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_lookup_in_a_transformation_inside_the_loss_is_refused_by_name(loop):
    _, (batch, *_), model, _ = new("dense")
    # Without gradients, the lookup is accepted, because nothing has to be recorded.
    assert np.shape(LOOPS[loop](model, batch)) == ()
    with pytest.raises(
        RuntimeError, match=r"rows of the layers \['embeddings'\].* call the layer before it"
    ):
        rs.nnx.value_and_grad(LOOPS[loop])(model, batch)
    # The refused call does not disturb later ones.
    rs.nnx.value_and_grad(loss_fn)(model, batch)


def test_tables_of_another_model_are_read_by_a_loss_and_a_copy_that_would_forget_them_is_refused():
    """The teacher is called like the student, has a layer at the same path, and is not trained."""
    _, (batch, *_), student, _ = new("dense")
    teacher = nnx.clone(student)
    _, gradients = rs.nnx.value_and_grad(lambda m, t: loss_fn(m, batch) + loss_fn(t, batch))(
        student, teacher
    )
    _, alone = rs.nnx.value_and_grad(loss_fn)(student, batch)
    assert_same(*opaque.unwrap_all((gradients.rows, alone.rows)))
    with pytest.raises(RuntimeError, match="would stay untrained"):
        rs.nnx.value_and_grad(lambda m: loss_fn(nnx.clone(m), batch))(student)


class Noisy(nnx.Module):
    """A model that draws random numbers and counts its calls."""

    def __init__(self, collection):
        self.embeddings = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.num_calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, ids):
        self.num_calls[...] += 1
        return self.dropout(world.joined(self.embeddings(ids)))


def test_what_a_loss_changes_is_changed_once():
    collection, rngs = world.collection("dense"), nnx.Rngs(labels=0)
    model, batch = Noisy(collection), world.batches(collection)[0]

    def noisy_loss(model, batch, rngs):
        return jnp.sum(model(batch)) + jnp.sum(jax.random.normal(rngs.labels(), ())), "aux"

    (_, aux), gradients = rs.nnx.value_and_grad(noisy_loss, has_aux=True)(model, batch, rngs)
    assert aux == "aux" and set(gradients.calls) == {"embeddings"}
    for count in (model.num_calls, rngs.labels.count, model.dropout.rngs.count):
        assert int(count[...]) == 1


def test_a_step_writes_into_the_tables():
    table = rs.TableSpec("t", 4096, 8, optimizer=rs.optimizers.Adagrad(0.1))
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    layer = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
    optimizer, ids = rs.nnx.Optimizer(layer, world.TX), {"f": np.arange(8).reshape(4, 2)}

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(layer, optimizer, ids):
        gradients = rs.nnx.value_and_grad(lambda layer: jnp.sum(layer(ids)["f"] ** 2))(layer)[1]
        optimizer.update(layer, gradients)

    num_bytes = 2 * 4096 * 8 * 4
    memory = train_step.lower(layer, optimizer, ids).compile().compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes and memory.temp_size_in_bytes < num_bytes / 4
    rows = layer.state.tables["t"]
    train_step(layer, optimizer, ids)
    assert rows.is_deleted() and not layer.state.tables["t"].is_deleted()


def test_tables_on_the_host_train_as_dense_ones():
    feature = rs.FeatureSpec("dense", world.table("dense", rs.HostCached(cache_rows=8)))
    model, losses = Model(rs.EmbeddingCollection([feature])), []
    optimizer = rs.nnx.Optimizer(model, world.TX)
    for batch in world.batches(model.embeddings.collection):
        model.embeddings.prefetch(batch)
        losses.append(train_step(model, optimizer, batch))
    world.assert_same_run(world.core_run("dense"), losses, *trained_parts(model))


@functools.cache
def trained_once():
    """A collection, its batches, and a model and optimizer after one step. Do not change them."""
    collection, batches, model, optimizer = new(*world.ALL)
    train_step(model, optimizer, batches[0])
    return collection, batches, model, optimizer


def go_on(batches, model, optimizer):
    losses = [world.core_run(*world.ALL)[0][0]] + [
        train_step(model, optimizer, batch) for batch in batches[1:]
    ]
    world.assert_same_run(world.core_run(*world.ALL), losses, *trained_parts(model))


def test_training_goes_on_from_files_of_orbax(tmp_path):
    _, batches, model, optimizer = trained_once()
    _, _, other, other_optimizer = new(*world.ALL)
    other.embeddings.set_state(other.embeddings.collection.init(jax.random.key(7)))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.state((model, optimizer)))
        checkpointer.wait_until_finished()
        nnx.update(
            (other, other_optimizer),
            checkpointer.restore(tmp_path / "saved", nnx.state((other, other_optimizer))),
        )
    go_on(batches, other, other_optimizer)


def test_training_goes_on_from_our_files(tmp_path):
    collection, batches, model, optimizer = trained_once()
    others = nnx.state((model, optimizer), nnx.Not(rs.nnx.Tables))
    checkpoint.save_collection(
        tmp_path / "saved", collection, model.embeddings.state, others=others
    )
    _, _, other, other_optimizer = new(*world.ALL)
    like = nnx.state((other, other_optimizer), nnx.Not(rs.nnx.Tables))
    state, others = checkpoint.load_collection(tmp_path / "saved", collection, others=like)
    other.embeddings.set_state(state)
    nnx.update((other, other_optimizer), others)
    go_on(batches, other, other_optimizer)
    with pytest.raises(ValueError, match="does not belong to this collection"):
        Model(world.collection("dense")).embeddings.set_state(state)


COPIES = {
    "nnx.clone": nnx.clone,
    "split and merge": lambda model: nnx.merge(*nnx.split(model)),
    "jax.tree": lambda model: jax.tree.map(jnp.copy, model),
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_model_read_what_it_reads(way):
    _, batches, model, _ = trained_once()
    other = COPIES[way](model)
    assert other.embeddings is not model.embeddings
    assert_array_equal(other(batches[1]), model(batches[1]))
