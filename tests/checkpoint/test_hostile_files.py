"""Damaged and forged files, concurrent saves, failed saves, and leaves with unusual dtypes."""

import errno
import functools
import json
import operator
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import rsembed as rs
from rsembed import checkpoint

# Leaves


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16", "<f8"])
def test_numbers_keep_their_value_whatever_their_byte_order(tmp_path, dtype):
    values = np.asarray([1, 2, 258], dtype)
    checkpoint.save(tmp_path / "a", {"x": values})
    for like in (None, {"x": values}, {"x": values.astype(values.dtype.newbyteorder("="))}):
        actual = checkpoint.load(tmp_path / "a", like).tree["x"]
        assert actual.dtype.isnative
        assert_array_equal(actual, values)


def test_wide_integers_are_not_narrowed_without_a_word(tmp_path):
    values = np.asarray([2**40, 3])
    checkpoint.save(tmp_path / "a", {"x": values})
    assert checkpoint.load(tmp_path / "a", {"x": values}).tree["x"].tolist() == [2**40, 3]
    for like in (jax.ShapeDtypeStruct((2,), np.int64), jnp.zeros(2, jnp.int32)):
        with pytest.raises(
            ValueError, match=r"'x' is int64\[2\], (which a JAX array cannot hold|wanted int32)"
        ):
            checkpoint.load(tmp_path / "a", {"x": like})


# Files of arrays


def swap(one, other):
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])


def test_files_that_are_missing_or_in_each_others_place_are_refused(tmp_path, monkeypatch):
    """A reader of zarr would read zeros for some of these files, and wrong rows for others."""
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 48)
    tree = {"a": np.zeros((12, 3), np.float32), "b": np.arange(36, dtype=np.float32).reshape(12, 3)}
    damages = {
        r"0000/c\.1\.0: chunk 1, rows 4 to 7 of 'a', .* missing": lambda a, b: (
            a / "c.1.0"
        ).unlink(),
        r"0001/c\.0\.0: .* missing": lambda a, b: (b / "c.0.0").rename(b / "c.0"),
        r"0001/c\.0\.0: chunk 0, rows 0 to 3 of 'b'": lambda a, b: swap(b / "c.0.0", b / "c.1.0"),
        r"0000/c\.0\.0: chunk 0, rows 0 to 3 of 'a'": lambda a, b: swap(a / "c.0.0", b / "c.0.0"),
        r"0001/zarr\.json of 'b' is missing": lambda a, b: (b / "zarr.json").unlink(),
        r"0000/zarr\.json of 'a' is missing": lambda a, b: shutil.rmtree(a),
    }
    for number, (message, damage) in enumerate(damages.items()):
        path = tmp_path / str(number)
        checkpoint.save(path, tree)
        damage(path / "0000", path / "0001")
        with pytest.raises(checkpoint.CorruptCheckpointError, match=message):
            checkpoint.load(path, tree)


def test_what_is_removed_during_a_load_is_refused_and_not_taken_for_zeros(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a", {"x": np.arange(3)})
    whole = checkpoint.states.SavedArray.whole

    def remove_before(array):
        shutil.rmtree(tmp_path / "a")
        return whole(array)

    monkeypatch.setattr(checkpoint.states.SavedArray, "whole", remove_before)
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"the file is missing|does not hold 'x'"
    ):
        checkpoint.load(tmp_path / "a")


# Manifests with valid checksums


ABSENT = object()


def forge(path, place, value):
    """Changes a field in the body of a manifest, and updates the checksum."""
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())["manifest"]
    *before, name = place
    fields = functools.reduce(operator.getitem, before, body)
    if value is ABSENT:
        del fields[name]
    else:
        fields[name] = value
    file.write_bytes(checkpoint.files.encoded(body))


FIELDS_OF_BODY = {
    "step": [ABSENT, "3", -1, 1.5, True],
    "layout_version": [ABSENT, "4", 4.5],
    "belongs_to": [ABSENT, None, []],
    "metadata": [ABSENT, None, []],
    "arrays": [ABSENT, {}, [3], [{}]],
}
FIELDS_OF_ENTRY = {
    "folder": [ABSENT, "0001", "../0000"],
    "path": [ABSENT, "y", {}, [["x"]], ["y"]],
    "shape": [
        ABSENT, {}, ["6"], [6.0], [-6], [True], [2**40], [6, 2**40], [2**80], [3, 2], [7],
        [1] * 33, [0, 2**62, 2**62], [],
    ],
    "dtype": [
        ABSENT, {}, "nonsense", "object", "f4", "f4,(", "datetime64", "longdouble", "float64",
        "int8",
    ],
    "rows_per_chunk": [ABSENT, 0, -1, "6", 6.0, True, 2**40, 7, 2],
    "metadata_crc32": [ABSENT, "", "00000000", "x" * 8],
    "crc32c": [ABSENT, "", [], [3], ["00000000"], ["00000000"] * 2],
    "prng": [ABSENT, 3, "nonsense", "threefry2x32"],
}  # fmt: skip


