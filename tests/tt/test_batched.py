import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.tt import OptimType, TableBatchedTTEmbeddingBag
from tests.oracles import lookup
from tests.tt.tt_oracles import CASES, call_of, core_gradients, dense_table, looked_up, step
from tests.world import assert_same

SIZES, RANKS = [10, 600, 7, 33], [[2, 3], [4, 4], [2, 3], [2, 3]]


def mixed(**options):
    """A module with four tables, initialized by one compiled program."""
    options = {"sparse": False, **options}
    return nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(4, SIZES, 4, RANKS, None, [2, 1, 2], **options)
    )()


@nnx.jit
def cores_of(emb):
    return [emb.cores_of(k) for k in range(len(emb.specs))]


def batch(seed=0):
    """Ids and weights of three bags for each table, table by table."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, rows, generator.integers(0, 4)) for rows in np.repeat(SIZES, 3)]
    return ids, [generator.normal(size=len(bag)) for bag in ids]


def call_of_table(k, ids, weights, mode="sum"):
    table_bags = Bags.from_lists(ids[3 * k : 3 * k + 3], weights[3 * k : 3 * k + 3])
    return call_of(table_bags.ids, table_bags.offsets, table_bags.weights, mode)


def test_the_worked_batch_of_three_tables():
    case = CASES["table_batched_forward"]
    inputs, expect = case["input"], case["expect"]
    emb = nnx.jit(
        lambda: TableBatchedTTEmbeddingBag(3, 6, 4, inputs["ranks"], inputs["p"], inputs["q"])
    )()
    # Cores of all tables, concatenated.
    stacked = [
        np.asarray(core, np.float32).reshape(variable.get_value().shape)
        for core, variable in zip(inputs["cores"], emb.core_groups[0], strict=True)
    ]
    for table in range(3):
        emb.set_cores([np.split(core, 3)[table] for core in stacked], table)
    output = looked_up(emb, jnp.asarray(inputs["indices"]), jnp.asarray(inputs["offsets"]))
    assert_array_equal(output, expect["output"])
    assert_array_equal(output, emb(inputs["indices"], inputs["offsets"][:-1]))
    assert jax.eval_shape(emb.full_weight).shape == (3, 6, 4)


def test_tables_of_different_sizes_and_ranks_agree_with_their_dense_tables():
    emb = mixed(mode="mean")
    assert emb.groups == ((0, 2, 3), (1,))
    ids, weights = batch()
    output, whole = looked_up(emb, Bags.from_lists(ids, weights)), emb.full_weight()
    assert output.shape == (4, 3, 4)
    for k, cores in enumerate(cores_of(emb)):
        table = dense_table(emb.specs[k], cores)
        assert_allclose(whole[k], table, rtol=1e-4, atol=1e-6)
        assert_allclose(emb.full_weight(k), whole[k])
        (expected,) = lookup([table], call_of_table(k, ids, weights, "mean"))
        assert_allclose(output[k], expected, rtol=1e-4, atol=1e-5)


def test_gradients_and_fused_step_are_those_of_each_table_by_itself():
    emb, rate = mixed(), 0.5
    fused = mixed(
        sparse=True, learning_rate=rate, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, eps=1e-3
    )
    ids, weights = batch(1)
    bags = Bags.from_lists(ids, weights)
    d_output = np.random.default_rng(2).normal(size=(4, 3, 4)).astype(np.float32)
    _, gradients = step(emb, d_output, bags)
    step(fused, d_output, bags)
    cores, stepped, wanted = cores_of(emb), cores_of(fused), []
    for k, spec in enumerate(emb.specs):
        call = call_of_table(k, ids, weights)
        wanted.append(core_gradients(spec, cores[k], call, d_output[k]))
    for tables, actual in zip(emb.groups, gradients.cores, strict=True):
        for t, d_core in enumerate(actual):
            expected = np.concatenate([wanted[k][t] for k in tables])
            assert_allclose(d_core, expected, rtol=1e-4, atol=1e-5)
    for k, d_cores in enumerate(wanted):
        for core, gradient, actual in zip(cores[k], d_cores, stepped[k], strict=True):
            total = np.sqrt((gradient**2).mean(1, keepdims=True))
            expected = core - rate * gradient / (total + 1e-3)
            assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_dimensions_may_differ():
    options = {"tt_ranks": [2], "sparse": True, "learning_rate": 0.5}
    emb = nnx.jit(lambda: TableBatchedTTEmbeddingBag(2, [5, 9], [3, 8], **options))()
    before = emb.full_weight()
    d_outputs = [np.ones((2, 3), np.float32), np.zeros((2, 8), np.float32)]
    outputs, _ = step(emb, d_outputs, np.asarray([[1, 2], [3, -1], [8, 8], [0, 4]]))
    assert [output.shape for output in outputs] == [(2, 3), (2, 8)]
    assert_allclose(outputs[1][0], 2 * before[1][8], rtol=1e-5, atol=1e-8)
    after = emb.full_weight()
    assert (after[1] == before[1]).all()
    assert not (after[0] == before[0]).all()


def test_published_attributes_are_one_for_all_tables_or_one_for_each():
    options = {"optimizer": OptimType.EXACT_ADAGRAD, "use_cache": True}
    alike = TableBatchedTTEmbeddingBag(2, 60, 8, [3], [6, 10], [2, 4], **options)
    first, second = (np.ravel(table) for table in alike.full_weight())
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.3
    assert (alike.num_tables, alike.num_embeddings, alike.embedding_dim) == (2, 60, 8)
    assert (alike.tt_p_shapes, alike.tt_q_shapes, alike.tt_ranks) == ([6, 10], [2, 4], [1, 3, 1])
    assert alike.tt_ndim == 2 and alike.cache_weight.shape[1] == 8
    for core, state in zip(alike.tt_cores, alike.optimizer_state, strict=True):
        assert core.get_value().shape == state.shape
    other = TableBatchedTTEmbeddingBag(2, [60, 61], [8, 4], tt_ranks=[[3], [2]], use_cache=True)
    assert (other.num_embeddings, other.embedding_dim) == ([60, 61], [8, 4])
    assert (other.tt_ranks, other.tt_ndim) == ([[1, 3, 1], [1, 2, 1]], 2)
    assert [rows.shape[1] for rows in other.cache_weight] == [8, 4]
    assert len(other.tt_cores) == 4
    # Reading the attributes changes nothing.
    for _ in range(2):
        assert_same(other.get_params()[4:], other.cache_weight)
    assert mixed().cache_weight is None
