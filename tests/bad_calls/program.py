"""Makes every call of the tables in this folder once, without the type checks of other tests.

    python -m tests.bad_calls.program

A row of a table `BAD` is `call => error: parts of its message`. A row of a table `ACCEPTED` is
`call => proper call`. Indented lines continue a row. The last line of the output is a JSON object
with an entry for each row: the error of a bad call, or the difference between the results of an
accepted call and of the proper call.
"""

import importlib
import json
import os
import re
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np

from tests.bad_calls import world

NO_TABLES = ("annotations", "program", "world")
WINGS = sorted(
    path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem not in NO_TABLES
)
OWN_FILES = (os.sep + "rsembed" + os.sep, os.sep + "bad_calls" + os.sep)


def rows(wing, table):
    """Texts after the arrows of a table, by the call before the arrow."""
    text = getattr(importlib.import_module(f"tests.bad_calls.{wing}"), table, "")
    lines = [line for line in re.sub(r"\n +", " ", text).splitlines() if line and line[0] != "#"]
    outcomes = dict(line.split(" => ") for line in lines)
    assert len(outcomes) == len(lines), f"{wing} has a call twice"
    return outcomes


def run(wing, call):
    """Result of a call, which can use all names in the module of its table and in `world`."""
    module = importlib.import_module(f"tests.bad_calls.{wing}")
    return eval(compile(call, str(module.__file__), "eval"), vars(world) | vars(module))


def outcome(call):
    """Classes and message of the error that a call raises, or None if the call was accepted.

    `raised_in` is the file with the function that raised the error, or "" if it is a file of ours.
    """
    try:
        call()
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        # Python may raise an OSError, because its message names the file that cannot be read.
        is_own = any(part in files[-1] for part in OWN_FILES) or isinstance(error, OSError)
        return {
            "errors": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "raised_in": "" if is_own else files[-1],
        }
    return None


def difference(wing, call, proper):
    """Description of the first difference between two results, or "" if they are equal."""
    try:
        actual = jax.tree.leaves_with_path(run(wing, call))
        expected = jax.tree.leaves_with_path(run(wing, proper))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if [path for path, _ in actual] != [path for path, _ in expected]:
        return f"other leaves: {actual}, {expected}"
    for (path, one), (_, two) in zip(actual, expected, strict=True):
        is_number = np.asarray(one).dtype.kind in "fiu"
        if type(one) is not type(two) or not np.array_equal(one, two, equal_nan=is_number):
            return f"{jax.tree_util.keystr(path)} differs: {one!r}, {two!r}"
    return ""


def main(wings):
    """Makes the calls of all tables, or of the tables in the modules `wings`."""
    # This import takes a second, and processes that only read the tables do not need it.
    from tests.bad_calls import annotations

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("ignore")
    results = {}
    for wing in wings or WINGS:
        for call in rows(wing, "BAD"):
            results[f"{wing}: {call}"] = outcome(partial(run, wing, call))
        for call, proper in rows(wing, "ACCEPTED").items():
            results[f"{wing}: {call}"] = difference(wing, call, proper)
    results |= {f"annotations: {name}": outcome(call) for name, call in annotations.CALLS.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
