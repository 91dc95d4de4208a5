"""Programs that import jax-tpu-embedding run unchanged on `rsembed.sparsecore`."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rsembed.sparsecore import embedding, install_as_jax_tpu_embedding

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import importlib.util
import sys

import jax
import numpy as np

assert importlib.util.find_spec("jax_tpu_embedding") is not None
import jax_tpu_embedding.sparsecore.lib.fdo.file_fdo_client
from jax_tpu_embedding.sparsecore.examples.models.shakespeare import dataset
from jax_tpu_embedding.sparsecore.lib.flax.nnx import embed
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec
from jax_tpu_embedding.sparsecore.lib.nn.table_stacking import stack_and_shard_tables
from jax_tpu_embedding.sparsecore.utils import utils

table = embedding_spec.TableSpec(
    vocabulary_size=32, embedding_dim=8, initializer=jax.nn.initializers.ones, name="word", combiner="sum",
    optimizer=embedding_spec.SGDOptimizerSpec(learning_rate=0.5),
)
spec = embedding_spec.FeatureSpec(name="title", table_spec=table, input_shape=(8, 2), output_shape=(8, 8))
embedding.prepare_feature_specs_for_training([spec], global_device_count=1, num_sc_per_device=4)
given = [[np.full((8, 2), 3)], [np.ones((8, 2), np.float32)]]
inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
    *given, [spec], local_device_count=1, global_device_count=1, num_sc_per_device=utils.num_sparsecores_per_device(),
    sharding_strategy="MOD",
)
word_ids = dataset.load_shakespeare(vocab_size=64)
features, labels = dataset.word_id_batches(list(word_ids), num_steps=2, batch_size=4, seq_len=3, num_tables=1)
assert features["words_0"][1].shape == (4, 3, 1) and labels[1].tolist() == list(word_ids[3:7])
assert callable(stack_and_shard_tables) and list(inputs.lhs_row_pointers) == ["word"]
print(sys.argv[1:], embed.SparseCoreEmbed.__module__, __name__)
"""


@pytest.mark.parametrize("form", ["script", pytest.param("module", marks=pytest.mark.slow)])
def test_a_program_of_the_published_imports_runs_by_one_command(tmp_path, form):
    (tmp_path / "client.py").write_text(PROGRAM)
    named = ["-m", "client"] if form == "module" else [str(tmp_path / "client.py")]
    command = [sys.executable, "-m", "rsembed.sparsecore", *named, "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "['--steps', '3'] rsembed.sparsecore.nnx.embed __main__\n", done.stderr


def test_a_context_takes_the_names_away_again():
    with install_as_jax_tpu_embedding():
        from jax_tpu_embedding.sparsecore.lib.nn import embedding as theirs

        assert theirs is embedding
        with pytest.raises(RuntimeError, match="was imported before, from this alias"):
            install_as_jax_tpu_embedding()
    assert not [name for name in sys.modules if name.startswith("jax_tpu_embedding")]
    assert embedding.__name__ == embedding.__spec__.name == "rsembed.sparsecore.embedding"


def test_the_page_names_the_modules_that_a_program_can_import():
    prefix = "jax_tpu_embedding.sparsecore."
    with install_as_jax_tpu_embedding():
        names = [name for name in sys.modules if name.startswith(prefix)]
        modules = {
            name.removeprefix(prefix)
            for name in names
            if not hasattr(sys.modules[name], "__path__")
        }
    page = (ROOT / "docs" / "sparsecore.md").read_text()
    table = page.split("|---|---|\n")[1].split("\n\n")[0]
    published = [row.split("|")[1] for row in table.splitlines()]
    assert set(re.findall(r"`([\w.]+)`", "".join(published))) == modules


def test_no_program_is_no_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rsembed.sparsecore"])
    with pytest.raises(SystemExit, match="PROGRAM ARGUMENTS"):
        runpy.run_module("rsembed.sparsecore", run_name="__main__")


def test_a_keras_model_of_the_page_trains_on_two_devices(tmp_path):
    # An import of keras_rs would choose a backend, so the test only looks for it.
    if importlib.util.find_spec("keras_rs") is None:
        pytest.skip("needs keras and keras-rs: `make test-clients` runs it")
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "keras.md").read_text(), re.DOTALL
    )
    (tmp_path / "model.py").write_text(program)
    chosen = {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-m", "rsembed.sparsecore", "model.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | chosen
    )
    loss, tables = done.stdout.splitlines()[-1].split(" ", 1)
    assert float(loss) < 0.6 and tables == "{'seen': (500, 16), 'user': (1000, 16)}", done.stderr
