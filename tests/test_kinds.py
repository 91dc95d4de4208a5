"""What annotations admit beyond the letter, and how errors name what they do not."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int, PRNGKeyArray

from rsembed.intervals import Count, check_fields, door, within
from rsembed.kinds import check_kind, did_you_mean, dtype_among, is_kind


class Colour(enum.Enum):
    RED = "red"


Point = tuple[int, Colour]

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
    ("anything", Any),
    ([0] * 2000, Sequence[str]),
]

REFUSED = [
    (3.0, int, TypeError, "x must be an integer, got 3.0 (float)."),
    (True, float, TypeError, "x must be a number, got True (bool)."),
    (1, bool, TypeError, "x must be True or False, got 1 (int)."),
    ("ab", Sequence[str], TypeError, "x must be a list (each a text), got 'ab' (str)."),
    (["a", 1], Sequence[str], TypeError, "x[1] must be a text, got 1 (int)."),
    ({"a": 1}, str | Mapping[str, str], TypeError, "x['a'] must be a text, got 1 (int)."),
    (
        [(3, "red")],
        Sequence[Point],
        TypeError,
        "x[0][1] must be a member of Colour, such as Colour.RED, got 'red' (str).",
    ),
    ((3,), Point, TypeError, "x must be (an integer, a member of Colour, such as Colour.RED), got (3,) (tuple)."),
    (np.ones(2), Int[np.ndarray, "a"], TypeError, "x must be an array of integers [a], got an array of float64"),
    (np.ones(2), Float[np.ndarray, "a b"], ValueError, "x must be an array of numbers [a, b], got an array of float64"),
    (
        [[1], [1, 2]],
        Float[np.ndarray, "a b"],
        TypeError,
        "x must be an array of numbers [a, b], got [[1], [1, 2]] (list).",
    ),
    (0, PRNGKeyArray, TypeError, "x must be a PRNG key, such as jax.random.key(0), got 0 (int)."),
    (object(), int | None, TypeError, "x must be an integer or None, got a value of type object."),
]


@pytest.mark.parametrize(("value", "hint"), ADMITTED)
def test_what_means_the_same_is_admitted(value, hint):
    assert is_kind(value, hint)


@pytest.mark.parametrize(("value", "hint", "error", "message"), REFUSED)
def test_what_does_not_fit_is_named_with_its_place(value, hint, error, message):
    with pytest.raises(error) as found:
        check_kind(value, hint, "x")
    assert str(found.value).startswith(message)


@door
def planned(first: int, *others: Count, name: str = "plan", share: Float[np.ndarray, "a"] | None = None) -> int:
    return first + sum(others)


def test_a_door_names_the_function_what_it_makes_and_the_argument():
    assert planned(1, 2, np.int64(3), name="x") == 6
    with pytest.raises(TypeError, match=r"^planned: first must be an integer"):
        planned("1")
    with pytest.raises(ValueError, match=r"^planned: others must be in \[1, inf\), got 0"):
        planned(1, 2, 0)
    with pytest.raises(ValueError, match=r"^planned 'x': share must be an array of numbers \[a\] or None"):
        planned(1, name="x", share=np.ones((2, 2)))


@dataclasses.dataclass
class Settings:
    rate: float = within("[0, 1]", default=0.5)
    colour: Colour = Colour.RED
    unknown: "Nowhere" = None

    __post_init__ = check_fields


def test_fields_are_held_to_their_annotations():
    assert Settings(rate=1).rate == 1
    with pytest.raises(ValueError, match="Settings: rate must be in"):
        Settings(rate=2.0)
    with pytest.raises(TypeError, match="Settings: colour must be a member of Colour"):
        Settings(colour="red")


def test_names_and_dtypes_near_by_are_offered():
    assert did_you_mean("titel", ["author", "title"]) == " (did you mean 'title'?)"
    assert did_you_mean(0, ["author"]) == ""
    assert dtype_among(("float32", "bfloat16"), jnp.bfloat16, "dtype") == "bfloat16"
    with pytest.raises(ValueError, match=r"^dtype 'flaot32' is not one of float32, bfloat16"):
        dtype_among(("float32", "bfloat16"), "flaot32", "dtype")
