"""Unusual batches, states and calls, most of them for keyed tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import sok
from rsembed.kernels import native
from rsembed.keys import split_keys
from rsembed.tt import TensorTrain
from tests.world import assert_close, assert_same, mesh_of

DIM, LR = 4, 0.5
ONE, OTHER, THIRD = 2**40 + 1, 2**40 + 2**33 + 1, 2**62 + 3


SGD = rs.optimizers.SGD(LR)
WIDE = np.array([[2**40 + 7, 7]])
"""Two keys with the same lower 32 bits. Inside `jit`, JAX converts both to 7 in 32-bit mode."""


def keyed(mesh=None, *, rows=8, optimizer=SGD, dtype="float32", capacity=None, **storage):
    """A collection with one keyed table and one feature."""
    table = rs.TableSpec("t", rows, DIM, optimizer=optimizer, dtype=dtype,
        storage=rs.Hashed(**storage), stochastic_rounding=dtype != "float32",
    )  # fmt: skip
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh, exchange_capacity=capacity)


def stepped(collection, state, keys):
    """The state after a step on these ids of the only feature, with gradients of ones."""
    ones = {"f": np.ones((len(keys), DIM), np.float32)}
    return collection.update(state, {"f": np.asarray(keys)}, ones)


def rows_of(collection, state):
    """Keys in ascending order, with their rows and all other arrays of the table."""
    return collection.tables(state)["t"]


def keys_of(collection, state):
    return rows_of(collection, state)["keys"].tolist()


@pytest.mark.slow_rows("no samples")
@pytest.mark.parametrize("samples", [8, 0], ids=["all padding", "no samples"])
def test_a_batch_without_ids_changes_nothing_but_the_step(samples):
    storages = {"f": rs.Hashed(), "d": None, "w": TensorTrain((2,), (2, 4), (2, 2))}
    features = [
        rs.FeatureSpec(name, rs.TableSpec(name, 8, DIM, optimizer=SGD, storage=storage))
        for name, storage in storages.items()
    ]
    collection = rs.EmbeddingCollection(features, mesh=mesh_of(4))
    state = collection.init(jax.random.key(0))
    batch = collection.prepare(dict.fromkeys(storages, np.full((samples, 3), -1)))
    activations, pullback = collection.lookup_vjp(state, batch)
    for values in activations.values():
        assert_array_equal(values, np.zeros((samples, DIM)))
    ones = jax.tree.map(jnp.ones_like, activations)
    assert set(map(int, pullback(ones).num_touched().values())) == {0}
    after = jax.jit(collection.update)(state, batch, ones)
    assert_same(collection.tables(after), collection.tables(state))
    assert int(after.step) == 1


def test_a_full_table_counts_inside_jit_the_keys_that_found_no_row():
    collection = keyed(rows=2)
    batch = collection.prepare({"f": np.array([ONE, OTHER, THIRD, ONE])})
    ones = {"f": np.ones((4, DIM), np.float32)}
    state = jax.jit(collection.update)(collection.init(jax.random.key(0)), batch, ones)
    assert collection.counts(state)["t"]["failed"].tolist() == [1]
    assert keys_of(collection, state) == [ONE, OTHER]


def test_a_raw_random_key_starts_the_same_rows_and_one_of_another_generator_starts_some():
    collection = keyed()
    raw, typed, other = (
        rows_of(collection, stepped(collection, collection.init(key), [ONE]))
        for key in (jax.random.PRNGKey(3), jax.random.key(3), jax.random.key(3, impl="rbg"))
    )
    assert_same(raw, typed)
    assert other["keys"].tolist() == [ONE]


def test_keys_enter_jit_as_they_are_and_are_read_ahead_where_numbers_are_64_bits_wide():
    with jax.enable_x64(True):
        collection = keyed()
        state = collection.init(jax.random.key(0))
        ahead, pullback = collection.lookup_vjp(state, {"f": WIDE[0]})
        state = collection.apply(state, pullback(jax.tree.map(jnp.ones_like, ahead)))
        rows = rows_of(collection, state)
        actual = np.asarray(jax.jit(collection.lookup)(state, {"f": WIDE[0]})["f"])
    assert rows["keys"].tolist() == [7, 2**40 + 7]
    assert_array_equal(actual, rows["values"][::-1])
    assert_allclose(actual, np.asarray(ahead["f"]) - LR, rtol=1e-5)


def test_a_scan_of_value_and_grad_with_a_donated_state_trains_keys():
    collection = keyed()
    state = collection.init(jax.random.key(0))
    batches = [
        collection.prepare({"f": np.array(keys)})
        for keys in ([[ONE, OTHER]], [[THIRD, ONE]], [[ONE, ONE]])
    ]
    value_and_grad = rs.value_and_grad(
        lambda weight, vectors: jnp.sum(vectors["f"] @ weight), collection
    )

    def step(state, batch):
        loss, (d_weight, row_gradients) = value_and_grad(jnp.full(DIM, 2.0), state, batch)
        return collection.apply(state, row_gradients), (loss, d_weight)

    one_by_one = state
    expected = []
    for batch in batches:
        one_by_one, outputs = step(one_by_one, batch)
        expected.append(outputs)
    scan = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    after, outputs_of_scan = scan(state, stacked(batches))
    actual = outputs_of_scan, rows_of(collection, after)
    assert_close(actual, (stacked(expected), rows_of(collection, one_by_one)), rtol=1e-5)
    assert jax.tree.leaves(state.tables)[0].is_deleted()


@pytest.mark.slow
def test_tables_of_several_storages_widths_and_numbers_of_rounds_share_an_exchange():
    adagrad = rs.optimizers.Adagrad(LR)
    kept = {
        "rows": (DIM, adagrad, None),
        "moved": (DIM, rs.optimizers.LAMB(LR), None),
        "few": (2 * DIM, rs.optimizers.Adam(LR), None),
        "known": (DIM, adagrad, rs.Hashed()),
        "evicting": (2 * DIM, adagrad, rs.Hashed(when_full="evict")),
        "cached": (DIM, adagrad, rs.HostCached(cache_rows=32)),
    }
    features = []
    for name, (dim, rule, storage) in kept.items():
        table = rs.TableSpec(name, 32, dim, optimizer=rule, storage=storage,
            initializer=jax.nn.initializers.ones,
        )  # fmt: skip
        features.append(rs.FeatureSpec(name, table))
    d_activations = {name: np.full((8, dim), 0.3, np.float32) for name, (dim, *_) in kept.items()}
    trained = []
    for options in ({}, {"mesh": mesh_of(4), "exchange_capacity": 2}):
        collection = rs.EmbeddingCollection(features, **options)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        generator = np.random.default_rng(0)
        for _ in range(3):
            ids = {
                name: generator.integers(0, 32, (8, 1 + number % 4))
                for number, name in enumerate(kept)
            }
            batch = collection.prepare(ids)
            state = update(collection.prefetch(state, batch), batch, d_activations)
        trained.append(collection.tables(state))
    assert_close(*trained, rtol=1e-6)


def test_stochastic_rounding_draws_by_key_or_row_so_one_device_and_four_store_equal_bits():
    keys = np.array([ONE, OTHER, THIRD, 5, 2**41, -1])
    features, tables = [], []
    for name, rows, storage in (("t", 32, rs.Hashed()), ("a", 21, None), ("b", 5, None)):
        table = rs.TableSpec(name, rows, DIM, optimizer=rs.optimizers.SGD(0.3), dtype="bfloat16",
            stochastic_rounding=True, initializer=jax.nn.initializers.ones, storage=storage,
        )  # fmt: skip
        features.append(rs.FeatureSpec(name, table))
    for placement in (None, "row", "table"):
        options = {}
        if placement is not None:
            placements = {"t": "row", "a": placement, "b": placement}
            options = {"mesh": mesh_of(4), "placement": placements}
        collection = rs.EmbeddingCollection(features, **options)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        generator = np.random.default_rng(0)
        for _ in range(3):
            ids = {
                name: generator.integers(-1, rows, (8, 2)) for name, rows in (("a", 21), ("b", 5))
            }
            batch = collection.prepare(ids | {"t": generator.choice(keys, (8, 2))})
            # Sums of such gradients are exact in any order.
            gradients = generator.integers(-8, 8, (8, DIM)) / np.float32(64)
            state = update(state, batch, dict.fromkeys(batch, gradients))
        tables.append(jax.tree.map(np.array, collection.tables(state)))
    assert tables[0]["t"]["keys"].tolist() == sorted(keys[keys >= 0].tolist())
    for actual in tables[1:]:
        assert_same(actual, tables[0])


@pytest.mark.slow_rows("asked")
@pytest.mark.parametrize(
    ("mesh", "dtype"), [(None, "float16"), (mesh_of(4), "bfloat16")], ids=["here", "asked"]
)
def test_new_rows_are_read_as_they_are_stored_whatever_company_they_come_in(mesh, dtype):
    collection = keyed(mesh, rows=8192, dtype=dtype, optimizer=rs.optimizers.SGD(0.0))
    state, rows_read = collection.init(jax.random.key(3)), []
    # 64 new rows are one block, and 4096 new rows are several blocks.
    for num_keys in (64, 4096):
        batch = {"f": np.arange(1, num_keys + 1) * (2**33 + 1)}
        ahead, pullback = collection.lookup_vjp(state, batch)
        applied = collection.apply(state, pullback(ahead))
        updated = jax.jit(collection.update)(state, collection.prepare(batch), ahead)
        for vectors in (
            ahead,
            collection.lookup(applied, batch),
            collection.lookup(updated, batch),
        ):
            rows_read.append(vectors["f"][:64])
    assert np.asarray(rows_read[0]).any(axis=1).all()
    for rows in rows_read:
        assert_array_equal(rows, rows_read[0])


@pytest.mark.parametrize("storage", [rs.Hashed(), rs.HostCached(cache_rows=4)], ids=repr)
def test_a_table_is_found_by_its_name_although_the_state_cuts_long_ones(storage):
    table = rs.TableSpec("a" * 70, 8, DIM, storage=storage)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
    state = stepped(collection, collection.init(jax.random.key(0)), [1, 2])
    for read in (collection.tables, collection.slots, collection.counts):
        assert list(read(state)) == [table.name]
    tables = collection.tables(state)
    written = collection.with_tables(collection.init(jax.random.key(1)), tables)
    assert_same(collection.tables(written), tables)


def test_keys_without_a_row_are_counted():
    collection = keyed()
    state = stepped(collection, collection.init(jax.random.key(0)), [ONE])
    batch = {"f": [[ONE, OTHER, OTHER, THIRD]]}
    _, statistics = collection.lookup(state, batch, return_statistics=True)
    assert int(statistics.num_unknown["t"].sum()) == 2 and int(statistics.num_ids["f"]) == 4


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def on_host(cache_rows, eviction="lru"):
    storage = rs.HostCached(cache_rows=cache_rows, eviction=eviction)
    table = rs.TableSpec("t", 100, DIM, storage=storage)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table))


@pytest.mark.parametrize(("eviction", "fetched"), [("lru", 4), ("lfu", 3)])
def test_rows_leave_the_device_by_their_last_use_or_by_how_often_they_were_used(eviction, fetched):
    collection = on_host(2, eviction)
    state = collection.init(jax.random.key(0))
    for row in (1, 1, 2, 3, 1):
        state = collection.prefetch(state, {"f": np.array([row])})
    assert collection.counts(state)["t"]["fetched"].tolist() == [fetched]


def test_rows_on_the_host_are_fetched_before_a_compiled_step_or_it_stops():
    collection = on_host(4)
    state, batch = collection.init(jax.random.key(0)), collection.prepare({"f": np.array([3, 99])})
    with pytest.raises(
        Exception,
        match=r"rsembed\.storage: 2 ids of the batch have no row of table 't' on the device",
    ):
        jax.block_until_ready(jax.jit(collection.lookup)(state, batch))
    # Outside `jit`, a lookup fetches rows, and the state can still be used.
    expected = collection.lookup(state, batch)
    near = collection.prefetch(state, batch)
    assert_array_equal(jax.jit(collection.lookup)(near, batch)["f"], expected["f"])


@pytest.mark.slow_rows("vmap of vmap")
@pytest.mark.parametrize("way", ["vmap", "jit of vmap", "vmap of vmap"])
def test_vmap_reads_rows_on_the_host_and_stops_where_one_is_missing(way):
    collection = on_host(20)
    ids = np.arange(12).reshape(3, 2, 2)
    state = collection.prefetch(collection.init(jax.random.key(0)), {"f": ids.reshape(6, 2)})

    def lookup(ids):
        return collection.lookup(state, {"f": ids})["f"]

    ways = {
        "vmap": jax.vmap(lookup),
        "jit of vmap": jax.jit(jax.vmap(lookup)),
        "vmap of vmap": jax.vmap(jax.vmap(lookup)),
    }
    rows = rows_of(collection, state)[ids]
    expected = rows if way == "vmap of vmap" else rows.sum(axis=2)
    assert_allclose(ways[way](ids), expected, rtol=1e-6)
    with pytest.raises(
        Exception, match=r"1 ids of the batch have no row of table 't' on the device"
    ):
        jax.block_until_ready(ways[way](np.where(ids == 7, 99, ids)))


def test_a_state_for_serving_has_keys_and_rows():
    collection = keyed(optimizer=rs.optimizers.Adagrad(LR))
    state = stepped(collection, collection.init(jax.random.key(0)), [ONE])._replace(slots={})
    assert list(rows_of(collection, state)) == ["keys", "last_step", "count", "values"]


def test_a_state_from_before_an_exchange_with_the_host_is_refused():
    collection = on_host(2)
    old = collection.init(jax.random.key(0))
    stepped(collection, old, [3, 99])
    with pytest.raises(
        RuntimeError, match=r"table 't': the host no longer holds the rows.*checkpoint"
    ):
        collection.lookup(old, {"f": np.array([3])})


def on_host_beside(other, *, rows=100):
    """A table on the host, and one with another number of columns, so that they are not stacked."""
    options = {"optimizer": SGD, "initializer": jax.nn.initializers.zeros}
    on_the_host = rs.TableSpec("a", 100, DIM, storage=rs.HostCached(cache_rows=4), **options)
    beside = rs.TableSpec("b", rows, 2 * DIM, storage=other, **options)
    return rs.EmbeddingCollection([rs.FeatureSpec("a", on_the_host), rs.FeatureSpec("b", beside)])


@pytest.mark.slow_rows("apply", "prefetch")
@pytest.mark.parametrize("way", ["prefetch", "apply", "update"])
def test_an_error_in_another_table_costs_no_rows_on_the_host(way):
    error = "table 'b': 1 ids of the batch do not fit in the cache of cache_rows=2"
    collection = on_host_beside(rs.HostCached(cache_rows=2))
    if way == "update":
        error = "table 'b' is full"
        collection = on_host_beside(rs.Hashed(), rows=2)

    def trained(state, ids):
        gradients = {
            "a": np.ones((len(ids["a"]), DIM)),
            "b": np.ones((len(ids["b"]), 2 * DIM)),
        }
        if way == "update":
            return collection.update(state, ids, gradients)
        return collection.apply(state, collection.row_gradients(ids, gradients))

    few = {"a": np.array([1, 2, 3, 4]), "b": np.array([1, 2])}
    many = {"a": np.array([5, 6, 7, 8]), "b": np.array([3, 4, 5])}
    state = trained(collection.init(jax.random.key(0)), few)
    with pytest.raises(RuntimeError, match=error):
        if way == "prefetch":
            collection.prefetch(state, many)
        trained(state, many)
    state = trained(state, {"a": np.array([8, 1, 9]), "b": np.array([1])})
    expected = np.zeros((100, DIM))
    expected[[2, 3, 4, 8, 9]] = -LR
    expected[1] = -2 * LR
    assert_array_equal(collection.tables(state)["a"], expected)


@pytest.mark.slow_rows("storage0-None")
@pytest.mark.parametrize(
    ("storage", "mesh"), [(rs.Hashed(), None), (rs.Hashed(when_full="evict"), 2)]
)
def test_a_compiled_step_holds_one_copy_of_a_hashed_table(storage, mesh):
    table = rs.TableSpec("t", 40_000, 32, storage=storage)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh and mesh_of(mesh))
    batch = collection.prepare({"f": np.arange(64)})

    def step(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        return collection.apply(state, pullback(activations))

    state = collection.template
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    # Without native kernels, XLA sorts the uses of all rows, which takes more than half a table.
    share = 0.5 if native.unavailable_because() is None else 0.9
    assert compiled.memory_analysis().temp_size_in_bytes < share * 40_000 * 32 * 4 / (mesh or 1)


def doors(key_dtype):
    """Functions of keys by name, for all calls that take keys inside `jit`."""
    collection = keyed(key_dtype=key_dtype)
    state = collection.init(jax.random.key(0))
    ones = {"f": jnp.ones((1, DIM))}
    loss_fn = rs.value_and_grad(lambda _, activations: jnp.sum(activations["f"]), collection)
    layer = rs.nnx.Embeddings(collection, rngs=nnx.Rngs(0))
    module = rs.linen.Embeddings(collection)
    variables = module.init(jax.random.key(0), collection.prepare({"f": WIDE % 2**20}))
    served, tables = rs.for_serving(collection, state)
    context = sok.Init(mesh=mesh_of(1))
    pooled = sok.DistributedEmbedding("sum", 8, DIM, 1, 2, context=context, key_dtype=key_dtype)
    listed = sok.All2AllDenseEmbedding(
        8, DIM, 1, 1, dynamic_input=True, context=context, key_dtype=key_dtype
    )
    plain = sok.embedding_variable(
        "p", DIM, rows_per_device=8, use_hashtable=False, context=context, key_dtype=key_dtype
    )
    return {
        "lookup": lambda keys: collection.lookup(state, {"f": keys}),
        "lookup_vjp": lambda keys: collection.lookup_vjp(state, {"f": keys})[0],
        "update": lambda keys: collection.update(state, {"f": keys}, ones).step,
        "row_gradients": lambda keys: collection.row_gradients({"f": keys}, ones).values,
        "value_and_grad": lambda keys: loss_fn(jnp.ones(()), state, {"f": keys})[0],
        "scan": lambda keys: jax.lax.scan(
            lambda s, key: (s, collection.lookup(s, {"f": key})), state, jax.tree.map(lambda lane: lane[None], keys)
        )[1],
        "nnx": lambda keys: layer({"f": keys}),
        "linen": lambda keys: module.apply(variables, {"f": keys}),
        "served": lambda keys: served(tables, {"f": keys}),
        "model-parallel, pooled": pooled,
        "model-parallel, list": lambda keys: listed(keys.reshape(-1)),
        "model-parallel, group": lambda keys: sok.group_embedding_lookup_sparse([plain], [keys], ["sum"]),
    }  # fmt: skip


def test_keys_that_jax_may_have_cut_are_refused_inside_jit_at_every_door():
    for name, door in doors("int64").items():
        with pytest.raises(
            TypeError, match=r"array of int32.*key_dtype='int64'.*collection\.prepare.*split_keys"
        ):
            jax.jit(door)(WIDE)
        with pytest.raises(TypeError, match="key_dtype='int32' if all keys fit"):
            jax.jit(door)(jnp.asarray([[7, 8]]))
        # Tracing shows that the keys are accepted, so the program need not run.
        if name != "model-parallel, list":
            jax.eval_shape(door, jax.tree.map(jnp.asarray, split_keys(np.array([[5, 7]]))))
        # `lax.scan` traces its keys, so it refuses them outside `jit`, too.
        if name != "scan":
            # These keys are not cut.
            jax.block_until_ready(door(np.array([[5, 7]], np.int32)))
    for door in doors("int32").values():
        jax.eval_shape(door, np.array([[5, 7]], np.int32))
