"""Times lookups and fused training steps on a GPU: our kernels beside plain XLA, torch and FBGEMM on one card.

    python benchmarks/gpu.py [--cases A,B,C,D,T] [--rounds 10] [--tiny] [--json PATH]

Cases A to D are the workloads of `tbe.py` at ten times the batch: A 8 tables of 100k rows of 64 float32, batch 20480,
20 ids a bag; B 26 x 100k x 128, batch 10240, 1 id; C one table of 10M x 64, batch 40960, 20 ids, all uniform; D is A
with Zipf 1.15. T is that of FBGEMM's own benchmark: 32 tables of 1M rows of 128, batch 8192, 20 ids, 16 GB.

Those in JAX keep the tables of a case in one array, one below the other, as the library does with tables of equal
rows, and donate it:

* ours: `rsembed.kernels.gpu`, a lookup and a step in one compiled program each.
* reference: `rsembed.kernels.reference`, what a GPU gets by default.
* XLA: `jnp.take` and a sum over the bag; `table.at[ids].add` for SGD. Only bags of equal size can be written so.
* torch: `EmbeddingBag(mode="sum", sparse=True)` with `optim.SGD` or `optim.Adagrad`, if torch can be imported. Its
  Adagrad is elementwise and stands in for the row-wise one: its times are shown, its numbers not compared.
* FBGEMM: `SplitTableBatchedEmbeddingBagsCodegen` on the device, if `fbgemm_gpu` can be imported and there is a GPU.

It needs an NVIDIA GPU of 20 GB for case T, and JAX's CUDA plugin. Before it is timed, every contestant takes two steps
and must then agree with the reference on a lookup. A time is that of several calls, one after the other without waiting
in between, over four distinct batches. GB/s counts as FBGEMM does: every looked-up row and every output once for a
lookup, three times for a step; `of copy` is the share of what a large copy reads and writes on the same card in the
same run.

Without a GPU, or with `--tiny`, batches are tiny; without a GPU our kernels also run in Pallas' interpreter. Such
numbers check that this script works and that all contestants agree. They say nothing about speed.
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
LEARNING_RATE, EPSILON, INITIAL_WEIGHT = 0.01, 1e-8, 0.01
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
    """A workload and how its ids are distributed."""

    workload: Workload
    law: str


class Contestant(NamedTuple):
    """Calls take the number of a batch and return at once; `wait` returns when a result is there."""

    lookup: Callable[[int], Any]
    step: Callable[[int], Any]
    wait: Callable[[Any], Any]


def cases(*, tiny: bool) -> dict[str, Case]:
    """The workloads by letter; tiny ones keep the numbers of tables above one, and row lengths."""
    tens = [dataclasses.replace(own, batch_size=10 * own.batch_size) for own in timing.WORKLOADS]
    every = [*tens, tens[0], LARGE]
    if tiny:
        few = {"vocabulary_size": 50, "batch_size": 4}
        every = [dataclasses.replace(w, num_tables=min(2, w.num_tables), **few) for w in every]
    laws = ["uniform"] * 3 + ["zipf", "uniform"]
    return {letter: Case(*own) for letter, *own in zip("ABCDT", every, laws, strict=True)}


class Inputs(NamedTuple):
    """For all contestants: ids `[batches, tables, batch, ids]`, gradient of the outputs `[tables, batch, dim]`."""

    ids: np.ndarray
    gradients: np.ndarray


def draw(case: Case) -> Inputs:
    """The same for every contestant and every run."""
    own = case.workload
    shape = (NUM_BATCHES, own.num_tables, own.batch_size, own.ids_per_sample)
    ids = timing.ids_by_law(case.law, own.vocabulary_size, shape, 3, exponent=1.15)
    gradients = (own.num_tables, own.batch_size, own.embedding_dim)
    return Inputs(ids, np.random.default_rng(7).standard_normal(gradients, dtype=np.float32))


def times(
    run: Callable[[int], Any], wait: Callable[[Any], Any], num_rounds: int
) -> tuple[float, float]:
    """Median and best seconds of a call, over rounds of `2 * NUM_BATCHES` calls; one more is not counted."""
    seconds, num_calls = [], 2 * NUM_BATCHES
    for turn in range(num_rounds + 1):
        start = time.perf_counter()
        for k in range(num_calls if turn else 2):
            result = run(k % NUM_BATCHES)
        wait(result)
        if turn:
            seconds.append((time.perf_counter() - start) / num_calls)
    return statistics.median(seconds), min(seconds)


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second that the device reads and writes together in a large copy, the best of some."""
    source, best = jnp.zeros(num_bytes // 4, jnp.float32), math.inf
    copy = jax.jit(lambda x: x + 1.0)
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(4):
            result = copy(source)
        result.block_until_ready()
        best = min(best, (time.perf_counter() - start) / 4)
    return 2 * source.nbytes / best


class Stacked(NamedTuple):
    """The inputs for tables in one array: rows `[tables * batch * ids]` of each batch, gradient, and the array."""

    rows: list[jax.Array]
    gradient: jax.Array
    table: jax.Array


def stacked(workload: Workload, inputs: Inputs) -> Stacked:
    """Bags of the first table first; weights are equal, as those of the others."""
    first_rows = (np.arange(workload.num_tables, dtype=np.int32) * workload.vocabulary_size)[
        :, None, None
    ]
    gradient = jnp.asarray(inputs.gradients.reshape(-1, workload.embedding_dim))
    table = jnp.full((workload.num_rows, workload.embedding_dim), INITIAL_WEIGHT)
    return Stacked(
        [jnp.asarray((ids + first_rows).reshape(-1)) for ids in inputs.ids], gradient, table
    )


def kernel_contestant(
    module: Any, workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec
) -> Contestant:
    """A lookup of all bags, and a step with donated state, by an implementation of the kernels."""
    rows, gradient, table = stacked(workload, inputs)
    num_bags, hyper = workload.num_tables * workload.batch_size, rule.get_hyperparameters(0)
    bounds = jnp.arange(num_bags + 1, dtype=jnp.int32) * workload.ids_per_sample
    state = {"table": table, "slots": rule.init_slots(table)}
    del table

    # Bounds are an argument: XLA works out what depends on a constant alone, for a minute, when it compiles for a GPU.
    calls = [Call.of([IdList(own, bounds)], ["sum"]) for own in rows]

    @jax.jit
    def lookup(table: Any, call: Call) -> Any:
        return module.lookup((table,), call)[0]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table: Any, slots: Any, call: Call, gradient: Any) -> Any:
        gradients = CallGradients(call, (gradient,), (workload.embedding_dim,))
        return module.update(table, slots, gradients, Step(hyper, rule))

    def train(k: int) -> Any:
        lookup(state["table"], calls[k])  # the loss would read its outputs
        state["table"], state["slots"] = step(state["table"], state["slots"], calls[k], gradient)
        return state["table"]

    return Contestant(lambda k: lookup(state["table"], calls[k]), train, jax.block_until_ready)


