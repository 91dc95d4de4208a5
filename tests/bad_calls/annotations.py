"""Arguments that annotations check: each gets bad values alone, since they are checked before all else."""

import inspect
import math
import pathlib
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxtyping import PyTree

from tests.world import module_of

reference = module_of(pathlib.Path(__file__).parents[2] / "docs/reference.py")


def is_validated(call):
    """Whether `checks.validated` wraps it."""
    return getattr(getattr(call, "__code__", None), "co_name", "") == "validate_and_call"


def public_calls():
    """Every public function, and every method of a public class, by the name that users know."""
    for name in sorted(set(reference.entries().values())):
        value = reference.found(name)
        yield name, value
        for kind in getattr(value, "__mro__", ()):
            for member_name, member in vars(kind).items():
                # A static method, or one of the class, wraps a function.
                yield f"{name}.{member_name}", getattr(member, "__func__", member)


def refused(call, name, value):
    """The call with this value of an argument, and an object in the place of `self`."""
    instance = [object()] if "self" in inspect.signature(call).parameters else []
    return lambda: call(*instance, **{name: value})


def bad_values(hint):
    """An object of no kind, and a number just outside of each interval."""
    yield object()
    for part in (hint, *get_args(hint)):
        for interval in getattr(part, "__metadata__", ()):
            low, high = map(float, interval[1:-1].split(","))
            yield int(low) - 1 if low > -math.inf else int(high) + 1


def is_open(hint, parameter):
    """Whether anything may come, as far as annotations are read: those of variables and words are not."""
    is_unread = isinstance(hint, TypeVar) or Literal in map(get_origin, get_args(hint))
    is_rest = parameter.name == "self" or parameter.kind is parameter.VAR_KEYWORD
    return is_unread or is_rest or hint in (None, Any, object, PyTree)


CALLS = {
    f"{path}({name}={type(value).__name__})": refused(call, name, value)
    for call, path in {call: path for path, call in public_calls() if is_validated(call)}.items()
    for name, hint in get_type_hints(inspect.unwrap(call), include_extras=True).items()
    if name != "return" and not is_open(hint, inspect.signature(call).parameters[name])
    for value in bad_values(hint)
}
