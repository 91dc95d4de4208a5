"""Runs the scripts beside the notebooks for a few steps, and checks their results."""

import dataclasses
import math
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from tests.world import module_of

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def script(name):
    return module_of(NOTEBOOKS / f"{name}.py")


@pytest.mark.slow
def test_a_log_in_criteos_form_trains_hashed_tables_beside_logistic_regression(tmp_path, capsys):
    criteo = script("criteo")
    (labels, counts, keys), law = criteo.generated(40_000)
    counts, keys = np.floor(10 * np.maximum(counts, 0)).astype(int), keys % 2**32
    log = tmp_path / "train.txt"
    with log.open("w") as file:
        for label, numbers, categories in zip(labels, counts, keys, strict=True):
            shown = [int(label), *numbers, *(f"{key:08x}" for key in categories)]
            file.write("\t".join(map(str, shown)) + "\n")
    parts = criteo.load(log, 40_000)
    assert [len(part.labels) for part in parts] == [32_000, 4_000, 4_000]
    assert_array_equal(np.concatenate([part.labels for part in parts]), labels)
    assert_allclose(np.concatenate([part.numbers for part in parts]), np.log1p(counts), rtol=1e-6)
    assert_array_equal(np.concatenate([part.keys for part in parts]), keys)
    losses, results = criteo.main(["--data", str(log)])
    assert law.best_log_loss < np.mean(losses[-10:]) < law.base_rate_log_loss < losses[0] + 0.1
    for name in ("DLRM", "logistic regression"):
        assert law.best_log_loss < results[name].log_loss < results["rate of clicks"].log_loss
        assert 0.6 < results[name].auc < 0.8
    assert capsys.readouterr().out.count("step ") >= 10


@pytest.mark.slow
def test_a_short_log_with_a_header_shows_its_loss_and_every_epoch(tmp_path, capsys):
    criteo = script("criteo")
    lines = ["label,I1,C1,C2"]
    for number in range(300):
        count = "" if number % 7 == 0 else number % 5
        category = "" if number % 11 == 0 else f"{number % 3:x}"
        lines.append(f"{int(number % 3 == 1)},{count},{category},ff")
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    losses, results = criteo.main(
        ["--data", str(tmp_path / "log.csv"), "--epochs", "3", "--table-rates", "0.1", "0.0001"]
    )
    assert len(losses) == 3 * (240 // 12)
    printed = capsys.readouterr().out
    assert printed.count("step ") >= 20
    for epoch in (1, 2, 3):
        assert printed.count(f"DLRM, epoch {epoch} ") == 2
    # Each model reports its loss on the held-out rows once, for the chosen settings.
    assert printed.count(" held-out log-loss ") == len(results) == 3
    assert "DLRM: the validation rows chose rate 0.1 and epoch 3" in printed
    assert results["DLRM"].auc > 0.9 and results["logistic regression"].auc > 0.9


@pytest.mark.slow
def test_the_rows_that_are_reported_choose_nothing(monkeypatch):
    criteo = script("criteo")
    train, _ = criteo.generated(2_000, num_features=2)
    held_out, _ = criteo.generated(200, num_features=2, sample_seed=1)
    validation, _ = criteo.generated(200, num_features=2, sample_seed=2)
    # Epoch 1 is the best on the validation rows. The held-out rows must not be judged.
    first, last = criteo.Quality(0.5, 0.6, 9, 3), criteo.Quality(0.7, 0.6, 9, 3)
    for fit in (
        lambda: criteo.fit_linear((train, validation, held_out), 100, 2, 0.05, 0),
        lambda: criteo.fit_dlrm((train, validation, held_out), 100, 2, 0.1, 500, 0)[0],
    ):
        judge = mock.Mock(side_effect=[first, last])
        monkeypatch.setattr(criteo, "judge", judge)
        assert fit().epoch == 1
        assert [call.args[0] is validation.labels for call in judge.call_args_list] == [True, True]


def test_auc_is_the_share_of_pairs_in_order_and_the_loss_that_of_its_formula():
    criteo = script("criteo")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 60)
    # Some of the scores are equal.
    scores = generator.integers(0, 20, 60) / 4
    clicked = scores[labels == 1][:, None]
    others = scores[labels == 0]
    in_order = (clicked > others) + 0.5 * (clicked == others)
    assert_allclose(criteo.auc(labels, scores), in_order.mean(), rtol=1e-12)
    quality = criteo.judge(labels, scores)
    probability = 1 / (1 + np.exp(-scores))
    loss = -np.mean(labels * np.log(probability) + (1 - labels) * np.log(1 - probability))
    assert_allclose(quality.log_loss, loss, rtol=1e-9)


