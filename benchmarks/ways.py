"""Times training steps of one model with several storages, wings and numbers of devices, in one run.

    python benchmarks/ways.py [--rounds 3] [--contestants "dense;hashed"] [--json PATH]

The model has four tables of 1M rows and 32 columns, a batch of 4096 samples, ten ids per feature by a
Zipf law with exponent 1.05, and Adagrad. A step is a lookup, the gradient of half the squared
distance to one, and `collection.update`, or with `apply`, the pullback and `collection.apply`. All
contestants take turns with the same eight batches. Ratios are relative to the first contestant,
`dense`: arrays on one device.

* `mesh of 1`, `4`, `8`: each row has one owner, on a mesh of emulated devices that share the cores.
* `hashed`: ids are keys, and all of them have rows.
* `hashed, new`: all keys of every batch are new, and get rows.
* `hashed, mesh of 4`, `8`: keys that have rows, with one owner each.
* `train`, also on meshes: tensor trains of ranks 32, 32, with the cores on every device.
* `SparseCore`, also on meshes: functions of the wing, with batches that are already preprocessed.
* `table-batched`, also on meshes: the module in one compiled step, with batches that are already
  prepared.
* `model-parallel` and `model-parallel, hashed`, also in `nnx.jit` and on a mesh of 4: the wing's
  group of four tables.
* `2 processes` and `hashed, 2 processes`: one device and half of the batch per process. They run
  after all other contestants.

All devices and processes share the cores of this machine. So several devices read and update the rows
of a batch in the time of one device, and the rest of their time is the share of the exchange: finding
the owners, sending, and waiting for each other. Bytes are those that all devices send for an id,
padding included. A lookup and an update send the same number of bytes, and lookups of tensor trains
send nothing.
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
IS_CHILD = "RSEMBED_PROCESS_ID" in os.environ
# `parallel.launch` sets the number of devices of its processes.
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

NUM_TABLES = 4
NUM_ROWS = 1_000_000
DIM = 32
BATCH_SIZE = 4096
IDS_PER_SAMPLE = 10
NAMES = [f"feature_{k}" for k in range(NUM_TABLES)]


def draw_batches() -> np.ndarray:
    """Ids `[batches, tables, batch, ids]`."""
    shape = (timing.NUM_BATCHES, NUM_TABLES, BATCH_SIZE, IDS_PER_SAMPLE)
    return timing.ids_by_law("zipf", NUM_ROWS, shape, 3, exponent=1.05)


def collection_of(
    mesh: jax.sharding.Mesh | None, storage: rs.Hashed | TensorTrain | None
) -> rs.EmbeddingCollection:
    """The tables of the model, with a feature each."""
    features = []
    for name in NAMES:
        table = rs.TableSpec(
            name=name,
            vocabulary_size=NUM_ROWS,
            embedding_dim=DIM,
            optimizer=rs.optimizers.Adagrad(0.01),
            storage=storage,
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    return rs.EmbeddingCollection(features, mesh=mesh)


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    return jax.make_mesh((num_devices,), ("shard",), devices=jax.devices()[:num_devices])


def distance_gradients(outputs: Any) -> Any:
    """Gradients of half the squared distance to one."""
    return jax.tree.map(lambda output: output - 1.0, outputs)


def update_step(collection: rs.EmbeddingCollection) -> Callable:
    """A compiled step with `update`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        outputs = collection.lookup(state, batch)
        return collection.update(state, batch, distance_gradients(outputs))

    return step


