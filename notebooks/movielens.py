"""Trains a film recommender on a log of ratings, and measures its recall, NDCG and AUC.

    python notebooks/movielens.py --tables hashed --devices 4

The model has two towers. The user tower makes a vector of the user's number, the films that the user
rated last, and the month. The item tower makes a vector of the film's number and genres. The dot
product of the two vectors is the score of the film for the user.

`--tables` chooses the `storage=` of the tables of users and films, and `--devices` the size of the
mesh. The rest of the program is the same for all choices. The notebook 12_movielens explains it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import rsembed as rs
from rsembed import checkpoint, datasets
from rsembed.datasets.ratings import RatingsLog
from rsembed.progress import progress
from rsembed.tt import TensorTrain

TABLES = ("dense", "hashed", "tensor_train", "host_cached")
DAYS_PER_MONTH = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. Each field is an option of the command line.

    Args:
      data: "generated", a path of a MovieLens folder or archive, "ml-1m" to download it, or "auto"
        to read the folder `RSEMBED_DATA` and to generate a log if it has no ratings.
      tables: storage of the tables of users and films, one of `TABLES`.
      devices: number of devices of the mesh.
      steps: number of training steps.
      batch_size: number of ratings of a step.
      embedding_dim: number of columns of each table.
      history: number of films in a user's history.
      table_rate: learning rate of the tables.
      tower_rate: learning rate of the towers.
      max_norm: gradients with a larger global norm are scaled to this norm.
      seed: seed of the generated log, the initial values and the order of the ratings.
      folder: folder of checkpoints. If it has checkpoints, the run continues from the latest one.
    """

    data: str = "generated"
    tables: str = "dense"
    devices: int = 1
    steps: int = 300
    batch_size: int = 512
    embedding_dim: int = 32
    history: int = 20
    table_rate: float = 0.1
    tower_rate: float = 0.003
    max_norm: float = 1.0
    seed: int = 0
    folder: str = ""


# The log


class Task(NamedTuple):
    """A log of ratings, split by time: the last rating of each user is for the test.

    Attributes:
      log: all ratings.
      histories: `[ratings, history]`, for each rating the films that the user rated before, the
        latest one first. -1 is padding.
      months: `[ratings]`, month of each rating.
      genres: `[films, genres]`, numbers of the genres of each film. -1 is padding.
      train: indices of the ratings for training.
      test: indices of the ratings for the test, one for each user.
      log_frequency: `[films]`, logarithm of each film's share of the training ratings.
    """

    log: RatingsLog
    histories: np.ndarray
    months: np.ndarray
    genres: np.ndarray
    train: np.ndarray
    test: np.ndarray
    log_frequency: np.ndarray


def load_log(settings: Settings) -> RatingsLog:
    """Ratings from the source that `settings.data` names."""
    if settings.data not in ("generated", "auto", "ml-1m"):
        return datasets.movielens(settings.data)
    if settings.data == "ml-1m":
        return datasets.movielens(download=True)
    if settings.data == "auto":
        try:
            return datasets.movielens()
        except FileNotFoundError:
            print("no ratings at RSEMBED_DATA: a log is generated")
    return datasets.generated_ratings(2_000, 500, seed=settings.seed)


def load_task(settings: Settings) -> Task:
    """The log, its split, and the inputs of the model that follow from the log."""
    log = load_log(settings)
    is_last = log.is_last()
    train = np.flatnonzero(~is_last)
    # Genres of each film first, then the other genres, which become padding.
    most_genres = log.genres.sum(axis=1).max()
    genres = np.argsort(~log.genres, axis=1, kind="stable")[:, :most_genres]
    has_genre = np.take_along_axis(log.genres, genres, axis=1)
    counts = np.bincount(log.items[train], minlength=len(log.titles))
    # Five more ratings for each film. Without them, the correction for the frequency in `loss_fn`
    # is so large for a rare film that this film decides the loss of its batch.
    frequency = (counts + 5) / len(train)
    return Task(
        log=log,
        histories=log.histories(settings.history),
        months=(log.days / DAYS_PER_MONTH).astype(np.int32),
        genres=np.where(has_genre, genres, -1),
        train=train,
        test=np.flatnonzero(is_last),
        log_frequency=np.log(frequency).astype(np.float32),
    )


# Tables


