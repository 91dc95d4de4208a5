"""Times lookups and training steps of our kernels on a GPU beside plain XLA, torch and FBGEMM.

    python benchmarks/gpu.py [--cases A,B,C,D,T] [--rounds 10] [--tiny] [--json PATH]

Cases A to D are the workloads of `tbe.py` with ten times the batch:

* A: 8 tables of 100k rows and 64 columns, batch 20480, 20 uniform ids per bag
* B: 26 tables of 100k rows and 128 columns, batch 10240, 1 uniform id per bag
* C: one table of 10M rows and 64 columns, batch 40960, 20 uniform ids per bag
* D: A with ids by a Zipf law with exponent 1.15
* T: the workload of FBGEMM's benchmark: 32 tables of 1M rows and 128 columns, batch 8192, 20 uniform
  ids per bag, 16 GB

The contestants in JAX have all tables of a case in one array, one below the other, as the library
stores tables with equal dims. Steps donate this array.

* ours: `rsembed.kernels.gpu`, with one compiled program for a lookup and one for a step.
* reference: `rsembed.kernels.reference` in the same programs.
* XLA: `jnp.take` and a sum over each bag, and `table.at[ids].add` for SGD. All bags have equal sizes,
  which this form needs.
* torch: `EmbeddingBag(mode="sum", sparse=True)` with `optim.SGD` or `optim.Adagrad`, if torch can be
  imported. Its Adagrad is elementwise, so for row-wise Adagrad only its times are shown, and its
  numbers are not compared.
* FBGEMM: `SplitTableBatchedEmbeddingBagsCodegen` on the device, if there is a GPU and `fbgemm_gpu` can
  be imported.

Case T needs an NVIDIA GPU with 20 GB. Before a contestant is timed, it takes two steps, and its next
lookup must agree with the lookup of the reference. A time is the mean of several calls that do not
wait for each other, with four distinct batches. GB/s count as FBGEMM does: each looked-up row and each
output once for a lookup, three times for a step. `of copy` is the share of the bandwidth of a large
copy in the same run.

Batches are tiny with `--tiny` and without a GPU. Without a GPU, our kernels run in Pallas'
interpreter. Such a run checks that the script works and that all contestants agree, but it says
nothing about speed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import timing
from timing import Workload, make_parser, write_records

import rsembed.optimizers as ro
from rsembed.kernels import gpu, reference
from rsembed.kernels.contract import Call, CallGradients, IdList, Step

NUM_BATCHES = 4
LEARNING_RATE = 0.01
EPSILON = 1e-8
INITIAL_WEIGHT = 0.01
RULES = {
    "SGD": ro.SGD(LEARNING_RATE),
    "row-wise Adagrad": ro.RowWiseAdagrad(LEARNING_RATE, epsilon=EPSILON),
}
LARGE = Workload(
    name="32x1M",
    num_tables=32,
    vocabulary_size=10**6,
    embedding_dim=128,
    batch_size=8192,
    ids_per_sample=20,
)


class Case(NamedTuple):
    """A workload, and the law of its ids."""

    workload: Workload
    law: str


class Contestant(NamedTuple):
    """Runs that take the number of a batch and do not wait, and a function that waits for a result."""

    lookup: Callable[[int], Any]
    step: Callable[[int], Any]
    wait: Callable[[Any], Any]


def cases(*, tiny: bool) -> dict[str, Case]:
    """Cases by letter. Tiny cases keep the dims, and have at most two tables."""
    workloads = []
    for workload in (*timing.WORKLOADS, timing.WORKLOADS[0]):
        workloads.append(dataclasses.replace(workload, batch_size=10 * workload.batch_size))
    workloads.append(LARGE)
    laws = ["uniform", "uniform", "uniform", "zipf", "uniform"]
    by_letter = {}
    for letter, workload, law in zip("ABCDT", workloads, laws, strict=True):
        if tiny:
            num_tables = min(2, workload.num_tables)
            workload = dataclasses.replace(
                workload, num_tables=num_tables, vocabulary_size=50, batch_size=4
            )
        by_letter[letter] = Case(workload, law)
    return by_letter


class Inputs(NamedTuple):
    """Inputs of all contestants.

    Attributes:
      ids: `[batches, tables, batch, ids]`.
      gradients: gradients of the outputs, `[tables, batch, dim]`.
    """

    ids: np.ndarray
    gradients: np.ndarray


def draw(case: Case) -> Inputs:
    """Inputs of a case, equal in every run."""
    num_tables = case.workload.num_tables
    batch_size = case.workload.batch_size
    shape = (NUM_BATCHES, num_tables, batch_size, case.workload.ids_per_sample)
    ids = timing.ids_by_law(case.law, case.workload.vocabulary_size, shape, 3, exponent=1.15)
    generator = np.random.default_rng(7)
    shape_of_outputs = (num_tables, batch_size, case.workload.embedding_dim)
    return Inputs(ids, generator.standard_normal(shape_of_outputs, dtype=np.float32))


def times(
    run: Callable[[int], Any], wait: Callable[[Any], Any], num_rounds: int
) -> tuple[float, float]:
    """Median and best seconds of a call, over rounds of `2 * NUM_BATCHES` calls.

    Two calls before the first round are not timed.
    """
    for k in range(2):
        wait(run(k))
    num_calls = 2 * NUM_BATCHES
    seconds = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        for k in range(num_calls):
            result = run(k % NUM_BATCHES)
        wait(result)
        seconds.append((time.perf_counter() - start) / num_calls)
    return statistics.median(seconds), min(seconds)


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second that the device reads and writes in a large copy, the best of eight rounds."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda array: array + 1.0)
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(4):
            result = copy(source)
        result.block_until_ready()
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * source.nbytes / best


class Stacked(NamedTuple):
    """Inputs for tables in one array.

    Attributes:
      rows: row numbers `[tables * batch * ids]` of each batch.
      gradient: gradient of all bags, `[tables * batch, dim]`.
      table: the array.
    """

    rows: list[jax.Array]
    gradient: jax.Array
    table: jax.Array


def stacked(workload: Workload, inputs: Inputs) -> Stacked:
    """Inputs for tables in one array, with the bags of the first table first."""
    first_rows = np.arange(workload.num_tables, dtype=np.int32) * workload.vocabulary_size
    rows = []
    for ids in inputs.ids:
        rows.append(jnp.asarray((ids + first_rows[:, None, None]).reshape(-1)))
    gradient = jnp.asarray(inputs.gradients.reshape(-1, workload.embedding_dim))
    table = jnp.full((workload.num_rows, workload.embedding_dim), INITIAL_WEIGHT)
    return Stacked(rows, gradient, table)


def kernel_contestant(
    module: Any, workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec
) -> Contestant:
    """Lookups of all bags, and steps with donated state, by an implementation of the kernels."""
    rows, gradient, table = stacked(workload, inputs)
    slots = rule.init_slots(table)
    num_bags = workload.num_tables * workload.batch_size
    hyper = rule.get_hyperparameters(0)
    # Offsets are an argument of the program. XLA for GPUs computes everything that depends only on
    # constants while it compiles, and with constant offsets this takes a minute.
    offsets = jnp.arange(num_bags + 1, dtype=jnp.int32) * workload.ids_per_sample
    calls = [Call.of([IdList(rows_of_batch, offsets)], ["sum"]) for rows_of_batch in rows]

    @jax.jit
    def lookup(table: Any, call: Call) -> Any:
        return module.lookup((table,), call)[0]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table: Any, slots: Any, call: Call, gradient: Any) -> Any:
        gradients = CallGradients(call, (gradient,), (workload.embedding_dim,))
        return module.update(table, slots, gradients, Step(hyper, rule))

    def run_lookup(k: int) -> Any:
        return lookup(table, calls[k])

    def run_step(k: int) -> Any:
        nonlocal table, slots
        # In training, the loss reads the outputs of the lookup.
        lookup(table, calls[k])
        table, slots = step(table, slots, calls[k], gradient)
        return table

    return Contestant(run_lookup, run_step, jax.block_until_ready)


def xla_contestant(workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec) -> Contestant | None:
    """Plain JAX, for SGD only."""
    if not isinstance(rule, ro.SGD):
        return None
    flat_rows, gradient, table = stacked(workload, inputs)
    bags = [rows.reshape(-1, workload.ids_per_sample) for rows in flat_rows]

    @jax.jit
    def lookup(table: Any, rows: Any) -> Any:
        return jnp.take(table, rows, axis=0).sum(axis=1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table: Any, rows: Any, gradient: Any) -> Any:
        gradients = jnp.broadcast_to(gradient[:, None], (*rows.shape, gradient.shape[1]))
        return table.at[rows].add(-LEARNING_RATE * gradients)

    def run_lookup(k: int) -> Any:
        return lookup(table, bags[k])

    def run_step(k: int) -> Any:
        nonlocal table
        lookup(table, bags[k])
        table = step(table, bags[k], gradient)
        return table

    return Contestant(run_lookup, run_step, jax.block_until_ready)


def torch_contestant(workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec) -> Contestant:
    """`EmbeddingBag`s with sparse gradients, on a GPU if torch has one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    bags = timing.torch_bags(workload, INITIAL_WEIGHT, device)
    weights = [bag.weight for bag in bags]
    ids = []
    for batch in inputs.ids:
        # A bag takes one row of this array, the ids of its table.
        ids.append(torch.from_numpy(batch.astype(np.int64)).to(device))
    gradients = [torch.from_numpy(gradient).to(device) for gradient in inputs.gradients]
    optimizer: Any = torch.optim.Adagrad(weights, lr=LEARNING_RATE)
    if isinstance(rule, ro.SGD):
        optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)
    runs = timing.torch_runs(bags, ids, gradients, {"step": optimizer})

    def wait(result: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return Contestant(runs["lookup"], runs["step"], wait)


def fbgemm_contestant(
    workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec
) -> Contestant | None:
    """FBGEMM's module on a GPU. Its output has the features side by side."""
    import torch
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )

    if not torch.cuda.is_available():
        return None
    shape = (workload.vocabulary_size, workload.embedding_dim)
    name = "EXACT_SGD" if isinstance(rule, ro.SGD) else "EXACT_ROWWISE_ADAGRAD"
    module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(*shape, EmbeddingLocation.DEVICE, fbgemm.ComputeDevice.CUDA)] * workload.num_tables,
        optimizer=fbgemm.OptimType[name],
        learning_rate=LEARNING_RATE,
        eps=EPSILON,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for table in module.split_embedding_weights():
        table.fill_(INITIAL_WEIGHT)
    num_bags = workload.num_tables * workload.batch_size
    offsets = torch.arange(num_bags + 1, device="cuda") * workload.ids_per_sample
    ids = [torch.from_numpy(batch.reshape(-1).astype(np.int64)).cuda() for batch in inputs.ids]
    gradient = torch.from_numpy(np.concatenate(inputs.gradients, axis=1)).cuda()

    def lookup(k: int) -> Any:
        with torch.no_grad():
            return module(ids[k], offsets)

    def train(k: int) -> Any:
        return module(ids[k], offsets).backward(gradient)

    return Contestant(lookup, train, lambda _: torch.cuda.synchronize())


