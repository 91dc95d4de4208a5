"""What the timing scripts share: workloads, ids, torch's runs, taking turns, the command line and the records."""

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
    """Tables of one size, one feature each, a fixed number of ids per sample."""

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
    """Ids `[NUM_BATCHES, num_tables, batch, ids_per_sample]`; law `zipf` has exponent 1.15 and id 0 most frequent."""
    shape = (NUM_BATCHES, workload.num_tables, workload.batch_size, workload.ids_per_sample)
    return ids_by_law(law, workload.vocabulary_size, shape, seed, exponent=1.15)


def ids_by_law(
    law: str, num_rows: int, shape: tuple[int, ...], seed: int, *, exponent: float
) -> np.ndarray:
    """Row numbers by the law `uniform` or `zipf`, of which row 0 is the most frequent."""
    generator = np.random.default_rng(seed)
    if law == "uniform":
        return generator.integers(0, num_rows, shape, dtype=np.int32)
    cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative, generator.random(shape) * cumulative[-1]).astype(np.int32)


def torch_bags(workload: Workload, weight: float, device: str = "cpu") -> list[Any]:
    """One `EmbeddingBag` per table, with sparse gradients and equal weights; raises ImportError without torch."""
    import torch

    shape = (workload.vocabulary_size, workload.embedding_dim)
    return [
        torch.nn.EmbeddingBag(
            *shape, mode="sum", sparse=True, _weight=torch.full(shape, weight, device=device)
        )
        for _ in range(workload.num_tables)
    ]


def torch_runs(
    bags: Sequence[Any],
    batches: Sequence[Any],
    gradients: Sequence[Any],
    optimizers: Mapping[str, Any],
) -> dict[str, Run]:
    """A lookup of all bags, and a step with each optimizer by its name; all return the outputs, a list."""
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

    return {
        "lookup": lookup,
        **{what: functools.partial(step, optimizer=own) for what, own in optimizers.items()},
    }


def bytes_per_second() -> float:
    """What the memory of this machine gives to all cores together: the best of some copies of very large arrays."""
    num_threads = granted_cores()
    arrays = [(np.ones(1 << 25), np.zeros(1 << 25)) for _ in range(num_threads)]
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        for _ in range(6):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), arrays))
            best = min(best, time.perf_counter() - start)
    return sum(2 * source.nbytes for source, _ in arrays) / best


def least_bytes(workload: Workload, num_unique_rows: float, *, state_bytes: int | None) -> float:
    """What a lookup must move if caches do all they can: each distinct row once, and the output.

    A step (with `state_bytes` of optimizer state per row, not None) also reads the output's gradient, and reads and
    writes each distinct row and its state.
    """
    row_bytes = 4 * workload.embedding_dim
    output_bytes = workload.num_tables * workload.batch_size * row_bytes
    lookup = num_unique_rows * row_bytes + output_bytes
    return (
        lookup
        if state_bytes is None
        else lookup + output_bytes + 2 * num_unique_rows * (row_bytes + state_bytes)
    )


class Times(NamedTuple):
    """Milliseconds of one contestant."""

    median: float
    best: float


def _orders(names: list[str]) -> Iterator[Sequence[str]]:
    """All orders, again and again, so shuffled that the first few do not begin alike; of many names any orders."""
    draw = random.Random(0)
    if len(names) > 7:  # thirteen names have six billion
        while True:
            yield draw.sample(names, len(names))
    permutations = list(itertools.permutations(names))
    draw.shuffle(permutations)
    yield from itertools.cycle(permutations)


def race(
    contestants: Mapping[str, Run], num_rounds: int, *, num_warm: int | None = None
) -> dict[str, Times]:
    """Times of every contestant. They take turns of all batches, in every order, or in as many as there are rounds.

    Before its turn each runs for a while untimed. Training calls one of them again and again, so nobody's time may
    depend on what another one left behind: its rows in the caches, or its threads, which spin before they sleep. Those
    of torch do so for 12 ms, in which short lookups of others take three to six times as long. Contestants of several
    processes, which wait for each other, need a number of untimed runs instead, `num_warm`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in itertools.islice(_orders(list(contestants)), num_rounds):
        for name in order:
            contestants[name](NUM_BATCHES - 1)  # the first time, this compiles
            start, num_done = time.perf_counter(), 0
            while (
                time.perf_counter() < start + WARM_SECONDS
                if num_warm is None
                else num_done < num_warm
            ):
                contestants[name](NUM_BATCHES - 1)
                num_done += 1
            for k in range(NUM_BATCHES):
                start = time.perf_counter()
                contestants[name](k)
                seconds[name].append(time.perf_counter() - start)
    return {
        name: Times(1e3 * statistics.median(values), 1e3 * min(values))
        for name, values in seconds.items()
    }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every script has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the records to this file")
    return parser


def write_records(options: argparse.Namespace, records: object) -> None:
    """Writes them where `--json` asks for it."""
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n")


def read_options(
    description: str | None, names: Sequence[str], *, quick_names: Sequence[str]
) -> argparse.Namespace:
    """Arguments of the command line, with `workloads` as a list and `rounds` chosen. Leaves without native kernels."""
    parser = make_parser(description)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, and no workload above 2 GB"
    )
    parser.add_argument("--workloads", default=None, help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument(
        "--rounds", type=int, default=None, help="times all batches are run (default 8, quick 2)"
    )
    options = parser.parse_args()
    options.workloads = (
        options.workloads.split(",")
        if options.workloads
        else quick_names
        if options.quick
        else names
    )
    unknown = set(options.workloads) - set(names)
    if unknown:
        parser.error(f"unknown workloads {sorted(unknown)}; choose from {', '.join(names)}")
    options.rounds = options.rounds or (2 if options.quick else 8)
    check_native()
    return options


def check_native() -> None:
    """Leaves the program where native kernels are missing: nobody wants the times of the reference."""
    reason = native.unavailable_because()
    if reason is not None:
        sys.exit(f"rsembed's native kernels are not available: {reason}")
