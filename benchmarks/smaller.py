"""Measures what a model loses when its tables are trained with 4 to 100 times fewer bytes: log-loss and AUC.

    python benchmarks/smaller.py [--seeds 3] [--logs films,clicks] [--json PATH] [--picture PATH]

A factorization machine learns logs whose large tables are made small. In MovieLens it tells the films that a user
rated from others as popular (a generated log of the same size where no published one is at hand). Clicks are generated,
with ids by Zipf's law: ten samples for a row of the largest table, or, in "few clicks", one. A table is an array, an
array of fewer rows that ids share by remainder, or a tensor train of two or three cores. "int8" is an array that was
trained in float32 and is served as 8-bit numbers with a scale for each row. All train by Adam. Samples
that are kept for that choose the learning rate, by the first seed and a tenth of the bytes, and the number of passes.
Loss and AUC are those of other samples, which nothing has seen.
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

DIM, BATCH, PASSES, RATES, RATIOS = 16, 2048, 2, (0.001, 0.002, 0.006, 0.015), (4, 10, 40, 100)
METHODS = ("hashed", "train, 2 cores", "train, 3 cores", "int8")
LEAST_LARGE_ROWS = 1_000
Samples = dict[str, np.ndarray]
Record = dict[str, Any]


class Log(NamedTuple):
    """Samples to train on, to choose by and to report; the vocabularies of the tables; those to make small."""

    parts: tuple[Samples, Samples, Samples]
    vocabularies: dict[str, int]
    large: tuple[str, ...]


def clicks(seed: int, num_samples: int = 1_000_000) -> Log:
    """Four ids and four numbers a sample, from a law without any likeness of ids."""
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
    """Pairs of user and film, half of them ratings, the others with the film of any rating."""
    try:
        log = datasets.movielens(path, max_users=num_users)
    except FileNotFoundError:
        if path:
            raise
        log = datasets.generated_ratings(num_users, 3_883, ratings_per_user=165.6, seed=seed)
    generator = np.random.default_rng(seed)
    count = len(log.users)
    pairs = {
        "user": np.tile(log.users, 2),
        "film": np.concatenate([log.items, generator.permutation(log.items)]),
    }
    every = {**pairs, "numbers": np.zeros((2 * count, 0)), "labels": np.repeat([1, 0], count)}
    cuts = np.split(generator.permutation(2 * count), [int(1.6 * count), int(1.8 * count)])
    train, held, test = ({name: column[cut] for name, column in every.items()} for cut in cuts)
    sizes = {"user": len(log.user_ids), "film": len(log.item_ids)}
    # A hundredth of a table of fewer rows holds no train of any rank.
    large = tuple(name for name, rows in sizes.items() if rows >= LEAST_LARGE_ROWS)
    return Log((train, held, test), sizes, large or ("user", "film"))


def table_of(method: str, vocabulary: int, ratio: int) -> tuple[dict[str, Any], int]:
    """Rows and storage of a table of `ratio` times fewer bytes, and these bytes."""
    num_bytes = 4 * DIM * (vocabulary // ratio)
    if method == "int8":
        num_bytes = (DIM + 4) * vocabulary  # a scale of four bytes for each row
    if not method.startswith("train"):
        return {
            "vocabulary_size": vocabulary // ratio,
            "initializer": jax.nn.initializers.normal(0.01),
        }, num_bytes
    num_cores = int(method.split()[1])
    # A hundredth of a small table may be less than a train of rank 1 takes.
    smallest = tt.TTSpec.suggest(vocabulary, DIM, [1] * (num_cores - 1)).num_bytes()
    budget = max(num_bytes, smallest)
    spec = tt.TTSpec.for_budget(vocabulary, DIM, bytes=budget, num_cores=num_cores)
    storage = tt.TensorTrain(spec.tt_ranks, spec.tt_p_shapes, spec.tt_q_shapes)
    return {"vocabulary_size": vocabulary, "storage": storage}, spec.num_bytes()


def log_odds(params: Any, vectors: dict[str, jax.Array], numbers: jax.Array) -> jax.Array:
    """A factorization machine; the first number of a vector is the bias of its id."""
    rows = jnp.stack([*vectors.values()], axis=1)
    pairs = rs.pairwise_interaction(rows[:, :, 1:]).sum(axis=1)
    return params["bias"] + numbers @ params["weights"] + rows[:, :, 0].sum(axis=1) + pairs


def loss_fn(
    params: Any, vectors: dict[str, jax.Array], numbers: jax.Array, labels: jax.Array
) -> jax.Array:
    """Mean log-loss."""
    return optax.sigmoid_binary_cross_entropy(log_odds(params, vectors, numbers), labels).mean()


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of all pairs of a positive and a negative sample in which the positive one has the higher score."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = labels > 0
    return float((ranks[positive].mean() - (positive.sum() + 1) / 2) / (~positive).sum())


def fit(
    log: Log, method: str, ratio: int, seed: int, rate: float, most_passes: int = PASSES
) -> dict[str, float]:
    """Loss and AUC after the pass that is best on the samples to choose by, whose loss is `held`.

    Training stops after two passes without a better one, and after `most_passes`.
    """
    tables = {
        name: table_of(*((method, size, ratio) if name in log.large else ("dense", size, 1)))
        for name, size in log.vocabularies.items()
    }
    num_bytes = sum(tables[name][1] for name in log.large)
    rule, tx = rs.optimizers.Adam(rate), optax.adam(rate)
    collection = rs.EmbeddingCollection(
        [
            rs.FeatureSpec(name, rs.TableSpec(name, embedding_dim=DIM, optimizer=rule, **table))
            for name, (table, _) in tables.items()
        ]
    )

    def batches(
        samples: Samples, order: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        order = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        ids = {
            name: samples[name][order] % table["vocabulary_size"]
            for name, (table, _) in tables.items()
        }
        return (
            ids,
            samples["numbers"][order].astype(np.float32),
            samples["labels"][order].astype(np.float32),
        )

    def step(carry: Any, batch: Any) -> Any:
        params, slots, state = carry
        _, (gradients, row_gradients) = rs.value_and_grad(loss_fn, collection)(
            params, state, *batch
        )
        changes, slots = tx.update(gradients, slots)
        return (
            optax.apply_updates(params, changes),
            slots,
            collection.apply(state, row_gradients),
        ), None

    @functools.partial(jax.jit, static_argnums=0)
    def scores(lookup: Callable[..., Any], params: Any, tables: Any, batches: Any) -> jax.Array:
        return jax.lax.map(lambda own: log_odds(params, lookup(tables, own[0]), own[1]), batches)

    train = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches)[0], donate_argnums=0)
    generator, (samples, held, test) = np.random.default_rng(seed), log.parts
    params = {"bias": jnp.zeros(()), "weights": jnp.zeros(samples["numbers"].shape[1])}
    carry, found = (params, tx.init(params), collection.init(jax.random.key(seed))), []
    for _ in range(most_passes):
        best = min(range(len(found)), key=lambda number: found[number]["held"], default=0)
        if len(found) > best + 2:
            break
        carry = train(carry, batches(samples, generator.permutation(len(samples["labels"]))))
        metrics = {}
        lookup, served = collection.lookup, carry[2]
        if method == "int8":
            lookup, served = rs.for_serving(collection, carry[2], dtype="int8")
        for part in (held, test):
            seen = batches(part, np.arange(len(part["labels"])))
            odds, labels = (
                np.asarray(scores(lookup, carry[0], served, seen), np.float64).ravel(),
                seen[2].ravel(),
            )
            loss = float(np.mean(np.logaddexp(0, odds) - labels * odds))
            metrics |= (
                {"held": loss}
                if part is held
                else {"loss": loss, "AUC": area_under_curve(odds, labels)}
            )
        found.append(metrics)
    return {**min(found, key=lambda own: own["held"]), "rate": rate, "bytes": num_bytes}


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
    """A record of every log, seed, method and ratio."""
    rates: dict[tuple[str, str], float] = {}
    for seed, name in itertools.product(range(num_seeds), names):
        log = logs[name](seed)
        for method in ("dense", *METHODS):
            if (name, method) not in rates:
                trials = [
                    fit(
                        log,
                        method,
                        1 if method in ("dense", "int8") else 10,
                        seed,
                        rate,
                        most_passes,
                    )
                    for rate in RATES
                ]
                rates[name, method] = min(trials, key=lambda own: own["held"])["rate"]
            for ratio in (1,) if method in ("dense", "int8") else RATIOS:
                found = fit(log, method, ratio, seed, rates[name, method], most_passes)
                yield {"log": name, "method": method, "ratio": ratio, "seed": seed, **found}


def draw(records: Sequence[Record], machine: str, path: Path) -> None:
    """What fewer bytes cost, a row of pictures for each log: loss and AUC less those of arrays with the same seed."""
    names = list(dict.fromkeys(record["log"] for record in records))
    figure, grid = plt.subplots(
        len(names), 2, figsize=(10.5, 3.4 * len(names)), layout="constrained", squeeze=False
    )
    for name, row in zip(names, grid, strict=True):
        chosen = [record for record in records if record["log"] == name]
        arrays = {own["seed"]: own for own in chosen if own["method"] == "dense"}
        for what, scale, unit, ax in zip(
            ("loss", "AUC"), (1, -100), ("nats", "points"), row, strict=True
        ):
            costs: dict[str, list[tuple[float, float]]] = {}
            for own in chosen:
                if own["method"] != "dense":
                    cost = scale * (own[what] - arrays[own["seed"]][what])
                    costs.setdefault(own["method"].removeprefix("train, "), []).append(
                        (own["bytes"], cost)
                    )
            plot.plot_against_bytes(
                costs, ylabel=f"{what} {'above' if scale > 0 else 'below'} arrays ({unit})", ax=ax
            )
            ax.axhline(0, color=plot.MUTED, linewidth=0.8)
            arrays_have = f"{np.mean([own[what] for own in arrays.values()]):.3f}"
            ax.set_title(
                f"{name}: arrays of {arrays[0]['bytes'] / 1e6:.1f} MB have {what} {arrays_have}",
                fontsize=10,
            )
    figure.supxlabel(
        f"means of the seeds, lines from the least to the largest; {machine}", fontsize=8
    )
    figure.savefig(path, dpi=80)


def main() -> int:
    """Prints the table, and writes records and picture if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="also draw loss and AUC into this file")
    parser.add_argument("--logs", default=",".join(LOGS), help="separated by commas")
    options, machine, records = parser.parse_args(), measured_on(), []
    print(
        f"{machine}\n{'log':11}{'method':16}{'ratio':>6}{'seed':>6}{'bytes':>12}{'rate':>8}{'loss':>9}{'AUC':>9}"
    )
    for own in study(options.logs.split(","), options.seeds):
        records.append(own)
        print(
            f"{own['log']:11}{own['method']:16}{own['ratio']:6}{own['seed']:6}{own['bytes']:12,}{own['rate']:8}"
            f"{own['loss']:9.4f}{own['AUC']:9.4f}",
            flush=True,
        )
        timing.write_records(options, {"machine": machine, "records": records})
    if options.picture:
        draw(records, machine, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
