"""Times table-batched lookups and training steps beside FBGEMM and torch on CPU cores, in one run.

    python benchmarks/tbe.py [--quick] [--workloads A,B,C,D] [--json PATH]

All contestants get equal tables, the same ids and the same gradient of their outputs. There is no
loss and no dense layer, and bounds checks are off. The contestants take turns with eight distinct
batches:

* ours, eager: `TableBatchedEmbeddingBags` called with arrays of numpy, as a user of PyTorch would. A
  step is `vjp` and `backward`.
* ours, jit: `rsembed.tbe.functional` in one compiled step with donated state. Ids are arrays of JAX.
* FBGEMM: `SplitTableBatchedEmbeddingBagsCodegen` on the host, if `fbgemm_gpu` can be imported. Its
  CPU kernels use one thread, and do not have Adam.
* torch: an `nn.EmbeddingBag(mode="sum", sparse=True)` for each table with `optim.SGD`,
  `optim.Adagrad` or `optim.SparseAdam`. torch has no row-wise Adagrad, so the rows for row-wise
  Adagrad show its elementwise Adagrad.

Workloads, in float32:

* A: 8 tables of 100k rows and 64 columns, batch 2048, 20 uniform ids per bag
* B: 26 tables of 100k rows and 128 columns, batch 1024, 1 uniform id per bag
* C: one table of 10M rows and 64 columns, batch 4096, 20 uniform ids per bag
* D: A with ids by a Zipf law with exponent 1.15

The table shows medians in milliseconds, with the best times in brackets, and how many times as long
the fastest peer took (median by median, best by best). `unique` is the number of distinct rows of a
batch over its number of ids. GB/s are for our eager median, as FBGEMM counts them: a lookup moves
each looked-up row and each output once, a step three times. The last column is the time that the
memory of this machine takes for the bytes that every contestant must read and write. A kernel can be
faster only if rows are in a processor's cache.

Before they are timed, all contestants take two steps, and their next lookups must agree. If they need
more than 14 GiB together (C with elementwise state), they run one after the other.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import timing
from timing import Run, Times, Workload

from rsembed.tbe import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    TableBatchedEmbeddingBags,
    functional,
)

CASES = {
    "A": (timing.WORKLOADS[0], "uniform"),
    "B": (timing.WORKLOADS[1], "uniform"),
    "C": (timing.WORKLOADS[2], "uniform"),
    "D": (timing.WORKLOADS[0], "zipf"),
}
OPTIMIZERS = ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD", "ADAM")
# Numbers of optimizer state for each value of a table. Row-wise Adagrad has one number for each row.
STATE_NUMBERS = {
    "EXACT_SGD": 0,
    "EXACT_ROWWISE_ADAGRAD": 0,
    "EXACT_ADAGRAD": 1,
    "ADAM": 2,
}
LEARNING_RATE = 0.01
EPS = 1e-8
INITIAL_WEIGHT = 0.01
MAX_GIB = 14


class Batches(NamedTuple):
    """Inputs of all contestants: flat ids of each batch, offsets, and the gradient of the output."""

    indices: list[np.ndarray]
    offsets: np.ndarray
    gradient: np.ndarray


class Contestant(NamedTuple):
    """A lookup, and a step that returns the output of its lookup. Both wait for their results."""

    lookup: Run
    step: Run


def draw_batches(workload: Workload, law: str) -> Batches:
    """Batches with a fixed number of ids per bag."""
    indices = [ids.reshape(-1) for ids in timing.draw_ids(workload, law, seed=3)]
    num_bags = workload.num_tables * workload.batch_size
    offsets = (np.arange(num_bags + 1) * workload.ids_per_sample).astype(np.int32)
    shape = (workload.batch_size, workload.num_tables * workload.embedding_dim)
    gradient = np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
    return Batches(indices, offsets, gradient)


def our_contestants(workload: Workload, batches: Batches, optimizer: str) -> dict[str, Contestant]:
    """The module called eagerly, and a compiled step. They share the tables to save memory."""
    shape = (workload.vocabulary_size, workload.embedding_dim)
    tbe = TableBatchedEmbeddingBags(
        [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU)] * workload.num_tables,
        optimizer=OptimType[optimizer],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        bounds_check_mode=BoundsCheckMode.NONE,
    )

    # All contestants have the same weights. Tables are filled in place, because they are allocated on
    # huge pages if the system has them.
    @functools.partial(jax.jit, donate_argnums=0)
    def fill(table):
        return 0.0 * table + INITIAL_WEIGHT

    state = tbe.state.get_value()
    for name, (weights, *slots) in state.arrays.items():
        state = state.with_arrays(name, [fill(weights), *slots])
    tbe.state.set_value(state)
    plan = tbe.plan
    gradient = jnp.asarray(batches.gradient)
    on_device = [jnp.asarray(ids) for ids in batches.indices]
    offsets = jnp.asarray(batches.offsets)

    def eager_lookup(k: int) -> object:
        return tbe(batches.indices[k], batches.offsets).block_until_ready()

    def eager_step(k: int) -> object:
        output, backward = tbe.vjp(batches.indices[k], batches.offsets)
        backward(gradient)
        jax.block_until_ready(tbe.state.get_value())
        return output.block_until_ready()

    @jax.jit
    def lookup(state, indices):
        return functional.lookup(plan, state, plan.batch(indices, offsets, None))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, indices):
        batch = plan.batch(indices, offsets, None)
        output = functional.lookup(plan, state, batch)
        # In training, the gradient depends on the output, so XLA reads tables before it updates them.
        # Here the learning rates do. Otherwise XLA might update tables first, and would copy them.
        rates = functional.learning_rates(plan, state) + 0.0 * output[0, 0]
        return output, functional.backward(plan, state, batch, gradient, rates)[0]

    def compiled_lookup(k: int) -> object:
        return lookup(tbe.state.get_value(), on_device[k]).block_until_ready()

    def compiled_step(k: int) -> object:
        output, state = jax.block_until_ready(step(tbe.state.get_value(), on_device[k]))
        tbe.state.set_value(state)
        return output

    return {
        "ours": Contestant(eager_lookup, eager_step),
        "ours, jit": Contestant(compiled_lookup, compiled_step),
    }


def fbgemm_contestant(
    workload: Workload, batches: Batches, optimizer: str
) -> dict[str, Contestant]:
    """FBGEMM's module. There is none for Adam."""
    if optimizer == "ADAM":
        return {}
    import torch
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )

    shape = (workload.vocabulary_size, workload.embedding_dim)
    tbe = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(*shape, EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)] * workload.num_tables,
        optimizer=fbgemm.OptimType[optimizer],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for table in tbe.split_embedding_weights():
        table.fill_(INITIAL_WEIGHT)
    indices = [torch.from_numpy(ids.astype(np.int64)) for ids in batches.indices]
    offsets = torch.from_numpy(batches.offsets.astype(np.int64))
    gradient = torch.from_numpy(batches.gradient)

    def lookup(k: int) -> object:
        with torch.no_grad():
            return tbe(indices[k], offsets)

    def step(k: int) -> object:
        output = tbe(indices[k], offsets)
        output.backward(gradient)
        return output.detach()

    return {"FBGEMM": Contestant(lookup, step)}