def as_array(outputs: Any, workload: Workload) -> np.ndarray:
    """Outputs on the host, with the features side by side."""
    if isinstance(outputs, jax.Array):
        # Contestants in JAX have the features one below the other.
        shape = (workload.num_tables, workload.batch_size, workload.embedding_dim)
        return np.concatenate(np.asarray(outputs).reshape(shape), axis=1)
    if isinstance(outputs, list):
        # torch has a list of features.
        return np.concatenate([np.asarray(output.cpu()) for output in outputs], axis=1)
    return np.asarray(outputs.cpu())


@functools.cache
def makers() -> dict[str, Callable[..., Contestant | None]]:
    """Functions that make the contestants, the reference first. Prints which ones are missing."""
    makers: dict[str, Callable[..., Contestant | None]] = {
        "reference": functools.partial(kernel_contestant, reference),
        "ours": functools.partial(kernel_contestant, gpu),
        "XLA": xla_contestant,
    }
    try:
        import torch  # noqa: F401

        makers["torch"] = torch_contestant
        import fbgemm_gpu  # noqa: F401

        makers["FBGEMM"] = fbgemm_contestant
    # A wheel of FBGEMM for another version of torch lacks a symbol, which is an OSError.
    except (ImportError, OSError) as error:
        print(f"contestants are missing: {error}")
    return makers


