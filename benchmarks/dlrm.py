"""Times whole training steps of a DLRM, from ids in numpy to updated tables, in one run.

    python benchmarks/dlrm.py [--gigabytes 1] [--batch 2048] [--rounds 4] [--json PATH]

26 tables with the cardinalities of Criteo's Kaggle log, scaled to the given size, 64 columns, one Zipf id each; 13
numbers a sample; an MLP of 512, 256 and 64 below, pairs of all 27 vectors, one of 512, 256 and 1 above. Dense layers
step by SGD, tables by row-wise Adagrad. Contestants take turns of eight distinct batches.

* core, nnx: an `EmbeddingCollection` under one `jax.jit`; the same as a layer of an `nnx` model.
* hashed, host-cached: as core, with ids as keys; or with a tenth of the rows of large tables near, and all on the host.
* table-batched: the module in one `nnx.jit`. SparseCore: that wing's functions, preprocessing included, full Adagrad.
* core, own pairs: as core, with the pairs of plain JAX in place of `rs.pairwise_interaction`.
* plain JAX: tables are arrays, `table[ids]`, and optax steps everything by SGD with dense gradients.
* torch: its dense layers over `EmbeddingBag`s and full Adagrad, on a GPU if JAX has one. torch + FBGEMM, TorchRec: over
  FBGEMM's module on the host, or TorchRec's around it. Those that can be imported.
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
NUM_DENSE, DIM = 13, 64
BELOW, ABOVE = (NUM_DENSE, 512, 256, DIM), (DIM + 27 * 26 // 2, 512, 256, 1)
DENSE_RATE, TABLE_RATE = 0.01, 0.01
Run = Callable[[int], object]


class Batch(NamedTuple):
    """Ids of each table, 13 numbers and the label of every sample, in numpy."""

    ids: dict[str, np.ndarray]
    dense: np.ndarray
    labels: np.ndarray


def table_sizes(gigabytes: float) -> list[int]:
    """Rows of each table."""
    scale = gigabytes * 1e9 / (4 * DIM * sum(CARDINALITIES))
    return [max(3, round(scale * size)) for size in CARDINALITIES]


def draw_batches(sizes: list[int], batch_size: int) -> list[Batch]:
    """Distinct batches of Zipf ids."""
    rng, ranks = np.random.default_rng(0), np.random.default_rng(1)
    return [
        Batch(
            {
                f"t{k:02}": timing.ids_by_law(
                    "zipf", size, (batch_size,), int(ranks.integers(1 << 30)), exponent=1.05
                )
                for k, size in enumerate(sizes)
            },
            rng.standard_normal((batch_size, NUM_DENSE), dtype=np.float32),
            rng.integers(0, 2, batch_size).astype(np.float32),
        )
        for _ in range(timing.NUM_BATCHES)
    ]


def layers(widths: tuple[int, ...], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of an MLP."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.standard_normal((a, b), dtype=np.float32) / np.float32(a**0.5),
            np.zeros(b, np.float32),
        )
        for a, b in itertools.pairwise(widths)
    ]


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Layers with ReLUs between them."""
    for k, (weight, bias) in enumerate(params):
        x = x @ weight + bias
        x = jax.nn.relu(x) if k + 1 < len(params) else x
    return x


def loss_of(
    pairs: Callable, params: Any, vectors: dict[str, jax.Array], dense: jax.Array, labels: jax.Array
) -> Any:
    """Mean log-loss."""
    below = mlp(params["below"], dense)
    products = pairs(jnp.stack([below, *vectors.values()], axis=1))
    logits = mlp(params["above"], jnp.concatenate([below, products], axis=1))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def dense_params() -> dict[str, Any]:
    """Of both MLPs."""
    return jax.tree.map(jnp.asarray, {"below": layers(BELOW, 1), "above": layers(ABOVE, 2)})


def collection_of(
    sizes: list[int], storage_of: Callable[[int], Any] = lambda size: None
) -> rs.EmbeddingCollection:
    """One feature and table for each size, kept as `storage_of` says of a size."""
    rule = rs.optimizers.RowWiseAdagrad(TABLE_RATE)
    start = jax.nn.initializers.constant(0.01)
    return rs.EmbeddingCollection(
        [
            rs.FeatureSpec(
                name=f"t{k:02}",
                table_spec=rs.TableSpec(
                    name=f"t{k:02}",
                    vocabulary_size=size,
                    embedding_dim=DIM,
                    initializer=start,
                    optimizer=rule,
                    storage=storage_of(size),
                ),
            )
            for k, size in enumerate(sizes)
        ]
    )


