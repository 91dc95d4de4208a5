"""Checkpoints of layouts 1 and 2, which earlier versions wrote: some lie in `tests/data`, others are made of those."""

import json
import shutil
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint

OLD = Path(__file__).parents[1] / "data" / "checkpoints_of_layout_2"


def ramp(key, shape):
    return jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape)


def collection_of(**options):
    """The tables of the files, which were saved before their first step."""
    rule = rs.AdagradOptimizerSpec(0.1, initial_accumulator_value=0.5)
    tables = [
        rs.TableSpec(name=name, vocabulary_size=rows, embedding_dim=2, initializer=ramp, optimizer=rule)
        for name, rows in (("t", 8), ("u", 5))
    ]
    return rs.EmbeddingCollection([rs.FeatureSpec(name=f"f_{t.name}", table_spec=t) for t in tables], **options)


def mesh_of(num_devices):
    return jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])


def assert_holds(collection, state):
    for name, rows in (("t", 8), ("u", 5)):
        np.testing.assert_array_equal(collection.tables(state)[name], ramp(None, (rows, 2)))
        np.testing.assert_array_equal(collection.slots(state)[name].accumulator, np.full((rows, 2), 0.5))
    fresh = collection.init(jax.random.key(3))
    assert jax.random.key_data(state.key).tolist() == jax.random.key_data(fresh.key).tolist()


def test_a_tree_of_layout_2_comes_back_to_the_bit():
    expected = {
        "tables": {
            "item": np.arange(60, dtype=np.float32).reshape(20, 3) / 8,
            "half": jnp.arange(10, dtype=jnp.bfloat16).reshape(5, 2),
        },
        "flags": [np.arange(5) % 2 == 0, np.zeros((0, 3), np.int64), np.uint64(2**63), np.arange(3) * (1 - 2j)],
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "rate": 0.25,
    }
    found = checkpoint.load(OLD / "tree", expected)
    assert (found.step, found.metadata) == (3, {"α": [1, None]})
    assert jax.tree.structure(found.tree) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(found.tree), jax.tree.leaves(expected), strict=True):
        if isinstance(wanted, jax.Array) and jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
        assert np.asarray(got).dtype == np.asarray(wanted).dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    whole = checkpoint.load(OLD / "tree").tree
    np.testing.assert_array_equal(whole["tables"]["item"], expected["tables"]["item"])


@pytest.mark.parametrize("num_devices", [None, 4])
def test_a_collection_of_layout_2_comes_back_on_any_mesh(num_devices):
    collection = collection_of() if num_devices is None else collection_of(mesh=mesh_of(num_devices))
    state, others = checkpoint.load_collection(OLD / "collection", collection, others={"dense": np.zeros(3)})
    assert_holds(collection, state)
    assert others["dense"].tolist() == [0, 1, 2]
    found = checkpoint.load(OLD / "state", {"state": collection.template, "epoch": 0})
    assert (found.step, found.tree["epoch"]) == (2, 4)
    assert_holds(collection, found.tree["state"])


def test_damaged_files_of_layout_2_are_refused_by_chunk_and_rows(tmp_path):
    path = shutil.copytree(OLD / "tree", tmp_path / "a")
    (file,) = (path / entry["file"] for entry in entries(path) if entry["path"] == ["tables", "item"])
    data = file.read_bytes()
    for byte in range(0, len(data), 7):
        file.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << byte % 8]) + data[byte + 1 :])
        message = rf"{file.name}: chunk {byte // 48}, rows {byte // 48 * 4} to {byte // 48 * 4 + 3} of 'tables/item'"
        with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
            checkpoint.load(path)
    file.write_bytes(data[:-1])
    with pytest.raises(checkpoint.CorruptCheckpointError, match="is 239 bytes long, but 'tables/item' has 240 bytes"):
        checkpoint.load(path)
    file.unlink()
    with pytest.raises(checkpoint.CorruptCheckpointError, match=rf"{file.name} is missing"):
        checkpoint.load(path)


def entries(path):
    return json.loads((path / "manifest.json").read_text())["manifest"]["arrays"]


def make_layout_1(path):
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    body["layout_version"] = 1
    tables = body.pop("belongs_to").get("tables", {})
    body["metadata"]["tables"] = {name: {**table, "optimizer": "adagrad"} for name, table in tables.items()}
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    (path / "manifest.json").write_text(json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1))


def test_files_of_layout_1_are_read_and_said_to_be_old(tmp_path, caplog):
    for name in ("collection", "arrays_of_a_state"):
        make_layout_1(shutil.copytree(OLD / name, tmp_path / name))
    collection, like = collection_of(), {"state": collection_of().init(jax.random.key(0))}
    for found in (
        checkpoint.load_collection(tmp_path / "collection", collection),
        checkpoint.load(tmp_path / "arrays_of_a_state", like).tree["state"],
    ):
        assert found.layout == collection.layout
        assert_holds(collection, found)
    assert "has layout 1" in caplog.text
    on_mesh = collection_of(mesh=mesh_of(2))
    with pytest.raises(ValueError, match="has layout 1, which kept rows in the order of the devices"):
        checkpoint.load(tmp_path / "arrays_of_a_state", {"state": on_mesh.template})
