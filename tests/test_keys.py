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
from tests.world import NA, Column

CASES = json.loads((Path(__file__).parent / "data" / "sok_cases.json").read_text())
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=8))
@example(EDGES)
def test_lanes_hold_every_64_bit_number(numbers):
    keys = split_keys(np.array(numbers, np.uint64))
    lanes = zip(keys.high.tolist(), keys.low.tolist(), strict=True)
    assert [(high << 32) | low for high, low in lanes] == numbers
    assert keys.is_key.all()
    assert join_keys(keys.high, keys.low).tolist() == numbers


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint32, np.uint64])
def test_keys_have_the_bits_of_their_numbers_and_minus_one_of_a_signed_dtype_is_no_key(dtype):
    numbers = np.array([5, 0, -1, -2]).astype(dtype)
    numbers = np.append(numbers, np.array([np.iinfo(dtype).max, np.iinfo(dtype).min], dtype))
    keys = split_keys(numbers)
    assert keys.is_key.tolist() == (numbers != -1).tolist()
    assert join_keys(keys.high, keys.low).tolist() == numbers.astype(np.uint64).tolist()
    joined = join_keys(keys.high, keys.low, dtype=np.int64 if dtype == np.int8 else dtype)
    assert joined.tolist() == numbers.tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_keys_inside_jit_are_split_as_on_the_host(dtype):
    numbers = np.array([[0, 7, np.iinfo(dtype).max], [-1, -2, 12]]).astype(dtype)
    inside = jax.tree.leaves(jax.jit(split_keys)(numbers))
    outside = jax.tree.leaves(split_keys(numbers))
    for lane, expected in zip(inside, outside, strict=True):
        np.testing.assert_array_equal(lane, expected, strict=True)


@pytest.mark.parametrize(
    ("dtype", "beyond"),
    [
        ("int32", [2**31, -(2**31) - 1]), ("int64", []),
        ("uint32", [2**32, -2]), ("uint64", []),
    ],
)  # fmt: skip
def test_keys_that_a_dtype_cannot_hold_are_told_and_counted(dtype, beyond):
    held = [0, 7, np.iinfo(dtype).max, np.iinfo(dtype).min]
    numbers = [number % 2**64 for number in (*held, *beyond)]
    keys = split_keys(np.asarray(numbers, np.uint64))
    is_held = [True] * len(held) + [False] * len(beyond)
    np.testing.assert_array_equal(is_beyond(keys, dtype), np.logical_not(is_held))
    kept = jax.jit(lambda keys: checked_keys(keys, dtype, feature="f"))(keys)
    assert kept.is_key.tolist() == is_held
    assert num_invalid(kept) == len(beyond)
    largest = split_keys(np.asarray([2**64 - 1], np.uint64))
    assert is_beyond(largest, dtype).item() == (dtype != "uint64")


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
    num_rows = num_shards * rows_per_shard
    numbers = [*numbers, num_rows - 1, min(num_rows, 2**64 - 1)]
    keys = split_keys(np.array(numbers, np.uint64))
    expected_rows = [k // num_shards if k < num_rows else NO_ROW for k in numbers]
    for lanes in (keys, jax.tree.map(jnp.asarray, keys)):
        assert owners(lanes, num_shards).tolist() == [k % num_shards for k in numbers]
        assert local_rows(lanes, num_shards, rows_per_shard).tolist() == expected_rows


def test_padding_has_no_owner_and_no_row():
    keys = split_keys(np.array([9, -1]))
    assert owners(keys, 4).tolist() == [1, 4]
    assert local_rows(keys, 4, 10).tolist() == [2, NO_ROW]


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
