"""Stacks that do not ask together give the bits of stacks that do."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from rsembed.collection import engine

DIMS = (4, 8, 16)


def collection_of_three(num_devices):
    """Three stacks, whose features are named after each other's tables."""
    storages = (None, rs.Hashed(when_full="evict"), rs.HostCached(cache_rows=64))
    names = [f"t{k}" for k in range(len(DIMS))]
    tables = [
        rs.TableSpec(
            name=name,
            vocabulary_size=96,
            embedding_dim=dim,
            combiner="mean",
            optimizer=rs.optimizers.Adagrad(0.1),
            storage=storage,
        )
        for name, dim, storage in zip(names, DIMS, storages, strict=True)
    ]
    features = [
        rs.FeatureSpec(name=name, table_spec=table) for name, table in zip(reversed(names), tables, strict=True)
    ]
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    return rs.EmbeddingCollection(features, mesh=mesh)


def train(num_devices):
    collection, generator = collection_of_three(num_devices), np.random.default_rng(0)
    state, found = collection.init(jax.random.key(0)), []
    for number in range(3):
        batch = {name: generator.integers(0, 96, (8, 5)) for name in collection.features}
        outputs, pullback = collection.lookup_vjp(state, batch)
        ones = jax.tree.map(jnp.ones_like, outputs)
        state = collection.update(state, batch, ones) if number % 2 else collection.apply(state, pullback(ones))
        found.append(outputs)
    looked_up, statistics = collection.lookup(state, batch, return_statistics=True)
    assert list(looked_up) == list(collection.features)
    return found, looked_up, statistics, collection.tables(state)


def test_groups_of_any_size_give_the_same_bits(monkeypatch):
    together = train(2)
    monkeypatch.setattr(engine, "STACKS_TOGETHER", 2)
    jax.tree.map(np.testing.assert_array_equal, train(2), together)
