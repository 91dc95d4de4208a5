"""States on disk are tables in the order of their ids, whatever mesh, placement and stacking they had or get."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.fingerprint import Fingerprint
from rsembed.tt import TensorTrain
from tests.world import assert_same, made_mesh

ROWS = {"item": 10, "user": 8, "word": 5}
DIM = 4


def ramp(key, shape):
    del key
    return jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape)


def table_of(name, **options):
    how = {
        "vocabulary_size": ROWS.get(name),
        "initializer": ramp,
        "optimizer": rs.optimizers.Adagrad(0.1),
    } | options
    return rs.TableSpec(name, embedding_dim=DIM, **how)


def collection_of(num_devices=None, placement=None, *, rows=ROWS, alone=(), **options):
    """Tables of so many rows on one device or a mesh; those in `alone` have a rule of their own, hence own stacks."""
    own = {name: {"optimizer": rs.optimizers.Adagrad(lambda: 0.1)} for name in alone}
    tables = [
        table_of(name, vocabulary_size=count, **own.get(name, {}), **options)
        for name, count in rows.items()
    ]
    mesh = made_mesh(num_devices)
    return collection_with(tables, placement=placement, mesh=mesh)


def collection_with(tables, **options):
    features = [rs.FeatureSpec(f"f_{table.name}", table) for table in tables]
    return rs.EmbeddingCollection(features, **options)


def batch_of(step):
    rng = np.random.default_rng(step)
    return {
        f"f_{name}": rng.integers(0, rows, (8, 2)).astype(np.int32) for name, rows in ROWS.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def one_step(collection, state, batch):
    return collection.update(state, batch, collection.lookup(state, batch))


def trained(collection, state, steps):
    for number in range(*steps):
        batch = {name: ids for name, ids in batch_of(number).items() if name in collection.features}
        state = one_step(collection, state, collection.prepare(batch))
    return state


LAYOUTS = {
    "one": (None, None),
    "row 4": (4, "row"),
    "column": (2, "column"),
    "mixed": (4, {"item": "row", "user": "table", "word": "replicated"}),
}


def assert_holds(collection, state, expected):
    for found, wanted in zip(
        (collection.tables(state), collection.slots(state)), expected, strict=True
    ):
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps saved from every layout; what its tables and slots are then, and a step later."""
    folder, collection, expected = tmp_path_factory.mktemp("layouts"), collection_of(), []
    state = collection.init(jax.random.key(0))
    for steps in ((0, 2), (2, 3)):
        state = trained(collection, state, steps)
        expected.append(
            jax.tree.map(np.asarray, (collection.tables(state), collection.slots(state)))
        )
    for name, layout in LAYOUTS.items():
        source = collection_of(*layout)
        state = trained(source, source.init(jax.random.key(0)), (0, 2))
        others = {"dense": np.arange(3.0), "optax": (jnp.int32(4),)}
        checkpoint.save_collection(folder / f"{name} collection", source, state, others=others)
        checkpoint.save(folder / f"{name} tree", {"state": state, "epoch": 3})
    return folder, *expected


@pytest.mark.parametrize("source", LAYOUTS)
def test_files_hold_rows_in_the_order_of_ids_whatever_the_mesh(saved, source):
    folder, (tables, slots), _ = saved
    whole = checkpoint.load(folder / f"{source} collection").tree
    inside = checkpoint.load(folder / f"{source} tree").tree["state"]
    for found in (whole, inside):
        for name in ROWS:
            assert_allclose(found["tables"][name], tables[name], rtol=1e-6)
            assert_allclose(found["slots"][name]["accumulator"], slots[name][0], rtol=1e-6)


@pytest.mark.slow_rows("row 4-one")
@pytest.mark.parametrize(
    ("source", "target"),
    [("one", "row 4"), ("row 4", "one"), ("mixed", "column"), ("row 4", "mixed")],
)
def test_a_state_comes_back_on_another_mesh(saved, source, target):
    folder, expected, _ = saved
    collection = collection_of(*LAYOUTS[target])
    assert_holds(
        collection,
        checkpoint.load_collection(folder / f"{source} collection", collection),
        expected,
    )
    like = {"state": collection.init(jax.random.key(5)), "epoch": 0}
    found = checkpoint.load(folder / f"{source} tree", like).tree
    assert found["epoch"] == 3 and int(found["state"].step) == 2
    assert_holds(collection, found["state"], expected)


