"""Times tensor-train lookups and training steps against plain JAX, a dense table and tensorly-torch, in one run.

    python benchmarks/tt.py [--rows 11000000] [--batches 512,4096] [--ids 20] [--json PATH]
    python benchmarks/tt.py --published [--json PATH]

The published shape: 11 million rows of 64 numbers, p 200·220·250, q 4·4·4, ranks 32·32. The contestants take turns of
eight batches, on the same ids and the same gradient of the outputs; times are medians in nanoseconds per lookup. A step
is a lookup, the gradient and one SGD update.

* ours: `rsembed.tt.TTEmbeddingBag` with the fused update, without a cache.
* ours, each: `rsembed.tt.bag` in plain JAX (`implementation="plain"`): every lookup makes its own row, as published.
* ours d=2: two cores with at most as many numbers.
* ours cached: with 1 % of the rows cached, chosen from as many ids as are timed, of other batches of the same law.
* plain: slices of every core gathered per lookup, two einsums, `jax.grad`.
* dense: `table[ids].sum(1)`, and a scatter of the gradient into the donated table. Not above `--dense-rows` rows.
* tensorly-torch: `FactorizedEmbedding` with `torch.optim.SGD`, if it is installed.

With `--published` only the benchmark of the page that published the module is run: 512 bags of 20
uniform ids, forward, backward and SGD, on JAX's first device of whatever kind. It prints microseconds
per id beside the published ones, which are of a GPU of 2020 that the page does not name.

Counted FLOP are those of the products of a lookup, and three times as many for a step, whatever was executed. The peak
is that of one large product in JAX on this machine.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import NUM_BATCHES, Run, ids_by_law, make_parser, race, write_records

from rsembed import Bags
from rsembed.plot.drawing import measured_on
from rsembed.tt import TTEmbeddingBag, TTSpec, bag, init_cores, suggested_tt_shapes

LEARNING_RATE = 0.01
RANK = 32
PUBLISHED_MICROSECONDS = 0.416
PUBLISHED_SPEC = TTSpec(11_000_000, (200, 220, 250), (4, 4, 4), (RANK, RANK))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One table, a fixed number of ids per bag."""

    spec: TTSpec
    batch_size: int
    ids_per_bag: int
    law: str

    @property
    def num_lookups(self) -> int:
        return self.batch_size * self.ids_per_bag

    def draw_ids(self, seed: int) -> np.ndarray:
        """Ids `[NUM_BATCHES, batch, ids per bag]`; law `zipf` has exponent 1.05 and frequent ids anywhere."""
        rows, shape = self.spec.num_embeddings, (NUM_BATCHES, self.batch_size, self.ids_per_bag)
        drawn = ids_by_law(self.law, rows, shape, seed, exponent=1.05)
        return (
            drawn
            if self.law == "uniform"
            else np.random.default_rng(0).permutation(rows).astype(np.int32)[drawn]
        )

    def draw_gradient(self) -> np.ndarray:
        shape = (self.batch_size, self.spec.embedding_dim)
        return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def compiled_runs(
    workload: Workload, state: Any, lookup: Callable, step: Callable
) -> dict[str, Run]:
    """Compiled runs of `lookup(state, ids)`, and of `step(state, ids)`, which returns the output and the new state."""
    batches, held = [jnp.asarray(ids) for ids in workload.draw_ids(seed=3)], {"state": state}
    lookup, step = jax.jit(lookup), jax.jit(step, donate_argnums=0)

    def run_step(k: int) -> object:
        output, held["state"] = step(held["state"], batches[k])
        return jax.block_until_ready((output, held["state"]))

    return {
        "lookup": lambda k: jax.block_until_ready(lookup(held["state"], batches[k])),
        "step": run_step,
    }