def storages(task: Task, settings: Settings) -> dict[str, Any]:
    """Storages of the tables that are not arrays on the device, by table."""
    num_users = len(task.log.user_ids)
    num_films = len(task.log.item_ids)
    if settings.tables == "hashed":
        return {"user": rs.Hashed(), "item": rs.Hashed()}
    if settings.tables == "tensor_train":
        # One byte for each value. An array has four.
        return {
            "user": TensorTrain(bytes=num_users * settings.embedding_dim),
            "item": TensorTrain(bytes=num_films * settings.embedding_dim),
        }
    if settings.tables == "host_cached":
        # Films stay on the device, because a batch reads most of them.
        return {"user": rs.HostCached(cache_rows=2 * settings.batch_size)}
    return {}


def make_collection(task: Task, settings: Settings) -> rs.EmbeddingCollection:
    """Four tables and the five features that read them."""
    num_rows = {
        "user": len(task.log.user_ids),
        "item": len(task.log.item_ids),
        "genre": len(task.log.genre_names),
        "month": int(task.months.max()) + 1,
    }
    storage_of_table = storages(task, settings)
    tables = {}
    for name, rows in num_rows.items():
        tables[name] = rs.TableSpec(
            name=name,
            vocabulary_size=rows,
            embedding_dim=settings.embedding_dim,
            combiner="mean",
            initializer=jax.nn.initializers.normal(0.02),
            optimizer=rs.optimizers.RowWiseAdagrad(settings.table_rate),
            storage=storage_of_table.get(name),
        )
    features = [
        rs.FeatureSpec(name="user", table_spec=tables["user"]),
        rs.FeatureSpec(name="history", table_spec=tables["item"]),
        rs.FeatureSpec(name="month", table_spec=tables["month"]),
        rs.FeatureSpec(name="item", table_spec=tables["item"]),
        rs.FeatureSpec(name="genres", table_spec=tables["genre"]),
    ]
    mesh = None
    if settings.devices > 1:
        devices = jax.devices()[: settings.devices]
        mesh = jax.make_mesh((settings.devices,), ("device",), devices=devices)
    return rs.EmbeddingCollection(features, mesh=mesh)


# Batches


def ids_of(
    task: Task, settings: Settings, ratings: np.ndarray, items: np.ndarray
) -> dict[str, np.ndarray]:
    """Ids of a batch: users and histories at the time of `ratings`, and the films to score."""
    user = task.log.users[ratings]
    history = task.histories[ratings]
    item = items
    if settings.tables == "hashed":
        # Hashed tables take the numbers in the log as they are, with gaps.
        user = task.log.user_ids[user]
        item = task.log.item_ids[item]
        history = np.where(history < 0, -1, task.log.item_ids[history])
    return {
        "user": user,
        "history": history,
        "month": task.months[ratings],
        "item": item,
        "genres": task.genres[items],
    }


def make_batches(
    task: Task, settings: Settings, collection: rs.EmbeddingCollection
) -> Iterator[Any]:
    """Batches of all steps, which threads prepare in advance.

    `get_state` of the iterator is its position, which a checkpoint saves.
    """
    import grain

    generator = np.random.Generator(np.random.PCG64(settings.seed))
    num_epochs = 1 + settings.steps * settings.batch_size // len(task.train)
    order = np.concatenate([generator.permutation(task.train) for _ in range(num_epochs)])

    def batch_at(step: int) -> tuple[dict[str, Any], np.ndarray]:
        start = step * settings.batch_size
        ratings = order[start : start + settings.batch_size]
        items = task.log.items[ratings]
        return collection.prepare(ids_of(task, settings, ratings, items)), items

    batches = grain.MapDataset.range(settings.steps).map(batch_at)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


# Model


def init_towers(settings: Settings) -> dict[str, list[jax.Array]]:
    """Weights and biases of the two layers of each tower."""
    generator = np.random.Generator(np.random.PCG64(settings.seed))
    dim = settings.embedding_dim

    def layer(inputs: int, outputs: int) -> list[jax.Array]:
        weights = generator.normal(0.0, inputs**-0.5, (inputs, outputs))
        return [jnp.asarray(weights, jnp.float32), jnp.zeros(outputs, jnp.float32)]

    return {
        "user": layer(3 * dim, 2 * dim) + layer(2 * dim, dim),
        "item": layer(2 * dim, 2 * dim) + layer(2 * dim, dim + 1),
    }


def tower(layers: list[jax.Array], *vectors: jax.Array) -> jax.Array:
    """Output of two dense layers for the concatenated vectors."""
    weights_1, bias_1, weights_2, bias_2 = layers
    inputs = jnp.concatenate(vectors, axis=1)
    hidden = jax.nn.relu(inputs @ weights_1 + bias_1[None])
    return hidden @ weights_2 + bias_2[None]