def core_contestant(
    sizes: list[int],
    batches: list[Batch],
    pairs: Callable = rs.pairwise_interaction,
    **storage: Callable[[int], Any],
) -> Run:
    """Functions over an `EmbeddingCollection`."""
    collection, loss_fn = collection_of(sizes, **storage), functools.partial(loss_of, pairs)
    held = [dense_params(), collection.init(jax.random.key(0))]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids, dense, labels):
        value_and_grad = rs.value_and_grad(loss_fn, collection)
        loss, (gradients, row_gradients) = value_and_grad(params, state, ids, dense, labels)
        params = jax.tree.map(lambda p, g: p - DENSE_RATE * g, params, gradients)
        return params, collection.apply(state, row_gradients), loss

    def run(k: int) -> object:
        own, ids = batches[k], collection.prepare(batches[k].ids)
        held[1] = collection.prefetch(held[1], ids)  # rows that are on the host
        held[0], held[1], loss = step(*held, ids, own.dense, own.labels)
        return jax.block_until_ready(loss)

    return run


def table_batched_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """The table-batched module, in one compiled step."""
    specs = [(size, DIM, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU) for size in sizes]
    module = tbe.TableBatchedEmbeddingBags(
        specs, optimizer="exact_rowwise_adagrad", learning_rate=TABLE_RATE
    )
    module.init_embedding_weights_uniform(0.01, 0.01)
    params, ends = nnx.Param(dense_params()), np.arange(len(sizes) * len(batches[0].labels) + 1)

    def loss_fn(params, output, dense, labels):
        by_table = dict(enumerate(jnp.split(output, len(sizes), axis=1)))
        return loss_of(rs.pairwise_interaction, params, by_table, dense, labels)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(module, params, batch, dense, labels):
        output, backward = module.vjp(batch)
        loss, (gradients, d_output) = jax.value_and_grad(loss_fn, (0, 1))(
            params.get_value(), output, dense, labels
        )
        params.set_value(
            jax.tree.map(lambda p, g: p - DENSE_RATE * g, params.get_value(), gradients)
        )
        backward(d_output)
        return loss

    def run(k: int) -> object:
        own = batches[k]
        batch = module.prepare(np.concatenate([*own.ids.values()]), ends)
        return jax.block_until_ready(step(module, params, batch, own.dense, own.labels))

    return run


def sparsecore_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """Functions of the SparseCore wing."""
    size = len(batches[0].labels)
    specs = {
        f"t{k:02}": embedding_spec.FeatureSpec(
            name=f"t{k:02}",
            table_spec=embedding_spec.TableSpec(
                name=f"t{k:02}",
                vocabulary_size=rows,
                embedding_dim=DIM,
                initializer=jax.nn.initializers.constant(0.01),
                optimizer=embedding_spec.AdagradOptimizerSpec(TABLE_RATE),
                max_ids_per_partition=size,
                max_unique_ids_per_partition=size,
            ),
            input_shape=(size, 1),
            output_shape=(size, DIM),
        )
        for k, rows in enumerate(sizes)
    }
    embedding.prepare_feature_specs_for_training(specs, 1)
    mesh = jax.make_mesh((1,), ("shard",), devices=jax.devices()[:1])
    split, whole = jax.sharding.PartitionSpec("shard"), jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, split)
    state = embedding.init_embedding_variables(
        jax.random.key(0), embedding.get_table_specs(specs), sharding
    )

    def on_device(variables, params, batch, dense, labels):
        vectors = embedding.sparse_dense_matmul(batch, variables, specs, global_device_count=1)
        loss_fn = functools.partial(loss_of, rs.pairwise_interaction)
        loss, (gradients, d_vectors) = jax.value_and_grad(loss_fn, (0, 1))(
            params, vectors, dense, labels
        )
        params = jax.tree.map(lambda p, g: p - DENSE_RATE * g, params, gradients)
        variables = embedding.sparse_dense_matmul_grad(
            d_vectors, batch, variables, specs, global_device_count=1
        )
        return variables, params, loss

    in_specs, out_specs = (split, whole, split, split, split), (split, whole, whole)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    step, held = jax.jit(mapped, donate_argnums=(0, 1)), [state, dense_params()]

    def run(k: int) -> object:
        own = batches[k]
        ids = {name: values[:, None] for name, values in own.ids.items()}
        batch, _ = embedding.preprocess_sparse_dense_matmul_input(
            ids,
            features_weights=None,
            feature_specs=specs,
            local_device_count=1,
            global_device_count=1,
        )
        held[0], held[1], loss = step(
            *held, *jax.device_put((batch, own.dense, own.labels), sharding)
        )
        return jax.block_until_ready(loss)

    return run