@pytest.mark.parametrize(
    ("names", "alone"), [(["user", "word", "item"], ["item"]), (["item", "user", "word"], ROWS)]
)
def test_training_goes_on_alike_on_another_stacking(saved, names, alone):
    folder, _, expected = saved
    collection, fresh = (
        collection_of(rows={name: ROWS[name] for name in names}, alone=alone),
        collection_of(),
    )
    assert [stack.name for stack in collection.plan.stacks] != [
        stack.name for stack in fresh.plan.stacks
    ]
    state = checkpoint.load_collection(folder / "one collection", collection)
    keys = (jax.random.key_data(own.key).tolist() for own in (state, fresh.init(jax.random.key(0))))
    assert state.step == 2 and next(keys) == next(keys)
    state = trained(collection, state, (2, 3))
    assert_same(
        (collection.tables(state), collection.slots(state)),
        tuple(expected),
    )


def test_dense_parameters_of_the_same_instant_come_back(saved):
    path, like = (
        saved[0] / "one collection",
        {"dense": np.zeros(3), "optax": (jax.ShapeDtypeStruct((), jnp.int32),)},
    )
    state, others = checkpoint.load_collection(path, collection_of(), others=like)
    assert state.step == 2 and others["dense"].tolist() == [0, 1, 2] and others["optax"][0] == 4


def test_a_template_of_shapes_is_enough_and_says_where_rows_go(saved):
    folder, (tables, _), _ = saved
    collection = collection_of(4, "row")
    state = checkpoint.load(folder / "one tree", {"state": collection.template, "epoch": 0}).tree[
        "state"
    ]
    fresh = collection.init(jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for got, wanted in zip(
        jax.tree.leaves(state.tables), jax.tree.leaves(fresh.tables), strict=True
    ):
        assert got.sharding == wanted.sharding
    assert_allclose(collection.tables(state)["item"], tables["item"], rtol=1e-6)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_step_is_not_compiled_anew_for_what_was_loaded(tmp_path, num_devices, caplog):
    collection = collection_of(num_devices)
    dense = {"weights": jnp.ones((DIM, 1)), "key": jax.random.key(3)}
    if num_devices is not None:
        everywhere = jax.sharding.NamedSharding(
            collection.devices.mesh, jax.sharding.PartitionSpec()
        )
        dense = jax.device_put(dense, everywhere)

    @jax.jit
    def step(state, dense, batch):
        activations = collection.lookup(state, batch)
        return collection.update(state, batch, activations), dense

    batch = collection.prepare(batch_of(0))
    state, dense = step(*step(collection.init(jax.random.key(0)), dense, batch), batch)
    checkpoint.save_collection(tmp_path / "c", collection, state, others=dense)
    loaded = checkpoint.load_collection(tmp_path / "c", collection, others=dense)
    with jax.log_compiles():
        step(*step(*loaded, batch), batch)
        assert [
            record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()
        ] == []
        jax.jit(lambda x: x + 1)(dense["weights"])
        # As JAX says it.
        assert any("Compiling" in record.getMessage() for record in caplog.records)


def test_a_restart_on_fewer_devices_keeps_every_row_even_where_padded_shapes_agree(tmp_path):
    rows = {"user": 8}  # 8 rows on 4 and on 2 devices have one shape
    four, two = collection_of(4, "row", rows=rows), collection_of(2, "row", rows=rows)
    state = four.init(jax.random.key(0))
    checkpoint.save(tmp_path / "a", state, step=7)
    found = checkpoint.load(tmp_path / "a", like=two.init(jax.random.key(1)))
    assert found.step == 7
    assert_array_equal(two.tables(found.tree)["user"], ramp(None, (8, DIM)))


def test_state_of_one_optax_rule_is_not_that_of_another(tmp_path):
    adam, other = (
        collection_of(optimizer=rs.from_optax(rule(0.1))) for rule in (optax.adam, optax.nadam)
    )
    state = adam.init(jax.random.key(0))
    checkpoint.save_collection(tmp_path / "a", adam, state)
    checkpoint.save(tmp_path / "b", state)
    with pytest.raises(
        ValueError, match=r"item/optimizer is .*scale_by_adam.*, expected .*with_tables"
    ):
        checkpoint.load_collection(tmp_path / "a", other)
    with pytest.raises(ValueError, match=r"item/optimizer is .*scale_by_adam"):
        checkpoint.load(tmp_path / "b", like=other.template)
    with pytest.raises(ValueError, match=r"item/optimizer is .*scale_by_adam"):
        other.lookup(state, batch_of(0))


def test_a_learning_rate_may_change_between_save_and_load(tmp_path):
    before = collection_of(optimizer=rs.from_optax(optax.adam(0.1)))
    after = collection_of(
        optimizer=rs.from_optax(optax.adam(0.2, b1=0.8), learning_rate=lambda step: 1 / (step + 1))
    )
    state = trained(before, before.init(jax.random.key(0)), (0, 1))
    checkpoint.save_collection(tmp_path / "a", before, state)
    restored = checkpoint.load_collection(tmp_path / "a", after)
    assert_array_equal(after.tables(restored)["word"], before.tables(state)["word"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: collection_of(rows={**ROWS, "item": 20}),
        lambda: collection_of(rows={"item": 10, "user": 8}),
        lambda: collection_of(optimizer=rs.optimizers.Adam(0.1)),
        lambda: collection_of(4, "row"),
    ],
    ids=["more rows", "fewer tables", "another rule", "another mesh"],
)
def test_a_state_of_another_collection_is_refused_by_every_method(tmp_path, make):
    collection, state = collection_of(), make().init(jax.random.key(0))
    batch = collection.prepare(batch_of(0))
    activations, pullback = collection.lookup_vjp(collection.init(jax.random.key(0)), batch)
    calls = [
        lambda: collection.lookup(state, batch),
        lambda: jax.jit(collection.lookup)(state, batch),
        lambda: collection.lookup_vjp(state, batch),
        lambda: collection.update(state, batch, activations),
        lambda: collection.apply(state, pullback(activations)),
        lambda: collection.tables(state),
        lambda: collection.slots(state),
        lambda: collection.with_tables(state, {}),
        lambda: checkpoint.save_collection(tmp_path / "a", collection, state),
    ]
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"the state does not belong to this collection: .* is .*load_collection",
        ):
            call()
    assert not list(tmp_path.iterdir())


