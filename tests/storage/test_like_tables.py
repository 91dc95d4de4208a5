"""Tables of keys that are alike share a storage; each of them is what it is in a collection of its own.

So are tables of several sizes, of which each takes the place of the largest.
"""

import functools

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from rsembed.storage import protocol
from tests.world import assert_same, mesh_of

DIM, ROWS, NAMES, NUM_STEPS = 4, 8, ("here", "mine", "yours"), 6
KEY = jax.random.key(3)
SIZES = {"here": 5, "mine": 8, "yours": 13}
POOL = np.append(np.arange(2, 14) * (2**40 + 1), 2**62)
ADAM = rs.optimizers.Adam(0.1)

POLICIES = {
    "full": {"when_full": "zero"},
    "lru": {"when_full": "evict"},
    "lfu": {"when_full": "evict", "eviction": "lfu"},
    "count": {"when_full": "evict", "admission_count": 2, "admission_capacity": 6},
    "probability": {"when_full": "zero", "admission_probability": 0.5},
}


def split_initializer(key, shape, dtype="float32"):
    """Which no evaluator makes rows of many keys with at once."""
    one, other = jax.random.split(key)
    return jax.random.normal(one, shape, dtype) + jax.random.uniform(other, (), dtype)


def table(name, *, rows=ROWS, dtype="float32", rule=ADAM, initializer=None, **policy):
    initializer = jax.nn.initializers.normal(0.3) if initializer is None else initializer
    return rs.TableSpec(name, rows, DIM, optimizer=rule, initializer=initializer, dtype=dtype,
        stochastic_rounding=dtype == "bfloat16", storage=rs.Hashed(**policy),
    )  # fmt: skip


def collection_of(names, num_devices=1, placement=None, **given):
    """Of each table two features, one of bags and one of single keys; `rows` are by table."""
    features = []
    for name in names:
        own = table(name, **given | {"rows": given.get("rows", dict.fromkeys(NAMES, ROWS))[name]})
        features += [
            rs.FeatureSpec(f"{name}_bag", own),
            rs.FeatureSpec(name, own),
        ]
    mesh = None if num_devices == 1 else mesh_of(num_devices)
    placements = None if placement is None else dict.fromkeys(names, placement)
    return rs.EmbeddingCollection(features, mesh=mesh, placement=placements)


def batches(names):
    """Keys that all tables know, in other bags of each; more of them than rows."""
    generator, found = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        drawn = {name: generator.choice(POOL, (4, 3)) for name in NAMES}
        weights = {name: generator.normal(size=(4, 3)).astype(np.float32) for name in NAMES}
        gradients = {name: generator.normal(size=(4, DIM)).astype(np.float32) for name in NAMES}
        ids = {f"{name}_bag": (drawn[name], weights[name]) for name in names}
        ids |= {name: drawn[name][:, 0] for name in names}
        both = {f"{name}_bag": gradients[name] for name in names} | {
            name: -2 * gradients[name] for name in names
        }
        found.append((ids, both))
    return found


def trained(collection, names, way):
    """Every activation, and the state behind the last step."""
    state, activations = collection.init(KEY), []

    @jax.jit
    def step(state, batch, gradients):
        activations, pullback = collection.lookup_vjp(state, batch)
        if way == "update":
            return activations, collection.update(state, batch, gradients)
        if way == "combine":
            half = jax.tree.map(lambda gradient: gradient / 2, gradients)
            return activations, collection.apply(state, rs.combine(pullback(half), pullback(half)))
        return activations, collection.apply(state, pullback(gradients))

    for ids, gradients in batches(names):
        batch = collection.prepare(ids)
        found, state = step(state, batch, gradients)
        activations.append(
            found | {f"{name} read": own for name, own in collection.lookup(state, batch).items()}
        )
    return activations, state


def of_tables(collection, state, name):
    """All that a table is: rows by key with what belongs to them, and what happened."""
    return collection.tables(state)[name], collection.counts(state)[name]


def assert_each_is_as_if_alone(num_devices=1, placement=None, way="apply", **given):
    together, alone = (
        collection_of(names, num_devices, placement, **given) for names in (NAMES, NAMES[1:2])
    )
    assert len(together.init(KEY).tables) == 1
    many, state = trained(together, NAMES, way)
    one, own_state = trained(alone, NAMES[1:2], way)
    for found, expected in zip(many, one, strict=True):
        assert_same({name: found[name] for name in expected}, expected)
    assert_same(of_tables(together, state, "mine"), of_tables(alone, own_state, "mine"))
    return together, state


