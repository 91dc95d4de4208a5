import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.kernels import native
from rsembed.tt import TTSpec, bag, cores as tt_cores, full_weight, rows
from tests.oracles import lookup, weight_gradients
from tests.tt.tt_oracles import CASES, call_of, core_gradients, dense_table, worked_cores
from tests.world import assert_close, assert_same, mesh_of

SPECS = {
    "d2": TTSpec(11, (4, 3), (2, 3), (5,)),
    "d3": TTSpec(58, (4, 3, 5), (2, 3, 2), (3, 4)),
    "d3, first core largest": TTSpec(20, (2, 3, 4), (6, 1, 1), (4, 2)),
    "d3, last core largest": TTSpec(24, (4, 3, 2), (1, 1, 5), (2, 4)),
    "d3, wide": TTSpec(118, (4, 5, 6), (4, 4, 4), (8, 6)),
    "d4": TTSpec(100, (3, 4, 3, 3), (2, 1, 3, 2), (2, 5, 3)),
}


@pytest.fixture(params=["native", "plain"])
def form(request):
    need(request.param)
    return request.param


def need(form):
    if form == "native" and (reason := native.unavailable_because()):
        pytest.skip(reason)


def random_cores(spec, seed=0):
    """Cores of random multiples of 1/4. Sums of their products are exact in any order."""
    generator = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(generator.integers(-4, 5, shape) / 4, jnp.float32) for shape in spec.core_shapes
    )


@functools.cache
def jitted(spec, mode, form):
    """A compiled function of cores, bags and gradient of the output.

    It returns the output, and the gradients of cores and weights.
    """

    @jax.jit
    def run(cores, bags, d_output):
        def lookup(cores, weights):
            bags_of_weights = Bags(bags.ids, bags.offsets, weights)
            return bag(spec, cores, bags_of_weights, mode=mode, implementation=form)

        output, pull = jax.vjp(lookup, cores, bags.weights)
        return output, *pull(d_output)

    return run


@functools.cache
def jitted_rows(spec, form):
    @jax.jit
    def run(cores, ids, d_output):
        output, pull = jax.vjp(lambda cores: rows(spec, cores, ids, implementation=form), cores)
        return output, *pull(d_output)

    return run


@pytest.mark.slow_rows("native-full_weight_4core", "plain-full_weight_4core")
@pytest.mark.parametrize("name", ["full_weight_2core", "full_weight_3core", "full_weight_4core"])
def test_full_weight_is_the_worked_table(form, name):
    inputs, expect = CASES[name]["input"], CASES[name]["expect"]
    num_rows = inputs.get("num_embeddings", math.prod(inputs["p"]))
    spec = TTSpec(num_rows, inputs["p"], inputs["q"], inputs["ranks"])
    cores = worked_cores(inputs, spec)
    assert_array_equal(full_weight(spec, cores), expect["weight"])
    assert_array_equal(
        rows(spec, cores, jnp.arange(num_rows), implementation=form), expect["weight"]
    )


@pytest.mark.slow_rows("native-d4-mean", "native-d2-sum", "plain-d2-mean")
@pytest.mark.parametrize(
    ("form_of_row", "name", "mode"),
    [
        *(("native", name, mode) for name, mode in zip(SPECS, 3 * ("sum", "mean"), strict=True)),
        ("plain", "d2", "mean"),
        ("plain", "d4", "sum"),
    ],
)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_bags_agree_with_the_dense_table(name, form_of_row, mode, data):
    need(form_of_row)
    spec, batch, room = SPECS[name], 5, 40
    cores = random_cores(spec, data.draw(st.integers(0, 99)))

    def drawn(least, most, size):
        integers = st.lists(st.integers(least, most), min_size=size, max_size=size)
        return np.asarray(data.draw(integers))

    ids = drawn(-2, spec.num_embeddings + 2, room)
    offsets = np.append(0, np.sort(drawn(0, room, batch)))
    weights = drawn(-4, 4, room).astype(np.float32) / 4
    d_output = np.arange(batch * spec.embedding_dim, dtype=np.float32).reshape(batch, -1) % 7 - 3
    bags = Bags(jnp.asarray(ids), jnp.asarray(offsets), jnp.asarray(weights))
    output, d_cores, d_weights = jitted(spec, mode, form_of_row)(cores, bags, d_output)
    table, call = dense_table(spec, cores), call_of(ids, offsets, weights, mode)
    assert_allclose(output, lookup([table], call)[0], rtol=1e-5, atol=1e-5)
    assert_allclose(d_weights, weight_gradients([table], call, [d_output])[0], atol=1e-4)
    assert_close(d_cores, core_gradients(spec, cores, call, d_output), rtol=1e-4, atol=1e-4)


