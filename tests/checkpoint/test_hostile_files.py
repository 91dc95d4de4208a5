"""Files that somebody damaged or raced for, and leaves that are more than numbers."""

import errno
import functools
import json
import os
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
        found = checkpoint.load(tmp_path / "a", like).tree["x"]
        assert found.dtype.isnative
        assert_array_equal(found, values)


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


def test_files_that_are_missing_or_in_each_others_place_are_refused(tmp_path, monkeypatch):
    """What a reader of zarr would take for zeros, or for the rows themselves."""
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 48)
    tree = {"a": np.zeros((12, 3), np.float32), "b": np.arange(36, dtype=np.float32).reshape(12, 3)}
    first, second = "0001/c.0.0", "0001/c.1.0"

    def swap(path, *names):
        contents = [(path / name).read_bytes() for name in names]
        for name, content in zip(names, contents[::-1], strict=True):
            (path / name).write_bytes(content)

    damages = {
        r"0000/c\.1\.0: chunk 1, rows 4 to 7 of 'a', .* missing": lambda path: (
            path / "0000/c.1.0"
        ).unlink(),
        r"0001/c\.0\.0: .* missing": lambda path: (path / first).rename(path / "0001/c.0"),
        r"0001/c\.0\.0: chunk 0, rows 0 to 3 of 'b'": lambda path: swap(path, first, second),
        r"0000/c\.0\.0: chunk 0, rows 0 to 3 of 'a'": lambda path: swap(path, "0000/c.0.0", first),
        r"0001/zarr\.json of 'b' is missing": lambda path: (path / "0001/zarr.json").unlink(),
        r"0000/zarr\.json of 'a' is missing": lambda path: shutil.rmtree(path / "0000"),
    }
    for number, (message, damage) in enumerate(damages.items()):
        path = tmp_path / str(number)
        checkpoint.save(path, tree)
        damage(path)
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


# Manifests whose checksum is right


def forged(path, change):
    """Changes the body of a manifest, and its checksum with it."""
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())["manifest"]
    change(body)
    file.write_bytes(checkpoint.files.encoded(body))


ABSENT = object()
TOP_FIELDS = {
    "step": [ABSENT, "3", None, -1, 1.5, float("nan"), True, [3], {}],
    "layout_version": [ABSENT, "4", None, [], 4.5],
    "belongs_to": [ABSENT, None, [], "x", 3],
    "metadata": [ABSENT, None, [], "x", 3],
    "arrays": [ABSENT, None, {}, "x", 3, [3], [None], [[]], ["x"], [{}]],
}
ENTRY_FIELDS = {
    "folder": [ABSENT, None, 3, [], "0001", "../0000", "/tmp", "", "0000/."],
    "path": [ABSENT, None, "y", [3], {}, [["x"]], ["y"]],
    "shape": [
        ABSENT, None, 6, "6", {}, [None], ["6"], [6.0], [-6], [True], [2**40], [2**40, 4], [6, 2**40], [2**80], [3, 2],
        [5], [7], [1] * 33, [0, 2**62, 2**62], [],
    ],
    "dtype": [
        ABSENT, None, 3, [], {}, "nonsense", "object", "f4", "float32,int8", "f4,(", "datetime64", "str", "longdouble",
        "float64", "int8",
    ],
    "rows_per_chunk": [ABSENT, None, 0, -1, "6", 6.0, True, [], 2**40, 7, 2],
    "metadata_crc32": [ABSENT, None, 3, [], "", "00000000", "x" * 8],
    "crc32c": [ABSENT, None, 3, {}, "", [], [3], [None], ["00000000"], ["x"], ["00000000"] * 2],
    "prng": [ABSENT, 3, [], {}, "nonsense", "threefry2x32"],
}  # fmt: skip


def with_field(fields, name, value):
    if value is ABSENT:
        del fields[name]
    else:
        fields[name] = value


def test_forged_fields_of_a_manifest_are_refused_by_file_before_anything_is_allocated(tmp_path):
    """One error class for all of them; none of them makes a list or an array of the size that it declares."""
    tree = {"x": np.arange(6.0, dtype=np.float32), "y": np.ones((2, 2), np.float32)}
    checkpoint.save(tmp_path / "a", tree, step=3)
    intact = (tmp_path / "a" / "manifest.json").read_bytes()
    number = 0
    for fields, of_entry in ((TOP_FIELDS, False), (ENTRY_FIELDS, True)):
        for name, values in fields.items():
            for value in values:
                body = json.loads(intact)["manifest"]
                with_field(body["arrays"][0] if of_entry else body, name, value)
                (tmp_path / "a" / "manifest.json").write_bytes(checkpoint.files.encoded(body))
                for read in (
                    checkpoint.load,
                    checkpoint.verify,
                    lambda path: checkpoint.load(path, tree),
                ):
                    start = time.perf_counter()
                    with pytest.raises(
                        checkpoint.CorruptCheckpointError, match=str(tmp_path / "a")
                    ):
                        read(tmp_path / "a")
                    assert time.perf_counter() - start < 2.0, (name, value)
                (tmp_path / "a" / "manifest.json").write_bytes(intact)
                number += 1
    assert number > 80
    assert_array_equal(checkpoint.load(tmp_path / "a").tree["x"], tree["x"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"manifest": []}',
        b"[" * 200_000,
        b"\xff\xfe",
        b'{"manifest": {}, "crc32": "0"}',
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused_by_its_name(tmp_path, content):
    checkpoint.save(tmp_path / "a", {"x": np.arange(3)})
    (tmp_path / "a" / "manifest.json").write_bytes(content)
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"manifest\.json is not what was written"
    ):
        checkpoint.load(tmp_path / "a")


