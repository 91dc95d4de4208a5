import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed.tt import OptimType, TableBatchedTTEmbeddingBag, full_weight
from tests.tt.tt_oracles import (
    CASES,
    core_gradients,
    dense_table,
    looked_up,
    pooled,
    step,
)

SIZES, RANKS = [10, 600, 7, 33], [[2, 3], [4, 4], [2, 3], [2, 3]]


def mixed(**options):
    """A module of its own, made by one program."""
    options = {"sparse": False, **options}
    return nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(4, SIZES, 4, RANKS, None, [2, 1, 2], **options)
    )()


@functools.cache
def unchanged(**options):
    """One that tests may share, since none of them trains it."""
    return mixed(**options)


@nnx.jit
def expanded_and_cores(emb):
    tables = range(len(emb.specs))
    return (
        emb.full_weight(),
        [emb.full_weight(k) for k in tables],
        [emb.cores_of(k) for k in tables],
    )


def batch(seed=0, bags_per_table=3):
    """Flat ids, offsets without the last and weights of 4 tables."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 4, 4 * bags_per_table)
    sizes = np.repeat(np.repeat(SIZES, bags_per_table), lengths)
    ids = generator.integers(0, sizes)
    return (
        ids,
        np.concatenate([[0], np.cumsum(lengths)[:-1]]),
        generator.normal(size=ids.size).astype(np.float32),
    )


def by_table(ids, offsets, weights, k, count=3):
    ends = [*offsets, len(ids)][k * count : (k + 1) * count + 1]
    part = slice(ends[0], ends[-1])
    return ids[part], [end - ends[0] for end in ends], weights[part]


def test_the_worked_batch_of_three_tables():
    given, expect = (
        CASES["table_batched_forward"]["input"],
        CASES["table_batched_forward"]["expect"],
    )
    emb = nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(3, 6, 4, given["ranks"], given["p"], given["q"])
    )()
    # Of all tables, one behind the other.
    shapes = [variable.get_value().shape for variable in emb.core_groups[0]]
    stacked = [
        np.asarray(core, np.float32).reshape(shape)
        for core, shape in zip(given["cores"], shapes, strict=True)
    ]
    for table in range(3):
        emb.set_cores([np.split(core, 3)[table] for core in stacked], table)
    output = looked_up(emb, jnp.asarray(given["indices"]), jnp.asarray(given["offsets"]))
    assert_array_equal(output, expect["output"])
    assert_array_equal(output, emb(given["indices"], given["offsets"][:-1]))
    assert_array_equal(jax.eval_shape(emb.full_weight).shape, (3, 6, 4))


def test_tables_of_different_sizes_and_ranks_agree_with_their_dense_tables():
    emb = unchanged(mode="mean")
    assert emb.groups == ((0, 2, 3), (1,))
    ids, offsets, weights = batch()
    output = looked_up(emb, ids, offsets, weights)
    assert output.shape == (4, 3, 4)
    for k, (found, alone, cores) in enumerate(zip(*expanded_and_cores(emb), strict=True)):
        table = dense_table(emb.specs[k], cores)
        assert found.shape == (SIZES[k], 4)
        assert_allclose(found, table, rtol=1e-4, atol=1e-6)
        assert_allclose(alone, found)
        part_ids, part_offsets, part_weights = by_table(ids, offsets, weights, k)
        assert_allclose(
            output[k],
            pooled(table, part_ids, part_offsets, part_weights, "mean"),
            rtol=1e-4,
            atol=1e-5,
        )


def test_gradients_and_fused_step_are_those_of_each_table_by_itself():
    emb, rate = unchanged(), 0.5
    fused = mixed(
        sparse=True, learning_rate=rate, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, eps=1e-3
    )
    ids, offsets, weights = batch(1)
    d_output = np.random.default_rng(2).normal(size=(4, 3, 4)).astype(np.float32)
    _, gradients = step(emb, d_output, ids, offsets, weights)
    step(fused, d_output, ids, offsets, weights)
    d_cores = jax.tree.map(np.asarray, gradients.cores)
    (_, _, cores), (_, _, stepped) = (
        jax.tree.map(np.asarray, expanded_and_cores(module)) for module in (emb, fused)
    )
    for k, spec in enumerate(emb.specs):
        part_ids, part_offsets, part_weights = by_table(ids, offsets, weights, k)
        bag_of = np.repeat(np.arange(3), np.diff(part_offsets))
        wanted = core_gradients(spec, cores[k], part_ids, bag_of, part_weights, d_output[k])
        group = next(g for g, tables in enumerate(emb.groups) if k in tables)
        before = emb.groups[group][: emb.groups[group].index(k)]
        for t, (gradient, core) in enumerate(zip(wanted, cores[k], strict=True)):
            start = sum(emb.specs[b].tt_p_shapes[t] for b in before)
            found = d_cores[group][t][start : start + core.shape[0]]
            assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)
            total = np.sqrt((gradient**2).mean(1, keepdims=True))
            assert_allclose(
                stepped[k][t], core - rate * gradient / (total + 1e-3), rtol=1e-4, atol=1e-4
            )


def test_dimensions_may_differ():
    options = {"tt_ranks": [2], "sparse": True, "learning_rate": 0.5}
    emb = nnx.jit(lambda: TableBatchedTTEmbeddingBag(2, [5, 9], [3, 8], **options))()
    before, _, _ = jax.tree.map(np.asarray, expanded_and_cores(emb))
    d_outputs = [np.ones((2, 3), np.float32), np.zeros((2, 8), np.float32)]
    outputs, _ = step(emb, d_outputs, np.asarray([[1, 2], [3, -1], [8, 8], [0, 4]]))
    assert [output.shape for output in outputs] == [(2, 3), (2, 8)]
    assert_allclose(outputs[1][0], 2 * before[1][8], rtol=1e-5, atol=1e-8)
    after, _, _ = jax.tree.map(np.asarray, expanded_and_cores(emb))
    assert (after[1] == before[1]).all()
    assert not (after[0] == before[0]).all()


def test_published_attributes_are_one_for_all_tables_or_one_for_each():
    alike = TableBatchedTTEmbeddingBag(
        2, 60, 8, [3], [6, 10], [2, 4], optimizer=OptimType.EXACT_ADAGRAD, use_cache=True
    )
    tables = np.stack([full_weight(spec, alike.cores_of(k)) for k, spec in enumerate(alike.specs)])
    assert abs(np.corrcoef(tables[0].ravel(), tables[1].ravel())[0, 1]) < 0.3
    assert (alike.num_tables, alike.num_embeddings, alike.embedding_dim, alike.tt_ndim) == (
        2,
        60,
        8,
        2,
    )
    assert (alike.tt_p_shapes, alike.tt_q_shapes, alike.tt_ranks) == ([6, 10], [2, 4], [1, 3, 1])
    assert [core.get_value().shape for core in alike.tt_cores] == [
        state.shape for state in alike.optimizer_state
    ]
    assert alike.cache_weight.shape[1] == 8
    other = TableBatchedTTEmbeddingBag(2, [60, 61], [8, 4], tt_ranks=[[3], [2]], use_cache=True)
    assert (other.num_embeddings, other.embedding_dim, other.tt_ranks) == (
        [60, 61],
        [8, 4],
        [[1, 3, 1], [1, 2, 1]],
    )
    assert [rows.shape[1] for rows in other.cache_weight] == [8, 4] and other.tt_ndim == 2
    assert len(other.get_params()) == 6 and len(other.tt_cores) == 4
