"""Names and arguments that a published interface has and a wing has not, refused where they are used, and why."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from rsembed.checks import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


class RefusedNameError(ImportError):
    """A module has not the name; `reason` says why, and what to use."""

    def __init__(self, module: str, name: str, reason: str):
        super().__init__(f"{module} has no {name}: {reason}.", name=module)
        self.reason = reason


class RefusedAttributeError(AttributeError):
    """A class has not the name; `reason` says why, and what to use."""

    def __init__(self, owner: str, name: str, reason: str):
        super().__init__(f"{owner} has no {name}: {reason}.")
        self.reason = reason


class RefusedOfEnumError(NotImplementedError):
    """An enum has not the name. Its metaclass would replace an AttributeError by one that says nothing."""

    def __init__(self, owner: str, name: str, reason: str):
        super().__init__(f"{owner} has no {name}: {reason}.")
        self.reason = reason


REFUSALS = (RefusedNameError, RefusedAttributeError, RefusedOfEnumError)


def refused_names(module: str, reasons: Mapping[str, str], names: Mapping[str, Any]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module. Its error is an ImportError, which `from module import name` does not replace.

    Args:
      module: its name.
      reasons: by name, why it is not there, and what to use.
      names: those that are there, for names that are in neither.
    """

    def missing(name: str) -> NoReturn:
        if name in reasons:
            raise RefusedNameError(module, name, reasons[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}{did_you_mean(name, list(names))}")

    return missing


class _RefusedName:
    """Where a class would have the name."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        error = RefusedOfEnumError if issubclass(owner, enum.Enum) else RefusedAttributeError
        raise error(owner.__name__, self.name, self.reason)


def refuses_names(reasons: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A class whose attributes and methods of these names raise an AttributeError with the reason.

    Example:
      >>> @refuses_names({"prepare_inputs": "calls check their input themselves"})
      ... class Tables:
      ...     pass
      >>> Tables().prepare_inputs
      Traceback (most recent call last):
        ...
      rsembed.refusals.RefusedAttributeError: Tables has no prepare_inputs: calls check their input themselves.
    """

    def refusing(kind: Kind) -> Kind:
        for name, reason in reasons.items():
            setattr(kind, name, _RefusedName(name, reason))
        return kind

    return refusing


def refuses(reasons: Mapping[str, str]) -> Callable[[Function], Function]:
    """A function, or a class, that refuses arguments of these names unless they ask for nothing: None, False and "".

    Example:
      >>> @refuses({"vbe_output": "results are new arrays"})
      ... def look_up(ids):
      ...     return ids
      >>> look_up([7], vbe_output=None)
      [7]
      >>> look_up([7], vbe_output=[0])
      Traceback (most recent call last):
        ...
      NotImplementedError: look_up takes no vbe_output: results are new arrays.
    """

    def refusing(function: Function) -> Function:
        if isinstance(function, type):
            maker: Any = function
            maker.__init__ = refuses(reasons)(maker.__init__)
            return function

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in [name for name in kwargs if name in reasons]:
                value = kwargs.pop(name)
                if value is not None and value is not False and not (isinstance(value, str) and not value):
                    raise NotImplementedError(f"{function.__qualname__} takes no {name}: {reasons[name]}.")
            return function(*args, **kwargs)

        checked.refused_arguments = dict(reasons)  # type: ignore[attr-defined]
        return cast(Function, checked)

    return refusing
