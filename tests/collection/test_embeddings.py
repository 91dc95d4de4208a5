import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed.kernels import native
from rsembed.tt import TensorTrain
from tests.oracles import dense_gradients
from tests.world import assert_close, assert_same, made_mesh

VOCABULARY, DIM = 11, 3
SGD = rs.optimizers.SGD(1.0)


def table_spec(name="t", **changes):
    defaults = {"vocabulary_size": VOCABULARY, "embedding_dim": DIM, "optimizer": SGD}
    return rs.TableSpec(name=name, **defaults | changes)


def collection_of(*tables, **options):
    return rs.EmbeddingCollection([rs.FeatureSpec(f"f_{t.name}", t) for t in tables], **options)


def gain_matrix(rows, weights, combiner):
    """Gains `[samples, ids]`. Activations are `gains @ table`."""
    gains = np.zeros((len(rows), VOCABULARY))
    for sample, ids in enumerate(rows):
        sample_weights = np.ones(len(ids)) if weights is None else weights[sample]
        np.add.at(gains[sample], np.array(ids, int), sample_weights)
    if combiner == "mean":
        gains /= np.maximum(gains.sum(axis=1, keepdims=True), 1e-9)
    return gains


ROWS = [[1, 2, 2], [], [10], [0, 1, 5, 5]]
WEIGHTS = [[1.0, 0.5, 2.0], [], [3.0], [0.25, 1.0, 1.0, 2.0]]


@pytest.mark.parametrize("combiner", ["sum", "mean", "none"])
def test_gradients_straight_from_a_batch_step_clip_and_read_as_those_that_were_written_down(
    combiner,
):
    collection = collection_of(
        table_spec(optimizer=rs.optimizers.Adagrad(0.1), combiner=combiner),
        table_spec("u", embedding_dim=2),
    )
    batch = collection.prepare(
        {"f_t": np.array([[3, 3], [1, -1], [3, 0], [2, 2]]), "f_u": np.array([[1], [2], [1], [-1]])}
    )
    state = collection.init(jax.random.key(0))
    d_activations = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) % 7 - 3.0,
        collection.lookup(state, batch),
    )

    def step(keep, state, d_activations):
        gradients = keep(collection.lookup_vjp(state, batch)[1](d_activations))
        clipped = keep(rs.clip_by_global_norm(keep(rs.scale(gradients, 0.5)), 2.0))
        norms = rs.global_norm(gradients), rs.global_norm(clipped)
        stepped = [collection.apply(state, row_grads).tables for row_grads in (gradients, clipped)]
        return stepped, norms, dense_gradients(clipped)

    def written_down(gradients):
        return jax.tree.map(lambda leaf: leaf, gradients)

    def clipped_step(state, d_activations):
        gradients = collection.lookup_vjp(state, batch)[1](d_activations)
        return collection.apply(state, rs.clip_by_global_norm(gradients, 2.0))

    fused = jax.jit(functools.partial(step, lambda gradients: gradients))(state, d_activations)
    expected = step(written_down, state, d_activations)
    assert_close(fused, expected, rtol=1e-6, atol=1e-7)
    if native.unavailable_because() is None:
        program = jax.jit(clipped_step).lower(state, d_activations).compile().as_text()
        assert "rsembed_row_gradients" not in program


def test_value_and_grad_returns_loss_aux_dense_and_row_gradients():
    collection = collection_of(table_spec())
    state = collection.init(jax.random.key(0))

    def loss_fn(params, activations, labels):
        errors = activations["f_t"] @ params - labels
        return jnp.sum(errors**2), errors

    batch = collection.prepare({"f_t": ROWS})
    params, labels = np.ones(DIM, np.float32), np.arange(4, dtype=np.float32)
    value_and_grad = jax.jit(rs.value_and_grad(loss_fn, collection, has_aux=True))
    (loss, aux), (dense, row_gradients) = value_and_grad(params, state, batch, labels)
    gains = gain_matrix(ROWS, None, "sum")
    activations = gains @ np.asarray(collection.tables(state)["t"])
    errors = activations.sum(axis=1) - labels
    assert_allclose(aux, errors, rtol=1e-5, atol=1e-6)
    assert_allclose(loss, (errors**2).sum(), rtol=1e-5)
    assert_allclose(dense, 2 * activations.T @ errors, rtol=1e-5)
    expected = np.outer(gains.T @ (2 * errors), params)
    assert_allclose(dense_gradients(row_gradients)["t"], expected, rtol=1e-5, atol=1e-6)


