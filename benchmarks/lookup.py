"""Times lookups and training steps of rsembed against torch EmbeddingBag and plain JAX, in one run.

    python benchmarks/lookup.py [--quick] [--workloads 8x100k,26x100k,1x10M] [--json PATH]

The contestants take turns of eight distinct batches, so that a noisy machine is noisy for all of them; the table shows
medians. Every contestant gets the same ids and the same gradient of its outputs; no loss and no dense layers are timed:

* rsembed: an `EmbeddingCollection` with one feature a table, prepared batches; `lookup`, then `update`, which is fused.
  "apply" and "clipped" are `lookup_vjp` and `apply` of its row gradients, as they come or after `clip_by_global_norm`.
* torch: `nn.EmbeddingBag(mode="sum")` per feature, with `sparse=True` for training; `torch.optim.Adagrad`, which is not
  row-wise (torch has no such rule) but keeps its sums only up to date for the rows of the batch, and `torch.optim.SGD`.
* plain JAX: `table[ids].sum(1)` per feature. The gradient goes to the gathered rows, never to the whole table. SGD is
  one scatter. Row-wise Adagrad needs the whole gradient of a row before it is squared, as the other two have it, so
  equal rows are combined with `jnp.unique` and `segment_sum` before the scatters. (A rule that squares the gradient of
  every entry instead costs about as much as SGD, and computes something else.)

The last column is what the memory of this machine needs for the bytes that any contestant has to move: no kernel can
be faster unless the rows were in a cache already.

Tables and optimizer state are donated to the step everywhere. Needs about 12 GB of memory for the largest workload.
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
    """Gradient of every feature's output."""
    generator = np.random.default_rng(7)
    shape = (workload.batch_size, workload.embedding_dim)
    return [generator.standard_normal(shape, dtype=np.float32) for _ in range(workload.num_tables)]


def after(output: jax.Array, value: float | jax.Array) -> jax.Array:
    """The same value, known only once the output is.

    In training the loss sees to it that tables are read before they are stepped. Without one, XLA would be free to step
    them first, and would copy whole tables to do so.
    """
    value = jnp.asarray(value)
    return value + (0.0 * output[0, 0]).astype(value.dtype)


def rsembed_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of rsembed."""
    names = [f"feature_{k}" for k in range(workload.num_tables)]
    gradients = dict(zip(names, map(jnp.asarray, draw_gradients(workload)), strict=True))

    def collection_with(make_rule: Callable[..., rs.OptimizerSpec]) -> rs.EmbeddingCollection:
        # A rate that depends on the step is what `after` can hold back.
        rule = make_rule(lambda step: LEARNING_RATE + 0.0 * step.astype(jnp.float32))
        tables = [
            rs.TableSpec(
                name=name,
                vocabulary_size=workload.vocabulary_size,
                embedding_dim=workload.embedding_dim,
                initializer=jax.nn.initializers.constant(0.01),
                optimizer=rule,
            )
            for name in names
        ]
        features = [
            rs.FeatureSpec(name=name, table_spec=table)
            for name, table in zip(names, tables, strict=True)
        ]
        return rs.EmbeddingCollection(features)

    def stepper(collection: rs.EmbeddingCollection, max_norm: float | None = None) -> Callable:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            outputs, pullback = collection.lookup_vjp(state, batch)
            state = state._replace(step=after(outputs[names[0]], state.step))
            if max_norm is None:
                return outputs, collection.update(state, batch, gradients)
            row_gradients = pullback(gradients)
            clipped = (
                row_gradients
                if max_norm == np.inf
                else rs.clip_by_global_norm(row_gradients, max_norm)
            )
            return outputs, collection.apply(state, clipped)

        return step

    adagrad = collection_with(
        lambda rate: rs.optimizers.RowWiseAdagrad(rate, initial_accumulator_value=0.1)
    )
    sgd = collection_with(rs.optimizers.SGD)
    batches = [adagrad.prepare(dict(zip(names, batch, strict=True))) for batch in ids]
    lookup, adagrad_step, sgd_step = jax.jit(adagrad.lookup), stepper(adagrad), stepper(sgd)
    held = {"state": jax.block_until_ready(adagrad.init(jax.random.key(0)))}

    def run(step: Callable, k: int) -> object:
        outputs, held["state"] = step(held["state"], batches[k])
        return jax.block_until_ready((outputs, held["state"]))

    def run_sgd(k: int) -> object:  # on the same tables, without their slots
        slots, layout = held["state"].slots, held["state"].layout
        bare = held["state"]._replace(slots=dict.fromkeys(slots, ()), layout=None)
        outputs, state = sgd_step(bare, batches[k])
        held["state"] = state._replace(slots=slots, layout=layout)
        return jax.block_until_ready((outputs, state))

    return {
        "lookup": lambda k: jax.block_until_ready(lookup(held["state"], batches[k])),
        "step, Adagrad": functools.partial(run, adagrad_step),
        "apply, Adagrad": functools.partial(run, stepper(adagrad, np.inf)),
        "clipped, Adagrad": functools.partial(run, stepper(adagrad, 1.0)),
        "step, SGD": run_sgd,
    }


def xla_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of plain JAX."""
    batches = [[jnp.asarray(feature) for feature in batch] for batch in ids]
    gradients = [jnp.asarray(gradient) for gradient in draw_gradients(workload)]

    def pool(vectors):
        return [v.sum(1) for v in vectors]

    def gather(tables, batch):
        return [table[feature] for table, feature in zip(tables, batch, strict=True)]

    @jax.jit
    def lookup(tables, batch):
        return pool(gather(tables, batch))

    def combine(feature, d_vector):
        rows, places = jnp.unique(
            feature.reshape(-1), return_inverse=True, size=feature.size, fill_value=NO_ROW
        )
        return rows, jax.ops.segment_sum(
            d_vector.reshape(-1, workload.embedding_dim), places, feature.size
        )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def adagrad_step(tables, accumulators, batch):
        outputs, pullback = jax.vjp(pool, gather(tables, batch))
        (d_vectors,) = pullback(gradients)
        new_tables, new_accumulators = [], []
        arrays = zip(tables, accumulators, batch, d_vectors, outputs, strict=True)
        for table, accumulator, feature, d_vector, output in arrays:
            rows, sums = combine(feature, d_vector)
            accumulator = accumulator.at[rows].add(jnp.mean(sums * sums, axis=-1), mode="drop")
            scale = after(output, LEARNING_RATE) / (
                jnp.sqrt(accumulator.at[rows].get(mode="fill", fill_value=1)) + 1e-8
            )
            new_tables.append(table.at[rows].add(-scale[:, None] * sums, mode="drop"))
            new_accumulators.append(accumulator)
        return outputs, new_tables, new_accumulators

    @functools.partial(jax.jit, donate_argnums=0)
    def sgd_step(tables, batch):
        outputs, pullback = jax.vjp(pool, gather(tables, batch))
        (d_vectors,) = pullback(gradients)
        arrays = zip(tables, batch, d_vectors, outputs, strict=True)
        return outputs, [
            table.at[feature].add(-after(output, LEARNING_RATE) * d_vector)
            for table, feature, d_vector, output in arrays
        ]

    count = range(workload.num_tables)
    state = {
        "tables": [
            jnp.full((workload.vocabulary_size, workload.embedding_dim), 0.01, jnp.float32)
            for _ in count
        ],
        "accumulators": [jnp.full((workload.vocabulary_size,), 0.1, jnp.float32) for _ in count],
    }

    def run_adagrad(k: int) -> object:
        outputs, state["tables"], state["accumulators"] = adagrad_step(
            state["tables"], state["accumulators"], batches[k]
        )
        return jax.block_until_ready((outputs, state))

    def run_sgd(k: int) -> object:
        outputs, state["tables"] = sgd_step(state["tables"], batches[k])
        return jax.block_until_ready((outputs, state))

    return {
        "lookup": lambda k: jax.block_until_ready(lookup(state["tables"], batches[k])),
        "step, Adagrad": run_adagrad,
        "step, SGD": run_sgd,
    }


