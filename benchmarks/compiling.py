"""Times what the first step of a model costs before it runs, by wing and number of tables, on pretended devices.

    python benchmarks/compiling.py [--tables 26,100] [--wings "core, dense;core, hashed"] [--json PATH]

Tables that are alike but for their names, 4,096 rows of 16 each, batch 64, 4 ids a feature, Adagrad, on 8 pretended
devices. A step is a lookup, the gradient of half the squared distance to one, and an update. What is told is by how
much the first call of a step, which traces and compiles all programs that it needs, takes longer than the third. For
calls outside of `jit`, as the model-parallel wing's are here, that is a few programs; for the others it is one. Tables
of `core, hashed, unlike` have as many sizes as there are tables, from 1,000 to 300,000 rows.
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

ROWS, DIM, BATCH, IDS = 4096, 16, 64, 4
RULE = rs.optimizers.Adagrad(0.1)
Step = Callable[[], object]


def mesh() -> jax.sharding.Mesh:
    """All pretended devices."""
    return jax.make_mesh((NUM_DEVICES,), ("device",))


def ids_of(num_tables: int) -> np.ndarray:
    """Ids `[tables, batch, ids]`."""
    return np.random.default_rng(0).integers(0, ROWS, (num_tables, BATCH, IDS))


def core(num_tables: int, *, storage: Any = None, is_unlike: bool = False) -> Step:
    """An `EmbeddingCollection` in a compiled step."""
    sizes = (
        np.geomspace(1_000, 300_000, num_tables).astype(int).tolist()
        if is_unlike
        else [ROWS] * num_tables
    )
    features = [
        rs.FeatureSpec(
            name=f"f{k}",
            table_spec=rs.TableSpec(
                name=f"t{k}",
                vocabulary_size=sizes[k],
                embedding_dim=DIM,
                optimizer=RULE,
                storage=storage,
            ),
        )
        for k in range(num_tables)
    ]
    collection = rs.EmbeddingCollection(features, mesh=mesh())
    state = jax.block_until_ready(collection.init(jax.random.key(0)))
    batch = collection.prepare({f"f{k}": own for k, own in enumerate(ids_of(num_tables))})

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(jax.tree.map(lambda x: x - 1.0, activations)))

    def step() -> object:
        nonlocal state
        state = train(state, batch)
        return state

    return step


def model_parallel(num_tables: int, *, use_hashtable: bool) -> Step:
    """Variables in one group, which compiles its own programs."""
    context = sok.Init()
    variables = [
        sok.embedding_variable(
            f"t{k}",
            DIM,
            rows_per_device=ROWS // NUM_DEVICES,
            use_hashtable=use_hashtable,
            optimizer=RULE,
            context=context,
            rngs=nnx.Rngs(0),
        )
        for k in range(num_tables)
    ]
    ids = list(ids_of(num_tables))

    def step() -> object:
        outputs, backward = sok.group_embedding_lookup_vjp(variables, ids, ["sum"] * num_tables)
        backward([output - 1.0 for output in outputs])
        return [variable.get_value() for variable in variables]

    return step


def sparse_core(num_tables: int) -> Step:
    """The layer for Linen, whose tables are stacked; parameters are donated to a compiled step."""
    devices = mesh()
    table_specs = [
        embedding_spec.TableSpec(
            name=f"t{k}",
            vocabulary_size=ROWS,
            embedding_dim=DIM,
            initializer=jax.nn.initializers.normal(),
            optimizer=embedding_spec.AdagradOptimizerSpec(0.1),
            combiner="sum",
            max_ids_per_partition=BATCH * IDS,
            max_unique_ids_per_partition=BATCH * IDS,
        )
        for k in range(num_tables)
    ]
    specs = linen.FrozenDict(
        {
            f"f{k}": embedding_spec.FeatureSpec(
                name=f"f{k}", table_spec=table, input_shape=(BATCH, IDS), output_shape=(BATCH, DIM)
            )
            for k, table in enumerate(table_specs)
        }
    )
    embedding.prepare_feature_specs_for_training(specs, NUM_DEVICES, num_sc_per_device=1)
    ids = linen.FrozenDict(
        {f"f{k}": own.astype(np.int32) for k, own in enumerate(ids_of(num_tables))}
    )
    ones = jax.tree.map(lambda own: np.ones(own.shape, np.float32), ids)
    inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
        ids, ones, specs, NUM_DEVICES, NUM_DEVICES, num_sc_per_device=1
    )
    data, whole = (
        NamedSharding(devices, own) for own in (PartitionSpec("device"), PartitionSpec())
    )
    inputs = jax.device_put(inputs, data)
    layer = embed.SparseCoreEmbed(feature_specs=specs, mesh=devices, sharding_axis="device")
    shardings = linen.get_sharding(jax.eval_shape(layer.init, jax.random.key(0), inputs), devices)
    start = jax.jit(layer.init, in_shardings=(whole, data), out_shardings=shardings)
    params = jax.block_until_ready(start(jax.random.key(0), inputs))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def train(params, inputs):
        def loss_of(params):
            return sum(
                jnp.square(out - 1.0).sum() / 2
                for out in jax.tree.leaves(layer.apply(params, inputs))
            )

        return embed_optimizer.apply_updates_for_sc_model(
            params, jax.grad(loss_of, allow_int=True)(params)
        )

    def step() -> object:
        nonlocal params
        params = train(params, inputs)
        return params

    return step


def table_batched(num_tables: int) -> Step:
    """The module in one compiled step."""
    specs = [(ROWS, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)] * num_tables
    module = tbe.TableBatchedEmbeddingBags(specs, optimizer="exact_adagrad", mesh=mesh())
    ids = ids_of(num_tables)
    batch = module.prepare(ids.reshape(-1), np.arange(0, ids.size + 1, IDS))

    @functools.partial(nnx.jit, donate_argnums=0)
    def train(module, batch):
        outputs, backward = module.vjp(batch)
        backward(jax.tree.map(lambda x: x - 1.0, outputs))

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
    """How long a call takes until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--tables", default="26,100", help="numbers of tables, comma-separated")
    parser.add_argument(
        "--wings", default=";".join(WINGS), help="separated by semicolons; default all"
    )
    options = parser.parse_args()
    names = options.wings.split(";")
    if unknown := set(names) - WINGS.keys():
        parser.error(f"unknown wings {sorted(unknown)}; choose from {'; '.join(WINGS)}")
    numbers = [int(number) for number in options.tables.split(",")]
    jax.block_until_ready(jnp.ones(8) + 1)  # what the backend itself needs
    records = []
    print(
        f"{'seconds before the first step':<32}"
        + "".join(f"{number:>8} tables" for number in numbers)
    )
    for name in names:
        found = []
        for number in numbers:
            step = WINGS[name](number)
            first, _, later = (seconds_of(step) for _ in range(3))
            found.append(first - later)
            records.append({"wing": name, "tables": number, "seconds": first - later})
            jax.clear_caches()
        print(f"{name:<32}" + "".join(f"{seconds:15.1f}" for seconds in found), flush=True)
    timing.write_records(options, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
