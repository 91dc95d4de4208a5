"""Prepared batches: one list of ids for the ragged features of a stack, and the numbers of single features."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs

BATCH, DIM = 6, 4
SIZES = {"a": 11, "b": 7, "c": 30, "d": 9}


def collection_of(storage=None, **options):
    """Ragged features of tables in one stack and of another dim, one of arrays, and one without a combiner."""
    rule = rs.optimizers.Adagrad(0.3)
    tables = {}
    for name, size in SIZES.items():
        tables[name] = rs.TableSpec(
            name, size, DIM, combiner="mean", optimizer=rule, storage=storage
        )
    other = rs.TableSpec("other", 12, 2 * DIM, combiner="sqrtn", optimizer=rule)
    features = [rs.FeatureSpec(name, tables[name]) for name in "abc"]
    features += [
        rs.FeatureSpec("c_again", tables["c"], combiner="sum"),
        rs.FeatureSpec("other", other),
    ]
    features += [
        rs.FeatureSpec("dense", tables["d"]),
        rs.FeatureSpec("sequence", tables["b"], combiner="none"),
    ]
    return rs.EmbeddingCollection(features, **options)


def draw_batch(seed, *, seed_of_lengths=None):
    """Batches of the same lengths run the same programs."""
    rng = np.random.default_rng(seed)
    of_lengths = rng if seed_of_lengths is None else np.random.default_rng(seed_of_lengths)

    def lists(size):
        return [rng.integers(0, size, of_lengths.integers(0, 5)).tolist() for _ in range(BATCH)]

    batch = {name: lists(SIZES[name]) for name in "abc"}
    ids = lists(SIZES["c"])
    batch["c_again"] = (ids, [[float(w) for w in rng.uniform(0.5, 2.0, len(own))] for own in ids])
    batch["other"] = rs.Bags.from_lists(lists(12))
    batch["dense"] = rng.integers(-1, SIZES["d"], (BATCH, 2))
    batch["sequence"] = rng.integers(-1, SIZES["b"], (BATCH, 3))
    return batch


def gradients_like(activations, seed):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=own.shape), jnp.float32)
        for name, own in activations.items()
    }


@pytest.mark.slow_rows("host")
@pytest.mark.parametrize(
    "storage", [None, rs.Hashed(), rs.HostCached(cache_rows=64)], ids=["dense", "keys", "host"]
)
def test_joined_features_have_the_numbers_of_single_ones(storage):
    collection = collection_of(storage)
    # A batch size that is declared nowhere, and features that each come alone: no list is shared.
    # Programs that find rows by key compile for long, so these storages read two of the features.
    names = list(collection.features) if storage is None else ["a", "c_again"]
    apart = [rs.EmbeddingCollection([collection.features[name]]) for name in names]
    state = collection.init(jax.random.key(0))
    for seed in range(4 if storage is None else 2):
        batch = draw_batch(seed, seed_of_lengths=None if storage is None else 0)
        prepared = collection.prepare(batch)
        state = collection.prefetch(state, prepared)
        tables = collection.tables(state)
        activations, statistics = collection.lookup(state, prepared, return_statistics=True)
        for single in apart:
            (name,) = single.features
            own = single.init(jax.random.key(0))
            own = single.with_tables(own, {t: tables[t] for t in single.table_specs})
            own = single.prefetch(own, {name: batch[name]})
            expected, counts = single.lookup(own, {name: batch[name]}, return_statistics=True)
            assert_array_equal(activations[name], expected[name])
            assert statistics.num_ids[name] == counts.num_ids[name]
            assert statistics.num_out_of_range[name] == counts.num_out_of_range[name] == 0
        d_activations = gradients_like(activations, seed)
        if storage == rs.HostCached(cache_rows=64):  # whose host goes on with one state alone
            state = collection.update(state, prepared, d_activations)
            continue
        fused = collection.update(state, prepared, d_activations)
        _, pullback = collection.lookup_vjp(state, prepared)
        applied = collection.apply(state, pullback(d_activations))
        for one, other in zip(
            jax.tree.leaves(collection.tables(fused)),
            jax.tree.leaves(collection.tables(applied)),
            strict=True,
        ):
            assert_allclose(one, other, rtol=2e-6, atol=1e-6)
        state = fused


@pytest.mark.parametrize(("form", "bad"), [("lists", "a"), ("bags", "b"), ("jagged", "c")])
def test_each_ragged_feature_is_held_against_its_table(form, bad):
    tables = {
        name: rs.TableSpec(name, SIZES[name], DIM * (1 + (name == "c")), combiner="sum")
        for name in "abc"
    }
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(name, table) for name, table in tables.items()]
    )
    forms = {
        "lists": dict,
        "bags": lambda rows: {name: rs.Bags.from_lists(own) for name, own in rows.items()},
        "jagged": lambda rows: rs.Jagged(
            np.concatenate([np.int32(row) for own in rows.values() for row in own]),
            [len(row) for own in rows.values() for row in own],
            features=list(rows),
        ),
    }
    make = forms[form]
    rows = {name: [[0], [], [SIZES[name] - 1, -1]] for name in "abc"}
    prepared = collection.prepare(make(rows))
    assert {name: prepared[name].to_lists() for name in "abc"} == {
        name: [[0], [], [SIZES[name] - 1]] for name in "abc"
    }
    rows["a" if bad != "a" else "b"] = [[], [], []]
    assert collection.prepare(make(rows))[bad].to_lists() == [[0], [], [SIZES[bad] - 1]]
    for wrong in (SIZES[bad], -2):
        rows[bad] = [[0], [], [1, wrong]]
        with pytest.raises(
            ValueError, match=rf"feature '{bad}': id {wrong} in sample 2 .* table '{bad}'"
        ):
            collection.prepare(make(rows))


def test_a_prepared_batch_reads_as_a_mapping_and_travels_as_a_pytree():
    collection = collection_of()
    batch = draw_batch(1)
    prepared = collection.prepare(batch)
    assert list(prepared) == list(collection.features) and len(prepared) == 7
    assert prepared["b"].to_lists() == batch["b"]
    assert prepared["c_again"].to_lists() == batch["c_again"][0]
    assert_array_equal(prepared["dense"], batch["dense"])
    lists = {name: own.ids.shape for name, own in prepared.lists.items()}
    assert len(lists) == 2  # one for each stack
    assert "ragged features" in repr(prepared) and "room for" in repr(prepared)
    assert collection.prepare(prepared) is prepared
    again = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, prepared)))
    assert again["a"].to_lists() == batch["a"]

    state = collection.init(jax.random.key(0))
    stacked = jax.tree.map(lambda *own: jnp.stack(own), prepared, prepared)
    _, activations = jax.lax.scan(
        lambda _, own: (None, collection.lookup(state, own)), None, stacked
    )
    expected = collection.lookup(state, batch)
    for name, own in expected.items():
        assert_array_equal(activations[name][1], own)


def test_a_batch_of_another_collection_is_checked_again():
    small, large = (
        rs.EmbeddingCollection([rs.FeatureSpec(n, rs.TableSpec(n, size, DIM)) for n in "ab"])
        for size in (4, 100)
    )
    prepared = large.prepare({"a": [[3], [50]], "b": [[1], []]})
    with pytest.raises(
        ValueError,
        match=r"feature 'a': id 50 in sample 1 is outside table 'a' with vocabulary_size=4",
    ):
        small.prepare(prepared)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[1], [2, 70]], "feature 'b': id 70 in sample 1 is outside table 'b'"),
        ([[1], [2, -2]], "feature 'b': id -2 in sample 1"),
        ([[1], [2, 2**70]], "feature 'b': row 1 holds ids that do not fit 64 bits"),
        (
            rs.Bags(np.arange(4), np.asarray([0, 3, 2])),
            "feature 'b': offsets must start at 0 and never fall",
        ),
        (rs.Bags(np.arange(4), np.asarray([1, 2, 4])), "feature 'b': offsets must start at 0"),
        (rs.Bags(np.arange(4), np.asarray([0, 2, 9])), "feature 'b': the last offset is 9"),
    ],
)
def test_mistakes_in_one_of_many_features_are_named(wrong, message):
    tables = {name: rs.TableSpec(name, 9, DIM) for name in "abc"}
    collection = rs.EmbeddingCollection([rs.FeatureSpec(n, t) for n, t in tables.items()])
    sound = [[1], [2, 3]] if isinstance(wrong, list) else rs.Bags.from_lists([[1], [2, 3]])
    with pytest.raises((ValueError, TypeError), match=message):
        collection.prepare({"a": sound, "b": wrong, "c": sound})


@pytest.mark.parametrize("weighted", [False, True])
def test_a_jagged_pair_of_all_features_is_a_batch(weighted):
    tables = {name: rs.TableSpec(name, 9, DIM, combiner="mean") for name in "abc"}
    collection = rs.EmbeddingCollection([rs.FeatureSpec(n, t) for n, t in tables.items()])
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 4, 3 * BATCH)
    values = rng.integers(0, 9, lengths.sum())
    weights = rng.uniform(0.5, 2.0, values.size).astype(np.float32) if weighted else None
    # In an order that is not that of the collection.
    jagged = rs.Jagged(values, lengths, features=["c", "a", "b"], weights=weights)
    assert list(jagged) == ["c", "a", "b"] and len(jagged) == 3
    state = collection.init(jax.random.key(0))
    found = collection.lookup(state, jagged)
    table_values, first = (
        {n: np.asarray(t, np.float64) for n, t in collection.tables(state).items()},
        0,
    )
    for name, own in zip("cab", lengths.reshape(3, BATCH), strict=True):
        for sample, length in enumerate(own):
            part = slice(first, first + length)
            gains = np.ones(length) if weights is None else np.asarray(weights[part], np.float64)
            expected = np.zeros(DIM)
            if length:
                expected = gains @ table_values[name][values[part]] / gains.sum()
            assert_allclose(found[name][sample], expected, rtol=1e-5, atol=1e-6)
            first += length
    wrong = rs.Jagged(
        np.where(np.arange(values.size) == 5, 70, values), lengths, features=["c", "a", "b"]
    )
    with pytest.raises(ValueError, match="feature 'c': id 70 in sample"):
        collection.prepare(wrong)
