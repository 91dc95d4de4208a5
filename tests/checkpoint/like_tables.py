"""Two hashed tables that share a storage, for programs of one process and of several."""

import jax
import numpy as np

import rsembed as rs


def keyed_collection(mesh):
    """Tables `left` and `right`, alike but for their names."""
    same = {"vocabulary_size": 16, "embedding_dim": 2, "initializer": jax.nn.initializers.normal()}
    same |= {"optimizer": rs.optimizers.Adagrad(0.1), "storage": rs.Hashed()}
    tables = [rs.TableSpec(name=name, **same) for name in ("left", "right")]
    features = [rs.FeatureSpec(name=table.name, table_spec=table) for table in tables]
    return rs.EmbeddingCollection(features, mesh=mesh)


def keyed_step(collection, state, keys):
    """One step with the samples of this process: `keys` for `left`, and others for `right`."""
    batch = collection.prepare({"left": keys, "right": keys + 1})
    return jax.jit(lambda state, batch: collection.update(state, batch, collection.lookup_vjp(state, batch)[0]))(
        state, batch
    )


def all_keys():
    """What two processes give together."""
    return np.concatenate([np.arange(4).reshape(2, 2) + 2**40 * process for process in range(2)])
