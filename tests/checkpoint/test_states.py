"""Files have tables in the order of ids, for any mesh, placement and stacking before and after."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.fingerprint import Fingerprint
from rsembed.storage.row_layout import RowLayout
from rsembed.tt import TensorTrain
from tests.checkpoint.world import ramp
from tests.world import assert_close, assert_same, made_mesh

ROWS = {"item": 10, "user": 8, "word": 5}
DIM = 4


def table_of(name, **options):
    defaults = {"vocabulary_size": ROWS.get(name), "initializer": ramp}
    defaults["optimizer"] = rs.optimizers.Adagrad(0.1)
    return rs.TableSpec(name, embedding_dim=DIM, **defaults | options)


def collection_of(num_devices=None, placement=None, *, rows=ROWS, alone=(), **options):
    """A collection with these numbers of rows on one device or a mesh.

    Tables in `alone` have different optimizers, and therefore stacks of their own.
    """
    rates = {name: {"optimizer": rs.optimizers.Adagrad(lambda: 0.1)} for name in alone}
    tables = [
        table_of(name, vocabulary_size=count, **rates.get(name, {}), **options)
        for name, count in rows.items()
    ]
    return collection_with(tables, placement=placement, mesh=made_mesh(num_devices))


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
    actual = collection.tables(state), collection.slots(state)
    assert_close(actual, tuple(expected), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of a run after two steps in each layout.

    Also tables and slots after two steps, and after three steps.
    """
    folder, collection, expected = tmp_path_factory.mktemp("layouts"), collection_of(), []
    state = collection.init(jax.random.key(0))
    for steps in ((0, 2), (2, 3)):
        state = trained(collection, state, steps)
        both = collection.tables(state), collection.slots(state)
        expected.append(jax.tree.map(np.asarray, both))
    for name, layout in LAYOUTS.items():
        source = collection_of(*layout)
        state = trained(source, source.init(jax.random.key(0)), (0, 2))
        checkpoint.save_collection(folder / f"{name} collection", source, state)
        checkpoint.save(folder / f"{name} tree", {"state": state, "epoch": 3})
    return folder, *expected


@pytest.mark.parametrize("source", LAYOUTS)
def test_files_hold_rows_in_the_order_of_ids_whatever_the_mesh(saved, source):
    folder, (tables, slots), _ = saved
    whole = checkpoint.load(folder / f"{source} collection").tree
    inside = checkpoint.load(folder / f"{source} tree").tree["state"]
    for actual in (whole, inside):
        for name in ROWS:
            assert_allclose(actual["tables"][name], tables[name], rtol=1e-6)
            assert_allclose(actual["slots"][name]["accumulator"], slots[name][0], rtol=1e-6)


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
    # A template of shapes says where rows go.
    like = {"state": collection.template, "epoch": 0}
    actual = checkpoint.load(folder / f"{source} tree", like).tree
    assert actual["epoch"] == 3 and int(actual["state"].step) == 2
    for stack, array in collection.init(jax.random.key(5)).tables.items():
        assert actual["state"].tables[stack].sharding == array.sharding
    assert_holds(collection, actual["state"], expected)


