"""Times table-batched lookups and fused training steps against FBGEMM and torch EmbeddingBag, in one run on CPU cores.

    python benchmarks/tbe.py [--quick] [--workloads A,B,C,D] [--json PATH]

Every contestant gets the same ids, the same gradient of its outputs and equal tables; no loss and no dense layers are
timed. They take turns of eight distinct batches, and bounds checks are off everywhere:

* ours, eager: `TableBatchedEmbeddingBags` called with numpy ids, as a user of PyTorch would; `vjp`, then `backward`.
* ours, jit: `rsembed.tbe.functional` in one compiled step with donated state, on ids that are jax arrays already.
* FBGEMM: `SplitTableBatchedEmbeddingBagsCodegen` on the host, if `fbgemm_gpu` can be imported. Its CPU kernels use one
  thread, and it has no Adam there.
* torch: one `nn.EmbeddingBag(mode="sum", sparse=True)` per table with `optim.SGD`, `optim.Adagrad` or
  `optim.SparseAdam`. torch has no row-wise Adagrad: its Adagrad, elementwise, stands in that row as well.

Workloads, 4 bytes per number: A has 8 tables of 100k rows of 64, batch 2048, 20 ids a bag; B 26 tables of 100k x 128,
batch 1024, 1 id; C one table of 10M x 64, batch 4096, 20 ids, all uniform; D is A with Zipf 1.15.

The table shows medians in milliseconds, the best in brackets; how many times as long the fastest peer took (median by
median, best by best); how many of the ids of a batch are distinct rows; and GB/s of our eager median, as FBGEMM counts
them: every looked-up row and every output once for a lookup, three times for a step. The last column is what the
memory of this machine needs for the bytes that any contestant has to move, each distinct row once: no kernel can be
faster unless the rows were in a cache already. Before a race all contestants
take two steps and must then agree on a lookup. Where they would need more than 14 GiB together (C with elementwise
state) each runs alone, one after another.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import NamedTuple

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

CASES = dict(
    zip(
        "ABCD",
        [(w, "uniform") for w in timing.WORKLOADS] + [(timing.WORKLOADS[0], "zipf")],
        strict=True,
    )
)
OPTIMIZERS = ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD", "ADAM")
# Per weight, about.
STATE_NUMBERS = {
    "EXACT_SGD": 0,
    "EXACT_ROWWISE_ADAGRAD": 0,
    "EXACT_ADAGRAD": 1,
    "ADAM": 2,
}
LEARNING_RATE, EPS, INITIAL_WEIGHT = 0.01, 1e-8, 0.01
MAX_GIB = 14


class Batches(NamedTuple):
    """What all contestants are given: flat ids of each batch, offsets, and the gradient of the output."""

    indices: list[np.ndarray]
    offsets: np.ndarray
    gradient: np.ndarray


class Contestant(NamedTuple):
    """A lookup, and a step that returns the output of its lookup; both return when the numbers are there."""

    lookup: Run
    step: Run


def draw_batches(workload: Workload, law: str) -> Batches:
    """Batches with a fixed number of ids per bag."""
    indices = [ids.reshape(-1) for ids in timing.draw_ids(workload, law, seed=3)]
    num_bags = workload.num_tables * workload.batch_size
    offsets = (np.arange(num_bags + 1) * workload.ids_per_sample).astype(np.int32)
    shape = (workload.batch_size, workload.num_tables * workload.embedding_dim)
    return Batches(
        indices, offsets, np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
    )


def our_contestants(workload: Workload, batches: Batches, optimizer: str) -> dict[str, Contestant]:
    """The module called eagerly, and a compiled step; they share the tables, which would not fit twice."""
    shape = (workload.vocabulary_size, workload.embedding_dim)
    tbe = TableBatchedEmbeddingBags(
        [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU)] * workload.num_tables,
        optimizer=OptimType[optimizer],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    # One number in all contestants; in place, since tables are allocated on huge pages where there are some.
    fill = jax.jit(
        lambda tables: [0.0 * table + INITIAL_WEIGHT for table in tables], donate_argnums=0
    )
    state = tbe.state.get_value()
    tbe.state.set_value(state._replace(weights=tuple(fill(state.weights))))
    plan, gradient = tbe.plan, jnp.asarray(batches.gradient)
    on_device = [jnp.asarray(ids) for ids in batches.indices]
    offsets = jnp.asarray(batches.offsets)

    def eager_step(k: int) -> object:
        output, backward = tbe.vjp(batches.indices[k], batches.offsets)
        backward(gradient)
        return jax.block_until_ready((output, tbe.state.get_value()))[0]

    @jax.jit
    def lookup(state, indices):
        return functional.lookup(plan, state, plan.batch(indices, offsets, None))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, indices):
        batch = plan.batch(indices, offsets, None)
        output = functional.lookup(plan, state, batch)
        # In training the loss sees to it that rows are read before they are stepped. Here the rates do: XLA would be
        # free to step first, and would copy whole tables to do so.
        rates = functional.learning_rates(plan, state) + 0.0 * output[0, 0]
        return output, functional.backward(plan, state, batch, gradient, rates)[0]

    def compiled_step(k: int) -> object:
        output, state = jax.block_until_ready(step(tbe.state.get_value(), on_device[k]))
        tbe.state.set_value(state)
        return output

    return {
        "ours": Contestant(
            lambda k: tbe(batches.indices[k], batches.offsets).block_until_ready(), eager_step
        ),
        "ours, jit": Contestant(
            lambda k: lookup(tbe.state.get_value(), on_device[k]).block_until_ready(), compiled_step
        ),
    }


def fbgemm_contestant(
    workload: Workload, batches: Batches, optimizer: str
) -> dict[str, Contestant]:
    """FBGEMM's module, none for Adam."""
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
    rule = {
        "EXACT_SGD": lambda: torch.optim.SGD(weights, lr=LEARNING_RATE),
        "ADAM": lambda: torch.optim.SparseAdam(weights, lr=LEARNING_RATE, eps=EPS),
    }.get(optimizer, lambda: torch.optim.Adagrad(weights, lr=LEARNING_RATE, eps=EPS))()
    by_table = (workload.num_tables, workload.batch_size, workload.ids_per_sample)
    indices = [
        torch.from_numpy(ids.astype(np.int64)).reshape(by_table).unbind() for ids in batches.indices
    ]
    gradients = [
        part.contiguous()
        for part in torch.from_numpy(batches.gradient).chunk(workload.num_tables, dim=1)
    ]
    return {"torch": Contestant(**timing.torch_runs(bags, indices, gradients, {"step": rule}))}


