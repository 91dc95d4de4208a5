"""Converts a model with `nnx.Embed`, and trains both models, which have the same losses.

    python notebooks/from_nnx_embed.py

`nnx.Embed` is a parameter: its gradient and its optimizer state are as large as the table, and each
step reads and writes all of it. The layer of rsembed takes over the rows with `with_tables`, and a
step changes only the rows of its batch. optax trains the rest of the model, as before.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rsembed as rs

NUM_ROWS = 50_000
DIM = 16
RATE = 0.5


class Before(nnx.Module):
    """The mean of the vectors of some items, and a linear layer."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(NUM_ROWS, DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.embed(ids).mean(axis=1))[:, 0]


class After(nnx.Module):
    """The same model with a table of rsembed, starting from the values of `before`."""

    def __init__(self, before, *, rngs):
        table = rs.TableSpec(
            name="item",
            vocabulary_size=NUM_ROWS,
            embedding_dim=DIM,
            combiner="mean",
            optimizer=rs.optimizers.SGD(RATE),
        )
        collection = rs.EmbeddingCollection([rs.FeatureSpec(name="items", table_spec=table)])
        self.embed = rs.nnx.Embeddings(collection, rngs=rngs)
        rows = np.asarray(before.embed.embedding[...])
        self.embed.set_state(collection.with_tables(self.embed.state, {"item": rows}))
        self.head = nnx.Linear(DIM, 1, rngs=rngs)
        nnx.update(self.head, jax.tree.map(jnp.array, nnx.state(before.head)))

    def __call__(self, ids):
        return self.head(self.embed({"items": ids})["items"])[:, 0]


def loss_fn(model, ids, labels):
    return optax.sigmoid_binary_cross_entropy(model(ids), labels).mean()


def train(model, optimizer, value_and_grad, batches):
    """Trains the model on each batch, and returns the losses."""

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, ids, labels):
        loss, gradients = value_and_grad(loss_fn)(model, ids, labels)
        optimizer.update(model, gradients)
        return loss

    losses = []
    for ids, labels in batches:
        losses.append(float(train_step(model, optimizer, ids, labels)))
    return losses


def main():
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(20):
        ids = rng.integers(0, NUM_ROWS, (64, 5))
        labels = rng.integers(0, 2, 64).astype(np.float32)
        batches.append((ids, labels))
    before = Before(rngs=nnx.Rngs(0))
    after = After(before, rngs=nnx.Rngs(1))
    optimizer_before = nnx.Optimizer(before, optax.sgd(RATE), wrt=nnx.Param)
    optimizer_after = rs.nnx.Optimizer(after, optax.sgd(RATE))
    losses_before = train(before, optimizer_before, nnx.value_and_grad, batches)
    losses_after = train(after, optimizer_after, rs.nnx.value_and_grad, batches)
    difference = np.abs(np.subtract(losses_before, losses_after)).max()
    print(f"largest difference of two losses: {difference:.1e}")
    return losses_before, losses_after


if __name__ == "__main__":
    main()
