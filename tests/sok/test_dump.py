"""Dumps are restored on any number of devices with optimizer state and step, or refused."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint, sok
from tests.sok.training import by_key, context, step, step_of
from tests.world import assert_close, assert_same

DIM = 3


def model(num_devices, *, use_hashtable=True, rows=16, **options):
    context(num_devices)
    options = {"optimizer": sok.optimizers.LazyAdam(0.1)} | options
    return sok.All2AllDenseEmbedding(rows, DIM, 1, 1, use_hashtable=use_hashtable, **options)


def train(layer, numbers):
    for number in numbers:
        keys = (np.arange(8) * (number + 1) % 13).reshape(8, 1, 1)
        out, backward = layer.vjp(keys)
        backward(np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape))


def test_training_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path):
    straight = model(2)
    train(straight, range(2))
    sok.dump(tmp_path / "dump", straight)
    train(straight, range(2, 4))
    restored = model(1, rows=32)
    # Loading replaces all earlier training.
    train(restored, [7])
    sok.load(tmp_path / "dump", restored)
    assert int(restored.variable.get_value().step) == 2
    train(restored, range(2, 4))
    assert_close(sok.export_rows(restored.variable), sok.export_rows(straight.variable), rtol=1e-6)


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_row_is_assigned_where_it_lies_and_a_dump_gathers_block_by_block(
    tmp_path, monkeypatch, use_hashtable
):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(checkpoint.arrays, "_BYTES_IN_FLIGHT", 1 << 20)
    dim = 256
    variable = sok.embedding_variable(
        "t",
        dim,
        rows_per_device=1 << 13,
        use_hashtable=use_hashtable,
        initializer="ones",
        context=context(2),
    )
    keys = np.arange(1 << 14)
    if use_hashtable:
        sok.assign_rows(variable, {"keys": keys, "values": np.ones((keys.size, dim), np.float32)})
    state = variable.get_value()
    table_bytes = sum(
        leaf.nbytes for leaf in jax.tree.leaves((state.tables["t"].rows, state.slots))
    )
    calls = [
        (lambda: sok.assign_rows(variable, {"keys": [5], "values": np.full((1, dim), 7)}), 0.15),
        (lambda: sok.dump(tmp_path / "dump", [variable]), 0.4),
        (lambda: sok.load(tmp_path / "dump", [variable]), 0.4),
    ]
    for call, share in calls:
        tracemalloc.start()
        call()
        assert tracemalloc.get_traced_memory()[1] < share * table_bytes
        tracemalloc.stop()
    rows = sok.export_rows(variable)
    expected = np.ones((keys.size, dim))
    expected[5] = 7
    assert_array_equal(rows["values"], expected)
    assert_same(checkpoint.load(tmp_path / "dump").tree["t"], rows)


def grows(num_devices=2, **options):
    return sok.embedding_variable(
        "t",
        2,
        rows_per_device=4 // num_devices,
        when_full="grow",
        optimizer=rs.optimizers.SGD(1.0),
        initializer="ones",
        context=context(num_devices),
        **options,
    )


@pytest.mark.slow
def test_a_table_that_grows_takes_rows_and_waiting_keys_of_a_larger_one(tmp_path):
    variable = grows()
    step_of(variable, np.array([[1], [2], [3], [4]]), 1.0)
    sok.assign_rows(variable, {"keys": np.arange(10, 13), "values": np.full((3, 2), 5, np.float32)})
    assert list(by_key(variable)) == [1, 2, 3, 4, 10, 11, 12]
    step_of(variable, np.arange(20, 26)[:, None], 1.0)
    # The optimizer is a positional argument, as in published programs.
    sok.dump(tmp_path / "a", [variable], variable.table.spec.optimizer)
    other = grows()
    sok.load(tmp_path / "a", [other])
    assert_same(sok.export_rows(other), sok.export_rows(variable))

    waits, other = (grows(admission_count=1, admission_capacity=10) for _ in range(2))
    step_of(waits, np.arange(1, 21)[:, None], 1.0)
    # Keys 1 and 2 occur a second time.
    step_of(waits, np.array([[1], [2]]), 1.0)
    sok.dump(tmp_path / "c", [waits])
    sok.load(tmp_path / "c", [other])
    rows = sok.export_rows(other)
    assert len(rows["waiting_keys"]) == 18 and len(rows["keys"]) == 2
    assert_same(rows, sok.export_rows(waits))


def test_places_of_keys_that_wait_do_not_make_a_table_grow():
    waits = grows(1, admission_count=1, admission_capacity=20)
    rows = {"keys": [1], "values": np.ones((1, 2), np.float32), "waiting_keys": np.arange(2, 20)}
    sok.assign_rows(waits, rows)
    assert waits.get_value().tables["t"].rows.shape[0] == 4


def test_a_table_that_admits_every_key_says_which_counts_it_drops():
    variable = grows()
    rows = {"keys": [5], "values": np.ones((1, 2), np.float32), "waiting_keys": [8, 9]}
    with pytest.warns(UserWarning, match="'t' admits every key at once: the counts of 2 keys"):
        sok.assign_rows(variable, rows)
    assert list(by_key(variable)) == [5]


def test_a_dump_that_does_not_fit_is_refused(tmp_path):
    small = model(2, rows=1)
    step(small.vjp, np.asarray([[[3]], [[8]]]))
    full = model(2)
    train(full, [1])
    sok.dump(tmp_path / "full", full)
    with pytest.raises(ValueError, match="free rows"):
        sok.load(tmp_path / "full", small)
    # The small table still has its rows.
    assert small.variable.num_rows == 2


@pytest.mark.slow_rows("4-4")
@pytest.mark.parametrize(("devices", "rows"), [(1, 18), (4, 5), (4, 4)])
def test_a_table_without_hash_table_moves_to_any_number_of_devices(tmp_path, devices, rows):
    """Keys below 13 are trained. 2 devices with 8 rows have 16 rows, the others 18, 20 and 16."""
    there = model(2, use_hashtable=False, rows=8)
    train(there, range(2))
    sok.dump(tmp_path / "dump", there)
    here = model(devices, use_hashtable=False, rows=rows)
    fresh = by_key(here.variable)
    train(here, [3])
    sok.load(tmp_path / "dump", here)
    assert_same(by_key(here.variable), fresh | by_key(there.variable))
    train(here, [5])
    train(there, [5])
    expected = by_key(there.variable)
    actual = by_key(here.variable)
    for key in range(13):
        assert_allclose(actual[key], expected[key], rtol=1e-6)


KEYS = np.asarray([[[3]], [[4]]])
RULES = {
    "adagrad": None,
    "adam": rs.from_optax(optax.adam(0.1)),
    "nadam": rs.from_optax(optax.nadam(0.1)),
    "own": rs.optimizers.Custom(0.1, lambda g, w, m, lr: (w - lr * m, m + g), (0.0,)),
    "other": rs.optimizers.Custom(
        0.1, lambda g, w, m, lr: (w - lr * jnp.sqrt(m), m + g * g), (0.0,)
    ),
}


@pytest.mark.parametrize(
    ("then", "now", "field"),
    [("adam", "nadam", "rule"), ("own", "other", "rule"), ("own", "adagrad", "optimizer")],
)
def test_state_of_another_rule_is_refused(tmp_path, then, now, field):
    sok.dump(tmp_path / "dump", model(1, optimizer=RULES[then]))
    with pytest.raises(ValueError, match=rf"differs from .* in .'{field}': .* assign_rows"):
        sok.load(tmp_path / "dump", model(1, optimizer=RULES[now]))


def test_numbers_are_not_rounded_by_a_load_nor_lost_by_an_import(tmp_path):
    wide = model(1)
    # Dumps do not depend on the learning rate.
    narrow = model(1, dtype="bfloat16", optimizer=sok.optimizers.LazyAdam(0.2))
    for layer, name in ((wide, "wide"), (narrow, "narrow")):
        step(layer.vjp, KEYS)
        sok.dump(tmp_path / name, layer)
    with pytest.raises(ValueError, match=r"'dtype': .'float32', 'bfloat16'"):
        sok.load(tmp_path / "wide", narrow)
    sok.load(tmp_path / "narrow", wide)
    assert_array_equal(wide(KEYS), narrow(KEYS))


@pytest.mark.parametrize(
    "changes", [{"optimizer": rs.from_optax(optax.adamax(0.1))}, {"num_devices": 1, "rows": 32}]
)
def test_a_checkpoint_of_a_models_state_does_not_become_the_state_of_another(tmp_path, changes):
    options = {"num_devices": 2, "rows": 16, "use_hashtable": False, "optimizer": RULES["adam"]}
    state = model(**options).variable.get_value()
    other = model(**options | changes).variable.get_value()
    checkpoint.save(tmp_path / "state", state)
    checkpoint.load(tmp_path / "state", like=state)
    with pytest.raises(ValueError, match=r"optimizer|storage|rows"):
        checkpoint.load(tmp_path / "state", like=other)
