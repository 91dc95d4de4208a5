import io
import sys
import types

import pytest

from rsembed.progress import is_watched, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shell(**attributes):
    return types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(**attributes))


def test_nothing_is_written_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not is_watched()
    assert list(progress(range(3), description="training")) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""


def test_a_terminal_sees_description_and_count(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress(iter("ab"), description="training", total=2)) == ["a", "b"]
    assert "training: 100%" in sys.stderr.getvalue() and "2/2" in sys.stderr.getvalue()


@pytest.mark.parametrize(("attributes", "expected"), [({"kernel": 1}, True), ({}, False)])
def test_a_notebook_watches_and_a_plain_shell_without_terminal_does_not(
    monkeypatch, attributes, expected
):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", shell(**attributes))
    assert is_watched() is expected
