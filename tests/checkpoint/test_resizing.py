"""Tables get another size or dtype when a file is loaded, and slots move between states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain
from tests.world import assert_close, assert_same, made_mesh

DIM, FEW, MANY = 4, 10, 12
KEYS = 2**40 + 3 * np.arange(FEW)
STORAGES = ["dense", "on the host", "train", "cached train", "keyed"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes rows that are added or removed, and chunks of files, come in several blocks."""
    monkeypatch.setattr(checkpoint.resizing, "ROWS_PER_BLOCK", 4)
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 48)


def storage_of(kind, rows, cache_rows=8):
    cached = {"cache_rows": 3, "populate_every": 2} if kind == "cached train" else {}
    if "train" in kind:
        return TensorTrain((2,), (rows // 2, 2), (2, 2), **cached)
    if kind == "on the host":
        return rs.HostCached(cache_rows=cache_rows)
    return rs.Hashed() if kind == "keyed" else None


def collection_of(rows, kind="dense", *, dtype="float32", num_devices=None, placement=None):
    """A collection with table `t`, and a second table which shares its stack if possible."""
    options = {"embedding_dim": DIM, "optimizer": rs.optimizers.Adam(0.1), "dtype": dtype}
    storage = storage_of(kind, rows, cache_rows=8 if num_devices is None else 16)
    tables = [
        rs.TableSpec("t", rows, storage=storage, **options),
        rs.TableSpec("other", 5, storage=rs.Hashed() if kind == "keyed" else None, **options),
    ]
    features = [rs.FeatureSpec(table.name, table) for table in tables]
    return rs.EmbeddingCollection(features, mesh=made_mesh(num_devices), placement=placement)


def ids_of(kind, step):
    ids = (3 * step + np.arange(8) ** 2) % FEW
    return KEYS[ids] if kind == "keyed" else ids


def trained(collection, state, kind, steps):
    gradients = {"t": jnp.ones((8, DIM)), "other": jnp.full((8, DIM), 0.5)}
    for step in steps:
        batch = {"t": ids_of(kind, step), "other": np.arange(8) % 4}
        state = collection.update(state, batch, gradients)
    return state


def trained_few(kind):
    """A collection and its state after three steps.

    A host store works with one state only, so tables on the host are trained again for each test.
    """
    return made(kind) if kind == "on the host" else made_once(kind)


def made(kind):
    collection = collection_of(FEW, kind)
    return collection, trained(collection, collection.init(jax.random.key(7)), kind, range(3))


made_once = functools.cache(made)


def arrays_of(collection, state):
    """Rows and slots of `t` by name, in numpy. Those of a tensor train are its cores and slots."""
    table, slots = collection.tables(state)["t"], collection.slots(state)["t"]
    if isinstance(table, dict):
        return {name: np.array(array) for name, array in table.items()}
    leaves = jax.tree.leaves_with_path({"values": table, "slots": slots})
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


@pytest.mark.slow_rows(
    "on the host-None-None",
    "dense-None-None",
    "dense-4-row",
    "on the host-4-row",
    "dense-2-replicated",
)
@pytest.mark.parametrize(
    ("kind", "num_devices", "placement"),
    [
        ("dense", None, None),
        ("dense", 4, "row"),
        ("dense", 4, "table"),
        ("dense", 4, "column"),
        ("dense", 2, "replicated"),
        ("on the host", None, None),
        ("on the host", 4, "row"),
    ],
)
def test_a_larger_table_keeps_rows_slots_and_step_and_gets_rows_of_init(
    tmp_path, kind, num_devices, placement
):
    collection, state = trained_few(kind)
    before = arrays_of(collection, state)
    checkpoint.save_collection(tmp_path / "few", collection, state)
    placements, rows = placement and {"t": placement}, 23
    larger = collection_of(rows, kind, num_devices=num_devices, placement=placements)
    loaded = checkpoint.load_collection(tmp_path / "few", larger, resize=True)
    actual = arrays_of(larger, loaded)
    assert int(loaded.step) == 3
    assert_same(larger.tables(loaded)["other"], collection.tables(state)["other"])
    assert_same(larger.slots(loaded)["other"], collection.slots(state)["other"])
    fresh = collection_of(rows)
    expected = arrays_of(fresh, fresh.init(loaded.key))
    for name, array in actual.items():
        assert_array_equal(array, np.concatenate([before[name], expected[name][FEW:]]))
    # Training continues as in the smaller table.
    goes_on = arrays_of(larger, trained(larger, loaded, kind, range(3, 5)))
    alone = arrays_of(collection, trained(collection, state, kind, range(3, 5)))
    for name, array in goes_on.items():
        assert_allclose(array[:FEW], alone[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow_rows(
    "keyed-bfloat16-None",
    "train-bfloat16-None",
    "cached train-bfloat16-None",
    "on the host-bfloat16-None",
)
@pytest.mark.parametrize(
    ("kind", "dtype", "num_devices"),
    [
        *((kind, "bfloat16", None) for kind in STORAGES),
        *((kind, "float16", 2) for kind in ("dense", "keyed")),
    ],
)
def test_a_table_of_another_dtype_keeps_slots_and_step(tmp_path, kind, dtype, num_devices):
    collection, state = trained_few(kind)
    before = arrays_of(collection, state)
    checkpoint.save_collection(tmp_path / "wide", collection, state)
    narrow = collection_of(FEW, kind, dtype=dtype, num_devices=num_devices)
    loaded = checkpoint.load_collection(tmp_path / "wide", narrow, resize=True)
    assert int(loaded.step) == 3
    for name, array in arrays_of(narrow, loaded).items():
        if "values" not in name:
            assert_array_equal(array, before[name])
        elif "train" in kind:
            assert_allclose(array, before[name], atol=0.02)
        else:
            assert array.dtype == dtype
            assert_array_equal(array, before[name].astype(dtype))
    # A second change of the dtype does not restore rounded rows, and changes nothing else.
    checkpoint.save_collection(tmp_path / "narrow", narrow, loaded)
    again = collection_of(FEW, kind)
    back = checkpoint.load_collection(tmp_path / "narrow", again, resize=True)
    assert_same(again.slots(back)["t"], collection.slots(state)["t"])


def arrays_in_file(folder, collection, state):
    """Arrays of table `t` in a saved file, by path."""
    checkpoint.save_collection(folder, collection, state)
    leaves = jax.tree.leaves_with_path(checkpoint.load(folder).tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if "/t/" in name}


@pytest.mark.slow_rows("cached train-None-first_core1")
@pytest.mark.parametrize(
    ("kind", "num_devices", "first_core"),
    [
        ("train", 2, ("tables/t/0", "slots/t/0/")),
        ("cached train", None, ("tables/t/cores/0", "slots/t/0/0/")),
    ],
)
def test_a_train_grows_by_slices_of_its_first_core(tmp_path, kind, num_devices, first_core):
    collection, state = trained_few(kind)
    before = arrays_in_file(tmp_path / "few", collection, state)
    larger = collection_of(MANY, kind, num_devices=num_devices)
    loaded = checkpoint.load_collection(tmp_path / "few", larger, resize=True)
    assert int(loaded.step) == 3
    assert_array_equal(larger.tables(loaded)["t"][:FEW], collection.tables(state)["t"])
    fresh = arrays_in_file(tmp_path / "fresh", larger, larger.init(loaded.key))
    for name, array in arrays_in_file(tmp_path / "many", larger, loaded).items():
        expected = before[name]
        if name.startswith(first_core):
            expected = np.concatenate([before[name], fresh[name][FEW // 2 :]])
        assert_array_equal(array, expected)


@pytest.mark.slow_rows("train", "dense")
@pytest.mark.parametrize("kind", ["dense", "on the host", "train", "keyed"])
def test_a_smaller_table_is_refused_unless_it_is_asked_for(tmp_path, kind):
    rows = 8
    collection, state = trained_few(kind)
    checkpoint.save_collection(tmp_path / "few", collection, state)
    smaller = collection_of(rows, kind)
    refusal = r"'t' has .*=10 .* 8 here.*resize='shrink'"
    if kind == "keyed":
        refusal = r"table 't': .* keys need .* free rows"
    with pytest.raises(ValueError, match=refusal):
        checkpoint.load_collection(tmp_path / "few", smaller, resize=True)
    # The keys to remove must be chosen with `evict`.
    if kind == "keyed":
        with pytest.raises(ValueError, match=refusal):
            checkpoint.load_collection(tmp_path / "few", smaller, resize="shrink")
        return
    loaded = checkpoint.load_collection(tmp_path / "few", smaller, resize="shrink")
    assert_array_equal(smaller.tables(loaded)["t"], collection.tables(state)["t"][:rows])
    if kind != "train":
        halves = jax.tree.map(lambda slot: slot[:rows], collection.slots(state)["t"])
        assert_same(smaller.slots(loaded)["t"], halves)


def test_a_manager_restores_into_a_larger_collection(tmp_path):
    collection, state = trained_few("dense")
    with checkpoint.CheckpointManager(tmp_path, collection) as checkpoints:
        checkpoints.save(state)
    with checkpoint.CheckpointManager(tmp_path, collection_of(MANY), read_only=True) as checkpoints:
        with pytest.raises(ValueError, match="resize=True"):
            checkpoints.restore()
        assert int(checkpoints.restore(resize=True).step) == 3


# Slots of states, without files


@pytest.mark.slow_rows("dense-4", "on the host-4", "train-4", "keyed-4")
@pytest.mark.parametrize(
    ("kind", "num_devices"),
    [("dense", None), ("dense", 4), ("on the host", 4), ("train", 4), ("keyed", 4)],
)
def test_slots_of_one_state_go_into_another(kind, num_devices):
    collection, state = trained_few(kind)
    target = collection_of(FEW, kind, num_devices=num_devices)
    tables, slots = collection.tables(state), collection.slots(state)
    if kind == "train":
        tables["t"] = tuple(state.tables["t"])
    moved = target.with_tables(target.init(jax.random.key(1)), tables, slots=slots)
    assert_same(target.slots(moved)["t"], slots["t"])
    assert int(moved.step) == 0
    moved = moved._replace(step=jnp.int32(int(state.step)))
    goes_on = trained(target, moved, kind, range(3, 5))
    expected = trained(collection, state, kind, range(3, 5))
    assert_close(arrays_of(target, goes_on), arrays_of(collection, expected), rtol=1e-5, atol=1e-6)


@pytest.mark.slow_rows("cached train")
@pytest.mark.parametrize("kind", ["dense", "on the host", "cached train", "keyed"])
def test_slots_alone_leave_rows_and_other_tables_as_they_are(kind):
    collection, state = made(kind)
    tables, slots = jax.tree.map(np.array, (collection.tables(state), collection.slots(state)))
    doubled = jax.tree.map(lambda slot: 2 * slot, slots["t"])
    moved = collection.with_tables(state, {}, slots={"t": doubled})
    assert_same(collection.slots(moved), {"t": doubled, "other": slots["other"]})
    actual = collection.tables(moved)
    assert_same(actual["other"], tables["other"])
    if kind == "keyed":
        for name in ("keys", "values", "count", "last_step"):
            assert_array_equal(actual["t"][name], tables["t"][name])
    else:
        assert_array_equal(actual["t"], tables["t"])


def test_slots_are_written_inside_jit():
    collection, state = trained_few("dense")
    slots = collection.slots(state)
    moved = jax.jit(collection.with_tables)(collection.init(jax.random.key(1)), {}, slots=slots)
    assert_same(collection.slots(moved), slots)


@pytest.mark.parametrize("kind", ["dense", "on the host", "train", "keyed"])
def test_slots_that_do_not_fit_are_refused_by_table_and_slot(kind):
    collection, state = trained_few(kind)
    slots = collection.slots(state)["t"]
    refusals = {
        r"must be float32\[\d+, \d+\], got float32\[\d+, \d+\]": lambda slot: slot[1:],
        "must be float32.*, got float64": lambda slot: np.asarray(slot, np.float64),
        "array of numbers, got 'text'": lambda slot: "text",
    }
    first = "0" if kind == "train" else "m"
    for message, change in refusals.items():
        wrong = jax.tree.map(change, slots)
        with pytest.raises(
            (ValueError, TypeError), match=rf"table 't': its slot '{first}.*{message}"
        ):
            collection.with_tables(state, {}, slots={"t": wrong})
    with pytest.raises(ValueError, match=r"table 't': its slots must be \[.*Adam, got"):
        collection.with_tables(state, {}, slots={"t": {"accumulator": np.zeros(2)}})
    # The refused calls did not invalidate the state.
    assert collection.slots(state)
