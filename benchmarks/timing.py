"""Common part of the timing scripts: workloads, ids, runs of torch, races, options and records."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rsembed.kernels import native
from rsembed.kernels.devices import granted_cores

NUM_BATCHES = 8
WARM_SECONDS = 0.03
Run = Callable[[int], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables of equal size. Each table has one feature, with a fixed number of ids per sample."""

    name: str
    num_tables: int
    vocabulary_size: int
    embedding_dim: int
    batch_size: int
    ids_per_sample: int

    @property
    def num_rows(self) -> int:
        return self.num_tables * self.vocabulary_size


WORKLOADS = (
    Workload(
        name="8x100k",
        num_tables=8,
        vocabulary_size=100_000,
        embedding_dim=64,
        batch_size=2048,
        ids_per_sample=20,
    ),
    Workload(
        name="26x100k",
        num_tables=26,
        vocabulary_size=100_000,
        embedding_dim=128,
        batch_size=1024,
        ids_per_sample=1,
    ),
    Workload(
        name="1x10M",
        num_tables=1,
        vocabulary_size=10_000_000,
        embedding_dim=64,
        batch_size=4096,
        ids_per_sample=20,
    ),
)


def draw_ids(workload: Workload, law: str, seed: int) -> np.ndarray:
    """Ids `[NUM_BATCHES, num_tables, batch, ids_per_sample]` by the law `uniform` or `zipf`.

    The Zipf law has exponent 1.15. Id 0 is the most frequent one.
    """
    shape = (NUM_BATCHES, workload.num_tables, workload.batch_size, workload.ids_per_sample)
    return ids_by_law(law, workload.vocabulary_size, shape, seed, exponent=1.15)


def ids_by_law(
    law: str, num_rows: int, shape: tuple[int, ...], seed: int, *, exponent: float
) -> np.ndarray:
    """Row numbers by the law `uniform` or `zipf`. In a Zipf law, row 0 is the most frequent one."""
    generator = np.random.default_rng(seed)
    if law == "uniform":
        return generator.integers(0, num_rows, shape, dtype=np.int32)
    ranks = np.arange(1, num_rows + 1, dtype=np.float64)
    cumulative = np.cumsum(ranks**-exponent)
    uniform = generator.random(shape) * cumulative[-1]
    return np.searchsorted(cumulative, uniform).astype(np.int32)


def torch_bags(workload: Workload, weight: float, device: str = "cpu") -> list[Any]:
    """An `EmbeddingBag` with sparse gradients for each table. All weights are `weight`.

    Raises: ImportError: torch is not installed.
    """
    import torch

    shape = (workload.vocabulary_size, workload.embedding_dim)
    bags = []
    for _ in range(workload.num_tables):
        weights = torch.full(shape, weight, device=device)
        bags.append(torch.nn.EmbeddingBag(*shape, mode="sum", sparse=True, _weight=weights))
    return bags


def torch_runs(
    bags: Sequence[Any],
    batches: Sequence[Any],
    gradients: Sequence[Any],
    optimizers: Mapping[str, Any],
) -> dict[str, Run]:
    """A lookup of all bags, and a step with each optimizer, by the optimizer's name.

    All runs return the list of the bags' outputs.
    """
    import torch

    def forward(k: int) -> list[Any]:
        return [bag(ids) for bag, ids in zip(bags, batches[k], strict=True)]

    def lookup(k: int) -> object:
        with torch.no_grad():
            return forward(k)

    def step(k: int, optimizer: Any) -> object:
        optimizer.zero_grad(set_to_none=True)
        outputs = forward(k)
        torch.autograd.backward(outputs, gradients)
        optimizer.step()
        return outputs

    runs: dict[str, Run] = {"lookup": lookup}
    for name, optimizer in optimizers.items():
        runs[name] = functools.partial(step, optimizer=optimizer)
    return runs


def bytes_per_second() -> float:
    """Memory bandwidth of all cores together, from the fastest of six copies of large arrays."""
    num_threads = granted_cores()
    sources = [np.ones(1 << 25) for _ in range(num_threads)]
    targets = [np.zeros(1 << 25) for _ in range(num_threads)]
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(6):
            start = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            best = min(best, time.perf_counter() - start)
    # A copy reads the source and writes the target.
    return sum(array.nbytes for array in sources + targets) / best


