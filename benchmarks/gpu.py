"""Times lookups and fused training steps on a GPU: our Triton kernels, plain XLA and torch EmbeddingBag on one card.

    python benchmarks/gpu.py [--quick] [--tiny] [--json PATH]

The workload is that of FBGEMM's TBE benchmark: 32 tables of 1e6 rows of 128 float32, batch 8192, 20 uniform ids a bag,
which takes 16 GB for the tables; `--quick` has 4 tables. The table shows nanoseconds per looked-up row, GB/s as FBGEMM
counts them (every looked-up row and every output once for a lookup, three times for a step), and what share of the
card's own copy bandwidth that is, measured in the same run. Steps are SGD and row-wise Adagrad; torch has no row-wise
Adagrad and takes part in SGD.

Without a GPU the kernels run in Pallas' interpreter at a tiny size. Those numbers check that this script works and that
all contestants agree; they say nothing about speed, and the script says so.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from timing import Workload, make_parser, torch_bags, write_records

import rsembed.optimizers as ro
from rsembed.kernels import gpu, reference
from rsembed.kernels.contract import Segment, SegmentGradients, Step

SIZES = {"embedding_dim": 128, "batch_size": 8192, "ids_per_sample": 20, "vocabulary_size": 10**6}
FULL, QUICK = Workload(name="T=32", num_tables=32, **SIZES), Workload(name="T=4", num_tables=4, **SIZES)
TINY = Workload(name="tiny", num_tables=2, vocabulary_size=50, embedding_dim=8, batch_size=4, ids_per_sample=3)
RULES = {"SGD": ro.SGDOptimizerSpec(0.01), "row-wise Adagrad": ro.RowWiseAdagradOptimizerSpec(0.01)}
INITIAL_WEIGHT = 0.01


def median_seconds(run: Callable[[], object], num_rounds: int) -> float:
    """Median wall time of calls that return when their results are there; the first two are not counted."""
    seconds = []
    for turn in range(num_rounds + 2):
        start = time.perf_counter()
        run()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second that the device reads and writes together in a large copy."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    return 2 * source.nbytes / median_seconds(lambda: copy(source).block_until_ready(), 5)


def jax_contestant(module: object, workload: Workload, ids: np.ndarray, rule: ro.OptimizerSpec) -> dict[str, Callable]:
    """A lookup of all tables, and a step of all tables with donated state, in one program each."""
    shape, offsets = (workload.vocabulary_size, workload.embedding_dim), bag_offsets(workload)
    state = {"tables": [jnp.full(shape, INITIAL_WEIGHT) for _ in range(workload.num_tables)]}
    state["slots"] = [rule.init_slots(table) for table in state["tables"]]
    rows, hyper = [jnp.asarray(own) for own in ids], rule.get_hyperparameters(0)
    gradient = jnp.ones((workload.batch_size, workload.embedding_dim))

    def segments(own: jax.Array) -> list[Segment]:
        return [Segment(own, jnp.asarray(offsets), None, "sum")]

    @jax.jit
    def lookup(tables: list, rows: list) -> list:
        return [module.lookup(table, segments(own))[0] for table, own in zip(tables, rows, strict=True)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(tables: list, slots: list, rows: list) -> tuple[list, list]:
        both = [
            module.update(table, slot, SegmentGradients(segments(own), (gradient,)), Step(hyper, rule))
            for table, slot, own in zip(tables, slots, rows, strict=True)
        ]
        return [table for table, _ in both], [slot for _, slot in both]

    def run_step() -> None:
        state["tables"], state["slots"] = jax.block_until_ready(step(state["tables"], state["slots"], rows))

    return {"lookup": lambda: jax.block_until_ready(lookup(state["tables"], rows)), "step": run_step}


def torch_contestant(workload: Workload, ids: np.ndarray, rule: ro.OptimizerSpec) -> dict[str, Callable]:
    """EmbeddingBags with sparse gradients and SGD, on torch's device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    bags = torch_bags(workload, INITIAL_WEIGHT, device)
    rows = [torch.from_numpy(own.astype(np.int64)).to(device) for own in ids]
    offsets = torch.from_numpy(bag_offsets(workload)[:-1].astype(np.int64)).to(device)
    gradients = [torch.ones(workload.batch_size, workload.embedding_dim, device=device)] * workload.num_tables
    optimizer = torch.optim.SGD([bag.weight for bag in bags], lr=rule.learning_rate)

    def finish(result: object) -> object:
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    def lookup() -> object:
        with torch.no_grad():
            return finish([bag(own, offsets) for bag, own in zip(bags, rows, strict=True)])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = [bag(own, offsets) for bag, own in zip(bags, rows, strict=True)]
        torch.autograd.backward(outputs, gradients)
        finish(optimizer.step())

    return {"lookup": lookup, "step": step}


