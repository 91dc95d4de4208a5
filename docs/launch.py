"""Links that open a notebook in Binder or in Colab, if its sources are on GitHub."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path


def source(root: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Repository (`owner/name`) and commit of the sources in `root`, or None if not from GitHub.

    Read the Docs sets environment variables for both. Elsewhere, git tells both.
    """

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip()

    url = environment.get("READTHEDOCS_GIT_CLONE_URL") or git("remote", "get-url", "origin")
    commit = environment.get("READTHEDOCS_GIT_COMMIT_HASH") or git("rev-parse", "HEAD")
    place = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", url)
    if not place or not commit:
        return None
    return place[1], commit


def links(repository: str, commit: str, notebook: str) -> str:
    """A line of Markdown with links that open a notebook in Binder and in Colab.

    In Colab, users first install the library by a command, which the line has, too.
    """
    binder = (
        f"https://mybinder.org/v2/gh/{repository}/{commit}?labpath=notebooks%2F{notebook}.ipynb"
    )
    colab = f"https://colab.research.google.com/github/{repository}/blob/{commit}/notebooks/{notebook}.ipynb"
    install = f"%pip install 'rsembed[notebooks] @ git+https://github.com/{repository}@{commit}'"
    return f"Run it: [Binder]({binder}) · [Colab]({colab}), with `{install}` in a first cell.\n"


def note_on_outputs(notebook: str) -> str:
    """A note on how to see outputs, for pages that were built without executing their notebooks."""
    return (
        "```{note}\n"
        "This page was built without executing the notebook, so it shows stored pictures only. "
        f"`make docs EXECUTE=1` builds it with what the cells print, and `rsembed run {notebook}` prints it.\n"
        "```"
    )
