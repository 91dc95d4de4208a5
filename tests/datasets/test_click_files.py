"""Click logs in Criteo's formats, against a loop over their lines, and errors that name a line."""

import gzip
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rsembed import datasets

NUMBERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


def fields_of(num_rows=40, digits=8):
    """Fields of each line of a log. A fifth of the fields are empty."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        numbers = generator.integers(-3, 60_000, 13).astype(str)
        categories = [generator.bytes(digits // 2).hex() for _ in range(26)]
        fields = np.array([*numbers, *categories])
        fields[generator.random(39) < 0.2] = ""
        rows.append([str(generator.integers(0, 2)), *fields.tolist()])
    rows[0][14:] = [""] * 26  # a row without any category
    return rows


def text_of(rows, separator="\t"):
    return "".join(separator.join(row) + "\n" for row in rows)


def key_of(field, missing):
    """Key of a category: its hexadecimal digits as a signed integer of 64 bits."""
    if not field:
        return missing
    return np.uint64(int(field, 16)).view(np.int64)


def check(log, rows, missing=-1):
    """Checks the labels, numbers and keys of a log against a loop over the fields."""
    assert len(log) == len(rows)
    assert log.labels.dtype == np.int32
    assert log.labels.tolist() == [int(row[0]) for row in rows]
    assert log.dense_names == tuple(NUMBERS)
    dense = [[float(field or "nan") for field in row[1:14]] for row in rows]
    np.testing.assert_array_equal(log.dense, np.float32(dense))
    assert list(log.sparse) == CATEGORIES
    for column, keys in enumerate(log.sparse.values(), start=14):
        assert keys.dtype == np.int64
        assert keys.tolist() == [key_of(row[column], missing) for row in rows]
    assert repr(log).startswith(f"CriteoLog({len(rows):,} rows with 13 numbers and 26 categories; ")


@pytest.fixture(
    params=["tsv", "csv with header", "gz", "gztar", "zip", "windows", "one archive member"]
)
def log_path(request, tmp_path):
    text = text_of(fields_of()).encode()
    folder = tmp_path / "dac"
    folder.mkdir()
    path = folder / "train.txt"
    path.write_bytes(text)
    if request.param == "csv with header":
        path = tmp_path / "sample.csv"
        header = ["label", *NUMBERS, *CATEGORIES]
        path.write_text("\ufeff" + text_of([header, *fields_of()], ","))
    elif request.param == "gz":
        path = tmp_path / "day_0.gz"
        path.write_bytes(gzip.compress(text))
    elif request.param == "windows":
        path.write_bytes(text.replace(b"\n", b"\r\n"))
    elif request.param == "one archive member":
        path.rename(folder / "sample")
        path = Path(shutil.make_archive(tmp_path / "one", "zip", folder))
    elif request.param != "tsv":
        (folder / "test.txt").write_text("no label")
        path = Path(shutil.make_archive(tmp_path / "dac", request.param, tmp_path, "dac"))
    return path


def test_every_published_form_is_read_as_a_loop_reads_it(log_path):
    log = datasets.criteo(log_path)
    check(log, fields_of())
    assert str(log_path) in log.source
    check(datasets.criteo(log_path, rows=7), fields_of()[:7])
    check(datasets.criteo(log_path, rows=1_000, missing=0), fields_of(), missing=0)


@pytest.mark.parametrize("block_bytes", [1, 500, 1 << 20])
def test_chunks_are_the_rows_in_order_wherever_blocks_end(log_path, monkeypatch, block_bytes):
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", block_bytes)
    rows = fields_of()
    chunks = list(datasets.criteo_chunks(log_path, rows=15))
    assert [len(chunk) for chunk in chunks] == [15, 15, 10]
    first = chunks[0].first_line
    assert first == (2 if log_path.suffix == ".csv" else 1)
    assert [chunk.first_line - first for chunk in chunks] == [0, 15, 30]
    for number, chunk in enumerate(chunks):
        check(chunk, rows[15 * number : 15 * number + 15])


@pytest.mark.parametrize("digits", [2, 8, 16])
def test_categories_of_up_to_sixteen_digits_are_keys(tmp_path, digits):
    rows = fields_of(digits=digits)
    rows[1][20] = "F" * digits
    (tmp_path / "train.txt").write_text(text_of(rows))
    if digits == 16:
        # -1 is not a key, so the loader turns it into -2.
        rows[1][20] = "F" * 15 + "E"
    check(datasets.criteo(tmp_path / "train.txt"), rows)


def test_a_header_may_have_other_columns_in_any_order(tmp_path):
    lines = ["Id,cat_1,int_0,click,cat_0", "10000743,ff,1.5,1,a0", "10000744,,,0,1"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    log = datasets.criteo(tmp_path / "log.csv")
    assert log.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(log.dense, np.float32([[1.5], [np.nan]]))
    assert {name: keys.tolist() for name, keys in log.sparse.items()} == {
        "cat_1": [255, -1],
        "cat_0": [160, 1],
    }
    assert log.dense_names == ("int_0",)


@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
@pytest.mark.parametrize("read", [datasets.criteo, datasets.criteo_chunks])
def test_a_bad_line_is_refused_by_its_number_wherever_blocks_end(
    tmp_path, monkeypatch, read, block_bytes
):
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", block_bytes)
    rows = fields_of(4)
    rows[2][14] = "68fg1e64"
    path = tmp_path / "train.txt"
    path.write_text(text_of(rows))
    with pytest.raises(ValueError, match=rf"{read.__name__}: .*, line 3: C1 is '68fg1e64'"):
        list(read(path))


@pytest.mark.slow
def test_chunks_take_no_more_memory_for_a_longer_file(tmp_path):
    text = text_of(fields_of(2_000)).encode()
    peaks = []
    for times in (1, 20):
        path = tmp_path / f"day_{times}.gz"
        path.write_bytes(gzip.compress(text * times, 1))
        tracemalloc.start()
        num_rows = sum(len(chunk) for chunk in datasets.criteo_chunks(path, rows=500))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num_rows == 2_000 * times
    assert peaks[1] < 1.5 * peaks[0] + (8 << 20) and peaks[1] < 40 << 20
