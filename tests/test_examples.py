"""The scripts beside the notebooks do what they say, for a few steps."""

import importlib.util
import math
from pathlib import Path

import numpy as np

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_log_in_criteos_form_trains_hashed_tables(tmp_path):
    criteo = script("criteo")
    (labels, counts, keys), (best, base) = criteo.generated(40 * criteo.BATCH)
    counts, keys = np.floor(10 * np.maximum(counts, 0)).astype(int), keys % 2**32
    log = tmp_path / "train.txt"
    with log.open("w") as file:
        for label, numbers, categories in zip(labels, counts, keys, strict=True):
            shown = [int(label), *numbers, *(f"{key:08x}" for key in categories)]
            file.write("\t".join(map(str, shown)) + "\n")
    with log.open() as file:
        read = criteo.read(file)
    np.testing.assert_array_equal(read[0], labels)
    np.testing.assert_allclose(read[1], np.log1p(counts), rtol=1e-6)
    np.testing.assert_array_equal(read[2], keys)
    losses = criteo.main(["--data", str(log), "--steps", "40"])
    assert best < np.mean(losses[-10:]) < base < losses[0] + 0.1
    (_, numbers, keys) = criteo.read(["1" + "\t" * 39 + "\n"])
    assert not numbers.any() and not keys.any() and keys.shape == (1, 26)


def test_word2vec_brings_words_of_one_kind_together():
    word2vec = script("word2vec")
    losses, vectors, text = word2vec.main(["--steps", "1000"])
    assert abs(losses[0] - 6 * math.log(2)) < 0.1  # six scores of about 0
    assert np.mean(losses[-100:]) < 0.85 * losses[0]
    assert "shall" in word2vec.nearest(vectors, text, "will")


def test_a_converted_model_has_the_losses_of_nnx_embed():
    theirs, ours = script("from_nnx_embed").main()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert theirs[0] != theirs[-1]
