"""A recommender of films, from the log of ratings to recall and AUC. The notebook 12_movielens tells its story.

    python notebooks/movielens.py --tables hashed --devices 4

Two towers: a user's number, the films that he rated last and the month become one vector, a film's number and genres
another, and their product says how well the two go together. What differs between variants is `storage=` of two tables,
and the mesh.
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
    """What a run can be asked to do otherwise; every field is an option of the command line."""

    data: str = "generated"  # or "auto": MovieLens at RSEMBED_DATA, if it is there; "ml-1m": fetched; or a path
    tables: str = "dense"  # how users and films are kept: one of TABLES
    devices: int = 1
    steps: int = 300
    batch_size: int = 512
    embedding_dim: int = 32
    history: int = 20  # films
    table_rate: float = 0.1
    tower_rate: float = 0.003
    max_norm: float = 1.0
    seed: int = 0
    folder: str = ""  # of checkpoints, from the latest of which the run goes on


# The log


class Task(NamedTuple):
    """The log and what follows from it: a user's last film is asked for, the earlier ones are for training."""

    log: RatingsLog
    histories: np.ndarray  # [ratings, history]
    months: np.ndarray  # [ratings]
    genres: np.ndarray  # [films, most genres of one], -1 where it has fewer
    train: np.ndarray  # numbers of ratings
    test: np.ndarray
    log_frequency: np.ndarray  # [films]


def load_log(settings: Settings) -> RatingsLog:
    if settings.data not in ("generated", "auto", "ml-1m"):
        return datasets.movielens(settings.data)
    if settings.data == "ml-1m":
        return datasets.movielens(download=True)
    if settings.data == "auto":
        try:
            return datasets.movielens()
        except FileNotFoundError:
            print("no ratings of people are at RSEMBED_DATA, so a log is generated")
    return datasets.generated_ratings(2_000, 500, seed=settings.seed)


def load_task(settings: Settings) -> Task:
    log = load_log(settings)
    is_last = log.is_last()
    train = np.flatnonzero(~is_last)
    counts = np.bincount(log.items[train], minlength=len(log.titles))
    first_genres = np.argsort(~log.genres, axis=1, kind="stable")[:, : log.genres.sum(axis=1).max()]
    return Task(
        log=log,
        histories=log.histories(settings.history),
        months=(log.days / DAYS_PER_MONTH).astype(np.int32),
        genres=np.where(np.take_along_axis(log.genres, first_genres, axis=1), first_genres, -1),
        train=train,
        test=np.flatnonzero(is_last),
        log_frequency=np.log((counts + 5) / len(train)).astype(
            np.float32
        ),  # else a rare film outweighs its batch
    )


# Tables


def storages(task: Task, settings: Settings) -> dict[str, Any]:
    """By table, where its rows live, if not in an array of the device."""
    sizes = {"user": len(task.log.user_ids), "item": len(task.log.item_ids)}
    return {
        "dense": {},
        "hashed": {name: rs.Hashed() for name in sizes},
        "tensor_train": {
            name: TensorTrain(bytes=rows * settings.embedding_dim) for name, rows in sizes.items()
        },
        "host_cached": {
            "user": rs.HostCached(cache_rows=2 * settings.batch_size)
        },  # a batch names most films
    }[settings.tables]


def make_collection(task: Task, settings: Settings) -> rs.EmbeddingCollection:
    sizes = {"user": len(task.log.user_ids), "item": len(task.log.item_ids)}
    sizes |= {"genre": len(task.log.genre_names), "month": int(task.months.max()) + 1}
    how = {
        "embedding_dim": settings.embedding_dim,
        "combiner": "mean",
        "initializer": jax.nn.initializers.normal(0.02),
        "optimizer": rs.optimizers.RowWiseAdagrad(settings.table_rate),
    }
    storage_of = storages(task, settings)
    tables = {
        name: rs.TableSpec(name=name, vocabulary_size=rows, storage=storage_of.get(name), **how)
        for name, rows in sizes.items()
    }
    reads = {"user": "user", "history": "item", "month": "month", "item": "item", "genres": "genre"}
    features = [
        rs.FeatureSpec(name=name, table_spec=tables[table]) for name, table in reads.items()
    ]
    mesh = None
    if settings.devices > 1:
        mesh = jax.make_mesh(
            (settings.devices,), ("device",), devices=jax.devices()[: settings.devices]
        )
    return rs.EmbeddingCollection(features, mesh=mesh)


