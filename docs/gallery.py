"""Runs the programs of the gallery page, and puts the picture of each one below it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
DOTS_PER_INCH = 110


class Shown(NamedTuple):
    """A program of the page, and its figure, or None if the program draws nothing.

    `end` is the index in the page's text after the program.
    """

    name: str
    program: str
    end: int
    figure: Any


def run(text: str) -> Iterator[Shown]:
    """Runs the programs of the page one after the other, and yields each with its figure.

    The name of a program is the heading above it. A figure is closed before the next program runs.
    """
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "gallery"}
    for match in PROGRAM.finditer(text):
        headings = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)
        exec(compile(match[1], "docs/gallery.md", "exec"), names)
        figure = None
        if plt.get_fignums():
            figure = plt.gcf()
        yield Shown(headings[-1].strip("`"), match[1], match.end(), figure)
        plt.close("all")


def with_pictures(text: str, folder: Path) -> str:
    """The text of the page with links to its pictures, which are written into `folder`."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(exist_ok=True)
    parts = []
    start = 0
    for shown in run(text):
        parts.append(text[start : shown.end])
        start = shown.end
        if shown.figure is not None:
            file = re.sub(r"\W+", "_", shown.name) + ".png"
            shown.figure.savefig(folder / file, dpi=DOTS_PER_INCH)
            parts.append(f"\n![What {shown.name} draws]({folder.name}/{file})\n")
    return "".join([*parts, text[start:]])
