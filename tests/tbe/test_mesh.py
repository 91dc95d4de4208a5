"""A module on a mesh gives the numbers of a module on one device."""

import dataclasses
import functools

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

SPECS = ((50, 4), (30, 4), (40, 8))
BAGS = 8
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def draw(seed, *, features=(0, 1, 2), seed_of_lengths=0):
    """Ids with duplicates and -1, offsets with empty bags, and weights.

    Batches with the same `seed_of_lengths` run the same compiled programs.
    """
    lengths = np.random.default_rng(seed_of_lengths).integers(0, 5, len(features) * BAGS)
    rng = np.random.default_rng(seed)
    num_rows = np.array([50, 30, 40])[np.repeat(features, BAGS)]
    ids = rng.integers(-1, np.repeat(num_rows, lengths))
    weights = rng.uniform(0.5, 2.0, ids.size).astype(np.float32)
    return ids, np.array([0, *np.cumsum(lengths)]), weights


def one_and_many(specs=SPECS, **options):
    """Two modules with the same tables, on one device and on a mesh of four."""
    return make(specs, **options), make(specs, mesh=mesh_of(4), **options)


# Comparison with one device, which test_random_configurations.py compares with loops


def rules(*names, **arguments):
    """Arguments with an optimizer for each table. One exchange and one program serve all tables."""
    return {"optimizer": list(names), "eps": 1e-3, **arguments}


ENSEMBLE = rt.EnsembleModeDefinition(step_ema=1, step_swap=2)
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
        "mesh": mesh_of(2, 4),
        "sharding_axis": "x",
        "placement": {"table_1": "table"},
    },
    "cowclip": variant("cowclip"),
    "counter": variant("counter_adagradw"),
    "ensemble": variant("ensemble") | {"ensemble_mode": ENSEMBLE},
    "emainplace": variant("emainplace")
    | {"emainplace_mode": rt.EmainplaceModeDefinition(step_ema=1)},
}


@pytest.mark.slow_rows(
    "counter",
    "emainplace",
    "column of halves",
    "ensemble",
    "copies along another axis",
    "replicated",
    "cowclip",
)
@pytest.mark.parametrize("name", SHARED)
def test_a_mesh_looks_up_and_trains_as_one_device_does(name):
    features = (0, 1, 2, 0)
    options = {"feature_table_map": features, "mesh": mesh_of(4), **SHARED[name]}
    many = make(SPECS, **options)
    for of_mesh in ("mesh", "sharding_axis", "placement"):
        options.pop(of_mesh, None)
    one = make(SPECS, **options)
    assert_same_bits(one, many)
    for seed in range(3):
        ids, offsets, weights = draw(seed, features=features)
        if seed > 0 and many.plan.pooling == "mean":
            weights = None
        expected, backward = one.vjp(ids, offsets, weights)
        output, backward_many = many.vjp(ids, offsets, weights)
        assert_allclose(output, expected, **CLOSE)
        gradient = gradient_like(expected, seed)
        d_weights = backward(gradient)
        d_weights_many = backward_many(gradient)
        if weights is None:
            assert d_weights is None and d_weights_many is None
        else:
            assert_allclose(d_weights_many, d_weights, rtol=2e-4, atol=2e-5)
    assert_same_bits(one, many, **CLOSE)
    assert int(many.step) == 3


def test_rows_are_rounded_by_the_noise_of_one_device():
    one, many = one_and_many(weights_precision="FP16", learning_rate=0.37)
    for seed in range(3):
        ids, offsets, _ = draw(seed)
        # Sums of these gradients are exact.
        gradient = np.random.default_rng(seed).integers(-8, 9, (BAGS, 16)).astype(np.float32) / 16
        train(one, ids, offsets, d_output=gradient)
        train(many, ids, offsets, d_output=gradient)
    assert_same_bits(one, many)


# Row gradients, gradients of weights


def test_row_gradients_are_clipped_added_and_applied_as_on_one_device():
    num_touched = []
    one, many = one_and_many(optimizer="EXACT_ADAGRAD")
    # The tables with 4 columns have 16 distinct rows together, as many as the bound allows.
    bounded = (np.arange(24) % 8, np.arange(25))
    for module in (one, many):
        output, backward = module.vjp(*draw(0))
        other, backward_other = module.vjp(*bounded, total_unique_indices=16)
        gradients = combine(
            backward.row_gradients(gradient_like(output)),
            backward_other.row_gradients(gradient_like(other, 1)),
        )
        total = clip_by_global_norm(gradients, 1.5)
        module.apply(total)
        num_touched.append(jax.tree.map(int, total.num_touched()))
    assert num_touched[0] == num_touched[1]
    assert_same_bits(one, many, **CLOSE)


