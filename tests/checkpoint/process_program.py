"""Program that test_processes.py starts: steps on a mesh, and checkpoints of several processes.

Arguments: path of the checkpoint to write, and path of a checkpoint of a single process to read.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint, parallel
from tests.checkpoint.world import ramp


def collection_of(mesh=None):
    """A collection with one table of ten rows."""
    rule = rs.optimizers.Adagrad(0.1)
    table = rs.TableSpec("item", 10, 2, initializer=ramp, optimizer=rule)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh)


def keyed_collection(mesh=None):
    """A collection with two hashed tables that share a storage, because only their names differ."""
    same = {"vocabulary_size": 16, "embedding_dim": 2, "initializer": jax.nn.initializers.normal()}
    same |= {"optimizer": rs.optimizers.Adagrad(0.1), "storage": rs.Hashed()}
    tables = [rs.TableSpec(name, **same) for name in ("left", "right")]
    features = [rs.FeatureSpec(table.name, table) for table in tables]
    return rs.EmbeddingCollection(features, mesh=mesh)


def keys_of(process):
    """Ids of a process for `step`."""
    return np.arange(4).reshape(2, 2) + 2**40 * process


def step(collection, state, ids):
    """One step with the samples of this process. The gradients equal the activations.

    Feature number `k` reads `ids + k`.
    """
    batch = collection.prepare(
        {name: ids + number for number, name in enumerate(collection.features)}
    )
    return jax.jit(
        lambda state, batch: collection.update(state, batch, collection.lookup_vjp(state, batch)[0])
    )(state, batch)


def assert_same_tables(restored, state):
    assert jax.tree.all(jax.tree.map(jnp.array_equal, restored.tables, state.tables))


def main(folder, alone):
    """Prints the keys and counters that test_processes.py compares."""
    parallel.init(heartbeat_timeout_seconds=60)
    collection = collection_of(parallel.make_mesh())
    ids = np.arange(4, dtype=np.int32).reshape(2, 2) + 4 * jax.process_index()
    state = step(collection, collection.init(jax.random.key(0)), ids)
    checkpoint.save_collection(folder, collection, state)
    assert_same_tables(checkpoint.load_collection(folder, collection), state)
    read = checkpoint.load(alone, like={"state": collection.template}).tree["state"]
    assert jnp.sum(collection.tables(read)["item"]) == 190
    with pytest.raises(FileExistsError):
        checkpoint.save_collection(folder, collection, state)
    # Only process 0 tries to make this folder, and fails.
    with pytest.raises(OSError, match="/proc/nowhere"):
        checkpoint.save("/proc/nowhere/a", state)
    with pytest.raises(OSError, match="/proc/nowhere"):
        checkpoint.CheckpointManager("/proc/nowhere/a", collection)
    with checkpoint.CheckpointManager(f"{folder}-run", collection) as checkpoints:
        checkpoints.save(state)
        state = step(collection, state, ids)
        checkpoints.save(state)
        again = checkpoints.restore()
    assert_same_tables(again, state)
    assert int(again.step) == 2
    keyed = keyed_collection(parallel.make_mesh())
    state = step(keyed, keyed.init(jax.random.key(0)), keys_of(jax.process_index()))
    checkpoint.save_collection(f"{folder}-keys", keyed, state)
    again = keyed.tables(checkpoint.load_collection(f"{folder}-keys", keyed))
    keys = [table["keys"].tolist() for table in again.values()]
    print("keys", keys, keyed.counts(state)["right"]["inserted"])


if __name__ == "__main__":
    main(*sys.argv[1:])
