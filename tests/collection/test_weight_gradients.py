"""The engine's gradients of weights, wherever rows are: those of a pooled lookup in float64, by finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rsembed as rs
from rsembed.kernels.contract import Segment
from tests import oracles

BATCH, WIDTH, ROWS, DIM = 8, 3, 17, 4


@pytest.mark.parametrize("placement", [None, "row", "column", "replicated"])
@pytest.mark.parametrize("storage", [None, rs.Hashed()])
def test_gradients_of_weights_are_those_of_loops(placement, storage):
    if storage is not None and placement == "column":
        return  # refused, as its own test says
    combiners = ("sum", "mean", "sqrtn")
    tables = [
        rs.TableSpec(name=c, vocabulary_size=4 * ROWS, embedding_dim=DIM, combiner=c, storage=storage)
        for c in combiners
    ]
    mesh = None if placement is None else Mesh(np.asarray(jax.devices()[:4]), "x")
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(name=table.name, table_spec=table) for table in tables], mesh=mesh, placement=placement
    )
    rng, state = np.random.default_rng(0), collection.init(jax.random.key(0))
    ids = {c: rng.integers(-1, ROWS, (BATCH, WIDTH)).astype(np.int32) for c in combiners}
    weights = {c: rng.uniform(0.5, 2.0, (BATCH, WIDTH)).astype(np.float32) for c in combiners}
    d_outputs = {c: jnp.asarray(rng.normal(size=(BATCH, DIM)), jnp.float32) for c in combiners}
    batch = collection.prepare({c: (ids[c], weights[c]) for c in combiners})
    if storage is not None:  # keys get rows
        state = collection.update(state, batch, d_outputs)
    found = collection._engine.weight_gradients(state.tables, batch, d_outputs)
    logical = collection.tables(state)
    for c in combiners:
        table = np.zeros((ROWS, DIM))
        if storage is None:
            table = np.asarray(logical[c], np.float64)[:ROWS]
        else:
            table[logical[c]["keys"]] = logical[c]["values"]

        def value(own, c=c, table=table):
            segment = Segment(ids[c].reshape(-1), np.arange(BATCH + 1) * WIDTH, own, c)
            return np.vdot(oracles.pooled_lookup(table, segment), np.asarray(d_outputs[c], np.float64))

        expected = np.zeros(BATCH * WIDTH)
        for place in range(BATCH * WIDTH):
            step = np.eye(BATCH * WIDTH)[place] * 1e-5
            own = weights[c].reshape(-1).astype(np.float64)
            expected[place] = (value(own + step) - value(own - step)) / 2e-5
        np.testing.assert_allclose(np.asarray(found[c]).reshape(-1), expected, rtol=1e-4, atol=1e-5)
