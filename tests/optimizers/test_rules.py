import dataclasses
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro


@pytest.mark.parametrize(
    ("optimizer", "unmoved"),
    [
        (ro.Adagrad(0.1, initial_accumulator_value=0.0), 1.0),
        (ro.TorchAdagrad(0.1, epsilon=0.0), 1.0),
        (ro.rules.AdagradMomentum(0.1, initial_accumulator_value=0.0, epsilon=0.0), 1.0),
        (ro.LaProp(0.1, b1=0.0, eps=0.0), 1.0),
        (ro.rules.F2A(0.1, initial_accumulator_value=0.0), 1.0),
        # FTRL computes rows from their linear term, which is 0 here.
        (ro.FTRL(0.1, initial_accumulator_value=0.0), 0.0),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_entries_without_history_and_gradient_stay_put(optimizer, unmoved):
    row = jnp.ones((1, 2))
    state = row, optimizer.init_slots(row), jnp.asarray([[0.0, 1.0]])
    stepped, _ = optimizer.step_rows(*state, optimizer.get_hyperparameters(0))
    assert_allclose(stepped, [[unmoved, 0.9]], rtol=1e-6)


def collection_of(optimizer, **fields):
    """A collection with one table of four rows and two columns."""
    table = rs.TableSpec("t", 4, 2, optimizer=optimizer, **fields)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table))


def test_schedule_reaches_the_update_through_the_state_step():
    schedule = ro.SGD(lambda step: 1.0 + step.astype(jnp.float32))
    collection = collection_of(schedule, initializer=jax.nn.initializers.zeros)
    state = collection.init(jax.random.key(0))
    batch = collection.prepare({"f": [[1]]})
    update = jax.jit(collection.update)
    for expected in (-1.0, -3.0, -6.0):
        state = update(state, batch, {"f": np.ones((1, 2), np.float32)})
        assert np.all(state.tables["t"][1] == expected)


def test_optax_state_is_kept_per_row_and_shown_in_its_own_type():
    collection = collection_of(ro.from_optax(optax.adam(0.1)))
    state = collection.init(jax.random.key(0))
    for ids in ([[1], [2]], [[1], [1]]):
        batch = collection.prepare({"f": ids})
        state = collection.update(state, batch, {"f": np.ones((2, 2), np.float32)})
    adam_state = collection.slots(state)["t"][0]
    assert isinstance(adam_state, optax.ScaleByAdamState)
    assert adam_state.count.tolist() == [0, 2, 1, 0]


def test_optax_state_made_from_parameters_starts_from_the_rows_themselves():
    tracking = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, p))
    state = collection_of(ro.from_optax(tracking)).init(jax.random.key(0))
    assert_array_equal(state.slots["t"][0], state.tables["t"])


REFUSED = ["dpsgd", "lbfgs", "lookahead", "momo", "momo_adam", "noisy_sgd", "polyak_sgd", "sophia"]
"""Optimizers of optax that cannot step rows. docs/optimizers.md gives the reasons."""
GIVEN = {
    "learning_rate": 0.1,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 1.0,
    "key": 0,
    "seed": 0,
    "base_optimizer": optax.sgd(0.1),
    "fast_optimizer": optax.sgd(0.1),
    "sync_period": 5,
    "slow_step_size": 0.5,
}


def optimizers_of_optax():
    """Yields the name of each optimizer that optax and optax.contrib export, and the optimizer."""
    for module in (optax, optax.contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            if not {"learning_rate", "max_learning_rate", "fast_optimizer"} & set(parameters):
                continue
            if name.startswith(("_", "scale_by_")):
                continue
            required = [
                parameter.name
                for parameter in parameters.values()
                if parameter.default is parameter.empty
            ]
            wanted = {"learning_rate", "key", *required} & set(parameters) & set(GIVEN)
            yield name, function(**{parameter: GIVEN[parameter] for parameter in wanted})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_optimizer_of_optax_is_a_row_rule_or_refused_by_its_name():
    refused = []
    num_taken = 0
    for name, transformation in optimizers_of_optax():
        try:
            ro.from_optax(transformation)
        except TypeError as error:
            assert str(error).startswith("from_optax: ")
            refused.append(name)
        else:
            num_taken += 1
    assert sorted(refused) == REFUSED
    assert num_taken >= 40
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    assert [name for name in REFUSED if f"`{name}`" not in page] == []


def test_specs_compare_by_class_and_value_and_print_short():
    assert ro.SGD(0.1) == ro.SGD(0.1)
    assert hash(ro.SGD(0.1)) == hash(ro.SGD(0.1))
    assert ro.Adagrad(0.1) != ro.SGD(0.1)

    @dataclasses.dataclass(frozen=True)
    class Own(ro.Adam):
        pass

    assert repr(ro.Adam(0.1)) == "Adam()"
    assert repr(Own(0.1)) == "Own()"
    assert "beta_1=0.9" in str(ro.Adam(0.1))
    assert ro.SGD(jnp.asarray(0.5)).learning_rate == 0.5
    assert isinstance(ro.Adam().pack_slots((1, 2)), ro.rules.AdamSlotVariables)


@pytest.mark.parametrize(
    "rule",
    [
        ro.AdamW(has_row_wise_second_moment=True),
        ro.AdamW(has_row_wise_bias_correction=True),
        ro.LAMB(),
        ro.LARS(),
        ro.regularized.DecayedAdagrad(is_per_row=False, max_norm=1.0),
        ro.regularized.CounterAdagrad(),
    ],
)
def test_a_rule_that_reads_whole_rows_is_row_wise(rule):
    assert rule.is_row_wise


@pytest.mark.parametrize(
    "rule", [ro.AdamW(), ro.regularized.DecayedAdagrad(is_per_row=False), ro.LazyAdam()]
)
def test_padding_columns_leave_the_numbers_of_any_other_rule_alone(rule):
    assert not rule.is_row_wise
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    padded = jnp.pad(rows, ((0, 0), (0, 4)))
    stepped = []
    for own_rows in (rows, padded):
        state = own_rows, rule.init_slots(own_rows), 2.0 * own_rows
        new, _ = jax.jit(rule.step_rows)(*state, rule.get_hyperparameters(0))
        stepped.append(new[:, :4])
    assert_allclose(*stepped, rtol=1e-6, atol=1e-8)


def test_slots_that_are_stored_in_16_bits_stay_so_whoever_steps_them():
    rule = ro.LAMB(0.1, slot_dtypes=("bfloat16", "float16"), has_row_wise_second_moment=True)
    rows = jnp.ones((3, 4))
    state = rows, rule.init_slots(rows), 2.0 * rows
    _, (m, v) = rule.step_rows(*state, rule.get_hyperparameters(0))
    assert (m.dtype, v.dtype) == (jnp.bfloat16, jnp.float16)
    assert (m.shape, v.shape) == ((3, 4), (3, 1))
    assert_allclose(m.astype(jnp.float32), 0.2, rtol=2**-8)
    assert_allclose(v.astype(jnp.float32), 0.004, rtol=2**-9)
