"""What annotations and intervals admit, how errors name what they do not, and that public numbers have an interval."""

import ast
import dataclasses
import enum
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jaxtyping import Float, Int, PRNGKeyArray
from numpy.testing import assert_array_equal

import rsembed as rs
import rsembed.optimizers as ro
from rsembed import checkpoint, sok
from rsembed.checks import (
    PositiveInt,
    check_finite,
    check_type,
    check_within,
    did_you_mean,
    dtype_among,
    validated,
    within,
)

NAN, INF = math.nan, math.inf


class Colour(enum.Enum):
    RED = "red"


Point = tuple[int, Colour]
Share = Float[np.ndarray, "a"]

ADMITTED = [
    (np.int8(3), int),
    (jnp.int32(3), int),
    (3, float),
    (jnp.float32(3), float),
    (np.bool_(True), bool),
    (None, int | None),
    ([1, 2], tuple[int, ...]),
    (np.ones(2), Sequence[float]),
    ((3, Colour.RED), Point),
    ({"a": [1]}, Mapping[str, Sequence[int]]),
    (np.ones((2, 2), int), Float[np.ndarray, "a b"]),
    ([[1.0, 2.0]], Float[np.ndarray, "a b"]),
    ([], Int[np.ndarray, "a"]),
    (jnp.ones(2, jnp.bfloat16), Float[np.ndarray, "a"]),
    (jax.random.key(0), PRNGKeyArray),
    (jax.random.PRNGKey(0), PRNGKeyArray),
    (len, Callable[..., int]),
    (np.str_("row"), Literal["row", "table"]),
    ("anything", Any),
    ([0] * 2000, Sequence[str]),
]

REFUSED = [
    (3.0, int, "x must be an integer, got 3.0 (float)."),
    (True, float, "x must be a number, got True (bool)."),
    (1, bool, "x must be True or False, got 1 (int)."),
    ("ab", Sequence[str], "x must be a list (each a text), got 'ab' (str)."),
    (["a", 1], Sequence[str], "x[1] must be a text, got 1 (int)."),
    ({"a": 1}, str | Mapping[str, str], "x['a'] must be a text, got 1 (int)."),
    (
        [(3, "red")],
        Sequence[Point],
        "x[0][1] must be a member of Colour, such as Colour.RED, got 'red' (str).",
    ),
    (
        (3,),
        Point,
        "x must be (an integer, a member of Colour, such as Colour.RED), got (3,) (tuple).",
    ),
    (
        np.ones(2),
        Int[np.ndarray, "a"],
        "x must be an array of integers [a], got an array of float64",
    ),
    (
        np.ones(2) * 1j,
        Float[np.ndarray, "a"],
        "x must be an array of numbers [a], got an array of complex128",
    ),
    (
        [[1], [1, 2]],
        Float[np.ndarray, "a b"],
        "x must be an array of numbers [a, b], got [[1], [1, 2]] (list).",
    ),
    (0, PRNGKeyArray, "x must be a PRNG key, such as jax.random.key(0), got 0 (int)."),
    (object(), int | None, "x must be an integer or None, got a value of type object."),
    (["row"], int | Literal["row"], "x must be an integer or 'row', got ['row'] (list)."),
]


@pytest.mark.parametrize(("value", "hint"), ADMITTED)
def test_what_means_the_same_is_admitted(value, hint):
    check_type(value, hint, "x")


@pytest.mark.parametrize(("value", "hint", "message"), REFUSED)
def test_what_does_not_fit_is_named_with_its_place(value, hint, message):
    with pytest.raises(TypeError) as refusal:
        check_type(value, hint, "x")
    assert str(refusal.value).startswith(message)


@validated
def planned(
    first: int | Literal["row", "table"],
    *,
    others: PositiveInt | None = None,
    name="plan",
    share: Share = (),
):
    return first


def test_an_error_names_the_function_what_it_makes_and_the_argument():
    assert planned(np.int64(1), others=2, name="x") == 1
    with pytest.raises(
        ValueError,
        match=r"^planned: first must be an integer or 'row' or 'table', got 'rows' \(str\)",
    ):
        planned("rows")
    with pytest.raises(ValueError, match=r"^planned: others must be in \[1, inf\), got 0"):
        planned(1, others=0)
    with pytest.raises(
        ValueError, match=r"^planned 'x': share must be an array of numbers \[a\], got an array of"
    ):
        planned(1, name="x", share=np.ones((2, 2)))


@dataclasses.dataclass
@validated
class Settings:
    rate: float = within("[0, 1]", default=0.5)
    colour: Colour = Colour.RED


def test_fields_are_held_to_their_annotations():
    assert Settings(rate=1).rate == 1
    with pytest.raises(ValueError, match="Settings: rate must be in"):
        Settings(rate=2.0)
    with pytest.raises(TypeError, match="Settings: colour must be a member of Colour"):
        Settings(colour="red")


