"""A module whose tables and samples a mesh shares: the numbers of one device, and of loops in float64."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import clip_by_global_norm, combine, tbe as rt
from rsembed.tbe import functional
from tests.tbe.oracle import assert_same_bits, gradient_like, make, train, variant
from tests.world import mesh_of

Optim = rt.OptimType
SPECS = ((50, 4), (30, 4), (40, 8))
FEATURES = (0, 1, 2, 0)
BAGS = 8
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def draw(seed, *, features=FEATURES, seed_of_lengths=0):
    """Ids (some -1, some equal), offsets (some bags empty) and weights.

    Batches of the same lengths run the same programs.
    """
    lengths = np.random.default_rng(seed_of_lengths).integers(0, 5, len(features) * BAGS)
    rng = np.random.default_rng(seed)
    rows = np.repeat(
        [SPECS[t][0] for t in features], lengths.reshape(len(features), BAGS).sum(axis=1)
    )
    ids = rng.integers(-1, rows)
    return ids, np.r_[0, np.cumsum(lengths)], rng.uniform(0.5, 2.0, ids.size).astype(np.float32)


# Against one device, which test_random_configurations.py holds against loops in float64


def rules(*names, **arguments):
    """An optimizer for each table: all of them travel in one exchange, and one program serves all."""
    return {"optimizer": [Optim[name] for name in names], "eps": 1e-3, **arguments}


ENSEMBLE = rt.EnsembleModeDefinition(step_ema=1, step_swap=2, step_start=0, step_ema_coef=0.6)
SHARED = {
    "row": rules("EXACT_ROWWISE_ADAGRAD", "ADAM", "LAMB", placement="row"),
    "table": rules(
        "EXACT_SGD", "PARTIAL_ROWWISE_ADAM", "EXACT_ADAGRAD", placement="table", pooling_mode="MEAN"
    ),
    "column": rules("EXACT_SGD", "EXACT_SGD", "ADAM", placement="column"),
    "column of halves": {
        "placement": "column",
        "weights_precision": "FP16",
        "stochastic_rounding": False,
    },
    "replicated": rules(
        *("LARS_SGD", "PARTIAL_ROWWISE_LAMB", "EXACT_ROWWISE_ADAGRAD"),
        placement="replicated",
        pooling_mode="MEAN",
    ),
    "copies along another axis": {
        "mesh": (2, 4),
        "sharding_axis": "x",
        "placement": {"table_1": "table"},
    },
    "cowclip": variant("cowclip"),
    "counter": variant("counter_adagradw"),
    "ensemble": variant("ensemble") | {"ensemble_mode": ENSEMBLE},
    "emainplace": variant("emainplace")
    | {"emainplace_mode": rt.EmainplaceModeDefinition(step_ema=1, step_start=0, step_ema_coef=0.6)},
}


@pytest.mark.slow_rows("counter", "emainplace", "column of halves")
@pytest.mark.parametrize("name", SHARED)
def test_a_mesh_looks_up_and_trains_as_one_device_does(name):
    arguments = {"feature_table_map": FEATURES, **SHARED[name]}
    shared = {
        key: arguments.pop(key)
        for key in ("mesh", "sharding_axis", "placement")
        if key in arguments
    }
    one = make(SPECS, **arguments)
    many = make(SPECS, **arguments, **shared | {"mesh": mesh_of(*shared.get("mesh", (4,)))})
    assert_same_bits(one, many)
    for seed in range(3):
        ids, offsets, weights = draw(seed)
        weights = weights if seed == 0 or many.plan.pooling == "sum" else None
        (expected, backward), (found, backward_many) = (
            m.vjp(ids, offsets, weights) for m in (one, many)
        )
        assert_allclose(found, expected, **CLOSE)
        gradient = gradient_like(expected, seed)
        d_weights, d_weights_many = backward(gradient), backward_many(gradient)
        assert (d_weights is None) == (d_weights_many is None) == (weights is None)
        if weights is not None:
            assert_allclose(d_weights_many, d_weights, rtol=2e-4, atol=2e-5)
    assert_same_bits(one, many, **CLOSE)
    assert int(many.step) == 3


def test_rows_are_rounded_by_the_noise_of_one_device():
    half = {
        "weights_precision": rt.SparseType.FP16,
        "optimizer": Optim.EXACT_SGD,
        "learning_rate": 0.37,
    }
    one, many = make(SPECS, **half), make(SPECS, mesh=mesh_of(4), **half)
    for seed in range(3):
        ids, offsets, _ = draw(seed, features=(0, 1, 2))
        # Sums are exact.
        gradient = np.random.default_rng(seed).integers(-8, 9, (BAGS, 16)).astype(np.float32) / 16
        for module in (one, many):
            train(module, ids, offsets, d_output=gradient)
    assert_same_bits(one, many)


# Row gradients, gradients of weights


def test_row_gradients_are_clipped_added_and_applied_as_on_one_device():
    found = []
    for how in ({}, {"mesh": mesh_of(4)}):
        module, gradients = make(SPECS, optimizer=Optim.EXACT_ADAGRAD, **how), []
        for seed in range(2):
            output, backward = module.vjp(*draw(seed, features=(0, 1, 2)))
            gradients.append(backward.row_gradients(gradient_like(output, seed)))
        total = clip_by_global_norm(combine(*gradients), 1.5)
        module.apply(total)
        found.append((module, {name: int(num) for name, num in total.num_touched().items()}))
    (one, touched), (many, touched_many) = found
    assert touched == touched_many
    assert_same_bits(one, many, **CLOSE)


def test_a_bound_on_unique_indices_cuts_no_gradient_of_a_mesh():
    one, many = make(SPECS), make(SPECS, mesh=mesh_of(4))
    ids, offsets = np.arange(24) % 8, np.arange(25)
    for module in (one, many):
        output, backward = module.vjp(ids, offsets, total_unique_indices=16)
        module.apply(backward.row_gradients(np.ones(output.shape, np.float32)))
    assert_same_bits(one, many, **CLOSE)


@pytest.mark.slow_rows("shared0")
@pytest.mark.parametrize(
    "shared",
    [
        {"mesh": (4,)},
        {"mesh": (2, 4), "sharding_axis": "x", "placement": "table", "pooling_mode": "MEAN"},
    ],
)
def test_gradients_of_weights_come_in_the_form_of_the_weights_and_are_those_of_autodiff(shared):
    one, many = (
        make(SPECS, pooling_mode=shared.get("pooling_mode", 0)),
        make(SPECS, **shared | {"mesh": mesh_of(*shared["mesh"])}),
    )
    ids, offsets, weights = draw(5, features=(0, 1, 2))
    gradient, mask = gradient_like(one(ids, offsets)), np.asarray([1, 0, 1])
    for module in (one, many):
        module.set_learning_rate(0.0)  # nothing moves
    expected = np.asarray(one.vjp(ids, offsets, weights, mask)[1](gradient))
    assert_allclose(many.vjp(ids, offsets, weights, mask)[1](gradient), expected, **CLOSE)

    batch, names = many.prepare(ids, offsets, weights), many.feature_names
    by_feature = many.vjp(batch, None, None, mask)[1](gradient)
    assert {name: own.shape for name, own in by_feature.items()} == {
        name: batch[name].ids.shape for name in names
    }
    assert_allclose(np.concatenate([by_feature[name] for name in names]), expected, **CLOSE)

    autodiff = jax.grad(lambda batch: jnp.vdot(many(batch), gradient), allow_int=True)(batch)
    lists = {}
    for stack, bags in batch.lists.items():
        lists[stack] = dataclasses.replace(bags, weights=autodiff.lists[stack].weights)
    d_weights = dataclasses.replace(batch, lists=lists)
    for name, is_asked in zip(names, mask, strict=True):
        assert_allclose(np.asarray(d_weights[name].weights) * is_asked, by_feature[name], **CLOSE)


# Compiled steps


def test_one_compiled_step_serves_batches_of_many_lengths_and_updates_tables_where_they_lie():
    one, many = (
        make(SPECS, optimizer=Optim.ADAM),
        make(SPECS, optimizer=Optim.ADAM, mesh=mesh_of(4)),
    )
    traces = []

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(module, batch):
        traces.append(1)
        output, backward = module.vjp(batch)
        backward(2 * output)
        return (output**2).sum()

    for seed in range(4):
        ids, offsets, weights = draw(seed, features=(0, 1, 2), seed_of_lengths=seed)
        expected, backward = one.vjp(ids, offsets, weights)
        backward(2 * expected)
        kept = many.state.get_value().weights
        assert_allclose(
            step(many, many.prepare(ids, offsets, weights)), (expected**2).sum(), rtol=1e-5
        )
        assert all(old.is_deleted() for old in kept)
    assert_same_bits(one, many, **CLOSE)
    assert len(traces) <= 2  # of bags of up to 4 ids, and of up to 2


# Whole tables


def test_rows_and_rates_are_set_and_states_read_as_on_one_device():
    one, many = (
        make(SPECS, optimizer=Optim.EXACT_ADAGRAD, **how) for how in ({}, {"mesh": mesh_of(4)})
    )
    for module in (one, many):
        train(module, *draw(0, features=(0, 1, 2)))
        module.set_embedding_weights("table_1", np.arange(120, dtype=np.float32).reshape(30, 4))
        module.set_learning_rate(0.5)
        module.set_optimizer_step(11)
        train(module, *draw(1, features=(0, 1, 2)))
    assert_same_bits(one, many, **CLOSE)
    assert int(many.step) == 12 and many.get_learning_rate() == 0.5
    assert many.state_bytes() == one.state_bytes()


# Batches without ids, and of other modules


def test_a_batch_without_bags_or_ids_changes_nothing():
    module, untouched = make(SPECS, mesh=mesh_of(4)), make(SPECS)
    for num_bags in (0, 8):
        output, _ = train(module, np.zeros(0, int), np.zeros(3 * num_bags + 1, int))
        assert output.shape == (num_bags, 16)
    assert_same_bits(module, untouched)


def test_prepared_batches_belong_to_where_they_were_prepared():
    one, many = make(SPECS), make(SPECS, mesh=mesh_of(4))
    batch = draw(0, features=(0, 1, 2))
    others = [(one, many), (many, one), (one, make(((50, 4), (30, 4), (41, 8))))]
    others += [
        (one, make(SPECS, pooling_mode="MEAN")),
        (many, make(SPECS, mesh=mesh_of(4), feature_names=list("xyz"))),
    ]
    others += [(many, make(((50, 4), (30, 4), (41, 8)), mesh=mesh_of(4)))]
    others += [(many, make(SPECS, mesh=mesh_of(4), bounds_check_mode="NONE"))]
    for module, other in others:
        prepared = other.prepare(*batch)
        for call in (module, nnx.jit(lambda batch, module=module: module(batch))):
            with pytest.raises(ValueError, match="prepared by a module with other tables"):
                call(prepared)
    with pytest.raises(ValueError, match=r"the tables are on a mesh: split the batch"):
        functional.lookup(many.plan, many.state.get_value(), one.prepare(*batch))


@pytest.mark.parametrize(
    ("mode", "weighted"), [("WARNING", True), ("IGNORE", False), ("NONE", True)]
)
def test_ids_outside_their_tables_are_corrected_and_counted_as_on_one_device(mode, weighted):
    ids, offsets = np.array([0, 1, -1, 3, 29, 2, 29, 0, 40, 40, 39, 3]), np.arange(13)
    weights = np.arange(1, 13, dtype=np.float32) if weighted else None
    compiled = nnx.jit(lambda module, batch: module(batch))
    one, many = (make(SPECS, bounds_check_mode=mode, mesh=mesh) for mesh in (None, mesh_of(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = one(ids, offsets, weights)
        found = compiled(many, many.prepare(ids, offsets, weights))
    assert_array_equal(found, expected)
    count = int(many.bounds_check_warning.get_value())
    assert count == int(one.bounds_check_warning.get_value()) == {"WARNING": 2}.get(mode, 0)
