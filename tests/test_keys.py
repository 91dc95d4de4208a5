"""64-bit keys keep their bits, and their owner and row are those of ordinary integer division."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import rsembed as rs
from rsembed.kernels.contract import NO_ROW
from rsembed.keys import (
    MAX_SHARDS,
    checked_keys,
    is_beyond,
    join_keys,
    local_rows,
    num_invalid,
    owners,
    split_keys,
)

CASES = json.loads((Path(__file__).parent / "data" / "sok_cases.json").read_text())
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=8))
@example(EDGES)
def test_lanes_hold_every_64_bit_number(numbers):
    keys = split_keys(np.array(numbers, np.uint64))
    assert [
        (int(high) << 32) | int(low) for high, low in zip(keys.high, keys.low, strict=True)
    ] == numbers
    assert keys.is_key.all()
    assert join_keys(keys.high, keys.low).tolist() == numbers


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_minus_one_is_padding_of_signed_keys_and_the_largest_key_of_unsigned_ones(dtype):
    largest = np.iinfo(dtype).max
    keys = split_keys(np.array([5, largest, 0], dtype))
    assert keys.is_key.tolist() == [True] * 3
    assert join_keys(keys.high, keys.low, dtype=dtype).tolist() == [5, largest, 0]
    if np.issubdtype(dtype, np.signedinteger):
        assert split_keys(np.array([[-1, 3]], dtype)).is_key.tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
def test_keys_inside_jit_are_split_as_on_the_host(dtype):
    numbers = np.array([[0, 7], [2**31 - 1, 12]], dtype)
    lanes = zip(
        jax.tree.leaves(jax.jit(split_keys)(numbers)),
        jax.tree.leaves(split_keys(numbers)),
        strict=True,
    )
    for inside, outside in lanes:
        assert inside.dtype == outside.dtype
        np.testing.assert_array_equal(inside, outside)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_negative_numbers_are_the_keys_of_their_bits(dtype):
    numbers = np.array([4, -1, -2, np.iinfo(dtype).min], dtype)
    for keys in (
        split_keys(numbers),
        *([jax.jit(split_keys)(numbers)] if dtype != np.int64 else []),
    ):
        assert np.asarray(keys.is_key).tolist() == [True, False, True, True]
        assert join_keys(keys.high, keys.low).tolist() == numbers.astype(np.uint64).tolist()
        assert join_keys(keys.high, keys.low, dtype=np.int64).tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("dtype", "beyond"),
    [
        ("int32", [2**31, -(2**31) - 1]), ("int64", []),
        ("uint32", [2**32, -2]), ("uint64", []),
    ],
)  # fmt: skip
def test_keys_that_a_dtype_cannot_hold_are_told_and_counted(dtype, beyond):
    held = [0, 7, np.iinfo(dtype).max] + (
        [-2, np.iinfo(dtype).min] if dtype.startswith("i") else []
    )
    numbers = np.asarray([number % 2**64 for number in [*held, *beyond]], np.uint64)
    keys = split_keys(numbers)
    assert is_beyond(keys, dtype).tolist() == [False] * len(held) + [True] * len(beyond)
    kept = jax.jit(lambda keys: checked_keys(keys, dtype, feature="f"))(
        jax.tree.map(jnp.asarray, keys)
    )
    assert kept.is_key.tolist() == [True] * len(held) + [False] * len(beyond) and num_invalid(
        kept
    ) == len(beyond)
    assert is_beyond(split_keys(np.asarray([2**64 - 1], np.uint64)), dtype).item() == (
        dtype != "uint64"
    )


def test_a_key_that_does_not_fit_is_not_cut():
    with pytest.raises(ValueError, match="key 2147483648 does not fit into int32; ask for uint64"):
        join_keys([0], [1 << 31], dtype=np.int32)


@settings(deadline=None)
@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=10, max_size=10),
    num_shards=st.one_of(
        st.sampled_from([1, 2, 3, 65_535, MAX_SHARDS]), st.integers(1, MAX_SHARDS)
    ),
    rows_per_shard=st.sampled_from([1, 1000, 2**31 - 1]),
)
@example(numbers=EDGES, num_shards=MAX_SHARDS, rows_per_shard=2**31 - 1)
@example(numbers=EDGES, num_shards=65_535, rows_per_shard=2**31 - 1)
def test_owner_and_row_are_remainder_and_quotient(numbers, num_shards, rows_per_shard):
    # Near the largest legal key quotients are interesting, too.
    numbers = [
        *numbers,
        num_shards * rows_per_shard - 1,
        min(num_shards * rows_per_shard, 2**64 - 1),
    ]
    keys = split_keys(np.array(numbers, np.uint64))
    on_device = jax.tree.map(jnp.asarray, keys)
    expected_rows = [
        k // num_shards if k < num_shards * rows_per_shard else NO_ROW for k in numbers
    ]
    for lanes in (keys, on_device):
        assert owners(lanes, num_shards).tolist() == [k % num_shards for k in numbers]
        assert local_rows(lanes, num_shards, rows_per_shard).tolist() == expected_rows


def test_padding_has_no_owner_and_no_row():
    keys = split_keys(np.array([9, -1]))
    assert owners(keys, 4).tolist() == [1, 4]
    assert local_rows(keys, 4, 10).tolist() == [2, NO_ROW]


@pytest.mark.parametrize("num_shards", [0, MAX_SHARDS + 1])
@pytest.mark.parametrize("function", [owners, lambda keys, n: local_rows(keys, n, 1)])
def test_shard_counts_beyond_exact_arithmetic_are_refused(function, num_shards):
    with pytest.raises(ValueError, match=rf"num_shards must lie in \[1, 65536\], got {num_shards}"):
        function(split_keys(np.array([1])), num_shards)


@pytest.mark.parametrize(
    "case", CASES["partition"][0]["expected"]["cases"], ids=lambda case: str(case["num_shards"])
)
def test_worked_case_of_the_partition(case):
    keys = split_keys(np.array(case["keys"]))
    assert owners(keys, case["num_shards"]).tolist() == case["owners"]
    assert local_rows(keys, case["num_shards"], 1000).tolist() == case["local_rows"]


def test_worked_case_of_valid_keys_without_an_index():
    (case,) = CASES["validate_keys"]
    assert not case["use_hashtable"]

    @jax.jit
    def is_valid(numbers):
        return local_rows(split_keys(numbers), case["num_shards"], case["rows_per_shard"]) != NO_ROW

    assert is_valid(np.array(case["keys"], np.int32)).tolist() == case["expected"]["valid"]


# Keys of texts


class NA:
    """As pandas.NA: no comparison has a truth value."""

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    def __ne__(self, other):
        return self

    __eq__, __hash__ = __ne__, object.__hash__


class Column:
    """As columns of pandas, polars and Arrow: an iterable that numpy reads as an array of objects."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __array__(self, dtype=None, copy=None):
        array = np.empty(len(self.values), object)
        array[:] = self.values
        return array