# Batches


def ids_of(
    task: Task, settings: Settings, ratings: np.ndarray, items: np.ndarray
) -> dict[str, np.ndarray]:
    """Who asks, at the moment of some ratings, and which films are offered."""
    user, history, item = task.log.users[ratings], task.histories[ratings], items
    # The numbers that the log itself has, with gaps; nobody keeps a dictionary.
    if settings.tables == "hashed":
        user, item = task.log.user_ids[user], task.log.item_ids[item]
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
    """The batches of all steps, prepared by threads ahead of time; `get_state` says how far they were read."""
    import grain

    generator, num_epochs = np.random.Generator(np.random.PCG64(settings.seed)), 1
    num_epochs += settings.steps * settings.batch_size // len(task.train)
    order = np.concatenate([generator.permutation(task.train) for _ in range(num_epochs)])

    def batch_at(step: int) -> tuple[dict[str, Any], np.ndarray]:
        ratings = order[step * settings.batch_size : (step + 1) * settings.batch_size]
        items = task.log.items[ratings]
        return collection.prepare(ids_of(task, settings, ratings, items)), items

    batches = grain.MapDataset.range(settings.steps).map(batch_at)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


# Model


def init_towers(settings: Settings) -> dict[str, list[jax.Array]]:
    generator, dim = np.random.Generator(np.random.PCG64(settings.seed)), settings.embedding_dim

    def layer(inputs: int, outputs: int) -> list[jax.Array]:
        weights = generator.normal(0.0, inputs**-0.5, (inputs, outputs))
        return [jnp.asarray(weights, jnp.float32), jnp.zeros(outputs, jnp.float32)]

    return {
        "user": layer(3 * dim, 2 * dim) + layer(2 * dim, dim),
        "item": layer(2 * dim, 2 * dim) + layer(2 * dim, dim + 1),
    }


def tower(layers: list[jax.Array], *vectors: jax.Array) -> jax.Array:
    first, first_bias, second, second_bias = layers
    return (
        jax.nn.relu(jnp.concatenate(vectors, axis=1) @ first + first_bias[None]) @ second
        + second_bias[None]
    )


def user_vectors(towers: Any, vectors: dict[str, jax.Array]) -> jax.Array:
    """`[batch, dim + 1]`; the last column meets the popularity of a film."""
    user, history = vectors["user"], vectors["history"]
    taste = user + history + tower(towers["user"], user, history, vectors["month"])
    return jnp.pad(taste, ((0, 0), (0, 1)), constant_values=1.0)


def item_vectors(towers: Any, vectors: dict[str, jax.Array]) -> jax.Array:
    """`[batch, dim + 1]`; the last column is what all users like alike."""
    item, genres = vectors["item"], vectors["genres"]
    return jnp.pad(item + genres, ((0, 0), (0, 1))) + tower(towers["item"], item, genres)


def loss_fn(
    towers: Any, vectors: dict[str, jax.Array], items: jax.Array, log_frequency: jax.Array
) -> jax.Array:
    """Which film of the batch is a user's? Films are there as often as they are popular: that is subtracted."""
    logits = (
        user_vectors(towers, vectors) @ item_vectors(towers, vectors).T - log_frequency[items][None]
    )
    is_same, is_own = items[:, None] == items[None], jnp.eye(len(items), dtype=bool)
    logits = jnp.where(is_same & ~is_own, -1e9, logits)  # the same film, of another user
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(items))).mean()


# Training


class Model(NamedTuple):
    """All that training changes, of one instant."""

    state: rs.EmbeddingState
    towers: Any
    adam: Any


def tower_rule(settings: Settings) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(settings.max_norm), optax.adam(settings.tower_rate)
    )


def init_model(settings: Settings, collection: rs.EmbeddingCollection) -> Model:
    towers = init_towers(settings)
    others = placed(collection, (towers, tower_rule(settings).init(towers)))
    return Model(collection.init(jax.random.key(settings.seed)), *others)


