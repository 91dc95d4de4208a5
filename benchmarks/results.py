"""Measures the quality of models and of their peers on real data, and writes docs/results.md.

    python benchmarks/results.py --ratings ml-latest-small --text shakespeare [--seeds 3]

`--ratings` are folders or archives of MovieLens, several if you like. `--text` is a folder with the
published Shakespeare file. `--clicks` may be a click log in Criteo's format. Nothing is downloaded.
The records of each job go into `--json`. A job with records in this file is not repeated, so the
command can be stopped and called again. The page is made from the records alone. Settings are
chosen on the last rows of the training split, never on rows that are reported.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import smaller
from flax import nnx

import rsembed as rs

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
TEXT_STEPS = 3_000
EPOCHS = 20
NEIGHBOURS = (20, 50, 200)
# Whose neighbours count, and how many of a user's latest films: the models read 20.
NEIGHBOUR_OPTIONS = (("seen", "offered"), (None, 20))
FACTORS = ((1.0, 10.0), (1.0, 50.0), (10.0, 50.0))  # weight of a film that was seen, decay
TABLE_RATES = (0.02, 0.05, 0.1)
COUNTED_LETTERS = (2, 3, 4, 5, 6)
Record = dict[str, Any]


def script(name: str) -> Any:
    """A script of the folder of notebooks, as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# Films


class SelfAttention(nnx.Module):
    """Scores of films, from one block of attention over the films that a user rated last."""

    def __init__(self, num_films: int, steps_per_epoch: int, rngs: nnx.Rngs):
        training = script("training")
        dim = training.DIM
        rule = rs.optimizers.RowWiseAdagrad(training.schedule(0.1, steps_per_epoch))
        table = rs.TableSpec("film", num_films, dim, optimizer=rule, combiner="none")
        features = [rs.FeatureSpec(name, table) for name in ("history", "film")]
        self.embeddings = rs.nnx.Embeddings(rs.EmbeddingCollection(features), rngs=rngs)
        self.places = nnx.Param(0.05 * rngs.params.normal((training.HISTORY, dim)))
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2,
            in_features=dim,
            dropout_rate=0.2,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.layers = nnx.Sequential(
            nnx.LayerNorm(dim, rngs=rngs),
            nnx.Linear(dim, 2 * dim, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.2, rngs=rngs),
            nnx.Linear(2 * dim, dim, rngs=rngs),
        )

    def prepare(self, histories: np.ndarray, films: np.ndarray) -> Any:
        """Ids of a batch."""
        ids = {"history": histories, "film": films[:, None]}
        return self.embeddings.collection.prepare(ids)

    def __call__(self, ids: Any) -> Any:
        vectors = self.embeddings(ids)
        history = vectors["history"]
        is_film = jnp.any(history != 0, axis=2)  # padding reads zeros
        places = history + self.places[...][None]
        mask = is_film[:, None, None, :]  # [batch, heads, query, film]
        latest = places[:, :1]
        mixed = latest + self.attention(self.norm(latest), self.norm(places), mask=mask)
        user = (mixed + self.layers(mixed))[:, 0]
        return user @ vectors["film"][:, 0].T


def peers(task: Any, validation_task: Any) -> list[Record]:
    """Popularity, item-kNN and matrix factorisation, with the settings best for validation."""
    films = script("movielens")
    records = [record_of("popularity", films.judge(task, films.popularity(task)), "")]
    makers = {
        "item-kNN": (
            films.item_neighbours,
            list(itertools.product(NEIGHBOURS, *NEIGHBOUR_OPTIONS)),
        ),
        "ALS": (factorisation, FACTORS),
    }
    for who, (make, settings) in makers.items():
        recalls = []
        for setting in settings:
            scores = make(validation_task, *setting)
            recalls.append(films.judge(validation_task, scores).recall_at_10)
        chosen = settings[int(np.argmax(recalls))]
        records.append(record_of(who, films.judge(task, make(task, *chosen)), str(chosen)))
        print("films", records[-1], flush=True)
    return records


def factorisation(task: Any, weight: float, decay: float) -> np.ndarray:
    """Scores of the matrix factorisation."""
    return script("movielens").matrix_factorisation(task, weight=weight, decay=decay)


def record_of(who: str, quality: Any, setting: str, seed: int | None = None) -> Record:
    """A record of a recommender."""
    return {
        "who": who,
        "setting": setting,
        "seed": seed,
        "recall": quality.recall_at_10,
        "NDCG": quality.ndcg_at_10,
    }