@pytest.fixture
def any_size(monkeypatch):
    """However many rows stay empty."""
    monkeypatch.setattr(protocol, "MOST_EMPTY", 2.0)


SOME_WAIT = {"when_full": "evict", "admission_count": 1}


@pytest.mark.slow_rows(
    "full-4-row", "lru-4-row", "count-1-None", "as many wait as have rows-1-None"
)
@pytest.mark.parametrize(
    ("policy", "num_devices", "placement"),
    [
        *((policy, 4, "row") for policy in ("full", "lru", "count")),
        *((policy, 1, None) for policy in ("lfu", "probability", "as many wait as have rows")),
        ("count", 1, None),
    ],
)
def test_a_table_among_smaller_and_larger_ones_has_the_bits_of_one_alone(
    any_size, policy, num_devices, placement
):
    policy = POLICIES.get(policy, SOME_WAIT)
    way = {"row": "apply", None: "combine"}[placement]
    collection, state = assert_each_is_as_if_alone(
        num_devices, placement, way, rows=SIZES, **policy
    )
    used = {name: own["rows"].sum() for name, own in collection.counts(state).items()}
    assert used == {name: len(rows["keys"]) for name, rows in collection.tables(state).items()}


def test_noise_and_initial_values_belong_to_the_table():
    """Here of as many rows as the others; all of them give rows up."""
    collection, state = assert_each_is_as_if_alone(
        2, when_full="evict", dtype="bfloat16", initializer=split_initializer
    )
    counts = collection.counts(state)
    assert all(counts[name]["evicted"].sum() > 0 for name in NAMES)
    # The tables differ.
    assert not np.array_equal(counts["here"]["inserted"], counts["mine"]["inserted"])


@functools.cache
def some_state(num_devices=1, *, is_unlike=False):
    """Of a collection whose tables have rows, evict by use, and let keys wait."""
    collection = collection_of(
        NAMES, num_devices, **GIVEN | ({"rows": UNLIKE_ROWS} if is_unlike else {})
    )
    return collection, trained(collection, NAMES, "apply")[1]


UNLIKE_ROWS = {"here": 12, "mine": 16, "yours": 24}
GIVEN = {
    "rows": dict.fromkeys(NAMES, 12),
    "when_full": "evict",
    "eviction": "lfu",
    "admission_count": 1,
}


@pytest.mark.slow_rows("1-1-False")
@pytest.mark.parametrize(("saved_on", "loaded_on", "is_unlike"), [(1, 1, False), (4, 2, True)])
def test_files_know_tables_by_name_whatever_storage_they_share(
    saved_on, loaded_on, is_unlike, any_size, tmp_path
):
    collection, state = some_state(saved_on, is_unlike=is_unlike)
    assert len(state.tables) == 1
    checkpoint.save_collection(tmp_path / "saved", collection, state)
    rows = {"rows": UNLIKE_ROWS} if is_unlike else {}
    # In the other storage they have another order.
    other = collection_of(NAMES[::-1], loaded_on, **GIVEN | rows)
    loaded = checkpoint.load_collection(tmp_path / "saved", other)
    assert_same(other.tables(loaded), collection.tables(state))
    # New keys start from the key of their table, whoever drew it.
    ids, gradients = batches(NAMES)[0]
    ids = jax.tree.map(lambda leaf: leaf + 5 if leaf.dtype == np.int64 else leaf, ids)
    after = [
        c.update(s, c.prepare(ids), gradients) for c, s in ((other, loaded), (collection, state))
    ]
    found, wanted = other.tables(after[0]), collection.tables(after[1])
    if saved_on == loaded_on:  # otherwise keys have other company when rows are taken away
        assert_same(found, wanted)
    assert all(
        found[name]["waiting_keys"].size == wanted[name]["waiting_keys"].size for name in NAMES
    )


def test_a_file_of_tables_together_is_one_of_tables_apart(tmp_path):
    collection, state = some_state()
    checkpoint.save_collection(tmp_path / "saved", collection, state)
    features = collection_of(["here", "yours"], **GIVEN).features.values()
    larger = rs.FeatureSpec("mine", table("mine", **GIVEN | {"rows": 40, "eviction": "lru"}))
    apart_from = rs.EmbeddingCollection([*features, larger])
    assert apart_from.init(KEY).tables.keys() == {"here_yours", "mine"}
    loaded = checkpoint.load_collection(tmp_path / "saved", apart_from)
    found, expected = apart_from.tables(loaded), collection.tables(state)
    assert_same(found, expected)
    checkpoint.save_collection(tmp_path / "again", apart_from, loaded)
    back = collection.tables(checkpoint.load_collection(tmp_path / "again", collection))
    assert_same(
        {name: back[name] for name in ("here", "yours")},
        {name: found[name] for name in ("here", "yours")},
    )


