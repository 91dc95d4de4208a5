"""The recommender beside the notebooks: its options, its going on, and that the notebook shows it as it is."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("movielens_script", NOTEBOOKS / "movielens.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_setting_is_an_option_of_its_type(script):
    assert script.parsed([]) == script.Settings()
    chosen = script.parsed(["--tables", "hashed", "--devices", "4", "--table-rate", "0.5", "--folder", "runs"])
    assert chosen == script.Settings(tables="hashed", devices=4, table_rate=0.5, folder="runs")
    with pytest.raises(SystemExit):
        script.parsed(["--tables", "stone"])


def test_a_run_with_users_on_the_host_goes_on_where_the_last_one_stopped(script, tmp_path, capsys):
    options = ["--tables", "host_cached", "--batch-size", "64", "--folder", str(tmp_path)]
    printed = []
    for steps in ("2", "3"):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the number of the step
            script.main(script.parsed([*options, "--steps", steps]))
        printed.append(capsys.readouterr().out)
    assert "generated" in printed[0]
    assert "2 steps, the last loss" in printed[0]
    assert "1 steps, the last loss" in printed[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002", "step_000000003"]


def test_recall_and_auc_are_those_of_a_loop_over_films(script):
    task = script.load_task(script.Settings())
    task = task._replace(test=task.test[:50])
    scores = np.random.default_rng(0).random((50, 500)).round(2)  # some are equal
    recalls, aucs = [], []
    for number, own in zip(task.test, scores, strict=True):
        user, hidden = task.log.users[number], task.log.items[number]
        seen = set(task.log.items[task.train][task.log.users[task.train] == user].tolist())
        others = [own[film] for film in range(500) if film not in seen and film != hidden]
        aucs.append(np.mean([1.0 if other < own[hidden] else 0.5 * (other == own[hidden]) for other in others]))
        recalls.append((1 - aucs[-1]) * len(others) < 10)
    np.testing.assert_allclose(script.judge(task, scores), [np.mean(recalls), np.mean(aucs)], rtol=1e-12)


def test_the_notebook_shows_the_script_as_it_is():
    source = (NOTEBOOKS / "movielens.py").read_text()
    cells = json.loads((NOTEBOOKS / "12_movielens.ipynb").read_text())["cells"]
    shown = [
        "".join(output["data"]["text/markdown"]).removeprefix("```python\n").removesuffix("```")
        for cell in cells
        if "".join(cell["source"]).startswith("show(")
        for output in cell["outputs"]
    ]
    assert len(shown) == 4
    parts = [part.strip() for text in shown for part in text.split("\n\n\n")]
    assert [part for part in parts if part not in source] == []
