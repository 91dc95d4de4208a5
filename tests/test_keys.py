"""Tests of 64-bit keys: their bits, the owners and rows of keys, and the keys of texts."""

import hashlib
import json
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
    is_invalid,
    join_keys,
    local_rows,
    owners,
    split_keys,
)

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
    within = [0, 7, np.iinfo(dtype).max, np.iinfo(dtype).min]
    numbers = [number % 2**64 for number in (*within, *beyond)]
    keys = split_keys(np.asarray(numbers, np.uint64))
    is_held = [True] * len(within) + [False] * len(beyond)
    np.testing.assert_array_equal(is_beyond(keys, dtype), np.logical_not(is_held))
    kept = jax.jit(lambda keys: checked_keys(keys, dtype, feature="f"))(keys)
    assert kept.is_key.tolist() == is_held
    assert is_invalid(kept).sum() == len(beyond)
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
    # Also try the largest valid key and the smallest invalid one.
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
    """Key of a text: its BLAKE2b hash of 8 bytes, read as a little-endian signed integer."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = sum(byte << (8 * place) for place, byte in enumerate(digest))
    return number - 2**64 if number >= 2**63 else number


def test_the_key_of_a_text_is_that_of_its_bytes():
    texts = ["apple", "pear", "", "größe", "apple", "e\u0301", "a\0"]
    keys = rs.hash_keys(texts)
    assert keys.dtype == np.int64 and keys.tolist() == [key_of(text) for text in texts]
    # Keys of texts must not change between processes or releases.
    assert keys[:2].tolist() == [-2328654269316264298, -1411252022289735552]
