"""A refused call leaves the state as it was, and the state can still be used."""

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from tests.world import assert_same

ROWS, DIM = 40, 4


def collection_of(storages, *, keyed_rows=ROWS, **options):
    """A collection with one table and one feature for each storage."""
    features = []
    for name, storage in storages.items():
        rows = keyed_rows if isinstance(storage, rs.Hashed) else ROWS
        table = rs.TableSpec(name, rows, DIM, storage=storage,
            optimizer=rs.optimizers.Adagrad(0.1), **options,
        )  # fmt: skip
        features.append(rs.FeatureSpec(name, table))
    return rs.EmbeddingCollection(features)


def stepped(collection, state, ids):
    """The state after a step with gradients of 1."""
    ones = {name: np.ones((len(feature_ids), DIM), np.float32) for name, feature_ids in ids.items()}
    return collection.update(state, ids, ones)


def trained(collection):
    rng, state = np.random.default_rng(0), collection.init(jax.random.key(0))
    for _ in range(3):
        batch = {name: rng.integers(0, 8, (4, 2)) for name in collection.features}
        state = stepped(collection, state, batch)
    return state


HOST = {"a": rs.HostCached(cache_rows=16), "b": rs.HostCached(cache_rows=16), "h": rs.Hashed()}


@pytest.mark.slow_rows("name", "too many keys")
@pytest.mark.parametrize(
    "second",
    [
        {"b": np.zeros((3, DIM))},
        {"unknown": np.zeros((ROWS, DIM))},
        {"h": {"keys": np.arange(100), "values": np.zeros((100, DIM))}},
    ],
    ids=["shape", "name", "too many keys"],
)
def test_tables_on_the_host_stay_when_a_later_one_is_refused(second):
    collection = collection_of(HOST)
    state = trained(collection)
    before = collection.tables(state)
    with pytest.raises(ValueError, match=r"shape|unknown table|grow the table"):
        collection.with_tables(state, {"a": np.zeros((ROWS, DIM)), **second})
    assert_same(collection.tables(state), before)
    stepped(collection, state, dict.fromkeys(HOST, np.ones((4, 2), np.int64)))


def test_tables_on_the_host_stay_when_a_file_is_refused(tmp_path):
    large = collection_of(HOST)
    batch = dict.fromkeys("ab", np.ones((4, 2), int)) | {"h": np.arange(40).reshape(4, 10)}
    state = stepped(large, large.init(jax.random.key(0)), batch)
    checkpoint.save_collection(tmp_path / "file", large, state)
    small = collection_of(HOST, keyed_rows=8)
    own_state = trained(small)
    before = small.tables(own_state)
    with pytest.raises(ValueError, match="grow the table"):
        checkpoint.load_collection(tmp_path / "file", small)
    assert_same(small.tables(own_state), before)


@pytest.mark.parametrize("storage", [None, rs.HostCached(cache_rows=16), rs.Hashed()], ids=repr)
def test_numbers_too_large_for_the_dtype_are_refused(storage):
    collection = collection_of({"t": storage}, dtype="float16")
    state = trained(collection)
    before = collection.tables(state)
    with pytest.raises(
        ValueError,
        match="'t': 160 numbers of imported 'values' are too large for float16; clip them",
    ):
        collection.with_tables(state, {"t": np.full((ROWS, DIM), 1e6, np.float32)})
    assert_same(collection.tables(state), before)


def test_a_key_that_is_given_a_row_waits_no_longer():
    collection = collection_of({"t": rs.Hashed(admission_count=1, admission_capacity=1)})
    new = collection.init(jax.random.key(0))
    waits = stepped(collection, new, {"t": np.asarray([1])})
    assert collection.tables(waits)["t"]["waiting_keys"].tolist() == [1]
    row = {"keys": np.asarray([1]), "values": np.ones((1, DIM))}
    restored = collection.with_tables(waits, {"t": row})
    assert collection.tables(restored)["t"]["waiting_keys"].tolist() == []
    # Another key can wait now.
    rows = collection.tables(stepped(collection, restored, {"t": np.asarray([2])}))["t"]
    assert (rows["keys"].tolist(), rows["waiting_keys"].tolist()) == ([1], [2])
    with pytest.raises(
        ValueError, match=r"2 imported waiting_keys need 2 .* has 1 \(admission_capacity=1\)"
    ):
        collection.with_tables(new, {"t": row | {"waiting_keys": np.asarray([2, 3])}})


def test_lists_of_keys_with_the_top_bit_keep_all_their_bits():
    keys = [[2**64 - 1], [1], [], [2**63 + 1, 3]]
    assert rs.Bags.from_lists(keys).to_lists() == keys
    collection = collection_of({"t": rs.Hashed(key_dtype="uint64")})
    state = stepped(collection, collection.init(jax.random.key(0)), {"t": keys})
    assert collection.tables(state)["t"]["keys"].tolist() == [1, 3, 2**63 + 1, 2**64 - 1]
