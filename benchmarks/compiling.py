"""Times how long the first step of a model takes to compile, by wing and number of tables.

    python benchmarks/compiling.py [--tables 26,100] [--wings "core, dense;core, hashed"] [--json PATH]

The mesh has 8 emulated devices. Tables have 4,096 rows and 16 columns and differ only in their names,
a batch has 64 samples with 4 ids for each feature, and Adagrad trains the tables. Tables of
`core, hashed, unlike` all have different sizes, from 1,000 to 300,000 rows.

A step is a lookup, the gradient of half the squared distance to one, and an update. The number is the
difference between the first call of a step, which traces and compiles all programs, and the third
call. A step of the model-parallel wing calls several programs, a step of the others is one program.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

NUM_DEVICES = 8
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402
from flax import linen, nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import rsembed as rs  # noqa: E402
from rsembed import sok, tbe, tt  # noqa: E402
from rsembed.sparsecore import embedding, embedding_spec  # noqa: E402
from rsembed.sparsecore.linen import embed, embed_optimizer  # noqa: E402

NUM_ROWS = 4096
DIM = 16
BATCH_SIZE = 64
IDS_PER_SAMPLE = 4
RULE = rs.optimizers.Adagrad(0.1)
Step = Callable[[], object]


def mesh() -> jax.sharding.Mesh:
    """A mesh of all emulated devices."""
    return jax.make_mesh((NUM_DEVICES,), ("device",))


def ids_of(num_tables: int) -> np.ndarray:
    """Ids `[tables, batch, ids]`."""
    return np.random.default_rng(0).integers(0, NUM_ROWS, (num_tables, BATCH_SIZE, IDS_PER_SAMPLE))


def distance_gradients(outputs: Any) -> Any:
    """Gradients of half the squared distance to one."""
    return jax.tree.map(lambda output: output - 1.0, outputs)


def core(num_tables: int, *, storage: Any = None, is_unlike: bool = False) -> Step:
    """A compiled step of an `EmbeddingCollection`."""
    sizes = [NUM_ROWS] * num_tables
    if is_unlike:
        sizes = np.geomspace(1_000, 300_000, num_tables).astype(int).tolist()
    features = []
    ids = {}
    for k, ids_of_table in enumerate(ids_of(num_tables)):
        table = rs.TableSpec(
            name=f"t{k}",
            vocabulary_size=sizes[k],
            embedding_dim=DIM,
            optimizer=RULE,
            storage=storage,
        )
        features.append(rs.FeatureSpec(name=f"f{k}", table_spec=table))
        ids[f"f{k}"] = ids_of_table
    collection = rs.EmbeddingCollection(features, mesh=mesh())
    state = jax.block_until_ready(collection.init(jax.random.key(0)))
    batch = collection.prepare(ids)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(distance_gradients(activations)))

    def step() -> object:
        nonlocal state
        state = train(state, batch)
        return state

    return step


def model_parallel(num_tables: int, *, use_hashtable: bool) -> Step:
    """A step of variables in one group, which compiles its programs itself."""
    context = sok.Init()
    variables = []
    for k in range(num_tables):
        variable = sok.embedding_variable(
            f"t{k}",
            DIM,
            rows_per_device=NUM_ROWS // NUM_DEVICES,
            use_hashtable=use_hashtable,
            optimizer=RULE,
            context=context,
            rngs=nnx.Rngs(0),
        )
        variables.append(variable)
    ids = list(ids_of(num_tables))

    def step() -> object:
        outputs, backward = sok.group_embedding_lookup_vjp(variables, ids, ["sum"] * num_tables)
        backward(distance_gradients(outputs))
        return [variable.get_value() for variable in variables]

    return step


def sparse_core(num_tables: int) -> Step:
    """A compiled step of the Linen layer of the SparseCore wing, with donated parameters."""
    devices = mesh()
    feature_specs = {}
    feature_ids = {}
    for k, ids_of_table in enumerate(ids_of(num_tables)):
        table = embedding_spec.TableSpec(
            name=f"t{k}",
            vocabulary_size=NUM_ROWS,
            embedding_dim=DIM,
            initializer=jax.nn.initializers.normal(),
            optimizer=embedding_spec.AdagradOptimizerSpec(0.1),
            combiner="sum",
            max_ids_per_partition=BATCH_SIZE * IDS_PER_SAMPLE,
            max_unique_ids_per_partition=BATCH_SIZE * IDS_PER_SAMPLE,
        )
        feature_specs[f"f{k}"] = embedding_spec.FeatureSpec(
            name=f"f{k}",
            table_spec=table,
            input_shape=(BATCH_SIZE, IDS_PER_SAMPLE),
            output_shape=(BATCH_SIZE, DIM),
        )
        feature_ids[f"f{k}"] = ids_of_table.astype(np.int32)
    specs = linen.FrozenDict(feature_specs)
    ids = linen.FrozenDict(feature_ids)
    embedding.prepare_feature_specs_for_training(specs, NUM_DEVICES, num_sc_per_device=1)
    weights = jax.tree.map(lambda array: np.ones(array.shape, np.float32), ids)
    inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
        ids, weights, specs, NUM_DEVICES, NUM_DEVICES, num_sc_per_device=1
    )
    sharded = NamedSharding(devices, PartitionSpec("device"))
    replicated = NamedSharding(devices, PartitionSpec())
    inputs = jax.device_put(inputs, sharded)
    layer = embed.SparseCoreEmbed(feature_specs=specs, mesh=devices, sharding_axis="device")
    shapes = jax.eval_shape(layer.init, jax.random.key(0), inputs)
    shardings = linen.get_sharding(shapes, devices)
    init = jax.jit(layer.init, in_shardings=(replicated, sharded), out_shardings=shardings)
    params = jax.block_until_ready(init(jax.random.key(0), inputs))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def train(params, inputs):
        def loss_of(params):
            loss = 0.0
            for activations in jax.tree.leaves(layer.apply(params, inputs)):
                loss += jnp.square(activations - 1.0).sum() / 2
            return loss

        gradients = jax.grad(loss_of, allow_int=True)(params)
        return embed_optimizer.apply_updates_for_sc_model(params, gradients)

    def step() -> object:
        nonlocal params
        params = train(params, inputs)
        return params

    return step


def table_batched(num_tables: int) -> Step:
    """A compiled step of the table-batched module."""
    specs = [(NUM_ROWS, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)] * num_tables
    module = tbe.TableBatchedEmbeddingBags(specs, optimizer="exact_adagrad", mesh=mesh())
    ids = ids_of(num_tables)
    batch = module.prepare(ids.reshape(-1), np.arange(0, ids.size + 1, IDS_PER_SAMPLE))

    @functools.partial(nnx.jit, donate_argnums=0)
    def train(module, batch):
        outputs, backward = module.vjp(batch)
        backward(distance_gradients(outputs))

    def step() -> object:
        train(module, batch)
        return module.state.get_value()

    return step


WINGS: dict[str, Callable[[int], Step]] = {
    "core, dense": core,
    "core, hashed": functools.partial(core, storage=rs.Hashed()),
    "core, hashed, unlike": functools.partial(core, storage=rs.Hashed(), is_unlike=True),
    "core, tensor trains": functools.partial(core, storage=tt.TensorTrain((8,), (64, 64), (4, 4))),
    "SparseCore": sparse_core,
    "table-batched": table_batched,
    "model-parallel, indexed": functools.partial(model_parallel, use_hashtable=False),
    "model-parallel, hashed": functools.partial(model_parallel, use_hashtable=True),
}


def seconds_of(step: Step) -> float:
    """Seconds that a call takes until its results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def main() -> int:
    """Prints the table, and writes the records to the file of `--json`."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--tables", default="26,100", help="numbers of tables, comma-separated")
    parser.add_argument(
        "--wings", default=";".join(WINGS), help="separated by semicolons; default all"
    )
    options = parser.parse_args()
    names = options.wings.split(";")
    unknown = set(names) - WINGS.keys()
    if unknown:
        parser.error(f"unknown wings {sorted(unknown)}; choose from {'; '.join(WINGS)}")
    numbers = [int(number) for number in options.tables.split(",")]
    # The first program starts the backend.
    jax.block_until_ready(jnp.ones(8) + 1)
    heads = "".join(f"{number:>8} tables" for number in numbers)
    print(f"{'seconds before the first step':<32}{heads}")
    records = []
    for name in names:
        line = f"{name:<32}"
        for number in numbers:
            step = WINGS[name](number)
            first = seconds_of(step)
            seconds_of(step)
            third = seconds_of(step)
            records.append({"wing": name, "tables": number, "seconds": first - third})
            line += f"{first - third:15.1f}"
            jax.clear_caches()
        print(line, flush=True)
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