@functools.cache
def task_of(path: str) -> tuple[Any, Any]:
    """Leave-one-out by the last film of each user, and the same by the last but one."""
    films = script("movielens")
    training = script("training")
    task = films.load_task(films.Settings(data=path, history=training.HISTORY))
    train, validation, test = training.split(task.log)
    return task._replace(test=test), task._replace(train=train, test=validation)


def measure_peers(path: str) -> list[Record]:
    """Records of the peers, and the sizes of the log."""
    task, validation_task = task_of(path)
    sizes = {"users": len(task.log.user_ids), "films": len(task.log.titles)}
    return [sizes | {"ratings": len(task.log.users)}, *peers(task, validation_task)]


def measure_model(path: str, who: str, seed: int) -> list[Record]:
    """A record of a model at the epoch that is best for validation."""
    films = script("movielens")
    training = script("training")
    task, _ = task_of(path)
    model_class = {"two towers": training.TwoTowers, "self-attention": SelfAttention}[who]
    with tempfile.TemporaryDirectory() as folder:
        model, recalls = training.fit(task.log, folder, EPOCHS, seed, model_class)
    scores = training.score_films(model, task.histories[task.test], len(task.log.titles))
    epoch = f"epoch {int(np.argmax(recalls)) + 1}"
    return [record_of(who, films.judge(task, scores), epoch, seed)]


# Letters


def counter_loss(codes: np.ndarray, num_train: int, num_before: int) -> float:
    """Nats a letter, after `num_train` letters, of counts of letters that follow the last ones.

    Counts of longer contexts are mixed with those of shorter ones. A context that was seen `n`
    times, with `t` distinct letters after it, has the weight `n / (n + t)`.

    Source: Witten and Bell, "The Zero-Frequency Problem", IEEE Transactions on Information Theory,
      1991, method C.
    """
    num_letters = int(codes.max()) + 1
    codes = codes.astype(np.int64)
    new = np.arange(num_train, len(codes))
    probability = np.full(len(new), 1.0 / num_letters)
    for length in range(num_before + 1):
        contexts = np.zeros(len(codes), np.int64)
        for back in range(1, length + 1):
            contexts[length:] = contexts[length:] * num_letters + codes[length - back : -back]
        pairs = contexts * num_letters + codes
        seen_pairs, pair_counts = np.unique(pairs[length:num_train], return_counts=True)
        seen, first, num_distinct = np.unique(
            seen_pairs // num_letters, return_index=True, return_counts=True
        )
        totals = np.add.reduceat(pair_counts, first)
        place = np.minimum(np.searchsorted(seen, contexts[new]), len(seen) - 1)
        is_seen = seen[place] == contexts[new]
        pair_place = np.minimum(np.searchsorted(seen_pairs, pairs[new]), len(seen_pairs) - 1)
        is_pair_seen = seen_pairs[pair_place] == pairs[new]
        count = np.where(is_pair_seen, pair_counts[pair_place], 0)
        mixed = (count + num_distinct[place] * probability) / (totals[place] + num_distinct[place])
        probability = np.where(is_seen, mixed, probability)
    return float(-np.mean(np.log(probability)))


def best_counter(codes: np.ndarray, num_train: int) -> Record:
    """The counter with the number of letters that is best for the last tenth of the training."""
    num_fitted = int(0.9 * num_train)
    trials = {n: counter_loss(codes[:num_train], num_fitted, n) for n in COUNTED_LETTERS}
    num_before = min(trials, key=lambda n: trials[n])
    return {"letters": num_before, "loss": counter_loss(codes, num_train, num_before)}


def notebook_names(name: str, until: str, settings: Record) -> Record:
    """The names that the cells of a notebook have set when `until` is one of them.

    Args:
      name: file name of the notebook.
      until: name whose first value ends the run.
      settings: values that replace those of the cell with the parameters.
    """
    names: Record = {"__name__": "notebook"}
    for cell in json.loads((NOTEBOOKS / name).read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), name, "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names |= settings
        plt.close("all")
        if until in names:
            return names
    raise ValueError(f"{name} has no cell that sets {until}.")


def measure_text(path: str, seed: int) -> list[Record]:
    """Loss of the model of the notebook 01_shakespeare, and those of counters beside it."""
    os.environ["RSEMBED_DATA"] = path
    settings = {"SOURCE": "corpus", "STEPS": TEXT_STEPS, "SEED": seed}
    names = notebook_names("01_shakespeare.ipynb", "validation_loss", settings)
    records = [{"who": "hashed contexts", "seed": seed, "loss": float(names["validation_loss"])}]
    for name, loss in names["references"].items():
        records.append({"who": name, "loss": float(loss)})
    counter = best_counter(names["labels"], int(names["first_unseen"]))
    records.append({"who": f"counts after up to {counter['letters']} letters"} | counter)
    return records


