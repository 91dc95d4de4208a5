"""Rows that leave a table come back as they were: training is that of a table with room for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from rsembed.collection.moving import Coming
from rsembed.kernels import native
from rsembed.keys import Keys
from rsembed.sok.optimizers import Adam
from tests.homes.oracle import KeyedTable, Read, Steps
from tests.homes.test_corners import mesh_of

DIM, SAMPLES, ROWS, NUM_STEPS = 4, 8, 16, 8
# Fifteen for each of four devices, which have four rows each.
KEYS = np.random.default_rng(5).integers(0, 2**60, 60) * 4 + np.arange(60) % 4


def collection_of(rows=ROWS, *, mesh=None, rule=None, **storage):
    rule = rs.AdagradOptimizerSpec(0.3) if rule is None else rule
    table = rs.TableSpec(
        name="t", vocabulary_size=rows, embedding_dim=DIM, optimizer=rule, storage=rs.Hashed(**storage)
    )
    return rs.EmbeddingCollection([rs.FeatureSpec(name=name, table_spec=table) for name in "fg"], mesh=mesh)


@functools.cache
def batches():
    """Three keys of each device, in two features that share the table, and what the samples send back."""
    generator, found = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        keys = np.concatenate([generator.choice(KEYS[device::4], 3, replace=False) for device in range(4)])
        ids = {"f": keys[:SAMPLES], "g": np.resize(keys[SAMPLES:], SAMPLES)}
        found.append((ids, {name: generator.normal(size=(SAMPLES, DIM)).astype(np.float32) for name in ids}))
    return found


def joined(here, there):
    """The rows of a table and of its second tier, by key."""
    assert not np.intersect1d(here["keys"], there["keys"]).size
    order = np.argsort(np.concatenate([here["keys"], there["keys"]]))
    return {name: np.concatenate([array, there[name]])[order] for name, array in here.items() if name in there}


def test_training_gives_the_bits_of_a_table_with_room_for_all():
    small, large = collection_of(), collection_of(256)
    states, tier = [c.init(jax.random.key(0)) for c in (small, large)], rs.SecondTier(small, "t", num_rows=99)
    steps = jax.jit(small.update, donate_argnums=0), jax.jit(large.update)
    for ids, gradients in batches():
        batch = small.prepare(ids)
        states[0] = tier.fetch(states[0], batch)
        states = [step(state, batch, gradients) for step, state in zip(steps, states, strict=True)]
    here, there, expected = small.tables(states[0])["t"], tier.rows(), large.tables(states[1])["t"]
    assert len(here["keys"]) <= ROWS and len(tier) == len(there["keys"]) > ROWS
    for name, array in joined(here, there).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


POLICIES = {"row": {"eviction": "l2", "admission_count": 1}, "replicated": {"eviction": "age"}}


def test_on_a_mesh_it_gives_the_rows_of_loops(tmp_path):
    """One table split over four devices, whose keys wait until they come twice, and copies of another one."""
    features = [
        rs.FeatureSpec(
            name=name,
            table_spec=rs.TableSpec(
                name=name, vocabulary_size=ROWS, embedding_dim=DIM, combiner="sum", optimizer=rs.SGDOptimizerSpec(0.3),
                initializer=jax.nn.initializers.ones, storage=rs.Hashed(admission_capacity=60, **policy),
            ),
        )
        for name, policy in POLICIES.items()
    ]  # fmt: skip
    collection = rs.EmbeddingCollection(features, mesh=mesh_of(4), placement={name: name for name in POLICIES})
    state, step = collection.init(jax.random.key(0)), jax.jit(collection.update, donate_argnums=0)
    tiers = {name: rs.SecondTier(collection, name, num_rows=99, folder=tmp_path / name) for name in POLICIES}
    steps = Steps(
        (rs.SGDOptimizerSpec(0.3),), (lambda rule, row, slots, gradient, number: row.__isub__(0.3 * gradient),)
    )
    oracles = {
        name: KeyedTable(
            {key: np.ones(DIM) for key in KEYS.tolist()}, "sum", steps, admission_count=policy.get("admission_count", 0)
        )
        for name, policy in POLICIES.items()
    }
    for ids, gradients in batches():
        own = np.stack([ids["f"], ids["g"]], axis=1)
        batch = collection.prepare(dict.fromkeys(POLICIES, own))
        for tier in tiers.values():
            state = tier.fetch(state, batch)
        state = step(state, batch, dict.fromkeys(POLICIES, gradients["f"]))
        for name, oracle in oracles.items():
            oracle.update({name: Read(own, None)}, {name: gradients["f"]})
    for name, oracle in oracles.items():
        here, keys = collection.tables(state)[name], sorted(oracle.rows)
        found = joined(here, tiers[name].rows())
        assert found["keys"].tolist() == keys and len(here["keys"]) <= ROWS < len(keys), name
        assert found["count"].tolist() == [oracle.occurrences[key] for key in keys]
        np.testing.assert_allclose(found["values"], [oracle.rows[key][0] for key in keys], atol=1e-5)
        assert collection.counts(state)[name]["failed"].sum() == 0 and list((tmp_path / name).iterdir()) == []


@functools.cache
def some_rows():
    """Forty keys with all that belongs to them."""
    generator, keys = np.random.default_rng(3), np.sort(KEYS)[10:50]
    steps, counts = (generator.integers(low, 9, 40).astype(np.int32) for low in (0, 1))
    arrays = {name: generator.normal(size=(40, DIM)).astype(np.float32) for name in ("values", "slot_accumulator")}
    return {"keys": keys, "last_step": steps, "count": counts, **arrays}


def filled(num_devices=None, **storage):
    """A table with these rows, before step 9, on one device or four."""
    collection = collection_of(96, mesh=num_devices and mesh_of(num_devices), eviction="lfu", **storage)
    state = collection.with_tables(collection.init(jax.random.key(0)), {"t": some_rows()})
    return collection, state._replace(step=jnp.int32(9))


REASONS = {
    "keep": lambda rows: sorted(range(rows["keys"].size), key=lambda k: (rows["count"][k], rows["keys"][k]))[:-20],
    "unused_for": lambda rows: np.flatnonzero(9 - rows["last_step"] > 3),
    "norm_below": lambda rows: np.flatnonzero(np.linalg.norm(np.float64(rows["values"]), axis=1) < 1.7),
}
ARGUMENTS = {"keep": 20, "unused_for": 3, "norm_below": 1.7}


@pytest.mark.parametrize("num_devices", [None, 4])
@pytest.mark.parametrize("reason", REASONS)
def test_keys_that_have_a_reason_leave_with_all_that_belongs_to_them_and_come_back(reason, num_devices):
    (collection, state), rows = filled(num_devices), some_rows()
    state, gone = collection.evict(state, "t", **{reason: ARGUMENTS[reason]})
    leaves = np.isin(np.arange(rows["keys"].size), REASONS[reason](rows))
    assert 5 < leaves.sum() < leaves.size - 5
    left = collection.tables(state)["t"]
    for name, array in rows.items():
        np.testing.assert_array_equal(gone[name], array[leaves], err_msg=name)
        np.testing.assert_array_equal(left[name], array[~leaves], err_msg=name)
    assert collection.counts(state)["t"]["evicted"].sum() == leaves.sum()
    again = collection.tables(collection.with_tables(state, {"t": gone}))["t"]
    for name, array in (rows | {"last_step": np.where(leaves, 9, rows["last_step"])}).items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_what_nobody_lets_go_stays():
    (collection, state), rows = filled(), some_rows()
    state, gone = collection.evict(state, "t", keep=1000)
    assert gone.keys() == rows.keys() and all(array.shape == (0, *rows[name].shape[1:]) for name, array in gone.items())
    assert collection.tables(state)["t"]["keys"].size == 40


def test_evicting_what_was_not_used_forgets_keys_that_wait():
    collection, state = filled(admission_count=5)
    waiting = {"waiting_keys": KEYS[:3], "waiting_last_step": [3, 2, 8], "waiting_count": [1, 2, 1]}
    state = collection.with_tables(state, {"t": some_rows() | waiting})
    state, _ = collection.evict(state, "t", unused_for=5)
    assert collection.counts(state)["t"]["forgotten"].tolist() == [2]
    assert collection.tables(state)["t"]["waiting_keys"].tolist() == [KEYS[2]]


def test_a_tier_goes_into_a_file_and_into_another_one(tmp_path):
    (collection, state), rows = filled(), some_rows()
    tier = rs.SecondTier(collection, "t", num_rows=50)
    state, gone = collection.evict(state, "t", keep=10)
    tier.put(gone)
    checkpoint.save(tmp_path / "tier", tier.rows())
    other = rs.SecondTier(collection, "t", num_rows=50)
    other.put(checkpoint.load(tmp_path / "tier").tree)
    batch = {"f": gone["keys"][:3], "g": np.full(3, -1)}
    expected = rows["values"][np.isin(rows["keys"], gone["keys"][:3])]
    state = other.fetch(state, batch)
    np.testing.assert_array_equal(collection.lookup(state, batch)["f"], expected)
    assert len(other) == len(tier) - 3


def test_what_finds_no_room_is_refused_before_anything_moves():
    collection, rows = collection_of(), some_rows()
    state = collection.init(jax.random.key(0))
    state = collection.with_tables(state, {"t": {name: array[:12] for name, array in rows.items()}})
    tier = rs.SecondTier(collection, "t", num_rows=30)
    tier.put({name: array[12:] for name, array in rows.items()})
    more, nothing = {"f": KEYS[rows["keys"][-1] < KEYS][:8], "g": np.full(8, -1)}, np.full(17, -1)
    with pytest.raises(RuntimeError, match="table 't': 2 rows that leave find no room among num_rows=30 of the second"):
        tier.fetch(state, more)
    with pytest.raises(
        RuntimeError, match="table 't': 1 keys that come back find no room beside those of the batch in 16"
    ):
        tier.fetch(state, {"f": rows["keys"][12:29], "g": nothing})
    assert len(tier) == 28 and collection.tables(state)["t"]["keys"].size == 12
    with pytest.raises(RuntimeError, match="table 't': 12 more rows find no room beside 28 of num_rows=30"):
        tier.put(rows)
    with pytest.raises(
        ValueError, match=r"table 't': rows that are kept need \['count', 'last_step', 'slot_accumulator'\]"
    ):
        tier.put({"keys": KEYS[:1], "values": np.ones((1, DIM))})
    with pytest.raises(ValueError, match="table 't': imported keys must be distinct and not -1"):
        tier.put(rows | {"keys": np.resize(KEYS[:2], 40)})


def test_what_cannot_have_a_second_tier_is_refused_by_name():
    collection, state = filled()
    dense = rs.TableSpec(name="d", vocabulary_size=8, embedding_dim=DIM)
    others = rs.EmbeddingCollection([rs.FeatureSpec(name="d", table_spec=dense)])
    with pytest.raises(
        ValueError, match=r"table 'd' is kept as an array: rows leave tables of keys, with storage=Hashed"
    ):
        rs.SecondTier(others, "d", num_rows=5)
    with pytest.raises(ValueError, match="unknown table 'e'"):
        collection.evict(state, "e", keep=5)
    with pytest.raises(ValueError, match=r"table 't': .* moves all rows in every step, also those in a second tier"):
        rs.SecondTier(collection_of(rule=Adam(0.1)), "t", num_rows=5)
    for given in ({}, {"keep": 5, "unused_for": 2}):
        with pytest.raises(
            ValueError, match=r"evict from table 't': give one of keep, unused_for, norm_below, not \d of"
        ):
            collection.evict(state, "t", **given)
    with pytest.raises(ValueError, match=r"evict from table 't': keep must be in \[0, inf\), got -1"):
        collection.evict(state, "t", keep=-1)
    tier, ids = rs.SecondTier(collection, "t", num_rows=5), batches()[0][0]
    for call in (lambda state: tier.fetch(state, ids), lambda state: collection.evict(state, "t", keep=5)[0]):
        with pytest.raises(RuntimeError, match="outside of jit"):
            jax.jit(call)(state)


def test_rows_come_in_where_the_table_lies():
    collection = collection_of(40_000, mesh=mesh_of(2))
    moving, state = collection.logical.moving("t"), collection.init(jax.random.key(0))
    places, nothing = np.zeros(512, np.int32), np.zeros(512, np.uint32)
    arrays = (np.zeros((512, DIM), np.float32),) * 2
    (coming,) = moving._placed([Coming(Keys(nothing, nothing, places > 0), places, places, places, arrays)])
    compiled = moving._take_in.lower(state.tables[moving.stack_name], state.slots[moving.stack_name], coming).compile()
    # Without native kernels XLA copies the directory's rows, 65,536 places of 4 bytes, but no table.
    most = 20_000 * DIM if native.unavailable_because() is None else 65_536 * 4 + 20_000
    assert compiled.memory_analysis().temp_size_in_bytes < most
