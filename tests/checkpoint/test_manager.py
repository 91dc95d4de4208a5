"""A run that is left alone: what its manager saved comes back, whatever was changed, damaged or full meanwhile."""

import errno
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from rsembed.checkpoint import CheckpointManager, CorruptCheckpointError, increments, manager, writing


def make_collection(mesh=None):
    rule = rs.AdagradOptimizerSpec(0.1)
    dense = rs.TableSpec(name="word", vocabulary_size=64, embedding_dim=4, optimizer=rule)
    hashed = rs.TableSpec(name="user", vocabulary_size=64, embedding_dim=4, optimizer=rule, storage=rs.Hashed())
    features = [rs.FeatureSpec(name=table.name, table_spec=table) for table in (dense, hashed)]
    return rs.EmbeddingCollection(features, mesh=mesh)


def two_devices():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def run():
    """A collection, a step, and the states of three steps that touch few rows, with new keys in each."""
    collection = make_collection(two_devices())
    step = jax.jit(lambda state, batch: collection.update(state, batch, collection.lookup(state, batch)))
    rng = np.random.default_rng(0)
    state = collection.init(jax.random.key(0))
    states = []
    for number in range(4):
        batch = {"word": rng.integers(0, 64, (4, 2)), "user": rng.integers(0, 2**40, (4, 2)) | number}
        state = step(state, collection.prepare(batch))
        states.append(state)
    return collection, step, batch, states


def assert_same_rows(found, of_found, expected, of_expected):
    for read in ("tables", "slots"):
        both = getattr(of_found, read)(found), getattr(of_expected, read)(expected)
        jax.tree.map(np.testing.assert_array_equal, *both)
    assert int(found.step) == int(expected.step)


def test_what_was_given_is_written_though_training_goes_on_in_its_memory(tmp_path, run, monkeypatch):
    collection, step, batch, states = run
    donating = jax.jit(step, donate_argnums=0)
    may_write = threading.Event()

    def held_up(*args, **options):
        may_write.wait()
        return writing.written(*args, **options)

    monkeypatch.setattr(manager, "written", held_up)
    state, host = jax.tree.map(jnp.copy, states[0]), np.arange(4.0)
    with CheckpointManager(tmp_path, collection) as checkpoints:
        checkpoints.save(state, others={"host": host}, metadata={"input": 7})
        host[:] = 0
        state = donating(state, collection.prepare(batch))
        assert checkpoints.paths() == []
        may_write.set()
        found, others = checkpoints.restore(others={"host": host})
        assert checkpoints.metadata(int(found.step)) == {"input": 7}
    assert_same_rows(found, collection, states[0], collection)
    assert others["host"].tolist() == [0, 1, 2, 3] and int(state.step) == 2


@pytest.mark.parametrize("source", ["a mesh", "one device"])
def test_incremental_checkpoints_hold_the_rows_that_differ_and_come_back_whole(tmp_path, run, monkeypatch, source):
    collection, _, _, states = run
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    with CheckpointManager(tmp_path / "run", collection, full_every=3) as checkpoints:
        for state in states:
            checkpoints.save(state)
    manifests = [checkpoint.manifest(path) for path in checkpoints.paths()]
    assert ["base" in found for found in manifests] == [False, True, True, False]
    changed = {tuple(entry["path"]): entry for entry in manifests[1]["arrays"] if "changed" in entry}
    before, after = (collection.tables(state)["word"] for state in states[:2])
    num_differing = int((before != after).any(axis=1).sum())
    assert changed["tables", "word"]["shape"] == [num_differing, 4] and 0 < num_differing <= 8
    assert changed["tables", "user", "values"]["changed"]["by_key"]
    target = collection if source == "a mesh" else make_collection()
    with CheckpointManager(tmp_path / "run", target) as checkpoints:
        for state in states:
            assert_same_rows(checkpoints.restore(step=int(state.step)), target, state, collection)


def test_rows_are_told_apart_by_their_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    first = np.zeros((8, 3), np.float32)
    first[1] = np.nan
    second = first.copy()
    second[2, 0] = -0.0
    second[7] = 1.0
    with CheckpointManager(tmp_path, full_every=2) as checkpoints:
        checkpoints.save({"x": first}, step=1)
        checkpoints.save({"x": second}, step=2)
    (entry,) = checkpoint.manifest(checkpoints.paths()[1])["arrays"]
    assert entry["shape"] == [2, 3]
    found = checkpoint.load(checkpoints.paths()[1]).tree["x"]
    assert found.tobytes() == second.tobytes()