def apply_step(collection: rs.EmbeddingCollection) -> Callable:
    """A compiled step with `apply`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        outputs, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(distance_gradients(outputs)))

    return step


# Storages and wings with a contestant on one device, which their other contestants are compared with.
BASES = (
    "hashed",
    "train",
    "SparseCore",
    "table-batched",
    "model-parallel, hashed",
    "model-parallel",
)


class Contestant:
    """Steps of an `EmbeddingCollection`. Calls take the number of a batch.

    Args:
      ids: ids of all batches, as `draw_batches` returns them.
      make_step: `update_step` or `apply_step`.
      num_devices: number of devices of the mesh. None: no mesh.
      storage: storage of the tables.
      has_new_keys: if all keys of each batch are new. Then every turn begins with empty tables.
    """

    def __init__(
        self,
        ids: np.ndarray,
        make_step: Callable = update_step,
        *,
        num_devices: int | None = None,
        storage: rs.Hashed | TensorTrain | None = None,
        has_new_keys: bool = False,
    ):
        mesh = None
        if num_devices is not None:
            mesh = mesh_of(num_devices)
        self.num_devices = num_devices or 1
        self.collection = collection_of(mesh, storage)
        self.step = make_step(self.collection)
        self.init = jax.jit(self.collection.init)
        self.has_new_keys = has_new_keys
        self.num_calls = 0
        # Number of words of 32 bits that an id takes: one for a row number. A key takes five, for its
        # two halves, its table, its count and the position of its first occurrence.
        self.num_lanes = 1
        if isinstance(storage, rs.Hashed):
            self.num_lanes = 5
        self.state = jax.block_until_ready(self.init(jax.random.key(0)))
        if has_new_keys:
            # The upper half of a key is the number of its batch.
            upper_halves = np.arange(len(ids), dtype=np.int64) << 32
            ids = ids + upper_halves[:, None, None, None]
        samples_per_process = BATCH_SIZE // jax.process_count()
        first = samples_per_process * jax.process_index()
        self.batches = []
        for batch in ids:
            ids_of_process = batch[:, first : first + samples_per_process]
            features = dict(zip(NAMES, ids_of_process, strict=True))
            self.batches.append(self.collection.prepare(features))
        if isinstance(storage, rs.Hashed) and not has_new_keys:
            for batch in self.batches:
                self.state = self.step(self.state, batch)

    def __call__(self, k: int) -> object:
        self.state = jax.block_until_ready(self.step(self.state, self.batches[k]))
        # A turn is one untimed call and a call for each batch. The untimed call takes the last batch.
        if self.has_new_keys and self.num_calls % (timing.NUM_BATCHES + 1) == 0:
            self.state = jax.block_until_ready(self.init(jax.random.key(0)))
        self.num_calls += 1
        return self.state

    def bytes_per_id(self) -> float:
        """Bytes that all devices send for an id in a step of the first batch.

        The formula is that of docs/distributed.md.
        """
        _, statistics = self.collection.lookup(self.state, self.batches[0], return_statistics=True)
        num_rounds = max(map(int, statistics.num_rounds.values()))
        num_ids = NUM_TABLES * BATCH_SIZE * IDS_PER_SAMPLE // self.num_devices
        capacity = default_capacity(num_ids, self.num_devices)
        num_entries = num_rounds * (self.num_devices - 1) * capacity
        return 2 * 4 * num_entries * (self.num_lanes + DIM) / num_ids


class SparseCoreContestant:
    """Steps of the SparseCore wing. Batches are preprocessed before they are timed."""

    def __init__(self, ids: np.ndarray, *, num_devices: int = 1):
        mesh = mesh_of(num_devices)
        num_ids = BATCH_SIZE * IDS_PER_SAMPLE
        specs = {}
        for name in NAMES:
            table = embedding_spec.TableSpec(
                name=name,
                vocabulary_size=NUM_ROWS,
                embedding_dim=DIM,
                optimizer=embedding_spec.AdagradOptimizerSpec(0.01),
                max_ids_per_partition=num_ids,
                max_unique_ids_per_partition=num_ids,
                suggested_coo_buffer_size_per_device=2 * num_ids // num_devices,
            )
            specs[name] = embedding_spec.FeatureSpec(
                name=name,
                table_spec=table,
                input_shape=(BATCH_SIZE, IDS_PER_SAMPLE),
                output_shape=(BATCH_SIZE, DIM),
            )
        embedding.prepare_feature_specs_for_training(specs, num_devices)
        sharded = jax.sharding.PartitionSpec("shard")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("shard", None))

        def on_device(variables, batch):
            options = {"global_device_count": num_devices}
            outputs = embedding.sparse_dense_matmul(batch, variables, specs, **options)
            gradients = distance_gradients(outputs)
            return embedding.sparse_dense_matmul_grad(gradients, batch, variables, specs, **options)

        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=sharded, out_specs=sharded)
        self.step = jax.jit(mapped, donate_argnums=0)
        tables = embedding.get_table_specs(specs)
        self.state = embedding.init_embedding_variables(jax.random.key(0), tables, sharding)
        self.batches = []
        for batch in ids:
            inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
                dict(zip(NAMES, batch, strict=True)),
                features_weights=None,
                feature_specs=specs,
                local_device_count=num_devices,
                global_device_count=num_devices,
            )
            inputs = jax.device_put(inputs, jax.sharding.NamedSharding(mesh, sharded))
            self.batches.append(inputs)

    def __call__(self, k: int) -> object:
        self.state = jax.block_until_ready(self.step(self.state, self.batches[k]))
        return self.state

    def bytes_per_id(self) -> float:
        """Not measured."""
        return 0.0


class TableBatchedContestant:
    """Steps of the table-batched wing. Batches are prepared before they are timed."""

    def __init__(self, ids: np.ndarray, *, num_devices: int | None = None):
        mesh = None
        if num_devices is not None:
            mesh = mesh_of(num_devices)
        table = (NUM_ROWS, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)
        self.module = tbe.TableBatchedEmbeddingBags(
            [table] * NUM_TABLES,
            feature_names=NAMES,
            optimizer="exact_adagrad",
            eps=1e-10,
            mesh=mesh,
        )
        offsets = np.arange(0, ids[0].size + 1, IDS_PER_SAMPLE)
        self.batches = [self.module.prepare(batch.reshape(-1), offsets) for batch in ids]

        @functools.partial(nnx.jit, donate_argnums=0)
        def step(module, batch):
            outputs, backward = module.vjp(batch)
            backward(distance_gradients(outputs))

        self.step = step

    def __call__(self, k: int) -> object:
        self.step(self.module, self.batches[k])
        return jax.block_until_ready(self.module.state.get_value())

    def bytes_per_id(self) -> float:
        """Not measured. They are the bytes of the core."""
        return 0.0


class ModelParallelContestant:
    """Steps of the model-parallel wing.

    Args:
      ids: ids of all batches, as `draw_batches` returns them.
      is_hashed: if the tables are hash tables.
      in_jit: if a step is one program. Otherwise a step is two calls, which run compiled programs.
      num_devices: number of devices of the mesh.
    """

    def __init__(
        self, ids: np.ndarray, *, is_hashed: bool, in_jit: bool = False, num_devices: int = 1
    ):
        context = sok.Init(mesh=mesh_of(num_devices))
        self.variables = nnx.List()
        for name in NAMES:
            variable = sok.embedding_variable(
                name,
                DIM,
                rows_per_device=NUM_ROWS // num_devices,
                use_hashtable=is_hashed,
                optimizer=rs.optimizers.Adagrad(0.01),
                context=context,
                rngs=nnx.Rngs(0),
            )
            self.variables.append(variable)
        self.batches: list[list[Any]] = []
        for batch in ids:
            keys: list[Any] = list(batch)
            if in_jit:
                keys = [context.place(sok.split_keys(ids_of_table)) for ids_of_table in batch]
            self.batches.append(keys)

        def step(variables, batch):
            combiners = ["sum"] * NUM_TABLES
            outputs, backward = sok.group_embedding_lookup_vjp(list(variables), batch, combiners)
            backward(distance_gradients(outputs))

        self.step = step
        if in_jit:
            self.step = nnx.jit(step, donate_argnums=0)
        for batch in self.batches:
            self.step(self.variables, batch)

    def __call__(self, k: int) -> object:
        self.step(self.variables, self.batches[k])
        return jax.block_until_ready([variable.get_value() for variable in self.variables])

    def bytes_per_id(self) -> float:
        """Not measured. They are the bytes of the core."""
        return 0.0


AnyContestant = Contestant | SparseCoreContestant | TableBatchedContestant | ModelParallelContestant


def makers(ids: np.ndarray) -> dict[str, Callable[[], AnyContestant]]:
    """Functions that make the contestants of one process, by name."""
    collection = functools.partial(functools.partial, Contestant, ids)
    sparse_core = functools.partial(functools.partial, SparseCoreContestant, ids)
    table_batched = functools.partial(functools.partial, TableBatchedContestant, ids)
    model_parallel = functools.partial(functools.partial, ModelParallelContestant, ids)
    hashed = rs.Hashed()
    train = TensorTrain((32, 32))
    makers: dict[str, Callable[[], AnyContestant]] = {}
    makers["dense"] = collection()
    makers["dense, apply"] = collection(apply_step)
    for num_devices in (1, 4, 8):
        makers[f"mesh of {num_devices}"] = collection(num_devices=num_devices)
    makers["hashed"] = collection(storage=hashed)
    makers["hashed, apply"] = collection(apply_step, storage=hashed)
    makers["hashed, new"] = collection(storage=hashed, has_new_keys=True)
    makers["train"] = collection(storage=train)
    makers["SparseCore"] = sparse_core()
    makers["table-batched"] = table_batched()
    for num_devices in (4, 8):
        mesh = f"mesh of {num_devices}"
        makers[f"hashed, {mesh}"] = collection(num_devices=num_devices, storage=hashed)
        makers[f"train, {mesh}"] = collection(num_devices=num_devices, storage=train)
        makers[f"SparseCore, {mesh}"] = sparse_core(num_devices=num_devices)
        makers[f"table-batched, {mesh}"] = table_batched(num_devices=num_devices)
    for name, is_hashed in (("model-parallel", False), ("model-parallel, hashed", True)):
        makers[name] = model_parallel(is_hashed=is_hashed)
        makers[f"{name}, jit"] = model_parallel(is_hashed=is_hashed, in_jit=True)
        makers[f"{name}, mesh of 4"] = model_parallel(is_hashed=is_hashed, num_devices=4)
    return makers


def run(
    contestants: dict[str, Callable[[], AnyContestant]],
    num_rounds: int,
    num_warm: int | None = None,
) -> dict[str, dict[str, float]]:
    """Times of the contestants, and the bytes that they send."""
    made = {name: make() for name, make in contestants.items()}
    times = timing.race(made, num_rounds, num_warm=num_warm)
    records = {}
    for name, contestant in made.items():
        records[name] = times[name]._asdict() | {"bytes per id": contestant.bytes_per_id()}
    return records


def run_as_child(path: str, num_rounds: int) -> None:
    """Runs the contestants of several processes. The first process writes the records to a file."""
    parallel.init()
    make = functools.partial(
        functools.partial, Contestant, draw_batches(), num_devices=jax.device_count()
    )
    name = f"{jax.process_count()} processes"
    contestants = {name: make(), f"hashed, {name}": make(storage=rs.Hashed())}
    records = run(contestants, num_rounds, num_warm=2)
    if jax.process_index() == 0:
        Path(path).write_text(json.dumps(records))


def run_processes(num_processes: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Records of the contestants of several processes, which share the cores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.json")
        if parallel.launch(__file__, [str(path), str(num_rounds)], num_processes=num_processes):
            sys.exit("a process failed. Its last lines are above.")
        return json.loads(path.read_text())


def line_of(name: str, records: dict[str, dict[str, float]]) -> str:
    """A line of the printed table."""
    record = records[name]
    milliseconds = record["median"]
    ns_per_id = 1e6 * milliseconds / (NUM_TABLES * BATCH_SIZE * IDS_PER_SAMPLE)
    ratio = milliseconds / records["dense"]["median"]
    line = f"{name:<22}{milliseconds:9.2f}{record['best']:9.2f}{ns_per_id:8.0f}{ratio:7.2f}"
    base = "dense"
    if name.startswith(BASES):
        base = name.split(",")[0]
    is_distributed = "mesh of" in name or "processes" in name
    if is_distributed and base in records:
        line += f"{1 - records[base]['median'] / milliseconds:10.0%}"
        if record["bytes per id"]:
            line += f"{record['bytes per id']:10.0f}"
    return line


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times all batches are run")
    parser.add_argument("--contestants", help="separated by semicolons; default all")
    options = parser.parse_args()
    known = makers(draw_batches())
    of_processes = ["2 processes", "hashed, 2 processes"]
    names = [*known, *of_processes]
    if options.contestants:
        names = ["dense", *options.contestants.split(";")]
    unknown = set(names) - set(known) - set(of_processes)
    if unknown:
        choices = "; ".join([*known, *of_processes])
        parser.error(f"unknown contestants {sorted(unknown)}; choose from {choices}")
    chosen = {name: known[name] for name in dict.fromkeys(names) if name in known}
    records = run(chosen, options.rounds)
    if set(names) & set(of_processes):
        records |= run_processes(2, options.rounds)
    heads = f"{'ms':>9}{'best ms':>9}{'ns/id':>8}{'ratio':>7}{'exchange':>10}{'bytes/id':>10}"
    print(f"{'':<22}{heads}")
    for name in records:
        print(line_of(name, records))
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    if IS_CHILD:
        run_as_child(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
