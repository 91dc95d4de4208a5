"""What a call that is refused leaves behind: the state from before it, whole and usable."""

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from tests.world import assert_same

ROWS, DIM = 40, 4


def collection_of(storages, *, rows=ROWS, mesh=None, **options):
    tables = [
        rs.TableSpec(name, rows.get(name, ROWS) if isinstance(rows, dict) else rows, DIM,
            optimizer=rs.optimizers.Adagrad(0.1), storage=storage, **options,
        )
        for name, storage in storages.items()
    ]  # fmt: skip
    return rs.EmbeddingCollection([rs.FeatureSpec(own.name, own) for own in tables], mesh=mesh)


def trained(collection, seed=0):
    rng, state = np.random.default_rng(seed), collection.init(jax.random.key(seed))
    for _ in range(3):
        batch = {name: rng.integers(0, 8, (4, 2)) for name in collection.features}
        state = collection.update(
            state, batch, {name: np.ones((4, DIM), np.float32) for name in batch}
        )
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
    batch = {name: np.ones((4, 2), np.int64) for name in HOST}
    collection.update(state, batch, {name: np.ones((4, DIM), np.float32) for name in HOST})


def test_tables_on_the_host_stay_when_a_file_is_refused(tmp_path):
    small, large = collection_of(HOST, rows={"h": 8}), collection_of(HOST)
    state = large.init(jax.random.key(0))
    batch = {
        "h": np.arange(40).reshape(4, 10),
        "a": np.ones((4, 2), int),
        "b": np.ones((4, 2), int),
    }
    state = large.update(state, batch, {name: np.ones((4, DIM), np.float32) for name in HOST})
    checkpoint.save_collection(tmp_path / "file", large, state)
    own = trained(small)
    before = small.tables(own)
    with pytest.raises(ValueError, match="grow the table"):
        checkpoint.load_collection(tmp_path / "file", small)
    assert_same(small.tables(own), before)


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
    ones, state = {"t": np.ones((1, DIM), np.float32)}, collection.init(jax.random.key(0))
    state = collection.update(state, {"t": np.asarray([1])}, ones)
    assert collection.tables(state)["t"]["waiting_keys"].tolist() == [1]
    state = collection.with_tables(
        state, {"t": {"keys": np.asarray([1]), "values": np.ones((1, DIM))}}
    )
    assert collection.tables(state)["t"]["waiting_keys"].tolist() == []
    state = collection.update(state, {"t": np.asarray([2])}, ones)  # there is room to wait again
    rows = collection.tables(state)["t"]
    assert (rows["keys"].tolist(), rows["waiting_keys"].tolist()) == ([1], [2])
    two_wait = {"keys": rows["keys"], "values": rows["values"], "waiting_keys": np.asarray([2, 3])}
    with pytest.raises(
        ValueError, match=r"2 imported waiting_keys need 2 .* has 1 \(admission_capacity=1\)"
    ):
        collection.with_tables(collection.init(jax.random.key(0)), {"t": two_wait})


def test_lists_of_keys_with_the_top_bit_keep_all_their_bits():
    keys = [[2**64 - 1], [1], [], [2**63 + 1, 3]]
    assert rs.Bags.from_lists(keys).to_lists() == keys
    with pytest.raises(TypeError, match="no integers of 64 bits hold both -1 and"):
        rs.Bags.from_lists([[2**64 - 1], [-1]])
    collection = collection_of({"t": rs.Hashed(key_dtype="uint64")})
    state = collection.init(jax.random.key(0))
    state = collection.update(state, {"t": keys}, {"t": np.ones((4, DIM), np.float32)})
    assert collection.tables(state)["t"]["keys"].tolist() == [1, 3, 2**63 + 1, 2**64 - 1]


@pytest.mark.parametrize("storage", [None, rs.Hashed(), rs.HostCached(cache_rows=16)])
def test_a_state_that_an_interrupted_step_took_over_says_how_to_go_on(storage):
    collection = collection_of({"t": storage})
    state = trained(collection)
    jax.tree.map(lambda array: array.delete(), state.tables)
    for call in (collection.lookup, collection.lookup_vjp):
        with pytest.raises(
            RuntimeError, match=r"lost its tables to a step .* Ctrl-C .* load the latest checkpoint"
        ):
            call(state, {"t": [[1]]})
