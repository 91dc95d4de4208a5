import re
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import rsembed as rs
from tests.world import assert_same

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


@pytest.fixture
def quick_initial_values() -> None:
    """Keeps the library's initial values, so that the program runs as for a user who copies it."""


def run_of_the_program():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    return names


def test_the_program_runs_as_printed_and_goes_on_when_it_runs_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_of_the_program()
    collection, state, batch = (names[name] for name in ("collection", "state", "batch"))
    first = collection.init(jax.random.key(0))
    before, after = collection.tables(first), collection.tables(state)
    rows = np.flatnonzero((before["item"] != after["item"]).any(axis=1))
    assert rows.tolist() == [4, 17, 99, 123_456]
    assert before["user"]["keys"].tolist() == []
    assert sorted(after["user"]["keys"].tolist()) == [-7, 2**40 + 1]
    assert int(state.step) == 1

    items = np.asarray(before["item"])
    history = np.stack([items[[17, 4, 99]].mean(axis=0), items[123_456]])
    users = np.asarray(collection.lookup_vjp(first, batch)[0]["user"])
    logits = np.sum(history * users, axis=1)
    clicks = np.array([1.0, 0.0], np.float32)
    chances = 1 / (1 + np.exp(-logits))
    losses = -np.log(np.where(clicks, chances, 1 - chances))
    assert float(names["loss"]) == pytest.approx(losses.mean(), rel=1e-6)
    d_logits = (chances - clicks) / 2
    assert_allclose(names["params"], 1 - 0.1 * d_logits @ (history * users), rtol=1e-6)

    assert_same(collection.lookup(state, batch), names["activations"])

    again = run_of_the_program()
    step = jax.jit(names["step"].__wrapped__)
    params, expected, loss = step(names["params"], state, batch, clicks)
    assert int(again["state"].step) == 2
    assert float(again["loss"]) == float(loss) < float(names["loss"])
    printed = [f"step {run['state'].step}: loss {run['loss']:.4f}\n" for run in (names, again)]
    assert capsys.readouterr().out == "".join(printed) and printed[1].startswith("step 2: ")
    assert_same(again["params"], params)
    assert_same(collection.tables(again["state"]), collection.tables(expected))
    saved = [path.name for path in again["checkpoints"].paths()]
    assert saved == ["step_000000001", "step_000000002"]


def test_rooms_named_on_the_architecture_page_exist():
    root = Path(rs.__file__).parents[1]
    paths = re.findall(r"\| `(rsembed/[^`]+)`", (root / "docs" / "architecture.md").read_text())
    assert len(paths) > 10
    assert [path for path in paths if not (root / path).exists()] == []
