"""A trained model with `nnx.Embed`, converted: the same losses, and each step touches the rows of its batch alone.

    python notebooks/from_nnx_embed.py

`nnx.Embed` is a parameter, whose gradient and optimizer state are as large as the table. The layer of rsembed takes its
rows with `with_tables`, and optax keeps the rest of the model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rsembed as rs

ROWS, DIM, RATE = 50_000, 16, 0.5


class Before(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(ROWS, DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.embed(ids).mean(axis=1))[:, 0]


class After(nnx.Module):
    def __init__(self, before, *, rngs):
        item = rs.TableSpec(name="item", vocabulary_size=ROWS, embedding_dim=DIM, combiner="mean")
        item.optimizer = rs.optimizers.SGD(RATE)
        collection = rs.EmbeddingCollection([rs.FeatureSpec(name="items", table_spec=item)])
        self.embed = rs.nnx.Embeddings(collection, rngs=rngs)
        self.embed.set_state(
            collection.with_tables(
                self.embed.state, {"item": np.asarray(before.embed.embedding[...])}
            )
        )
        self.head = nnx.Linear(DIM, 1, rngs=rngs)
        nnx.update(self.head, jax.tree.map(jnp.array, nnx.state(before.head)))

    def __call__(self, ids):
        return self.head(self.embed({"items": ids})["items"])[:, 0]


def loss_fn(model, ids, labels):
    return optax.sigmoid_binary_cross_entropy(model(ids), labels).mean()


def train(model, optimizer, value_and_grad, batches):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, ids, labels):
        loss, gradients = value_and_grad(loss_fn)(model, ids, labels)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer, ids, labels)) for ids, labels in batches]


def main():
    rng = np.random.default_rng(0)
    batches = [
        (rng.integers(0, ROWS, (64, 5)), rng.integers(0, 2, 64).astype(np.float32))
        for _ in range(20)
    ]
    before = Before(rngs=nnx.Rngs(0))
    after = After(before, rngs=nnx.Rngs(1))
    theirs = train(
        before, nnx.Optimizer(before, optax.sgd(RATE), wrt=nnx.Param), nnx.value_and_grad, batches
    )
    ours = train(after, rs.nnx.Optimizer(after, optax.sgd(RATE)), rs.nnx.value_and_grad, batches)
    print(f"largest difference of two losses: {np.abs(np.subtract(theirs, ours)).max():.1e}")
    return theirs, ours


if __name__ == "__main__":
    main()