ROOT = Path(rs.__file__).parent


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", (0, 0.999), (-1e-9, 1, NAN)),
        ("(0, inf]", (1e-30, INF), (0, -1, NAN)),
        ("(-inf, inf)", (-1e30, 0), (INF, -INF, NAN)),
    ],
)
def test_an_interval_means_what_it_means_in_a_textbook(interval, inside, outside):
    for value in inside:
        check_within(interval, value, "number")
    for value in outside:
        with pytest.raises(ValueError, match="number must be in"):
            check_within(interval, value, "number")


def test_names_and_dtypes_near_by_are_offered():
    assert did_you_mean("titel", ["author", "title"]) == " (did you mean 'title'?)"
    assert did_you_mean(0, ["author"]) == ""
    assert dtype_among(("float32", "bfloat16"), jnp.bfloat16, "dtype") == "bfloat16"
    with pytest.raises(ValueError, match=r"^dtype 'flaot32' is not one of float32, bfloat16"):
        dtype_among(("float32", "bfloat16"), "flaot32", "dtype")


CLASSES = [own for module in (ro.base, ro.rules, ro.regularized) for own in vars(module).values()]
RULES = {
    own
    for own in CLASSES
    if hasattr(own, "step_rows") and not inspect.isabstract(own) and own.__name__[0] != "_"
}
FREE = (rs.optimizers.Custom, ro.base.OptaxOptimizerSpec)  # need a function or a transformation
OUTSIDE = {  # a number just outside, by the beginning of the field's name; NaN is outside of all
    **dict.fromkeys(
        (
            "learning_rate",
            "initial_acc",
            "initial_slot",
            "initial_local",
            "eps",
            "l1_",
            "l2_",
            "rho",
        ),
        -1e-3,
    ),
    **dict.fromkeys(("weight_decay", "max_norm", "max_counter", "eta", "ar_alpha", "beta"), -1e-3),
    **dict.fromkeys(("exponent", "max_lr_multiplier"), 0.0),
    **dict.fromkeys(("b1", "b2", "beta_1", "beta_2"), 1.0),
    **dict.fromkeys(("beta2", "momentum", "ema_beta", "min_shrinkage"), 1.1),
    **{"learning_rate_power": 0.5, "initial_linear": INF, "initial_momentum": INF},
}


@pytest.mark.parametrize("rule", sorted(RULES - {*FREE}, key=lambda rule: rule.__name__))
def test_rules_refuse_numbers_without_meaning(rule):
    for field in dataclasses.fields(rule):
        if "float" in str(field.type) or "LearningRate" in str(field.type):
            if field.name == "rms_clip_threshold":  # any number has a meaning
                continue
            outside = OUTSIDE[
                max((start for start in OUTSIDE if field.name.startswith(start)), key=len)
            ]
            for value in (outside, NAN):
                with pytest.raises(
                    ValueError, match=rf"{rule.__name__}: {field.name} must be in .*, got {value}"
                ):
                    rule(**{field.name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: [
            rule(learning_rate=0) for rule in RULES if rule not in (*FREE, rs.optimizers.FTRL)
        ],
        lambda: rs.optimizers.FTRL(learning_rate=0.0, multiply_linear_by_learning_rate=True),
        lambda: rs.optimizers.SGD(lambda step: -1.0),  # a function is known only later
        lambda: rs.optimizers.SGD(jnp.float32(0.1)),
        lambda: rs.optimizers.Adagrad(initial_accumulator_value=0.0),
        lambda: rs.optimizers.Adam(beta_1=0.0, beta_2=0.0),
        lambda: rs.optimizers.rules.AdagradMomentum(momentum=1.0, beta2=1.0),
        lambda: rs.optimizers.rules.F2A(max_lr_multiplier=INF),
        lambda: rs.from_optax(
            optax.scale_by_adam(), learning_rate=-0.1
        ),  # its updates point uphill
        lambda: jax.jit(lambda g, norm: rs.clip_by_global_norm(g, norm))(one_gradient(), 1.0),
    ],
)
def test_the_edges_of_meaning_still_run(make):
    make()


def one_gradient():
    return rs.RowGradients({"t": jnp.asarray([1])}, {"t": jnp.ones((1, 2))}, (("t", 3),))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_the_first_number_that_is_not_finite_is_named_by_its_row(make, dtype):
    """Against a loop over all rows, in arrays of many blocks and of one number."""
    generator = np.random.default_rng(0)
    for shape in ((), (3,), (70_000, 40), (5, 0, 2)):
        clean = make(np.ones(shape), dtype)
        check_finite(clean, "x", may_be_negative=False)
        if 0 in shape:
            continue
        for number, may_be_negative in ((-1.0, False), (NAN, True), (-INF, True)):
            if dtype == np.int32 and not math.isfinite(number):
                continue
            rows = sorted(generator.integers(0, shape[0] if shape else 1, 2))
            spoilt = np.array(clean)
            spoilt.reshape(shape[0] if shape else 1, -1)[rows, -1] = number
            with pytest.raises(
                ValueError,
                match=rf"x: {number} in row {rows[0]} is (not finite|negative); give it up",
            ):
                check_finite(
                    make(spoilt, dtype), "x", may_be_negative=may_be_negative, way_out="give it up"
                )
    jax.jit(lambda values: check_finite(values, "x"))(np.float32(NAN))  # known later


