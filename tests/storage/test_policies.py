"""What policies of tables with keys promise beyond the contract test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from tests.storage.test_corners import DIM, keyed
from tests.world import mesh_of

# Small numbers come last, so that rows in the order of arrival are not in that of the keys.
KEYS = 2**40 * np.arange(12)[::-1]


@pytest.mark.slow_rows("lru")
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_table_that_was_taken_out_and_in_goes_on_with_the_same_evictions(eviction):
    collection, generator = keyed(when_full="evict", eviction=eviction), np.random.default_rng(0)
    state, step = collection.init(jax.random.key(0)), jax.jit(collection.update)
    batches = [generator.choice(KEYS, 4) for _ in range(8)]
    for number, keys in enumerate(batches):
        if number == 4:
            rows = collection.tables(state)
            other = collection.with_tables(collection.init(jax.random.key(0)), rows)._replace(
                step=state.step
            )
        batch, gradients = collection.prepare({"f": keys}), {"f": np.ones((4, DIM), np.float32)}
        state = step(state, batch, gradients)
        if number >= 4:
            other = step(other, batch, gradients)
            for name, found in collection.tables(other)["t"].items():
                assert_array_equal(found, collection.tables(state)["t"][name], err_msg=name)
    assert collection.counts(other)["t"]["evicted"].sum() >= 2


@pytest.mark.slow_rows("lfu")
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_keys_of_a_step_never_lose_their_rows_to_new_keys_of_the_same_step(eviction):
    """Key 1 occurs least and is used now; key 2 has to go, and where even that is not enough, a new key gets no row."""
    collection = keyed(rows=2, when_full="evict", eviction=eviction)
    state = collection.init(jax.random.key(0))
    for keys, left in (([1, 2, 2, 2], [1, 2]), ([1, 3], [1, 3]), ([1, 4, 5], [1, 4])):
        batch = collection.prepare({"f": np.asarray(keys)})
        state = collection.update(state, batch, {"f": np.ones((len(keys), DIM), np.float32)})
        assert collection.tables(state)["t"]["keys"].tolist() == left


def test_rows_that_are_written_count_as_used_now():
    collection = keyed()
    state = collection.init(jax.random.key(0))._replace(step=jnp.int32(5))
    rows = {"keys": KEYS[:2], "values": np.ones((2, DIM), np.float32)}
    found = collection.tables(collection.with_tables(state, {"t": rows}))["t"]
    assert found["last_step"].tolist() == [5, 5]


def by_key(rows):
    """All that belongs to each key, bit by bit."""
    lanes = [rows[name] for name in sorted(rows) if "keys" not in name]
    return {
        key: [lane[k].tobytes() for lane in lanes] for k, key in enumerate(rows["keys"].tolist())
    }


def test_a_table_that_was_full_on_a_mesh_is_told_how_many_rows_it_needs(tmp_path):
    """Each of four devices has a whole number of rows, 11, of a table of 41."""
    mesh = mesh_of(4)
    collection = keyed(rows=41, mesh=mesh, when_full="evict")
    state, keys = collection.init(jax.random.key(0)), np.arange(48)
    state = collection.update(state, {"f": keys}, {"f": np.ones((48, DIM), np.float32)})
    checkpoint.save_collection(tmp_path / "file", collection, state)
    with pytest.raises(
        ValueError,
        match=r"44 free rows, but the shard has 41 .* grow the table to vocabulary_size=44,",
    ):
        checkpoint.load_collection(tmp_path / "file", keyed(rows=41, when_full="evict"))
    other = keyed(rows=44, when_full="evict")
    loaded = checkpoint.load_collection(tmp_path / "file", other)
    assert by_key(other.tables(loaded)["t"]) == by_key(collection.tables(state)["t"])


@pytest.mark.slow_rows("1-evict", "4-zero")
@pytest.mark.parametrize(("num_devices", "when_full"), [(1, "evict"), (4, "zero"), (4, "evict")])
def test_the_keys_that_come_first_get_the_last_rows_by_update_and_by_apply(num_devices, when_full):
    mesh = mesh_of(num_devices)
    collection = keyed(rows=2 * num_devices, mesh=mesh, when_full=when_full)
    keys = np.random.default_rng(num_devices).permutation(40)[:24].reshape(8, 3)
    owned, wanted = [0] * num_devices, []
    for (
        key
    ) in keys.ravel():  # sample by sample, each device has two rows for those keys that are its own
        if owned[key % num_devices] < 2:
            owned[key % num_devices] += 1
            wanted.append(key)
    batch, gradients = (
        collection.prepare({"f": keys}),
        {"f": np.sin(np.arange(8.0 * DIM, dtype=np.float32).reshape(8, DIM))},
    )
    state = collection.init(jax.random.key(0))
    updated = collection.update(state, batch, gradients)
    applied = collection.apply(state, collection.lookup_vjp(state, batch)[1](gradients))
    for after in (updated, applied):
        assert_array_equal(collection.tables(after)["t"]["keys"], np.sort(wanted))
    assert_array_equal(*(collection.tables(after)["t"]["values"] for after in (updated, applied)))


@pytest.mark.slow_rows("1-zero", "None-zero")
@pytest.mark.parametrize(("capacity", "when_full"), [(1, "zero"), (2, "evict"), (None, "zero")])
def test_any_number_of_rounds_admits_what_a_dictionary_does(capacity, when_full):
    """Where there is a row, and a place to wait, for every key."""
    mesh = mesh_of(2)
    collection = keyed(
        rows=48, mesh=mesh, capacity=capacity, when_full=when_full, admission_count=2
    )
    update, ones = jax.jit(collection.update), {"f": np.ones((8, DIM), np.float32)}
    for seed in range(3):
        generator, state, known = (
            np.random.default_rng(seed),
            collection.init(jax.random.key(0)),
            {},
        )
        for number in range(10):
            keys = generator.integers(-1, 24, (8, 2))
            state = update(state, collection.prepare({"f": keys}), ones)
            for key in keys[keys >= 0]:
                known[key] = number, known.get(key, (0, 0))[1] + 1
            rows = collection.tables(state)["t"]
            for prefix, is_in in (
                ("", lambda count: count > 2),
                ("waiting_", lambda count: count <= 2),
            ):
                found = zip(
                    *(rows[prefix + part].tolist() for part in ("keys", "last_step", "count")),
                    strict=True,
                )
                assert list(found) == [
                    (key, *noted) for key, noted in sorted(known.items()) if is_in(noted[1])
                ]


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("capacity", [1, None])
def test_keys_that_wait_are_not_forgotten_for_others_of_the_same_batch(capacity):
    """Whichever round brings them."""
    mesh = mesh_of(2)
    policies = {
        "when_full": "evict",
        "admission_count": 1,
        "admission_capacity": 1,
        "capacity": capacity,
    }
    collection = keyed(mesh=mesh, **policies)
    state = collection.init(jax.random.key(0))
    # Key 2 is asked for in an earlier round.
    for keys in (
        [[100, -1], [-1, -1]],
        [[2, 100], [-1, -1]],
    ):
        state = collection.update(
            state, {"f": np.asarray(keys)}, {"f": np.ones((2, DIM), np.float32)}
        )
    assert collection.tables(state)["t"]["keys"].tolist() == [100]


def test_of_equally_due_keys_the_least_signed_number_goes():
    """A table of a dtype of unsigned numbers takes the same bits for the largest keys."""
    for key_dtype, left in (("int64", [2, 3, 7]), ("uint64", [2**64 - 5, 3, 7])):
        keys = np.array([2**64 - 5, 2, 3], np.uint64)
        new = np.array([7], np.uint64)
        if key_dtype != "uint64":
            keys, new = keys.astype(np.int64), new.astype(np.int64)
        collection = keyed(rows=3, when_full="evict", key_dtype=key_dtype)
        state = collection.init(jax.random.key(0))
        taken = collection.update(state, {"f": keys}, {"f": np.ones((3, DIM), np.float32)})
        state = collection.update(taken, {"f": new}, {"f": np.ones((1, DIM), np.float32)})
        assert sorted(collection.tables(state)["t"]["keys"].tolist()) == sorted(left), key_dtype
        again = collection.update(
            collection.init(jax.random.key(0)), {"f": keys}, {"f": np.ones((3, DIM), np.float32)}
        )
        after, gone = collection.evict(again, "t", keep=2)
        assert gone["keys"].tolist() == (keys[1:2] if key_dtype == "uint64" else keys[:1]).tolist()
        assert len(collection.tables(after)["t"]["keys"]) == 2


@pytest.mark.slow_rows("1-2-evict", "4-2-error")
@pytest.mark.parametrize(
    ("num_devices", "num_tables", "when_full"),
    [(1, 2, "evict"), (2, 1, "zero"), (4, 2, "evict"), (4, 2, "error")],
)
def test_keys_that_will_find_no_row_read_zeros_in_training_as_in_serving(
    num_devices, when_full, num_tables
):
    """What training reads is what it steps: a key's row after the step is what was read, less its gradient."""
    tables = [
        rs.TableSpec(
            f"t{number}",
            4 * num_devices,
            DIM,
            optimizer=rs.optimizers.SGD(0.25),
            storage=rs.Hashed(when_full=when_full),
        )
        for number in range(num_tables)
    ]
    features = [rs.FeatureSpec(f"f{number}", table) for number, table in enumerate(tables)]
    collection = rs.EmbeddingCollection(features, mesh=mesh_of(num_devices))
    generator, state = np.random.default_rng(num_devices), collection.init(jax.random.key(1))
    look_up = jax.jit(lambda state, batch: collection.lookup_vjp(state, batch)[0])
    update = jax.jit(collection.update)
    num_without = 0
    for _ in range(3):
        most = 20 * num_devices
        keys = {
            feature.name: generator.integers(-most, most, 16 * num_devices) for feature in features
        }
        batch = collection.prepare(keys)
        read = jax.tree.map(np.asarray, look_up(state, batch))
        known_before = collection.tables(state)
        served = jax.tree.map(np.asarray, collection.lookup(state, batch))
        state = update(state, batch, jax.tree.map(np.ones_like, read))
        for number, feature in enumerate(features):
            rows = collection.tables(state)[f"t{number}"]
            values = dict(zip(rows["keys"].tolist(), rows["values"], strict=True))
            before = known_before[f"t{number}"]["keys"].tolist()
            own = keys[feature.name]
            for place, key in enumerate(own.tolist()):
                if key == -1:
                    continue
                if key in before:
                    assert_array_equal(read[feature.name][place], served[feature.name][place])
                if key not in values:
                    num_without += 1
                    assert (
                        not read[feature.name][place].any()
                        and not served[feature.name][place].any()
                    )
                else:
                    stepped = read[feature.name][place] - 0.25 * np.sum(own == key)
                    assert_allclose(values[key], stepped, rtol=1e-6)
                    assert read[feature.name][place].any()
    assert num_without > 8