def test_ordinary_autodiff_through_lookup_gives_dense_gradients_of_tables_and_weights():
    collection = collection_of(table_spec(combiner="mean"))
    state = collection.init(jax.random.key(0))
    bags = collection.prepare({"f_t": (ROWS, WEIGHTS)})["f_t"]

    @jax.jit
    def total(tables, weights):
        batch = {"f_t": rs.Bags(bags.ids, bags.offsets, weights)}
        pooled = collection.lookup(state._replace(tables=tables), batch)["f_t"]
        return jnp.sum(jnp.sin(pooled))

    d_tables = jax.grad(total)(state.tables, bags.weights)
    gains = gain_matrix(ROWS, WEIGHTS, "mean")
    cosine = np.cos(gains @ np.asarray(state.tables["t"]))
    assert_allclose(d_tables["t"], gains.T @ cosine, rtol=1e-5, atol=1e-6)
    of_weights = functools.partial(total, state.tables)
    check_grads(of_weights, (bags.weights,), order=1, modes=["rev"], atol=1e-4, rtol=2e-2, eps=1e-2)


def test_initial_values_depend_on_key_and_table_not_on_company():
    alone = collection_of(table_spec("u"))
    together = collection_of(table_spec("t"), table_spec("u"), table_spec("v", embedding_dim=5))
    key = jax.random.key(7)
    one, many = alone.tables(alone.init(key))["u"], together.tables(together.init(key))
    assert_array_equal(one, many["u"])
    assert not np.array_equal(many["t"], many["u"])
    assert not np.array_equal(one, alone.tables(alone.init(jax.random.key(8)))["u"])


def test_a_declared_batch_size_leaves_the_state_as_it_is():
    shapes = []
    for samples in (None, 2**20):
        input_shape = None if samples is None else (samples, 1)
        features = [
            rs.FeatureSpec(name, table_spec(name), input_shape=input_shape) for name in "abc"
        ]
        collection = rs.EmbeddingCollection(features)
        state = jax.eval_shape(collection.init, jax.random.key(0))
        shapes.append({name: rows.shape for name, rows in state.tables.items()})
    assert shapes[0] == shapes[1] == {"a_b_c": (3 * VOCABULARY, DIM)}


def test_init_in_blocks_fills_every_row_once(monkeypatch):
    spec = table_spec(
        vocabulary_size=50, optimizer=rs.optimizers.Adagrad(0.1, initial_accumulator_value=0.3)
    )
    expected = collection_of(spec).init(jax.random.key(0))
    # There are 8 blocks, and the last one overlaps its predecessor.
    monkeypatch.setattr("rsembed.storage.initial_states.INIT_BLOCK_VALUES", 7 * DIM)
    blocks = collection_of(spec).init(jax.random.key(0))
    assert_array_equal(blocks.tables["t"], expected.tables["t"])
    assert_array_equal(blocks.slots["t"][0], np.full((50, DIM), 0.3, np.float32))


