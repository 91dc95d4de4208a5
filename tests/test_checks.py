"""Tests of checks: numbers outside an interval, numbers that are not finite, and annotations.

`bad_calls/checks.py` tests what annotations and intervals accept, and the messages of the errors.
"""

import dataclasses
import importlib
import inspect
import math
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro
from rsembed import checkpoint, sok
from rsembed.checks import check_finite
from tests.world import made_mesh

NAN, INF = math.nan, math.inf
ROOT = Path(rs.__file__).parent

CLASSES = [
    value for module in (ro.base, ro.rules, ro.regularized) for value in vars(module).values()
]
RULES = {
    value
    for value in CLASSES
    if hasattr(value, "step_rows") and not inspect.isabstract(value) and value.__name__[0] != "_"
}
# Rules that cannot be made from a learning rate alone.
FREE = (rs.optimizers.Custom, ro.base.OptaxOptimizerSpec)
# A number outside the interval of a field, by the start of the field's name. For all other fields,
# -1e-3 is outside the interval.
OUTSIDE = {
    "exponent": 0.0,
    "max_lr_multiplier": 0.0,
    "b1": 1.0,
    "b2": 1.0,
    "beta_1": 1.0,
    "beta_2": 1.0,
    "beta2": 1.1,
    "momentum": 1.1,
    "ema_beta": 1.1,
    "min_shrinkage": 1.1,
    "learning_rate_power": 0.5,
    "initial_linear": INF,
    "initial_momentum": INF,
}


@pytest.mark.parametrize("rule", sorted(RULES - {*FREE}, key=lambda rule: rule.__name__))
def test_rules_refuse_numbers_without_meaning(rule):
    # FTRL divides by the learning rate.
    if rule is not rs.optimizers.FTRL:
        rule(learning_rate=0)
    for field in dataclasses.fields(rule):
        if "float" not in str(field.type) and "LearningRate" not in str(field.type):
            continue
        # LaProp refuses every number in this field, with another message.
        if field.name == "rms_clip_threshold":
            continue
        beginnings = [start for start in OUTSIDE if field.name.startswith(start)]
        outside = OUTSIDE[beginnings[-1]] if beginnings else -1e-3
        for value in (outside, NAN):
            with pytest.raises(
                ValueError, match=rf"{rule.__name__}: {field.name} must be in .*, got {value}"
            ):
                rule(**{field.name: value})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_the_first_number_that_is_not_finite_is_named_by_its_row(make, dtype):
    """Checks small arrays, which are one block, and large arrays, which are many blocks."""
    generator = np.random.default_rng(0)
    for shape in ((3,), (70_000, 40)):
        clean = make(np.ones(shape), dtype)
        check_finite(clean, "x", may_be_negative=False)
        for number, may_be_negative in ((-1.0, False), (NAN, True), (-INF, True)):
            if dtype == np.int32 and not math.isfinite(number):
                continue
            rows = sorted(generator.integers(0, len(clean), 2))
            spoilt = np.array(clean)
            spoilt.reshape(len(clean), -1)[rows, -1] = number
            with pytest.raises(
                ValueError, match=rf"x: {number} in row {rows[0]} is (not|negative)"
            ):
                check_finite(make(spoilt, dtype), "x", may_be_negative=may_be_negative)
    # Inside `jit`, values are traced, so they are not checked.
    jax.jit(lambda values: check_finite(values, "x"))(np.float32(NAN))


def spoilt_rows():
    values = np.ones((6, 4), np.float32)
    values[2, 1], values[4, 3] = NAN, -INF
    return values


def collection_of(storage=None):
    table = rs.TableSpec("t", 6, 4, optimizer=ro.Adagrad(0.1), storage=storage)
    return rs.EmbeddingCollection([rs.FeatureSpec("f", table)])


