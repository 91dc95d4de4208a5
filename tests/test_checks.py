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
from jaxtyping import Float, Int, PRNGKeyArray

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.checks import PositiveInt, check_type, check_within, did_you_mean, dtype_among, validated, within

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
    ([(3, "red")], Sequence[Point], "x[0][1] must be a member of Colour, such as Colour.RED, got 'red' (str)."),
    ((3,), Point, "x must be (an integer, a member of Colour, such as Colour.RED), got (3,) (tuple)."),
    (np.ones(2), Int[np.ndarray, "a"], "x must be an array of integers [a], got an array of float64"),
    (np.ones(2) * 1j, Float[np.ndarray, "a"], "x must be an array of numbers [a], got an array of complex128"),
    ([[1], [1, 2]], Float[np.ndarray, "a b"], "x must be an array of numbers [a, b], got [[1], [1, 2]] (list)."),
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
def planned(first: int | Literal["row", "table"], *, others: PositiveInt | None = None, name="plan", share: Share = ()):
    return first


def test_an_error_names_the_function_what_it_makes_and_the_argument():
    assert planned(np.int64(1), others=2, name="x") == 1
    with pytest.raises(ValueError, match=r"^planned: first must be an integer or 'row' or 'table', got 'rows' \(str\)"):
        planned("rows")
    with pytest.raises(ValueError, match=r"^planned: others must be in \[1, inf\), got 0"):
        planned(1, others=0)
    with pytest.raises(ValueError, match=r"^planned 'x': share must be an array of numbers \[a\], got an array of"):
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


@pytest.mark.parametrize("path", [path for path in sorted(ROOT.rglob("*.py")) if "@validated" in path.read_text()])
def test_every_annotation_of_a_validated_function_can_be_read(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    tree = ast.parse(path.read_text())
    classes = [(getattr(module, node.name), node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner, scope in [(module, tree), *classes]:
        for node in scope.body:
            if any(ast.unparse(decorator) == "validated" for decorator in getattr(node, "decorator_list", ())):
                assert get_type_hints(inspect.unwrap(getattr(owner, node.name)), include_extras=True)


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
RULES = {own for own in CLASSES if hasattr(own, "step_rows") and not inspect.isabstract(own) and own.__name__[0] != "_"}
FREE = (rs.optimizers.Custom, ro.base.OptaxOptimizerSpec)  # need a function or a transformation
OUTSIDE = {  # a number just outside, by the beginning of the field's name; NaN is outside of all
    **dict.fromkeys(
        ("learning_rate", "initial_acc", "initial_slot", "initial_local", "eps", "l1_", "l2_", "rho"), -1e-3
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
            outside = OUTSIDE[max((start for start in OUTSIDE if field.name.startswith(start)), key=len)]
            for value in (outside, NAN):
                with pytest.raises(ValueError, match=rf"{rule.__name__}: {field.name} must be in .*, got {value}"):
                    rule(**{field.name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: [rule(learning_rate=0) for rule in RULES if rule not in (*FREE, rs.optimizers.FTRL)],
        lambda: rs.optimizers.FTRL(learning_rate=0.0, multiply_linear_by_learning_rate=True),
        lambda: rs.optimizers.SGD(lambda step: -1.0),  # a function is known only later
        lambda: rs.optimizers.SGD(jnp.float32(0.1)),
        lambda: rs.optimizers.Adagrad(initial_accumulator_value=0.0),
        lambda: rs.optimizers.Adam(beta_1=0.0, beta_2=0.0),
        lambda: rs.optimizers.rules.AdagradMomentum(momentum=1.0, beta2=1.0),
        lambda: rs.optimizers.rules.F2A(max_lr_multiplier=INF),
        lambda: rs.from_optax(optax.scale_by_adam(), learning_rate=-0.1),  # its updates point uphill
        lambda: jax.jit(lambda g, norm: rs.clip_by_global_norm(g, norm))(one_gradient(), 1.0),
    ],
)
def test_the_edges_of_meaning_still_run(make):
    make()


def one_gradient():
    return rs.RowGradients({"t": jnp.asarray([1])}, {"t": jnp.ones((1, 2))}, (("t", 3),))