def test_stochastic_rounding_keeps_the_mean_where_nearest_rounding_stands_still():
    spec = table_spec(
        vocabulary_size=2000, embedding_dim=2, dtype="bfloat16", stochastic_rounding=True,
        initializer=jax.nn.initializers.ones,
    )  # fmt: skip
    # The step is much smaller than the spacing of bfloat16 below 1, which is 2**-8.
    step = 1e-3
    gradient = {"f_t": np.full((2000, 2), step, np.float32)}

    def trained(spec):
        collection = collection_of(spec)
        update = jax.jit(lambda state: collection.update(state, {"f_t": np.arange(2000)}, gradient))
        state = collection.init(jax.random.key(0))
        for _ in range(8):
            state = update(state)
        return np.asarray(state.tables["t"], np.float32)

    rounded = trained(spec)
    assert abs(np.mean(rounded) - (1 - 8 * step)) < 5e-4
    assert np.min(trained(dataclasses.replace(spec, stochastic_rounding=False))) == 1.0
    assert_array_equal(trained(spec), rounded)


def test_quantized_lookup_rounds_rows_before_they_are_summed():
    spec = table_spec(quantization_config=rs.QuantizationConfig(-1.0, 1.0, 5))
    collection = collection_of(spec)
    state = collection.init(jax.random.key(0))
    table = np.asarray(collection.tables(state)["t"], np.float64)
    rounded = np.floor((np.clip(table, -1, 1) + 1) / 0.5 + 0.5) * 0.5 - 1
    expected = gain_matrix(ROWS, None, "sum") @ rounded
    assert_allclose(collection.lookup(state, {"f_t": ROWS})["f_t"], expected, atol=1e-6)


def test_ids_out_of_range_inside_jit_contribute_nothing_and_are_counted():
    collection = collection_of(table_spec(), table_spec("u"))
    state = collection.init(jax.random.key(0))
    table = np.asarray(collection.tables(state)["t"])
    ids = np.int32([[1, VOCABULARY], [-1, 3], [-7, 2]])
    lookup = jax.jit(functools.partial(collection.lookup, return_statistics=True))
    activations, statistics = lookup(state, {"f_t": ids, "f_u": ids[:, :1]})
    assert_array_equal(activations["f_t"], table[[1, 3, 2]])
    assert int(statistics.num_ids["f_t"]) == 3
    assert int(statistics.num_out_of_range["f_t"]) == 2
    lenient = collection_of(table_spec(), table_spec("u"), bounds_check="ignore")
    batch = lenient.prepare({"f_t": ids, "f_u": np.asarray([[2**40], [0], [2**32 + 1]])})
    activations, statistics = lenient.lookup(state, batch, return_statistics=True)
    assert_array_equal(activations["f_t"], table[[1, 3, 2]])
    assert int(statistics.num_out_of_range["f_u"]) == 2


def test_output_dim_below_the_table_dim_returns_and_trains_leading_columns():
    feature = rs.FeatureSpec("f", table_spec(), output_shape=(2, 2))
    collection = rs.EmbeddingCollection(feature)
    state = collection.init(jax.random.key(0))
    activations, pullback = collection.lookup_vjp(state, {"f": [[1], [2]]})
    assert_array_equal(activations["f"], np.asarray(state.tables["t"])[[1, 2], :2])
    gradients = pullback({"f": np.ones((2, 2), np.float32)})
    assert_array_equal(dense_gradients(gradients)["t"][1], [1, 1, 0])


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_prepared_batch_stays_though_its_memory_is_written_again(num_devices):
    # JAX can use memory of numpy without a copy only if it is aligned.
    def aligned(values):
        memory = np.empty(values.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        array = memory[start : start + values.nbytes].view(values.dtype)
        array[...] = values
        return array

    ids, weights = np.arange(64, dtype=np.int32), np.ones(64, np.float32)
    offsets = np.arange(65, dtype=np.int32)
    arguments = [*map(aligned, (ids, ids, weights, ids, offsets, weights))]
    batch = {
        "array": arguments[0][:, None],
        "pair": (arguments[1][:, None], arguments[2][:, None]),
        "bags": rs.Bags(*arguments[3:]),
    }
    spec = rs.TableSpec("t", 64, DIM)
    features = [rs.FeatureSpec(name, spec) for name in batch]
    collection = rs.EmbeddingCollection(features, mesh=made_mesh(num_devices))
    prepared = jax.block_until_ready(collection.prepare(batch))
    before = jax.tree.map(np.array, prepared)
    for array in arguments:
        array[...] = 0
    assert_same(prepared, before)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint32, np.uint64, jnp.int32])
