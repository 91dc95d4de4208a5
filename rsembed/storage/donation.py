"""Calls programs that donate the arrays of an object, without losing the arrays to Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree


class _CtrlCLater:
    """Delays Ctrl-C until the end of a `with` block.

    Outside the main thread the context does nothing, because only the main thread gets Ctrl-C.
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
    """Result of a program that donates its operands, after `keep` has received it.

    Without this function, Ctrl-C could raise KeyboardInterrupt after the program has run and before
    its result is assigned. In that case, the donated arrays would be lost. Ctrl-C is delayed until
    the program is done, including its compilation.

    Args:
      keep: function that stores the result.
      program: compiled program that donates its operands.
      *operands: arguments of the program.
    """
    with _CtrlCLater():
        result = program(*operands)
        keep(result)
    return result
