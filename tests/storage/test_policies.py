"""Policies of keyed tables in cases that the contract test does not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from tests.storage.test_corners import DIM, keyed, keys_of, rows_of, stepped
from tests.world import assert_same, mesh_of


@pytest.mark.slow_rows("lfu")
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_keys_of_a_step_never_lose_their_rows_to_new_keys_of_the_same_step(eviction):
    """Key 1 occurs least, but in each step, so other keys are evicted. Key 5 gets no row."""
    collection = keyed(rows=2, when_full="evict", eviction=eviction)
    state = collection.init(jax.random.key(0))
    for keys, remaining in (([1, 2, 2, 2], [1, 2]), ([1, 3], [1, 3]), ([1, 4, 5], [1, 4])):
        state = stepped(collection, state, keys)
        assert keys_of(collection, state) == remaining


def test_rows_that_are_written_count_as_used_now():
    collection = keyed()
    state = collection.init(jax.random.key(0))._replace(step=jnp.int32(5))
    rows = {"keys": np.array([2**40, 7]), "values": np.ones((2, DIM), np.float32)}
    written = collection.with_tables(state, {"t": rows})
    assert rows_of(collection, written)["last_step"].tolist() == [5, 5]


def test_a_table_that_was_full_on_a_mesh_is_told_how_many_rows_it_needs(tmp_path):
    """Four devices have 11 rows each, so a table of 41 rows can have 44 keys."""
    collection = keyed(mesh_of(4), rows=41, when_full="evict")
    state = stepped(collection, collection.init(jax.random.key(0)), np.arange(48))
    checkpoint.save_collection(tmp_path / "file", collection, state)
    with pytest.raises(
        ValueError,
        match=r"44 free rows, but the shard has 41 .* grow the table to vocabulary_size=44,",
    ):
        checkpoint.load_collection(tmp_path / "file", keyed(rows=41, when_full="evict"))
    other = keyed(rows=44, when_full="evict")
    loaded = checkpoint.load_collection(tmp_path / "file", other)
    assert_same(rows_of(other, loaded), rows_of(collection, state))


@pytest.mark.slow_rows("1-evict", "4-zero")
@pytest.mark.parametrize(("num_devices", "when_full"), [(1, "evict"), (4, "zero"), (4, "evict")])
def test_the_keys_that_come_first_get_the_last_rows_by_update_and_by_apply(num_devices, when_full):
    collection = keyed(mesh_of(num_devices), rows=2 * num_devices, when_full=when_full)
    keys = np.random.default_rng(num_devices).permutation(40)[:24].reshape(8, 3)
    wanted = []
    for owner in range(num_devices):
        wanted += keys[keys % num_devices == owner][:2].tolist()
    batch = collection.prepare({"f": keys})
    gradients = {"f": np.sin(np.arange(8 * DIM, dtype=np.float32)).reshape(8, DIM)}
    state = collection.init(jax.random.key(0))
    updated = rows_of(collection, collection.update(state, batch, gradients))
    _, pullback = collection.lookup_vjp(state, batch)
    applied = rows_of(collection, collection.apply(state, pullback(gradients)))
    assert updated["keys"].tolist() == sorted(wanted)
    assert_same(applied, updated)


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("capacity", [1, None])
def test_keys_that_wait_are_not_forgotten_for_others_of_the_same_batch(capacity):
    """The result does not depend on the rounds of the exchange."""
    policies = {"when_full": "evict", "admission_count": 1, "admission_capacity": 1}
    collection = keyed(mesh_of(2), capacity=capacity, **policies)
    state = stepped(collection, collection.init(jax.random.key(0)), [[100, -1], [-1, -1]])
    # Key 2 is exchanged in an earlier round than key 100.
    state = stepped(collection, state, [[2, 100], [-1, -1]])
    assert keys_of(collection, state) == [100]


@pytest.mark.parametrize(("key_dtype", "first"), [("int64", 2**64 - 5), ("uint64", 2)])
def test_of_equally_due_keys_the_least_number_of_the_dtype_goes(key_dtype, first):
    """2**64 - 5 as int64 is -5, the lowest of the keys."""
    keys = np.array([2**64 - 5, 2, 3], np.uint64).astype(key_dtype)
    new = np.array([7], key_dtype)
    collection = keyed(rows=3, when_full="evict", key_dtype=key_dtype)
    full = stepped(collection, collection.init(jax.random.key(0)), keys)
    remaining = keys_of(collection, stepped(collection, full, new))
    assert remaining == sorted({2**64 - 5, 2, 3, 7} - {first})
    again = stepped(collection, collection.init(jax.random.key(0)), keys)
    _, evicted = collection.evict(again, "t", keep=2)
    assert evicted["keys"].astype(np.uint64).tolist() == [first]


@pytest.mark.slow_rows("1-2-evict", "4-2-error", "4-2-evict")
@pytest.mark.parametrize(
    ("num_devices", "num_tables", "when_full"),
    [(1, 2, "evict"), (2, 1, "zero"), (4, 2, "evict"), (4, 2, "error")],
)
def test_keys_that_will_find_no_row_read_zeros_in_training_as_in_serving(
    num_devices, when_full, num_tables
):
    """If a key has a row after the step, it is the row that was read, minus the step."""
    features = []
    for name in "tu"[:num_tables]:
        table = rs.TableSpec(name, 4 * num_devices, DIM, optimizer=rs.optimizers.SGD(0.25),
            storage=rs.Hashed(when_full=when_full),
        )  # fmt: skip
        features.append(rs.FeatureSpec(name, table))
    collection = rs.EmbeddingCollection(features, mesh=mesh_of(num_devices))
    generator, state = np.random.default_rng(num_devices), collection.init(jax.random.key(1))
    look_up = jax.jit(lambda state, batch: collection.lookup_vjp(state, batch)[0])
    update = jax.jit(collection.update)
    most = 20 * num_devices
    num_without = 0
    for _ in range(3):
        keys = {
            feature.name: generator.integers(-most, most, 16 * num_devices) for feature in features
        }
        batch = collection.prepare(keys)
        read = jax.tree.map(np.asarray, look_up(state, batch))
        served = jax.tree.map(np.asarray, collection.lookup(state, batch))
        before = collection.tables(state)
        state = update(state, batch, jax.tree.map(np.ones_like, read))
        for name, rows in collection.tables(state).items():
            values = dict(zip(rows["keys"].tolist(), rows["values"], strict=True))
            for place, key in enumerate(keys[name].tolist()):
                if key == -1:
                    continue
                if key in before[name]["keys"]:
                    assert_array_equal(read[name][place], served[name][place])
                if key in values:
                    stepped_row = read[name][place] - 0.25 * np.sum(keys[name] == key)
                    assert_allclose(values[key], stepped_row, rtol=1e-6)
                    assert read[name][place].any()
                else:
                    num_without += 1
                    assert not read[name][place].any() and not served[name][place].any()
    assert num_without > 8