# Bytes


def measure_bytes(path: str, num_seeds: int) -> list[Record]:
    """Records of benchmarks/smaller.py for the ratings of a log."""
    log_of = functools.partial(smaller.films, path=path)
    records = []
    for record in smaller.study(["films"], num_seeds, {"films": log_of}, most_passes=20):
        records.append(record)
        print(record, flush=True)
    return records


# Clicks


def measure_clicks(path: str | None, rows: int, seed: int) -> list[Record]:
    """Held-out quality of the DLRM of criteo.py, and of logistic regression."""
    arguments = ["--rows", str(rows), "--epochs", "2", "--seed", str(seed)]
    arguments += ["--table-rates", *map(str, TABLE_RATES)]
    if path:
        arguments += ["--data", path]
    _, results = script("criteo").main(arguments)
    records = []
    for who, quality in results.items():
        numbers = {"loss": quality.log_loss, "AUC": quality.auc}
        sizes = {"rows": quality.num_samples, "clicks": quality.num_clicks}
        records.append({"who": who, "seed": seed} | numbers | sizes)
    return records


# The page

PUBLISHED = (
    ("nanoGPT, 10 million parameters on a GPU, published", 1.4697),
    ("nanoGPT, small model on a CPU for 3 minutes, published", 1.88),
)
HEADS = {"recall": "recall@10", "NDCG": "NDCG@10", "loss": "log-loss", "AUC": "AUC"}


INTRO = """# Results

This page compares models that rsembed trains with other models, on real and on generated data. One
command measures all models and writes this page:

```bash
python benchmarks/results.py --ratings ml-latest-small --text shakespeare
```

You provide the data:

* `--ratings` is one or several folders or archives of MovieLens, as GroupLens publishes them.
  `--ratings ml-latest-small ml-100k` adds the rows of ml-100k.
* `--text` is a folder with `tinyshakespeare.txt`.
* `--clicks` is a log in Criteo's format. `criteo-sample.tsv` has 1,999 rows of Kaggle's log, as they
  circulate with implementations of click models. Its missing categories are written as 0.

Numbers are means over several seeds. The least and the largest number are in brackets. No setting
was chosen on rows that the page reports. The numbers are in `benchmarks/results.json`.

## Where we are worse than a peer

"""

BYTES = """## Bytes: trains, int8 and hashing

A factorization machine distinguishes films that a user rated from other films, or samples with a
click from samples without one. There are three ways to make its tables small:

* hashed: the tables have fewer rows, which ids share by remainder
* train: the tables are tensor trains
* int8: the tables are trained as arrays, and served as 8-bit numbers

The script is `benchmarks/smaller.py`. Samples that are not reported chose the learning rates and
the number of passes.

Arrays overfit ml-latest-small, so tensor trains have a higher AUC there. On ml-100k, which has as
many ratings of a sixth of the films, arrays have the highest AUC.
"""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_who(records: Sequence[Record], what: str) -> dict[str, list[float]]:
    """Numbers of each contestant, one for each seed."""
    values: dict[str, list[float]] = {}
    for record in records:
        if what in record:
            values.setdefault(record["who"], []).append(record[what])
    return values


def shown(values: Sequence[float]) -> str:
    """The mean, and the range of several seeds."""
    text = f"{np.mean(values):.3f}"
    if min(values) < max(values):
        text += f" ({min(values):.3f} to {max(values):.3f})"
    return text


def better_peers(records: Sequence[Record], ours: Sequence[str], what: str) -> list[str]:
    """A sentence for each peer that is better than one of ours; a loss is better when it is less."""
    sign = -1 if what == "loss" else 1
    means = {who: float(np.mean(values)) for who, values in by_who(records, what).items()}
    sentences = []
    for model in ours:
        if model not in means:
            continue
        for who, mean in means.items():
            if who not in ours and sign * mean > sign * means[model]:
                sentences.append(
                    f"{model} has {HEADS[what]} {means[model]:.3f}, {who} has {mean:.3f}"
                )
    return sentences


def contestants(records: Sequence[Record], columns: Sequence[str]) -> str:
    """A table of all contestants, sorted by the first column, the best one first."""
    first = by_who(records, columns[0])
    sign = 1 if columns[0] == "loss" else -1
    rows = []
    for who in sorted(first, key=lambda who: sign * np.mean(first[who])):
        numbers = [by_who(records, what)[who] for what in columns]
        seeds = {record.get("seed") for record in records if record["who"] == who}
        num_seeds = "–" if None in seeds else str(len(seeds))
        rows.append([who, *(shown(values) for values in numbers), num_seeds])
    return table(["", *(HEADS[what] for what in columns), "seeds"], rows)


