"""`jax.make_mesh` gives axes that are part of an array's type; tensor trains take such arrays like any others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rsembed import Bags
from rsembed.tt import TableBatchedTTEmbeddingBag, TTEmbeddingBag, TTSpec, bag, full_weight, init_cores, rows
from tests.parallel.hlo import collective_bytes
from tests.tt.tt_oracles import dense_table, looked_up

SPEC = TTSpec(200, (14, 15), (2, 2), (3,))
IDS = np.random.default_rng(0).integers(0, 200, (8, 2))
SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()


@pytest.fixture(scope="module")
def mesh():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    assert mesh.axis_types == (AxisType.Explicit,)
    return mesh


def placed(mesh, tree, partition=WHOLE):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, partition)), tree)


@pytest.mark.parametrize("jit", [False, True])
def test_functions_of_cores_take_arrays_of_explicit_axes(mesh, jit):
    cores = init_cores(jax.random.key(0), SPEC)
    table = dense_table(SPEC, cores)
    run = jax.jit if jit else lambda function: function
    flat = placed(mesh, IDS.reshape(-1), SPLIT)
    bags = Bags(flat, placed(mesh, np.arange(0, 17, 2)))
    for on_mesh in (cores, placed(mesh, cores)):
        np.testing.assert_allclose(run(lambda c, i: rows(SPEC, c, i))(on_mesh, flat), table[IDS.ravel()], rtol=1e-5)
        np.testing.assert_allclose(
            run(lambda c, b: bag(SPEC, c, b, mode="mean"))(on_mesh, bags), table[IDS].mean(1), rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(run(lambda c: full_weight(SPEC, c))(on_mesh), table, rtol=1e-5, atol=1e-7)


def make_module(cached):
    return TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], learning_rate=0.3, use_cache=cached, cache_size=4)


def step(emb, ids, d_output):
    output, backward = emb.vjp(ids)
    backward(d_output)
    return output


jitted_step = nnx.jit(step)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_a_module_trains_on_arrays_of_explicit_axes_as_on_one_device(mesh, jit, cached):
    run = jitted_step if jit else step
    expected, emb = make_module(cached), make_module(cached)
    nnx.update(emb, placed(mesh, nnx.state(emb)))
    d_output = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    ids, gradients = placed(mesh, IDS, SPLIT), placed(mesh, d_output, SPLIT)
    for _ in range(2):
        if not jit:  # where a lookup counts
            expected.update_cache(IDS)
        np.testing.assert_allclose(run(emb, ids, gradients), jitted_step(expected, IDS, d_output), rtol=1e-5, atol=1e-7)
        for module in (emb, expected):
            module.update_cache(IDS)
            module.cache_populate()
    np.testing.assert_allclose(emb.full_weight(), expected.full_weight(), rtol=1e-5, atol=1e-7)


def test_modules_work_while_a_mesh_of_explicit_axes_is_set(mesh):
    expected = make_module(True)
    table = dense_table(expected.spec, expected.cores_of())
    with jax.set_mesh(mesh):
        emb = make_module(True)
        np.testing.assert_allclose(emb(placed(mesh, IDS, SPLIT)), table[IDS].sum(axis=1), rtol=1e-5, atol=1e-7)
        emb.cache_populate()
        wanted = table[1] + table[2], np.zeros(4), table[199]
        np.testing.assert_allclose(emb([[1, 2], [], [199]]), wanted, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(emb.full_weight(), table, rtol=1e-5, atol=1e-7)
        gradients = nnx.jit(nnx.grad(lambda m, ids: jnp.sum(m(ids))))(
            TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], sparse=False, use_cache=False), placed(mesh, IDS, SPLIT)
        )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_batched_tables_take_arrays_of_explicit_axes(mesh):
    emb = nnx.jit(lambda: TableBatchedTTEmbeddingBag(2, [200, 50], 4, tt_ranks=[3]))()
    np.testing.assert_allclose(emb(placed(mesh, IDS % 50, SPLIT)), looked_up(emb, IDS % 50), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("axes", ["x", ("x", "y")])
def test_gradients_of_ids_that_devices_share_are_those_of_one_device(axes, jit):
    """Tables of two lengths of row, means, weights and bags that begin on one device and end on the next."""
    on_axes, split = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4]), PartitionSpec(axes)
    emb = TableBatchedTTEmbeddingBag(3, [200, 50, 60], [4, 6, 4], tt_ranks=[3], sparse=False, mode="mean")
    rng = np.random.default_rng(2)
    ids, offsets = rng.integers(0, 50, 16).astype(np.int32), np.array([0, 3, 3, 9, 10, 15, 16], np.int32)
    weights = rng.random(16, np.float32)
    d_outputs = [rng.normal(size=(2, dim)).astype(np.float32) for dim in (4, 6, 4)]

    def pulled(emb, ids, offsets, weights):
        outputs, backward = emb.vjp(ids, offsets, weights)
        return outputs, backward(d_outputs)

    expected = pulled(emb, ids, offsets, weights)
    nnx.update(emb, placed(on_axes, nnx.state(emb)))
    given = placed(on_axes, ids, split), placed(on_axes, offsets), placed(on_axes, weights, split)
    found = (nnx.jit(pulled) if jit else pulled)(emb, *given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_devices_sum_rows_and_gradients_of_cores_of_their_own_ids(mesh):
    emb = TTEmbeddingBag(200, 4, [3], [14, 15], [2, 2], use_cache=False)
    nnx.update(emb, placed(mesh, nnx.state(emb)))
    given = placed(mesh, IDS, SPLIT), placed(mesh, np.ones((8, 4), np.float32))
    sent = collective_bytes(jitted_step.lower(emb, *given).compile().as_text(), 4)
    assert sent == {"all-gather": 3 / 4 * IDS.size * 4, "all-reduce": 2 * 3 / 4 * 4 * (2 * 8 * 4 + SPEC.num_params)}


@pytest.mark.parametrize("shape", [(0, 2), (8, 0)])
def test_split_batches_without_ids_give_zeros(mesh, shape):
    ids = placed(mesh, np.zeros(shape, np.int32), SPLIT)
    np.testing.assert_array_equal(jitted_step(make_module(False), ids, np.zeros((shape[0], 4), np.float32)), 0.0)
