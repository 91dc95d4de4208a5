"""One progress bar for everything that takes long; silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


def is_watched() -> bool:
    """Whether standard error is a terminal, or this is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or (sys.stderr is not None and sys.stderr.isatty())


def progress(items: Iterable[Item], *, description: str, **bar_options: Any) -> Iterable[Item]:
    """The items, one by one; where somebody watches, a bar tells how many are done and how long the rest takes.

    Args:
      items: any iterable; a `total=` among the options helps where it has no length.
      description: stands before the bar, such as "training".
      **bar_options: options of tqdm.

    Example:
      >>> sum(progress(range(4), description="adding"))
      6
    """
    if not is_watched():
        return items
    from tqdm import tqdm

    return tqdm(items, desc=description, **bar_options)
