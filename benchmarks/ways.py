"""Times training steps of one model by where its rows are kept and how devices ask for them, in one run.

    python benchmarks/ways.py [--rounds 3] [--contestants dense,hashed] [--json PATH]

Four tables of 1M rows of 32, batch 4096, 10 ids a feature by Zipf 1.05, Adagrad. A step is a lookup, the gradient of
half the squared distance to one, and `collection.update`; with `apply` it is `pullback` and `collection.apply`. All
contestants take turns of the same eight batches, and the last column divides by the first of them, which keeps rows in
an array on one device:

* `mesh of 1`, `mesh of 4`: rows with one owner each, on a mesh of pretended devices that share the cores.
* `hashed`: the ids are keys that all have rows. `hashed, new`: every key of every batch is new and gets one.
* `hashed, mesh of 4`: known keys with one owner each.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

NUM_DEVICES = 4
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402
from timing import Run  # noqa: E402

import rsembed as rs  # noqa: E402

NUM_TABLES, ROWS, DIM, BATCH, IDS = 4, 1_000_000, 32, 4096, 10
NAMES = [f"feature_{k}" for k in range(NUM_TABLES)]


def draw_batches() -> np.ndarray:
    """Ids `[batches, tables, batch, ids]`."""
    shape = (timing.NUM_BATCHES, NUM_TABLES, BATCH, IDS)
    return timing.ids_by_law("zipf", ROWS, shape, 3, exponent=1.05)


def collection_of(num_devices: int | None, storage: rs.Hashed | None) -> rs.EmbeddingCollection:
    """The model's tables; on a mesh of some devices, each row with one owner."""
    mesh = None if num_devices is None else jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    tables = [
        rs.TableSpec(
            name=name, vocabulary_size=ROWS, embedding_dim=DIM, optimizer=rs.AdagradOptimizerSpec(0.01), storage=storage
        )
        for name in NAMES
    ]
    features = [rs.FeatureSpec(name=name, table_spec=table) for name, table in zip(NAMES, tables, strict=True)]
    return rs.EmbeddingCollection(features, mesh=mesh)


def updating(collection: rs.EmbeddingCollection) -> Callable:
    """One compiled step by `update`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        outputs, _ = collection.lookup_vjp(state, batch)
        return collection.update(state, batch, jax.tree.map(lambda x: x - 1.0, outputs))

    return step


def applying(collection: rs.EmbeddingCollection) -> Callable:
    """One compiled step by `apply`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        outputs, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(jax.tree.map(lambda x: x - 1.0, outputs)))

    return step


def contestant(
    ids: np.ndarray,
    make_step: Callable = updating,
    *,
    num_devices: int | None = None,
    storage: rs.Hashed | None = None,
    has_new_keys: bool = False,
) -> Run:
    """A run that takes a batch's number; with new keys, every turn begins with an empty table."""
    collection = collection_of(num_devices, storage)
    step, init = make_step(collection), jax.jit(collection.init)
    held = {"calls": 0, "state": jax.block_until_ready(init(jax.random.key(0)))}
    batches = [collection.prepare(dict(zip(NAMES, batch, strict=True))) for batch in ids]
    if has_new_keys:  # keys of other batches have another upper half
        numbered = [(ids[k].astype(np.int64) + (k << 32)) for k in range(len(ids))]
        batches = [collection.prepare(dict(zip(NAMES, batch, strict=True))) for batch in numbered]
    elif storage is not None:
        for batch in batches:
            held["state"] = step(held["state"], batch)

    def run(k: int) -> object:
        held["state"] = jax.block_until_ready(step(held["state"], batches[k]))
        # The first call of a turn is not timed, and is of a batch that comes again.
        if has_new_keys and held["calls"] % (timing.NUM_BATCHES + 1) == 0:
            held["state"] = jax.block_until_ready(init(jax.random.key(0)))
        held["calls"] += 1
        return held["state"]

    return run


def makers(ids: np.ndarray) -> dict[str, Callable[[], Run]]:
    """All contestants by name, to be made."""
    make = functools.partial(functools.partial, contestant, ids)
    return {
        "dense": make(),
        "dense, apply": make(applying),
        "mesh of 1": make(num_devices=1),
        f"mesh of {NUM_DEVICES}": make(num_devices=NUM_DEVICES),
        "hashed": make(storage=rs.Hashed()),
        "hashed, apply": make(applying, storage=rs.Hashed()),
        "hashed, new": make(storage=rs.Hashed(), has_new_keys=True),
        f"hashed, mesh of {NUM_DEVICES}": make(num_devices=NUM_DEVICES, storage=rs.Hashed()),
    }


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times all batches are run")
    parser.add_argument("--contestants", help="separated by semicolons; default all")
    options = parser.parse_args()
    ids = draw_batches()
    known = makers(ids)
    names = ["dense", *(options.contestants or ";".join(known)).split(";")]
    if unknown := set(names) - set(known):
        parser.error(f"unknown contestants {sorted(unknown)}; choose from {'; '.join(known)}")
    times = timing.race({name: known[name]() for name in dict.fromkeys(names)}, options.rounds)
    num_ids = ids[0].size
    print(f"{'':<20}{'ms':>9}{'best ms':>9}{'ns/id':>8}{'ratio':>7}")
    for name, (median, best) in times.items():
        print(f"{name:<20}{median:9.2f}{best:9.2f}{1e6 * median / num_ids:8.0f}{median / times['dense'].median:7.2f}")
    timing.write_records(options, {name: own._asdict() for name, own in times.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
