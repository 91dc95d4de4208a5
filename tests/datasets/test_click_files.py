"""Click logs in Criteo's formats are read as a loop over their lines reads them, or refused by line."""

import gzip
import math
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from rsembed import datasets

NUM_ROWS = 40
HEADER = [
    "label",
    *(f"I{number}" for number in range(1, 14)),
    *(f"C{number}" for number in range(1, 27)),
]


def fields_of(num_rows=NUM_ROWS, digits=8, seed=0):
    """Fields of the lines of a log, of which a fifth are missing."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        row = [str(generator.integers(0, 2))]
        row += [str(number) for number in generator.integers(-3, 60_000, 13)]
        row += [generator.bytes(digits // 2).hex() for _ in range(26)]
        for column in range(1, 40):
            if generator.random() < 0.2:
                row[column] = ""
        rows.append(row)
    rows[0][14:] = [""] * 26  # a row without any category
    return rows


def text_of(rows, separator="\t", header=()):
    lines = [separator.join(row) for row in ([list(header)] if header else []) + rows]
    return "\n".join(lines) + "\n"


def signed(number):
    return number - 2**64 if number >= 2**63 else number


def expected(rows, missing=-1):
    """Labels, numbers and keys by a loop."""
    labels = [int(row[0]) for row in rows]
    dense = [[float(field) if field else math.nan for field in row[1:14]] for row in rows]
    keys = [[signed(int(field, 16)) if field else missing for field in row[14:]] for row in rows]
    return labels, dense, keys


def check(log, rows, missing=-1):
    labels, dense, keys = expected(rows, missing)
    assert log.labels.tolist() == labels and log.labels.dtype == np.int32
    assert repr(log).startswith(f"CriteoLog({len(rows):,} rows with 13 numbers and 26 categories; ")
    np.testing.assert_array_equal(log.dense, np.float32(dense))
    assert [
        list(row) for row in zip(*(log.sparse[f"C{k}"].tolist() for k in range(1, 27)), strict=True)
    ] == keys
    assert all(column.dtype == np.int64 for column in log.sparse.values())
    assert list(log.sparse) == HEADER[14:] and log.dense_names == tuple(HEADER[1:14])
    assert len(log) == len(rows)


@pytest.fixture(
    params=["tsv", "csv with header", "gz", "tar.gz", "zip", "windows", "one archive member"]
)
def log_path(request, tmp_path):
    text = text_of(fields_of())
    path = tmp_path / "train.txt"
    path.write_text(text)
    if request.param == "csv with header":
        path = tmp_path / "sample.csv"
        path.write_text("\ufeff" + text_of(fields_of(), ",", HEADER))
    elif request.param == "gz":
        path = tmp_path / "day_0.gz"
        path.write_bytes(gzip.compress(text.encode()))
    elif request.param == "tar.gz":
        with tarfile.open(tmp_path / "dac.tar.gz", "w:gz") as archive:
            (tmp_path / "test.txt").write_text("no label")
            archive.add(tmp_path / "test.txt", "test.txt")
            archive.add(path, "train.txt")
        path = tmp_path / "dac.tar.gz"
    elif request.param == "zip":
        with zipfile.ZipFile(tmp_path / "dac.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("dac/readme.txt", "text")
            archive.write(path, "dac/train.txt")
        path = tmp_path / "dac.zip"
    elif request.param == "windows":
        path.write_bytes(text.replace("\n", "\r\n").encode())
    elif request.param == "one archive member":
        with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
            archive.writestr("sample", text)
        path = tmp_path / "one.zip"
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
        rows[1][20] = "F" * 15 + "E"  # -1 is no id, and becomes -2
    check(datasets.criteo(tmp_path / "train.txt"), rows)


def test_a_header_may_have_other_columns_in_any_order(tmp_path):
    lines = ["cat_1,int_0,click,cat_0", "ff,1.5,1,a0", ",,0,1"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    log = datasets.criteo(tmp_path / "log.csv")
    assert log.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(log.dense, np.float32([[1.5], [np.nan]]))
    assert {name: keys.tolist() for name, keys in log.sparse.items()} == {
        "cat_1": [255, -1],
        "cat_0": [160, 1],
    }
    assert log.dense_names == ("int_0",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1\t5", "2\t5", r"line 2: label is '2', neither 0 nor 1"),
        ("1\t5\t", "1\t5\t\t", r"line 2 has 41 fields, not 40"),
        ("1\t5\t", "1\t", r"line 2 has 39 fields, not 40 \(a log without labels, as test\.txt is"),
        ("1\t5\t", "1\t5x\t", r"line 2: I1 is '5x', no number that float32 can hold"),
        ("1\t5\t", "1\tnan\t", r"line 2: I1 is 'nan', no number"),
        ("1\t5\t", "1\t1_0\t", r"line 2: I1 is '1_0', no number"),
        ("1\t5\t", "1\t1e39\t", r"line 2: I1 is '1e39', no number"),
        (
            "68fd1e64",
            "68fg1e64",
            r"line 2: C1 is '68fg1e64', no category of at most 16 hexadecimal.*rs\.hash_keys",
        ),
        ("68fd1e64", "-8fd1e64", r"line 2: C1 is '-8fd1e64', no category"),
        ("68fd1e64", "68 d1e64", r"line 2: C1 is '68 d1e64', no category"),
        ("68fd1e64", "0" * 17, r"line 2: C1 is '0{17}', no category of at most 16"),
        ("68fd1e64", "68fd\0e64", r"line 2: C1 is '68fd.x00e64', no category"),
        ("68fd1e64", "68fd\n1e64", r"line 2 has 15 fields, not 40"),
    ],
)
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_a_bad_line_is_refused_by_its_number(tmp_path, monkeypatch, old, new, message, block_bytes):
    monkeypatch.setattr("rsembed.datasets.files.BLOCK_BYTES", block_bytes)
    rows = fields_of(3)
    rows[1][:2] = ["1", "5"]
    rows[1][14] = "68fd1e64"
    path = tmp_path / "train.txt"
    path.write_text(text_of(rows).replace(old, new))
    with pytest.raises(ValueError, match=rf"criteo: .*train\.txt: train\.txt, {message}"):
        datasets.criteo(path)
    with pytest.raises(ValueError, match=rf"criteo_chunks: .*train\.txt: train\.txt, {message}"):
        list(datasets.criteo_chunks(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("label,I1,user", r"line 1 has the column 'user', neither label, nor I1"),
        ("label,I1,I1", r"line 1 names a column twice"),
        ("label,I1,click", r"line 1 names a column twice"),
    ],
)
def test_a_header_with_other_columns_is_refused(tmp_path, header, message):
    (tmp_path / "log.csv").write_text(header + "\n1,2,3\n")
    with pytest.raises(ValueError, match=message):
        datasets.criteo(tmp_path / "log.csv")


def test_files_that_are_cut_empty_or_missing_are_refused(tmp_path):
    path = tmp_path / "train.txt"
    text = text_of(fields_of(1_000))
    path.write_text(text[:-100])
    with pytest.raises(
        ValueError, match=r"line 1000 has \d+ fields, not 40 \(the file ends inside this line\)"
    ):
        datasets.criteo(path)
    path.write_text(text[:-1])  # only the end of the last line is missing
    assert len(datasets.criteo(path)) == 1_000
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(text.encode())[:-2_000])
    with pytest.raises(
        ValueError, match=r"criteo: .*day_0\.gz, line \d+ .*cannot be read: .*end-of-stream"
    ):
        datasets.criteo(path)
    path.write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(ValueError, match=r"day_0\.gz, line 1,? .*cannot be read"):
        datasets.criteo(path)
    for content in ("", "label,I1\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"day_0\.gz has no rows"):
            datasets.criteo(path)
    with pytest.raises(FileNotFoundError, match=r"criteo: path='.*nothing' is no file"):
        datasets.criteo(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"criteo_chunks: path='.*nothing' is no file"):
        datasets.criteo_chunks(tmp_path / "nothing")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.txt", "")
        archive.writestr("b.txt", "")
    with pytest.raises(ValueError, match=r"two\.zip: it has no train\.txt, but a\.txt, b\.txt"):
        datasets.criteo(tmp_path / "two.zip")
    (tmp_path / "long.txt").write_bytes(b"1" * (3 << 20))
    with pytest.raises(ValueError, match=r"long\.txt, line 1 has 1048576 bytes and no end"):
        datasets.criteo(tmp_path / "long.txt")


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
