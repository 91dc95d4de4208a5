"""Rows and counts of the ids of many features equal a loop over single ids, in every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rsembed as rs
from rsembed.kernels import api, native
from rsembed.kernels.contract import NO_ROW
from rsembed.places import Place
from tests.kernels.cases import IMPLEMENTATIONS, needs_native


def row_of(id_, place, size, spread, rows_per_shard):
    if not 0 <= id_ < size:
        return NO_ROW
    shard = place.owner + (id_ + place.first + place.rotation) % spread
    return shard * rows_per_shard + (place.first + id_) // spread


@st.composite
def features(draw):
    spread = draw(st.sampled_from([1, 2, 3, 8]))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 40))
        owner = draw(st.integers(0, 3)) if spread == 1 else 0
        place = Place(owner, draw(st.integers(0, 50)), draw(st.integers(0, 7)))
        ids = st.integers(-3, size + 2) | st.sampled_from([-(2**31), 2**31 - 1])
        # Few lengths, so that few programs are compiled.
        own = draw(st.lists(ids, min_size=5, max_size=5)) * draw(st.sampled_from([0, 1, 1000]))
        drawn.append((jnp.asarray(own, jnp.int32), place, size))
    return spread, drawn


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(features())
@settings(max_examples=30, deadline=None)
def test_rows_are_those_of_a_loop_over_ids(implementation, drawn):
    spread, all_features = drawn
    ids, places, sizes = zip(*all_features, strict=True)
    found = api.rows_of_ids(ids, places, sizes, spread=spread, rows_per_shard=64, implementation=implementation)
    for rows, own, place, size in zip(found, ids, places, sizes, strict=True):
        expected = [row_of(id_, place, size, spread, 64) for id_ in own.tolist()]
        assert rows.dtype == jnp.int32 and rows.tolist() == expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_counts_are_those_of_a_loop_over_ids(implementation):
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(-2, 12, n), jnp.int32) for n in (0, 7, 20_000)]
    offsets = [jnp.asarray(own, jnp.int32) for own in ([0, 0], [0, 3, 5], [0, 19_000, 25_000])]
    found = api.count_ids(ids, offsets, (4, 5, 10), implementation=implementation)
    for (num_inside, num_outside), own, ends, size in zip(found, ids, offsets, (4, 5, 10), strict=True):
        used = own[: ends[-1]].tolist()
        assert int(num_inside) == sum(0 <= id_ < size for id_ in used)
        assert int(num_outside) == sum(id_ >= size or id_ < -1 for id_ in used)


@needs_native
def test_ids_of_other_types_are_left_to_the_definition():
    ids = [jnp.asarray([3, -1, 9], jnp.int8)]
    with pytest.raises(NotImplementedError, match="ids and offsets are int32, not int8"):
        native.rows_of_ids(ids, [Place(0, 5)], [8], 1, 64)
    (rows,) = api.rows_of_ids(ids, [Place(0, 5)], [8], spread=1, rows_per_shard=64)
    assert rows.tolist() == [8, NO_ROW, NO_ROW]


@needs_native
def test_a_program_does_not_grow_with_the_number_of_features():
    def num_operations(num_features):
        tables = [
            rs.TableSpec(name=f"t{k}", vocabulary_size=10 + k, embedding_dim=8, optimizer=rs.optimizers.SGD(0.1))
            for k in range(num_features)
        ]
        collection = rs.EmbeddingCollection([rs.FeatureSpec(name=t.name, table_spec=t) for t in tables])
        state = jax.eval_shape(collection.init, jax.random.key(0))
        batch = {t.name: jnp.zeros((4, 2), jnp.int32) for t in tables}

        def step(state, batch):
            activations, statistics = collection.lookup(state, batch, return_statistics=True)
            return collection.update(state, batch, activations), statistics

        text = jax.jit(step).lower(state, batch).compile().as_text()
        return text.count(" fusion(") + text.count(" custom-call(")

    assert num_operations(12) == num_operations(3)
