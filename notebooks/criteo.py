"""Trains a DLRM and a logistic regression on a click log in Criteo's format.

    python notebooks/criteo.py [--data train.txt] [--rows 400000] [--epochs 1]

`--data` is Kaggle's train.txt, a day of the Terabyte log, or a CSV or TSV file with a header. See
rs.datasets.criteo. Without a file, a log is generated, and the best possible loss is known.
Categories become 64-bit keys of hashed tables, so there is no vocabulary to build.

The last tenth of the rows is held out, and the tenth before it is for validation. The script
reports each model with the learning rate and the epoch that have the least log-loss on the
validation rows: on most click logs, a DLRM overfits in the second epoch. Held-out rows are used for
the report only.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rsembed as rs

DIM = 16
MOST_BATCH_SIZE = 1024
HELD_OUT = 0.1
LINEAR_RATES = (0.02, 0.05, 0.2)


class Samples(NamedTuple):
    """Rows of a click log."""

    labels: np.ndarray  # [rows], 0 or 1
    numbers: np.ndarray  # [rows, 13]
    keys: np.ndarray  # [rows, 26], 64-bit keys of the categories


class Quality(NamedTuple):
    """Quality of predictions, and the numbers of samples and clicks that they were made for."""

    log_loss: float
    auc: float
    num_samples: int
    num_clicks: int


class Fit(NamedTuple):
    """A trained model at its best epoch."""

    validation: Quality
    epoch: int  # starts at 1
    rate: float
    held_log_odds: np.ndarray  # predictions for the held-out rows


# The model


class DLRM(nnx.Module):
    """Log-odds of a click from the numbers and the categories of a sample."""

    def __init__(self, collection, num_numbers, *, rngs):
        num_vectors = 1 + len(collection.features)
        num_inputs = DIM + num_vectors * (num_vectors - 1) // 2
        self.embeddings = rs.nnx.Embeddings(collection, rngs=rngs)
        self.bottom = nnx.Sequential(
            nnx.Linear(num_numbers, 64, rngs=rngs), jax.nn.relu, nnx.Linear(64, DIM, rngs=rngs)
        )
        self.top = nnx.Sequential(
            nnx.Linear(num_inputs, 64, rngs=rngs), jax.nn.relu, nnx.Linear(64, 1, rngs=rngs)
        )

    def __call__(self, numbers, ids):
        bottom = self.bottom(numbers)
        vectors = self.embeddings(ids)
        pairs = rs.pairwise_interaction(jnp.stack([bottom, *vectors.values()], axis=1))
        return self.top(jnp.concatenate([bottom, pairs], axis=1))[:, 0]


def make_model(num_numbers, num_categories, num_rows, rate=0.1, seed=0):
    """A collection with a hashed table for each category, and the model.

    A key gets a row when it is trained for the first time.
    """
    features = []
    for column in range(num_categories):
        table = rs.TableSpec(
            name=f"c{column}",
            vocabulary_size=num_rows,
            embedding_dim=DIM,
            # The model has 351 products of two vectors. With larger initial values, these products
            # are noise that slows the first steps down.
            initializer=jax.nn.initializers.normal(0.02),
            storage=rs.Hashed(when_full="evict", eviction="lfu"),
            optimizer=rs.optimizers.RowWiseAdagrad(rate),
        )
        features.append(rs.FeatureSpec(name=f"c{column}", table_spec=table))
    collection = rs.EmbeddingCollection(features)
    return collection, DLRM(collection, num_numbers, rngs=nnx.Rngs(seed))


def loss_fn(model, numbers, ids, labels):
    """Mean log-loss of a batch."""
    return optax.sigmoid_binary_cross_entropy(model(numbers, ids), labels).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, numbers, ids, labels):
    loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, numbers, ids, labels)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def log_odds(model, numbers, ids):
    return model(numbers, ids)


def prepared(collection, keys):
    """A batch of the collection from the keys of some samples."""
    columns = {}
    for column, name in enumerate(collection.features):
        columns[name] = keys[:, column]
    return collection.prepare(columns)


def predict(collection, model, samples, batch_size):
    """Log-odds of a click for each sample."""
    num_samples = len(samples.labels)
    parts = []
    for start in range(0, num_samples, batch_size):
        # All batches have the same size. The first samples fill up the last batch.
        rows = np.arange(start, start + batch_size) % num_samples
        ids = prepared(collection, samples.keys[rows])
        parts.append(np.asarray(log_odds(model, samples.numbers[rows], ids)))
    return np.concatenate(parts)[:num_samples]


# Logistic regression on the same columns


def weight_indices(train, other):
    """Index of the weight of each category of `other`, and the number of weights.

    The categories of `train` have weights, column by column. Index 0 is for all other categories.
    """
    indices = np.zeros(other.keys.shape, np.int32)
    num_weights = 1
    for column in range(train.keys.shape[1]):
        known = np.unique(train.keys[:, column])
        keys = other.keys[:, column]
        positions = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        is_known = known[positions] == keys
        indices[:, column] = np.where(is_known, num_weights + positions, 0)
        num_weights += len(known)
    return indices, num_weights


def linear_log_odds(params, numbers, indices):
    is_known = indices > 0
    weights = jnp.where(is_known, params["weights"][indices], 0)
    return params["bias"] + numbers @ params["numbers"] + weights.sum(axis=1)


def linear_loss(params, numbers, indices, labels):
    log_odds = linear_log_odds(params, numbers, indices)
    return optax.sigmoid_binary_cross_entropy(log_odds, labels).mean()


def fit_linear(parts, batch_size, epochs, rate, seed):
    """Logistic regression at its best epoch. It has a weight for each category and each number."""
    train, validation, held = parts
    train_indices, num_weights = weight_indices(train, train)
    validation_indices, _ = weight_indices(train, validation)
    held_indices, _ = weight_indices(train, held)
    params = {
        "bias": jnp.zeros(()),
        "numbers": jnp.zeros(train.numbers.shape[1]),
        "weights": jnp.zeros(num_weights),
    }
    optimizer = optax.adagrad(rate)

    @jax.jit
    def step(params, state, numbers, indices, labels):
        gradients = jax.grad(linear_loss)(params, numbers, indices, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    fits = []
    for epoch in range(epochs):
        for rows in batches_of(len(train.labels), batch_size, epoch, seed):
            params, state = step(
                params, state, train.numbers[rows], train_indices[rows], train.labels[rows]
            )
        log_odds = linear_log_odds(params, validation.numbers, validation_indices)
        quality = judge(validation.labels, log_odds)
        held_log_odds = np.asarray(linear_log_odds(params, held.numbers, held_indices))
        fits.append(Fit(quality, epoch + 1, rate, held_log_odds))
    return best_of(fits)


# Data


def load(path, num_rows):
    """Samples of a file for training, for validation and held out, in the order of the file.

    Logs are sorted by time, so the held-out samples are the latest ones.
    """
    # A missing category is a category, too, with key 0.
    log = rs.datasets.criteo(path, rows=num_rows, missing=0)
    keys = np.stack(list(log.sparse.values()), axis=1)
    # The logarithm shortens the long tail of counts. Missing and negative numbers count as 0.
    numbers = np.log1p(np.maximum(np.nan_to_num(log.dense), 0))
    samples = Samples(log.labels.astype(np.float32), numbers, keys)
    num_held = len(log) - int((1 - HELD_OUT) * len(log))
    num_train = len(log) - 2 * num_held
    parts = []
    for start, stop in ((0, num_train), (num_train, -num_held), (-num_held, None)):
        parts.append(Samples(*(array[start:stop] for array in samples)))
    return parts


def generated(num_samples, num_features=26, sample_seed=0):
    """Samples with known probabilities of a click, and the generated log."""
    clicks = rs.datasets.synthetic_clicks(
        num_samples,
        vocabulary_sizes=[1_000] * num_features,
        num_dense=13,
        seed=0,
        sample_seed=sample_seed,
    )
    ids = np.stack(list(clicks.sparse.values()), axis=1).astype(np.int64)
    # Ids become numbers as large as the hashes of texts.
    keys = (ids + 1) * 0x9E3779B97F4A7C1 % 2**62 + np.arange(num_features)
    return Samples(clicks.labels.astype(np.float32), clicks.dense, keys), clicks


def batches_of(num_samples, batch_size, epoch, seed):
    """Row numbers of each batch of an epoch. Every epoch has another order."""
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    for start in range(0, num_samples - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


# Quality


def auc(labels, scores):
    """Probability that a click has a higher score than a sample without a click.

    Two equal scores count as one half.
    """
    _, indices, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores get the middle of their ranks.
    last_ranks = np.cumsum(counts)
    middle_ranks = last_ranks - (counts - 1) / 2
    is_click = labels > 0
    num_clicks = is_click.sum()
    num_others = len(labels) - num_clicks
    rank_sum = middle_ranks[indices[is_click]].sum()
    return float((rank_sum - num_clicks * (num_clicks + 1) / 2) / (num_clicks * num_others))


def judge(labels, scores):
    """Quality of the scores, which are log-odds."""
    scores = np.asarray(scores, np.float64)
    log_loss = float(np.mean(np.logaddexp(0, scores) - labels * scores))
    return Quality(log_loss, auc(labels, scores), len(labels), int(labels.sum()))


def best_of(fits):
    """The fit with the least validation log-loss."""
    return min(fits, key=lambda fit: fit.validation.log_loss)


def show(name, quality, part="held-out"):
    print(f"{name:24}{part} log-loss {quality.log_loss:.4f}   AUC {quality.auc:.4f}")


def fit_dlrm(parts, batch_size, epochs, rate, table_rows, seed):
    """The DLRM at its best epoch, the loss of each step, and the number of keys in each table."""
    train, validation, held = parts
    num_numbers = train.numbers.shape[1]
    num_categories = train.keys.shape[1]
    collection, model = make_model(num_numbers, num_categories, table_rows, rate, seed)
    optimizer = rs.nnx.Optimizer(model, optax.adam(3e-3))
    num_steps = epochs * (len(train.labels) // batch_size)
    steps_per_line = max(1, num_steps // 10)
    losses = []
    fits = []
    for epoch in range(epochs):
        for rows in batches_of(len(train.labels), batch_size, epoch, seed):
            ids = prepared(collection, train.keys[rows])
            loss = train_step(model, optimizer, train.numbers[rows], ids, train.labels[rows])
            losses.append(loss)
            if len(losses) % steps_per_line == 0 or len(losses) == num_steps:
                mean_loss = np.mean(losses[-steps_per_line:])
                print(f"step {len(losses):,} of {num_steps:,}: loss {mean_loss:.4f}")
        log_odds = predict(collection, model, validation, batch_size)
        quality = judge(validation.labels, log_odds)
        show(f"DLRM, epoch {epoch + 1}", quality, "validation")
        held_log_odds = predict(collection, model, held, batch_size)
        fits.append(Fit(quality, epoch + 1, rate, held_log_odds))
    tables = collection.tables(model.embeddings.state)
    num_keys = [len(table["keys"]) for table in tables.values()]
    return best_of(fits), [float(loss) for loss in losses], num_keys


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", help="a click log in Criteo's format; without it, one is generated"
    )
    parser.add_argument("--rows", type=int, default=400_000, help="rows to read or generate")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--table-rates",
        type=float,
        nargs="+",
        default=[0.1],
        help="learning rates of the tables; the validation rows choose one",
    )
    parser.add_argument(
        "--table-rows", type=int, default=100_000, help="rows of each of the hashed tables"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    results = {}
    if options.data:
        parts = load(options.data, options.rows)
    else:
        num_held = max(1, int(HELD_OUT * options.rows))
        train, _ = generated(options.rows)
        validation, _ = generated(num_held, sample_seed=2)
        held, law = generated(num_held, sample_seed=1)
        parts = [train, validation, held]
        best = np.log(law.click_probability) - np.log1p(-law.click_probability)
        results["best possible"] = judge(held.labels, best)
    train, validation, held = parts
    for name, part in (("validation", validation), ("held-out", held)):
        if part.labels.min() == part.labels.max():
            raise ValueError(
                f"all {len(part.labels)} {name} labels are {part.labels[0]:.0f}, so there is no "
                "AUC. Read more --rows."
            )
    rate = float(train.labels.mean())
    print(
        f"{len(train.labels):,} rows to train, {len(validation.labels):,} for validation, "
        f"{len(held.labels):,} held out; {rate:.1%} are clicks"
    )
    batch_size = max(1, min(MOST_BATCH_SIZE, len(train.labels) // 20))
    log_odds_of_rate = np.log(rate) - np.log1p(-rate)
    results["rate of clicks"] = judge(held.labels, np.full(len(held.labels), log_odds_of_rate))
    linear_fits = []
    for linear_rate in LINEAR_RATES:
        linear_fits.append(fit_linear(parts, batch_size, options.epochs, linear_rate, options.seed))
    dlrm_fits = []
    for table_rate in options.table_rates:
        fit, losses, num_keys = fit_dlrm(
            parts, batch_size, options.epochs, table_rate, options.table_rows, options.seed
        )
        dlrm_fits.append(fit)
    for name, fits in (("logistic regression", linear_fits), ("DLRM", dlrm_fits)):
        fit = best_of(fits)
        print(f"{name}: the validation rows chose rate {fit.rate} and epoch {fit.epoch}")
        results[name] = judge(held.labels, fit.held_log_odds)
    for name, quality in results.items():
        show(name, quality)
    print(f"{sum(num_keys):,} keys have a row, {min(num_keys):,} to {max(num_keys):,} in a table")
    return losses, results


if __name__ == "__main__":
    main()
