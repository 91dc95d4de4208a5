"""Every bad call gets an error of the library's own, in words that help; what is accepted means what it says.

The tables are in `tests/bad_calls/`. Their calls run once, in a process without the hook that checks types under tests,
since users have none.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_calls.program import WINGS, rows

ROOT = Path(__file__).parent.parent
BAD = {f"{wing}: {call}": error for wing in WINGS for call, error in rows(wing, "BAD").items()}
ACCEPTED = [f"{wing}: {call}" for wing in WINGS for call in rows(wing, "ACCEPTED")]


@pytest.fixture(scope="module")
def outcomes():
    command = [sys.executable, "-m", "tests.bad_calls.program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_in_words_that_help(outcomes, name):
    error, _, words = BAD[name].partition(": ")
    outcome = outcomes[name]
    assert outcome is not None, "accepted in silence"
    assert error in outcome["errors"], outcome
    pattern = ".*".join(re.escape(part) for part in words.split(" ... "))
    assert re.search(pattern, outcome["message"], re.DOTALL), outcome["message"]
    assert not outcome["raised_in"], outcome  # not by JAX or numpy, deep inside


def test_what_an_annotation_does_not_admit_is_refused_by_the_name_of_the_argument(outcomes):
    """Of every public call that `checks.validated` guards; what else its words say is in `bad_calls/checks.py`."""
    names = [name for name in outcomes if name.startswith("annotations: ")]
    assert len(names) > 450
    for name in names:
        argument = re.search(r"\((\w+)=", name)[1]
        assert outcomes[name] is not None, f"{name} is accepted in silence"
        message = outcomes[name]["message"]
        assert argument in message, name
        assert argument == "missing" or "missing" not in message, name


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_on_purpose_means_what_the_proper_call_means(outcomes, name):
    assert outcomes[name] == ""
