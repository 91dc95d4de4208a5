"""Checkpoints of collections that several processes share."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from rsembed import checkpoint
from tests.checkpoint.process_program import collection_of, keyed_collection, keys_of, step

PROGRAM = Path(__file__).with_name("process_program.py")


def test_processes_write_one_table_and_read_one_of_a_single_process(tmp_path):
    collection = collection_of()
    state = collection.init(jax.random.key(0))
    checkpoint.save(tmp_path / "alone", {"state": state})
    command = [sys.executable, "-m", "rsembed", "launch", "--processes=2", "--devices-per-process=2", str(PROGRAM)]
    environment = os.environ | {"XLA_FLAGS": os.environ["RSEMBED_TEST_XLA_FLAGS"]}  # see tests/conftest.py
    environment["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, str(tmp_path / "shared"), str(tmp_path / "alone")],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    for process in range(2):
        assert f"[{process}] restored [True] sum 190.0" in output, output
        assert f"[{process}] second save refused" in output
        assert f"[{process}] impossible save refused:" in output
        assert f"[{process}] managed [True] 2" in output
        assert f"[{process}] impossible folder refused:" in output
    state = step(collection, state, np.arange(8).reshape(4, 2))
    restored = checkpoint.load_collection(tmp_path / "shared", collection)
    assert int(restored.step) == 1
    np.testing.assert_allclose(collection.tables(restored)["item"], collection.tables(state)["item"], rtol=1e-6)
    np.testing.assert_allclose(
        collection.slots(restored)["item"].accumulator, collection.slots(state)["item"].accumulator, rtol=1e-6
    )
    keyed = keyed_collection(jax.make_mesh((4,), ("device",), devices=jax.devices()[:4]))
    expected = keyed.tables(step(keyed, keyed.init(jax.random.key(0)), np.concatenate([keys_of(0), keys_of(1)])))
    keys = [own["keys"].tolist() for own in expected.values()]
    assert output.count(f"keys {keys} [2 2 2 2]") == 2, output
    alone = keyed_collection()
    found = alone.tables(checkpoint.load_collection(f"{tmp_path / 'shared'}-keys", alone))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
