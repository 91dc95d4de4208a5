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
    chosen = script.parsed(
        ["--tables", "hashed", "--devices", "4", "--table-rate", "0.5", "--folder", "runs"]
    )
    assert chosen == script.Settings(tables="hashed", devices=4, table_rate=0.5, folder="runs")
    with pytest.raises(SystemExit):
        script.parsed(["--tables", "stone"])


@pytest.mark.slow
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


def test_recall_ndcg_and_auc_are_those_of_a_loop_over_films(script):
    task = script.load_task(script.Settings())
    task = task._replace(test=task.test[:50])
    scores = np.random.default_rng(0).random((50, 500)).round(2)  # some are equal
    recalls, gains, aucs = [], [], []
    for number, own in zip(task.test, scores, strict=True):
        user, hidden = task.log.users[number], task.log.items[number]
        seen = set(task.log.items[task.train][task.log.users[task.train] == user].tolist())
        others = [own[film] for film in range(500) if film not in seen and film != hidden]
        aucs.append(
            np.mean(
                [1.0 if other < own[hidden] else 0.5 * (other == own[hidden]) for other in others]
            )
        )
        above = sum(
            1.0 if other > own[hidden] else 0.5 * (other == own[hidden]) for other in others
        )
        recalls.append(above < 10)
        gains.append(1 / np.log2(above + 2) if above < 10 else 0.0)
    expected = [np.mean(recalls), np.mean(gains), np.mean(aucs)]
    np.testing.assert_allclose(script.judge(task, scores), expected, rtol=1e-12)


def test_neighbours_and_factorisation_are_those_of_loops(script):
    task = script.load_task(script.Settings())
    task = task._replace(train=task.train[:4_000], test=task.test[:5])
    seen = np.zeros((len(task.log.user_ids), len(task.log.titles)))
    for number in task.train:
        seen[task.log.users[number], task.log.items[number]] = 1
    film_sums = seen.sum(axis=0)
    scores = script.item_neighbours(task, num_neighbours=500)  # all of them
    for row, number in enumerate(task.test):
        user = task.log.users[number]
        for film in (0, 7, 499):
            expected = 0.0
            for other in np.flatnonzero(seen[user]):
                if other != film and film_sums[film] > 0:
                    both = (seen[:, other] * seen[:, film]).sum()
                    expected += both / np.sqrt(film_sums[other] * film_sums[film])
            np.testing.assert_allclose(scores[row, film], expected, rtol=1e-4, atol=1e-6)
    # Each vector is where the gradient of the weighted loss is zero.
    generator = np.random.default_rng(0)
    others = generator.normal(size=(seen.shape[1], 4))
    vectors = script.least_squares(seen > 0, others, weight=2.0, decay=0.5)
    for user in (0, 3, 99):
        weights = 1 + 2.0 * seen[user]
        gradient = (weights * (seen[user] - others @ vectors[user])) @ others - 0.5 * vectors[user]
        np.testing.assert_allclose(gradient, 0, atol=1e-8)


def test_data_may_be_a_path_or_searched(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,A (1995),Drama\n2,B (1996),War\n")
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(5):
        lines += [f"{user},1,4.5,{900_000_000 + user}", f"{user},2,3,{910_000_000 + user}"]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    task = script.load_task(script.Settings(data=str(tmp_path)))
    assert task.log.titles == ("A (1995)", "B (1996)") and task.log.users[task.test].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path))
    assert script.load_log(script.Settings(data="auto")).source == task.log.source
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "nothing")
    assert "generated" in script.load_log(script.Settings(data="auto")).source
    assert "so a log is generated" in capsys.readouterr().out


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
