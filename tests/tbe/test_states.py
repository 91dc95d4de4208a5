"""Whole tables and their states: saving, loading, initial values, rounding, decay and averages."""

import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import tbe as rt
from tests.tbe.oracle import CACHED, CLOSE, Oracle, assert_same_bits, make, train, variant
from tests.tbe.row_formulas import LR
from tests.world import mesh_of

FP32, FP16, BF16 = rt.SparseType
ONE_BAG = np.array([0, 1])
ONE_SET = {"location": CACHED, "cache_sets": 1}


# State dicts


OTHERS = {
    "weight_decay": 0.1,
    "weights_precision": FP16,
    "learning_rate": [0.1, 0.2],
    "location": CACHED,
}
FTRL = {"optimizer": rs.optimizers.FTRL(LR)}
RULES = ["rowwise", "global", "counter_l2", "partial_adam", "ensemble", "emainplace"]
EXCHANGES = {
    **{rule: (rule, {}, {}) for rule in RULES},
    "a rule of the core": ("sgd", FTRL, FTRL),
    "from behind a cache": ("adam", ONE_SET, {}),
    "behind a cache": ("adam", {}, ONE_SET),
    "to a mesh": ("rowwise", {}, {"mesh": mesh_of(4)}),
    "from mesh to mesh": ("adam", {"mesh": mesh_of(2), "placement": "table"}, {"mesh": mesh_of(4)}),
    "from a mesh": ("adagrad", {"mesh": mesh_of(4), "placement": "replicated"}, {}),
    "to other hyperparameters, precision and grouping": ("adam", {}, OTHERS),
}


@pytest.mark.slow_rows("to a mesh", "from a mesh", "from mesh to mesh")
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_state_dict_continues_in_another_module(name):
    rule, *sides = EXCHANGES[name]
    module, other = (make(((90, 4), (50, 2)), **variant(rule) | side) for side in sides)
    other.init_embedding_weights_uniform(5, 6)
    ids = np.arange(96) % 50
    offsets = np.arange(0, 97, 12)
    train(module, ids, offsets)
    train(module, ids[::-1], offsets)
    train(other, ids, offsets)
    saved = module.state_dict()
    assert all(isinstance(array, np.ndarray) for array in saved.values())
    other.load_state_dict(saved)
    assert_same_bits(other, module)
    assert int(module.step) == int(other.step)
    if sides[1] is not OTHERS:
        train(module, ids, offsets)
        train(other, ids, offsets)
        assert_same_bits(module, other, **CLOSE if "mesh" in name else {})


# Initial values and rounding


def test_initial_values_are_uniform_and_independent_of_grouping_caching_and_precision():
    specs = ((3000, 4), (2000, 4))
    first, second = map(np.asarray, make(specs, uniform=(-2, 3)).split_embedding_weights())
    for values in (first, second):
        assert -2 <= np.min(values) < -1.9 and 2.9 < np.max(values) <= 3
        assert_allclose(np.mean(values), 0.5, atol=4 * 5 / np.sqrt(12 * values.size))
        assert_allclose(np.var(values), 25 / 12, rtol=0.1)
        assert len(np.unique(values)) > 0.99 * values.size
    assert not np.array_equal(first[:2000], second)
    for options in (
        {"location": CACHED},
        {"optimizer": ["EXACT_SGD", "ADAM"]},
        {"learning_rate": [0.1, 0.2], "feature_table_map": [1, 0]},
        {"weights_precision": FP16},
    ):
        others = make(specs, uniform=(-2, 3), **options).split_embedding_weights()
        assert_array_equal(others[0], first.astype(others[0].dtype))
        assert_array_equal(others[1], second.astype(others[1].dtype))


@pytest.mark.parametrize(("precision", "spacing"), [(FP16, 2.0**-10), (BF16, 2.0**-7)])
def test_stochastic_rounding_has_bits_that_follow_from_key_and_table(precision, spacing):
    def stepped(seed, **options):
        module = make(
            ((4096, 4),) * 2,
            uniform=None,
            weights_precision=precision,
            learning_rate=1.0,
            rngs=nnx.Rngs(seed),
            **options,
        )
        gradient = np.full((4096, 8), -1.0003, np.float32)
        train(module, np.arange(8192) % 4096, np.arange(8193), d_output=gradient)
        return np.asarray(module.split_embedding_weights(), np.float64)

    values = stepped(1)
    assert set(np.unique(values)) == {1.0, 1.0 + spacing}
    assert_array_equal(values, stepped(1))
    for others in (stepped(2), values[::-1]):
        # Another seed or another table rounds some numbers up that are rounded down here.
        assert np.mean(values == others) < 0.95
    assert_array_equal(stepped(1, stochastic_rounding=False), np.ones((2, 4096, 4)))


# Rounding with a cache of another precision


NUM_ROWS, DIM = 200, 32


def stepped(rate, *, num_steps=40, **precisions):
    """Weights after `num_steps` steps of `-rate` from 1.0.

    First, rows train that do not all fit into the cache, and then 20 rows that do.
    """
    module = make(((NUM_ROWS, DIM),), learning_rate=rate, uniform=None, **ONE_SET, **precisions)
    module.set_embedding_weights(0, np.ones((NUM_ROWS, DIM), np.float32))
    for ids in (np.arange(20, NUM_ROWS), np.arange(20)):
        for _ in range(num_steps):
            train(module, ids, np.array([0, ids.size]))
    (weights,) = module.split_embedding_weights()
    return weights.astype(np.float64)


