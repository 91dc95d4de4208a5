"""Steps and rows for tests, and a training run of layers and a collection on all given devices.

test_processes.py runs `train` in its own process, and seams_program.py in several processes.
"""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed import sok
from tests.world import mesh_of

BATCH = 16
DIM = 4


def context(num_devices):
    """The context of `sok.Init` for the first devices."""
    return sok.Init(mesh=mesh_of(num_devices, axes=["shard"]))


def step(look_up, *args, gradient=0.0):
    """Runs one step with `gradient` as the gradient of all outputs, and returns the outputs.

    With the default gradient 0, keys get their rows, and rows keep their initial values.
    """
    output, backward = look_up(*args)
    backward(jax.tree.map(lambda array: jnp.full_like(array, gradient), output))
    return output


def step_of(variable, ids, gradient=0.0):
    """Runs one step of a variable with combiner "sum", see `step`."""
    (output,) = step(sok.group_embedding_lookup_vjp, [variable], [ids], ["sum"], gradient=gradient)
    return output


def by_key(variable):
    rows = sok.export_rows(variable)
    return dict(zip(rows["keys"].tolist(), rows["values"], strict=True))


def own_part(array):
    """Samples of this process in a global batch."""
    return np.split(array, jax.process_count())[jax.process_index()]


def train(devices):
    """Rows and slots by key of two layers, and the table of a collection, after three steps."""
    generator = np.random.default_rng(0)
    keys = generator.choice(generator.integers(0, 2**62, 30), (3, BATCH, 2, 3))
    keys[generator.random(keys.shape) < 0.3] = -1
    targets = generator.normal(size=(3, BATCH, 2, DIM)).astype(np.float32)
    layers = {}
    # LazyAdam moves only rows of the batch, Adam moves all rows.
    for name, rule in (("lazy", sok.optimizers.LazyAdam(0.1)), ("adam", sok.optimizers.Adam(0.1))):
        layers[name] = sok.DistributedEmbedding(
            "mean", 32, DIM, 2, 3, optimizer=rule, context=devices, name=name
        )
    table = rs.TableSpec(
        "t",
        30,
        DIM,
        initializer=jax.nn.initializers.normal(),
        optimizer=rs.optimizers.Adagrad(0.1),
    )
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=devices.mesh)
    state = collection.init(jax.random.key(0))
    gradient = jax.jit(lambda out, target: 2 * (out - target) / BATCH)
    for process_keys, target in zip(map(own_part, keys), map(own_part, targets), strict=True):
        for layer in layers.values():
            out, backward = layer.vjp(process_keys)
            backward(gradient(out, devices.place(target)))
        first = process_keys[:, 0]
        batch = collection.prepare({"f": np.where(first < 0, -1, first % 30)})
        out = jax.jit(collection.lookup)(state, batch)["f"]
        gradients = {"f": gradient(out, devices.place(target[:, 0]))}
        state = jax.jit(collection.update)(state, batch, gradients)
    rows = {name: sok.export_rows(layer.variable) for name, layer in layers.items()}
    return {"layers": rows, "tables": collection.tables(state)}
