"""Whole tables and their states: saved, loaded, drawn, reset, rounded, decayed, averaged; and other inputs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rsembed import Bags
from rsembed import tbe as rt
from tests.tbe.oracle import Oracle, assert_same_bits, make, tables_of, train
from tests.tbe.row_formulas import LR, VARIANTS, rowwise_adagrad, sgd

Optim, Location, Type = rt.OptimType, rt.EmbeddingLocation, rt.SparseType
ROWWISE, CACHED = Optim.EXACT_ROWWISE_ADAGRAD, Location.MANAGED_CACHING
SPECS = ((40, 4), (50, 3))
IDS, OFFSETS = np.array([3, 1, 1, 4, 0, 2, 1]), np.array([0, 3, 3, 4, 7])
ONE_BAG = np.array([0, 1])
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of a few numbers against float64

STATEFUL = ["rowwise", "global", "counter_l2", "adam_by_row", "partial_adam", "ensemble", "emainplace"]
WHOLE_TABLES = ["ensemble", "emainplace", "counter_l2"]


# State dicts


@pytest.mark.parametrize("variant", STATEFUL)
def test_a_state_dict_continues_in_another_module(variant):
    optimizer, arguments, _ = VARIANTS[variant]
    specs = ((40, 4), (50, 2))
    module, other = (make(specs, optimizer=optimizer, **arguments) for _ in range(2))
    other.init_embedding_weights_uniform(5, 6)
    for k in range(2):
        train(module, IDS + k, OFFSETS)
    saved = module.state_dict()
    assert all(isinstance(v, np.ndarray) for v in saved.values())
    other.load_state_dict(saved)
    assert_same_bits(module, other)
    for each in (module, other):
        train(each, IDS, OFFSETS)
    assert_same_bits(module, other)
    assert int(module.step) == int(other.step) == 3


@pytest.mark.parametrize(("source", "target"), [(CACHED, Location.DEVICE), (Location.DEVICE, CACHED)])
def test_cached_and_uncached_modules_exchange_state_dicts(source, target):
    arguments = {"optimizer": Optim.ADAM, "cache_sets": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # cache_sets has no effect without a cache
        module, other = (make(((90, 4), (50, 3)), location=x, **arguments) for x in (source, target))
    ids, offsets = np.arange(90) % 50, np.array([0, 20, 50, 70, 90])
    train(module, ids, offsets)
    train(other, ids[::-1], offsets)
    other.load_state_dict(module.state_dict())
    for each in (module, other):
        train(each, ids, offsets)
    assert_same_bits(module, other)


def test_going_back_to_a_checkpoint_runs_the_passes_of_its_steps_again():
    config = rt.EmainplaceModeDefinition(step_ema=2, step_ema_coef=0.5)
    module = make(((5, 4),), optimizer=Optim.EMAINPLACE_ROWWISE_ADAGRAD, emainplace_mode=config)
    train(module, np.array([3]), ONE_BAG)
    saved = module.state_dict()
    train(module, np.array([3]), ONE_BAG)
    first = tables_of(module)
    module.load_state_dict(saved)
    train(module, np.array([3]), ONE_BAG)
    np.testing.assert_array_equal(tables_of(module)[0][0], first[0][0])


def test_numbers_that_are_too_large_are_refused_by_name():
    module = make(SPECS, optimizer=ROWWISE)
    saved = module.state_dict()
    for name in ("table_1.weight", "table_1.sum"):
        with pytest.raises(ValueError, match=f"imported '{name}' are too large for float32; clip them"):
            module.load_state_dict({**saved, name: np.full(saved[name].shape, 1e300)})
    with pytest.raises(ValueError, match="'table_1': 150 numbers of imported 'weights' are too large for float32"):
        module.set_embedding_weights(1, np.full((50, 3), 1e300))


def test_every_optimizer_lists_its_states_by_table_also_sgd_and_lars():
    assert make(SPECS).split_optimizer_states() == [[], []]
    lars = make(SPECS, optimizer=Optim.LARS_SGD)
    assert [list(states) for states in lars.get_optimizer_state()] == [["momentum1"]] * 2
    assert [s["momentum1"].shape for s in lars.get_optimizer_state()] == [(40, 4), (50, 3)]


def test_weights_that_were_read_are_copies():
    module = make(SPECS)
    read = module.split_embedding_weights()
    before = [np.array(w) for w in read]
    train(module, IDS, OFFSETS)
    np.testing.assert_array_equal(read[0], before[0])


@pytest.mark.parametrize(
    ("variant", "location"),
    [(v, Location.DEVICE) for v in STATEFUL] + [(v, CACHED) for v in STATEFUL if v not in WHOLE_TABLES],
)
def test_rows_are_reset_with_all_their_states_for_every_optimizer(variant, location):
    optimizer, arguments, _ = VARIANTS[variant]
    if variant == "ensemble":
        arguments = arguments | {"ensemble_mode": rt.EnsembleModeDefinition(1, 100)}
    module = make(((40, 4), (50, 2)), optimizer=optimizer, location=location, **arguments)
    for _ in range(3):
        train(module, IDS, OFFSETS)
    weights, states = tables_of(module)
    module.reset_embedding_weight_momentum(np.array([1, 3, 2]), np.array([0, 2, 3]), np.array([0, 1]))
    for table, rows in ((0, [1, 3]), (1, [2])):
        for array in (weights[table], *states[table]):
            assert array[rows].any()
            array[rows] = 0
    for found, wanted in zip(jax.tree.leaves(tables_of(module)), jax.tree.leaves((weights, states)), strict=True):
        np.testing.assert_array_equal(found, wanted)


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


@pytest.mark.parametrize("precision", [Type.FP16, Type.BF16])
def test_stochastic_rounding_keeps_the_mean_and_has_the_same_bits_for_the_same_key(precision):
    def stepped(seed, **arguments):
        module = make(
            ((4096, 4),), uniform=None, weights_precision=precision, learning_rate=1.0, rngs=nnx.Rngs(seed), **arguments
        )
        ids, offsets = np.arange(4096), np.arange(4097)
        d_output = np.full((4096, 4), -1.0003, np.float32)
        train(module, ids, offsets, d_output=d_output)
        return np.asarray(module.split_embedding_weights()[0])

    values = stepped(1)
    spacing = {Type.FP16: 2.0**-10, Type.BF16: 2.0**-7}[precision]
    assert set(np.unique(values.astype(np.float64))) == {1.0, 1.0 + spacing}
    share = 0.0003 / spacing
    deviation = spacing * np.sqrt(share * (1 - share) / values.size)
    np.testing.assert_allclose(values.astype(np.float64).mean(), 1.0003, atol=5 * deviation)
    np.testing.assert_array_equal(values, stepped(1))
    assert not np.array_equal(values, stepped(2))
    np.testing.assert_array_equal(stepped(1, stochastic_rounding=False).astype(np.float32), np.ones((4096, 4)))


# Decay of rows that nobody reads, and passes over whole tables


@pytest.mark.parametrize("location", [Location.DEVICE, CACHED])
def test_lazy_global_decay_equals_decaying_all_touched_rows_at_each_step_for_evaluation_too(location):
    decay, rows = 0.5, 40
    arguments = {"weight_decay": decay, "weight_decay_mode": rt.WeightDecayMode.DECOUPLE_GLOBAL, "eps": 0.1}
    module = make(
        ((rows, 4),),
        location=location,
        optimizer=ROWWISE,
        global_weight_decay=rt.GlobalWeightDecayDefinition(start_iter=2),
        **arguments,
    )
    dense = np.array(module.split_embedding_weights()[0], np.float64)
    sums, active = np.zeros(rows), np.zeros(rows, bool)
    rng = np.random.default_rng(0)
    for t in range(1, 9):
        ids = rng.integers(0, 6, 3)
        counts = np.bincount(ids, minlength=rows).astype(np.float64)
        everything = module(np.arange(rows), np.arange(rows + 1))
        np.testing.assert_allclose(everything, dense, rtol=1e-5, atol=1e-6)
        train(module, ids, np.array([0, 3]))
        sums[counts > 0] += counts[counts > 0] ** 2
        if t >= 2:
            active |= counts > 0
        dense[active | (counts > 0)] *= 1 - LR * decay  # a row first touched now decays now, an owing one always
        step = LR * counts / (np.sqrt(sums) + 0.1)
        dense -= step[:, None]
    np.testing.assert_allclose(module(np.arange(rows), np.arange(rows + 1)), dense, rtol=1e-5, atol=1e-6)


def test_the_decay_that_a_lookup_saw_is_that_of_its_gradient():
    arguments = {"weight_decay": 0.5, "weight_decay_mode": rt.WeightDecayMode.DECOUPLE_GLOBAL}
    module = make(((5, 4),), optimizer=ROWWISE, global_weight_decay=rt.GlobalWeightDecayDefinition(), **arguments)
    for row in (1, 2, 2):
        train(module, np.array([row]), ONE_BAG)
    output, backward = module.vjp(np.array([1]), ONE_BAG, np.ones(1, np.float32))
    module.set_learning_rate(0.9)
    np.testing.assert_allclose(backward(np.ones((1, 4), np.float32)), output.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize("mode", list(rt.StepMode))
def test_the_ensemble_averages_and_swaps_over_several_steps(mode):
    config = rt.EnsembleModeDefinition(step_ema=2, step_swap=4, step_start=2, step_ema_coef=0.75, step_mode=mode)
    module = make(((6, 4),), optimizer=Optim.ENSEMBLE_ROWWISE_ADAGRAD, ensemble_mode=config, eps=0.1)
    oracle = Oracle(module, (0,), "sum", rowwise_adagrad, {"eps": 0.1})
    slow = np.zeros((6, 4))
    for t in range(1, 10):
        weights = oracle.tables[0]
        if t % 2 == 0:
            slow = slow + (1 - (0 if t <= 2 else 0.75)) * (weights - slow)
        if t % 4 == 0:
            oracle.tables[0] = slow.copy()
        if t % 2 == 0 and mode == rt.StepMode.NONE:
            slow = 0 * slow
        ids = np.array([t % 6, (t * t) % 6])
        module.vjp(ids, np.array([0, 2]))  # a second lookup of the same step runs no pass again
        output, _ = train(module, ids, np.array([0, 2]))
        np.testing.assert_allclose(output[0], oracle.pooled(ids, [0, 2], None, [1])[0], **CLOSE)
        oracle.states[0]["momentum2"] = slow
        oracle.formula = lambda w, g, state, t, a: rowwise_adagrad(w, g, state, t, a)
        oracle.backward(ids, [0, 2], None, [1], [np.ones(4)])
        oracle.assert_agrees(module, **CLOSE)


def test_the_slow_half_follows_the_fast_half_over_several_steps():
    config = rt.EmainplaceModeDefinition(step_ema=3.0, step_start=4.0, step_ema_coef=0.25)
    module = make(((6, 4),), optimizer=Optim.EMAINPLACE_ROWWISE_ADAGRAD, emainplace_mode=config, eps=0.1)
    oracle = Oracle(module, (0,), "sum", rowwise_adagrad, {"eps": 0.1})
    for t in range(1, 11):
        if t % 3 == 0 and t >= 4:
            table = oracle.tables[0]
            table[:, 2:] += 0.25 * (table[:, :2] - table[:, 2:])
        ids = np.array([t % 6, (t * t) % 6])
        module(ids, np.array([0, 2]))  # evaluation runs no pass
        train(module, ids, np.array([0, 2]))
        oracle.backward(ids, [0, 2], None, [1], [np.ones(4)])
        oracle.assert_agrees(module, **CLOSE)


# Forms of input


def test_bags_by_feature_give_named_outputs_and_the_bits_of_flat_input():
    module, other = make(SPECS, optimizer=ROWWISE), make(SPECS, optimizer=ROWWISE)
    batch = {
        "table_1": Bags.from_lists([[4], [0, 2, 1]]).pad_to(6),
        "table_0": Bags.from_lists([[3, 1, 1], []]).pad_to(5),
    }
    output, backward = module.vjp(batch)
    wanted, other_backward = other.vjp(IDS, OFFSETS)
    assert set(output) == {"table_0", "table_1"}
    np.testing.assert_array_equal(np.concatenate([output["table_0"], output["table_1"]], axis=1), wanted)
    backward({"table_0": wanted[:, :4], "table_1": wanted[:, 4:]})
    other_backward(wanted)
    assert_same_bits(module, other)
    with pytest.raises(ValueError, match=r"batch does not match the features: .* unknown \['x'\]"):
        module({"x": [[1]]})
    _, backward = module.vjp(batch)
    with pytest.raises(ValueError, match=r"its gradient needs the features \['table_0', 'table_1'\]"):
        backward(wanted)


def test_bags_by_feature_may_differ_in_number():
    module = make(SPECS)
    oracle = Oracle(module, (0, 1), "sum", sgd, {})
    output, backward = module.vjp({"table_0": [[3, 1], [2], [1]], "table_1": [[0]]})
    assert [output[name].shape for name in ("table_0", "table_1")] == [(3, 4), (1, 3)]
    backward(jax.tree.map(jnp.ones_like, output))
    oracle.backward([3, 1, 2, 1, 0], [0, 2, 3, 4, 5], None, [3, 1], [*np.ones((3, 4)), np.ones(3)])
    oracle.assert_agrees(module, **CLOSE)