def module_contestant(
    workload: Workload, spec: TTSpec, *, cached_fraction: float = 0.0
) -> dict[str, Run]:
    """Lookup and fused step of a module."""
    cache_size = int(cached_fraction * spec.num_embeddings)
    emb = TTEmbeddingBag(
        spec.num_embeddings,
        spec.embedding_dim,
        spec.tt_ranks,
        spec.tt_p_shapes,
        spec.tt_q_shapes,
        learning_rate=LEARNING_RATE,
        use_cache=cache_size > 0,
        cache_size=cache_size,
    )
    if cache_size:
        emb.update_cache(workload.draw_ids(seed=4).reshape(-1, workload.ids_per_bag))
        emb.cache_populate()
    gradient, (graph, state) = jnp.asarray(workload.draw_gradient()), nnx.split(emb)

    def lookup(state, ids):
        return nnx.merge(graph, state)(ids)

    def step(state, ids):
        emb = nnx.merge(graph, state)
        output, backward = emb.vjp(ids)
        # In training the loss sees to it that cached rows are read before they are stepped. Here the gradient does: XLA
        # would be free to step first, and would copy all cached rows to do so.
        backward(gradient + 0.0 * output[0, 0])
        return output, nnx.state(emb)

    return compiled_runs(workload, state, lookup, step)


def plain_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of gathered slices and einsums."""
    spec = workload.spec

    def pooled(cores, ids):
        flat = ids.reshape(-1)
        product = jnp.ones((flat.size, 1, 1))
        for core, stride, p, shape in zip(
            cores, spec.strides, spec.tt_p_shapes, spec.slice_shapes, strict=True
        ):
            slices = core[flat // stride % p].reshape(-1, *shape)
            product = jnp.einsum("ncr,nrqs->ncqs", product, slices).reshape(flat.size, -1, shape[2])
        return product.reshape(*ids.shape, spec.embedding_dim).sum(1)

    return function_contestant(workload, pooled)


def function_contestant(workload: Workload, pooled: Callable[[Any, Any], Any]) -> dict[str, Run]:
    """Lookup and SGD step of a function of cores and ids."""
    gradient = jnp.asarray(workload.draw_gradient())

    def step(cores, ids):
        output, pull = jax.vjp(lambda c: pooled(c, ids), cores)
        (d_cores,) = pull(gradient)
        return output, jax.tree.map(lambda c, g: c - LEARNING_RATE * g, cores, d_cores)

    return compiled_runs(workload, init_cores(jax.random.key(0), workload.spec), pooled, step)


def dense_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of a table that is stored."""
    spec, gradient = workload.spec, jnp.asarray(workload.draw_gradient())

    def lookup(table, ids):
        return table[ids].sum(1)

    def step(table, ids):
        output = lookup(table, ids)
        # The update waits for the lookup; otherwise XLA would copy the table to do both at once.
        rate = LEARNING_RATE + 0.0 * output[0, 0]
        return output, table.at[ids].add(-rate * gradient[:, None, :])

    return compiled_runs(
        workload, jnp.full((spec.num_embeddings, spec.embedding_dim), 0.01), lookup, step
    )