class Model(nnx.Module):
    """A DLRM whose tables are a layer."""

    def __init__(self, collection: rs.EmbeddingCollection):
        self.tables = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
        self.params = nnx.Param(dense_params())


def nnx_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """A layer of an nnx model."""
    collection = collection_of(sizes)
    model = Model(collection)
    optimizer = rs.nnx.Optimizer(model, optax.sgd(DENSE_RATE))

    def loss_fn(model, ids, dense, labels):
        return loss_of(
            rs.pairwise_interaction, model.params.get_value(), model.tables(ids), dense, labels
        )

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, ids, dense, labels):
        loss, gradients = rs.nnx.value_and_grad(loss_fn)(model, ids, dense, labels)
        optimizer.update(model, gradients)
        return loss

    def run(k: int) -> object:
        own = batches[k]
        return jax.block_until_ready(
            step(model, optimizer, collection.prepare(own.ids), own.dense, own.labels)
        )

    return run


def plain_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """JAX and optax alone."""
    tables = {f"t{k:02}": jnp.full((size, DIM), 0.01, jnp.float32) for k, size in enumerate(sizes)}
    held, tx = [(dense_params(), tables)], optax.sgd(DENSE_RATE)

    def loss_fn(given, ids, dense, labels):
        params, tables = given
        return loss_of(
            reference.pair_products, params, {k: tables[k][ids[k]] for k in ids}, dense, labels
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(given, *batch):
        loss, gradients = jax.value_and_grad(loss_fn)(given, *batch)
        return optax.apply_updates(given, tx.update(gradients, tx.init(given))[0]), loss

    def run(k: int) -> object:
        held[0], loss = step(held[0], *batches[k])
        return jax.block_until_ready(loss)

    return run


def torch_layers(
    batches: list[Batch], vectors_of: Callable[[Batch], Any], tables: Any = None
) -> Run:
    """Torch's dense layers over vectors `[batch, 26, dim]`, whose tables step in the backward pass or are given."""
    import torch

    device = torch_device()

    def torch_mlp(widths: tuple[int, ...], seed: int) -> Any:
        parts: list[Any] = []
        for weight, bias in layers(widths, seed):
            linear = torch.nn.Linear(*weight.shape)
            linear.weight.data, linear.bias.data = (
                torch.from_numpy(weight.T.copy()),
                torch.from_numpy(bias),
            )
            parts += [linear, torch.nn.ReLU()]
        return torch.nn.Sequential(*parts[:-1]).to(device)

    below, above = torch_mlp(BELOW, 1), torch_mlp(ABOVE, 2)
    optimizers = [torch.optim.SGD([*below.parameters(), *above.parameters()], lr=DENSE_RATE)]
    if tables is not None:
        optimizers.append(torch.optim.Adagrad(tables.parameters(), lr=TABLE_RATE))
    first, second = (torch.from_numpy(own).to(device) for own in np.triu_indices(27, 1))

    def run(k: int) -> object:
        own = batches[k]
        vectors = vectors_of(own)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        dense = below(torch.from_numpy(own.dense).to(device))
        every = torch.cat([dense[:, None], vectors], dim=1)
        products = torch.bmm(every, every.transpose(1, 2))[:, first, second]
        logits = above(torch.cat([dense, products], dim=1))[:, 0]
        labels = torch.from_numpy(own.labels).to(device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return run


def torch_device() -> str:
    """Where torch runs, if it can: beside JAX."""
    import torch

    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def torch_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """Torch alone: a bag for each table, sparse gradients and elementwise Adagrad; raises ImportError without it."""
    import torch

    device = torch_device()
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, device=device) for rows in sizes
    )
    for table in bags.parameters():
        table.data.fill_(0.01)
    offsets = torch.arange(len(batches[0].labels), device=device)

    def vectors_of(own: Batch) -> Any:
        ids = torch.from_numpy(np.stack([*own.ids.values()])).to(device)
        return torch.stack(
            [bag(its, offsets) for bag, its in zip(bags, ids.long(), strict=True)], dim=1
        )

    return torch_layers(batches, vectors_of, bags)