def bag_offsets(workload: Workload) -> np.ndarray:
    """Bags of equal size."""
    return (np.arange(workload.batch_size + 1) * workload.ids_per_sample).astype(np.int32)


def measure(workload: Workload, num_rounds: int, bandwidth: float) -> list[dict]:
    """One record per contestant and kind of run; prints them."""
    generator = np.random.default_rng(0)
    shape = (workload.num_tables, workload.batch_size * workload.ids_per_sample)
    ids = generator.integers(0, workload.vocabulary_size, shape, dtype=np.int32)
    makers = {
        "ours": functools.partial(jax_contestant, gpu),
        "XLA": functools.partial(jax_contestant, reference),
    }
    try:
        import torch  # noqa: F401

        makers["torch"] = torch_contestant
    except ImportError as error:
        print(f"{error}; torch does not take part.")
    row_bytes = 4 * workload.embedding_dim * workload.num_tables * workload.batch_size
    passed_bytes, records = row_bytes * (1 + workload.ids_per_sample), []
    for name, rule in RULES.items():
        outputs = {}
        for who, make in makers.items():
            if who == "torch" and name != "SGD":
                continue
            contestant = make(workload, ids, rule)
            for kind in ("lookup", "step") if name == "SGD" else ("step",):
                seconds = median_seconds(contestant[kind], num_rounds)
                speed = passed_bytes * (1 if kind == "lookup" else 3) / seconds
                record = {"what": kind if kind == "lookup" else f"step {name}", "who": who, "seconds": seconds}
                record |= {"ns_per_row": 1e9 * seconds / ids.size, "gb_per_second": speed / 1e9}
                records.append(record | {"share_of_copy": speed / bandwidth})
                print(
                    f"{record['what']:<24}{who:<8}{1e3 * seconds:>10.3f} ms{record['ns_per_row']:>12.3f} ns/row"
                    f"{speed / 1e9:>12.3f} GB/s{100 * speed / bandwidth:>8.1f} % of copy",
                    flush=True,
                )
            outputs[who] = [np.asarray(out.cpu() if who == "torch" else out) for out in contestant["lookup"]()]
            del contestant
        for who, output in outputs.items():  # all have taken equally many steps
            np.testing.assert_allclose(np.stack(output), np.stack(outputs["ours"]), rtol=1e-3, err_msg=who)
    return records


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="4 tables instead of 32")
    parser.add_argument("--tiny", action="store_true", help="a size that only checks the script")
    options = parser.parse_args()
    has_gpu = gpu.unavailable_because() is None
    if not has_gpu:
        print(f"No measurement: {gpu.unavailable_because()}.")
        print("The kernels run in Pallas' interpreter at a tiny size. Speed on GPUs is unproven.")
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind}")
    bandwidth = copy_bandwidth(1 << 30 if has_gpu else 1 << 24)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    workload = TINY if options.tiny or not has_gpu else QUICK if options.quick else FULL
    records = measure(workload, 20 if has_gpu else 2, bandwidth)
    about = {"device": device.device_kind, "is_measurement": has_gpu, "workload": workload.name}
    write_records(options, {**about, "records": records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