def user_vectors(towers: Any, vectors: dict[str, jax.Array]) -> jax.Array:
    """Vectors of users, `[batch, dim + 1]`. The last column is 1, a factor of the film's bias."""
    user = vectors["user"]
    history = vectors["history"]
    taste = user + history + tower(towers["user"], user, history, vectors["month"])
    return jnp.pad(taste, ((0, 0), (0, 1)), constant_values=1.0)


def item_vectors(towers: Any, vectors: dict[str, jax.Array]) -> jax.Array:
    """Vectors of films, `[batch, dim + 1]`. The last column is a bias, the same for all users."""
    item = vectors["item"]
    genres = vectors["genres"]
    return jnp.pad(item + genres, ((0, 0), (0, 1))) + tower(towers["item"], item, genres)


def loss_fn(
    towers: Any, vectors: dict[str, jax.Array], items: jax.Array, log_frequency: jax.Array
) -> jax.Array:
    """Cross-entropy of finding the user's film among the films of the batch.

    A popular film is more often in a batch, so its frequency is divided out.
    """
    scores = user_vectors(towers, vectors) @ item_vectors(towers, vectors).T
    logits = scores - log_frequency[items][None]
    labels = jnp.arange(len(items))
    # A film that another user of the batch rated, too, is no wrong answer.
    is_same_film = items[:, None] == items[None]
    is_label = jnp.eye(len(items), dtype=bool)
    logits = jnp.where(is_same_film & ~is_label, -1e9, logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Training


class Model(NamedTuple):
    """Everything that a training step changes: tables, towers, and the optimizer of the towers."""

    state: rs.EmbeddingState
    towers: Any
    adam: Any


def tower_rule(settings: Settings) -> optax.GradientTransformation:
    """The optimizer of the towers."""
    clip = optax.clip_by_global_norm(settings.max_norm)
    return optax.chain(clip, optax.adam(settings.tower_rate))


def init_model(settings: Settings, collection: rs.EmbeddingCollection) -> Model:
    """A model with initial values."""
    towers = init_towers(settings)
    adam = tower_rule(settings).init(towers)
    towers, adam = placed(collection, (towers, adam))
    return Model(collection.init(jax.random.key(settings.seed)), towers, adam)


def placed(collection: rs.EmbeddingCollection, arrays: Any) -> Any:
    """The arrays on the device, or with a mesh, a copy of them on each of its devices."""
    mesh = collection.devices.mesh
    if mesh is None:
        return jax.tree.map(jnp.asarray, arrays)
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    settings: Settings,
    collection: rs.EmbeddingCollection,
    model: Model,
    batch: Any,
    items: Any,
    log_frequency: Any,
) -> tuple[Model, jax.Array]:
    """One step of the tables and the towers. Returns the new model and the loss."""
    value_and_grad = rs.value_and_grad(loss_fn, collection)
    loss, (d_towers, row_gradients) = value_and_grad(
        model.towers, model.state, batch, items, log_frequency
    )
    updates, adam = tower_rule(settings).update(d_towers, model.adam)
    towers = optax.apply_updates(model.towers, updates)
    row_gradients = rs.clip_by_global_norm(row_gradients, settings.max_norm)
    state = collection.apply(model.state, row_gradients)
    return Model(state, towers, adam), loss


def train(
    task: Task,
    settings: Settings,
    collection: rs.EmbeddingCollection,
    model: Model,
    batches: Any,
    num_steps: int,
) -> tuple[Model, np.ndarray]:
    """Trains for `num_steps` batches. Returns the new model and the loss of each step."""
    losses = []
    description = f"{settings.tables}, {settings.devices} device(s)"
    for _ in progress(range(num_steps), description=description):
        batch, items = next(batches)
        # Only tables on the host need this. Other tables stay as they are.
        model = model._replace(state=collection.prefetch(model.state, batch))
        model, loss = train_step(settings, collection, model, batch, items, task.log_frequency)
        losses.append(loss)
    return model, np.array(losses)


def save(path: Path, collection: rs.EmbeddingCollection, model: Model, batches: Any) -> None:
    """Saves the model and the position of the batches."""
    others = {"towers": model.towers, "adam": model.adam}
    metadata = {"input": batches.get_state()}
    checkpoint.save_collection(path, collection, model.state, others=others, metadata=metadata)


def restore(path: Path, collection: rs.EmbeddingCollection, fresh: Model, batches: Any) -> Model:
    """The model of a checkpoint. Sets `batches` to the position that was saved with it."""
    others = {"towers": fresh.towers, "adam": fresh.adam}
    state, others = checkpoint.load_collection(path, collection, others=others)
    batches.set_state(checkpoint.manifest(path)["metadata"]["user"]["input"])
    return Model(state, others["towers"], others["adam"])


