"""Times whole training steps of a DLRM, from ids in numpy to updated tables, in one run.

    python benchmarks/dlrm.py [--gigabytes 1] [--batch 2048] [--rounds 4] [--json PATH]

The model has 26 tables with 64 columns. The numbers of rows are those of Criteo's Kaggle log, scaled
to the size of `--gigabytes`. A sample has one id for each table, drawn by a Zipf law, and 13 numbers.
The bottom MLP has layers of 512, 256 and 64, the top MLP of 512, 256 and 1, and between them are the
products of all pairs of 27 vectors. SGD trains the dense layers, row-wise Adagrad the tables. The
contestants take turns with eight distinct batches:

* core: an `EmbeddingCollection` under one `jax.jit`.
* core, own pairs: core with the pairs of plain JAX in place of `rs.pairwise_interaction`.
* nnx: the collection as a layer of an `nnx` model.
* hashed: core with ids as keys of hashed tables.
* host-cached: core with large tables on the host, and a tenth of their rows cached on the device.
* table-batched: the module of the table-batched wing in one `nnx.jit`.
* SparseCore: functions of the SparseCore wing, with preprocessing, and Adagrad with an accumulator
  for each value.
* plain JAX: tables are arrays, lookups are `table[ids]`, and SGD of optax updates everything with
  dense gradients.
* torch: `EmbeddingBag`s and Adagrad with an accumulator for each value, on a GPU if JAX has one.
* torch + FBGEMM: FBGEMM's module on the host, under torch's dense layers.
* TorchRec: TorchRec's fused collection over FBGEMM's module, under torch's dense layers.

Contestants that cannot be imported are left out.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
from flax import nnx

import rsembed as rs
from rsembed import tbe
from rsembed.kernels import reference
from rsembed.plot.drawing import measured_on
from rsembed.sparsecore import embedding, embedding_spec

CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUM_DENSE = 13
DIM = 64
NUM_VECTORS = len(CARDINALITIES) + 1
BOTTOM_WIDTHS = (NUM_DENSE, 512, 256, DIM)
TOP_WIDTHS = (DIM + NUM_VECTORS * (NUM_VECTORS - 1) // 2, 512, 256, 1)
DENSE_RATE = 0.01
TABLE_RATE = 0.01
Run = Callable[[int], object]


class Batch(NamedTuple):
    """Ids by table, and the numbers and labels of all samples, as arrays of numpy."""

    ids: dict[str, np.ndarray]
    dense: np.ndarray
    labels: np.ndarray


def table_sizes(gigabytes: float) -> list[int]:
    """Number of rows of each table, if all tables together have this size."""
    scale = gigabytes * 1e9 / (4 * DIM * sum(CARDINALITIES))
    return [max(3, round(scale * size)) for size in CARDINALITIES]


def draw_batches(sizes: list[int], batch_size: int) -> list[Batch]:
    """Distinct batches of Zipf ids."""
    rng = np.random.default_rng(0)
    seeds = np.random.default_rng(1)
    batches = []
    for _ in range(timing.NUM_BATCHES):
        ids = {}
        for name, size in zip(table_names(sizes), sizes, strict=True):
            seed = int(seeds.integers(1 << 30))
            ids[name] = timing.ids_by_law("zipf", size, (batch_size,), seed, exponent=1.05)
        dense = rng.standard_normal((batch_size, NUM_DENSE), dtype=np.float32)
        labels = rng.integers(0, 2, batch_size).astype(np.float32)
        batches.append(Batch(ids, dense, labels))
    return batches


def table_names(sizes: list[int]) -> list[str]:
    """Names of the tables, which are also the names of their features."""
    return [f"t{k:02}" for k in range(len(sizes))]


def layers(widths: tuple[int, ...], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of an MLP."""
    rng = np.random.default_rng(seed)
    params = []
    for num_inputs, num_outputs in itertools.pairwise(widths):
        weights = rng.standard_normal((num_inputs, num_outputs), dtype=np.float32)
        weights /= np.float32(num_inputs**0.5)
        params.append((weights, np.zeros(num_outputs, np.float32)))
    return params