def test_numbers_that_are_not_finite_are_taken_where_the_caller_allows_it():
    values, collection = spoilt_rows(), collection_of()
    before = collection.init(jax.random.key(0))
    state = collection.with_tables(before, {"t": values}, allow_nonfinite=True)
    assert_array_equal(collection.tables(state)["t"], values)
    traced = jax.jit(collection.with_tables)(before, {"t": values})
    assert_array_equal(collection.tables(traced)["t"], values)
    _, served = rs.for_serving(collection, state, dtype="float16", allow_nonfinite=True)
    assert_array_equal(served["t"]["rows"], values.astype(np.float16))
    keyed = collection_of(rs.Hashed())
    rows = {"keys": np.arange(6), "values": values, "slot_accumulator": -values}
    written = keyed.with_tables(keyed.init(jax.random.key(0)), {"t": rows}, allow_nonfinite=True)
    rows_read = keyed.tables(written)["t"]
    assert_array_equal(rows_read["values"], values)
    assert_array_equal(rows_read["slot_accumulator"], -values)
    tables = [(6, 4, rs.tbe.EmbeddingLocation.HOST, rs.tbe.ComputeDevice.CPU)]
    module = rs.tbe.TableBatchedEmbeddingBags(tables, optimizer=rs.tbe.OptimType.EXACT_ADAGRAD)
    module.set_embedding_weights(0, values, allow_nonfinite=True)
    saved = module.state_dict()
    module.set_embedding_weights(0, np.zeros_like(values))
    with pytest.raises(ValueError, match="nan in row 2 is not finite"):
        module.load_state_dict(saved)
    module.load_state_dict(saved, allow_nonfinite=True)
    assert_array_equal(module.split_embedding_weights()[0], values)


@pytest.mark.parametrize(
    "storage", [None, rs.Hashed(), rs.HostCached(cache_rows=4)], ids=["dense", "keyed", "near"]
)
def test_a_file_of_ours_gives_back_what_was_saved_finite_or_not(tmp_path, storage):
    values, collection = spoilt_rows(), collection_of(storage)
    state = collection.init(jax.random.key(0))
    state = collection.with_tables(state, {"t": values}, allow_nonfinite=True)
    checkpoint.save_collection(tmp_path / "saved", collection, state)
    loaded = collection.tables(checkpoint.load_collection(tmp_path / "saved", collection))["t"]
    assert_array_equal(loaded["values"] if isinstance(loaded, dict) else loaded, values)


def test_a_dump_gives_back_what_was_assigned_finite_or_not(tmp_path):
    context = sok.Init(mesh=made_mesh(1))
    variable, other = (
        sok.embedding_variable("t", 4, rows_per_device=8, context=context) for _ in range(2)
    )
    rows = {"keys": np.arange(6), "values": spoilt_rows()}
    sok.assign_rows(variable, rows, allow_nonfinite=True)
    sok.dump(tmp_path / "dump", [variable])
    sok.load(tmp_path / "dump", [other])
    assert_array_equal(sok.export_rows(other)["values"], rows["values"])


def test_every_rule_names_slots_that_it_has_and_never_makes_these_negative():
    generator = np.random.default_rng(0)
    named = 0
    for rule in (rule_class(learning_rate=0.1) for rule_class in RULES - {*FREE}):
        fields = getattr(rule.slot_type, "_fields", ())
        assert set(rule.non_negative_slots) - {"row_counter", "prev_iter"} <= set(fields)
        rows = jnp.asarray(generator.normal(size=(5, 4)), jnp.float32)
        slots = rule.init_slots(rows)
        for step in range(3):
            gradients = jnp.asarray(generator.normal(size=(5, 4)), jnp.float32)
            rows, slots = rule.step_rows(rows, slots, gradients, rule.get_hyperparameters(step))
        for name, slot in zip(fields, slots, strict=False):
            if name in rule.non_negative_slots:
                assert np.asarray(slot).min() >= 0, (rule, name)
                named += 1
    assert named > 10


@pytest.mark.parametrize(
    "path", [path for path in sorted(ROOT.rglob("*.py")) if "@validated" in path.read_text()]
)
def test_every_annotation_of_a_validated_function_can_be_read(path):
    """Reads all annotations of a module. Arguments with unreadable annotations are not checked."""
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    values = [value for value in vars(module).values() if inspect.getmodule(value) is module]
    for kind in filter(inspect.isclass, tuple(values)):
        values += [getattr(member, "__func__", member) for member in vars(kind).values()]
    for value in values:
        if inspect.isfunction(value) or inspect.isclass(value):
            get_type_hints(inspect.unwrap(value), include_extras=True)
