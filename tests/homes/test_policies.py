"""What policies of tables with keys promise beyond the contract test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rsembed as rs
from rsembed import checkpoint

DIM, LR, ROWS = 4, 0.5, 8
# Small numbers come last, so that rows in the order of arrival are not in that of the keys.
KEYS = 2**40 * np.arange(12)[::-1]


def one_table(rule=None, rows=ROWS, mesh=None, **storage):
    rule = rs.SGDOptimizerSpec(LR) if rule is None else rule
    table = rs.TableSpec(
        name="t", vocabulary_size=rows, embedding_dim=DIM, optimizer=rule, storage=rs.Hashed(**storage)
    )
    return rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], mesh=mesh)


@pytest.mark.parametrize("eviction", ["lru", "age"])
def test_a_table_that_was_taken_out_and_in_goes_on_with_the_same_evictions(eviction):
    collection, generator = one_table(when_full="evict", eviction=eviction), np.random.default_rng(0)
    state, step = collection.init(jax.random.key(0)), jax.jit(collection.update)
    batches = [generator.choice(KEYS, 4) for _ in range(8)]
    for number, keys in enumerate(batches):
        if number == 4:
            rows = collection.tables(state)
            other = collection.with_tables(collection.init(jax.random.key(0)), rows)._replace(step=state.step)
        batch, gradients = collection.prepare({"f": keys}), {"f": np.ones((4, DIM), np.float32)}
        state = step(state, batch, gradients)
        if number >= 4:
            other = step(other, batch, gradients)
            for name, found in collection.tables(other)["t"].items():
                np.testing.assert_array_equal(found, collection.tables(state)["t"][name], err_msg=name)
    assert collection.counts(other)["t"]["evicted"].sum() >= 2


@pytest.mark.parametrize("policy", [{"when_full": "evict"}, {"admission_count": 1}], ids=str)
def test_changes_since_a_step_make_earlier_rows_those_of_now(policy):
    collection, generator = one_table(rs.AdagradOptimizerSpec(LR), **policy), np.random.default_rng(1)
    state, step = collection.init(jax.random.key(0)), jax.jit(collection.update)
    for number in range(8):
        if number == 6:
            before = collection.tables(state)
        batch = collection.prepare({"f": generator.choice(KEYS[number % 3 :], 4)})
        state = step(state, batch, {"f": generator.normal(size=(4, DIM)).astype(np.float32)})
    now, changes = collection.tables(state)["t"], collection.tables(state, since=6)
    assert 0 < changes["t"]["keys"].size < now["keys"].size
    assert set(changes["t"]["keys"]) | set(changes["t"]["other_keys"]) == set(now["keys"].tolist())
    fresh = collection.init(jax.random.key(0))
    found = collection.tables(collection.with_tables(collection.with_tables(fresh, before), changes))["t"]
    assert found.keys() == now.keys()
    for name, array in now.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert "evict" not in str(policy) or set(before["t"]["keys"]) - set(now["keys"])


def test_rows_that_are_written_count_as_used_now():
    collection = one_table(eviction="age")
    state = collection.init(jax.random.key(0))._replace(step=jnp.int32(5))
    rows = {"keys": KEYS[:2], "values": np.ones((2, DIM), np.float32)}
    found = collection.tables(collection.with_tables(state, {"t": rows}), since=5)["t"]
    assert found["last_step"].tolist() == found["first_step"].tolist() == [5, 5] and not found["other_keys"].size


@pytest.mark.parametrize("num_devices", [1, 2])
def test_rows_that_come_back_edited_are_among_the_changes(num_devices):
    mesh = None if num_devices == 1 else Mesh(np.asarray(jax.devices()[:num_devices]), "x")
    collection = one_table(rows=16, mesh=mesh)
    state = collection.init(jax.random.key(0))
    for keys in (KEYS[:4], KEYS[2:6]):
        state = collection.update(state, {"f": keys}, {"f": np.ones((4, DIM), np.float32)})
    base, since = collection.tables(state), int(state.step)
    rows = {**base["t"], "values": base["t"]["values"].copy()}
    rows["values"][[0, 3]] *= 10
    edited = collection.with_tables(state, {"t": rows})
    changes = collection.tables(edited, since=since)
    assert changes["t"]["keys"].tolist() == rows["keys"][[0, 3]].tolist()
    again = collection.with_tables(collection.with_tables(collection.init(jax.random.key(1)), base), changes)
    np.testing.assert_array_equal(collection.tables(again)["t"]["values"], rows["values"])
    same = collection.tables(collection.with_tables(edited, collection.tables(edited)))["t"]
    np.testing.assert_array_equal(same["last_step"], collection.tables(edited)["t"]["last_step"])
    counts = collection.counts(edited)["t"]
    assert {array.dtype for array in counts.values()} == {np.dtype(np.int64)}


def by_key(rows):
    """All that belongs to each key, bit by bit."""
    lanes = [rows[name] for name in sorted(rows) if "keys" not in name]
    return {key: [lane[k].tobytes() for lane in lanes] for k, key in enumerate(rows["keys"].tolist())}


WRITES = {
    "as they were two steps ago": lambda now, old: old,
    "with fresh slots": lambda now, old: {name: now[name] for name in ("keys", "values", "last_step", "count")},
    "with fresh counts": lambda now, old: {name: array for name, array in now.items() if name != "count"},
    "with other slots": lambda now, old: now | {"slot_accumulator": 2 * now["slot_accumulator"]},
    "with keys of another dtype": lambda now, old: now | {"values": -now["values"], "keys": np.uint64(now["keys"])},
    "with another sign of zero": lambda now, old: now | {"values": now["values"] * 0 * -1},
    "the same": lambda now, old: now,
}


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("base_is_before", [False, True])
def test_rows_that_left_and_come_back_are_among_the_changes(base_is_before, is_edited):
    collection = one_table()
    state = collection.init(jax.random.key(0))
    for own in (KEYS[:4], KEYS[3:6]):
        state = collection.update(state, {"f": own}, {"f": np.ones((len(own), DIM), np.float32)})
    full, since = collection.tables(state)["t"], int(state.step)
    state, gone = collection.evict(state, "t", unused_for=1)
    base = by_key(full if base_is_before else collection.tables(state)["t"])
    assert sorted(gone["keys"]) == sorted(KEYS[:3])
    state = collection.with_tables(state, {"t": gone | {"values": 10 * gone["values"]} if is_edited else gone})
    changes = collection.tables(state, since=since)["t"]
    found = {key: base[key] for key in changes["other_keys"].tolist()} | by_key(changes)
    assert found == by_key(collection.tables(state)["t"]) and set(by_key(changes)) == set(KEYS[:3].tolist())


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_whatever_is_written_is_among_the_changes(write, num_devices):
    mesh = None if num_devices == 1 else Mesh(np.asarray(jax.devices()[:num_devices]), "x")
    collection = one_table(rs.AdagradOptimizerSpec(LR), rows=16, mesh=mesh)
    state, keys = collection.init(jax.random.key(0)), 2**60 + np.arange(6)  # as floats they would be one
    for own in (keys[:4], keys[2:], keys[2:]):
        old = collection.tables(state)
        state = collection.update(state, {"f": own}, {"f": np.ones((4, DIM), np.float32)})
    now, since = collection.tables(state)["t"], int(state.step)
    written = collection.with_tables(state, {"t": WRITES[write](now, old["t"])})
    changes, expected = collection.tables(written, since=since)["t"], by_key(collection.tables(written)["t"])
    base = by_key(now)
    found = {key: base[key] for key in changes["other_keys"].tolist()} | by_key(changes)
    assert found == expected
    assert set(by_key(changes)) == {key for key, row in expected.items() if row != base[key]}


def test_changes_keep_the_steps_that_they_tell():
    """Rows that are written count as used by the step to come, which uses them then itself."""
    collection = one_table(rows=16)
    state = collection.init(jax.random.key(0))
    for _ in range(3):
        state = collection.update(state, {"f": KEYS[:4]}, {"f": np.ones((4, DIM), np.float32)})
    rows = collection.tables(state)["t"]
    state = collection.with_tables(state, {"t": rows | {"values": 3 * rows["values"]}})
    base, since = collection.tables(state), int(state.step)
    state = collection.update(state, {"f": KEYS[:2]}, {"f": np.ones((2, DIM), np.float32)})
    changes, now = collection.tables(state, since=since), collection.tables(state)["t"]
    for step in (0, 9):
        fresh = collection.with_tables(collection.init(jax.random.key(1)), base)._replace(step=jnp.int32(step))
        assert by_key(collection.tables(collection.with_tables(fresh, changes))["t"]) == by_key(now)


def test_a_table_that_was_full_on_a_mesh_is_told_how_many_rows_it_needs(tmp_path):
    """Each of four devices has a whole number of rows, 11, of a table of 41."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")
    collection = one_table(rows=41, mesh=mesh, when_full="evict")
    state, keys = collection.init(jax.random.key(0)), np.arange(48)
    state = collection.update(state, {"f": keys}, {"f": np.ones((48, DIM), np.float32)})
    checkpoint.save_collection(tmp_path / "file", collection, state)
    with pytest.raises(
        ValueError, match=r"44 free rows, but the shard has 41 .* grow the table to vocabulary_size=44,"
    ):
        checkpoint.load_collection(tmp_path / "file", one_table(rows=41, when_full="evict"))
    other = one_table(rows=44, when_full="evict")
    loaded = checkpoint.load_collection(tmp_path / "file", other)
    assert by_key(other.tables(loaded)["t"]) == by_key(collection.tables(state)["t"])


@pytest.mark.parametrize("when_full", ["zero", "evict"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_keys_that_come_first_get_the_last_rows_by_update_and_by_apply(num_devices, when_full):
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), "x")
    collection = one_table(rows=2 * num_devices, mesh=mesh, when_full=when_full)
    keys = np.random.default_rng(num_devices).permutation(40)[:24].reshape(8, 3)
    owned, wanted = [0] * num_devices, []
    for key in keys.ravel():  # sample by sample, each device has two rows for those keys that are its own
        if owned[key % num_devices] < 2:
            owned[key % num_devices] += 1
            wanted.append(key)
    batch, gradients = collection.prepare({"f": keys}), {"f": np.ones((8, DIM), np.float32)}
    state = collection.init(jax.random.key(0))
    updated = collection.update(state, batch, gradients)
    applied = collection.apply(state, collection.lookup_vjp(state, batch)[1](gradients))
    for after in (updated, applied):
        np.testing.assert_array_equal(collection.tables(after)["t"]["keys"], np.sort(wanted))
    np.testing.assert_array_equal(*(collection.tables(after)["t"]["values"] for after in (updated, applied)))
