"""Batches of ragged bags share few compiled programs, and the padding for that changes no bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed import Bags
from rsembed.kernels import native
from rsembed.tt import TableBatchedTTEmbeddingBag, TTEmbeddingBag, TTSpec, bag, init_cores


def ragged(num_ids, num_bags=6, seed=0):
    """Bags with `num_ids` ids in total."""
    generator = np.random.default_rng([num_ids, seed])
    cuts = np.sort(generator.integers(0, num_ids + 1, num_bags - 1))
    return [part.tolist() for part in np.split(generator.integers(0, 200, num_ids), cuts)]


def flat(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return np.asarray([i for row in lists for i in row], np.int32), offsets.astype(np.int32)


def make(**options):
    return TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], **options)


def num_compiled(caplog, call, *batch):
    caplog.clear()
    with jax.log_compiles():
        call(*batch)
    return sum(record.getMessage().startswith("Compiling ") for record in caplog.records)


def step(emb, *batch):
    output, backward = emb.vjp(*batch)
    backward(output)


FORMS = {
    "lists": lambda lists: (lists,),
    "numpy": flat,
    "arrays of jax": lambda lists: tuple(map(jnp.asarray, flat(lists))),
    "bags": lambda lists: (Bags.from_lists(lists),),
}


def assert_no_new_programs(caplog, call, batches):
    first, *others = batches
    call(*first)
    assert [num_compiled(caplog, call, *batch) for batch in others] == [0] * len(others)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_of_other_lengths_compile_nothing_new(form, caplog):
    emb = make(include_last_offset=True, use_cache=True)
    batches = [form(ragged(num_ids)) for num_ids in (40, 33, 47, 64, 51)]
    for call in (emb, functools.partial(step, emb), emb.update_cache):
        assert_no_new_programs(caplog, call, batches)


def test_batches_of_other_lengths_compile_nothing_new_in_functions_and_batched_tables(caplog):
    spec = TTSpec(200, (14, 15), (2, 2), (3,))
    function = functools.partial(bag, spec, init_cores(jax.random.key(0), spec))
    batches = [FORMS["bags"](ragged(num_ids)) for num_ids in (40, 33, 47, 64)]
    for call in (function, TableBatchedTTEmbeddingBag(2, 200, 4, tt_ranks=[3])):
        assert_no_new_programs(caplog, call, batches)


def test_a_new_batch_compiles_something_where_nothing_is_rounded(caplog):
    """Checks that `num_compiled` counts new programs."""
    emb = make(use_cache=False)
    emb(np.zeros((50, 2), np.int32))
    assert num_compiled(caplog, emb, np.zeros((51, 2), np.int32)) > 0


@pytest.mark.parametrize("implementation", ["native", "plain"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_room_for_more_ids_changes_no_bit(implementation, mode):
    if implementation == "native" and (reason := native.unavailable_because()) is not None:
        pytest.skip(f"needs the native kernels: {reason}")
    spec = TTSpec(200, (5, 6, 7), (1, 2, 2), (3, 3))
    cores = init_cores(jax.random.key(0), spec)
    ids, offsets = flat(ragged(45))
    weights = np.random.default_rng(3).normal(size=45).astype(np.float32)
    actual, as_given = (
        bag(
            spec,
            cores,
            Bags(ids, offsets, weights, shape),
            mode=mode,
            implementation=implementation,
        )
        # With a shape, the ids are those of a dense array, which is not padded.
        for shape in (None, (0,))
    )
    assert_array_equal(actual, as_given)


def test_an_empty_batch_is_a_batch():
    emb = make(include_last_offset=False)
    assert_array_equal(emb([[], []]), np.zeros((2, 4)))
    assert_array_equal(emb(np.zeros(0, np.int32), np.zeros(3, np.int32)), np.zeros((3, 4)))
