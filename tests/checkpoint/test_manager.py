"""A manager saves and restores a run, also after damaged files, failed saves and full disks."""

import errno
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.checkpoint import CheckpointManager, CorruptCheckpointError, files, manager
from tests.world import assert_same, made_mesh


@pytest.fixture(scope="module")
def run():
    """A collection, a step, a batch, and the states after two steps. Each step reads new keys."""
    rule = rs.optimizers.Adagrad(0.1)
    dense = rs.TableSpec("word", 64, 4, optimizer=rule)
    hashed = rs.TableSpec("user", 64, 4, optimizer=rule, storage=rs.Hashed())
    features = [rs.FeatureSpec(table.name, table) for table in (dense, hashed)]
    collection = rs.EmbeddingCollection(features, mesh=made_mesh(2))

    def step(state, batch):
        return collection.update(state, batch, collection.lookup(state, batch))

    rng, state, states = np.random.default_rng(0), collection.init(jax.random.key(0)), []
    for _ in range(2):
        words, users = rng.integers(0, 64, (4, 2)), rng.integers(0, 2**40, (4, 2))
        batch = collection.prepare({"word": words, "user": users})
        state = jax.jit(step)(state, batch)
        states.append(state)
    return collection, step, batch, states


def assert_same_rows(collection, actual, expected):
    assert_same(collection.tables(actual), collection.tables(expected))
    assert_same(collection.slots(actual), collection.slots(expected))
    assert int(actual.step) == int(expected.step)


def steps_of(checkpoints):
    return [int(path.name[5:]) for path in checkpoints.paths()]


def x(step):
    return {"x": np.full(4, step)}


def save(checkpoints, *steps):
    """Saves small checkpoints of these steps, and waits for them."""
    for step in steps:
        checkpoints.save(x(step), step=step)
    checkpoints.wait_until_finished()


def test_what_was_given_is_written_though_training_goes_on_in_its_memory(
    tmp_path, run, monkeypatch
):
    collection, step, batch, states = run
    may_write = threading.Event()

    def held_up(*args, **options):
        may_write.wait()
        return files.write_folder(*args, **options)

    monkeypatch.setattr(manager, "write_folder", held_up)
    state, host = jax.tree.map(jnp.copy, states[0]), np.arange(4.0)
    with CheckpointManager(tmp_path, collection) as checkpoints:
        checkpoints.save(state, others={"host": host}, metadata={"input": 7})
        host[:] = 0
        state = jax.jit(step, donate_argnums=0)(state, batch)
        assert checkpoints.paths() == []
        may_write.set()
        actual, others = checkpoints.restore(others={"host": host})
        assert checkpoints.metadata(int(actual.step)) == {"input": 7}
    assert_same_rows(collection, actual, states[0])
    assert others["host"].tolist() == [0, 1, 2, 3] and int(state.step) == 2


def test_old_ones_go_but_for_those_of_a_period(tmp_path):
    def steps_after(folder, **options):
        with CheckpointManager(folder, **options) as checkpoints:
            save(checkpoints, *range(1, 8))
        assert not list(folder.glob(".*.partial"))
        return steps_of(checkpoints)

    assert steps_after(tmp_path / "a", max_to_keep=2) == [6, 7]
    assert steps_after(tmp_path / "b", max_to_keep=1, keep_period=3) == [3, 6, 7]


