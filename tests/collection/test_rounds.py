"""Batches with many distinct ids take two exchange rounds, with the bits of a single round."""

import jax
import numpy as np
import pytest

import rsembed as rs
from tests.world import assert_same, made_mesh, mesh_of

ROWS, BATCH, IDS = 3_000, 512, 6


def trained(storage, rule, capacity, mesh):
    """Numbers of exchange rounds, activations of three steps, and the trained table."""
    table = rs.TableSpec("t", ROWS, 8, optimizer=rule, combiner="mean", storage=storage)
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec("f", table), rs.FeatureSpec("g", table)],
        mesh=mesh,
        exchange_capacity=capacity,
    )
    state, draw = collection.init(jax.random.key(0)), np.random.default_rng(1)
    rounds, read = [], []
    for step in range(3):
        ids = draw.integers(0, ROWS - 100, (2, BATCH, IDS))
        batch = collection.prepare({"f": ids[0], "g": ids[1]})
        activations, pullback = collection.lookup_vjp(state, batch)
        d_activations = jax.tree.map(lambda x: x - 1, activations)
        if step % 2:
            state = collection.apply(state, pullback(d_activations))
        else:
            state = collection.update(state, batch, d_activations)
        _, statistics = collection.lookup(state, batch, return_statistics=True)
        rounds.append(int(statistics.num_rounds["t"]))
        read.append(activations)
    return rounds, (read, collection.tables(state)["t"])


@pytest.mark.slow_rows("host", "hashed")
@pytest.mark.parametrize(
    ("storage", "rule"),
    [
        (None, rs.optimizers.Adam(0.01)),
        (rs.Hashed(), rs.optimizers.Adagrad(0.1)),
        (rs.HostCached(cache_rows=ROWS), rs.optimizers.Adagrad(0.1)),
    ],
    ids=["array", "hashed", "host"],
)
def test_two_rounds_give_the_bits_of_one(storage, rule):
    mesh = made_mesh(4)
    two_rounds, actual = trained(storage, rule, None, mesh)
    one_round, expected = trained(storage, rule, BATCH * IDS, mesh)
    assert two_rounds == [2, 2, 2] and one_round == [1, 1, 1]
    assert_same(actual, expected)


@pytest.mark.slow_rows("hashed")
@pytest.mark.parametrize("storage", [None, rs.Hashed()], ids=["dense", "hashed"])
def test_a_mesh_of_one_device_asks_nobody_and_gives_the_bits_of_no_mesh(storage):
    rule = rs.optimizers.Adagrad(0.1)
    rounds, actual = trained(storage, rule, None, mesh_of(1))
    assert rounds == [0, 0, 0]
    assert_same(actual, trained(storage, rule, None, None)[1])
