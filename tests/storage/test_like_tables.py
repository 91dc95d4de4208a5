"""Keyed tables that share a storage give the same results as alone in a collection.

Tables of different sizes can share a storage. They are padded to the size of the largest one.
"""

import functools

import jax
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from rsembed.storage import protocol
from tests.world import assert_same, mesh_of

DIM, NAMES, NUM_STEPS = 4, ("here", "mine", "yours"), 6
KEY = jax.random.key(3)
SIZES = {
    "eight": dict.fromkeys(NAMES, 8),
    "twelve": dict.fromkeys(NAMES, 12),
    "around eight": {"here": 5, "mine": 8, "yours": 13},
    "twelve and more": {"here": 12, "mine": 16, "yours": 24},
}
POOL = np.append(np.arange(2, 14) * (2**40 + 1), 2**62)
ADAM = rs.optimizers.Adam(0.1)
NORMAL = jax.nn.initializers.normal(0.3)

POLICIES = {
    "full": {"when_full": "zero"},
    "lru": {"when_full": "evict"},
    "lfu": {"when_full": "evict", "eviction": "lfu"},
    "count": {"when_full": "evict", "admission_count": 2, "admission_capacity": 6},
    "probability": {"when_full": "zero", "admission_probability": 0.5},
}


def split_initializer(key, shape, dtype="float32"):
    """An initializer that the library cannot evaluate for many keys at once."""
    one, other = jax.random.split(key)
    return jax.random.normal(one, shape, dtype) + jax.random.uniform(other, (), dtype)


def table(name, *, rows=8, dtype="float32", rule=ADAM, initializer=NORMAL, **policy):
    return rs.TableSpec(name, rows, DIM, optimizer=rule, initializer=initializer, dtype=dtype,
        stochastic_rounding=dtype == "bfloat16", storage=rs.Hashed(**policy),
    )  # fmt: skip


def collection_of(names, num_devices=1, placement=None, *, sizes="eight", **options):
    """A collection with two features for each table: bags with weights, and single keys."""
    features = []
    for name in names:
        spec = table(name, rows=SIZES[sizes][name], **options)
        features += [rs.FeatureSpec(f"{name}_bag", spec), rs.FeatureSpec(name, spec)]
    mesh = None if num_devices == 1 else mesh_of(num_devices)
    placements = None if placement is None else dict.fromkeys(names, placement)
    return rs.EmbeddingCollection(features, mesh=mesh, placement=placements)


def batches(names):
    """Batches of keys from one pool, and gradients. Each table has other bags.

    The bags of a table do not depend on the other names in `names`.
    """
    generator, results = np.random.default_rng(0), []
    for _ in range(NUM_STEPS):
        ids, d_activations = {}, {}
        for name in NAMES:
            keys = generator.choice(POOL, (4, 3))
            weights = generator.normal(size=(4, 3)).astype(np.float32)
            gradient = generator.normal(size=(4, DIM)).astype(np.float32)
            if name in names:
                ids |= {f"{name}_bag": (keys, weights), name: keys[:, 0]}
                d_activations |= {f"{name}_bag": gradient, name: -2 * gradient}
        results.append((ids, d_activations))
    return results


def trained(collection, names, way="apply"):
    """Activations of all steps, and the state after the last step."""
    state, activations = collection.init(KEY), []

    @jax.jit
    def step(state, batch, d_activations):
        ahead, pullback = collection.lookup_vjp(state, batch)
        if way == "combine":
            half = jax.tree.map(lambda gradient: gradient / 2, d_activations)
            gradients = rs.combine(pullback(half), pullback(half))
        else:
            gradients = pullback(d_activations)
        return ahead, collection.apply(state, gradients)

    for ids, d_activations in batches(names):
        batch = collection.prepare(ids)
        ahead, state = step(state, batch, d_activations)
        activations.append({"ahead": ahead, "read": collection.lookup(state, batch)})
    return activations, state


def assert_each_is_as_if_alone(num_devices=1, placement=None, way="apply", **options):
    together = collection_of(NAMES, num_devices, placement, **options)
    alone = collection_of(["mine"], num_devices, placement, **options)
    assert len(together.init(KEY).tables) == 1
    many, state = trained(together, NAMES, way)
    one, own_state = trained(alone, ["mine"], way)
    for actual, expected in zip(many, one, strict=True):
        for call, activations in expected.items():
            assert_same({name: actual[call][name] for name in activations}, activations)
    for read in ("tables", "counts"):
        assert_same(getattr(together, read)(state)["mine"], getattr(alone, read)(own_state)["mine"])
    return together, state


@pytest.fixture
def any_size(monkeypatch):
    """Lets tables share a storage with any number of padding rows."""
    monkeypatch.setattr(protocol, "MOST_EMPTY", 2.0)


SOME_WAIT = {"when_full": "evict", "admission_count": 1}


@pytest.mark.slow_rows(
    "full-4-row",
    "lru-4-row",
    "lfu-1-None",
    "count-1-None",
    "as many wait as have rows-1-None",
    "count-4-row",
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
        num_devices, placement, way, sizes="around eight", **policy
    )
    used = {name: counts["rows"].sum() for name, counts in collection.counts(state).items()}
    assert used == {name: len(rows["keys"]) for name, rows in collection.tables(state).items()}


@pytest.mark.slow
def test_noise_and_initial_values_belong_to_the_table():
    """All tables have the same number of rows, and all of them evict keys."""
    collection, state = assert_each_is_as_if_alone(
        2, when_full="evict", dtype="bfloat16", initializer=split_initializer
    )
    counts = collection.counts(state)
    assert all(counts[name]["evicted"].sum() > 0 for name in NAMES)
    # The tables differ.
    assert not np.array_equal(counts["here"]["inserted"], counts["mine"]["inserted"])