def fbgemm_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """FBGEMM's tables under torch's layers; raises ImportError without them."""
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
    size = len(batches[0].labels)
    offsets = torch.arange(len(sizes) * size + 1)

    def vectors_of(own: Batch) -> Any:
        ids = torch.from_numpy(np.concatenate([*own.ids.values()]).astype(np.int64))
        return tables(ids, offsets).reshape(size, len(sizes), DIM)

    return torch_layers(batches, vectors_of)


def torchrec_contestant(sizes: list[int], batches: list[Batch]) -> Run:
    """TorchRec's fused collection under torch's layers; raises ImportError without it."""
    import torch
    import torchrec
    from torchrec.modules import fused_embedding_modules
    from torchrec.optim import RowWiseAdagrad

    names = [f"t{k:02}" for k in range(len(sizes))]
    tables = fused_embedding_modules.FusedEmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=size, embedding_dim=DIM, feature_names=[name]
            )
            for name, size in zip(names, sizes, strict=True)
        ],
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": TABLE_RATE},
        device=torch.device("cpu"),
    )
    for weights in tables.parameters():
        weights.data.fill_(0.01)
    size = len(batches[0].labels)
    lengths = torch.ones(len(sizes) * size, dtype=torch.int64)

    def vectors_of(own: Batch) -> Any:
        ids = torch.from_numpy(np.concatenate([*own.ids.values()]).astype(np.int64))
        every = tables(torchrec.KeyedJaggedTensor.from_lengths_sync(names, ids, lengths))
        return every.values().reshape(size, len(sizes), DIM)

    return torch_layers(batches, vectors_of)


def main() -> int:
    """Prints the table, and writes it if asked."""
    parser = timing.make_parser(__doc__)
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=1.0,
        help="all tables together; every contestant keeps its own, at the same time",
    )
    parser.add_argument("--batch", type=int, default=2048, help="samples")
    parser.add_argument("--rounds", type=int, default=4, help="times that all batches are run")
    parser.add_argument(
        "--without", default="", help="contestants to leave out, separated by semicolons"
    )
    options = parser.parse_args()
    makers: dict[str, Callable] = {
        "core": core_contestant,
        "core, own pairs": functools.partial(core_contestant, pairs=reference.pair_products),
        "nnx": nnx_contestant,
        "table-batched": table_batched_contestant,
        "SparseCore": sparsecore_contestant,
        "hashed": functools.partial(core_contestant, storage_of=lambda size: rs.Hashed()),
        "host-cached": functools.partial(
            core_contestant,
            storage_of=lambda size: (
                rs.HostCached(cache_rows=size // 10) if size > 10 * options.batch else None
            ),
        ),
        "plain JAX": plain_contestant,
        "torch": torch_contestant,
        "torch + FBGEMM": fbgemm_contestant,
        "TorchRec": torchrec_contestant,
    }
    for name in options.without.split(";"):
        makers.pop(name, None)
    # SparseCore and torch keep an accumulator for every number, so their tables count twice.
    num_tables = len(makers) + sum(name in makers for name in ("SparseCore", "torch"))
    needed = options.gigabytes * num_tables
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if needed > 0.8 * memory:
        parser.error(
            f"the tables of {len(makers)} contestants take {needed:.0f} GB of {memory:.0f} GB of memory: "
            "leave some out with --without, or give a smaller --gigabytes"
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
    for name, own in times.items():
        print(
            f"{name:<17}{own.median:8.1f} ms (best {own.best:.1f}){1e3 / own.median:8.1f} steps a second"
        )
    timing.write_records(options, {name: own._asdict() for name, own in times.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
