import re
from pathlib import Path

import jax
import numpy as np
import pytest

import rsembed as rs

KEY = jax.random.key(0)

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


@pytest.fixture
def quick_initial_values() -> None:
    """None: the lines run as for whoever copies them."""


def test_the_programs_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ten_lines, clicks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(ten_lines, "README.md", "exec"), names)
    before, after = (names["collection"].tables(s)["item"] for s in (names["collection"].init(KEY), names["state"]))
    assert np.flatnonzero((np.asarray(before) != np.asarray(after)).any(axis=1)).tolist() == [4, 17, 99, 123_456]
    assert int(names["state"].step) == 1
    exec(compile(clicks, "README.md", "exec"), names)
    assert sorted(names["collection"].tables(names["state"])["user"]["keys"].tolist()) == [-7, 2**40 + 1]
    again = names["collection"].lookup(names["state"], names["batch"])
    jax.tree.map(np.testing.assert_array_equal, again, names["activations"])


def test_rooms_named_on_the_architecture_page_exist():
    root = Path(rs.__file__).parents[1]
    places = re.findall(r"\| `(rsembed/[^`]+)`", (root / "docs" / "architecture.md").read_text())
    assert len(places) > 10
    assert [place for place in places if not (root / place).exists()] == []
