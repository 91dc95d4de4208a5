"""The cache goes on following what is read, loses nothing that was learned, and says so where it cannot follow."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rsembed.tt import TTEmbeddingBag

NUM_ROWS, WIDTH = 900, 24


def make(**options):
    options = {"cache_size": 32, "learning_rate": 0.3, "halve_counts_every": 1, **options}
    return TTEmbeddingBag(NUM_ROWS, 4, [3], [30, 30], [2, 2], **options)


def hot_ids(epoch, seed):
    """What is read in an epoch: ids of a window that has moved on by its width."""
    return (
        np.random.default_rng([epoch, seed]).integers(0, WIDTH, (64 if seed else 192, 1)) * 37 + epoch * WIDTH
    ) % NUM_ROWS


def with_room(ids):
    """192 bags, so that one program serves all batches."""
    return np.pad(ids, ((0, 192 - len(ids)), (0, 0)), constant_values=-1)


@nnx.jit
def step(emb, ids):
    output, backward = emb.vjp(ids)
    return output, backward(jnp.ones_like(output))


def train(emb, ids):
    """Counts the ids, as a lookup outside `jit` does, and steps the rows."""
    emb.update_cache(with_room(ids))
    return step(emb, with_room(ids))


def hits_of(emb, ids):
    before = emb.cache_reports()[0]
    emb.update_cache(with_room(ids))
    after = emb.cache_reports()[0]
    return (after.hits - before.hits) / (after.lookups - before.lookups)


@nnx.jit
def looked_up(emb):
    return emb(jnp.arange(NUM_ROWS)[:, None])


def all_rows(emb):
    """As lookups see them, counting nothing."""
    return np.asarray(looked_up(emb))


def test_under_drift_the_cache_hits_like_a_fresh_one_and_loses_no_learned_row(caplog):
    emb, learned, hit_rates = make(), {}, []
    for epoch in range(6):
        train(emb, hot_ids(epoch, 0))
        emb.cache_populate()
        of_a_fresh_cache = np.isin(hot_ids(epoch, 1), hot_ids(epoch, 0)).mean()  # which has room for all of them
        hit_rates.append((hits_of(emb, hot_ids(epoch, 1)), of_a_fresh_cache))
        train(emb, hot_ids(epoch, 2))
        ids, rows = emb.caches[0].learned()
        learned |= dict(zip(ids.tolist(), np.array(rows), strict=True))
        emb.cache_populate()
    own, fresh = np.mean(hit_rates[2:], axis=0)
    assert own > fresh - 0.15, hit_rates  # old reads fade by half with every populate
    ids, rows = emb.caches[0].learned()
    report = emb.cache_reports()[0]
    assert report.spilled_ids > 3 * 32
    assert report.held_ids == 0
    assert len(ids) == report.cached_ids + report.spilled_ids
    held = dict(zip(ids.tolist(), np.asarray(rows), strict=True))
    trained = {i for epoch in range(6) for i in hot_ids(epoch, 2).ravel().tolist()} & learned.keys()
    for i in trained:
        np.testing.assert_array_equal(held[i], learned[i])
    assert caplog.text.count("none is dropped") == 1


@pytest.mark.parametrize("options", [{"max_spilled_rows": 8}, {"sparse": False, "max_spilled_rows": 0}])
def test_a_cache_that_cannot_follow_says_so_once_and_keeps_what_was_learned(options, caplog):
    emb = make(**options)
    for epoch in (0, 0, 1, 1, 2, 2):  # the second time, rows are in the cache and are trained there
        _, gradients = train(emb, hot_ids(epoch, 0))
        if gradients is not None:
            rows = emb.caches[0].rows
            rows.set_value(rows.get_value() - 0.3 * gradients.cached_rows[0])
        before = all_rows(emb)
        emb.cache_populate()
        np.testing.assert_allclose(all_rows(emb), before, rtol=2e-5, atol=1e-7)
    assert emb.cache_reports()[0].held_ids > 0
    assert emb.cache_reports()[0].spilled_ids == options["max_spilled_rows"]  # used to the last row
    assert caplog.text.count("keep their places in a tensor-train cache of 32") == 1


def test_rows_that_an_optimizer_outside_steps_make_room_for_what_is_read_now():
    emb, optimizer_state = make(sparse=False), None
    tx = optax.sgd(0.1, momentum=0.9)
    for epoch in range(4):  # of 24 rows each, which the cache of 32 and the room for 96 hold
        train(emb, hot_ids(epoch, 0))
        emb.cache_populate()
        rows = emb.caches[0].rows
        optimizer_state = tx.init(rows.get_value()) if optimizer_state is None else optimizer_state
        _, gradients = train(emb, hot_ids(epoch, 2))
        changes, optimizer_state = tx.update(gradients.cached_rows[0], optimizer_state)
        rows.set_value(rows.get_value() + changes)
        before = all_rows(emb)
        emb.cache_populate()
        np.testing.assert_allclose(all_rows(emb), before, rtol=2e-5, atol=1e-7)
        assert hits_of(emb, hot_ids(epoch, 1)) > 0.8
    assert emb.cache_reports()[0].held_ids == 0


WAYS_TO_COPY = {
    "clone": nnx.clone,
    "merge": lambda emb: nnx.merge(*nnx.split(emb), copy=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda emb: pickle.loads(pickle.dumps(emb)),
}


@pytest.mark.parametrize("make_copy", WAYS_TO_COPY.values(), ids=WAYS_TO_COPY)
def test_a_copy_and_its_original_go_their_own_ways(make_copy):
    def life(emb, epochs):
        for epoch in epochs:
            train(emb, hot_ids(epoch, 0))
            emb.cache_populate()

    emb, alone, other_alone = (make(optimizer="exact_adagrad") for _ in range(3))
    life(emb, [0, 1])
    twin = make_copy(emb)
    life(emb, [2, 3])  # before the copy is used for the first time
    life(twin, [5])
    life(alone, [0, 1, 2, 3])
    life(other_alone, [0, 1, 5])
    for module, expected in ((emb, alone), (twin, other_alone)):
        assert module.cache_reports() == expected.cache_reports()
        for name, value in expected.state_dict().items():
            np.testing.assert_array_equal(module.state_dict()[name], value, err_msg=name)


def test_rolling_back_the_state_rolls_back_the_whole_cache():
    emb = make()
    train(emb, hot_ids(0, 0))
    emb.cache_populate()
    train(emb, hot_ids(0, 1))
    kept, saved, rows = jax.tree.map(jnp.copy, nnx.state(emb)), emb.state_dict(), all_rows(emb)
    for epoch in (1, 2):
        train(emb, hot_ids(epoch, 0))
        emb.cache_populate()
    nnx.update(emb, kept)
    np.testing.assert_array_equal(all_rows(emb), rows)
    for name, value in emb.state_dict().items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    emb.cache_populate()
    np.testing.assert_allclose(all_rows(emb), rows, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"cache_size": 16, "hashtbl_size": 512}, r"caches/0/ids/0|cache_size is 32, expected 16"),
        ({"hashtbl_size": 256}, r"caches/0/reads/0 has shape \(512,\) in the state and \(256,\)"),
        ({"optimizer": "exact_sgd", "dtype": jnp.bfloat16}, r"has dtype float32 in the state and bfloat16"),
        ({"optimizer": "exact_rowwise_adagrad"}, r"slots/0/0"),
        ({"use_cache": False}, r"caches/0/ids/0"),
    ],
)
def test_the_state_of_another_kind_of_module_is_refused_and_changes_nothing(options, difference):
    emb, other = make(), make(**options)
    train(emb, hot_ids(0, 0))
    before = other.state_dict()
    with pytest.raises(ValueError, match=difference):
        other.load_state_dict(emb.state_dict())
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_the_state_of_other_tables_in_cores_of_the_same_shape_is_refused():
    emb, fewer = (TTEmbeddingBag(rows, 4, [3], [30, 30], [2, 2], use_cache=False) for rows in (900, 899))
    with pytest.raises(ValueError, match=r"tables/0/num_embeddings is 900, expected 899"):
        fewer.load_state_dict(emb.state_dict())
    factors = TTEmbeddingBag(900, 4, [2], [30, 30], [2, 2], use_cache=False)
    with pytest.raises(ValueError, match=r"has shape"):
        factors.load_state_dict(emb.state_dict())
