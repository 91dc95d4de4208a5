"""Dumps come back on any number of devices, with optimizer state and step; or not at all."""

import functools
import tracemalloc

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint, sok
from tests.sok.training import context

DIM = 3


def model(num_devices, *, use_hashtable=True, rows=16, **options):
    context(num_devices)
    options = {"optimizer": sok.optimizers.LazyAdam(0.1)} | options
    return sok.All2AllDenseEmbedding(rows, DIM, 1, 1, use_hashtable=use_hashtable, **options)


def train(layer, steps):
    for step in steps:
        keys = (np.arange(8) * (step + 1) % 13).reshape(8, 1, 1)
        out, backward = layer.vjp(keys)
        backward(np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape))


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("use_hashtable", [True, False])
def test_training_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path, use_hashtable):
    straight = model(2, use_hashtable=use_hashtable)
    train(straight, range(2))
    sok.dump(tmp_path / "dump", straight)
    train(straight, range(2, 4))
    expected = sok.export_rows(straight.variable)
    restored = model(1, use_hashtable=use_hashtable, rows=32)
    train(restored, [7])  # what it learned before does not matter
    sok.load(tmp_path / "dump", restored)
    assert int(restored.variable.get_value().step) == 2
    train(restored, range(2, 4))
    found = sok.export_rows(restored.variable)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_a_row_is_assigned_where_it_lies_and_a_dump_gathers_block_by_block(
    tmp_path, monkeypatch, use_hashtable
):
    monkeypatch.setattr(checkpoint.arrays, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(checkpoint.arrays, "_BYTES_IN_FLIGHT", 1 << 20)
    dim, options = (
        256,
        {"rows_per_device": 1 << 13, "use_hashtable": use_hashtable, "initializer": "ones"},
    )
    options["context"] = context(2)
    variable = sok.embedding_variable("t", dim, **options)
    keys = np.arange(1 << 14)
    if use_hashtable:
        sok.assign_rows(variable, {"keys": keys, "values": np.ones((keys.size, dim), np.float32)})
    params, slots = (part["t"] for part in variable.get_value()[:2])
    table_bytes = params.rows.nbytes + sum(slot.nbytes for slot in slots)
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
    saved = checkpoint.load(tmp_path / "dump").tree["t"]
    expected = sok.export_rows(variable)
    assert (
        expected["values"][5].tolist() == [7] * dim and (expected["values"][keys != 5] == 1).all()
    )
    for name, array in expected.items():
        assert_array_equal(saved[name], array, err_msg=name)


def grows(num_devices=1, **options):
    options |= {
        "rows_per_device": 4 // num_devices,
        "optimizer": rs.optimizers.SGD(1.0),
        "initializer": "ones",
    }
    options["context"] = context(num_devices)
    return sok.embedding_variable("t", 2, when_full="grow", **options)


def train_keys(variable, keys):
    output, backward = sok.group_embedding_lookup_vjp(
        [variable], [[[key] for key in keys]], ["sum"]
    )
    backward([jnp.ones_like(output[0])])


def test_a_table_that_grows_takes_rows_and_waiting_keys_of_a_larger_one(tmp_path):
    num_devices = 2
    variable = grows(num_devices)
    train_keys(variable, [1, 2, 3, 4])
    sok.assign_rows(variable, {"keys": np.arange(10, 13), "values": np.full((3, 2), 5, np.float32)})
    assert sok.export_rows(variable)["keys"].tolist() == [1, 2, 3, 4, 10, 11, 12]
    train_keys(variable, [20, 21, 22, 23, 24, 25])
    sok.dump(tmp_path / "a", [variable], variable.table.spec.optimizer)  # by position, as published
    again = grows(num_devices)
    sok.load(tmp_path / "a", [again])
    for name, array in sok.export_rows(variable).items():
        assert_array_equal(sok.export_rows(again)[name], array, err_msg=name)

    waits = grows(num_devices, admission_count=1, admission_capacity=10)
    train_keys(waits, [*range(1, 21)])
    train_keys(waits, [1, 2])  # a second time
    sok.dump(tmp_path / "c", [waits])
    again = grows(num_devices, admission_count=1, admission_capacity=10)
    sok.load(tmp_path / "c", [again])
    rows = sok.export_rows(again)
    assert len(rows["waiting_keys"]) + len(rows["keys"]) == 20
    for name, array in sok.export_rows(waits).items():
        assert_array_equal(rows[name], array, err_msg=name)


def test_places_of_keys_that_wait_do_not_make_a_table_grow():
    waits = grows(admission_count=1, admission_capacity=20)
    sok.assign_rows(
        waits,
        {"keys": [1], "values": np.ones((1, 2), np.float32), "waiting_keys": np.arange(2, 20)},
    )
    assert waits.get_value().tables["t"].rows.shape[0] == 4


def test_a_table_that_admits_every_key_says_which_counts_it_drops():
    rows = {"keys": [5], "values": np.ones((1, 2), np.float32), "waiting_keys": [8, 9]}
    with pytest.warns(UserWarning, match="'t' admits every key at once: the counts of 2 keys"):
        sok.assign_rows(variable := grows(), rows)
    assert sok.export_rows(variable)["keys"].tolist() == [5]


def test_a_dump_that_does_not_fit_is_refused(tmp_path):
    empty = model(2)
    sok.dump(tmp_path / "dump", empty)
    with pytest.raises(
        ValueError, match=r"differs from .* in .'optimizer': .'tf_lazy_adam', 'adagrad'"
    ):
        sok.load(tmp_path / "dump", model(2, optimizer=None))
    small = model(2, rows=1)
    _, backward = small.vjp(np.asarray([[[3]], [[8]]]))
    backward(np.zeros((2, 1, 1, DIM), np.float32))
    full = model(2)
    train(full, [1])
    sok.dump(tmp_path / "full", full)
    with pytest.raises(ValueError, match="free rows"):
        sok.load(tmp_path / "full", small)
    assert small.variable.num_rows == 2  # what it had learned is still there


def by_key(layer):
    rows = sok.export_rows(layer.variable)
    return {int(key): rows["values"][place] for place, key in enumerate(rows["keys"])}


@pytest.mark.slow_rows("4-4")
@pytest.mark.parametrize(("devices", "rows"), [(1, 18), (4, 5), (4, 4)])
def test_a_table_without_hash_table_moves_to_any_number_of_devices(tmp_path, devices, rows):
    """Keys below 13 were trained: 2 devices of 8 rows have 16 in all, the others 18, 20 and 16."""
    there = model(2, use_hashtable=False, rows=8)
    train(there, range(2))
    sok.dump(tmp_path / "dump", there)
    here = model(devices, use_hashtable=False, rows=rows)
    fresh = by_key(here)
    train(here, [3])
    sok.load(tmp_path / "dump", here)
    found, expected = by_key(here), by_key(there)
    for key in range(rows * devices):
        assert_array_equal(found[key], expected.get(key, fresh[key]), err_msg=str(key))
    for layer in (here, there):
        train(layer, [5])
    for key in range(13):
        assert_allclose(by_key(here)[key], by_key(there)[key], rtol=1e-6)


ADAM, KEYS = optax.adam(0.1), np.asarray([[[3]], [[4]]])
RULES = {
    "adam": rs.from_optax(ADAM),
    "adam of another rate": rs.from_optax(optax.adam(0.2), learning_rate=0.5),
    "nadam": rs.from_optax(optax.nadam(0.1)),
    "momentum": rs.from_optax(optax.sgd(0.1, 0.9)),
    "nesterov": rs.from_optax(optax.sgd(0.1, 0.9, nesterov=True)),
    "rmsprop": rs.from_optax(optax.rmsprop(0.1)),
    "own": rs.optimizers.Custom(0.1, lambda g, w, m, lr: (w - lr * m, m + g), (0.0,)),
    "other": rs.optimizers.Custom(
        0.1, lambda g, w, m, lr: (w - lr * jnp.sqrt(m), m + g * g), (0.0,)
    ),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """By rule: a dump of a table that was trained under it, and what the table reads then."""

    @functools.cache
    def dumped(rule):
        layer, folder = model(1, optimizer=RULES[rule]), tmp_path_factory.mktemp("dumps") / "dump"
        layer(KEYS, training=True)
        sok.dump(folder, layer)
        return folder, np.asarray(layer(KEYS))

    return dumped


@pytest.mark.parametrize(
    ("then", "now"),
    [("adam", "nadam"), ("momentum", "nesterov"), ("momentum", "rmsprop"), ("own", "other")],
)
def test_state_of_another_rule_is_refused(dumps, then, now):
    with pytest.raises(ValueError, match=r"differs from .* in .'rule': .* assign_rows"):
        sok.load(dumps(then)[0], model(1, optimizer=RULES[now]))


def test_state_of_the_same_rule_is_taken_whatever_its_rate(dumps):
    (folder, expected), here = dumps("adam"), model(1, optimizer=RULES["adam of another rate"])
    sok.load(folder, here)
    assert_array_equal(here(KEYS), expected)


def test_numbers_are_not_rounded_by_a_load_nor_lost_by_an_import(tmp_path):
    wide, narrow = model(1), model(1, dtype="bfloat16")
    for layer, name in ((wide, "wide"), (narrow, "narrow")):
        layer(KEYS, training=True)
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
    there, here = model(**options), model(**options | changes)
    checkpoint.save(tmp_path / "state", there.variable.get_value())
    checkpoint.load(tmp_path / "state", like=model(**options).variable.get_value())
    with pytest.raises(ValueError, match=r"optimizer|storage|rows"):
        checkpoint.load(tmp_path / "state", like=here.variable.get_value())
