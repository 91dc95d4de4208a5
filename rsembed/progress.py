"""Progress bar for long operations, shown only in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def is_watched() -> bool:
    """Whether standard error is a terminal, or this process is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", lambda: None)
    if hasattr(get_shell(), "kernel"):
        return True
    return sys.stderr is not None and sys.stderr.isatty()


def progress(items: Iterable[Item], *, description: str, **bar_options: object) -> Iterable[Item]:
    """The same items as `items`, with a progress bar in a terminal or a notebook.

    If standard error is not a terminal and there is no notebook, the function returns `items`.

    Args:
      items: any iterable. For an iterable without a length, pass `total=`, and the progress bar
        shows the remaining time.
      description: string before the bar, such as "training".
      **bar_options: further options of tqdm.

    Example:
      >>> sum(progress(range(4), description="adding"))
      6
    """
    if not is_watched():
        return items
    from tqdm import tqdm

    return tqdm(items, desc=description, **bar_options)
