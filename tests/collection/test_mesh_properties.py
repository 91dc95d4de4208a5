"""What a mesh promises beside its numbers: equal bits, bytes that travel, arrays stepped in place, clear refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from tests.parallel.hlo import collective_bytes
from tests.world import assert_same, made_mesh, mesh_of

BATCH, DIM = 16, 8
ROWS = {"t": 21, "u": 5}


def features_of(combiner="mean", **changes):
    changes = {
        "optimizer": rs.optimizers.Adagrad(0.1),
        "initializer": jax.nn.initializers.ones,
        **changes,
    }
    t, u = (
        rs.TableSpec(name, rows, DIM, combiner=combiner, **changes) for name, rows in ROWS.items()
    )
    return [rs.FeatureSpec(name, table) for name, table in (("a", t), ("b", t), ("c", u))]


def some_batch(seed=0):
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-1, rows, (BATCH, width)) for rows, width in ((21, 5), (4, 3), (5, 1)))
    return {"a": (a, rng.random(a.shape, np.float32)), "b": b, "c": c}


def targets(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(BATCH, DIM)).astype(np.float32) for name in "abc"}


def test_stochastic_rounding_draws_for_the_row_not_for_its_owner():
    options = {"dtype": "bfloat16", "stochastic_rounding": True, "combiner": "sum"}
    layouts = (
        {},
        {"mesh": mesh_of(4), "placement": "row"},
        {"mesh": mesh_of(4), "placement": "table"},
    )
    # No row twice.
    batch = {
        "a": np.arange(16),
        "b": np.full(16, -1),
        "c": np.r_[np.arange(5), np.full(11, -1)],
    }
    results = []
    for layout in layouts:
        collection = rs.EmbeddingCollection(features_of(**options), **layout)
        state = collection.init(jax.random.key(0))
        state = jax.jit(collection.update)(state, collection.prepare(batch), targets())
        results.append(jax.tree.map(lambda x: np.asarray(x, np.float32), collection.tables(state)))
    for found in results[1:]:
        assert_same(found, results[0])


@pytest.mark.usefixtures(
    "more_optimizations"
)  # of the approximation of a normal value, whose last bit is a compiler's
def test_initial_values_do_not_depend_on_the_mesh():
    features = features_of(initializer=jax.nn.initializers.normal(1.0))
    one = rs.EmbeddingCollection(features)
    expected = one.tables(one.init(jax.random.key(7)))
    for placement in ("row", "table", "column"):
        collection = rs.EmbeddingCollection(features, mesh=mesh_of(4), placement=placement)
        state = collection.init(jax.random.key(7))
        assert_same(collection.tables(state), expected)
        shard_sizes = {
            shard.data.size for array in state.tables.values() for shard in array.addressable_shards
        }
        assert max(shard_sizes) <= (21 if placement == "table" else 7) * DIM


def test_accumulation_and_clipping_inside_a_scan_equal_one_device():
    def train(collection, state, batches, wanted):
        """Row gradients of two micro-batches make one step."""

        def body(state, inputs):
            def micro(_, inputs):
                return None, collection.lookup_vjp(state, inputs[0])[1](inputs[1])

            row_gradients = rs.combine(jax.lax.scan(micro, None, inputs)[1])
            return collection.apply(
                state, rs.clip_by_global_norm(row_gradients, 1.5)
            ), rs.global_norm(row_gradients)

        return jax.lax.scan(body, state, (batches, wanted))

    stack = functools.partial(jax.tree.map, lambda *x: np.stack(x).reshape(2, 2, *x[0].shape))
    one_batches = [
        {n: v[0] if n == "a" else v for n, v in some_batch(seed).items()} for seed in range(4)
    ]
    batches, wanted = stack(*one_batches), stack(*map(targets, range(4)))
    batches = jax.tree.map(lambda x: x.astype(np.int32), batches)
    results = []
    for options in ({}, {"mesh": made_mesh(4)}):
        collection = rs.EmbeddingCollection(features_of(), **options)
        state = collection.init(jax.random.key(0))
        state, norms = jax.jit(functools.partial(train, collection), donate_argnums=0)(
            state, batches, wanted
        )
        results.append(
            jax.tree.map(np.asarray, (collection.tables(state), collection.slots(state), norms))
        )
    assert (results[0][2] > 1.5).all()
    for one, many in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("4-row")
@pytest.mark.parametrize(
    ("num_devices", "placement"),
    [(4, "row"), (8, "row"), (4, "column"), (4, "replicated")],
)
def test_compiled_programs_send_the_bytes_of_the_page(num_devices, placement):
    local_batch, width, vocabulary = 4, 3, 1000
    local_ids = local_batch * width
    table = rs.TableSpec("t", vocabulary, DIM, initializer=jax.nn.initializers.zeros,
        optimizer=rs.optimizers.SGD(0.1),
    )  # fmt: skip
    # As many places as ids, which one round always serves.
    capacity = 12 if placement == "row" else None
    collection = rs.EmbeddingCollection(
        rs.FeatureSpec("f", table),
        mesh=mesh_of(num_devices),
        placement=placement,
        exchange_capacity=capacity,
    )
    ids = np.zeros((num_devices * local_batch, width), np.int32)

    def step(state, ids):
        activations, statistics = collection.lookup(state, {"f": ids}, return_statistics=True)
        return collection.update(state, {"f": ids}, activations), statistics

    compiled = jax.jit(step).lower(collection.init(jax.random.key(0)), ids).compile()
    sent = collective_bytes(compiled.as_text(), num_devices)
    sent.pop("all-reduce", None)  # numbers of ids and rounds
    pooled, others = local_batch * DIM * 4, num_devices - 1
    # What lookup and update both need travels once: XLA merges equal collectives of a program.
    # Keys go, rows come back, gradients go: capacity places for every device.
    if placement == "row":
        places = others * 12
        expected = {"all-to-all": places * (4 + 2 * DIM * 4)}
    elif (
        placement == "column"
    ):  # every device needs all ids; pieces of activations and of their gradients travel
        pieces = pooled * others // num_devices
        expected = {"all-to-all": 2 * pieces, "all-gather": others * local_ids * 4}
    else:
        expected = {"all-gather": others * (local_ids * 4 + pooled)}
    assert sent == expected
    statistics = compiled(collection.init(jax.random.key(0)), ids)[1]
    assert int(statistics.num_rounds["t"]) == (placement == "row")
    assert int(statistics.num_ids["f"]) == ids.size


@pytest.mark.parametrize("capacity", [None, 64])
def test_compiled_training_on_a_mesh_copies_no_table(capacity):
    rows, dim, num_devices = 1_000_000, 64, 4
    table = rs.TableSpec("t", rows, dim, optimizer=rs.optimizers.Adagrad())
    feature = rs.FeatureSpec("f", table)
    collection = rs.EmbeddingCollection(
        feature, mesh=mesh_of(num_devices), exchange_capacity=capacity
    )
    state = jax.eval_shape(collection.init, jax.random.key(0))

    def train(state, batches):
        def body(state, ids):
            activations = collection.lookup(state, {"f": ids})
            return collection.update(state, {"f": ids}, activations), jnp.sum(activations["f"])

        return jax.lax.scan(body, state, batches)

    batches = jax.ShapeDtypeStruct((3, 512, 4), jnp.int32)
    memory = jax.jit(train, donate_argnums=0).lower(state, batches).compile().memory_analysis()
    bytes_per_device = rows * dim * 4 // num_devices
    assert memory.alias_size_in_bytes >= 2 * bytes_per_device
    assert memory.temp_size_in_bytes < 0.1 * bytes_per_device