def test_arrays_in_the_place_of_dictionaries_are_refused(tmp_path):
    checkpoint.save(tmp_path / "a", {"x": np.arange(3), "y": {"z": np.arange(3)}})
    forged(tmp_path / "a", functools.partial(rename, 0, ["y"]))
    with pytest.raises(
        checkpoint.CorruptCheckpointError,
        match=r"manifest\.json .*'y' is an array, and so is 'y/z'",
    ):
        checkpoint.load(tmp_path / "a")


def collection_of_all_kinds():
    how = {"embedding_dim": 4, "vocabulary_size": 6, "optimizer": rs.optimizers.Adagrad(0.1)}
    storages = {"dense": None, "keyed": rs.Hashed(), "host": rs.HostCached(cache_rows=4)}
    tables = [rs.TableSpec(name, storage=storage, **how) for name, storage in storages.items()]
    return rs.EmbeddingCollection([rs.FeatureSpec(table.name, table) for table in tables])


def rename(number, path, body):
    body["arrays"][number]["path"] = path


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("resize", [False, True])
def test_a_collection_whose_manifest_was_forged_is_refused_by_file(tmp_path, resize):
    collection = collection_of_all_kinds()
    checkpoint.save_collection(tmp_path / "a", collection, collection.init(jax.random.key(0)))
    intact = (tmp_path / "a" / "manifest.json").read_bytes()
    body = json.loads(intact)["manifest"]
    paths = ([], ["tables"], ["slots"], ["elsewhere"], ["tables", "host", "x"])
    assert len(body["arrays"]) >= len(paths)
    # Each array gets one of the paths.
    changes = [
        functools.partial(rename, number, paths[number % len(paths)])
        for number in range(len(body["arrays"]))
    ]
    changes += [
        lambda body: body.update(step=2**31),
        lambda body: body["belongs_to"].update(tables=3),
        lambda body: body["belongs_to"].update(tables=None),
        lambda body: body["belongs_to"].update(tables=[]),
        lambda body: body["belongs_to"]["tables"].update(dense=3),
        lambda body: body["belongs_to"]["tables"]["dense"].update(vocabulary_size="6"),
        lambda body: body["belongs_to"]["tables"]["dense"].update(vocabulary_size=5),
        lambda body: body["belongs_to"]["tables"]["dense"].pop("dtype"),
        lambda body: body["belongs_to"].pop("tables"),
    ]
    for change in changes:
        forged(tmp_path / "a", change)
        try:
            state = checkpoint.load_collection(tmp_path / "a", collection, resize=resize)
        except ValueError as error:  # corrupt, or of other tables
            assert str(tmp_path / "a") in str(error)
        else:  # what was renamed was not missed: a fact that a resize accepts
            assert resize and state.step == 0
        (tmp_path / "a" / "manifest.json").write_bytes(intact)
    assert int(checkpoint.load_collection(tmp_path / "a", collection, resize=resize).step) == 0


# Savers


def test_of_several_savers_of_one_path_exactly_one_succeeds_and_what_it_wrote_can_be_read(tmp_path):
    def save(path, number, gate):
        gate.wait()
        try:
            checkpoint.save(
                path, {"x": np.full(200_000, number), "y": np.full(3, number)}, step=number
            )
        except FileExistsError as error:
            return str(error)

    for race in range(6):
        path, gate = tmp_path / f"race_{race}", threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            errors = list(pool.map(save, [path] * 4, range(4), [gate] * 4))
        found = checkpoint.load(path)
        assert (
            len([error for error in errors if error is not None and "never replaced" in error]) == 3
        )
        assert (found.tree["x"] == found.step).all() and (found.tree["y"] == found.step).all()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.parametrize("too_large", ["an array", "the manifest"])
def test_a_save_that_fails_leaves_nothing_and_frees_what_it_took(tmp_path, too_large):
    tree = {
        "x": np.arange(3),
        "y": np.arange(100_000 if too_large == "an array" else 3),
        "z": np.arange(3),
    }
    metadata = {"note": "" if too_large == "an array" else "long" * 20_000}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            checkpoint.save(tmp_path / "a", tree, metadata=metadata)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a", tree)
    assert_array_equal(checkpoint.load(tmp_path / "a").tree["y"], tree["y"])