def films_section(name: str, part: Record) -> tuple[str, list[str]]:
    """The table of a log of ratings, and what is worse than a peer there."""
    sizes, *records = part["records"]
    worse = []
    for what in ("recall", "NDCG"):
        worse += better_peers(records, ("two towers", "self-attention"), what)
    error = np.sqrt(0.1 * 0.9 / sizes["users"])
    text = f"""## Films: {name}

The log has {sizes["ratings"]:,} ratings of {sizes["films"]:,} films by {sizes["users"]:,} users. The
last film of each user is hidden and ranked among all films that the user had not rated. With this
number of users, a recall of 0.1 has a standard error of {error:.3f}. "Two towers" is the model of
`notebooks/training.py`. "Self-attention" replaces its user tower by a block of attention over the
last 20 films.

{contestants(records, ("recall", "NDCG"))}

{part["machine"]}. The last film but one of each user chose the epoch of each model and the settings of
item-kNN (number of neighbours, the film with these neighbours, number of latest films of the user)
and ALS (weight, decay). The chosen settings are {settings_of(records)}.
We know no published number for this log with this protocol.
"""
    return text, [f"{name}: {sentence}" for sentence in worse]


def settings_of(records: Sequence[Record]) -> str:
    """The chosen settings of the peers."""
    chosen = [f"{r['who']} {r['setting']}" for r in records if r["seed"] is None and r["setting"]]
    return ", ".join(chosen)


def text_section(part: Record) -> tuple[str, list[str]]:
    """The table of the language model, and what is worse than a peer there."""
    unique = {}
    for record in part["records"]:
        unique[record["who"], record.get("seed")] = record
    records = [*unique.values()]
    for who, loss in PUBLISHED:
        records.append({"who": who, "loss": loss})
    text = f"""## Letters: tiny Shakespeare

"Hashed contexts" is the model of notebook 01, trained for {TEXT_STEPS:,} steps on the first nine
tenths of the text. Losses are nats per letter on the last tenth.

{contestants(records, ("loss",)).replace("log-loss", "nats a letter")}

{part["machine"]}. The best counter mixes contexts of all lengths up to a maximum (Witten and Bell).
The last tenth of the training text chose this maximum. The published losses come from the README of
[nanoGPT](https://github.com/karpathy/nanoGPT), which splits the text in the same way. The second
published loss is an estimate from 20 batches.
"""
    worse = better_peers(records, ("hashed contexts",), "loss")
    return text, [f"letters: {sentence}".replace("log-loss", "a loss of") for sentence in worse]


def bytes_section(name: str, records: Sequence[Record], machine: str) -> tuple[str, list[str]]:
    """The table of smaller tables, and which of them are worse than an array."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["ratio"]), []).append(record)
    (dense,) = (group for (method, _), group in groups.items() if method == "dense")
    array_auc = float(np.mean([record["AUC"] for record in dense]))
    rows = []
    equal, worse = [], []
    for (method, _), group in groups.items():
        aucs = [record["AUC"] for record in group]
        times = dense[0]["bytes"] / group[0]["bytes"]
        cells = [shown([record["loss"] for record in group]), shown(aucs)]
        rows.append([method, f"{group[0]['bytes'] / 1e3:,.0f}", f"{times:.1f}", *cells])
        if times < 90:
            continue
        if np.mean(aucs) < array_auc - 0.005:
            worse.append(f"{method} {np.mean(aucs):.3f}")
        else:
            equal.append(f"{method} {np.mean(aucs):.3f}")
    sentences = []
    if worse:
        sentence = (
            "tables with a hundredth of the bytes lose more than 0.005 of AUC "
            f"({array_auc:.3f} for arrays)"
        )
        sentences.append(f"{name}: {sentence}: {', '.join(worse)}")
    verdict = "Tables with a hundredth of the bytes and the same AUC, within 0.005: " + (
        ", ".join(equal) or "none"
    )
    text = f"""### {name}

{table(["", "kB of tables", "times smaller", "log-loss", "AUC"], rows)}

