"""The page names every public name and argument of the published package: where it is here, or why it is not."""

import importlib.metadata
import importlib.util
import json
import pathlib

import pytest

from tests.sparsecore import published_names

RECORD = json.loads(published_names.RECORD.read_text())


def installed():
    """Folder of the recorded version of the package, or None."""
    try:
        if importlib.metadata.version("jax-tpu-embedding") != RECORD["version"]:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    return pathlib.Path(importlib.util.find_spec("jax_tpu_embedding").origin).parent / "sparsecore"


def test_the_page_tells_the_place_of_every_name_and_argument():
    table = published_names.table(RECORD)
    assert published_names.BEGIN + table + published_names.END in published_names.PAGE.read_text(), (
        "run python -m tests.sparsecore.published_names"
    )
    assert table.count("\n| ") > 200


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"no_such_function": []}, AttributeError),
        ({"get_table_specs": ["feature_specs", "no_such_argument"]}, AssertionError),
    ],
)
def test_a_name_or_argument_that_is_nowhere_is_found(names, error):
    with pytest.raises(error, match=r"no_such"):
        published_names.rows({"package": {"lib.nn.embedding": names}, "elsewhere": {}})


def test_nothing_is_refused_that_was_never_published():
    everything = RECORD["package"] | RECORD["elsewhere"]
    keys = {f"{module}.{name}" for module, names in everything.items() for name in names} | set(everything)
    keys |= {f"{m}.{name}({one})" for m, names in everything.items() for name, given in names.items() for one in given}
    for refused in published_names.REFUSED:
        assert any(f"{key}.".startswith(f"{refused}.") or key.endswith(f".{refused}") for key in keys), refused


@pytest.mark.skipif(
    installed() is None, reason="needs the recorded version of jax-tpu-embedding; the record is its twin"
)
def test_the_record_is_what_the_installed_package_has():
    assert published_names.published(installed()) == RECORD["package"]
