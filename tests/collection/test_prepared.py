"""Prepared batches: the ragged features of a stack share one list of ids, without other results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.kernels.contract import IdList
from tests.oracles import pooled_lookup
from tests.world import assert_close, assert_same

BATCH, DIM = 6, 4
SIZES = {"a": 11, "b": 7, "c": 30, "d": 9}


def collection_of(storage=None):
    """A collection with ragged features in two stacks, a dense feature, and a sequence feature."""
    rule = rs.optimizers.Adagrad(0.3)
    a, b, c, d = (
        rs.TableSpec(name, size, DIM, combiner="mean", optimizer=rule, storage=storage)
        for name, size in SIZES.items()
    )
    other = rs.TableSpec("other", 12, 2 * DIM, combiner="sqrtn", optimizer=rule)
    features = [
        rs.FeatureSpec("a", a),
        rs.FeatureSpec("b", b),
        rs.FeatureSpec("c", c),
        rs.FeatureSpec("c_again", c, combiner="sum"),
        rs.FeatureSpec("other", other),
        rs.FeatureSpec("dense", d),
        rs.FeatureSpec("sequence", b, combiner="none"),
    ]
    return rs.EmbeddingCollection(features)


def draw_batch(seed):
    """A random batch. All batches have the same lengths, so that they run the same programs."""
    rng = np.random.default_rng(seed)
    of_lengths = np.random.default_rng(0)

    def lists(size):
        return [rng.integers(0, size, of_lengths.integers(0, 5)).tolist() for _ in range(BATCH)]

    batch = {name: lists(SIZES[name]) for name in "abc"}
    ids = lists(SIZES["c"])
    batch["c_again"] = (ids, [rng.uniform(0.5, 2.0, len(bag)).tolist() for bag in ids])
    batch["other"] = rs.Bags.from_lists(lists(12))
    batch["dense"] = rng.integers(-1, SIZES["d"], (BATCH, 2))
    batch["sequence"] = rng.integers(-1, SIZES["b"], (BATCH, 3))
    return batch


@pytest.mark.slow_rows("host", "keys")
@pytest.mark.parametrize(
    "storage", [None, rs.Hashed(), rs.HostCached(cache_rows=64)], ids=["dense", "keys", "host"]
)
def test_joined_features_have_the_numbers_of_single_ones(storage):
    collection = collection_of(storage)
    # Collections with a single feature share no list of ids. Programs that find rows by key take
    # long to compile, so for these storages, only two features are compared.
    names = list(collection.features) if storage is None else ["a", "c_again"]
    apart = [rs.EmbeddingCollection([collection.features[name]]) for name in names]
    state = collection.init(jax.random.key(0))
    for seed in range(2):
        batch = draw_batch(seed)
        prepared = collection.prepare(batch)
        state = collection.prefetch(state, prepared)
        tables = collection.tables(state)
        activations, statistics = collection.lookup(state, prepared, return_statistics=True)
        for name, single in zip(names, apart, strict=True):
            own_state = single.init(jax.random.key(0))
            own_state = single.with_tables(own_state, {t: tables[t] for t in single.table_specs})
            expected, counts = single.lookup(own_state, {name: batch[name]}, return_statistics=True)
            assert_array_equal(activations[name], expected[name])
            assert statistics.num_ids[name] == counts.num_ids[name]
            assert statistics.num_out_of_range[name] == counts.num_out_of_range[name] == 0
        d_activations = jax.tree.map(jnp.cos, activations)
        _, pullback = collection.lookup_vjp(state, prepared)
        gradients = pullback(d_activations)
        # The host store works with one state only, so only `apply` is tested.
        if storage == rs.HostCached(cache_rows=64):
            state = collection.apply(state, gradients)
            continue
        applied = collection.tables(collection.apply(state, gradients))
        state = collection.update(state, prepared, d_activations)
        assert_close(collection.tables(state), applied, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "bad"), [("lists", "a"), ("bags", "b"), ("jagged", "c")])
def test_each_ragged_feature_is_held_against_its_table(form, bad):
    dims = {"a": DIM, "b": DIM, "c": 2 * DIM}
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(n, rs.TableSpec(n, SIZES[n], dim)) for n, dim in dims.items()]
    )

    def prepared(rows):
        batch = rows
        if form == "bags":
            batch = {name: rs.Bags.from_lists(lists) for name, lists in rows.items()}
        if form == "jagged":
            bags = [bag for lists in rows.values() for bag in lists]
            values = np.concatenate(bags).astype(int)
            batch = rs.Jagged(values, list(map(len, bags)), features=list(rows))
        return {name: bags.to_lists() for name, bags in collection.prepare(batch).items()}

    rows = {name: [[0], [], [SIZES[name] - 1, -1]] for name in dims}
    kept = {name: [[0], [], [SIZES[name] - 1]] for name in dims}
    empty = {"a": "b", "b": "c", "c": "a"}[bad]
    rows[empty] = kept[empty] = [[], [], []]
    assert prepared(rows) == kept
    for wrong in (SIZES[bad], -2):
        rows[bad] = [[0], [], [1, wrong]]
        with pytest.raises(
            ValueError, match=rf"feature '{bad}': id {wrong} in sample 2 .* table '{bad}'"
        ):
            prepared(rows)


def test_a_prepared_batch_reads_as_a_mapping_and_travels_as_a_pytree():
    collection = collection_of()
    batch = draw_batch(1)
    prepared = collection.prepare(batch)
    assert list(prepared) == list(collection.features) and len(prepared) == 7
    assert prepared["b"].to_lists() == batch["b"]
    assert prepared["c_again"].to_lists() == batch["c_again"][0]
    assert_array_equal(prepared["dense"], batch["dense"])
    # Each stack has one list.
    assert len(prepared.lists) == 2
    assert "ragged features" in repr(prepared) and "room for" in repr(prepared)
    assert collection.prepare(prepared) is prepared

    state = collection.init(jax.random.key(0))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), prepared)
    _, activations = jax.lax.scan(
        lambda _, step_batch: (None, collection.lookup(state, step_batch)), None, stacked
    )
    expected = collection.lookup(state, batch)
    assert_same({name: array[1] for name, array in activations.items()}, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_jagged_pair_of_all_features_is_a_batch(weighted):
    tables = [rs.TableSpec(name, 9, DIM, combiner="mean") for name in "abc"]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in tables])
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 4, 3 * BATCH)
    values = rng.integers(0, 9, lengths.sum())
    weights = rng.uniform(0.5, 2.0, values.size).astype(np.float32) if weighted else None
    # The order of the features differs from that of the collection.
    jagged = rs.Jagged(values, lengths, features=["c", "a", "b"], weights=weights)
    assert list(jagged) == ["c", "a", "b"] and len(jagged) == 3
    state = collection.init(jax.random.key(0))
    actual = collection.lookup(state, jagged)
    offsets = np.append(0, np.cumsum(lengths))
    for number, name in enumerate(jagged):
        id_list = IdList(values, offsets[number * BATCH : (number + 1) * BATCH + 1], weights)
        expected = pooled_lookup(collection.tables(state)[name], id_list, "mean")
        assert_allclose(actual[name], expected, rtol=1e-5, atol=1e-6)