{verdict}. {machine}; seeds: {len(dense)}.
"""
    return text, sentences


def error_of_auc(auc: float, num_clicks: int, num_others: int) -> float:
    """Standard error of an AUC.

    Source: Hanley and McNeil, "The meaning and use of the area under a receiver operating
      characteristic (ROC) curve", Radiology 1982.
    """
    both_clicks_rank_higher = auc / (2 - auc)
    click_ranks_above_both = 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc)
    variance += (num_clicks - 1) * (both_clicks_rank_higher - auc**2)
    variance += (num_others - 1) * (click_ranks_above_both - auc**2)
    return float(np.sqrt(variance / (num_clicks * num_others)))


def clicks_section(part: Record) -> tuple[str, list[str]]:
    """The table of a log of clicks, and what is worse than a peer there."""
    records = part["records"]
    peers_and_ours = [record for record in records if record["who"] != "best possible"]
    worse = []
    for what in ("loss", "AUC"):
        worse += better_peers(peers_and_ours, ("DLRM",), what)
    held_out = records[0]
    error = error_of_auc(0.7, held_out["clicks"], held_out["rows"] - held_out["clicks"])
    text = f"""## Clicks: {part["source"]}

The table shows log-loss and AUC of {held_out["rows"]:,} held-out rows, {held_out["clicks"]:,} of them
with a click. With this number of rows, an AUC of 0.7 has a standard error of {error:.3f}. Other rows
chose the learning rate of logistic regression and of the DLRM's tables, and the epochs of both
models.

{contestants(records, ("loss", "AUC"))}

{part["machine"]}.
"""
    return text, [f"clicks: {sentence}" for sentence in worse]


def page(parts: dict[str, Record], measured_before: Record) -> str:
    """The page, from the records of all parts and those of benchmarks/smaller.json."""
    sections = []
    worse = []
    for key, part in parts.items():
        kind, _, name = key.partition(":")
        if kind == "films":
            section = films_section(name, part)
        elif kind == "text":
            section = text_section(part)
        elif kind == "clicks":
            section = clicks_section(part)
        else:
            continue
        sections.append(section[0])
        worse += section[1]
    sections.append(BYTES)
    for key, part in parts.items():
        if key.startswith("bytes:"):
            section = bytes_section(key.partition(":")[2], part["records"], part["machine"])
            sections.append(section[0])
            worse += section[1]
    for log in dict.fromkeys(record["log"] for record in measured_before["records"]):
        records = [record for record in measured_before["records"] if record["log"] == log]
        section = bytes_section(f"{log}, generated", records, measured_before["machine"])
        sections.append(section[0])
        worse += section[1]
    lines = [f"* {sentence}." for sentence in worse]
    return INTRO + "\n".join([*lines, "", *sections]).rstrip() + "\n"


def measured(
    parts: dict[str, Record], key: str, job: Callable[[], list[Record]], path: Path, source: str
) -> None:
    """Adds the records of a job to its part, unless they are there, and writes the file."""
    part_name, _, job_name = key.rpartition("/")
    part = parts.setdefault(part_name, {"records": [], "jobs": []})
    if job_name in part["jobs"]:
        return
    part["records"] += job()
    part["jobs"].append(job_name)
    part["machine"] = f"Two x86-64 cores, {datetime.date.today()}"
    part["source"] = source
    path.write_text(json.dumps(parts, indent=1) + "\n")
    print(f"{key}: done", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing, and writes the page."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", nargs="*", default=[], help="folders or archives of MovieLens")
    parser.add_argument("--text", help="folder with the published Shakespeare file")
    parser.add_argument("--clicks", help="a click log; without it, one is generated")
    parser.add_argument("--click-rows", type=int, default=100_000, help="0 leaves clicks out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args(argv)
    parts: dict[str, Record] = {}
    if options.json.exists():
        parts = json.loads(options.json.read_text())
    jobs: list[tuple[str, Callable[[], list[Record]], str]] = []
    for path in options.ratings:
        name = Path(path).name
        jobs.append((f"films:{name}/peers", functools.partial(measure_peers, path), name))
        for who in ("two towers", "self-attention"):
            for seed in range(options.seeds):
                job = functools.partial(measure_model, path, who, seed)
                jobs.append((f"films:{name}/{who} {seed}", job, name))
    if options.text:
        for seed in range(options.seeds):
            job = functools.partial(measure_text, options.text, seed)
            jobs.append((f"text:tiny Shakespeare/{seed}", job, "tiny Shakespeare"))
    for path in options.ratings:
        job = functools.partial(measure_bytes, path, options.seeds)
        jobs.append((f"bytes:{Path(path).name}/all", job, Path(path).name))
    if options.click_rows:
        source = "a generated log"
        if options.clicks:
            source = Path(options.clicks).name
        for seed in range(options.seeds):
            job = functools.partial(measure_clicks, options.clicks, options.click_rows, seed)
            jobs.append((f"clicks:{source}/{seed}", job, source))
    for key, job, source in jobs:
        measured(parts, key, job, options.json, source)
    before = json.loads((ROOT / "benchmarks" / "smaller.json").read_text())
    options.page.write_text(page(parts, before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
