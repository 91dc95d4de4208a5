"""A small model for tests of the Flax layers, and its training by the functional core."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import rsembed as rs
from rsembed.tt import TensorTrain

ROWS, DIM, NUM_STEPS = 20, 4, 3
TRAIN = TensorTrain((3,), tt_p_shapes=(4, 5), tt_q_shapes=(2, 2))
STORAGES = {"dense": None, "hashed": rs.Hashed(), "train": TRAIN, "hashed too": rs.Hashed()}
"""Storages of tables. The two hashed tables share one storage."""
ALL = tuple(STORAGES)
KEY = jax.random.key(0)
HEAD = np.sin(np.arange(DIM, dtype=np.float32)).reshape(DIM, 1)
LABELS = np.float32([1, 0, 0, 1])
TX = optax.adam(0.05)


def table(name, storage):
    return rs.TableSpec(
        name,
        ROWS,
        DIM,
        combiner="mean",
        optimizer=rs.optimizers.Adagrad(0.1),
        storage=storage,
    )


@functools.cache
def collection(*storages, on_mesh=False):
    """A collection with a table and a feature for each of `storages`. Bags have any length."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("device",)) if on_mesh else None
    features = [rs.FeatureSpec(storage, table(storage, STORAGES[storage])) for storage in storages]
    return rs.EmbeddingCollection(features, mesh=mesh)


def batches(a_collection):
    """Batches of ragged ids, different for every feature.

    All batches have equally many ids. Some ids occur in several samples and batches.
    """
    generator, batches_of_ids = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        ids = {
            name: [generator.integers(0, ROWS, size).tolist() for size in (2, 1, 3, 1)]
            for name in a_collection.features
        }
        batches_of_ids.append(a_collection.prepare(ids))
    return batches_of_ids


def loss_of(logits, labels=LABELS):
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()


def joined(activations):
    """Input of the head: the sum of the activations of all features."""
    return functools.reduce(jnp.add, activations.values())


class Core:
    """The model with the functional core. optax trains the head."""

    def __init__(self, *storages, tx=TX, on_mesh=False):
        self.collection = collection(*storages, on_mesh=on_mesh)
        self.tx = tx
        self.model = (HEAD, tx.init(HEAD), self.collection.init(KEY))

    def value_and_grad(self, model, batch, labels):
        """The loss, and dense and row gradients as a pair."""
        head, _, state = model

        def loss_fn(head, activations):
            return loss_of(joined(activations) @ head, labels)

        return rs.value_and_grad(loss_fn, self.collection)(head, state, batch)

    def stepped(self, model, gradients):
        """The model after a step."""
        head, opt_state, state = model
        dense, rows = gradients
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(dense, opt_state, head)
        return optax.apply_updates(head, updates), opt_state, self.collection.apply(state, rows)

    def parts(self, gradients):
        """Dense gradients, and row gradients as a list."""
        return gradients[0], [gradients[1]]

    def replaced(self, gradients, dense, rows):
        """The gradients with other parts."""
        return dense, rows[0]

    def contents(self, model):
        """The head, and tables, slots and number of steps."""
        return model[0], contents(self.collection, model[2])


def contents(collection, state):
    """Tables and slots, with rows in the order of ids or keys, and the number of steps."""
    return collection.tables(state), collection.slots(state), int(state.step)


@functools.cache
def core_run(*storages):
    """Losses, head, tables and slots after training on one device, without Flax."""
    core = Core(*storages)

    @jax.jit
    def step(model, batch):
        loss, gradients = core.value_and_grad(model, batch, LABELS)
        return core.stepped(model, gradients), loss

    model, losses = core.model, []
    for batch in batches(core.collection):
        model, loss = step(model, batch)
        losses.append(float(loss))
    return losses, *core.contents(model)


def assert_same_run(run, losses, head, tables_and_slots):
    """Checks losses, head, tables and slots against those of another run."""
    np.testing.assert_allclose(losses, run[0], rtol=1e-5)
    actual, wanted = (jax.tree.leaves(tree) for tree in ((head, tables_and_slots), run[1:]))
    for array, expected in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