def key_of(text):
    """BLAKE2b, read byte by byte; -1 is no key."""
    content = text.encode() if isinstance(text, str) else text
    digest = hashlib.blake2b(content, digest_size=8).digest()
    number = sum(byte << (8 * place) for place, byte in enumerate(digest))
    return number - 2**64 if number >= 2**63 else number


TEXTS = ["apple", "pear", "", "größe", "apple", "e\u0301", "a\0"]
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "numpy objects": lambda texts: np.array(texts, object),
    "numpy texts of any length": lambda texts: np.array(texts, np.dtypes.StringDType()),
    "column": Column,
    "masked": lambda texts: np.ma.array(texts, mask=False, dtype=object),
    "iterator": iter,
    "bytes": lambda texts: [text.encode() for text in texts],
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_text_has_the_same_key_in_every_container(kind):
    texts = TEXTS[:-1] if kind == "numpy" else TEXTS  # which cuts a zero at the end of a text
    keys = rs.hash_keys(CONTAINERS[kind](texts))
    assert keys.dtype == np.int64 and keys.tolist() == [key_of(text) for text in texts]


def test_keys_of_texts_are_those_of_another_process():
    program = "import rsembed as rs; print(rs.hash_keys(['apple', 'pear']).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # As in all releases.
    assert done.stdout.strip() == "[-2328654269316264298, -1411252022289735552]"