def check_agreement(output: np.ndarray, expected: np.ndarray, who: str) -> float:
    """Mean difference of the outputs relative to the mean output.

    Raises: AssertionError: the difference is above 1e-4.
    """
    # Single values may differ: if the gradients of a row cancel out, their order decides the sign of
    # the sum, and so of Adagrad's step. So the mean is compared.
    error = float(np.abs(output - expected).mean() / np.abs(expected).mean())
    assert error < 1e-4, (
        f"{who} and the reference differ by {error:.1e} of the mean output after two steps"
    )
    return error


def measure(letter: str, case: Case, num_rounds: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Records of a case: one for each rule, contestant and kind of run, as soon as it is measured.

    If a contestant fails, or its numbers differ, its record has an `error` in place of times.
    """
    workload = case.workload
    inputs = draw(case)
    num_bags = workload.num_tables * workload.batch_size
    num_ids = num_bags * workload.ids_per_sample
    lookup_bytes = 4 * workload.embedding_dim * (num_ids + num_bags)
    for rule_name, rule in RULES.items():
        kinds = {"step": f"step, {rule_name}"}
        if rule_name == "SGD":
            # Lookups do not depend on the rule, so they are timed once.
            kinds = {"lookup": "lookup"} | kinds
        expected = None
        for who, make in makers().items():
            record = {"case": letter, "ids": case.law, "who": who}
            contestant = None
            try:
                contestant = make(workload, inputs, rule)
                if contestant is None:
                    continue
                for _ in range(2):
                    contestant.wait(contestant.step(0))
                output = as_array(contestant.lookup(0), workload)
                if expected is None:
                    expected = output
                error = None
                if who != "torch" or rule_name == "SGD":
                    error = check_agreement(output, expected, who)
                for kind, what in kinds.items():
                    run = getattr(contestant, kind)
                    median, best = times(run, contestant.wait, num_rounds)
                    num_passes = 1 if kind == "lookup" else 3
                    speed = num_passes * lookup_bytes / median
                    yield record | {
                        "what": what,
                        "milliseconds": 1e3 * median,
                        "best_milliseconds": 1e3 * best,
                        "ns_per_row": 1e9 * median / num_ids,
                        "gb_per_second": speed / 1e9,
                        "share_of_copy": speed / bandwidth,
                        "difference": error,
                    }
            # A contestant that runs out of memory raises a RuntimeError.
            except (RuntimeError, AssertionError, NotImplementedError) as problem:
                text = f"{type(problem).__name__}: {problem}"[:500]
                yield record | {"what": f"step, {rule_name}", "error": text}
            # The tables of this contestant are freed before those of the next one are allocated.
            contestant = None
            gc.collect()


def format_record(record: dict[str, Any]) -> str:
    """A row of the printed table."""
    run = f"{record['case']:<3}{record['ids']:<9}{record['what']:<24}{record['who']:<11}"
    if "error" in record:
        return run + record["error"].splitlines()[0][:80]
    times = f"{record['milliseconds']:>10.3f} ({record['best_milliseconds']:.3f}) ms"
    speed = f"{record['ns_per_row']:>10.3f} ns/row{record['gb_per_second']:>10.1f} GB/s"
    return f"{run}{times}{speed}{100 * record['share_of_copy']:>7.1f} % of copy"


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", default="A,B,C,D,T", help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of eight calls each")
    parser.add_argument("--tiny", action="store_true", help="sizes that only check the script")
    options = parser.parse_args()
    reason = gpu.unavailable_because()
    tiny = options.tiny or reason is not None
    if reason:
        print(f"No measurement: {reason}.")
        print(
            "The kernels run in Pallas' interpreter at tiny sizes, which says nothing about speed."
        )
    known = cases(tiny=tiny)
    letters = options.cases.split(",")
    unknown = set(letters) - set(known)
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; choose from {', '.join(known)}")
    num_rounds = options.rounds
    copied_bytes = 1 << 30
    if tiny:
        num_rounds = 1
        copied_bytes = 1 << 24
    bandwidth = copy_bandwidth(copied_bytes)
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device}; copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    records = []
    for letter in letters:
        for record in measure(letter, known[letter], num_rounds, bandwidth):
            print(format_record(record), flush=True)
            records.append(record)
    run = {"device": device, "is_measurement": not tiny, "copy_bytes_per_second": bandwidth}
    write_records(options, run | {"records": records})
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