def torch_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of tensorly-torch; raises ImportError without it."""
    import tltorch
    import torch

    spec = workload.spec
    table = tltorch.FactorizedEmbedding(
        spec.num_embeddings,
        spec.embedding_dim,
        auto_tensorize=False,
        tensorized_num_embeddings=spec.tt_p_shapes,
        tensorized_embedding_dim=spec.tt_q_shapes,
        factorization="blocktt",
        rank=list(spec.ranks),
    )
    optimizer = torch.optim.SGD(table.parameters(), lr=LEARNING_RATE)
    batches = [torch.from_numpy(ids.astype(np.int64)) for ids in workload.draw_ids(seed=3)]
    gradient = torch.from_numpy(workload.draw_gradient())

    def lookup(k: int) -> object:
        with torch.no_grad():
            return table(batches[k]).sum(1)

    def step(k: int) -> object:
        optimizer.zero_grad(set_to_none=True)
        output = table(batches[k]).sum(1)
        output.backward(gradient)
        optimizer.step()
        return output

    return {"lookup": lookup, "step": step}


def peak_gflops(size: int = 2048) -> float:
    """What one large float32 product reaches here."""
    product, matrix, times = jax.jit(jnp.matmul), jnp.ones((size, size)), []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        times.append(time.perf_counter() - start)
    return 2e-9 * size**3 / min(times)


def measure(workload: Workload, num_rounds: int, dense_rows: int) -> list[dict]:
    """One record per contestant and kind of run."""
    spec = workload.spec
    two_cores = TTSpec.for_budget(
        spec.num_embeddings, spec.embedding_dim, bytes=spec.num_bytes(), num_cores=2
    )
    specs = {
        "ours": spec,
        "ours, each": spec,
        "ours d=2": two_cores,
        "ours cached": spec,
        "plain": spec,
        "tensorly-torch": spec,
    }
    contestants = {
        "ours": module_contestant(workload, spec),
        "ours, each": function_contestant(
            workload,
            lambda cores, ids: bag(spec, cores, Bags.from_dense(ids), implementation="plain"),
        ),
        "ours d=2": module_contestant(workload, two_cores),
        "ours cached": module_contestant(workload, spec, cached_fraction=0.01),
        "plain": plain_contestant(workload),
    }
    if spec.num_embeddings <= dense_rows:
        contestants["dense"] = dense_contestant(workload)
    try:
        contestants["tensorly-torch"] = torch_contestant(workload)
    except ImportError:
        print("tensorly-torch is not installed and left out.", file=sys.stderr)
    records = []
    for what in ("lookup", "step"):
        for name, times in race(
            {name: runs[what] for name, runs in contestants.items()}, num_rounds
        ).items():
            flops = (
                (3 if what == "step" else 1) * specs[name].flops_per_lookup if name in specs else 0
            )
            nanoseconds = 1e6 * times.median / workload.num_lookups
            record = {
                "bags": f"{workload.batch_size}x{workload.ids_per_bag}",
                "ids": workload.law,
                "what": what,
                "contestant": name,
                "nanoseconds_per_lookup": nanoseconds,
                "gflops": None if name == "ours cached" or not flops else flops / nanoseconds,
            }
            records.append(record)
            gflops = "-" if record["gflops"] is None else f"{record['gflops']:.1f}"
            print(
                f"{record['bags']:<10}{workload.law:<9}{what:<8}{name:<16}{nanoseconds:>12.0f}{gflops:>10}",
                flush=True,
            )
    return records


def measure_published(
    num_rounds: int, *, spec: TTSpec = PUBLISHED_SPEC, batch_size: int = 512
) -> dict:
    """Microseconds per id of a step of the published benchmark, and the device that took them."""
    workload = Workload(spec=spec, batch_size=batch_size, ids_per_bag=20, law="uniform")
    times = race({"step": module_contestant(workload, spec)["step"]}, num_rounds)["step"]
    microseconds_per_millisecond = 1e3
    return {
        "device": f"{jax.devices()[0].device_kind} ({measured_on()})",
        "median": microseconds_per_millisecond * times.median / workload.num_lookups,
        "best": microseconds_per_millisecond * times.best / workload.num_lookups,
        "published": PUBLISHED_MICROSECONDS,
    }


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=11_000_000, help="rows of the table")
    parser.add_argument(
        "--dense-rows", type=int, default=11_000_000, help="largest dense table to make"
    )
    parser.add_argument("--batches", default="512,4096", help="bags per batch, comma-separated")
    parser.add_argument("--ids", type=int, default=20, help="ids per bag")
    parser.add_argument("--rounds", type=int, default=4, help="times all batches are run")
    parser.add_argument("--published", action="store_true", help="only the published benchmark")
    options = parser.parse_args()
    if options.published:
        record = measure_published(options.rounds)
        print(
            f"512 bags of 20 ids, forward and backward, us per id: {record['median']:.3f} "
            f"(best {record['best']:.3f}) on {record['device']}; published, on a GPU of 2020: "
            f"{PUBLISHED_MICROSECONDS}"
        )
        write_records(options, record)
        return 0
    shape = tuple(suggested_tt_shapes(options.rows))
    spec = TTSpec(options.rows, shape, (4, 4, 4), (RANK, RANK))
    print(f"{spec}\npeak {peak_gflops():.0f} GFLOP/s")
    print(f"{'bags':<10}{'ids':<9}{'what':<8}{'contestant':<16}{'ns / lookup':>12}{'GFLOP/s':>10}")
    records = []
    for batch_size in map(int, options.batches.split(",")):
        for law in ("uniform", "zipf"):
            workload = Workload(spec=spec, batch_size=batch_size, ids_per_bag=options.ids, law=law)
            records += measure(workload, options.rounds, options.dense_rows)
    write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
