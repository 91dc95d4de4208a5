"""Times lookups and steps as one thing grows at a time: one table and one picture of how the cost of an id changes.

    python benchmarks/curves.py [--rounds 3] [--curves dim,skew] [--json PATH] [--picture PATH]

Every curve starts from four tables of 1M rows of 64, batch 4096, 10 ids a feature by Zipf 1.05, and changes one of
these: ids a step, the length of a row, rows of a single table (up to 8 GB), the number of tables at the same number of
ids, the skew, and the cores of the process. A step is lookup and update by row-wise Adagrad, compiled, with donated
state. `keys` gives a hashed table of 32 numbers a row batches in which every key is new, and so a dictionary of rows in
numpy. Needs about 9 GB of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lookup
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import timing
from summary import machine
from timing import Workload

import rsembed as rs

STEP = "step, Adagrad"
BASE = Workload(
    name="base",
    num_tables=4,
    vocabulary_size=1_000_000,
    embedding_dim=64,
    batch_size=4096,
    ids_per_sample=10,
)
EXPONENT = 1.05
NANOSECONDS = (5, 10, 20, 50, 100, 200, 500)
Record = dict[str, Any]


def time_point(workload: Workload, exponent: float, num_rounds: int) -> Record:
    """Nanoseconds per id of lookup and step, and seconds until the first step was done."""
    shape = (timing.NUM_BATCHES, workload.num_tables, workload.batch_size, workload.ids_per_sample)
    ids = timing.ids_by_law("zipf", workload.vocabulary_size, shape, 3, exponent=exponent)
    runs = lookup.rsembed_contestant(workload, ids)
    start = time.perf_counter()
    runs[STEP](0)
    record: Record = {"first step s": time.perf_counter() - start}
    for what in ("lookup", STEP):
        median, best = timing.race({what: runs[what]}, num_rounds)[what]
        record[what] = {"ns per id": 1e6 * median / ids[0].size, "best": 1e6 * best / ids[0].size}
    return record


def time_new_keys(num_keys: int, num_rounds: int) -> Record:
    """Millions of keys a second that get a row in a table of keys, and are stepped; and with a dictionary of rows."""
    rule, capacity = rs.optimizers.RowWiseAdagrad(0.01), 2 * timing.NUM_BATCHES * num_keys
    table = rs.TableSpec(
        name="user",
        vocabulary_size=capacity,
        embedding_dim=32,
        optimizer=rule,
        storage=rs.Hashed(when_full="zero"),
    )
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="user", table_spec=table)])
    gradients = {"user": jnp.ones((num_keys, 32))}
    update, init = jax.jit(collection.update, donate_argnums=0), jax.jit(collection.init)
    batches = [
        collection.prepare({"user": np.arange(num_keys) + k * num_keys})
        for k in range(timing.NUM_BATCHES)
    ]
    seconds = []
    for _ in range(num_rounds):
        state = jax.block_until_ready(init(jax.random.key(0)))
        for batch in batches:
            start = time.perf_counter()
            state = jax.block_until_ready(update(state, batch, gradients))
            seconds.append(time.perf_counter() - start)
    dictionary, in_dictionary = np.empty((capacity, 32), np.float32), []
    for _ in range(num_rounds):
        row_of: dict[int, int] = {}
        rng = np.random.default_rng(0)
        for k in range(timing.NUM_BATCHES):
            keys = np.arange(num_keys) + k * num_keys
            start = time.perf_counter()
            rows = np.fromiter(
                (row_of.setdefault(key, len(row_of)) for key in keys.tolist()), np.int64, num_keys
            )
            dictionary[rows] = rng.standard_normal((num_keys, 32), dtype=np.float32) - np.float32(
                0.01
            )
            in_dictionary.append(time.perf_counter() - start)
    both = {"million keys a second": seconds, "with a dictionary": in_dictionary}
    return {what: num_keys / np.median(own) / 1e6 for what, own in both.items()}


def on_cores(num_cores: int, num_rounds: int) -> Record:
    """The start of all curves, in a process that may use so many cores."""
    all_cores = os.sched_getaffinity(0)
    # Of this thread, whose children inherit it.
    os.sched_setaffinity(0, sorted(all_cores)[:num_cores])
    try:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [
                sys.executable,
                __file__,
                "--curves",
                "base",
                "--rounds",
                str(num_rounds),
                "--json",
                file.name,
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            record: Record = json.load(file)["records"]["base"][0]
    finally:
        os.sched_setaffinity(0, all_cores)
    return record


def curves(num_rounds: int) -> dict[str, dict[float, Callable[[], Record]]]:
    """All points by curve and abscissa, to be timed."""

    def point(exponent: float = EXPONENT, **changes: int) -> Callable[[], Record]:
        return functools.partial(
            time_point, dataclasses.replace(BASE, **changes), exponent, num_rounds
        )

    def tables(number: int) -> Callable[[], Record]:
        return point(
            num_tables=number, vocabulary_size=1_000_000 // number, batch_size=16_384 // number
        )

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes = (10_000, 100_000, 1_000_000, 10_000_000, 32_000_000)
    return {
        "base": {1: point()},
        "ids a step": {
            40 * batch: point(batch_size=batch) for batch in (16, 64, 256, 1024, 4096, 16_384)
        },
        "dim": {dim: point(embedding_dim=dim) for dim in (4, 8, 16, 32, 64, 128, 256, 512)},
        "rows": {
            rows: point(num_tables=1, vocabulary_size=rows, batch_size=16_384) for rows in sizes
        },
        "tables": {number: tables(number) for number in (1, 4, 16, 64, 256, 1000)},
        "skew": {exponent: point(exponent) for exponent in (0.0, 0.6, 0.8, 1.0, 1.2, 1.4)},
        "cores": {n: functools.partial(on_cores, n, num_rounds) for n in range(1, num_cores + 1)},
        "keys": {
            n: functools.partial(time_new_keys, n, num_rounds)
            for n in (256, 1024, 4096, 16_384, 65_536)
        },
    }


def show(name: str, records: dict[float, Record]) -> None:
    """The rows of one curve."""
    for place, record in records.items():
        if "million keys a second" in record:
            ours, dictionary = record["million keys a second"], record["with a dictionary"]
            print(
                f"{name:<12}{place:>12,g}{ours:>12.2f} million new keys a second, with a dictionary {dictionary:.2f}"
            )
            continue
        cells = [
            f"{record[what]['ns per id']:.1f} ({record[what]['best']:.1f})"
            for what in ("lookup", STEP)
        ]
        print(
            f"{name:<12}{place:>12,g}{cells[0]:>18}{cells[1]:>18}{record['first step s']:>10.1f}",
            flush=True,
        )


def conclusion(name: str, records: dict[float, Record]) -> str:
    """What one curve says of a step, from its first and last point."""
    points, places = list(records.values()), list(records)
    if name == "keys":
        return f"at most {max(point['million keys a second'] for point in points):.1f} million new keys a second"
    first, last = points[0][STEP]["ns per id"], points[-1][STEP]["ns per id"]
    change = (
        f"{last / first:.1f} times the cost"
        if last > first
        else f"{first / last:.1f} times cheaper"
    )
    if name == "skew":
        return f"uniform to {places[-1]:g}: {change}"
    return f"{places[-1] / places[0]:,.0f} times as many: {change}"


def draw(records: dict[str, dict[float, Record]], path: Path) -> None:
    """One small plot a curve, under what it says."""
    labels = {
        "ids a step": "ids a step",
        "dim": "numbers a row",
        "rows": "rows of one table",
        "tables": "tables, same number of ids",
        "skew": "exponent of Zipf's law",
        "keys": "new keys a step",
    }
    shown = [name for name in labels if name in records]
    figure, grid = plt.subplots(2, 3, figsize=(9.5, 5.4), layout="constrained")
    for axes, name in zip(grid.flat, shown, strict=False):
        places, points = list(records[name]), list(records[name].values())
        if name == "keys":
            axes.plot(
                places, [point["million keys a second"] for point in points], "o-", color="C2"
            )
            axes.plot(places, [point["with a dictionary"] for point in points], "o-", color="0.6")
            axes.annotate(
                "a dictionary",
                (places[-1], points[-1]["with a dictionary"]),
                ha="right",
                va="bottom",
            )
            axes.set(ylabel="million a second")
        else:
            for what, label in (("lookup", "lookup"), (STEP, "lookup and update")):
                axes.plot(places, [point[what]["ns per id"] for point in points], "o-", label=label)
            axes.set(ylabel="ns per id", yscale="log")
            axes.set_yticks(NANOSECONDS, map(str, NANOSECONDS))
            axes.set_yticks([], minor=True)
        axes.set(xlabel=labels[name], xscale="linear" if name == "skew" else "log")
        axes.set_title(conclusion(name, records[name]), fontsize=9)
        axes.grid(color="0.9")
    figure.legend(
        *grid.flat[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    figure.suptitle(f"What an id costs as one thing grows ({machine()})", fontsize=11)
    figure.savefig(path, dpi=80)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times all batches are run")
    parser.add_argument("--curves", help="separated by commas; default all")
    parser.add_argument("--picture", type=Path, help="also draw the curves into this file")
    options = parser.parse_args()
    known = list(curves(1))
    options.curves = (options.curves or ",".join(known)).split(",")
    if unknown := set(options.curves) - set(known):
        parser.error(f"unknown curves {sorted(unknown)}; choose from {', '.join(known)}")
    return options


def main() -> int:
    """Prints the table, and writes records and picture if asked."""
    matplotlib.use("Agg")
    options = read_arguments()
    print(machine())
    print(f"{'curve':<24}{'lookup ns/id':>18}{'step ns/id':>18}{'first, s':>10}   medians (bests)")
    records: dict[str, dict[float, Record]] = {}
    for name in options.curves:
        records[name] = {}
        for place, measure in curves(options.rounds)[name].items():
            records[name][place] = measure()
            gc.collect()
            show(name, {place: records[name][place]})
    in_lists = {
        name: [{"at": at, **record} for at, record in own.items()] for name, own in records.items()
    }
    timing.write_records(options, {"machine": machine(), "records": in_lists})
    if options.picture:
        draw(records, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