def torch_contestant(workload: Workload, batches: Batches, optimizer: str) -> dict[str, Contestant]:
    """EmbeddingBags with sparse gradients."""
    import torch

    bags = timing.torch_bags(workload, INITIAL_WEIGHT)
    weights = [bag.weight for bag in bags]
    if optimizer == "EXACT_SGD":
        rule: Any = torch.optim.SGD(weights, lr=LEARNING_RATE)
    elif optimizer == "ADAM":
        rule = torch.optim.SparseAdam(weights, lr=LEARNING_RATE, eps=EPS)
    else:
        rule = torch.optim.Adagrad(weights, lr=LEARNING_RATE, eps=EPS)
    shape = (workload.num_tables, workload.batch_size, workload.ids_per_sample)
    indices = []
    for ids in batches.indices:
        indices.append(torch.from_numpy(ids.astype(np.int64)).reshape(shape).unbind())
    gradients = []
    for gradient in torch.from_numpy(batches.gradient).chunk(workload.num_tables, dim=1):
        gradients.append(gradient.contiguous())
    return {"torch": Contestant(**timing.torch_runs(bags, indices, gradients, {"step": rule}))}


def as_array(output: object) -> np.ndarray:
    """The output with the features side by side. Some contestants return a list of features."""
    if isinstance(output, list):
        return np.concatenate(output, axis=1)
    return np.asarray(output)


def outputs_after_two_steps(contestants: dict[str, Contestant]) -> dict[str, np.ndarray]:
    """A lookup of each contestant after two steps of its tables."""
    for name, contestant in contestants.items():
        contestant.step(0)
        # Both contestants of ours have the same tables, so each takes one of the two steps.
        if not name.startswith("ours"):
            contestant.step(0)
    return {name: as_array(contestant.lookup(0)) for name, contestant in contestants.items()}


def check_agreement(outputs: dict[str, np.ndarray], optimizer: str) -> None:
    """Raises: AssertionError: contestants with the same optimizer have different outputs."""
    if optimizer == "EXACT_ROWWISE_ADAGRAD":
        # The Adagrad of torch is elementwise.
        outputs = {name: output for name, output in outputs.items() if name != "torch"}
    expected = outputs["ours"]
    for name, output in outputs.items():
        # Single values may differ: if the gradients of a row cancel out, their order decides the sign
        # of the sum, and so of Adagrad's step. So the mean is compared.
        error = float(np.abs(output - expected).mean() / np.abs(expected).mean())
        assert error < 1e-4, (
            f"{name} and ours differ by {error:.1e} of the mean output after {optimizer}"
        )