def placed(collection: rs.EmbeddingCollection, arrays: Any) -> Any:
    """A copy on every device of the mesh, or, as fresh arrays are, tied to no device."""
    mesh = collection.devices.mesh
    return (
        jax.tree.map(jnp.asarray, arrays)
        if mesh is None
        else jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    settings: Settings,
    collection: rs.EmbeddingCollection,
    model: Model,
    batch: Any,
    items: Any,
    log_frequency: Any,
) -> tuple[Model, jax.Array]:
    value_and_grad = rs.value_and_grad(loss_fn, collection)
    loss, (d_towers, row_gradients) = value_and_grad(
        model.towers, model.state, batch, items, log_frequency
    )
    updates, adam = tower_rule(settings).update(d_towers, model.adam)
    state = collection.apply(model.state, rs.clip_by_global_norm(row_gradients, settings.max_norm))
    return Model(state, optax.apply_updates(model.towers, updates), adam), loss


def train(
    task: Task,
    settings: Settings,
    collection: rs.EmbeddingCollection,
    model: Model,
    batches: Any,
    num_steps: int,
) -> tuple[Model, np.ndarray]:
    losses = []
    for _ in progress(
        range(num_steps), description=f"{settings.tables}, {settings.devices} device(s)"
    ):
        batch, items = next(batches)
        # Nothing, unless rows are on the host.
        model = model._replace(state=collection.prefetch(model.state, batch))
        model, loss = train_step(settings, collection, model, batch, items, task.log_frequency)
        losses.append(loss)
    return model, np.array(losses)


def save(path: Path, collection: rs.EmbeddingCollection, model: Model, batches: Any) -> None:
    others = {"towers": model.towers, "adam": model.adam}
    checkpoint.save_collection(
        path, collection, model.state, others=others, metadata={"input": batches.get_state()}
    )


def restore(path: Path, collection: rs.EmbeddingCollection, fresh: Model, batches: Any) -> Model:
    """The model of a checkpoint; the batches go on where it was made."""
    others = {"towers": fresh.towers, "adam": fresh.adam}
    state, others = checkpoint.load_collection(path, collection, others=others)
    batches.set_state(checkpoint.manifest(path)["metadata"]["user"]["input"])
    return Model(state, others["towers"], others["adam"])


# Judgement


@partial(jax.jit, static_argnums=0)
def score(collection: rs.EmbeddingCollection, model: Model, batch: Any) -> jax.Array:
    vectors = collection.lookup(model.state, batch)
    return user_vectors(model.towers, vectors) @ item_vectors(model.towers, vectors).T


