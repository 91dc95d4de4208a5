"""Files that somebody damaged, forged or raced for, and leaves that are more than numbers."""

import json
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint


def encoded(body):
    """A manifest with a right checksum, as a forger would write it."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    return json.dumps({"crc32": checksum, "manifest": body}, sort_keys=True, indent=1)


def forge(path, change):
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    change(body)
    (path / "manifest.json").write_text(encoded(body))


# Leaves


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16", "<f8"])
def test_numbers_keep_their_value_whatever_their_byte_order(tmp_path, dtype):
    values = np.asarray([1, 2, 258], dtype)
    checkpoint.save(tmp_path / "a", {"x": values})
    for like in (None, {"x": values}, {"x": values.astype(values.dtype.newbyteorder("="))}):
        found = checkpoint.load(tmp_path / "a", like).tree["x"]
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.zeros(2, [("id", np.int32), ("weight", np.float32)]), "leaf 'x' is .*fields of a record"),
        (np.zeros(2, "V8"), "leaf 'x' is .*only arrays of numbers"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"leaf 'x' is a masked array.*\.data and \.mask"),
        (np.asarray(["a"], object), "leaf 'x' is object"),
        (np.asarray(["2026-01-01"], "datetime64[D]"), "leaf 'x' is datetime64"),
    ],
)
def test_what_numbers_cannot_say_is_refused_before_anything_is_written(tmp_path, leaf, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path / "a", {"x": leaf})
    assert list(tmp_path.iterdir()) == []


def test_wide_integers_are_not_narrowed_without_a_word(tmp_path):
    values = np.asarray([2**40, 3])
    checkpoint.save(tmp_path / "a", {"x": values})
    assert checkpoint.load(tmp_path / "a", {"x": values}).tree["x"].tolist() == [2**40, 3]
    for like in (jax.ShapeDtypeStruct((2,), np.int64), jnp.zeros(2, jnp.int32)):
        with pytest.raises(ValueError, match=r"'x' is int64\[2\], (which a JAX array cannot hold|wanted int32)"):
            checkpoint.load(tmp_path / "a", {"x": like})


# Manifests


def test_latest_goes_on_to_the_newest_good_checkpoint_and_says_so(tmp_path):
    for step in range(4):
        checkpoint.save(tmp_path / f"step_{step}", {"x": np.arange(3)}, step=step)
    for step in (0, 3):
        file = tmp_path / f"step_{step}" / "manifest.json"
        file.write_bytes(file.read_bytes()[:-5])
    with pytest.warns(UserWarning, match=r"step_. is passed over: .*manifest\.json is not what was written") as told:
        assert checkpoint.latest(tmp_path).name == "step_2"
    assert len(told) == 2
    (tmp_path / "step_1" / "manifest.json").write_bytes(b"")
    (tmp_path / "step_2" / "manifest.json").write_bytes(b'{"manifest": []}')
    with pytest.warns(UserWarning, match="passed over"):
        assert checkpoint.latest(tmp_path) is None


def set_entry(**changes):
    return lambda body: body["arrays"][0].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        set_entry(file="../secret.bin"),
        set_entry(file="/etc/hostname"),
        set_entry(file="0001.bin"),
        set_entry(crc32=[]),
        set_entry(crc32=["00000000"] * 3),
        set_entry(rows_per_chunk=0),
        set_entry(rows_per_chunk=-1),
        set_entry(shape=[-3]),
        set_entry(shape=[3.0]),
        set_entry(shape="3"),
        set_entry(dtype="object"),
        set_entry(dtype="V8"),
        set_entry(path=[3]),
        lambda body: body.update(arrays=[{}]),
        lambda body: body.update(arrays=["x"]),
    ],
)
def test_a_forged_manifest_reads_nothing_outside_its_folder_and_skips_no_check(tmp_path, change):
    (tmp_path / "secret.bin").write_bytes(np.arange(3).tobytes())
    checkpoint.save(tmp_path / "a", {"x": np.arange(3)})
    forge(tmp_path / "a", change)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"entry 0 of the manifest|is not what was written"):
        checkpoint.load(tmp_path / "a")


def test_a_forged_size_is_refused_before_memory_is_asked_for(tmp_path):
    checkpoint.save(tmp_path / "a", {"x": np.arange(3)})
    forge(tmp_path / "a", set_entry(shape=[2**50], rows_per_chunk=2**50))
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"0000\.bin is 24 bytes long, but 'x' has"):
        checkpoint.load(tmp_path / "a")


# Savers


def test_of_several_savers_of_one_path_exactly_one_succeeds_and_what_it_wrote_can_be_read(tmp_path):
    def save(path, number, gate):
        gate.wait()
        try:
            checkpoint.save(path, {"x": np.full(200_000, number), "y": np.full(3, number)}, step=number)
        except FileExistsError as error:
            return str(error)

    for race in range(6):
        path, gate = tmp_path / f"race_{race}", threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            errors = list(pool.map(save, [path] * 4, range(4), [gate] * 4))
        found = checkpoint.load(path)
        assert len([error for error in errors if error is not None and "never replaced" in error]) == 3
        assert (found.tree["x"] == found.step).all() and (found.tree["y"] == found.step).all()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_save_that_fails_leaves_nothing_and_frees_what_it_took(tmp_path, monkeypatch):
    def full(file, mode="r", *args):
        if "w" in mode and "0001" in str(file):
            raise OSError(28, "No space left on device")
        return open(file, mode, *args)

    monkeypatch.setattr(checkpoint.arrays, "open", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "a", {"x": np.arange(3), "y": np.arange(3)})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / ".a.of-somebody.partial").mkdir()
    checkpoint.save(tmp_path / "a", {"x": np.arange(3), "y": np.arange(3)})
    assert checkpoint.load(tmp_path / "a").tree["y"].tolist() == [0, 1, 2]
    assert (tmp_path / ".a.of-somebody.partial").exists()


# Files of the layout before


def small_collection(**options):
    table = rs.TableSpec(name="t", vocabulary_size=8, embedding_dim=2, optimizer=rs.AdagradOptimizerSpec(0.1))
    return rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], **options)


def make_old(body):
    body["layout_version"] = 1
    (table,) = body.pop("belongs_to").get("tables", {"t": {}}).values()
    body["metadata"]["tables"] = {"t": {**table, "optimizer": "adagrad"}}


def test_files_of_the_layout_before_are_read_and_said_to_be_old(tmp_path, caplog):
    collection = small_collection()
    state = collection.init(jax.random.key(3))
    checkpoint.save_collection(tmp_path / "collection", collection, state)
    checkpoint.save(tmp_path / "tree", {"state": state._replace(layout=None)})
    for name in ("collection", "tree"):
        forge(tmp_path / name, make_old)
    for found in (
        checkpoint.load_collection(tmp_path / "collection", collection),
        checkpoint.load(tmp_path / "tree", {"state": collection.init(jax.random.key(0))}).tree["state"],
    ):
        assert found.layout == collection.layout
        np.testing.assert_array_equal(collection.tables(found)["t"], collection.tables(state)["t"])
    assert "has layout 1" in caplog.text
    on_mesh = small_collection(mesh=jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="has layout 1, which kept rows in the order of the devices"):
        checkpoint.load(tmp_path / "tree", {"state": on_mesh.template})
