"""What policies of tables with keys promise beyond the contract test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rsembed as rs

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
            other = collection.with_tables(collection.init(jax.random.key(0))._replace(step=state.step), rows)
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
