"""Checkpoints are loaded unchanged on another mesh, and damaged checkpoints are refused."""

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_array_equal

from rsembed import checkpoint
from tests.world import mesh_of


def make_tree():
    item = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    empty, large = np.zeros((0, 3), np.int64), np.uint64(2**63)
    return {
        "tables": {"item": item, "user": jnp.arange(12.0).reshape(4, 3)},
        "slots": [jnp.arange(5, dtype=jnp.bfloat16), (empty, large)],
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "rate": 0.25,
    }


def assert_equal_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert getattr(one, "dtype", float) == getattr(other, "dtype", float)
        assert np.shape(one) == np.shape(other)
        assert np.all(one == other)


def test_any_tree_comes_back_with_its_structure(tmp_path):
    tree, metadata = make_tree(), {"loss": [0.5], "α": {10: 1, 9: None}}
    checkpoint.save(tmp_path / "deep" / "a", tree, step=3, metadata=metadata)
    actual = checkpoint.load(tmp_path / "deep" / "a", tree)
    assert_equal_trees(actual.tree, tree)
    assert (actual.step, actual.metadata) == (3, {"loss": [0.5], "α": {"10": 1, "9": None}})
    assert isinstance(actual.tree["rate"], float) and isinstance(actual.tree["slots"][0], jax.Array)


def test_without_a_template_names_are_keys(tmp_path):
    checkpoint.save(tmp_path / "a", make_tree())
    tree = checkpoint.load(tmp_path / "a").tree
    assert sorted(tree) == ["key", "keys", "rate", "slots", "tables"]
    assert tree["slots"]["1"]["1"] == 2**63 and tree["slots"]["0"].dtype == jnp.bfloat16
    assert_equal_trees(tree["keys"], make_tree()["keys"])
    checkpoint.save(tmp_path / "b", np.arange(3))
    assert checkpoint.load(tmp_path / "b").tree.tolist() == [0, 1, 2]


def test_sharded_arrays_come_back_on_another_mesh(tmp_path, monkeypatch):
    # Chunks of this size cross the borders of shards.
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 200)
    values = np.arange(24 * 6, dtype=np.float32).reshape(24, 6)
    grid, line = mesh_of(4, 2), NamedSharding(mesh_of(3), P("x"))
    tree = {
        "rows": jax.device_put(values, NamedSharding(grid, P("y"))),
        "columns": jax.device_put(values, NamedSharding(grid, P(None, "y"))),
        "both": jax.device_put(values, NamedSharding(grid, P("x", "y"))),
    }
    checkpoint.save(tmp_path / "a", tree)
    like = {name: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=line) for name in tree}
    for array in checkpoint.load(tmp_path / "a", like).tree.values():
        assert array.sharding == line
        assert_array_equal(array, values)


def test_any_flipped_bit_is_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 64)
    tree = {"item": np.arange(60, dtype=np.float32).reshape(20, 3), "user": jax.random.key(0)}
    checkpoint.save(tmp_path / "a", tree, step=2, metadata={"note": "α"})
    files = sorted(file for file in (tmp_path / "a").rglob("*") if file.is_file())
    names = [file.relative_to(tmp_path / "a").as_posix() for file in files]
    chunks = [f"0000/c.{number}.0" for number in range(4)]
    assert names == [*chunks, "0000/zarr.json", "0001/c.0", "0001/zarr.json", "manifest.json"]
    rng = np.random.default_rng(0)
    for name, file in zip(names, files, strict=True):
        data = file.read_bytes()
        # A chunk has less than 70 bytes, so all its bytes are tested.
        for byte in rng.permutation(len(data))[:70]:
            flipped = bytearray(data)
            flipped[byte] ^= 1 << int(rng.integers(8))
            file.write_bytes(flipped)
            with pytest.raises(checkpoint.CorruptCheckpointError, match=name):
                checkpoint.load(tmp_path / "a")
        file.write_bytes(data)
    assert_equal_trees(checkpoint.load(tmp_path / "a", tree).tree, tree)


def test_the_error_names_file_chunk_array_and_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 48)
    checkpoint.save(tmp_path / "a", {"tables": {"item": np.zeros((20, 3), np.float32)}})
    file = tmp_path / "a" / "0000" / "c.2.0"
    data = file.read_bytes()
    message = r"c\.2\.0: chunk 2, rows 8 to 11 of 'tables/item', .*\(CRC32C differs\)"
    # Wrong rows, a wrong checksum, and files that are too short or too long.
    for content in (b"x" + data[1:], data[:-1] + b"x", b"", data[:3], data[:-1], data + b"x"):
        file.write_bytes(content)
        with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
            checkpoint.load(tmp_path / "a")


SAVE_FOR_EVER = """
import sys, numpy as np
from rsembed import checkpoint
for step in range(2, 10_000):
    checkpoint.save(f"{sys.argv[1]}/step_{step}", {"x": np.full((4_000_000,), step, np.float32)}, step=step)
    print(step, flush=True)
"""


def test_a_killed_save_leaves_the_checkpoints_before_it(tmp_path):
    checkpoint.save(tmp_path / "step_1", {"x": np.ones(4, np.float32)}, step=1)
    writer = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with writer:
        writer.stdout.readline()
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob(".*.partial/0000/c.*")) and time.monotonic() < deadline:
            pass
        os.kill(writer.pid, signal.SIGKILL)
    (torn,) = tmp_path.glob(".*.partial")
    with pytest.raises(
        FileNotFoundError, match=r"no manifest\.json\. An interrupted save leaves none"
    ):
        checkpoint.load(torn)
    last = tmp_path / f"step_{int(torn.name.split('_')[1].split('.')[0]) - 1}"
    actual = checkpoint.load(last)
    assert_array_equal(actual.tree["x"], np.full(4_000_000, actual.step, np.float32))


def test_no_checkpoint_is_replaced_and_what_is_refused_leaves_nothing(tmp_path):
    checkpoint.save(tmp_path / "a", {"x": np.zeros(1)})
    with pytest.raises(FileExistsError, match="never replaced"):
        checkpoint.save(tmp_path / "a", {"x": np.ones(1)})
    assert checkpoint.load(tmp_path / "a").tree["x"] == 0
    with pytest.raises(TypeError, match="leaf 'y' is <U4"):
        checkpoint.save(tmp_path / "b", {"x": np.ones(1), "y": "text"})
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
