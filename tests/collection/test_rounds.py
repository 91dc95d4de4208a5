"""Batches of which nearly all ids differ take two rounds of the exchange: the bits are those of one round."""

import jax
import numpy as np
import pytest

import rsembed as rs
from tests.world import made_mesh

ROWS, BATCH, IDS, NUM_DEVICES = 3_000, 512, 6, 4
STORAGES = {"array": None, "hashed": rs.Hashed(), "host": rs.HostCached(cache_rows=ROWS)}


def trained(storage, rule, capacity):
    mesh = made_mesh(NUM_DEVICES)
    table = rs.TableSpec(
        "t",
        ROWS,
        8,
        optimizer=rule,
        combiner="mean",
        storage=storage,
    )
    features = [rs.FeatureSpec(name, table) for name in "fg"]
    collection = rs.EmbeddingCollection(features, mesh=mesh, exchange_capacity=capacity)
    state, draw, seen = collection.init(jax.random.key(0)), np.random.default_rng(1), []
    for step in range(3):
        batch = collection.prepare(
            {name: draw.integers(0, ROWS - 100, (BATCH, IDS)) for name in "fg"}
        )
        activations, pullback = collection.lookup_vjp(state, batch)
        d_activations = jax.tree.map(lambda x: x - 1, activations)
        if step % 2:
            state = collection.apply(state, pullback(d_activations))
        else:
            state = collection.update(state, batch, d_activations)
        _, statistics = collection.lookup(state, batch, return_statistics=True)
        seen.append((activations, int(statistics.num_rounds["t"])))
    return [rounds for _, rounds in seen], [own for own, _ in seen], collection.tables(state)["t"]


@pytest.mark.slow_rows("host")
@pytest.mark.parametrize(
    ("storage", "rule"),
    [
        ("array", rs.optimizers.Adam(0.01)),
        ("hashed", rs.optimizers.Adagrad(0.1)),
        ("host", rs.optimizers.Adagrad(0.1)),
    ],
    ids=["array", "hashed", "host"],
)
def test_two_rounds_give_the_bits_of_one(storage, rule):
    few, *found = trained(STORAGES[storage], rule, None)
    one, *expected = trained(STORAGES[storage], rule, BATCH * IDS)
    assert few == [2, 2, 2] and one == [1, 1, 1]
    for mine, yours in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(mine, yours)
