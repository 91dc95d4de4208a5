"""Whole tables and their states: saved, loaded, drawn, reset, rounded, decayed, averaged."""

import jax
import numpy as np
import pytest
from flax import nnx

from rsembed import tbe as rt
from tests.tbe.oracle import Oracle, assert_same_bits, make, tables_of, train
from tests.tbe.row_formulas import VARIANTS, rowwise_adagrad
from tests.tbe.test_mesh import mesh_of

Optim, Location, Type = rt.OptimType, rt.EmbeddingLocation, rt.SparseType
ROWWISE, CACHED = Optim.EXACT_ROWWISE_ADAGRAD, Location.MANAGED_CACHING
SPECS = ((40, 4), (50, 3))
IDS, OFFSETS = np.array([3, 1, 1, 4, 0, 2, 1]), np.array([0, 3, 3, 4, 7])
ONE_BAG = np.array([0, 1])
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of a few numbers against float64

STATEFUL = ["rowwise", "global", "counter_l2", "partial_adam", "ensemble", "emainplace"]
WHOLE_TABLES = ["ensemble", "emainplace", "counter_l2"]


# State dicts


OTHERS = {"weight_decay": 0.1, "weights_precision": Type.FP16, "learning_rate": [0.1, 0.2], "location": CACHED}
EXCHANGES = {
    **{variant: (variant, {}, {}) for variant in STATEFUL},
    "from behind a cache": ("adam", {"location": CACHED, "cache_sets": 1}, {}),
    "behind a cache": ("adam", {}, {"location": CACHED, "cache_sets": 1}),
    "to a mesh": ("rowwise", {}, {"mesh": mesh_of(4)}),
    "from mesh to mesh": ("adam", {"mesh": mesh_of(2), "placement": "table"}, {"mesh": mesh_of(4)}),
    "from a mesh": ("adagrad", {"mesh": mesh_of(4), "placement": "replicated"}, {}),
    "to other hyperparameters, precision and grouping": ("adam", {}, OTHERS),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_state_dict_continues_in_another_module(name):
    variant, *sides = EXCHANGES[name]
    optimizer, arguments, _ = VARIANTS[variant]
    specs, ids, offsets = ((90, 4), (50, 2)), np.arange(90) % 50, np.array([0, 10, 20, 40, 50, 60, 70, 80, 90])
    module, other = (make(specs, optimizer=optimizer, **arguments, **side) for side in sides)
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
    for mine, yours in zip(*(jax.tree.leaves(tables_of(each)) for each in (other, module)), strict=True):
        np.testing.assert_allclose(mine, yours.astype(mine.dtype), **close)
    assert int(module.step) == int(other.step)


def test_passes_need_the_whole_table():
    for variant in WHOLE_TABLES:
        optimizer, arguments, _ = VARIANTS[variant]
        with pytest.raises(NotImplementedError, match="goes over whole tables"):
            make(((40, 4),), optimizer=optimizer, location=CACHED, **arguments)


# Initial values and rounding


def test_initial_values_are_uniform_and_independent_of_grouping_caching_and_precision():
    specs = ((3000, 4), (2000, 4))
    plain = make(specs, uniform=(-2, 3))
    first, second = plain.split_embedding_weights()
    for values in (first, second):
        assert -2 <= np.min(values) < -1.9 and 2.9 < np.max(values) <= 3
        np.testing.assert_allclose(np.mean(values), 0.5, atol=4 * 5 / np.sqrt(12 * values.size))
        np.testing.assert_allclose(np.var(values), 25 / 12, rtol=0.1)
        assert len(np.unique(values)) > 0.99 * values.size
    assert not np.array_equal(first[:2000], second)
    others = [
        make(specs, uniform=(-2, 3), location=CACHED),
        make(specs, uniform=(-2, 3), optimizer=[Optim.EXACT_SGD, Optim.ADAM]),
        make(specs, uniform=(-2, 3), learning_rate=[0.1, 0.2], feature_table_map=[1, 0]),
    ]
    for other in others:
        for mine, yours in zip(other.split_embedding_weights(), (first, second), strict=True):
            np.testing.assert_array_equal(mine, yours)
    (half, _) = make(specs, uniform=(-2, 3), weights_precision=Type.FP16).split_embedding_weights()
    np.testing.assert_array_equal(half, np.asarray(first).astype(np.float16))


@pytest.mark.parametrize(("precision", "spacing"), [(Type.FP16, 2.0**-10), (Type.BF16, 2.0**-7)])
def test_stochastic_rounding_has_the_same_bits_for_the_same_key(precision, spacing):
    def stepped(seed, **arguments):
        given = {"weights_precision": precision, "learning_rate": 1.0, "rngs": nnx.Rngs(seed), **arguments}
        module = make(((4096, 4),), uniform=None, **given)
        train(module, np.arange(4096), np.arange(4097), d_output=np.full((4096, 4), -1.0003, np.float32))
        return np.asarray(module.split_embedding_weights()[0], np.float64)

    values = stepped(1)
    assert set(np.unique(values)) == {1.0, 1.0 + spacing}
    np.testing.assert_array_equal(values, stepped(1))
    assert not np.array_equal(values, stepped(2))
    np.testing.assert_array_equal(stepped(1, stochastic_rounding=False), np.ones((4096, 4)))


# Decay of rows that nobody reads, and passes over whole tables


def test_the_decay_that_a_lookup_saw_is_that_of_its_gradient():
    arguments = {"weight_decay": 0.5, "weight_decay_mode": rt.WeightDecayMode.DECOUPLE_GLOBAL}
    module = make(((5, 4),), optimizer=ROWWISE, global_weight_decay=rt.GlobalWeightDecayDefinition(), **arguments)
    for row in (1, 2, 2):
        train(module, np.array([row]), ONE_BAG)
    output, backward = module.vjp(np.array([1]), ONE_BAG, np.ones(1, np.float32))
    module.set_learning_rate(0.9)
    np.testing.assert_allclose(backward(np.ones((1, 4), np.float32)), output.sum(axis=1), rtol=1e-6)


def test_passes_over_whole_tables_are_run_before_the_lookup_of_their_step_and_once():
    mode = rt.EnsembleModeDefinition(2, 4, 2, 0.75, rt.StepMode.NONE)
    module = make(((6, 4),), optimizer=Optim.ENSEMBLE_ROWWISE_ADAGRAD, eps=0.1, ensemble_mode=mode)
    oracle, slow = Oracle(module, (0,), "sum", rowwise_adagrad, {"eps": 0.1}), np.zeros((6, 4))
    for t in range(1, 11):
        ids, offsets = np.array([t % 6, (t * t) % 6]), np.array([0, 2])
        module(ids, offsets)  # evaluation runs none
        module.vjp(ids, offsets)
        if t % 2 == 0:
            slow = slow + (1 - (0 if t <= 2 else 0.75)) * (oracle.tables[0] - slow)
            oracle.tables[0] = slow.copy() if t % 4 == 0 else oracle.tables[0]
        slow = slow * (t % 2)  # begins anew
        output, _ = train(module, ids, offsets)
        np.testing.assert_allclose(output[0], oracle.pooled(ids, offsets, None, [1])[0], **CLOSE)
        oracle.states[0]["momentum2"] = slow
        oracle.backward(ids, offsets, None, [1], [np.ones(4)])
        oracle.assert_agrees(module, **CLOSE)
