"""A DLRM for click logs in Criteo's form, whose categories are hashed keys: no vocabulary, no offsets, no files of ids.

    python notebooks/criteo.py [--data train.txt] [--steps 400]

A line of the log has a label, 13 counts and 26 categories in hexadecimal digits, between tabs. Without a file a log is
generated, of which the best possible loss is known.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rsembed as rs

DIM, BATCH = 16, 1024


class DLRM(nnx.Module):
    def __init__(self, collection, *, rngs):
        num_vectors = 1 + len(collection.features)
        self.embeddings = rs.nnx.Embeddings(collection, rngs=rngs)
        self.below = nnx.Sequential(nnx.Linear(13, 64, rngs=rngs), jax.nn.relu, nnx.Linear(64, DIM, rngs=rngs))
        num_inputs = DIM + num_vectors * (num_vectors - 1) // 2
        self.above = nnx.Sequential(nnx.Linear(num_inputs, 64, rngs=rngs), jax.nn.relu, nnx.Linear(64, 1, rngs=rngs))

    def __call__(self, numbers, ids):
        below = self.below(numbers)
        pairs = rs.pairwise_interaction(jnp.stack([below, *self.embeddings(ids).values()], axis=1))
        return self.above(jnp.concatenate([below, pairs], axis=1))[:, 0]


def loss_fn(model, numbers, ids, labels):
    return optax.sigmoid_binary_cross_entropy(model(numbers, ids), labels).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, *batch):
    loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, *batch)
    optimizer.update(model, gradients)
    return loss


def make_model(num_features, rows, seed=0):
    """The collection has a hashed table a feature; a key gets its row when it is first trained."""
    table = {"vocabulary_size": rows, "embedding_dim": DIM, "storage": rs.Hashed(when_full="evict", eviction="lfu")}
    table["optimizer"] = rs.optimizers.RowWiseAdagrad(0.1)
    features = [
        rs.FeatureSpec(name=f"c{k}", table_spec=rs.TableSpec(name=f"c{k}", **table)) for k in range(num_features)
    ]
    collection = rs.EmbeddingCollection(features)
    return collection, DLRM(collection, rngs=nnx.Rngs(seed))


def read(lines):
    """Labels, numbers and keys of lines of the log; what is missing is 0."""
    fields = [line.rstrip("\n").split("\t") for line in lines]
    numbers = np.float32([[float(field or 0) for field in row[1:14]] for row in fields])
    keys = np.int64([[int(field or "0", 16) for field in row[14:]] for row in fields])
    return np.float32([row[0] for row in fields]), np.log1p(np.maximum(numbers, 0)), keys


def generated(num_samples, num_features=26, sample_seed=0):
    """The same from a known law, the best loss that is possible on it, and that of the rate of clicks alone."""
    clicks = rs.datasets.synthetic_clicks(
        num_samples, vocabulary_sizes=[1_000] * num_features, num_dense=13, seed=0, sample_seed=sample_seed
    )
    ids = np.stack(list(clicks.sparse.values()), axis=1).astype(np.int64)
    keys = (ids + 1) * 0x9E3779B97F4A7C1 % 2**62 + np.arange(num_features)  # as large as those of hashed strings
    return (clicks.labels.astype(np.float32), clicks.dense, keys), (clicks.best_log_loss, clicks.base_rate_log_loss)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file in the form of Criteo's log")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(argv)
    if options.data:
        with open(options.data) as file:
            labels, numbers, keys = read(itertools.islice(file, options.steps * BATCH))
    else:
        (labels, numbers, keys), (best, base) = generated(options.steps * BATCH)
        print(f"generated log: whoever knows only the rate of clicks has a loss of {base:.4f}, the best is {best:.4f}")
    collection, model = make_model(keys.shape[1], rows=100_000)
    optimizer = rs.nnx.Optimizer(model, optax.adam(3e-3))
    losses = []
    for start in range(0, len(labels) - BATCH + 1, BATCH):  # each sample once: the loss is that of unseen ones
        part = slice(start, start + BATCH)
        ids = collection.prepare({name: keys[part, k] for k, name in enumerate(collection.features)})
        losses.append(train_step(model, optimizer, numbers[part], ids, labels[part]))
        if len(losses) % 100 == 0:
            print(f"step {len(losses)}: loss {np.mean(losses[-100:]):.4f}")
    rows = [len(table["keys"]) for table in collection.tables(model.embeddings.state).values()]
    print(f"{sum(rows)} keys got a row, {min(rows)} to {max(rows)} of a category")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