def mlp(params: Any, vectors: jax.Array) -> jax.Array:
    """Dense layers, with a ReLU after each layer except the last one."""
    *hidden_layers, (last_weights, last_bias) = params
    for weights, bias in hidden_layers:
        vectors = jax.nn.relu(vectors @ weights + bias)
    return vectors @ last_weights + last_bias


def loss_of(
    pairs: Callable, params: Any, vectors: dict[str, jax.Array], dense: jax.Array, labels: jax.Array
) -> Any:
    """Mean log-loss of a batch. `pairs` computes the products of all pairs of vectors."""
    bottom = mlp(params["bottom"], dense)
    products = pairs(jnp.stack([bottom, *vectors.values()], axis=1))
    logits = mlp(params["top"], jnp.concatenate([bottom, products], axis=1))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def dense_params() -> dict[str, Any]:
    """Initial weights and biases of both MLPs."""
    params = {"bottom": layers(BOTTOM_WIDTHS, 1), "top": layers(TOP_WIDTHS, 2)}
    return jax.tree.map(jnp.asarray, params)


def sgd_step(params: Any, gradients: Any) -> Any:
    """The dense parameters after a step."""
    return jax.tree.map(lambda param, gradient: param - DENSE_RATE * gradient, params, gradients)


def as_array(size: int) -> Any:
    """Storage of a table that is an array."""
    return None