def torch_contestant(workload: Workload, ids: np.ndarray) -> dict[str, Run]:
    """Lookup and steps of torch; raises ImportError without it."""
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
    """One record per kind of run."""
    ids = timing.draw_ids(workload, law, seed=3)
    num_unique = float(np.mean([sum(np.unique(own).size for own in batch) for batch in ids]))
    contestants = {name: make(workload, ids) for name, make in makers.items()}
    records = []
    for what in STATE_BYTES:
        times = timing.race(
            {name: runs[what] for name, runs in contestants.items() if what in runs}, num_rounds
        )
        milliseconds = {name: own.median for name, own in times.items()}
        needed = timing.least_bytes(workload, num_unique, state_bytes=STATE_BYTES[what])
        milliseconds["memory"] = 1e3 * needed / bandwidth
        records.append(
            {"workload": workload.name, "ids": law, "what": what, "milliseconds": milliseconds}
        )
        print(format_record(records[-1]), flush=True)
    contestants.clear()
    gc.collect()
    return records


def format_record(record: dict) -> str:
    """A row of the printed table."""
    times = record["milliseconds"]

    def cell(name: str, divisor: float = 1.0) -> str:
        return f"{times[name] / divisor:11.2f}" if name in times else " " * 10 + "-"

    ours = times["ours"]
    numbers = (
        cell("ours")
        + cell("torch")
        + cell("xla")
        + cell("torch", ours)
        + cell("xla", ours)
        + cell("memory")
    )
    return f"{record['workload']:<9}{record['ids']:<9}{record['what']:<17}{numbers}"


def main() -> int:
    """Prints the table, and writes it if asked."""
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
        print(
            "torch is not installed, its columns stay empty; `pip install 'rsembed[bench]'` fills them."
        )
        del makers["torch"]
    print(f"{'workload':<9}{'ids':<9}{'what':<17}", end="")
    print(
        "".join(
            f"{head:>11}"
            for head in ("ours ms", "torch ms", "xla ms", "torch/ours", "xla/ours", "memory ms")
        )
    )
    records, bandwidth = [], timing.bytes_per_second()
    for workload in timing.WORKLOADS:
        if workload.name in options.workloads:
            for law in ("uniform", "zipf"):
                records += measure(workload, law, options.rounds, makers, bandwidth)
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