def test_a_state_made_by_hand_is_compared_by_its_shapes_and_one_without_slots_is_read():
    collection = collection_of()
    state, batch = collection.init(jax.random.key(0)), batch_of(0)
    by_hand = rs.EmbeddingState(state.tables, state.slots, state.step, state.key)
    for other in (by_hand, state._replace(slots={})):
        assert_same(
            collection.lookup(other, batch),
            collection.lookup(state, batch),
        )
        assert_array_equal(collection.tables(other)["item"], ramp(None, (10, DIM)))
    for wrong in (jnp.zeros((20, DIM)), jnp.zeros((23, 3)), jnp.zeros((23, DIM), jnp.bfloat16)):
        with pytest.raises(
            ValueError, match=rf"tables are .*{wrong.dtype}.*, expected .*float32\[23, 4\]"
        ):
            collection.lookup(by_hand._replace(tables=dict.fromkeys(state.tables, wrong)), batch)


def test_row_gradients_of_another_collection_are_refused():
    rows = {"user": 8}
    four, two = collection_of(4, "row", rows=rows), collection_of(2, "row", rows=rows)
    batch = {"f_user": np.arange(8, dtype=np.int32)[:, None]}
    gradients = {}
    for name, collection in (("four", four), ("two", two)):
        activations, pullback = collection.lookup_vjp(collection.init(jax.random.key(0)), batch)
        gradients[name] = pullback(activations)
    with pytest.raises(
        ValueError,
        match=r"row gradients belong to another collection or module: .*num_shards is 4, expected 2",
    ):
        two.apply(two.init(jax.random.key(0)), gradients["four"])
    with pytest.raises(ValueError, match=r"belong to another .*num_shards is 2, expected 4"):
        rs.combine(gradients["four"], gradients["two"])


def test_two_states_of_different_layouts_do_not_mix_in_a_tree_map():
    states = [collection_of(n, "row", rows={"user": 8}).init(jax.random.key(0)) for n in (4, 2)]
    with pytest.raises(ValueError, match="pytree"):
        jax.tree.map(lambda a, b: a, *states)


def test_tables_whose_joined_names_meet_have_stacks_of_their_own():
    def table(name, dim):
        return rs.TableSpec(name, 3, dim, initializer=ramp)

    tables = [table("user", 2), table("item", 2), table("user_item", 3)]
    collection = rs.EmbeddingCollection([rs.FeatureSpec(t.name, t) for t in tables])
    assert len({stack.name for stack in collection.plan.stacks}) == 2
    state = collection.init(jax.random.key(0))
    found = jax.jit(collection.lookup)(
        state, collection.prepare({t.name: np.asarray([2]) for t in tables})
    )
    for t in tables:
        assert_array_equal(np.asarray(found[t.name])[0], ramp(None, (3, t.embedding_dim))[2])


def test_trains_rounded_tables_and_states_of_optax_go_to_another_mesh_and_stacking(tmp_path):
    tables = [
        rs.TableSpec("word", 30, DIM, storage=TensorTrain((2, 2))),
        table_of("user", dtype="bfloat16", stochastic_rounding=True),
        table_of("item", optimizer=rs.from_optax(optax.adam(0.1))),
    ]
    mesh = made_mesh(4)
    source, target = collection_with(tables, mesh=mesh), collection_with(tables[::-1])
    state = trained(source, source.init(jax.random.key(0, impl="rbg")), (0, 2))
    checkpoint.save_collection(tmp_path / "a", source, state)
    restored = checkpoint.load_collection(tmp_path / "a", target)
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()
    for found, wanted in ((target.tables, source.tables), (target.slots, source.slots)):
        assert_same(found(restored), wanted(state))