@pytest.mark.parametrize("name", [*FIELDS_OF_BODY, *FIELDS_OF_ENTRY])
def test_forged_fields_of_a_manifest_are_refused_by_file_before_anything_is_allocated(
    tmp_path, name
):
    """All of them raise the same class of error, and none allocates memory of a forged size."""
    tree = {"x": np.arange(6.0, dtype=np.float32), "y": np.ones((2, 2), np.float32)}
    path = tmp_path / "a"
    checkpoint.save(path, tree, step=3)
    readers = (checkpoint.load, checkpoint.verify, lambda path: checkpoint.load(path, tree))
    intact = (path / "manifest.json").read_bytes()
    for value in (FIELDS_OF_BODY | FIELDS_OF_ENTRY)[name]:
        forge(path, [name] if name in FIELDS_OF_BODY else ["arrays", 0, name], value)
        for read in readers:
            start = time.perf_counter()
            with pytest.raises(checkpoint.CorruptCheckpointError, match=str(path)):
                read(path)
            assert time.perf_counter() - start < 2.0, value
        (path / "manifest.json").write_bytes(intact)
    assert_array_equal(checkpoint.load(path).tree["x"], tree["x"])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b'{"manifest": []}', b"[" * 200_000, b"\xff\xfe"]
)
def test_a_manifest_that_is_no_manifest_is_refused_by_its_name(tmp_path, content):
    checkpoint.save(tmp_path / "a", {"x": np.arange(3)})
    (tmp_path / "a" / "manifest.json").write_bytes(content)
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"manifest\.json is not what was written"
    ):
        checkpoint.load(tmp_path / "a")


def collection_of_all_kinds():
    options = {"embedding_dim": 4, "vocabulary_size": 6, "optimizer": rs.optimizers.Adagrad(0.1)}
    storages = {"dense": None, "keyed": rs.Hashed(), "host": rs.HostCached(cache_rows=4)}
    tables = [rs.TableSpec(name, storage=storage, **options) for name, storage in storages.items()]
    return rs.EmbeddingCollection([rs.FeatureSpec(table.name, table) for table in tables])


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("resize", [False, True])
def test_a_collection_whose_manifest_was_forged_is_refused_by_file(tmp_path, resize):
    collection, path = collection_of_all_kinds(), tmp_path / "a"
    checkpoint.save_collection(path, collection, collection.init(jax.random.key(0)))
    intact = (path / "manifest.json").read_bytes()
    forgeries = [
        (["step"], 2**31),
        (["belongs_to", "tables"], 3),
        (["belongs_to", "tables"], None),
        (["belongs_to", "tables"], []),
        (["belongs_to", "tables"], ABSENT),
        (["belongs_to", "tables", "dense"], 3),
        (["belongs_to", "tables", "dense", "vocabulary_size"], "6"),
        (["belongs_to", "tables", "dense", "vocabulary_size"], 5),
        (["belongs_to", "tables", "dense", "dtype"], ABSENT),
    ]
    paths = ([], ["tables"], ["slots"], ["elsewhere"], ["tables", "host", "x"])
    num_arrays = len(json.loads(intact)["manifest"]["arrays"])
    assert num_arrays >= len(paths)
    for number in range(num_arrays):
        forgeries.append((["arrays", number, "path"], paths[number % len(paths)]))
    for place, value in forgeries:
        forge(path, place, value)
        try:
            state = checkpoint.load_collection(path, collection, resize=resize)
        # The file is corrupt, or has other tables.
        except ValueError as error:
            assert str(path) in str(error)
        # The renamed entry is not needed: with `resize`, it may be missing.
        else:
            assert resize and state.step == 0
        (path / "manifest.json").write_bytes(intact)
    assert int(checkpoint.load_collection(path, collection, resize=resize).step) == 0


# Savers


def test_of_several_savers_of_one_path_exactly_one_succeeds_and_what_it_wrote_can_be_read(tmp_path):
    def saves(path, number, gate):
        gate.wait()
        tree = {"x": np.full(200_000, number), "y": np.full(3, number)}
        try:
            checkpoint.save(path, tree, step=number)
        except FileExistsError:
            return False
        return True

    for race in range(6):
        path, gate = tmp_path / f"race_{race}", threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(saves, [path] * 4, range(4), [gate] * 4)) == 1
        actual = checkpoint.load(path)
        assert (actual.tree["x"] == actual.step).all() and (actual.tree["y"] == actual.step).all()
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("length", "note"), [(100_000, ""), (3, "long" * 20_000)], ids=["an array", "the manifest"]
)
def test_a_save_that_fails_leaves_nothing_and_frees_what_it_took(tmp_path, length, note):
    tree = {"x": np.arange(3), "y": np.arange(length), "z": np.arange(3)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            checkpoint.save(tmp_path / "a", tree, metadata={"note": note})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a", tree)
    assert_array_equal(checkpoint.load(tmp_path / "a").tree["y"], tree["y"])
