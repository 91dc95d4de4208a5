"""Values that annotations and intervals accept, and errors for other values."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence  # noqa: F401, used by calls of the table
from typing import Any, Literal  # noqa: F401, used by calls of the table

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray  # noqa: F401, used by calls of the table

from rsembed import checks


class Colour(enum.Enum):
    RED = "red"


Point = tuple[int, Colour]


@checks.validated
def planned(
    first: int | Literal["row", "table"],
    *,
    others: checks.PositiveInt | None = None,
    name="plan",
    share: Float[np.ndarray, "a"] = (),
):
    return first


@checks.validated
def one_array(values: Int[np.ndarray, ""]):
    return values


@dataclasses.dataclass(frozen=True)
@checks.validated
class Settings:
    rate: float = checks.within("[0, 1]", default=0.5)
    colour: Colour = Colour.RED


BAD = """
# Annotations
checks.check_type(3.0, int, "x") => TypeError: x must be an integer, got 3.0 (float).
checks.check_type(True, float, "x") => TypeError: x must be a number, got True (bool).
checks.check_type(1, bool, "x") => TypeError: x must be True or False, got 1 (int).
checks.check_type("ab", Sequence[str], "x") => TypeError: x must be a list (each a text), got 'ab' (str).
checks.check_type(["a", 1], Sequence[str], "x") => TypeError: x[1] must be a text, got 1 (int).
checks.check_type({"a": 1}, str | Mapping[str, str], "x") => TypeError: x['a'] must be a text, got 1 (int).
checks.check_type([(3, "red")], Sequence[Point], "x")
    => TypeError: x[0][1] must be a member of Colour, such as Colour.RED, got 'red' (str).
checks.check_type((3,), Point, "x")
    => TypeError: x must be (an integer, a member of Colour, such as Colour.RED), got (3,) (tuple).
checks.check_type(np.ones(2), Int[np.ndarray, "a"], "x")
    => TypeError: x must be an array of integers [a], got an array of float64
checks.check_type(np.ones(2) * 1j, Float[np.ndarray, "a"], "x")
    => TypeError: x must be an array of numbers [a], got an array of complex128
checks.check_type([[1], [1, 2]], Float[np.ndarray, "a b"], "x")
    => TypeError: x must be an array of numbers [a, b], got [[1], [1, 2]] (list).
checks.check_type(0, PRNGKeyArray, "x") => TypeError: x must be a PRNG key, such as jax.random.key(0), got 0 (int).
checks.check_type(object(), int | None, "x") => TypeError: x must be an integer or None, got a value of type object.
checks.check_type(["row"], int | Literal["row"], "x") => TypeError: x must be an integer or 'row', got ['row'] (list).
planned("rows") => ValueError: planned: first must be an integer or 'row' or 'table', got 'rows' (str)
planned(1, others=0) => ValueError: planned: others must be in [1, inf), got 0
planned(1, name="x", share=np.ones((2, 2))) => ValueError: planned 'x': share must be an array of numbers [a], got an
Settings(rate=2.0) => ValueError: Settings: rate must be in
Settings(colour="red") => TypeError: Settings: colour must be a member of Colour
# Intervals
checks.check_within("[0, 1)", -1e-9, "x") => ValueError: x must be in
checks.check_within("[0, 1)", 1, "x") => ValueError: x must be in
checks.check_within("[0, 1)", NAN, "x") => ValueError: x must be in
checks.check_within("(0, inf]", 0, "x") => ValueError: x must be in
checks.check_within("(0, inf]", -1, "x") => ValueError: x must be in
checks.check_within("(0, inf]", NAN, "x") => ValueError: x must be in
checks.check_within("(-inf, inf)", np.inf, "x") => ValueError: x must be in
checks.check_within("(-inf, inf)", -np.inf, "x") => ValueError: x must be in
checks.check_within("(-inf, inf)", NAN, "x") => ValueError: x must be in
checks.check_finite(np.float32(NAN), "x", way_out="give it up") => ValueError: x: nan in row 0 is not finite; give it up
checks.dtype_among(("float32", "bfloat16"), "flaot32", "dtype")
    => ValueError: dtype 'flaot32' is not one of float32, bfloat16
"""

ACCEPTED = """
checks.check_type(np.int8(3), int, "x") => None
checks.check_type(jnp.int32(3), int, "x") => None
checks.check_type(3, float, "x") => None
checks.check_type(jnp.float32(3), float, "x") => None
checks.check_type(np.bool_(True), bool, "x") => None
checks.check_type(None, int | None, "x") => None
checks.check_type([1, 2], tuple[int, ...], "x") => None
checks.check_type(np.ones(2), Sequence[float], "x") => None
checks.check_type((3, Colour.RED), Point, "x") => None
checks.check_type({"a": [1]}, Mapping[str, Sequence[int]], "x") => None
checks.check_type(np.ones((2, 2), int), Float[np.ndarray, "a b"], "x") => None
checks.check_type([[1.0, 2.0]], Float[np.ndarray, "a b"], "x") => None
checks.check_type([], Int[np.ndarray, "a"], "x") => None
checks.check_type(jnp.ones(2, jnp.bfloat16), Float[np.ndarray, "a"], "x") => None
checks.check_type(KEY(0), PRNGKeyArray, "x") => None
checks.check_type(jax.random.PRNGKey(0), PRNGKeyArray, "x") => None
checks.check_type(len, Callable[..., int], "x") => None
checks.check_type(np.str_("row"), Literal["row", "table"], "x") => None
checks.check_type("anything", Any, "x") => None
checks.check_type([0] * 2000, Sequence[str], "x") => None
planned(1, others=2, name="x") => 1
Settings(rate=1).rate => 1
Settings(rate=np.float32(0.5)).rate => 0.5
Settings(rate=np.longdouble(0.5)).rate => 0.5
planned(np.int64(3), others=np.uint8(2)) => 3
planned("row", share=np.ones(2)) => "row"
one_array(np.int64(3)) => np.int64(3)
checks.check_within("[0, 1)", 0, "x") => None
checks.check_within("[0, 1)", 0.999, "x") => None
checks.check_within("(0, inf]", 1e-30, "x") => None
checks.check_within("(0, inf]", np.inf, "x") => None
checks.check_within("(-inf, inf)", -1e30, "x") => None
checks.check_within("(-inf, inf)", 0, "x") => None
checks.check_finite(np.ones((5, 0, 2)), "x") => None
checks.did_you_mean("titel", ["author", "title"]) => " (did you mean 'title'?)"
checks.did_you_mean(0, ["author"]) => ""
checks.dtype_among(("float32", "bfloat16"), jnp.bfloat16, "dtype") => "bfloat16"
"""
