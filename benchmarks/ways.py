"""Times training steps of one model by where its rows are kept and how devices ask for them, in one run.

    python benchmarks/ways.py [--rounds 3] [--contestants "dense;hashed"] [--json PATH]

Four tables of 1M rows of 32, batch 4096, 10 ids a feature by Zipf 1.05, Adagrad. A step is a lookup, the gradient of
half the squared distance to one, and `collection.update`; with `apply` it is `pullback` and `collection.apply`. All
contestants take turns of the same eight batches, and the ratio is to the first of them, which keeps rows in an array on
one device:

* `mesh of 1`, `4`, `8`: rows with one owner each, on a mesh of pretended devices that share the cores.
* `hashed`: the ids are keys that all have rows. `hashed, new`: every key of every batch is new and gets one.
* `hashed, mesh of 4`, `8`: known keys with one owner each.
* `train`, and on a mesh of 4 and 8: cores of ranks 32, 32 on every device.
* `SparseCore`, and on a mesh of 4 and 8: the wing's functions, with batches that were preprocessed beforehand.
* `table-batched`, and on a mesh of 4 and 8: the module in one compiled step, with batches that were prepared.
* `model-parallel` and `model-parallel, hashed`, also in `nnx.jit` and on a mesh of 4: the wing's group of four tables.
* `2 processes` and `hashed, 2 processes` run behind the others: a device each, half of the batch each.

All devices and processes share the cores of this machine, so the rows of a batch are read and stepped in the time that
one device takes, and the rest is what finding owners, travelling and waiting for each other costs: the share of the
exchange. Bytes are those that all devices send for an id, padding included; a lookup and an update send equally
many. A lookup of trains sends nothing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_DEVICES = 8
# A process of `parallel.launch`, which says how many devices it has.
IS_CHILD = "RSEMBED_PROCESS_ID" in os.environ
if not IS_CHILD:
    devices = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402
from flax import nnx  # noqa: E402

import rsembed as rs  # noqa: E402
from rsembed import parallel, sok, tbe  # noqa: E402
from rsembed.parallel.exchange import default_capacity  # noqa: E402
from rsembed.sparsecore import embedding, embedding_spec  # noqa: E402
from rsembed.tt import TensorTrain  # noqa: E402

NUM_TABLES, ROWS, DIM, BATCH, IDS = 4, 1_000_000, 32, 4096, 10
NAMES = [f"feature_{k}" for k in range(NUM_TABLES)]


def draw_batches() -> np.ndarray:
    """Ids `[batches, tables, batch, ids]`."""
    shape = (timing.NUM_BATCHES, NUM_TABLES, BATCH, IDS)
    return timing.ids_by_law("zipf", ROWS, shape, 3, exponent=1.05)


def collection_of(
    mesh: jax.sharding.Mesh | None, storage: rs.Hashed | TensorTrain | None
) -> rs.EmbeddingCollection:
    """The model's tables; on a mesh, each row with one owner, and trains everywhere."""
    tables = [
        rs.TableSpec(
            name=name,
            vocabulary_size=ROWS,
            embedding_dim=DIM,
            optimizer=rs.optimizers.Adagrad(0.01),
            storage=storage,
        )
        for name in NAMES
    ]
    features = [
        rs.FeatureSpec(name=name, table_spec=table)
        for name, table in zip(NAMES, tables, strict=True)
    ]
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


WINGS = (
    "hashed",
    "train",
    "SparseCore",
    "table-batched",
    "model-parallel, hashed",
    "model-parallel",
)
"""What has a contestant of its own on one device, beside which its others stand."""