def as_array(output: object) -> np.ndarray:
    """Features side by side, whether a contestant returns them so or as a list."""
    return np.concatenate(output, axis=1) if isinstance(output, list) else np.asarray(output)


def outputs_after_two_steps(contestants: dict[str, Contestant]) -> dict[str, np.ndarray]:
    """A lookup of every contestant after two steps. Those of ours, on the same tables, take one each."""
    for name, contestant in contestants.items():
        for _ in range(1 if name.startswith("ours") else 2):
            contestant.step(0)
    return {name: as_array(contestant.lookup(0)) for name, contestant in contestants.items()}


def check_agreement(outputs: dict[str, np.ndarray], optimizer: str) -> None:
    """Raises: AssertionError: contestants that ran the same rule have other numbers."""
    if optimizer == "EXACT_ROWWISE_ADAGRAD":
        # Elementwise.
        outputs = {name: output for name, output in outputs.items() if name != "torch"}
    expected = outputs["ours"]
    for name, output in outputs.items():
        # In the mean: where the gradients of a row cancel, their order decides the sign that Adagrad steps with.
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
    """Times by kind of run and contestant."""
    table_bytes = 4 * workload.num_rows * workload.embedding_dim
    fits_together = len(makers) * table_bytes * (1 + STATE_NUMBERS[optimizer]) < MAX_GIB * 2**30
    kinds = ("lookup", "step") if optimizer == "EXACT_SGD" else ("step",)
    times: dict[str, dict[str, Times]] = {kind: {} for kind in kinds}
    outputs: dict[str, np.ndarray] = {}
    for group in [makers] if fits_together else [[maker] for maker in makers]:
        contestants: dict[str, Contestant] = {}
        for make in group:
            contestants |= make(workload, batches, optimizer)
        outputs |= outputs_after_two_steps(contestants)
        for kind in kinds:
            times[kind] |= timing.race(
                {name: getattr(c, kind) for name, c in contestants.items()}, num_rounds
            )
        del contestants
        gc.collect()
    check_agreement(outputs, optimizer)
    return times