def test_a_train_with_kept_rows_becomes_a_dense_table_as_the_refusal_to_load_it_says(tmp_path):
    kept = TensorTrain((2, 2), cache_rows=4, populate_every=1)
    source, target = (
        collection_with([table_of("item", storage=storage)]) for storage in (kept, None)
    )
    state = trained(source, source.init(jax.random.key(0)), (0, 4))
    checkpoint.save_collection(tmp_path / "a", source, state)
    refusal = r"tables/item/storage is .TensorTrain.*, expected null.*trains: collection.tables of what it was saved"
    with pytest.raises(ValueError, match=refusal):
        checkpoint.load_collection(tmp_path / "a", target)
    restored = checkpoint.load_collection(tmp_path / "a", source)
    moved = target.with_tables(target.init(jax.random.key(1)), source.tables(restored))
    assert source.counts(state)["item"]["cached_ids"] == 4
    rows = source.lookup(state, {"f_item": np.arange(ROWS["item"])})["f_item"]
    assert_allclose(target.tables(moved)["item"], rows, rtol=1e-6, atol=1e-7)


def test_keys_move_to_another_rule_as_the_refusal_to_load_them_says(tmp_path):
    rules = rs.optimizers.Adagrad(0.1), rs.optimizers.SGD(0.1)
    source, target = (
        collection_with([table_of("item", storage=rs.Hashed(), optimizer=rule)]) for rule in rules
    )
    state = trained(source, source.init(jax.random.key(0)), (0, 4))
    checkpoint.save_collection(tmp_path / "a", source, state)
    with pytest.raises(
        ValueError, match=r"expected .SGD.*keys and trains: collection.tables of what it was saved"
    ):
        checkpoint.load_collection(tmp_path / "a", target)
    found = source.tables(checkpoint.load_collection(tmp_path / "a", source))["item"]
    rows = {name: found[name] for name in ("keys", "values")}
    moved = target.with_tables(target.init(jax.random.key(1)), {"item": rows})
    ids = {"f_item": np.arange(ROWS["item"])}
    assert_array_equal(target.lookup(moved, ids)["f_item"], source.lookup(state, ids)["f_item"])


def test_what_carries_a_fingerprint_is_compared_in_any_tree(tmp_path):
    tree = {"rows": np.arange(4), "owner": Fingerprint.of({"shards": 4})}
    checkpoint.save(tmp_path / "a", tree)
    assert checkpoint.load(tmp_path / "a", tree).tree["owner"] == tree["owner"]
    with pytest.raises(ValueError, match="owner/shards is 4, expected 2"):
        checkpoint.load(tmp_path / "a", tree | {"owner": Fingerprint.of({"shards": 2})})


def test_a_collection_can_be_pickled_and_prepares_alike():
    collection = collection_of(rows={"user": 8})
    copy = pickle.loads(pickle.dumps(collection))
    assert copy.layout == collection.layout and copy.plan == collection.plan
    state = collection.init(jax.random.key(0))
    batch = {"f_user": [[1, 2], [3]]}
    expected = jax.jit(collection.lookup)(state, collection.prepare(batch))["f_user"]
    assert_array_equal(jax.jit(copy.lookup)(state, copy.prepare(batch))["f_user"], expected)
    assert pickle.loads(pickle.dumps(state)).layout == state.layout


def test_a_collection_without_the_mesh_prepares_in_a_worker_what_the_mesh_reads():
    collection = collection_of(4, "row", rows={"user": 8}, optimizer=rs.from_optax(optax.adam(0.1)))
    worker = pickle.loads(pickle.dumps(collection_of(rows={"user": 8})))
    lists = [[1, 2], [3], [], [7]]
    prepared = pickle.loads(pickle.dumps(worker.prepare({"f_user": lists})))
    found = collection.lookup(collection.init(jax.random.key(0)), prepared)["f_user"]
    rows = np.asarray(ramp(None, (8, DIM)))
    assert_array_equal(found, [rows[np.asarray(ids, int)].sum(axis=0) for ids in lists])


def test_a_jitted_step_is_compiled_for_few_sizes_of_ragged_batches():
    collection = collection_of(rows={"user": 8})
    state, rng, num_traces = collection.init(jax.random.key(0)), np.random.default_rng(0), 0
    rows = np.asarray(ramp(None, (8, DIM)))

    @jax.jit
    def step(state, batch):
        nonlocal num_traces
        num_traces += 1
        return collection.lookup(state, batch)["f_user"]

    for _ in range(40):
        lists = [rng.integers(0, 8, rng.integers(0, 6)).tolist() for _ in range(16)]
        found = step(state, collection.prepare({"f_user": lists}))
        assert_array_equal(found, [rows[np.asarray(ids, int)].sum(axis=0) for ids in lists])
    assert num_traces <= 3