def test_the_newest_good_one_is_not_the_one_that_a_save_in_progress_removes(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save({"x": np.zeros(3)}, step=1)
        checkpoints.wait_until_finished()
        write, may_write = checkpoints._write, threading.Event()
        monkeypatch.setattr(checkpoints, "_write", lambda *args: may_write.wait(60) and write(*args))
        checkpoints.save({"x": np.ones(3)}, step=2)
        threading.Timer(0.2, may_write.set).start()
        good = checkpoints.latest_good()
        checkpoints.wait_until_finished()
        assert checkpoint.load(good).tree["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_any_chain_of_trees_comes_back_to_the_bit(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    rng = np.random.default_rng(seed)
    dtypes = ["float32", "bfloat16", "int8", "bool", "uint16"]
    tree = {dtype: rng.integers(0, 2, (20, seed + 1)).astype(jnp.dtype(dtype)) for dtype in dtypes}
    tree |= {"line": np.arange(30), "grown": np.zeros((3, 2)), "key": jax.random.key(seed), "one": np.int32(0)}
    saved = []
    with CheckpointManager(tmp_path, full_every=10) as checkpoints:
        for step in range(5):
            keys = np.unique(rng.integers(0, 40, 25))
            values = (keys[:, None] * 2.0).astype(np.float32)
            values[rng.integers(0, len(keys), 3)] += step
            tree = jax.tree.map(lambda leaf: np.copy(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
            tree |= {"table": {"keys": keys, "values": values}, "one": np.int32(step)}
            tree["line"][rng.integers(0, 30, 4)] = step
            tree["bfloat16"][rng.integers(0, 20)] = 1 - tree["bfloat16"][rng.integers(0, 20)]
            tree["grown"] = np.zeros((3 + step, 2))
            checkpoints.save(tree, step=step)
            saved.append(tree)
    assert [("base" in checkpoint.manifest(path)) for path in checkpoints.paths()] == [False] + 4 * [True]
    checkpoint.compact(checkpoints.paths()[4], tmp_path / "alone")
    for path, expected in [*zip(checkpoints.paths(), saved, strict=True), (tmp_path / "alone", saved[4])]:
        found = checkpoint.load(path, expected).tree
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if not isinstance(b, jax.Array):
                a, b = np.asarray(a), np.asarray(b)
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert jax.random.uniform(found["key"]) == jax.random.uniform(expected["key"])
    for path in checkpoints.paths():
        path.rename(tmp_path / f"gone_{path.name}")
    checkpoint.verify(tmp_path / "alone")


def test_old_ones_go_but_for_those_that_others_build_on(tmp_path, monkeypatch):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)

    def steps_after(folder, **options):
        with CheckpointManager(folder, **options) as checkpoints:
            for step in range(1, 8):
                checkpoints.save({"x": np.arange(10) + (np.arange(10) == step)}, step=step)
        assert not list(folder.glob(".*.partial"))
        return [int(path.name[5:]) for path in checkpoints.paths()]

    assert steps_after(tmp_path / "a", max_to_keep=2) == [6, 7]
    assert steps_after(tmp_path / "b", max_to_keep=1, keep_period=3) == [3, 6, 7]
    assert steps_after(tmp_path / "c", max_to_keep=1, full_every=4) == [5, 6, 7]
    assert steps_after(tmp_path / "d", asynchronous=False, max_to_keep=3) == [5, 6, 7]


def damage(path, name="0000"):
    file = min((path / name).glob("c.*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_with_those_that_build_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    trees = [{"x": np.arange(10) + (np.arange(10) == step)} for step in range(5)]
    with CheckpointManager(tmp_path, full_every=2) as checkpoints:
        for step, tree in enumerate(trees):
            checkpoints.save(tree, step=step)
        checkpoints.wait_until_finished()
        damage(checkpoints.paths()[4])
        damage(checkpoints.paths()[2])
        with pytest.warns(UserWarning, match="step_00000000[234] is passed over: .*is not what was written") as told:
            found = checkpoints.restore(trees[0])
        assert found.step == 1 and found.tree["x"].tolist() == trees[1]["x"].tolist()
        assert len(told) == 3
        with pytest.warns(UserWarning, match="passed over"):
            good = checkpoints.latest_good()
        assert good == checkpoints.paths()[1]
        with pytest.raises(CorruptCheckpointError, match="is not what was written"):
            checkpoints.restore(trees[0], step=3)
        with pytest.warns(UserWarning, match="becomes a full checkpoint"):
            checkpoints.save(trees[0], step=5)
            checkpoints.wait_until_finished()
        assert "base" not in checkpoint.manifest(checkpoints.paths()[-1])


def test_changes_of_another_base_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    x = np.arange(10)
    with CheckpointManager(tmp_path, full_every=2) as checkpoints:
        checkpoints.save({"x": x}, step=1)
        checkpoints.save({"x": x + (x == 3)}, step=2)
    base, path = checkpoints.paths()
    base.rename(tmp_path / "kept")
    with pytest.raises(CorruptCheckpointError, match=r"changes of .*step_000000001, which is gone"):
        checkpoint.load(path)
    checkpoint.save(base, {"x": x + 1}, step=1)
    with pytest.raises(CorruptCheckpointError, match=r"changes of another .*step_000000001"):
        checkpoint.verify(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["base"].update(name="../elsewhere"),
        lambda body: body["base"].update(name=".."),
        lambda body: body.pop("base"),
        lambda body: body["arrays"][0]["changed"].update(rows=7),
        lambda body: body["arrays"][0]["changed"].update(count=0),
        lambda body: body["arrays"][0]["changed"].update(by_key="yes"),
        lambda body: body.update(row_numbers=[]),
    ],
)
def test_a_forged_manifest_of_changes_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(increments, "LEAST_BYTES", 0)
    x = np.arange(10)
    with CheckpointManager(tmp_path, full_every=2) as checkpoints:
        checkpoints.save({"x": x}, step=1)
        checkpoints.save({"x": x + (x == 3)}, step=2)
    path = checkpoints.paths()[1]
    body = checkpoint.manifest(path)
    change(body)
    (path / "manifest.json").write_bytes(checkpoint.manifests.encoded(body))
    with pytest.raises(CorruptCheckpointError):
        checkpoint.load(path)


def test_a_save_that_failed_is_heard_of_and_the_next_one_may_succeed(tmp_path, monkeypatch, caplog):
    full = OSError(errno.ENOSPC, "No space left on device")
    with CheckpointManager(tmp_path) as checkpoints:
        monkeypatch.setattr(manager, "written", lambda *_, **__: full)
        checkpoints.save({"x": np.zeros(3)}, step=1)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save({"x": np.zeros(3)}, step=2)
        monkeypatch.undo()
        assert "step_000000001 could not be written: [Errno 28] No space" in caplog.text
        checkpoints.save({"x": np.zeros(3)}, step=3)
        with pytest.raises(FileExistsError, match="step_000000003 exists"):
            checkpoints.save({"x": np.zeros(3)}, step=3)
    assert checkpoints.latest_step() == 3
    with pytest.raises(RuntimeError, match="are closed"):
        checkpoints.save({"x": np.zeros(3)}, step=4)


def test_two_writers_of_one_folder_are_refused_and_torn_saves_go(tmp_path):
    message = r'another process writes checkpoints into .*"process": [0-9]+'
    with CheckpointManager(tmp_path), pytest.raises(RuntimeError, match=message):
        CheckpointManager(tmp_path)
    torn = tmp_path / ".step_000000007.0badc0de-1-00000000-0.partial"
    torn.mkdir()
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(FileNotFoundError, match="has no checkpoint"):
        checkpoints.restore()
    assert not torn.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_to_keep": 0}, "max_to_keep must be at least 1"), ({"full_every": 0}, "full_every must be at least 1")],
)
def test_numbers_below_one_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path, **options)


def test_a_tree_needs_a_step_and_a_state_has_one(tmp_path, run):
    collection, _, _, states = run
    with CheckpointManager(tmp_path / "a") as checkpoints, pytest.raises(ValueError, match="a tree needs step"):
        checkpoints.save({"x": np.zeros(1)})
    with CheckpointManager(tmp_path / "b", collection) as checkpoints, pytest.raises(ValueError, match="its own step"):
        checkpoints.save(states[0], step=3)
