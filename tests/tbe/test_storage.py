"""Folders of tables are continued from their last flush to the bit, or refused by name."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from rsembed import tbe as rt
from tests.tbe.oracle import assert_same_bits, make, tables_of, train

Optim, CACHED = rt.OptimType, rt.EmbeddingLocation.MANAGED_CACHING
SPECS = ((90, 4), (60, 4), (50, 6))
OFFSETS = np.array([0, 30, 60, 90])


def ids(seed):
    return np.random.default_rng(seed).integers(0, 50, 90)


def stored(folder, specs=SPECS, *, uniform=None, **arguments):
    arguments = {"optimizer": Optim.ADAM, "cache_sets": 1, **arguments}
    return make(specs, location=CACHED, uniform=uniform, storage_folder=folder, **arguments)


def trained(folder, **arguments):
    module = stored(folder, uniform=(-1, 1), **arguments)
    for seed in range(3):
        train(module, ids(seed), OFFSETS)
    module.flush()
    return module


def test_adam_goes_on_from_its_step_with_the_bits_of_a_module_that_never_stopped(tmp_path):
    plain = make(SPECS, optimizer=Optim.ADAM)
    for seed in range(3):
        train(plain, ids(seed), OFFSETS)
    trained(tmp_path)
    module = stored(tmp_path, cache_sets=2)
    assert int(module.step) == 3
    assert_same_bits(plain, module)
    for seed in range(3, 6):
        train(plain, ids(seed), OFFSETS)
        train(module, ids(seed), OFFSETS)
    assert_same_bits(plain, module)


OTHERS = {
    "order": ({"specs": ((60, 4), (90, 4), (50, 6))}, "table_0/rows is 90, expected 60"),
    "names": ({"table_names": ["table_1", "table_0", "table_2"]}, "table_0/first_row is 0, expected 90"),
    "rows": ({"specs": ((80, 4), (70, 4), (50, 6))}, "table_0/rows is 90, expected 80"),
    "dim": ({"specs": ((90, 4), (60, 4), (50, 8))}, "table_2/dim is 6, expected 8"),
    "optimizer": ({"optimizer": Optim.LAMB}, 'table_0/optimizer is "ADAM", expected "LAMB"'),
    "precision": ({"weights_precision": rt.SparseType.BF16}, 'table_0/dtype is "float32", expected "bfloat16"'),
    "states": (
        {"optimizer_state_dtypes": {"momentum1": rt.SparseType.BF16}},
        r'table_0/state_dtypes is \["float32", "float32"\], expected \["bfloat16", "float32"\]',
    ),
    "grouping": ({"learning_rate": [0.1, 0.2, 0.1]}, "table_1/first_row is 90, expected 0"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_files_of_another_module_are_refused_by_name(tmp_path, other):
    trained(tmp_path)
    arguments, message = OTHERS[other]
    with pytest.raises(ValueError, match=f"belong to another module: .*{message}.*Construct the module as it was"):
        stored(tmp_path, **arguments)
    stored(tmp_path)


def test_every_flipped_byte_and_missing_file_is_found_by_name(tmp_path):
    trained(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 7  # two groups of weights and two states, and the record
    for number, file in enumerate(files):
        content = file.read_bytes()
        place = 17 * (number + 1) % len(content)
        for damaged in (
            content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :],
            content[: len(content) // 2],
        ):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{file.name}.*(checksum|damaged|bytes)"):
                stored(tmp_path)
        file.unlink()
        with pytest.raises(ValueError, match=rf"{file.name}"):
            stored(tmp_path)
        file.write_bytes(content)
    assert int(stored(tmp_path).step) == 3


def test_a_record_with_another_step_is_refused(tmp_path):
    trained(tmp_path)
    record = tmp_path / "tables.json"
    record.write_text(record.read_text().replace('"step": 3', '"step": 0'))
    with pytest.raises(ValueError, match=r"tables.json is damaged"):
        stored(tmp_path)


AFTERWARDS = {
    "train": lambda module: train(module, ids(4), OFFSETS),
    "uniform": lambda module: module.init_embedding_weights_uniform(0, 1),
    "load": lambda module: module.load_state_dict(module.state_dict() | {"table_0.weight": np.ones((90, 4))}),
    "reset": lambda module: module.reset_embedding_weight_momentum(np.array([1]), np.array([0, 1]), np.array([0])),
}


@pytest.mark.parametrize("change", AFTERWARDS)
def test_files_that_were_changed_after_the_last_flush_are_refused_and_a_flush_makes_them_whole(tmp_path, change):
    module = trained(tmp_path)
    AFTERWARDS[change](module)
    module.split_embedding_weights()  # reading brings rows to the files, and declares nothing
    with pytest.raises(
        ValueError, match=r"not whole: .* the last flush\(\), which was at step 3, and its process still"
    ):
        stored(tmp_path)
    module.flush()
    assert_same_bits(module, stored(tmp_path))


@pytest.mark.parametrize("tear", [0, 7])
def test_a_killed_process_leaves_a_folder_that_goes_back_to_its_last_flush(tmp_path, caplog, tear):
    trained(tmp_path / "twin")
    program = f"""
        import os, signal
        import numpy as np
        from tests.tbe.test_storage import OFFSETS, ids, train, trained
        module = trained({str(tmp_path / "run")!r})
        for seed in range(3, 9):
            train(module, ids(seed), OFFSETS)
        module.split_embedding_weights()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, env=dict(os.environ))
    assert child.returncode == -signal.SIGKILL
    (log,) = (tmp_path / "run").glob("*.undo")
    assert log.stat().st_size > 1000
    with log.open("ab") as file:  # a record that the process did not end belongs to rows that it did not change
        file.write(log.read_bytes()[:tear])
    module = stored(tmp_path / "run")
    assert "went back to step 3, its last flush()" in caplog.text and not log.exists()
    assert_same_bits(module, stored(tmp_path / "twin"))
    train(module, ids(3), OFFSETS)
    module.flush()
    assert int(stored(tmp_path / "run").step) == 4 and not list((tmp_path / "run").glob("*.undo"))