def test_arrays_of_one_batch_become_int32_in_their_shapes_and_stay_where_they_are_that(dtype):
    tables = [table_spec(name, vocabulary_size=n) for name, n in (("b", 3), ("a", 5), ("c", 9))]
    collection = collection_of(*tables)
    ids = [np.asarray([2, 0]), np.asarray([[4, 1], [0, 3]]), np.zeros((2, 0), int)]
    make = jnp.asarray if dtype is jnp.int32 else np.asarray
    batch = {f"f_{t.name}": make(rows, dtype) for t, rows in zip(tables, ids, strict=True)}
    prepared = collection.prepare(batch)
    for rows, (name, actual) in zip(ids, prepared.items(), strict=True):
        assert actual.dtype == np.int32
        assert_array_equal(actual, rows)
        assert actual.shape == rows.shape
        assert actual is batch[name] or dtype is not jnp.int32
    with pytest.raises(
        ValueError, match=r"'f_b': id 3 in sample 1 is outside table 'b' with vocabulary_size=3"
    ):
        collection.prepare(batch | {"f_b": make([2, 3], dtype)})


def loops_of(jaxpr):
    """The loops of a jaxpr, each one with the loops inside it."""
    loops = []
    for equation in jaxpr.eqns:
        inside = []
        for program in jax.extend.core.jaxprs_in_params(equation.params):
            inside += loops_of(program)
        if equation.primitive.name in ("scan", "while"):
            loops.append((equation.primitive.name, inside))
        else:
            loops += inside
    return loops


def test_the_loops_that_make_keys_and_fill_tables_have_no_loops_inside():
    """XLA for GPUs in JAX 0.11 fails to compile a binary search inside a loop.

    The error is "depends on parameters to its parent computation".
    """
    collection = collection_of(table_spec("a"), table_spec("b"))
    program = jax.make_jaxpr(collection.init)(jax.random.key(0))
    assert loops_of(program.jaxpr) == [("scan", []), ("scan", [])]


@pytest.mark.slow_rows("storage2")
@pytest.mark.parametrize("storage", [None, rs.Hashed(), rs.HostCached(cache_rows=VOCABULARY)])
def test_ids_after_the_last_offset_are_neither_read_nor_trained_without_a_combiner(storage):
    collection = collection_of(table_spec(combiner="none", storage=storage))
    everything = {"f_t": np.arange(VOCABULARY)}
    state = collection.prefetch(collection.init(jax.random.key(0)), everything)
    state = collection.update(state, everything, {"f_t": jnp.zeros((VOCABULARY, DIM))})
    before = np.asarray(collection.lookup(state, everything)["f_t"])
    ids = np.asarray([1, 2, 3, 4])
    prepared = collection.prepare({"f_t": rs.Bags(ids, np.asarray([0, 2, 4], np.int32))})["f_t"]
    shortened = {"f_t": dataclasses.replace(prepared, offsets=jnp.asarray([1, 2, 3], jnp.int32))}
    is_read = np.isin(np.arange(VOCABULARY), [2, 3])[:, None]
    read = jax.jit(collection.lookup)(state, shortened)["f_t"]
    assert_allclose(read, (is_read * before)[ids])
    state = jax.jit(collection.update)(state, shortened, {"f_t": jnp.ones((4, DIM))})
    after = collection.lookup(state, everything)["f_t"]
    assert_allclose(after, before - is_read, atol=1e-6)