def test_keys_of_texts_keep_the_shape_and_lists_stay_lists():
    square = np.array([["a", "b"], ["b", "c"]])
    assert rs.hash_keys(square).tolist() == [[key_of(text) for text in row] for row in square]
    assert rs.hash_keys(np.array([], object)).shape == rs.hash_keys([]).shape == (0,)
    for column in (
        [["a"], [], ["b", "a"]],
        Column([np.array(["a"], object), [], np.array(["b", "a"])]),
    ):
        rows = rs.hash_keys(column)
        assert [row.tolist() for row in rows] == [[key_of("a")], [], [key_of("b"), key_of("a")]]
        assert {row.dtype for row in rows} == {np.dtype(np.int64)}


@pytest.mark.parametrize("missing", [None, float("nan"), np.nan, np.datetime64("NaT", "ns"), NA()])
@pytest.mark.parametrize("kind", [list, Column, lambda texts: np.array(texts, object)])
def test_a_missing_text_is_an_error_with_its_row_or_gets_the_key_that_is_given(missing, kind):
    column = kind(["a", "b", missing, "c", missing])
    with pytest.raises(ValueError, match=r"row 2 has a missing value \(.*\); give missing=-1"):
        rs.hash_keys(column)
    wanted = [key_of("a"), key_of("b"), -1, key_of("c"), -1]
    assert rs.hash_keys(column, missing=-1).tolist() == wanted
    rows = rs.hash_keys(kind([["a"], ["b", missing], missing]), missing=7)
    assert [row.tolist() for row in rows] == [[key_of("a")], [key_of("b"), 7], [7]]
    masked = np.ma.array(["a", "b", "x"], mask=[False, False, True], dtype=object)
    assert rs.hash_keys(masked, missing=-1).tolist() == [key_of("a"), key_of("b"), -1]


@pytest.mark.parametrize("storage", [None, rs.Hashed()])
@pytest.mark.parametrize("missing", [None, float("nan"), NA()])
@pytest.mark.parametrize(
    ("column", "row"),
    [
        (lambda missing: Column([1, missing, 3]), 1),
        (lambda missing: [1, 2, missing], 2),
        (lambda missing: Column([[1], [2, missing]]), 1),
        (lambda missing: [[1, missing], [2]], 0),
        (lambda missing: Column([[1], missing, [2]]), 1),
        (lambda missing: [[1], [2], missing], 2),
        (lambda missing: np.array([[1, 2], [3, missing]], object), 1),
        (
            lambda missing: np.array(
                [1, 2, missing], float if isinstance(missing, float) else object
            ),
            2,
        ),
        (lambda missing: rs.Bags(np.array([1.0, 2.0, np.nan]), np.array([0, 2, 3], np.int32)), 1),
    ],
)
def test_a_missing_id_is_called_missing_with_its_row_in_every_container(
    column, row, missing, storage
):
    table = rs.TableSpec(
        "user", 64, 4, storage=storage, combiner="sum", optimizer=rs.optimizers.SGD(0.1)
    )
    collection = rs.EmbeddingCollection([rs.FeatureSpec("user", table)])
    words = rf"feature 'user': row {row} has a missing value \(.*\); fill missing values with -1, which is no id"
    with pytest.raises(TypeError, match=words):
        collection.prepare({"user": column(missing)})
