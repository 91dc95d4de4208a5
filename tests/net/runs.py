"""Short runs of every wing, by public names. Changes of internals must not change their results.

`RUNS` maps a name to a function that trains two steps and returns arrays by name: outputs,
gradients, tables, slots and counts. `test_net.py` compares the arrays with a record, and also their
bits if this version of jax and this processor were recorded. To make a new record, run
`RSEMBED_RECORD_NET=1 pytest tests/net`, but only in a commit that says why numbers changed.
"""

import hashlib
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rsembed as rs
from rsembed import sok, tbe, tt
from rsembed.kernels import native
from rsembed.sparsecore.nnx import embed
from tests.oracles import dense_gradients
from tests.sparsecore.small_world import (
    draw_batch,
    logical_tables,
    logical_variables,
    placed_specs,
    squared_error,
)
from tests.world import made_mesh, mesh_of

RECORD = Path(__file__).parents[1] / "data" / "net.npz"
STEPS, BATCH, DIM = 2, 8, 4


def platform():
    """Names of jax, of the native instruction set and of the processor.

    Bits depend on the processor, because XLA compiles programs for it.
    """
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    fields = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    processor = " ".join(fields.get(key, "unknown") for key in ("vendor_id", "cpu family", "model"))
    return f"jax {jax.__version__}, {native.instruction_set() or 'no native kernels'}, {processor}"


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def named(tree, prefix=""):
    """Leaves of a tree as NumPy arrays, by path. Arrays of bfloat16 become float32."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
        arrays[name] = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
    return arrays


def loss_gradient(outputs):
    """Gradient of half the squared distance of the outputs to 1."""
    return jax.tree.map(lambda output: output - 1.0, outputs)


# The core

ROWS = {"item": 23, "user": 17, "word": 40}
RULES = {
    "sgd": rs.optimizers.SGD(0.1),
    "adagrad": rs.optimizers.Adagrad(0.1),
    "row_wise_adagrad": rs.optimizers.RowWiseAdagrad(0.1),
    "adam": rs.optimizers.Adam(lambda step: 0.1 / (1.0 + jnp.float32(step))),
    "custom": rs.optimizers.Custom(
        0.1, lambda g, w, m, lr: (w - lr * (m + g), 0.9 * m + g), (0.0,)
    ),
}


def core(
    rule,
    *,
    mesh=None,
    placement=None,
    combiner="sum",
    weighted=False,
    is_ragged=False,
    **table_options,
):
    options = {"combiner": combiner, "optimizer": RULES[rule]} | table_options
    tables = {name: rs.TableSpec(name, rows, DIM, **options) for name, rows in ROWS.items()}
    features = [rs.FeatureSpec(f"f_{name}", table) for name, table in tables.items()]
    features.append(rs.FeatureSpec("again", tables["item"]))
    collection = rs.EmbeddingCollection(features, mesh=made_mesh(mesh), placement=placement)
    state, rng, arrays = collection.init(jax.random.key(7)), np.random.default_rng(0), {}

    @jax.jit
    def step(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        gradients = pullback(loss_gradient(activations))
        fused = collection.update(state, batch, loss_gradient(activations))
        return activations, dense_gradients(gradients), collection.apply(state, gradients), fused

    for number in range(STEPS):
        batch = {}
        for feature in features:
            ids = rng.integers(-1, feature.table_spec.vocabulary_size, (BATCH, 3)).astype(np.int32)
            lengths = rng.integers(1, 4, BATCH)
            weights = rng.uniform(0.5, 2.0, ids.shape).astype(np.float32)
            batch[feature.name] = ids
            if weighted:
                batch[feature.name] = (ids, weights)
            if is_ragged:
                rows = zip(ids, lengths, strict=True)
                batch[feature.name] = [row[:length].clip(0).tolist() for row, length in rows]
        activations, gradients, applied, fused = step(state, collection.prepare(batch))
        arrays |= named(activations, f"outputs {number}/") | named(
            gradients, f"gradients {number}/"
        )
        state = (applied, fused)[number]
    tables, slots = jax.jit(lambda state: (collection.tables(state), collection.slots(state)))(
        state
    )
    return arrays | named(tables, "tables/") | named(slots, "slots/")


# Wings


def sparsecore(*, devices, cores, rule="adagrad", **options):
    specs = placed_specs(devices, cores, stack_limit=512, optimizer=RULES[rule], **options)
    rngs = nnx.Rngs(3)
    layer = embed.SparseCoreEmbed(specs, "x", mesh_of(devices), rngs, num_sc_per_device=cores)
    arrays = named(logical_tables(nnx.state(layer), specs), "before/")

    @nnx.jit
    def train(layer, inputs):
        activations = layer(inputs)
        grads = nnx.grad(lambda layer: squared_error(layer(inputs)))(layer)
        nnx.update(layer, nnx.state(grads, embed.is_embedding_variables))
        return activations

    for step in range(STEPS):
        inputs, _ = layer.prepare_batch(draw_batch(step)[0])
        if step == 0:
            arrays |= named(inputs, "inputs/")
        arrays |= named(train(layer, inputs), f"outputs {step}/")
    variables = logical_variables(nnx.state(layer), specs)
    return arrays | named({name: tuple(variable) for name, variable in variables.items()}, "after/")


def table_batched(
    optimizer,
    *,
    location=tbe.EmbeddingLocation.DEVICE,
    **options,
):
    sizes = (23, 17, 40)
    specs = [
        (rows, dim, location, tbe.ComputeDevice.CPU)
        for rows, dim in zip(sizes, (4, 8, 4), strict=True)
    ]
    readers = [0, 1, 1, 2]
    module = tbe.TableBatchedEmbeddingBags(
        specs,
        feature_table_map=readers,
        optimizer=optimizer,
        learning_rate=0.1,
        **options,
    )
    module.init_embedding_weights_uniform(-1.0, 1.0)
    rng, arrays = np.random.default_rng(0), {}
    for step in range(STEPS):
        lengths = rng.integers(0, 4, 4 * BATCH)
        ids = np.concatenate(
            [rng.integers(0, sizes[readers[bag // BATCH]], n) for bag, n in enumerate(lengths)]
        )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        weights = rng.uniform(0.5, 2.0, ids.size).astype(np.float32)
        output, backward = module.vjp(ids, offsets, weights)
        arrays |= named({"output": output, "backward": backward(output - 1.0)}, f"{step}/")
    state = [module.split_embedding_weights(), module.split_optimizer_states()]
    return arrays | named(state, "state/")


def tensor_train(**options):
    module = tt.TTEmbeddingBag(
        60,
        8,
        tt_ranks=[3, 4],
        learning_rate=0.1,
        use_cache="cache_size" in options,
        **options,
    )
    rng, arrays = np.random.default_rng(0), {}
    cores = [rng.normal(size=shape) for shape in module.spec.core_shapes]
    module.set_cores([jnp.asarray(core.astype(np.float32)) for core in cores])
    for step in range(STEPS):
        lengths = rng.integers(1, 4, BATCH)
        ids, offsets = rng.integers(0, 60, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
        output, backward = module.vjp(jnp.asarray(ids), jnp.asarray(offsets))
        backward(output - 1.0)
        arrays[f"{step}/output"] = np.asarray(output)
        if step == 0 and "cache_size" in options:
            module.cache_populate()
    return arrays | named(module.cores_of(), "cores/") | {"table": np.asarray(module.full_weight())}


def model_parallel(*, devices, use_hashtable=True, optimizer=None, combiner="mean", **options):
    context = sok.Init(mesh=mesh_of(devices, axes=["shard"]), global_batch_size=BATCH)
    variable = sok.embedding_variable(
        "net",
        DIM,
        rows_per_device=32,
        use_hashtable=use_hashtable,
        optimizer=optimizer,
        context=context,
        **options,
    )
    rng, arrays = np.random.default_rng(0), {}
    known = rng.integers(0, 2**62, 30) if use_hashtable else np.arange(32)
    for step in range(STEPS):
        keys = np.where(rng.random((BATCH, 3)) < 0.2, -1, rng.choice(known, (BATCH, 3)))
        (output,), backward = sok.group_embedding_lookup_vjp([variable], [keys], [combiner])
        backward([output - 1.0])
        arrays[f"{step}/output"] = np.asarray(output)
    return arrays | named(sok.export_rows(variable), "rows/") | named(variable.counts(), "counts/")


RUNS = {
    **{f"core {rule}": partial(core, rule) for rule in RULES},
    **{
        f"core {placement} {devices}": partial(core, "adagrad", mesh=devices, placement=placement)
        for placement, devices in (("row", 4), ("table", 4), ("column", 2), ("replicated", 2))
    },
    "core row 4 adam": partial(core, "adam", mesh=4, placement="row"),
    "core ragged": partial(core, "adagrad", is_ragged=True),
    "core weighted mean": partial(core, "sgd", weighted=True, combiner="mean"),
    "core weighted sqrtn": partial(core, "adam", weighted=True, combiner="sqrtn"),
    "core bfloat16": partial(core, "adagrad", dtype="bfloat16", stochastic_rounding=True),
    "core train": partial(core, "adagrad", storage=tt.TensorTrain((2, 2))),
    "sparsecore 1x1": partial(sparsecore, devices=1, cores=1),
    "sparsecore 4x1 adam": partial(sparsecore, devices=4, cores=1, rule="adam"),
    "sparsecore 1x4 custom": partial(sparsecore, devices=1, cores=4, rule="custom"),
    "sparsecore 2x2 bfloat16": partial(
        sparsecore, devices=2, cores=2, dtype="bfloat16", stochastic_rounding=True
    ),
    **{
        f"table-batched {optimizer.name.lower()}": partial(table_batched, optimizer)
        for optimizer in (
            tbe.OptimType.EXACT_SGD,
            tbe.OptimType.EXACT_ROWWISE_ADAGRAD,
            tbe.OptimType.EXACT_ADAGRAD,
            tbe.OptimType.ADAM,
            tbe.OptimType.PARTIAL_ROWWISE_ADAM,
            tbe.OptimType.LAMB,
            tbe.OptimType.LARS_SGD,
        )
    },
    "table-batched cached": partial(
        table_batched,
        tbe.OptimType.ADAM,
        location=tbe.EmbeddingLocation.MANAGED_CACHING,
        cache_load_factor=0.5,
    ),
    "tensor train adagrad": partial(tensor_train, optimizer=tt.OptimType.EXACT_ADAGRAD),
    "tensor train adam": partial(tensor_train, optimizer=tt.OptimType.ADAM),
    "tensor train cached": partial(
        tensor_train, optimizer=tt.OptimType.EXACT_ADAGRAD, cache_size=8
    ),
    "model-parallel 4": partial(model_parallel, devices=4),
    "model-parallel 4 lazy adam": partial(
        model_parallel, devices=4, optimizer=sok.optimizers.LazyAdam(0.1), combiner="sum"
    ),
    "model-parallel 2 indexed": partial(model_parallel, devices=2, use_hashtable=False),
    "model-parallel 2 admission": partial(model_parallel, devices=2, admission_count=1),
}
