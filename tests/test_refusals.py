"""Refused names say why, wherever they are asked for."""

import importlib

import pytest

from rsembed.refusals import RefusedAttributeError, RefusedNameError, refuses, refuses_names
from tests import published_names


@refuses_names({"gone": "nothing is like it"})
class Tables:
    """Has `here` alone."""

    here = 1


def test_a_refused_attribute_is_missing_and_says_why():
    assert not hasattr(Tables, "gone") and Tables().here == 1
    with pytest.raises(RefusedAttributeError, match=r"Tables has no gone: nothing is like it\."):
        Tables().gone  # noqa: B018


def test_a_refused_argument_may_ask_for_nothing():
    look_up = refuses({"out": "results are new arrays"})(lambda ids, scale=1: (ids, scale))
    assert look_up(7, out=None, scale=2) == (7, 2) and look_up(7, out=False) == (7, 1)
    with pytest.raises(NotImplementedError, match="takes no out: results are new arrays"):
        look_up(7, out=[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'another'"):
        look_up(7, another=1)


@pytest.mark.parametrize("module", published_names.WITH_REFUSED_NAMES)
def test_a_name_that_is_not_there_is_no_refused_one_and_tells_what_is_near(module):
    wing = importlib.import_module(module)
    near = next(name for name in sorted(vars(wing)) if name[0].isupper())
    with pytest.raises(AttributeError, match=f"has no attribute '{near}x'.*{near}"):
        getattr(wing, f"{near}x")
    with pytest.raises(RefusedNameError):
        exec(f"from {module} import {next(iter(wing.refused.NAMES))}")


@pytest.mark.parametrize(
    ("module", "name"), [("sparsecore", "auto_pipelining"), ("sparsecore.nnx", "checkpoint_utils")]
)
def test_a_published_module_that_is_not_there_says_where_to_go(module, name):
    with pytest.raises(RefusedNameError, match=f"rsembed.{module} has no {name}: .*`rsembed"):
        exec(f"from rsembed.{module} import {name}")
