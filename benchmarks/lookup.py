"""Times lookups and training steps of rsembed against torch EmbeddingBag and plain JAX, in one run.

    python benchmarks/lookup.py [--quick] [--workloads 8x100k,26x100k,1x10M] [--json PATH]

The contestants take turns with eight distinct batches, so that a noisy machine is noisy for all of
them. The table shows medians. All contestants get the same ids and the same gradients of their
outputs. There is no loss and no dense layer.

* rsembed: an `EmbeddingCollection` with a feature for each table, and prepared batches. A step is
  `lookup` and `update`. "apply" and "clipped" are `lookup_vjp` and `apply` with the row gradients,
  as they are or after `clip_by_global_norm`.
* torch: an `nn.EmbeddingBag(mode="sum")` for each feature, with `sparse=True`, and
  `torch.optim.Adagrad` or `torch.optim.SGD`. torch has no row-wise Adagrad: its sums have as many
  values as the tables. Its step changes only the rows of the batch.
* plain JAX: `table[ids].sum(1)` for each feature. Gradients are computed for the gathered rows only,
  not for the whole table. SGD is one scatter. Row-wise Adagrad squares the sum of all gradients of a
  row, so `jnp.unique` and `segment_sum` combine equal rows before the scatters. (A rule that squares
  the gradient of each entry costs about as much as SGD, but computes something else.)

The last column is the time that the memory of this machine takes for the bytes that every
contestant must read and write. A kernel can be faster only if rows are in a processor's cache.

Steps donate tables and optimizer state. The largest workload needs about 12 GB of memory.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import timing
from timing import Run, Workload

import rsembed as rs
from rsembed.kernels.contract import NO_ROW

LEARNING_RATE = 0.01


def draw_gradients(workload: Workload) -> list[np.ndarray]:
    """Gradients of the outputs, one for each feature."""
    generator = np.random.default_rng(7)
    shape = (workload.batch_size, workload.embedding_dim)
    return [generator.standard_normal(shape, dtype=np.float32) for _ in range(workload.num_tables)]


def after(output: jax.Array, value: float | jax.Array) -> jax.Array:
    """The same value, but XLA can compute it only after `output`.

    In training, the gradients depend on the outputs, so XLA reads tables before it updates them. In
    this benchmark they do not, so XLA might update tables first, and would copy whole tables to do
    so.
    """
    value = jnp.asarray(value)
    return value + (0.0 * output[0, 0]).astype(value.dtype)


def rsembed_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of rsembed."""
    names = [f"feature_{k}" for k in range(workload.num_tables)]
    gradients = {}
    for name, gradient in zip(names, draw_gradients(workload), strict=True):
        gradients[name] = jnp.asarray(gradient)

    def collection_with(make_rule: Callable[..., rs.OptimizerSpec]) -> rs.EmbeddingCollection:
        # The learning rate depends on the step, and `after` makes the step depend on an output.
        rule = make_rule(lambda step: LEARNING_RATE + 0.0 * step.astype(jnp.float32))
        features = []
        for name in names:
            table = rs.TableSpec(
                name=name,
                vocabulary_size=workload.vocabulary_size,
                embedding_dim=workload.embedding_dim,
                initializer=jax.nn.initializers.constant(0.01),
                optimizer=rule,
            )
            features.append(rs.FeatureSpec(name=name, table_spec=table))
        return rs.EmbeddingCollection(features)

    def update_step(collection: rs.EmbeddingCollection) -> Callable:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            outputs = collection.lookup(state, batch)
            state = state._replace(step=after(outputs[names[0]], state.step))
            return outputs, collection.update(state, batch, gradients)

        return step

    def apply_step(collection: rs.EmbeddingCollection, max_norm: float) -> Callable:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            outputs, pullback = collection.lookup_vjp(state, batch)
            state = state._replace(step=after(outputs[names[0]], state.step))
            row_gradients = pullback(gradients)
            if max_norm < np.inf:
                row_gradients = rs.clip_by_global_norm(row_gradients, max_norm)
            return outputs, collection.apply(state, row_gradients)

        return step

    adagrad = collection_with(
        lambda rate: rs.optimizers.RowWiseAdagrad(rate, initial_accumulator_value=0.1)
    )
    sgd = collection_with(rs.optimizers.SGD)
    batches = [adagrad.prepare(dict(zip(names, batch, strict=True))) for batch in ids]
    lookup = jax.jit(adagrad.lookup)
    sgd_step = update_step(sgd)
    state = jax.block_until_ready(adagrad.init(jax.random.key(0)))

    def run_lookup(k: int) -> object:
        return jax.block_until_ready(lookup(state, batches[k]))

    def run(step: Callable, k: int) -> object:
        nonlocal state
        outputs, state = step(state, batches[k])
        return jax.block_until_ready((outputs, state))

    def run_sgd(k: int) -> object:
        """A step on the same tables, without the slots of Adagrad."""
        nonlocal state
        slots = state.slots
        layout = state.layout
        without_slots = state._replace(slots=dict.fromkeys(slots, ()), layout=None)
        outputs, stepped = sgd_step(without_slots, batches[k])
        state = stepped._replace(slots=slots, layout=layout)
        return jax.block_until_ready((outputs, stepped))

    return {
        "lookup": run_lookup,
        "step, Adagrad": functools.partial(run, update_step(adagrad)),
        "apply, Adagrad": functools.partial(run, apply_step(adagrad, np.inf)),
        "clipped, Adagrad": functools.partial(run, apply_step(adagrad, 1.0)),
        "step, SGD": run_sgd,
    }