class Contestant:
    """Takes a step of the batch of a number; with new keys, every turn begins with an empty table."""

    def __init__(
        self,
        ids: np.ndarray,
        make_step: Callable = updating,
        *,
        num_devices: int | None = None,
        storage: rs.Hashed | TensorTrain | None = None,
        has_new_keys: bool = False,
    ):
        chosen = jax.devices()[:num_devices]
        mesh = (
            None
            if num_devices is None
            else jax.make_mesh((len(chosen),), ("shard",), devices=chosen)
        )
        self.num_devices, self.collection = len(chosen) if mesh else 1, collection_of(mesh, storage)
        collection = self.collection
        self.step, self.init = make_step(collection), jax.jit(collection.init)
        self.has_new_keys, self.num_calls = has_new_keys, 0
        # An id travels as a row number; or as both halves of a key, its table, its count and its first place.
        self.num_lanes = 5 if isinstance(storage, rs.Hashed) else 1
        self.state = jax.block_until_ready(self.init(jax.random.key(0)))
        if has_new_keys:  # keys of other batches have another upper half
            ids = np.stack([own.astype(np.int64) + (k << 32) for k, own in enumerate(ids)])
        share = BATCH // jax.process_count()
        first = share * jax.process_index()
        batches = [dict(zip(NAMES, batch[:, first : first + share], strict=True)) for batch in ids]
        self.batches = [collection.prepare(batch) for batch in batches]
        if isinstance(storage, rs.Hashed) and not has_new_keys:
            for batch in self.batches:
                self.state = self.step(self.state, batch)

    def __call__(self, k: int) -> object:
        self.state = jax.block_until_ready(self.step(self.state, self.batches[k]))
        # The first call of a turn is not timed, and is of a batch that comes again.
        if self.has_new_keys and self.num_calls % (timing.NUM_BATCHES + 1) == 0:
            self.state = jax.block_until_ready(self.init(jax.random.key(0)))
        self.num_calls += 1
        return self.state

    def bytes_per_id(self) -> float:
        """What all devices send for an id in a step of the first batch, by the formula of docs/distributed.md."""
        _, statistics = self.collection.lookup(self.state, self.batches[0], return_statistics=True)
        # Of the stack that all tables share.
        num_rounds = max(map(int, statistics.num_rounds.values()))
        num_ids = NUM_TABLES * BATCH * IDS // self.num_devices
        places = num_rounds * (self.num_devices - 1) * default_capacity(num_ids, self.num_devices)
        return 2 * 4 * places * (self.num_lanes + DIM) / num_ids


class SparseCoreContestant:
    """The same by the SparseCore wing, whose batches are preprocessed before they are timed."""

    def __init__(self, ids: np.ndarray, *, num_devices: int = 1):
        mesh = jax.make_mesh((num_devices,), ("shard",), devices=jax.devices()[:num_devices])
        specs = {
            name: embedding_spec.FeatureSpec(
                name=name,
                table_spec=embedding_spec.TableSpec(
                    name=name,
                    vocabulary_size=ROWS,
                    embedding_dim=DIM,
                    optimizer=embedding_spec.AdagradOptimizerSpec(0.01),
                    max_ids_per_partition=BATCH * IDS,
                    max_unique_ids_per_partition=BATCH * IDS,
                    suggested_coo_buffer_size_per_device=2 * BATCH * IDS // num_devices,
                ),
                input_shape=(BATCH, IDS),
                output_shape=(BATCH, DIM),
            )
            for name in NAMES
        }
        embedding.prepare_feature_specs_for_training(specs, num_devices)
        split = jax.sharding.PartitionSpec("shard")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("shard", None))

        def on_device(variables, batch):
            options = {"global_device_count": num_devices}
            outputs = embedding.sparse_dense_matmul(batch, variables, specs, **options)
            gradients = jax.tree.map(lambda x: x - 1.0, outputs)
            return embedding.sparse_dense_matmul_grad(gradients, batch, variables, specs, **options)

        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split)
        self.step = jax.jit(mapped, donate_argnums=0)
        tables = embedding.get_table_specs(specs)
        self.state = embedding.init_embedding_variables(jax.random.key(0), tables, sharding)
        preprocess = functools.partial(
            embedding.preprocess_sparse_dense_matmul_input,
            features_weights=None,
            feature_specs=specs,
            local_device_count=num_devices,
            global_device_count=num_devices,
        )
        inputs = [preprocess(dict(zip(NAMES, batch, strict=True)))[0] for batch in ids]
        self.batches = [
            jax.device_put(own, jax.sharding.NamedSharding(mesh, split)) for own in inputs
        ]

    def __call__(self, k: int) -> object:
        self.state = jax.block_until_ready(self.step(self.state, self.batches[k]))
        return self.state

    def bytes_per_id(self) -> float:
        """Not told."""
        return 0.0