@pytest.mark.slow_rows("d4")
@pytest.mark.parametrize("name", ["d3", "d3, wide", "d4"])
def test_many_tiles_make_the_same_bits_as_native_kernels(name, monkeypatch):
    need("native")
    monkeypatch.setattr(tt_cores, "TILE_BYTES", 4096)
    spec, generator = SPECS[name], np.random.default_rng(0)
    cores = random_cores(spec)
    # Many rows have the same first slices.
    ids = jnp.asarray(generator.integers(-1, spec.num_embeddings + 1, 500))
    arguments = (
        cores,
        Bags(ids, jnp.asarray([0, 0, 100, 100, 499])),
        np.ones((4, spec.embedding_dim), np.float32),
    )
    actual, wanted = (jitted(spec, "sum", form)(*arguments) for form in ("native", "plain"))
    assert_same(actual, wanted)


def test_slices_that_no_counted_id_names_may_hold_nan(form):
    spec = SPECS["d3"]
    cores = tuple(core.at[-1].set(np.nan) for core in random_cores(spec))
    # Padding and ids from 58 on must not read the last slices. Id 7 has the digits (0, 1, 2).
    bags = Bags(jnp.asarray([7, 58, 59, -1, 7, 58]), jnp.asarray([0, 1, 1, 5]))
    run = jitted(spec, "sum", form)
    output, *gradients = jax.tree.map(np.asarray, run(cores, bags, np.ones((3, 12), np.float32)))
    assert np.isfinite(output).all()
    assert (output[0] == output[2]).all()
    for gradient in jax.tree.leaves(gradients):
        assert np.isfinite(gradient).all()
        assert gradient.any()


def test_no_lookup_at_all():
    spec, cores = SPECS["d3"], random_cores(SPECS["d3"])
    bags = Bags(np.zeros(0, np.int32), np.zeros(3, np.int32))
    output, *gradients = jitted(spec, "sum", None)(cores, bags, np.ones((2, 12), np.float32))
    assert output.shape == (2, 12)
    assert not any(np.asarray(array).any() for array in jax.tree.leaves((output, gradients)))


def test_bfloat16_cores_are_summed_in_float32(form):
    spec = SPECS["d3"]
    # Multiples of 1/4 are exact in bfloat16.
    wide = random_cores(spec)
    cores = tuple(core.astype(jnp.bfloat16) for core in wide)
    ids, d_output = jnp.arange(50), np.ones((50, spec.embedding_dim), np.float32)
    output, d_cores = jitted_rows(spec, form)(cores, ids, d_output)
    assert output.dtype == jnp.float32
    assert_array_equal(output, dense_table(spec, wide)[:50])
    _, wanted = jitted_rows(spec, form)(wide, ids, d_output)
    for actual, value in zip(d_cores, wanted, strict=True):
        assert actual.dtype == jnp.bfloat16
        # The sum in float32 is rounded once.
        assert_array_equal(actual, value.astype(jnp.bfloat16))


