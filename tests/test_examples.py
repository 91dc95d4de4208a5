"""The scripts beside the notebooks do what they say, for a few steps."""

import importlib.util
import math
from pathlib import Path

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_log_in_criteos_form_trains_hashed_tables_beside_logistic_regression(tmp_path, capsys):
    criteo = script("criteo")
    (labels, counts, keys), law = criteo.generated(40_000)
    counts, keys = np.floor(10 * np.maximum(counts, 0)).astype(int), keys % 2**32
    log = tmp_path / "train.txt"
    with log.open("w") as file:
        for label, numbers, categories in zip(labels, counts, keys, strict=True):
            shown = [int(label), *numbers, *(f"{key:08x}" for key in categories)]
            file.write("\t".join(map(str, shown)) + "\n")
    train, held = criteo.load(log, 40_000)
    assert_array_equal(np.concatenate([train.labels, held.labels]), labels)
    assert_allclose(np.concatenate([train.numbers, held.numbers]), np.log1p(counts), rtol=1e-6)
    assert_array_equal(np.concatenate([train.keys, held.keys]), keys)
    assert len(held.labels) == 4_000
    losses, results = criteo.main(["--data", str(log)])
    assert law.best_log_loss < np.mean(losses[-10:]) < law.base_rate_log_loss < losses[0] + 0.1
    for name in ("DLRM, epoch 1", "logistic regression"):
        assert law.best_log_loss < results[name].log_loss < results["rate of clicks"].log_loss
        assert 0.6 < results[name].auc < 0.8
    assert capsys.readouterr().out.count("step ") >= 10


def test_a_short_log_with_a_header_shows_its_loss_and_every_epoch(tmp_path, capsys):
    criteo = script("criteo")
    lines = ["label,I1,C1,C2"]
    for number in range(300):
        count = "" if number % 7 == 0 else number % 5
        category = "" if number % 11 == 0 else f"{number % 3:x}"
        lines.append(f"{int(number % 3 == 1)},{count},{category},ff")
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    losses, results = criteo.main(["--data", str(tmp_path / "log.csv"), "--epochs", "3"])
    assert len(losses) == 3 * (270 // 13)
    printed = capsys.readouterr().out
    assert printed.count("step ") >= 10
    assert list(results)[2:] == ["DLRM, epoch 1", "DLRM, epoch 2", "DLRM, epoch 3"]
    assert results["DLRM, epoch 3"].auc > 0.9 and results["logistic regression"].auc > 0.9


def test_auc_is_that_of_a_loop_over_pairs():
    criteo = script("criteo")
    generator = np.random.default_rng(0)
    # Some are equal.
    labels, scores = (
        generator.integers(0, 2, 60),
        generator.integers(0, 20, 60) / 4,
    )
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    assert_allclose(criteo.auc(labels, scores), np.mean(pairs), rtol=1e-12)
    quality = criteo.judge(labels, scores)
    probability = 1 / (1 + np.exp(-scores))
    loss = -np.mean(labels * np.log(probability) + (1 - labels) * np.log(1 - probability))
    assert_allclose(quality.log_loss, loss, rtol=1e-9)


def test_word2vec_brings_words_of_one_kind_together():
    word2vec = script("word2vec")
    losses, vectors, text = word2vec.main(["--steps", "1000"])
    assert abs(losses[0] - 6 * math.log(2)) < 0.1  # six scores of about 0
    assert np.mean(losses[-100:]) < 0.85 * losses[0]
    assert "shall" in word2vec.nearest(vectors, text, "will")


def test_a_converted_model_has_the_losses_of_nnx_embed():
    theirs, ours = script("from_nnx_embed").main()
    assert_allclose(ours, theirs, rtol=1e-6)
    assert theirs[0] != theirs[-1]