def race_all(
    makers: list[Callable[..., dict[str, Contestant]]],
    workload: Workload,
    batches: Batches,
    optimizer: str,
    num_rounds: int,
) -> dict[str, dict[str, Times]]:
    """Times by kind of run and by contestant."""
    table_bytes = 4 * workload.num_rows * workload.embedding_dim
    fits_together = len(makers) * table_bytes * (1 + STATE_NUMBERS[optimizer]) < MAX_GIB * 2**30
    kinds = ["step"]
    if optimizer == "EXACT_SGD":
        # Lookups do not depend on the optimizer, so they are timed once.
        kinds = ["lookup", "step"]
    groups = [[maker] for maker in makers]
    if fits_together:
        groups = [makers]
    times: dict[str, dict[str, Times]] = {kind: {} for kind in kinds}
    outputs: dict[str, np.ndarray] = {}
    for group in groups:
        contestants: dict[str, Contestant] = {}
        for make in group:
            contestants |= make(workload, batches, optimizer)
        outputs |= outputs_after_two_steps(contestants)
        for kind in kinds:
            runs = {name: getattr(contestants[name], kind) for name in contestants}
            times[kind] |= timing.race(runs, num_rounds)
        del contestants
        gc.collect()
    check_agreement(outputs, optimizer)
    return times


def measure(
    case: str, num_rounds: int, makers: list[Callable[..., dict[str, Contestant]]], bandwidth: float
) -> list[dict]:
    """Records of a workload: one for the lookup, and one for the step of each optimizer."""
    workload, law = CASES[case]
    batches = draw_batches(workload, law)
    ids_per_table = workload.batch_size * workload.ids_per_sample
    first_rows = np.arange(workload.num_tables) * workload.vocabulary_size
    num_ids = workload.num_tables * ids_per_table
    unique_ratios = []
    for ids in batches.indices:
        rows = ids + np.repeat(first_rows, ids_per_table)
        unique_ratios.append(np.unique(rows).size / num_ids)
    unique_ratio = float(np.mean(unique_ratios))
    num_bags = workload.num_tables * workload.batch_size
    lookup_bytes = 4 * workload.embedding_dim * (num_bags + num_ids)
    records = []
    for optimizer in OPTIMIZERS:
        state_bytes = 4 * workload.embedding_dim * STATE_NUMBERS[optimizer]
        if optimizer == "EXACT_ROWWISE_ADAGRAD":
            state_bytes = 4
        for kind, times in race_all(makers, workload, batches, optimizer, num_rounds).items():
            name = f"step {optimizer}"
            moved_bytes = 3 * lookup_bytes
            needed_bytes = timing.least_bytes(
                workload, unique_ratio * num_ids, state_bytes=state_bytes
            )
            if kind == "lookup":
                name = "forward"
                moved_bytes = lookup_bytes
                needed_bytes = timing.least_bytes(
                    workload, unique_ratio * num_ids, state_bytes=None
                )
            record = {
                "workload": case,
                "what": name,
                "unique_ratio": unique_ratio,
                "memory_milliseconds": 1e3 * needed_bytes / bandwidth,
                "milliseconds": {who: times[who]._asdict() for who in times},
                "gb_per_second": {who: moved_bytes / times[who].median / 1e6 for who in times},
            }
            records.append(record)
            print(format_record(record), flush=True)
    return records


def format_record(record: dict) -> str:
    """A row of the printed table."""
    times = {who: Times(**values) for who, values in record["milliseconds"].items()}
    peers = [times[who] for who in ("FBGEMM", "torch") if who in times]
    row = f"{record['workload']:<3}{record['what']:<27}"
    for who in ("ours", "ours, jit", "FBGEMM", "torch"):
        cell = "-"
        if who in times:
            cell = f"{times[who].median:.2f} ({times[who].best:.2f})"
        row += f" {cell:>16}"
    for who in ("ours", "ours, jit"):
        cell = "-"
        if peers:
            median_ratio = min(peer.median for peer in peers) / times[who].median
            best_ratio = min(peer.best for peer in peers) / times[who].best
            cell = f"{median_ratio:.2f} ({best_ratio:.2f})"
        row += f" {cell:>14}"
    speed = record["gb_per_second"]["ours"]
    return f"{row}{record['unique_ratio']:>8.2f}{speed:>7.1f}{record['memory_milliseconds']:>10.2f}"


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    options = timing.read_options(__doc__, list(CASES), quick_names=["A", "B", "D"])
    makers = [our_contestants]
    try:
        import torch

        makers.append(torch_contestant)
        print(f"torch {torch.__version__} with {torch.get_num_threads()} threads")
        import fbgemm_gpu

        makers.append(fbgemm_contestant)
        print(f"fbgemm_gpu {fbgemm_gpu.__version__}")
    # A wheel of FBGEMM for another version of torch lacks a symbol, which is an OSError.
    except (ImportError, OSError) as error:
        print(f"{error}, so its columns are empty. `pip install 'rsembed[bench]'` installs torch.")
    heads = "".join(f"{head:>17}" for head in ("ours", "ours, jit", "FBGEMM", "torch"))
    other_heads = f"{'peer/ours':>15}{'peer/jit':>15}{'unique':>8}{'GB/s':>7}{'memory ms':>10}"
    print(f"{'milliseconds: median (best)':<30}{heads}{other_heads}")
    bandwidth = timing.bytes_per_second()
    records = []
    for case in options.workloads:
        records += measure(case, options.rounds, makers, bandwidth)
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
