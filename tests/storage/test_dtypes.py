"""Tables of 16-bit floats are read as they are stored, and steps round to the nearest value.

Expected results are computed by loops from the rows of the state.
"""

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed.tt import TensorTrain
from tests.storage.test_contract import WAYS
from tests.world import made_mesh

STORAGES = {
    "dense": None,
    "hashed": rs.Hashed(),
    "host-cached": rs.HostCached(cache_rows=16),
    "train": TensorTrain((2,)),
}
# Relative tolerance of rows by dtype: the error of one rounding.
DTYPES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROWS, DIM, LEARNING_RATE = 16, 4, 0.5
CELLS = [
    ("dense", "one device", "bfloat16"),
    ("dense", "row", "float16"),
    ("dense", "column", "float16"),
    ("dense", "replicated", "bfloat16"),
    ("hashed", "one device", "float16"),
    ("hashed", "row", "bfloat16"),
    ("host-cached", "one device", "bfloat16"),
    ("host-cached", "row", "float16"),
    # Tensor trains in float16 are refused.
    ("train", "one device", "bfloat16"),
    ("train", "replicated", "bfloat16"),
]


def rows_of(collection, state):
    """Rows by id in float64. Ids without a row have zeros."""
    table = collection.tables(state)["t"]
    if not isinstance(table, dict):
        return np.asarray(table).astype(np.float64)
    rows = np.zeros((ROWS, DIM))
    rows[table["keys"]] = table["values"]
    return rows


@pytest.mark.slow_rows(
    "host-cached, one device, bfloat16",
    "train, one device, bfloat16",
    "hashed, one device, float16",
    "dense, row, float16",
    "dense, replicated, bfloat16",
)
@pytest.mark.parametrize(
    ("storage", "way", "dtype"), CELLS, ids=[", ".join(cell) for cell in CELLS]
)
def test_rows_are_read_as_stored_and_stepped_to_what_the_dtype_can_hold(storage, way, dtype):
    placed = WAYS[way]
    table = rs.TableSpec("t", ROWS, DIM, dtype=dtype, storage=STORAGES[storage],
        initializer=jax.nn.initializers.uniform(1.0), optimizer=rs.optimizers.SGD(LEARNING_RATE),
    )  # fmt: skip
    collection = rs.EmbeddingCollection(
        rs.FeatureSpec("f", table),
        mesh=None if placed.placement is None else made_mesh(4),
        placement=placed.placement,
        exchange_capacity=placed.capacity,
    )
    rng = np.random.default_rng(0)
    ids, d_outputs = rng.integers(0, ROWS, (8, 3)), rng.normal(size=(8, DIM)).astype(np.float32)
    batch = collection.prepare({"f": ids})
    state = collection.prefetch(collection.init(jax.random.key(0)), batch)
    update = jax.jit(collection.update)
    if storage == "hashed":
        # This step gives rows to the keys.
        state = update(state, batch, {"f": np.zeros_like(d_outputs)})

    before = rows_of(collection, state)

    @jax.jit
    def apply(state, batch, d_outputs):
        actual, pullback = collection.lookup_vjp(state, batch)
        return actual, collection.apply(state, pullback(d_outputs))

    actual, applied = apply(state, batch, {"f": d_outputs})
    np.testing.assert_allclose(actual["f"], before[ids].sum(axis=1), rtol=1e-6, atol=1e-6)
    # A step of a tensor train changes its cores, so rows do not change by the gradient.
    if storage == "train":
        return

    expected = before.copy()
    np.subtract.at(expected, ids, LEARNING_RATE * np.float64(d_outputs)[:, None])
    for stepped in (applied, update(state, batch, {"f": d_outputs})):
        after = rows_of(collection, stepped)
        np.testing.assert_allclose(after, expected, rtol=DTYPES[dtype], atol=1e-6)