def xla_contestant(workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec) -> Contestant | None:
    """What one would write in JAX without a library; none for a rule with state."""
    if not isinstance(rule, ro.SGD):
        return None
    rows, gradient, table = stacked(workload, inputs)
    rows = [own.reshape(-1, workload.ids_per_sample) for own in rows]
    state = {"table": table}
    del table

    @jax.jit
    def lookup(table: Any, rows: Any) -> Any:
        return jnp.take(table, rows, axis=0).sum(axis=1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table: Any, rows: Any, gradient: Any) -> Any:
        of_entries = jnp.broadcast_to(gradient[:, None], (*rows.shape, gradient.shape[1]))
        return table.at[rows].add(-LEARNING_RATE * of_entries)

    def train(k: int) -> Any:
        lookup(state["table"], rows[k])
        state["table"] = step(state["table"], rows[k], gradient)
        return state["table"]

    return Contestant(lambda k: lookup(state["table"], rows[k]), train, jax.block_until_ready)


def torch_contestant(workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec) -> Contestant:
    """EmbeddingBags with sparse gradients, on torch's device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    bags = timing.torch_bags(workload, INITIAL_WEIGHT, device)
    weights = [bag.weight for bag in bags]
    ids = [
        [torch.from_numpy(own.astype(np.int64)).to(device) for own in batch] for batch in inputs.ids
    ]
    gradients = [torch.from_numpy(own).to(device) for own in inputs.gradients]
    of_torch = torch.optim.SGD if isinstance(rule, ro.SGD) else torch.optim.Adagrad
    runs = timing.torch_runs(bags, ids, gradients, {"step": of_torch(weights, lr=LEARNING_RATE)})
    return Contestant(
        runs["lookup"],
        runs["step"],
        lambda _: torch.cuda.synchronize() if device == "cuda" else None,
    )


def fbgemm_contestant(
    workload: Workload, inputs: Inputs, rule: ro.OptimizerSpec
) -> Contestant | None:
    """FBGEMM's module, whose output has the features side by side; none without a GPU."""
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
    """Outputs on the host, features side by side, whether they come so, as a list or one below the other."""
    if isinstance(outputs, jax.Array):
        by_table = np.asarray(outputs).reshape(
            workload.num_tables, workload.batch_size, workload.embedding_dim
        )
        return np.concatenate(by_table, axis=1)
    parts = outputs if isinstance(outputs, list) else [outputs]
    return np.concatenate([np.asarray(part.cpu()) for part in parts], axis=1)