def xla_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of plain JAX."""
    batches = [[jnp.asarray(feature) for feature in batch] for batch in ids]
    gradients = [jnp.asarray(gradient) for gradient in draw_gradients(workload)]

    def pool(vectors):
        return [vector.sum(1) for vector in vectors]

    def gather(tables, batch):
        return [table[feature] for table, feature in zip(tables, batch, strict=True)]

    @jax.jit
    def lookup(tables, batch):
        return pool(gather(tables, batch))

    def combine(feature, d_vector):
        rows, segments = jnp.unique(
            feature.reshape(-1), return_inverse=True, size=feature.size, fill_value=NO_ROW
        )
        d_vectors = d_vector.reshape(-1, workload.embedding_dim)
        return rows, jax.ops.segment_sum(d_vectors, segments, feature.size)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def adagrad_step(tables, accumulators, batch):
        outputs, pullback = jax.vjp(pool, gather(tables, batch))
        (d_vectors,) = pullback(gradients)
        new_tables = []
        new_accumulators = []
        arrays = zip(tables, accumulators, batch, d_vectors, outputs, strict=True)
        for table, accumulator, feature, d_vector, output in arrays:
            rows, sums = combine(feature, d_vector)
            accumulator = accumulator.at[rows].add(jnp.mean(sums * sums, axis=-1), mode="drop")
            sums_of_squares = accumulator.at[rows].get(mode="fill", fill_value=1)
            scale = after(output, LEARNING_RATE) / (jnp.sqrt(sums_of_squares) + 1e-8)
            new_tables.append(table.at[rows].add(-scale[:, None] * sums, mode="drop"))
            new_accumulators.append(accumulator)
        return outputs, new_tables, new_accumulators

    @functools.partial(jax.jit, donate_argnums=0)
    def sgd_step(tables, batch):
        outputs, pullback = jax.vjp(pool, gather(tables, batch))
        (d_vectors,) = pullback(gradients)
        new_tables = []
        for table, feature, d_vector, output in zip(tables, batch, d_vectors, outputs, strict=True):
            rate = after(output, LEARNING_RATE)
            new_tables.append(table.at[feature].add(-rate * d_vector))
        return outputs, new_tables

    tables = []
    accumulators = []
    for _ in range(workload.num_tables):
        shape = (workload.vocabulary_size, workload.embedding_dim)
        tables.append(jnp.full(shape, 0.01, jnp.float32))
        accumulators.append(jnp.full(shape[:1], 0.1, jnp.float32))

    def run_lookup(k: int) -> object:
        return jax.block_until_ready(lookup(tables, batches[k]))

    def run_adagrad(k: int) -> object:
        nonlocal tables, accumulators
        outputs, tables, accumulators = adagrad_step(tables, accumulators, batches[k])
        return jax.block_until_ready((outputs, tables, accumulators))

    def run_sgd(k: int) -> object:
        nonlocal tables
        outputs, tables = sgd_step(tables, batches[k])
        return jax.block_until_ready((outputs, tables))

    return {
        "lookup": run_lookup,
        "step, Adagrad": run_adagrad,
        "step, SGD": run_sgd,
    }


def torch_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of torch. Raises ImportError if torch is not installed."""
    import torch

    batches = [[torch.from_numpy(feature.astype(np.int64)) for feature in batch] for batch in ids]
    gradients = [torch.from_numpy(gradient) for gradient in draw_gradients(workload)]
    bags = timing.torch_bags(workload, 0.01)
    weights = [bag.weight for bag in bags]
    optimizers = {
        "step, Adagrad": torch.optim.Adagrad(
            weights, lr=LEARNING_RATE, initial_accumulator_value=0.1
        ),
        "step, SGD": torch.optim.SGD(weights, lr=LEARNING_RATE),
    }
    return timing.torch_runs(bags, batches, gradients, optimizers)


