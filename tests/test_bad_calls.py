"""Every bad call raises an error of the library that names the cause.

The tables of calls are in `tests/bad_calls/`. A child process makes all calls once, without the
import hook that checks types in tests, because users have no such hook. Some calls are accepted on
purpose. Their results must be those of the proper calls.
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
    assert outcome is not None, "the call was accepted"
    assert error in outcome["errors"], outcome
    pattern = ".*".join(re.escape(part) for part in words.split(" ... "))
    assert re.search(pattern, outcome["message"], re.DOTALL), outcome["message"]
    # The library itself must raise the error, and not a function of JAX or NumPy that it calls.
    assert not outcome["raised_in"], outcome


def test_what_an_annotation_does_not_admit_is_refused_by_the_name_of_the_argument(outcomes):
    """Calls every public function that `checks.validated` wraps with bad values of its arguments.

    `bad_calls/checks.py` tests the other words of the messages.
    """
    names = [name for name in outcomes if name.startswith("annotations: ")]
    assert len(names) > 450
    for name in names:
        argument = re.search(r"\((\w+)=", name)[1]
        assert outcomes[name] is not None, f"{name} was accepted"
        message = outcomes[name]["message"]
        assert argument in message, name
        assert argument == "missing" or "missing" not in message, name


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_on_purpose_means_what_the_proper_call_means(outcomes, name):
    assert outcomes[name] == ""