def test_vmap_over_tables_and_over_ids(form):
    spec = SPECS["d3"]
    tables = random_cores(spec, 1), random_cores(spec, 2)
    ids = np.asarray([[3, 57, 3], [0, -1, 20]], np.int32)
    run = jax.vmap(lambda cores, ids: rows(spec, cores, ids, implementation=form))
    actual = jax.jit(run)(jax.tree.map(lambda *cores: np.stack(cores), *tables), ids)
    for k, cores in enumerate(tables):
        wanted = jnp.where(ids[k][:, None] < 0, 0, dense_table(spec, cores)[ids[k]])
        assert_array_equal(actual[k], wanted)


def test_shard_map_over_the_batch_sums_core_gradients(form):
    spec, cores = SPECS["d3"], random_cores(SPECS["d3"])
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 58, 64))
    local = jax.shard_map(
        lambda cores, ids: rows(spec, cores, ids, implementation=form),
        mesh=mesh_of(4),
        in_specs=(P(), P("x")),
        out_specs=P("x"),
    )
    d_output = (np.arange(64 * 12) % 5 - 2.0).astype(np.float32).reshape(64, 12)

    @jax.jit
    def run(cores, ids, d_output):
        output, pull = jax.vjp(lambda cores: local(cores, ids), cores)
        return output, *pull(d_output)

    assert_same(
        run(cores, ids, d_output),
        jitted_rows(spec, "plain")(cores, ids, d_output),
    )


def test_temporary_memory_is_a_row_a_lookup_and_no_slice():
    spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (16, 16))
    cores = random_cores(spec)

    def temporary_bytes(num_lookups):
        ids = jnp.zeros(num_lookups, jnp.int32)
        offsets = jnp.zeros(9, jnp.int32)

        def step(cores, ids, offsets, d_output):
            output, pull = jax.vjp(
                lambda c: bag(spec, c, Bags(ids, offsets), implementation="plain"), cores
            )
            return output, pull(d_output)

        compiled = jax.jit(step).lower(cores, ids, offsets, jnp.zeros((8, 64))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(4_000), temporary_bytes(64_000)
    assert small < 3 * tt_cores.TILE_BYTES + 4 * spec.num_bytes()
    # The limit is four rows of 64 numbers for each id. A gathered middle slice would need 1,024.
    assert large - small < 60_000 * 4 * 4 * 64


def test_ids_above_float32_and_int32_are_told_apart():
    spec = TTSpec(2**40, (2**20, 2**20), (1, 1), (1,))
    cores = (jnp.arange(2**20, dtype=jnp.float32)[:, None], jnp.ones((2**20, 1)))
    ids = np.asarray([2**24 + 1, 2**24 - 1, 2**35 + 5, 2**40, 2**40 - 1, -1])
    assert_array_equal(rows(spec, cores, ids)[:, 0], [16, 15, 2**15, 0, 2**20 - 1, 0])
    assert_array_equal(rows(spec, cores, jnp.asarray([2**31 - 2, 2**20]))[:, 0], [2047, 1])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_every_integer_type_of_ids_is_read_right(dtype):
    spec, cores = SPECS["d4"], random_cores(SPECS["d4"])
    actual = rows(spec, cores, np.asarray([0, 99, 100, 120], dtype))
    assert_array_equal(actual[:2], dense_table(spec, cores)[[0, 99]])
    assert not actual[2:].any()


def test_second_derivatives_of_the_plain_form():
    spec, ids = SPECS["d2"], jnp.arange(6)

    @jax.jit
    @jax.grad
    def slopes(cores):
        return jnp.sum(rows(spec, cores, ids, implementation="plain") ** 2)

    check_grads(slopes, (random_cores(spec),), order=1, modes=["fwd"], atol=5e-3, rtol=5e-3)


def test_equal_inputs_give_equal_bits():
    spec, generator = SPECS["d3"], np.random.default_rng(3)
    cores = tuple(generator.normal(size=shape).astype(np.float32) for shape in spec.core_shapes)
    ids, d_output = generator.integers(0, 58, 3000), np.ones((3000, 12), np.float32)
    run = jitted_rows(spec, None)
    assert_same(run(cores, ids, d_output), run(cores, ids, d_output))