STATE_BYTES = {
    "lookup": None,
    "step, Adagrad": 4,
    "apply, Adagrad": 4,
    "clipped, Adagrad": 4,
    "step, SGD": 0,
}


def measure(
    workload: Workload, law: str, num_rounds: int, makers: dict[str, Callable], bandwidth: float
) -> list[dict]:
    """Records of a workload: one for the lookup, and one for each kind of step."""
    ids = timing.draw_ids(workload, law, seed=3)
    num_unique_rows = 0
    for batch in ids:
        for feature in batch:
            num_unique_rows += np.unique(feature).size
    contestants = {name: make(workload, ids) for name, make in makers.items()}
    records = []
    for what, state_bytes in STATE_BYTES.items():
        runs = {name: runs[what] for name, runs in contestants.items() if what in runs}
        milliseconds = {}
        for name, times in timing.race(runs, num_rounds).items():
            milliseconds[name] = times.median
        num_bytes = timing.least_bytes(
            workload, num_unique_rows / len(ids), state_bytes=state_bytes
        )
        milliseconds["memory"] = 1e3 * num_bytes / bandwidth
        record = {"workload": workload.name, "ids": law, "what": what}
        records.append(record | {"milliseconds": milliseconds})
        print(format_record(records[-1]), flush=True)
    # The tables of this workload are freed before those of the next one are allocated.
    contestants.clear()
    gc.collect()
    return records


def format_record(record: dict) -> str:
    """A row of the printed table."""
    times = record["milliseconds"]

    def cell(name: str, divisor: float = 1.0) -> str:
        if name not in times:
            return f"{'-':>11}"
        return f"{times[name] / divisor:11.2f}"

    ours = times["ours"]
    cells = [
        cell("ours"),
        cell("torch"),
        cell("xla"),
        cell("torch", ours),
        cell("xla", ours),
        cell("memory"),
    ]
    return f"{record['workload']:<9}{record['ids']:<9}{record['what']:<17}{''.join(cells)}"


HEADS = ("ours ms", "torch ms", "xla ms", "torch/ours", "xla/ours", "memory ms")


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    names = [workload.name for workload in timing.WORKLOADS]
    options = timing.read_options(__doc__, names, quick_names=names[:2])
    makers: dict[str, Callable] = {
        "ours": rsembed_contestant,
        "torch": torch_contestant,
        "xla": xla_contestant,
    }
    try:
        import torch  # noqa: F401
    except ImportError:
        print("torch is not installed, so its columns are empty: pip install 'rsembed[bench]'")
        del makers["torch"]
    heads = "".join(f"{head:>11}" for head in HEADS)
    print(f"{'workload':<9}{'ids':<9}{'what':<17}{heads}")
    bandwidth = timing.bytes_per_second()
    records = []
    for workload in timing.WORKLOADS:
        if workload.name in options.workloads:
            for law in ("uniform", "zipf"):
                records += measure(workload, law, options.rounds, makers, bandwidth)
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
