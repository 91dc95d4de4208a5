"""Batches and uses that break what works on ordinary ones, for tables of keys above all."""

import functools
import pickle
from collections import Counter

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
from tests.world import assert_same, mesh_of

DIM, LR = 4, 0.5
ONE, OTHER, THIRD = 2**40 + 1, 2**40 + 2**33 + 1, 2**62 + 3


SGD = rs.optimizers.SGD(LR)


def keyed(
    mesh=None, *, rows=8, optimizer=SGD, dtype="float32", beside=(), capacity=None, **storage
):
    """One table of keys read by one feature, and other features."""
    table = rs.TableSpec("t", rows, DIM, optimizer=optimizer, dtype=dtype,
        storage=rs.Hashed(**storage), stochastic_rounding=dtype != "float32",
    )  # fmt: skip
    features = [rs.FeatureSpec("f", table), *beside]
    return rs.EmbeddingCollection(features, mesh=mesh, exchange_capacity=capacity)


@functools.cache
def on_mesh():
    """Keys, rows and a train on four devices, with a state and a compiled step that updates, and one that applies."""
    others = {"d": None, "w": TensorTrain((2,), (2, 4), (2, 2))}
    beside = [
        rs.FeatureSpec(
            name,
            rs.TableSpec(name, 8, DIM, optimizer=SGD, storage=storage),
        )
        for name, storage in others.items()
    ]
    collection = keyed(mesh_of(4), beside=beside)

    @jax.jit
    def gradients(state, batch, d_activations):
        activations, pullback = collection.lookup_vjp(state, batch)
        return activations, pullback(d_activations)

    return collection, collection.init(jax.random.key(0)), gradients, jax.jit(collection.update)


def batch_of(keys):
    """The keys for one feature, and no ids for the others."""
    keys = np.asarray(keys, np.int64)
    return {"f": keys} | dict.fromkeys("dw", np.full(keys.shape, -1, np.int32))


def ones_for(batch):
    return {name: np.ones((len(ids), DIM), np.float32) for name, ids in batch.items()}


@pytest.mark.parametrize("samples", [8, 0], ids=["all padding", "no samples"])
def test_a_batch_without_ids_changes_nothing_but_the_step(samples):
    collection, state, gradients, update = on_mesh()
    batch = batch_of(np.full((samples, 3), -1))
    activations, row_gradients = gradients(state, collection.prepare(batch), ones_for(batch))
    assert {name: values.shape for name, values in activations.items()} == dict.fromkeys(
        "fdw", (samples, DIM)
    )
    assert all(not np.asarray(values).any() for values in activations.values())
    assert int(row_gradients.num_touched()["t"]) == int(row_gradients.num_touched()["d"]) == 0
    after = update(state, collection.prepare(batch), ones_for(batch))
    assert_same(after.tables["d"], state.tables["d"])
    assert_same(after.tables["w"], state.tables["w"])
    assert collection.tables(after)["t"]["keys"].size == 0 and int(after.step) == 1


def test_gradients_of_micro_batches_on_a_mesh_combine_by_key():
    collection, state, gradients, _ = on_mesh()
    generator, keys, sums, initial = (
        np.random.default_rng(0),
        np.array([ONE, OTHER, THIRD, 0, -1]),
        Counter(),
        {},
    )
    parts, counts = [], Counter()
    for number in range(2):
        batch = batch_of(generator.choice(keys[number : number + 4], (8, 3)))
        d_activations = {name: generator.normal(size=(8, DIM)).astype(np.float32) for name in batch}
        parts.append(gradients(state, collection.prepare(batch), d_activations)[1])
        for sample, own in enumerate(batch["f"]):
            for key in own[own >= 0].tolist():
                counts[key] += 1
                sums[key] = sums[key] + np.float64(d_activations["f"][sample])
    for key in counts:
        alone = batch_of(np.where(np.arange(24) == 0, key, -1).reshape(8, 3))
        initial[key] = np.asarray(
            gradients(state, collection.prepare(alone), ones_for(alone))[0]["f"]
        )[0]
    applied = jax.jit(lambda state, *parts: collection.apply(state, rs.combine(*parts)))(
        state, *parts
    )
    table = collection.tables(applied)["t"]
    assert dict(zip(table["keys"].tolist(), table["count"].tolist(), strict=True)) == counts
    for key, vector in zip(table["keys"].tolist(), table["values"], strict=True):
        assert_allclose(vector, initial[key] - LR * sums[key], rtol=1e-5, atol=1e-5)


