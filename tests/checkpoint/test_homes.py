"""What keeps the rows of a table is no part of a file: hashed rows go by key, rows on the host by id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint

DIM, ITEMS, LR = 4, 60, 0.5
KEYS = 2**40 + (2**33 + 1) * np.arange(12)
BATCHES = [
    {
        "user": KEYS[(5 * step + np.arange(24) ** 2) % 12].reshape(8, 3),
        "item": (7 * step + np.arange(8)) % ITEMS,
    }
    for step in range(4)
]


def collection_of(user_rows, item_storage, **options):
    how = {
        "embedding_dim": DIM,
        "optimizer": rs.optimizers.Adagrad(LR),
        "initializer": jax.nn.initializers.normal(),
    }
    user = rs.TableSpec("user", user_rows, storage=rs.Hashed(), **how)
    item = rs.TableSpec("item", ITEMS, storage=item_storage, **how)
    return rs.EmbeddingCollection(
        [
            rs.FeatureSpec("user", user),
            rs.FeatureSpec("item", item),
        ],
        **options,
    )


def trained(collection, state, batches):
    for batch in batches:
        state = collection.update(
            state, batch, {"user": jnp.ones((8, DIM)), "item": -jnp.ones((8, DIM))}
        )
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two batches, the state and the items of that time, and all tables after four."""
    collection = collection_of(12, rs.HostCached(cache_rows=8))
    state = trained(collection, collection.init(jax.random.key(0)), BATCHES[:2])
    path = tmp_path_factory.mktemp("storage") / "saved"
    checkpoint.save_collection(path, collection, state)
    items = collection.tables(state)["item"]
    return path, state, items, collection.tables(trained(collection, state, BATCHES[2:]))


def mesh():
    return Mesh(np.asarray(jax.devices()[:4]), ("device",))


@pytest.mark.slow_rows("both on a mesh")
@pytest.mark.parametrize(
    "make",
    [
        lambda: collection_of(100, None, mesh=mesh()),
        lambda: collection_of(40, rs.HostCached(cache_rows=32), mesh=mesh()),
    ],
    ids=["dense on a mesh, more room for keys", "both on a mesh"],
)
def test_training_goes_on_wherever_rows_are_kept_then(saved, make):
    path, _, _, expected = saved
    collection = make()
    state = checkpoint.load_collection(path, collection)
    assert int(state.step) == 2
    found = collection.tables(trained(collection, state, BATCHES[2:]))
    assert_allclose(found["item"], expected["item"], atol=1e-6)
    for name in ("keys", "count", "last_step"):
        assert_array_equal(found["user"][name], expected["user"][name])
    for name in ("values", "slot_accumulator"):
        assert_allclose(found["user"][name], expected["user"][name], atol=1e-6)


def test_a_file_holds_rows_by_key_and_by_id(saved):
    path, _, items, _ = saved
    tree = checkpoint.load(path).tree
    seen = np.unique(np.concatenate([batch["user"].ravel() for batch in BATCHES[:2]]))
    assert_array_equal(tree["tables"]["user"]["keys"], seen)
    counts = [sum((batch["user"] == key).sum() for batch in BATCHES[:2]) for key in seen]
    assert_array_equal(tree["tables"]["user"]["count"], counts)
    assert tree["tables"]["item"].shape == (ITEMS, DIM)
    assert_array_equal(tree["tables"]["item"], items)
    # Every item of the two batches was stepped once, by a gradient of -1 in every entry.
    stepped = np.unique(np.concatenate([batch["item"] for batch in BATCHES[:2]]))
    twice = np.intersect1d(BATCHES[0]["item"], BATCHES[1]["item"])
    expected = np.full((ITEMS, DIM), 0.1, np.float32)
    expected[stepped] += 1.0
    expected[twice] += 1.0
    assert_allclose(tree["slots"]["item"]["accumulator"], expected, rtol=1e-6)
