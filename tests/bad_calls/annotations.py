"""Calls of public functions with one bad argument, for all arguments that annotations check.

The other arguments are missing, because annotations are checked before the call.
"""

import inspect
import math
import pathlib
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxtyping import PyTree

from tests.world import module_of

reference = module_of(pathlib.Path(__file__).parents[2] / "docs/reference.py")


def is_validated(call):
    """Whether `checks.validated` wraps a function."""
    return getattr(getattr(call, "__code__", None), "co_name", "") == "validate_and_call"


def public_calls():
    """Yields the name and value of every public object, and of every member of public classes."""
    for name in sorted(set(reference.entries().values())):
        value = reference.found(name)
        yield name, value
        for kind in getattr(value, "__mro__", ()):
            for member_name, member in vars(kind).items():
                # Static methods and class methods wrap a function.
                yield f"{name}.{member_name}", getattr(member, "__func__", member)


def refused(call, name, value):
    """A function that calls `call` with one argument. `self` is a bare object."""
    instance = [object()] if "self" in inspect.signature(call).parameters else []
    return lambda: call(*instance, **{name: value})


def bad_values(hint):
    """Yields a bare object, and a number outside each interval of an annotation."""
    yield object()
    for part in (hint, *get_args(hint)):
        for interval in getattr(part, "__metadata__", ()):
            low, high = map(float, interval[1:-1].split(","))
            yield int(low) - 1 if low > -math.inf else int(high) + 1


def is_open(hint, parameter):
    """Whether an argument is not tested, because its annotation accepts every value.

    Type variables and unions with literals are not tested, either.
    """
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
