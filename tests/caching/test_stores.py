"""Both stores against a plain array, over one contract."""

import ml_dtypes
import numpy as np
import pytest

from rsembed.caching import RowStore


@pytest.fixture(params=["memory", "file"])
def make_store(request, tmp_path):
    if request.param == "memory":
        return RowStore.in_memory
    return lambda shape, dtype: RowStore.in_file(tmp_path / "rows.bin", shape, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("shape", [(100, 4), (100,), (100, 2, 3)])
def test_a_store_behaves_like_an_array(make_store, shape, dtype):
    generator = np.random.default_rng(0)
    store, array = make_store(shape, dtype), np.zeros(shape, dtype)
    assert store.shape == shape and store.dtype == dtype
    for _ in range(5):
        rows = generator.permutation(100)[:30]
        values = generator.integers(-100, 100, (30, *shape[1:])).astype(dtype)
        store.write(rows, values)
        array[rows] = values
        wanted = generator.integers(0, 100, 50)
        got = store.read(wanted)
        assert type(got) is np.ndarray and got.dtype == dtype
        np.testing.assert_array_equal(got, array[wanted])


def test_what_was_read_is_a_copy(make_store):
    store = make_store((3, 2), np.float32)
    store.read(np.array([1]))[:] = 7
    assert not store.read(np.arange(3)).any()


def test_fill_goes_block_by_block(make_store):
    store, blocks = make_store((10, 2), np.float32), []

    def block(start, stop):
        blocks.append((start, stop))
        return np.arange(start, stop, dtype=np.float32)[:, None]

    store.fill(block, rows_per_block=4)
    assert blocks == [(0, 4), (4, 8), (8, 10)]
    np.testing.assert_array_equal(store.read(np.arange(10)), np.repeat(np.arange(10.0), 2).reshape(10, 2))


@pytest.mark.parametrize("rows", [[0, -1], [3], [-4]])
def test_rows_outside_are_refused(make_store, rows):
    store, rows = make_store((3, 2), np.float32), np.asarray(rows)
    with pytest.raises(IndexError, match="0 to 2, got"):
        store.read(rows)
    with pytest.raises(IndexError, match="0 to 2, got"):
        store.write(rows, np.zeros((rows.size, 2), np.float32))


@pytest.mark.parametrize("values", [np.zeros((1, 2), np.float32), np.zeros(2, np.float32), np.zeros((2, 2))])
def test_values_must_be_rows_of_the_store(make_store, values):
    with pytest.raises(ValueError, match="cannot take values of shape"):
        make_store((3, 2), np.float32).write(np.array([0, 1]), values)


def test_a_file_holds_the_rows_row_after_row(tmp_path):
    path = tmp_path / "rows.bin"
    store = RowStore.in_file(path, (4, 2), np.float32)
    store.write(np.array([2]), np.array([[1, 2]], np.float32))
    store.flush()
    np.testing.assert_array_equal(np.fromfile(path, np.float32), [0, 0, 0, 0, 1, 2, 0, 0])
    np.testing.assert_array_equal(RowStore.in_file(path, (4, 2), np.float32).read(np.array([2])), [[1, 2]])


def test_a_new_file_is_sparse(tmp_path):
    path = tmp_path / "rows.bin"
    store = RowStore.in_file(path, (2**26, 16), np.float32)  # 4 GiB
    store.write(np.array([2**26 - 1]), np.ones((1, 16), np.float32))
    assert path.stat().st_size == 2**32
    store.flush()
    assert path.stat().st_blocks * 512 < 2**24


def test_a_file_of_another_size_is_refused_and_kept(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"has 8 bytes, but rows of shape \(4, 2\) and dtype float32 need 32"):
        RowStore.in_file(path, (4, 2), np.float32)
    assert path.read_bytes() == b"precious"


def test_an_empty_file_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds nothing"):
        RowStore.in_file(tmp_path / "rows.bin", (0, 2), np.float32)
    assert not (tmp_path / "rows.bin").exists()


def test_the_checksum_of_a_file_follows_every_change_and_tells_equal_numbers_of_other_bits(tmp_path):
    path, changes = tmp_path / "rows.bin", []
    store = RowStore.in_file(path, (100, 3), np.float16, before_change=lambda *_: changes.append(store.checksum))
    assert store.checksum == 0
    rng = np.random.default_rng(0)
    for _ in range(5):
        store.write(rng.permutation(100)[:20], rng.normal(size=(20, 3)).astype(np.float16))
    store.fill(lambda start, stop: np.arange(start, stop, dtype=np.float16)[:, None], rows_per_block=30)
    store.write(np.array([0]), np.array([[0.0, -0.0, 0.0]], np.float16))
    assert len(changes) == len(set(changes)) == 5 + 4 + 1
    again = RowStore.in_file(path, (100, 3), np.float16, before_change=lambda *_: None)
    assert again.checksum == store.checksum
    for first, second in ((3, 4), (98, 99)):
        rows = np.array([first, second])
        again.write(rows, again.read(rows[::-1]))
        assert again.checksum != store.checksum


def test_writing_what_is_there_changes_nothing(tmp_path):
    def refuse(*_):
        raise RuntimeError("a change")

    store = RowStore.in_file(tmp_path / "rows.bin", (5, 2), np.float32, before_change=refuse)
    store.write(np.array([1, 3]), np.zeros((2, 2), np.float32))
    store.write(np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
    with pytest.raises(RuntimeError, match="a change"):
        store.write(np.array([1, 3]), np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(store.read(np.arange(5)), 0)
