"""A training program to copy: evaluation, early stopping, checkpoints, schedules, a log of losses.

    python notebooks/training.py [--data FOLDER] [--run runs/films] [--epochs 20] [--seed 0]

It learns which film a user rates next, from any published MovieLens log or from generated ratings.
A second call with the same --run continues where the first one stopped. docs/training.md explains
the program.
"""

import argparse
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rsembed as rs

DIM, HISTORY, BATCH_SIZE, PATIENCE, K = 32, 20, 512, 3, 10


def split(log):
    """Ratings to train on, for validation (each user's last but one) and for the test (the last)."""
    by_user = np.argsort(log.users, kind="stable")  # keeps the ratings of a user sorted by time
    is_last = log.is_last()[by_user]
    is_validation = np.append(is_last[1:], False)
    return by_user[~(is_last | is_validation)], by_user[is_validation], by_user[is_last]


def schedule(rate, steps_per_epoch):
    """Warms up for 100 steps, then decays by a tenth in each epoch."""
    return optax.warmup_exponential_decay_schedule(0.0, rate, 100, steps_per_epoch, 0.9)


class TwoTowers(nnx.Module):
    """Scores of films for users, from the films that a user rated last."""

    def __init__(self, num_films, steps_per_epoch, rngs):
        rule = rs.optimizers.RowWiseAdagrad(schedule(0.1, steps_per_epoch))
        table = rs.TableSpec("film", num_films, DIM, optimizer=rule, combiner="mean")
        features = [rs.FeatureSpec(name, table) for name in ("latest", "history", "film")]
        self.embeddings = rs.nnx.Embeddings(rs.EmbeddingCollection(features), rngs=rngs)
        self.user_tower = self.tower(2 * DIM, rngs)
        self.film_tower = self.tower(DIM, rngs)

    def tower(self, num_inputs, rngs):
        # Products are computed in bfloat16; weights stay in float32.
        first = nnx.Linear(num_inputs, 64, dtype=jnp.bfloat16, rngs=rngs)
        second = nnx.Linear(64, DIM, dtype=jnp.bfloat16, rngs=rngs)
        return nnx.Sequential(nnx.Dropout(0.2, rngs=rngs), first, nnx.relu, second)

    def prepare(self, histories, films):
        ids = {"latest": histories[:, 0], "history": histories, "film": films}
        return self.embeddings.collection.prepare(ids)

    def __call__(self, ids):
        vectors = self.embeddings(ids)
        seen = jnp.concatenate([vectors["latest"], vectors["history"]], axis=1)
        user = vectors["latest"] + vectors["history"] + self.user_tower(seen).astype(jnp.float32)
        return user @ (vectors["film"] + self.film_tower(vectors["film"]).astype(jnp.float32)).T


def loss_fn(model, ids, films, log_counts):
    """Cross-entropy of finding the user's film among the films of the batch.

    A popular film is more often in a batch, so its frequency is divided out.
    """
    logits = model(ids) - log_counts[films][None]
    is_same_film = (films[:, None] == films[None]) & ~jnp.eye(len(films), dtype=bool)
    logits = jnp.where(is_same_film, -1e9, logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(films))).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, films, log_counts):
    loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ids, films, log_counts)
    optimizer.update(model, gradients)
    return loss


predict = jax.jit(lambda model, ids: model(ids))


def score_films(model, histories, num_films):
    """Scores of all films without dropout. Each history has a row."""
    model.eval()
    parts = []
    for start in range(0, len(histories), BATCH_SIZE):
        rows = np.resize(np.arange(start, len(histories)), BATCH_SIZE)  # all batches are full
        parts.append(predict(model, model.prepare(histories[rows], np.arange(num_films))))
    model.train()
    return np.concatenate(parts)[: len(histories)]


def recall(log, scores, rows, seen):
    """Share of `rows` with a film among the first K that the user has not rated in `seen`."""
    is_seen = np.zeros((len(log.user_ids), len(log.titles)), bool)
    is_seen[log.users[seen], log.items[seen]] = True
    scores = np.where(is_seen[log.users[rows]], -np.inf, scores)
    hidden_scores = scores[np.arange(len(rows)), log.items[rows]]
    return float(np.mean(np.sum(scores >= hidden_scores[:, None], axis=1) <= K))