def test_a_full_table_raises_outside_jit_and_counts_inside():
    collection = keyed(rows=2)
    state, batch = (
        collection.init(jax.random.key(0)),
        collection.prepare({"f": np.array([[ONE, OTHER], [THIRD, ONE]])}),
    )
    d_activations = {"f": np.ones((2, DIM), np.float32)}
    with pytest.raises(RuntimeError, match="table 't' is full: 1 new keys found no room in 2 rows"):
        collection.update(state, batch, d_activations)
    after = jax.jit(collection.update)(state, batch, d_activations)
    assert collection.counts(after)["t"]["failed"].tolist() == [1]
    assert collection.tables(after)["t"]["keys"].tolist() == [ONE, OTHER]


def test_a_key_of_another_generator_makes_tables_of_keys():
    collection = keyed()
    state = collection.init(jax.random.key(0, impl="rbg"))
    state = collection.update(
        state, {"f": np.asarray([[ONE]])}, {"f": np.ones((1, DIM), np.float32)}
    )
    assert collection.tables(state)["t"]["keys"].tolist() == [ONE]


def test_keys_without_rows_are_read_ahead_where_numbers_are_64_bits_wide():
    with jax.enable_x64(True):
        collection = keyed()
        state = collection.init(jax.random.key(0))
        batch = {"f": np.asarray([[ONE, OTHER]])}
        activations, pullback = collection.lookup_vjp(state, batch)
        state = collection.apply(state, pullback(jax.tree.map(jnp.ones_like, activations)))
        values = np.asarray(collection.tables(state)["t"]["values"])
    assert_allclose(values.sum(axis=0), np.asarray(activations["f"])[0] - 2 * LR, rtol=1e-5)


