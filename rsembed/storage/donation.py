"""Calls programs that donate the arrays of an object, so that Ctrl-C does not lose the arrays."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import PyTree


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Delays Ctrl-C until the end of a `with` block.

    `_ctrl_c_later` has no effect outside the main thread, because Python handles Ctrl-C in the main
    thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):
        yield
        return
    signals: list[tuple[int, Any]] = []

    def remember(number: int, frame: object) -> None:
        signals.append((number, frame))

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            handler(*signals[-1])


def kept(
    keep: Callable[[PyTree], None], program: Callable[..., PyTree], *operands: PyTree
) -> PyTree:
    """Calls a program that donates its operands, and returns the result after `keep` stored it.

    Ctrl-C is delayed until `keep` has stored the result. A KeyboardInterrupt between the end of
    the program and the call of `keep` would lose the donated arrays. If `program` must be compiled
    first, Ctrl-C is delayed during the compilation of `program`.

    Args:
      keep: function that stores the result.
      program: jitted function that donates its operands.
      *operands: arguments of the program.
    """
    with _ctrl_c_later():
        result = program(*operands)
        keep(result)
    return result
