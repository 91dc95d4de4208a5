"""Measures log-loss and AUC of a model with tables of 4 to 100 times fewer bytes.

    python benchmarks/smaller.py [--seeds 3] [--logs films,clicks] [--json PATH] [--picture PATH]

A factorization machine learns from one of three logs, and its large tables are made smaller:

* films: half of the samples are ratings of MovieLens, the other half has the film of another rating.
  If there is no MovieLens folder, a log of the same size is generated.
* clicks: generated clicks, with ids by a Zipf law. The largest table has ten samples per row.
* few clicks: the same with one sample per row.

A table is an array ("dense"), an array of fewer rows that ids share by remainder ("hashed"), or a
tensor train of two or three cores. "int8" is an array that is trained in float32 and served as 8-bit
numbers with a scale for each row. Adam trains all of them. The validation samples choose the number of
passes and, with the first seed and a tenth of the bytes, the learning rate. Loss and AUC are those of
the test samples, which choose nothing.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import timing

import rsembed as rs
from rsembed import datasets, plot, tt
from rsembed.plot.drawing import measured_on

DIM = 16
BATCH = 2048
PASSES = 2
RATES = (0.001, 0.002, 0.006, 0.015)
RATIOS = (4, 10, 40, 100)
METHODS = ("hashed", "train, 2 cores", "train, 3 cores", "int8")
LEAST_LARGE_ROWS = 1_000
Samples = dict[str, np.ndarray]
Record = dict[str, Any]


class Log(NamedTuple):
    """Samples and tables of a log.

    Attributes:
      parts: samples for training, for validation and for the test.
      vocabularies: number of rows of each table.
      large: names of the tables to make smaller.
    """

    parts: tuple[Samples, Samples, Samples]
    vocabularies: dict[str, int]
    large: tuple[str, ...]


def clicks(seed: int, num_samples: int = 1_000_000) -> Log:
    """Generated clicks, with four ids and four numbers per sample. No two ids are similar."""
    sizes = {"sparse_0": 100_000, "sparse_1": 20_000, "sparse_2": 1_000, "sparse_3": 100}

    def draw(count: int, sample_seed: int) -> Samples:
        log = datasets.synthetic_clicks(
            count,
            vocabulary_sizes=[*sizes.values()],
            num_dense=4,
            seed=seed,
            sample_seed=sample_seed,
        )
        return {**log.sparse, "numbers": log.dense, "labels": log.labels}

    parts = draw(num_samples, 0), draw(num_samples // 10, 1), draw(num_samples // 10, 2)
    return Log(parts, sizes, ("sparse_0", "sparse_1"))


def films(seed: int, num_users: int = 6_040, path: str | None = None) -> Log:
    """Pairs of users and films. Half of them are ratings, the others have the film of any rating."""
    try:
        log = datasets.movielens(path, max_users=num_users)
    except FileNotFoundError:
        if path:
            raise
        log = datasets.generated_ratings(num_users, 3_883, ratings_per_user=165.6, seed=seed)
    generator = np.random.default_rng(seed)
    count = len(log.users)
    samples = {
        "user": np.tile(log.users, 2),
        "film": np.concatenate([log.items, generator.permutation(log.items)]),
        "numbers": np.zeros((2 * count, 0)),
        "labels": np.repeat([1, 0], count),
    }
    order = generator.permutation(2 * count)
    parts = []
    for indices in np.split(order, [int(1.6 * count), int(1.8 * count)]):
        parts.append({name: column[indices] for name, column in samples.items()})
    train, validation, test = parts
    sizes = {"user": len(log.user_ids), "film": len(log.item_ids)}
    # No tensor train is small enough for a hundredth of the bytes of a smaller table.
    large = tuple(name for name, rows in sizes.items() if rows >= LEAST_LARGE_ROWS)
    return Log((train, validation, test), sizes, large or ("user", "film"))


def table_of(method: str, vocabulary: int, ratio: int) -> tuple[dict[str, Any], int]:
    """Options of the spec of a table with `ratio` times fewer bytes, and its number of bytes."""
    num_bytes = 4 * DIM * (vocabulary // ratio)
    if method == "int8":
        # Each row has a scale of four bytes.
        num_bytes = (DIM + 4) * vocabulary
    if not method.startswith("train"):
        options = {
            "vocabulary_size": vocabulary // ratio,
            "initializer": jax.nn.initializers.normal(0.01),
        }
        return options, num_bytes
    num_cores = int(method.split()[1])
    # A tensor train of rank 1 may need more than a hundredth of the bytes of a small table.
    smallest = tt.TTSpec.suggest(vocabulary, DIM, [1] * (num_cores - 1)).num_bytes()
    budget = max(num_bytes, smallest)
    spec = tt.TTSpec.for_budget(vocabulary, DIM, bytes=budget, num_cores=num_cores)
    storage = tt.TensorTrain(spec.tt_ranks, spec.tt_p_shapes, spec.tt_q_shapes)
    return {"vocabulary_size": vocabulary, "storage": storage}, spec.num_bytes()


def log_odds(params: Any, vectors: dict[str, jax.Array], numbers: jax.Array) -> jax.Array:
    """Log-odds of a factorization machine. The first number of a vector is the bias of its id."""
    rows = jnp.stack([*vectors.values()], axis=1)
    pairs = rs.pairwise_interaction(rows[:, :, 1:]).sum(axis=1)
    return params["bias"] + numbers @ params["weights"] + rows[:, :, 0].sum(axis=1) + pairs


def loss_fn(
    params: Any, vectors: dict[str, jax.Array], numbers: jax.Array, labels: jax.Array
) -> jax.Array:
    """Mean log-loss."""
    return optax.sigmoid_binary_cross_entropy(log_odds(params, vectors, numbers), labels).mean()


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of the pairs of a positive and a negative sample with a higher score of the positive one."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = labels > 0
    return float((ranks[positive].mean() - (positive.sum() + 1) / 2) / (~positive).sum())


class Batches(NamedTuple):
    """Batches of samples: arrays `[batches, batch, ...]`."""

    ids: dict[str, np.ndarray]
    numbers: np.ndarray
    labels: np.ndarray


def fit(
    log: Log, method: str, ratio: int, seed: int, rate: float, most_passes: int = PASSES
) -> dict[str, float]:
    """Quality of a model after the pass with the least loss on the validation samples.

    Training stops after two passes without a better one, and after `most_passes`.

    Returns:
      "loss" and "AUC" of the test samples, "held", the loss of the validation samples, the learning
      rate, and the bytes of the large tables.
    """
    num_bytes = 0
    num_rows = {}
    features = []
    for name, size in log.vocabularies.items():
        options, _ = table_of("dense", size, 1)
        if name in log.large:
            options, bytes_of_table = table_of(method, size, ratio)
            num_bytes += bytes_of_table
        table = rs.TableSpec(name, embedding_dim=DIM, optimizer=rs.optimizers.Adam(rate), **options)
        num_rows[name] = table.vocabulary_size
        features.append(rs.FeatureSpec(name, table))
    collection = rs.EmbeddingCollection(features)
    optimizer = optax.adam(rate)

    def batches_of(samples: Samples, order: np.ndarray) -> Batches:
        order = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        ids = {}
        for name, rows in num_rows.items():
            ids[name] = samples[name][order] % rows
        numbers = samples["numbers"][order].astype(np.float32)
        return Batches(ids, numbers, samples["labels"][order].astype(np.float32))

    def step(carry: Any, batch: Batches) -> Any:
        params, optimizer_state, state = carry
        value_and_grad = rs.value_and_grad(loss_fn, collection)
        _, (gradients, row_gradients) = value_and_grad(params, state, *batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        params = optax.apply_updates(params, updates)
        return (params, optimizer_state, collection.apply(state, row_gradients)), None

    @functools.partial(jax.jit, donate_argnums=0)
    def train(carry: Any, batches: Batches) -> Any:
        carry, _ = jax.lax.scan(step, carry, batches)
        return carry

    @functools.partial(jax.jit, static_argnums=0)
    def scores(lookup: Callable[..., Any], params: Any, tables: Any, batches: Batches) -> jax.Array:
        def scores_of_batch(batch: Batches) -> jax.Array:
            return log_odds(params, lookup(tables, batch.ids), batch.numbers)

        return jax.lax.map(scores_of_batch, batches)

    def quality(lookup: Callable[..., Any], params: Any, tables: Any, samples: Samples) -> Any:
        """Loss and AUC of all samples that fill whole batches."""
        batches = batches_of(samples, np.arange(len(samples["labels"])))
        odds = np.asarray(scores(lookup, params, tables, batches), np.float64).ravel()
        labels = batches.labels.ravel()
        loss = float(np.mean(np.logaddexp(0, odds) - labels * odds))
        return loss, area_under_curve(odds, labels)

    generator = np.random.default_rng(seed)
    samples, validation, test = log.parts
    params = {"bias": jnp.zeros(()), "weights": jnp.zeros(samples["numbers"].shape[1])}
    carry = (params, optimizer.init(params), collection.init(jax.random.key(seed)))
    passes: list[dict[str, float]] = []
    for _ in range(most_passes):
        best = int(np.argmin([record["held"] for record in passes] or [0]))
        if len(passes) > best + 2:
            break
        order = generator.permutation(len(samples["labels"]))
        carry = train(carry, batches_of(samples, order))
        params, _, state = carry
        lookup = collection.lookup
        tables: Any = state
        if method == "int8":
            lookup, tables = rs.for_serving(collection, state, dtype="int8")
        validation_loss, _ = quality(lookup, params, tables, validation)
        loss, auc = quality(lookup, params, tables, test)
        passes.append({"held": validation_loss, "loss": loss, "AUC": auc})
    best = int(np.argmin([record["held"] for record in passes]))
    return passes[best] | {"rate": rate, "bytes": num_bytes}


LOGS = {
    "films": films,
    "clicks": clicks,
    "few clicks": functools.partial(clicks, num_samples=100_000),
}


def study(
    names: Sequence[str],
    num_seeds: int,
    logs: Mapping[str, Callable[[int], Log]] = LOGS,
    most_passes: int = PASSES,
) -> Iterator[Record]:
    """A record for each log, seed, method and ratio."""
    rates: dict[tuple[str, str], float] = {}
    for seed, name in itertools.product(range(num_seeds), names):
        log = logs[name](seed)
        for method in ("dense", *METHODS):
            ratios: tuple[int, ...] = RATIOS
            ratio_of_trials = 10
            if method in ("dense", "int8"):
                ratios = (1,)
                ratio_of_trials = 1
            if (name, method) not in rates:
                losses = []
                for rate in RATES:
                    trial = fit(log, method, ratio_of_trials, seed, rate, most_passes)
                    losses.append(trial["held"])
                rates[name, method] = RATES[int(np.argmin(losses))]
            for ratio in ratios:
                record = {"log": name, "method": method, "ratio": ratio, "seed": seed}
                yield record | fit(log, method, ratio, seed, rates[name, method], most_passes)


def draw(records: Sequence[Record], machine: str, path: Path) -> None:
    """Draws loss and AUC against bytes, a row for each log, relative to arrays with the same seed."""
    names = list(dict.fromkeys(record["log"] for record in records))
    figure, grid = plt.subplots(
        len(names), 2, figsize=(10.5, 3.4 * len(names)), layout="constrained", squeeze=False
    )
    for name, (loss_axes, auc_axes) in zip(names, grid, strict=True):
        of_log = [record for record in records if record["log"] == name]
        draw_costs(of_log, "loss", 1, f"{name}: ", "loss above arrays (nats)", loss_axes)
        draw_costs(of_log, "AUC", -100, f"{name}: ", "AUC below arrays (points)", auc_axes)
    figure.supxlabel(
        f"means of the seeds, lines from the least to the largest; {machine}", fontsize=8
    )
    figure.savefig(path, dpi=80)


def draw_costs(
    records: Sequence[Record], what: str, scale: float, title: str, ylabel: str, ax: Any
) -> None:
    """Draws the difference from arrays, times `scale`, of each small table."""
    arrays = {record["seed"]: record for record in records if record["method"] == "dense"}
    costs: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["method"] == "dense":
            continue
        cost = scale * (record[what] - arrays[record["seed"]][what])
        method = record["method"].removeprefix("train, ")
        costs.setdefault(method, []).append((record["bytes"], cost))
    plot.plot_against_bytes(costs, ylabel=ylabel, ax=ax)
    ax.axhline(0, color=plot.MUTED, linewidth=0.8)
    megabytes = arrays[0]["bytes"] / 1e6
    mean = np.mean([record[what] for record in arrays.values()])
    ax.set_title(f"{title}arrays of {megabytes:.1f} MB have {what} {mean:.3f}", fontsize=10)


def main() -> int:
    """Prints the table, and writes records and picture to the files of the options."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="also draw loss and AUC into this file")
    parser.add_argument("--logs", default=",".join(LOGS), help="separated by commas")
    options = parser.parse_args()
    machine = measured_on()
    print(machine)
    heads = f"{'ratio':>6}{'seed':>6}{'bytes':>12}{'rate':>8}{'loss':>9}{'AUC':>9}"
    print(f"{'log':11}{'method':16}{heads}")
    records = []
    for record in study(options.logs.split(","), options.seeds):
        records.append(record)
        setting = f"{record['log']:11}{record['method']:16}{record['ratio']:6}{record['seed']:6}"
        quality = f"{record['loss']:9.4f}{record['AUC']:9.4f}"
        print(f"{setting}{record['bytes']:12,}{record['rate']:8}{quality}", flush=True)
        timing.write_records(options, {"machine": machine, "records": records})
    if options.picture:
        draw(records, machine, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