@pytest.mark.parametrize(
    ("names", "alone"), [(["user", "word", "item"], ["item"]), (["item", "user", "word"], ROWS)]
)
def test_training_goes_on_alike_on_another_stacking(saved, names, alone):
    folder, _, expected = saved
    collection = collection_of(rows={name: ROWS[name] for name in names}, alone=alone)
    assert len(collection.plan.stacks) > len(collection_of().plan.stacks)
    state = checkpoint.load_collection(folder / "one collection", collection)
    assert state.step == 2
    assert state.key == collection.init(jax.random.key(0)).key
    state = trained(collection, state, (2, 3))
    assert_same((collection.tables(state), collection.slots(state)), tuple(expected))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_step_is_not_compiled_anew_for_what_was_loaded(tmp_path, num_devices, caplog):
    collection = collection_of(num_devices)
    dense = {"weights": jnp.ones((DIM, 1)), "key": jax.random.key(3)}
    if num_devices is not None:
        dense = jax.device_put(dense, NamedSharding(collection.devices.mesh, P()))

    @jax.jit
    def step(state, dense, batch):
        activations = collection.lookup(state, batch)
        return collection.update(state, batch, activations), dense

    def compiled():
        return [record for record in caplog.records if "Compiling" in record.getMessage()]

    batch = collection.prepare(batch_of(0))
    state, dense = step(*step(collection.init(jax.random.key(0)), dense, batch), batch)
    checkpoint.save_collection(tmp_path / "c", collection, state, others=dense)
    loaded = checkpoint.load_collection(tmp_path / "c", collection, others=dense)
    with jax.log_compiles():
        step(*step(*loaded, batch), batch)
        assert not compiled()
        jax.jit(lambda x: x + 1)(dense["weights"])
        # JAX still logs new programs in this form.
        assert compiled()


def test_a_restart_on_fewer_devices_keeps_every_row_even_where_padded_shapes_agree(tmp_path):
    # 8 rows have the same padded shape on 4 and on 2 devices.
    rows = {"user": 8}
    four, two = collection_of(4, "row", rows=rows), collection_of(2, "row", rows=rows)
    state = four.init(jax.random.key(0))
    checkpoint.save(tmp_path / "a", state, step=7)
    actual = checkpoint.load(tmp_path / "a", like=two.init(jax.random.key(1)))
    assert actual.step == 7
    assert_array_equal(two.tables(actual.tree)["user"], ramp(None, (8, DIM)))


def test_rows_of_tables_that_a_plan_rotates_are_saved_in_the_order_of_ids(tmp_path):
    tables = [table_of(name, optimizer=rs.optimizers.SGD(0.1)) for name in ROWS]
    features = [rs.FeatureSpec(f"f_{table.name}", table) for table in tables]
    (stack,) = rs.plan_stacking(features, num_shards=4, rotation=1).stacks
    layout = RowLayout.as_planned(stack, shards_per_device=1)
    facts = Fingerprint.of({"s": layout.facts({table.name: table for table in tables})})
    rows = np.arange(layout.num_rows, dtype=np.float32)[:, None]
    state = rs.EmbeddingState({"s": rows}, {"s": ()}, jnp.int32(0), jax.random.key(0), facts)
    checkpoint.save(tmp_path / "a", state)
    for name, array in checkpoint.load(tmp_path / "a").tree["tables"].items():
        assert_array_equal(array[:, 0], layout.rows(name, np.arange(ROWS[name])))
    actual = checkpoint.load(tmp_path / "a", state).tree
    assert layout.places[1].rotation == 1
    for name, count in ROWS.items():
        index = layout.rows(name, np.arange(count))
        assert_array_equal(actual.tables["s"][index], rows[index])