def measure(
    case: str, num_rounds: int, makers: list[Callable[..., dict[str, Contestant]]], bandwidth: float
) -> list[dict]:
    """One record per kind of run."""
    workload, law = CASES[case]
    batches, records = draw_batches(workload, law), []
    table_of_id = np.repeat(
        np.arange(workload.num_tables), workload.batch_size * workload.ids_per_sample
    )
    rows = [ids + workload.vocabulary_size * table_of_id for ids in batches.indices]
    unique_ratio = float(np.mean([np.unique(own).size / own.size for own in rows]))
    row_bytes = 4 * workload.embedding_dim * workload.num_tables * workload.batch_size
    passed_bytes = row_bytes * (1 + workload.ids_per_sample)
    for optimizer in OPTIMIZERS:
        for kind, times in race_all(makers, workload, batches, optimizer, num_rounds).items():
            name = "forward" if kind == "lookup" else f"step {optimizer}"
            moved = passed_bytes * (1 if kind == "lookup" else 3)
            speeds = {who: moved / own.median / 1e6 for who, own in times.items()}
            record = {"workload": case, "what": name, "unique_ratio": unique_ratio}
            num_unique = unique_ratio * rows[0].size
            row_state = 4 * workload.embedding_dim * STATE_NUMBERS[optimizer] or 4 * (
                optimizer != "EXACT_SGD"
            )
            needed = timing.least_bytes(
                workload, num_unique, state_bytes=None if kind == "lookup" else row_state
            )
            record["memory_milliseconds"] = 1e3 * needed / bandwidth
            record |= {
                "milliseconds": {who: own._asdict() for who, own in times.items()},
                "gb_per_second": speeds,
            }
            records.append(record)
            print(format_record(record), flush=True)
    return records


def format_record(record: dict) -> str:
    """A row of the printed table."""
    times = {name: Times(**own) for name, own in record["milliseconds"].items()}
    peers = [times[name] for name in ("FBGEMM", "torch") if name in times]
    row = f"{record['workload']:<3}{record['what']:<27}"
    for name in ("ours", "ours, jit", "FBGEMM", "torch"):
        row += (
            f" {f'{times[name].median:.2f} ({times[name].best:.2f})' if name in times else '-':>16}"
        )
    for name in ("ours", "ours, jit"):
        ratios = (
            [min(peer[k] for peer in peers) / times[name][k] for k in (0, 1)] if peers else None
        )
        row += f" {f'{ratios[0]:.2f} ({ratios[1]:.2f})' if ratios else '-':>14}"
    return (
        row
        + f"{record['unique_ratio']:>8.2f}{record['gb_per_second']['ours']:>7.1f}{record['memory_milliseconds']:>10.2f}"
    )


def main() -> int:
    """Prints the table, and writes it if asked."""
    options = timing.read_options(__doc__, list(CASES), quick_names=["A", "B", "D"])
    makers = [our_contestants]
    try:
        import torch

        makers.append(torch_contestant)
        print(f"torch {torch.__version__} with {torch.get_num_threads()} threads")
        import fbgemm_gpu

        makers.append(fbgemm_contestant)
        print(f"fbgemm_gpu {fbgemm_gpu.__version__}")
    except (
        ImportError,
        OSError,
    ) as error:  # a wheel for another torch fails at an undefined symbol
        print(
            f"{error}; the columns of what is missing stay empty. `pip install 'rsembed[bench]'` brings torch."
        )
    heads = ("ours", "ours, jit", "FBGEMM", "torch")
    print(f"{'milliseconds: median (best)':<30}" + "".join(f"{head:>17}" for head in heads), end="")
    print(f"{'peer/ours':>15}{'peer/jit':>15}{'unique':>8}{'GB/s':>7}{'memory ms':>10}")
    bandwidth = timing.bytes_per_second()
    records = [
        record
        for case in options.workloads
        for record in measure(case, options.rounds, makers, bandwidth)
    ]
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
