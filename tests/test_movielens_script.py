"""Tests of `notebooks/movielens.py`: options, continued runs, measures, peers, and its notebook."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.world import module_of

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.fixture(scope="module")
def script():
    return module_of(NOTEBOOKS / "movielens.py")


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
        # optax raises floats to the power of the integer step.
        with jax.numpy_dtype_promotion("standard"):
            script.main(script.parsed([*options, "--steps", steps]))
        printed.append(capsys.readouterr().out)
    assert "generated" in printed[0]
    assert "2 steps, the last loss" in printed[0]
    assert "1 steps, the last loss" in printed[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002", "step_000000003"]


def test_recall_ndcg_and_auc_are_those_of_counts_of_films(script):
    task = script.load_task(script.Settings())
    task = task._replace(test=task.test[:50])
    # Some of the scores are equal.
    scores = np.random.default_rng(0).random((50, 500)).round(2)
    measures = []
    for number, film_scores in zip(task.test, scores, strict=True):
        user, hidden = task.log.users[number], task.log.items[number]
        seen = task.log.items[task.train][task.log.users[task.train] == user]
        others = np.delete(film_scores, [*seen, hidden])
        ties = (others == film_scores[hidden]).sum() / 2
        above = (others > film_scores[hidden]).sum() + ties
        is_recalled = above < 10
        gain = is_recalled / np.log2(above + 2)
        measures.append([is_recalled, gain, 1 - above / len(others)])
    expected = np.mean(measures, axis=0)
    assert_allclose(script.judge(task, scores), expected, rtol=1e-12)


def test_neighbours_and_factorisation_solve_their_equations(script):
    task = script.load_task(script.Settings())
    task = task._replace(train=task.train[:4_000], test=task.test[:5])
    seen = np.zeros((len(task.log.user_ids), len(task.log.titles)))
    seen[task.log.users[task.train], task.log.items[task.train]] = 1
    film_sums = np.maximum(seen.sum(axis=0), 1)
    similar = seen.T @ seen / np.sqrt(np.outer(film_sums, film_sums))
    np.fill_diagonal(similar, 0)
    expected = seen[task.log.users[task.test]] @ similar
    # All films are neighbours.
    scores = script.item_neighbours(task, num_neighbours=500)
    assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    # Three neighbours of each offered film, and the four latest films of each user. Similarities
    # are computed in float32, as in the script, so that both find the same ties.
    lengths = np.sqrt(film_sums.astype(np.float32))
    similar = (seen.T @ seen).astype(np.float32) / lengths[:, None] / lengths
    np.fill_diagonal(similar, 0)
    scores = script.item_neighbours(task, 3, side="offered", num_latest=4)
    histories = task.log.histories(4)[task.test]
    for film, similarities in enumerate(similar.T):
        near = np.where(similarities >= np.sort(similarities)[-3], similarities, 0)
        expected = [near[history[history >= 0]].sum() for history in histories]
        assert_allclose(scores[:, film], expected, rtol=1e-5)
    # The gradient of the weighted loss is zero at each vector.
    others = np.random.default_rng(0).normal(size=(seen.shape[1], 4))
    vectors = script.least_squares(seen > 0, others, weight=2.0, decay=0.5)
    errors = (1 + 2.0 * seen) * (seen - vectors @ others.T)
    assert_allclose(errors @ others, 0.5 * vectors, atol=1e-8)


def test_data_may_be_a_path_or_searched(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,A (1995),Drama\n2,B (1996),War\n")
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(5):
        lines += [f"{user},1,4.5,{900_000_000 + user}", f"{user},2,3,{910_000_000 + user}"]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    task = script.load_task(script.Settings(data=str(tmp_path)))
    assert task.log.titles == ("A (1995)", "B (1996)")
    assert task.log.users[task.test].tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path))
    assert script.load_log(script.Settings(data="auto")).source == task.log.source
    monkeypatch.setenv("RSEMBED_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "nothing")
    assert "generated" in script.load_log(script.Settings(data="auto")).source
    assert "a log is generated" in capsys.readouterr().out


def test_the_notebook_shows_the_script_as_it_is():
    source = (NOTEBOOKS / "movielens.py").read_text()
    cells = json.loads((NOTEBOOKS / "12_movielens.ipynb").read_text())["cells"]
    shown = []
    for cell in cells:
        if "".join(cell["source"]).startswith("show("):
            shown += ["".join(output["data"]["text/markdown"]) for output in cell["outputs"]]
    assert len(shown) == 4
    for text in shown:
        program = text.removeprefix("```python\n").removesuffix("```")
        for part in program.split("\n\n\n"):
            assert part.strip() in source