@functools.cache
def some_state(num_devices=1, sizes="twelve"):
    """A collection with lfu eviction and waiting keys, and its trained state."""
    collection = collection_of(NAMES, num_devices, sizes=sizes, **GIVEN)
    return collection, trained(collection, NAMES)[1]


GIVEN = {"when_full": "evict", "eviction": "lfu", "admission_count": 1}


@pytest.mark.slow_rows("1-1-twelve")
@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "sizes"), [(1, 1, "twelve"), (4, 2, "twelve and more")]
)
def test_files_know_tables_by_name_whatever_storage_they_share(
    saved_on, loaded_on, sizes, any_size, tmp_path
):
    collection, state = some_state(saved_on, sizes)
    assert len(state.tables) == 1
    checkpoint.save_collection(tmp_path / "saved", collection, state)
    # In the other collection, the tables of the storage are in another order.
    other = collection_of(NAMES[::-1], loaded_on, sizes=sizes, **GIVEN)
    loaded = checkpoint.load_collection(tmp_path / "saved", other)
    assert_same(other.tables(loaded), collection.tables(state))
    # On another number of devices, keys share shards with other keys, which changes evictions.
    if saved_on != loaded_on:
        return
    # Initial values of new keys depend on the PRNG key of their table, also in a loaded state.
    ids, d_activations = batches(NAMES)[0]
    ids = jax.tree.map(lambda leaf: leaf + 5 if leaf.dtype == np.int64 else leaf, ids)
    actual = other.update(loaded, other.prepare(ids), d_activations)
    wanted = collection.update(state, collection.prepare(ids), d_activations)
    assert_same(other.tables(actual), collection.tables(wanted))


@pytest.mark.slow
def test_a_file_of_tables_together_is_one_of_tables_apart(tmp_path):
    together, state = some_state()
    checkpoint.save_collection(tmp_path / "together", together, state)
    features = list(collection_of(["here", "yours"], sizes="twelve", **GIVEN).features.values())
    features.append(rs.FeatureSpec("mine", table("mine", rows=40, **GIVEN | {"eviction": "lru"})))
    apart = rs.EmbeddingCollection(features)
    assert apart.init(KEY).tables.keys() == {"here_yours", "mine"}
    loaded = checkpoint.load_collection(tmp_path / "together", apart)
    assert_same(apart.tables(loaded), together.tables(state))
    checkpoint.save_collection(tmp_path / "apart", apart, loaded)
    back = checkpoint.load_collection(tmp_path / "apart", together)
    for name in ("here", "yours"):
        assert_same(together.tables(back)[name], together.tables(state)[name])


@pytest.mark.slow_rows("1-twelve")
@pytest.mark.parametrize(("num_devices", "sizes"), [(1, "twelve"), (4, "twelve and more")])
def test_rows_of_one_table_are_written_and_evicted_alone(num_devices, sizes, any_size):
    collection, state = some_state(num_devices, sizes)
    before = collection.tables(state)
    sevens = {"keys": POOL[:3], "values": np.full((3, DIM), 7.0, np.float32)}
    written = collection.tables(
        collection.with_tables(collection.init(KEY), {"mine": sevens, "yours": before["yours"]})
    )
    np.testing.assert_array_equal(written["mine"]["values"], sevens["values"])
    assert_same(written["yours"], before["yours"])
    assert not written["here"]["keys"].size
    with jax.numpy_dtype_promotion("standard"):
        copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    remaining, evicted = collection.evict(copy, "mine", keep=2)
    after = collection.tables(remaining)
    assert after["mine"]["keys"].size == 2
    again = collection.tables(collection.with_tables(remaining, {"mine": evicted}))
    for name, array in before["mine"].items():
        if not name.startswith("waiting"):
            np.testing.assert_array_equal(again["mine"][name], array, err_msg=name)
    for name in ("here", "yours"):
        assert_same(after[name], before[name])


def test_rows_that_a_smaller_table_has_no_room_for_are_refused(any_size):
    collection = collection_of(NAMES, sizes="around eight")
    state = collection.init(KEY)
    rows = {"keys": POOL[:9], "values": np.ones((9, DIM), np.float32)}
    with pytest.raises(
        ValueError,
        match=r"'mine': 9 imported keys need 9 free rows, but the shard has 8 \(capacity=8",
    ):
        collection.with_tables(state, {"mine": rows})
    collection.with_tables(state, {"yours": rows})


def test_the_full_table_is_named(any_size):
    collection = collection_of(NAMES, sizes="around eight")
    ids, d_activations = batches(NAMES)[0]
    keys = dict.fromkeys(ids, np.arange(4)) | {"here": np.array([4, 5, 6, 7])}
    with pytest.raises(
        RuntimeError, match="table 'here' is full: 3 new keys found no room in 5 rows"
    ):
        collection.update(collection.init(KEY), keys, d_activations)


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
    collection = rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in tables])
    assert collection.init(KEY).tables.keys() == {"here_yours", "mine"}


class Theirs(rs.Hashed):
    """A storage class of a user."""


def test_tables_of_a_class_that_nobody_knows_stay_alone():
    tables = [rs.TableSpec(name, 8, DIM, storage=Theirs()) for name in NAMES]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in tables])
    assert collection.init(KEY).tables.keys() == set(NAMES)