def test_a_scan_of_value_and_grad_with_a_donated_state_trains_keys():
    collection = keyed()
    state = collection.init(jax.random.key(0))
    batches = [
        collection.prepare({"f": np.array(keys)})
        for keys in ([[ONE, OTHER]], [[THIRD, ONE]], [[ONE, ONE]])
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    value_and_grad = rs.value_and_grad(
        lambda weight, found: jnp.sum(found["f"] @ weight), collection
    )

    def step(state, batch):
        loss, (d_weight, row_gradients) = value_and_grad(jnp.full(DIM, 2.0), state, batch)
        return collection.apply(state, row_gradients), (loss, d_weight)

    after, (losses, d_weights) = jax.jit(lambda s, b: jax.lax.scan(step, s, b), donate_argnums=0)(
        state, stacked
    )
    table = collection.tables(after)["t"]
    assert (table["keys"].tolist(), table["count"].tolist()) == ([ONE, OTHER, THIRD], [4, 1, 1])
    # What they started from.
    one, other, third = table["values"] + LR * 2 * np.array([[4], [1], [1]])
    moved = LR * 2
    read = [one + other, third + one - moved, 2 * (one - 2 * moved)]
    assert_allclose(np.stack(d_weights).reshape(3, DIM), read, rtol=1e-5, atol=1e-6)
    assert_allclose(losses, 2 * np.sum(read, axis=1), rtol=1e-5, atol=1e-5)
    assert jax.tree.leaves(state.tables)[0].is_deleted()


def test_tables_of_several_storages_widths_and_numbers_of_rounds_share_an_exchange():
    rules = {
        "rows": rs.optimizers.Adagrad(LR),
        "moved": rs.optimizers.LAMB(LR),
        "few": rs.optimizers.Adam(LR),
    }
    storages = {
        "known": rs.Hashed(),
        "evicting": rs.Hashed(when_full="evict"),
        "cached": rs.HostCached(cache_rows=32),
    }
    tables = [
        rs.TableSpec(
            name,
            32,
            2 * DIM if name in ("few", "evicting") else DIM,
            optimizer=rules.get(name, rules["rows"]),
            initializer=jax.nn.initializers.ones,
            storage=storages.get(name),
        )
        for name in (*rules, *storages)
    ]
    generator, widths = (
        np.random.default_rng(0),
        {table.name: 1 + k % 4 for k, table in enumerate(tables)},
    )
    batches = [
        {name: generator.integers(0, 32, (8, width), np.int32) for name, width in widths.items()}
        for _ in range(3)
    ]
    trained = []
    for options in ({}, {"mesh": mesh_of(4), "exchange_capacity": 2}):
        features = [rs.FeatureSpec(table.name, table) for table in tables]
        collection = rs.EmbeddingCollection(features, **options)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        for batch in batches:
            prepared = collection.prepare(batch)
            d_activations = {
                table.name: np.full((8, table.embedding_dim), 0.3, np.float32) for table in tables
            }
            state = update(collection.prefetch(state, prepared), prepared, d_activations)
        trained.append(collection.tables(state))
    for one, many in zip(*map(jax.tree.leaves, trained), strict=True):
        assert_allclose(many, one, rtol=1e-6)


def test_stochastic_rounding_draws_by_key_so_one_device_and_four_store_equal_bits():
    keys = np.array([ONE, OTHER, THIRD, 5, 2**41, -1])
    tables = []
    for mesh in (None, mesh_of(4)):
        collection = keyed(mesh, dtype="bfloat16", optimizer=rs.optimizers.SGD(0.3), rows=32)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        generator = np.random.default_rng(0)
        for _ in range(3):
            batch = collection.prepare({"f": generator.choice(keys, (8, 2))})
            # Sums of such gradients are exact, in any order.
            state = update(
                state, batch, {"f": generator.integers(-8, 8, (8, DIM)).astype(np.float32) / 64}
            )
        tables.append(collection.tables(state)["t"])
    assert tables[0]["keys"].tolist() == sorted(keys[keys >= 0].tolist())
    assert tables[0]["values"].tobytes() == tables[1]["values"].tobytes()


@pytest.mark.parametrize(
    ("mesh", "dtype"), [(None, "float16"), (mesh_of(4), "bfloat16")], ids=["here", "asked"]
)
def test_new_rows_are_read_as_they_are_stored_whatever_company_they_come_in(mesh, dtype):
    collection = keyed(mesh, rows=8192, dtype=dtype, optimizer=rs.optimizers.SGD(0.0))
    state, found = collection.init(jax.random.key(3)), []
    for num_keys in (64, 4096):  # one block of new rows, and several
        batch = {"f": np.arange(1, num_keys + 1) * (2**33 + 1)}
        activations, pullback = collection.lookup_vjp(state, batch)
        applied = collection.apply(state, pullback(activations))
        updated = jax.jit(collection.update)(state, collection.prepare(batch), activations)
        found += [
            own["f"][:64]
            for own in (activations, *(collection.lookup(x, batch) for x in (applied, updated)))
        ]
    assert np.asarray(found[0]).any(axis=1).all()
    for rows in found:
        assert_array_equal(rows, found[0])


@pytest.mark.parametrize(
    "storage", [rs.Hashed(), rs.HostCached(cache_rows=4), TensorTrain((2,))], ids=repr
)
def test_a_table_is_found_by_its_name_although_the_state_cuts_long_ones(storage):
    table = rs.TableSpec("a" * 70, 8, DIM, storage=storage)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
    state = collection.init(jax.random.key(0))
    assert list(collection.tables(state)) == list(collection.slots(state)) == [table.name]
    assert list(collection.counts(state)) == [table.name] * (not isinstance(storage, TensorTrain))
    if isinstance(storage, TensorTrain):
        return  # takes no rows
    values = np.ones((8, DIM), np.float32)
    rows = {"keys": np.arange(8), "values": values} if storage.takes_keys else values
    found = collection.tables(collection.with_tables(state, {table.name: rows}))[table.name]
    assert_array_equal(found["values"] if storage.takes_keys else found, values)


def test_pickled_collections_know_keys_of_64_bits():
    worker = pickle.loads(pickle.dumps(keyed()))
    assert worker.prepare({"f": [[ONE, OTHER], []]})["f"].to_lists() == [[ONE, OTHER], []]


def test_keys_without_a_row_are_counted():
    collection = keyed()
    state = collection.init(jax.random.key(0))
    state = collection.update(state, {"f": [[ONE]]}, {"f": jnp.ones((1, DIM))})
    _, statistics = collection.lookup(
        state, {"f": [[ONE, OTHER, OTHER, THIRD]]}, return_statistics=True
    )
    assert int(statistics.num_unknown["t"].sum()) == 2 and int(statistics.num_ids["f"]) == 4


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
    # Outside of jit it fetches by itself, and the state stays good.
    expected = collection.lookup(state, batch)
    near = collection.prefetch(state, batch)
    assert_array_equal(jax.jit(collection.lookup)(near, batch)["f"], expected["f"])


@pytest.mark.slow_rows("vmap of vmap", "vmap of jit")
@pytest.mark.parametrize("way", ["vmap", "jit of vmap", "vmap of jit", "vmap of vmap"])
def test_vmap_reads_rows_on_the_host_and_stops_where_one_is_missing(way):
    collection = on_host(20)
    ids = np.arange(12).reshape(3, 2, 2)
    state = collection.prefetch(collection.init(jax.random.key(0)), {"f": ids.reshape(6, 2)})
    table = collection.tables(state)["t"]

    def lookup(ids):
        return collection.lookup(state, {"f": ids})["f"]

    ways = {
        "vmap": jax.vmap(lookup),
        "jit of vmap": jax.jit(jax.vmap(lookup)),
        "vmap of jit": jax.vmap(jax.jit(lookup)),
        "vmap of vmap": jax.vmap(jax.vmap(lookup)),
    }
    found, rows = ways[way](ids), table[ids]
    expected = rows if way == "vmap of vmap" else rows.sum(axis=2)
    assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(
        Exception, match=r"1 ids of the batch have no row of table 't' on the device"
    ):
        jax.block_until_ready(ways[way](np.where(ids == 7, 99, ids)))


def test_a_state_for_serving_has_keys_and_rows():
    collection = keyed(optimizer=rs.optimizers.Adagrad(LR))
    state = collection.init(jax.random.key(0))
    state = collection.update(state, {"f": [[ONE]]}, {"f": jnp.ones((1, DIM))})._replace(slots={})
    assert list(collection.tables(state)["t"]) == ["keys", "last_step", "count", "values"]


def test_a_state_from_before_an_exchange_with_the_host_is_refused():
    collection = on_host(2)
    old = collection.init(jax.random.key(0))
    collection.update(old, {"f": np.array([3, 99])}, {"f": jnp.ones((2, DIM))})
    with pytest.raises(
        RuntimeError, match=r"table 't': the host no longer holds the rows.*checkpoint"
    ):
        collection.lookup(old, {"f": np.array([3])})


def on_host_beside(other, *, rows=100):
    """A table on the host, and another one with rows of another size, so that each has its arrays."""
    how = {"optimizer": rs.optimizers.SGD(LR), "initializer": jax.nn.initializers.zeros}
    tables = [
        rs.TableSpec(
            "a",
            100,
            DIM,
            storage=rs.HostCached(cache_rows=4),
            **how,
        ),
        rs.TableSpec("b", rows, 2 * DIM, storage=other, **how),
    ]
    return rs.EmbeddingCollection([rs.FeatureSpec(table.name, table) for table in tables])


NO_PLACE = (
    rs.HostCached(cache_rows=2),
    100,
    "table 'b': 1 ids of the batch do not fit in the cache of cache_rows=2",
)
NO_ROW = (rs.Hashed(when_full="error"), 2, "table 'b' is full")


@pytest.mark.parametrize(
    ("way", "other", "rows", "error"),
    [
        ("prefetch", *NO_PLACE),
        ("apply", *NO_PLACE),
        ("update", *NO_ROW),
    ],
    ids=["prefetch", "apply", "update"],
)
def test_an_error_in_another_table_costs_no_rows_on_the_host(way, other, rows, error):
    collection = on_host_beside(other, rows=rows)

    def trained(state, ids):
        gradients = {
            name: np.ones((len(own), DIM * n)) for n, (name, own) in enumerate(ids.items(), 1)
        }
        if way == "update":
            return collection.update(state, ids, gradients)
        return collection.apply(state, collection.row_gradients(ids, gradients))

    few = {"a": np.array([1, 2, 3, 4]), "b": np.array([1, 2])}
    many = {"a": np.array([5, 6, 7, 8]), "b": np.array([3, 4, 5])}
    state = trained(collection.init(jax.random.key(0)), few)
    with pytest.raises(RuntimeError, match=error):
        collection.prefetch(state, many) if way == "prefetch" else trained(state, many)
    state = trained(state, {"a": np.array([8, 1, 9]), "b": np.array([1])})
    expected = np.zeros((100, DIM))
    expected[[2, 3, 4, 8, 9]], expected[1] = -LR, -2 * LR
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
    # Where XLA sorts the uses of all rows, lists of them take more than half of what a copy of the table would.
    share = 0.5 if native.unavailable_because() is None else 0.9
    assert compiled.memory_analysis().temp_size_in_bytes < share * 40_000 * 32 * 4 / (mesh or 1)


WIDE = np.array([[2**40 + 7, 7]])
"""Keys of which JAX, where they enter `jit`, makes 7 and 7."""


def doors(key_dtype):
    """Each way by which keys reach a table inside `jit`: a function of the keys."""
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
            lambda s, own: (s, collection.lookup(s, {"f": own})), state, jax.tree.map(lambda lane: lane[None], keys)
        )[1],
        "nnx": lambda keys: layer({"f": keys}),
        "linen": lambda keys: module.apply(variables, {"f": keys}),
        "served": lambda keys: served(tables, {"f": keys}),
        "model-parallel, pooled": lambda keys: pooled(keys),
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
        # To trace it is enough: a program that takes them needs not run.
        if name != "model-parallel, list":
            jax.eval_shape(door, jax.tree.map(jnp.asarray, split_keys(np.array([[5, 7]]))))
        if name != "scan":  # which traces
            jax.block_until_ready(door(np.array([[5, 7]], np.int32)))  # nothing was cut
    for door in doors("int32").values():
        jax.eval_shape(door, np.array([[5, 7]], np.int32))


def test_keys_of_64_bits_enter_jit_as_they_are_where_jax_has_them():
    with jax.enable_x64(True):
        collection = keyed()
        state = collection.init(jax.random.key(0))
        state = collection.update(state, {"f": WIDE[0]}, {"f": np.ones((2, DIM), np.float32)})
        found = np.asarray(jax.jit(collection.lookup)(state, {"f": WIDE[0]})["f"])
        rows = collection.tables(state)["t"]
    assert rows["keys"].tolist() == [7, 2**40 + 7]
    assert_array_equal(found, rows["values"][::-1])