@pytest.mark.slow_rows("storage2-4", "storage3-4")
@pytest.mark.parametrize(
    ("storage", "num_devices"),
    [
        (None, None),
        (None, 4),
        (rs.Hashed(), 4),
        (rs.HostCached(cache_rows=64), 4),
        (TensorTrain(tt_ranks=(2, 2)), None),
    ],
)
def test_the_reference_implementation_calls_no_native_kernel(storage, num_devices):
    mesh = made_mesh(num_devices)
    spec = table_spec(vocabulary_size=64, storage=storage, embedding_dim=4)
    collection = collection_of(spec, implementation="reference", mesh=mesh)
    state = collection.init(jax.random.key(0))
    batch = collection.prepare({"f_t": np.arange(16).reshape(8, 2)})
    state = collection.prefetch(state, batch)

    def steps(state):
        activations, pullback = collection.lookup_vjp(state, batch)
        state = collection.apply(state, rs.clip_by_global_norm(pullback(activations), 1.0))
        return collection.update(state, batch, activations), collection.lookup(state, batch)

    assert "rsembed_" not in jax.jit(steps).lower(state).as_text()
    if native.unavailable_because() is None:
        fastest = collection_of(spec, mesh=mesh)
        assert "rsembed_" in jax.jit(fastest.lookup).lower(state, batch).as_text()


@pytest.mark.parametrize(("storage", "num_devices"), [(rs.Hashed(), None), (None, 4)])
def test_features_of_one_table_pool_it_each_in_their_own_way(storage, num_devices):
    table = table_spec(combiner="mean", storage=storage)
    features = [rs.FeatureSpec("mean", table)]
    for combiner in ("sum", "sqrtn", "none"):
        features.append(rs.FeatureSpec(combiner, table, combiner=combiner))
    collection = rs.EmbeddingCollection(features, mesh=made_mesh(num_devices))
    batch = dict.fromkeys(collection.features, np.arange(8).reshape(4, 2))
    state = collection.init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, collection.lookup(state, batch))
    # This step gives rows to the hashed keys.
    state = collection.update(state, batch, zeros)
    activations = collection.lookup(state, batch)
    rows = np.asarray(activations["none"], np.float64)
    factors = {"mean": 1 / 2, "sum": 1.0, "sqrtn": 1 / np.sqrt(2)}
    for name, factor in factors.items():
        assert_allclose(activations[name], factor * rows.sum(axis=1), rtol=1e-5, atol=1e-6)
    serve, served = rs.for_serving(collection, state)
    assert_close(serve(served, batch), activations, rtol=1e-5, atol=1e-6)
    stepped = collection.update(state, batch, jax.tree.map(jnp.ones_like, zeros))
    moved = rows - np.asarray(collection.lookup(stepped, batch)["none"])
    assert_allclose(moved, sum(factors.values()) + 1, rtol=1e-4)


@pytest.mark.skipif(
    native.unavailable_because() is not None, reason="counts calls of the native library"
)
def test_one_kernel_call_looks_up_all_arrays_of_a_device():
    rules = rs.optimizers.SGD(0.1), rs.optimizers.RowWiseAdagrad(0.1), rs.optimizers.Adam(0.1)
    features = []
    for dim, rule, combiner in zip((4, 8, 16), rules, ("sum", "mean", "none"), strict=True):
        table = rs.TableSpec(f"t{dim}", 50, dim, optimizer=rule)
        features += [rs.FeatureSpec(f"f{dim}", table, combiner=combiner)]
        features += [rs.FeatureSpec(f"g{dim}", table, combiner="sqrtn")]
    collection = rs.EmbeddingCollection(features)
    batch = dict.fromkeys(collection.features, rs.Bags.from_lists([[1, 2], [], [49, 0, 3]]))
    batch["f8"] = np.array([[1, 2], [-1, 3], [4, 4]])
    state = collection.init(jax.random.key(0))
    lowered = jax.jit(collection.lookup).lower(state, collection.prepare(batch))
    assert lowered.as_text().count("@rsembed_lookup(") == 1