@pytest.mark.slow
def test_word2vec_brings_words_of_one_kind_together():
    word2vec = script("word2vec")
    losses, vectors, text = word2vec.main(["--steps", "1000"])
    # At first, six scores are about 0, and each one adds log(2) to the loss.
    assert abs(losses[0] - 6 * math.log(2)) < 0.1
    assert np.mean(losses[-100:]) < 0.85 * losses[0]
    assert "shall" in word2vec.nearest(vectors, text, "will")


def test_a_converted_model_has_the_losses_of_nnx_embed():
    theirs, ours = script("from_nnx_embed").main()
    assert_allclose(ours, theirs, rtol=1e-6)
    assert theirs[0] != theirs[-1]


@pytest.fixture
def small_training(monkeypatch):
    """The training program, with a smaller batch and a log of fewer ratings."""
    training = script("training")
    monkeypatch.setattr(training, "BATCH_SIZE", 256)
    log = rs.datasets.generated_ratings(200, 80, seed=0)
    monkeypatch.setattr(rs.datasets, "generated_ratings", lambda *sizes, seed: log)
    return training


def test_the_training_program_has_less_than_130_lines_of_code():
    source = (NOTEBOOKS / "training.py").read_text()
    without_docstrings = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    assert len(re.findall(r"^ *[^ #\n]", without_docstrings, re.MULTILINE)) < 130


@pytest.mark.slow
def test_a_training_that_runs_again_goes_on_with_the_bits_of_one_that_never_stopped(
    small_training, tmp_path, capsys, monkeypatch
):
    # With this, tensorboardX cannot be imported.
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    folders = {"stopped": ["1", "2"], "whole": ["2"]}
    printed = {}
    for folder, epochs_of_runs in folders.items():
        for epochs in epochs_of_runs:
            small_training.main(["--run", str(tmp_path / folder), "--epochs", epochs])
        printed[folder] = capsys.readouterr().out.splitlines()
    assert f"{tmp_path / 'stopped'} continues after epoch 1" in printed["stopped"]
    # A log with as many users, films and ratings, in which two films have swapped their ratings.
    ratings = rs.datasets.generated_ratings(seed=0)
    films = np.arange(len(ratings.titles), dtype=np.int32)
    films[[0, 1]] = [1, 0]
    other_ratings = dataclasses.replace(ratings, items=films[ratings.items])
    for name, log, seed in (("seed", ratings, 1), ("log of ratings", other_ratings, 0)):
        with pytest.raises(SystemExit, match=f"whole has a run with another {name}: .* --run"):
            small_training.fit(log, tmp_path / "whole", epochs=3, seed=seed)
    assert printed["stopped"][-3:] == printed["whole"][-3:]
    assert printed["whole"][-3].startswith("epoch 2: loss ")
    log = (tmp_path / "whole" / "log.csv").read_text()
    assert log.startswith("# loss,recall\n") and len(log.splitlines()) == 1 + 2
    assert (tmp_path / "stopped" / "log.csv").read_text() == log
    last_of_stopped, last_of_whole = (
        sorted((tmp_path / folder).glob("step_*"))[-1] for folder in folders
    )
    for path in last_of_whole.rglob("*.bin"):
        again = last_of_stopped / path.relative_to(last_of_whole)
        assert path.read_bytes() == again.read_bytes(), path


def test_training_stops_early_restores_the_best_epoch_and_logs_to_tensorboard(
    small_training, tmp_path, monkeypatch
):
    library = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "tensorboardX", library)
    recalls = iter([0.1, 0.3, 0.2, 0.3, 0.1, 0.9])
    monkeypatch.setattr(small_training, "recall", lambda *arguments, seen: next(recalls))
    log = rs.datasets.generated_ratings(seed=0)
    model, reached = small_training.fit(log, tmp_path, epochs=20, seed=0)
    # Training stops three epochs after the best one.
    assert reached == [0.1, 0.3, 0.2, 0.3, 0.1]
    train, validation, test = small_training.split(log)
    assert int(model.embeddings.state.step) == 2 * (len(train) // 256)
    written = library.SummaryWriter.return_value.add_scalar.call_args_list
    assert [call.args[1] for call in written if call.args[0] != "loss"] == reached
    for user in range(len(log.user_ids)):
        of_user = np.flatnonzero(log.users == user)
        assert of_user[-1] in test and of_user[-2] in validation
    assert sorted([*train, *validation, *test]) == [*range(len(log.users))]


def test_recall_of_the_training_program_is_that_of_a_loop(small_training):
    log = rs.datasets.generated_ratings(seed=0)
    train, validation, _ = small_training.split(log)
    scores = np.random.default_rng(0).random((len(validation), len(log.titles)))
    hits = []
    for row, scores_of_row in zip(validation, scores, strict=True):
        seen = log.items[train][log.users[train] == log.users[row]]
        order = [film for film in np.argsort(-scores_of_row) if film not in seen]
        hits.append(log.items[row] in order[:10])
    assert small_training.recall(log, scores, validation, train) == np.mean(hits)