def collection_of(
    sizes: list[int], storage_of: Callable[[int], Any] = as_array
) -> rs.EmbeddingCollection:
    """A collection with a table and a feature for each size.

    Args:
      sizes: number of rows of each table.
      storage_of: function of a table's number of rows that returns its storage.
    """
    features = []
    for name, size in zip(table_names(sizes), sizes, strict=True):
        table = rs.TableSpec(
            name=name,
            vocabulary_size=size,
            embedding_dim=DIM,
            initializer=jax.nn.initializers.constant(0.01),
            optimizer=rs.optimizers.RowWiseAdagrad(TABLE_RATE),
            storage=storage_of(size),
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    return rs.EmbeddingCollection(features)


def core_contestant(
    sizes: list[int],
    batches: list[Batch],
    pairs: Callable = rs.pairwise_interaction,
    storage_of: Callable[[int], Any] = as_array,
) -> Run:
    """An `EmbeddingCollection` under one `jax.jit`."""
    collection = collection_of(sizes, storage_of)
    loss_fn = functools.partial(loss_of, pairs)
    params = dense_params()
    state = collection.init(jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, dense, labels):
        value_and_grad = rs.value_and_grad(loss_fn, collection)
        loss, (gradients, row_gradients) = value_and_grad(params, state, ids, dense, labels)
        return sgd_step(params, gradients), collection.apply(state, row_gradients), loss

    def run(k: int) -> object:
        nonlocal params, state
        batch = batches[k]
        ids = collection.prepare(batch.ids)
        # Only tables on the host need this. Other tables stay as they are.
        state = collection.prefetch(state, ids)
        params, state, loss = step(params, state, ids, batch.dense, batch.labels)
        return jax.block_until_ready(loss)

    return run


def table_batched_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """The module of the table-batched wing in one compiled step."""
    specs = [(size, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU) for size in sizes]
    module = tbe.TableBatchedEmbeddingBags(
        specs, optimizer="exact_rowwise_adagrad", learning_rate=TABLE_RATE
    )
    module.init_embedding_weights_uniform(0.01, 0.01)
    params = nnx.Param(dense_params())
    offsets = np.arange(len(sizes) * len(batches[0].labels) + 1)  # one id per bag

    def loss_fn(params, output, dense, labels):
        vectors = dict(enumerate(jnp.split(output, len(sizes), axis=1)))
        return loss_of(rs.pairwise_interaction, params, vectors, dense, labels)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(module, params, batch, dense, labels):
        output, backward = module.vjp(batch)
        value_and_grad = jax.value_and_grad(loss_fn, (0, 1))
        loss, (gradients, d_output) = value_and_grad(params.get_value(), output, dense, labels)
        params.set_value(sgd_step(params.get_value(), gradients))
        backward(d_output)
        return loss

    def run(k: int) -> object:
        batch = batches[k]
        ids = module.prepare(np.concatenate([*batch.ids.values()]), offsets)
        return jax.block_until_ready(step(module, params, ids, batch.dense, batch.labels))

    return run


def sparsecore_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """Functions of the SparseCore wing."""
    batch_size = len(batches[0].labels)
    specs = {}
    for name, size in zip(table_names(sizes), sizes, strict=True):
        table = embedding_spec.TableSpec(
            name=name,
            vocabulary_size=size,
            embedding_dim=DIM,
            initializer=jax.nn.initializers.constant(0.01),
            optimizer=embedding_spec.AdagradOptimizerSpec(TABLE_RATE),
            max_ids_per_partition=batch_size,
            max_unique_ids_per_partition=batch_size,
        )
        specs[name] = embedding_spec.FeatureSpec(
            name=name,
            table_spec=table,
            input_shape=(batch_size, 1),
            output_shape=(batch_size, DIM),
        )
    embedding.prepare_feature_specs_for_training(specs, 1)
    mesh = jax.make_mesh((1,), ("shard",), devices=jax.devices()[:1])
    sharded = jax.sharding.PartitionSpec("shard")
    replicated = jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, sharded)
    variables = embedding.init_embedding_variables(
        jax.random.key(0), embedding.get_table_specs(specs), sharding
    )
    params = dense_params()

    def on_device(variables, params, batch, dense, labels):
        vectors = embedding.sparse_dense_matmul(batch, variables, specs, global_device_count=1)
        loss_fn = functools.partial(loss_of, rs.pairwise_interaction)
        value_and_grad = jax.value_and_grad(loss_fn, (0, 1))
        loss, (gradients, d_vectors) = value_and_grad(params, vectors, dense, labels)
        params = sgd_step(params, gradients)
        variables = embedding.sparse_dense_matmul_grad(
            d_vectors, batch, variables, specs, global_device_count=1
        )
        return variables, params, loss

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(sharded, replicated, sharded, sharded, sharded),
        out_specs=(sharded, replicated, replicated),
        check_vma=False,
    )
    step = jax.jit(mapped, donate_argnums=(0, 1))

    def run(k: int) -> object:
        nonlocal variables, params
        batch = batches[k]
        ids = {name: values[:, None] for name, values in batch.ids.items()}
        processed, _ = embedding.preprocess_sparse_dense_matmul_input(
            ids,
            features_weights=None,
            feature_specs=specs,
            local_device_count=1,
            global_device_count=1,
        )
        inputs = jax.device_put((processed, batch.dense, batch.labels), sharding)
        variables, params, loss = step(variables, params, *inputs)
        return jax.block_until_ready(loss)

    return run


class Model(nnx.Module):
    """A DLRM with its tables as a layer."""

    def __init__(self, collection: rs.EmbeddingCollection):
        self.tables = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
        self.params = nnx.Param(dense_params())


def nnx_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """The collection as a layer of an `nnx` model."""
    collection = collection_of(sizes)
    model = Model(collection)
    optimizer = rs.nnx.Optimizer(model, optax.sgd(DENSE_RATE))

    def loss_fn(model, ids, dense, labels):
        params = model.params.get_value()
        return loss_of(rs.pairwise_interaction, params, model.tables(ids), dense, labels)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, ids, dense, labels):
        loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ids, dense, labels)
        optimizer.update(model, gradients)
        return loss

    def run(k: int) -> object:
        batch = batches[k]
        ids = collection.prepare(batch.ids)
        return jax.block_until_ready(step(model, optimizer, ids, batch.dense, batch.labels))

    return run


