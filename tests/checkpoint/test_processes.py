"""Checkpoints of collections on a mesh of several processes."""

from pathlib import Path

import jax
import numpy as np

from rsembed import checkpoint
from tests import launching
from tests.checkpoint.process_program import collection_of, keyed_collection, keys_of, step
from tests.world import assert_close, assert_same, made_mesh

PROGRAM = Path(__file__).with_name("process_program.py")


def test_processes_write_one_table_and_read_one_of_a_single_process(tmp_path):
    collection = collection_of()
    state = collection.init(jax.random.key(0))
    checkpoint.save(tmp_path / "alone", {"state": state})
    run = launching.start(PROGRAM, tmp_path / "shared", tmp_path / "alone")
    output = launching.printed(run)
    assert run.returncode == 0, output
    state = step(collection, state, np.arange(8).reshape(4, 2))
    restored = checkpoint.load_collection(tmp_path / "shared", collection)
    assert int(restored.step) == 1
    for read in (collection.tables, collection.slots):
        assert_close(read(restored), read(state), rtol=1e-6)
    keyed = keyed_collection(made_mesh(4))
    expected = keyed.tables(
        step(keyed, keyed.init(jax.random.key(0)), np.concatenate([keys_of(0), keys_of(1)]))
    )
    keys = [table["keys"].tolist() for table in expected.values()]
    assert output.count(f"keys {keys} [2 2 2 2]") == 2, output
    alone = keyed_collection()
    actual = alone.tables(checkpoint.load_collection(f"{tmp_path / 'shared'}-keys", alone))
    assert_same(actual, expected)