class TableBatchedContestant:
    """The same by the table-batched wing, whose batches are prepared before they are timed."""

    def __init__(self, ids: np.ndarray, *, num_devices: int | None = None):
        chosen = jax.devices()[:num_devices]
        mesh = (
            None
            if num_devices is None
            else jax.make_mesh((num_devices,), ("shard",), devices=chosen)
        )
        specs = [(ROWS, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)] * NUM_TABLES
        how: dict[str, Any] = {"optimizer": "exact_adagrad", "eps": 1e-10, "mesh": mesh}
        self.module = tbe.TableBatchedEmbeddingBags(specs, feature_names=NAMES, **how)
        ends = np.arange(0, ids[0].size + 1, ids.shape[-1])
        self.batches = [self.module.prepare(batch.reshape(-1), ends) for batch in ids]

        @functools.partial(nnx.jit, donate_argnums=0)
        def step(module, batch):
            outputs, backward = module.vjp(batch)
            backward(jax.tree.map(lambda x: x - 1.0, outputs))

        self.step = step

    def __call__(self, k: int) -> object:
        self.step(self.module, self.batches[k])
        return jax.block_until_ready(self.module.state.get_value())

    def bytes_per_id(self) -> float:
        """Not told; those of the core."""
        return 0.0


class ModelParallelContestant:
    """The same by the model-parallel wing: eager calls, which compile inside, or one step that is given the tables."""

    def __init__(
        self, ids: np.ndarray, *, is_hashed: bool, in_jit: bool = False, num_devices: int = 1
    ):
        mesh = jax.make_mesh((num_devices,), ("shard",), devices=jax.devices()[:num_devices])
        context = sok.Init(mesh=mesh)
        how = {
            "rows_per_device": ROWS // num_devices,
            "use_hashtable": is_hashed,
            "optimizer": rs.optimizers.Adagrad(0.01),
        }
        self.variables = nnx.List(
            [
                sok.embedding_variable(name, DIM, context=context, rngs=nnx.Rngs(0), **how)
                for name in NAMES
            ]
        )
        self.batches = [list(batch) for batch in ids]
        if in_jit:
            self.batches = [
                [context.place(sok.split_keys(own)) for own in batch] for batch in self.batches
            ]

        def step(variables, batch):
            outputs, backward = sok.group_embedding_lookup_vjp(
                list(variables), batch, ["sum"] * NUM_TABLES
            )
            backward([output - 1.0 for output in outputs])

        self.step = nnx.jit(step, donate_argnums=0) if in_jit else step
        for batch in self.batches:
            self.step(self.variables, batch)

    def __call__(self, k: int) -> object:
        self.step(self.variables, self.batches[k])
        return jax.block_until_ready([variable.get_value() for variable in self.variables])

    def bytes_per_id(self) -> float:
        """Not told; those of the core."""
        return 0.0


AnyContestant = Contestant | SparseCoreContestant | TableBatchedContestant | ModelParallelContestant


