import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tt import TTSpec, suggested_tt_shapes
from rsembed.tt.cores import digits_of
from tests.tt.tt_oracles import CASES


@pytest.mark.parametrize(
    "row", CASES["suggested_tt_shapes"]["expect"]["table"], ids=lambda row: f"{row['n']}-{row['d']}"
)
def test_suggested_shapes_are_the_published_ones(row):
    assert suggested_tt_shapes(row["n"], row["d"], row["round_up"]) == row["shape"]


@pytest.mark.parametrize("dim", [1, 3, 13, 17, 96, 127, 128])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_an_embedding_dimension_is_never_rounded_up(dim, d):
    assert TTSpec.suggest(1000, dim, [2] * (d - 1)).embedding_dim == dim


@pytest.mark.parametrize("row", CASES["counts"]["expect"]["rows"], ids=lambda row: str(row["E"]))
def test_counts_of_numbers_and_flops(row):
    spec = TTSpec(row["E"], row["p"], row["q"], row["ranks"])
    assert spec.num_params == row["params"]
    assert spec.flops_per_lookup == row["fwd_flops_per_lookup"]
    assert spec.num_bytes(jnp.bfloat16) == 2 * row["params"]
    assert f"{row['params']:,} numbers" in str(spec)
    assert f"{row['fwd_flops_per_lookup']:,} FLOP" in str(spec)
    assert f"{row['ratio']:.3g} times fewer" in str(spec)


@pytest.mark.parametrize(("rows", "dim", "num_cores"), [(97, 12, 3), (1000, 64, 2), (360, 8, 3)])
@pytest.mark.parametrize("ratio", [2, 4])
def test_the_factors_of_a_budget_are_the_cheapest_of_a_full_search(rows, dim, num_cores, ratio):
    spec = TTSpec.for_budget(rows, dim, bytes=4 * rows * dim // ratio, num_cores=num_cores)
    sizes = [math.prod(shape) for shape in spec.slice_shapes]
    *leading, _ = [range(1, rows + 1)] * num_cores
    shapes = ((*some, -(-rows // math.prod(some))) for some in itertools.product(*leading))
    assert spec.num_params == min(
        sum(p * a for p, a in zip(shape, sizes, strict=True)) for shape in shapes
    )


@pytest.mark.parametrize(
    ("most", "num_cores", "dtype"),
    [
        (4_000_000, 2, jnp.float32),
        (300_000, 3, jnp.float32),
        (300_000, 3, jnp.bfloat16),
        (4_000_000, 4, jnp.float32),
    ],
)
def test_a_budget_is_kept_and_used(most, num_cores, dtype):
    spec = TTSpec.for_budget(11_000_000, 64, bytes=most, num_cores=num_cores, dtype=dtype)
    assert 0.75 * most <= spec.num_bytes(dtype) <= most and spec.num_cores == num_cores
    assert (spec.num_embeddings, spec.embedding_dim) == (11_000_000, 64)
    # One more rank would not fit: the bound is the size with real factors, and integer factors cost
    # at most 1 percent more.
    ends, d = [1, *(rank + 1 for rank in spec.tt_ranks), 1], spec.num_cores
    sizes = [a * q * b for a, q, b in zip(ends[:-1], spec.tt_q_shapes, ends[1:], strict=True)]
    assert 1.01 * jnp.dtype(dtype).itemsize * d * (11_000_000 * math.prod(sizes)) ** (1 / d) > most


def test_specs_are_values():
    one = TTSpec(10, [3, 4], [1, 3], [2])
    assert {one, TTSpec(np.int64(10), (3, 4), np.asarray([1, 3]), (2,))} == {one}
    assert one != TTSpec(11, [3, 4], [1, 3], [2])


@pytest.mark.parametrize("name", ["full_weight_2core", "full_weight_3core", "full_weight_4core"])
def test_strides_and_stored_shapes(name):
    inputs, expect = CASES[name]["input"], CASES[name]["expect"]
    spec = TTSpec(math.prod(inputs["p"]), inputs["p"], inputs["q"], inputs["ranks"])
    assert list(spec.strides) == expect["strides"]
    assert [[1, *shape] for shape in spec.core_shapes] == expect["core_shapes_stored"]
    assert spec.num_params == expect["num_params"]
    digits, _ = digits_of([spec], np.arange(spec.num_embeddings))
    assert np.stack(digits, axis=1).tolist() == expect["digits"]


def test_numbers_of_many_divisors_are_factored_without_going_through_all_products():
    # A search through all products would try about ten million.
    assert suggested_tt_shapes(735_134_400, 5) == [
        51,
        63,
        55,
        64,
        65,
    ]


@pytest.mark.parametrize("n", [2**31 - 1, 10**12, 2 * 3 * 5 * 7 * 11 * 13, 1, 2**5 * 5**3])
def test_suggestions_multiply_to_at_least_n_and_are_plain_integers(n):
    for d in (2, 3):
        shape = suggested_tt_shapes(n, d)
        assert math.prod(shape) >= n and all(type(factor) is int for factor in shape)
    assert math.prod(suggested_tt_shapes(n, 3, allow_round_up=False)) == n