# Quality


@partial(jax.jit, static_argnums=0)
def score(collection: rs.EmbeddingCollection, model: Model, batch: Any) -> jax.Array:
    """Scores `[users, films]` of the users and films of a batch."""
    vectors = collection.lookup(model.state, batch)
    return user_vectors(model.towers, vectors) @ item_vectors(model.towers, vectors).T


def score_all(
    task: Task, settings: Settings, collection: rs.EmbeddingCollection, model: Model
) -> tuple[Model, np.ndarray]:
    """Scores `[users, films]` of all films at the time of each user's last rating.

    Returns:
      the model, which is the same except that other rows of tables on the host may be cached, and
      the scores.
    """
    num_films = len(task.log.titles)
    # All batches have the same shapes, and all devices have the same number of films. The films and
    # ratings that fill them up are scored and removed at the end.
    films_per_device = -(-num_films // settings.devices)
    films = np.resize(np.arange(num_films), films_per_device * settings.devices)
    scores = []
    for start in range(0, len(task.test), settings.batch_size):
        ratings = np.resize(task.test[start : start + settings.batch_size], settings.batch_size)
        batch = collection.prepare(ids_of(task, settings, ratings, films))
        model = model._replace(state=collection.prefetch(model.state, batch))
        scores.append(score(collection, model, batch))
    return model, np.concatenate(scores)[: len(task.test), :num_films]


class Quality(NamedTuple):
    """How high the hidden film of each user is ranked among the films that the user had not rated.

    Attributes:
      recall_at_10: share of users with the hidden film among the first ten.
      ndcg_at_10: the same, but rank r counts 1 / log2(r + 1).
      auc: share of the other films that are ranked below the hidden film.
    """

    recall_at_10: float
    ndcg_at_10: float
    auc: float


def seen_films(task: Task) -> np.ndarray:
    """Mask `[all users, films]` of the training ratings."""
    is_seen = np.zeros((len(task.log.user_ids), len(task.log.titles)), bool)
    is_seen[task.log.users[task.train], task.log.items[task.train]] = True
    return is_seen


def judge(task: Task, scores: np.ndarray) -> Quality:
    """Quality of scores `[users, films]`, with a row for each rating of `task.test`.

    A film with the same score as the hidden film counts as half a film above it.
    """
    is_candidate = ~seen_films(task)[task.log.users[task.test]]
    score_of_hidden = np.take_along_axis(scores, task.log.items[task.test][:, None], axis=1)
    num_above = np.sum((scores > score_of_hidden) & is_candidate, axis=1)
    num_equal = np.sum((scores == score_of_hidden) & is_candidate, axis=1) - 1
    above = num_above + 0.5 * num_equal
    is_in_first_ten = above < 10
    gains = np.where(is_in_first_ten, 1 / np.log2(above + 2), 0)
    num_others = np.sum(is_candidate, axis=1) - 1
    return Quality(
        recall_at_10=float(np.mean(is_in_first_ten)),
        ndcg_at_10=float(np.mean(gains)),
        auc=float(np.mean(1 - above / num_others)),
    )


# Other recommenders, for comparison


def popularity(task: Task) -> np.ndarray:
    """Scores `[users, films]` that rank the films by the number of training ratings."""
    return np.tile(task.log_frequency, (len(task.test), 1))


def item_neighbours(
    task: Task,
    num_neighbours: int = 50,
    side: str = "seen",
    num_latest: int | None = None,
) -> np.ndarray:
    """Scores `[users, films]` of item-kNN: the sum of cosine similarities to the user's films.

    Args:
      task: the log and its split.
      num_neighbours: the sum has a pair of films only if one is among this number of films that are
        most similar to the other.
      side: the film with these neighbours. "seen": the film that the user rated. "offered": the film
        to score.
      num_latest: number of latest films of each user in the sum. None: all films.
    """
    seen = seen_films(task).astype(np.float32)
    num_viewers = seen.sum(axis=0)
    lengths = np.sqrt(np.maximum(num_viewers, 1))
    similarity = seen.T @ seen
    similarity /= lengths[:, None]
    similarity /= lengths[None]
    np.fill_diagonal(similarity, 0)
    num_neighbours = min(num_neighbours, len(similarity) - 1)
    axis = 1 if side == "seen" else 0
    partitioned = np.partition(similarity, -num_neighbours, axis=axis)
    least = partitioned.take([-num_neighbours], axis=axis)
    similarity[similarity < least] = 0
    users = task.log.users[task.test]
    if num_latest is None:
        return seen[users] @ similarity
    latest = np.zeros((len(users), seen.shape[1]), np.float32)
    histories = task.log.histories(num_latest)[task.test]
    samples, positions = np.nonzero(histories >= 0)
    latest[samples, histories[samples, positions]] = 1
    return latest @ similarity


def matrix_factorisation(
    task: Task, dim: int = 32, rounds: int = 5, weight: float = 1.0, decay: float = 10.0
) -> np.ndarray:
    """Scores `[users, films]` of a matrix factorisation, by alternating least squares.

    The matrix has a 1 for each film that a user rated, with weight 1 + `weight`, and a 0 for each
    other film, with weight 1.

    Source: Hu, Koren and Volinsky, "Collaborative Filtering for Implicit Feedback Datasets", ICDM
      2008, equation 4.
    """
    is_seen = seen_films(task)
    generator = np.random.default_rng(0)
    films = generator.normal(0.0, 0.1, (is_seen.shape[1], dim))
    for _ in progress(range(rounds), description="matrix factorisation"):
        users = least_squares(is_seen, films, weight, decay)
        films = least_squares(is_seen.T, users, weight, decay)
    return users[task.log.users[task.test]] @ films.T


def least_squares(
    is_seen: np.ndarray, others: np.ndarray, weight: float, decay: float
) -> np.ndarray:
    """The best vector for each row of `is_seen`, if `others` are the vectors of its columns."""
    dim = others.shape[1]
    common = others.T @ others + decay * np.eye(dim)
    vectors = np.zeros((len(is_seen), dim))
    for row in range(len(is_seen)):
        seen = others[is_seen[row]]
        matrix = common + weight * seen.T @ seen
        vectors[row] = np.linalg.solve(matrix, (1 + weight) * seen.sum(axis=0))
    return vectors


def line_of(name: str, quality: Quality) -> str:
    """A line of a table of results."""
    recall = f"recall@10 {quality.recall_at_10:.3f}"
    ndcg = f"NDCG@10 {quality.ndcg_at_10:.3f}"
    return f"{name:14}{recall}   {ndcg}   AUC {quality.auc:.3f}"


def device_bytes(state: rs.EmbeddingState) -> int:
    """Bytes of the tables and their optimizer state on one device."""
    num_bytes = 0
    for leaf in jax.tree.leaves((state.tables, state.slots)):
        num_bytes += leaf.addressable_shards[0].data.nbytes
    return num_bytes


def fit(task: Task, settings: Settings) -> tuple[rs.EmbeddingCollection, Model, np.ndarray]:
    """A trained model, and the loss of each step.

    With a folder of checkpoints, training continues from the latest one and ends with another.
    """
    collection = make_collection(task, settings)
    batches = make_batches(task, settings, collection)
    model = init_model(settings, collection)
    if settings.folder:
        paths = checkpoint.CheckpointManager(settings.folder, read_only=True).paths()
        if paths:
            model = restore(paths[-1], collection, model, batches)
    num_steps = settings.steps - int(model.state.step)
    model, losses = train(task, settings, collection, model, batches, num_steps)
    if settings.folder and len(losses):
        save(Path(settings.folder) / f"step_{settings.steps:09}", collection, model, batches)
    return collection, model, losses


def main(settings: Settings) -> None:
    """Trains a model and prints its quality beside the quality of other recommenders."""
    task = load_task(settings)
    print(task.log.source)
    collection, model, losses = fit(task, settings)
    model, scores = score_all(task, settings, collection, model)
    print(collection)
    if len(losses):
        print(f"{len(losses)} steps, the last loss {losses[-1]:.4f}")
    else:
        print("no steps were left to do")
    scores_of = {
        "most popular": popularity(task),
        "item-kNN": item_neighbours(task),
        "factorisation": matrix_factorisation(task),
        settings.tables: scores,
    }
    for name, scores in scores_of.items():
        print(line_of(name, judge(task, scores)))
    kilobytes = device_bytes(model.state) / 1e3
    print(f"{kilobytes:,.0f} kB of tables and their optimizer state on a device")


def parsed(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        choices = None
        if field.name == "tables":
            choices = TABLES
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            choices=choices,
            type=type(field.default),
            default=field.default,
            help=f"default: {field.default!r}",
        )
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    settings = parsed()
    # A CPU can act as several devices.
    jax.config.update("jax_num_cpu_devices", settings.devices)
    main(settings)
