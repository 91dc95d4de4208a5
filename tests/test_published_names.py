"""Pages list names and arguments of four systems: their places here, or why they are refused."""

import pytest

from tools import published_names

EVERY_SYSTEM = pytest.mark.parametrize(
    "system", published_names.SYSTEMS.values(), ids=list(published_names.SYSTEMS)
)
NAMED_ONLY = ("OptimType", "EmbeddingLocation", "ComputeDevice")
"""Classes with members that exist here although functions refuse them."""
LEAST_ROWS = {"sparsecore": 200, "tbe": 100, "tt": 50, "sok": 35}


@EVERY_SYSTEM
def test_the_page_tells_the_place_of_every_name_and_argument(system):
    table = published_names.table(system, system.record())
    on_page = system.page.read_text().endswith(system.begin + table)
    assert on_page, "run python -m tools.published_names"
    assert table.count("\n| ") > LEAST_ROWS[system.name]


@EVERY_SYSTEM
def test_what_the_page_calls_refused_is_not_here(system):
    for module, names in system.record()["package"].items():
        for name, arguments in names.items() if module in system.here else ():
            key = f"{module}.{name}"
            if system.refusal(key):
                with pytest.raises((AttributeError, ImportError)):
                    published_names.resolve(system.place(key))
                continue
            refused = [one for one in arguments if system.refusal(f"{key}({one})")]
            taken = published_names.accepted(system, system.place(key), refused)
            assert not taken or name in NAMED_ONLY, (key, taken)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"no_such_function": []}, AttributeError),
        ({"get_table_specs": ["feature_specs", "no_such_argument"]}, AssertionError),
        # This function takes `**options`, and the tool knows their names.
        ({"auto_stack_tables": ["no_such_argument"]}, AssertionError),
    ],
)
def test_a_name_or_argument_that_is_nowhere_is_found(names, error):
    record = {"package": {"lib.nn.embedding": names}, "elsewhere": {}}
    with pytest.raises(error, match=r"no_such"):
        published_names.rows(published_names.SPARSECORE, record)


@EVERY_SYSTEM
def test_nothing_is_refused_that_was_never_published(system):
    everything = system.record()["package"] | system.record()["elsewhere"]
    keys = set(everything)
    for module, names in everything.items():
        for name, arguments in names.items():
            keys.add(f"{module}.{name}")
            keys |= {f"{module}.{name}({argument})" for argument in arguments}
    for refused in system.refused:
        assert any(f".{refused}." in f".{key}." for key in keys), refused
    assert {*system.places, *system.renamed} <= keys