def damage(path):
    file = min((path / "0000").glob("c.*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def lose_the_manifest(path):
    (path / "manifest.json").unlink()


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        save(checkpoints, 0, 1, 2, 3)
        damage(checkpoints.paths()[3])
        damage(checkpoints.paths()[2])
        with pytest.warns(
            UserWarning, match="step_00000000[23] is passed over: .*is not what was written"
        ) as warned:
            assert checkpoints.restore(x(0)).tree["x"].tolist() == [1] * 4
        assert len(warned) == 2
        with pytest.raises(CorruptCheckpointError, match="is not what was written"):
            checkpoints.restore(x(0), step=3)


def save_three_and_harm_the_last(folder, harm):
    with CheckpointManager(folder) as checkpoints:
        save(checkpoints, 10, 20, 30)
    harm(checkpoints.paths()[-1])


@pytest.mark.parametrize("harm", [damage, lose_the_manifest])
def test_a_run_that_goes_back_behind_a_damaged_checkpoint_saves_that_step_again(
    tmp_path, caplog, harm
):
    save_three_and_harm_the_last(tmp_path, harm)
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="passed over"):
            assert checkpoints.restore(x(0)).step == 20
        with pytest.raises(FileExistsError, match="step_000000020 exists"):
            checkpoints.save(x(20), step=20)
        checkpoints.save(x(31), step=30)
        assert "step_000000030 is damaged and is replaced" in caplog.text
        assert checkpoints.restore(x(0)).tree["x"].tolist() == [31] * 4
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("harm", [damage, lose_the_manifest])
def test_a_damaged_checkpoint_goes_before_a_good_one(tmp_path, harm):
    save_three_and_harm_the_last(tmp_path, harm)
    with CheckpointManager(tmp_path, max_to_keep=3) as checkpoints:
        with pytest.warns(UserWarning, match="step_000000030 is passed over"):
            assert checkpoints.restore(x(0)).step == 20
        for step, kept in ((25, [10, 20, 25]), (30, [20, 25, 30]), (35, [25, 30, 35])):
            save(checkpoints, step)
            assert steps_of(checkpoints) == kept


def test_those_written_last_are_kept_and_not_those_of_the_largest_step(tmp_path):
    with CheckpointManager(tmp_path, max_to_keep=1, keep_period=20) as checkpoints:
        save(checkpoints, 20, 40, 60)
        for step in (21, 22):
            save(checkpoints, step)
            assert steps_of(checkpoints) == [20, step, 40, 60]


def test_the_oldest_go_first(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as checkpoints:
        save(checkpoints, *range(1, 9))
    removed = []
    monkeypatch.setattr(manager, "_remove", removed.append)
    with CheckpointManager(tmp_path, max_to_keep=2) as checkpoints:
        save(checkpoints, 9)
    assert removed == [tmp_path / f"step_{step:09d}" for step in range(1, 8)]


def test_a_folder_is_read_beside_its_writer_and_where_nothing_can_be_written(tmp_path, run):
    collection, _, _, states = run
    with CheckpointManager(tmp_path / "run", collection) as checkpoints:
        checkpoints.save(states[0])
        checkpoints.wait_until_finished()
        with CheckpointManager(tmp_path / "run", collection, read_only=True) as reader:
            assert_same_rows(collection, reader.restore(), states[0])
            assert reader.paths() == checkpoints.paths() and reader.metadata(1) == {}
        checkpoints.save(states[1])
    before = sorted(tmp_path.rglob("*"))
    reader = CheckpointManager(tmp_path / "nowhere", read_only=True)
    with reader, pytest.raises(FileNotFoundError, match="has no checkpoint"):
        reader.restore()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_reader_goes_on_to_what_its_writer_saved_meanwhile(tmp_path, monkeypatch):
    with (
        CheckpointManager(tmp_path, max_to_keep=1) as checkpoints,
        CheckpointManager(tmp_path, read_only=True) as reader,
    ):
        save(checkpoints, 1)
        load = manager.load

        def overtaken(path, like):
            monkeypatch.undo()
            save(checkpoints, 2)
            return load(path, like)

        monkeypatch.setattr(manager, "load", overtaken)
        with pytest.warns(UserWarning, match="step_000000001 is passed over"):
            assert reader.restore(x(0)).step == 2


def test_a_save_that_failed_is_heard_of_and_the_next_one_may_succeed(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointManager(tmp_path) as checkpoints:
        monkeypatch.setattr(manager, "write_folder", full)
        checkpoints.save(x(1), step=1)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(x(2), step=2)
        monkeypatch.undo()
        assert "step_000000001 could not be written: [Errno 28] No space" in caplog.text
        save(checkpoints, 3)
        with pytest.raises(FileExistsError, match="step_000000003 exists"):
            save(checkpoints, 3)
    assert steps_of(checkpoints) == [3]


def test_two_writers_of_one_folder_are_refused_and_torn_saves_go(tmp_path):
    message = r'another process writes checkpoints into .*"process": [0-9]+'
    with CheckpointManager(tmp_path), pytest.raises(RuntimeError, match=message):
        CheckpointManager(tmp_path)
    torn = tmp_path / ".step_000000007.0badc0de00000000.partial"
    torn.mkdir()
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(FileNotFoundError, match="has no checkpoint"),
    ):
        checkpoints.restore()
    assert not torn.exists()