def spoilt_rows():
    values = np.ones((6, 4), np.float32)
    values[2, 1], values[4, 3] = NAN, -INF
    return values


def test_numbers_that_are_not_finite_are_taken_where_the_caller_allows_it():
    values, table = spoilt_rows(), rs.TableSpec("t", 6, 4, optimizer=ro.Adagrad(0.1))
    collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
    state = collection.with_tables(
        collection.init(jax.random.key(0)), {"t": values}, allow_nonfinite=True
    )
    assert_array_equal(collection.tables(state)["t"], values)
    traced = jax.jit(
        lambda rows: collection.tables(collection.with_tables(state, {"t": rows}))["t"]
    )
    assert_array_equal(traced(values), values)
    _, served = rs.for_serving(collection, state, dtype="float16", allow_nonfinite=True)
    assert_array_equal(served["t"]["rows"], values.astype(np.float16))
    keyed = rs.EmbeddingCollection(
        [rs.FeatureSpec("f", dataclasses.replace(table, storage=rs.Hashed()))]
    )
    rows = {"keys": np.arange(6), "values": values, "slot_accumulator": -values}
    written = keyed.with_tables(keyed.init(jax.random.key(0)), {"t": rows}, allow_nonfinite=True)
    found = keyed.tables(written)["t"]
    assert_array_equal(found["values"], values)
    assert_array_equal(found["slot_accumulator"], -values)
    tables = [(6, 4, rs.tbe.EmbeddingLocation.HOST, rs.tbe.ComputeDevice.CPU)]
    module = rs.tbe.TableBatchedEmbeddingBags(tables, optimizer=rs.tbe.OptimType.EXACT_ADAGRAD)
    module.set_embedding_weights(0, values, allow_nonfinite=True)
    twin = rs.tbe.TableBatchedEmbeddingBags(tables, optimizer=rs.tbe.OptimType.EXACT_ADAGRAD)
    with pytest.raises(ValueError, match="nan in row 2 is not finite"):
        twin.load_state_dict(module.state_dict())
    twin.load_state_dict(module.state_dict(), allow_nonfinite=True)
    assert_array_equal(twin.split_embedding_weights()[0], values)


def test_a_file_of_ours_gives_back_what_was_saved_finite_or_not(tmp_path):
    values = spoilt_rows()
    for name, storage in {
        "dense": None,
        "keyed": rs.Hashed(),
        "near": rs.HostCached(cache_rows=4),
    }.items():
        table = rs.TableSpec("t", 6, 4, optimizer=ro.Adagrad(0.1), storage=storage)
        collection = rs.EmbeddingCollection([rs.FeatureSpec("f", table)])
        state = collection.with_tables(
            collection.init(jax.random.key(0)), {"t": values}, allow_nonfinite=True
        )
        checkpoint.save_collection(tmp_path / name, collection, state)
        found = collection.tables(checkpoint.load_collection(tmp_path / name, collection))["t"]
        assert_array_equal(found["values"] if name == "keyed" else found, values)
    devices = sok.Init(mesh=Mesh(np.asarray(jax.devices()[:1]), ("shard",)))
    variable, other = (
        sok.embedding_variable("t", 4, rows_per_device=8, context=devices) for _ in range(2)
    )
    rows = {"keys": np.arange(6), "values": values}
    with pytest.raises(ValueError, match="its values: nan in row 2 is not finite"):
        sok.assign_rows(variable, rows)
    sok.assign_rows(variable, rows, allow_nonfinite=True)
    sok.dump(tmp_path / "dump", [variable])
    sok.load(tmp_path / "dump", [other])
    assert_array_equal(sok.export_rows(other)["values"], values)


def test_every_rule_names_slots_that_it_has_and_never_makes_these_negative():
    generator = np.random.default_rng(0)
    named = 0
    for rule in (own(learning_rate=0.1) for own in RULES - {*FREE}):
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
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    tree = ast.parse(path.read_text())
    classes = [
        (getattr(module, node.name), node) for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    for owner, scope in [(module, tree), *classes]:
        for node in scope.body:
            if any(
                ast.unparse(decorator) == "validated"
                for decorator in getattr(node, "decorator_list", ())
            ):
                assert get_type_hints(
                    inspect.unwrap(getattr(owner, node.name)), include_extras=True
                )
