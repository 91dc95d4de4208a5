"""Times lookups of a few samples, as a server makes them, from ids in numpy to vectors.

    python benchmarks/serving.py [--samples 1,8,64] [--rounds 8] [--json PATH]

There are 26 tables of 100,000 rows and 64 columns, with one uniform id each. The contestants take
turns with eight distinct batches:

* compiled: `jax.jit(collection.lookup)` with arrays of numpy.
* prepared: the same with `collection.prepare(batch)`, which checks the ids.
* eager: `collection.lookup(state, batch)`.
* for serving: the compiled function of `rs.for_serving`, which is plain JAX.
* torch: an `EmbeddingBag` for each table, without gradients.
* FBGEMM: its module on the host, without gradients.

torch and FBGEMM are left out if they cannot be imported.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import timing

import rsembed as rs
from rsembed.plot.drawing import measured_on

NUM_TABLES = 26
ROWS = 100_000
DIM = 64
Batches = list[dict[str, np.ndarray]]


def draw_batches(num_samples: int) -> Batches:
    """Distinct batches of uniform ids `[samples]`."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(timing.NUM_BATCHES):
        batch = {}
        for k in range(NUM_TABLES):
            batch[f"f{k:02}"] = rng.integers(0, ROWS, num_samples, dtype=np.int32)
        batches.append(batch)
    return batches


def our_contestants(batches: Batches) -> dict[str, timing.Run]:
    """Four kinds of lookups of the collection. Each returns vectors by feature."""
    features = []
    for name in batches[0]:
        table = rs.TableSpec(name=name, vocabulary_size=ROWS, embedding_dim=DIM)
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    collection = rs.EmbeddingCollection(features)
    state = collection.init(jax.random.key(0))
    compiled_lookup = jax.jit(collection.lookup)
    serve, tables = rs.for_serving(collection, state)
    compiled_serve = jax.jit(serve)

    def compiled(k: int) -> object:
        return jax.block_until_ready(compiled_lookup(state, batches[k]))

    def prepared(k: int) -> object:
        return jax.block_until_ready(compiled_lookup(state, collection.prepare(batches[k])))

    def eager(k: int) -> object:
        return jax.block_until_ready(collection.lookup(state, batches[k]))

    def for_serving(k: int) -> object:
        return jax.block_until_ready(compiled_serve(tables, batches[k]))

    return {
        "compiled": compiled,
        "prepared": prepared,
        "eager": eager,
        "for serving": for_serving,
    }


def torch_contestant(batches: Batches) -> timing.Run:
    """An `EmbeddingBag` of torch for each table. Raises ImportError without torch."""
    import torch

    bags = [torch.nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(NUM_TABLES)]
    offsets = torch.arange(len(batches[0]["f00"]))

    @torch.no_grad()
    def run(k: int) -> object:
        vectors = []
        for bag, ids in zip(bags, batches[k].values(), strict=True):
            vectors.append(bag(torch.from_numpy(ids), offsets.int()))
        return vectors

    return run


def fbgemm_contestant(batches: Batches) -> timing.Run:
    """FBGEMM's module. Raises ImportError without it."""
    import torch
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )

    tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)] * NUM_TABLES,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    offsets = torch.arange(NUM_TABLES * len(batches[0]["f00"]) + 1)

    @torch.no_grad()
    def run(k: int) -> object:
        ids = torch.from_numpy(np.concatenate([*batches[k].values()]))
        return tables(ids.long(), offsets)

    return run


def main() -> int:
    """Prints the times, and writes them to the file of `--json`."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--samples", default="1,8,64", help="sizes of batches, comma-separated")
    parser.add_argument("--rounds", type=int, default=8, help="times that all batches are run")
    options = parser.parse_args()
    records: dict[str, dict[str, object]] = {}
    print(measured_on())
    for num_samples in map(int, options.samples.split(",")):
        batches = draw_batches(num_samples)
        runs = our_contestants(batches)
        for name, make in {"torch": torch_contestant, "FBGEMM": fbgemm_contestant}.items():
            try:
                runs[name] = make(batches)
            except ImportError as error:
                print(f"without {name}: {error}")
        times = timing.race(runs, options.rounds)
        for name, (median, best) in times.items():
            print(
                f"{num_samples:>4} samples {name:<12}{median:8.3f} ms (best {best:.3f})", flush=True
            )
        records[str(num_samples)] = {name: times[name]._asdict() for name in times}
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
