"""Times tensor-train lookups and training steps beside plain JAX, a dense table and tensorly-torch.

    python benchmarks/tt.py [--rows 11000000] [--batches 512,4096] [--ids 20] [--json PATH]
    python benchmarks/tt.py --published [--json PATH]

The table has the published shape: 11 million rows and 64 columns, p 200·220·250, q 4·4·4, ranks
32·32. A step is a lookup, the gradient and an SGD update. The contestants take turns with eight
batches, with the same ids and the same gradient of the outputs. Times are medians in nanoseconds per
looked-up row.

* ours: `rsembed.tt.TTEmbeddingBag` with the fused update, without a cache.
* ours, each: `rsembed.tt.bag` in plain JAX (`implementation="plain"`), which computes the row of each
  id separately, as the published kernels do.
* ours d=2: two cores with at most the bytes of the published three.
* ours cached: with 1 % of the rows cached. Other batches by the same law chose these rows.
* plain: slices of each core gathered for each id, two einsums, and `jax.grad`.
* dense: `table[ids].sum(1)`, and a scatter of the gradient into the donated table, if the table has
  at most `--dense-rows` rows.
* tensorly-torch: `FactorizedEmbedding` with `torch.optim.SGD`, if it is installed.

GFLOP/s count the products of a lookup once for a lookup and three times for a step, whatever a
contestant computes. The peak is that of one large product of matrices in JAX on this machine.

`--published` runs only the benchmark of the page that published the module: 512 bags of 20 uniform
ids, forward, backward and SGD, on the first device of JAX. It prints microseconds per id beside the
published number, which was measured on a GPU of 2020 that the page does not name.
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
    """A table, and batches with a fixed number of ids per bag."""

    spec: TTSpec
    batch_size: int
    ids_per_bag: int
    law: str

    @property
    def num_lookups(self) -> int:
        return self.batch_size * self.ids_per_bag

    def draw_ids(self, seed: int) -> np.ndarray:
        """Ids `[NUM_BATCHES, batch, ids per bag]` by the law `uniform` or `zipf`.

        The Zipf law has exponent 1.05, and its frequent ids are spread over the whole table.
        """
        num_rows = self.spec.num_embeddings
        shape = (NUM_BATCHES, self.batch_size, self.ids_per_bag)
        ranks = ids_by_law(self.law, num_rows, shape, seed, exponent=1.05)
        if self.law == "uniform":
            return ranks
        return np.random.default_rng(0).permutation(num_rows).astype(np.int32)[ranks]

    def draw_gradient(self) -> np.ndarray:
        shape = (self.batch_size, self.spec.embedding_dim)
        return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def compiled_runs(
    workload: Workload, state: Any, lookup: Callable, step: Callable
) -> dict[str, Run]:
    """Runs of two functions, compiled.

    Args:
      workload: table and batches.
      state: initial state.
      lookup: function of the state and the ids of a batch that returns the output.
      step: function of the state and the ids of a batch that returns the output and the new state.
    """
    batches = [jnp.asarray(ids) for ids in workload.draw_ids(seed=3)]
    compiled_lookup = jax.jit(lookup)
    compiled_step = jax.jit(step, donate_argnums=0)

    def run_lookup(k: int) -> object:
        return jax.block_until_ready(compiled_lookup(state, batches[k]))

    def run_step(k: int) -> object:
        nonlocal state
        output, state = compiled_step(state, batches[k])
        return jax.block_until_ready((output, state))

    return {"lookup": run_lookup, "step": run_step}


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
    gradient = jnp.asarray(workload.draw_gradient())
    graph, state = nnx.split(emb)

    def lookup(state, ids):
        return nnx.merge(graph, state)(ids)

    def step(state, ids):
        emb = nnx.merge(graph, state)
        output, backward = emb.vjp(ids)
        # In training, the gradient depends on the output, so XLA reads cached rows before it updates
        # them. Without this sum, XLA might update them first, and would copy all cached rows.
        backward(gradient + 0.0 * output[0, 0])
        return output, nnx.state(emb)

    return compiled_runs(workload, state, lookup, step)


def plain_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of gathered slices and einsums."""
    spec = workload.spec

    def pooled(cores, ids):
        flat_ids = ids.reshape(-1)
        product = jnp.ones((flat_ids.size, 1, 1))
        shapes = zip(cores, spec.strides, spec.tt_p_shapes, spec.slice_shapes, strict=True)
        for core, stride, num_slices, slice_shape in shapes:
            slices = core[flat_ids // stride % num_slices].reshape(-1, *slice_shape)
            product = jnp.einsum("ncr,nrqs->ncqs", product, slices)
            product = product.reshape(flat_ids.size, -1, slice_shape[2])
        return product.reshape(*ids.shape, spec.embedding_dim).sum(1)

    return function_contestant(workload, pooled)


def function_contestant(workload: Workload, pooled: Callable[[Any, Any], Any]) -> dict[str, Run]:
    """Lookup and SGD step of a function of cores and ids."""
    gradient = jnp.asarray(workload.draw_gradient())

    def step(cores, ids):
        output, pullback = jax.vjp(lambda cores: pooled(cores, ids), cores)
        (d_cores,) = pullback(gradient)
        new_cores = jax.tree.map(lambda core, d_core: core - LEARNING_RATE * d_core, cores, d_cores)
        return output, new_cores

    return compiled_runs(workload, init_cores(jax.random.key(0), workload.spec), pooled, step)


def dense_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of a dense table."""
    spec = workload.spec
    gradient = jnp.asarray(workload.draw_gradient())

    def lookup(table, ids):
        return table[ids].sum(1)

    def step(table, ids):
        output = lookup(table, ids)
        # The learning rate depends on the output, so that XLA does not update the table before the
        # lookup, and does not copy it.
        rate = LEARNING_RATE + 0.0 * output[0, 0]
        return output, table.at[ids].add(-rate * gradient[:, None, :])

    table = jnp.full((spec.num_embeddings, spec.embedding_dim), 0.01)
    return compiled_runs(workload, table, lookup, step)


def torch_contestant(workload: Workload) -> dict[str, Run]:
    """Lookup and SGD step of tensorly-torch. Raises ImportError if it is not installed."""
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
    """GFLOP/s of a large product of matrices in float32, the best of six."""
    product = jax.jit(jnp.matmul)
    matrix = jnp.ones((size, size))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        seconds.append(time.perf_counter() - start)
    return 2e-9 * size**3 / min(seconds)


def measure(workload: Workload, num_rounds: int, dense_rows: int) -> list[dict]:
    """A record for each contestant and kind of run."""
    spec = workload.spec

    def separate_rows(cores: Any, ids: Any) -> Any:
        return bag(spec, cores, Bags.from_dense(ids), implementation="plain")

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
        "ours, each": function_contestant(workload, separate_rows),
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
        runs = {name: contestant[what] for name, contestant in contestants.items()}
        for name, times in race(runs, num_rounds).items():
            nanoseconds = 1e6 * times.median / workload.num_lookups
            gflops = None
            # A cached row and a row of a dense table need no products.
            if name in specs and name != "ours cached":
                num_products = 3 if what == "step" else 1
                gflops = num_products * specs[name].flops_per_lookup / nanoseconds
            record = {
                "bags": f"{workload.batch_size}x{workload.ids_per_bag}",
                "ids": workload.law,
                "what": what,
                "contestant": name,
                "nanoseconds_per_lookup": nanoseconds,
                "gflops": gflops,
            }
            records.append(record)
            print(format_record(record), flush=True)
    return records


def format_record(record: dict) -> str:
    """A row of the printed table."""
    gflops = "-"
    if record["gflops"] is not None:
        gflops = f"{record['gflops']:.1f}"
    run = f"{record['bags']:<10}{record['ids']:<9}{record['what']:<8}{record['contestant']:<16}"
    return f"{run}{record['nanoseconds_per_lookup']:>12.0f}{gflops:>10}"


def measure_published(
    num_rounds: int, *, spec: TTSpec = PUBLISHED_SPEC, batch_size: int = 512
) -> dict:
    """Microseconds per id of a step of the published benchmark, and the name of the device."""
    workload = Workload(spec=spec, batch_size=batch_size, ids_per_bag=20, law="uniform")
    step = module_contestant(workload, spec)["step"]
    milliseconds = race({"step": step}, num_rounds)["step"]
    return {
        "device": f"{jax.devices()[0].device_kind} ({measured_on()})",
        "median": 1e3 * milliseconds.median / workload.num_lookups,
        "best": 1e3 * milliseconds.best / workload.num_lookups,
        "published": PUBLISHED_MICROSECONDS,
    }


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
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
