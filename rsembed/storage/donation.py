"""Calls programs that donate the arrays of an object, so that Ctrl-C does not lose the arrays."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree


class _CtrlCLater:
    """Delays Ctrl-C until the end of a `with` block.

    `_CtrlCLater` has no effect outside the main thread, because Python handles Ctrl-C in the main
    thread.
    """

    def __enter__(self) -> None:
        self._signals: list[tuple[int, Any]] = []
        self._handler: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self._signals.append((number, frame))

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._signals:
            self._handler(*self._signals[-1])


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
    with _CtrlCLater():
        result = program(*operands)
        keep(result)
    return result
