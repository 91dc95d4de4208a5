"""What each process of test_processes.py does: one step on a mesh, a checkpoint, and the same checkpoint back.

Arguments: the folder to write, and a checkpoint of one process to read.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed import checkpoint, parallel
from tests.checkpoint.like_tables import keyed_collection, keyed_step

parallel.init(heartbeat_timeout_seconds=60)
table = rs.TableSpec(
    name="item",
    vocabulary_size=10,
    embedding_dim=2,
    initializer=lambda key, shape: jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape),
    optimizer=rs.optimizers.Adagrad(0.1),
)
collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], mesh=parallel.make_mesh())
batch = collection.prepare({"f": np.arange(4, dtype=np.int32).reshape(2, 2) + 4 * jax.process_index()})


@jax.jit
def step(state, batch):
    return collection.update(state, batch, collection.lookup(state, batch))


state = step(collection.init(jax.random.key(0)), batch)
checkpoint.save_collection(sys.argv[1], collection, state)
again = checkpoint.load_collection(sys.argv[1], collection)
same = [
    bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(again.tables), jax.tree.leaves(state.tables), strict=True)
]
alone = checkpoint.load(sys.argv[2], like={"state": collection.template}).tree["state"]
print("restored", same, "sum", float(jnp.sum(collection.tables(alone)["item"])))
try:
    checkpoint.save_collection(sys.argv[1], collection, state)
except FileExistsError:
    print("second save refused")
try:  # a folder that only process 0 tries to make, and cannot
    checkpoint.save("/proc/nowhere/a", state)
except OSError as error:
    print("impossible save refused:", error)
with checkpoint.CheckpointManager(sys.argv[1] + "-run", collection) as checkpoints:
    checkpoints.save(state)
    state = step(state, batch)
    checkpoints.save(state)
    again = checkpoints.restore()
pairs = zip(jax.tree.leaves(again.tables), jax.tree.leaves(state.tables), strict=True)
print("managed", [bool(jnp.all(a == b)) for a, b in pairs], int(again.step))
try:
    checkpoint.CheckpointManager("/proc/nowhere/a", collection)
except OSError as error:
    print("impossible folder refused:", error)
keyed = keyed_collection(parallel.make_mesh())
keys = np.arange(4).reshape(2, 2) + 2**40 * jax.process_index()
state = keyed_step(keyed, keyed.init(jax.random.key(0)), keys)
checkpoint.save_collection(sys.argv[1] + "-keys", keyed, state)
again = checkpoint.load_collection(sys.argv[1] + "-keys", keyed)
print("keys", [own["keys"].tolist() for own in keyed.tables(again).values()], keyed.counts(state)["right"]["inserted"])
