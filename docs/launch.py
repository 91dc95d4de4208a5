"""Links that open a notebook where it can be run, for a host that knows where the sources are."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path


def source(root: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """`owner/name` on GitHub and the commit of what lies in `root`; None where it is nowhere to be fetched from.

    Read the Docs says both in its environment, a clone knows them itself.
    """

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip()

    url = environment.get("READTHEDOCS_GIT_CLONE_URL") or git("remote", "get-url", "origin")
    commit = environment.get("READTHEDOCS_GIT_COMMIT_HASH") or git("rev-parse", "HEAD")
    place = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", url)
    return (place[1], commit) if place and commit else None


def links(repository: str, commit: str, notebook: str) -> str:
    """A line of Markdown that opens `notebook` in Binder, or in Colab behind one line that installs the library."""
    binder = (
        f"https://mybinder.org/v2/gh/{repository}/{commit}?labpath=notebooks%2F{notebook}.ipynb"
    )
    colab = f"https://colab.research.google.com/github/{repository}/blob/{commit}/notebooks/{notebook}.ipynb"
    install = f"%pip install 'rsembed[notebooks] @ git+https://github.com/{repository}@{commit}'"
    return f"Run it: [Binder]({binder}) · [Colab]({colab}), with `{install}` in a first cell.\n"


def note_on_outputs(notebook: str) -> str:
    """Text of a page that was built without executing its notebook: how to see what the cells print."""
    return (
        "```{note}\n"
        "This page was built without executing the notebook, so it shows stored pictures only. "
        f"`make docs EXECUTE=1` builds it with what the cells print, and `rsembed run {notebook}` prints it.\n"
        "```"
    )
