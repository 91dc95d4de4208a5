"""A training run that tells what it learned: a layer of the wing, and a collection, over all devices there are.

Called by test_processes.py in this process, and by the program that it starts in several.
"""

import jax
import numpy as np

import rsembed as rs
from rsembed import sok

BATCH, STEPS, DIM = 16, 3, 4


def own_part(array):
    """This process' samples of a global batch."""
    return np.split(array, jax.process_count())[jax.process_index()]


def train(context):
    """Losses of every step, and all rows by key."""
    generator = np.random.default_rng(0)
    keys = generator.choice(generator.integers(0, 2**62, 30), (STEPS, BATCH, 2, 3))
    keys[generator.random(keys.shape) < 0.3] = -1
    targets = generator.normal(size=(STEPS, BATCH, 2, DIM)).astype(np.float32)
    layer = sok.DistributedEmbedding("mean", 32, DIM, 2, 3, optimizer=sok.optimizers.LazyAdam(0.1), context=context)
    normal, adagrad = jax.nn.initializers.normal(), rs.AdagradOptimizerSpec(0.1)
    table = rs.TableSpec(name="t", vocabulary_size=30, embedding_dim=DIM, initializer=normal, optimizer=adagrad)
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], mesh=context.mesh)
    state, losses = collection.init(jax.random.key(0)), []
    lookup, update = jax.jit(collection.lookup), jax.jit(collection.update)

    @jax.jit
    def loss_and_gradient(out, target):
        return ((out - target) ** 2).sum() / BATCH, 2 * (out - target) / BATCH

    for own, target in zip(keys, targets, strict=True):
        out, backward = layer.vjp(own_part(own))
        loss, gradient = loss_and_gradient(out, context.place(own_part(target)))
        backward(gradient)
        losses.append(float(loss))
        batch = collection.prepare({"f": own_part(np.where(own[:, 0] < 0, -1, own[:, 0] % 30))})
        activations = lookup(state, batch)
        loss, gradient = loss_and_gradient(activations["f"], context.place(own_part(target[:, 0])))
        state = update(state, batch, {"f": gradient})
        losses.append(float(loss))
    return {"losses": np.asarray(losses), "layer": sok.export_rows(layer.variable), "tables": collection.tables(state)}
