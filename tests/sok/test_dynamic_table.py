"""One shard does what its model in dicts does, starts rows from their keys alone, and stays where it is in memory."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rsembed import Hashed, TableSpec, sok
from rsembed.homes import hashed_rows, row_map
from rsembed.initial_values import table_key
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.keys import Keys, join_keys, split_keys
from rsembed.optimizers import AdagradOptimizerSpec, SGDOptimizerSpec
from rsembed.sok.named_initializers import uniform_initializer
from tests.sok.model import Table

CASES = json.loads((Path(__file__).parent.parent / "data" / "sok_cases.json").read_text())
DIM, BATCH, CAPACITY = 2, 6, 8
SEED = jax.random.key(3)
PLAIN = TableSpec(
    name="t",
    vocabulary_size=CAPACITY,
    embedding_dim=DIM,
    initializer=uniform_initializer,
    optimizer=SGDOptimizerSpec(0.5),
    storage=Hashed(),
)


def kept(table, *, rows=CAPACITY, optimizer=PLAIN.optimizer, **policies):
    """The same table, kept otherwise."""
    return dataclasses.replace(table, vocabulary_size=rows, optimizer=optimizer, storage=Hashed(**policies))


LRU = kept(PLAIN, when_full="evict", optimizer=AdagradOptimizerSpec(0.5))
LFU = kept(PLAIN, when_full="evict", eviction="lfu", admission_count=1, admission_capacity=3)
TABLES = {"full is full": PLAIN, "lru": LRU, "lfu with admission": LFU}
# Most programs here take longer to compile than to run; that of LRU is compiled as for users.
QUICK = {"xla_backend_optimization_level": 0}
POOL = [*range(9), 2**32, 2**63, 2**64 - 1]


@functools.cache
def programs(spec):
    """Training of one batch, and evaluation; compiled once per table and shape."""
    home = spec.storage

    def train(state, keys, step, gradients, occurrences):
        how = Step(spec.optimizer.get_hyperparameters(step), spec.optimizer, None, step)
        params, slots, rows = home.find(*state, keys, spec, occurrences=occurrences, step=how)
        vectors, segment = home.vectors(params, rows, spec), Segment(rows, None, None, "none")
        return home.step(params, slots, [segment], [gradients + vectors], spec, step=how), rows, vectors

    def evaluate(state, keys):
        return row_map.find(state[0].keys, keys), *home.read(state[0], keys, spec)

    options = None if spec is LRU else QUICK
    return jax.jit(train, compiler_options=options), jax.jit(evaluate, compiler_options=options)


def init(spec, key):
    return spec.storage.init(key, spec, shard=jnp.int32(0), num_shards=1)


@functools.cache
def fresh(spec):
    return jax.jit(functools.partial(init, spec))(SEED)


def padded(numbers, length=BATCH):
    keys = split_keys(np.array([0 if k is None else k for k in numbers] + [1] * (length - len(numbers)), np.uint64))
    is_key = [k is not None for k in numbers] + [False] * (length - len(numbers))
    return keys._replace(is_key=np.array(is_key))


def train(spec, table, numbers, step, gradients=None, occurrences=None):
    gradients = np.zeros((BATCH, DIM), np.float32) if gradients is None else gradients
    occurrences = np.ones(BATCH, np.int32) if occurrences is None else occurrences
    return programs(spec)[0](table, padded(numbers), np.int32(step), gradients, occurrences)


def first_row(key):
    """What a key starts from, by the documented formula."""
    own_key = jax.random.fold_in(jax.random.fold_in(table_key(SEED, "t"), key >> 32), key & 0xFFFFFFFF)
    return np.asarray(jax.random.uniform(own_key, (1, DIM), minval=-0.05, maxval=0.05))[0]


FIRST_ROWS = {}


def contents(rows):
    last_step = np.asarray(rows.last_step)
    used = np.flatnonzero(last_step >= 0)
    keys = join_keys(np.asarray(rows.high)[used], np.asarray(rows.low)[used]).tolist()
    numbers = zip(used.tolist(), last_step[used].tolist(), np.asarray(rows.counts)[used].tolist(), strict=True)
    return dict(zip(keys, numbers, strict=True))


def counters_of(table):
    lanes = {name: np.asarray(number)[0].tolist() for name, number in table[0].counters._asdict().items()}
    return {name: (high << 32) + low for name, (high, low) in lanes.items()}


batches = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "train", "evaluate"]),
        st.lists(st.sampled_from([None, *POOL]), max_size=BATCH),
    ),
    max_size=9,
)


@pytest.mark.parametrize("spec", TABLES.values(), ids=TABLES)
@settings(deadline=None, max_examples=15)
@given(sequence=batches, gradient_seed=st.integers(0, 2**31))
def test_any_sequence_of_batches_equals_the_model(spec, sequence, gradient_seed):
    generator = np.random.default_rng(gradient_seed)
    table, model, values, squares, unknown = fresh(spec), Table(spec), {}, {}, 0
    for step, (kind, numbers) in enumerate(sequence):
        keys = numbers + [None] * (BATCH - len(numbers))
        rows, new = model.translate(keys, step, kind == "train")
        for key in new:
            if key not in FIRST_ROWS:
                FIRST_ROWS[key] = first_row(key)
            values[key], squares[key] = FIRST_ROWS[key].astype(np.float64), np.full(DIM, 0.1)
        expected = [values[k] if row != NO_ROW else np.zeros(DIM) for k, row in zip(keys, rows, strict=True)]
        if kind == "evaluate":
            found, vectors, num_unknown = programs(spec)[1](table, padded(numbers))
            unknown += int(num_unknown)
        else:
            gradients = generator.normal(size=(BATCH, DIM)).astype(np.float32)
            table, found, vectors = train(spec, table, numbers, step, gradients)
            for key in {k for k, row in zip(keys, rows, strict=True) if row != NO_ROW}:
                total = sum(gradients[i] + values[key] for i in range(BATCH) if keys[i] == key)
                squares[key] = squares[key] + total**2
                scale = np.sqrt(squares[key]) if spec is LRU else 1.0
                values[key] = values[key] - 0.5 * total / scale
        assert found.tolist() == rows
        np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
        assert contents(table[0].keys) == model.rows.as_dict()
        assert spec.storage.admission_count == 0 or contents(table[0].waiting) == model.waiting.as_dict()
        assert counters_of(table) | {"unknown": unknown} == model.counters
        assert spec.vocabulary_size - int(table[0].keys.num_free[0]) == len(model.rows.as_dict())
    final = np.asarray(table[0].rows)
    for key, (row, _, _) in model.rows.as_dict().items():
        np.testing.assert_allclose(final[row], values[key], rtol=1e-5, atol=1e-6)


def variable(**changes):
    sok.Init(mesh=Mesh(np.asarray(jax.devices()[:1]), ("shard",)))
    return sok.embedding_variable(**{"name": "t", "embedding_dim": DIM, "rows_per_device": CAPACITY} | changes)


def test_first_values_depend_on_the_key_alone():
    numbers = [int(k) for k in np.random.default_rng(0).integers(0, 2**64, 300, dtype=np.uint64)]
    wide = kept(PLAIN, rows=512)

    def first_vectors(keys):
        nothing = np.zeros((320, DIM), np.float32), np.ones(320, np.int32)
        _, _, vectors = programs(wide)[0](fresh(wide), padded(keys, 320), np.int32(0), *nothing)
        return dict(zip(keys, map(bytes, np.asarray(vectors)), strict=False))

    all_at_once = first_vectors(numbers)
    assert all_at_once == first_vectors(numbers[::-1]) and len(all_at_once) == 300
    merged = {}
    for shard in range(3):
        table, own = fresh(LRU), [k for k in numbers[:20] if k % 3 == shard]
        for step, start in enumerate(range(0, len(own), BATCH)):
            table, _, vectors = train(LRU, table, own[start : start + BATCH], step)
            merged |= dict(zip(own[start : start + BATCH], map(bytes, np.asarray(vectors)), strict=False))
    assert merged == {key: all_at_once[key] for key in numbers[:20]}


def test_a_key_that_returns_after_eviction_starts_as_new():
    table, rows, first = train(LRU, fresh(LRU), [7, 7], 0, np.ones((BATCH, DIM), np.float32))
    changed = np.asarray(table[0].rows)[int(rows[0])]
    assert (changed != np.asarray(first)[0]).all()
    for step, numbers in enumerate([[1, 2, 3, 4], [5, 6, 8, 9]], start=1):  # the last one takes the row of 7
        table, _, _ = train(LRU, table, numbers, step)
    assert 7 not in contents(table[0].keys)
    table, rows, again = train(LRU, table, [7], 3)
    assert np.asarray(again)[0].tobytes() == np.asarray(first)[0].tobytes()
    assert contents(table[0].keys)[7] == (int(rows[0]), 3, 1)
    # Its accumulator is new, too: Adagrad starts from 0.1 and has seen one gradient, which was the row itself.
    accumulator = np.asarray(table[1][0])[int(rows[0])]
    np.testing.assert_allclose(accumulator, 0.1 + np.asarray(first)[0] ** 2, rtol=1e-6)


def test_rows_of_one_step_are_not_evicted_by_another_call_of_it():
    table, _, _ = train(LRU, fresh(LRU), [1, 2, 3, 4, 5], 4)
    table, rows, _ = train(LRU, table, [6, 7, 8, 9, 10], 4)
    assert rows.tolist()[:5] == [5, 6, 7, NO_ROW, NO_ROW]
    assert counters_of(table)["failed"] == 2 and set(contents(table[0].keys)) == set(range(1, 9))
    table, rows, _ = train(LRU, table, [6, 9, 10], 5)
    assert rows.tolist()[:3] == [5, 0, 1]


def test_eviction_by_age_counts_steps_without_training():
    table, model = fresh(LRU), Table(LRU)
    for step, numbers in enumerate([[1, 2], [2, 3], [3], [4]]):
        table, _, _ = train(LRU, table, numbers, step)
        model.translate(numbers, step)
    evict = jax.jit(functools.partial(hashed_rows.evict_older, steps_to_live=2))
    for step in (3, 5, 9):
        table = evict(table[0], step), table[1]
        model.evict_older(step, 2)
        assert contents(table[0].keys) == model.rows.as_dict()
        assert counters_of(table) == model.counters
    assert not contents(table[0].keys)
    with pytest.raises(ValueError, match="table 't': evict_older needs steps_to_live"):
        variable().evict_older()


def test_occurrences_may_stand_for_repeated_keys():
    table, rows, _ = train(LFU, fresh(LFU), [8, 9, 8], 0, occurrences=np.array([1, 1, 3, 9, 9, 9], np.int32))
    assert rows.tolist() == [0, NO_ROW, 0, NO_ROW, NO_ROW, NO_ROW]
    assert contents(table[0].keys) == {8: (0, 0, 4)} and contents(table[0].waiting)[9][2] == 1


def test_counts_stop_at_the_largest_number():
    most = row_map.MAX_COUNT
    sums = row_map.add_counts(jnp.asarray([1, most, most - 5], jnp.int32), jnp.asarray([2, most, 3], jnp.int32))
    assert sums.tolist() == [3, most, most - 2]


def test_a_grown_table_keeps_its_rows_and_has_new_ones_behind_them():
    small = kept(PLAIN, rows=3)
    table, _, _ = train(small, fresh(small), [1, 2, 3, 4], 0, np.ones((BATCH, DIM), np.float32))
    assert counters_of(table)["failed"] == 1 and contents(table[0].keys) == {1: (0, 0, 1), 2: (1, 0, 1), 3: (2, 0, 1)}
    table = jax.jit(hashed_rows.grow, static_argnums=(2, 3))(*table, small, CAPACITY)
    assert jax.tree.map(jnp.shape, table) == jax.tree.map(jnp.shape, fresh(PLAIN))
    table, rows, vectors = train(PLAIN, table, [4, 7, 1], 1)
    assert rows.tolist()[:3] == [3, 4, 0]
    np.testing.assert_allclose(vectors[2], 0.5 * first_row(1) - 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="has 8 rows and cannot grow to 7"):
        hashed_rows.grow(*table, PLAIN, 7)


@pytest.mark.parametrize("case", CASES["dynamic_insert"], ids=lambda case: case["name"])
def test_worked_cases_of_insertion(case):
    spec = kept(PLAIN, rows=case["capacity"])
    shards = [fresh(spec)] * case["num_shards"]
    for number, (numbers, expected) in enumerate(zip(case["batches"], case["expected"]["steps"], strict=True)):
        found = [None] * len(numbers)
        for shard, table in enumerate(shards):
            own = [k if k % case["num_shards"] == shard else None for k in numbers]
            if number in case.get("eval_batches", []):
                rows, vectors, _ = programs(spec)[1](table, padded(own))
                assert not np.asarray(vectors)[np.asarray(rows) == NO_ROW].any()
            else:
                shards[shard], rows, _ = train(spec, table, own, number)
            for place, key in enumerate(own):
                if key is not None:
                    row = int(rows[place])
                    found[place] = [shard, -1 if row == NO_ROW else row]
        assert found == expected["slots"]
        assert [spec.vocabulary_size - int(table[0].keys.num_free[0]) for table in shards] == expected["sizes"]
        assert sum(counters_of(table)["failed"] for table in shards) == len(expected["failed"])
    for table, expected in zip(shards, case["expected"].get("final", []), strict=False):
        assert {str(key): row for key, (row, _, _) in contents(table[0].keys).items()} == expected


def test_shards_of_a_mesh_are_tables_of_their_own():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("shard",))
    step = programs(LFU)[0].__wrapped__
    specs = (P("shard"), P("shard"), P(), P("shard"), P("shard"))
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("shard")), compiler_options=QUICK)
    start = functools.partial(init, LFU)
    together = jax.jit(jax.shard_map(start, mesh=mesh, in_specs=P(), out_specs=P("shard")))(SEED)
    alone = [fresh(LFU), fresh(LFU)]
    generator = np.random.default_rng(5)
    for number in range(4):
        numbers = [generator.choice(9, BATCH).tolist() for _ in alone]
        gradients = generator.normal(size=(2 * BATCH, DIM)).astype(np.float32)
        keys = jax.tree.map(lambda *lanes: np.concatenate(lanes), *map(padded, numbers))
        together, rows, vectors = sharded(together, keys, np.int32(number), gradients, np.ones(2 * BATCH, np.int32))
        for shard in range(2):
            own = slice(shard * BATCH, (shard + 1) * BATCH)
            alone[shard], own_rows, own_vectors = train(LFU, alone[shard], numbers[shard], number, gradients[own])
            np.testing.assert_array_equal(rows[own], own_rows)
            np.testing.assert_array_equal(vectors[own], own_vectors)
    leaves = [jax.tree.leaves((params._replace(key=None), slots)) for params, slots in (*alone, together)]
    for one, other, both in zip(*leaves, strict=True):
        np.testing.assert_array_equal(np.concatenate([one, other]), both)


def test_training_has_no_temporary_of_the_size_of_the_table():
    spec = dataclasses.replace(LRU, embedding_dim=64, vocabulary_size=2**18)
    table = jax.eval_shape(lambda: init(spec, SEED))
    lanes = jax.ShapeDtypeStruct((1024,), jnp.uint32)
    keys = Keys(lanes, lanes, jax.ShapeDtypeStruct((1024,), jnp.bool))
    ints, step = jax.ShapeDtypeStruct((1024,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (table, keys, step, jax.ShapeDtypeStruct((1024, 64), jnp.float32), ints)
    memory = (
        jax.jit(programs(spec)[0].__wrapped__, donate_argnums=0, compiler_options=QUICK)
        .lower(*arguments)
        .compile()
        .memory_analysis()
    )
    table_bytes = table[0].rows.size * 4
    assert memory.alias_size_in_bytes >= 2 * table_bytes  # the rows and Adagrad's accumulator
    # Eviction looks at every row's last step and, now and then, writes the index anew.
    assert memory.temp_size_in_bytes < 0.25 * table_bytes


def declared(**changes):
    storage = Hashed()
    for name in {field.name for field in dataclasses.fields(Hashed)} & set(changes):
        object.__setattr__(storage, name, changes.pop(name))  # past the tests' own checks of types
    return dataclasses.replace(PLAIN, storage=storage, **changes)


def test_more_rows_than_ids_of_32_bits_reach_need_keys():
    assert declared(vocabulary_size=2**33).vocabulary_size == 2**33  # over all devices
    with pytest.raises(ValueError, match="the most rows that 32-bit ids reach"):
        TableSpec(name="t", vocabulary_size=2**33, embedding_dim=DIM)


@pytest.mark.parametrize(
    ("make", "changes", "error", "message"),
    [
        (declared, {"name": ""}, TypeError, "name must be a non-empty string"),
        (variable, {"rows_per_device": 0}, ValueError, r"table 't': rows_per_device must be in \[1, inf\), got 0"),
        (variable, {"rows_per_device": 2**30}, ValueError, "at most 536870912 rows per shard.*more shards"),
        (declared, {"embedding_dim": 2.0}, TypeError, "table 't': embedding_dim must be an integer, got 2.0"),
        (declared, {"when_full": "panic"}, ValueError, "when_full 'panic' is not one of error, grow, evict, zero"),
        (declared, {"eviction": "random"}, ValueError, "eviction 'random' is not one of lru, lfu"),
        (declared, {"dtype": "int8"}, ValueError, "dtype 'int8' is not one of float32, bfloat16, float16"),
        (declared, {"key_dtype": "int16"}, ValueError, "key_dtype 'int16' is not one of"),
        (variable, {"steps_to_live": -1}, ValueError, r"steps_to_live must be in \[0, inf\)"),
        (declared, {"admission_count": -1}, ValueError, r"admission_count must be in \[0, inf\)"),
        (declared, {"admission_count": 1, "admission_capacity": 2**30}, ValueError, "at most 536870912 keys can wait"),
        (declared, {"admission_capacity": 0}, ValueError, r"admission_capacity must be in \[1, inf\)"),
        (declared, {"optimizer": "adam"}, TypeError, "optimizer must be an OptimizerSpec, got str"),
        (declared, {"initializer": 0.1}, TypeError, "initializer must be a function of"),
        (declared, {"initializer": lambda key, shape: jnp.zeros(3)}, ValueError, r"returned shape \(3,\) for \(1, 2\)"),
    ],
)
def test_wrong_tables_are_refused_by_name(make, changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)