def test_gradients_of_weights_come_in_the_form_of_the_weights_and_are_those_of_autodiff():
    # With learning rate 0, the tables do not change.
    options = {"pooling_mode": "MEAN", "learning_rate": 0.0}
    one = make(SPECS, **options)
    many = make(SPECS, mesh=mesh_of(2, 4), sharding_axis="x", placement="table", **options)
    flat = draw(5)
    gradient = gradient_like(one(*flat[:2]))
    mask = np.asarray([1, 0, 1])
    expected = np.asarray(one.vjp(*flat, mask)[1](gradient))
    assert_allclose(many.vjp(*flat, mask)[1](gradient), expected, **CLOSE)

    batch = many.prepare(*flat)
    by_feature = many.vjp(batch, None, None, mask)[1](gradient)
    assert list(by_feature) == list(many.feature_names)
    assert_allclose(np.concatenate(list(by_feature.values())), expected, **CLOSE)

    autodiff = jax.grad(lambda batch: jnp.vdot(many(batch), gradient), allow_int=True)(batch)
    lists = {}
    for stack, bags in batch.lists.items():
        lists[stack] = dataclasses.replace(bags, weights=autodiff.lists[stack].weights)
    d_batch = dataclasses.replace(batch, lists=lists)
    for name, is_asked in zip(many.feature_names, mask, strict=True):
        d_weights = np.asarray(d_batch[name].weights)
        assert d_weights.shape == by_feature[name].shape
        assert_allclose(d_weights * is_asked, by_feature[name], **CLOSE)


# Compiled steps


def test_one_compiled_step_serves_batches_of_many_lengths_and_updates_tables_where_they_lie():
    one, many = one_and_many(optimizer="ADAM")
    traces = []

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(module, batch):
        traces.append(1)
        output, backward = module.vjp(batch)
        backward(2 * output)
        return (output**2).sum()

    for seed in range(4):
        batch = draw(seed, seed_of_lengths=seed)
        expected, backward = one.vjp(*batch)
        backward(2 * expected)
        before = many.state.get_value().weights
        assert_allclose(step(many, many.prepare(*batch)), (expected**2).sum(), rtol=1e-5)
        assert all(old.is_deleted() for old in before.values())
    assert_same_bits(one, many, **CLOSE)
    # The four batches are padded to at most two sizes.
    assert len(traces) <= 2


# Whole tables


def test_rows_and_rates_are_set_and_states_read_as_on_one_device():
    one, many = one_and_many(optimizer="EXACT_ADAGRAD")
    for module in (one, many):
        train(module, *draw(0))
        module.set_embedding_weights("table_1", np.arange(120, dtype=np.float32).reshape(30, 4))
        module.set_learning_rate(0.5)
        module.set_optimizer_step(11)
        train(module, *draw(1))
    assert_same_bits(one, many, **CLOSE)
    assert int(many.step) == 12 and many.get_learning_rate() == 0.5
    assert many.state_bytes() == one.state_bytes()


# Batches without ids, and of other modules


def test_a_batch_without_bags_or_ids_changes_nothing():
    untouched = make(SPECS)
    for module in one_and_many():
        for num_bags in (0, 8):
            output, _ = train(module, np.zeros(0, int), np.zeros(3 * num_bags + 1, int))
            assert output.shape == (num_bags, 16)
        assert_same_bits(module, untouched)


def test_prepared_batches_belong_to_where_they_were_prepared():
    one, many = one_and_many()
    other_one, other_many = one_and_many(((50, 4), (30, 4), (41, 8)))
    pairs = [
        (one, many),
        (many, one),
        (one, other_one),
        (many, other_many),
        (one, make(SPECS, pooling_mode="MEAN")),
        (many, make(SPECS, mesh=mesh_of(4), feature_names=list("xyz"))),
        (many, make(SPECS, mesh=mesh_of(4), bounds_check_mode="NONE")),
    ]
    for module, other in pairs:
        batch = other.prepare(*draw(0))
        for call in (module, nnx.jit(lambda batch, module=module: module(batch))):
            with pytest.raises(ValueError, match="prepared by a module with other tables"):
                call(batch)
    with pytest.raises(ValueError, match=r"the tables are on a mesh: split the batch"):
        functional.lookup(many.plan, many.state.get_value(), one.prepare(*draw(0)))


@pytest.mark.filterwarnings("ignore:.*was corrected")
@pytest.mark.parametrize(
    ("mode", "weights", "count"),
    [("WARNING", np.arange(1, 13, dtype=np.float32), 2), ("IGNORE", None, 0), ("NONE", None, 0)],
)
def test_ids_outside_their_tables_are_corrected_and_counted_as_on_one_device(mode, weights, count):
    one, many = one_and_many(bounds_check_mode=mode)
    batch = np.array([0, 1, -1, 3, 29, 2, 29, 0, 40, 40, 39, 3]), np.arange(13), weights
    compiled = nnx.jit(lambda module, batch: module(batch))
    assert_array_equal(compiled(many, many.prepare(*batch)), one(*batch))
    assert int(many.bounds_check_warning) == int(one.bounds_check_warning) == count
