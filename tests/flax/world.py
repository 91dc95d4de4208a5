"""One small model for both Flax interfaces, and what the functional core makes of it."""

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
"""Two are alike, and share a storage."""
KEY = jax.random.key(0)
HEAD = np.sin(np.arange(DIM, dtype=np.float32)).reshape(DIM, 1)
LABELS = np.float32([1, 0, 0, 1])
TX = optax.adam(0.05)


def table(name, storage=None, optimizer=None):
    return rs.TableSpec(
        name,
        ROWS,
        DIM,
        combiner="mean",
        optimizer=optimizer or rs.optimizers.Adagrad(0.1),
        storage=storage,
    )


@functools.cache
def collection(*storages, on_mesh=False):
    """One table of each storage, which a feature of its name reads; a mean of bags of any length."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("device",)) if on_mesh else None
    features = [rs.FeatureSpec(storage, table(storage, STORAGES[storage])) for storage in storages]
    return rs.EmbeddingCollection(features, mesh=mesh)


def batches(own):
    """Ragged ids, some of them in several samples and steps, as many in each step; every feature has its own."""
    generator, found = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        ids = {
            name: [generator.integers(0, ROWS, size).tolist() for size in (2, 1, 3, 1)]
            for name in own.features
        }
        found.append(own.prepare(ids))
    return found


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()


def joined(activations):
    """The input of the head."""
    return functools.reduce(jnp.add, activations.values())


@functools.cache
def core_run(*storages, max_norm=None):
    """Losses, head, tables and slots after training on one device, without Flax."""
    own = collection(*storages)

    def loss_fn(head, activations):
        return loss_of(joined(activations) @ head, LABELS)

    @jax.jit
    def step(head, opt_state, state, batch):
        value_and_grad = rs.value_and_grad(loss_fn, own)
        loss, (d_head, rows) = value_and_grad(head, state, batch)
        if max_norm is not None:
            rows = rs.clip_by_global_norm(rows, max_norm)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = TX.update(d_head, opt_state)
        return optax.apply_updates(head, updates), opt_state, own.apply(state, rows), loss

    head, opt_state, state, losses = HEAD, TX.init(HEAD), own.init(KEY), []
    for batch in batches(own):
        head, opt_state, state, loss = step(head, opt_state, state, batch)
        losses.append(float(loss))
    return losses, head, contents(own, state)


def contents(own, state):
    """Tables and slots in the order of ids and keys, wherever their rows lie."""
    return own.tables(state), own.slots(state), int(state.step)


def assert_same_run(run, losses, head, tables_and_slots):
    """Losses, head, tables and slots are those of another run."""
    np.testing.assert_allclose(losses, run[0], rtol=1e-5)
    found, wanted = (jax.tree.leaves(own) for own in ((head, tables_and_slots), run[1:]))
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
