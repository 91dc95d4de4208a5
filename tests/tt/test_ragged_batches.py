"""Batches of bags of any lengths share few compiled programs, and what makes them share changes no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.kernels import native
from rsembed.tt import TableBatchedTTEmbeddingBag, TTEmbeddingBag, TTSpec, bag, init_cores


def ragged(num_ids, num_bags=6, seed=0):
    """Bags of `num_ids` ids together."""
    generator = np.random.default_rng([num_ids, seed])
    cuts = np.sort(generator.integers(0, num_ids + 1, num_bags - 1))
    return [part.tolist() for part in np.split(generator.integers(0, 200, num_ids), cuts)]


def flat(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return np.asarray([i for row in lists for i in row], np.int32), offsets.astype(np.int32)


def make(**options):
    return TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], **options)


def num_compiled(caplog, call):
    caplog.clear()
    with jax.log_compiles():
        call()
    found = sum(record.getMessage().startswith("Compiling ") for record in caplog.records)
    caplog.clear()
    return found


def step(emb, *batch):
    output, backward = emb.vjp(*batch)
    backward(output)


FORMS = {
    "lists": lambda lists: (lists,),
    "numpy": flat,
    "arrays of jax": lambda lists: tuple(map(jnp.asarray, flat(lists))),
    "bags": lambda lists: (Bags.from_lists(lists),),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_of_other_lengths_compile_nothing_new(form, caplog):
    emb = make(include_last_offset=True, use_cache=True)
    calls = [
        lambda batch: emb(*batch),
        lambda batch: step(emb, *batch),
        lambda batch: emb.update_cache(*batch),
    ]
    batches = [form(ragged(num_ids)) for num_ids in (40, 33, 47, 64, 51)]
    for call in calls:
        call(batches[0])
        assert [num_compiled(caplog, lambda: call(batch)) for batch in batches[1:]] == [0, 0, 0, 0]  # noqa: B023


def test_batches_of_other_lengths_compile_nothing_new_in_functions_and_batched_tables(caplog):
    spec = TTSpec(200, (14, 15), (2, 2), (3,))
    cores = init_cores(jax.random.key(0), spec)
    emb = TableBatchedTTEmbeddingBag(2, 200, 4, tt_ranks=[3])
    for call in (lambda lists: bag(spec, cores, Bags.from_lists(lists)), emb):
        call(ragged(40))
        assert [num_compiled(caplog, lambda: call(ragged(n))) for n in (33, 47, 64)] == [0, 0, 0]  # noqa: B023


def test_a_new_batch_compiles_something_where_nothing_is_rounded(caplog):
    """What the others count is counted."""
    emb = make(use_cache=False)
    emb(np.zeros((50, 2), np.int32))
    assert num_compiled(caplog, lambda: emb(np.zeros((51, 2), np.int32))) > 0


@pytest.mark.parametrize("implementation", ["native", "plain"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_room_for_more_ids_changes_no_bit(implementation, mode):
    if implementation == "native" and (reason := native.unavailable_because()) is not None:
        pytest.skip(f"needs the native kernels: {reason}")
    spec = TTSpec(200, (5, 6, 7), (1, 2, 2), (3, 3))
    cores = init_cores(jax.random.key(0), spec)
    lists = ragged(45)
    weights = [np.random.default_rng(3).normal(size=len(row)).tolist() for row in lists]
    bags = Bags.from_lists(lists, weights)
    # Is left as it is.
    as_given = Bags(bags.ids, bags.offsets, jnp.asarray(bags.weights), dense_shape=(0,))
    options = {"mode": mode, "implementation": implementation}
    assert_array_equal(bag(spec, cores, bags, **options), bag(spec, cores, as_given, **options))


def test_gradients_are_those_of_the_given_ids_and_weights():
    lists = ragged(45)
    weights = [np.random.default_rng(3).normal(size=len(row)).tolist() for row in lists]
    bags, emb = Bags.from_lists(lists, weights), make(sparse=False, use_cache=False)
    d_output = jnp.asarray(np.random.default_rng(4).normal(size=(6, 4)), jnp.float32)
    gradients = emb.vjp(bags)[1](d_output)
    inside = jax.jit(lambda bags: emb.vjp(bags)[1](d_output))(jax.tree.map(jnp.asarray, bags))
    assert gradients.per_sample_weights.shape == (45,)
    assert_array_equal(gradients.per_sample_weights, inside.per_sample_weights)
    for own, expected in zip(gradients.cores[0], inside.cores[0], strict=True):
        assert_allclose(own, expected, rtol=1e-6, atol=1e-7)


def test_an_empty_batch_is_a_batch():
    emb = make(include_last_offset=False)
    assert_array_equal(emb([[], []]), np.zeros((2, 4)))
    assert_array_equal(emb(np.zeros(0, np.int32), np.zeros(3, np.int32)), np.zeros((3, 4)))
