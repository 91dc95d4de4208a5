"""Every bad call gets an error of the library's own, in words that help; what is accepted means what it says.

The tables are in `tests/bad_calls/`. Their calls run once, in a process without the hook that checks types under tests,
since users have none.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLES = {
    path.stem: importlib.import_module(f"tests.bad_calls.{path.stem}")
    for path in sorted((ROOT / "tests" / "bad_calls").glob("[a-z]*.py"))
    if path.stem not in ("annotations", "program", "world")
}
BAD = {f"{wing}: {name}": row for wing, table in TABLES.items() for name, row in table.BAD.items()}
ACCEPTED = [f"{wing}: {name}" for wing, table in TABLES.items() for name in getattr(table, "ACCEPTED", ())]


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bad_calls.program"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_in_words_that_help(outcomes, name):
    _, error, *words = BAD[name]
    found = outcomes[name]
    assert found is not None, "accepted in silence"
    assert error.__name__ in found["errors"], found
    assert [word for word in words if word not in found["message"]] == [], found["message"]
    assert not found["raised_in"], found  # not by JAX or numpy, deep inside


def test_what_an_annotation_does_not_admit_is_refused_by_the_name_of_the_argument(outcomes):
    """Of every public call that `checks.validated` guards; what else its words say is tested in `test_checks.py`."""
    found = {name: own for name, own in outcomes.items() if name.startswith("annotations: ")}
    helpful = [
        name
        for name, own in found.items()
        if own and name[:-1].rpartition("(")[2] in own["message"] and "missing" not in own["message"]
    ]
    assert len(found) > 400 and sorted(found) == sorted(helpful)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_on_purpose_means_what_the_proper_call_means(outcomes, name):
    assert outcomes[name] == ""