@functools.cache
def makers() -> dict[str, Callable[..., Contestant | None]]:
    """Those who take part, the reference first, and who is missing printed."""
    found: dict[str, Callable[..., Contestant | None]] = {
        "reference": functools.partial(kernel_contestant, reference),
        "ours": functools.partial(kernel_contestant, gpu),
        "XLA": xla_contestant,
    }
    for name, module, make in (
        ("torch", "torch", torch_contestant),
        ("FBGEMM", "fbgemm_gpu", fbgemm_contestant),
    ):
        try:
            __import__(module)
            found[name] = make
        except (
            ImportError,
            OSError,
        ) as error:  # a wheel for another torch fails at an undefined symbol
            print(f"without {name}: {error}")
    return found


def check_agreement(output: np.ndarray, expected: np.ndarray, who: str) -> float:
    """The mean difference as a share of the mean output.

    Raises: AssertionError: it is above 1e-4.
    """
    # In the mean: where the gradients of a row cancel, their order decides the sign that Adagrad steps with.
    error = float(np.abs(output - expected).mean() / np.abs(expected).mean())
    assert error < 1e-4, (
        f"{who} and the reference differ by {error:.1e} of the mean output after two steps"
    )
    return error


def measure(letter: str, case: Case, num_rounds: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """One record per rule, contestant and kind of run, as soon as it is there.

    A contestant that fails, or whose numbers differ, leaves a record with its `error` instead of times.
    """
    workload, inputs = case.workload, draw(case)
    num_ids = workload.num_tables * workload.batch_size * workload.ids_per_sample
    passed_bytes = (
        4 * workload.embedding_dim * (num_ids + workload.num_tables * workload.batch_size)
    )
    for rule_name, rule in RULES.items():
        expected = None
        for who, make in makers().items():
            about = {"case": letter, "ids": case.law, "who": who}
            try:
                contestant = make(workload, inputs, rule)
                if contestant is None:
                    continue
                for _ in range(2):
                    contestant.wait(contestant.step(0))
                output, is_same_rule = (
                    as_array(contestant.lookup(0), workload),
                    who != "torch" or rule_name == "SGD",
                )
                expected = output if expected is None else expected
                error = check_agreement(output, expected, who) if is_same_rule else None
                for kind in ("lookup", "step") if rule_name == "SGD" else ("step",):
                    median, best = times(getattr(contestant, kind), contestant.wait, num_rounds)
                    speed = passed_bytes * (1 if kind == "lookup" else 3) / median
                    yield about | {
                        "what": kind if kind == "lookup" else f"step, {rule_name}",
                        "milliseconds": 1e3 * median,
                        "best_milliseconds": 1e3 * best,
                        "ns_per_row": 1e9 * median / num_ids,
                        "gb_per_second": speed / 1e9,
                        "share_of_copy": speed / bandwidth,
                        "difference": error,
                    }
            except (
                RuntimeError,
                AssertionError,
                NotImplementedError,
            ) as problem:  # out of memory is a RuntimeError
                yield about | {
                    "what": f"step, {rule_name}",
                    "error": f"{type(problem).__name__}: {problem}"[:500],
                }
            contestant = None
            gc.collect()


def format_record(record: dict[str, Any]) -> str:
    """A row of the printed table."""
    start = f"{record['case']:<3}{record['ids']:<9}{record['what']:<24}{record['who']:<11}"
    if "error" in record:
        return start + record["error"].splitlines()[0][:80]
    return start + (
        f"{record['milliseconds']:>10.3f} ({record['best_milliseconds']:.3f}) ms{record['ns_per_row']:>10.3f} ns/row"
        f"{record['gb_per_second']:>10.1f} GB/s{100 * record['share_of_copy']:>7.1f} % of copy"
    )


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", default="A,B,C,D,T", help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of eight calls each")
    parser.add_argument("--tiny", action="store_true", help="sizes that only check the script")
    options = parser.parse_args()
    reason = gpu.unavailable_because()
    tiny = options.tiny or reason is not None
    if reason:
        print(f"No measurement: {reason}.")
        print("The kernels run in Pallas' interpreter at tiny sizes. Speed on GPUs is unproven.")
    device, known = jax.devices()[0], cases(tiny=tiny)
    if unknown := set(options.cases.split(",")) - set(known):
        parser.error(f"unknown cases {sorted(unknown)}; choose from {', '.join(known)}")
    bandwidth = copy_bandwidth(1 << 24 if tiny else 1 << 30)
    print(
        f"jax {jax.__version__} on {device.device_kind}; copy bandwidth {bandwidth / 1e9:.0f} GB/s"
    )
    records = []
    for letter in options.cases.split(","):
        for record in measure(letter, known[letter], 1 if tiny else options.rounds, bandwidth):
            print(format_record(record), flush=True)
            records.append(record)
    about = {
        "device": device.device_kind,
        "is_measurement": not tiny,
        "copy_bytes_per_second": bandwidth,
    }
    write_records(options, {**about, "records": records})
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
