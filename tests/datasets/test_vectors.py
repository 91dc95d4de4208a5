"""Tests of word vectors, from files in the forms of word2vec, GloVe and fastText."""

import gzip
import tracemalloc

import numpy as np
import pytest

from rsembed import datasets

WORDS = ["2000", "new york", "the", "missing", "the", "größe"]
VECTORS = {
    "the": [0.418, 0.24968, -0.41242],
    "2000": [1e-3, -2.5, 3.0],
    "new york": [1.0, 2.0, -3.0],
    "größe": [0.5, 0.25, 4.0],
    "other": [9.0, 9.0, 9.0],
}


def body(end):
    """A line for each vector. word2vec and fastText write a space before the end of the line."""
    lines = [" ".join([word, *map(str, numbers)]) + end for word, numbers in VECTORS.items()]
    return "".join(lines).encode()


FORMS = {
    "glove": body("\n"),
    "word2vec": b"5 3\n" + body(" \n"),
    "fasttext": b"5 3\n" + body(" \r\n"),
    "with a byte order mark": b"\xef\xbb\xbf" + body("\n"),
}


@pytest.mark.parametrize("kind", ["file", "gzip", "lines of bytes", "lines of text"])
@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_gives_the_vectors_of_a_dictionary(tmp_path, form, kind):
    content = FORMS[form]
    source = tmp_path / "vectors.txt"
    if kind == "lines of bytes":
        source = iter(content.splitlines(keepends=True))
    elif kind == "lines of text":
        source = content.decode().splitlines()
    else:
        source.write_bytes(gzip.compress(content) if kind == "gzip" else content)
    vectors = datasets.word_vectors(source, WORDS, dim=3)
    wanted = np.array([VECTORS.get(word, [0, 0, 0]) for word in WORDS], np.float32)
    assert vectors.values.dtype == np.float32 and vectors.values.tolist() == wanted.tolist()
    assert vectors.is_found.tolist() == [word in VECTORS for word in WORDS]
    has_header = content.startswith(b"5")
    counts = (
        vectors.num_vectors,
        vectors.num_duplicates,
        vectors.num_bad_lines,
        vectors.num_announced,
    )
    assert counts == (5, 0, 0, 5 if has_header else None)


def test_a_header_is_no_vector_of_its_number(tmp_path):
    vectors = datasets.word_vectors(["2 1", "a 5", "b 6"], ["2", "b"], dim=1)
    assert vectors.values.tolist() == [[0.0], [6.0]] and vectors.is_found.tolist() == [False, True]


def test_the_first_of_two_vectors_counts_and_the_other_is_counted():
    more = datasets.word_vectors(
        ["a 1 1", "b 3 3", "a 2 2", "b 4 4", "c 1 1", "c 2 2"], ["a", "b"], dim=2
    )
    assert more.values.tolist() == [[1, 1], [3, 3]]
    assert (more.num_vectors, more.num_duplicates) == (6, 2)


BAD_LINES = {
    "cut": b"new york 1 1",
    "one number": b"the 1",
    "no number": b"the",
    "empty": b"",
    "too many": b"the 1 2 3 4",
    "two spaces": b"the  1 2 3",
    "no number in the middle": b"the 1 x 3",
    "an underscore": b"the 1 1_0 3",
    "not finite": b"the 1 nan 3",
    "beyond float32": b"the 1 1e39 3",
    "latin": "größe 1 2 3".encode("latin-1"),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=list(BAD_LINES))
@pytest.mark.parametrize("header", [(), (b"2 3",)], ids=["no header", "header"])
def test_a_bad_line_is_an_error_with_its_number_or_is_counted(bad, header):
    lines = [*header, b"a 1 2 3", bad, b"b 4 5 6"]
    with pytest.raises(ValueError, match=f"word_vectors: lines, line {2 + len(header)}: .*skip"):
        datasets.word_vectors(lines, ["the", "größe"], dim=3)
    vectors = datasets.word_vectors(lines, ["the", "größe", "b"], dim=3, bad_lines="skip")
    assert vectors.is_found.tolist() == [False, False, True] and vectors.values[2].tolist() == [
        4,
        5,
        6,
    ]
    assert (vectors.num_vectors, vectors.num_bad_lines) == (2, 1)


@pytest.mark.parametrize("header", [b"", b"5 3\n"], ids=["no header", "header"])
def test_a_cut_file_never_gives_another_number_silently(tmp_path, header):
    whole = header + body("\n")
    file = tmp_path / "vectors.txt"
    wanted = np.array(list(VECTORS.values()), np.float32)
    line_ends = [place for place, letter in enumerate(whole, start=1) if letter == ord("\n")]
    for size in range(len(header), len(whole)):
        file.write_bytes(whole[:size])
        if header or size not in [0, *line_ends]:
            with pytest.raises(ValueError, match=r"may be cut|header says"):
                datasets.word_vectors(file, list(VECTORS), dim=3)
        vectors = datasets.word_vectors(file, list(VECTORS), dim=3, bad_lines="skip")
        assert vectors.values[vectors.is_found].tolist() == wanted[vectors.is_found].tolist()


def test_memory_is_that_of_the_result(tmp_path):
    dim, num_lines = 100, 5_000
    file = tmp_path / "vectors.txt.gz"
    with gzip.open(file, "wt") as written:
        for number in range(num_lines):
            written.write(f"word_{number}" + " 0.125" * dim + "\n")
    tracemalloc.start()
    vectors = datasets.word_vectors(file, ["word_7", f"word_{num_lines - 1}"], dim=dim)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert vectors.is_found.all() and vectors.num_vectors == num_lines
    # The unpacked file has 3 MB.
    assert most_bytes < 1_000_000


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    file = tmp_path / "vectors.txt.gz"
    file.write_bytes(gzip.compress(b"0" * 50_000_000))
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 1 has 65728 bytes and no end"):
        datasets.word_vectors(file, ["the"], dim=3)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 2_000_000
