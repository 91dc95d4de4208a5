"""Times lookups of few samples, as a server makes them, from ids in numpy to vectors.

    python benchmarks/serving.py [--samples 1,8,64] [--rounds 8] [--json PATH]

26 tables of 100,000 rows of 64, one uniform id each. Contestants take turns of eight distinct batches.

* compiled: `jax.jit(collection.lookup)` of the arrays as they are. prepared: of `collection.prepare(batch)`, which is
  checked. eager: `collection.lookup(state, batch)`. for serving: what `rs.for_serving` gives, compiled, in plain JAX.
* torch: an `EmbeddingBag` a table. FBGEMM: its module on the host. Both without gradients, if they can be imported.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import timing

import rsembed as rs
from rsembed.plot.drawing import measured_on

NUM_TABLES, ROWS, DIM = 26, 100_000, 64
Batches = list[dict[str, np.ndarray]]


def draw_batches(num_samples: int) -> Batches:
    """Distinct batches of uniform ids `[samples]`."""
    rng = np.random.default_rng(0)
    return [
        {f"f{k:02}": rng.integers(0, ROWS, num_samples, dtype=np.int32) for k in range(NUM_TABLES)}
        for _ in range(timing.NUM_BATCHES)
    ]


def our_contestants(batches: Batches) -> dict[str, timing.Run]:
    """The collection in four ways; each returns vectors by feature."""
    tables = [
        rs.TableSpec(name=name, vocabulary_size=ROWS, embedding_dim=DIM) for name in batches[0]
    ]
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(name=table.name, table_spec=table) for table in tables]
    )
    state = collection.init(jax.random.key(0))
    serve, served = rs.for_serving(collection, state)
    compiled, compiled_serve = jax.jit(collection.lookup), jax.jit(serve)
    return {
        "compiled": lambda k: jax.block_until_ready(compiled(state, batches[k])),
        "prepared": lambda k: jax.block_until_ready(
            compiled(state, collection.prepare(batches[k]))
        ),
        "eager": lambda k: jax.block_until_ready(collection.lookup(state, batches[k])),
        "for serving": lambda k: jax.block_until_ready(compiled_serve(served, batches[k])),
    }


def torch_contestant(batches: Batches) -> timing.Run:
    """Torch's bags; raises ImportError without it."""
    import torch

    bags = [torch.nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(NUM_TABLES)]
    offsets = torch.arange(len(batches[0]["f00"]))

    @torch.no_grad()
    def run(k: int) -> object:
        return [
            bag(torch.from_numpy(ids), offsets.int())
            for bag, ids in zip(bags, batches[k].values(), strict=True)
        ]

    return run


def fbgemm_contestant(batches: Batches) -> timing.Run:
    """FBGEMM's module; raises ImportError without it."""
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
        return tables(torch.from_numpy(np.concatenate([*batches[k].values()])).long(), offsets)

    return run


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--samples", default="1,8,64", help="of a batch, separated by commas")
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
        for name, own in times.items():
            print(
                f"{num_samples:>4} samples {name:<12}{own.median:8.3f} ms (best {own.best:.3f})",
                flush=True,
            )
        records[str(num_samples)] = {name: own._asdict() for name, own in times.items()}
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
