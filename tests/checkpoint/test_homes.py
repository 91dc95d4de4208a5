"""Files do not depend on the storage of a table: hashed rows are saved by key, other rows by id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from tests.world import made_mesh

DIM, ITEMS = 4, 60
KEYS = 2**40 + (2**33 + 1) * np.arange(12)
BATCHES = [
    {
        "user": KEYS[(5 * step + np.arange(24) ** 2) % 12].reshape(8, 3),
        "item": (7 * step + np.arange(8)) % ITEMS,
    }
    for step in range(4)
]


def collection_of(user_rows, item_storage, **options):
    table_options = {
        "embedding_dim": DIM,
        "optimizer": rs.optimizers.Adagrad(0.5),
        "initializer": jax.nn.initializers.normal(),
    }
    user = rs.TableSpec("user", user_rows, storage=rs.Hashed(), **table_options)
    item = rs.TableSpec("item", ITEMS, storage=item_storage, **table_options)
    features = [rs.FeatureSpec("user", user), rs.FeatureSpec("item", item)]
    return rs.EmbeddingCollection(features, **options)


def trained(collection, state, batches):
    gradients = {"user": jnp.ones((8, DIM)), "item": -jnp.ones((8, DIM))}
    for batch in batches:
        state = collection.update(state, batch, gradients)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two batches, and all tables after four batches."""
    collection = collection_of(12, rs.HostCached(cache_rows=8))
    state = trained(collection, collection.init(jax.random.key(0)), BATCHES[:2])
    path = tmp_path_factory.mktemp("storage") / "saved"
    checkpoint.save_collection(path, collection, state)
    return path, collection.tables(trained(collection, state, BATCHES[2:]))


def test_a_file_holds_rows_by_key_and_by_id(saved):
    path, _ = saved
    tree = checkpoint.load(path).tree
    seen = np.concatenate([batch["user"].ravel() for batch in BATCHES[:2]])
    keys, counts = np.unique(seen, return_counts=True)
    assert_array_equal(tree["tables"]["user"]["keys"], keys)
    assert_array_equal(tree["tables"]["user"]["count"], counts)
    # Each item of a batch was stepped once, with a gradient of -1 for all its values.
    stepped = np.concatenate([batch["item"] for batch in BATCHES[:2]])
    num_steps = np.bincount(stepped, minlength=ITEMS)
    accumulators = np.repeat(0.1 + num_steps[:, None], DIM, axis=1)
    assert_allclose(tree["slots"]["item"]["accumulator"], accumulators, rtol=1e-6)


@pytest.mark.slow_rows("both on a mesh")
@pytest.mark.parametrize(
    ("user_rows", "item_storage"),
    [(100, None), (40, rs.HostCached(cache_rows=32))],
    ids=["dense on a mesh, more room for keys", "both on a mesh"],
)
def test_training_goes_on_wherever_rows_are_kept_then(saved, user_rows, item_storage):
    path, expected = saved
    collection = collection_of(user_rows, item_storage, mesh=made_mesh(4))
    state = checkpoint.load_collection(path, collection)
    assert int(state.step) == 2
    actual = collection.tables(trained(collection, state, BATCHES[2:]))
    assert_allclose(actual["item"], expected["item"], atol=1e-6)
    for name in ("keys", "count", "last_step"):
        assert_array_equal(actual["user"][name], expected["user"][name])
    for name in ("values", "slot_accumulator"):
        assert_allclose(actual["user"][name], expected["user"][name], atol=1e-6)
