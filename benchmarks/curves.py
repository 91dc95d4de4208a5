"""Times lookups and steps while one property of the workload grows: a table and a picture.

    python benchmarks/curves.py [--rounds 3] [--curves dim,skew] [--json PATH] [--picture PATH]

All curves start from four tables of 1M rows and 64 columns, batch 4096, and 10 ids per feature by a
Zipf law with exponent 1.05. A curve changes one property: the number of ids of a step, the number of
columns, the number of rows of a single table (up to 8 GB), the number of tables with the same number
of ids, the exponent, or the number of cores of the process. A step is a lookup and an update by
row-wise Adagrad, compiled, with donated state. In the curve `keys`, all keys of each batch are new, for
a hashed table with 32 columns and for a dictionary of rows in numpy. The script needs about 9 GB of
memory.
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
    """Nanoseconds per id of lookup and step, and seconds of the first step, which compiles."""
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
    """Millions of new keys per second, of a hashed table and of a dictionary of rows."""
    batches = [np.arange(num_keys) + k * num_keys for k in range(timing.NUM_BATCHES)]
    capacity = 2 * timing.NUM_BATCHES * num_keys
    seconds = time_hashed_table(batches, capacity, num_rounds)
    seconds_of_dictionary = time_dictionary(batches, capacity, num_rounds)
    return {
        "million keys a second": num_keys / np.median(seconds) / 1e6,
        "with a dictionary": num_keys / np.median(seconds_of_dictionary) / 1e6,
    }


def time_hashed_table(batches: list[np.ndarray], capacity: int, num_rounds: int) -> list[float]:
    """Seconds of each update of a hashed table with new keys. Each round starts with no keys."""
    table = rs.TableSpec(
        name="user",
        vocabulary_size=capacity,
        embedding_dim=32,
        optimizer=rs.optimizers.RowWiseAdagrad(0.01),
        storage=rs.Hashed(when_full="zero"),
    )
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="user", table_spec=table)])
    init = jax.jit(collection.init)
    update = jax.jit(collection.update, donate_argnums=0)
    gradients = {"user": jnp.ones((len(batches[0]), 32))}
    prepared = [collection.prepare({"user": keys}) for keys in batches]
    seconds = []
    for _ in range(num_rounds):
        state = jax.block_until_ready(init(jax.random.key(0)))
        for batch in prepared:
            start = time.perf_counter()
            state = jax.block_until_ready(update(state, batch, gradients))
            seconds.append(time.perf_counter() - start)
    return seconds


def time_dictionary(batches: list[np.ndarray], capacity: int, num_rounds: int) -> list[float]:
    """Seconds for the rows of each batch of new keys, with a dictionary and an array of numpy."""
    table = np.empty((capacity, 32), np.float32)
    rate = np.float32(0.01)
    seconds = []
    for _ in range(num_rounds):
        row_of_key: dict[int, int] = {}
        rng = np.random.default_rng(0)
        for keys in batches:
            start = time.perf_counter()
            rows = [row_of_key.setdefault(key, len(row_of_key)) for key in keys.tolist()]
            table[rows] = rng.standard_normal((len(keys), 32), dtype=np.float32) - rate
            seconds.append(time.perf_counter() - start)
    return seconds


def on_cores(num_cores: int, num_rounds: int) -> Record:
    """The record of the base workload in a process that may use `num_cores` cores."""
    all_cores = os.sched_getaffinity(0)
    # The child process inherits the cores of this thread.
    os.sched_setaffinity(0, sorted(all_cores)[:num_cores])
    try:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            arguments = ["--curves", "base", "--rounds", str(num_rounds), "--json", file.name]
            command = [sys.executable, __file__, *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            record: Record = json.load(file)["records"]["base"][0]
    finally:
        os.sched_setaffinity(0, all_cores)
    return record


def curves(num_rounds: int) -> dict[str, dict[float, Callable[[], Record]]]:
    """Functions that measure the points of all curves, by curve and by value of its property."""

    def point(exponent: float = EXPONENT, **changes: int) -> Callable[[], Record]:
        workload = dataclasses.replace(BASE, **changes)
        return functools.partial(time_point, workload, exponent, num_rounds)

    points: dict[str, dict[float, Callable[[], Record]]] = {"base": {1: point()}}
    points["ids a step"] = {}
    for batch_size in (16, 64, 256, 1024, 4096, 16_384):
        points["ids a step"][40 * batch_size] = point(batch_size=batch_size)
    points["dim"] = {}
    for dim in (4, 8, 16, 32, 64, 128, 256, 512):
        points["dim"][dim] = point(embedding_dim=dim)
    points["rows"] = {}
    for num_rows in (10_000, 100_000, 1_000_000, 10_000_000, 32_000_000):
        points["rows"][num_rows] = point(num_tables=1, vocabulary_size=num_rows, batch_size=16_384)
    points["tables"] = {}
    for num_tables in (1, 4, 16, 64, 256, 1000):
        points["tables"][num_tables] = point(
            num_tables=num_tables,
            vocabulary_size=1_000_000 // num_tables,
            batch_size=16_384 // num_tables,
        )
    points["skew"] = {}
    for exponent in (0.0, 0.6, 0.8, 1.0, 1.2, 1.4):
        points["skew"][exponent] = point(exponent)
    points["cores"] = {}
    # Only Linux can set the cores of a process.
    if hasattr(os, "sched_getaffinity"):
        for num_cores in range(1, len(os.sched_getaffinity(0)) + 1):
            points["cores"][num_cores] = functools.partial(on_cores, num_cores, num_rounds)
    points["keys"] = {}
    for num_keys in (256, 1024, 4096, 16_384, 65_536):
        points["keys"][num_keys] = functools.partial(time_new_keys, num_keys, num_rounds)
    return points


def show(name: str, value: float, record: Record) -> None:
    """Prints a point of a curve."""
    line = f"{name:<12}{value:>12,g}"
    if name == "keys":
        ours = record["million keys a second"]
        dictionary = record["with a dictionary"]
        print(f"{line}{ours:>12.2f} million new keys a second, with a dictionary {dictionary:.2f}")
        return
    for what in ("lookup", STEP):
        cell = f"{record[what]['ns per id']:.1f} ({record[what]['best']:.1f})"
        line += f"{cell:>18}"
    print(f"{line}{record['first step s']:>10.1f}", flush=True)


def conclusion(name: str, records: dict[float, Record]) -> str:
    """A title for a curve, from its first and last point."""
    values = list(records)
    points = list(records.values())
    if name == "keys":
        most = max(point["million keys a second"] for point in points)
        return f"at most {most:.1f} million new keys a second"
    first = points[0][STEP]["ns per id"]
    last = points[-1][STEP]["ns per id"]
    change = f"{first / last:.1f} times cheaper"
    if last > first:
        change = f"{last / first:.1f} times the cost"
    if name == "skew":
        return f"uniform to {values[-1]:g}: {change}"
    return f"{values[-1] / values[0]:,.0f} times as many: {change}"


def draw(records: dict[str, dict[float, Record]], path: Path) -> None:
    """Draws a small plot for each curve, with its conclusion as the title."""
    labels = {
        "ids a step": "ids a step",
        "dim": "numbers a row",
        "rows": "rows of one table",
        "tables": "tables, same number of ids",
        "skew": "exponent of Zipf's law",
        "keys": "new keys a step",
    }
    names = [name for name in labels if name in records]
    figure, grid = plt.subplots(2, 3, figsize=(9.5, 5.4), layout="constrained")
    for axes, name in zip(grid.flat, names, strict=False):
        values = list(records[name])
        points = list(records[name].values())
        if name == "keys":
            ours = [point["million keys a second"] for point in points]
            dictionary = [point["with a dictionary"] for point in points]
            axes.plot(values, ours, "o-", color="C2")
            axes.plot(values, dictionary, "o-", color="0.6")
            end = (values[-1], dictionary[-1])
            axes.annotate("a dictionary", end, ha="right", va="bottom")
            axes.set(ylabel="million a second")
        else:
            for what, label in (("lookup", "lookup"), (STEP, "lookup and update")):
                times = [point[what]["ns per id"] for point in points]
                axes.plot(values, times, "o-", label=label)
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
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.suptitle(f"What an id costs as one thing grows ({machine()})", fontsize=11)
    figure.savefig(path, dpi=80)


def read_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times all batches are run")
    parser.add_argument("--curves", help="separated by commas; default all")
    parser.add_argument("--picture", type=Path, help="also draw the curves into this file")
    options = parser.parse_args()
    known = list(curves(1))
    options.curves = options.curves.split(",") if options.curves else known
    unknown = set(options.curves) - set(known)
    if unknown:
        parser.error(f"unknown curves {sorted(unknown)}; choose from {', '.join(known)}")
    return options


def main() -> int:
    """Prints the table, and writes records and picture to the files of the options."""
    matplotlib.use("Agg")
    options = read_arguments()
    print(machine())
    print(f"{'curve':<24}{'lookup ns/id':>18}{'step ns/id':>18}{'first, s':>10}   medians (bests)")
    records: dict[str, dict[float, Record]] = {}
    all_curves = curves(options.rounds)
    for name in options.curves:
        records[name] = {}
        for value, measure in all_curves[name].items():
            records[name][value] = measure()
            gc.collect()
            show(name, value, records[name][value])
    # Keys of objects in JSON are texts, so the points are lists.
    lists = {}
    for name, points in records.items():
        lists[name] = [{"at": value, **point} for value, point in points.items()]
    timing.write_records(options, {"machine": machine(), "records": lists})
    if options.picture:
        draw(records, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