def test_state_of_one_optax_rule_is_not_that_of_another(tmp_path):
    adam, nadam = (
        collection_of(optimizer=rs.from_optax(rule(0.1))) for rule in (optax.adam, optax.nadam)
    )
    state = adam.init(jax.random.key(0))
    checkpoint.save_collection(tmp_path / "a", adam, state)
    checkpoint.save(tmp_path / "b", state)
    refusal = r"item/optimizer is .*scale_by_adam.*, expected "
    with pytest.raises(ValueError, match=f"{refusal}.*with_tables"):
        checkpoint.load_collection(tmp_path / "a", nadam)
    with pytest.raises(ValueError, match=refusal):
        checkpoint.load(tmp_path / "b", like=nadam.template)
    with pytest.raises(ValueError, match=refusal):
        nadam.lookup(state, batch_of(0))


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
    "options",
    [
        {"rows": {**ROWS, "item": 20}},
        {"rows": {"item": 10, "user": 8}},
        {"optimizer": rs.optimizers.Adam(0.1)},
        {"num_devices": 4, "placement": "row"},
    ],
    ids=["more rows", "fewer tables", "another rule", "another mesh"],
)
def test_a_state_of_another_collection_is_refused_by_every_method(tmp_path, options):
    collection, state = collection_of(), collection_of(**options).init(jax.random.key(0))
    batch = collection.prepare(batch_of(0))
    activations, pullback = collection.lookup_vjp(collection.init(jax.random.key(0)), batch)
    calls = {
        collection.lookup: [batch],
        jax.jit(collection.lookup): [batch],
        collection.lookup_vjp: [batch],
        collection.update: [batch, activations],
        collection.apply: [pullback(activations)],
        collection.tables: [],
        collection.slots: [],
        collection.with_tables: [{}],
        functools.partial(checkpoint.save_collection, tmp_path / "a", collection): [],
    }
    refusal = r"the state does not belong to this collection: .* is .*load_collection"
    for call, arguments in calls.items():
        with pytest.raises(ValueError, match=refusal):
            call(state, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_state_made_by_hand_is_compared_by_its_shapes_and_one_without_slots_is_read():
    collection = collection_of()
    state, batch = collection.init(jax.random.key(0)), batch_of(0)
    by_hand = rs.EmbeddingState(state.tables, state.slots, state.step, state.key)
    for other in (by_hand, state._replace(slots={})):
        assert_same(collection.lookup(other, batch), collection.lookup(state, batch))
        assert_array_equal(collection.tables(other)["item"], ramp(None, (10, DIM)))
    for wrong in (jnp.zeros((20, DIM)), jnp.zeros((23, 3)), jnp.zeros((23, DIM), jnp.bfloat16)):
        with pytest.raises(
            ValueError, match=rf"tables are .*{wrong.dtype}.*, expected .*float32\[23, 4\]"
        ):
            collection.lookup(by_hand._replace(tables=dict.fromkeys(state.tables, wrong)), batch)


def test_row_gradients_of_another_collection_are_refused():
    rows = {"user": 8}
    four, two = collection_of(4, "row", rows=rows), collection_of(2, "row", rows=rows)
    batch, ones = {"f_user": np.arange(8)[:, None]}, {"f_user": jnp.ones((8, DIM))}
    of_four, of_two = four.row_gradients(batch, ones), two.row_gradients(batch, ones)
    refusal = "row gradients belong to another collection or module: .*num_shards is"
    with pytest.raises(ValueError, match=f"{refusal} 4, expected 2"):
        two.apply(two.init(jax.random.key(0)), of_four)
    with pytest.raises(ValueError, match=r"belong to another .*num_shards is 2, expected 4"):
        rs.combine(of_four, of_two)


def test_tables_whose_joined_names_meet_have_stacks_of_their_own():
    dims = {"user": 2, "item": 2, "user_item": 3}
    tables = [rs.TableSpec(name, 3, dim, initializer=ramp) for name, dim in dims.items()]
    collection = collection_with(tables)
    assert len({stack.name for stack in collection.plan.stacks}) == 2
    state = collection.init(jax.random.key(0))
    actual = collection.lookup(state, {f"f_{name}": np.asarray([2]) for name in dims})
    for name, dim in dims.items():
        assert_array_equal(actual[f"f_{name}"][0], ramp(None, (3, dim))[2])


def test_trains_rounded_tables_and_states_of_optax_go_to_another_mesh_and_stacking(tmp_path):
    tables = [
        rs.TableSpec("word", 30, DIM, storage=TensorTrain((2, 2))),
        table_of("user", dtype="bfloat16", stochastic_rounding=True),
        table_of("item", optimizer=rs.from_optax(optax.adam(0.1))),
    ]
    source, target = collection_with(tables, mesh=made_mesh(4)), collection_with(tables[::-1])
    state = trained(source, source.init(jax.random.key(0, impl="rbg")), (0, 2))
    checkpoint.save_collection(tmp_path / "a", source, state)
    restored = checkpoint.load_collection(tmp_path / "a", target)
    assert restored.key == state.key
    assert_same(target.tables(restored), source.tables(state))
    assert_same(target.slots(restored), source.slots(state))


KEPT = TensorTrain((2, 2), cache_rows=4, populate_every=1)


@pytest.mark.slow_rows("a train with kept rows becomes a dense table")
@pytest.mark.parametrize(
    ("before", "after", "refusal", "tolerance"),
    [
        ({"storage": KEPT}, {}, r"tables/item/storage is .TensorTrain.*, expected null", 1e-6),
        (
            {"storage": rs.Hashed()},
            {"storage": rs.Hashed(), "optimizer": rs.optimizers.SGD(0.1)},
            r"expected .SGD",
            0,
        ),
    ],
    ids=["a train with kept rows becomes a dense table", "keys move to another rule"],
)
def test_rows_move_as_the_refusal_to_load_them_says(tmp_path, before, after, refusal, tolerance):
    source, target = (collection_with([table_of("item", **options)]) for options in (before, after))
    state = trained(source, source.init(jax.random.key(0)), (0, 4))
    checkpoint.save_collection(tmp_path / "a", source, state)
    way_out = "keys and trains: collection.tables of what it was saved"
    with pytest.raises(ValueError, match=f"{refusal}.*{way_out}"):
        checkpoint.load_collection(tmp_path / "a", target)
    actual = source.tables(checkpoint.load_collection(tmp_path / "a", source))["item"]
    if isinstance(actual, dict):
        actual = {name: actual[name] for name in ("keys", "values")}
    moved = target.with_tables(target.init(jax.random.key(1)), {"item": actual})
    ids = {"f_item": np.arange(ROWS["item"])}
    rows, expected = target.lookup(moved, ids)["f_item"], source.lookup(state, ids)["f_item"]
    assert_allclose(rows, expected, rtol=tolerance, atol=tolerance / 10)


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
    state, batch = collection.init(jax.random.key(0)), {"f_user": [[1, 2], [3]]}
    actual, expected = (each.lookup(state, each.prepare(batch)) for each in (copy, collection))
    assert_same(actual, expected)
    assert pickle.loads(pickle.dumps(state)).layout == state.layout


def sums_of(lists):
    """Activations of table `user` for lists of ids, with initial rows."""
    rows = np.asarray(ramp(None, (8, DIM)))
    return [rows[np.asarray(ids, int)].sum(axis=0) for ids in lists]


def test_a_collection_without_the_mesh_prepares_in_a_worker_what_the_mesh_reads():
    collection = collection_of(4, "row", rows={"user": 8}, optimizer=rs.from_optax(optax.adam(0.1)))
    worker = pickle.loads(pickle.dumps(collection_of(rows={"user": 8})))
    lists = [[1, 2], [3], [], [7]]
    prepared = pickle.loads(pickle.dumps(worker.prepare({"f_user": lists})))
    actual = collection.lookup(collection.init(jax.random.key(0)), prepared)["f_user"]
    assert_array_equal(actual, sums_of(lists))


def test_a_jitted_step_is_compiled_for_few_sizes_of_ragged_batches():
    collection = collection_of(rows={"user": 8})
    state, rng, num_traces = collection.init(jax.random.key(0)), np.random.default_rng(0), 0

    @jax.jit
    def step(state, batch):
        nonlocal num_traces
        num_traces += 1
        return collection.lookup(state, batch)["f_user"]

    for _ in range(40):
        lists = [rng.integers(0, 8, rng.integers(0, 6)).tolist() for _ in range(16)]
        actual = step(state, collection.prepare({"f_user": lists}))
        assert_array_equal(actual, sums_of(lists))
    assert num_traces <= 3
