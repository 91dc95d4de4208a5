"""Numbers that have no meaning are refused where they are given, by name; those at the edge of meaning are not."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.intervals import check_within, within
from rsembed.sparsecore.utils import estimate_preprocessing_parameters
from rsembed.tbe import records
from rsembed.tbe.module import TableBatchedEmbeddingBags
from rsembed.tbe.records import EmbOptimType, WeightDecayMode

NAN, INF = math.nan, math.inf
RATES, POSITIVE_OR_ZERO = (-0.1, NAN, INF), (-1e-3, NAN, INF)
DECAYS = (-0.1, 1.0, 1.1, NAN)
FAMILIES = tuple(getattr(ro, name) for name in dir(ro) if name.endswith("OptimizerSpec") and name != "OptimizerSpec")
ADAMS = (rs.AdamOptimizerSpec, ro.TensorFlowAdamOptimizerSpec, ro.LazyAdamOptimizerSpec)
ADAMS += (rs.AdamWOptimizerSpec, rs.LAMBOptimizerSpec)
FREE = (rs.CustomOptimizerSpec, ro.OptaxOptimizerSpec)  # need a function or a transformation

REFUSED = [
    *((family, "learning_rate", value) for family in FAMILIES if family not in FREE for value in RATES),
    *((family, name, value) for family in ADAMS for name in ("beta_1", "beta_2") for value in DECAYS),
    *((rs.LaPropOptimizerSpec, name, value) for name in ("b1", "b2") for value in DECAYS),
    *((rs.AdagradMomentumOptimizerSpec, name, value) for name in ("momentum", "beta2") for value in (-0.1, 1.1, NAN)),
    *((rs.AdagradMomentumOptimizerSpec, "exponent", value) for value in (0.0, -2.0, NAN)),
    *((rs.FTRLOptimizerSpec, "learning_rate_power", value) for value in (0.5, NAN)),
    (rs.FTRLOptimizerSpec, "learning_rate", 0.0),  # is divided by
    *((rs.F2AOptimizerSpec, "max_lr_multiplier", value) for value in (0.0, -1.0, NAN)),
    *((rs.F2AOptimizerSpec, "rho", value) for value in POSITIVE_OR_ZERO),
    *(
        (family, field.name, value)
        for family in FAMILIES
        for field in dataclasses.fields(family)
        if field.name.startswith(("initial_acc", "initial_slot", "initial_local", "eps", "l1_", "l2_", "weight_decay"))
        and field.name != "weight_decay_mode"
        for value in POSITIVE_OR_ZERO
    ),
]


@pytest.mark.parametrize(("family", "field", "value"), REFUSED)
def test_rules_refuse_numbers_without_meaning(family, field, value):
    interval = r"[\[(].*, .*[\])]"
    with pytest.raises(
        ValueError, match=rf"{family.__name__}: {field} must be in {interval}, got {re.escape(str(value))}"[:-1]
    ):
        family(**{field: value})


def test_every_number_of_every_rule_declares_its_interval():
    for family in FAMILIES:
        for field in dataclasses.fields(family):
            if "float" in str(field.type) or "LearningRate" in str(field.type):
                assert "interval" in field.metadata or field.name == "rms_clip_threshold", (family, field.name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [family() for family in FAMILIES if family not in FREE],
        lambda: [family(learning_rate=0) for family in FAMILIES if family not in (*FREE, rs.FTRLOptimizerSpec)],
        lambda: rs.FTRLOptimizerSpec(learning_rate=0.0, multiply_linear_by_learning_rate=True),
        lambda: rs.SGDOptimizerSpec(learning_rate=lambda step: -1.0),  # a function is known only later
        lambda: rs.SGDOptimizerSpec(np.float32(0.1)),
        lambda: rs.SGDOptimizerSpec(jnp.float32(0.1)),
        lambda: rs.AdagradOptimizerSpec(initial_accumulator_value=0.0),
        lambda: rs.AdamOptimizerSpec(beta_1=0.0, epsilon=0.0),
        lambda: rs.AdagradMomentumOptimizerSpec(momentum=1.0, beta2=1.0),
        lambda: rs.F2AOptimizerSpec(max_lr_multiplier=INF),
        lambda: rs.from_optax(optax.scale_by_adam(), learning_rate=-0.1),  # its updates point uphill
        lambda: jax.jit(lambda g, norm: rs.clip_by_global_norm(g, norm))(one_gradient(), 1.0),
    ],
)
def test_published_uses_and_the_edges_of_meaning_still_run(make):
    make()


def test_a_rule_refuses_what_is_no_number():
    with pytest.raises(TypeError, match=r"AdamOptimizerSpec: beta_1 must be a number in \[0, 1\), got str"):
        rs.AdamOptimizerSpec(beta_1="0.9")
    with pytest.raises(ValueError, match=r"OptaxOptimizerSpec: learning_rate must be in \(-inf, inf\), got nan"):
        rs.from_optax(optax.sgd(0.1), learning_rate=NAN)


def one_gradient():
    return rs.RowGradients({"t": jnp.asarray([1])}, {"t": jnp.ones((1, 2))}, (("t", 3),))


def tables(**options):
    specs = [(6, 4, records.EmbeddingLocation.MANAGED_CACHING, records.ComputeDevice.CPU)]
    return TableBatchedEmbeddingBags(specs, **{"optimizer": EmbOptimType.EXACT_SGD, **options})


LARS, RMSPROP = EmbOptimType.LARS_SGD, EmbOptimType.ROWWISE_RMSPROP_AR
DECAYED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.L2}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("clip_by_global_norm: max_norm", lambda: rs.clip_by_global_norm(one_gradient(), -1.0)),
        ("clip_by_global_norm: max_norm", lambda: rs.clip_by_global_norm(one_gradient(), NAN)),
        ("max_gradient", lambda: tables(gradient_clipping=True, max_gradient=-1.0)),
        ("max_gradient", lambda: tables(gradient_clipping=True, max_gradient=NAN)),
        ("cache_load_factor", lambda: tables(cache_load_factor=1.5)),
        ("cache_sets", lambda: tables(cache_sets=-1)),
        ("cache_reserved_memory", lambda: tables(cache_reserved_memory=NAN)),
        ("learning_rate", lambda: tables(learning_rate=-0.1)),
        ("learning_rate", lambda: tables().set_learning_rate(NAN)),
        ("set_optimizer_step: step", lambda: tables().set_optimizer_step(-1)),
        ("max_norm", lambda: tables(**DECAYED, max_norm=-1.0)),
        ("weight_decay", lambda: tables(**DECAYED, weight_decay=-0.1)),
        ("momentum", lambda: tables(optimizer=LARS, momentum=1.1)),
        ("eta", lambda: tables(optimizer=LARS, eta=NAN)),
        ("ema_beta", lambda: tables(optimizer=RMSPROP, ema_beta=1.5)),
        ("min_shrinkage", lambda: tables(optimizer=RMSPROP, min_shrinkage=2.0)),
        ("init_embedding_weights_uniform: min_val", lambda: tables().init_embedding_weights_uniform(0.1, -0.1)),
        ("init_embedding_weights_uniform: max_val", lambda: tables().init_embedding_weights_uniform(0.1, NAN)),
        ("EnsembleModeDefinition: step_ema_coef", lambda: records.EnsembleModeDefinition(step_ema_coef=1.2)),
        ("CowClipDefinition: lower_bound", lambda: records.CowClipDefinition(lower_bound=-1.0)),
        ("GlobalWeightDecayDefinition: lower_bound", lambda: records.GlobalWeightDecayDefinition(lower_bound=NAN)),
        (
            "estimate_preprocessing_parameters: hot_shard_fraction",
            lambda: estimate_preprocessing_parameters(
                global_batch_size=8, global_device_count=1, num_sc_per_device=4, valency=1.0, hot_shard_fraction=1.5
            ),
        ),
    ],
)
def test_calls_refuse_numbers_without_meaning(name, call):
    with pytest.raises(ValueError, match=rf"{name} must be in [\[(].*, .*[\])], got "):
        call()


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", (0, 0.999), (-1e-9, 1, NAN)),
        ("(0, inf]", (1e-30, INF), (0, -1, NAN)),
        ("(-inf, inf)", (-1e30, 0), (INF, -INF, NAN)),
    ],
)
def test_an_interval_means_what_it_means_in_a_textbook(interval, inside, outside):
    record = dataclasses.make_dataclass("Record", [("number", float, within(interval, default=inside[0]))])
    assert record().number == inside[0]
    for value in inside:
        check_within(interval, value, "number")
    for value in outside:
        with pytest.raises(ValueError, match="number must be in"):
            check_within(interval, value, "number")
    with pytest.raises(TypeError, match="got bool"):
        check_within(interval, True, "number")
