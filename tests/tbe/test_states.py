"""Whole tables and their states: saved, loaded, drawn, reset, rounded, decayed, averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import tbe as rt
from tests.tbe.oracle import (
    CLOSE,
    Oracle,
    assert_same_bits,
    make,
    tables_of,
    train,
    variant,
)
from tests.tbe.row_formulas import LR, rowwise_adagrad
from tests.world import assert_same, mesh_of

Optim, Location, Type = rt.OptimType, rt.EmbeddingLocation, rt.SparseType
FP32, FP16, BF16 = Type.FP32, Type.FP16, Type.BF16
ROWWISE, CACHED = Optim.EXACT_ROWWISE_ADAGRAD, Location.MANAGED_CACHING
SPECS = ((40, 4), (50, 3))
ONE_BAG = np.array([0, 1])

STATEFUL = ["rowwise", "global", "counter_l2", "partial_adam", "ensemble", "emainplace"]


# State dicts


OTHERS = {
    "weight_decay": 0.1,
    "weights_precision": Type.FP16,
    "learning_rate": [0.1, 0.2],
    "location": CACHED,
}
EXCHANGES = {
    **{rule: (rule, {}, {}) for rule in STATEFUL},
    "from behind a cache": ("adam", {"location": CACHED, "cache_sets": 1}, {}),
    "behind a cache": ("adam", {}, {"location": CACHED, "cache_sets": 1}),
    "to a mesh": ("rowwise", {}, {"mesh": mesh_of(4)}),
    "from mesh to mesh": ("adam", {"mesh": mesh_of(2), "placement": "table"}, {"mesh": mesh_of(4)}),
    "from a mesh": ("adagrad", {"mesh": mesh_of(4), "placement": "replicated"}, {}),
    "to other hyperparameters, precision and grouping": ("adam", {}, OTHERS),
}


@pytest.mark.slow_rows("to a mesh", "from a mesh")
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_state_dict_continues_in_another_module(name):
    rule, *sides = EXCHANGES[name]
    specs, ids, offsets = (
        ((90, 4), (50, 2)),
        np.arange(90) % 50,
        np.array([0, 10, 20, 40, 50, 60, 70, 80, 90]),
    )
    module, other = (make(specs, **variant(rule) | side) for side in sides)
    other.init_embedding_weights_uniform(5, 6)
    for k in range(2):
        train(module, (ids + k) % 50, offsets)
    train(other, ids[::-1], offsets)
    saved = module.state_dict()
    assert all(isinstance(v, np.ndarray) for v in saved.values())
    other.load_state_dict(saved)
    if sides[1] is not OTHERS:
        assert_same_bits(module, other)
        for each in (module, other):
            train(each, ids, offsets)
    close = CLOSE if "mesh" in name else {"rtol": 0}
    for mine, yours in zip(
        *(jax.tree.leaves(tables_of(each)) for each in (other, module)), strict=True
    ):
        assert_allclose(mine, yours.astype(mine.dtype), **close)
    assert int(module.step) == int(other.step)


# Initial values and rounding


def test_initial_values_are_uniform_and_independent_of_grouping_caching_and_precision():
    specs = ((3000, 4), (2000, 4))
    plain = make(specs, uniform=(-2, 3))
    first, second = plain.split_embedding_weights()
    for values in (first, second):
        assert -2 <= np.min(values) < -1.9 and 2.9 < np.max(values) <= 3
        assert_allclose(np.mean(values), 0.5, atol=4 * 5 / np.sqrt(12 * values.size))
        assert_allclose(np.var(values), 25 / 12, rtol=0.1)
        assert len(np.unique(values)) > 0.99 * values.size
    assert not np.array_equal(first[:2000], second)
    others = [
        make(specs, uniform=(-2, 3), location=CACHED),
        make(specs, uniform=(-2, 3), optimizer=[Optim.EXACT_SGD, Optim.ADAM]),
        make(specs, uniform=(-2, 3), learning_rate=[0.1, 0.2], feature_table_map=[1, 0]),
    ]
    for other in others:
        assert_same(tables_of(other)[0], [first, second])
    (half, _) = make(specs, uniform=(-2, 3), weights_precision=Type.FP16).split_embedding_weights()
    assert_array_equal(half, np.asarray(first).astype(np.float16))


@pytest.mark.parametrize(("precision", "spacing"), [(Type.FP16, 2.0**-10), (Type.BF16, 2.0**-7)])
def test_stochastic_rounding_has_bits_that_follow_from_key_and_table(precision, spacing):
    def stepped(seed, **arguments):
        given = {
            "weights_precision": precision,
            "learning_rate": 1.0,
            "rngs": nnx.Rngs(seed),
            **arguments,
        }
        module, ids = make(((4096, 4),) * 2, uniform=None, **given), np.tile(np.arange(4096), 2)
        train(module, ids, np.arange(8193), d_output=np.full((4096, 8), -1.0003, np.float32))
        return np.asarray(module.split_embedding_weights(), np.float64)

    values = stepped(1)
    assert set(np.unique(values)) == {1.0, 1.0 + spacing}
    assert_array_equal(values, stepped(1))
    for others in (stepped(2), values[::-1]):
        assert np.mean(values == others) < 0.95  # some are rounded up in one of both
    assert_array_equal(stepped(1, stochastic_rounding=False), np.ones((2, 4096, 4)))


# Rounding, also where the cache has another precision


NUM_ROWS, DIM = 200, 32


def stepped(rate, *, num_steps=40, **arguments):
    """Weights after that many steps of `-rate` from 1.0, of rows more than fit into the cache and of 20 that do."""
    caching = {"location": rt.EmbeddingLocation.MANAGED_CACHING, "cache_sets": 1}
    module = make(((NUM_ROWS, DIM),), learning_rate=rate, uniform=None, **caching, **arguments)
    module.load_state_dict({"table_0.weight": np.ones((NUM_ROWS, DIM), np.float32)})
    for few in (False, True):
        ids = np.arange(20) if few else np.arange(20, NUM_ROWS)
        for _ in range(num_steps):
            train(module, ids, np.array([0, ids.size]))
    (weights,) = module.split_embedding_weights()
    return weights.astype(np.float64)


@pytest.mark.slow_rows(
    "SparseType.FP16-SparseType.BF16-0.0001",
    "SparseType.BF16-SparseType.FP32-0.0001",
    "SparseType.FP32-SparseType.FP16-1e-05",
)
@pytest.mark.parametrize(
    ("weights", "cache", "rate"),
    [(FP16, FP32, 1e-5), (FP32, FP16, 1e-5), (BF16, FP32, 1e-4), (FP16, BF16, 1e-4)],
)
def test_steps_smaller_than_the_rounding_are_not_lost_where_the_cache_has_another_precision(
    weights, cache, rate
):
    values = stepped(rate, weights_precision=weights, cache_precision=cache)
    spacing = {FP16: 2.0**-11, BF16: 2.0**-8}[cache if cache != FP32 else weights]  # below 1.0
    for own in (values[:20], values[20:]):
        # Each step rounds once: a random walk of at most 40 times `spacing`, of which a share moves.
        deviation = np.sqrt(40 * spacing * rate / own.size) + 1e-9
        assert 5 * deviation < 40 * rate / 4  # lost steps would leave 1
        assert_allclose(own.mean(), 1 - 40 * rate, atol=5 * deviation)


@pytest.mark.parametrize(("weights", "cache"), [(FP32, FP16), (FP32, BF16), (FP16, BF16)])
def test_a_lookup_through_a_narrower_cache_changes_no_bit_of_the_table(weights, cache):
    caching = {
        "location": rt.EmbeddingLocation.MANAGED_CACHING,
        "cache_sets": 1,
        "cache_precision": cache,
    }
    module = make(((NUM_ROWS, DIM),), uniform=(-1, 1), weights_precision=weights, **caching)
    (before,) = module.split_embedding_weights()
    narrow = {FP16: jnp.float16, BF16: jnp.bfloat16}[cache]
    for first in (0, 30, 60):  # rows leave for others, and all come home in the end
        found = module(np.arange(first, first + 30), np.arange(31))
        assert_array_equal(
            found, np.asarray(before)[first : first + 30].astype(narrow).astype(np.float32)
        )
    assert_array_equal(module.split_embedding_weights()[0], before)


def test_without_stochastic_rounding_a_cache_of_another_precision_rounds_to_nearest():
    values = stepped(
        1e-5, num_steps=5, weights_precision=FP16, cache_precision=FP32, stochastic_rounding=False
    )
    assert_array_equal(values[52:], 1.0)


# Decay of rows that nobody reads, and passes over whole tables


def test_the_decay_that_a_lookup_saw_is_that_of_its_gradient():
    arguments = {"weight_decay": 0.5, "weight_decay_mode": rt.WeightDecayMode.DECOUPLE_GLOBAL}
    module = make(
        ((5, 4),),
        optimizer=ROWWISE,
        global_weight_decay=rt.GlobalWeightDecayDefinition(),
        **arguments,
    )
    for row in (1, 2, 2):
        train(module, np.array([row]), ONE_BAG)
    output, backward = module.vjp(np.array([1]), ONE_BAG, np.ones(1, np.float32))
    module.set_learning_rate(0.9)
    assert_allclose(backward(np.ones((1, 4), np.float32)), output.sum(axis=1), rtol=1e-6)


MODES = {
    "ensemble": (
        Optim.ENSEMBLE_ROWWISE_ADAGRAD,
        {"ensemble_mode": rt.EnsembleModeDefinition(1, 2, 0, 0.75)},
    ),
    "emainplace": (
        Optim.EMAINPLACE_ROWWISE_ADAGRAD,
        {"emainplace_mode": rt.EmainplaceModeDefinition(1, 0, 0.75)},
    ),
}


def after_steps(weights, mode, gradients):
    """Weights after row-wise Adagrad, by loops: before each step the pass of `mode`, then one step of each row."""
    weights, slow, sums = (
        weights.astype(np.float64),
        np.zeros(weights.shape),
        np.zeros(len(weights)),
    )
    half = weights.shape[1] // 2
    for t, gradient in enumerate(gradients, start=1):
        if mode == "ensemble":
            slow += 0.25 * (weights - slow)
            weights = slow.copy() if t % 2 == 0 else weights
        else:
            weights[:, half:] += 0.75 * (weights[:, :half] - weights[:, half:])
        for row, own in gradient.items():
            sums[row] += np.mean(np.square(own))
            weights[row] -= LR * own / (np.sqrt(sums[row]) + 0.1)
    return weights


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["backward", "apply", "compiled"])
def test_no_step_misses_its_pass_however_many_lookups_wait_for_their_backward(mode, way):
    optimizer, arguments = MODES[mode]
    module = make(((6, 4),), optimizer=optimizer, eps=0.1, **arguments)
    weights, rows = np.asarray(module.split_embedding_weights()[0]), (1, 4, 1, 2, 5)
    gradients = [np.full((1, 4), 0.5 + row, np.float32) for row in rows]

    def steps(module):
        waiting = [module.vjp(np.array([row]), ONE_BAG)[1] for row in rows]
        for backward, gradient in zip(waiting, gradients, strict=True):
            if way == "apply":
                module.apply(backward.row_gradients(gradient))
            else:
                backward(gradient)

    nnx.jit(steps)(module) if way == "compiled" else steps(module)
    expected = after_steps(
        weights, mode, [{row: own[0]} for row, own in zip(rows, gradients, strict=True)]
    )
    assert_allclose(module.split_embedding_weights()[0], expected, **CLOSE)
    assert int(module.step) == len(rows)


def test_passes_over_whole_tables_are_run_before_the_lookup_of_their_step_and_once():
    mode = rt.EnsembleModeDefinition(2, 4, 2, 0.75, rt.StepMode.NONE)
    module = make(((6, 4),), optimizer=Optim.ENSEMBLE_ROWWISE_ADAGRAD, eps=0.1, ensemble_mode=mode)
    oracle, slow = Oracle(module, (0,), "sum", rowwise_adagrad, {"eps": 0.1}), np.zeros((6, 4))
    for t in range(1, 11):
        ids, offsets = np.array([t % 6, (t * t) % 6]), np.array([0, 2])
        module(ids, offsets)  # evaluation runs none
        if t % 4:
            module.vjp(ids, offsets)
        if t % 2 == 0:
            slow = slow + (1 - (0 if t <= 2 else 0.75)) * (oracle.tables[0] - slow)
            oracle.tables[0] = slow.copy() if t % 4 == 0 else oracle.tables[0]
        slow = slow * (t % 2)  # begins anew
        output, _ = train(module, ids, offsets)
        assert_allclose(output[0], oracle.pooled(ids, offsets, None, [1])[0], **CLOSE)
        oracle.states[0]["momentum2"] = slow
        oracle.backward(ids, offsets, None, [1], [np.ones(4)])
        oracle.assert_agrees(module, **CLOSE)
