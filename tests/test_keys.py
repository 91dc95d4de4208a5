"""64-bit keys keep their bits, and their owner and row are those of ordinary integer division."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rsembed.kernels.contract import NO_ROW
from rsembed.keys import MAX_SHARDS, checked_keys, is_beyond, join_keys, local_rows, num_invalid, owners, split_keys

CASES = json.loads((Path(__file__).parent / "data" / "sok_cases.json").read_text())
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=8))
@example(EDGES)
def test_lanes_hold_every_64_bit_number(numbers):
    keys = split_keys(np.array(numbers, np.uint64))
    assert [(int(high) << 32) | int(low) for high, low in zip(keys.high, keys.low, strict=True)] == numbers
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
    lanes = zip(jax.tree.leaves(jax.jit(split_keys)(numbers)), jax.tree.leaves(split_keys(numbers)), strict=True)
    for inside, outside in lanes:
        assert inside.dtype == outside.dtype
        np.testing.assert_array_equal(inside, outside)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_negative_numbers_are_the_keys_of_their_bits(dtype):
    numbers = np.array([4, -1, -2, np.iinfo(dtype).min], dtype)
    for keys in (split_keys(numbers), *([jax.jit(split_keys)(numbers)] if dtype != np.int64 else [])):
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
    held = [0, 7, np.iinfo(dtype).max] + ([-2, np.iinfo(dtype).min] if dtype.startswith("i") else [])
    numbers = np.asarray([number % 2**64 for number in [*held, *beyond]], np.uint64)
    keys = split_keys(numbers)
    assert is_beyond(keys, dtype).tolist() == [False] * len(held) + [True] * len(beyond)
    kept = jax.jit(lambda keys: checked_keys(keys, dtype, feature="f"))(jax.tree.map(jnp.asarray, keys))
    assert kept.is_key.tolist() == [True] * len(held) + [False] * len(beyond) and num_invalid(kept) == len(beyond)
    assert is_beyond(split_keys(np.asarray([2**64 - 1], np.uint64)), dtype).item() == (dtype != "uint64")


def test_a_key_that_does_not_fit_is_not_cut():
    with pytest.raises(ValueError, match="key 2147483648 does not fit into int32; ask for uint64"):
        join_keys([0], [1 << 31], dtype=np.int32)


@settings(deadline=None)
@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=10, max_size=10),
    num_shards=st.one_of(st.sampled_from([1, 2, 3, 65_535, MAX_SHARDS]), st.integers(1, MAX_SHARDS)),
    rows_per_shard=st.sampled_from([1, 1000, 2**31 - 1]),
)
@example(numbers=EDGES, num_shards=MAX_SHARDS, rows_per_shard=2**31 - 1)
@example(numbers=EDGES, num_shards=65_535, rows_per_shard=2**31 - 1)
def test_owner_and_row_are_remainder_and_quotient(numbers, num_shards, rows_per_shard):
    # Near the largest legal key quotients are interesting, too.
    numbers = [*numbers, num_shards * rows_per_shard - 1, min(num_shards * rows_per_shard, 2**64 - 1)]
    keys = split_keys(np.array(numbers, np.uint64))
    on_device = jax.tree.map(jnp.asarray, keys)
    expected_rows = [k // num_shards if k < num_shards * rows_per_shard else NO_ROW for k in numbers]
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


@pytest.mark.parametrize("case", CASES["partition"][0]["expected"]["cases"], ids=lambda case: str(case["num_shards"]))
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