def tensorboard(folder, step):
    """A function that writes a number for TensorBoard. Without tensorboardX, it writes nothing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return lambda name, value, step: None
    return SummaryWriter(folder, purge_step=step + 1).add_scalar


def restore(saved, model, optimizer, step=None):
    """Restores the latest checkpoint, or the one after `step` steps."""
    rest = nnx.state((model, optimizer), nnx.Not(rs.nnx.Tables))
    state, rest = saved.restore(others=rest, step=step)
    model.embeddings.set_state(state)
    nnx.update((model, optimizer), rest)


def fit(log, folder, epochs, seed, model_class=TwoTowers):
    """The model of the epoch with the best recall on the validation rows, and these recalls."""
    train, validation, _ = split(log)
    histories, num_films = log.histories(HISTORY), len(log.titles)
    log_counts = np.log(np.bincount(log.items[train], minlength=num_films) + 5.0)
    num_steps = len(train) // BATCH_SIZE
    model = model_class(num_films, num_steps, nnx.Rngs(seed))
    optimizer = rs.nnx.Optimizer(model, optax.adam(schedule(0.003, num_steps)))
    collection = model.embeddings.collection
    # A run continues only if these have the values of the checkpoint. Add your own settings.
    setting = {"seed": seed, "log of ratings": zlib.crc32(np.stack([log.users, log.items]))}
    losses, recalls = [], []
    # Training stops PATIENCE epochs after the best epoch, so its checkpoint still exists.
    with rs.checkpoint.CheckpointManager(folder, collection, max_to_keep=PATIENCE + 1) as saved:
        if saved.paths():
            restore(saved, model, optimizer)
            metadata = saved.metadata(int(model.embeddings.state.step))
            for name, value in setting.items():
                if metadata.get(name) != value:
                    raise SystemExit(f"{folder} has a run with another {name}: take another --run")
            losses, recalls = metadata["curves"]
            print(f"{folder} continues after epoch {len(recalls)}")
        write = tensorboard(folder, len(recalls) * num_steps)
        while len(recalls) < min(epochs, np.argmax([*recalls, 0]) + PATIENCE + 1):
            order = np.random.default_rng((seed, len(recalls))).permutation(train)
            step_losses = []
            for rows in order[: num_steps * BATCH_SIZE].reshape(num_steps, BATCH_SIZE):
                ids = model.prepare(histories[rows], log.items[rows])
                step_losses.append(train_step(model, optimizer, ids, log.items[rows], log_counts))
            losses.append(float(np.mean(step_losses)))
            scores = score_films(model, histories[validation], num_films)
            recalls.append(recall(log, scores, validation, seen=train))
            rest = nnx.state((model, optimizer), nnx.Not(rs.nnx.Tables))
            curves = [losses, recalls]
            saved.save(model.embeddings.state, others=rest, metadata=setting | {"curves": curves})
            np.savetxt(f"{folder}/log.csv", np.transpose(curves), "%g", ",", header="loss,recall")
            write("loss", losses[-1], len(recalls) * num_steps)
            write("validation recall", recalls[-1], len(recalls) * num_steps)
            print(f"epoch {len(recalls)}: loss {losses[-1]:.3f}, recall@{K} {recalls[-1]:.3f}")
        restore(saved, model, optimizer, step=num_steps * (int(np.argmax(recalls)) + 1))
    return model, recalls


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder or archive of MovieLens; default: generated ratings")
    parser.add_argument("--run", default="runs/films", help="folder of checkpoints and log")
    parser.add_argument("--epochs", type=int, default=20, help="largest number of epochs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    log = rs.datasets.generated_ratings(1_000, 500, seed=0)
    if options.data:
        log = rs.datasets.movielens(options.data)
    model, _ = fit(log, options.run, options.epochs, options.seed)
    test = np.flatnonzero(log.is_last())
    seen = np.flatnonzero(~log.is_last())
    popularity = np.tile(np.bincount(log.items[seen], minlength=len(log.titles)), (len(test), 1))
    scores = score_films(model, log.histories(HISTORY)[test], len(log.titles))
    print(f"most popular films: test recall@{K} {recall(log, popularity, test, seen):.3f}")
    print(f"two towers:         test recall@{K} {recall(log, scores, test, seen):.3f}")


if __name__ == "__main__":
    main()