def makers(ids: np.ndarray) -> dict[str, Callable[[], AnyContestant]]:
    """All contestants of one process by name, to be made."""
    make = functools.partial(functools.partial, Contestant, ids)
    meshes = {f"mesh of {n}": {"num_devices": n} for n in (1, NUM_DEVICES // 2, NUM_DEVICES)}
    hashed: dict[str, Any] = {"storage": rs.Hashed()}
    train: dict[str, Any] = {"storage": TensorTrain((32, 32))}
    return {
        "dense": make(),
        "dense, apply": make(applying),
        **{name: make(**mesh) for name, mesh in meshes.items()},
        "hashed": make(**hashed),
        "hashed, apply": make(applying, **hashed),
        "hashed, new": make(has_new_keys=True, **hashed),
        **{
            f"hashed, {name}": make(**mesh, **hashed)
            for name, mesh in meshes.items()
            if mesh["num_devices"] > 1
        },
        "train": make(**train),
        **{
            f"train, {name}": make(**mesh, **train)
            for name, mesh in meshes.items()
            if mesh["num_devices"] > 1
        },
        "SparseCore": functools.partial(SparseCoreContestant, ids),
        **{
            f"SparseCore, mesh of {n}": functools.partial(SparseCoreContestant, ids, num_devices=n)
            for n in (NUM_DEVICES // 2, NUM_DEVICES)
        },
        "table-batched": functools.partial(TableBatchedContestant, ids),
        **{
            f"table-batched, mesh of {n}": functools.partial(
                TableBatchedContestant, ids, num_devices=n
            )
            for n in (NUM_DEVICES // 2, NUM_DEVICES)
        },
        **{
            f"{name}{where}": functools.partial(
                ModelParallelContestant, ids, is_hashed="hashed" in name, **how
            )
            for name in ("model-parallel", "model-parallel, hashed")
            for where, how in (
                ("", {}),
                (", jit", {"in_jit": True}),
                (", mesh of 4", {"num_devices": 4}),
            )
        },
    }


def run(
    contestants: dict[str, Callable[[], AnyContestant]],
    num_rounds: int,
    num_warm: int | None = None,
) -> dict[str, dict[str, float]]:
    """Their times and what they send."""
    made = {name: make() for name, make in contestants.items()}
    times = timing.race(made, num_rounds, num_warm=num_warm)
    return {
        name: {**own._asdict(), "bytes per id": made[name].bytes_per_id()}
        for name, own in times.items()
    }


def run_as_child(path: str, num_rounds: int) -> None:
    """The contestants of several processes; the first process writes what it finds to a file."""
    parallel.init()
    make = functools.partial(
        functools.partial, Contestant, draw_batches(), num_devices=jax.device_count()
    )
    name = f"{jax.process_count()} processes"
    found = run(
        {name: make(), f"hashed, {name}": make(storage=rs.Hashed())}, num_rounds, num_warm=2
    )
    if jax.process_index() == 0:
        Path(path).write_text(json.dumps(found))


def run_processes(num_processes: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """The same contestants in processes of their own, which share the cores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        if parallel.launch(__file__, [str(path), str(num_rounds)], num_processes=num_processes):
            sys.exit("a process failed; its last lines are above.")
        return json.loads(path.read_text())


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times all batches are run")
    parser.add_argument("--contestants", help="separated by semicolons; default all")
    options = parser.parse_args()
    known, of_processes = makers(draw_batches()), ["2 processes", "hashed, 2 processes"]
    names = ["dense", *(options.contestants or ";".join([*known, *of_processes])).split(";")]
    if unknown := set(names) - set(known) - set(of_processes):
        parser.error(
            f"unknown contestants {sorted(unknown)}; choose from {'; '.join([*known, *of_processes])}"
        )
    found = run(
        {name: known[name] for name in dict.fromkeys(names) if name in known}, options.rounds
    )
    if set(names) & set(of_processes):
        found |= run_processes(2, options.rounds)
    print(
        f"{'':<22}{'ms':>9}{'best ms':>9}{'ns/id':>8}{'ratio':>7}{'exchange':>10}{'bytes/id':>10}"
    )
    dense, ns_per_id = found["dense"]["median"], 1e6 / (NUM_TABLES * BATCH * IDS)
    for name, own in found.items():
        ms, wing = own["median"], name.split(",")[0] if name.startswith(WINGS) else "dense"
        here, is_split = found.get(wing, {}).get("median"), "mesh of" in name or "processes" in name
        line = f"{name:<22}{ms:9.2f}{own['best']:9.2f}{ns_per_id * ms:8.0f}{ms / dense:7.2f}"
        if is_split and here is not None:
            line += f"{1 - here / ms:10.0%}" + (
                f"{own['bytes per id']:10.0f}" if own["bytes per id"] else ""
            )
        print(line)
    timing.write_records(options, found)
    return 0


if __name__ == "__main__":
    if IS_CHILD:
        run_as_child(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