@pytest.mark.parametrize(("num_devices", "is_unlike"), [(1, False), (4, True)])
def test_rows_of_one_table_are_written_and_evicted_alone(num_devices, is_unlike, any_size):
    collection, state = some_state(num_devices, is_unlike=is_unlike)
    before = collection.tables(state)
    rows = {"keys": POOL[:3], "values": np.full((3, DIM), 7.0, np.float32)}
    fresh = collection.init(KEY)
    written = collection.tables(
        collection.with_tables(fresh, {"mine": rows, "yours": before["yours"]})
    )
    np.testing.assert_array_equal(written["mine"]["values"], rows["values"])
    assert_same(written["yours"], before["yours"])
    assert not written["here"]["keys"].size
    with jax.numpy_dtype_promotion("standard"):
        copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    left, gone = collection.evict(copy, "mine", keep=2)
    after = collection.tables(left)
    assert after["mine"]["keys"].size == 2 and gone["keys"].size == before["mine"]["keys"].size - 2
    assert not np.intersect1d(after["mine"]["keys"], gone["keys"]).size
    assert_same(
        {name: after[name] for name in ("here", "yours")},
        {name: before[name] for name in ("here", "yours")},
    )
    order = [name for name in before["mine"] if not name.startswith("waiting")]
    whole = collection.tables(collection.with_tables(left, {"mine": gone}))["mine"]
    assert_same(
        {name: whole[name] for name in order}, {name: before["mine"][name] for name in order}
    )


def test_rows_that_a_smaller_table_has_no_room_for_are_refused(any_size):
    collection = collection_of(NAMES, rows=SIZES)
    rows = {"keys": POOL[:9], "values": np.ones((9, DIM), np.float32)}
    with pytest.raises(
        ValueError,
        match=r"'mine': 9 imported keys need 9 free rows, but the shard has 8 \(capacity=8",
    ):
        collection.with_tables(collection.init(KEY), {"mine": rows})
    collection.with_tables(collection.init(KEY), {"yours": rows})


def test_the_full_table_is_named(any_size):
    collection = collection_of(NAMES, rows={"here": 7, "mine": 12, "yours": 4})
    state = collection.init(KEY)
    ids = {f"{name}_bag": np.full((4, 3), 1) for name in NAMES} | {
        name: np.full(4, 2) for name in NAMES
    }
    gradients = {name: np.ones((4, DIM), np.float32) for name in ids}
    state = collection.update(state, ids, gradients)
    with pytest.raises(
        RuntimeError, match="table 'yours' is full: 2 new keys found no room in 4 rows"
    ):
        collection.update(state, ids | {"yours": np.arange(10, 14)}, gradients)


def test_keys_of_numbers_as_they_once_were_start_the_same_tables():
    collection, (ids, gradients) = collection_of(NAMES), batches(NAMES)[0]
    found = [
        collection.tables(
            collection.update(collection.init(key), collection.prepare(ids), gradients)
        )
        for key in (jax.random.PRNGKey(3), jax.random.key(3))
    ]
    assert_same(*found)


UNLIKE = {
    "rule": {"rule": rs.optimizers.Adam(0.2)},
    "dtype": {"dtype": "bfloat16"},
    "rows": {"rows": 16},
    "initializer": {"initializer": jax.nn.initializers.normal(0.4)},
    "policy": {"when_full": "zero"},
    "type of keys": {"key_dtype": "int32"},
}


@pytest.mark.parametrize("difference", [*UNLIKE])
def test_tables_that_differ_in_more_than_their_names_stay_alone(difference):
    tables = [table("here"), table("mine", **UNLIKE[difference]), table("yours")]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(own.name, own) for own in tables])
    assert collection.init(KEY).tables.keys() == {"here_yours", "mine"}


class Theirs(rs.Hashed):
    """Of a user, with rules of their own."""


def test_tables_of_a_class_that_nobody_knows_stay_alone():
    same = {"vocabulary_size": ROWS, "embedding_dim": DIM, "optimizer": ADAM, "storage": Theirs()}
    features = [rs.FeatureSpec(name, rs.TableSpec(name=name, **same)) for name in NAMES]
    assert rs.EmbeddingCollection(features).init(KEY).tables.keys() == set(NAMES)