def least_bytes(workload: Workload, num_unique_rows: float, *, state_bytes: int | None) -> float:
    """Bytes that a lookup or a step must read and write with perfect caches.

    A lookup reads each distinct row once, and writes the output. A step also reads the gradient of
    the output, and reads and writes each distinct row and its optimizer state.

    Args:
      workload: tables and batch size.
      num_unique_rows: number of distinct rows of a batch.
      state_bytes: bytes of optimizer state per row. None: a lookup.
    """
    row_bytes = 4 * workload.embedding_dim
    output_bytes = workload.num_tables * workload.batch_size * row_bytes
    lookup_bytes = num_unique_rows * row_bytes + output_bytes
    if state_bytes is None:
        return lookup_bytes
    return lookup_bytes + output_bytes + 2 * num_unique_rows * (row_bytes + state_bytes)


class Times(NamedTuple):
    """Milliseconds of one contestant."""

    median: float
    best: float


def _orders(names: list[str]) -> Iterator[Sequence[str]]:
    """Endless orders of the names: all orders, shuffled, or with many names, random orders."""
    draw = random.Random(0)
    # Seven names have 5,040 orders, thirteen names six billion.
    if len(names) > 7:
        while True:
            yield draw.sample(names, len(names))
    permutations = list(itertools.permutations(names))
    draw.shuffle(permutations)
    yield from itertools.cycle(permutations)


def race(
    contestants: Mapping[str, Run], num_rounds: int, *, num_warm: int | None = None
) -> dict[str, Times]:
    """Times of each contestant. In each round, each contestant runs all batches, one after the other.

    Every round has another order of the contestants, and each contestant runs untimed for a while
    before it is timed. In training, one contestant runs all the time, so its time must not depend
    on what another contestant left: its rows in the processor's caches, or its threads, which spin
    before they sleep. Threads of torch spin for 12 ms, and during this time, short lookups of other
    contestants take three to six times as long.

    Args:
      contestants: runs by name. A run takes the number of a batch.
      num_rounds: number of rounds.
      num_warm: number of untimed runs. None: `WARM_SECONDS` of untimed runs. Contestants in several
        processes that wait for each other need a number.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in itertools.islice(_orders(list(contestants)), num_rounds):
        for name in order:
            _warm(contestants[name], num_warm)
            for k in range(NUM_BATCHES):
                start = time.perf_counter()
                contestants[name](k)
                seconds[name].append(time.perf_counter() - start)
    times = {}
    for name, values in seconds.items():
        times[name] = Times(median=1e3 * statistics.median(values), best=1e3 * min(values))
    return times


def _warm(run: Run, num_warm: int | None) -> None:
    """Runs one batch again and again, untimed. The first run in the process compiles."""
    run(NUM_BATCHES - 1)
    if num_warm is not None:
        for _ in range(num_warm):
            run(NUM_BATCHES - 1)
        return
    start = time.perf_counter()
    while time.perf_counter() < start + WARM_SECONDS:
        run(NUM_BATCHES - 1)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the records to this file")
    return parser


def write_records(options: argparse.Namespace, records: object) -> None:
    """Writes the records to the file of `--json`, if there is one."""
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n")


def read_options(
    description: str | None, names: Sequence[str], *, quick_names: Sequence[str]
) -> argparse.Namespace:
    """Options of the command line: `workloads` as a list, and `rounds`.

    Ends the program if native kernels are missing.
    """
    parser = make_parser(description)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, and no workload above 2 GB"
    )
    parser.add_argument("--workloads", default=None, help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument(
        "--rounds", type=int, default=None, help="times all batches are run (default 8, quick 2)"
    )
    options = parser.parse_args()
    if options.workloads:
        options.workloads = options.workloads.split(",")
    elif options.quick:
        options.workloads = quick_names
    else:
        options.workloads = names
    unknown = set(options.workloads) - set(names)
    if unknown:
        parser.error(f"unknown workloads {sorted(unknown)}; choose from {', '.join(names)}")
    if not options.rounds:
        options.rounds = 2 if options.quick else 8
    check_native()
    return options


def check_native() -> None:
    """Ends the program if native kernels are missing, because the reference kernels are slow."""
    reason = native.unavailable_because()
    if reason is not None:
        sys.exit(f"rsembed's native kernels are not available: {reason}")