@pytest.mark.slow_rows(
    "SparseType.FP16-SparseType.BF16-0.0001",
    "SparseType.FP32-SparseType.FP16-1e-05",
)
@pytest.mark.parametrize(
    ("weights", "cache", "rate"),
    [(FP16, FP32, 1e-5), (FP32, FP16, 1e-5), (FP16, BF16, 1e-4)],
)
def test_steps_smaller_than_the_rounding_are_not_lost_where_the_cache_has_another_precision(
    weights, cache, rate
):
    values = stepped(rate, weights_precision=weights, cache_precision=cache)
    # Distance of neighbouring numbers below 1.0.
    spacing = {FP16: 2.0**-11, BF16: 2.0**-8}[cache if cache != FP32 else weights]
    for part in (values[:20], values[20:]):
        # Each step rounds stochastically, with a variance of about `spacing * rate`.
        deviation = np.sqrt(40 * spacing * rate / part.size) + 1e-9
        # If small steps were lost, the mean would be 1.
        assert 5 * deviation < 40 * rate / 4
        assert_allclose(part.mean(), 1 - 40 * rate, atol=5 * deviation)


@pytest.mark.parametrize(("weights", "cache"), [(FP32, BF16), (FP16, BF16)])
def test_a_lookup_through_a_narrower_cache_changes_no_bit_of_the_table(weights, cache):
    precisions = {"weights_precision": weights, "cache_precision": cache}
    module = make(((NUM_ROWS, DIM),), **ONE_SET, **precisions)
    before = module.split_embedding_weights()[0].copy()
    # Rows are evicted for others, and `split_embedding_weights` writes all rows back.
    for first in (0, 30, 60):
        actual = module(np.arange(first, first + 30), np.arange(31))
        narrow = before[first : first + 30].astype(cache.dtype)
        assert_array_equal(actual, narrow.astype(np.float32))
    assert_array_equal(module.split_embedding_weights()[0], before)


def test_without_stochastic_rounding_a_cache_of_another_precision_rounds_to_nearest():
    values = stepped(
        1e-5, num_steps=5, weights_precision=FP16, cache_precision=FP32, stochastic_rounding=False
    )
    assert_array_equal(values[52:], 1.0)


# Decay of rows that are not read, and passes over whole tables


def test_the_decay_that_a_lookup_saw_is_that_of_its_gradient():
    module = make(((5, 4),), **variant("global"))
    for row in (1, 2, 2):
        train(module, np.array([row]), ONE_BAG)
    output, backward = module.vjp(np.array([1]), ONE_BAG, np.ones(1, np.float32))
    module.set_learning_rate(0.9)
    assert_allclose(backward(np.ones((1, 4), np.float32)), output.sum(axis=1), rtol=1e-6)


MODES = {
    "ensemble": {
        "optimizer": "ENSEMBLE_ROWWISE_ADAGRAD",
        "ensemble_mode": rt.EnsembleModeDefinition(1, 2, 0, 0.75),
    },
    "emainplace": {
        "optimizer": "EMAINPLACE_ROWWISE_ADAGRAD",
        "emainplace_mode": rt.EmainplaceModeDefinition(1, 0, 0.75),
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["backward", "apply", "compiled"])
def test_no_step_misses_its_pass_however_many_lookups_wait_for_their_backward(mode, way):
    module = make(((6, 4),), eps=0.1, **MODES[mode])
    oracle = Oracle(module, "rowwise")
    rows = (1, 4, 1, 2, 5)
    gradients = [np.full((1, 4), 0.5 + row, np.float32) for row in rows]

    def steps(module):
        waiting = [module.vjp(np.array([row]), ONE_BAG)[1] for row in rows]
        for backward, gradient in zip(waiting, gradients, strict=True):
            if way == "apply":
                module.apply(backward.row_gradients(gradient))
            else:
                backward(gradient)

    nnx.jit(steps)(module) if way == "compiled" else steps(module)
    table = oracle.tables[0]
    slow = np.zeros(table.shape)
    for row, gradient in zip(rows, gradients, strict=True):
        if mode == "emainplace":
            table[:, 2:] += 0.75 * (table[:, :2] - table[:, 2:])
        else:
            slow += 0.25 * (table - slow)
            if oracle.t % 2 == 0:
                table[:] = slow
        oracle.backward([row], ONE_BAG, None, gradient)
    assert_allclose(module.split_embedding_weights()[0], table, **CLOSE)
    assert int(module.step) == len(rows)


def test_passes_over_whole_tables_are_run_before_the_lookup_of_their_step_and_once():
    mode = rt.EnsembleModeDefinition(2, 4, 2, 0.75, rt.StepMode.NONE)
    module = make(((6, 4),), optimizer="ENSEMBLE_ROWWISE_ADAGRAD", eps=0.1, ensemble_mode=mode)
    oracle = Oracle(module, "rowwise")
    table = oracle.tables[0]
    slow = oracle.states[0]["momentum2"]
    offsets = np.array([0, 2])
    for t in range(1, 11):
        ids = np.array([t, t * t]) % 6
        # An evaluation runs no pass.
        module(ids, offsets)
        if t % 4:
            module.vjp(ids, offsets)
        if t % 2 == 0:
            slow += (1.0 if t <= 2 else 0.25) * (table - slow)
            if t % 4 == 0:
                table[:] = slow
            # The slow copy starts again from 0.
            slow[:] = 0.0
        output, _ = train(module, ids, offsets)
        assert_allclose(output, oracle.lookup(ids, offsets), **CLOSE)
        oracle.backward(ids, offsets, None, np.ones((1, 4)))
        oracle.assert_agrees(module, **CLOSE)