def score_all(
    task: Task, settings: Settings, collection: rs.EmbeddingCollection, model: Model
) -> tuple[Model, np.ndarray]:
    """Scores `[users, films]` at the moment of each user's last rating; the model comes back as it was."""
    films = np.arange(len(task.log.titles))
    # Equal shares for the devices.
    asked = np.resize(films, -(-len(films) // settings.devices) * settings.devices)
    found = []
    for start in range(0, len(task.test), settings.batch_size):
        ratings = np.resize(task.test[start : start + settings.batch_size], settings.batch_size)
        batch = collection.prepare(ids_of(task, settings, ratings, asked))
        model = model._replace(state=collection.prefetch(model.state, batch))
        found.append(score(collection, model, batch))
    return model, np.concatenate(found)[: len(task.test), : len(films)]


class Quality(NamedTuple):
    """How high a user's hidden film was ranked among the films that the user had not seen."""

    recall_at_10: float  # share of users with the hidden film among the first ten
    ndcg_at_10: float  # the same, but rank r counts 1 / log2(r + 1)
    auc: float  # share of the other films that are ranked below the hidden one


def seen_films(task: Task) -> np.ndarray:
    """Mask `[all users, films]` of the training ratings."""
    is_seen = np.zeros((len(task.log.user_ids), len(task.log.titles)), bool)
    is_seen[task.log.users[task.train], task.log.items[task.train]] = True
    return is_seen


def judge(task: Task, scores: np.ndarray) -> Quality:
    """Quality of scores `[users, films]`, one row for each rating of `task.test`. A draw counts half."""
    is_candidate = ~seen_films(task)[task.log.users[task.test]]
    score_of_hidden = np.take_along_axis(scores, task.log.items[task.test][:, None], axis=1)
    num_above = np.sum((scores > score_of_hidden) & is_candidate, axis=1)
    num_equal = np.sum((scores == score_of_hidden) & is_candidate, axis=1) - 1
    above = num_above + 0.5 * num_equal
    is_named = above < 10
    num_others = np.sum(is_candidate, axis=1) - 1
    return Quality(
        recall_at_10=float(np.mean(is_named)),
        ndcg_at_10=float(np.mean(np.where(is_named, 1 / np.log2(above + 2), 0))),
        auc=float(np.mean(1 - above / num_others)),
    )


# Other recommenders, to compare with


def popularity(task: Task) -> np.ndarray:
    """Scores `[users, films]` of naming the films that most people saw."""
    return np.tile(task.log_frequency, (len(task.test), 1))


def item_neighbours(
    task: Task,
    num_neighbours: int = 50,
    side: str = "seen",
    num_latest: int | None = None,
) -> np.ndarray:
    """Scores `[users, films]` of item-kNN: a film's cosine similarity to the films that the user saw, summed.

    The sum takes pairs of neighbours only: the offered film is among the `num_neighbours` films that are most similar
    to the seen film, or with `side="offered"`, the seen film is among those most similar to the offered film. With
    `num_latest`, only the latest films of each user are in the sum.
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
    """Scores `[users, films]` of a matrix factorisation of who saw what, by alternating least squares.

    A film that was seen is a 1 with weight 1 + `weight`, each other film a 0 with weight 1.

    Source: Hu, Koren and Volinsky, "Collaborative Filtering for Implicit Feedback Datasets", ICDM 2008, equation 4.
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
    """The best vector of each row of `is_seen`, where `others` are the vectors of its columns."""
    dim = others.shape[1]
    common = others.T @ others + decay * np.eye(dim)
    vectors = np.zeros((len(is_seen), dim))
    for row in range(len(is_seen)):
        seen = others[is_seen[row]]
        vectors[row] = np.linalg.solve(
            common + weight * seen.T @ seen, (1 + weight) * seen.sum(axis=0)
        )
    return vectors


def line_of(name: str, quality: Quality) -> str:
    """A line of a table of results."""
    return f"{name:14}recall@10 {quality.recall_at_10:.3f}   NDCG@10 {quality.ndcg_at_10:.3f}   AUC {quality.auc:.3f}"


def device_bytes(state: rs.EmbeddingState) -> int:
    """Of the tables and their optimizer state, on one device."""
    return sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((state.tables, state.slots))
    )


def fit(task: Task, settings: Settings) -> tuple[rs.EmbeddingCollection, Model, np.ndarray]:
    """A trained model and the losses on the way; with a folder, it goes on from the latest checkpoint there."""
    collection = make_collection(task, settings)
    batches, model = make_batches(task, settings, collection), init_model(settings, collection)
    if settings.folder and (
        paths := checkpoint.CheckpointManager(settings.folder, read_only=True).paths()
    ):
        model = restore(paths[-1], collection, model, batches)
    model, losses = train(
        task, settings, collection, model, batches, settings.steps - int(model.state.step)
    )
    if settings.folder and len(losses):
        save(Path(settings.folder) / f"step_{settings.steps:09}", collection, model, batches)
    return collection, model, losses


def main(settings: Settings) -> None:
    task = load_task(settings)
    print(task.log.source)
    collection, model, losses = fit(task, settings)
    model, scores = score_all(task, settings, collection, model)
    print(collection)
    print(
        f"{len(losses)} steps, the last loss {losses[-1]:.4f}"
        if len(losses)
        else "no steps were left to do"
    )
    scores_of = {
        "most popular": popularity(task),
        "item-kNN": item_neighbours(task),
        "factorisation": matrix_factorisation(task),
        settings.tables: scores,
    }
    for name, scores in scores_of.items():
        print(line_of(name, judge(task, scores)))
    print(
        f"{device_bytes(model.state) / 1e3:,.0f} kB of tables and their optimizer state on a device"
    )


def parsed(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        how = {
            "type": type(field.default),
            "default": field.default,
            "help": f"default: {field.default!r}",
        }
        choices = TABLES if field.name == "tables" else None
        parser.add_argument(f"--{field.name.replace('_', '-')}", choices=choices, **how)
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    chosen = parsed()
    # A processor pretends to be several devices.
    jax.config.update("jax_num_cpu_devices", chosen.devices)
    main(chosen)