def test_a_log_that_lacks_something_is_found_by_checksums_and_without_one_the_folder_is_refused(tmp_path):
    module = trained(tmp_path)
    train(module, ids(4), OFFSETS)
    module.split_embedding_weights()
    del module
    gc.collect()
    (log,) = tmp_path.glob("*.undo")
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="was changed or damaged since it was written"):
        stored(tmp_path)
    for left in tmp_path.glob("*.undo"):
        left.unlink()
    record = tmp_path / "tables.json"
    assert json.loads(record.read_text())["record"]["is_whole"]


def test_a_full_disk_stops_a_step_before_rows_change(tmp_path, monkeypatch):
    module = trained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("rsembed.caching.undo.os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            train(module, ids(4), OFFSETS), module.split_embedding_weights()
    del module
    gc.collect()
    assert_same_bits(stored(tmp_path), stored(tmp_path))
    assert int(stored(tmp_path).step) == 3


def test_evaluation_leaves_the_files_whole(tmp_path):
    wanted = tables_of(trained(tmp_path))
    module = stored(tmp_path)
    for seed in range(5):
        module(ids(seed), OFFSETS)
    module.reset_cache_states()
    again = stored(tmp_path)
    for mine, yours in zip(tables_of(again)[0], wanted[0], strict=True):
        np.testing.assert_array_equal(mine, yours)


def test_of_two_modules_in_one_folder_the_second_that_writes_is_stopped(tmp_path):
    first = trained(tmp_path)
    second = stored(tmp_path)
    train(first, ids(4), OFFSETS)
    with pytest.raises(RuntimeError, match="another module has written into"):
        train(second, ids(5), OFFSETS), second.flush()
    first.flush()
    with pytest.raises(RuntimeError):
        second.flush()
    assert_same_bits(first, stored(tmp_path))


def test_rows_without_a_record_are_refused(tmp_path):
    (tmp_path / "group0_weights.bin").write_bytes(bytes(90 * 4 * 4))
    with pytest.raises(ValueError, match=r"has \['group0_weights.bin'\], but no tables.json"):
        stored(tmp_path)


def test_a_step_without_a_row_is_kept_too(tmp_path):
    module = trained(tmp_path)
    train(module, np.zeros(0, np.int64), np.zeros(4, np.int64))
    module.flush()
    assert int(stored(tmp_path).step) == 4


def test_tables_on_the_device_begin_anew_with_a_word(tmp_path):
    places = [rt.EmbeddingLocation.DEVICE, CACHED]
    specs = [(40, 2, place, rt.ComputeDevice.CPU) for place in places]
    rt.TableBatchedEmbeddingBags(specs, storage_folder=tmp_path)
    with pytest.warns(UserWarning, match=r"tables \['table_0'\] begin anew"):
        rt.TableBatchedEmbeddingBags(specs, storage_folder=tmp_path)


def test_the_record_is_readable(tmp_path):
    trained(tmp_path)
    record = json.loads((tmp_path / "tables.json").read_text())["record"]
    assert (record["is_whole"], record["step"], record["tables"]["table_1"]["rows"]) == (True, 3, 60)