def plain_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """JAX and optax without rsembed."""
    tables = {}
    for name, size in zip(table_names(sizes), sizes, strict=True):
        tables[name] = jnp.full((size, DIM), 0.01, jnp.float32)
    params = (dense_params(), tables)
    optimizer = optax.sgd(DENSE_RATE)
    optimizer_state = optimizer.init(params)

    def loss_fn(params, ids, dense, labels):
        dense_layers, tables = params
        vectors = {name: tables[name][ids[name]] for name in ids}
        return loss_of(reference.pair_products, dense_layers, vectors, dense, labels)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, ids, dense, labels):
        loss, gradients = jax.value_and_grad(loss_fn)(params, ids, dense, labels)
        # SGD has no state that changes.
        updates, _ = optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(params, updates), loss

    def run(k: int) -> object:
        nonlocal params
        params, loss = step(params, *batches[k])
        return jax.block_until_ready(loss)

    return run


def torch_layers(
    batches: list[Batch], vectors_of: Callable[[Batch], Any], tables: Any = None
) -> Run:
    """Steps of torch's dense layers.

    Args:
      batches: batches of the runs.
      vectors_of: function of a batch that returns its vectors `[batch, 26, dim]`.
      tables: module with tables that Adagrad of torch trains. None: the tables are updated in the
        backward pass.
    """
    import torch

    device = torch_device()

    def torch_mlp(widths: tuple[int, ...], seed: int) -> Any:
        parts: list[Any] = []
        for weight, bias in layers(widths, seed):
            linear = torch.nn.Linear(*weight.shape)
            linear.weight.data = torch.from_numpy(weight.T.copy())
            linear.bias.data = torch.from_numpy(bias)
            parts += [linear, torch.nn.ReLU()]
        return torch.nn.Sequential(*parts[:-1]).to(device)

    bottom = torch_mlp(BOTTOM_WIDTHS, 1)
    top = torch_mlp(TOP_WIDTHS, 2)
    optimizers = [torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=DENSE_RATE)]
    if tables is not None:
        optimizers.append(torch.optim.Adagrad(tables.parameters(), lr=TABLE_RATE))
    first, second = torch.triu_indices(NUM_VECTORS, NUM_VECTORS, 1, device=device)

    def run(k: int) -> object:
        batch = batches[k]
        vectors = vectors_of(batch)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        dense = bottom(torch.from_numpy(batch.dense).to(device))
        all_vectors = torch.cat([dense[:, None], vectors], dim=1)
        products = torch.bmm(all_vectors, all_vectors.transpose(1, 2))[:, first, second]
        logits = top(torch.cat([dense, products], dim=1))[:, 0]
        labels = torch.from_numpy(batch.labels).to(device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return run


def torch_device() -> str:
    """Device of torch: a GPU if JAX and torch both have one."""
    import torch

    if jax.default_backend() == "gpu" and torch.cuda.is_available():
        return "cuda"
    return "cpu"


def torch_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """An `EmbeddingBag` of torch for each table. Raises ImportError without torch."""
    import torch

    device = torch_device()
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, device=device) for rows in sizes
    )
    for table in bags.parameters():
        table.data.fill_(0.01)
    offsets = torch.arange(len(batches[0].labels), device=device)

    def vectors_of(batch: Batch) -> Any:
        ids = torch.from_numpy(np.stack([*batch.ids.values()])).to(device).long()
        vectors = []
        for bag, ids_of_table in zip(bags, ids, strict=True):
            vectors.append(bag(ids_of_table, offsets))
        return torch.stack(vectors, dim=1)

    return torch_layers(batches, vectors_of, bags)


def fbgemm_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """FBGEMM's module under torch's dense layers. Raises ImportError without them."""
    import torch
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )

    tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(size, DIM, EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU) for size in sizes],
        optimizer=fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=TABLE_RATE,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for table in tables.split_embedding_weights():
        table.fill_(0.01)
    batch_size = len(batches[0].labels)
    offsets = torch.arange(len(sizes) * batch_size + 1)

    def vectors_of(batch: Batch) -> Any:
        ids = torch.from_numpy(np.concatenate([*batch.ids.values()]).astype(np.int64))
        return tables(ids, offsets).reshape(batch_size, len(sizes), DIM)

    return torch_layers(batches, vectors_of)


