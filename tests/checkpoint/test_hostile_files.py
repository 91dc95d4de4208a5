"""Files that somebody damaged or raced for, and leaves that are more than numbers."""

import errno
import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import checkpoint

# Leaves


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16", "<f8"])
def test_numbers_keep_their_value_whatever_their_byte_order(tmp_path, dtype):
    values = np.asarray([1, 2, 258], dtype)
    checkpoint.save(tmp_path / "a", {"x": values})
    for like in (None, {"x": values}, {"x": values.astype(values.dtype.newbyteorder("="))}):
        found = checkpoint.load(tmp_path / "a", like).tree["x"]
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, values)


def test_wide_integers_are_not_narrowed_without_a_word(tmp_path):
    values = np.asarray([2**40, 3])
    checkpoint.save(tmp_path / "a", {"x": values})
    assert checkpoint.load(tmp_path / "a", {"x": values}).tree["x"].tolist() == [2**40, 3]
    for like in (jax.ShapeDtypeStruct((2,), np.int64), jnp.zeros(2, jnp.int32)):
        with pytest.raises(ValueError, match=r"'x' is int64\[2\], (which a JAX array cannot hold|wanted int32)"):
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
        r"0000/c\.1\.0: chunk 1, rows 4 to 7 of 'a', .* missing": lambda path: (path / "0000/c.1.0").unlink(),
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
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"the file is missing|does not hold 'x'"):
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


@pytest.mark.parametrize("too_large", ["an array", "the manifest"])
def test_a_save_that_fails_leaves_nothing_and_frees_what_it_took(tmp_path, too_large):
    tree = {"x": np.arange(3), "y": np.arange(100_000 if too_large == "an array" else 3), "z": np.arange(3)}
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
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "a").tree["y"], tree["y"])
