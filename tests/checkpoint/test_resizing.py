"""A table of another size or dtype goes on from a file, or from another state, with its slots and its step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain
from tests.world import assert_same, made_mesh

DIM, FEW, MANY = 4, 10, 12
KEYS = 2**40 + 3 * np.arange(FEW)


def train_of(first_factor, **options):
    return TensorTrain((2,), (first_factor, 2), (2, 2), **options)


def storage_of(kind, rows, cache_rows=8):
    if kind == "train":
        return train_of(rows // 2)
    if kind == "cached train":
        return train_of(rows // 2, cache_rows=3, populate_every=2)
    return {
        "dense": None,
        "on the host": rs.HostCached(cache_rows=cache_rows),
        "keyed": rs.Hashed(),
    }[kind]


STORAGES = ["dense", "on the host", "train", "cached train", "keyed"]


def collection_of(
    rows, kind="dense", *, dtype="float32", num_devices=None, placement=None, rule=None, beside=5
):
    """Table `t` of this size and kind, and a table of another name beside it, which shares its stack where it can."""
    rule = rule or rs.optimizers.Adam(0.1)
    how = {"embedding_dim": DIM, "optimizer": rule, "dtype": dtype}
    storage = storage_of(kind, rows, cache_rows=8 if num_devices is None else 16)
    table = rs.TableSpec("t", rows, storage=storage, **how)
    other = rs.TableSpec(
        "other",
        beside,
        storage=rs.Hashed() if kind == "keyed" else None,
        **how,
    )
    features = [rs.FeatureSpec(own.name, own) for own in (table, other)]
    mesh = made_mesh(num_devices)
    return rs.EmbeddingCollection(features, mesh=mesh, placement=placement)


def ids_of(kind, step):
    ids = (3 * step + np.arange(8) ** 2) % FEW
    return KEYS[ids] if kind == "keyed" else ids


def trained(collection, state, kind, steps):
    for step in steps:
        batch = {"t": ids_of(kind, step), "other": np.arange(8) % 4}
        state = collection.update(
            state, batch, {"t": jnp.ones((8, DIM)), "other": jnp.full((8, DIM), 0.5)}
        )
    return state


def trained_few(kind):
    """A collection and its state after three steps; rows on the host are those of one state, so these are made anew."""
    return made(kind) if kind == "on the host" else made_once(kind)


def made(kind):
    collection = collection_of(FEW, kind)
    return collection, trained(collection, collection.init(jax.random.key(7)), kind, range(3))


made_once = functools.cache(made)


def arrays_of(collection, state):
    """Rows and slots of `t` by name, as numpy arrays; those of a train are its cores and their slots."""
    table, slots = collection.tables(state)["t"], collection.slots(state)["t"]
    if isinstance(table, dict):
        return {name: np.array(array) for name, array in table.items()}
    leaves = jax.tree.leaves_with_path({"values": table, "slots": slots})
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


PLACEMENTS = [(None, None), (4, "row"), (4, "table"), (4, "column"), (2, "replicated")]


@pytest.mark.slow_rows("on the host-None-None", "dense-None-None", "dense-4-row")
@pytest.mark.parametrize(
    ("kind", "num_devices", "placement"),
    [
        *(("dense", *placement) for placement in PLACEMENTS),
        *(("on the host", *placement) for placement in PLACEMENTS[:2]),
    ],
)
def test_a_larger_table_keeps_rows_slots_and_step_and_gets_rows_of_init(
    tmp_path, kind, num_devices, placement
):
    collection, state = trained_few(kind)
    before = arrays_of(collection, state)
    checkpoint.save_collection(tmp_path / "few", collection, state)
    larger = collection_of(
        MANY, kind, num_devices=num_devices, placement=placement and {"t": placement}
    )
    loaded = checkpoint.load_collection(tmp_path / "few", larger, resize=True)
    found = arrays_of(larger, loaded)
    assert int(loaded.step) == 3
    others = collection.tables(state)["other"], collection.slots(state)["other"]
    assert_same(
        (larger.tables(loaded)["other"], larger.slots(loaded)["other"]),
        others,
    )
    fresh = collection_of(MANY)
    expected = arrays_of(fresh, fresh.init(loaded.key))
    for name, array in found.items():
        assert array.shape == (MANY, *before[name].shape[1:])
        assert_array_equal(array[:FEW], before[name])
        assert_array_equal(array[FEW:], expected[name][FEW:])
    # Training goes on as that of the smaller table does.
    goes_on = arrays_of(larger, trained(larger, loaded, kind, range(3, 5)))
    alone = arrays_of(collection, trained(collection, state, kind, range(3, 5)))
    for name, array in goes_on.items():
        assert_allclose(array[:FEW], alone[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow_rows("keyed-bfloat16-None", "train-bfloat16-None", "cached train-bfloat16-None")
@pytest.mark.parametrize(
    ("kind", "dtype", "num_devices"),
    [
        *((kind, "bfloat16", None) for kind in STORAGES),
        *((kind, "float16", 2) for kind in ("dense", "keyed")),
    ],
)
def test_a_table_of_another_dtype_keeps_slots_and_step(tmp_path, kind, dtype, num_devices):
    collection, state = trained_few(kind)
    checkpoint.save_collection(tmp_path / "wide", collection, state)
    narrow = collection_of(FEW, kind, dtype=dtype, num_devices=num_devices)
    loaded = checkpoint.load_collection(tmp_path / "wide", narrow, resize=True)
    assert int(loaded.step) == 3
    assert_same(narrow.slots(loaded)["t"], collection.slots(state)["t"])
    wide, rounded = collection.tables(state)["t"], narrow.tables(loaded)["t"]
    if kind == "keyed":
        assert rounded["values"].dtype == dtype
        assert_array_equal(rounded["keys"], wide["keys"])
        wide, rounded = wide["values"], rounded["values"]
    if "train" in kind:
        assert_allclose(rounded, wide, atol=0.02)
    else:
        assert_array_equal(np.asarray(rounded), np.asarray(wide).astype(dtype))
    # And back: what was rounded stays so, and nothing else changes.
    checkpoint.save_collection(tmp_path / "narrow", narrow, loaded)
    again = collection_of(FEW, kind)
    back = checkpoint.load_collection(tmp_path / "narrow", again, resize=True)
    assert_same(again.slots(back)["t"], collection.slots(state)["t"])


@pytest.mark.slow_rows("cached train-None")
@pytest.mark.parametrize(("kind", "num_devices"), [("train", 2), ("cached train", None)])
def test_a_train_grows_by_slices_of_its_first_core(tmp_path, kind, num_devices):
    collection, state = trained_few(kind)
    checkpoint.save_collection(tmp_path / "few", collection, state)
    larger = collection_of(MANY, kind, num_devices=num_devices)
    loaded = checkpoint.load_collection(tmp_path / "few", larger, resize=True)
    assert int(loaded.step) == 3
    assert_array_equal(larger.tables(loaded)["t"][:FEW], collection.tables(state)["t"])
    saved, found = (
        checkpoint.load(path).tree
        for path in (tmp_path / "few", saved_again(tmp_path, larger, loaded))
    )
    fresh = checkpoint.load(saved_again(tmp_path / "fresh", larger, larger.init(loaded.key))).tree
    core = ("tables", "t", "cores", "0") if kind == "cached train" else ("tables", "t", "0")
    slot = ("slots", "t", "0", "0", "0") if kind == "cached train" else ("slots", "t", "0", "0")
    leaves = {
        tuple(str(part.key) for part in path): leaf
        for path, leaf in jax.tree.leaves_with_path(found)
    }
    for path, array in leaves.items():
        before, start = (
            functools.reduce(lambda tree, part: tree[part], path, tree) for tree in (saved, fresh)
        )
        if path[: len(core)] == core or path[: len(slot) - 1] == slot[:-1]:
            assert_array_equal(array[: FEW // 2], before)
            assert_array_equal(array[FEW // 2 :], start[FEW // 2 :])
        elif path[0] in ("tables", "slots") and path[1] == "t":
            assert_array_equal(array, before)


def saved_again(folder, collection, state):
    checkpoint.save_collection(folder / "again", collection, state)
    return folder / "again"


def test_a_train_of_other_factors_is_refused(tmp_path):
    collection, state = trained_few("train")
    checkpoint.save_collection(tmp_path / "few", collection, state)
    table = rs.TableSpec(
        "t", MANY, DIM, storage=TensorTrain((2,), (4, 3), (2, 2)),
        optimizer=rs.optimizers.Adam(0.1),
    )  # fmt: skip
    other = rs.TableSpec("other", 5, DIM, optimizer=rs.optimizers.Adam(0.1))
    features = [rs.FeatureSpec(own.name, own) for own in (table, other)]
    with pytest.raises(ValueError, match=r"tables/t/storage .*tt_p_shapes=\(5, 2\).*\(4, 3\)"):
        checkpoint.load_collection(tmp_path / "few", rs.EmbeddingCollection(features), resize=True)


@pytest.mark.slow_rows("train", "dense")
@pytest.mark.parametrize("kind", ["dense", "on the host", "train", "keyed"])
def test_a_smaller_table_is_refused_unless_it_is_asked_for(tmp_path, kind):
    rows = 8
    collection, state = trained_few(kind)
    checkpoint.save_collection(tmp_path / "few", collection, state)
    smaller = collection_of(rows, kind)
    refusal = (
        r"table 't': .* keys need .* free rows"
        if kind == "keyed"
        else r"'t' has .*=10 .* 8 here.*resize='shrink'"
    )
    with pytest.raises(ValueError, match=refusal):
        checkpoint.load_collection(tmp_path / "few", smaller, resize=True)
    if kind == "keyed":  # which keys go is for `evict` to say
        with pytest.raises(ValueError, match=refusal):
            checkpoint.load_collection(tmp_path / "few", smaller, resize="shrink")
        return
    with pytest.raises(
        ValueError, match=r"vocabulary_size is 10, expected 8.*resize=True.*slots=slots"
    ):
        checkpoint.load_collection(tmp_path / "few", smaller)
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
    trees = checkpoint.CheckpointManager(tmp_path / "trees", read_only=True)
    with pytest.raises(ValueError, match="resize is of a collection"):
        trees.restore(resize=True)


def test_numbers_that_a_narrower_dtype_cannot_hold_are_refused(tmp_path):
    collection, state = trained_few("dense")
    state = collection.with_tables(state, {"t": np.full((FEW, DIM), 1e6, np.float32)})
    checkpoint.save_collection(tmp_path / "few", collection, state)
    with pytest.raises(ValueError, match=r"table 't': .* too large for float16"):
        checkpoint.load_collection(
            tmp_path / "few", collection_of(FEW, dtype="float16"), resize=True
        )


def test_many_rows_are_added_and_cut_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.resizing, "ROWS_PER_BLOCK", 4)
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 48)
    collection, state = trained_few("dense")
    checkpoint.save_collection(tmp_path / "few", collection, state)
    for rows in (23, 7):
        resized = collection_of(rows)
        loaded = checkpoint.load_collection(tmp_path / "few", resized, resize="shrink")
        fresh = resized.tables(resized.init(loaded.key))["t"]
        kept = min(rows, FEW)
        assert_array_equal(resized.tables(loaded)["t"][:kept], collection.tables(state)["t"][:kept])
        assert_array_equal(resized.tables(loaded)["t"][kept:], fresh[kept:])


# Slots without a file


@pytest.mark.slow_rows("dense-4", "train-4", "keyed-4")
@pytest.mark.parametrize(
    ("kind", "num_devices"), [("dense", None), *((kind, 4) for kind in STORAGES)]
)
def test_slots_of_one_state_go_into_another(kind, num_devices):
    collection, state = trained_few(kind)
    target = collection_of(FEW, kind, num_devices=num_devices)
    fresh = target.init(jax.random.key(1))
    tables = {"t": tuple(state.tables["t"])} if kind == "train" else collection.tables(state)
    if kind == "cached train":
        tables = {}
    moved = target.with_tables(fresh, tables, slots=collection.slots(state) if tables else None)
    if kind == "cached train":  # slots alone
        moved = target.with_tables(fresh, {}, slots={"t": collection.slots(state)["t"]})
    assert_same(target.slots(moved)["t"], collection.slots(state)["t"])
    assert int(moved.step) == 0
    if kind == "cached train":
        assert_same(target.tables(moved), target.tables(fresh))
        return
    moved = moved._replace(step=jnp.int32(int(state.step)))
    goes_on = trained(target, moved, kind, range(3, 5))
    expected = trained(collection, state, kind, range(3, 5))
    for name, array in arrays_of(target, goes_on).items():
        assert_allclose(array, arrays_of(collection, expected)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "on the host", "keyed"])
def test_slots_alone_leave_rows_and_other_tables_as_they_are(kind):
    collection = collection_of(FEW, kind)
    state = trained(collection, collection.init(jax.random.key(7)), kind, range(3))
    tables, slots = jax.tree.map(np.array, (collection.tables(state), collection.slots(state)))
    doubled = jax.tree.map(lambda slot: 2 * slot, slots["t"])
    moved = collection.with_tables(state, {}, slots={"t": doubled})
    found = collection.tables(moved)
    assert_same(
        collection.slots(moved),
        {"t": doubled, "other": slots["other"]},
    )
    assert_same(found["other"], tables["other"])
    if kind == "keyed":
        for name in ("keys", "values", "count", "last_step"):
            assert_array_equal(found["t"][name], tables["t"][name])
    else:
        assert_array_equal(found["t"], tables["t"])


def test_slots_are_written_inside_jit():
    collection, state = trained_few("dense")
    slots = collection.slots(state)
    moved = jax.jit(collection.with_tables)(collection.init(jax.random.key(1)), {}, slots=slots)
    assert_same(collection.slots(moved), slots)
    keyed, state = trained_few("keyed")
    with pytest.raises(RuntimeError, match=r"table 't' .* outside of jit"):
        jax.jit(keyed.with_tables)(state, {}, slots={"t": keyed.slots(state)["t"]})


@pytest.mark.parametrize("kind", ["dense", "on the host", "train", "keyed"])
def test_slots_that_do_not_fit_are_refused_by_table_and_slot(kind):
    collection, state = trained_few(kind)
    slots = collection.slots(state)["t"]
    first = jax.tree.leaves(slots)[0]
    name = "0/mu" if kind == "train" else "mu"
    for wrong, message in {
        "shape": (
            jax.tree.map(lambda slot: slot[1:], slots),
            r"must be float32\[\d+, \d+\], got float32\[\d+, \d+\]",
        ),
        "dtype": (
            jax.tree.map(lambda slot: np.asarray(slot, np.float64), slots),
            r"must be float32.*, got float64",
        ),
        "text": (jax.tree.map(lambda slot: "text", slots), r"array of numbers, got 'text'"),
    }.values():
        with pytest.raises(
            (ValueError, TypeError), match=rf"table 't': its slot '{name[:1]}.*{message}"
        ):
            collection.with_tables(state, {}, slots={"t": wrong})
    with pytest.raises(ValueError, match=r"table 't': its slots must be \[.*Adam, got"):
        collection.with_tables(state, {}, slots={"t": {"accumulator": first}})
    with pytest.raises(ValueError, match=r"unknown table 'tt' \(did you mean 't'"):
        collection.with_tables(state, {}, slots={"tt": slots})
    assert collection.slots(state)  # the state is still the newest one