def torchrec_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """TorchRec's fused collection under torch's dense layers. Raises ImportError without it."""
    import torch
    import torchrec
    from torchrec.modules import fused_embedding_modules
    from torchrec.optim import RowWiseAdagrad

    names = table_names(sizes)
    configs = []
    for name, size in zip(names, sizes, strict=True):
        config = torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=size, embedding_dim=DIM, feature_names=[name]
        )
        configs.append(config)
    tables = fused_embedding_modules.FusedEmbeddingBagCollection(
        configs,
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": TABLE_RATE},
        device=torch.device("cpu"),
    )
    for weights in tables.parameters():
        weights.data.fill_(0.01)
    batch_size = len(batches[0].labels)
    lengths = torch.ones(len(sizes) * batch_size, dtype=torch.int64)

    def vectors_of(batch: Batch) -> Any:
        ids = torch.from_numpy(np.concatenate([*batch.ids.values()]).astype(np.int64))
        pooled = tables(torchrec.KeyedJaggedTensor.from_lengths_sync(names, ids, lengths))
        return pooled.values().reshape(batch_size, len(sizes), DIM)

    return torch_layers(batches, vectors_of)


def main() -> int:
    """Prints the times, and writes them to the file of `--json`."""
    parser = timing.make_parser(__doc__)
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=1.0,
        help="size of all tables together; all contestants have their tables at the same time",
    )
    parser.add_argument("--batch", type=int, default=2048, help="samples")
    parser.add_argument("--rounds", type=int, default=4, help="times that all batches are run")
    parser.add_argument(
        "--without", default="", help="contestants to leave out, separated by semicolons"
    )
    options = parser.parse_args()

    def host_cached(size: int) -> Any:
        """A tenth of the rows is cached, if a batch fits into the cache."""
        if size <= 10 * options.batch:
            return None
        return rs.HostCached(cache_rows=size // 10)

    makers: dict[str, Callable] = {
        "core": core_contestant,
        "core, own pairs": functools.partial(core_contestant, pairs=reference.pair_products),
        "nnx": nnx_contestant,
        "table-batched": table_batched_contestant,
        "SparseCore": sparsecore_contestant,
        "hashed": functools.partial(core_contestant, storage_of=lambda size: rs.Hashed()),
        "host-cached": functools.partial(core_contestant, storage_of=host_cached),
        "plain JAX": plain_contestant,
        "torch": torch_contestant,
        "torch + FBGEMM": fbgemm_contestant,
        "TorchRec": torchrec_contestant,
    }
    for name in options.without.split(";"):
        makers.pop(name, None)
    # SparseCore and torch have an accumulator for every value, so their tables count twice.
    num_copies = len(makers) + len({"SparseCore", "torch"} & set(makers))
    needed = options.gigabytes * num_copies
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if needed > 0.8 * memory:
        parser.error(
            f"the tables of {len(makers)} contestants take {needed:.0f} GB of {memory:.0f} GB of "
            "memory: leave some out with --without, or give a smaller --gigabytes"
        )
    sizes = table_sizes(options.gigabytes)
    batches = draw_batches(sizes, options.batch)
    runs = {}
    for name, make in makers.items():
        try:
            runs[name] = make(sizes, batches)
        except ImportError as error:
            print(f"without {name}: {error}")
    times = timing.race(runs, options.rounds)
    print(f"{sum(sizes):,} rows of {DIM}, batch {options.batch}; {measured_on()}")
    for name, (median, best) in times.items():
        steps = f"{1e3 / median:8.1f} steps a second"
        print(f"{name:<17}{median:8.1f} ms (best {best:.1f}){steps}")
    timing.write_records(options, {name: values._asdict() for name, values in times.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
